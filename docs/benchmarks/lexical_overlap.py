"""Which heads carry lexical overlap?

    python docs/benchmarks/lexical_overlap.py [--model DIR] [--task mnli --path FILE] [--split S]
        [--limit 1000] [--core L0.H1,L2.H3] [--out DIR]

Prints the heads with the highest overlap score beside chance and the permuted score, and the number
of heads in each role. By default the model and the rows are the organism's. --core marks heads, as
those of `hc_lens.analyses.subnetworks`; --out writes the table and both figures there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import hc_lens as hc
from hc_lens import organism
from hc_lens.analyses import lexical_overlap
from hc_lens.attention.patterns import word_batches


def main() -> None:
    parser = argparse.ArgumentParser(description="Heads by their lexical-overlap score.")
    parser.add_argument("--model", help="checkpoint; the organism by default")
    parser.add_argument("--task", default="mnli", help="task of the rows in --path")
    parser.add_argument("--path", help="rows; the organism's by default")
    parser.add_argument("--split", help="split to read; the organism's validation by default")
    parser.add_argument("--limit", type=int, default=1000, help="number of rows")
    parser.add_argument("--content-words", action="store_true", help="leave function words out")
    parser.add_argument("--core", default="", help="heads to mark, separated by commas")
    parser.add_argument("--out", type=Path, help="folder for the table and the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = hc.load(args.model) if args.model else organism.load()
    task = hc.Task.named(args.task, args.path) if args.path else organism.task()
    split = args.split or (None if args.path else "validation")
    rows = word_batches(model, task, split, limit=args.limit, max_length=min(128, model.cfg.n_ctx))
    stop_words = lexical_overlap.STOP_WORDS if args.content_words else ()
    table = lexical_overlap.scores(
        model, rows, words=lexical_overlap.WordRule(stop_words=stop_words)
    )
    core = [label for label in args.core.split(",") if label]
    overlap = table[table["score"] == "overlap"].nlargest(10, "value")
    shown = overlap[["unit", "value", "low", "high", "chance", "permuted", "n", "role"]]
    print(shown.assign(core=shown["unit"].isin(core)).round(3).to_string(index=False))
    roles = table.drop_duplicates("unit")["role"].replace("", "no clear role").value_counts()
    print("\n".join(f"{count:>4} heads: {role}" for role, count in roles.items()))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        table.to_csv(args.out / "lexical_overlap.csv", index=False)
        lexical_overlap.figure(table, mark=core).savefig(args.out / "figure_9.png", dpi=150)
        lexical_overlap.heat_maps(table, mark=core).savefig(args.out / "heat_maps.png", dpi=150)


if __name__ == "__main__":
    main()
