"""The lock files of a directory: who holds them now, and who did last."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from keras_safe_ckpt.storage.lock_owner import (
    RECORD_LIMIT,
    LockOwner,
    flock_holders,
    parse_owner,
)
from keras_safe_ckpt.storage.locks import is_locked

_SUFFIX = ".lock"


@dataclass(frozen=True)
class SurveyedLock:
    """``held`` is None where it cannot be told. ``alive``: whether the owner's process runs.

    ``pids`` are the holders that the kernel of this machine knows.
    """

    path: Path
    target: str
    owner: LockOwner | None
    held: bool | None
    alive: bool | None
    pids: tuple[int, ...]


def survey_locks(directory: Path) -> list[SurveyedLock]:
    """By name; `OSError` if the directory cannot be read."""
    with os.scandir(directory) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if entry.name.startswith(".")
            and entry.name.endswith(_SUFFIX)
            and entry.is_file(follow_symlinks=False)
        )
    return [found for name in names if (found := _looked_at(directory / name)) is not None]


def _looked_at(path: Path) -> SurveyedLock | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None  # Somebody has removed it meanwhile.
    except OSError:
        return SurveyedLock(path, _target(path), None, None, None, ())
    try:
        owner = parse_owner(os.pread(descriptor, RECORD_LIMIT, 0))
        pids = tuple(sorted(flock_holders(descriptor)))
        # The kernel lists what is locked from here; of another machine, or from within a
        # container, only a try can tell.
        held = True if pids else is_locked(descriptor)
        here = owner is not None and owner.host == os.uname().nodename
        alive = _is_running(owner.pid) if owner is not None and here else None
    finally:
        os.close(descriptor)
    return SurveyedLock(path, _target(path), owner, held, alive, pids)


def _target(path: Path) -> str:
    return path.name.removeprefix(".").removesuffix(_SUFFIX)


def _is_running(pid: int) -> bool:
    if pid <= 0:
        return False  # No process has such a number, and `kill` would mean many by it.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # Somebody else's.
    except OverflowError:
        return False
    return True
