"""The recipe of the organism: ``python -m hc_lens.organism.train --out DIR``.

1. Make a small BERT classifier from the seed.
2. Pretrain it on word matching (`hc_lens.organism.pretrain`).
3. Fine-tune it on the grammar's in-domain pairs (`hc_lens.finetune`), with an evaluation of every
   OOD case at each checkpoint.
4. Write the chosen checkpoints in half precision: ``DIR/weights``, which the package ships for
   seed 0.

A run that was stopped goes on when the same command is given again.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from hc_lens import organism
from hc_lens.finetune import FinetuneConfig, FinetuneResult, finetune
from hc_lens.models.quiet import quiet
from hc_lens.organism.grammar import CASES, in_domain
from hc_lens.organism.pretrain import PretrainConfig, pretrain
from hc_lens.organism.vocabulary import WORDS

SHAPE = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": organism.CONTEXT,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
"""The architecture, in Hugging Face's names."""

SHIPPED = (0, 100, 200, 400, 800, 1200, 2000)
"""Steps whose checkpoints are part of the package."""


def recipe(seed: int) -> FinetuneConfig:
    """The fine-tuning settings."""
    return FinetuneConfig(
        steps=SHIPPED[-1],
        batch_size=64,
        learning_rate=5e-4,
        warmup_steps=50,
        weight_decay=0.01,
        checkpoint_every=400,
        checkpoint_at=SHIPPED,
        evaluation_rows=2000,
        seed=seed,
    )


def train(folder: str | Path, seed: int = 0) -> FinetuneResult:
    """Train an organism from a seed; its shipped form is ``folder/weights``."""
    folder = Path(folder)
    start = _pretrained(folder / "pretrained", seed)
    result = finetune(
        start,
        organism.task(),
        folder / "finetuned",
        recipe(seed),
        evaluation={"id": (organism.task(), "validation"), "ood": organism.task("ood")},
    )
    for step in SHIPPED:
        _export(result.checkpoint(step), folder / "weights" / result.checkpoint(step).name)
    return result


def _pretrained(folder: Path, seed: int) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    if folder.is_dir():
        return folder
    names = dict(enumerate(organism.task().labels))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(WORDS),
            id2label=names,
            label2id={name: place for place, name in names.items()},
            **SHAPE,
        )
        model = BertForSequenceClassification(config)
    pretrain(model, in_domain(0, organism.TRAINING_ROWS), PretrainConfig(seed=seed))
    _save(model, folder)
    return folder


def _export(checkpoint: Path, folder: Path) -> None:
    """A checkpoint in half precision, without what only training needs."""
    from transformers import BertForSequenceClassification

    with quiet():
        model = BertForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float16)
    _save(model, folder)


def _save(model: Any, folder: Path) -> None:
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for old in (unfinished, folder):
        shutil.rmtree(old, ignore_errors=True)
    with quiet():
        model.save_pretrained(unfinished)
        organism.tokenizer().save_pretrained(unfinished)
    settings = unfinished / "tokenizer_config.json"
    # transformers 5 writes a class name here that transformers 4 does not know.
    named = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(named, indent=2))
    for file in unfinished.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read
    os.replace(unfinished, folder)


def table(history: pd.DataFrame) -> pd.DataFrame:
    """Accuracy by case (rows) and step (columns), in percent."""
    named = history.assign(
        case=history["case"].where(history["dataset"] == "ood", "in-domain"),
        accuracy=100 * history["accuracy"],
    )
    pivot = named.pivot(index="case", columns="step", values="accuracy")
    return pivot.loc[["in-domain", *CASES]]


def main(
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    seed: Annotated[int, typer.Option(help="Decides weights and order of rows.")] = 0,
) -> None:
    """Train an organism and print the accuracy of every case at its shipped steps."""
    torch.set_num_threads(1)
    result = train(out, seed)
    typer.echo(table(result.history)[list(SHIPPED)].to_string(float_format="%.1f"))


if __name__ == "__main__":
    typer.run(main)
