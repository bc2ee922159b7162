"""How many examples does a subnetwork need? KL on held-out rows against examples seen.

    python docs/benchmarks/lengths.py RUNS.csv --model organism [--seeds 6] [--processes 2]
    python docs/benchmarks/lengths.py RUNS.csv --model FOLDER --task mnli --path TRAIN.parquet \\
        --held-out HELD_OUT.parquet [--budget 512] [--max-length 128] [--bfloat16]
    python docs/benchmarks/lengths.py RUNS.csv --model FOLDER --task agreement
    ... [--lr 0.05 0.1 0.2] [--steps 50 100 200 400] [--warm-start 0 1] [--public 9300]

Prunes half of the units with our settings at each learning rate, number of updates and warm start,
and with ``--public N ...`` also with the public code's preset at these numbers of updates (9300 is
what its own recipe makes at this sparsity). Each update sees one batch, the same batches for both.
Each finished run is added to RUNS.csv at once, so a second call goes on from there. Prints:

1. the mean KL with its 95% interval (Student's t over seeds);
2. at how many examples ours reaches the KL of the public code;
3. what a stop after so many updates without a change of the mask (`patience`) would have saved,
   and in how many runs the mask would have been another.
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
from hc_lens.pruning.teacher import Teacher
from hc_lens.pruning.train import GateTraining, frozen, ready
from hc_lens.pruning.warm import WARM_BATCHES

SPARSITY = 0.5
FIRST_SEED = 42
"""The first of the paper's seeds."""
TRAIN_ROWS, HELD_OUT_ROWS = 8000, 1000
PATIENCES = (20, 40, 60, 100)
"""Updates without a change of the mask."""
OURS, PUBLIC = "ours", "public code"
SETTINGS = ["preset", "lr", "warm_start", "steps", "seed"]
"""What tells the runs of one file apart."""


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Options that say which model and which rows, and how many processes."""
    parser.add_argument("--model", default=ORGANISM)
    parser.add_argument("--task", default=ORGANISM)
    parser.add_argument("--path")
    parser.add_argument("--held-out")
    parser.add_argument("--budget", type=int, default=512, help="tokens a batch")
    parser.add_argument("--max-length", type=int, help="tokens at which a row is cut")
    parser.add_argument("--bfloat16", action="store_true", help="in every run")
    parser.add_argument("--processes", type=int, default=2)


def specs(options: argparse.Namespace) -> tuple[DataSpec, DataSpec]:
    """The rows to prune on and those held out."""
    made = options.path is None
    train = DataSpec(
        options.task, options.path, "train" if made else None, TRAIN_ROWS,
        token_budget=options.budget, max_length=options.max_length,
    )  # fmt: skip
    held_out = DataSpec(
        options.task, options.held_out, "validation" if made else None, HELD_OUT_ROWS, seed=1,
        max_length=options.max_length,
    )  # fmt: skip
    return train, held_out


@functools.cache
def inputs(model_name: str, specs: tuple[DataSpec, DataSpec]) -> tuple:
    """The model, the rows to prune on, its means and kept logits, and held-out rows."""
    torch.set_num_threads(1)
    model = read_model(model_name)
    train, held_out = (spec.batches(model) for spec in specs)
    means = hc.collect_means(model, train, progress=False)
    return model, train, means, Teacher(model), {"held out": held_out}, {"held out": Teacher(model)}


def config(run: dict[str, Any], low: bool) -> hc.PruneConfig:
    """The settings of a run."""
    shared = {"steps": run["steps"], "bfloat16": low}
    if run["preset"] == PUBLIC:
        return hc.PruneConfig.reference(SPARSITY, run["seed"], **shared)
    ours = {"lr": run["lr"], "warm_start": run["warm_start"], "patience": None}
    return hc.PruneConfig(SPARSITY, run["seed"], **ours, **shared)


def trained(settings: hc.PruneConfig, given: tuple) -> tuple[hc.Subnetwork, list[int]]:
    """The subnetwork of a run, and the steps after its warm-up that changed the mask."""
    model, train, means, teacher = given[:4]
    training = GateTraining(ready(model, train, means, settings, None, teacher, False))
    mask, changes = training.mask(SPARSITY), []
    with frozen(model):
        for record in training.run(lambda: SPARSITY):
            before, mask = mask, training.mask(SPARSITY)
            if record.step > settings.warmup_steps and not torch.equal(before, mask):
                changes.append(record.step)
    return training.subnetwork(SPARSITY), changes


def scores(found: hc.Subnetwork, given: tuple) -> dict[str, float]:
    """KL and accuracy on the held-out rows of `inputs`."""
    model, _, means, _, data, theirs = given
    table = hc.evaluate(model, data, means=means, subnetwork=found, teachers=theirs,
                        progress=False)  # fmt: skip
    line = table[table["subnetwork"] != "full"]
    total = line["n"].sum()
    return {name: float((line[name] * line["n"]).sum() / total) for name in ("kl", "accuracy")}


def one(
    run: dict[str, Any], low: bool, model_name: str, rows: tuple[DataSpec, DataSpec]
) -> dict[str, Any]:
    """KL and accuracy on held-out rows of a run."""
    given, settings = inputs(model_name, rows), config(run, low)
    train, start = given[1], time.process_time()
    found, changes = trained(settings, given)
    seconds = time.process_time() - start
    updates = run["steps"] + (WARM_BATCHES if settings.warm_start else 0)
    examples = round(updates * len(train.rows) / len(train))
    return {**run, "examples": examples, "warm_up": settings.warmup_steps,
            "changes": " ".join(map(str, changes)), "seconds": round(seconds, 1),
            **scores(found, given)}  # fmt: skip


def wanted(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every run, shortest first."""
    lines = [(OURS, lr, warm, steps) for steps in sorted(options.steps)
             for lr in options.lr for warm in options.warm_start]  # fmt: skip
    lines += [(PUBLIC, 0.1, 0.0, steps) for steps in sorted(options.public)]
    return [dict(zip(SETTINGS, (*line, FIRST_SEED + seed), strict=True))
            for line in lines for seed in range(options.seeds)]  # fmt: skip


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean KL and accuracy of each line over seeds, with a 95% interval of the KL."""
    groups = runs.groupby(SETTINGS[:-1])
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
            f"{enough.iloc[0]['examples']} examples (lr {enough.iloc[0]['lr']}, warm start "
            f"{enough.iloc[0]['warm_start']}), "
            f"{public.examples / enough.iloc[0]['examples']:.1f} times fewer"
        )  # fmt: skip
        said.append(f"public code, {public.examples} examples: KL {public.kl:.4f}; ours at {best}")
    return said


def stop(run: Any, wait: int) -> tuple[int, bool]:
    """Where a run would have stopped with a patience, and whether its mask changed after that."""
    still = run.warm_up
    for change in map(int, str(run.changes).split() if isinstance(run.changes, str) else ()):
        if change - still > wait:
            return still + wait, True
        still = change
    return min(still + wait, run.steps), False


def patience(runs: pd.DataFrame) -> pd.DataFrame:
    """What each patience would have saved and lost, over all runs of ours."""
    ours, lines = runs[runs["preset"] == OURS], []
    for wait in PATIENCES:
        stops = [stop(run, wait) for run in ours.itertuples()]
        saved = [1 - at / steps for (at, _), steps in zip(stops, ours["steps"], strict=True)]
        lines.append(
            {
                "patience": wait,
                "updates saved": sum(saved) / len(saved),
                "runs": len(stops),
                "other masks": sum(later for _, later in stops),
            }
        )
    return pd.DataFrame(lines)


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    add_rows(parser)
    parser.add_argument("--lr", type=float, nargs="*", default=[0.05, 0.1, 0.2])
    parser.add_argument("--steps", type=int, nargs="*", default=[50, 100, 200, 400])
    parser.add_argument("--warm-start", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--public", type=int, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    done = pd.read_csv(options.runs).to_dict("records") if options.runs.exists() else []
    known = {tuple(run[name] for name in SETTINGS) for run in done}
    missing = [run for run in wanted(options) if tuple(run.values()) not in known]
    with ProcessPoolExecutor(options.processes) as pool:
        rows = specs(options)
        for run in as_completed(
            [pool.submit(one, run, options.bfloat16, options.model, rows) for run in missing]
        ):
            done.append(run.result())
            pd.DataFrame(done).to_csv(options.runs, index=False)
    lines = summary(pd.DataFrame(done))
    print(
        f"{SPARSITY:.0%} removed, {HELD_OUT_ROWS} held-out rows, KL in nats, accuracy in percent:"
    )
    print(lines.round(4).to_string())
    print("\n".join(reached(lines)))
    print(f"\n{patience(pd.DataFrame(done)).round(3).to_string(index=False)}")


if __name__ == "__main__":
    main()
