"""The events of a run, read without trust: what is not as it should be is left out, and counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from keras_safe_ckpt.errors import CheckpointNotFoundError, UnreadableCheckpointError
from keras_safe_ckpt.storage.events import FILE_NAME, EventLog

#: The end of the year 9999: nothing later can be shown as a date.
_LATEST = 253402300799.0
#: Some thirty years: no save takes longer, and no page is to show what says so.
_LONGEST_SECONDS = 1e9
_LARGEST_COUNT = 2**63 - 1
#: An error may bring pages of text along.
_LONGEST_TEXT = 300


class Event(NamedTuple):
    """One line of a log; what it does not say is None.

    ``folder`` is the sub-folder whose log it was in, empty for that of the run itself. The others
    have the names that they have in the log.
    """

    event: str
    time: float
    host: str
    pid: int
    folder: str = ""
    started: float | None = None
    callback: str | None = None
    worker: int | None = None
    leads: bool | None = None
    file: str | None = None
    step: int | None = None
    epoch: int | None = None
    batch: int | None = None
    runs: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    blocked_seconds: float | None = None
    bytes: int | None = None
    repeated: int | None = None
    dropped: int | None = None
    source: str | None = None
    reason: str | None = None
    outcome: str | None = None
    ending: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class History:
    """All events below a directory, oldest first, and how much was left out."""

    directory: Path
    events: list[Event]
    #: Lines that are not JSON objects, such as one that a full disk has cut.
    broken: int = 0
    #: Lines that are, and in which something is not what it should be.
    unfit: int = 0


class _UnfitError(Exception):
    """A value that no honest event has."""


def _moment(value: Any) -> float:
    return _number(value, _LATEST)


def _duration(value: Any) -> float:
    return _number(value, _LONGEST_SECONDS)


def _number(value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _UnfitError
    # Compared before it is converted: a whole number may be too large for a float.
    if not 0 <= value <= most or math.isnan(value):
        raise _UnfitError
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_COUNT:
        raise _UnfitError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _UnfitError
    if not value.isascii():
        # Half of a surrogate pair is valid JSON and cannot be written to any file.
        value = value.encode("utf-8", "replace").decode()
    return value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]} ..."


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _UnfitError
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("time", "started"), _moment),
    **dict.fromkeys(("seconds", "blocked_seconds"), _duration),
    **dict.fromkeys(("pid", "worker", "step", "epoch", "batch", "runs", "epochs", "bytes"), _count),
    **dict.fromkeys(("repeated", "dropped"), _count),
    **dict.fromkeys(("event", "host", "callback", "file"), _text),
    **dict.fromkeys(("source", "reason", "outcome", "ending", "error"), _text),
    "leads": _flag,
}
_NEEDED = ("event", "time", "host", "pid")

assert set(_CHECKS) == set(Event._fields) - {"folder"}


def event_from(entry: Mapping[str, Any], folder: str = "") -> Event | None:
    """What a line says; None if something in it cannot be."""
    facts: dict[str, Any] = {}
    try:
        for name, value in entry.items():
            check = _CHECKS.get(name)
            if check is not None and value is not None:
                facts[name] = check(value)
    except _UnfitError:
        return None
    if any(name not in facts for name in _NEEDED):
        return None
    return Event(folder=folder, **facts)


def _has_log(folder: Path, *, is_asked: bool) -> bool:
    try:
        return (folder / FILE_NAME).is_file()
    except OSError as error:
        if is_asked:
            raise UnreadableCheckpointError(folder, error) from error
        return False  # A folder beside others that is not ours to look into.


def read_history(directory: Path) -> History:
    """From ``events.jsonl`` of the directory and of the folders in it, one level deep."""
    if not directory.is_dir():
        raise CheckpointNotFoundError(directory, "there is no such directory", what="events")
    places = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    logs = {path: EventLog(path) for path in places if _has_log(path, is_asked=path == directory)}
    if not logs:
        reason = f"neither it nor a folder in it has a file {FILE_NAME}"
        raise CheckpointNotFoundError(directory, reason, what="events")
    events: list[Event] = []
    broken, unfit = 0, 0

    def count_broken() -> None:
        nonlocal broken
        broken += 1

    for place, log in logs.items():
        folder = "" if place == directory else _text(place.name)
        try:
            for entry in log.read(count_broken):
                event = event_from(entry, folder)
                if event is None:
                    unfit += 1
                else:
                    events.append(event)
        except OSError as error:
            raise UnreadableCheckpointError(log.path, error) from error
    if not events:
        reason = f"no line of {FILE_NAME} is an event that can be used"
        raise CheckpointNotFoundError(directory, reason, what="events")
    events.sort(key=lambda event: event.time)
    return History(directory, events, broken, unfit)
