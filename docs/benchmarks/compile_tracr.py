"""Compile RASP programs into the small transformers of ``hc.circuits.compiled``.

    pip install "hc-lens[tracr]" && python docs/benchmarks/compile_tracr.py

It writes the weights and examples with Tracr's own outputs to hc_lens/circuits/weights. Tracr
(Lindner et al. 2023, arXiv 2301.05062) needs jax; what it writes is read without it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import haiku as hk
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tracr.compiler import compiling, lib
from tracr.rasp import rasp

FOLDER = Path(__file__).parents[2] / "hc_lens" / "circuits" / "weights"
BOS = "BOS"
N_EXAMPLES, N_STREAMS = 60, 6
"""Sequences with outputs, and how many of them come with the residual stream too."""
PROGRAMS = {
    "reverse": (lib.make_reverse(rasp.tokens), ("a", "b", "c"), 5),
    "histogram": (lib.make_hist(), ("a", "b", "c"), 5),
    "sort": (lib.make_sort_unique(rasp.tokens, rasp.tokens), (1, 2, 3, 4, 5), 5),
    "frac-prevs": (lib.make_frac_prevs(rasp.tokens == "x"), ("x", "y", "z"), 5),
    "pair-balance": (lib.make_pair_balance(rasp.tokens, "(", ")"), ("(", ")", "-"), 5),
}


def sequences(name: str, vocabulary: Sequence[Any], longest: int) -> list[list[Any]]:
    """Sequences of two tokens or more, each once; sorting takes different tokens."""
    draw, found = random.Random(0), {}
    for _ in range(40 * N_EXAMPLES):
        length = draw.randint(2, longest)
        if name == "sort":
            chosen = draw.sample(vocabulary, length)
        else:
            chosen = draw.choices(vocabulary, k=length)
        found[tuple(chosen)] = list(chosen)
    return list(found.values())[:N_EXAMPLES]


def unembedding(model: Any, width: int) -> np.ndarray:
    """The matrix that reads the output from the stream; one column if it is a number."""

    def apply() -> Any:
        return model.get_compiled_model().unembed(jnp.eye(width), use_unembed_argmax=False)

    transformed = hk.without_apply_rng(hk.transform(apply))
    return np.asarray(transformed.apply(transformed.init(None))).reshape(width, -1)


def weights(model: Any) -> dict[str, np.ndarray]:
    """The weights under TransformerLens's names."""
    params, heads = model.params, model.model_config.num_heads
    tensors = {
        "embed.W_E": params["token_embed"]["embeddings"],
        "pos_embed.W_pos": params["pos_embed"]["embeddings"],
    }
    for layer in range(model.model_config.num_layers):
        theirs, ours = f"transformer/layer_{layer}", f"blocks.{layer}"
        for kind in ("query", "key", "value"):
            given = params[f"{theirs}/attn/{kind}"]
            letter = kind[0].upper()
            by_head = np.stack(np.split(np.asarray(given["w"]), heads, axis=1))
            tensors[f"{ours}.attn.W_{letter}"] = by_head
            tensors[f"{ours}.attn.b_{letter}"] = np.asarray(given["b"]).reshape(heads, -1)
        out = params[f"{theirs}/attn/linear"]
        tensors[f"{ours}.attn.W_O"] = np.stack(np.split(np.asarray(out["w"]), heads, axis=0))
        tensors[f"{ours}.attn.b_O"] = out["b"]
        for number, side in ((1, "in"), (2, "out")):
            linear = params[f"{theirs}/mlp/linear_{number}"]
            tensors[f"{ours}.mlp.W_{side}"] = linear["w"]
            tensors[f"{ours}.mlp.b_{side}"] = linear["b"]
    arrays = {name: np.asarray(value, np.float32) for name, value in tensors.items()}
    return {name: np.ascontiguousarray(value) for name, value in arrays.items()}


def compile_one(name: str) -> None:
    """Write the two files of a program."""
    program, vocabulary, longest = PROGRAMS[name]
    model = compiling.compile_rasp_to_model(
        program, vocab=set(vocabulary), max_seq_len=longest, compiler_bos=BOS
    )
    tensors = weights(model)
    out = unembedding(model, tensors["embed.W_E"].shape[1])
    encoder = model.output_encoder
    categorical = hasattr(encoder, "encoding_map")
    examples = []
    for number, tokens in enumerate(sequences(name, vocabulary, longest)):
        given = [BOS, *tokens]
        ran = model.apply(given)
        if number < N_STREAMS:
            tensors[f"stream.{number}"] = np.array(ran.transformer_output[0], np.float32)
        values = [value if categorical else float(value) for value in ran.decoded[1:]]
        expected = program(tokens)
        assert len(values) == len(expected)
        if categorical:
            assert values == list(expected), (values, expected)
        else:
            assert np.allclose(values, np.array(expected, float), atol=1e-4), (values, expected)
        examples.append({"tokens": model.input_encoder.encode(given), "output": values})
    tensors["output"] = np.asarray(out, np.float32)
    about = {
        "program": name,
        "n_layers": model.model_config.num_layers,
        "n_heads": model.model_config.num_heads,
        "causal": model.model_config.causal,
        "vocabulary": [str(value) for value in model.input_encoder.encoding_map],
        "values": [*encoder.encoding_map] if categorical else None,
        "examples": examples,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file(tensors, FOLDER / f"{name}.safetensors")
    text = json.dumps(about, indent=None, separators=(",", ":"))
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    size = sum((FOLDER / f"{name}.{kind}").stat().st_size for kind in ("safetensors", "json"))
    shapes = {key: value.shape for key, value in tensors.items() if key.startswith("blocks.0")}
    print(f"{name}: {about['n_layers']} layers x {about['n_heads']} heads, {size:,} bytes", shapes)


if __name__ == "__main__":
    for each in PROGRAMS:
        compile_one(each)
