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
    """A change behind a norm whose hook points begin with `name`."""
    if norms == "recomputed":
        return norm(at + change) - norm(at)
    centres = not type(norm).__name__.startswith("RMS")
    centred = change - change.mean(-1, keepdim=True) if centres else change
    return centred / cache[f"{name}.hook_scale"] * getattr(norm, "w", 1.0)


@torch.no_grad()
def inputs_without(model, inputs, means, sender, norms: str):
    """What every receiver would read without the sender's contribution, and what heads read."""
    _, cache = model.run_with_cache(**inputs, return_type="logits")
    encoder = hasattr(model.blocks[0], "hook_normalized_resid_post")  # with norms behind
    change, moved = None, {}

    def add(one, other):
        return other if one is None else one + other

    for index, block in enumerate(model.blocks):
        at = f"blocks.{index}"
        x = cache[f"{at}.hook_resid_pre"]
        before, in_front = change, x
        moved[index, "clean"] = x if encoder else block.ln1(x)
        if change is not None:
            new = change
            if not encoder:
                new = _through(block.ln1, cache, f"{at}.ln1", x, change, norms)
            moved[index, "heads"] = moved[index, "clean"] + new
        if sender.layer == index and sender.is_head:
            z = cache[z_name(index)][:, :, sender.head]
            value = means.value(z_name(index), cache[z_name(index)])[..., sender.head, :]
            change = add(change, (value - z) @ block.attn.W_O[sender.head])
        if not model.cfg.parallel_attn_mlp:
            before, in_front = change, cache[f"{at}.hook_resid_mid"]
        norm, name = (block.ln1, f"{at}.ln1") if encoder else (block.ln2, f"{at}.ln2")
        inside = None
        if before is not None:
            inside = _through(norm, cache, name, in_front, before, norms)
            moved[index, "mlp"] = norm(in_front) + inside
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
        moved[None, "last"] = final + change
    else:
        final = cache[f"{last}.hook_resid_post"]
        new = _through(model.ln_final, cache, "ln_final", final, change, norms)
        moved[None, "last"] = model.ln_final(final) + new
    return moved


@torch.no_grad()
def patched_logits(model, inputs, moved, receiver) -> Tensor:
    """One full forward pass in which one receiver reads its rebuilt input."""
    if receiver.unit is None:
        names = ("pooler", "mlm_head", "unembed")
        name = next(name for name in names if hasattr(model, name))
        return _reading(getattr(model, name), moved[None, "last"], model, inputs)
    index, head = receiver.unit.layer, receiver.unit.head
    if receiver.kind == "mlp":
        return _reading(model.blocks[index].mlp, moved[index, "mlp"], model, inputs)
    clean, read = moved[index, "clean"], moved[index, "heads"]
    given = [read if kind in receiver.inputs else clean for kind in "qkv"]
    mask, kept = inputs.get("attention_mask"), {}
    masks = {"attention_mask": mask}
    if is_encoder(model):
        mask = inputs["one_zero_attention_mask"]
        masks = {"additive_attention_mask": torch.where(mask == 0, -torch.inf, 0.0)[:, None, None]}
    # The attention of the layer with other inputs, of which only the receiver's head is used.
    with model.hooks([(z_name(index), lambda z, hook: kept.update(z=z.clone()))]):
        model.blocks[index].attn(*given, **masks)

    def write(z, hook):
        z[:, :, head] = kept["z"][:, :, head]
        return z

    return model.run_with_hooks(**inputs, fwd_hooks=[(z_name(index), write)])


def _reading(module, read: Tensor, model, inputs) -> Tensor:
    """A full forward pass in which a module reads something else."""
    handle = module.register_forward_pre_hook(lambda _, given: (read, *given[1:]))
    try:
        return model(**inputs)
    finally:
        handle.remove()
