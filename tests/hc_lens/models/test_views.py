"""Blocks and their views against TransformerLens's own blocks."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, jvp

from hc_lens.blocks import KINDS, Context, forward_mode
from hc_lens.models.inputs import mask_of
from hc_lens.models.lens import known_parts
from hc_lens.models.quiet import quiet
from hc_lens.models.views import can_view, view
from tests import tiny
from tests.batches import random_batches
from tests.hc_lens.pairs import deep_model
from tests.lens import HookedTransformer, HookedTransformerConfig, exact

KINDS_OF_DECODERS = {
    "pre-norm": {},
    "folded norms": {"normalization_type": "LNPre"},
    "RMS norms": {"normalization_type": "RMS"},
    "folded RMS norms": {"normalization_type": "RMSPre"},
    "no norms": {"normalization_type": None},
    "gated": {"gated_mlp": True, "act_fn": "silu", "normalization_type": "RMS"},
    "rotary": {"positional_embedding_type": "rotary", "rotary_dim": 4},
    "grouped": {"n_key_value_heads": 2, "positional_embedding_type": "rotary", "rotary_dim": 4},
    "grouped with norms of queries": {"n_key_value_heads": 2, "use_qk_norm": True},
    "windows": {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 3},
    "parallel": {"parallel_attn_mlp": True},
    "attention alone": {"attn_only": True},
    "norms of what is written": {
        "use_normalization_before_and_after": True,
        "normalization_type": "RMS",
    },
    "an activation with a norm": {"act_fn": "solu_ln"},
    "experts": {"num_experts": 2, "experts_per_token": 1, "gated_mlp": True},
    "bidirectional": {"attention_dir": "bidirectional"},
    "without scale": {"use_attn_scale": False, "scale_attn_by_inverse_layer_idx": True},
}


def decoder(**settings) -> HookedTransformer:
    """A tiny decoder with random weights, norms and biases included, float64."""
    cfg = HookedTransformerConfig(
        **{
            **{"n_layers": 2, "d_model": 16, "n_ctx": 12, "d_head": 4, "n_heads": 4, "d_mlp": 24},
            **{"d_vocab": 11, "act_fn": "gelu_new", "normalization_type": "LN", "device": "cpu"},
            **{"dtype": torch.float64, "seed": None, "init_weights": False, **settings},
        }
    )
    with quiet():
        model = HookedTransformer(cfg)
    model.blocks.double()  # TransformerLens makes experts in single precision
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.4 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def stream(rows: int = 3, pos: int = 8, seed: int = 1, d_model: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, pos, d_model, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS_OF_DECODERS)
def test_a_viewed_block_computes_what_the_models_own_block_computes(kind: str):
    model, x = decoder(**KINDS_OF_DECODERS[kind]), stream()
    assert can_view(model)
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            assert torch.allclose(view(model, layer)(x, Context()), block(x), atol=1e-12)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_pads_and_read_positions_are_those_of_every_family(family: str):
    model = deep_model(family)
    batch = random_batches(model)[0]
    causal = family in tiny.DECODERS
    mask = mask_of(batch.inputs)
    reads = mask.sum(1) - 1 if causal else torch.zeros_like(mask[:, 0])
    parts = known_parts(model)
    entered = parts.enter(batch.inputs, blocks=True)
    x = stream(*mask.shape, d_model=model.cfg.d_model)
    context = Context.of(mask, reads, mask.shape[1], causal)
    with torch.no_grad():
        for layer in range(model.cfg.n_layers):
            block, theirs = view(model, layer), parts.block(layer, entered)(x)
            got = block(x, context)[mask == 1]
            assert torch.allclose(got, theirs[mask == 1], atol=exact(family, 1e-11))
            z = block.attention(block.attention_input(x), context)
            at = block.attend_at(block.attention_input(x), context)
            assert torch.allclose(at, context.at_reads(z), atol=1e-11)


PROJECTED = ["pre-norm", "windows", "grouped", "grouped with norms of queries"]


@pytest.mark.parametrize("kind", PROJECTED)
def test_attention_from_its_pieces_is_the_attention_from_one_product(kind: str):
    model, x = decoder(**KINDS_OF_DECODERS[kind]), stream()
    block = view(model, 0)
    q, k, v = (block.project(x, name) for name in KINDS)
    z = block.attention(x, Context())
    assert torch.allclose(block.attend(q, k, v, Context()), z, atol=1e-12)
    written = block.written_by_heads(z).sum(2) + block.heads.b_O
    assert torch.allclose(written, block.attention_out(z), atol=1e-12)


def test_copies_of_a_batch_can_be_stacked():
    model = deep_model("llama")
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    context = Context.of(mask, mask.sum(1) - 1, 4, causal=True)
    x = stream(6, 4, d_model=model.cfg.d_model)
    block = view(model, 1)
    parts = [block(part, context) for part in x.split(2)]
    assert torch.allclose(block(x, context), torch.cat(parts), atol=1e-12)


@pytest.mark.parametrize("kind", KINDS_OF_DECODERS)
def test_replaced_weights_take_the_place_of_the_models_own(kind: str):
    model, other, x = decoder(**KINDS_OF_DECODERS[kind]), stream(), stream()
    own = dict(model.blocks[1].named_parameters())
    weights = {name: weight.detach() + 0.1 for name, weight in own.items()}
    named = {f"blocks.1.{name}": weight for name, weight in weights.items()}
    with torch.no_grad():
        expected = functional_call(model.blocks[1], weights, (x,))
        assert torch.allclose(view(model, 1, named)(x, Context()), expected, atol=1e-12)
        assert torch.allclose(view(model, 0, named)(other, Context()), model.blocks[0](other))


@pytest.mark.parametrize("kind", ["pre-norm", "gated", "grouped", "norms of what is written"])
def test_derivatives_with_respect_to_weights_are_those_of_the_models_own_block(kind: str):
    model, x = decoder(**KINDS_OF_DECODERS[kind]), stream()
    own = model.named_parameters()
    start = {name: w.detach() for name, w in own if name.startswith("blocks.0")}
    delta = {name: torch.sin(torch.arange(w.numel()) * 1.0).view_as(w) for name, w in start.items()}
    delta = {name: change.double() for name, change in delta.items()}

    def ours(weights):
        return view(model, 0, weights)(x, Context())

    def theirs(weights):
        inside = {name.removeprefix("blocks.0."): weight for name, weight in weights.items()}
        return functional_call(model.blocks[0], inside, (x,))

    with forward_mode():
        _, moved = jvp(ours, (start,), (delta,))
    assert torch.allclose(moved, jvp(theirs, (start,), (delta,))[1], atol=1e-9)
    leaf = start["blocks.0.attn.W_O"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(ours({"blocks.0.attn.W_O": leaf}).sum(), leaf)
    assert gradient.abs().sum() > 0


def test_weights_that_are_not_replaced_have_no_gradient():
    assert not view(decoder(), 0)(stream(), Context()).requires_grad


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_scores_soft_cap": 30.0},
        {"positional_embedding_type": "alibi"},
        {"positional_embedding_type": "shortformer"},
        {"use_attention_sinks": True},
        {"clip_qkv": 1.0},
    ],
)
def test_what_the_kernels_do_not_know_cannot_be_viewed(settings: dict):
    assert not can_view(decoder(**settings))
