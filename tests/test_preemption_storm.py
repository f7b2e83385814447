"""A run of two workers in a storm of interruptions of every kind ends as an undisturbed one.

Whoever interrupts is outside: it knows the workers by their process ids, and how far they are.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import FORKING, LAUNCHER
from processes import environment, wait_until
from test_preemption_cluster import PROGRAM, ends, events
from test_preemption_cluster import launch as launch_to_the_end

#: Batches and validation batches of an epoch: one hook each.
HOOKS_OF_AN_EPOCH = 4 + 4
KINDS = ("sigterm", "kill", "pause", "full_disk")
#: 42 is asked for, the others are how a worker ends that was killed, or whose peer or disk failed.
RESTART_CODES = "42,1,134,137,143"


def pass_time(seconds: float) -> None:
    """A part of the fault itself, or of the moment at which it comes: nothing is waited for."""
    time.sleep(seconds)


class Storm:
    """Interrupts a run; what it has done is in ``counts``."""

    def __init__(self, folder: Path, disk: Path, seed: int, interruptions: int, hooks: int) -> None:
        self._folder = folder
        self._disk = disk
        self._rng = random.Random(seed)
        self._interruptions = interruptions
        self._hooks = hooks
        self.counts: collections.Counter[str] = collections.Counter()
        self._allow_more()

    def rage(self, process: subprocess.Popen[str]) -> None:
        """Every kind at least once, in no order."""
        wanted = [*KINDS, *self._rng.choices(KINDS, k=self._interruptions)][: self._interruptions]
        self._rng.shuffle(wanted)
        for kind in wanted:
            self._let_it_run(process)
            while not getattr(self, f"_{kind}")(self._rng.randint(0, 1)):
                assert process.poll() is None, "the launcher has given up"
                time.sleep(0.01)  # That worker is not there at the moment.
            self.counts[kind.replace("_", " ")] += 1
            self._allow_more()

    def _let_it_run(self, process: subprocess.Popen[str]) -> None:
        """To the next hook as a rule, now and then not even that far, and some time beyond."""
        before = [self._said("hooks", worker) for worker in range(2)]

        def goes_on() -> bool:
            assert process.poll() is None, "the launcher has given up"
            return [self._said("hooks", worker) for worker in range(2)] != before

        if self._rng.random() < 0.8:
            wait_until(goes_on, "the run goes on", seconds=200)
        pass_time(self._rng.choice([0, 0.05, 0.3, 1.0]) * self._rng.random())

    def _allow_more(self) -> None:
        """No further than this before the next one: the run must not end before the storm."""
        done = sum(self.counts.values())
        allowed = self._hooks * (done + 1) // (self._interruptions + 1)
        if done == self._interruptions:
            allowed = self._hooks
        (self._folder / ".allowed").write_text(str(allowed))
        os.replace(self._folder / ".allowed", self._folder / "allowed")

    def _said(self, name: str, worker: int) -> str:
        try:
            return (self._folder / f"{name}-{worker}").read_text()
        except FileNotFoundError:
            return ""

    def _send(self, worker: int, number: signal.Signals) -> bool:
        """Whether it was there to get the signal."""
        pid = self._said("pid", worker)
        try:
            if b"preempted_worker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                return False
            os.kill(int(pid), number)
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return False
        return True

    # The kinds.

    def _sigterm(self, worker: int) -> bool:
        return self._send(worker, signal.SIGTERM)

    def _kill(self, worker: int) -> bool:
        return self._send(worker, signal.SIGKILL)

    def _pause(self, worker: int) -> bool:
        """Mostly for some seconds; now and then for longer than the others wait for a sign."""
        if not self._send(worker, signal.SIGSTOP):
            return False
        pass_time(15 if self._rng.random() < 0.1 else self._rng.uniform(0, 3))
        self._send(worker, signal.SIGCONT)
        return True

    def _full_disk(self, worker: int) -> bool:
        """For a while, in which the run goes on, fails, or is started again in vain."""
        filler = self._disk / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
            file.writelines(itertools.repeat(bytes(1 << 12)))
        pass_time(self._rng.uniform(0.2, 4))
        filler.unlink()
        return True


@contextlib.contextmanager
def launched(
    folder: Path, launcher: list[str], options: dict[str, Any]
) -> Iterator[subprocess.Popen[str]]:
    # A worker that waits for one that was killed before it came does not hear of a signal.
    command = [*launcher, "--workers=2", "--grace-seconds=3", "--pause-seconds=0"]
    command += ["--max-restarts=1000", f"--restart-codes={RESTART_CODES}", PROGRAM, folder, ""]
    command.append(json.dumps(options))
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)


def weather(
    tmp_path: Path, disk: Path, *, seed: int, interruptions: int, epochs: int, launcher: list[str]
) -> str:
    """A run in a storm, compared with one without; what happened."""
    calm, folder = tmp_path / "calm", tmp_path / "storm"
    done = launch_to_the_end(calm, "", undisturbed=True, epochs=epochs)
    assert done.returncode == 0, done.stdout
    folder.mkdir()
    hooks = epochs * HOOKS_OF_AN_EPOCH
    storm = Storm(folder, disk, seed, interruptions, hooks)
    options = {"directory": str(disk / "state"), "save_freq": 2, "delete_checkpoint": False}
    with launched(folder, launcher, {"storm": True, "epochs": epochs, **options}) as process:
        storm.rage(process)
        process.wait(300)
    output = (folder / "output.txt").read_text()
    assert process.returncode == 0, output[-8000:]
    assert ends(folder) == ends(calm), output[-8000:]
    assert not (disk / "filler").exists()
    left = [path.name for path in (disk / "state").rglob("*") if "kscktmp" in path.name]
    assert left == []
    resumed = len(events(disk, "resume")) // 2
    (restarts,) = re.findall(r"\((\d+) restarts?,", output)
    kinds_done = ", ".join(f"{number} x {kind}" for kind, number in sorted(storm.counts.items()))
    return f"{sum(storm.counts.values())} interruptions ({kinds_done}), {restarts} restarts, " + (
        f"{resumed} of them resumed; weights, optimizer and history as undisturbed"
    )


def test_a_short_storm(tmp_path, small_disk):
    disk = small_disk("size=8m")
    said = weather(tmp_path, disk, seed=1, interruptions=len(KINDS), epochs=2, launcher=FORKING)
    assert said.startswith("4 interruptions (1 x full disk, 1 x kill, 1 x pause, 1 x sigterm)")


@pytest.mark.campaign
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_fifty(tmp_path, small_disk, seed, record_property):
    disk, launcher = small_disk("size=8m"), LAUNCHER if seed else FORKING
    said = weather(tmp_path, disk, seed=seed, interruptions=50, epochs=10, launcher=launcher)
    record_property("campaign", f"storm {seed}, two workers: {said}")
