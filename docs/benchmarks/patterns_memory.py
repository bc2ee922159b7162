"""Does the memory of a study of attention patterns grow with the number of rows?

    python docs/benchmarks/patterns_memory.py [--model DIR] [--path FILE] [--rows 250 1000 4000]

Scores the heads on more and more rows in one process and prints the peak memory of the process
after each, beside the size that all patterns would have if they were kept. Without --model the
model is a BERT of 6 layers x 12 heads with random weights; without --path the rows are made up.
The token budget is small so that batches are full, and so equally large, with few rows too.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hc_lens as hc
from hc_lens.analyses import lexical_overlap
from hc_lens.attention.patterns import WordBatches, word_batches

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = ("the", "a", "judge", "doctor", "saw", "old", "in", "city", "and", "did", "not", "today")


def made_up_model():
    """A BERT with random weights that reads the made-up words."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, **names)
    sizes = {"hidden_size": 192, "num_hidden_layers": 6, "intermediate_size": 384}
    config = hf.BertConfig(vocab_size=len(vocabulary), num_labels=3, **sizes)
    return hc.load(hf.BertForSequenceClassification(config), tokenizer=tokenizer)


def made_up_task(n_rows: int) -> hc.Task:
    """Pairs of random words with lengths like MNLI's."""
    draw = random.Random(0)

    def text(median: int) -> str:
        return " ".join(draw.choices(WORDS, k=max(1, round(median * draw.lognormvariate(0, 0.6)))))

    rows = [{"premise": text(17), "hypothesis": text(9)} for _ in range(n_rows)]
    return hc.Task.from_rows({"train": rows}, columns=("premise", "hypothesis"), label=None)


def peak() -> float:
    """Peak memory of this process so far, in MB."""
    units_per_mb = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mb


def pattern_sizes(rows: WordBatches, space: hc.UnitSpace) -> tuple[float, float]:
    """MB of all patterns of one pass, and of the largest pattern of one batch and layer."""
    cells = [batch.inputs["input"].numel() * batch.inputs["input"].shape[1] for batch in rows]
    per_cell = 4 / 2**20
    n_heads = len(space.heads)
    return sum(cells) * n_heads * per_cell, max(cells) * space.n_heads[0] * per_cell


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of lexical_overlap.scores by rows.")
    parser.add_argument("--model", help="checkpoint; a random BERT by default")
    parser.add_argument("--path", help="MNLI rows: a file, or a folder of files")
    parser.add_argument("--split", help="split to read")
    parser.add_argument("--token-budget", type=int, default=512, help="most tokens in a batch")
    parser.add_argument("--rows", type=int, nargs="+", default=[250, 1000, 4000])
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = hc.load(args.model) if args.model else made_up_model()
    task = hc.Task.named("mnli", args.path) if args.path else made_up_task(max(args.rows))
    task.dataset(args.split)  # the rows themselves are read before the first measurement
    print(f"{'rows':>6} {'peak MB':>8} {'one layer MB':>13} {'all patterns MB':>16} {'seconds':>8}")
    for n_rows in args.rows:
        budget = {"max_length": 128, "token_budget": args.token_budget}
        rows = word_batches(model, task, args.split, limit=n_rows, **budget)
        everything, one = pattern_sizes(rows, hc.UnitSpace.of(model))
        start = time.perf_counter()
        lexical_overlap.scores(model, rows, permuted=False, progress=False)
        seconds = time.perf_counter() - start
        print(f"{rows.n_rows:>6} {peak():>8.0f} {one:>13.1f} {everything:>16.0f} {seconds:>8.1f}")


if __name__ == "__main__":
    main()
