"""What does the optimisation buy? Pruning the organism, against the baselines and the public code.

    python docs/benchmarks/prune.py [--seeds 12] [--rows 3200] [--processes 2] [--short]

Prints, at 50% and 70% sparsity and over seeds, the held-out KL to the full model and the in-domain
accuracy of our preset, our preset with a third of the examples, the public code's preset, gradient
importance and 20 random masks; then the accuracy of our subnetworks on every adversarial case, how
near they are to the overlap heuristic (0% on adversarial cases, 100% on friendly ones), and the
heads that all of them keep.
"""

from __future__ import annotations

import argparse
import functools
from concurrent.futures import ProcessPoolExecutor

import pandas as pd
import torch

import hc_lens as hc
from hc_lens.organism.grammar import CASES, CONSTRUCTIONS

SPARSITIES = (0.5, 0.7)
LEARNT = 0.4
"""Accuracy of the full model on an adversarial case that it has learnt in part at least."""
SHORT = "ours, 1/3 of the examples"
"""The run whose subnetworks are looked at more closely."""
STEPS = 1500
"""Steps of the public code's preset; ours gets as many, and a third."""
BUDGET = 512
"""Tokens a batch: about 25 rows."""


def methods(sparsity: float, seed: int, short: bool) -> dict[str, hc.PruneConfig]:
    """The settings that are compared, by name; baselines once or, at random, 20 times."""
    named = {SHORT: hc.PruneConfig(sparsity, seed, accumulate=2, steps=STEPS // 6)}
    if short:
        return named
    named["ours"] = hc.PruneConfig(sparsity, seed, accumulate=2, steps=STEPS // 2)
    named["public code"] = hc.PruneConfig.reference(sparsity, seed, steps=STEPS)
    if seed == 0:
        named["importance"] = hc.PruneConfig(sparsity, seed, method="importance")
        for draw in range(20):
            named[f"random {draw}"] = hc.PruneConfig(sparsity, draw, method="random")
    return named


@functools.cache
def inputs(rows: int) -> tuple:
    """The model, the rows to prune on, the means and the evaluation sets, once a process."""
    torch.set_num_threads(1)
    model = hc.organism.load()
    task, ood = hc.organism.task(), hc.organism.task("ood")
    train = task.batches(model, "train", limit=8000, token_budget=BUDGET)
    means = hc.collect_means(model, task.batches(model, "train"), progress=False)
    data = {"id": task.batches(model, "validation"), "ood": ood.batches(model, limit=rows)}
    return model, train, means, data


def one(job: tuple[float, int, int, bool]) -> pd.DataFrame:
    """Every method at one sparsity with one seed, evaluated."""
    sparsity, seed, rows, short = job
    model, train, means, data = inputs(rows)
    found = {}
    for name, config in methods(sparsity, seed, short).items():
        found[name] = hc.prune(model, train, means, config, progress=False)
    table = hc.evaluate(model, data, means=means, subnetwork=found, progress=False)
    heads = [label for label in found[SHORT].kept if "H" in label]
    return table.assign(sparsity=sparsity, seed=seed, heads=" ".join(heads))


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Held-out KL and accuracy by method and sparsity: mean, spread and range over seeds."""
    table = table.assign(method=table["subnetwork"].str.replace(r" \d+$", "", regex=True))
    held_out = table[(table["dataset"] == "id") & (table["subnetwork"] != "full")]
    groups = held_out.groupby(["sparsity", "method"])
    lines = groups["kl"].agg(["mean", "std", "min", "max", "count"])
    lines["id accuracy"] = 100 * groups["accuracy"].mean()
    return lines


def spreads(table: pd.DataFrame) -> pd.DataFrame:
    """Accuracy of our subnetworks on each adversarial case: full model, then range over seeds."""
    cases = table[table["case"].isin(list(CONSTRUCTIONS))]
    full = cases[cases["subnetwork"] == "full"].groupby("case")["accuracy"].first()
    ours = cases[cases["subnetwork"] == SHORT].groupby(["sparsity", "case"])["accuracy"]
    lines = 100 * ours.agg(["min", "mean", "max"])
    lines["spread"] = lines["max"] - lines["min"]
    lines.insert(0, "full", [100 * full[case] for _, case in lines.index])
    return lines


def collapse(table: pd.DataFrame) -> pd.DataFrame:
    """Accuracy in domain, on the adversarial cases the model has learnt, and on friendly cases."""
    full = table[table["subnetwork"] == "full"].groupby("case")["accuracy"].first()
    learnt = [case for case in CONSTRUCTIONS if full[case] >= LEARNT]
    kinds = dict.fromkeys(learnt, f"{len(learnt)} learnt adversarial cases")
    kinds |= dict.fromkeys(CASES[len(CONSTRUCTIONS) :], "8 friendly cases")
    named = table.assign(kind=table["case"].map(kinds).mask(table["dataset"] == "id", "in domain"))
    named = named[named["subnetwork"].isin(["full", "ours", SHORT])].dropna(subset="kind")
    runs = 100 * named.groupby(["subnetwork", "sparsity", "kind", "seed"])["accuracy"].mean()
    return runs.groupby(["kind", "sparsity", "subnetwork"]).agg(["min", "mean", "max"])


def core(table: pd.DataFrame) -> str:
    """The heads that every one of our subnetworks at the two sparsities keeps."""
    every = set.intersection(*(set(heads.split()) for heads in table["heads"].unique()))
    return ", ".join(sorted(every))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--rows", type=int, default=3200, help="out-of-domain rows")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="our short runs alone")
    options = parser.parse_args()
    jobs = [(sparsity, seed, options.rows, options.short) for seed in range(options.seeds)
            for sparsity in SPARSITIES]  # fmt: skip
    with ProcessPoolExecutor(options.processes) as pool:
        table = pd.concat(pool.map(one, jobs), ignore_index=True)
    full = table[(table["subnetwork"] == "full") & (table["dataset"] == "id")].iloc[0]
    print(f"full model: in-domain accuracy {100 * full['accuracy']:.1f}")
    print("\nKL to the full model on held-out in-domain rows (nats), over seeds:")
    print(summary(table).round(4).to_string())
    print("\nAccuracy of our subnetworks on the adversarial cases (percent), over seeds:")
    print(spreads(table).round(1).to_string())
    print("\nThe full model and our subnetworks, mean over cases (percent), over seeds:")
    print(collapse(table).round(1).to_string())
    print(f"\nHeads kept by every one of our subnetworks at 50% and 70%: {core(table)}")


if __name__ == "__main__":
    main()
