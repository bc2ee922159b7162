"""What can happen to a file on disk: a flipped bit, a lost end, another number, another's place.

`at`, from 0 to 1, says where in the file it happens.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

SHAPES = (b"null", b"[]", b"{}", b"3", b'"text"', b"[[1]]", b'{"key": 1}', b'{"files": []}')
"""JSON that can be read and is none of ours."""


def flip(path: Path, at: float = 0.5) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes() or b"\0")
    content[int(len(content) * at)] ^= 1 << int(800 * at) % 8
    path.write_bytes(content)


def truncate(path: Path, at: float = 0.5) -> None:
    """Lose the end."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * at)])


def edit(path: Path, at: float = 0.999) -> None:
    """Make a digit another; in a file without digits, flip a bit."""
    content = path.read_bytes()
    places = [found.start() for found in re.finditer(rb"[0-9]", content)]
    if not places:
        flip(path, at)
        return
    place = places[int(len(places) * at)]
    other = b"7" if content[place : place + 1] != b"7" else b"3"
    path.write_bytes(content[:place] + other + content[place + 1 :])


def blank(path: Path, at: float = 0.5) -> None:
    """Lose the content, as when a system stops before a file has reached the disk."""
    path.write_bytes(bytes(path.stat().st_size if at < 0.5 else 0))


def reshape(path: Path, at: float = 0.5) -> None:
    """Put valid JSON of another shape in its place: that of nobody, or its own with a change."""
    try:
        about = json.loads(path.read_bytes())
        own = [{key: about[key] for key in about if key != left} for left in about]
        own += [{**about, key: value} for key in about for value in (None, [], {}, "text")]
        shapes = [*SHAPES, *(json.dumps(each).encode() for each in own)]
    except (ValueError, TypeError):
        shapes = list(SHAPES)
    path.write_bytes(shapes[int(len(shapes) * at)])


def delete(path: Path, at: float = 0.5) -> None:
    """Remove it."""
    path.unlink()


def block(path: Path, at: float = 0.5) -> None:
    """Put a folder in its place."""
    path.unlink()
    path.mkdir()


def swap(first: Path, second: Path) -> None:
    """Let two files or folders change places."""
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def replace(first: Path, second: Path) -> None:
    """Put a copy of another file in its place."""
    shutil.copyfile(second, first)


DAMAGES: tuple[Callable[[Path], None], ...] = (flip, truncate, edit)
"""What can happen to one file."""
EVERY = (*DAMAGES, blank, reshape, delete, block)
"""The same, with what only a campaign tries."""
PAIRS = (swap, replace)
"""What can happen to two files of one kind."""
