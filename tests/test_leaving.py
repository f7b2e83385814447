"""The way out of a program, in real processes: its code stays, and nothing keeps it."""

from __future__ import annotations

import signal

import pytest
from processes import run, start, wait_until

PRELUDE = """
import atexit, signal, sys, threading, time
from pathlib import Path
from keras_safe_ckpt.preemption.leaving import Departure, stay
NOTES = Path(sys.argv[1])
def note(text):
    with NOTES.open("a") as file:
        print(text, file=file)
atexit.register(note, "before")

class Hangs:
    '''As the iterators of TensorFlow do, whose threads need Python.'''
    def __del__(self):
        note("taken apart")
        time.sleep(60)
kept = Hangs()
departure = Departure(42)
departure.former = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
"""


@pytest.mark.parametrize("how", ["departure.go()", "threading.Thread(target=departure.go).start()"])
def test_the_code_comes_out_without_taking_the_program_apart(tmp_path, how):
    code = """
atexit.register(note, "after")
print("said", end="")
%s
time.sleep(10)
"""
    done = run(PRELUDE + code % how, tmp_path / "notes", timeout=30)
    assert done.returncode == 42, done.stderr
    assert done.stdout == "said"
    if how == "departure.go()":
        # What Python does at the end of a program is done, in its order.
        assert (tmp_path / "notes").read_text() == "after\nbefore\n"


def test_whoever_catches_it_goes_on_and_ends_as_always(tmp_path):
    code = """
del kept
departure.former = {signal.SIGTERM: lambda number, frame: note("former")}
signal.signal(signal.SIGTERM, departure.on_signal)
try:
    departure.go()
except SystemExit as end:
    note(end.code)
stay()
stay()
import os
os.kill(os.getpid(), signal.SIGTERM)
class Last:
    def __del__(self):
        note("end")
last = Last()
sys.exit(3)
"""
    notes = tmp_path / "notes"
    done = run(PRELUDE.replace("sleep(60)", "sleep(0)") + code, notes, timeout=30)
    assert done.returncode == 3, done.stderr
    assert notes.read_text().split("\n") == ["taken apart", "42", "former", "before", "end", ""]


def test_a_handler_that_is_another_ones_by_now_is_left_alone(tmp_path):
    code = """
import os
signal.signal(signal.SIGTERM, lambda number, frame: note("another"))
try:
    departure.go()
except SystemExit:
    stay()
os.kill(os.getpid(), signal.SIGTERM)
os._exit(0)
"""
    run(PRELUDE + code, tmp_path / "notes", timeout=30)
    assert (tmp_path / "notes").read_text() == "another\n"


def test_an_echo_is_ignored_and_a_later_signal_ends_at_once_with_the_code(tmp_path):
    """A thread of the user's keeps the program, which Python waits for."""
    code = """
signal.signal(signal.SIGTERM, departure.on_signal)
threading.Thread(target=lambda: (note("thread"), time.sleep(600))).start()
import os
os.kill(os.getpid(), signal.SIGTERM)
note("echo")
departure.go()
"""
    notes = tmp_path / "notes"
    process = start(PRELUDE + code, notes)

    def ends() -> bool:
        # Those that come within half a second are taken for echoes.
        process.send_signal(signal.SIGTERM)
        return process.poll() is not None

    wait_until(lambda: notes.exists() and "echo" in notes.read_text(), "it leaves")
    wait_until(ends, "it has ended", 30)
    assert process.returncode == 42
    assert "taken apart" not in notes.read_text()


def test_a_python_that_asks_in_another_way_ends_as_always(tmp_path):
    """Without the private function of `atexit`, objects are taken apart, and the code stays."""
    code = """
del atexit._run_exitfuncs
departure.go()
"""
    done = run(PRELUDE.replace("sleep(60)", "sleep(0)") + code, tmp_path / "notes", timeout=30)
    assert done.returncode == 42, done.stderr
    assert (tmp_path / "notes").read_text() == "before\ntaken apart\n"
