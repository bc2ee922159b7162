"""The whole study, in a small size: its page, its cache, its commands."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from hc_lens.analyses import study
from hc_lens.analyses.study.config import StudyConfig, demo
from hc_lens.analyses.study.steps import KIND
from hc_lens.errors import HcLensError
from hc_lens.locks import alone
from hc_lens.records import DamagedWarning, Records, digest, read_table, unsealed
from hc_lens.show.kept import ABOUT
from hc_lens.show.report import show
from tests.browser import running_browser
from tests.commands import invoke
from tests.damage import DAMAGES

pytestmark = pytest.mark.slow

SECTIONS = ("summary", "model", "subnetworks", "core", "ablation", "attention", "composition",
            "effective_size", "reproduce")  # fmt: skip


def small() -> StudyConfig:
    """The demo with two seeds, few rows and hardly any pruning."""
    config = demo()
    few = {"limit": 160, "limit_per_case": None}
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, limit=60),
        evaluation={
            name: dataclasses.replace(spec, **few) for name, spec in config.evaluation.items()
        },
        checkpoints={"400": "organism:400", "2000": "organism"},
        seeds=(1, 2),
        prune={"steps": 3},
        grid=(0.3, 0.6),
        grid_seeds=(1,),
        grid_prune={"steps": 2},
        attention_rows=20,
        scan_rows=80,
        trace_rows=20,
        examples=2,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a finished small study."""
    out = tmp_path_factory.mktemp("study") / "run"
    study.run(small(), out, command="hc-lens demo", workers=0, progress=False)
    return out


class Page(HTMLParser):
    """The facts and the tables of a report."""

    def __init__(self, text: str):
        super().__init__()
        self.facts: list[tuple[str, float, str]] = []
        self.tables: dict[str, list[dict[str, tuple[str, str]]]] = {}
        self._open: tuple[str, dict[str, str]] | None = None
        self._source = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = dict(attrs)
        if tag == "table":
            self._source = given["data-source"]
            self.tables[self._source] = []
        if tag == "tr" and self._source:
            self.tables[self._source].append({})
        if tag in ("data", "td"):
            self._open = (tag, given)
        if tag == "td":  # a cell may be empty, and then no text follows
            self.tables[self._source][-1][given["data-column"]] = (given["data-value"], "")

    def handle_data(self, data: str) -> None:
        if self._open is None:
            return
        tag, given = self._open
        if tag == "data":
            self.facts.append((given["data-fact"], float(given["value"]), data))
        else:
            self.tables[self._source][-1][given["data-column"]] = (given["data-value"], data)
        self._open = None

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._source = ""
        self._open = None


def without_time(page: str) -> str:
    return re.sub(r"<time>.*?</time>", "", page)


def test_every_table_of_the_page_stands_in_the_run_folder(run: Path) -> None:
    page = Page((run / "report.html").read_text())
    assert len(page.tables) >= 9
    for source, rows in page.tables.items():
        table = read_table(run / source)
        cells = [row for row in rows if row]
        assert cells, source
        columns = list(cells[0])
        known = {tuple(_exact(value) for value in row) for row in table[columns].to_numpy(object)}
        for row in cells:
            assert tuple(value for value, _ in row.values()) in known, (source, row)


def _exact(value: object) -> str:
    if isinstance(value, float) and math.isnan(value):
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def test_every_number_of_the_text_is_a_fact_of_the_run_folder(run: Path) -> None:
    page = Page((run / "report.html").read_text())
    facts = json.loads((run / "facts.json").read_text())
    assert len(page.facts) > 30
    for name, value, _ in page.facts:
        assert value == facts[name] or (math.isnan(value) and facts[name] is None), name


def test_the_facts_follow_from_the_tables(run: Path) -> None:
    facts = json.loads((run / "facts.json").read_text())
    evaluation = pd.read_csv(run / "steps/evaluate/evaluation.csv")
    inside = evaluation[evaluation["dataset"] == "id"]
    assert facts["id_accuracy"] == pytest.approx(inside["accuracy"].iloc[0], abs=1e-12)
    kept = pd.read_csv(run / "steps/subnetworks/subnetworks.csv", dtype={"checkpoint": str})
    final = [set(row.split()) for row in kept.loc[kept["checkpoint"] == "2000", "kept"]]
    heads = {label for label in set.intersection(*final) if "H" in label}
    assert set(facts["core"]) == heads
    assert facts["subnetworks"] == len(final) == 4
    runs = pd.read_csv(run / "steps/subnetworks/runs.csv", dtype={"checkpoint": str})
    chosen = runs[(runs["checkpoint"] == "2000") & (runs["sparsity"] == 0.5)]
    case = chosen[chosen["case"] == facts["first_widest_case"]]["accuracy"]
    assert facts["first_widest_spread"] == pytest.approx(case.max() - case.min(), abs=1e-12)
    mean = chosen[chosen["dataset"] == "id"]["accuracy"].mean()
    assert facts["first_id_mean"] == pytest.approx(mean, abs=1e-12)


def test_shown_numbers_are_the_exact_ones_rounded(run: Path) -> None:
    page = Page((run / "report.html").read_text())
    cells = page.tables["steps/evaluate/evaluation.csv"]
    for row in (row for row in cells if row):
        exact, shown = row["accuracy"]
        assert shown == show(float(exact), "percent")


def test_a_second_run_computes_nothing_and_leaves_the_page_alone(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.html")}
    lines: list[str] = []
    study.run(small(), run, command="hc-lens demo", workers=0, progress=False, say=lines.append)
    assert lines == []
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.html")} == before


def test_a_change_redoes_only_what_it_touches(run: Path) -> None:
    lines: list[str] = []
    changed = dataclasses.replace(small(), attention_rows=30)
    study.run(changed, run, command="hc-lens demo", workers=0, progress=False, say=lines.append)
    assert lines == ["step 7 of 11: attention", "step 11 of 11: report"]
    study.run(small(), run, command="hc-lens demo", workers=0, progress=False)


def again(run: Path) -> list[str]:
    """Run the same study again; the lines of the steps that it did."""
    lines: list[str] = []
    study.run(small(), run, command="hc-lens demo", workers=0, progress=False, say=lines.append)
    return lines


def test_a_page_that_the_user_changed_is_set_aside_and_never_written_over(run: Path) -> None:
    page = run / "report.html"
    ours = page.read_text()
    page.write_text("my notes")
    with pytest.warns(DamagedWarning, match=r"not as this study wrote it: it is now report\.other"):
        assert again(run) == []
    assert page.read_text() == ours
    assert (run / "report.other-1.html").read_text() == "my notes"
    (run / "report.other-1.html").unlink()


def test_two_studies_do_not_write_to_one_folder(run: Path) -> None:
    lock = run / ".unfinished" / "lock"
    with alone(lock), pytest.raises(HcLensError, match="expected to be the only one that writes"):
        study.run(small(), run, workers=0, progress=False, force=True)
    assert again(run) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_list_of_pages_does_not_make_the_page_somebody_elses(run: Path, damage) -> None:
    pages = run / "pages.json"
    damage(pages)
    assert again(run) == []
    assert digest((run / "report.html").read_bytes()) in unsealed(pages.read_bytes())["pages"]
    assert not list(run.glob("report.other*"))


@pytest.mark.parametrize(
    ("file", "damage"),
    zip(
        ["evaluate/evaluation.csv", "attention/patterns.json", "report/facts.json"],
        DAMAGES,
        strict=True,
    ),
)
def test_a_damaged_step_is_not_read_and_is_done_again(run: Path, file: str, damage) -> None:
    step, path = file.partition("/")[0], run / "steps" / file
    before = path.read_bytes()
    damage(path)
    for read in (study.summary, lambda folder: study.report(folder, folder.parent / "page.html")):
        with (
            pytest.warns(DamagedWarning, match=f"steps/{file} is damaged"),
            pytest.raises(HcLensError, match=f"the steps {step} are missing or damaged; finish"),
        ):
            read(run)
    with pytest.warns(DamagedWarning, match=f"steps/{file} is damaged"):
        lines = again(run)
    assert [line.split(": ")[1] for line in lines] == list(dict.fromkeys([step, "report"]))
    assert path.read_bytes() == before


def test_a_study_that_was_killed_ends_with_the_same_page(run: Path, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(small().to_toml())
    out = tmp_path / "run"
    call = (
        "from hc_lens.analyses import study; study.run(study.read_settings('study.toml'), 'run', "
        "command='hc-lens demo', workers=0, progress=False)"
    )
    command = [sys.executable, "-c", call]
    for step in ("means", "core", "composition"):
        process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
        until = time.monotonic() + 240
        while not (out / "steps" / step / "done.json").exists() and process.poll() is None:
            assert time.monotonic() < until, step
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command, cwd=tmp_path, check=True)
    ours, theirs = (out / "report.html").read_text(), (run / "report.html").read_text()
    assert without_time(ours) == without_time(theirs)


def test_the_report_command_writes_the_page_again_but_never_over_a_file(
    run: Path, tmp_path: Path
) -> None:
    page = tmp_path / "again" / "report.html"
    result = invoke("report", run, "--out", page.parent)
    assert result.exit_code == 0, result.output
    assert f"report  {page}\n" in result.stdout
    assert Page(page.read_text()).facts == Page((run / "report.html").read_text()).facts
    with pytest.raises(HcLensError, match="which exists; give another path, or pass --force"):
        study.report(run, page)
    with pytest.raises(HcLensError, match="expected finished work of 'study'"):
        study.report(tmp_path, tmp_path / "other.html")


def digests(folder: Path) -> dict[str, str]:
    """The hash of every file below a folder; an empty text for a folder."""
    return {
        str(path.relative_to(folder)): digest(path.read_bytes()) if path.is_file() else ""
        for path in folder.rglob("*")
    }


def test_the_report_command_leaves_the_run_folder_as_it_is(run: Path, tmp_path: Path) -> None:
    before = digests(run)
    for _ in range(2):
        again = invoke("report", run, "--out", tmp_path / "pages", "--force")
        assert again.exit_code == 0, again.output
        assert digests(run) == before
    for inside in (run, run / "steps", run / "pages"):
        refused = invoke("report", run, "--out", inside, "--force")
        assert refused.exit_code == 1
        assert "expected a folder outside the run folder" in refused.stderr
        assert digests(run) == before


def test_the_folder_of_another_model_is_refused(run: Path) -> None:
    other = dataclasses.replace(small(), model="organism:200")
    with pytest.raises(HcLensError, match=r"expected to continue the work in .*whose model is"):
        study.run(other, run, progress=False)


def test_a_page_that_somebody_laid_beside_the_patterns_is_not_shown(
    run: Path, tmp_path: Path
) -> None:
    strange = [run / "steps" / "attention" / f"pattern-{index}.html" for index in (0, 9)]
    for path in strange:
        path.write_text("<script>document.title = 'ran'</script>laid here")
    page = study.report(run, tmp_path / "page.html")
    for path in strange:
        path.unlink()
    assert "laid here" not in page.read_text("utf-8")
    assert page.read_text("utf-8").count('class="hc-lens-canvas"') == 2


NASTY = "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 1\">"


@pytest.mark.browser
def test_the_page_of_patterns_that_somebody_wrote_anew_runs_nothing(
    run: Path, tmp_path: Path
) -> None:
    forged = tmp_path / "run"
    shutil.copytree(run, forged)
    records = Records.existing(forged, KIND)
    files = records.read("steps/attention") or {}
    about = json.loads(files[ABOUT])
    for figure in about:
        figure |= {name: [NASTY] * len(figure[name]) for name in ("tokens", "heads")}
        figure["title"] = NASTY
    records.remove("steps/attention")
    # With hashes and a seal that are right, as somebody who knows the format would make them.
    records.write("steps/attention", {**files, ABOUT: json.dumps(about).encode()})
    page = study.report(forged, tmp_path / "page.html")
    texts = "return [...document.querySelectorAll('.hc-lens-token')].map(node => node.textContent)"
    with running_browser(tmp_path) as window:
        window.open(page, "document.readyState === 'complete'")
        window.run("document.querySelector('#attention .hc-lens-canvas').scrollIntoView()")
        time.sleep(1)
        assert window.run("return document.querySelectorAll('canvas').length") > 0
        assert set(window.run(texts)) == {NASTY}
        assert window.run("return document.title") == small().title
        assert window.errors() == []


@pytest.mark.browser
def test_the_page_opens_without_network_and_draws_everything(run: Path, tmp_path: Path) -> None:
    with running_browser(tmp_path) as window:
        window.open(run / "report.html", "document.readyState === 'complete'")
        ids = window.run("return [...document.querySelectorAll('main section')].map(x => x.id)")
        assert tuple(ids) == SECTIONS
        broken = "return [...document.images].filter(x => !x.complete || !x.naturalWidth).length"
        assert window.run(broken) == 0
        assert window.run("return document.images.length") >= 7
        window.run("document.querySelector('#attention .hc-lens-canvas').scrollIntoView()")
        time.sleep(1)
        drawn = (
            "return document.querySelectorAll('.hc-lens-canvas canvas, .hc-lens-canvas svg').length"
        )
        assert window.run(drawn) > 0
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert window.run(wide) <= 0
        assert window.errors() == []
