"""`PreemptionGuard` in loops of plain Python: real signals, real ends of programs."""

from __future__ import annotations

import datetime
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from metadata_server import AwsServer, AzureServer, GcpServer
from processes import run

#: A loop of ten steps that keeps its state in a file of its own; `notes` is what happened.
LOOP = """
import time
from keras_safe_ckpt import PreemptionGuard
FOLDER = sys.argv[1]
STATE = f"{FOLDER}/state.json"
state = json.load(open(STATE)) if os.path.exists(STATE) else {"step": 0, "sum": 0}
notes = []

def note(text):
    with open(f"{FOLDER}/notes", "a") as file:
        print(text, file=file)

def save():
    with open(STATE + ".new", "w") as file:
        json.dump(state, file)
    os.replace(STATE + ".new", STATE)
    note(f"saved {state['step']}")

def train(number):
    state["sum"] += number * number
    return state["sum"]

def loop(guard, hit=None, number=signal.SIGTERM, steps=10):
    while state["step"] < steps and guard.preempted is None:
        assert guard.run(train, state["step"]) == state["sum"]
        state["step"] += 1
        if state["step"] == hit:
            os.kill(os.getpid(), number)
"""


def notes(folder: Path) -> list[str]:
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


def state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_text())


def test_a_loop_without_tensorflow(tmp_path):
    code = LOOP + "loop(PreemptionGuard(save_fn=save), hit=4)"
    done = run(code, tmp_path)
    assert done.returncode == 42, done.stderr
    assert state(tmp_path) == {"step": 4, "sum": 14}
    assert "Notice from SIGTERM" in done.stdout
    assert "Stopping after 4 runs" in done.stdout
    assert "Saved (0.0" in done.stdout
    assert done.stdout.endswith("exit code 42\n")
    code = LOOP + "loop(PreemptionGuard(save_fn=save)); print(state['sum'])\n"
    code += "print({'tensorflow', 'keras'} & set(sys.modules))"
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "285\nset()\n"


def test_what_is_done_after_a_step_belongs_to_it(tmp_path):
    """The save comes before the next step, not within the one that was running."""
    done = run(LOOP + "loop(PreemptionGuard(save_fn=save, verbose=0), hit=1)", tmp_path)
    assert done.returncode == 42, done.stderr
    assert done.stdout == ""
    assert state(tmp_path) == {"step": 1, "sum": 0}


def test_the_loop_ends_before_the_next_step(tmp_path):
    """At the end of the block the program stops, saved; started again, it comes to what follows."""
    code = LOOP + "with PreemptionGuard(save_fn=save) as guard: loop(guard, hit=10)\nnote('after')"
    done = run(code, tmp_path)
    assert done.returncode == 42, done.stderr
    assert notes(tmp_path) == ["saved 10"]
    assert run(code, tmp_path).returncode == 0
    assert notes(tmp_path) == ["saved 10", "after"]


def test_the_program_ends_before_the_next_step(tmp_path):
    """It has come to its end in time: saved all the same, and nothing to be started again."""
    code = LOOP + "guard = PreemptionGuard(save_fn=save)\nloop(guard, hit=10)\nnote('after')"
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert notes(tmp_path) == ["after", "saved 10"]


def test_the_function_ends_before_the_next_step(tmp_path):
    """Nobody has the guard any more, and what follows may take longer than there is."""
    code = LOOP + "loop(PreemptionGuard(save_fn=save), hit=10)\nnote('after')"
    done = run(code, tmp_path)
    assert done.returncode == 42, done.stderr
    assert notes(tmp_path) == ["saved 10"]


def test_a_program_that_fails_saves_nothing(tmp_path):
    """Nobody knows what is half done."""
    code = (
        LOOP
        + """
guard = PreemptionGuard(save_fn=save)
loop(guard, hit=3, steps=3)
raise KeyError("a bug")
"""
    )
    done = run(code, tmp_path)
    assert done.returncode == 1
    assert "a bug" in done.stderr
    assert notes(tmp_path) == []
    code = (
        LOOP
        + """
with PreemptionGuard(save_fn=save) as guard:
    loop(guard, hit=3, steps=3)
    raise KeyError("a bug")
"""
    )
    done = run(code, tmp_path)
    assert done.returncode == 1
    assert "a bug" in done.stderr
    assert "nothing saved" in done.stderr
    assert notes(tmp_path) == []


ENDS = {
    "caught, and the program ends": "try:\n    go(guard)\nexcept KeyError:\n    sys.exit(5)",
    "sys.exit in a step": "go(guard, lambda: sys.exit(5))",
    "caught, and the guard is gone": (
        "del guard\ndef train_all(one):\n    try:\n        go(one)\n    except KeyError:\n"
        "        pass\n"
        "train_all(PreemptionGuard(save_fn=save))\nsys.exit(5)"
    ),
    "at the end of a block": (
        "try:\n    with guard:\n        try:\n            go(guard)\n        except KeyError:\n"
        "            pass\nfinally:\n    sys.exit(5)"
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_step_that_is_half_done_is_not_saved(tmp_path, end):
    code = """
def fail():
    raise KeyError("in the middle of a step")
def go(guard, how=fail):
    def half():
        state["sum"] = 999
        os.kill(os.getpid(), signal.SIGTERM)
        how()
    guard.run(train, 0)
    guard.run(half)
guard = PreemptionGuard(save_fn=save)
"""
    done = run(LOOP + code + ENDS[end], tmp_path)
    assert done.returncode == 5, done.stderr
    assert notes(tmp_path) == []


def test_an_error_that_the_loop_goes_on_after_is_none(tmp_path):
    code = """
def fail():
    raise KeyError("a bad batch")
with PreemptionGuard(save_fn=save) as guard:
    try:
        guard.run(fail)
    except KeyError:
        pass
    loop(guard, hit=3)
"""
    done = run(LOOP + code, tmp_path)
    assert done.returncode == 42, done.stderr
    assert notes(tmp_path) == ["saved 3"]


def test_a_notice_is_not_forgotten_when_a_loop_is_tried_again(tmp_path):
    code = """
def fail():
    os.kill(os.getpid(), signal.SIGTERM)
    raise ConnectionError
for attempt in range(2):
    try:
        with PreemptionGuard(save_fn=save) as guard:
            if attempt == 0:
                guard.run(fail)
            loop(guard)
    except ConnectionError:
        note("again")
"""
    done = run(LOOP + code, tmp_path)
    assert done.returncode == 42, done.stderr
    assert notes(tmp_path) == ["again", "saved 0"]


def test_the_end_of_the_data_is_the_end_of_the_loop(tmp_path):
    code = """
data = iter(range(3))
try:
    with PreemptionGuard(save_fn=save) as guard:
        while True:
            guard.run(train, next(data))
            state["step"] += 1
            if state["step"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)
except StopIteration:
    note("after")
"""
    done = run(LOOP + code, tmp_path)
    assert done.returncode == 42, done.stderr
    assert notes(tmp_path) == ["saved 3"]


def test_guards_that_are_gone_leave_no_handler(tmp_path):
    """Each is made before the one before it is gone: handlers are given back out of order."""
    code = """
heard = []
def own(number, frame):
    heard.append(number)
signal.signal(signal.SIGTERM, own)
for epoch in range(3):
    guard = PreemptionGuard(save_fn=save, on_preempted="stop")
    guard.run(train, 1)
os.kill(os.getpid(), signal.SIGTERM)
guard.run(train, 1)
assert guard.preempted and heard == [signal.SIGTERM], heard
guard.close()
assert signal.getsignal(signal.SIGTERM) is own
import gc, threading
cycle = [PreemptionGuard(save_fn=save)]
cycle.append(cycle)
del cycle
thread = threading.Thread(target=gc.collect)  # Handlers can be changed on the main thread only.
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
assert heard == [signal.SIGTERM] * 2, heard
"""
    done = run(LOOP + code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert notes(tmp_path) == ["saved 0"]


@pytest.mark.parametrize("options", ["exit_fn=lambda: time.sleep(1)", "on_preempted='stop'"])
def test_an_echo_of_the_signal_does_nothing(tmp_path, options):
    code = f"""
import threading
from keras_safe_ckpt.preemption import signals
signals.ECHO_SECONDS = 3.0  # However busy the machine is.
guard = PreemptionGuard(save_fn=save, {options})
echo = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
echo.start()
os.kill(os.getpid(), signal.SIGTERM)
guard.run(train, 1)
echo.join()
note("after")
"""
    done = run(LOOP + code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert notes(tmp_path) == ["saved 0", "after"]


def test_signals_are_chained_and_given_back(tmp_path):
    code = (
        LOOP
        + """
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
with PreemptionGuard(save_fn=save, on_preempted="stop") as guard:
    loop(guard, hit=2)
assert guard.preempted == "SIGTERM: received", guard.preempted
assert heard == [signal.SIGTERM]
os.kill(os.getpid(), signal.SIGTERM)
assert heard == [signal.SIGTERM] * 2
with PreemptionGuard(save_fn=save):
    pass
os.kill(os.getpid(), signal.SIGTERM)
assert heard == [signal.SIGTERM] * 3
"""
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert notes(tmp_path) == ["saved 2"]


def test_several_guards_in_one_process(tmp_path):
    code = (
        LOOP
        + """
for phase in range(3):
    state.update(step=0, sum=0)
    guard = PreemptionGuard(save_fn=save, exit_fn=lambda: note("exit_fn"))
    loop(guard, hit=2 + phase)
    assert guard.preempted, phase
    assert guard.total_run_calls == 3 + phase  # The one that was asked for is still made.
    # A guard that is over calls the function, and nothing else.
    assert guard.run(lambda x: x + 1, 1) == 2
    guard.close()
"""
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert notes(tmp_path) == [f"{what}" for n in (2, 3, 4) for what in (f"saved {n}", "exit_fn")]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("exit_code=7", 7),
        ("exit_fn=lambda: sys.exit(9)", 9),
        ("termination_config=Config(exit_fn=lambda: sys.exit(11))", 11),
        ("termination_config=Config(grace_period=0)", 42),
        ("termination_config=Config(grace_period=4)", 42),
        ("notices=['SIGUSR2', 'SIGTERM']", 42),
    ],
)
def test_ways_to_exit(tmp_path, options, code):
    program = (
        LOOP
        + f"""
class Config:  # As tf.distribute.experimental.TerminationConfig.
    def __init__(self, **given):
        self.termination_watcher_fn = self.exit_fn = self.grace_period = self.save_fn = None
        vars(self).update(given)
loop(PreemptionGuard(save_fn=save, {options}), hit=4)
"""
    )
    done = run(program, tmp_path)
    assert done.returncode == code, done.stderr
    assert notes(tmp_path) == ["saved 4"]


def test_a_save_that_fails_is_said_and_the_program_is_to_be_started_again(tmp_path):
    code = (
        LOOP
        + """
def broken():
    raise OSError(28, "No space left on device")
loop(PreemptionGuard(save_fn=broken), hit=4)
"""
    )
    done = run(code, tmp_path)
    assert done.returncode == 42
    assert (
        "Not saved: [Errno 28] No space left on device; the last checkpoint stands" in done.stdout
    )


def test_a_watcher_function_and_arguments_for_the_save(tmp_path):
    code = (
        LOOP
        + """
def save_as(name, *, suffix):
    note(name + suffix)
guard = PreemptionGuard(save_fn=save_as, notices=lambda: os.path.exists(f"{FOLDER}/stop"))
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    state["step"] += 1
    guard.save_checkpoint_if_preempted("model", suffix=" at the end")
    open(f"{FOLDER}/stop", "w").close()
    time.sleep(0.01)
"""
    )
    done = run(code, tmp_path)
    assert done.returncode == 42, done.stderr
    assert notes(tmp_path) == ["model at the end"]


def test_a_scope_is_a_boundary(tmp_path):
    code = (
        LOOP
        + """
guard = PreemptionGuard(save_fn=save)
for epoch in range(3):
    with guard.watch_preemption_scope():
        loop(guard, hit=4, steps=4)
    note(f"epoch {epoch}")
"""
    )
    done = run(code, tmp_path)
    assert done.returncode == 42, done.stderr
    assert notes(tmp_path) == ["saved 4"]


def test_advice_is_a_save_and_no_end(tmp_path):
    code = (
        LOOP
        + """
from keras_safe_ckpt.preemption.notices import Notice
class Adviser:
    name = "adviser"
    def start(self, desk):
        self.desk = desk
    def stop(self):
        pass
adviser = Adviser()
guard = PreemptionGuard(save_fn=save, notices=adviser)
loop(guard, steps=3)
adviser.desk.tell(Notice("AWS", "rebalance", advisory=True))
loop(guard, steps=6)
adviser.desk.tell(Notice("AWS", "spot interruption"))
loop(guard, steps=8)
"""
    )
    done = run(code, tmp_path)
    assert done.returncode == 42, done.stderr
    assert notes(tmp_path) == ["saved 3", "saved 6"]
    assert "After 3 runs: saved (AWS: rebalance" in done.stdout


def test_signals_of_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    done = run(LOOP + "loop(PreemptionGuard(save_fn=save), 3, signal.SIGUSR1)", tmp_path)
    assert done.returncode == 42, done.stderr
    assert notes(tmp_path) == ["saved 3"]


def gcp(server: Any) -> None:
    server.values["preempted"] = "TRUE"


def aws(server: Any) -> None:
    server.spot(action="terminate", time=f"{soon():%Y-%m-%dT%H:%M:%SZ}")


def azure(server: Any) -> None:
    server.schedule("Preempt", NotBefore=f"{soon():%a, %d %b %Y %H:%M:%S GMT}")


def soon() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=20)


@pytest.mark.parametrize(
    ("make", "variable", "tell", "code"),
    [
        (GcpServer, "GCE_METADATA_HOST", gcp, 143),
        (AwsServer, "AWS_EC2_METADATA_SERVICE_ENDPOINT", aws, 42),
        (AzureServer, "KERAS_SAFE_CKPT_AZURE_ENDPOINT", azure, 42),
    ],
)
def test_notices_of_clouds(tmp_path, monkeypatch, make, variable, tell, code):
    """On machines without an accelerator, too, on which TensorFlow's handler does nothing."""
    program = """
guard = PreemptionGuard(save_fn=save)
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    loop(guard, steps=state["step"] + 1)
    time.sleep(0.01)
"""
    with make() as server:
        monkeypatch.setenv(variable, server.url)
        tell(server)
        done = run(LOOP + program, tmp_path)
    assert done.returncode == code, done.stderr
    assert len(notes(tmp_path)) == 1


def test_a_long_grace_period_is_trained_through(tmp_path):
    """A save at once, since the end may come early; another one just before the deadline."""
    program = """
from keras_safe_ckpt.preemption import pace
pace.LONG_SECONDS = 0.5
guard = PreemptionGuard(save_fn=save, grace_period=5.0)  # Two of them are reserve.
began = time.monotonic()
import atexit
atexit.register(lambda: note(f"{time.monotonic() - began:.2f}"))
os.kill(os.getpid(), signal.SIGTERM)
while True:
    loop(guard, steps=state["step"] + 1)
    time.sleep(0.01)
"""
    done = run(LOOP + program, tmp_path)
    assert done.returncode == 42, done.stderr
    first, last, seconds = notes(tmp_path)
    assert int(first.split()[1]) <= 5
    assert int(last.split()[1]) > int(first.split()[1]) + 5
    assert 1.0 < float(seconds) < 5.0


def test_a_boundary_costs_next_to_nothing():
    """Counted, not timed: nothing is written, asked or locked while nothing is due."""
    from keras_safe_ckpt import PreemptionGuard

    calls = []
    guard = PreemptionGuard(save_fn=lambda: calls.append("saved"), notices=None)
    for number in range(1000):
        guard.run(calls.append, number)
    guard.close()
    assert calls == list(range(1000))
    assert guard.total_run_calls == 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "something to save"),
        ({"save_fn": "x"}, "save_fn to be a function"),
        ({"save_fn": print, "exit_fn": 3}, "exit_fn"),
        ({"save_fn": print, "exit_code": 256}, "exit_code"),
        ({"save_fn": print, "grace_period": -1}, "grace_period"),
        ({"save_fn": print, "on_preempted": "die"}, "on_preempted"),
        ({"save_fn": print, "notices": "nobody"}, "notices"),
        ({"save_fn": print, "verbose": 7}, "verbose"),
        ({"save_fn": print, "locks": 7}, "locks"),
        ({"save_fn": print, "notices": "aws", "termination_config": object()}, "both"),
    ],
)
def test_bad_arguments_are_named_at_once(arguments, message):
    from keras_safe_ckpt import PreemptionGuard

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match=message):
        PreemptionGuard(**arguments)
    assert signal.getsignal(signal.SIGTERM) == before
    assert os.getpid()
