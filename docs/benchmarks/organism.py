"""What does the organism show?

    python docs/benchmarks/organism.py
    python docs/benchmarks/organism.py --weights DIR/weights    # of another training seed

Prints the accuracy of every case at every shipped step, the heads whose ablation spares in-domain
accuracy and breaks an adversarial case, and each claim of docs/method/organism.md with its number.
The weights of another seed come from `python -m hc_lens.organism.train --out DIR --seed 2`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pandas as pd
import torch

import hc_lens as hc
from hc_lens import organism
from hc_lens.evaluation import evaluate
from hc_lens.organism.grammar import CASES, CONSTRUCTIONS
from hc_lens.scans.scan import scan

ADVERSARIAL = list(CONSTRUCTIONS)
FRIENDLY = [case for case in CASES if case not in CONSTRUCTIONS]
ID = "in-domain"


SCANNED = 4000
"""OOD rows of the head scan, about 250 a case."""


def data(model, limit=None):
    """In-domain validation rows and OOD rows."""
    return {
        "id": organism.task().batches(model, "validation"),
        "ood": organism.task("ood").batches(model, limit=limit),
    }


def by_case(table: pd.DataFrame) -> pd.Series:
    """Accuracy in percent by case; the in-domain rows are one case."""
    names = table["case"].where(table["dataset"] == "ood", ID)
    return (100 * table["accuracy"]).set_axis(names)


def accuracies(weights: Path) -> pd.DataFrame:
    """Accuracy by case (rows) and step (columns), in percent."""
    columns = {}
    for folder in sorted(weights.glob("step-*")):
        model = hc.load(folder)
        table = evaluate(model, data(model), progress=False)
        columns[int(folder.name.split("-")[1])] = by_case(table)
    return pd.DataFrame(columns).loc[[ID, *CASES]]


def head_scan(folder: Path) -> pd.DataFrame:
    """Change in accuracy, in points, by head (rows) and case (columns)."""
    model = hc.load(folder)
    means = hc.collect_means(model, organism.task().batches(model, "train", limit=4000))
    units = hc.UnitSpace.of(model).heads
    table = scan(model, data(model, SCANNED), means, units, progress=False)
    table["case"] = table["case"].where(table["dataset"] == "ood", ID)
    wide = table.pivot(index="set", columns="case", values="accuracy_change")
    return 100 * wide.loc[[str(head) for head in units], [ID, *CASES]]


def claims(table: pd.DataFrame, heads: pd.DataFrame) -> None:
    """Each claim with its number."""
    last = table.columns[-1]
    final = table[last]
    learnt = [case for case in ADVERSARIAL if final[case] >= 60]
    earlier = [
        step
        for step in table.columns[:-1]
        if final[ID] - table.at[ID, step] <= 3 and (table.loc[learnt, step] < 15).all()
    ]
    print(f"in-domain accuracy at the end: {final[ID]:.1f} (wanted: at least 95)")
    print(f"adversarial cases of at least 60: {learnt} (wanted: two)")
    print(f"lowest friendly case: {final[FRIENDLY].min():.1f} (wanted: at least 90)")
    for step in earlier:
        worst = table.loc[learnt, step].max()
        print(
            f"at step {step}: in-domain {table.at[ID, step]:.1f}, those cases at most {worst:.1f} "
            "(wanted: within 3 points, below 15)"
        )
    if not earlier:
        print("no earlier step is within 3 points in-domain and below 15 on those cases")
    spared = heads[heads[ID] > -3]
    shown = spared[spared[ADVERSARIAL].min(axis=1) < -15]
    print(f"heads that cost less than 3 points in-domain and over 15 on a case: {len(shown)}")
    print(shown[[ID, *ADVERSARIAL]].to_string(float_format="%.1f"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, default=organism.WEIGHTS)
    weights = parser.parse_args().weights
    torch.set_num_threads(1)
    for name in ("id", "ood"):
        organism.task(name)
    last = sorted(weights.glob("step-*"))[-1]
    start, used = time.perf_counter(), time.process_time()
    model = hc.load(last)
    evaluate(model, data(model), progress=False)
    start, used = time.perf_counter() - start, time.process_time() - used
    print(
        f"load and evaluate all cases: {start:.1f} s ({used:.1f} s of processor time), one thread"
    )
    size = sum(file.stat().st_size for file in weights.rglob("*") if file.is_file())
    print(f"{len(list(weights.glob('step-*')))} checkpoints, {size / 1e6:.1f} MB\n")
    table = accuracies(weights)
    print(table.to_string(float_format="%.1f"), "\n")
    claims(table, head_scan(last))


if __name__ == "__main__":
    main()
