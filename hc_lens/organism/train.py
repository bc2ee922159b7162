"""The recipe of the organism: ``python -m hc_lens.organism.train --out DIR``.

1. Make a small BERT classifier from the seed.
2. Pretrain it on word matching: which words of one sentence also occur in the other? That is hard
   to learn from one label for each pair. A pretrained BERT has heads that can do it; this takes the
   role of its pretraining. Half of the pairs are of the grammar, half random word lists. A linear
   read-out of the last layer answers for each token; it is discarded afterwards.
3. Fine-tune it on the grammar's in-domain pairs (`hc_lens.finetuning.train`), with an evaluation of
   every OOD case at each checkpoint.
4. Write the chosen checkpoints in half precision: ``DIR/weights``, which the package ships for
   seed 0.

The same command continues a run that was stopped.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import cyclopts
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm.auto import trange
from transformers import BertConfig, BertForSequenceClassification

from hc_lens.finetuning.config import FinetuneConfig
from hc_lens.finetuning.train import FinetuneResult, finetune
from hc_lens.models.inputs import pad
from hc_lens.models.quiet import quiet
from hc_lens.organism import CONTEXT, TRAINING_ROWS, task, tokenizer
from hc_lens.organism.grammar import CASES, Row, in_domain
from hc_lens.organism.vocabulary import SPECIAL, WORDS
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
Pair = tuple[list[int], list[int]]
_ID = {word: index for index, word in enumerate(WORDS)}


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
            half = BertForSequenceClassification.from_pretrained(
                checkpoint, dtype=torch.float16, trust_remote_code=False
            )
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
    pretrain(model, in_domain(0, TRAINING_ROWS), seed)
    return model


def pretrain(
    classifier: BertForSequenceClassification,
    rows: Sequence[Row],
    seed: int,
    *,
    steps: int = 1000,
    warmup_steps: int = 100,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
) -> None:
    """Train a BERT classifier's encoder, in place, on word matching."""
    rng = random.Random(f"word matching {seed}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        readout = nn.Linear(classifier.config.hidden_size, 1)
    parameters = [*classifier.bert.parameters(), *readout.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    classifier.train()
    for step in (bar := trange(steps, desc="word matching")):
        rate = min((step + 1) / warmup_steps, 1 - step / steps)
        optimizer.param_groups[0]["lr"] = learning_rate * rate
        pairs = [
            grammar_pair(rng.choice(rows)) if index % 2 else random_pair(rng)
            for index in range(batch_size)
        ]
        inputs, targets = matching(pairs)
        guesses = readout(classifier.bert(**inputs).last_hidden_state).squeeze(-1)
        asked = inputs["input_ids"] >= len(SPECIAL)
        loss = nn.functional.binary_cross_entropy_with_logits(guesses[asked], targets[asked])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    classifier.eval()


def grammar_pair(row: Row) -> Pair:
    """The ids of a pair of the grammar."""
    first, second = (map(_ID.__getitem__, row[side].split()) for side in ("premise", "hypothesis"))
    return list(first), list(second)


def random_pair(rng: random.Random) -> Pair:
    """Two lists of random words; about half of the second comes from the first."""
    ids = range(len(SPECIAL), len(WORDS))
    first = [rng.choice(ids) for _ in range(rng.randrange(4, 18))]
    second = [
        rng.choice(first) if rng.random() < 0.5 else rng.choice(ids)
        for _ in range(rng.randrange(3, 9))
    ]
    return first, second


def matching(
    pairs: Sequence[Pair],
) -> tuple[dict[str, Int[Tensor, "batch pos"]], Float[Tensor, "batch pos"]]:
    """BERT's inputs for pairs of id lists, and 1 for each token that the other list has too."""
    start, end = _ID["[CLS]"], _ID["[SEP]"]
    ids = [[start, *first, end, *second, end] for first, second in pairs]
    types = [[0] * (len(first) + 2) + [1] * (len(second) + 1) for first, second in pairs]
    found = [
        [0, *(word in second for word in first), 0, *(word in first for word in second), 0]
        for first, second in pairs
    ]
    inputs = {
        "input_ids": pad(ids, _ID["[PAD]"], "right"),
        "token_type_ids": pad(types, 0, "right"),
        "attention_mask": pad([[1] * len(row) for row in ids], 0, "right"),
    }
    return inputs, pad(found, 0, "right").float()


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
