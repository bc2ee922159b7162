"""The whole study of a fine-tuned classifier, from its checkpoint to one page.

1. `run` runs the steps of the paper in one folder (`analyses.study.steps`); a step whose inputs and
   settings have not changed is not run again. The last step writes ``report.html``, ``facts.json``
   with the numbers of its text, and ``study.toml`` with the settings; all three are copied to the
   top of the folder.
2. `report` writes the page of a finished study again, `summary` gives its sentences.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from analyses.study.config import StudyConfig, demo
from analyses.study.results import FACTS, KIND, PAGE, PUBLISHED, REPORT, SETTINGS, Results
from hc_lens.errors import HcLensError
from hc_lens.records import Records, digest, json_bytes
from hc_lens.settings import make
from hc_lens.settings import read_settings as read_file

if TYPE_CHECKING:
    from hc_lens.show.report import Sentence

__all__ = ["StudyConfig", "demo", "read_settings", "report", "run", "summary"]


def run(
    config: StudyConfig,
    out: str | Path,
    *,
    command: str = "analyses.study.run(...)",
    workers: int | None = None,
    progress: bool = True,
    say: Callable[[str], None] = lambda line: None,
    force: bool = False,
) -> Path:
    """Run a study, or what is left of it, and return the path of its report.

    Args:
        config: which model, rows and sizes.
        out: the run folder; that of an earlier call is continued.
        command: how the study was started, for the report.
        workers: processes that prune at the same time; by default one per core.
        progress: show progress bars.
        say: gets a line at the start of each step that is run.
        force: run every step again, also in the folder of another model.
    """
    from analyses.study.steps import Study, list_steps, run_steps

    study = Study(config, command, workers, progress)
    records = Records(out, KIND, {"model": study.fingerprint}, owner=True, force=force)
    if force:
        records.remove("steps")
    page = Path(out) / PAGE
    if page.exists() and digest(page.read_bytes()) not in _published(records):
        raise HcLensError(
            f"expected {page} to be the report that this study wrote, got another file; move it "
            "away and run the same command again"
        )
    made = run_steps(records, list_steps(study), study, say)[REPORT]
    content = (made / PAGE).read_bytes()
    # Remembered first: a page that is there but unknown would count as somebody else's.
    known = _published(records)
    if digest(content) not in known:
        records.write_file(PUBLISHED, json_bytes([*known, digest(content)]))
    for name in (SETTINGS, FACTS, PAGE):
        _copy(made / name, records)
    return page


def report(folder: str | Path, path: str | Path, *, command: str = "", force: bool = False) -> Path:
    """Write the report of a finished run folder again, to a path of your choice."""
    from analyses.study.findings import collect
    from analyses.study.page import build

    results, config = _finished(folder)
    path = Path(path)
    if path.exists() and not force:
        raise HcLensError(
            f"expected a new file for the report, got {path}, which exists; give another path, or "
            "pass --force to write over it"
        )
    return build(results, collect(results, config), config, command).save(path)


def summary(folder: str | Path) -> list[Sentence]:
    """What the numbers of a finished run folder say, in the order of the study."""
    from analyses.study.findings import collect, say

    return say(collect(*_finished(folder)))


def read_settings(path: str | Path) -> StudyConfig:
    """The settings of a study, from its ``study.toml``."""
    return make(StudyConfig, read_file(Path(path)), str(path))


def _finished(folder: str | Path) -> tuple[Results, StudyConfig]:
    """The results and the settings of a finished run folder."""
    report = Records.existing(folder, KIND).find(f"steps/{REPORT}")
    if report is None:
        raise HcLensError(
            f"expected the run folder of a finished study, got {folder}; finish it with the "
            "command that began it"
        )
    steps = {step.name: step for step in report.parent.iterdir()}
    return Results(steps), read_settings(report / SETTINGS)


def _published(records: Records) -> list[str]:
    path = records.folder(PUBLISHED)
    return json.loads(path.read_bytes()) if path.exists() else []


def _copy(path: Path, records: Records) -> None:
    """Copy a file to the top of the run folder, unless it is there already."""
    target, content = records.folder(path.name), path.read_bytes()
    if not target.exists() or target.read_bytes() != content:
        records.write_file(path.name, content)
