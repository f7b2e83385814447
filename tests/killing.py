"""Kill a real process at each of its system calls, or let one fail; look at what it leaves."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from warm import Trial, warm_process

#: Those by which a trial waits for its beginning and says its end.
_OURS = ("poll", "restart_syscall")

#: After one of these the disk is another. What a process does between two of them leaves no trace.
CHANGING = (
    *("rename", "link", "unlink", "unlinkat", "mkdir", "rmdir", "write", "writev", "pwrite64"),
    *("ftruncate", "fallocate", "fsync", "fdatasync", "utimensat", "chmod", "fchmod"),
    *("sendfile", "copy_file_range"),
)

#: Threads make the numbers vary: how many of the calls that were seen once may not come again.
MOST_MISSED = 0.2


class Call(NamedTuple):
    """The n-th call of one name by the thread that comes to its n-th first."""

    name: str
    when: int


class Kills(NamedTuple):
    """Killed so often; in so many trials the call did not come; so many calls of other threads
    had the same name and number."""

    tried: int
    missed: int
    shadowed: int

    def __str__(self) -> str:
        return (
            f"killed at {self.tried} system calls ({self.missed} did not come again, "
            f"{self.shadowed} of other threads have the number of one of these)"
        )


def calls_of(log: str) -> tuple[list[Call], list[Call]]:
    """The calls that strace can meet, in their order, and those that others shadow.

    It counts for each thread and each name by itself, and injects wherever the number comes up
    first.
    """
    counts: Counter[tuple[str, str]] = Counter()
    met: dict[Call, None] = {}
    shadowed = []
    for line in log.splitlines():
        found = re.match(r"(\d+) +(\w+)\(", line)
        if found is None:
            continue
        thread, name = found.groups()
        if name == "getpriority":
            break
        if name in _OURS:
            continue
        counts[thread, name] += 1
        call = Call(name, counts[thread, name])
        if call in met:
            shadowed.append(call)
        met[call] = None
    return list(met), shadowed


def spread(calls: list[Call], most: int) -> list[Call]:
    """Some of each kind that changes the disk: the first, the last, and what is between."""
    chosen = []
    for name in CHANGING:
        of_name = [call for call in calls if call.name == name]
        step = max(1, -(-len(of_name) // most))
        chosen += [*of_name[::step], *of_name[-1:]]
    return list(dict.fromkeys(chosen))


class Operation(NamedTuple):
    """What one trial does: ``setup`` before it is watched, then ``code``, each with ``arguments``
    after the folder."""

    code: str
    setup: str = ""
    arguments: tuple[object, ...] = ()

    def run(self, folder: Path, *options: str) -> Trial:
        return warm_process().run(
            self.code, folder, *self.arguments, setup=self.setup, watched=options
        )

    def calls(
        self, folder: Path, prepare: Callable[[Path], object]
    ) -> tuple[list[Call], list[Call]]:
        """All that it makes when nothing disturbs it, as `calls_of`."""
        self.rehearse(folder, prepare)
        place = _place(folder, "enumeration", prepare)
        done = self.run(place)
        assert done.code == 0, done.err
        return calls_of(done.log)

    def rehearse(self, folder: Path, prepare: Callable[[Path], object]) -> None:
        """Undisturbed, for what is imported on the way, unless that is known."""
        warm = warm_process()
        if not warm.knows(self.code, self.setup):
            place = _place(folder, "rehearsal", prepare)
            done = warm.rehearse(self.code, place, *self.arguments, setup=self.setup)
            assert done.code == 0, done.err


def _place(folder: Path, name: str, prepare: Callable[[Path], object]) -> Path:
    number = 0
    while (place := folder / f"{name}.{number}").exists():
        number += 1
    place.mkdir(parents=True)
    prepare(place)
    return place


def killed_at_each(
    code: str | Operation,
    calls: Iterable[tuple[str, int]] | int | None,
    folder: Path,
    check: Callable[[Path], object],
    prepare: Callable[[Path], object] = lambda folder: None,
) -> Kills:
    """Kill ``code`` (its argument is an empty folder) at each of ``calls``, then check.

    ``calls`` of None are all that it makes, of whatever name; a number is that many of each kind
    that changes the disk. A process that came to its end is counted, and checked as well.
    """
    operation = code if isinstance(code, Operation) else Operation(code)
    shadowed: list[Call] = []
    if calls is None or isinstance(calls, int):
        met, others = operation.calls(folder, prepare)
        shadowed = others if calls is None else []
        calls = met if calls is None else spread(met, calls)
    operation.rehearse(folder, prepare)
    tried, missed = 0, []
    for name, when in calls:
        place = _place(folder, f"{name}-{when}", prepare)
        injection = f"inject={name}:signal=KILL:when={when}"
        done = operation.run(place, "-e", f"trace={name}", "-e", injection)
        assert "Error" not in done.err, (name, when, done.err)
        assert done.code in (0, -signal.SIGKILL), (name, when, done.err)
        if done.code == 0:
            missed.append((name, when))
        else:
            tried += 1
        try:
            check(place)
        except BaseException as error:
            error.add_note(f"killed at {name} {when}") if hasattr(error, "add_note") else None
            raise
    assert len(missed) <= MOST_MISSED * (tried + len(missed)), missed
    return Kills(tried, len(missed), len(shadowed))
