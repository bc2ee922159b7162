"""Path patching the slow way: TransformerLens hooks, one full forward pass per edge.

The receiver's input is rebuilt from a cache of the clean run, step by step along the skip
connections, with the model's own modules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hc_lens.masks.hooks import mlp_name, z_name
from hc_lens.models.inputs import is_encoder


def _through(norm, cache, name: str, at: Tensor, change: Tensor, norms: str) -> Tensor:
    """A change behind a layer norm whose hook points begin with `name`."""
    if norms == "recomputed":
        return norm(at + change) - norm(at)
    centred = change - change.mean(-1, keepdim=True)
    return centred / cache[f"{name}.hook_scale"] * norm.w


@torch.no_grad()
def inputs_without(model, inputs, means, sender, norms: str):
    """The clean cache, and what every receiver would read without the sender's contribution."""
    _, cache = model.run_with_cache(**inputs, return_type="logits")
    encoder, change, moved = is_encoder(model), None, {}

    def add(one, other):
        return other if one is None else one + other

    for index, block in enumerate(model.blocks):
        at = f"blocks.{index}"
        x = cache[f"{at}.hook_resid_pre"]
        if change is not None:
            if encoder:
                moved[index, "heads"] = x + change
            else:
                new = _through(block.ln1, cache, f"{at}.ln1", x, change, norms)
                moved[index, "heads"] = block.ln1(x) + new
        if sender.layer == index and sender.is_head:
            z = cache[z_name(index)][:, :, sender.head]
            value = means.value(z_name(index), cache[z_name(index)])[..., sender.head, :]
            change = add(change, (value - z) @ block.attn.W_O[sender.head])
        mid = cache[f"{at}.hook_resid_mid"]
        norm, name = (block.ln1, f"{at}.ln1") if encoder else (block.ln2, f"{at}.ln2")
        inside = None
        if change is not None:
            inside = _through(norm, cache, name, mid, change, norms)
            moved[index, "mlp"] = norm(mid) + inside
        sent = None
        if sender.layer == index and not sender.is_head:
            out = cache[mlp_name(index)]
            sent = means.value(mlp_name(index), out) - out
        if not encoder:
            change = change if sent is None else add(change, sent)
        elif inside is not None or sent is not None:
            total = inside if sent is None else add(inside, sent)
            post = cache[f"{at}.hook_resid_post"]
            change = _through(block.ln2, cache, f"{at}.ln2", post, total, norms)
    last = f"blocks.{len(model.blocks) - 1}"
    if encoder:
        final = cache[f"{last}.hook_normalized_resid_post"]
        moved[None, "classifier"] = final + change
    else:
        final = cache[f"{last}.hook_resid_post"]
        new = _through(model.ln_final, cache, "ln_final", final, change, norms)
        moved[None, "classifier"] = model.ln_final(final) + new
    return moved


@torch.no_grad()
def patched_logits(model, inputs, moved, receiver) -> Tensor:
    """One full forward pass in which one receiver reads its rebuilt input."""
    if receiver.unit is None:
        name = "unembed" if not is_encoder(model) else "pooler"
        module, read = getattr(model, name), moved[None, "classifier"]
        handle = module.register_forward_pre_hook(lambda _, given: (read,))
        try:
            return model(**inputs)
        finally:
            handle.remove()
    index, attn = receiver.unit.layer, model.blocks[receiver.unit.layer].attn
    if receiver.kind == "mlp":
        mlp, read = model.blocks[index].mlp, moved[index, "mlp"]
        value = read @ mlp.W_in + mlp.b_in
        hooks = [(f"blocks.{index}.mlp.hook_pre", lambda x, hook: value)]
        return model.run_with_hooks(**inputs, fwd_hooks=hooks)
    hooks = []
    for kind in receiver.inputs:
        weight, bias = getattr(attn, f"W_{kind.upper()}"), getattr(attn, f"b_{kind.upper()}")
        head = receiver.unit.head
        value = moved[index, "heads"] @ weight[head] + bias[head]

        def write(x, hook, value=value, head=head):
            x[:, :, head] = value
            return x

        hooks.append((f"blocks.{index}.attn.hook_{kind}", write))
    return model.run_with_hooks(**inputs, fwd_hooks=hooks)
