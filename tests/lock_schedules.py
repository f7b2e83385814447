"""Random schedules for a lock, and who decides whether it kept its promise.

Processes of `lock_actor` are told what to do, all at once: each order is sent without waiting for
the one before. Afterwards everybody is told to let go, and then: all orders have ended, nobody
was in who should not have been, nobody has an open file or a thread more than before, and a
newcomer gets the lock. What happened is read from the notes of the witness, by `judged`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import select
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from forking import Forking
from hypothesis import strategies as st
from lock_actor import LARGEST_MESSAGE, SLOTS
from processes import environment

#: For what must happen, however loaded the machine is.
PATIENCE = 60.0
ACTORS = 3

actors = st.integers(0, ACTORS - 1)
slots = st.integers(0, SLOTS - 1)
modes = st.sampled_from(["exclusive", "shared"])


def orders(longest_stop: float) -> st.SearchStrategy[tuple[Any, ...]]:
    """Most of them take and give back, or nothing would be held when something happens."""
    acquire = st.tuples(
        *(st.just("acquire"), actors, slots, modes),
        st.sampled_from([0.0, 0.05, PATIENCE]),
        st.sampled_from(["leave", "raise"]),
    )
    release = st.tuples(st.just("release"), actors, slots)
    fork = st.tuples(st.just("fork"), actors, st.sampled_from(["lives", "releases", "uses"]), modes)
    end = st.tuples(st.sampled_from(["kill", "exit"]), actors)
    stop = st.tuples(st.just("stop"), actors, st.floats(0.01, longest_stop))
    ctrl_c = st.tuples(st.just("interrupt"), actors)
    pause = st.tuples(st.just("pause"), st.floats(0, 0.04))
    kinds = [acquire] * 7 + [release] * 3 + [pause] * 2 + [fork, end, stop, ctrl_c]
    return st.integers(0, len(kinds) - 1).flatmap(kinds.__getitem__)


def schedules(longest_stop: float = 0.2) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    return st.lists(orders(longest_stop), min_size=8, max_size=40)


class Stay(NamedTuple):
    """From when to when somebody was in, by its own account."""

    begin: int
    end: int
    mode: str
    name: str


def judged(notes: Path, killed: dict[int, int]) -> list[Stay]:
    """The stays; raises if one was beside a writer. ``killed``: when a process was, if it was.

    A stay ends with its process. One whose end was not written down, because Ctrl-C came right
    then, is known to have been in when it came in, and no longer.
    """
    began: dict[str, tuple[int, int, str]] = {}
    stays = []
    died = dict(killed)
    for line in notes.read_text().splitlines() if notes.exists() else []:
        moment, pid, what, name, mode = line.split()
        if what == "enter":
            began[name] = (int(moment), int(pid), mode)
        elif what == "leave":
            begin, _, mode = began.pop(name)
            stays.append(Stay(begin, int(moment), mode, name))
        else:
            died[int(pid)] = int(moment)
    for name, (begin, pid, mode) in began.items():
        stays.append(Stay(begin, max(begin, died.get(pid, begin)), mode, name))
    stays = [stay._replace(end=min(stay.end, died.get(_pid(stay), stay.end))) for stay in stays]
    stays.sort()
    last: dict[str, Stay] = {}  # Of each mode, the one that stays longest.
    for stay in stays:
        for mode in ("exclusive", "shared") if stay.mode == "exclusive" else ("exclusive",):
            other = last.get(mode)
            assert other is None or other.end <= stay.begin, f"{stay} came in beside {other}"
        if stay.mode not in last or last[stay.mode].end < stay.end:
            last[stay.mode] = stay
    return stays


def _pid(stay: Stay) -> int:
    return int(stay.name.partition("-")[0])


class Line:
    """The connection to one process."""

    def __init__(self, connection: socket.socket, greeting: dict[str, Any]) -> None:
        self.connection = connection
        self.pid = greeting["pid"]
        self.kind = greeting["hello"]
        self.alive = True
        self.waiting: dict[int, dict[str, Any]] = {}
        self.before: dict[str, int] = {}


class Pool:
    """Processes that are kept from one schedule to the next, unless they died in it."""

    def __init__(self, folder: Path, locks: Any, modules: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._locks = pickle.dumps(locks).hex()
        self._forking = Forking(environment(), ("lock_actor", *modules))
        self._address = f"lock-schedules-{secrets.token_hex(8)}"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind("\0" + self._address)
        self._listening.listen(64)
        self._lines: list[Line] = []
        self._actors: list[Line | None] = [None] * ACTORS
        self._started = self._ordered = self._tried = 0
        self._outcomes: dict[int, str] = {}
        self._killed: dict[int, int] = {}
        self._stopped: dict[int, tuple[float, Line]] = {}
        self.count: Counter[str] = Counter()

    def close(self) -> None:
        for line in self._lines:
            line.connection.close()
        self._listening.close()
        self._forking.close()

    # Processes

    def _actor(self, number: int) -> Line:
        line = self._actors[number]
        if line is None or not line.alive:
            self._started += 1
            script = self._folder / f"actor-{self._started}.py"
            script.write_text("import lock_actor; lock_actor.main()")
            self._forking.start(environment(), script, self._address, self._locks)
            known = len(self._lines)
            self._until(
                lambda: any(line.kind == "actor" for line in self._lines[known:]), "an actor starts"
            )
            line = self._actors[number] = next(
                line for line in self._lines[known:] if line.kind == "actor"
            )
            # Once, so that what stays open for ever is open before it is counted.
            self._send(line, "drain", on=True)
            self._acquire(line, 0, "exclusive", PATIENCE, "leave", self._folder / f"warm{line.pid}")
            self._until(lambda: not line.waiting, "it has had a lock")
            line.before = self._status(line)
            self._send(line, "drain", on=False)
        return line

    def _send(self, line: Line, do: str, **words: Any) -> int:
        self._ordered += 1
        order = {"do": do, "order": self._ordered, **words}
        if do in ("acquire", "fork", "status"):
            line.waiting[self._ordered] = order
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # Died: heard below.
            line.connection.send(json.dumps(order).encode())
        return self._ordered

    def _hear(self, seconds: float) -> None:
        lines = {line.connection: line for line in self._lines if line.alive}
        for ready in select.select([self._listening, *lines], [], [], seconds)[0]:
            if ready is self._listening:
                connection = self._listening.accept()[0]
                greeting = json.loads(connection.recv(LARGEST_MESSAGE))
                self._lines.append(Line(connection, greeting))
                continue
            line = lines[ready]
            try:
                message = ready.recv(LARGEST_MESSAGE)
            except ConnectionResetError:
                message = b""
            if not message:
                line.alive = False
                line.waiting.clear()
                continue
            self._understand(line, json.loads(message))

    def _understand(self, line: Line, words: dict[str, Any]) -> None:
        if "status" in words:
            line.before = line.before or words
            line.waiting.pop(words["status"])["status"] = words
            self._outcomes[words["status"]] = json.dumps(words)
            return
        self._outcomes[words["done"]] = words["outcome"]
        for one in self._lines:  # What a child tells, its parent was told to do.
            one.waiting.pop(words["done"], None)

    def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"waited {PATIENCE} s until {what}"
            self._hear(0.05)

    def _status(self, line: Line) -> dict[str, int]:
        number = self._send(line, "status")
        self._until(lambda: not line.alive or number not in line.waiting, "it tells its status")
        return json.loads(self._outcomes[number]) if line.alive else line.before

    # One schedule

    def _acquire(
        self, line: Line, slot: int, mode: str, timeout: float, ending: str, path: Path
    ) -> int:
        return self._send(
            line,
            "acquire",
            slot=slot,
            mode=mode,
            timeout=timeout,
            ending=ending,
            path=str(path),
            witness=f"{path}.notes",
        )

    def run(self, schedule: list[tuple[Any, ...]]) -> None:
        """Raises if a promise was not kept."""
        self._tried += 1
        folder = self._folder / f"schedule-{self._tried}"
        folder.mkdir()
        path = folder / "model"
        self._killed.clear()
        self._outcomes.clear()
        chosen = [self._actor(number) for number in range(ACTORS)]
        asked: dict[int, str] = {}
        try:
            for what, *rest in schedule:
                self._resume(time.monotonic())
                self._hear(rest[0] if what == "pause" else 0)
                if what != "pause":
                    chosen[rest[0]] = self._actor(rest[0])
                    self._do(what, chosen[rest[0]], rest[1:], path, asked)
        finally:
            self._resume(float("inf"))
        self._drain(chosen)
        for number, outcome in self._outcomes.items():
            if asked.get(number, "") == "":
                continue
            assert outcome in ("held", "raised", "interrupted", "timeout"), outcome
            # Everybody let go in the end: who had time got it.
            assert outcome != "timeout" or asked[number] != "patient", "a dead-lock"
            self.count[outcome] += 1
        newcomer = self._acquire(chosen[0], 0, "exclusive", PATIENCE, "leave", path)
        self._until(lambda: not chosen[0].waiting, "a newcomer gets the lock")
        assert self._outcomes[newcomer] == "held", self._outcomes[newcomer]
        stays = judged(Path(f"{path}.notes"), self._killed)
        self.count["stays"] += len(stays)
        self.count["schedules"] += 1
        for line in chosen:
            self._send(line, "drain", on=False)
        for line in self._lines:
            if line.kind == "child":
                line.connection.close()
                line.alive = False
        for line in [line for line in self._lines if not line.alive]:
            line.connection.close()
            self._lines.remove(line)

    def _do(
        self, what: str, line: Line, rest: list[Any], path: Path, asked: dict[int, str]
    ) -> None:
        if what == "acquire":
            patience = "patient" if rest[2] == PATIENCE else "impatient"
            asked[self._acquire(line, *rest, path)] = patience
        elif what == "release":
            self._send(line, "release", slot=rest[0])
        elif what == "fork":
            words = {"path": str(path), "witness": f"{path}.notes", "timeout": PATIENCE}
            order = self._send(line, "fork", kind=rest[0], mode=rest[1], ending="leave", **words)
            asked[order] = "patient"
        elif what == "exit":
            self._send(line, "exit", witness=f"{path}.notes")
        elif what == "kill":
            self._killed[line.pid] = time.monotonic_ns()
            self._signal(line, signal.SIGKILL)
        elif what == "stop":
            if self._signal(line, signal.SIGSTOP):
                self._stopped[line.pid] = (time.monotonic() + rest[0], line)
        else:
            self._signal(line, signal.SIGINT)
        self.count[what] += 1

    def _signal(self, line: Line, number: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(line.pid, number)
            return True
        return False

    def _resume(self, now: float) -> None:
        for pid, (until, line) in list(self._stopped.items()):
            if until <= now:
                del self._stopped[pid]
                self._signal(line, signal.SIGCONT)

    def _drain(self, chosen: list[Line]) -> None:
        for line in chosen:
            self._send(line, "drain", on=True)
        for line in chosen:
            self._status(line)  # Who is to die has read that before, and is dead.
        self._until(
            lambda: not any(line.waiting for line in self._lines if line.alive),
            "every order has ended",
        )
        for number, line in enumerate(chosen):
            if not line.alive:
                line = chosen[number] = self._actor(number)
                self._send(line, "drain", on=True)
        self._until_as_before(chosen)

    def _until_as_before(self, chosen: list[Line]) -> None:
        """A thread of a client library may be about to end."""
        deadline = time.monotonic() + PATIENCE
        for line in chosen:
            while True:
                now = self._status(line)
                left = {what: now[what] - line.before[what] for what in ("files", "threads")}
                if max(left.values()) <= 0:
                    break
                assert time.monotonic() < deadline, f"left behind: {left}"
                self._hear(0.01)
