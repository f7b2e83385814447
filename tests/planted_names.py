"""Temporary names that come again in each run, as if somebody could guess them.

A name has a number that is drawn, and the process with the time of its start. Here the number
counts, and the process is one that always runs, so that nobody sweeps what has its name.
"""

from __future__ import annotations

import itertools
import os
import types
from pathlib import Path

from keras_safe_ckpt.storage import temp_names

#: The trial, and a process that it starts. No system gives out so large ids.
TRIAL, STARTED = 4_200_000, 4_200_001


def count_names(pid: int = TRIAL) -> None:
    """From now on, in this process."""
    real_start = temp_names._start_time
    numbers = itertools.count()
    draw = types.SimpleNamespace(token_hex=lambda size: f"{next(numbers):0{2 * size}x}")
    # The same `os` but for the process; only these are asked for there.
    system = types.SimpleNamespace(
        getpid=lambda: pid, stat=os.stat, path=os.path, name=os.name, kill=os.kill
    )
    temp_names.secrets, temp_names.os = draw, system  # type: ignore[attr-defined]
    temp_names._start_time = lambda asked: 1 if asked in (TRIAL, STARTED) else real_start(asked)


def is_below_one(path: Path) -> bool:
    """Whether it is in a folder with such a name, which only its owner can write to."""
    return any(temp_names.owner_of(part) for part in path.parts[:-1])
