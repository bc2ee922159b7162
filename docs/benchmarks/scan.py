"""How long does an ablation scan take, and how much memory?

    python docs/benchmarks/scan.py [--model FOLDER --path FILE] [--rows N]
    python docs/benchmarks/scan.py --family deberta-v3 [--path FILE] [--rows N]

Ablates every head and every MLP of a 6-layer x 12-head model on rows of MNLI's lengths, in four
ways, one after the other on each batch, so that a busy machine slows all of them alike. Times are
those of the processor, on one thread:

- ours: hc.scan;
- loop: TransformerLens with hc.ablate, one full forward pass per unit, on the same batches;
- loop128: the same loop with every row padded to 128 tokens, as fine-tuning scripts do;
- floor: the sum of the suffix forward passes alone, one per unit, with the kernels of ours. The
  activations before the ablated unit, the metrics and the tables cost nothing here.

Then all pairs of 12 heads against the loop, and the largest number of bytes alive during a scan
under several memory caps. Without --model the weights are random, without --path the rows are.
With --family the model is an encoder of this family, of 12 layers x 6 heads and width 384, with
random weights, and ours alone is compared with the loop and the floor.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import torch
from made_up import ENCODERS, made_up_encoder, made_up_model, made_up_task
from torch.nn.functional import pad
from torch.profiler import ProfilerActivity, profile

import hc_lens as hc
from hc_lens.scans.engine import SuffixEngine
from hc_lens.scans.layers import Branch, FusedLayers, Stream
from hc_lens.scans.scan import scan

FIXED = 128


class OneBatch:
    """One batch of some batches, with what a scan asks of batches."""

    def __init__(self, batches: hc.Batches, batch: hc.Batch):
        self.batches, self.batch = batches, batch
        self.name, self.labels = batches.name, batches.labels
        self.predictions, self.log_probs = batches.predictions, batches.log_probs
        self.n_rows = len(batch)

    def __iter__(self):
        yield self.batch

    def __len__(self) -> int:
        return 1


def seconds(repeats: int, run: Callable[..., object], *args, **settings) -> float:
    """The shortest of some runs, in seconds of the processor: others may use the machine too."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        run(*args, **settings)
        taken.append(time.process_time() - start)
    return min(taken)


@torch.no_grad()
def loop(model, batch, means, sets) -> torch.Tensor:
    """One full forward pass per set, under hooks."""
    results = []
    for units in sets:
        with hc.ablate(model, units, means):
            results.append(model(**batch.inputs))
    return torch.stack(results)


def padded(batch: hc.Batch) -> hc.Batch:
    """The batch with its rows padded to 128 tokens."""
    width = FIXED - batch.tokens.shape[1]
    return replace(batch, inputs={k: pad(v, (0, width)) for k, v in batch.inputs.items()})


@torch.no_grad()
def floor(engine: SuffixEngine, batch: hc.Batch, repeats: int) -> float:
    """Seconds in the suffix forward passes alone."""
    layers, n_layers = engine.layers, engine.space.n_layers
    stream = layers.start(batch, engine.source.on(batch))
    total, resid = 0.0, stream.resid
    for layer in range(n_layers):
        last = layer == n_layers - 1
        step = layers.step(stream, layer, resid, narrow=last)
        for unit in (unit for unit in engine.space if unit.layer == layer):
            above = range(layer + 1, n_layers)
            total += seconds(repeats, suffix, layers, stream, step, above, unit)
        resid = step([Branch(0, ())])
    return total


def suffix(layers: FusedLayers, stream: Stream, step, above: range, unit: hc.Unit) -> torch.Tensor:
    """From the ablated unit to the logits."""
    resid = step([Branch(0, (unit,))])
    for layer in above:
        step = layers.step(stream, layer, resid, narrow=layer == above.stop - 1)
        resid = step([Branch(0, ())])
    return layers.held(stream, resid)


def compare(model, batches, means, fixed: bool = True) -> None:
    """Every unit alone, four ways; without `fixed` not padded to 128."""
    space = hc.UnitSpace.of(model)
    sets = [[], *([unit] for unit in space)]
    engine = SuffixEngine(model, sets, means, 10**9)
    spent, worst = dict.fromkeys(("ours", "loop", *["loop128"] * fixed), 0.0), 0.0
    best = dict.fromkeys(("ours", "floor"), 0.0)
    for batch in batches:
        one = {"rows": OneBatch(batches, batch)}
        # Single runs against the loops, the shortest of three against the floor.
        spent["ours"] += seconds(1, scan, model, one, means, progress=False)
        best["ours"] += seconds(3, scan, model, one, means, progress=False)
        best["floor"] += floor(engine, batch, 3)
        spent["loop"] += seconds(1, loop, model, batch, means, sets)
        if fixed:
            spent["loop128"] += seconds(1, loop, model, padded(batch), means, sets)
        expected = loop(model, batch, means, sets[::5])
        worst = max(worst, float((engine.logits(batch)[::5] - expected).abs().max()))
    print(f"every unit alone ({len(space)} sets); largest difference in logits {worst:.1e}")
    for name, taken in spent.items():
        print(f"  {name:>8} {taken:8.1f} s   {taken / spent['ours']:6.2f} x ours")
    print(
        f"  shortest of three: ours {best['ours']:.1f} s, floor {best['floor']:.1f} s, "
        f"ours is {best['ours'] / best['floor']:.2f} x the floor"
    )


def compare_pairs(model, batches, means) -> None:
    """All pairs of 12 heads, two to a layer."""
    heads = [hc.Unit(layer, head) for layer in range(model.cfg.n_layers) for head in (1, 7)][:12]
    sets = [[], *([head] for head in heads), *map(list, combinations(heads, 2))]
    ours = theirs = 0.0
    for batch in batches:
        one = {"rows": OneBatch(batches, batch)}
        ours += seconds(1, scan, model, one, means, sets=hc.pairs(heads), progress=False)
        theirs += seconds(1, loop, model, batch, means, sets)
    print(f"pairs of {len(heads)} heads ({len(sets)} sets)")
    print(f"      ours {ours:8.1f} s\n      loop {theirs:8.1f} s   {theirs / ours:6.2f} x ours")


def peak_bytes(run: Callable[..., object], *args, **settings) -> int:
    """The most bytes that PyTorch had allocated at once during a run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(*args, **settings)
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes), default=0)


def measure_memory(model, batches, means) -> None:
    """The bytes alive during a scan of pairs, under several caps."""
    batch = max(batches, key=lambda batch: batch.tokens.numel())
    one = {"rows": OneBatch(batches, batch)}
    units = ["L0.H0", "L2.MLP", "L3.H1", "L5.H2"]
    settings = {"sets": hc.pairs(units), "progress": False}
    rows, pos = batch.tokens.shape
    print(f"memory of a scan of pairs, batch of {rows} rows x {pos} tokens")
    for cap in ("200MB", "60MB", "30MB", "15MB", "10MB"):
        try:
            most = peak_bytes(scan, model, one, means, memory=cap, **settings)
        except hc.HcLensError as error:
            print(f"  cap {cap:>6}: refused, {str(error).split(';')[0]}")
        else:
            print(f"  cap {cap:>6}: peak {most / 1e6:6.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of an ablation scan.")
    parser.add_argument("--model", help="a fine-tuned 6 x 12, d=384 checkpoint")
    parser.add_argument("--family", choices=ENCODERS, help="make up an encoder of a family")
    parser.add_argument("--path", help="MNLI rows: a file")
    parser.add_argument("--rows", type=int, default=64, help="rows to scan")
    parser.add_argument("--token-budget", type=int, default=4096, help="tokens of a batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.family:
        model = made_up_encoder(args.family)
    else:
        model = hc.load(args.model) if args.model else made_up_model()
    task = hc.Task.named("mnli", args.path) if args.path else made_up_task(1000)
    batches = task.batches(model, limit=args.rows, max_length=FIXED, token_budget=args.token_budget)
    print(batches)
    means = hc.collect_means(model, batches, progress=False)
    compare(model, batches, means, fixed=not args.family)
    if args.family:
        return
    compare_pairs(model, batches, means)
    measure_memory(model, batches, means)


if __name__ == "__main__":
    main()
