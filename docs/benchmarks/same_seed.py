"""What changes a number, if seed, weights and rows are the same?

    python docs/benchmarks/same_seed.py [--rows 300] [--steps 200]

1. A process with one torch thread measures the bundled organism and a BERT of 6 layers x 12 heads,
   384 wide, with random weights: logits, means, a scan, importance and a pruned subnetwork, and for
   the organism a sweep by one worker.
2. Further processes do the same again: alone, while two other processes keep the machine busy, with
   two threads, with other token budgets down to the longest row, and with two workers.
3. Printed for each: the largest absolute difference from the first process, or "same bits"; for
   subnetworks how many units are kept in one and not in the other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

WAYS: dict[str, dict[str, int]] = {
    "first": {},
    "again": {},
    "busy machine": {"busy": 2},
    "2 workers": {"workers": 2},
    "2 threads": {"threads": 2},
    "budget 1024": {"budget": 1024},
    "budget 128": {"budget": 128},
}
"""How each process differs from the first."""
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""What a process does that keeps the machine busy, as long as the one that started it lives."""
SWEEP = {
    "checkpoints": {"400": "organism:400", "final": "organism"},
    "train": {"task": "organism", "split": "train", "limit": 200},
    "evaluation": {"id": {"task": "organism", "split": "validation", "limit": 100}},
    "sparsities": [0.5],
    "seeds": [0, 1],
    "prune": {"steps": 30},
}


def measure(n_rows: int, steps: int, threads: int, budget: int, workers: int) -> dict:
    """Every number of one process, by the name of the model and of what was measured."""
    import torch
    from made_up import made_up_model, made_up_task

    import hc_lens as hc
    from hc_lens.sweeps.engines import Local

    torch.set_num_threads(threads)
    found: dict[str, np.ndarray] = {}
    models = {
        "organism": (hc.organism.load(), hc.organism.task()),
        "6 x 12": (made_up_model(), made_up_task(n_rows)),
    }
    for name, (model, task) in models.items():
        limits = {"limit": n_rows, "max_length": 64, "token_budget": budget}
        rows = task.batches(model, "train", **limits)
        quiet = {"progress": False}
        means = hc.collect_means(model, rows, **quiet)
        sets = [[unit] for unit in list(hc.UnitSpace.of(model))[::5]]
        scan = hc.scan_rows(model, {"rows": rows}, means, sets, **quiet)
        few = steps if name == "organism" else steps // 10
        settings = hc.PruneConfig(sparsity=0.5, seed=0, steps=few)
        sub = hc.prune(model, rows, means, settings, **quiet)
        values = {
            "logits": scan.logits[0],
            "means": np.concatenate([value.numpy().ravel() for value in means.at_token.values()]),
            "scan, logits": scan.logits[1:],
            "scan, table": scan.table().select_dtypes("number").to_numpy(float),
            "importance": hc.importance(model, rows, means, **quiet)["importance"].to_numpy(),
            f"scores after {few} steps": sub.scores.numpy(),
            "units kept": sub.keep.numpy(),
        }
        found |= {f"{name}: {what}": value for what, value in values.items()}
    with tempfile.TemporaryDirectory() as store:
        engine = Local(workers=workers, threads=threads)
        runs = hc.sweep(hc.SweepConfig.from_dict(SWEEP), store, engine=engine, progress=False)
        found["organism: sweep"] = runs.table.select_dtypes("number").to_numpy(float)
    return found


def difference(before: np.ndarray, after: np.ndarray) -> str:
    """How two arrays differ, in a word."""
    if before.dtype == bool:
        return f"{int((before != after).sum())} of {len(before)}"
    gap = float(np.nanmax(np.abs(before.astype(float) - after), initial=0.0))
    return "same bits" if gap == 0 else f"{gap:.1e}"


def run(way: dict[str, int], path: Path, given: argparse.Namespace) -> dict[str, np.ndarray]:
    """Measure in a process of its own, perhaps beside others that do nothing but work."""
    if path.exists():
        return dict(np.load(path))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(way.get("busy", 0))]
    try:
        chosen = {"threads": 1, "budget": 4096, "workers": 1, **way}
        options = [f"--{name}={chosen[name]}" for name in ("threads", "budget", "workers")]
        sizes = [f"--rows={given.rows}", f"--steps={given.steps}", f"--write={path}"]
        # Threads that wait for each other let others run: on a busy machine that is much faster.
        threads = {"OMP_NUM_THREADS": str(chosen["threads"]), "OMP_WAIT_POLICY": "passive"}
        env = {**os.environ, **threads}
        command = [sys.executable, __file__, *options, *sizes]
        subprocess.run(command, env=env, check=True, stderr=subprocess.DEVNULL)
    finally:
        for process in busy:
            process.kill()
    return dict(np.load(path))


def main() -> None:
    """Run every process and print a table, one line for each number that was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--steps", type=int, default=200, help="pruning steps of the organism")
    for name in ("threads", "budget", "workers"):
        parser.add_argument(f"--{name}", type=int, help="of the one process of --write")
    parser.add_argument("--kept", type=Path, help="folder of finished processes, to go on from")
    parser.add_argument("--write", type=Path, help="only measure, in this process, and write here")
    given = parser.parse_args()
    if given.write is not None:
        settings = given.rows, given.steps, given.threads, given.budget, given.workers
        np.savez(given.write, **measure(*settings))
        return
    with tempfile.TemporaryDirectory() as scratch:
        kept = given.kept or Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        first, *others = (run(way, kept / f"{name}.npz", given) for name, way in WAYS.items())
    print(f"{'':<32}" + "".join(f"{name:>14}" for name in list(WAYS)[1:]))
    for what, value in first.items():
        cells = (difference(value, other[what]) for other in others)
        print(f"{what:<32}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
