"""The tasks that `Task.named` knows: where their rows are, and what their columns are called."""

from __future__ import annotations

from dataclasses import dataclass

from hc_lens.errors import HcLensError

_PAIRS = (("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"))
_LABELS = ("gold_label", "label", "is_duplicate")
_IDS = ("pairID", "id", "idx", "index")
_NLI = ("entailment", "neutral", "contradiction")
_DUPLICATE = ("not_duplicate", "duplicate")


@dataclass(frozen=True)
class Known:
    """One named task: its labels, its source on the Hub and the column names of its copies."""

    labels: tuple[str, ...]
    """Label names, in the order of the integers in the task's files."""
    columns: tuple[str, str]
    """Names that the two texts get."""
    repo: str | None
    """Dataset id on the Hub; None if the task may not be published there."""
    config: str | None = None
    """Configuration of the Hub dataset."""
    revision: str | None = None
    """Revision of the Hub dataset; None for its main branch."""
    pairs: tuple[tuple[str, str], ...] = _PAIRS
    """Names that the two texts have in the copies in use, the first that is there wins."""
    label: tuple[str, ...] = _LABELS
    """Names that the label has in the copies in use."""
    id: tuple[str, ...] = _IDS
    """Names that the row's own id has in the copies in use."""
    case: tuple[str, ...] = ()
    """Columns whose values, joined by an underscore, name a row's case."""
    help: str = "pass path= with a file or folder of its rows"
    """What to do when the Hub cannot give the rows."""


KNOWN = {
    "mnli": Known(_NLI, ("premise", "hypothesis"), "nyu-mll/glue", "mnli"),
    "snli": Known(_NLI, ("premise", "hypothesis"), "stanfordnlp/snli"),
    "qqp": Known(_DUPLICATE, ("question1", "question2"), "nyu-mll/glue", "qqp"),
    "hans": Known(
        ("entailment", "non-entailment"),
        ("premise", "hypothesis"),
        "jhu-cogsci/hans",
        # The main branch holds a loading script, which datasets >= 4 does not run.
        revision="refs/convert/parquet",
        case=("heuristic", "subcase"),
        help="pass path= with heuristics_evaluation_set.txt of github.com/tommccoy1/hans",
    ),
    "paws-qqp": Known(
        _DUPLICATE,
        ("sentence1", "sentence2"),
        None,
        help="make the files with github.com/google-research-datasets/paws (the licence of QQP "
        "does not let them be published) and pass path= with the file or folder",
    ),
}


def known(name: str) -> Known:
    """The named task; an unknown name is an HcLensError that lists the known ones."""
    if name not in KNOWN:
        raise HcLensError(
            f"expected a task named {', '.join(KNOWN)}, got {name!r}; read other rows with "
            "Task.from_files, Task.from_hub or Task.from_rows"
        )
    return KNOWN[name]
