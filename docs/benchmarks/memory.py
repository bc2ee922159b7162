"""Does the memory of evaluate, collect_means and scan grow with the number of rows?

    python docs/benchmarks/memory.py [--rows 1000 4000 9800] [--max-length 128] [--units 6]

1. The model is a BERT of 6 layers x 12 heads, 384 wide, with random weights; the rows are random
   words, as many to a row as in MNLI.
2. Each measurement is a process of its own with one torch thread, because the peak of a process
   never falls. It prints the peak when the model is loaded and the batches are made, and the peak
   after the work.
3. Printed for each piece of work: the peak against that of the fewest rows, the seconds of the
   processor, which a busy machine hardly changes, and those of one row against the fewest rows.

A scan of every unit of many rows takes long: the scan is of `--units` units, spread over the
layers. What it holds at once does not depend on how many units there are, beyond a few numbers for
each unit and row of one batch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

WORK = ("evaluate", "means", "scan")


def peak() -> float:
    """Peak memory of this process so far, in MB."""
    units_per_mb = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mb


def measure(work: str, n_rows: int, max_length: int, n_units: int) -> dict[str, float]:
    """The peak and the seconds of one piece of work in this process."""
    import torch
    from made_up import made_up_model, made_up_task

    import hc_lens as hc

    torch.set_num_threads(1)
    model, task = made_up_model(), made_up_task(n_rows)
    rows = task.batches(model, max_length=max_length)
    space, quiet = hc.UnitSpace.of(model), {"progress": False}
    sets = [[unit] for unit in list(space)[:: len(space) // n_units]]
    works: dict[str, Callable[[], object]] = {
        "evaluate": lambda: hc.evaluate(model, {"rows": rows}, **quiet),
        "means": lambda: hc.collect_means(model, rows, **quiet),
        "scan": lambda: hc.scan(model, {"rows": rows}, "zero", sets, **quiet),
    }
    before, start = peak(), time.process_time()
    works[work]()
    return {"before": before, "peak": peak(), "seconds": time.process_time() - start}


def main() -> None:
    """Measure every piece of work at every number of rows and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 4000, 9800])
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--max-length", type=int, default=128, help="longest row, in tokens")
    parser.add_argument("--units", type=int, default=6, help="units that the scan removes")
    parser.add_argument("--one", action="store_true", help="measure once, in this process")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.work[0], given.rows[0], given.max_length, given.units)))
        return
    shown = ("rows", "loaded MB", "peak MB", "ratio", "CPU s", "per row")
    print(f"{'':<10} " + " ".join(f"{name:>9}" for name in shown))
    for work in given.work:
        first: dict[str, float] = {}
        for n_rows in given.rows:
            settings = ["--max-length", str(given.max_length), "--units", str(given.units)]
            command = [sys.executable, __file__, "--one", "--work", work, "--rows", str(n_rows)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            told = subprocess.run([*command, *settings], env=env, check=True, capture_output=True)
            found = json.loads(told.stdout.splitlines()[-1])
            found["each"] = found["seconds"] / n_rows
            first = first or found
            ratios = [found[key] / first[key] for key in ("peak", "each")]
            print(
                f"{work:<10} {n_rows:>9,} {found['before']:>9.0f} {found['peak']:>9.0f} "
                f"{ratios[0]:>9.2f} {found['seconds']:>9.1f} {ratios[1]:>9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
