"""Everything that hc_lens writes, in a small size, below the working folder.

Run as ``python -m tests.written``. Names of folders are relative, as results repeat them.
"""

from __future__ import annotations

from pathlib import Path

import torch

import hc_lens as hc
from hc_lens.analyses import study
from tests.analyses.study.test_study import small
from tests.commands import invoke

SWEEP = {
    "checkpoints": {"400": "organism:400", "final": "organism"},
    "train": {"task": "organism", "split": "train", "limit": 60},
    "evaluation": {"id": {"task": "organism", "split": "validation", "limit": 40}},
    "sparsities": [0.5],
    "seeds": [0, 1],
    "prune": {"steps": 3},
}


def main() -> None:
    """One of every kind of file or folder."""
    folder = Path(".")
    torch.set_num_threads(1)
    model, task = hc.organism.load(), hc.organism.task()
    train = task.batches(model, "train", limit=60)
    quiet = {"progress": False}
    means = hc.collect_means(model, train, **quiet)
    means.save(folder / "means" / "token.safetensors")
    hc.collect_means(model, train, by="position", **quiet).save(
        folder / "means" / "position.safetensors"
    )
    sub = hc.prune(model, train, means, hc.PruneConfig(sparsity=0.5, seed=1, steps=5), **quiet)
    sub.save(folder / "subnetwork")
    hc.scan(model, {"id": train}, means, ["L0.H0", "L1.MLP"], store=folder / "scan", **quiet)
    hc.sweep(hc.SweepConfig.from_dict(SWEEP), store=str(folder / "sweep"), workers=0, **quiet)
    settings = hc.FinetuneConfig(steps=4, batch_size=8, learning_rate=1e-4, checkpoint_every=2)
    start = Path(hc.organism.__file__).parent / "weights" / "step-00100"
    hc.finetune(str(start), task, folder / "finetune", settings, **quiet)
    pair = ("--premise", "the artist saw the judge", "--hypothesis", "the judge slept")
    for command, *options in (
        ("evaluate", "--task", "organism", "--limit", 20),
        ("attention", *pair),
    ):
        told = invoke(command, "--model", "organism", *options, "--out", command)
        assert told.exit_code == 0, told.output
    study.run(small(), folder / "study", workers=0, **quiet)


if __name__ == "__main__":
    main()
