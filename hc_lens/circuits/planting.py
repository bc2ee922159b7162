"""A random BERT or GPT-2 in which a known set of heads carries the label.

1. A row holds one *evidence* word for each true head, positive or negative, among filler words in
   random order. Its label says which of the two are more.
2. Directions of the residual stream are random, orthogonal to each other and of mean zero, so that
   layer norms leave them apart: one that marks the token where the model is read, one for the
   evidence of each head, one for its sign, one for the answer.
3. A true head asks from the marked token for the evidence words of its own, reads their sign and
   writes it along the answer's direction, in whichever layer it is. The classifier reads that
   direction alone.
4. Every other head and every MLP has random weights, scaled so that what it writes at a token is
   about ``noise`` times as long as what a true head writes. With ``noise=0`` it writes exactly
   nothing. Much noise drowns the evidence: the difficulty can be turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.circuits.known import Known
from hc_lens.errors import HcLensError, check_choice, check_count
from hc_lens.units import Unit

Family = Literal["bert", "gpt2"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
READ = {"bert": "[CLS]", "gpt2": "[SEP]"}
"""The token at which each family's classifier reads."""
LABELS = ("negative", "positive")
N_VARIANTS, N_FILLERS = 4, 20
"""Words of each head's evidence and sign, and words that say nothing."""
LONGEST = 64
SHARP = 14.0
"""How far the score of a head's own evidence is above that of other words."""
STRENGTH = 0.25
"""Length of what a true head writes, against the length of a token's embedding."""
SPREAD = 0.5
"""Length of what is a word's own, against each direction that it shares with others."""
MARGIN = 6.0
"""Logit of a label where the stream points along the answer's direction."""


@dataclass(frozen=True)
class PlantedConfig:
    """What is planted, and how well it is hidden."""

    family: Family = "bert"
    """Post-norm encoder or pre-norm decoder."""
    n_layers: int = 3
    """Number of layers."""
    n_heads: int = 4
    """Heads in each layer."""
    d_head: int = 16
    """Width of a head; the model is as wide as its heads together."""
    n_true: int = 5
    """Heads that carry the label."""
    noise: float = 0.5
    """Length of what another head or MLP writes, against that of a true head."""
    n_rows: int = 200
    """Rows in each of the splits train and validation."""
    seed: int = 0
    """Decides the weights, which heads are true, and the rows."""

    def __post_init__(self) -> None:
        check_choice("a family", self.family, get_args(Family))
        for name in ("n_layers", "n_heads", "d_head", "n_true", "n_rows"):
            check_count(name, getattr(self, name))
        if self.n_true > self.n_layers * self.n_heads or self.n_true + 4 > self.d_model:
            raise HcLensError(
                f"expected at most {min(self.n_layers * self.n_heads, self.d_model - 4)} true "
                f"heads in {self.n_layers} layers of {self.n_heads} heads of width {self.d_head}, "
                f"got {self.n_true}; plant fewer, or make the model larger"
            )
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise HcLensError(
                f"expected noise of 0 or more, got {self.noise}; 1 is as much as a true head writes"
            )

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.n_heads * self.d_head

    @property
    def words(self) -> list[str]:
        """The vocabulary: special tokens, evidence, fillers."""
        evidence = [f"{sign}{k}{chr(97 + variant)}" for k in range(self.n_true)
                    for sign in ("no", "yes") for variant in range(N_VARIANTS)]  # fmt: skip
        return [*SPECIAL, *evidence, *(f"so{index}" for index in range(N_FILLERS))]


DEFAULTS = PlantedConfig()


def planted(
    config: PlantedConfig = DEFAULTS, split: Literal["train", "validation"] = "validation"
) -> Known:
    """A model with a planted circuit, the rows of a split in batches, and the true heads."""
    from hc_lens.models.loading import load

    hf_model, tokenizer = planted_checkpoint(config)
    model = load(hf_model, tokenizer=tokenizer, device="cpu")
    name = f"planted {config.family}, noise {config.noise:g}"
    return Known(name, model, planted_task(config).batches(model, split), true_heads(config))


def true_heads(config: PlantedConfig) -> tuple[Unit, ...]:
    """The heads that carry the label, drawn from the seed."""
    generator = torch.Generator().manual_seed(config.seed)
    order = torch.randperm(config.n_layers * config.n_heads, generator=generator)
    chosen = sorted(order[: config.n_true].tolist())
    return tuple(Unit(index // config.n_heads, index % config.n_heads) for index in chosen)


def planted_task(config: PlantedConfig = DEFAULTS) -> Any:
    """The rows: splits train and validation, and a case for each margin of the evidence."""
    from hc_lens.data.task import Task

    generator = torch.Generator().manual_seed(config.seed + 1)
    splits = {
        split: [_row(config, generator) for _ in range(config.n_rows)]
        for split in ("train", "validation")
    }
    name = f"planted-{config.n_true}"
    return Task.from_rows(splits, columns="text", labels=LABELS, case="case", name=name)


def _row(config: PlantedConfig, generator: torch.Generator) -> dict[str, str]:
    def draw(n: int, shape: tuple[int, ...] = (1,)) -> list[int]:
        return torch.randint(n, shape, generator=generator).tolist()

    positive = draw(2, (config.n_true,))
    while 2 * sum(positive) == config.n_true:
        positive = draw(2, (config.n_true,))
    variants = draw(N_VARIANTS, (config.n_true,))
    words = [
        f"{('no', 'yes')[sign]}{k}{chr(97 + variant)}"
        for k, (sign, variant) in enumerate(zip(positive, variants, strict=True))
    ]
    words += [f"so{index}" for index in draw(N_FILLERS, (3 + draw(6)[0],))]
    order = torch.randperm(len(words), generator=generator).tolist()
    surplus = 2 * sum(positive) - config.n_true
    return {
        "text": " ".join(words[index] for index in order),
        "label": LABELS[surplus > 0],
        "case": f"margin-{abs(surplus)}",
    }


@dataclass(frozen=True)
class _Layer:
    """The matrices of one layer; there are no biases."""

    W_Q: Float[Tensor, "heads d_model d_head"]
    W_K: Float[Tensor, "heads d_model d_head"]
    W_V: Float[Tensor, "heads d_model d_head"]
    W_O: Float[Tensor, "heads d_head d_model"]
    W_in: Float[Tensor, "d_model d_mlp"]
    W_out: Float[Tensor, "d_mlp d_model"]


class _Plan:
    """Directions and weights, drawn from the seed."""

    def __init__(self, config: PlantedConfig):
        self.config, self.width = config, config.d_model
        self.length = math.sqrt(self.width)
        """Length of an embedding, which a layer norm leaves as it is."""
        self.generator = torch.Generator().manual_seed(config.seed + 2)
        start = self.normal(self.width, self.width)
        start[:, 0] = 1.0
        # The first column of Q is constant; a layer norm takes away what lies along it.
        basis = torch.linalg.qr(start).Q.T[1:]
        self.marker, self.sign, self.answer = basis[:3]
        self.evidence = basis[3 : 3 + config.n_true]
        self._rest = basis[3 + config.n_true :]
        self.embeddings = torch.stack([self._embedding(word) for word in config.words])
        self.layers = [self._layer(layer) for layer in range(config.n_layers)]

    def normal(self, *shape: int) -> Tensor:
        """Standard normal draws."""
        return torch.randn(shape, generator=self.generator)

    def own(self) -> Float[Tensor, "d_model"]:
        """A random direction apart from all that have a meaning."""
        drawn = self.normal(len(self._rest)) @ self._rest
        return drawn / drawn.norm()

    def _embedding(self, word: str) -> Float[Tensor, "d_model"]:
        shared = torch.zeros(self.width)
        if word == READ[self.config.family]:
            shared = self.marker
        elif word.startswith(("yes", "no")):
            k = int("".join(letter for letter in word if letter.isdigit()))
            shared = self.evidence[k] + (1 if word.startswith("yes") else -1) * self.sign
        whole = shared + SPREAD * self.own()
        return self.length * whole / whole.norm()

    def _layer(self, layer: int) -> _Layer:
        heads = [self._head(Unit(layer, head)) for head in range(self.config.n_heads)]
        W_Q, W_K, W_V, W_O = map(torch.stack, zip(*heads, strict=True))
        d_mlp = 4 * self.width
        # Of a standard normal input GELU leaves 0.425 of the mean square.
        scale = self._noise / math.sqrt(0.425 * d_mlp * self.width)
        W_in = self.normal(self.width, d_mlp) / self.length
        return _Layer(W_Q, W_K, W_V, W_O, W_in, scale * self.normal(d_mlp, self.width))

    @property
    def _noise(self) -> float:
        """Length of what a unit that is no true one writes."""
        return self.config.noise * STRENGTH * self.length

    def _head(self, unit: Unit) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        true, d_head = true_heads(self.config), self.config.d_head
        drawn = [self.normal(self.width, d_head) / self.length for _ in range(3)]
        out = self._noise * self.normal(d_head, self.width) / math.sqrt(d_head * self.width)
        if unit not in true:
            return drawn[0], drawn[1], drawn[2], out
        asks, holds = (each / each.norm() for each in self.normal(2, d_head))
        marked = self.length / math.hypot(1, SPREAD)
        shown = self.length / math.sqrt(2 + SPREAD**2)
        """Components of the marked token and of evidence along their directions."""
        score = SHARP * math.sqrt(d_head) / (marked * shown)
        return (
            torch.outer(self.marker, asks) * score,
            torch.outer(self.evidence[true.index(unit)], asks),
            torch.outer(self.sign, holds) / shown,
            torch.outer(holds, self.answer) * STRENGTH * self.length,
        )


def planted_checkpoint(config: PlantedConfig = DEFAULTS) -> tuple[Any, Any]:
    """The Hugging Face model and its tokenizer, for `save_pretrained`."""
    from hc_lens.organism import tokenizer

    plan, made = _Plan(config), tokenizer(config.words)
    write: Callable[[_Plan], Any] = _bert if config.family == "bert" else _gpt2
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return write(plan).eval(), made


def _labels() -> dict[str, Any]:
    return {"id2label": dict(enumerate(LABELS)), "label2id": {k: i for i, k in enumerate(LABELS)}}


def _zero(model: Any) -> None:
    """Every bias 0, every norm's weight 1; what carries something is written after this."""
    for name, parameter in model.named_parameters():
        norm = "LayerNorm" in name or ".ln_" in name
        parameter.fill_(1.0 if norm and name.endswith("weight") else 0.0)


def _bert(plan: _Plan) -> Any:
    """The plan as a BertForSequenceClassification."""
    from transformers import BertConfig, BertForSequenceClassification

    config = plan.config
    model: Any = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(config.words),
            hidden_size=plan.width,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            intermediate_size=4 * plan.width,
            max_position_embeddings=LONGEST,
            **_labels(),
        )
    )
    _zero(model)
    embeddings = model.bert.embeddings
    embeddings.word_embeddings.weight.copy_(plan.embeddings)
    for layer, made in zip(model.bert.encoder.layer, plan.layers, strict=True):
        attention: Any = layer.attention
        for name, weight in (("query", made.W_Q), ("key", made.W_K), ("value", made.W_V)):
            getattr(attention.self, name).weight.copy_(_columns(weight).T)
        attention.output.dense.weight.copy_(made.W_O.flatten(0, 1).T)
        layer.intermediate.dense.weight.copy_(made.W_in.T)
        layer.output.dense.weight.copy_(made.W_out.T)
    # The pooler's tanh is almost straight at the sizes that the answer has there.
    pool = torch.zeros(plan.width, plan.width)
    pool[0] = plan.answer / plan.length
    model.bert.pooler.dense.weight.copy_(pool)
    model.classifier.weight[:, 0] = torch.tensor([-MARGIN, MARGIN])
    return model


def _gpt2(plan: _Plan) -> Any:
    """The plan as a GPT2ForSequenceClassification."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = plan.config
    model: Any = GPT2ForSequenceClassification(
        GPT2Config(
            vocab_size=len(config.words),
            n_embd=plan.width,
            n_layer=config.n_layers,
            n_head=config.n_heads,
            n_positions=LONGEST,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            **_labels(),
        )
    )
    _zero(model)
    decoder: Any = model.transformer
    decoder.wte.weight.copy_(plan.embeddings)
    for layer, made in zip(decoder.h, plan.layers, strict=True):
        joined = torch.cat([_columns(weight) for weight in (made.W_Q, made.W_K, made.W_V)], dim=1)
        layer.attn.c_attn.weight.copy_(joined)
        layer.attn.c_proj.weight.copy_(made.W_O.flatten(0, 1))
        layer.mlp.c_fc.weight.copy_(made.W_in)
        layer.mlp.c_proj.weight.copy_(made.W_out)
    model.score.weight.copy_(
        torch.outer(torch.tensor([-1.0, 1.0]), plan.answer) * MARGIN / plan.length
    )
    return model


def _columns(weight: Float[Tensor, "heads d_model d_head"]) -> Float[Tensor, "d_model _"]:
    """The matrices of the heads side by side."""
    return weight.transpose(0, 1).flatten(1)
