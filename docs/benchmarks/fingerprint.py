"""What does it cost to read all weights for a fingerprint, against a scan of 100 rows?

    python docs/benchmarks/fingerprint.py [--rows 100] [--rounds 3]

1. Two BERTs with random weights and 30,522 tokens: 6 layers x 12 heads, 384 wide, and bert-base's
   12 x 12, 768 wide. The rows are made up, as long as those of MNLI.
2. In every round the first fingerprint of an edited model, another fingerprint of the same weights,
   and a scan, one after the other, so that a busy machine slows all alike. The scan removes every
   unit of the smaller model, and every 13th of the larger one, to save time: of a scan of all its
   units the share is smaller still.
3. Printed: the medians, and the median of the rounds' shares.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from made_up import made_up_model, made_up_task

import hc_lens as hc
from hc_lens.models.fingerprint import fingerprint

SIZES = {"6 x 12, 384 wide": (6, 384, 1), "12 x 12, 768 wide": (12, 768, 13)}
"""Layers, width, and the step between the units that the scan removes."""
VOCABULARY = 30_522


def seconds(run: Callable[..., object], *given, **settings) -> float:
    """Seconds of the processor for a call."""
    start = time.process_time()
    run(*given, **settings)
    return time.process_time() - start


def main() -> None:
    """Time both models and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100, help="rows of the scan")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shown = ("parameters", "units", "after edit s", "again s", "scan s", "after edit", "again")
    print(f"{'':<18} " + " ".join(f"{name:>12}" for name in shown))
    for name, (n_layers, width, step) in SIZES.items():
        model = made_up_model(n_layers, width, VOCABULARY)
        rows = made_up_task(given.rows).batches(model, max_length=128)
        sets = [[unit] for unit in list(hc.UnitSpace.of(model))[::step]]
        rounds = []
        for number in range(given.rounds):
            with torch.no_grad():
                model.b_U[0] = number
            edited, again = (seconds(fingerprint, model) for _ in range(2))
            scan = seconds(hc.scan, model, {"rows": rows}, "zero", sets, progress=False)
            rounds.append((edited, again, scan, 100 * edited / scan, 100 * again / scan))
        found = [median(values) for values in zip(*rounds, strict=True)]
        count = sum(parameter.numel() for parameter in model.parameters())
        times = " ".join(f"{value:>12.3f}" for value in found[:3])
        shares = " ".join(f"{value:>11.2f}%" for value in found[3:])
        print(f"{name:<18} {count:>12,} {len(sets):>12} {times} {shares}", flush=True)


if __name__ == "__main__":
    main()
