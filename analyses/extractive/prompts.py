"""Questions as tokens: the answer's first token, the reward, the rank, and aligned counterfactuals.

1. The first token of an option is the token that follows the prompt in ``prompt + " " + option``.
   Two options with one first token cannot be told apart: that is an error that lists them.
2. Reward: logit of the answer's first token minus the mean over the options' first tokens, at the
   last token of the prompt. Rank: how many options have a larger logit than the answer.
3. A counterfactual prompt is another prompt of the set with another answer. Its tokens are aligned
   by the common prefix and suffix; the middles are aligned at their right ends, and tokens to the
   left of a shorter middle all take its first token.
Questions of one length form a batch, so that no padding is ever needed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.errors import HcLensError, check_count
from hc_lens.protocols import LanguageModel


@dataclass(frozen=True)
class Question:
    """A prompt and the answer that should follow it."""

    prompt: str
    """Text up to the answer, without a space at its end."""
    answer: str
    """Text that follows; its first token is what counts."""


@dataclass(frozen=True)
class Encoded:
    """Questions of one length as token ids."""

    rows: Int[Tensor, "batch"]
    """Index of each question in the list it came from."""
    tokens: Int[Tensor, "batch pos"]
    """Token ids of the prompts."""
    answer: Int[Tensor, "batch"]
    """First token of the right answer."""
    options: Int[Tensor, "batch options"]
    """First token of every option, in the order of the options."""

    def split(self, max_rows: int) -> list[Encoded]:
        """The questions in pieces of at most `max_rows`."""
        columns = (column.split(max_rows) for column in vars(self).values())
        return [Encoded(*piece) for piece in zip(*columns, strict=True)]

    def reward(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch"]:
        """Logit of the answer minus the mean over the options."""
        right = logits.gather(1, self.answer[:, None]).squeeze(1)
        return right - logits.gather(1, self.options).mean(1)

    def rank(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch"]:
        """Number of options above the answer; a tie counts half."""
        right = logits.gather(1, self.answer[:, None])
        offered = logits.gather(1, self.options)
        ties = (offered == right).sum(1) - 1
        return (offered > right).sum(1) + 0.5 * ties


def token_ids(model: LanguageModel, text: str) -> list[int]:
    """Token ids of a text, with a BOS only where the model's configuration asks for one."""
    ids = model.to_tokens(text, truncate=False, move_to_device=False)[0].tolist()
    if len(ids) > model.cfg.n_ctx:
        raise HcLensError(
            f"expected at most {model.cfg.n_ctx} tokens, got {len(ids)} in {text!r}; shorten it"
        )
    return ids


def continuation(model: LanguageModel, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and those that the answer adds to it."""
    start, whole = token_ids(model, prompt), token_ids(model, f"{prompt} {answer}")
    if not start or whole[: len(start)] != start or len(whole) == len(start):
        raise HcLensError(
            f"expected the tokens of {prompt!r} to stay when {answer!r} follows, got {start} and "
            f"{whole}; end the prompt at a word, without a space"
        )
    return start, whole[len(start) :]


def encode(
    model: LanguageModel, questions: Sequence[Question], options: Sequence[str]
) -> list[Encoded]:
    """The questions as batches of one length each, shortest first."""
    options = list(dict.fromkeys(options))
    if not questions:
        raise HcLensError("expected at least one question, got none; check the file or the set")
    if len(options) < 2:
        raise HcLensError(
            f"expected at least 2 different options, got {options}; the reward of a single option "
            "is always 0, so name the alternatives"
        )
    if strange := sorted({question.answer for question in questions} - set(options)):
        raise HcLensError(
            f"expected every answer among the options, got {strange[:3]} which are not; "
            "add them to the options"
        )
    found = []
    for row, question in enumerate(questions):
        added = [continuation(model, question.prompt, option) for option in options]
        heads = [answer[0] for _, answer in added]
        _check_different(model, options, heads)
        found.append((added[0][0], row, heads[options.index(question.answer)], heads))
    return [Encoded(rows, tokens, *rest) for tokens, rows, *rest in by_length(model, found)]


def _check_different(model: LanguageModel, options: Sequence[str], heads: Sequence[int]) -> None:
    """Raise if two options have the same first token."""
    starting = defaultdict(list)
    for option, head in zip(options, heads, strict=True):
        starting[head].append(option)
    shared = [
        f"{', '.join(group)} all start with {model.tokenizer.decode([head])!r}"
        for head, group in starting.items()
        if len(group) > 1
    ]
    if shared:
        raise HcLensError(
            f"expected options with different first tokens, got {'; '.join(shared)}; "
            "replace all but one of each"
        )


def by_length(model: LanguageModel, rows: Iterable[tuple]) -> list[tuple[Tensor, ...]]:
    """Rows as one tensor a column, those whose first entry has one length together."""
    groups = defaultdict(list)
    for row in rows:
        groups[len(row[0])].append(row)
    columns = (zip(*groups[length], strict=True) for length in sorted(groups))
    device = model.cfg.device
    return [tuple(torch.tensor(each, device=device) for each in group) for group in columns]


def align(tokens: Sequence[int], other: Sequence[int]) -> list[int]:
    """For every position in `tokens`, the position in `other` that plays its part.

    Raises an HcLensError for equal sequences, for sequences with neither a common beginning nor a
    common end, and where `other` has nothing between the two.
    """
    prefix, suffix = common_ends([tokens, other])
    middle, other_middle = (len(row) - prefix - suffix for row in (tokens, other))
    equal = middle == other_middle == 0
    if equal or prefix + suffix == 0 or (middle > 0 and other_middle == 0):
        raise HcLensError(
            "expected two prompts that differ in a stretch between a common beginning and a common "
            f"end, got tokens {tokens} and {other}; use counterfactuals from the same template"
        )
    end = prefix + other_middle
    centre = [max(prefix, end - middle + i) for i in range(middle)]
    return [*range(prefix), *centre, *range(len(other) - suffix, len(other))]


def common_ends(rows: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many tokens all rows share at their beginning, and how many of the rest at their end."""
    shortest = min(map(len, rows))
    prefix = next((i for i in range(shortest) if len({row[i] for row in rows}) > 1), shortest)
    room = shortest - prefix
    suffix = next((i for i in range(room) if len({row[-1 - i] for row in rows}) > 1), room)
    return prefix, suffix


def counterfactuals(
    questions: Sequence[Question], count: int, seed: int
) -> list[tuple[Question, ...]]:
    """For each question `count` others with another prompt and another answer, drawn.

    Where the set is too small for `count`, every question gets as many as all can have.
    """
    check_count("n_counterfactuals", count)
    pools = []
    for asked in questions:
        unlike = [q for q in questions if q.prompt != asked.prompt and q.answer != asked.answer]
        if not unlike:
            raise HcLensError(
                f"expected another question with an answer other than {asked.answer!r} to serve "
                f"as counterfactual of {asked.prompt!r}, got none; add questions to the set"
            )
        pools.append(unlike)
    rng = random.Random(seed)
    count = min(count, *map(len, pools))
    return [tuple(rng.sample(pool, count)) for pool in pools]
