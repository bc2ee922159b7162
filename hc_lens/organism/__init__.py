"""The organism: a small trained classifier in which the paper's phenomenon can be seen at once.

A BERT of a few hundred thousand weights, fine-tuned on three-way inference pairs of our own
grammar (`hc_lens.organism.grammar`), with checkpoints from before and after it generalised. It
needs no network: the weights are part of the package, the rows are made on the spot.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hc_lens.errors import check_choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from hc_lens.data.task import Task
    from hc_lens.models.loading import HookedModel

WEIGHTS = Path(__file__).parent / "weights"
"""Folder of the checkpoints that are part of the package."""
TRAINING_ROWS = 20_000
VALIDATION_ROWS = 2_000
CONTEXT = 64
"""Most tokens of a row."""


def steps() -> tuple[int, ...]:
    """The fine-tuning steps whose checkpoints are part of the package, in order."""
    return tuple(sorted(int(folder.name.split("-")[1]) for folder in WEIGHTS.glob("step-*")))


def checkpoint(step: int | None = None) -> Path:
    """The folder of a step's checkpoint, by default that of the end of training."""
    chosen = steps()[-1] if step is None else step
    check_choice("a step of the organism", chosen, steps())
    return WEIGHTS / f"step-{chosen:05d}"


def load(step: int | None = None, **settings: Any) -> HookedModel:
    """The organism after a number of fine-tuning steps, by default at the end of training.

    `settings` are those of ``hc.load``.
    """
    from hc_lens.models.loading import load as load_model

    return load_model(checkpoint(step), **settings)


@cache
def task(name: Literal["id", "ood"] = "id") -> Task:
    """The organism's rows, the same at every call.

    ``task()`` is in-domain: splits ``train`` and ``validation``, three labels. ``task("ood")`` has
    16 cases of 1,000 rows, each construction in its adversarial and its friendly form, and two
    labels, entailment (what the heuristic answers) and non-entailment.
    """
    from hc_lens.data.task import Task
    from hc_lens.organism.grammar import in_domain, out_of_domain

    check_choice("a task of the organism", name, ("id", "ood"))
    columns = ("premise", "hypothesis")
    if name == "ood":
        splits, labels = {"validation": out_of_domain(0)}, ("entailment", "non-entailment")
        return Task.from_rows(
            splits,
            columns=columns,
            labels=labels,
            case="case",
            heuristic=labels[0],
            name="organism-ood",
        )
    train = in_domain(0, TRAINING_ROWS)
    seen = frozenset((row["premise"], row["hypothesis"]) for row in train)
    splits = {"train": train, "validation": in_domain(1, VALIDATION_ROWS, seen)}
    labels = ("entailment", "neutral", "contradiction")
    return Task.from_rows(splits, columns=columns, labels=labels, name="organism")


def tokenizer(words: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """The organism's tokenizer: a token for each word of the grammar, BERT's special tokens.

    Other `words` begin with the special tokens too, as `hc_lens.organism.vocabulary.WORDS` do.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from hc_lens.organism.vocabulary import WORDS

    ids = {word: index for index, word in enumerate(words or WORDS)}
    made = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    names = ("pad", "unk", "cls", "sep", "mask")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name}_token": f"[{name.upper()}]" for name in names},
    )
