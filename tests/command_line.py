"""Run the command line as users do: as a process."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import environment

#: Whoever imports one of these where it is not needed fails.
_NOT_NEEDED = ("tensorflow", "keras")


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


def cli(
    *arguments: object, tensorflow: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        **{
            "env": variables(tensorflow=tensorflow),
            "capture_output": True,
            "text": True,
            "timeout": 250,
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
