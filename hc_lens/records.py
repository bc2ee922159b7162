"""Finished work on disk: what is there is complete, and is not computed again.

1. A record is a folder of files with ``done.json``, which holds the record's key, the hash of every
   file, and a seal: the hash of its own content and of the record's name. A record counts only if
   the seal and every hash are right; anything else is damaged, which is said in a warning, and
   counts as missing. One with another key is missing too. A key is the `digest` of everything that
   decides the content.
2. The files of a record are first written into a folder of another name. In a local folder that
   one is flushed to the disk and renamed; elsewhere (``s3://...``) there is no rename, so each file
   is copied below its own hash, where no other content ever stands, ``done.json`` comes last, and
   the record is read back: of two who write one record at once, one ``done.json`` stays, and all
   that it names is there. A record that is a whole folder itself (its name is empty) shares it with
   other files, so its files are moved one by one, ``done.json`` last.
3. `Records` is a folder of records of one kind of work. Its ``records.json`` names the format, the
   kind and what the work is about; ``.records.json`` is a copy, should it be damaged. A folder with
   other work, or one in the layout of an older version, is refused and left as it is.
4. Work of which one process alone may be in charge holds the lock of its folder (`hc_lens.locks`).
5. What is half-written has a name that tells its process. It never counts as work of anybody, and
   what a process that has died left is removed when the folder is next opened.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import posixpath
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hc_lens import locks
from hc_lens.errors import HcLensError, HcLensWarning, warn

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "hc_lens.records.1"
MARKER, COPY = "records.json", ".records.json"
"""What a folder holds, and a copy of it."""
DONE = "done.json"
UNFINISHED, LOCK = ".unfinished", "lock"
"""Folder in which records and files are written before they get their name, and its lock."""
OLDER_LAYOUTS = ("store.json", "run.json", "study.json", "command.toml", "scan.json")
"""Files by which folders of older versions are known where ``records.json`` is missing. The last of
them stood one level deeper."""
LONGEST_NAME = 150
"""Most characters of a name that a text gets; file systems take about 250."""
SCRATCH = "hc_lens"
"""How the names of our temporary folders begin."""
TEXT_COLUMNS = ("checkpoint", "dataset", "case", "side", "unit", "set", "sender", "receiver", "run")
"""Columns that hold text even where it looks like a number."""
SEAL = "seal"
"""Entry of a JSON file by which a change of it, or of what it vouches for, is noticed."""
AGAIN = 2
"""How often a record at an address is read or written again if it is not whole."""
CHUNK = 2**20
"""Bytes of a file that are in memory at one time while it is hashed."""

Files = Mapping[str, bytes]
"""The files of a record, by their path below it."""
Fill = Callable[[Path], object]
"""Writes the files of a record into an empty folder."""


class OtherWorkError(HcLensError):
    """A folder holds something else, which ``force=True`` would write over."""

    there: Mapping[str, Any] = {}
    """What the work in the folder is about, where it is of the same kind."""


class DamagedWarning(HcLensWarning):
    """Kept work is not as it was written: it is not used."""


class RecordsError(HcLensError):
    """Finished work cannot be written or read: a full disk, no permission, no answer."""


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


def sha256(text: str) -> bytes:
    """The SHA-256 of a text, by which browsers know a script."""
    return hashlib.sha256(text.encode()).digest()


def seed_of(text: str) -> int:
    """A seed that a text alone decides: the first 63 bits of its SHA-256."""
    return int.from_bytes(sha256(text)[:8], "little") >> 1


def safe_name(text: str) -> str:
    """A record's name for any text: never a path or a hidden name, and short enough for a file."""
    quoted = quote(text, safe="") or "%"
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    if len(quoted) > LONGEST_NAME:
        quoted = f"{quoted[: LONGEST_NAME - 33]}-{digest(text)}"
    return quoted


def json_bytes(value: object) -> bytes:
    """A value as JSON, the same bytes each time."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def sealed(about: Mapping[str, Any], *more: object) -> dict[str, Any]:
    """Values with a seal: the `digest` of them, and of what else they vouch for."""
    plain = json.loads(json.dumps(about))  # as they will be read
    return {**plain, SEAL: digest(plain, *more)}


def unsealed(content: bytes | str, *more: object) -> dict[str, Any]:
    """The values of JSON that `sealed` made, without the seal; a ValueError if they have changed.

    Files of older versions have no seal.
    """
    try:
        about = dict(json.loads(content))
        whole = about.pop(SEAL, digest(about, *more)) == digest(about, *more)
    except RecursionError as error:
        raise ValueError("JSON that nests too deeply") from error
    if not whole:
        raise ValueError("content that has changed since it was written")
    return about


def table_bytes(table: pd.DataFrame) -> bytes:
    """A table as CSV, from which `read_table` gives back every number bit by bit."""
    return table.to_csv(index=False).encode()


def read_table(content: bytes | Path) -> pd.DataFrame:
    """The table that `table_bytes` wrote; numbers come back exactly, texts stay texts."""
    import pandas as pd

    older = tuple(map(int, pd.__version__.split(".")[:2])) < (3, 1)
    table = pd.read_csv(
        content if isinstance(content, Path) else io.BytesIO(content),
        dtype=dict.fromkeys(TEXT_COLUMNS, str),
        keep_default_na=False,
        na_values=[""],
        float_precision="round_trip" if older else None,  # newer ones are exact unasked
    )
    return table.fillna({name: "" for name in TEXT_COLUMNS if name in table})


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file completely or not at all, and the folder that it goes to."""
    with writing(path):
        _clean(_in_folder(path).parent.glob(f".{glob.escape(path.name)}~*"))
        _replace(path, content, path.with_name(f".{path.name}~{_mark()}"))


def _replace(path: Path, content: bytes | str, unfinished: Path) -> None:
    """Write a file under another name, flush it to the disk, and rename it."""
    try:
        _write_flushed(unfinished, content.encode() if isinstance(content, str) else content)
        if path.is_dir():
            path.rmdir()  # an empty folder is nobody's; a full one is an error
        os.replace(unfinished, path)
        _flush_folder(path.parent)
    finally:
        _remove(unfinished)


@contextlib.contextmanager
def as_folder(files: Files) -> Iterator[Path]:
    """A folder that holds some files for the duration of a ``with`` block."""
    folder = _scratch()
    try:
        with writing(folder):
            for name, content in files.items():
                _in_folder(folder / name).write_bytes(content)
        yield folder
    finally:
        _remove(folder)


def files_of(fill: Fill) -> dict[str, bytes]:
    """The files that a function writes into an empty folder, by their path below it."""
    with as_folder({}) as folder:
        with writing(folder, by_caller=True):
            fill(folder)
        return {name: (folder / name).read_bytes() for name in _names_below(folder)}


def changed_file(folder: Path) -> str | None:
    """The file by which the folder of a record is not as it was written; None in any other folder.

    For a folder that somebody names by its path. It may be a copy, so its own name does not count.
    """
    hashes = recorded_files(folder)
    if hashes is None:
        # Among records it is a damaged one, elsewhere somebody else's file of this name.
        return DONE if (folder.parent / MARKER).exists() else None
    for file, expected in hashes.items():
        found = ""
        with contextlib.suppress(OSError):
            if (folder / file).is_file():  # anything else might never end
                with open(folder / file, "rb") as opened:
                    found = _hash(opened)
        if found != expected:
            return file
    return None


def recorded_files(folder: Path) -> dict[str, str] | None:
    """The files that a folder's ``done.json`` names, with their hashes; None if it is damaged.

    A folder without one has none.
    """
    done = folder / DONE
    try:
        return _hashes_in(json.loads(done.read_bytes())) if done.is_file() else {}
    except OSError:
        return {}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def is_full(error: BaseException) -> bool:
    """Whether a full disk is behind an error; safetensors tells it only in the text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    cause = error.__cause__ or error.__context__
    return "No space left on device" in str(error) or (cause is not None and is_full(cause))


def is_broken(error: BaseException) -> bool:
    """Whether a disk that is full, fails or cannot be written to is behind an error."""
    known = isinstance(error, OSError) and error.errno in (errno.EIO, errno.EROFS)
    told = ("Input/output error", "Read-only file system")  # in the text of safetensors' errors
    cause = error.__cause__ or error.__context__
    if known or is_full(error) or any(text in str(error) for text in told):
        return True
    return cause is not None and is_broken(cause)


def failed(
    address: str | Path,
    error: BaseException,
    what: str = "write to",
    cure: str = "make room or give access",
) -> RecordsError:
    """The error of an address that cannot be written to, or not read."""
    if isinstance(error, OSError) and error.errno in _IN_THE_WAY:
        cure = "move what stands in its place"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        cure = "give a shorter name"
    return RecordsError(
        f"expected to {what} {address}, got {type(error).__name__}: {error}; {cure}, then call "
        "again: finished work is kept"
    )


@contextlib.contextmanager
def writing(address: str | Path, by_caller: bool = False) -> Iterator[None]:
    """Turn a failure of the disk into a RecordsError; in the caller's own code, a disk's alone."""
    try:
        yield
    except Exception as error:  # each filesystem fails in its own way
        if isinstance(error, HcLensError) or (by_caller and not is_broken(error)):
            raise
        raise failed(address, error) from error


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
        alone: bool = False,
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
            alone: refuse a folder that another holds in this way, until `close` or the end of a
                ``with`` block; not at an address that is no local folder.
        """
        given: dict[str, Any] = json.loads(json.dumps(about or {}))

        def check() -> dict[str, Any] | None:
            there = self._open(address, kind)
            if there is None:
                self._check_new(owner, force)
            elif not force:
                self._check_same(there, given, free)
            return there

        there = check()
        with contextlib.ExitStack() as held:
            if alone and self._folder is not None:
                with writing(self.address):
                    path = _in_folder(self._folder / UNFINISHED / LOCK)
                    held.enter_context(locks.alone(path))
                there = check()  # another may have ended just before
            self._begin(kind, given, force and there is not None)
            self._held = held.pop_all()

    def _begin(self, kind: str, given: Mapping[str, Any], give_up: bool) -> None:
        with writing(self.address):
            if give_up:
                self._give_up()
            # Written even if it says the same: an address that refuses it fails here, not hours
            # later.
            marker = json_bytes(sealed({"format": FORMAT, "kind": kind, "about": given}))
            for name in (MARKER, COPY):
                self._put(name, marker)
        self.tidy()

    _held: contextlib.ExitStack | None = None

    def close(self) -> None:
        """Let others write to a folder that was opened with ``alone=True``."""
        if self._held is not None:
            self._held.close()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """The files of a complete record; None if it is missing or has another key than `key`.

        A damaged one is named in a warning and counts as missing.
        """
        return self._read(name, key, say=True)

    def find(self, name: str, key: str | None = None) -> Path | None:
        """The folder of a complete record in a local folder; None as in `read`."""
        return self.folder(name) if self._is_complete(name, key, say=True) else None

    def folder(self, name: str = "") -> Path:
        """Where a record stands, or would stand, in a local folder."""
        if self._folder is None:
            raise HcLensError(f"expected a local folder, got {self.address}; name a path")
        return self._folder / _checked(name)

    def write(self, name: str, files: Files | Fill, key: str = "") -> None:
        """Write a record; one that is complete and has this key stays as it is.

        `files` are the content, or a function that writes them into an empty folder. An empty
        `name` stands for the folder itself, which is written in any case.
        """
        if name and self._is_complete(name, key):
            return
        with writing(self.address):
            folder = _scratch() if self._folder is None else self._beside()
            folder.mkdir(exist_ok=True)
        try:
            if callable(files):
                with writing(self.address, by_caller=True):
                    files(folder)
            with writing(self.address):
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
            with self._reading():
                found = self._files.ls(self._path(under), detail=False)
        except OSError as error:
            if not _is_missing(error):
                raise
            return []
        names = {item.rstrip("/").rpartition("/")[2] for item in found}
        own = {MARKER, COPY, DONE, UNFINISHED}
        return sorted(name for name in names - own if not _LEFTOVER.fullmatch(name))

    def remove(self, name: str) -> None:
        """Remove a record."""
        if self._folder is not None:
            _remove(self.folder(_checked(name, some=True)))
        else:
            with writing(self.address), contextlib.suppress(FileNotFoundError):
                self._files.rm(self._path(_checked(name, some=True)), recursive=True)

    def write_file(self, name: str, content: bytes | str) -> None:
        """Write a file beside the records, replacing an earlier one at once."""
        with writing(self.address):
            self._put(name, content.encode() if isinstance(content, str) else content)

    def set_aside(self, name: str) -> str:
        """Give a file beside the records another name, and tell it."""
        path = self.folder(name)
        numbered = (f"{path.stem}.other-{number}{path.suffix}" for number in itertools.count(1))
        free = next(other for other in numbered if not self.folder(other).exists())
        with writing(self.address):
            os.rename(path, self.folder(free))
        return free

    def tidy(self) -> None:
        """Remove what processes of this machine that have died left half-written."""
        if self._folder is not None:
            _clean((self._folder / UNFINISHED).glob("*"))
            _clean(self._folder.glob(".*~*"))
            for item in self._folder.glob(f".{MARKER}.*"):  # so older versions named them
                pid = item.name.rpartition(".")[2]
                if pid.isdigit() and not locks.alive(int(pid)):
                    _remove(item)

    def _publish(self, folder: Path, name: str, key: str) -> None:
        """Finish a record and give it its name, unless another process was faster."""
        hashes: dict[str, str] = {}
        for file in _names_below(folder):
            with open(folder / file, "rb+") as opened:
                os.fsync(opened.fileno())
                hashes[file] = _hash(opened)
        _write_flushed(folder / DONE, json_bytes(sealed({"key": key, "files": hashes}, name)))
        try:
            if name and self._folder is not None:
                with locks.in_turn(self._folder):
                    if not self._is_complete(name, key):
                        self._rename(folder, self.folder(name))
            elif not name or not self._is_complete(name, key):
                self._copy(folder, name, hashes)
        except OSError:
            if not name or not self._is_complete(name, key):
                raise

    def _rename(self, folder: Path, target: Path) -> None:
        """Give a folder a record's name; what has it is damaged, or of another key."""
        for inner in (*(item for item in folder.rglob("*") if item.is_dir()), folder):
            _flush_folder(inner)
        if _in_folder(target).exists():
            replaced = self._beside()
            os.replace(target, replaced)
            _remove(replaced)
        os.rename(folder, target)
        _flush_folder(target.parent)

    def _copy(self, folder: Path, name: str, hashes: Mapping[str, str]) -> None:
        """Write a folder's files again where they belong, ``done.json`` last.

        At an address, what the record held before stays below its hashes until the record is
        removed: another who writes at the same time may just have finished with it.
        """
        for _ in range(1 + AGAIN):
            for file in _names_below(folder):
                place = self._place(name, file, hashes.get(file, ""))
                self._put(place, (folder / file).read_bytes())
            # At an address two may write at once; whose record it is then does not matter.
            if self._folder is not None or self._is_complete(name, None):
                break
        else:
            raise OSError(f"{name} as it was read back is not what was written")

    def _place(self, name: str, file: str, content: str) -> str:
        """Where a record's file with the hash `content` stands; ``done.json`` has a fixed place."""
        own = bool(name) and self._folder is None and file != DONE
        return posixpath.join(name, content if own else "", file)

    def _read(
        self, name: str, key: str | None, say: bool, again: int = AGAIN
    ) -> dict[str, bytes] | None:
        files: dict[str, bytes] = {}
        for file, expected in self._hashes(name, key, say).items():
            content = self._get(self._place(name, file, expected))
            if content is None or digest(content) != expected:
                if again and self._folder is None:  # another process may just have replaced it
                    return self._read(name, key, say, again - 1)
                if say:
                    self._say_damaged(self._place(name, file, expected))
                return None
            files[file] = content
        return files or None

    def _hashes(self, name: str, key: str | None, say: bool = False) -> dict[str, str]:
        """The hashes of a record's files; none if it is missing, damaged or has another key."""
        content = self._get(posixpath.join(name, DONE))
        if content is None and not (name and self._folder and (self._folder / name).is_dir()):
            return {}
        try:
            done = unsealed(content or b"", name)
            hashes = _hashes_in(done)
            return hashes if key in (None, done["key"]) else {}
        except (ValueError, TypeError, KeyError):
            if say:
                self._say_damaged(posixpath.join(name, DONE))
            return {}

    def _is_complete(self, name: str, key: str | None, say: bool = False) -> bool:
        if self._folder is None:
            return self._read(name, key, say) is not None
        hashes = self._hashes(name, key, say)
        for file, expected in hashes.items():
            try:
                with self._files.open(self._path(posixpath.join(name, file)), "rb") as opened:
                    found = _hash(opened)
            except OSError as error:
                if not _is_missing(error):
                    raise
                found = ""
            if found != expected:
                if say:
                    self._say_damaged(posixpath.join(name, file))
                return False
        return bool(hashes)

    def _say_damaged(self, place: str) -> None:
        warn(
            f"{posixpath.join(self.address, place)} is damaged or gone: what was kept there "
            "is not used, and is computed again where it is needed",
            DamagedWarning,
        )

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
            if os.path.exists(self._folder) and not os.path.isdir(self._folder):
                raise HcLensError(f"expected a folder, got the file {rest}; name another")
        else:
            self._files, self._root = _filesystem(self.address)
        there = self._marker(kind)
        if there is None:
            return None
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

    def _marker(self, kind: str) -> dict[str, Any] | None:
        """What the folder says of itself; None if it is new, nothing if it cannot be read.

        One of the two files that says something of another kind came from elsewhere.
        """
        # The copy is written last, so it is read first: another process may be making the folder.
        copy, marker = self._get(COPY), self._get(MARKER)
        found = {MARKER: marker, COPY: copy}
        whole: dict[str, dict[str, Any]] = {}
        for name, content in found.items():
            with contextlib.suppress(ValueError, TypeError):
                there = unsealed(content or b"")
                if isinstance(there.get("about", {}), dict):
                    whole[name] = there
        for name, there in sorted(whole.items(), key=lambda item: item[1].get("kind") != kind):
            if name == COPY:
                text = f"{posixpath.join(self.address, MARKER)} is damaged or gone: its copy"
                warn(f"{text} {COPY} is used", DamagedWarning)
            return there
        return {} if any(content is not None for content in found.values()) else None

    def _check_same(
        self, there: Mapping[str, Any], given: Mapping[str, Any], free: Sequence[str]
    ) -> None:
        """Refuse to continue work that is about something else."""
        old, new = _flat(there), _flat(given)
        changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        differing = [key for key in changed if key.split(".")[0] not in free]
        if differing:
            key = differing[0]
            error = OtherWorkError(
                f"expected to continue the work in {self.address}, whose {key} is "
                f"{old.get(key)!r}, got {new.get(key)!r} (differing: {', '.join(differing)}); "
                "repeat the call that began it, or name another folder"
            )
            error.there = old
            raise error

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
        return f"{self._root}/{_checked(name)}".rstrip("/")

    def _get(self, name: str) -> bytes | None:
        """The content of a file, or None."""
        try:
            with self._reading():
                return self._files.cat_file(self._path(name))
        except OSError as error:
            if not _is_missing(error):
                raise
            return None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn the failure of an address into a RecordsError; what is missing stays missing."""
        try:
            yield
        except _MISSING:
            raise
        except Exception as error:
            if self._folder is not None:
                raise
            cure = "see to its bucket, keys and network"
            raise failed(self.address, error, "read", cure) from error

    def _put(self, name: str, content: bytes) -> None:
        """Write a file, replacing an earlier one."""
        if self._folder is None:
            target = self._path(name)
            if target.startswith("/"):  # else it starts with a bucket, which is not ours to make
                self._files.makedirs(posixpath.dirname(target), exist_ok=True)
            self._files.pipe_file(target, content)
        else:
            target = _in_folder(self.folder(name))
            _replace(target, content, self._beside())
            _flush_folder(target.parent)

    def _beside(self) -> Path:
        """A name in a local folder that no other process uses, and that tells of this one."""
        folder = self.folder(UNFINISHED)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / _mark()


_LEFTOVER = re.compile(r"\..+(~.+@|\.)\d+(-[0-9a-f]{32})?")
"""The name of a half-written file that stands beside the finished ones, also of older versions."""
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY)


def _is_missing(error: OSError) -> bool:
    """Whether there is no such file, or nothing that could be one."""
    return isinstance(error, _MISSING) or error.errno in (errno.ELOOP, errno.ENAMETOOLONG)


def _hashes_in(done: Mapping[str, Any]) -> dict[str, str]:
    """The hashes that a ``done.json`` holds; a ValueError or a TypeError if they are none."""
    hashes = dict(done["files"])
    for name, content in hashes.items():
        if not isinstance(content, str) or not _is_below(name) or not name.isprintable():
            raise ValueError(f"the file {name!r} of a record, with the hash {content!r}")
    return hashes


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


def _checked(name: str, some: bool = False) -> str:
    """A name as it is given, unless it leads elsewhere; an empty one is the folder itself."""
    if (name or some) and not _is_below(name):
        raise HcLensError(
            f"expected the name of a record below its folder, got {name!r}; make one with "
            "hc_lens.records.safe_name"
        )
    return name


def _is_below(name: str) -> bool:
    """Whether a name is that of something below a folder."""
    return all(part not in ("", ".", "..") for part in name.split("/"))


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
    """A path whose folder has been made, and has reached the disk."""
    new = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in new:
        _flush_folder(folder.parent)
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


def _mark() -> str:
    """A name that no other process uses, and that tells of this one."""
    return f"{socket.gethostname()}@{os.getpid()}-{uuid.uuid4().hex}"


def _clean(items: Iterable[Path]) -> None:
    """Remove those items that processes of this machine which have died left half-written."""
    for item in items:
        host, _, rest = item.name.rpartition("~")[2].rpartition("@")
        pid = rest.partition("-")[0]
        if host == socket.gethostname() and pid.isdigit() and not locks.alive(int(pid)):
            _remove(item)


def _scratch() -> Path:
    """A new folder among the temporary ones of the system."""
    where = Path(tempfile.gettempdir())
    _clean_scratch(where)
    folder = where / f"{SCRATCH}~{_mark()}"
    with writing(where):
        folder.mkdir(mode=0o700)
    return folder


@functools.cache
def _clean_scratch(where: Path) -> None:
    """Remove the temporary folders of processes that have died, once."""
    _clean(where.glob(f"{SCRATCH}~*"))
