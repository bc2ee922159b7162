"""Finished work on disk: what is there is complete, and is not computed again.

1. A record is a folder of files with ``done.json``, which holds the record's key and the hash of
   every file. A record counts only if it has the right key and every file has its hash; anything
   else counts as missing.
2. A key is the `digest` of everything that decides the content.
3. The files of a record are first written into a folder of another name. In a local folder that
   one is flushed to the disk and renamed; elsewhere (``s3://...``) there is no rename, so the files
   are copied and ``done.json`` comes last. A record that is a whole folder itself (its name is
   empty) shares it with other files, so its files are moved one by one, ``done.json`` last.
4. `Records` is a folder of records of one kind of work. Its ``records.json`` names the format, the
   kind and what the work is about. A folder with other work, or one in the layout of an older
   version, is refused and left as it is.
5. What a process that has died left half-written is removed when the folder is next opened.
6. An address that cannot be written to (a full disk, no permission) is a `RecordsError`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import posixpath
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "hc_lens.records.1"
MARKER = "records.json"
DONE = "done.json"
UNFINISHED = ".unfinished"
"""Folder in which records and files are written before they get their name."""
OLDER_LAYOUTS = ("store.json", "run.json", "study.json", "command.toml", "scan.json")
"""Files by which folders of older versions are known where ``records.json`` is missing. The last of
them stood one level deeper."""
TEXT_COLUMNS = ("checkpoint", "case", "dataset", "unit", "set", "sender", "receiver", "run")
"""Columns that hold text even where it looks like a number."""
CHUNK = 2**20
"""Bytes of a file that are in memory at one time while it is hashed."""

Files = Mapping[str, bytes]
"""The files of a record, by their path below it."""
Fill = Callable[[Path], object]
"""Writes the files of a record into an empty folder."""


class RecordsError(HcLensError):
    """Finished work cannot be written: a full disk, no permission, an address that fails."""


def digest(*parts: object) -> str:
    """32 hexadecimal digits that name a sequence of values, the same in every process.

    Bytes (also the memory of an array) count as they are, every other value by its JSON.
    """
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = isinstance(part, (bytes, bytearray, memoryview))
        content = part if raw else json.dumps(part, sort_keys=True).encode("utf-8", "surrogatepass")
        # The length keeps ("ab", "c") apart from ("a", "bc").
        size = content.nbytes if isinstance(content, memoryview) else len(content)
        made.update(f"{size} ".encode())
        made.update(content)
    return made.hexdigest()


def seed_of(text: str) -> int:
    """A seed that a text alone decides: the first 63 bits of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def json_bytes(value: object) -> bytes:
    """A value as JSON, the same bytes each time."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def table_bytes(table: pd.DataFrame) -> bytes:
    """A table as CSV, from which `read_table` gives back every number bit by bit."""
    return table.to_csv(index=False).encode()


def read_table(content: bytes | Path) -> pd.DataFrame:
    """The table that `table_bytes` wrote; numbers come back exactly, texts stay texts."""
    import pandas as pd

    table = pd.read_csv(
        content if isinstance(content, Path) else io.BytesIO(content),
        dtype=dict.fromkeys(TEXT_COLUMNS, str),
        keep_default_na=False,
        na_values=[""],
        engine="python",  # its floats are exact in every version of pandas
    )
    return table.fillna({name: "" for name in TEXT_COLUMNS if name in table})


def write_file(path: Path, content: bytes | str, unfinished: Path | None = None) -> None:
    """Write a file completely or not at all: under another name, flushed, then renamed."""
    unfinished = unfinished or path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex}")
    try:
        _write_flushed(unfinished, content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, path)
    finally:
        _remove(unfinished)


@contextlib.contextmanager
def as_folder(files: Files) -> Iterator[Path]:
    """A folder that holds some files for the duration of a ``with`` block."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            _in_folder(Path(folder) / name).write_bytes(content)
        yield Path(folder)


def files_of(fill: Fill) -> dict[str, bytes]:
    """The files that a function writes into an empty folder, by their path below it."""
    with as_folder({}) as folder:
        fill(folder)
        return {name: (folder / name).read_bytes() for name in _names_below(folder)}


def is_full(error: BaseException) -> bool:
    """Whether a full disk is behind an error; safetensors tells it only in the text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    cause = error.__cause__ or error.__context__
    return "No space left on device" in str(error) or (cause is not None and is_full(cause))


def failed(address: str, error: BaseException) -> RecordsError:
    """The error of an address that cannot be written to."""
    return RecordsError(
        f"expected to write to {address}, got {type(error).__name__}: {error}; make room or give "
        "access, then call again: finished work is kept"
    )


class Records:
    """The finished work of one kind in a folder, or at an fsspec address."""

    def __init__(
        self,
        address: str | Path,
        kind: str,
        about: Mapping[str, Any] | None = None,
        *,
        free: Sequence[str] = (),
        owner: bool | Sequence[str] = False,
        force: bool = False,
    ):
        """Open a folder, or make it, and see that it can be written to.

        Args:
            address: path or fsspec address.
            kind: what sort of work it holds, such as ``"sweep"``.
            about: what the work is about; a folder about something else is an HcLensError.
            free: entries of `about` that may differ from the folder's.
            owner: whether a folder that already holds other files is refused; or the names that
                only other work would have put there.
            force: give up the finished work of this kind that the folder holds, and nothing else.
        """
        there = self._open(address, kind)
        given = {"format": FORMAT, "kind": kind, "about": json.loads(json.dumps(about or {}))}
        if there is None:
            self._check_new(owner, force)
        elif not force:
            self._check_same(there.get("about") or {}, given["about"], free)
        with self._writing():
            if force and there is not None:
                self._give_up()
            # Written even if it says the same: an address that refuses it fails here, not hours
            # later.
            self._disk.write(MARKER, json_bytes(given))
        self._disk.tidy()

    @classmethod
    def existing(cls, address: str | Path, kind: str) -> Records:
        """Records that are already there, whatever they are about; opening them writes nothing."""
        self = cls.__new__(cls)
        if self._open(address, kind) is None:
            self._check_new(False, False)
            raise HcLensError(
                f"expected finished work of {kind!r}, got {address} without {MARKER}; name the "
                "folder or address that it was written to"
            )
        return self

    def read(self, name: str, key: str | None = None) -> dict[str, bytes] | None:
        """The files of a complete record; None if it is missing or has another key than `key`."""
        files: dict[str, bytes] = {}
        for file, expected in self._hashes(name, key).items():
            content = self._disk.read(posixpath.join(name, file))
            if content is None or digest(content) != expected:
                return None
            files[file] = content
        return files or None

    def find(self, name: str, key: str | None = None) -> Path | None:
        """The folder of a complete record in a local folder; None as in `read`."""
        return self.folder(name) if self._is_complete(name, key) else None

    def folder(self, name: str = "") -> Path:
        """Where a record stands, or would stand, in a local folder."""
        if not isinstance(self._disk, _Local):
            raise HcLensError(f"expected a local folder, got {self.address}; name a path")
        return self._disk.root / name

    def write(self, name: str, files: Files | Fill, key: str = "") -> None:
        """Write a record; one that is complete and has this key stays as it is.

        `files` are the content, or a function that writes them into an empty folder. An empty
        `name` stands for the folder itself, which is written in any case.
        """
        if name and self._is_complete(name, key):
            return
        with self._writing():
            folder = self._disk.unfinished()
        try:
            with self._writing(by_caller=callable(files)):
                if callable(files):
                    files(folder)
                else:
                    for file, content in files.items():
                        _write_flushed(_in_folder(folder / file), content)
            with self._writing():
                self._publish(folder, name, key)
        finally:
            _remove(folder)

    def names(self, under: str = "") -> list[str]:
        """Names of the records below a name, complete or not, in order."""
        hidden = (MARKER, DONE, UNFINISHED)
        return sorted(name for name in self._disk.names(under) if name not in hidden)

    def remove(self, name: str) -> None:
        """Remove a record."""
        self._disk.remove(name)

    def write_file(self, name: str, content: bytes | str) -> None:
        """Write a file beside the records, replacing an earlier one at once."""
        with self._writing():
            self._disk.write(name, content.encode() if isinstance(content, str) else content)

    def _publish(self, folder: Path, name: str, key: str) -> None:
        """Finish a record and give it its name, unless another process was faster."""
        hashes: dict[str, str] = {}
        for file in _names_below(folder):
            with open(folder / file, "rb+") as opened:
                os.fsync(opened.fileno())
                hashes[file] = _hash(opened)
        _write_flushed(folder / DONE, json_bytes({"key": key, "files": hashes}))
        if name and self._is_complete(name, key):
            return
        try:
            self._disk.publish(folder, name)
        except OSError:
            if not name or not self._is_complete(name, key):
                raise

    @contextlib.contextmanager
    def _writing(self, by_caller: bool = False) -> Iterator[None]:
        """Turn a failure of the disk into a RecordsError; in the caller's own code, a full disk."""
        try:
            yield
        except RecordsError:
            raise
        except Exception as error:
            if is_full(error) or (not by_caller and isinstance(error, self._disk.failures)):
                raise failed(self.address, error) from error
            raise

    def _hashes(self, name: str, key: str | None) -> dict[str, str]:
        """The hashes of a record's files; none if it is missing or has another key."""
        try:
            done = json.loads(self._disk.read(posixpath.join(name, DONE)) or b"")
            return dict(done["files"]) if key in (None, done["key"]) else {}
        except (ValueError, TypeError, KeyError):
            return {}

    def _is_complete(self, name: str, key: str | None) -> bool:
        hashes = self._hashes(name, key)
        same = (self._disk.hash(posixpath.join(name, file)) == hashes[file] for file in hashes)
        return bool(hashes) and all(same)

    def _open(self, address: str | Path, kind: str) -> dict[str, Any] | None:
        """What ``records.json`` says; another format or kind of work is refused."""
        from fsspec.core import split_protocol

        protocol, rest = split_protocol(str(address))
        local = protocol in (None, "file", "local")
        self._disk = _Local(Path(rest)) if local else _Disk(str(address))
        self.address, self.kind = self._disk.address, kind
        content = self._disk.read(MARKER)
        if content is None:
            return None
        there: dict[str, Any] = {}
        with contextlib.suppress(ValueError, TypeError):
            there = dict(json.loads(content))
        if there.get("format") != FORMAT:
            raise HcLensError(
                f"expected finished work in the format {FORMAT!r}, got {there.get('format')!r} in "
                f"{self.address}; nothing was touched, name another folder or use the version of "
                "hc_lens that wrote it"
            )
        if there.get("kind") != kind:
            raise HcLensError(
                f"expected a new folder or one of {kind!r}, got {self.address}, which holds work "
                f"of {there.get('kind')!r}; nothing was touched, name another folder"
            )
        return there

    def _check_same(
        self, there: Mapping[str, Any], given: Mapping[str, Any], free: Sequence[str]
    ) -> None:
        """Refuse to continue work that is about something else."""
        old, new = _flat(there), _flat(given)
        keys = [key for key in {**old, **new} if key.split(".")[0] not in free]
        differing = [key for key in keys if old.get(key) != new.get(key)]
        if differing:
            key = differing[0]
            raise HcLensError(
                f"expected to continue the work in {self.address}, whose {key} is "
                f"{old.get(key)!r}, got {new.get(key)!r} (differing: {', '.join(differing)}); "
                "repeat the call that began it, or name another folder"
            )

    def _check_new(self, owner: bool | Sequence[str], force: bool) -> None:
        """Refuse a folder in an older layout, and one that holds what it should not."""
        found = self.names()
        *flat, deeper = OLDER_LAYOUTS
        older = [name for name in found if name in flat]
        older += [path for name in found if self._disk.read(path := f"{name}/{deeper}") is not None]
        if older:
            raise HcLensError(
                f"expected a new folder, got {self.address} in the layout of an older version of "
                f"hc_lens (it holds {older[0]} but no {MARKER}); nothing was touched, name another "
                "folder or use the version that wrote it"
            )
        strange = found if owner is True else [name for name in found if name in (owner or ())]
        if strange and not force:
            raise HcLensError(
                f"expected a new folder, got {self.address} with {strange[:3]} and no {MARKER}; "
                "nothing was touched, name another folder"
            )

    def _give_up(self) -> None:
        """Remove the folder's own record and the records directly below it."""
        for file in [DONE, *self._hashes("", None)]:
            self._disk.remove(file)
        for name in self._disk.names(""):
            if self._disk.read(f"{name}/{DONE}") is not None:
                self._disk.remove(name)


class _Disk:
    """An fsspec address, such as ``s3://bucket/sweep``, where nothing can be renamed."""

    failures: type[Exception] = Exception  # each filesystem fails in its own way

    def __init__(self, address: str):
        from fsspec.core import url_to_fs

        try:
            self._files, self._root = url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise HcLensError(
                f"expected a path or an address that fsspec knows, got {address!r}: {error}; "
                "install the package that it names"
            ) from error
        self.address = address

    def read(self, name: str) -> bytes | None:
        """A file, or None."""
        try:
            return self._files.cat_file(f"{self._root}/{name}")
        except _MISSING:
            return None

    def hash(self, name: str) -> str | None:
        """The `digest` of a file, or None."""
        try:
            with self._files.open(f"{self._root}/{name}", "rb") as file:
                return _hash(file)
        except _MISSING:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, replacing an earlier one."""
        target = f"{self._root}/{name}"
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(target, content)

    def unfinished(self) -> Path:
        """An empty local folder in which a record is made."""
        return Path(tempfile.mkdtemp())

    def publish(self, folder: Path, name: str) -> None:
        """Give the files of an unfinished folder their names, ``done.json`` last."""
        for file in _names_below(folder):
            self.write(posixpath.join(name, file), (folder / file).read_bytes())

    def names(self, under: str) -> list[str]:
        """Names of the files and folders in a folder."""
        folder = f"{self._root}/{under}".rstrip("/")
        try:
            # A listing kept from before would hide what other processes wrote.
            self._files.invalidate_cache(folder)
            found = self._files.ls(folder, detail=False)
        except _MISSING:
            return []
        return [item.rstrip("/").rpartition("/")[2] for item in found]

    def remove(self, name: str) -> None:
        """Remove a file or folder."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{name}", recursive=True)

    def tidy(self) -> None:
        """Remove what processes that have died left half-written: here nothing."""


class _Local(_Disk):
    """A local folder, where a record is flushed to the disk and renamed."""

    failures = OSError

    def __init__(self, folder: Path):
        from fsspec.implementations.local import LocalFileSystem

        self.root = folder.expanduser().absolute()
        self.address = str(self.root)
        self._files, self._root = LocalFileSystem(), self.root.as_posix()
        if self.root.exists() and not self.root.is_dir():
            raise HcLensError(f"expected a folder, got the file {folder}; name another")

    def write(self, name: str, content: bytes) -> None:
        write_file(self.root / name, content, self._beside())
        _flush_folder(self.root)

    def unfinished(self) -> Path:
        folder = self._beside()
        folder.mkdir()
        return folder

    def publish(self, folder: Path, name: str) -> None:
        target = self.root / name
        _flush_folder(folder)
        if name:
            if _in_folder(target).exists():  # damaged, or of another key
                replaced = self._beside()
                os.replace(target, replaced)
                _remove(replaced)
            os.rename(folder, target)
        else:
            for file in _names_below(folder):
                os.replace(folder / file, _in_folder(target / file))
        _flush_folder(target.parent if name else target)

    def remove(self, name: str) -> None:
        _remove(self.root / name)

    def tidy(self) -> None:
        for item in (self.root / UNFINISHED).iterdir():
            host, _, rest = item.name.rpartition("@")
            pid = rest.partition("-")[0]
            if host == socket.gethostname() and pid.isdigit() and not _alive(int(pid)):
                _remove(item)

    def _beside(self) -> Path:
        """A name that no other process uses, from which this process can be told."""
        folder = self.root / UNFINISHED
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{socket.gethostname()}@{os.getpid()}-{uuid.uuid4().hex}"


_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def _flat(about: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Nested settings under dotted names, so that a message can name the one that differs."""
    flat: dict[str, Any] = {}
    for key, value in about.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{start}{key}.")
        else:
            flat[f"{start}{key}"] = value
    return flat


def _names_below(folder: Path) -> list[str]:
    """Paths of all files below a folder, in order, ``done.json`` last."""
    files = (item.relative_to(folder).as_posix() for item in folder.rglob("*") if item.is_file())
    return sorted(files, key=lambda name: (name == DONE, name))


def _hash(file: io.IOBase) -> str:
    """The `digest` of a file's content, a little of it in memory at a time."""
    made = hashlib.blake2b(digest_size=16)
    made.update(f"{file.seek(0, os.SEEK_END)} ".encode())
    file.seek(0)
    while chunk := file.read(CHUNK):
        made.update(chunk)
    return made.hexdigest()


def _in_folder(path: Path) -> Path:
    """A path whose folder has been made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


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
    if item.is_dir() and not item.is_symlink():
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
    except PermissionError:  # it belongs to somebody else
        pass
    return True
