"""Repeated random tokens (Elhage et al. 2021; Olsson et al. 2022), for any vocabulary.

1. Draw a sequence of different tokens of the vocabulary, no special ones, with a BOS before it if
   the model's prompts have one.
2. Repeat it and cut the second copy at a random place. The right answer is the token that followed
   in the first copy, the wrong one another token of that copy.
3. The case is the distance from the last token back to where it stood before, which is the length
   of the sequence: ``distance_8``. Lengths are used that fit the model's context and vocabulary.
4. The counterfactual has other tokens in the place of the first copy, so that nothing is repeated.
"""

from __future__ import annotations

import random

from hc_lens.data.generated.drawing import Made, distinct
from hc_lens.errors import HcLensError
from hc_lens.models.inputs import is_encoder
from hc_lens.protocols import Model

LENGTHS = (4, 8, 16, 32)
"""Lengths of the repeated sequence."""


def rows(model: Model, split: str, n: int, seed: int) -> list[Made]:
    """`n` rows of a split, of each length as many as of the others."""
    first, tokens = _vocabulary(model)
    fits = [
        length
        for length in LENGTHS
        if len(first) + 2 * length - 1 <= model.cfg.n_ctx and 2 * length <= len(tokens)
    ]
    if is_encoder(model) or not fits:
        kind = "a masked language model" if is_encoder(model) else "a causal one"
        raise HcLensError(
            f"expected a causal model with a context and a vocabulary for at least "
            f"{2 * LENGTHS[0]} tokens, got {kind} with {model.cfg.n_ctx} and {len(tokens)}; "
            "choose other prompts"
        )
    lengths = {f"distance_{length}": length for length in fits}

    def make(drawn: random.Random, case: str) -> Made:
        length = lengths[case]
        both = drawn.sample(tokens, 2 * length)
        copy, others = both[:length], both[length:]
        cut = drawn.randrange(1, length)
        return {
            "prompt": [*first, *copy, *copy[:cut]],
            "right": copy[cut],
            "wrong": drawn.choice([token for token in copy if token != copy[cut]]),
            "counterfactual": [*first, *others, *copy[:cut]],
            "case": case,
            "side": "",
        }

    return distinct(make, list(lengths), "induction", split, n, seed)


def _vocabulary(model: Model) -> tuple[list[int], range | list[int]]:
    """The BOS that prompts of the model begin with, if any, and the tokens that are not special."""
    tokenizer = getattr(model, "tokenizer", None)
    size = min(model.cfg.d_vocab, model.cfg.d_vocab_out)
    if tokenizer is None:
        return [], range(size)
    bos = tokenizer.bos_token_id if model.cfg.default_prepend_bos else None
    special = {*tokenizer.all_special_ids}
    tokens = [token for token in range(min(size, len(tokenizer))) if token not in special]
    return [] if bos is None else [bos], tokens
