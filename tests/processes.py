"""Run Python code in real processes, watched, killed and disturbed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent

#: Makes and publishes snapshots without TensorFlow: a child starts in a fraction of a second.
PRELUDE = """
import os, sys, json, signal
import numpy as np
from keras_safe_ckpt import CheckpointStore
from keras_safe_ckpt.storage.snapshot import Snapshot
# A shell lets its background jobs ignore Ctrl-C, and that is handed down.
signal.signal(signal.SIGINT, signal.default_int_handler)

def snapshot(seed, size=1000):
    rng = np.random.default_rng(seed)
    arrays = {f"layers/dense/vars/{i}": rng.random((size,), "float32") for i in range(3)}
    config = '{"class_name": "Sequential"}'
    return Snapshot({"layers/dense/vars": {"name": "dense"}}, arrays, config=config,
                    metadata='{"keras_version": "3.15.1"}')
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PROJECT), "TF_CPP_MIN_LOG_LEVEL": "3"}


def start(
    code: str, *arguments: object, prefix: tuple[str, ...] = (), stdin: int | None = None
) -> subprocess.Popen[str]:
    """Start ``code`` in a new interpreter; ``prefix`` goes before the command."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
        env=environment(),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    code: str, *arguments: object, prefix: tuple[str, ...] = (), timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` to its end."""
    process = start(code, *arguments, prefix=prefix)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        # Without its output: a forked grandchild may hold the pipes open for ever.
        raise AssertionError(f"still running after {timeout} s: {code}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_ok(code: str, *arguments: object, **options: object) -> str:
    """Run ``code``, which must succeed; return what it printed."""
    done = run(code, *arguments, **options)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    return done.stdout


def strace(*injections: str) -> tuple[str, ...]:
    """The prefix that makes system calls fail, or kill the caller."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (apt-get install strace)")
    options = [option for injection in injections for option in ("-e", f"inject={injection}")]
    traced = ",".join(sorted({injection.split(":")[0] for injection in injections}))
    return ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={traced}", *options)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s until {what}"
        time.sleep(0.002)


@contextlib.contextmanager
def ending(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """None of them outlives a test that fails."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(30)


def children_of(pid: int) -> dict[int, str]:
    """Each with its state, as in ``ps``."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid:
                found[int(path.parent.name)] = state
    return found


def kill(process: subprocess.Popen[str]) -> None:
    """kill -9, and wait until it is gone."""
    process.send_signal(signal.SIGKILL)
    process.wait(30)


def press_ctrl_c(process: subprocess.Popen[str], seconds: float = 100) -> None:
    """Until it ends, as anybody would: Python drops one that comes in a ``__del__``.

    With time between them: one that comes while Python is on its way out kills the process.
    """
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        assert time.monotonic() < deadline, f"still running after {seconds} s of Ctrl-C"
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def writing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "keras_safe_ckpt-write"]


def require_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
