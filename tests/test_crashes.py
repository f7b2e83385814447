"""Killed at each system call in turn: old or new, whole, and the next one sweeps what is left."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest
from crash_scenes import BUNDLES, SCENES, SETUP
from killing import Kills, Operation, killed_at_each
from processes import wait_until

from keras_safe_ckpt import LockManager
from keras_safe_ckpt.storage.lock_owner import flock_holders

ACT = "scene.act(context)"
#: Those that are killed elsewhere, with more of what they do.
ELSEWHERE = ("shard", "append", "split", "worker file", "merge", "lock", *BUNDLES)
KILLED = [name for name in SCENES if name not in (*ELSEWHERE, "witnessed lock")]
#: Each of these comes to calls that the others do not.
QUICK = ("first", "replacing", "pruning", "set aside", "keras", "background", "large", "prune")


def kill_scene(name: str, calls: int | None, folder: Path) -> Kills:
    scene = SCENES[name]
    operation = Operation(ACT, SETUP, (name,))
    return killed_at_each(operation, calls, folder, scene.check_killed, scene.prepare)


@pytest.mark.parametrize("name", QUICK)
def test_killed_at_what_changes_the_disk(tmp_path, name):
    assert kill_scene(name, 1, tmp_path).tried >= 4


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", KILLED)
def test_killed_at_every_system_call(tmp_path, name, record_property):
    kills = kill_scene(name, None, tmp_path)
    record_property("campaign", f"{name}: {kills}, old or new each time")


# A lock that goes from one process to another.


class Other:
    """This process, as the one that has the lock before or after the one that is killed."""

    def __init__(self, folder: Path, *, holds_first: bool) -> None:
        self._folder = folder
        self._had = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hold if holds_first else self._follow)
        self._thread.start()
        if holds_first:
            assert self._had.wait(60)

    def check(self) -> None:
        """The other process has ended: now it can be had at once, and was never had by both."""
        self._over.set()
        self._thread.join(60)
        assert self._had.is_set()
        assert not self._thread.is_alive()
        with LockManager(timeout=0).exclusive(self._folder / "shared"):
            self._witness()

    def _hold(self) -> None:
        locks = LockManager(timeout=60)
        witness = self._folder / "witness"
        with locks.exclusive(self._folder / "shared"), open(witness, "a") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._had.set()
            # Until somebody is next, or is not there any more.
            wait_until(lambda: self._over.is_set() or self._is_held("gate"), "somebody waits")

    def _follow(self) -> None:
        wait_until(lambda: self._over.is_set() or self._is_held("lock"), "somebody has it")
        with LockManager(timeout=60).exclusive(self._folder / "shared"):
            self._witness()
            self._had.set()

    def _witness(self) -> None:
        with open(self._folder / "witness", "a") as witness:
            fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _is_held(self, suffix: str) -> bool:
        path = self._folder / f".shared.{suffix}"
        if not path.exists():
            return False
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return bool(flock_holders(descriptor))
        finally:
            os.close(descriptor)


#: Has the lock before it is watched, and gives it back.
RELEASING = """
import fcntl
from keras_safe_ckpt import LockManager
held = LockManager(timeout=30).exclusive(sys.argv[1] + "/shared")
held.__enter__()
witness = open(sys.argv[1] + "/witness", "a")
fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""
RELEASE = """
fcntl.flock(witness, fcntl.LOCK_UN)
held.__exit__(None, None, None)
"""
#: Waits for it, has it, and gives it back.
WAITING = SETUP.replace("sys.argv[2]", "'witnessed lock'")


def hand_over(folder: Path, calls: list[tuple[str, int]] | None, *, holds_first: bool) -> Kills:
    others: dict[Path, Other] = {}

    def prepare(place: Path) -> None:
        others[place] = Other(place, holds_first=holds_first)

    def check(place: Path) -> None:
        others.pop(place).check()

    operation = Operation(ACT, WAITING) if holds_first else Operation(RELEASE, RELEASING)
    try:
        return killed_at_each(operation, calls, folder, check, prepare)
    finally:
        for other in others.values():  # Of the rehearsal.
            other.check()


@pytest.mark.parametrize(
    ("holds_first", "calls"),
    [
        # The gate, the lock, leaving the gate, and giving it back.
        (True, [("flock", 1), ("flock", 2), ("pwrite64", 1), ("close", 1), ("close", 2)]),
        (False, [("flock", 1), ("flock", 2), ("close", 1)]),
    ],
)
def test_a_lock_changes_hands_whoever_is_killed(tmp_path, holds_first, calls):
    assert hand_over(tmp_path, calls, holds_first=holds_first).tried == len(calls)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("holds_first", [True, False])
def test_a_lock_changes_hands_at_every_system_call(tmp_path, holds_first, record_property):
    kills = hand_over(tmp_path, None, holds_first=holds_first)
    who = "waits" if holds_first else "has it"
    record_property("campaign", f"lock, the one that {who}: {kills}, free at once, never twice")
