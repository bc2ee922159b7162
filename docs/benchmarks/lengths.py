"""How many examples does a subnetwork need? KL on held-out rows against examples seen.

    python docs/benchmarks/lengths.py RUNS.csv --model organism [--seeds 6] [--processes 2]
    python docs/benchmarks/lengths.py RUNS.csv --model FOLDER --task mnli --path TRAIN.parquet \\
        --held-out HELD_OUT.parquet [--budget 512] [--lr 0.05 0.1 0.2] [--steps 50 100 200 400]
    python docs/benchmarks/lengths.py RUNS.csv --model FOLDER --task agreement

Prunes half of the units with our settings at each learning rate and number of updates, and with
``--public N ...`` also with the public code's preset at these numbers of updates (9300 is what its
own recipe makes at this sparsity). Each update sees one batch, the same batches for both. Each
finished run is added to RUNS.csv at once, so a second call goes on from there. Prints the mean KL
with its 95% interval (Student's t over seeds), and at how many examples ours reaches the KL of the
public code.
"""

from __future__ import annotations

import argparse
import functools
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy.stats import t

import hc_lens as hc
from hc_lens.data.specs import ORGANISM, DataSpec, read_model
from hc_lens.pruning.job import Teacher

SPARSITY = 0.5
FIRST_SEED = 42
"""The first of the paper's seeds."""
TRAIN_ROWS, HELD_OUT_ROWS = 8000, 1000
OURS, PUBLIC = "ours", "public code"
SETTINGS = ["preset", "lr", "steps", "seed"]
"""What tells the runs of one file apart."""


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Options that say which model and which rows, and how many processes."""
    parser.add_argument("--model", default=ORGANISM)
    parser.add_argument("--task", default=ORGANISM)
    parser.add_argument("--path")
    parser.add_argument("--held-out")
    parser.add_argument("--budget", type=int, default=512, help="tokens a batch")
    parser.add_argument("--processes", type=int, default=2)


def specs(options: argparse.Namespace) -> tuple[DataSpec, DataSpec]:
    """The rows to prune on and those held out."""
    made = options.path is None
    train = DataSpec(
        options.task, options.path, "train" if made else None, TRAIN_ROWS,
        token_budget=options.budget,
    )  # fmt: skip
    split = "validation" if made else None
    return train, DataSpec(options.task, options.held_out, split, HELD_OUT_ROWS, seed=1)


@functools.cache
def inputs(model_name: str, specs: tuple[DataSpec, DataSpec]) -> tuple:
    """The model, the rows to prune on, its means and kept logits, and held-out rows."""
    torch.set_num_threads(1)
    model = read_model(model_name)
    train, held_out = (spec.batches(model) for spec in specs)
    means = hc.collect_means(model, train, progress=False)
    return model, train, means, Teacher(model), {"held out": held_out}, {"held out": Teacher(model)}


def config(run: dict[str, Any]) -> hc.PruneConfig:
    """The settings of a run."""
    if run["preset"] == PUBLIC:
        return hc.PruneConfig.reference(SPARSITY, run["seed"], steps=run["steps"])
    return hc.PruneConfig(SPARSITY, run["seed"], lr=run["lr"], steps=run["steps"])


def scores(found: hc.Subnetwork, given: tuple) -> dict[str, float]:
    """KL and accuracy on the held-out rows of `inputs`."""
    model, _, means, _, data, theirs = given
    table = hc.evaluate(model, data, means=means, subnetwork=found, teachers=theirs,
                        progress=False)  # fmt: skip
    line = table[table["subnetwork"] != "full"]
    total = line["n"].sum()
    return {name: float((line[name] * line["n"]).sum() / total) for name in ("kl", "accuracy")}


def one(run: dict[str, Any], model_name: str, rows: tuple[DataSpec, DataSpec]) -> dict[str, Any]:
    """KL and accuracy on held-out rows of a run."""
    model, train, means, teacher, *_ = given = inputs(model_name, rows)
    start = time.process_time()
    found = hc.prune(model, train, means, config(run), teacher=teacher, progress=False)
    seconds = time.process_time() - start
    examples = round(run["steps"] * len(train.rows) / len(train))
    return {**run, "examples": examples, "seconds": round(seconds, 1), **scores(found, given)}


def wanted(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every run, shortest first."""
    lines = [(OURS, lr, steps) for steps in sorted(options.steps) for lr in options.lr]
    lines += [(PUBLIC, 0.1, steps) for steps in sorted(options.public)]
    return [dict(zip(SETTINGS, (*line, FIRST_SEED + seed), strict=True))
            for line in lines for seed in range(options.seeds)]  # fmt: skip


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean KL and accuracy of each line over seeds, with a 95% interval of the KL."""
    groups = runs.groupby(["preset", "lr", "steps"])
    lines = groups["examples"].agg(["first", "count"]).set_axis(["examples", "seeds"], axis=1)
    mean, half = groups["kl"].mean(), groups["kl"].sem() * t.ppf(0.975, lines["seeds"] - 1)
    lines = lines.assign(kl=mean, low=mean - half, high=mean + half)
    return lines.assign(accuracy=100 * groups["accuracy"].mean(), seconds=groups["seconds"].mean())


def reached(lines: pd.DataFrame) -> list[str]:
    """At how many examples ours has at most the public code's mean KL."""
    lines = lines.reset_index()
    ours, said = lines[lines["preset"] == OURS].sort_values("examples"), []
    for public in lines[lines["preset"] == PUBLIC].itertuples():
        enough = ours[ours["kl"] <= public.kl]
        best = "no length that was tried" if enough.empty else (
            f"{enough.iloc[0]['examples']} examples (lr {enough.iloc[0]['lr']}), "
            f"{public.examples / enough.iloc[0]['examples']:.1f} times fewer"
        )  # fmt: skip
        said.append(f"public code, {public.examples} examples: KL {public.kl:.4f}; ours at {best}")
    return said


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    add_rows(parser)
    parser.add_argument("--lr", type=float, nargs="*", default=[0.05, 0.1, 0.2])
    parser.add_argument("--steps", type=int, nargs="*", default=[50, 100, 200, 400])
    parser.add_argument("--public", type=int, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    done = pd.read_csv(options.runs).to_dict("records") if options.runs.exists() else []
    known = {tuple(run[name] for name in SETTINGS) for run in done}
    missing = [run for run in wanted(options) if tuple(run.values()) not in known]
    with ProcessPoolExecutor(options.processes) as pool:
        rows = specs(options)
        for run in as_completed([pool.submit(one, run, options.model, rows) for run in missing]):
            done.append(run.result())
            pd.DataFrame(done).to_csv(options.runs, index=False)
    lines = summary(pd.DataFrame(done))
    print(
        f"{SPARSITY:.0%} removed, {HELD_OUT_ROWS} held-out rows, KL in nats, accuracy in percent:"
    )
    print(lines.round(4).to_string())
    print("\n".join(reached(lines)))


if __name__ == "__main__":
    main()
