"""Run the command line as users do: as a process."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from forking import Forking
from processes import environment

#: Whoever imports one of these where it is not needed fails.
_NOT_NEEDED = ("tensorflow", "keras")
#: Of others, and slow to import: whoever forks has them.
_SLOW = ("h5py", "numpy", "portalocker", "rich.progress", "rich.table")
_TIMEOUT_SECONDS = 250


@functools.cache
def _without_tensorflow() -> str:
    folder = tempfile.mkdtemp(prefix="no-tensorflow-")
    for name in _NOT_NEEDED:
        Path(folder, f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')\n")
    return folder


def variables(*, tensorflow: bool = False, **more: str) -> dict[str, str]:
    """The environment of a command, which does without TensorFlow unless it is allowed."""
    found = environment()
    if not tensorflow:
        found["PYTHONPATH"] = os.pathsep.join((_without_tensorflow(), found["PYTHONPATH"]))
    found.pop("COLUMNS", None)
    return {**found, **more}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "keras_safe_ckpt", *map(str, arguments)]


@functools.cache
def _forking() -> tuple[Forking, Path]:
    one = Forking(variables(), _SLOW)
    atexit.register(one.close)
    script = Path(_without_tensorflow(), "command.py")
    script.write_text(
        "import runpy\nrunpy.run_module('keras_safe_ckpt', run_name='__main__', alter_sys=True)\n"
    )
    return one, script


def cli(
    *arguments: object, tensorflow: bool = False, cwd: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Forked from a process that has imported NumPy and the like, unless there are ``options``."""
    if not tensorflow and not options:
        forking, script = _forking()
        with tempfile.TemporaryDirectory() as folder:
            prints_to = Path(folder, "printed")
            running = forking.start(
                variables(), script, *arguments, prints_to=prints_to, cwd=cwd or Path.cwd()
            )
            out, err = running.communicate(_TIMEOUT_SECONDS)
        assert running.returncode is not None
        return subprocess.CompletedProcess(command(*arguments), running.returncode, out, err)
    return subprocess.run(
        command(*arguments),
        **{
            "env": variables(tensorflow=tensorflow),
            "capture_output": True,
            "text": True,
            "timeout": _TIMEOUT_SECONDS,
            "cwd": cwd,
            **options,
        },
    )


def cli_ok(*arguments: object, code: int = 0, **options: Any) -> str:
    """What it prints; ``code`` is the exit code that is expected."""
    done = cli(*arguments, **options)
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout


def cli_json(*arguments: object, code: int = 0, **options: Any) -> Any:
    return json.loads(cli_ok(*arguments, "--json", code=code, **options))


def one_line_of(done: subprocess.CompletedProcess[str]) -> str:
    """The only line that a command has to say about what went wrong."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("keras-safe-ckpt: "), line
    return line
