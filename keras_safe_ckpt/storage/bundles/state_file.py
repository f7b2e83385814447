"""The file in which TensorFlow keeps which checkpoints a directory has (``checkpoint``).

It is a message of protocol buffers as text, a field a line. It is read and written without
TensorFlow, and believed only where the checkpoints themselves do not tell more.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from keras_safe_ckpt.storage.atomic import write_atomically
from keras_safe_ckpt.storage.paths import open_regular

DEFAULT_NAME = "checkpoint"

_LATEST, _ALL = "model_checkpoint_path", "all_model_checkpoint_paths"
_TIMES, _PRESERVED = "all_model_checkpoint_timestamps", "last_preserved_timestamp"
_LINE = re.compile(
    rb"""\s*(\w+)\s*:\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([-+\w.]+))\s*(?:\#.*)?"""
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f"}
_LARGEST_BYTES = 1 << 26
#: No path is as long, and of each letter the pattern above takes some notes.
_LONGEST_LINE = 1 << 16
#: TensorFlow passes over comments, and drops them when it writes the file: then what is not
#: listed is not deleted.
_STAYS = "# keras_safe_ckpt: the newest one is not to be deleted"
#: There is nothing, or something that is no file; any other error is of the moment.
_NO_FILE = (errno.ENOENT, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENXIO)
#: A time that far ahead is none.
_TEN_YEARS = 10 * 365 * 86400.0


@dataclass(frozen=True)
class State:
    """Names of checkpoints with the time at which they were saved, oldest first.

    ``preserved`` is the time of the last one that is kept for ever: what is not younger than that
    is not ours to delete. ``newest_stays``: the newest is not, either.
    """

    listed: dict[str, float] = field(default_factory=dict)
    preserved: float = 0.0
    newest_stays: bool = False


def read_state(directory: Path, name: str = DEFAULT_NAME) -> State | None:
    """What the file says of this directory; None if it is not there or says nothing sensible.

    `OSError` if it cannot be read now: what it lists would be forgotten, and never deleted.
    """
    text = _read(directory / name)
    if text is None:
        return None
    try:
        fields = list(_fields(text))
        times = [_sane(value) for key, value in fields if key == _TIMES]
        preserved = [_sane(value) for key, value in fields if key == _PRESERVED]
    except ValueError:
        return None
    names = [_name_in(directory, os.fsdecode(value)) for key, value in fields if key == _ALL]
    if not any(key == _LATEST and value for key, value in fields):
        return None  # Cut off, or empty.
    known = [since for since in times if since is not None]
    if len(known) != len(names):
        # The v1 Saver of TensorFlow keeps none; the order of the list is the order of the saves.
        known = list(itertools.accumulate((_time_of(directory, own) for own in names), max))
    entries = [(since, own) for own, since in zip(names, known, strict=True) if own is not None]
    # By the times, and among equals as they are listed.
    entries.sort(key=lambda entry: entry[0])
    listed = {own: since for since, own in entries}
    before_all = min(listed.values(), default=0.0) - 1
    stays = _STAYS.encode() in text.split(b"\n")
    kept = preserved[-1] if preserved else None
    return State(listed, before_all if kept is None else kept, stays)


def write_state(directory: Path, state: State, newest: str, name: str = DEFAULT_NAME) -> None:
    """Durable and whole, or the old one; with names relative to the directory, which may move."""
    listed = {n: t for n, t in state.listed.items() if n != newest}
    listed[newest] = state.listed[newest]
    lines = [
        f'{_LATEST}: "{_escaped(newest)}"',
        *(f'{_ALL}: "{_escaped(one)}"' for one in listed),
        *(f"{_TIMES}: {since!r}" for since in listed.values()),
        f"{_PRESERVED}: {state.preserved!r}",
        *([_STAYS] if state.newest_stays else []),
    ]
    write_atomically(directory / name, "".join(f"{line}\n" for line in lines).encode("ascii"))


def _read(path: Path) -> bytes | None:
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
                return None
            return file.read()
    except OSError as error:
        if error.errno in _NO_FILE:
            return None
        raise


def _fields(text: bytes) -> Iterator[tuple[str, bytes]]:
    for line in text.split(b"\n"):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        match = _LINE.fullmatch(line) if len(line) <= _LONGEST_LINE else None
        if match is None:
            raise ValueError("not a field of a message")
        quoted = match[2] if match[2] is not None else match[3]
        yield match[1].decode(), match[4] if quoted is None else _unescaped(quoted)


def _unescaped(text: bytes) -> bytes:
    def plain(match: re.Match[bytes]) -> bytes:
        octal, hexadecimal, letter = match.groups()
        if letter is not None:
            return _LETTERS.get(letter, letter)
        return bytes([int(octal, 8) & 255 if octal else int(hexadecimal, 16)])

    return _ESCAPE.sub(plain, text)


def _escaped(name: str) -> str:
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"
        for byte in os.fsencode(name)
    )


def _sane(value: bytes) -> float | None:
    seconds = float(value)
    return seconds if 0 <= seconds <= time.time() + _TEN_YEARS else None


def _time_of(directory: Path, name: str | None) -> float:
    """0 for one that is gone, or elsewhere."""
    if name is None:
        return 0.0
    try:
        return os.stat(directory / f"{name}.index").st_mtime
    except OSError as error:
        if error.errno in (*_NO_FILE, errno.ENAMETOOLONG):
            return 0.0
        raise


def _name_in(directory: Path, path: str) -> str | None:
    """The name of a checkpoint of this directory; None for one that is elsewhere."""
    parent, name = os.path.split(path)
    try:
        there = os.path.realpath(os.path.join(directory, parent))
    except ValueError:
        return None  # With a NUL in it, say.
    return name if name and there == os.path.realpath(directory) else None
