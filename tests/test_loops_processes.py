"""Many processes save into one directory while others restore from it."""

from __future__ import annotations

import itertools
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from bundle_files import leftovers, names_in, value_of
from forking import Forked, Forking
from keras_setup import tf
from processes import environment, wait_until

from keras_safe_ckpt.storage.events import EventLog

#: Saves until it has done so often, or (0) for ever; a reader restores until there is "stop".
PROGRAM = """
import os, sys, json
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import numpy as np
import tensorflow as tf
from keras_safe_ckpt import SafeCheckpointManager, SafeSaver
KIND, PART, FOLDER, NUMBER, TIMES = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
SIZE, KEEP = 2000, 4
v1 = tf.compat.v1

def whole(values):
    assert len(set(np.concatenate([np.ravel(v) for v in values]).tolist())) == 1, "torn"

def count():
    step = 0
    while step < TIMES or not TIMES:
        step += 1
        yield step
        if step == 1:
            open(f"{FOLDER}/../ready-{NUMBER}", "w").close()

def stopped():
    return os.path.exists(f"{FOLDER}/../stop")

if KIND == "manager":
    kept = [tf.Variable(np.zeros(SIZE, "float32")) for _ in range(3)]
    checkpoint = tf.train.Checkpoint(**{f"v{n}": variable for n, variable in enumerate(kept)})
    manager = SafeCheckpointManager(checkpoint, FOLDER, KEEP)
    if PART == "save":
        for step in count():
            for variable in kept:
                variable.assign(np.full(SIZE, NUMBER * 1000 + step))
            manager.save()
    else:
        restored = 0
        while not stopped() or not restored:
            if manager.restore_or_initialize():
                restored += 1
                whole([variable.numpy() for variable in kept])
        print(restored)
else:
    with tf.Graph().as_default():
        kept = [v1.get_variable(f"v{n}", initializer=np.zeros(SIZE, "float32")) for n in range(3)]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            saver = SafeSaver(max_to_keep=KEEP)
            if PART == "save":
                for step in count():
                    for variable in kept:
                        variable.load(np.full(SIZE, NUMBER * 1000 + step, "float32"), session)
                    # All of them save under the same names, and some without a number.
                    saver.save(session, f"{FOLDER}/m", global_step=None if step % 5 == 0 else step)
            else:
                restored = 0
                while not stopped() or not restored:
                    path = saver.latest(FOLDER)
                    if path:
                        try:
                            saver.restore(session, path)
                        except ValueError as gone:  # Between the two calls.
                            assert "not a valid checkpoint" in str(gone), gone
                            continue
                        restored += 1
                        whole(session.run(kept))
                print(restored)
"""


class Starter:
    """Starts the program, each time with an output of its own."""

    def __init__(self, forking: Forking, kind: str, tmp_path: Path) -> None:
        self._forking = forking
        self._kind = kind
        self._scripts = tmp_path / "scripts"
        self._scripts.mkdir()
        self._count = itertools.count()
        self.folder = tmp_path / "ckpts"
        self.folder.mkdir()

    def begin(self, part: str, number: int, times: int) -> Forked:
        script = self._scripts / f"{next(self._count)}.py"
        script.write_text(PROGRAM)
        arguments = (self._kind, part, self.folder, number, times)
        return self._forking.start(environment(), script, *arguments)


def ended(process: Forked, seconds: float = 250) -> str:
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err[-3000:]
    return out


def save_and_read(starter: Starter, *, savers: int, times: int, readers: int) -> int:
    """How often somebody restored."""
    folder = starter.folder
    reading = [starter.begin("read", 100 + n, 0) for n in range(readers)]
    saving = [starter.begin("save", n, times) for n in range(savers)]
    try:
        for process in saving:
            ended(process, 1500)
    finally:
        (folder.parent / "stop").touch()
    restored = [int(ended(process)) for process in reading]
    assert all(restored), restored
    check(folder)
    errors = [event for event in events(folder) if event["event"] == "error"]
    assert errors == []
    saves = [event for event in events(folder) if event["event"] == "save"]
    assert len(saves) == savers * times
    return sum(restored)


def check(folder: Path) -> None:
    assert leftovers(folder) == []
    names = names_in(folder)
    assert len(names) == 4, names
    for name in names:
        value_of(folder / name)
    assert Path(tf.train.latest_checkpoint(str(folder))).name in names


def events(folder: Path) -> list[dict[str, Any]]:
    return list(EventLog(folder).read())


# Each of the two in one of the two ways; in both, the campaigns.


def test_processes_save_and_read(tmp_path, forking):
    assert save_and_read(Starter(forking, "saver", tmp_path), savers=2, times=12, readers=1) > 0


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["manager", "saver"])
def test_eight_processes_save_a_hundred_times(kind, tmp_path, forking, record_property):
    restored = save_and_read(Starter(forking, kind, tmp_path), savers=8, times=100, readers=3)
    assert restored >= 3
    record_property(
        "campaign",
        f"{kind}: 8 processes saved 100 times each, 3 readers restored {restored} times, "
        "no error, nothing torn, max_to_keep kept",
    )


def kill_at_random(starter: Starter, *, rounds: int, seed: int) -> int:
    """How many were killed while they saved."""
    killed, folder = 0, starter.folder
    rng = random.Random(seed)
    reader = starter.begin("read", 100, 0)
    try:
        for round in range(rounds):
            children = [starter.begin("save", n, 0) for n in range(2)]
            for number in range(2):
                mark = folder.parent / f"ready-{number}"
                wait_until(mark.exists, f"saver {number} of round {round} has saved", 120)
                mark.unlink()
            count = len(events(folder))
            target = count + rng.randrange(1, 30)
            wait_until(lambda target=target: len(events(folder)) >= target, "they save")
            for child in children:
                child.kill()
                child.communicate(30)
                killed += child.returncode == -signal.SIGKILL
    finally:
        (folder.parent / "stop").touch()
    assert int(ended(reader)) > 0
    ended(starter.begin("save", 7, 6))
    check(folder)
    return killed


def test_savers_killed_at_random(tmp_path, forking):
    assert kill_at_random(Starter(forking, "manager", tmp_path), rounds=1, seed=7) == 2


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["manager", "saver"])
def test_savers_killed_at_random_again_and_again(kind, tmp_path, forking, record_property):
    killed = kill_at_random(Starter(forking, kind, tmp_path), rounds=15, seed=1)
    assert killed == 30
    record_property("campaign", f"{kind}: {killed} savers killed at random, a reader beside them")
