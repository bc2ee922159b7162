"""Transformers that Tracr compiled from RASP programs, as HookedTransformers.

1. ``docs/benchmarks/compile_tracr.py`` compiles each program with Tracr (Lindner et al. 2023, arXiv
   2301.05062) and writes its weights, some sequences and Tracr's own outputs for them. Reading them
   needs neither Tracr nor jax.
2. The model attends in both directions, has no norms, and a ReLU in its MLPs. Every position but
   the first (BOS) has an output.
3. A unit is true if some of its weights are not zero: Tracr fills up the layers and heads that a
   program does not need with zeros. `spare_heads` puts further heads into every layer that attend
   at random and write nothing, for programs that need every unit of their model.
4. Of a program with categorical values the logits are `SHARPNESS` times the stream along the output
   directions. A program whose output is a number v has one logit for each value v_c that occurs:
   ``s (2 v v_c - v_c^2)``, which is ``-s (v - v_c)^2`` but for what all values share, with s chosen
   so that the nearest wrong value is `SHARPNESS` below. So every program is a classifier.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from hc_lens.circuits.known import ClassBatches, Known
from hc_lens.data.batches import Batch
from hc_lens.errors import check_choice, check_count
from hc_lens.models.installed import only_before_bridges
from hc_lens.models.quiet import quiet
from hc_lens.units import Unit

WEIGHTS = Path(__file__).parent / "weights"
PROGRAMS = ("reverse", "histogram", "sort", "frac-prevs", "pair-balance")
"""The programs of Tracr's own library that are part of the package."""
SHARPNESS = 4.0
"""Log-odds of the right value against the nearest wrong one."""
DECIMALS = 4
"""Digits by which numbers are told apart."""
NO_WRITE = ("W_Q", "W_K", "W_V")
"""The weights that a spare head has."""


class Example(NamedTuple):
    """One sequence and what the program says of it."""

    tokens: list[int]
    """Token ids, BOS first."""
    output: list[Any]
    """Tracr's own output at each position behind BOS."""


class Program(NamedTuple):
    """What was written of one program."""

    about: Mapping[str, Any]
    """Layers, heads, vocabulary and the values of a categorical output."""
    tensors: dict[str, Tensor]
    """Weights by TransformerLens's names; the output directions; the streams of some examples."""
    examples: list[Example]
    """Sequences with their outputs."""

    @property
    def values(self) -> list[Any]:
        """Every value that the output may have, in the order of the logits."""
        if self.about["values"] is not None:
            return list(self.about["values"])
        seen = {round(value, DECIMALS) for each in self.examples for value in each.output}
        return sorted(value + 0.0 for value in seen)

    def value_index(self, value: Any) -> int:
        """The index of a value among the logits."""
        known = self.values
        if self.about["values"] is None:
            return int(np.abs(np.array(known) - value).argmin())
        return known.index(value)


def read_program(name: str) -> Program:
    """The files of one program."""
    check_choice("a compiled program", name, PROGRAMS)
    about = json.loads((WEIGHTS / f"{name}.json").read_text(encoding="utf-8"))
    examples = [Example(each["tokens"], each["output"]) for each in about.pop("examples")]
    return Program(about, load_file(WEIGHTS / f"{name}.safetensors"), examples)


def compiled(
    name: str,
    *,
    spare_heads: int = 0,
    limit: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Known:
    """A program that Tracr compiled, its rows and its true units.

    Args:
        name: one of `PROGRAMS`.
        spare_heads: further heads in every layer that write nothing.
        limit: use so many of the 60 sequences; each gives a row for every position behind BOS.
        dtype: the type of the weights.
        seed: decides how spare heads attend.
    """
    program = read_program(name)
    check_count("spare_heads", spare_heads, 0)
    if limit is not None:
        check_count("limit", limit)
    only_before_bridges("a compiled program")
    model = _model(program, spare_heads, dtype, seed)
    batches = ClassBatches(
        f"tracr/{name}", tuple(map(str, program.values)), _batches(program, limit)
    )
    return Known(f"tracr {name}", model, batches, true_units(program))


def true_units(program: Program) -> tuple[Unit, ...]:
    """The heads and MLPs that write something, in mask order."""
    found = []
    for layer in range(program.about["n_layers"]):
        writes = program.tensors[f"blocks.{layer}.attn.W_O"]
        found += [Unit(layer, head) for head, matrix in enumerate(writes) if matrix.any()]
        if program.tensors[f"blocks.{layer}.mlp.W_out"].any():
            found.append(Unit(layer))
    return tuple(sorted(found))


def _model(program: Program, spare_heads: int, dtype: torch.dtype, seed: int) -> Any:
    """The HookedTransformer."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    about, tensors = program.about, program.tensors
    n_ctx, d_model = tensors["pos_embed.W_pos"].shape
    unembed, offset = _unembedding(program)
    cfg = HookedTransformerConfig(
        n_layers=about["n_layers"],
        n_heads=about["n_heads"] + spare_heads,
        d_model=d_model,
        d_head=tensors["blocks.0.attn.W_Q"].shape[-1],
        d_mlp=tensors["blocks.0.mlp.W_in"].shape[-1],
        n_ctx=n_ctx,
        d_vocab=len(about["vocabulary"]),
        d_vocab_out=unembed.shape[1],
        act_fn="relu",
        attention_dir="causal" if about["causal"] else "bidirectional",
        normalization_type=None,
        device="cpu",
        dtype=dtype,
        seed=None,
    )
    with quiet():
        model = HookedTransformer(cfg)
    generator = torch.Generator().manual_seed(seed)
    weights = {"unembed.W_U": unembed, "unembed.b_U": offset}
    for key, value in tensors.items():
        if key.startswith(("embed.", "pos_embed.")):
            weights[key] = value
        elif key.startswith("blocks."):
            weights[key] = _with_spare(key, value, spare_heads, generator)
    given = model.state_dict()
    # What is no weight of Tracr's are buffers such as the causal mask.
    model.load_state_dict(
        {**given, **{key: value.to(given[key]) for key, value in weights.items()}}
    )
    return model.requires_grad_(False).eval()


def _with_spare(key: str, value: Tensor, spare: int, generator: torch.Generator) -> Tensor:
    """A weight of the heads with spare heads behind the program's own."""
    part = key.rpartition(".")[2]
    if spare == 0 or ".attn." not in key or part == "b_O":
        return value
    more = torch.zeros(spare, *value.shape[1:])
    if part in NO_WRITE:
        more = torch.randn(more.shape, generator=generator)
    return torch.cat([value, more])


def _unembedding(
    program: Program,
) -> tuple[Float[Tensor, "d_model values"], Float[Tensor, "values"]]:
    """The matrix and the offset that make logits of the stream behind the last block."""
    directions = program.tensors["output"]
    if program.about["values"] is not None:
        return SHARPNESS * directions, torch.zeros(directions.shape[1])
    values = torch.tensor(program.values)
    sharp = SHARPNESS / float(values.diff().min()) ** 2
    return 2 * sharp * directions * values, -sharp * values.square()


def _batches(program: Program, limit: int | None) -> list[Batch]:
    """One batch for each length of a sequence, with a row for every position behind BOS."""
    by_length: dict[int, list[Example]] = defaultdict(list)
    for example in program.examples[:limit]:
        by_length[len(example.tokens)].append(example)
    batches, start = [], 0
    for length in sorted(by_length):
        batch = _batch(program, by_length[length], start)
        batches.append(batch)
        start += len(batch)
    return batches


def _batch(program: Program, examples: Sequence[Example], start: int) -> Batch:
    length = len(examples[0].tokens)
    tokens: Int[Tensor, "sequences pos"] = torch.tensor([each.tokens for each in examples])
    at = range(1, length)
    labels = [program.value_index(value) for each in examples for value in each.output]
    return Batch(
        inputs={"input": tokens.repeat_interleave(length - 1, dim=0)},
        labels=torch.tensor(labels),
        cases=tuple(f"position-{position}" for _ in examples for position in at),
        rows=torch.arange(start, start + len(labels)),
        reads=torch.tensor([position for _ in examples for position in at]),
    )
