"""What the organism's subnetworks share, and its effective size along training.

    python docs/benchmarks/sweep.py --store runs/organism

1. Prunes the final checkpoint, and an early one in which the adversarial cases are not learnt yet,
   with 12 seeds at 2 sparsities. Prints the core of the final one, its size against chance, the
   rank correlation of the heads' frequencies, and whether the early core is inside it.
2. Prunes every checkpoint with 3 seeds at 9 sparsities. Prints the effective size in domain, out of
   domain and mixed, with its flags, and whether the curves are flat or rise.

The store is resumable: stop it and call again. --quick is a tiny version that only shows that it
runs. --out writes the figures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from hc_lens import organism
from hc_lens.analyses import subnetworks as analysis
from hc_lens.analyses.effective_size import SizeConfig, compare, effective_size
from hc_lens.analyses.effective_size.figures import figure as size_figure
from hc_lens.analyses.subnetworks.cli import core_text, early_text
from hc_lens.analyses.subnetworks.figures import frequency_scatter, sparsity_figure, spread_figure
from hc_lens.data.specs import DataSpec
from hc_lens.organism.grammar import CASES, CONSTRUCTIONS
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.sweep import Runs, sweep

PAIR = (0.5, 0.7)
"""The two sparsities of the core."""
GRID = tuple(tenth / 10 for tenth in range(1, 10))
"""The sparsities of the effective size."""
STEP = 10.0
"""Effective sizes within one step of the grid count as the same."""
CHANCE = {"id": 1 / 3, "ood": 1 / 2}
"""Accuracy of a guess among the labels."""


def configs(early: int, quick: bool) -> tuple[SweepConfig, SweepConfig]:
    """The sweep of the cores and the sweep of the grid."""
    steps = organism.steps()
    rows = 200 if quick else 4000
    data = {
        "train": DataSpec("organism", split="train", limit=rows, token_budget=512),
        "evaluation": {
            "id": DataSpec("organism", split="validation", limit=100 if quick else 500),
            "ood": DataSpec("organism-ood", limit=160 if quick else 1600),
        },
    }
    of = {str(step): f"organism:{step}" for step in steps}
    pair = {name: of[name] for name in (str(early), str(steps[-1]))}
    some = {name: of[name] for name in (str(steps[0]), *pair)} if quick else of
    cores = SweepConfig(
        checkpoints=pair,
        sparsities=PAIR,
        seeds=tuple(range(42, 45 if quick else 54)),
        prune={"steps": 10 if quick else 400},
        **data,
    )
    grid = SweepConfig(
        checkpoints=some,
        sparsities=GRID[1::3] if quick else GRID,
        seeds=(42, 43) if quick else (42, 43, 44),
        prune={"steps": 10 if quick else 120},
        **data,
    )
    return cores, grid


def report_cores(runs: Runs) -> None:
    """The final core, chance, correlation, the early core, spreads."""
    early, last = runs.checkpoints
    final = analysis.select(runs.subnetworks, checkpoint=last)
    before = analysis.select(runs.subnetworks, checkpoint=early)
    print(core_text(final))
    counted = analysis.frequency_table(analysis.frequencies(final), *PAIR)
    print("\nheads by the number of subnetworks that keep them")
    print(counted.to_string())
    print("\n" + core_text(before))
    print("\n" + early_text(analysis.early_core(before, final), early, last))
    both = analysis.spread(runs.table, runs.full)
    rank = {case: at for at, case in enumerate(CASES, start=1)}
    both = both.sort_values("case", key=lambda case: case.map(rank).fillna(0), kind="stable")
    for name in runs.checkpoints:
        print(f"\nspread over {both['seeds'].max()} seeds at checkpoint {name}, percent")
        for sparsity in PAIR:
            rows = both.loc[(both["checkpoint"] == name) & (both["sparsity"] == sparsity)]
            shown = rows.set_index("case")[["full", "min", "max", "mean", "std"]]
            print(f"sparsity {sparsity:g}")
            print((100 * shown).round(1).to_string())


def targets(runs: Runs) -> dict[str, tuple[str, ...]]:
    """What out of domain may mean; chosen on the full model alone."""
    last = runs.full[runs.full["checkpoint"] == runs.checkpoints[-1]].set_index("case")["accuracy"]
    learnt = tuple(case for case in CONSTRUCTIONS if last[case] >= 0.5)
    return {
        "the 8 adversarial cases": tuple(CONSTRUCTIONS),
        f"the adversarial cases that the last model has learnt ({', '.join(learnt)})": learnt,
        "all 16 cases, half of them friendly": (),
    }


def report_sizes(runs: Runs, cases: tuple[str, ...], what: str) -> pd.DataFrame:
    """Effective sizes and what their curves do."""
    print(f"\nout of domain is {what}")
    config = SizeConfig(cases=cases, chance=CHANCE)
    rules = {
        "default": config,
        "seeds last": replace(config, average="seeds-last"),
        "one-sided": replace(config, one_sided=True),
        "monotone": replace(config, monotone=True),
    }
    wide = {name: effective_size(runs.table, runs.full, rule) for name, rule in rules.items()}
    sizes = wide["default"]
    print(sizes.drop(columns="std").round(3).to_string(index=False))
    columns = {
        name: table.set_index(["target", "checkpoint"])["effective_size"]
        for name, table in wide.items()
    }
    print("\nthe same by other rules")
    sized = pd.DataFrame(columns).rename_axis(columns="rule").stack().unstack("checkpoint")
    rows = pd.MultiIndex.from_product([("id", "ood", "mix"), list(wide)])
    print(sized.reindex(index=rows, columns=list(runs.checkpoints)).round(1).to_string())
    for target in ("id", "ood", "mix"):
        print(trend(sizes.loc[sizes["target"] == target], target))
    inside, outside = (sizes.loc[sizes["target"] == target] for target in ("id", "ood"))
    flat = "flat" if shape(trained(inside)) == "flat" else "not flat"
    rises = "rising" if shape(trained(outside)) == "rising" else "not rising"
    print(f"over the trained checkpoints ID is {flat}, OOD is {rises}")
    return sizes


def trained(sizes: pd.DataFrame) -> pd.DataFrame:
    """Without step 0, whose classifier is untrained."""
    return sizes.loc[sizes["checkpoint"] != "0"]


def trend(sizes: pd.DataFrame, target: str) -> str:
    """What a curve does, at the trained checkpoints and at those of them above chance."""
    name = {"id": "ID", "ood": "OOD", "mix": "mix"}[target]
    known = trained(sizes)
    above = known.loc[~known["floor"].astype(bool)]
    everywhere = f"{name} at all trained checkpoints: {_curve(known)}"
    if len(above) == len(known):
        return everywhere
    if len(above) < 2:
        return f"{everywhere}; the full model is above chance at {len(above)} of them"
    return (
        f"{everywhere}; at those above chance ({', '.join(above['checkpoint'])}): {_curve(above)}"
    )


def shape(sizes: pd.DataFrame) -> str:
    """Flat if all sizes are within one step of the grid; else what the last is to the first."""
    values = sizes["effective_size"].tolist()
    change = values[-1] - values[0]
    if max(values) - min(values) <= STEP + 1e-6:
        return "flat"
    if abs(change) <= STEP + 1e-6:
        return "not flat, first and last alike"
    return "rising" if change > 0 else "falling"


def _curve(sizes: pd.DataFrame) -> str:
    return f"{shape(sizes)}, {' '.join(f'{value:.0f}' for value in sizes['effective_size'])}"


def report_curves(runs: Runs) -> None:
    """Mean accuracy by checkpoint and sparsity."""
    table = compare(runs.table, runs.full, SizeConfig(cases=tuple(CONSTRUCTIONS)))
    for target, what in (("id", "in domain"), ("ood", "on the 8 adversarial cases")):
        rows = table[table["target"] == target]
        wide = rows.pivot_table(
            index="checkpoint", columns="sparsity", values="accuracy", sort=False
        )
        wide.insert(0, "full", rows.groupby("checkpoint", sort=False)["full"].first())
        print(f"\naccuracy {what} by sparsity, mean over seeds, percent")
        print((100 * wide).round(1).to_string())


def draw(out: Path, cores: Runs, grid: Runs, sizes: dict[str, pd.DataFrame]) -> None:
    """Write the figures."""
    out.mkdir(parents=True, exist_ok=True)
    last = cores.checkpoints[-1]
    final = analysis.select(cores.subnetworks, checkpoint=last)
    counted = analysis.frequencies(final)
    frequency_scatter(counted, *PAIR, mark=analysis.core(final)).savefig(out / "frequencies.png")
    table = cores.table.loc[cores.table["checkpoint"] == last]
    spread_figure(table, cores.full, cases=["id", *CONSTRUCTIONS]).savefig(out / "spread.png")
    table = grid.table.loc[grid.table["checkpoint"] == last]
    sparsity_figure(table, grid.full, cases=["id", *CONSTRUCTIONS]).savefig(out / "sparsity.png")
    for number, found in enumerate(sizes.values()):
        size_figure(found).savefig(out / f"effective-size-{number}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Core and effective size of the organism.")
    parser.add_argument("--store", help="folder of the runs; by default one that is thrown away")
    parser.add_argument("--early", type=int, default=400, help="step from before generalisation")
    parser.add_argument("--workers", type=int, default=2, help="runs at one time")
    parser.add_argument("--quick", action="store_true", help="a tiny version")
    parser.add_argument("--out", type=Path, help="folder for figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pd.set_option("display.width", 160, "display.max_columns", 40, "display.max_rows", 200)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        first, second = configs(args.early, args.quick)
        store = args.store or folder
        cores = sweep(first, store, workers=args.workers)
        grid = sweep(second, store, workers=args.workers)
    took = time.perf_counter() - start
    print(f"{first.n_runs} + {second.n_runs} runs in {took / 60:.1f} minutes")
    for runs in (cores, grid):
        if len(runs.failed):
            print(runs.failed.to_string(index=False))
    print(f"pruning: {dict(first.prune)} for the cores, {dict(second.prune)} for the grid\n")
    report_cores(cores)
    report_curves(grid)
    sizes = {what: report_sizes(grid, cases, what) for what, cases in targets(grid).items()}
    if args.out:
        draw(args.out, cores, grid, sizes)


if __name__ == "__main__":
    main()
