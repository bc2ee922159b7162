"""Do two checkouts of hc_lens give the same numbers?

    python docs/benchmarks/same_numbers.py --before OTHER_CHECKOUT --after .

A checkout's own environment, ``.venv``, is used if it has one: with --demo the other checkout needs
one, in which it is installed.

1. In each checkout, in a process of its own with one torch thread, run the same small workload from
   fixed seeds: evaluation, importance, scan, sweep, fine-tuning, attention, super-additivity,
   composition and extractive scores, and the demo with --demo.
2. Compare the tables cell by cell: identical bits, or the largest difference of a number, also as a
   share of the largest number in its column.

A column that only one side has, and a text that differs, is listed by name. The full model was
called ``none`` in scans of older checkouts; it is compared under its present name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

    from hc_lens.analyses.extractive import FactSet

FULL_NAMES = {"none": "full", "None": "full"}
"""What the full model is called in some tables, and its one name."""
SWEEP = {
    "checkpoints": {"400": "organism:400", "final": "organism"},
    "train": {"task": "organism", "split": "train", "limit": 400, "token_budget": 512},
    "evaluation": {
        "id": {"task": "organism", "split": "validation", "limit": 100},
        "ood": {"task": "organism-ood", "limit": 160},
    },
    "sparsities": [0.5, 0.7],
    "seeds": [0, 1],
    "prune": {"steps": 40},
}


def instrument_tables(folder: Path):
    """Tables of the instrument itself."""
    import hc_lens as hc

    model = hc.organism.load()
    inside, outside = hc.organism.task(), hc.organism.task("ood")
    train = inside.batches(model, "train", limit=600, token_budget=512)
    data = {
        "id": inside.batches(model, "validation", limit=200),
        "ood": outside.batches(model, limit=320),
    }
    means = hc.collect_means(model, train, progress=False)
    config = hc.PruneConfig(sparsity=0.5, seed=3, steps=60)
    sub = hc.prune(model, train, means, config, progress=False)
    yield "prune history", sub.history
    yield "prune kept", pd.DataFrame({"kept": sub.kept})
    yield "evaluate", hc.evaluate(model, data, means=means, subnetwork=sub, progress=False)
    yield "importance", hc.importance(model, data["id"], means, progress=False)
    yield "scan", hc.scan(model, data, means, progress=False)
    sets = [["L0.H1", "L1.H2"], ["L2.MLP"], ["L0.H0", "L3.H7", "L1.MLP"]]
    yield "scan of sets", hc.scan(model, data, "zero", sets, limit=90, progress=False)
    placed = hc.collect_means(model, train, by="position", progress=False)
    yield "scan, means by position", hc.scan(model, data, placed, sets, progress=False)
    hook = model.blocks[0].hook_mlp_out.register_forward_hook(lambda module, given, out: out)
    yield "scan, with a user's hook", hc.scan(model, data, means, sets, progress=False)
    hook.remove()
    runs = hc.sweep(hc.SweepConfig.from_dict(SWEEP), store=str(folder / "sweep"), workers=0)
    yield "sweep runs", runs.table.drop(columns="run")
    yield "sweep full models", runs.full
    settings = hc.FinetuneConfig(steps=12, batch_size=16, learning_rate=1e-4, checkpoint_every=6)
    weights = Path(hc.organism.__file__).parent / "weights" / "step-00100"
    tuned = hc.finetune(
        str(weights),
        inside,
        folder / "finetune",
        settings,
        evaluation={"id": (inside, "validation")},
        progress=False,
    )
    yield "finetune history", tuned.history


def analysis_tables(folder: Path):
    """Tables of the analyses."""
    import hc_lens as hc

    try:
        from hc_lens.analyses import composition, extractive, lexical_overlap, superadditive
    except ImportError:  # a checkout in which the analyses were a package of their own
        from analyses import composition, extractive, lexical_overlap, superadditive

    model = hc.organism.load()
    inside, outside = hc.organism.task(), hc.organism.task("ood")
    means = hc.collect_means(model, inside.batches(model, "train", limit=400), progress=False)
    data = {
        "id": inside.batches(model, "validation", limit=60),
        "ood": outside.batches(model, limit=96),
    }
    words = hc.word_batches(model, inside, "validation", limit=60)
    yield "lexical overlap", lexical_overlap.scores(model, words, n_bootstrap=50, progress=False)
    core, pool = ["L0.H6", "L1.H1", "L2.H3"], ["L0.H6", "L1.H1", "L1.H4"]
    chosen = configured(superadditive, "SuperAdditiveConfig", pool=tuple(pool))
    found = superadditive.analyse(model, data, means, core, **chosen, progress=False)
    yield "super-additive excess", found.excess
    yield "super-additive layout", found.layout.reset_index()
    for norms in ("frozen", "recomputed"):
        settings = {"norms": norms, "limit": 40, "progress": False}
        edges = composition.edge_effects(model, data, means, core, **settings)
        yield f"edge effects, {norms}", edges
        paths = [("L0.H6", ["L1.H1.q", "L1.MLP"]), ("L1.H1", "all")]
        yield (
            f"joint effects, {norms}",
            composition.joint_effects(model, data, means, paths, **settings),
        )
        yield (
            f"edge attribution, {norms}",
            composition.edge_attribution(model, data, means, core, **settings),
        )
    yield "weight scores", composition.weight_scores(model, data["id"], core, progress=False)
    chosen = configured(composition, "TraceConfig", limit=40)
    trace = composition.trace(model, data, means, core, **chosen, progress=False)
    for name in ("edges", "explained", "dependents", "agreement"):
        yield f"trace, {name}", getattr(trace, name)
    training = extractive.TrainConfig(steps=20)
    desk = extractive.DeskConfig(
        n_cities=4,
        n_known_cities=4,
        n_known_people=12,
        n_invented_people=6,
        **dict.fromkeys(("pretraining", "facts", "invented"), training),
    )
    for name, table in extractive.study([0], desk, progress=False).items():
        yield f"extractive, {name}", table
    world = extractive.World.invented(0, n_cities=4, n_people=20)
    facts = extractive.first_hop(world, n_cities=4)
    asked = facts.implications, facts.implication_options
    models = [double_model(facts, seed) for seed in (0, 1)]
    for method in ("linear", "exact"):
        chosen = configured(extractive, "ScoreConfig", method=method, n_counterfactuals=2)
        yield (
            f"extractive, {method} scores in float64",
            extractive.scores(*models, *asked, **chosen, progress=False),
        )


def double_model(facts: FactSet, seed: int) -> HookedTransformer:
    """A random language model in float64 that knows the words of some facts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformers import PreTrainedTokenizerFast

    texts = [f"{q.prompt} {q.answer}" for q in (*facts.facts, *facts.implications)]
    words = ["<pad>", *sorted({word for text in texts for word in text.split()})]
    level = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sizes = {"n_layers": 3, "d_model": 24, "n_heads": 3, "d_head": 8, "d_mlp": 48, "n_ctx": 16}
    cfg = HookedTransformerConfig(
        **sizes, d_vocab=len(words), act_fn="gelu", seed=seed, device="cpu", dtype=torch.float64
    )
    model = HookedTransformer(cfg, move_to_device=False)
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=level, pad_token="<pad>")
    model.cfg.tokenizer_prepends_bos = model.cfg.default_prepend_bos = False
    return model.eval()


def configured(module: ModuleType, name: str, **settings: object) -> dict[str, object]:
    """Settings as the module takes them: in a settings class, or one by one before it had one."""
    kind = getattr(module, name, None)
    return settings if kind is None else {"config": kind(**settings)}


def demo_tables(folder: Path):
    """Tables of the demo's run folder."""
    run = folder / "demo"
    subprocess.run([sys.executable, "-m", "hc_lens.cli", "demo", "--out", str(run)], check=True)
    for path in sorted(run.glob("steps/*/*.csv")):
        yield f"demo, {path.parent.name}/{path.stem}", pd.read_csv(path)


def write(folder: Path, demo: bool) -> None:
    """Run the workload in this process and write its tables."""
    import torch

    torch.set_num_threads(1)
    makers = [instrument_tables, analysis_tables, *([demo_tables] if demo else [])]
    start = time.perf_counter()
    for make in makers:
        for name, table in make(folder):
            plain = table.copy()
            plain.columns = [
                " ".join(map(str, column)) if isinstance(column, tuple) else str(column)
                for column in plain.columns
            ]
            plain.to_parquet(folder / f"{name.replace('/', '--')}.parquet", index=False)
            print(f"{time.perf_counter() - start:6.0f} s  {name}", file=sys.stderr)


def compare(before: pd.DataFrame, after: pd.DataFrame) -> str:
    """How two tables differ, in words."""
    said = []
    for side, one, other in (("before", before, after), ("after", after, before)):
        alone = [name for name in one if name not in other]
        said += [f"only {side}: {', '.join(alone)}"] if alone else []
    if len(before) != len(after):
        return "; ".join([*said, f"{len(before)} rows before, {len(after)} after"])
    largest, share = 0.0, 0.0
    for name in [name for name in before if name in after]:
        old, new = before[name], after[name]
        if pd.api.types.is_numeric_dtype(old) and pd.api.types.is_numeric_dtype(new):
            was, now = (each.to_numpy(float, na_value=np.nan) for each in (old, new))
            if (old.isna() != new.isna()).any():
                said.append(f"{name}: other missing numbers")
            gap = float(np.nanmax(np.abs(was - now), initial=0.0))
            largest = max(largest, gap)
            share = max(share, gap / max(np.nanmax(np.abs(was), initial=0.0), 1e-300))
        elif (_texts(old) != _texts(new)).any():
            said.append(f"{name}: other texts")
    differing = f"largest difference {largest:.2g}, {share:.2g} of the column's largest number"
    return "; ".join([*said, "identical" if largest == 0 else differing])


def _texts(column: pd.Series) -> pd.Series:
    return column.fillna("").astype(str).replace(FULL_NAMES)


def main() -> None:
    """Run both checkouts and print one line for each table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the older checkout")
    parser.add_argument("--after", type=Path, default=Path("."), help="the newer checkout")
    parser.add_argument("--kept", type=Path, help="folder to keep the tables of both in")
    parser.add_argument("--demo", action="store_true", help="also run the demo in both")
    parser.add_argument("--write", type=Path, help="only write this checkout's tables here")
    given = parser.parse_args()
    if given.write is not None:
        given.write.mkdir(parents=True, exist_ok=True)
        write(given.write, given.demo)
        return
    with tempfile.TemporaryDirectory() as scratch:
        kept = (given.kept or Path(scratch)).absolute()
        for side, checkout in (("before", given.before), ("after", given.after)):
            if not list((kept / side).glob("*.parquet")):
                own = checkout.absolute() / ".venv" / "bin" / "python"
                python = str(own) if own.exists() else sys.executable
                command = [python, str(Path(__file__).absolute()), "--write", str(kept / side)]
                env = {**os.environ, "PYTHONPATH": str(checkout.absolute()), "OMP_NUM_THREADS": "1"}
                extra = ["--demo"] if given.demo else []
                subprocess.run([*command, *extra], cwd=checkout, env=env, check=True)
        names = {path.stem for path in kept.glob("*/*.parquet")}
        for name in sorted(names):
            paths = [kept / side / f"{name}.parquet" for side in ("before", "after")]
            if all(path.exists() for path in paths):
                said = compare(*(pd.read_parquet(path) for path in paths))
            else:
                said = f"only {'before' if paths[0].exists() else 'after'}"
            print(f"{name:<40} {said}")


if __name__ == "__main__":
    main()
