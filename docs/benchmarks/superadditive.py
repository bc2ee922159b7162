"""Are the important heads super-additive, and can pairs be screened without running them all?

    python docs/benchmarks/superadditive.py
    python docs/benchmarks/superadditive.py --model FOLDER --path HANS_FILE --train MNLI_FILE

1. Ablates every head on every case. The heads with the largest mean drop on the adversarial cases
   are chosen on one half of the rows; everything below is measured on the other half, so that the
   choice does not flatter the result.
2. Prints the table of the paper for those heads, and the excess of their joint ablation with its
   verdicts.
3. Prints the minimal super-additive subsets of the six most important heads.
4. Searches all pairs of the 16 most important heads: for each case the pair with the largest
   excess on the first half, measured on the other half.
5. Screens all pairs of units on the case with the largest excess, and prints the rank correlation
   of each estimate with the exact interactions of 150 random pairs.

By default the model is the organism of hc_lens; with --model it is a checkpoint on HANS,
with the means of MNLI rows. With --core the heads are given and no choice is made.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
import torch

import hc_lens as hc
from hc_lens.analyses.superadditive import (
    ExcessConfig,
    ScreenConfig,
    excess,
    layout,
    minimal,
    screen,
    subsets,
)
from hc_lens.models.loading import HookedModel
from hc_lens.scans.scan import ScanRows, scan_rows
from hc_lens.units import as_units, pairs

TRAIN_ROWS = 2000


def chosen_heads(rows: ScanRows) -> list[str]:
    """The heads by their mean drop over the cases, largest first."""
    table = rows.table()
    alone = table[table["set"] != "full"]
    return list(alone.groupby("set", sort=False)["accuracy_change"].mean().sort_values().index)


def adversarial(batches: hc.Batches) -> list[str]:
    """The cases whose rows are all non-entailment."""
    entailment = batches.labels.index("entailment")
    friendly = {
        case
        for batch in batches
        for case, label in zip(batch.cases, batch.labels.tolist(), strict=True)
        if label == entailment
    }
    return sorted({case for batch in batches for case in batch.cases} - friendly)


def search(model, hard, means, heads: list[str], half: np.ndarray) -> pd.DataFrame:
    """For each case the most super-additive pair on one half of the rows, measured on the other."""
    rows = scan_rows(model, {"ood": hard}, means, pairs(heads), progress=False)
    tried = excess(rows.where(half), config=ExcessConfig(n_resamples=100))
    best = tried.loc[tried.groupby("case")["excess"].idxmax(), ["case", "set"]]
    table = excess(rows.where(~half), best["set"].unique())
    return best.merge(table, on=["case", "set"]).drop(columns=["dataset", "size"])


def read(args: argparse.Namespace) -> tuple[HookedModel, hc.Batches, hc.Means]:
    """The model, its rows out of domain and its means: those given, or the organism's."""
    if args.model:
        model = hc.load(args.model)
        batches = hc.Task.named("hans", args.path).batches(model, limit=args.rows)
        train = hc.Task.named("mnli", args.train).batches(model, limit=TRAIN_ROWS, max_length=128)
    else:
        model = hc.organism.load()
        batches = hc.organism.task("ood").batches(model, limit=args.rows)
        train = hc.organism.task().batches(model, "train", limit=TRAIN_ROWS)
    return model, batches, hc.collect_means(model, train, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Super-additive ablation and the pair screen.")
    parser.add_argument("--model", help="a checkpoint; the organism by default")
    parser.add_argument("--path", help="HANS rows, with --model")
    parser.add_argument("--train", help="MNLI rows for the means, with --model")
    parser.add_argument("--rows", type=int, help="rows to use; all by default")
    parser.add_argument("--core", nargs="+", help="the core heads, such as L2.H5 L3.H7")
    parser.add_argument("--joint", type=int, default=3, help="heads in the joint set")
    parser.add_argument("--pool", type=int, default=6, help="heads in the pool of subsets")
    parser.add_argument("--search", type=int, default=16, help="heads in the search of pairs")
    parser.add_argument("--check", type=int, default=150, help="random pairs to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pd.set_option("display.width", 160, "display.max_columns", 40, "display.max_rows", 200)
    model, batches, means = read(args)
    cases = adversarial(batches)
    hard = batches.of_cases(*cases)
    heads = [(head,) for head in hc.UnitSpace.of(model).heads]
    alone = scan_rows(model, {"ood": hard}, means, heads, progress=False)
    half = (alone.rows["row"] % 2 == 0).to_numpy()
    order = args.core or chosen_heads(alone.where(half))
    core, pool = order[: args.joint], order[: max(args.pool, args.joint)]
    print(f"{batches}\nadversarial cases: {', '.join(cases)}\njoint set: {'+'.join(core)}")
    sets = dict.fromkeys([*heads, *subsets(map(str, pool), 3), as_units(core)])
    rows = scan_rows(model, {"ood": hard}, means, sets, progress=False).where(~half)
    print(layout(rows.table(), core, [core]).round(1).T.to_string())
    joint = excess(rows, [core])
    print("\nexcess of the joint set, as a fraction of the rows")
    print(joint.drop(columns=["dataset", "set", "size"]).round(3).to_string(index=False))
    verdicts = joint["verdict"].value_counts().items()
    print("cases: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts))
    print("\nthe same for the log-odds of the gold label")
    odds = excess(rows, [core], ExcessConfig(measure="logit"))
    print(odds.drop(columns=["dataset", "set", "size"]).round(3).to_string(index=False))
    small = minimal(excess(rows, [given for given in subsets(map(str, pool), 3) if len(given) > 1]))
    print(f"\nminimal super-additive subsets of {', '.join(map(str, pool))}")
    columns = ["case", "set", "full", "joint", "drop", "sum_of_losses", "excess", "low", "high"]
    columns += ["p_holm", "verdict"]
    print(small[columns].round(3).to_string(index=False))
    searched = order[: args.search]
    print(f"\nthe pair of {len(searched)} heads that looked best on the other half of the rows")
    print(search(model, hard, means, searched, half).round(3).to_string(index=False))
    case = joint.sort_values("excess")["case"].iloc[-1]
    print(f"\nscreen of all pairs of units on {case}")
    for method in ("gradient", "hessian"):
        for measure in ("probability", "logit"):
            config = ScreenConfig(measure, n_resamples=100, method=method, top=0, check=args.check)
            found = screen(model, batches.of_cases(case), means, config=config, progress=False)
            for row in found.correlations[found.correlations["pairs"] == "random"].itertuples():
                print(
                    f"  {method:>8} of the {measure:<11} against exact {row.against:<11} "
                    f"Spearman {row.spearman:6.3f} over {row.n} pairs"
                )


if __name__ == "__main__":
    main()
