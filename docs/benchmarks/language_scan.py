"""How long does activation patching of every unit of a language model take, in three ways?

    python docs/benchmarks/language_scan.py --model FOLDER [--rows N]

Patches every head and every MLP with its activation on the counterfactual prompt, on prompts of
indirect object identification of one length (so that nobody needs pads), one after the other on
each batch, so that a busy machine slows all of them alike:

- ours: hc.scan with hc.Counterfactual, which also gives accuracy, KL over the vocabulary and
  agreement;
- loop: TransformerLens's run_with_hooks, one full forward pass per unit, and the logit difference;
- TransformerLens: transformer_lens.patching.get_act_patch_attn_head_out_all_pos, heads alone,
  beside ours for heads alone.

All of them must give the same logit differences.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm
from transformer_lens import patching

import hc_lens as hc
from hc_lens.metrics import over_cases

AT_ONCE = 50
"""Prompts in a batch."""


def seconds(run: Callable[..., Any], *args: Any, **settings: Any) -> tuple[float, Any]:
    """How long a call takes, and what it gives."""
    start = time.perf_counter()
    result = run(*args, **settings)
    return time.perf_counter() - start, result


def of_one_length(model, n_rows: int) -> list[dict[str, Any]]:
    """Prompts of the number of tokens that most have."""
    table = hc.Prompts.named("ioi", n=8 * n_rows).rows(model, "validation")
    chosen = table[table["tokens"] == table["tokens"].mode()[0]].head(n_rows)
    columns = ["prompt", "right", "wrong", "counterfactual", "case"]
    return chosen[columns].to_dict("records")


def difference(batch: hc.Batch) -> Callable[[torch.Tensor], torch.Tensor]:
    """Mean logit difference of a batch, from the logits at every position."""
    rows = torch.arange(len(batch))

    def metric(logits: torch.Tensor) -> torch.Tensor:
        read = logits[rows, batch.reads]
        right, wrong = batch.answers[:, :, 0].unbind(1)
        return (read[rows, right] - read[rows, wrong]).mean()

    return metric


@torch.no_grad()
def loop(model, batch: hc.Batch, cache) -> torch.Tensor:
    """One full forward pass per unit, under a hook."""
    metric, results = difference(batch), []
    for unit in hc.UnitSpace.of(model):
        name = f"blocks.{unit.layer}." + ("attn.hook_z" if unit.is_head else "hook_mlp_out")

        def patch(value, hook, name=name, head=unit.head):
            if head is None:
                return cache[name]
            value[:, :, head] = cache[name][:, :, head]
            return value

        results.append(metric(model.run_with_hooks(batch.tokens, fwd_hooks=[(name, patch)])))
    return torch.stack(results)


@torch.no_grad()
def theirs(model, batch: hc.Batch, cache) -> torch.Tensor:
    """TransformerLens's own patching of every head."""
    patch = patching.get_act_patch_attn_head_out_all_pos
    return patch(model, batch.tokens, cache, difference(batch)).flatten()


def means_of(table: pd.DataFrame) -> torch.Tensor:
    """The mean logit difference of each set but the full model, over all cases."""
    joined = over_cases(table, ["set"], ["logit_difference"])
    return torch.tensor(joined["logit_difference"].to_numpy()[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a causal language model")
    parser.add_argument("--rows", type=int, default=200, help="prompts to patch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    patching.tqdm = partial(tqdm, disable=True)
    model = hc.load(args.model)
    prompts, source = of_one_length(model, args.rows), hc.Counterfactual(model)
    heads = [[head] for head in hc.UnitSpace.of(model).heads]
    ways = {"all units": (None, "loop", loop), "heads": (heads, "TransformerLens", theirs)}
    spent, worst = Counter(), 0.0
    asked = {"metrics": ["logit_difference"], "progress": False}
    for first in range(0, args.rows, AT_ONCE):
        rows = prompts[first : first + AT_ONCE]
        batches = hc.Prompts.from_rows(rows, name="ioi").batches(model, token_budget=10**6)
        batch = batches[0]
        for what, (sets, name, run) in ways.items():
            taken, table = seconds(hc.scan, model, batches, source, sets, **asked)
            spent[f"ours, {what}"] += taken
            caching, (_, cache) = seconds(model.run_with_cache, batch.counterfactual["input"])
            taken, found = seconds(run, model, batch, cache)
            spent[f"{name}, {what}"] += taken + caching
            worst = max(worst, float((found.double() - means_of(table)).abs().max()))
    print(f"{len(prompts)} prompts of {batch.tokens.shape[1]} tokens, {AT_ONCE} in a batch")
    print(f"largest difference of a batch's mean logit difference: {worst:.1e}")
    for name, taken in spent.items():
        ours = spent[f"ours, {name.split(', ')[1]}"]
        print(f"  {name:>24} {taken:7.1f} s   {taken / ours:5.2f} x ours")


if __name__ == "__main__":
    main()
