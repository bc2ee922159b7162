"""Finished work on disk: what is there is complete, and is not computed again.

1. A record is a folder of files with ``done.json``, which holds the record's key and the hash of
   every file. A record counts only if it has the right key and every file has its hash; anything
   else counts as missing. A key is the `digest` of everything that decides the content.
2. The files of a record are first written into a folder of another name. In a local folder that
   one is flushed to the disk and renamed; elsewhere (``s3://...``) there is no rename, so the files
   are copied and ``done.json`` comes last. A record that is a whole folder itself (its name is
   empty) shares it with other files, so its files are moved one by one, ``done.json`` last.
3. `Records` is a folder of records of one kind of work. Its ``records.json`` names the format, the
   kind and what the work is about. A folder with other work, or one in the layout of an older
   version, is refused and left as it is.
4. What a process that has died left half-written is removed when the folder is next opened.
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
TEXT_COLUMNS = ("checkpoint", "dataset", "case", "side", "unit", "set", "sender", "receiver", "run")
"""Columns that hold text even where it looks like a number."""
CHUNK = 2**20
"""Bytes of a file that are in memory at one time while it is hashed."""

Files = Mapping[str, bytes]
"""The files of a record, by their path below it."""
Fill = Callable[[Path], object]
"""Writes the files of a record into an empty folder."""


class OtherWorkError(HcLensError):
    """A folder holds something else, which ``force=True`` would write over."""


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
        given: dict[str, Any] = json.loads(json.dumps(about or {}))
        if there is None:
            self._check_new(owner, force)
        elif not force:
            self._check_same(there, given, free)
        with self._writing():
            if force and there is not None:
                self._give_up()
            # Written even if it says the same: an address that refuses it fails here, not hours
            # later.
            self._put(MARKER, json_bytes({"format": FORMAT, "kind": kind, "about": given}))
        self._tidy()

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
            content = self._get(posixpath.join(name, file))
            if content is None or digest(content) != expected:
                return None
            files[file] = content
        return files or None

    def find(self, name: str, key: str | None = None) -> Path | None:
        """The folder of a complete record in a local folder; None as in `read`."""
        return self.folder(name) if self._is_complete(name, key) else None

    def folder(self, name: str = "") -> Path:
        """Where a record stands, or would stand, in a local folder."""
        if self._folder is None:
            raise HcLensError(f"expected a local folder, got {self.address}; name a path")
        return self._folder / name

    def write(self, name: str, files: Files | Fill, key: str = "") -> None:
        """Write a record; one that is complete and has this key stays as it is.

        `files` are the content, or a function that writes them into an empty folder. An empty
        `name` stands for the folder itself, which is written in any case.
        """
        if name and self._is_complete(name, key):
            return
        with self._writing():
            folder = Path(tempfile.mkdtemp()) if self._folder is None else self._beside()
            folder.mkdir(exist_ok=True)
        try:
            if callable(files):
                with self._writing(by_caller=True):
                    files(folder)
            with self._writing():
                for file, content in {} if callable(files) else files.items():
                    _write_flushed(_in_folder(folder / file), content)
                self._publish(folder, name, key)
        finally:
            _remove(folder)

    def names(self, under: str = "") -> list[str]:
        """Names of the records below a name, complete or not, in order."""
        try:
            # A listing kept from before would hide what other processes wrote.
            self._files.invalidate_cache()
            found = self._files.ls(self._path(under), detail=False)
        except _MISSING:
            return []
        names = {item.rstrip("/").rpartition("/")[2] for item in found}
        return sorted(names - {MARKER, DONE, UNFINISHED})

    def remove(self, name: str) -> None:
        """Remove a record."""
        if self._folder is not None:
            _remove(self._folder / name)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._path(name), recursive=True)

    def write_file(self, name: str, content: bytes | str) -> None:
        """Write a file beside the records, replacing an earlier one at once."""
        with self._writing():
            self._put(name, content.encode() if isinstance(content, str) else content)

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
            self._give_name(folder, name)
        except OSError:
            if not name or not self._is_complete(name, key):
                raise

    def _give_name(self, folder: Path, name: str) -> None:
        """Rename a folder; where that cannot be done, write its files again, ``done.json`` last."""
        if not name or self._folder is None:
            for file in _names_below(folder):
                self._put(posixpath.join(name, file), (folder / file).read_bytes())
            return
        _flush_folder(folder)
        target = _in_folder(self._folder / name)
        if target.exists():  # damaged, or of another key
            replaced = self._beside()
            os.replace(target, replaced)
            _remove(replaced)
        os.rename(folder, target)
        _flush_folder(target.parent)

    @contextlib.contextmanager
    def _writing(self, by_caller: bool = False) -> Iterator[None]:
        """Turn a failure of the disk into a RecordsError; in the caller's own code, a full disk."""
        try:
            yield
        except Exception as error:  # each filesystem fails in its own way
            if isinstance(error, RecordsError) or (by_caller and not is_full(error)):
                raise
            raise failed(self.address, error) from error

    def _hashes(self, name: str, key: str | None) -> dict[str, str]:
        """The hashes of a record's files; none if it is missing or has another key."""
        try:
            done = json.loads(self._get(posixpath.join(name, DONE)) or b"")
            return dict(done["files"]) if key in (None, done["key"]) else {}
        except (ValueError, TypeError, KeyError):
            return {}

    def _is_complete(self, name: str, key: str | None) -> bool:
        hashes = self._hashes(name, key)
        try:
            for file, expected in hashes.items():
                with self._files.open(self._path(posixpath.join(name, file)), "rb") as opened:
                    if _hash(opened) != expected:
                        return False
        except _MISSING:
            return False
        return bool(hashes)

    def _open(self, address: str | Path, kind: str) -> dict[str, Any] | None:
        """What the work is about; None in a new folder, and another format or kind is refused."""
        from fsspec.core import split_protocol
        from fsspec.implementations.local import LocalFileSystem

        protocol, rest = split_protocol(str(address))
        self.address = str(address)
        self._files: Any = LocalFileSystem()
        self._folder: Path | None = None
        """The local folder, in which files can be renamed; None elsewhere."""
        if protocol in (None, "file", "local"):
            self._folder = Path(rest).expanduser().absolute()
            self.address, self._root = str(self._folder), self._folder.as_posix()
            if self._folder.exists() and not self._folder.is_dir():
                raise HcLensError(f"expected a folder, got the file {rest}; name another")
        else:
            self._files, self._root = _filesystem(self.address)
        content = self._get(MARKER)
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
        return there.get("about") or {}

    def _check_same(
        self, there: Mapping[str, Any], given: Mapping[str, Any], free: Sequence[str]
    ) -> None:
        """Refuse to continue work that is about something else."""
        old, new = _flat(there), _flat(given)
        changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        differing = [key for key in changed if key.split(".")[0] not in free]
        if differing:
            key = differing[0]
            raise OtherWorkError(
                f"expected to continue the work in {self.address}, whose {key} is "
                f"{old.get(key)!r}, got {new.get(key)!r} (differing: {', '.join(differing)}); "
                "repeat the call that began it, or name another folder"
            )

    def _check_new(self, owner: bool | Sequence[str], force: bool) -> None:
        """Refuse a folder in an older layout, and one that holds what it should not."""
        found = self.names()
        *flat, deeper = OLDER_LAYOUTS
        older = [name for name in found if name in flat]
        older += [path for name in found if self._get(path := f"{name}/{deeper}") is not None]
        if older:
            raise HcLensError(
                f"expected a new folder, got {self.address} in the layout of an older version of "
                f"hc_lens (it holds {older[0]} but no {MARKER}); nothing was touched, name another "
                "folder or use the version that wrote it"
            )
        strange = found if owner is True else [name for name in found if name in (owner or ())]
        if strange and not force:
            raise OtherWorkError(
                f"expected a new folder, got {self.address} with {strange[:3]} and no {MARKER}; "
                "nothing was touched, name another folder"
            )

    def _give_up(self) -> None:
        """Remove the folder's own record and the records directly below it."""
        for file in [DONE, *self._hashes("", None)]:
            self.remove(file)
        for name in self.names():
            if self._get(f"{name}/{DONE}") is not None:
                self.remove(name)

    def _path(self, name: str) -> str:
        """The address of a file or folder, as its filesystem writes it."""
        return f"{self._root}/{name}".rstrip("/")

    def _get(self, name: str) -> bytes | None:
        """The content of a file, or None."""
        try:
            return self._files.cat_file(self._path(name))
        except _MISSING:
            return None

    def _put(self, name: str, content: bytes) -> None:
        """Write a file, replacing an earlier one."""
        if self._folder is None:
            target = self._path(name)
            self._files.makedirs(posixpath.dirname(target), exist_ok=True)
            self._files.pipe_file(target, content)
        else:
            target = _in_folder(self._folder / name)
            write_file(target, content, self._beside())
            _flush_folder(target.parent)

    def _beside(self) -> Path:
        """A name in a local folder that no other process uses, and that tells of this one."""
        folder = self.folder(UNFINISHED)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{socket.gethostname()}@{os.getpid()}-{uuid.uuid4().hex}"

    def _tidy(self) -> None:
        """Remove what processes of this machine that have died left half-written."""
        folder = self._folder and self._folder / UNFINISHED
        for item in folder.iterdir() if folder else ():
            host, _, rest = item.name.rpartition("@")
            pid = rest.partition("-")[0]
            if host == socket.gethostname() and pid.isdigit() and not _alive(int(pid)):
                _remove(item)


_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def _filesystem(address: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise HcLensError(
            f"expected a path or an address that fsspec knows, got {address!r}: {error}; "
            "install the package that it names"
        ) from error


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
    with contextlib.suppress(OSError):
        # A process that has ended can be called until its parent has looked at it.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return True
