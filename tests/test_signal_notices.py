"""Signals as notices, in real processes: chained, given back, and never swallowed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forking import Forked, Forking
from processes import PROJECT, environment, wait_until

#: A model whose step takes as long as we like, interrupted from outside.
PRELUDE = """
import os, signal, sys, threading, time
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import numpy as np
import keras
from keras_safe_ckpt import PreemptionAwareCallback
FOLDER = sys.argv[1]
X = np.zeros((8, 2), "float32")

def note(text):
    with open(f"{FOLDER}/notes.txt", "a") as file:
        print(text, file=file)

class Waiting(keras.callbacks.Callback):
    '''Says that training runs, and waits for the signal in each batch.'''
    def __init__(self, wait):
        super().__init__()
        self.wait = wait
    def on_train_batch_end(self, batch, logs=None):
        note(f"batch {batch}")
        self.wait()

def train(wait, epochs=50, **options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    mine = PreemptionAwareCallback(f"{FOLDER}/state", **options)
    model.fit(X, X[:, :1], batch_size=2, epochs=epochs, verbose=0, shuffle=False,
              callbacks=[Waiting(wait), mine])
"""


def training(folder: Path, process: Any, until: str = "batch 1") -> Any:
    wait_until(lambda: until in notes(folder) or process.poll() is not None, "it trains")
    return process


@pytest.fixture
def start(forking: Forking) -> Callable[..., Forked]:
    """Starts a process that has TensorFlow already."""

    def begin(folder: Path, code: str, **options: str) -> Forked:
        script = folder / "program.py"
        script.write_text(PRELUDE + code)
        return training(folder, forking.start(environment(), script, folder), **options)

    return begin


@pytest.fixture
def start_anew() -> Callable[[Path, str], subprocess.Popen[str]]:
    """Starts a new interpreter."""

    def begin(folder: Path, code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, str(folder)],
            env=environment(),
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return training(folder, process)

    return begin


def notes(folder: Path) -> str:
    path = folder / "notes.txt"
    return path.read_text() if path.exists() else ""


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "state").glob("run-*"))


def test_a_signal_saves_and_exits_with_the_restart_code(tmp_path, start_anew):
    process = start_anew(tmp_path, "train(lambda: time.sleep(0.05))")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 42, err
    assert "[preemption] Notice from SIGTERM: received, 30 s left" in out
    assert files(tmp_path)


def test_any_signal_by_choice_and_the_former_handler_is_called_too(tmp_path, start):
    code = """
def former(number, frame):
    note(f"former {number}")
    sys.exit(3)   # Has to wait until the checkpoint is there.
signal.signal(signal.SIGUSR2, former)
signal.signal(signal.SIGTERM, lambda number, frame: note("terminated"))
train(lambda: time.sleep(0.05), notices="SIGUSR2")
"""
    process = start(tmp_path, code)
    process.send_signal(signal.SIGTERM)  # Not ours.
    wait_until(lambda: "terminated" in notes(tmp_path), "the other signal was handled")
    process.send_signal(signal.SIGUSR2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 42, err
    assert notes(tmp_path).count("former 12") == 1
    assert files(tmp_path)


def test_a_step_that_hangs_falls_through_at_the_deadline(tmp_path, start_anew):
    """The main thread sits in a call that lets no signal handler of Python run."""
    code = """
import ctypes
calls = []
def hang():
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)   # Handled before this returns.
        ctypes.CDLL(None).sleep(600)
train(hang, grace_period=1.5)
"""
    process = start_anew(tmp_path, code)
    _, err = process.communicate(timeout=60)
    # As if nobody had ever handled it.
    assert process.returncode == -signal.SIGTERM, err
    assert "was not answered in time" in err


def test_after_fit_a_signal_has_its_former_effect(tmp_path, start):
    code = """
stop = []
def wait():
    stop.append(1)
    if len(stop) == 3:
        raise RuntimeError("by design")
try:
    train(wait)
except RuntimeError:
    note("failed")
time.sleep(600)
"""
    process = start(tmp_path, code)
    wait_until(lambda: "failed" in notes(tmp_path), "fit has failed")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, err


def test_a_notice_that_comes_before_fit_fails_is_not_swallowed(tmp_path, start):
    code = """
calls = []
def wait():
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("by design")
try:
    train(wait, grace_period=1.5)
except RuntimeError:
    note("failed")
time.sleep(600)
"""
    process = start(tmp_path, code)
    _, err = process.communicate(timeout=60)
    assert "failed" in notes(tmp_path)
    assert process.returncode == -signal.SIGTERM, err


def test_a_second_signal_does_not_wait_for_the_batch(tmp_path, start):
    # In short naps: a signal that comes just before a sleep is handled by Python after it.
    code = """
def slow():
    while os.path.exists(FOLDER + "/slow"):
        time.sleep(0.01)
train(slow)
"""
    (tmp_path / "slow").touch()
    process = start(tmp_path, code, until="batch 0")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: '"event": "notice"' in events(tmp_path), "the first one was noticed")

    def ends() -> bool:
        # Those that come within half a second are taken for echoes of the first.
        process.send_signal(signal.SIGTERM)
        return process.poll() is not None

    wait_until(ends, "another one has ended it")
    assert process.returncode == -signal.SIGTERM
    assert notes(tmp_path).count("batch") == 1


def test_a_signal_in_the_middle_of_a_print_ends_the_process(tmp_path, start):
    """The stream cannot be flushed there: Python refuses to enter it a second time."""
    code = """
import io
from keras_safe_ckpt.preemption.signals import end_by_signal
signal.signal(signal.SIGTERM, lambda number, frame: end_by_signal(number))
class Screen(io.RawIOBase):
    def writable(self):
        return True
    written = 0
    def write(self, data):
        Screen.written += 1
        if Screen.written == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return len(data)
sys.stdout = io.TextIOWrapper(io.BufferedWriter(Screen()))
note("batch 1")
print("Epoch 1", flush=True)
"""
    process = start(tmp_path, code)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, err


def events(folder: Path) -> str:
    path = folder / "state" / "events.jsonl"
    return path.read_text() if path.exists() else ""


def test_a_signal_at_the_very_end_of_training_is_not_swallowed(tmp_path, start):
    """It comes when there are no more batches, and all that was due was looked at."""
    code = """
from keras_safe_ckpt.callbacks.preemption_run import PreemptionRun
finish = PreemptionRun._finish
def late(self):
    note("batch 1")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
    finish(self)
PreemptionRun._finish = late
train(lambda: None, epochs=5, save_freq=None)
note("swallowed")
"""
    process = start(tmp_path, code)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, err
    assert "swallowed" not in notes(tmp_path)


def test_a_slow_event_log_does_not_lose_a_notice(tmp_path, start):
    code = """
from keras_safe_ckpt.storage.events import EventLog
append = EventLog._append
def slow(self, line):
    time.sleep(0.3 if b'"notice"' in line else 0)
    append(self, line)
EventLog._append = slow
def at_the_last_batch():
    if open(f"{FOLDER}/notes.txt").read().count("batch") == 20:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
train(at_the_last_batch, epochs=5)
note("swallowed")
"""
    process = start(tmp_path, code)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 42, err
    assert files(tmp_path)


def test_a_forked_child_ends_by_a_signal_as_it_always_did(tmp_path, start):
    code = """
import multiprocessing
made = []
def wait():
    time.sleep(0.05)
    for _ in range(0 if made else 20):  # At any moment of its beginning.
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join(10)
        made.append(child.exitcode)
        if len(made) == 20 or made[-1] is None:
            note(f"children {sorted(set(made), key=str)}")
            break
train(wait)
"""
    process = start(tmp_path, code)
    wait_until(lambda: "children" in notes(tmp_path), "the children have ended")
    assert "children [-15]" in notes(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 42


def test_a_failed_evaluation_leaves_no_handler_that_is_in_the_way(tmp_path, start):
    code = """
class Fails(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        raise RuntimeError("by design")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", run_eagerly=True)
try:
    model.evaluate(X, X[:, :1], callbacks=[PreemptionAwareCallback(f"{FOLDER}/state"), Fails()])
except RuntimeError:
    note("batch 1")
while True:
    time.sleep(0.01)  # As above: not one long sleep.
"""
    process = start(tmp_path, code)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


def test_a_program_whose_data_is_read_by_python_code_does_not_hang_at_its_end(tmp_path, start_anew):
    """TensorFlow's threads are in the middle of it, and wait for an interpreter that has ended."""
    code = """
def rows():
    while True:
        time.sleep(0.1)
        yield X[:2], X[:2, :1]
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(rows(), steps_per_epoch=500, epochs=2, verbose=0,
          callbacks=[Waiting(lambda: None), PreemptionAwareCallback(f"{FOLDER}/state")])
"""
    process = start_anew(tmp_path, code)
    process.send_signal(signal.SIGTERM)
    try:
        _, err = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 42, err
    assert files(tmp_path)


@pytest.mark.parametrize("exit", ["lambda: sys.exit(5)", "None"])
def test_off_the_main_thread_the_process_ends_all_the_same(tmp_path, start, exit):
    code = f"""
rings = threading.Event()
def target():
    train(lambda: (time.sleep(0.02), os.path.exists(FOLDER + "/now") and rings.set()),
          notices=["SIGTERM", rings.is_set], exit_fn={exit})
thread = threading.Thread(target=target)
thread.start()
thread.join()
note("joined")
time.sleep(60 if ({exit}) is None else 0)
"""
    process = start(tmp_path, code)
    (tmp_path / "now").touch()
    _, err = process.communicate(timeout=40)
    assert process.returncode == (42 if exit == "None" else 5), err
    assert "joined" not in notes(tmp_path)
    assert "does not run on the main thread" in err
    assert files(tmp_path)


def test_slurm_tells_by_signals_and_variables(tmp_path, start, monkeypatch):
    """As with ``sbatch --signal=USR1@120``: two minutes before the limit."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 20))
    process = start(tmp_path, "train(lambda: time.sleep(0.05))")
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 42, err
    assert "Notice from SIGUSR1: received" in out
    assert files(tmp_path)
    found = [json.loads(line) for line in events(tmp_path).splitlines()]
    assert (found[0]["job"], found[0]["restarts"]) == ("4711", 2)
    (notice,) = [event for event in found if event["event"] == "notice"]
    assert notice["seconds_left"] < 20
