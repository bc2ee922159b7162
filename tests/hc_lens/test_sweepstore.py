from __future__ import annotations

import errno
import json
import os
import socket

import fsspec
import pytest

from hc_lens import sweepstore
from hc_lens.errors import HcLensError
from hc_lens.sweepstore import FORMAT, LocalStore, RemoteStore, StoreError, open_store

FILES = {"a.json": b"{}", "b.bin": bytes(range(256))}


@pytest.fixture(params=["local", "remote"])
def store(request, tmp_path):
    """A store in a folder, and one on a filesystem without rename."""
    if request.param == "local":
        yield open_store(tmp_path / "store")
    else:
        yield open_store("memory://store")
        fsspec.filesystem("memory").rm("/store", recursive=True)


def put(store, path: str, content: bytes) -> None:
    """Change a file behind the store's back."""
    if isinstance(store, LocalStore):
        (store.folder / path).write_bytes(content)
    else:
        fsspec.filesystem("memory").pipe_file(f"/store/{path}", content)


def test_a_record_is_read_as_it_was_written(store):
    assert store.read("runs", "one") is None
    assert store.names("runs") == []
    store.write("runs", "one", FILES)
    assert store.read("runs", "one") == FILES
    assert store.names("runs") == ["one"]
    assert open_store(store.place).read("runs", "one") == FILES


def test_a_finished_record_is_not_written_again(store):
    store.write("runs", "one", FILES)
    store.write("runs", "one", {"a.json": b"other"})
    assert store.read("runs", "one") == FILES


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b'{"a.json": "other hash"}'])
def test_a_record_without_a_true_done_file_is_not_read_and_is_written_again(store, content):
    store.write("runs", "one", FILES)
    put(store, "runs/one/done.json", content)
    assert store.read("runs", "one") is None
    store.write("runs", "one", FILES)
    assert store.read("runs", "one") == FILES


def test_a_record_with_a_cut_file_is_not_read_and_is_written_again(store):
    store.write("runs", "one", FILES)
    put(store, "runs/one/b.bin", FILES["b.bin"][:100])
    assert store.read("runs", "one") is None
    store.write("runs", "one", FILES)
    assert store.read("runs", "one") == FILES


def test_a_store_of_another_format_is_refused_and_not_touched(tmp_path):
    (tmp_path / "store.json").write_text(json.dumps({"format": "hc_lens.sweep.0"}))
    (tmp_path / "runs").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(HcLensError, match=r"'hc_lens.sweep.1', got 'hc_lens.sweep.0' .*nothing"):
        open_store(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["", "[1]", "not json"])
def test_a_store_with_an_unreadable_marker_is_refused(tmp_path, text):
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(HcLensError, match="got None in"):
        open_store(tmp_path)


def test_a_remote_store_of_another_format_is_refused_too():
    files = fsspec.filesystem("memory")
    files.pipe_file("/old/store.json", b'{"format": "other"}')
    with pytest.raises(HcLensError, match="got 'other' in memory://old"):
        open_store("memory://old")
    files.rm("/old", recursive=True)


def test_runs_without_a_marker_are_somebody_elses(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(HcLensError, match=r"with \['runs'\] and no store.json; nothing was"):
        open_store(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["runs"]


def test_a_folder_with_other_files_becomes_a_store(tmp_path):
    (tmp_path / "sweep.toml").write_text("")
    open_store(tmp_path).begin()
    assert json.loads((tmp_path / "store.json").read_text()) == {"format": FORMAT}


def test_a_store_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HcLensError, match="expected a folder for the store, got the file"):
        open_store(tmp_path / "file")


def test_a_store_below_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"expected to write to the store .*NotADirectoryError"):
        open_store(tmp_path / "file" / "store")


def test_a_store_that_cannot_be_written_to_is_an_error(tmp_path, monkeypatch):
    store = open_store(tmp_path)

    def refuse(path, content):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(sweepstore, "_write_flushed", refuse)
    with pytest.raises(StoreError, match=r"Permission denied; make room or give access"):
        store.begin()


def test_an_unknown_kind_of_address_is_an_error():
    with pytest.raises(HcLensError, match="an address that fsspec knows, got 'nowhere://x'"):
        open_store("nowhere://x")


def test_a_file_address_is_a_local_store(tmp_path):
    assert isinstance(open_store(f"file://{tmp_path}/s"), LocalStore)
    assert isinstance(open_store("memory://s"), RemoteStore)
    fsspec.filesystem("memory").rm("/s", recursive=True)


def test_what_dead_processes_left_is_removed_and_what_living_ones_write_is_kept(tmp_path):
    store = open_store(tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    host = socket.gethostname()
    for name in (f"{host}@{child}-x", f"{host}@{os.getpid()}-x", f"elsewhere@{child}-x"):
        (tmp_path / "unfinished" / name).mkdir()
    store.begin()
    left = sorted(item.name for item in (tmp_path / "unfinished").iterdir())
    assert left == sorted([f"elsewhere@{child}-x", f"{host}@{os.getpid()}-x"])


def test_a_full_disk_leaves_neither_a_record_nor_rubbish(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    store.write_file("runs.parquet", b"old")
    real = sweepstore._write_flushed

    def full(path, content):
        if path.name == "b.bin":
            real(path, content[:10])
        if path.name == "b.bin" or content == b"new":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(sweepstore, "_write_flushed", full)
        with pytest.raises(StoreError, match="No space left on device; make room"):
            store.write("runs", "one", FILES)
        with pytest.raises(StoreError, match="No space left"):
            store.write_file("runs.parquet", b"new")
    assert store.read("runs", "one") is None
    assert list((tmp_path / "unfinished").iterdir()) == []
    assert (tmp_path / "runs.parquet").read_bytes() == b"old"
    store.write("runs", "one", FILES)
    assert store.read("runs", "one") == FILES
