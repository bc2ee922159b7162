"""The whole study of a fine-tuned classifier, from its checkpoint to one page.

1. Run the steps of the paper in one folder (`analyses.study.steps`); a step whose inputs and
   settings have not changed is not run again.
2. Write ``report.html`` from the tables of the folder (`analyses.study.report`), ``facts.json``
   with the numbers of its text, and ``study.toml`` with the settings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from analyses.study.config import StudyConfig, demo
from analyses.study.folder import write_text
from hc_lens.cli.settings import read_toml, write_toml
from hc_lens.errors import HcLensError

__all__ = ["StudyConfig", "demo", "read_settings", "report", "run"]

REPORT = "report.html"
SETTINGS = "study.toml"
FACTS = "facts.json"


def run(
    config: StudyConfig,
    out: str | Path,
    *,
    command: str = "analyses.study.run(...)",
    workers: int | None = None,
    progress: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Run a study, or what is left of it, and return the path of its report.

    Args:
        config: which model, rows and sizes.
        out: the run folder; that of an earlier call goes on from there.
        command: how the study was started, for the report.
        workers: processes that prune at the same time; by default one a core.
        progress: show progress bars.
        say: gets a line at the start of each step that is run.
    """
    from analyses.study.steps import Steps

    steps = Steps(config, out, workers=workers, progress=progress, say=say)
    steps.run()
    settings = write_toml(config.describe())
    write_text(steps.folder.path / SETTINGS, settings)

    def write(place: Path) -> None:
        say("report ...")
        _write(steps.folder.path, config, command, place / REPORT)
        shutil.copyfile(steps.folder.path / FACTS, place / FACTS)

    root = steps.folder.path / REPORT
    ours = steps.folder.path / "steps" / "report" / REPORT
    # A page that is not the last one written here may be the user's: it is never written over.
    if root.exists() and not (ours.is_file() and ours.read_bytes() == root.read_bytes()):
        raise HcLensError(
            f"expected {root} to be the report that this study wrote, got another file; move it "
            "away and run the same command again"
        )
    page = (
        steps.folder.step("report", {"settings": settings}, steps.folder.finished, write) / REPORT
    )
    if not root.exists() or root.read_bytes() != page.read_bytes():
        shutil.copyfile(page, root)
    return root


def report(folder: str | Path, path: str | Path, *, command: str = "", force: bool = False) -> Path:
    """Write the report of a finished run folder again, to a path of your choice."""
    folder, path = Path(folder), Path(path)
    if not (folder / "steps" / "report").is_dir():
        raise HcLensError(
            f"expected the run folder of a finished study, got {folder}; finish it with the "
            "command that began it"
        )
    if path.exists() and not force:
        raise HcLensError(
            f"expected a new file for the report, got {path}, which exists; give another path, or "
            "pass --force to write over it"
        )
    _write(folder, read_settings(folder / SETTINGS), command, path)
    return path


def read_settings(path: str | Path) -> StudyConfig:
    """The settings of a study, from its ``study.toml``."""
    return StudyConfig.from_dict(read_toml(Path(path)), str(path))


def _write(folder: Path, config: StudyConfig, command: str, path: Path) -> None:
    from analyses.study.report import Results, build

    results = Results(folder, config)
    write_text(folder / FACTS, json.dumps(results.facts(), indent=1))
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    build(results, write_toml(config.describe()), command, made).save(path)
