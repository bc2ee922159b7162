"""RoBERTa and XLM-RoBERTa: BERT with positions counted over real tokens and one token type.

1. Hugging Face gives the k-th token that is not a pad position ``pad_token_id + k`` (k from 1) and
   every pad position ``pad_token_id``. We drop the first ``pad_token_id + 1`` rows of the table, so
   that the first token has position 0; a pad gets the zero vector that the pad row holds.
2. The single token-type row is doubled, because HookedEncoder's table has two.
3. The classification head's dense layer is the pooler, its out_proj the unembedding.
4. The head of a masked language model has a GELU, whatever the activation of the blocks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hc_lens.models.encoders import EncoderFamily


def _embed(cfg: Any, config: Any) -> nn.Module:
    from hc_lens.models.embeddings import PadAwareEmbed

    return PadAwareEmbed(cfg, config.pad_token_id)


FAMILY = EncoderFamily(
    pooler="classifier.dense",
    classifier="classifier.out_proj",
    masked={
        "mlm_head.W": "lm_head.dense",
        "mlm_head.ln.w": "lm_head.layer_norm",
        "unembed.W_U": "lm_head.decoder",
    },
    masked_act_fn=lambda config: "gelu",
    first_position=lambda config: config.pad_token_id + 1,
    embed=_embed,
)
