"""Is one checkout of hc_lens as fast as another?

    python docs/benchmarks/same_speed.py --before OTHER_CHECKOUT --after . --rounds 5

1. Each round runs both checkouts one after the other, in processes of their own with one torch
   thread; the order alternates from round to round, so that a busy machine slows both alike.
2. Timed from outside: ``import hc_lens`` and the help texts of the command line. Timed inside, on
   the bundled organism and after a first call that does not count: a scan of every unit, pruning
   steps, and composition (all edges of two heads).
3. Prints, for each, the median seconds of both and the median of the rounds' ratios after / before,
   with the smallest and the largest ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

STARTS = {
    "import hc_lens": ["-c", "import hc_lens"],
    "hc-lens --help": ["-m", "hc_lens.cli", "--help"],
    "hc-lens prune --help": ["-m", "hc_lens.cli", "prune", "--help"],
    "hc-lens demo --help": ["-m", "hc_lens.cli", "demo", "--help"],
}


def seconds(run: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def work() -> None:
    """Time the workloads in this process and print them as JSON."""
    import torch

    import hc_lens as hc

    try:
        from hc_lens.analyses import composition
    except ImportError:  # a checkout in which the analyses were a package of their own
        from analyses import composition

    torch.set_num_threads(1)
    model = hc.organism.load()
    task = hc.organism.task()
    train = task.batches(model, "train", limit=512, token_budget=1024)
    rows = task.batches(model, "validation", limit=256)
    means = hc.collect_means(model, train, progress=False)
    quiet = {"progress": False}
    runs = {
        "scan of 36 units, 256 rows": lambda: hc.scan(model, {"id": rows}, means, **quiet),
        "30 pruning steps": lambda: hc.prune(
            model, train, means, hc.PruneConfig(sparsity=0.5, seed=0, steps=30), **quiet
        ),
        "composition, edges of 2 heads": lambda: composition.edge_effects(
            model, {"id": rows}, means, ["L0.H6", "L1.H1"], limit=64, **quiet
        ),
    }
    for run in runs.values():
        run()
    print(json.dumps({name: seconds(run) for name, run in runs.items()}))


def measure(checkout: Path) -> dict[str, float]:
    """Every time of one checkout, once."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}

    # A checkout's own environment, if it has one, knows its own entry points.
    own = checkout / ".venv" / "bin" / "python"

    def call(arguments: list[str]) -> str:
        command = [str(own) if own.exists() else sys.executable, *arguments]
        return subprocess.run(
            command, cwd=checkout, env=env, check=True, capture_output=True, text=True
        ).stdout

    times = {
        name: seconds(lambda arguments=arguments: call(arguments))
        for name, arguments in STARTS.items()
    }
    return times | json.loads(call([str(Path(__file__).absolute()), "--work"]).splitlines()[-1])


def main() -> None:
    """Run the rounds and print one line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the older checkout")
    parser.add_argument("--after", type=Path, default=Path("."), help="the newer checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", action="store_true", help="time this checkout's workloads once")
    given = parser.parse_args()
    if given.work:
        work()
        return
    checkouts = {"before": given.before.absolute(), "after": given.after.absolute()}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(given.rounds):
        order = list(checkouts) if number % 2 == 0 else list(reversed(checkouts))
        rounds.append({side: measure(checkouts[side]) for side in order})
    print(f"{'':<32} {'before':>9} {'after':>9} {'ratio':>7}  (smallest to largest)")
    for name in rounds[0]["before"]:
        times = {side: [each[side][name] for each in rounds] for side in checkouts}
        ratios = [after / before for before, after in zip(*times.values(), strict=True)]
        medians = [statistics.median(values) for values in times.values()]
        print(
            f"{name:<32} {medians[0]:8.3f}s {medians[1]:8.3f}s {statistics.median(ratios):7.2f}"
            f"  ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
