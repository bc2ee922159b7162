from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import fsspec
import numpy as np
import pandas as pd
import pytest

from hc_lens import records as module
from hc_lens.errors import HcLensError
from hc_lens.records import (
    FORMAT,
    UNFINISHED,
    DamagedWarning,
    Records,
    RecordsError,
    as_folder,
    changed_file,
    digest,
    files_of,
    is_full,
    read_table,
    safe_name,
    table_bytes,
    unsealed,
    write_file,
)
from tests.damage import DAMAGES, replace, swap

FILES = {"a.json": b"{}", "deep/b.bin": bytes(range(256))}


def fill(folder: Path) -> None:
    """Write `FILES` as a function that saves a model would."""
    (folder / "deep").mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below a folder, with its content."""
    return {
        str(item.relative_to(folder)): item.read_bytes() if item.is_file() else None
        for item in sorted(folder.rglob("*"))
    }


@pytest.fixture(params=["local", "remote"])
def records(request, tmp_path):
    """Records in a folder, and on a filesystem without rename."""
    if request.param == "local":
        yield Records(tmp_path / "store", "test")
    else:
        yield Records("memory://store", "test")
        fsspec.filesystem("memory").rm("/store", recursive=True)


def put(records: Records, path: str, content: bytes) -> None:
    """Change a file without the knowledge of the records."""
    if "://" in records.address:
        fsspec.filesystem("memory").pipe_file(f"/store/{path}", content)
    else:
        (records.folder() / path).write_bytes(content)


def test_a_record_is_read_as_it_was_written(records):
    assert records.read("runs/one") is None
    assert records.names("runs") == []
    records.write("runs/one", FILES)
    assert records.read("runs/one") == FILES
    assert records.names("runs") == ["one"]
    assert Records(records.address, "test").read("runs/one") == FILES
    assert Records.existing(records.address, "test").read("runs/one") == FILES


def test_a_function_that_writes_files_makes_the_same_record_as_the_files(records):
    records.write("one", FILES)
    records.write("two", fill)
    assert records.read("one") == records.read("two") == FILES
    assert records.names() == ["one", "two"]


def test_a_finished_record_is_not_written_again(records):
    records.write("runs/one", FILES)
    records.write("runs/one", {"a.json": b"other"})
    records.write("runs/one", lambda folder: pytest.fail("wrote a record again"))
    assert records.read("runs/one") == FILES


def test_a_record_of_another_key_counts_as_missing_and_is_replaced(records):
    records.write("one", FILES, "first")
    assert records.read("one", "first") == FILES
    assert records.read("one", "second") is None
    assert records.read("one") == FILES
    records.write("one", {"c": b"c"}, "second")
    assert records.read("one", "second") == {"c": b"c"}
    assert records.read("one", "first") is None


def assert_written_again(records) -> None:
    assert records.read("runs/one") is None
    records.write("runs/one", FILES)
    assert records.read("runs/one") == FILES


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{}", b"[]", b'{"key": "", "files": {"a.json": "other hash"}}', b'{"files": []}'],
)
def test_a_record_without_a_true_done_file_is_not_read_and_is_written_again(records, content):
    records.write("runs/one", FILES)
    put(records, "runs/one/done.json", content)
    assert_written_again(records)


@pytest.mark.parametrize("change", [b"", bytes(range(100)), bytes(range(255, -1, -1))])
def test_a_record_with_a_changed_file_is_not_read_and_is_written_again(records, change):
    records.write("runs/one", FILES)
    put(records, records._place("runs/one", "deep/b.bin", digest(FILES["deep/b.bin"])), change)
    assert_written_again(records)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["a.json", "deep/b.bin", "done.json"])
def test_every_damage_to_a_record_is_said_in_one_line(tmp_path, damage, file):
    records, files = Records(tmp_path, "test"), {**FILES, "a.json": b'{"a": 10}'}
    records.write("one", files, "key")
    damage(tmp_path / "one" / file)
    for read in (records.read, records.find):
        with pytest.warns(DamagedWarning, match=r"/one/.* is damaged or gone: .*not used") as said:
            assert read("one", "key") is None
        assert len(said) == 1
        assert "\n" not in str(said[0].message)
    records.write("one", files, "key")
    assert records.read("one", "key") == files


def test_records_that_changed_places_are_damaged_also_without_a_key(tmp_path):
    records = Records(tmp_path, "test")
    for name in ("one", "two"):
        records.write(f"runs/{name}", {"name": name.encode()})
    swap(tmp_path / "runs" / "one", tmp_path / "runs" / "two")
    for name in ("one", "two"):
        with pytest.warns(DamagedWarning, match=f"runs/{name}/done.json is damaged"):
            assert records.read(f"runs/{name}") is None


def test_a_record_without_its_done_file_is_damaged_and_one_that_is_not_there_is_not(tmp_path):
    records = Records(tmp_path, "test")
    records.write("one", FILES)
    (tmp_path / "one" / "done.json").unlink()
    with pytest.warns(DamagedWarning, match=r"one/done\.json"):
        assert records.read("one") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert records.read("two") is records.find("two", "key") is None


def test_a_record_of_an_older_version_has_no_seal_and_is_read(tmp_path):
    records = Records(tmp_path, "test")
    records.write("one", FILES, "key")
    done = tmp_path / "one" / "done.json"
    done.write_bytes(json.dumps(unsealed(done.read_bytes(), "one")).encode())
    assert records.read("one", "key") == FILES


@pytest.mark.parametrize("name", [".", "..", "../other", "a/../..", "/a", "a//b"])
def test_a_name_that_leads_elsewhere_is_refused_and_nothing_is_touched(tmp_path, name):
    records = Records(tmp_path / "store", "test")
    (tmp_path / "other").mkdir()
    records.write("one", FILES)
    before = tree(tmp_path)
    for use in (records.read, records.find, records.remove, lambda name: records.write(name, {})):
        with pytest.raises(HcLensError, match="expected the name of a record below its folder"):
            use(name)
    with pytest.raises(HcLensError, match="got ''"):
        records.remove("")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("final", "final"),
        ("step-00500", "step-00500"),
        ("runs/mnli 2", "runs%2Fmnli%202"),
        (".", "%2E"),
        ("..", "%2E."),
        ("../../etc", "%2E.%2F..%2Fetc"),
        ("/", "%2F"),
        ("", "%"),
        (".hidden.5", "%2Ehidden.5"),
        ("a\0b\\c", "a%00b%5Cc"),
    ],
)
def test_any_text_becomes_a_name_of_a_record(tmp_path, text, name):
    assert safe_name(text) == name
    records = Records(tmp_path, "test")
    records.write(safe_name(text), FILES)
    assert records.names() == [name]


def test_long_texts_become_short_names_that_differ(tmp_path):
    texts = [300 * "x", 301 * "x", 300 * "\u00e9", 150 * "x", 151 * "x"]
    names = [safe_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert [len(name) for name in names] == [150] * 5
    records = Records(tmp_path, "test")
    for name in names:
        records.write(name, FILES)
    assert records.names() == sorted(names)


def test_a_removed_record_is_missing(records):
    records.write("runs/one", FILES)
    records.remove("runs/one")
    records.remove("runs/none")
    assert records.read("runs/one") is None
    assert records.names("runs") == []


def test_a_record_can_be_the_folder_itself_beside_other_files(records):
    put(records, "mine.txt", b"mine")
    records.write("", FILES, "key")
    assert records.read("", "key") == FILES
    records.write("", {"a.json": b"[]"}, "key")  # written in any case
    assert records.read("", "key") == {"a.json": b"[]"}
    assert "mine.txt" in records.names()


def test_a_record_is_found_as_a_folder_only_where_there_are_folders(tmp_path):
    records = Records(tmp_path, "test")
    assert records.find("one") is None
    records.write("one", FILES)
    assert records.find("one") == tmp_path / "one" == records.folder("one")
    (tmp_path / "one" / "deep" / "b.bin").unlink()
    assert records.find("one") is None
    with pytest.raises(HcLensError, match="expected a local folder, got memory://here"):
        Records("memory://here", "test").folder()
    fsspec.filesystem("memory").rm("/here", recursive=True)


def test_a_large_record_is_written_and_checked_with_little_memory(tmp_path):
    records, size = Records(tmp_path, "test"), 40 * 2**20

    def large(folder: Path) -> None:
        with open(folder / "weights", "wb") as file:
            file.truncate(size)

    tracemalloc.start()
    records.write("one", large)
    assert records.find("one") is not None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 4


def test_a_file_beside_the_records_replaces_the_earlier_one(records):
    records.write_file("table.csv", "first")
    records.write_file("table.csv", b"second")
    assert "table.csv" in records.names()
    assert records._get("table.csv") == b"second"


def test_records_of_another_format_are_refused_and_not_touched(tmp_path):
    (tmp_path / "records.json").write_text(json.dumps({"format": "hc_lens.records.0"}))
    (tmp_path / "runs").mkdir()
    before = tree(tmp_path)
    message = r"'hc_lens.records.1', got 'hc_lens.records.0' .*nothing"
    for force in (False, True):
        with pytest.raises(HcLensError, match=message):
            Records(tmp_path, "test", force=force)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("damage", [*DAMAGES, Path.unlink])
def test_a_damaged_marker_is_made_good_by_its_copy(tmp_path, damage):
    Records(tmp_path, "test", {"steps": 10}, owner=True).write("one", FILES)
    marker = (tmp_path / "records.json").read_bytes()
    damage(tmp_path / "records.json")
    with pytest.warns(DamagedWarning, match=r"records\.json is damaged or gone: its copy"):
        assert Records.existing(tmp_path, "test").read("one") == FILES
    with (
        pytest.warns(DamagedWarning),
        pytest.raises(HcLensError, match="whose steps is 10, got 11"),
    ):
        Records(tmp_path, "test", {"steps": 11}, owner=True)
    with pytest.warns(DamagedWarning):
        assert Records(tmp_path, "test", {"steps": 10}, owner=True).read("one") == FILES
    assert (tmp_path / "records.json").read_bytes() == marker


def test_an_empty_folder_in_the_place_of_a_file_is_written_over_and_a_full_one_is_not(tmp_path):
    kept = Records(tmp_path, "test")
    (tmp_path / "file").mkdir()
    kept.write_file("file", "content")
    assert (tmp_path / "file").read_text() == "content"
    (tmp_path / "full" / "of").mkdir(parents=True)
    with pytest.raises(RecordsError, match="full"):
        kept.write_file("full", "content")
    assert (tmp_path / "full" / "of").is_dir()


def test_a_marker_that_came_from_a_folder_of_another_kind_is_made_good_by_its_copy(tmp_path):
    Records(tmp_path / "other", "other")
    Records(tmp_path / "test", "test", {"steps": 10}).write("one", FILES)
    marker = (tmp_path / "test" / "records.json").read_bytes()
    for name in ("records.json", ".records.json"):
        replace(tmp_path / "test" / name, tmp_path / "other" / name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamagedWarning)
            assert Records(tmp_path / "test", "test", {"steps": 10}).read("one") == FILES
        assert (tmp_path / "test" / name).read_bytes() == marker


@pytest.mark.parametrize("text", ["", "[1]", "not json"])
def test_an_unreadable_marker_without_a_copy_is_refused(tmp_path, text):
    (tmp_path / "records.json").write_text(text)
    with pytest.raises(HcLensError, match="got None in"):
        Records(tmp_path, "test")


def test_remote_records_of_another_format_are_refused_too():
    files = fsspec.filesystem("memory")
    files.pipe_file("/old/records.json", b'{"format": "other"}')
    with pytest.raises(HcLensError, match="got 'other' in memory://old"):
        Records("memory://old", "test")
    files.rm("/old", recursive=True)


@pytest.mark.parametrize(
    "layout",
    [
        {"store.json": '{"format": "hc_lens.sweep.1"}', "runs/1a/done.json": "{}"},
        {"run.json": '{"format": "hc_lens.finetune.1"}', "step-00000/history.json": "{}"},
        {"study.json": '{"format": "hc_lens.study.1"}', "steps/means/done.json": "{}"},
        {"0123456789abcdef01234567/scan.json": '{"format": "hc_lens.scan.1"}'},
        {"command.toml": 'command = "means"', "result.json": "{}"},
    ],
    ids=["sweep", "finetune", "study", "scan", "command"],
)
@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_folder_in_an_older_layout_is_refused_and_not_touched(tmp_path, layout, where):
    files = fsspec.filesystem("memory")
    for name, text in layout.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        files.pipe_file(f"/older/{name}", text.encode())
    before = tree(tmp_path)
    address = tmp_path if where == "local" else "memory://older"
    message = (
        rf"older version of hc_lens \(it holds {next(iter(layout))} but no records.json\); noth"
    )
    for kind in ("test", "sweep", "finetune", "study", "scan", "means"):
        for force in (False, True):
            with pytest.raises(HcLensError, match=message):
                Records(address, kind, force=force)
        with pytest.raises(HcLensError, match=message):
            Records.existing(address, kind)
    assert tree(tmp_path) == before
    assert {f"/older/{name}" for name in layout} == set(files.find("/older"))
    files.rm("/older", recursive=True)


def test_work_of_another_kind_is_refused_also_with_force(tmp_path):
    Records(tmp_path, "sweep").write("runs/one", FILES)
    before = tree(tmp_path)
    for force in (False, True):
        with pytest.raises(HcLensError, match=r"one of 'study', got .*holds work of 'sweep'; noth"):
            Records(tmp_path, "study", force=force)
    with pytest.raises(HcLensError, match="holds work of 'sweep'"):
        Records.existing(tmp_path, "study")
    assert tree(tmp_path) == before


def test_work_about_something_else_is_refused_and_says_what_differs(tmp_path):
    about = {"config": {"steps": 3, "seed": 1}, "model": "abc", "rows": {}}
    Records(tmp_path, "test", about)
    Records(tmp_path, "test", about)
    other = {**about, "config": {"steps": 4, "seed": 2}}
    message = r"whose config.steps is 3, got 4 \(differing: config.steps, config.seed\); repeat"
    with pytest.raises(HcLensError, match=message):
        Records(tmp_path, "test", other)
    with pytest.raises(HcLensError, match="whose model is 'abc', got None"):
        Records(tmp_path, "test", {"config": about["config"], "rows": {}})
    Records(tmp_path, "test", other, free=["config"])
    assert json.loads((tmp_path / "records.json").read_text())["about"] == other


def test_force_gives_up_the_finished_work_and_nothing_else(tmp_path):
    records = Records(tmp_path, "test", {"limit": 1}, owner=True)
    records.write("", {"result.json": b"{}"})
    records.write("one", FILES)
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    again = Records(tmp_path, "test", {"limit": 2}, owner=True, force=True)
    assert again.names() == ["folder", "mine.txt"]
    assert again.read("") is again.read("one") is None


def test_names_that_other_work_would_have_put_there_are_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(HcLensError, match=r"with \['runs'\] and no records.json; nothing was"):
        Records(tmp_path, "test", owner=["runs", "prepared"])
    assert [item.name for item in tmp_path.iterdir()] == ["runs"]


def test_a_folder_with_other_files_is_refused_by_an_owner_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(HcLensError, match=r"with \['thesis.txt'\] and no records.json; nothing"):
        Records(tmp_path, "test", owner=True)
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.txt"]
    Records(tmp_path, "test", owner=True, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_folder_with_other_files_gets_records(tmp_path):
    (tmp_path / "sweep.toml").write_text("")
    Records(tmp_path, "test", owner=["runs"])
    marker = (tmp_path / "records.json").read_bytes()
    assert unsealed(marker) == {"format": FORMAT, "kind": "test", "about": {}}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
def test_what_a_process_left_is_removed_although_its_parent_has_not_looked_yet(tmp_path):
    Records(tmp_path / "work", "scan")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    state = Path(f"/proc/{ended.pid}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    folder = tmp_path / "work" / UNFINISHED
    folder.mkdir(exist_ok=True)
    left, own = (
        folder / f"{socket.gethostname()}@{pid}-{'0' * 32}" for pid in (ended.pid, os.getpid())
    )
    left.write_text("half")
    own.write_text("being written")
    Records(tmp_path / "work", "scan")
    assert not left.exists()
    assert own.exists()
    ended.wait()


def test_a_process_that_died_before_the_marker_leaves_a_folder_that_can_be_used(tmp_path):
    (tmp_path / UNFINISHED).mkdir()
    records = Records(tmp_path, "test", owner=True)
    records.write("one", FILES)
    assert records.read("one") == FILES


def test_opening_what_is_there_writes_nothing(tmp_path):
    with pytest.raises(HcLensError, match=r"work of 'test', got .*nothing without records.json; n"):
        Records.existing(tmp_path / "nothing", "test")
    assert list(tmp_path.iterdir()) == []
    Records(tmp_path, "test")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    Records.existing(tmp_path, "test").names()
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_a_file_in_the_folders_place_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HcLensError, match="expected a folder, got the file"):
        Records(tmp_path / "file", "test")


def test_a_folder_below_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordsError, match=r"expected to write to .*NotADirectoryError"):
        Records(tmp_path / "file" / "store", "test")


def test_a_name_that_is_too_long_for_a_folder_is_told(tmp_path):
    address = tmp_path / (300 * "x")
    with pytest.raises(RecordsError, match=r"expected to write to .*; give a shorter name"):
        Records(address, "test")
    with pytest.raises(HcLensError, match="expected finished work of 'test'"):
        Records.existing(address, "test")


def test_a_folder_that_cannot_be_written_to_is_an_error_when_it_is_opened(tmp_path, monkeypatch):
    Records(tmp_path, "test")

    def refuse(path, content):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(module, "_write_flushed", refuse)
    with pytest.raises(RecordsError, match=r"Permission denied; make room or give access"):
        Records(tmp_path, "test")


def test_an_unknown_kind_of_address_is_an_error():
    with pytest.raises(HcLensError, match="an address that fsspec knows, got 'nowhere://x'"):
        Records("nowhere://x", "test")


def test_a_file_address_is_a_local_folder(tmp_path):
    assert Records(f"file://{tmp_path}/s", "test").folder() == tmp_path / "s"


def test_what_dead_processes_left_is_removed_and_what_living_ones_write_is_kept(tmp_path):
    Records(tmp_path, "test")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    host = socket.gethostname()
    for name in (f"{host}@{child}-x", f"{host}@{os.getpid()}-x", f"elsewhere@{child}-x"):
        (tmp_path / UNFINISHED / name).mkdir()
    Records(tmp_path, "test")
    left = sorted(item.name for item in (tmp_path / UNFINISHED).iterdir())
    assert left == sorted([f"elsewhere@{child}-x", f"{host}@{os.getpid()}-x"])


@pytest.fixture
def dead() -> int:
    """The number of a process that has died."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_a_file_that_was_never_renamed_locks_nobody_out(tmp_path, dead):
    host, hexadecimal = socket.gethostname(), 32 * "a"
    ours = f".records.json~{host}@{dead}-{hexadecimal}"
    others = [
        f".records.json~elsewhere@{dead}-{hexadecimal}",
        f".records.json~{host}@{os.getpid()}-{hexadecimal}",
        f".run.json.{dead}",  # as older versions named them
        f".study.json.{dead}-{hexadecimal}",
    ]
    for name in (ours, *others):
        (tmp_path / name).write_text("{")
    records = Records(tmp_path, "test", owner=True)
    records.write("one", FILES)
    assert records.names() == ["one"]
    left = {item.name for item in tmp_path.glob(".*") if item.is_file()}
    assert left == {".records.json", *others}


KILLED = """
import os, signal, sys
from pathlib import Path
from hc_lens import records
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "records":
    records.Records(Path(sys.argv[1]), "test", owner=True)
elif sys.argv[2] == "file":
    records.write_file(Path(sys.argv[1]) / "page.html", "half")
else:
    records.files_of(lambda folder: os.replace())
"""


@pytest.mark.parametrize("what", ["records", "file", "scratch"])
def test_a_kill_at_the_first_rename_leaves_nothing_that_needs_a_hand(tmp_path, what, monkeypatch):
    folder, scratch = tmp_path / "folder", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), what],
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert done.returncode == -9
    assert len([*folder.rglob("*"), *scratch.rglob("*")]) > 0
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(scratch))
    Records(folder, "test", owner=True)
    write_file(folder / "page.html", "whole")
    files_of(fill)
    found = {str(item.relative_to(tmp_path)) for item in tmp_path.rglob("*")}
    ours = {"", "/records.json", "/.records.json", "/.unfinished", "/page.html"}
    assert found == {f"folder{name}" for name in ours} | {"scratch"}


def test_a_folder_of_one_writer_refuses_a_second_before_it_gives_anything_up(tmp_path):
    with Records(tmp_path, "test", alone=True) as records:
        records.write("one", FILES)
        for force in (False, True):
            with pytest.raises(HcLensError, match=f"process {os.getpid()} on"):
                Records(tmp_path, "test", force=force, alone=True)
        Records(tmp_path, "test").write("two", FILES)  # work that many may share
        assert Records.existing(tmp_path, "test").names() == ["one", "two"]
    again = Records(tmp_path, "test", alone=True)
    again.close()
    again.close()
    with Records(tmp_path, "test", alone=True, force=True) as last:
        assert last.names() == []


def test_a_folder_that_is_refused_gets_no_lock(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(HcLensError, match="expected a new folder"):
        Records(tmp_path, "test", owner=True, alone=True)
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.txt"]
    Records(tmp_path / "other", "test", {"a": 1})
    for _ in range(2):
        with pytest.raises(HcLensError, match="whose a is 1, got 2"):
            Records(tmp_path / "other", "test", {"a": 2}, alone=True)


def test_an_address_without_locks_is_written_to_all_the_same():
    with Records("memory://alone", "test", alone=True) as records:
        records.write("one", FILES)
    fsspec.filesystem("memory").rm("/alone", recursive=True)


def test_a_full_disk_leaves_neither_a_record_nor_rubbish(tmp_path, monkeypatch):
    records = Records(tmp_path, "test")
    records.write_file("runs.parquet", b"old")
    real = module._write_flushed

    def full(path, content):
        if path.name == "b.bin":
            real(path, content[:10])
        if path.name == "b.bin" or content == b"new":
            no_room()
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_flushed", full)
        with pytest.raises(RecordsError, match="No space left on device; make room"):
            records.write("runs/one", FILES)
        with pytest.raises(RecordsError, match="No space left"):
            records.write_file("runs.parquet", b"new")
    assert records.read("runs/one") is None
    assert list((tmp_path / UNFINISHED).iterdir()) == []
    assert (tmp_path / "runs.parquet").read_bytes() == b"old"
    records.write("runs/one", FILES)
    assert records.read("runs/one") == FILES


@pytest.mark.parametrize("step", ["fill", "fsync", "rename"])
def test_a_disk_that_is_full_at_any_step_leaves_neither_a_record_nor_rubbish(
    tmp_path, monkeypatch, step
):
    records = Records(tmp_path, "test")

    def full(folder: Path) -> None:
        fill(folder)
        if step == "fill":
            no_room()

    with monkeypatch.context() as patch:
        if step != "fill":
            patch.setattr(module.os, step, no_room)
        with pytest.raises(RecordsError, match="No space left on device; make room"):
            records.write("one", full)
    assert records.names() == []
    assert list((tmp_path / UNFINISHED).iterdir()) == []
    records.write("one", fill)
    assert records.read("one") == FILES


def test_a_full_disk_that_safetensors_tells_of_is_recognised(records):
    def save(folder: Path) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os 28)")

    with pytest.raises(RecordsError, match="make room"):
        records.write("one", save)
    assert not is_full(ValueError("full of ideas"))


@pytest.mark.parametrize("error", [RuntimeError("mine"), FileNotFoundError("mine"), KeyError("k")])
def test_an_error_of_the_function_that_writes_stays_its_own_and_leaves_nothing(records, error):
    def save(folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise error

    with pytest.raises(type(error)) as caught:
        records.write("one", save)
    assert caught.value is error
    assert records.names() == []


def test_an_interrupted_function_leaves_nothing(tmp_path):
    def interrupted(folder: Path) -> None:
        (folder / "half.txt").write_text("half")
        raise KeyboardInterrupt

    records = Records(tmp_path, "test")
    with pytest.raises(KeyboardInterrupt):
        records.write("steps/means", interrupted)
    assert records.names("steps") == []
    assert list((tmp_path / UNFINISHED).iterdir()) == []
    records.write("steps/means", {"result.txt": b"1"})
    found = sorted(file.name for file in (tmp_path / "steps" / "means").iterdir())
    assert found == ["done.json", "result.txt"]


def test_files_reach_the_disk_before_the_record_gets_its_name(tmp_path, monkeypatch):
    records, order = Records(tmp_path, "test"), []
    for name in ("fsync", "rename"):
        real = getattr(os, name)

        def noted(*given, name=name, real=real):
            order.append(name)
            return real(*given)

        monkeypatch.setattr(module.os, name, noted)
    records.write("one", fill)
    assert order.count("rename") == 1
    assert order.index("rename") >= len(FILES) + 1  # every file and done.json


def test_a_record_that_another_process_finishes_first_is_kept(tmp_path):
    mine, theirs = Records(tmp_path, "test"), Records(tmp_path, "test")

    def slow(folder: Path) -> None:
        theirs.write("one", FILES, "key")
        (folder / "a.json").write_bytes(b"mine")

    mine.write("one", slow, "key")
    assert mine.read("one", "key") == FILES
    assert list((tmp_path / UNFINISHED).iterdir()) == []


RACE = """
import sys, time
from pathlib import Path
from hc_lens.records import Records
records = Records(sys.argv[1], "test")
(Path(sys.argv[1]) / sys.argv[2]).touch()
while len(list(Path(sys.argv[1]).glob("ready*"))) < 3:
    pass
for number in range(40):
    records.write(f"runs/{number}", {"a.json": b"{}", "b.bin": bytes(256)}, "key")
"""


def test_processes_that_finish_the_same_records_at_once_agree(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    processes = [subprocess.Popen([*command, f"ready-{number}"]) for number in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    records = Records(tmp_path, "test")
    assert len(records.names("runs")) == 40
    for number in range(40):
        expected = {"a.json": b"{}", "b.bin": bytes(256)}
        assert records.read(f"runs/{number}", "key") == expected
    assert list((tmp_path / UNFINISHED).iterdir()) == []


def test_a_file_is_written_completely_or_not_at_all(tmp_path, monkeypatch):
    write_file(tmp_path / "page.html", "old")
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", no_room)
        with pytest.raises(RecordsError, match="No space"):
            write_file(tmp_path / "page.html", "new")
    assert tree(tmp_path) == {"page.html": b"old"}
    write_file(tmp_path / "page.html", b"new")
    assert tree(tmp_path) == {"page.html": b"new"}


def test_a_file_makes_its_folder_and_a_failure_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "some" / "deep" / "page.html"
    write_file(path, "text")
    assert path.read_text() == "text"
    with pytest.raises(RecordsError, match=r"write to .*page.html/x, got .*; move what stands in"):
        write_file(path / "x", "text")
    monkeypatch.setattr(module, "_write_flushed", no_room)
    with pytest.raises(RecordsError, match=r"expected to write to \S+/page.html, got .*No space"):
        write_file(path, "other")
    assert path.read_text() == "text"


def test_files_become_a_folder_and_a_folder_files():
    with as_folder(FILES) as folder:
        assert (folder / "deep" / "b.bin").read_bytes() == FILES["deep/b.bin"]
    assert not folder.exists()
    assert files_of(fill) == FILES


def test_a_file_beside_the_records_is_set_aside_under_a_free_name(tmp_path):
    records = Records(tmp_path, "test")
    for text in ("first", "second"):
        records.write_file("page.html", text)
        records.set_aside("page.html")
    assert records.names() == ["page.other-1.html", "page.other-2.html"]
    assert (tmp_path / "page.other-2.html").read_text() == "second"


def test_a_file_and_its_folder_reach_the_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*given, name=name, real=real):
            order.append(name)
            return real(*given)

        monkeypatch.setattr(module.os, name, noted)
    write_file(tmp_path / "page.html", "text")
    assert order == ["fsync", "replace", "fsync"]


def test_a_temporary_folder_that_is_full_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(RecordsError, match=rf"expected to write to {tmp_path}/hc_lens~.*No space"):
        files_of(no_room)
    monkeypatch.setattr(Path, "write_bytes", no_room)
    with pytest.raises(RecordsError, match=rf"expected to write to {tmp_path}/hc_lens~.*No space"):
        as_folder(FILES).__enter__()

    def full(*_: object, **__: object) -> None:
        no_room()

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(RecordsError, match=rf"expected to write to {tmp_path}, got OSError"):
        as_folder(FILES).__enter__()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EROFS, "Read-only file system"),
        RuntimeError("Error while serializing: I/O error: Read-only file system (os error 30)"),
    ],
)
def test_a_disk_that_fails_in_the_middle_of_a_function_is_told_with_its_folder(records, error):
    def save(folder: Path) -> None:
        raise error

    with pytest.raises(RecordsError, match=rf"expected to write to {records.address}, got "):
        records.write("one", save)
    assert records.names() == []


def test_a_digest_names_a_sequence_of_values():
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})
    numbers = np.arange(6, dtype="float32")
    assert digest(memoryview(numbers)) == digest(numbers.tobytes())
    assert digest(memoryview(numbers)) != digest(memoryview(numbers + 1))
    assert len(digest("\ud800")) == 32
    assert digest(b"x") == hashlib.blake2b(b"1 x", digest_size=16).hexdigest()


def test_a_table_comes_back_exactly(tmp_path):
    table = pd.DataFrame(
        {
            "checkpoint": ["200", "final", ""],
            "case": ["None", "a,b", "NA"],
            "x": [1 / 3, 1e-17, float("nan")],
            "n": [1, 2, 3],
            "on": [True, False, True],
        }
    )
    (tmp_path / "t.csv").write_bytes(table_bytes(table))
    for back in (read_table(table_bytes(table)), read_table(tmp_path / "t.csv")):
        assert back["x"].tolist()[:2] == [1 / 3, 1e-17]
        pd.testing.assert_frame_equal(back, table, check_exact=True)


def test_a_missing_number_survives():
    table = pd.DataFrame(
        {"dataset": ["a", "b"], "n": [2, 3], "accuracy": [float("nan"), 0.1 + 0.2]}
    )
    content = table_bytes(table)
    assert b"NaN" not in content
    pd.testing.assert_frame_equal(read_table(content), table, check_exact=True)
    nothing = table.assign(accuracy=np.nan)
    pd.testing.assert_frame_equal(read_table(table_bytes(nothing)), nothing)


DEEP = "[" * 100_000
STRANGE = (
    '{"files": {"/dev/zero": "1"}}',
    '{"files": {"../other": "1"}}',
    '{"files": {"a\\u0000b": "1"}}',
    '{"files": {"\\ud800": "1"}}',
    '{"files": {"a": 1}}',
    '{"files": 3}',
    DEEP,
)
"""What a hostile ``done.json`` may hold; each names a file that is not the record's, or none."""


@pytest.mark.parametrize("text", STRANGE)
def test_a_hostile_done_file_is_damage_and_nothing_outside_is_read(tmp_path, text):
    records = Records(tmp_path, "test")
    records.write("one", {"a": b"1"})
    (tmp_path / "one" / "done.json").write_text(text)
    assert changed_file(tmp_path / "one") == "done.json"
    with pytest.warns(DamagedWarning, match=r"one.done\.json is damaged"):
        assert records.read("one") is None
    records.write("one", {"a": b"2"})
    assert records.read("one") == {"a": b"2"}


def test_a_pipe_in_the_place_of_a_file_is_damage_and_is_not_waited_for(tmp_path):
    Records(tmp_path, "test").write("one", {"a": b"1"})
    (tmp_path / "one" / "a").unlink()
    os.mkfifo(tmp_path / "one" / "a")
    assert changed_file(tmp_path / "one") == "a"
    (tmp_path / "one" / "done.json").unlink()
    os.mkfifo(tmp_path / "one" / "done.json")
    assert changed_file(tmp_path / "one") is None


def test_a_link_that_leads_to_itself_counts_as_missing(tmp_path):
    records = Records(tmp_path, "test")
    records.write("one", {"a": b"1"})
    (tmp_path / "one" / "a").unlink()
    (tmp_path / "one" / "a").symlink_to("a")
    with pytest.warns(DamagedWarning, match="one/a is damaged"):
        assert records.find("one") is None


@pytest.mark.parametrize(
    "text", ['{"format": "hc_lens.records.1", "kind": "test", "about": 5}', DEEP]
)
def test_a_marker_that_says_nothing_is_made_good_by_its_copy(tmp_path, text):
    Records(tmp_path, "test", {"seed": 1})
    (tmp_path / "records.json").write_text(text)
    with pytest.warns(DamagedWarning, match="its copy"):
        Records(tmp_path, "test", {"seed": 1})


def test_what_older_versions_left_of_the_marker_is_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, living = (tmp_path / f".records.json.{pid}" for pid in (ended.pid, os.getpid()))
    dead.touch()
    living.touch()
    Records(tmp_path, "test")
    assert not dead.exists()
    assert living.exists()


def test_what_stands_in_the_way_is_told_as_that(tmp_path):
    records = Records(tmp_path, "test")
    (tmp_path / "table.csv").mkdir()
    (tmp_path / "table.csv" / "mine").touch()
    with pytest.raises(HcLensError, match="move what stands in its place"):
        records.write_file("table.csv", "a")
