"""Every ranker on circuits that are known: AUROC by difficulty, and on compiled programs.

    python docs/benchmarks/known_circuits.py --out runs/known
    python docs/benchmarks/known_circuits.py --out runs/known-small --noise 1,4 --seeds 2 \\
        --families bert --rows 30 --layers 2 --steps 60 --sequences 8

Every cell is a row of rows.csv in --out: the same call continues from there.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch

import hc_lens as hc
from hc_lens.analyses.rankers import RANKERS, RankConfig, aurocs, rank
from hc_lens.analyses.statistics import t_interval
from hc_lens.models.installed import BRIDGES

COLUMNS = ("circuit", "noise", "seed", "ranker", "auroc", "seconds")
Cell = tuple[str, float, int, str]


def numbers(text: str) -> list[float]:
    """Numbers with commas."""
    return [float(part) for part in text.split(",")]


def cells(chosen: argparse.Namespace) -> Iterator[Cell]:
    """Every circuit, difficulty, seed and ranker."""
    for name in chosen.rankers:
        for family in chosen.families:
            for noise in chosen.noise:
                for seed in range(chosen.seeds):
                    yield family, noise, seed, name
        for program in () if BRIDGES else hc.circuits.PROGRAMS:
            yield program, 0.0, 0, name


def measured(cell: Cell, chosen: argparse.Namespace) -> float:
    """The AUROC of one cell, zero ablation."""
    circuit, noise, seed, name = cell
    if circuit in hc.circuits.PROGRAMS:
        known = hc.circuits.compiled(circuit, spare_heads=1, limit=chosen.sequences)
    else:
        config = hc.circuits.PlantedConfig(
            circuit, n_layers=chosen.layers, noise=noise, n_rows=chosen.rows, seed=seed
        )
        known = hc.circuits.planted(config, "train")
    settings = RankConfig(steps=chosen.steps, seed=seed)
    table = rank(known.model, known.batches, "zero", [name], settings, progress=False)
    return float(aurocs(table, known.units)["auroc"].iloc[0])


def run(chosen: argparse.Namespace) -> pd.DataFrame:
    """All cells, those that are missing measured now."""
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / "rows.csv"
    if not file.is_file():
        file.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    done = pd.read_csv(file)
    known = set(done[list(COLUMNS[:4])].itertuples(index=False, name=None))
    for cell in cells(chosen):
        if cell in known:
            continue
        start = time.perf_counter()
        value = measured(cell, chosen)
        with file.open("a", encoding="utf-8", newline="") as rows:
            csv.writer(rows).writerow([*cell, value, round(time.perf_counter() - start, 2)])
    return pd.read_csv(file)


def show(table: pd.DataFrame) -> None:
    """AUROC by ranker and difficulty, with Student's interval over seeds."""
    for circuit, part in table.groupby("circuit", sort=False):
        shown = {}
        for (ranker, noise), group in part.groupby(["ranker", "noise"], sort=False):
            found = t_interval(group["auroc"].tolist())
            low, high = max(found.low, 0.0), min(found.high, 1.0)
            ends = f" [{low:.2f}, {high:.2f}]" if len(group) > 1 else ""
            shown[ranker, f"noise {noise:g}, n={len(group)}"] = f"{found.value:.3f}{ends}"
        print(f"\nAUROC, {circuit}")
        print(pd.Series(shown).unstack(sort=False).to_string())
    print("\nseconds, mean")
    print(table.groupby("ranker", sort=False)["seconds"].mean().round(2).to_string())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--noise", type=numbers, default=[0.5, 1.0, 2.0, 3.0, 4.0])
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--families", type=lambda text: text.split(","), default=["bert", "gpt2"])
    parser.add_argument("--rankers", type=lambda text: text.split(","), default=[*RANKERS])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sequences", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    show(run(arguments))
