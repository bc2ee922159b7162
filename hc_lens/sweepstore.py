"""Where a sweep keeps its records: a folder, or any place that fsspec reads.

1. A record is a folder of a few small files and ``done.json``, which holds the hash of each. A
   record counts only if every file has its hash; anything else is as good as not there.
2. In a local folder a record is written under another name, flushed to the disk and renamed.
   Elsewhere (``s3://...``) there is no rename: the files are written first and ``done.json`` last.
3. ``store.json`` names the format. A store of another format is refused and left as it is.
4. A failure of the store itself (full disk, no permission) is a `StoreError`: it stops the sweep,
   where the failure of a run does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hc_lens.errors import HcLensError

FORMAT = "hc_lens.sweep.1"
MARKER = "store.json"
DONE = "done.json"
UNFINISHED = "unfinished"
"""Folder of a local store in which records and files are written before they get their name."""
_OURS = ("runs", "prepared", "checkpoints", "runs.parquet")


class StoreError(HcLensError):
    """The store cannot be written to."""


@runtime_checkable
class Store(Protocol):
    """Records by name, each complete or not there."""

    place: str
    """Path or address, the same in every process."""

    def begin(self) -> None:
        """Check that the store can be written to; remove what dead processes left half-written."""
        ...

    def names(self, kind: str) -> list[str]:
        """Names of the records of a kind, complete or not, in order."""
        ...

    def read(self, kind: str, name: str) -> dict[str, bytes] | None:
        """The files of a complete record; None if it is not there or not complete."""
        ...

    def write(self, kind: str, name: str, files: Mapping[str, bytes]) -> None:
        """Write a record; one that is complete stays as it is."""
        ...

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file at the top of the store, replacing the old one at once."""
        ...


def open_store(place: str | Path) -> Store:
    """The store at a path or fsspec address, made if it is not there."""
    from fsspec.core import split_protocol

    protocol, rest = split_protocol(str(place))
    if protocol in (None, "file", "local"):
        return LocalStore(Path(rest))
    return RemoteStore(str(place))


def hash_of(content: bytes) -> str:
    """The hash that ``done.json`` holds of a file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _done(files: Mapping[str, bytes]) -> bytes:
    hashes = {name: hash_of(content) for name, content in sorted(files.items())}
    return json.dumps(hashes, indent=1).encode()


def _hashes(content: bytes) -> dict[str, str] | None:
    """What a ``done.json`` says, or None if it is not one."""
    try:
        hashes = json.loads(content)
    except ValueError:
        return None
    return hashes if isinstance(hashes, dict) else None


def _check_marker(content: bytes | None, found: list[str], place: str) -> bool:
    """Whether a store is there already; one that is not ours is an HcLensError."""
    if content is None:
        others = [name for name in found if name in _OURS]
        if others:
            raise HcLensError(
                f"expected a store of sweeps or a new folder, got {place} with {others} and no "
                f"{MARKER}; nothing was touched, name another folder"
            )
        return False
    try:
        about = json.loads(content)
        known = about.get("format") if isinstance(about, dict) else None
    except ValueError:
        known = None
    if known != FORMAT:
        raise HcLensError(
            f"expected a store in the format {FORMAT!r}, got {known!r} in {place}; nothing was "
            "touched, name another folder or use the version of hc_lens that wrote it"
        )
    return True


def store_failed(place: str, error: Exception) -> StoreError:
    """The error of a store that cannot be written to."""
    return StoreError(
        f"expected to write to the store {place}, got {type(error).__name__}: {error}; make room "
        "or give access, then call again: finished runs are kept"
    )


class LocalStore:
    """A store in a local folder."""

    def __init__(self, folder: Path):
        self.folder = folder.expanduser().absolute()
        self.place = str(self.folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise HcLensError(
                f"expected a folder for the store, got the file {folder}; name another"
            )
        marker = self.folder / MARKER
        there = self.folder.is_dir()
        content = marker.read_bytes() if marker.is_file() else None
        found = [item.name for item in self.folder.iterdir()] if there else []
        known = _check_marker(content, found, self.place)
        try:
            (self.folder / UNFINISHED).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise store_failed(self.place, error) from error
        if not known:
            self.write_file(MARKER, json.dumps({"format": FORMAT}).encode())

    def begin(self) -> None:
        """Check that the store can be written to; remove what dead processes left half-written."""
        probe = self._unfinished()
        try:
            _write_flushed(probe, b"")
            probe.unlink()
        except OSError as error:
            raise store_failed(self.place, error) from error
        for item in (self.folder / UNFINISHED).iterdir():
            host, _, rest = item.name.rpartition("@")
            pid = rest.partition("-")[0]
            if host == socket.gethostname() and pid.isdigit() and not _alive(int(pid)):
                _remove(item)

    def names(self, kind: str) -> list[str]:
        """Names of the records of a kind, complete or not, in order."""
        folder = self.folder / kind
        return sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []

    def read(self, kind: str, name: str) -> dict[str, bytes] | None:
        """The files of a complete record; None if it is not there or not complete."""
        folder = self.folder / kind / name
        try:
            hashes = _hashes((folder / DONE).read_bytes())
            files = {file: (folder / file).read_bytes() for file in hashes or {}}
        except (FileNotFoundError, NotADirectoryError):
            return None
        whole = all(hash_of(content) == (hashes or {})[file] for file, content in files.items())
        return files if files and whole else None

    def write(self, kind: str, name: str, files: Mapping[str, bytes]) -> None:
        """Write a record; one that is complete stays as it is."""
        if self.read(kind, name) is not None:
            return
        target, unfinished = self.folder / kind / name, self._unfinished()
        try:
            target.parent.mkdir(exist_ok=True)
            unfinished.mkdir()
            for file, content in {**files, DONE: _done(files)}.items():
                _write_flushed(unfinished / file, content)
            _flush_folder(unfinished)
            if target.exists() and self.read(kind, name) is None:  # damaged from outside
                os.replace(target, self._unfinished())
            os.rename(unfinished, target)
            _flush_folder(target.parent)
        except OSError as error:
            _remove(unfinished)
            # Another process may have finished the same record in the meantime.
            if self.read(kind, name) is None:
                raise store_failed(self.place, error) from error

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file at the top of the store, replacing the old one at once."""
        unfinished = self._unfinished()
        try:
            _write_flushed(unfinished, content)
            os.replace(unfinished, self.folder / name)
            _flush_folder(self.folder)
        except OSError as error:
            _remove(unfinished)
            raise store_failed(self.place, error) from error

    def _unfinished(self) -> Path:
        owner = f"{socket.gethostname()}@{os.getpid()}"
        return self.folder / UNFINISHED / f"{owner}-{uuid.uuid4().hex}"


class RemoteStore:
    """A store at an fsspec address, such as ``s3://bucket/sweep``."""

    def __init__(self, place: str):
        from fsspec.core import url_to_fs

        try:
            self._files, self._root = url_to_fs(place)
        except (ImportError, ValueError) as error:
            raise HcLensError(
                f"expected a path or an address that fsspec knows, got {place!r}: {error}; "
                "install the package that it names"
            ) from error
        self.place = place
        found = [self._name(item) for item in self._list(self._root)]
        content = self._get(f"{self._root}/{MARKER}")
        if not _check_marker(content, found, place):
            self.write_file(MARKER, json.dumps({"format": FORMAT}).encode())

    def begin(self) -> None:
        """Check that the store can be written to."""
        self.write_file(MARKER, json.dumps({"format": FORMAT}).encode())

    def names(self, kind: str) -> list[str]:
        """Names of the records of a kind, complete or not, in order."""
        return sorted(self._name(item) for item in self._list(f"{self._root}/{kind}"))

    def read(self, kind: str, name: str) -> dict[str, bytes] | None:
        """The files of a complete record; None if it is not there or not complete."""
        folder = f"{self._root}/{kind}/{name}"
        hashes = _hashes(self._get(f"{folder}/{DONE}") or b"")
        files: dict[str, bytes] = {}
        for file, expected in (hashes or {}).items():
            content = self._get(f"{folder}/{file}")
            if content is None or hash_of(content) != expected:
                return None
            files[file] = content
        return files or None

    def write(self, kind: str, name: str, files: Mapping[str, bytes]) -> None:
        """Write a record, ``done.json`` last; one that is complete stays as it is."""
        if self.read(kind, name) is None:
            for file, content in {**files, DONE: _done(files)}.items():
                self.write_file(f"{kind}/{name}/{file}", content)

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file of the store."""
        target = f"{self._root}/{name}"
        try:
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(target, content)
        except Exception as error:  # each filesystem fails in its own way
            raise store_failed(self.place, error) from error

    def _list(self, folder: str) -> list[str]:
        try:
            # A listing kept from before would hide what other processes wrote.
            self._files.invalidate_cache(folder)
            return self._files.ls(folder, detail=False)
        except FileNotFoundError:
            return []

    def _get(self, target: str) -> bytes | None:
        try:
            return self._files.cat_file(target)
        except FileNotFoundError:
            return None

    @staticmethod
    def _name(item: str) -> str:
        return item.rstrip("/").rpartition("/")[2]


def _write_flushed(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Bring a folder's names to the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(item: Path) -> None:
    if item.is_dir():
        shutil.rmtree(item, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            item.unlink()


def _alive(pid: int) -> bool:
    if os.name == "nt":  # there the call below would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def json_bytes(value: Any) -> bytes:
    """A value as JSON, the same bytes each time."""
    return json.dumps(value, indent=1).encode()
