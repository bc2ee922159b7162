"""Labels are matched by name, never by position.

1. Fold every name: lower case, without the ``-``, ``_`` and spaces between words, so that
   ``NOT_ENTAILMENT`` is ``notentailment``; then replace the few synonyms in public use.
2. A value in a file is a name, or an integer that counts into the task's own label names.
3. A model label maps to the task label of the same folded name. Against a two-way inference task
   (entailment, non-entailment) a model's neutral and contradiction both map to non-entailment
   (McCoy et al. 2019, section 4).
4. Every model label must map to a task label, and every task label must be mapped to.
5. A checkpoint without names of its own (``LABEL_0``, ...) gets them from the user. Names that the
   checkpoint has are never changed: others, or the same in another order, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hc_lens.errors import HcLensError

NO_LABEL = -1
"""Label id of a row that has no gold label."""

_SYNONYMS = {
    # RTE and QNLI write "not_entailment" for what HANS calls "non-entailment".
    "notentailment": "nonentailment",
    # PAWS says "paraphrase" for what QQP, whose questions it rewrites, calls "duplicate".
    "paraphrase": "duplicate",
    "notparaphrase": "notduplicate",
}
_TWO_WAY = {"entailment", "nonentailment"}
_COLLAPSED = {"neutral": "nonentailment", "contradiction": "nonentailment"}
# SNLI and MNLI write "-" where the annotators did not agree, the Hub writes -1 for both.
_NO_GOLD = {"", "-", "-1"}
_PLACEHOLDER = re.compile(r"label\d+|\d+")


def fold(name: str) -> str:
    """The form in which two label names are compared."""
    folded = re.sub(r"(?<=[a-z0-9])[-_\s]+(?=[a-z0-9])", "", name.strip().lower())
    return _SYNONYMS.get(folded, folded)


def check_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Label names as a tuple; names that fold to the same form are an HcLensError."""
    names = not isinstance(labels, str) and all(isinstance(label, str) for label in labels)
    if not names or len({fold(label) for label in labels}) < len(labels):
        raise HcLensError(
            "expected a list of label names, in id order, that differ by more than case and "
            f"separators, got {labels!r}; name them for instance 'no' and 'yes'"
        )
    return tuple(labels)


def is_placeholder(name: str) -> bool:
    """Whether a model's label says nothing: ``LABEL_0`` or a number."""
    return _PLACEHOLDER.fullmatch(fold(name)) is not None


def name_labels(own: Mapping[int, str], given: Sequence[str]) -> dict[int, str]:
    """A model's labels by id, with a name that is given for each of its placeholders."""
    names = check_names(given)
    if len(names) != len(own):
        raise HcLensError(
            f"expected one name for each of the model's {len(own)} labels, got {list(names)}; "
            "name them in the order of the model's logits"
        )
    named = dict(zip(sorted(own), names, strict=True))
    real = {index: name for index, name in own.items() if not is_placeholder(name)}
    if any(fold(named[index]) != fold(name) for index, name in real.items()):
        raise HcLensError(
            f"expected names that agree with the checkpoint's own, {[*own.values()]}, got "
            f"{list(names)}; leave them out, as the checkpoint says what its logits mean"
        )
    return {**named, **real}


def is_missing(value: Any) -> bool:
    """Whether a label as written in a file says that the row has none."""
    return _text(value) in _NO_GOLD


def _text(value: Any) -> str:
    if value is None or value != value:  # NaN is how pandas writes a missing value
        return ""
    # pandas turns whole numbers into floats beside a missing value; a bool is 0 or 1.
    whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return str(int(value) if whole else value).strip()


def label_id(value: Any, labels: Sequence[str]) -> int:
    """Index in `labels` of a label as written in a file; `NO_LABEL` if the row has none."""
    text = _text(value)
    names = [fold(label) for label in labels]
    if fold(text) in names:
        return names.index(fold(text))
    if text in _NO_GOLD:
        return NO_LABEL
    if text.isdecimal() and int(text) < len(labels):
        return int(text)
    raise HcLensError(
        f"expected a label among {list(labels)} (or its index), got {value!r}; "
        "pass labels=[...] with the names that the rows use, in id order"
    )


def align(model_labels: Mapping[int, str], task_labels: Sequence[str]) -> list[int]:
    """Task label id of each model label id, by name."""
    given = [model_labels[index] for index in sorted(model_labels)]
    targets = {fold(label): index for index, label in enumerate(task_labels)}
    collapsed = _COLLAPSED if set(targets) == _TWO_WAY else {}
    folded = [fold(name) for name in given]
    mapped = [targets.get(collapsed.get(name, name), NO_LABEL) for name in folded]
    if given and NO_LABEL not in mapped and set(mapped) == set(targets.values()):
        return mapped
    if all(map(is_placeholder, given)):
        got = f"the placeholders {given}" if given else "a model without label names"
    else:
        strange = [name for name, index in zip(given, mapped, strict=True) if index == NO_LABEL]
        absent = [label for index, label in enumerate(task_labels) if index not in mapped]
        got = f"{given}: the task has no {strange}, the model has no {absent}"
    raise HcLensError(
        f"expected model labels that name the task's labels {list(task_labels)}, got {got}; pick a "
        "task the model was trained for, or say what its logits mean, in order, with "
        "hc.load(..., labels=[...]), or model_labels of a sweep"
    )
