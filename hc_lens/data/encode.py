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

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, config

from hc_lens.errors import HcLensError
from hc_lens.models.inputs import is_encoder, tokenizer_of

# Raise it when the columns of a cached table change, so that older files are not read.
_FORMAT = 1


def digest(parts: Iterable[Any]) -> str:
    """A content hash of strings and numbers, stable across processes."""
    sha = hashlib.sha256()
    for part in parts:
        data = str(part).encode("utf-8", "surrogatepass")
        # The length keeps ("ab", "c") apart from ("a", "bc").
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()[:32]


@dataclass(frozen=True)
class Encoder:
    """How the texts of a row become token ids for one model."""

    tokenizer: Any
    """The model's tokenizer."""
    limit: int
    """Longest row in tokens."""
    truncate: bool
    """Whether a longer row is cut; otherwise it is an error."""
    separator: str | None
    """Text between the two texts of a pair; None leaves the pair to the tokenizer."""

    @classmethod
    def of(cls, model: Any, n_texts: int, max_length: int | None, separator: str | None) -> Encoder:
        """The encoder for a model; settings the model cannot take are an HcLensError."""
        tokenizer = tokenizer_of(model)
        if separator is not None and (n_texts == 1 or is_encoder(model)):
            raise HcLensError(
                f"expected separator= only for pairs on a decoder, got {separator!r} for "
                f"{'single texts' if n_texts == 1 else 'an encoder, which has its own'}; "
                "leave separator= out"
            )
        context = int(model.cfg.n_ctx)
        if max_length is None:
            return cls(tokenizer, min(context, tokenizer.model_max_length), False, separator)
        special = tokenizer.num_special_tokens_to_add(pair=n_texts == 2 and separator is None)
        if not special + n_texts <= max_length <= context:
            raise HcLensError(
                f"expected max_length from {special + n_texts} (special tokens and one token of "
                f"each text) to {context} (the model's context), got {max_length}; "
                "choose one in between"
            )
        return cls(tokenizer, max_length, True, separator)

    def __call__(self, *texts: list[str]) -> dict[str, list]:
        """Token ids, their number, and whether the row was cut, for each row of texts."""
        if self.separator is not None:
            texts = ([self.separator.join(pair) for pair in zip(*texts, strict=True)],)
        # Not `truncation=True` at once: the tokenizer does not tell which rows it cut.
        whole = self.tokenizer(*texts, truncation=False, verbose=False)
        columns = {key: whole[key] for key in ("input_ids", "token_type_ids") if key in whole}
        long = [i for i, ids in enumerate(columns["input_ids"]) if len(ids) > self.limit]
        if long and self.truncate:
            chosen = [[column[i] for i in long] for column in texts]
            cut = self.tokenizer(*chosen, truncation=True, max_length=self.limit)
            for key, rows in columns.items():
                for place, row in zip(long, cut[key], strict=True):
                    rows[place] = row
        cut_rows = set(long)
        columns["long"] = [place in cut_rows for place in range(len(columns["input_ids"]))]
        columns["length"] = [len(ids) for ids in columns["input_ids"]]
        return columns

    def key(self, rows: Dataset, columns: tuple[str, ...]) -> str:
        """A hash of the texts and of everything that decides their token ids."""
        settings = [_FORMAT, len(columns), self.limit, self.truncate, repr(self.separator)]
        texts = (text for column in columns for text in rows[column][:])
        return digest([*_identity(self.tokenizer), *settings, *texts])

    def table(self, rows: Dataset, columns: tuple[str, ...], key: str, where: str) -> Dataset:
        """The token ids of all rows, memory-mapped from the cache, where `key` names them."""
        folder = Path(config.HF_DATASETS_CACHE) / "hc_lens"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            table = rows.select_columns(list(columns)).map(
                self,
                batched=True,
                input_columns=list(columns),
                remove_columns=list(columns),
                cache_file_name=str(folder / f"{key}.arrow"),
                new_fingerprint=key,
                desc=f"tokenising {where}",
            )
        except OSError as error:
            raise HcLensError(
                f"expected to write token ids to {str(folder)!r}, got {error}; "
                "name a folder that can be written with the variable HF_DATASETS_CACHE"
            ) from error
        self._check(table, where)
        return table

    def _check(self, table: Dataset, where: str) -> None:
        lengths = table["length"][:]
        n_long = sum(length > self.limit for length in lengths)
        if n_long:
            raise HcLensError(
                f"expected rows of at most {self.limit} tokens (the context of the model and its "
                f"tokenizer), got {n_long} longer rows in {where}, the longest of {max(lengths)}; "
                f"cut them with max_length={self.limit} or less"
            )
        if min(lengths) == 0:
            raise HcLensError(
                f"expected at least one token in each row, got {lengths.count(0)} rows without "
                f"text in {where}; remove the empty rows"
            )


def _identity(tokenizer: Any) -> list[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts = json.dumps([tokenizer.get_vocab(), tokenizer.special_tokens_map], sort_keys=True)
        return [type(tokenizer).__name__, parts]
    state = json.loads(backend.to_str())
    # Every call rewrites these two; the ids depend on our own settings only.
    for key in ("truncation", "padding"):
        state.pop(key, None)
    side = tokenizer.truncation_side
    return [type(tokenizer).__name__, side, json.dumps(state, sort_keys=True)]
