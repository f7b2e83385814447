"""Kill a real process at one of its system calls, and look at what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from processes import run, strace

CALLS = (
    *("rename", "link", "unlink", "unlinkat", "fsync", "mkdir", "rmdir"),
    *("write", "writev", "pwrite64", "ftruncate", "flock"),
)
EVERY = [(call, when) for call in CALLS for when in range(1, 200)]


def killed_at_each(
    code: str,
    calls: Iterable[tuple[str, int]],
    folder: Path,
    check: Callable[[Path], object],
    prepare: Callable[[Path], object] = lambda folder: None,
) -> int:
    """Kill ``code`` (its argument is an empty folder) at the n-th such call, then check.

    How often that was possible. A process that came to its end is checked as well.
    """
    tried = 0
    ended: set[str] = set()
    for call, when in calls:
        if call in ended:
            continue
        place = folder / f"{call}-{when}"
        place.mkdir()
        prepare(place)
        done = run(code, place, prefix=strace(f"{call}:signal=KILL:when={when}"))
        assert "Error" not in done.stderr, done.stderr
        if done.returncode == 0:
            ended.add(call)
        else:
            tried += 1
        check(place)
    return tried
