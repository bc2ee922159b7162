"""DeBERTa (He et al. 2021): as v2 (`hc_lens.models.deberta`), with other weights for positions.

1. Queries, keys and values of a head stand below one another in one matrix; keys have no bias.
2. Relative embeddings have one row for each distance, no norm, and weights of their own for keys
   (without bias) and queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from hc_lens.models import deberta


def _unfuse(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Queries, keys and values apart, with their biases."""
    found = dict(theirs)
    for name, value in theirs.items():
        at, _, last = name.rpartition("attention.self.")
        if last == "in_proj.weight":
            split = value.unflatten(0, (config.num_attention_heads, 3, -1))
            for place, part in enumerate(("query_proj", "key_proj", "value_proj")):
                found[f"{at}attention.self.{part}.weight"] = split[:, place].flatten(0, 1)
        elif last in ("q_bias", "v_bias"):
            part = {"q_bias": "query_proj", "v_bias": "value_proj"}[last]
            found[f"{at}attention.self.{part}.bias"] = value
    return found


FAMILY = replace(
    deberta.FAMILY,
    parts={
        **deberta.FAMILY.parts,
        "attn.W_K_pos": "attention.self.pos_proj",
        "attn.W_Q_pos": "attention.self.pos_q_proj",
    },
    unfuse=_unfuse,
    known={
        **deberta.FAMILY.known,
        # Hugging Face computes without these, whatever the configuration says.
        "share_att_key": (False,),
        "norm_rel_ebd": ("none",),
        "position_buckets": (-1, 0),
        "conv_kernel_size": (0,),
        "talking_head": (False,),
    },
)
