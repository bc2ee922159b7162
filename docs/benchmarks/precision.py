"""Do the intervals of a scan to a stated precision hold, and how much work does it save?

    python docs/benchmarks/precision.py coverage [--seeds 1000]
    python docs/benchmarks/precision.py work --model FOLDER --task mnli --path FILE [--exact FILE]
    python docs/benchmarks/precision.py time --model FOLDER --task mnli --path FILE

- coverage: the exact effects of every row of the organism, and their derivatives, are made once.
  From these numbers scans to a precision, and searches for the largest effects, are replayed with
  many seeds by the very code that hc.scan and hc.top run, and compared with the exact means.
- work: the same of a checkpoint: the share of rows times sets for several precisions, and how often
  a search finds the largest ten. The exact effects are kept in the file --exact, and read from it.
- time: a scan to a precision of 0.02 and a search, by the clock of the processor, and an exact scan
  of some of the same rows.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hc_lens as hc
from hc_lens.metrics import ACCURACY, AGREEMENT, KL, LOGIT
from hc_lens.scans import intervals, sampler
from hc_lens.scans.precise import Precision, WholeCaseWarning, measure_precisely
from hc_lens.scans.sampler import Learned, Sampler
from hc_lens.scans.scan import ScanJob
from hc_lens.scans.top import largest

Effects = dict[str, np.ndarray]


class Replayed(Sampler):
    """Looks up what was measured before, instead of measuring."""

    learned: Learned
    exact: np.ndarray

    def _learn(self, rows) -> Learned:
        return self.learned.of(rows)

    def _measure(self, sets, parts) -> None:
        for population, start, stop in parts:
            rows = population.rows[start:stop]
            for index in sets:
                population.effects[index][start:stop] = self.exact[index, rows]
            self.evaluations += len(sets) * (stop - start)


def replayed(model, batches: hc.Batches, means, of: str, effects: Effects) -> Replayed:
    """A sampler that knows the exact effects of all rows, and their derivatives."""
    job = ScanJob(model, {"rows": batches}, means, None, progress=False)
    (real,) = job.samplers(of, lambda n: None).values()
    made = Replayed(*(getattr(real, name) for name in Sampler.__dataclass_fields__))
    made.learned, made.exact = real._learn(np.arange(batches.n_rows)), effects[of]
    return made


def exact_effects(model, batches: hc.Batches, means) -> Effects:
    """The effect of every unit on every row, in the order of the batches' rows."""
    rows = hc.scan_rows(model, batches, means, progress=False)
    right, logit = rows.correct.astype(float), rows.logit
    return {
        LOGIT: logit[1:] - logit[:1],
        ACCURACY: right[1:] - right[:1],
        KL: rows.kl[1:],
        AGREEMENT: rows.agreement[1:].astype(float),
    }


def precise(sampled: Replayed, asked: Precision) -> tuple[np.ndarray, float]:
    """Which intervals hold the exact mean, of every case and set, and the share of the work."""
    before, holds, total = sampled.evaluations, [], 0
    for found in measure_precisely({"rows": sampled}, asked):
        exact = sampled.exact[:, found.population.rows].mean(1)
        holds.append(np.abs(exact - found.mean) <= found.half + 1e-9)
        total += found.population.total * len(exact)
    return np.concatenate(holds), (sampled.evaluations - before) / total


def show_coverage(name: str, sampled: Replayed, asked: float, seeds: int) -> None:
    """Print how often intervals hold: of each set and case, and all of a scan together."""
    of = sampled.target.name
    for together in (False, True):
        settings = (Precision(asked, simultaneous=together, of=of, seed=s) for s in range(seeds))
        runs = [precise(sampled, each) for each in settings]
        held = np.stack([holds for holds, _ in runs])
        each, work = held.mean(0), np.mean([share for _, share in runs])
        print(
            f"{name:>15} {of:>9} {asked:9g} {'yes' if together else 'no':>8} "
            f"{len(each):9d} {each.mean():9.4f} {each.min():9.3f} {(each < 0.95).sum():6d} "
            f"{held.all(1).mean():9.3f} {1 / work:7.2f}",
            flush=True,
        )


def show_plain(name: str, sampled: Replayed, asked: float, seeds: int) -> None:
    """Print the same for Student's intervals without what guards them against heavy tails."""
    guards = intervals.HIDDEN, sampler.STAND_OUT
    intervals.HIDDEN, sampler.STAND_OUT = 0, 0.0
    try:
        show_coverage(f"{name}, plain", sampled, asked, seeds)
    finally:
        intervals.HIDDEN, sampler.STAND_OUT = guards


def show_top(name: str, sampled: Replayed, k: int, seeds: int) -> None:
    """Print how often a search finds the largest effects, and its work."""
    size = np.abs(sampled.exact.mean(1) - sampled.target.unchanged)
    order = np.argsort(-size, kind="stable")
    total, right, work = sampled.exact.size, 0, []
    for seed in range(seeds):
        before = sampled.evaluations
        found = largest(sampled, f"{seed} rows", k, 0.05)
        right += set(found.sets.tolist()) == set(order[:k].tolist())
        work.append((sampled.evaluations - before) / total)
    print(
        f"{name:>15} {sampled.target.name:>9} top {k}: found in {right} of {seeds} seeds, "
        f"{1 / np.mean(work):.1f} x less work; the {k}th and the next are "
        f"{size[order[k - 1]]:.4f} and {size[order[k]]:.4f}",
        flush=True,
    )


def coverage(seeds: int) -> None:
    """How often intervals and searches are right on the organism."""
    model, task, ood = hc.organism.load(), hc.organism.task(), hc.organism.task("ood")
    means = hc.collect_means(model, task.batches(model, "train", limit=2000), progress=False)
    datasets = {
        "organism": task.batches(model, "validation"),
        "organism-ood": ood.batches(model, limit_per_case=250),
    }
    asked = {LOGIT: (0.02, 0.1), KL: (0.02,), ACCURACY: (0.02,), AGREEMENT: (0.02,)}
    print(
        "        dataset    metric precision together intervals  mean held least held <0.95"
        "  all hold  x less"
    )
    for name, batches in datasets.items():
        effects = exact_effects(model, batches, means)
        for of, precisions in asked.items():
            sampled = replayed(model, batches, means, of, effects)
            # Of sixteen cases one precision of the log-odds is enough.
            rest = precisions[1:] if of == LOGIT else ()
            for precision in precisions if name == "organism" else rest:
                show_coverage(name, sampled, precision, seeds)
            if name == "organism" and of == LOGIT:
                show_plain(name, sampled, precisions[0], seeds)
            show_top(name, sampled, 10, 100)


def read_exact(file: Path | None, model, batches: hc.Batches, means) -> tuple[hc.Batches, Effects]:
    """The rows and their exact effects from a file, or else of all rows, written into it."""
    if file is None or not file.exists():
        effects = exact_effects(model, batches, means)
        if file is not None:
            np.savez(file, rows=np.arange(batches.n_rows), **effects)
        return batches, effects
    found = dict(np.load(file))
    rows = found.pop("rows")
    return batches._chosen(rows.tolist()), found


def show_work(name: str, sampled: Replayed, precisions: Iterable[float], seeds: int) -> None:
    """Print how much less work a scan is, of each case alone and of all rows together."""
    n_cases = len(set(sampled._cases))
    print(f"{name}, {sampled.target.name}: {sampled.exact.shape[1]} rows in {n_cases} cases")
    for asked in precisions:
        line = [f"  {asked:9g}"]
        for by_case in (True, False) if n_cases > 1 else (True,):
            of = sampled.target.name
            settings = [Precision(asked, of=of, by_case=by_case, seed=s) for s in range(seeds)]
            runs = [precise(sampled, each) for each in settings]
            held = np.mean([holds.mean() for holds, _ in runs])
            less = 1 / np.mean([share for _, share in runs])
            line.append(
                f"{'by case' if by_case else 'dataset'}: {less:6.1f} x less, {held:.4f} hold"
            )
        print("   ".join(line), flush=True)


def work(args: argparse.Namespace) -> None:
    """The work of scans and searches on a checkpoint."""
    model, batches, means = prepared(args)
    batches, effects = read_exact(args.exact, model, batches, means)
    for of in (LOGIT, KL, ACCURACY, AGREEMENT):
        sampled = replayed(model, batches, means, of, effects)
        show_work(args.task, sampled, (0.005, 0.01, 0.02, 0.05, 0.1), seeds=10)
        show_top(args.task, sampled, 10, seeds=100)


def prepared(args: argparse.Namespace) -> tuple[Any, hc.Batches, hc.Means]:
    """The model, the rows and the means of the training rows."""
    model = hc.load(args.model)
    train = hc.Task.named("mnli", args.train).batches(model, limit=2000, max_length=128)
    batches = hc.Task.named(args.task, args.path).batches(model, max_length=128)
    return model, batches, hc.collect_means(model, train, progress=False)


def seconds(run, *args, **settings):
    """The processor time of a call, and what it gave."""
    start = time.process_time()
    found = run(*args, progress=False, **settings)
    return time.process_time() - start, found


def clock(args: argparse.Namespace) -> None:
    """A precise scan, a search, and an exact scan of some rows, by the processor's clock."""
    model, batches, means = prepared(args)
    n_sets = len(hc.UnitSpace.of(model))
    if args.cases:
        batches = batches.of_cases(*args.cases.split(","))
    some, _ = seconds(hc.scan, model, batches.limited(args.rows), means)
    whole = some / args.rows * batches.n_rows
    print(f"{batches}\n  exact: {some:.0f} s for {args.rows} rows, so {whole:.0f} s for all")
    for by_case in (True, False) if len(set(batches.column("case"))) > 1 else (True,):
        taken, table = seconds(hc.scan, model, batches, means, precision=0.02, by_case=by_case)
        done = int(table.loc[table["set"] != "full", "n"].sum())
        less = n_sets * batches.n_rows / done
        what = "by case" if by_case else "dataset"
        print(
            f"  precision 0.02, {what}: {done:,} of {n_sets * batches.n_rows:,} rows times sets "
            f"({less:.1f} x less), {taken:.0f} s ({whole / taken:.1f} x less)",
            flush=True,
        )
    taken, table = seconds(hc.top, model, batches, means, 10)
    print(f"  top 10: {taken:.0f} s ({whole / taken:.1f} x less)\n{table.to_string(index=False)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Scans to a stated precision.")
    parser.add_argument("what", choices=("coverage", "work", "time"))
    parser.add_argument("--seeds", type=int, default=1000, help="replications of coverage")
    parser.add_argument("--model", help="a fine-tuned checkpoint")
    parser.add_argument("--task", default="mnli", choices=("mnli", "hans"))
    parser.add_argument("--path", help="its rows: a file")
    parser.add_argument("--train", help="MNLI rows to collect means over: a file")
    parser.add_argument("--exact", type=Path, help="where exact effects are kept (.npz)")
    parser.add_argument("--cases", default="", help="cases of the rows for `time`, with commas")
    parser.add_argument("--rows", type=int, default=300, help="rows of the exact scan of `time`")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", WholeCaseWarning)
    if args.what == "coverage":
        coverage(args.seeds)
    else:
        (work if args.what == "work" else clock)(args)


if __name__ == "__main__":
    main()
