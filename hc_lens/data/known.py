"""The tasks that `Task.named` knows: where their rows are, and what their columns are called.

Public copies of one task differ in column names and write labels as names or as integers. The
table below holds the names in use and the order of the integers, as the Hub documents them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hc_lens.data.rows import Layout
from hc_lens.errors import HcLensError

_IDS = ("pairID", "id", "idx", "index")


@dataclass(frozen=True)
class Known:
    """One named task: its labels, its columns and its source on the Hub."""

    labels: tuple[str, ...]
    """Label names, in the order of the integers in the task's files."""
    layout: Layout
    """What its columns are called in the copies in use."""
    repo: str | None
    """Dataset id on the Hub; None if the task is not published there."""
    config: str | None = None
    """Configuration of the Hub dataset."""
    revision: str | None = None
    """Revision of the Hub dataset; None for its main branch."""
    remedy: str = "pass path= with a file or folder of its rows"
    """What to do when the Hub cannot give the rows."""


def _inference(case: tuple[tuple[str, ...], ...] = ()) -> Layout:
    texts = (("premise", "hypothesis"), ("sentence1", "sentence2"))
    return Layout(texts[0], texts, ("gold_label", "label"), case, _IDS)


def _questions(byte_literals: bool = False) -> Layout:
    texts = (("question1", "question2"), ("sentence1", "sentence2"))
    return Layout(texts[0], texts, ("is_duplicate", "label"), (), _IDS, byte_literals)


_NLI = ("entailment", "neutral", "contradiction")
_DUPLICATE = ("not_duplicate", "duplicate")

KNOWN = {
    "mnli": Known(_NLI, _inference(), "nyu-mll/glue", "mnli"),
    "snli": Known(_NLI, _inference(), "stanfordnlp/snli"),
    "qqp": Known(_DUPLICATE, _questions(), "nyu-mll/glue", "qqp"),
    "hans": Known(
        ("entailment", "non-entailment"),
        _inference(case=(("heuristic", "subcase"), ("case",))),
        "jhu-cogsci/hans",
        # The main branch holds a loading script, which datasets >= 4 does not run.
        revision="refs/convert/parquet",
        remedy="pass path= with heuristics_evaluation_set.txt of github.com/tommccoy1/hans",
    ),
    "paws-qqp": Known(
        _DUPLICATE,
        _questions(byte_literals=True),
        None,
        remedy="make the files with github.com/google-research-datasets/paws (the licence of QQP "
        "does not let them be published) and pass path= with the file or folder",
    ),
}


def known(name: str) -> Known:
    """The named task; an unknown name is an HcLensError that lists the known ones."""
    if name not in KNOWN:
        raise HcLensError(
            f"expected one of the named tasks {', '.join(KNOWN)}, got {name!r}; read other rows "
            "with Task.from_files, Task.from_hub or Task.from_rows"
        )
    return KNOWN[name]
