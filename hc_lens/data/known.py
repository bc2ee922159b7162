"""Names of prompts, and the tasks that `Task.named` knows: where their rows are, what columns have.

Public copies of one task differ in column names and write labels as names or as integers. The
table below holds the names in use and the order of the integers, as the Hub documents them. Nothing
here imports the libraries that read rows, so that a command line can list the names at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FRIENDLY, ADVERSARIAL = SIDES = ("friendly", "adversarial")
"""The side of a case: the heuristic is right on all its rows, or on none."""
PROMPTS = ("ioi", "agreement", "agreement-ood", "induction")
"""The prompts that are made for a language model (`hc_lens.data.prompts.Prompts.named`)."""
WITH_ADVERSARIAL = {"agreement": "agreement-ood", "organism": "organism-ood"}
"""Rows on which a heuristic is right -> those that also have cases on which it is wrong."""


@dataclass(frozen=True)
class Layout:
    """Which columns of a source table hold a task's texts, label and case."""

    texts: tuple[tuple[str, ...], ...]
    """Names that the texts may have; the first that are there win, the first of all stay."""
    label: tuple[str, ...] = ()
    """Names that the label may have; empty for rows without labels."""
    case: tuple[tuple[str, ...], ...] = ()
    """Columns that, joined by an underscore, name the case; the first that are there win."""
    drops_blank: bool = False
    """Whether rows with an empty text are left out, as of QQP, which has a few; else an error."""
    byte_literals: bool = False
    """Whether a text may be a Python byte literal, as the script that makes PAWS-QQP writes it."""


@dataclass(frozen=True)
class Known:
    """One named task: its labels, its columns and its source on the Hub."""

    labels: tuple[str, ...]
    """Label names, in the order of the integers in the task's files."""
    layout: Layout
    """What its columns are called in the copies in use."""
    hub: tuple[str, str | None, str | None] | None
    """Its id, configuration and revision on the Hub; None if the task is not published there."""
    heuristic: str | None = None
    """The label that the heuristic answers which the task was made to expose."""
    remedy: str = "pass path= with a file or folder of its rows"
    """What to do when the Hub cannot give the rows."""


_NLI = ("entailment", "neutral", "contradiction")
_INFERENCE = Layout(
    texts=(("premise", "hypothesis"), ("sentence1", "sentence2")), label=("gold_label", "label")
)
_DUPLICATE = ("not_duplicate", "duplicate")
_QUESTIONS = Layout(
    texts=(("question1", "question2"), ("sentence1", "sentence2")),
    label=("is_duplicate", "label"),
    drops_blank=True,
)

KNOWN = {
    "mnli": Known(_NLI, _INFERENCE, ("nyu-mll/glue", "mnli", None)),
    "snli": Known(_NLI, _INFERENCE, ("stanfordnlp/snli", None, None)),
    "qqp": Known(_DUPLICATE, _QUESTIONS, ("nyu-mll/glue", "qqp", None)),
    "hans": Known(
        ("entailment", "non-entailment"),
        replace(_INFERENCE, case=(("heuristic", "subcase"), ("case",))),
        # The main branch holds a loading script, which datasets >= 4 does not run.
        ("jhu-cogsci/hans", None, "refs/convert/parquet"),
        heuristic="entailment",
        remedy="pass path= with heuristics_evaluation_set.txt of github.com/tommccoy1/hans",
    ),
    "paws-qqp": Known(
        _DUPLICATE,
        replace(_QUESTIONS, byte_literals=True),
        None,
        heuristic="duplicate",
        remedy="make the files with github.com/google-research-datasets/paws (the licence of QQP "
        "does not let them be published) and pass path= with the file or folder",
    ),
}
