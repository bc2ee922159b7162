"""The recipe of the organism: ``python -m hc_lens.organism.train --out DIR``.

1. Make a small BERT classifier from the seed.
2. Pretrain it on word matching (`hc_lens.organism.pretrain`).
3. Fine-tune it on the grammar's in-domain pairs (`hc_lens.finetuning.train`), with an evaluation of
   every OOD case at each checkpoint.
4. Write the chosen checkpoints in half precision: ``DIR/weights``, which the package ships for
   seed 0.

The same command continues a run that was stopped.
"""

from __future__ import annotations

import json
from pathlib import Path

import cyclopts
import torch
from transformers import BertConfig, BertForSequenceClassification

from hc_lens.finetuning.train import FinetuneConfig, FinetuneResult, finetune
from hc_lens.models.quiet import quiet
from hc_lens.organism import CONTEXT, TRAINING_ROWS, task, tokenizer
from hc_lens.organism.grammar import CASES, in_domain
from hc_lens.organism.pretrain import PretrainConfig, pretrain
from hc_lens.organism.vocabulary import WORDS
from hc_lens.records import Records

SHAPE = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": CONTEXT,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
"""The architecture, in Hugging Face's names."""

SHIPPED = (0, 100, 200, 400, 800, 1200, 2000)
"""Steps whose checkpoints are part of the package."""


def train(folder: str | Path, seed: int = 0) -> FinetuneResult:
    """Train an organism from a seed; its shipped form is ``folder/weights``."""
    folder = Path(folder)
    done = Records(folder, "organism", {"seed": seed})
    if done.find("pretrained") is None:
        done.write("pretrained", lambda path: _save(_pretrained(seed), path))
    recipe = FinetuneConfig(
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
    result = finetune(
        done.folder("pretrained"),
        task(),
        folder / "finetuned",
        recipe,
        evaluation={"id": (task(), "validation"), "ood": task("ood")},
    )
    for checkpoint in map(result.checkpoint, SHIPPED):
        with quiet():
            half = BertForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float16)
        _save(half, folder / "weights" / checkpoint.name)
    return result


def _pretrained(seed: int) -> BertForSequenceClassification:
    names = dict(enumerate(task().labels))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(WORDS),
            id2label=names,
            label2id={name: index for index, name in names.items()},
            **SHAPE,
        )
        model = BertForSequenceClassification(config)
    pretrain(model, in_domain(0, TRAINING_ROWS), PretrainConfig(seed=seed))
    return model


def _save(model: BertForSequenceClassification, folder: Path) -> None:
    with quiet():
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    # transformers 5 writes a class name here that transformers 4 does not know.
    named = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(named, indent=2))


def main(*, out: Path, seed: int = 0) -> str:
    """Train an organism and show the accuracy of every case at its shipped steps.

    Args:
        out: Folder of the run.
        seed: Decides weights and order of rows.
    """
    torch.set_num_threads(1)
    history = train(out, seed).history
    case = history["case"].where(history["dataset"] == "ood", "in-domain")
    named = history.assign(case=case, percent=100 * history["accuracy"])
    table = named.pivot(index="case", columns="step", values="percent")
    return table.loc[["in-domain", *CASES], list(SHIPPED)].to_string(float_format="%.1f")


if __name__ == "__main__":
    cyclopts.run(main)
