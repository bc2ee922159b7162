"""Which heads look from a word to the same word in the other sentence?

Figure 9 of Bhaskar, Friedman and Chen (2024), for every head and with baselines.

1. For each row and head, take the attention mass that a word gives to a target: the same word in
   the other sentence (both ways together, and each way), the previous token, the next token, the
   separator, the first token, itself, and the same word elsewhere in its sentence.
2. A word split in pieces counts once: the mass *to* a word is the sum over its pieces, the mass
   *from* a word is the mean over its pieces. Two words are the same after `WordRule`.
3. Only words that have a target they can reach count. Under a causal mask a token reaches itself
   and earlier tokens; the column `reach` says what that leaves of a score. A token that reaches
   only itself is left out: its attention is forced.
4. A row's score is the mean over its words, a head's score (`value`) the mean over the rows that
   have any.
5. `chance` is the same under uniform attention over the reachable positions.
6. `permuted` is the same with each hypothesis swapped for another row's, of about as many words.
   The targets stay where the row's own hypothesis has them: the k-th word of the foreign
   hypothesis stands for the k-th word of the row's own. What a head owes to word identity is lost,
   what it owes to position stays.
7. `low` and `high` are the 95% interval of a Poisson bootstrap over rows
   (`hc_lens.analyses.statistics.poisson_weights`), which needs no more memory for more rows.
8. A head has a `role` if one score clearly dominates (`role_of`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.analyses.lexical_overlap.figures import figure, heat_maps
from hc_lens.analyses.statistics import poisson_weights
from hc_lens.attention.patterns import WordBatch, WordBatches, visit
from hc_lens.attention.words import NONE, Words
from hc_lens.errors import HcLensError, check_count
from hc_lens.masks.finite import check_weights
from hc_lens.models.inputs import is_encoder
from hc_lens.protocols import BatchesLike, Model
from hc_lens.units import UnitSpace

__all__ = ["SCORES", "STOP_WORDS", "WordRule", "figure", "heat_maps", "role_of", "scores"]

CROSS = ("overlap", "overlap_to_hypothesis", "overlap_to_premise")
IDENTITY = (*CROSS, "repeat")
"""The scores that depend on which words are the same."""
SCORES = (*CROSS, "previous", "next", "separator", "first", "self", "repeat")
"""The scores by their targets, as in step 1; `overlap` is both ways together."""

_FUNCTION_WORDS = (
    "a an the this that these those and or but if of to in on at by for with from as into near "
    "is are was were be been being am do does did have has had will would can could not no "
    "i you he she it we they me him her us them my your his its our their who which what"
)
STOP_WORDS = frozenset(_FUNCTION_WORDS.split())
"""English function words, for `WordRule.stop_words`."""

EDGES = re.compile(r"^[\W_]+|[\W_]+$")
"""What stands before the first and behind the last letter or digit of a word."""
ROLE_MASS = 0.2
"""Least mass that makes a role."""
ROLE_RATIO = 2.0
"""How many times the next score, chance and the permuted score a role must have."""


@dataclass(frozen=True)
class WordRule:
    """When two words are the same: after case-folding and without punctuation at their ends."""

    lemma: Callable[[str], str] | None = None
    """Maps a word to its base form, such as a lemmatiser of spaCy or NLTK; applied last."""
    stop_words: Collection[str] = ()
    """Words that match nothing, in lower case."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_words, str):
            raise HcLensError(
                f"expected stop_words as a collection of words, got the text {self.stop_words!r}; "
                "pass a set, such as lexical_overlap.STOP_WORDS"
            )
        object.__setattr__(self, "stop_words", frozenset(self.stop_words))

    def __call__(self, word: str) -> str | None:
        """What a word is compared by; None for a word that matches nothing."""
        # Some tokenizers leave a comma or a full stop on the word.
        form = EDGES.sub("", unicodedata.normalize("NFC", word).casefold())
        if not form or form in self.stop_words:
            return None
        return form if self.lemma is None else self.lemma(form)


def scores(
    model: Model,
    rows: WordBatches | BatchesLike,
    *,
    words: WordRule | None = None,
    permuted: bool = True,
    n_bootstrap: int = 1000,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Every score of every head: one row for each unit and score.

    To score the heads of a subnetwork, call this inside ``with hc.masked(model, mask, means)``.

    Args:
        model: a hooked model.
        rows: of ``hc.word_batches(model, task, split)``.
        words: when two words are the same; by default after case-folding, without punctuation.
        permuted: whether to run the swapped rows too; without them the column is NaN.
        n_bootstrap: number of bootstrap replicates; 0 for no interval.
        seed: decides the swaps and the replicates.
        progress: show a progress bar.

    Returns:
        Columns unit, layer, head, score, value, low, high, chance, permuted, n (rows that have a
        target), reach and role. A score that is not defined has n = 0 and NaN, and says why in
        reach. All masses are shares of attention, 0 to 1.
    """
    if not isinstance(rows, WordBatches):
        raise HcLensError(
            f"expected rows with their words, got {type(rows).__name__}; make them with "
            "hc.word_batches(model, task, split)"
        )
    check_count("n_bootstrap", n_bootstrap, least=0)
    rule, n_units = words or WordRule(), len(UnitSpace.of(model).heads)
    real = _stream(model, rows, rule, _Sums(n_units, n_bootstrap, seed), progress)
    swapped = torch.full_like(real.total, float("nan"))
    if permuted and rows.swappable:
        empty = _Sums(n_units, 0, seed)
        swapped = _stream(model, rows.swapped(seed), rule, empty, progress).means()
    return _table(model, rows, real, swapped)


def role_of(head: pd.DataFrame) -> str:
    """The score that clearly dominates among the scores of one head, or an empty text.

    The lower end of its interval (its value, without one) must be at least 0.2, and twice the value
    of every score for another target, twice its own chance level and, for a score of word identity,
    twice its permuted value. The three overlap scores are one role, ``overlap``.
    """
    known = head.dropna(subset=["value"])
    if known.empty:
        return ""
    top = known.loc[known["value"].idxmax()]
    role = "overlap" if top["score"] in CROSS else str(top["score"])
    same = known["score"].isin(CROSS) if role == "overlap" else known["score"] == role
    rivals = [known.loc[~same, "value"].max(), top["chance"]]
    if top["score"] in IDENTITY:
        rivals.append(top["permuted"])
    sure = top["value"] if np.isnan(top["low"]) else top["low"]
    least = max(ROLE_MASS, *(ROLE_RATIO * rival for rival in rivals if not np.isnan(rival)))
    return role if sure >= least else ""


class _Sums:
    """Running sums of row scores, plain and resampled; their size does not grow with the rows."""

    def __init__(self, n_units: int, n_bootstrap: int, seed: int):
        shape = (len(SCORES), n_units)
        self.seed = seed
        self.total = torch.zeros(shape, dtype=torch.float64)
        self.chance = torch.zeros(len(SCORES), dtype=torch.float64)
        self.count = torch.zeros(len(SCORES), dtype=torch.float64)
        self.resampled = torch.zeros((n_bootstrap, *shape), dtype=torch.float64)
        self.recount = torch.zeros((n_bootstrap, len(SCORES)), dtype=torch.float64)

    def add(
        self,
        rows: Int[Tensor, "batch"],
        values: Float[Tensor, "batch score unit"],
        chance: Float[Tensor, "batch score"],
        defined: Bool[Tensor, "batch score"],
    ) -> None:
        """Add the scores of some rows; an undefined score is 0 and does not count."""
        values, known = values.double().cpu(), defined.double().cpu()
        self.total += values.sum(0)
        self.chance += chance.double().cpu().sum(0)
        self.count += known.sum(0)
        drawn = poisson_weights(rows.tolist(), len(self.resampled), self.seed)
        weights = torch.from_numpy(drawn).double()
        self.resampled += einsum(weights, values, "row draw, row score unit -> draw score unit")
        self.recount += einsum(weights, known, "row draw, row score -> draw score")

    def means(self) -> Float[Tensor, "score unit"]:
        """Mean of each score over the rows that have it; NaN where none has."""
        return self.total / self.count[:, None]

    def interval(self) -> Float[Tensor, "end score unit"]:
        """The ends of the 95% interval of the means; NaN without replicates."""
        if not len(self.resampled):
            return torch.full((2, *self.total.shape), float("nan"), dtype=torch.float64)
        draws = self.resampled / self.recount[:, :, None]
        ends = torch.tensor([0.025, 0.975], dtype=draws.dtype)
        return torch.nanquantile(draws, ends, dim=0)


def _stream(model: Model, rows: WordBatches, rule: WordRule, sums: _Sums, progress: bool) -> _Sums:
    """Add the scores of all rows, one batch at a time."""
    check_weights(model)
    space, causal = UnitSpace.of(model), not is_encoder(model)
    masses = "row head query key, score row query key -> row score head"
    for batch in tqdm(rows, desc="patterns", disable=not progress, leave=False):
        share, reach = _shares(batch.words, _identities(batch, rule), causal, model.cfg.dtype)
        values = torch.zeros(len(batch), len(SCORES), len(space.heads), dtype=torch.float64)

        def see(layer: int, pattern: Tensor, share: Tensor = share, to: Tensor = values) -> None:
            to[:, :, space.head_slice(layer)] = einsum(pattern, share, masses).double().cpu()

        visit(model, batch, see)
        uniform = reach / reach.sum(-1, keepdim=True).clamp(min=1).to(share)
        chance = einsum(share, uniform, "score row query key, row query key -> row score")
        defined = rearrange(share.sum((-1, -2)) > 0, "score row -> row score")
        sums.add(batch.rows, values, chance, defined)
    return sums


def _identities(batch: WordBatch, rule: WordRule) -> Int[Tensor, "batch pos"]:
    """A number for the word of each token, equal for equal words of a row; -1 for none.

    In swapped batches the k-th word of the second sentence counts as the k-th word of the row's own
    second sentence.
    """
    known: dict[str, int] = {}
    table = torch.full((len(batch), 1 + max(len(row.words) for row in batch.words.rows)), NONE)
    for number, row in enumerate(batch.words.rows):
        words = list(row.words)
        if batch.own is not None:
            n_foreign = len(row.words_of(1))
            words = [*row.words_of(0), *batch.own[number].words_of(1)[:n_foreign]]
        for index, form in enumerate(map(rule, words)):
            if form is not None:
                table[number, index] = known.setdefault(form, len(known))
    # Tokens without a word are -1: they read the last column, which stays -1.
    word = batch.words.word
    return table.to(word.device).gather(1, word % table.shape[1])


def _shares(
    words: Words, identity: Int[Tensor, "batch pos"], causal: bool, dtype: torch.dtype
) -> tuple[Float[Tensor, "score batch query key"], Bool[Tensor, "batch query key"]]:
    """How much each cell of a pattern counts towards each score of a row, and what is reachable."""
    reach = words.mask[:, :, None] & words.mask[:, None, :]
    if causal:
        reach = reach.tril()
    free = (words.word != NONE) & (reach.sum(-1) > 1)
    targets = _targets(words, identity) & reach & free[:, :, None]
    counted = targets.any(-1)
    # A word's pieces share its weight: the counted ones are numbered by word, the rest last.
    width = words.word.shape[1] + 1
    at = (words.word % width).expand(counted.shape)
    pieces = counted.new_zeros((*counted.shape[:2], width), dtype=torch.float64)
    pieces = pieces.scatter_add(2, at, counted.double()).gather(2, at)
    weight = counted / pieces.clamp(min=1)
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=1)
    return targets * weight[..., None].to(dtype), reach


def _targets(
    words: Words, identity: Int[Tensor, "batch pos"]
) -> Bool[Tensor, "score batch query key"]:
    """Where the attention of each query goes in each score, reachable or not."""

    query, key = np.s_[:, :, None], np.s_[:, None, :]
    sentence, word = words.sentence, words.word
    same = (identity[query] == identity[key]) & (identity[query] != NONE)
    across = same & (sentence[query] != sentence[key])
    position = torch.arange(word.shape[1], device=word.device)[None]
    step = position[key] - position[query]
    first = position == words.mask.long().argmax(1, keepdim=True)
    targets = {
        "overlap": across,
        "overlap_to_hypothesis": across & (sentence == 0)[query],
        "overlap_to_premise": across & (sentence == 1)[query],
        "previous": step == -1,
        "next": step == 1,
        "separator": words.separator[key],
        "first": first[key],
        "self": step == 0,
        "repeat": same & ~across & (word[query] != word[key]),
    }
    return torch.stack([targets[name].expand_as(across) for name in SCORES])


def _reach(score: str, rows: WordBatches, causal: bool, n: int) -> str:
    """What a score covers; beginning with "none" where it is not defined, and why."""
    if score in CROSS and rows.n_texts == 1:
        return "none: the task has one sentence"
    if causal and score in ("overlap_to_hypothesis", "next"):
        return "none: hidden by the causal mask"
    if n == 0:
        return "none: no row has such a token"
    if not causal:
        return "all"
    return "from the hypothesis to the premise only" if score in CROSS else "earlier tokens only"


def _table(
    model: Model, rows: WordBatches, sums: _Sums, permuted: Float[Tensor, "score unit"]
) -> pd.DataFrame:
    causal, units = not is_encoder(model), UnitSpace.of(model).heads
    low, high = sums.interval()
    by_head = {"value": sums.means(), "low": low, "high": high, "permuted": permuted}
    heads = pd.DataFrame(
        [(str(unit), unit.layer, unit.head) for unit in units], columns=["unit", "layer", "head"]
    )
    n = sums.count.long().tolist()
    reach = [_reach(score, rows, causal, count) for score, count in zip(SCORES, n, strict=True)]
    by_score = pd.DataFrame(
        {"score": SCORES, "chance": (sums.chance / sums.count).numpy(), "n": n, "reach": reach}
    )
    table = by_score.merge(heads, how="cross")
    for name, values in by_head.items():
        table[name] = values.flatten().numpy()
    roles = {unit: role_of(head) for unit, head in table.groupby("unit", sort=False)}
    table["role"] = table["unit"].map(roles)
    order = ["value", "low", "high", "chance", "permuted", "n", "reach", "role"]
    return table.reindex(columns=["unit", "layer", "head", "score", *order])
