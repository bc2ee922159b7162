"""How fast is path patching, and who reads the core heads of the organism?

    python docs/benchmarks/composition.py [--rows N] [--rounds N] [--skip-speed] [--skip-organism]
        [--core L0.H6 L1.H1 ...]

1. On a 6-layer x 12-head model of width 384 with random weights: all receivers of one sender,
   patched one by one, in edges per second. "loop" is the plain way with TransformerLens hooks, one
   full forward pass per edge; it is given every patched query, key, value and input for free. The
   two take turns on every batch, and the shortest of the rounds counts.
2. On the organism: the trace of some heads with both treatments of layer norms. They are those of
   --core, or the five heads whose ablation moves the answers most.
"""

from __future__ import annotations

import argparse
import time

import torch
from made_up import made_up_model, made_up_task

import hc_lens as hc
from hc_lens.analyses.composition import Receiver, TraceConfig, trace
from hc_lens.analyses.composition.cli import summary
from hc_lens.analyses.composition.engine import PathEngine
from hc_lens.analyses.composition.passes import Direct
from hc_lens.analyses.composition.receivers import as_receivers
from hc_lens.units import Unit


@torch.no_grad()
def patched_values(engine: PathEngine, batch, sender, receivers) -> list:
    """For the loop: a hook point and what to write there, for each receiver."""
    clean = engine.start(batch)
    direct = Direct(clean, sender, engine.norms, clean.runs, clean.runs)
    found = []
    for receiver in receivers:
        if receiver.unit is None:
            final = clean.final.clone()
            final[:, :1] += direct.to_classifier()
            found.append(("blocks.5.hook_normalized_resid_post", None, final))
            continue
        index, head = receiver.unit.layer, receiver.unit.head
        block, run = engine.view.blocks[index], clean.runs[index]
        if receiver.kind == "mlp":
            value = (run.mlp_in + direct.to_mlp(index)) @ block.mlp.W_in + block.mlp.b_in
            found.append((f"blocks.{index}.mlp.hook_pre", None, value))
        else:
            value = block.project(run.reads + direct.to_heads(index), receiver.kind)[:, :, head]
            found.append((f"blocks.{index}.attn.hook_{receiver.kind}", head, value))
    return found


@torch.no_grad()
def loop(model, batch, values) -> torch.Tensor:
    """One full forward pass per edge."""
    results = []
    for name, head, value in values:

        def write(x, hook, head=head, value=value):
            if head is None:
                return value
            x[:, :, head] = value
            return x

        results.append(model.run_with_hooks(**batch.inputs, fwd_hooks=[(name, write)]))
    return torch.stack(results)


def speed(rows: int, rounds: int) -> None:
    """Edges per second of both ways, for a sender of each of the first layers."""
    model = made_up_model()
    batches = made_up_task(rows).batches(model, token_budget=1024, max_length=128)
    means = hc.collect_means(model, batches, progress=False)
    engine = PathEngine(model, means, "frozen")
    print(f"{batches}\n6 layers x 12 heads, width 384, one thread; {rounds} rounds")
    for layer in (0, 1, 2, 3):
        sender = (Unit(layer, 5),)
        receivers: list[Receiver] = as_receivers(model, sender)
        ours = slow = worst = 0.0
        for batch in batches:
            values = patched_values(engine, batch, sender, receivers)
            taken: dict[str, list[float]] = {"ours": [], "loop": []}
            fast = plain = torch.zeros(())
            for _ in range(rounds):
                start = time.perf_counter()
                clean = engine.start(batch)
                fast = engine.edges(clean, sender, receivers)
                taken["ours"].append(time.perf_counter() - start)
                start = time.perf_counter()
                plain = loop(model, batch, values)
                taken["loop"].append(time.perf_counter() - start)
            worst = max(worst, float((fast - plain).abs().max()))
            ours, slow = ours + min(taken["ours"]), slow + min(taken["loop"])
        n = len(receivers)
        work = n * batches.n_rows
        print(
            f"  sender L{layer}.H5, {n:3d} edges: ours {work / ours:7.0f}, loop {work / slow:6.0f} "
            f"edges x rows a second, {slow / ours:5.2f} x; largest difference {worst:.1e}"
        )


def important_heads(model, datasets, means, n: int = 5) -> list[str]:
    """The heads whose ablation moves the answers most, in KL divergence."""
    heads = hc.UnitSpace.of(model).heads
    table = hc.scan(model, datasets, means, heads, progress=False)
    table = table[table["set"] != "full"]
    weighted = table.assign(kl=table["kl"] * table["n"]).groupby(["dataset", "set"], sort=False)
    by_dataset = weighted["kl"].sum() / weighted["n"].sum()
    return list(by_dataset.groupby("set").mean().nlargest(n).index)


def organism(core: list[str] | None) -> None:
    """The trace of the organism's core heads."""
    from hc_lens import organism as bundled

    model = bundled.load()
    training = bundled.task().batches(model, "train", limit=2000)
    means = hc.collect_means(model, training, progress=False)
    datasets = {
        "id": bundled.task().batches(model, "validation", limit=200),
        "ood": bundled.task("ood").batches(model, limit=800),
    }
    if core is None:
        core = important_heads(model, datasets, means)
    for norms in ("recomputed", "frozen"):
        start = time.process_time()
        found = trace(model, datasets, means, core, TraceConfig(norms=norms), progress=False)
        seconds = time.process_time() - start
        print(f"\n== organism, norms {norms}: {seconds:.0f} s of processor time")
        print(summary(found))
        if norms == "recomputed":
            print("\nthe edge with the largest drop of accuracy on each case out of domain")
            cases = found.edges[found.edges["dataset"] == "ood"]
            best = cases.loc[cases.groupby("case")["accuracy_change"].idxmin()]
            columns = ["case", "sender", "receiver", "kind", "n", "accuracy_change", "kl"]
            print(best[columns].round(3).to_string(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description="Path patching: speed, and the organism.")
    parser.add_argument("--rows", type=int, default=24, help="rows of the made-up task")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--skip-organism", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--core", nargs="+", help="core heads of the organism")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.skip_speed:
        speed(args.rows, args.rounds)
    if not args.skip_organism:
        organism(args.core)


if __name__ == "__main__":
    main()
