"""What does the optimisation buy? Pruning the organism, against the baselines and the public code.

    python docs/benchmarks/prune.py [--seeds 12] [--rows 3200] [--processes 2] [--short]
    python docs/benchmarks/prune.py --budgets runs.csv [--seeds 12] [--processes 2]

Prints, at 50% and 70% sparsity and over seeds, the held-out KL to the full model and the in-domain
accuracy of our preset, our preset with a third of the examples, the public code's preset, gradient
importance and 20 random masks; then the accuracy of our subnetworks on every adversarial case, how
near they are to the overlap heuristic (0% on adversarial cases, 100% on friendly ones), and the
heads that all of them keep.

With --budgets, compares our preset with 1,500 batches and the public code's with 1,500 and with the
9,300 that its recipe asks for, at 50% sparsity and with the paper's seeds 42, 43, ... Each finished
run is added to the file, so a second call goes on from it.
"""

from __future__ import annotations

import argparse
import functools
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import pandas as pd
import torch
from scipy.stats import t

import hc_lens as hc
from hc_lens.organism.grammar import CASES, CONSTRUCTIONS
from hc_lens.pruning.teacher import Teacher

SPARSITIES = (0.5, 0.7)
LEARNT = 0.4
"""Accuracy of the full model on an adversarial case that it has learnt in part at least."""
SHORT = "ours, 1/3 of the examples"
"""The run whose subnetworks are looked at more closely."""
STEPS = 1500
"""Steps of the public code's preset; ours gets as many, and a third."""
BUDGET = 512
"""Tokens a batch: about 25 rows."""
FIRST_SEED = 42
"""The first of the paper's 12 seeds."""
OWN = hc.PruneConfig.reference(SPARSITIES[0], FIRST_SEED).steps
"""Updates that the public code's preset makes of its own accord at 50% sparsity."""
BUDGETS = [("ours", STEPS), ("public code", STEPS), ("public code", OWN)]
"""Preset and number of batches of each line of the comparison of budgets."""


def preset(name: str, sparsity: float, seed: int, batches: int) -> hc.PruneConfig:
    """Our settings with two batches an update, or the public code's with one."""
    if name == "ours":
        return hc.PruneConfig(sparsity, seed, accumulate=2, steps=batches // 2)
    return hc.PruneConfig.reference(sparsity, seed, steps=batches)


def methods(sparsity: float, seed: int, short: bool) -> dict[str, hc.PruneConfig]:
    """The settings that are compared, by name; baselines once or, at random, 20 times."""
    named = {SHORT: preset("ours", sparsity, seed, STEPS // 3)}
    if short:
        return named
    named |= {name: preset(name, sparsity, seed, STEPS) for name in ("ours", "public code")}
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


@functools.cache
def teacher() -> Teacher:
    """The full model's kept logits, once a process."""
    return Teacher(inputs(1)[0])


def one_budget(job: tuple[str, int, int]) -> dict[str, object]:
    """One preset with one number of batches and one seed: KL and accuracy on held-out rows."""
    name, batches, seed = job
    model, train, means, data = inputs(1)
    config = preset(name, SPARSITIES[0], seed, batches)
    found = hc.prune(model, train, means, config, teacher=teacher(), progress=False)
    table = hc.evaluate(model, data["id"], means=means, subnetwork=found, progress=False)
    line = table[table["subnetwork"] != "full"].iloc[0]
    return {"batches": batches, "preset": name, "seed": seed, "updates": config.steps,
            "kl": line["kl"], "accuracy": 100 * line["accuracy"]}  # fmt: skip


def run_budgets(runs: Path, seeds: int, processes: int) -> pd.DataFrame:
    """Every run of the comparison of budgets; those in the file are read, new ones are added."""
    done = pd.read_csv(runs).to_dict("records") if runs.exists() else []
    known = {(run["preset"], run["batches"], run["seed"]) for run in done}
    wanted = [(*line, FIRST_SEED + seed) for line in BUDGETS for seed in range(seeds)]
    with ProcessPoolExecutor(processes) as pool:
        for run in as_completed([pool.submit(one_budget, job) for job in wanted
                                 if job not in known]):  # fmt: skip
            done.append(run.result())
            pd.DataFrame(done).to_csv(runs, index=False)
    return pd.DataFrame(done)


def budgets(runs: pd.DataFrame) -> pd.DataFrame:
    """KL and accuracy by budget and preset: mean over seeds and its 95% interval (Student's t)."""
    groups = runs.groupby(["batches", "preset"])
    lines = groups["updates"].agg(["first", "count"]).set_axis(["updates", "seeds"], axis=1)
    for name in ("kl", "accuracy"):
        mean, half = groups[name].mean(), groups[name].sem() * t.ppf(0.975, lines["seeds"] - 1)
        columns = {name: mean, f"{name} low": mean - half, f"{name} high": mean + half}
        lines = lines.assign(**columns)
    return lines.round(4)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--rows", type=int, default=3200, help="out-of-domain rows")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="our short runs alone")
    parser.add_argument("--budgets", type=Path, help="compare budgets; file of finished runs")
    options = parser.parse_args()
    if options.budgets:
        print(f"{SPARSITIES[0]:.0%} removed: KL to the full model (nats) and accuracy (percent) on")
        print("held-out in-domain rows, mean over seeds with its 95% interval:")
        runs = run_budgets(options.budgets, options.seeds, options.processes)
        print(budgets(runs).to_string())
        return
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
