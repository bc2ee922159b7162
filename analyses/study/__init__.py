"""The whole study of a fine-tuned classifier, from its checkpoint to one page.

1. Run the steps of the paper in one folder (`analyses.study.steps`); a step whose inputs and
   settings have not changed is not run again.
2. Write ``report.html`` from the tables of the folder (`analyses.study.page`), ``facts.json``
   with the numbers of its text, and ``study.toml`` with the settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from analyses.study.config import StudyConfig, demo
from analyses.study.folder import REPORT
from hc_lens import __version__
from hc_lens.cli.settings import read_toml, write_toml
from hc_lens.errors import HcLensError
from hc_lens.files import write_text

__all__ = ["StudyConfig", "demo", "read_settings", "report", "run"]

PAGE = "report.html"
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
    folder, settings = steps.folder, write_toml(config.describe())
    root = folder.path / PAGE
    if not folder.owns(root):
        raise HcLensError(
            f"expected {root} to be the report that this study wrote, got another file; move it "
            "away and run the same command again"
        )
    steps.run()
    write_text(folder.path / SETTINGS, settings)

    def write(place: Path) -> None:
        say("report ...")
        _write(folder.path, config, command, place / PAGE)

    about = {"settings": settings, "version": __version__}
    page = folder.step(REPORT, about, folder.finished, write) / PAGE
    folder.publish(page, root)
    return root


def report(folder: str | Path, path: str | Path, *, command: str = "", force: bool = False) -> Path:
    """Write the report of a finished run folder again, to a path of your choice."""
    folder, path = Path(folder), Path(path)
    if not (folder / "steps" / REPORT / "done.json").is_file():
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


def facts_json(facts: dict[str, Any]) -> str:
    """Facts as JSON; a number that is not defined is null."""
    plain = {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in facts.items()
    }
    return json.dumps(plain, indent=1, allow_nan=False)


def _write(folder: Path, config: StudyConfig, command: str, path: Path) -> None:
    from analyses.study.page import Results, build

    results = Results(folder, config)
    facts = results.facts()
    write_text(folder / FACTS, facts_json(facts))
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    build(results, facts, write_toml(config.describe()), command, made).save(path)
