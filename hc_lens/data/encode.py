"""Texts into token ids, once.

1. Tokenise with the model's own tokenizer: a pair goes in as ``tokenizer(text_a, text_b)``. With
   `separator` the two are joined by it and go in as one text.
2. A row longer than the model's context is an error, unless `max_length` was given: then it is
   truncated (the longer text first) and counted.
3. The ids are written to an arrow file under the datasets cache and memory-mapped from there. The
   file is named by a hash of texts, tokenizer and settings, so the same rows are never tokenised
   twice and a change of any of them is never missed.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, config

from hc_lens.errors import HcLensError
from hc_lens.models.inputs import is_encoder, tokenizer_of
from hc_lens.protocols import Model
from hc_lens.records import digest

_FORMAT = 1
"""Format of a cached table; raised when its columns change, so that older files are not read."""


def tokenise(
    model: Model, texts: Dataset, where: str, max_length: int | None, separator: str | None
) -> tuple[Dataset, str]:
    """The token ids of rows of one or two texts, memory-mapped, and their name in the cache."""
    tokenizer, columns = tokenizer_of(model), texts.column_names
    _check_settings(model, len(columns), max_length, separator)
    limit = max_length or min(model.cfg.n_ctx, tokenizer.model_max_length)
    settings = [_FORMAT, limit, max_length is not None, separator]
    key = digest(_identity(tokenizer), settings, *(texts[column][:] for column in columns))
    folder = Path(config.HF_DATASETS_CACHE) / "hc_lens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table = texts.map(
            partial(_encode, tokenizer, separator, limit, max_length is not None),
            batched=True,
            input_columns=columns,
            remove_columns=columns,
            cache_file_name=str(folder / f"{key}.arrow"),
            new_fingerprint=key,
            desc=f"tokenising {where}",
        )
    except OSError as error:
        raise HcLensError(
            f"expected to write token ids to {str(folder)!r}, got {error}; "
            "name a folder that can be written with the variable HF_DATASETS_CACHE"
        ) from error
    _check_lengths(table["length"][:], limit, where)
    return table, key


def _encode(
    tokenizer: Any, separator: str | None, limit: int, truncate: bool, *texts: list[str]
) -> dict[str, list[Any]]:
    """Token ids, their number, and whether the row is too long, for each row of texts."""
    if separator is not None:
        texts = ([separator.join(pair) for pair in zip(*texts, strict=True)],)
    # Not `truncation=True` at once, as the tokenizer does not say which rows it cut.
    whole = tokenizer(*texts, truncation=False, verbose=False)
    columns = {key: whole[key] for key in ("input_ids", "token_type_ids") if key in whole}
    too_long = [len(ids) > limit for ids in columns["input_ids"]]
    if truncate and any(too_long):
        at = [index for index, long in enumerate(too_long) if long]
        chosen = [[column[index] for index in at] for column in texts]
        cut = tokenizer(*chosen, truncation=True, max_length=limit)
        for key, rows in columns.items():
            for index, row in zip(at, cut[key], strict=True):
                rows[index] = row
    return {**columns, "long": too_long, "length": [len(ids) for ids in columns["input_ids"]]}


def _check_settings(
    model: Model, n_texts: int, max_length: int | None, separator: str | None
) -> None:
    if separator is not None and (n_texts == 1 or is_encoder(model)):
        raise HcLensError(
            f"expected separator= only for pairs on a decoder, got {separator!r} for "
            f"{'single texts' if n_texts == 1 else 'an encoder, which has its own'}; "
            "leave separator= out"
        )
    pair = n_texts == 2 and separator is None
    least = tokenizer_of(model).num_special_tokens_to_add(pair=pair) + n_texts
    if max_length is not None and not least <= max_length <= model.cfg.n_ctx:
        raise HcLensError(
            f"expected max_length from {least} (special tokens and one token of each text) to "
            f"{model.cfg.n_ctx} (the model's context), got {max_length}; choose one in between"
        )


def _check_lengths(lengths: list[int], limit: int, where: str) -> None:
    n_long = sum(length > limit for length in lengths)
    if n_long:
        raise HcLensError(
            f"expected rows of at most {limit} tokens (the context of the model and its "
            f"tokenizer), got {n_long} longer rows in {where}, the longest of {max(lengths)}; "
            f"cut them with max_length={limit} or less"
        )
    if min(lengths) == 0:
        raise HcLensError(
            f"expected at least one token in each row, got {lengths.count(0)} rows without "
            f"text in {where}; remove the empty rows"
        )


def _identity(tokenizer: Any) -> list[Any]:
    """Everything in a tokenizer that decides the token ids, as plain values."""
    kind, backend = type(tokenizer).__name__, getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        return [kind, tokenizer.get_vocab(), special]
    state = json.loads(backend.to_str())
    # Every call rewrites these two; the ids depend on our own settings only.
    for key in ("truncation", "padding"):
        state.pop(key, None)
    return [kind, tokenizer.truncation_side, state]
