"""One path against separate runs: KL and accuracy at 19 sparsities, examples and time.

    python docs/benchmarks/paths.py RUNS.csv [--seeds 12] [--processes 2]
    python docs/benchmarks/paths.py RUNS.csv --model FOLDER --task mnli --path TRAIN.parquet \\
        --held-out HELD_OUT.parquet --seeds 3 [--separate-steps 400] [--path-steps 1500]

For each of the paper's seeds 42, 43, ... prunes to 5, 10, ..., 95% in 19 separate runs of
``--separate-steps`` updates each, and in one path of ``--path-steps`` updates, and evaluates all
subnetworks on held-out rows. Both see the same batches of ``--budget`` tokens and the same means.
Each finished seed of each way is added to RUNS.csv at once, so a second call goes on from there.
Prints the mean KL of both ways at each sparsity, the mean difference within a seed with its 95%
interval (Student's t), and what each way cost. The time is that of the processor, as other
processes may run beside it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lengths import FIRST_SEED, add_rows, inputs, scores, specs
from scipy.stats import t

import hc_lens as hc
from hc_lens.analyses import subnetworks
from hc_lens.data.specs import read_model
from hc_lens.sweeps.sizes import PAPER_SPARSITIES, TWENTIETHS

WAYS = ("separate", "path")


def find(way: str, seed: int, steps: int, given: tuple, low: bool) -> list[hc.Subnetwork]:
    """The subnetworks of one seed at all sparsities."""
    model, train, means, teacher = given[:4]
    if way == "path":
        path = hc.PathConfig(TWENTIETHS, seed, steps=steps, bfloat16=low)
        return hc.prune_path(model, train, means, path, teacher=teacher, progress=False)
    apart = [hc.PruneConfig(each, seed, steps=steps, bfloat16=low) for each in TWENTIETHS]
    return [hc.prune(model, train, means, each, teacher=teacher, progress=False) for each in apart]


def one(way: str, seed: int, steps: int, low: bool, *where) -> pd.DataFrame:
    """KL and accuracy on held-out rows at every sparsity."""
    given = inputs(*where)
    train, teacher = given[1], given[3]
    for batch in train:  # both ways find the full model's logits there
        teacher.held(batch)
    start = time.process_time()
    found = find(way, seed, steps, given, low)
    seconds = time.process_time() - start
    runs = 1 if way == "path" else len(TWENTIETHS)
    examples = round(runs * steps * len(train.rows) / len(train))
    table = pd.DataFrame([{**scores(sub, given), "kept": " ".join(sub.kept)} for sub in found])
    return table.assign(way=way, seed=seed, steps=steps, bfloat16=low, sparsity=TWENTIETHS,
                        examples=examples, seconds=round(seconds, 1))  # fmt: skip


def by_sparsity(runs: pd.DataFrame) -> pd.DataFrame:
    """Both ways at each sparsity: mean KL and accuracy, and path minus separate within a seed."""
    both = runs.groupby("seed")["way"].nunique() == len(WAYS)
    runs = runs[runs["seed"].isin(both.index[both])]
    wide = runs.pivot_table(index=["sparsity", "seed"], columns="way", values=["kl", "accuracy"])
    lines = pd.DataFrame({f"{name} {way}": wide[name, way].groupby("sparsity").mean()
                          for name in ("kl", "accuracy") for way in WAYS})  # fmt: skip
    gaps = (wide["kl", "path"] - wide["kl", "separate"]).groupby("sparsity")
    half = gaps.sem() * t.ppf(0.975, gaps.count() - 1)
    return lines.assign(difference=gaps.mean(), low=gaps.mean() - half, high=gaps.mean() + half,
                        seeds=gaps.count())  # fmt: skip


def networks(runs: pd.DataFrame, space: hc.UnitSpace) -> dict[subnetworks.Key, hc.Subnetwork]:
    """The subnetworks of the paper's two sparsities."""
    chosen: Any = runs[runs["sparsity"].isin(PAPER_SPARSITIES)].itertuples()
    return {
        ("model", run.sparsity, run.seed): hc.Subnetwork(
            space, torch.tensor([label in run.kept.split() for label in space.labels]), ""
        )
        for run in chosen
    }


def alike(runs: pd.DataFrame, space: hc.UnitSpace) -> dict[str, float]:
    """What the two sparsities of the paper have in common, among the subnetworks of one way."""
    found = networks(runs, space)
    low, high = PAPER_SPARSITIES
    heads = [(key, {label for label in sub.kept if "H" in label}) for key, sub in found.items()]
    shares = [(one[2] == other[2], one[1] == other[1], len(a & b) / len(a | b))
              for (one, a), (other, b) in itertools.combinations(heads, 2)]  # fmt: skip
    table = pd.DataFrame(shares, columns=["seed", "sparsity", "jaccard"])
    means = table.groupby(["seed", "sparsity"])["jaccard"].mean()
    frequencies = subnetworks.frequencies(found)
    return {
        "heads shared by 50 and 70% of one seed": means[True, False],
        "by 50 and 70% of two seeds": means[False, False],
        "by two seeds at one sparsity": means[False, True],
        "Spearman of the frequencies at 50 and 70%":
            subnetworks.spearman(frequencies, low, high).rho,
        "heads in every subnetwork": len(subnetworks.core(found)),
        "by chance": subnetworks.chance(found).expected,
    }  # fmt: skip


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    add_rows(parser)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--separate-steps", type=int, default=400)
    parser.add_argument("--path-steps", type=int, default=1500)
    options = parser.parse_args()
    steps = dict(zip(WAYS, (options.separate_steps, options.path_steps), strict=True))
    done = pd.read_csv(options.runs) if options.runs.exists() else pd.DataFrame()
    known = set(zip(done["way"], done["seed"], strict=True)) if len(done) else set()
    wanted = [(way, FIRST_SEED + seed) for seed in range(options.seeds) for way in WAYS]
    where = (options.model, specs(options))
    with ProcessPoolExecutor(options.processes) as pool:
        left = [pool.submit(one, way, seed, steps[way], options.bfloat16, *where)
                for way, seed in wanted if (way, seed) not in known]  # fmt: skip
        for run in as_completed(left):
            done = pd.concat([done, run.result()], ignore_index=True)
            done.to_csv(options.runs, index=False)
    lines = by_sparsity(done)
    print("KL to the full model (nats) and accuracy on held-out rows; difference of the KL is path")
    print("minus separate, with its 95% interval:")
    print(lines.round(4).to_string())
    print(f"lower or equal mean KL with the path at {(lines['difference'] <= 0).sum()} of "
          f"{len(lines)} sparsities")  # fmt: skip
    cost = done.groupby("way")[["steps", "examples", "seconds"]].mean()
    print(f"\nEach seed, mean:\n{cost.round(1).to_string()}")
    ratio = cost.loc["separate"] / cost.loc["path"]
    print(f"{ratio['examples']:.2f} times fewer examples, {ratio['seconds']:.2f} times less time")
    space = hc.UnitSpace.of(read_model(options.model))
    rows = {way: alike(part, space) for way, part in done.groupby("way")}
    print("\nShare of common heads (Jaccard), mean over pairs of subnetworks:")
    print(pd.DataFrame(rows).round(4).to_string())


if __name__ == "__main__":
    main()
