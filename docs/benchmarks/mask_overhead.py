"""Cost of an attached mask: forward, and forward + backward to the mask, against no mask.

    python docs/benchmarks/mask_overhead.py

A 6-layer x 12-head, d = 384 BERT classifier with random weights (the size of MiniLM) on batches of
32 rows of 32 tokens. The ways alternate within one run; each ratio is the median over the
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import hc_lens as hc


def model_of_minilm_size() -> Any:
    """A random-weight classifier of MiniLM's shape."""
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    config.num_labels = 3
    return hc.load(transformers.BertForSequenceClassification(config))


def seconds(way: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def ratio(way: Callable[[], object], base: Callable[[], object], rounds: int) -> float:
    """Median over rounds of the time of `way` over the time of `base`, run one after the other."""
    pairs = [(seconds(way), seconds(base)) for _ in range(rounds + 2)]
    return statistics.median(ours / theirs for ours, theirs in pairs[2:])


def main() -> None:
    """Print the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = model_of_minilm_size()
    space = hc.UnitSpace.of(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (32, 32), generator=generator)
    inputs = {"input": ids, "one_zero_attention_mask": torch.ones_like(ids)}
    means = hc.collect_means(model, [type("Batch", (), {"inputs": inputs})], progress=False)
    mask = torch.rand(len(space), generator=generator).requires_grad_()

    def plain() -> None:
        with torch.no_grad():
            model(**inputs)

    def masked() -> None:
        with torch.no_grad(), hc.masked(model, mask, means):
            model(**inputs)

    def plain_backward() -> None:
        embedding = model.hook_dict["blocks.0.hook_resid_pre"]
        embedding.add_hook(lambda value, hook: value.requires_grad_())
        model(**inputs).sum().backward()
        embedding.remove_hooks()

    def masked_backward() -> None:
        with hc.masked(model, mask, means):
            loss = model(**inputs).sum()
        loss.backward()

    rounds = options.rounds
    print(f"forward            masked / plain  {ratio(masked, plain, rounds):.3f}")
    both = ratio(masked_backward, plain_backward, rounds)
    print(f"forward + backward masked / plain  {both:.3f}")


if __name__ == "__main__":
    main()
