"""Real workers on this machine, started by the launcher."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forking import Forked, shared_forking
from processes import environment

#: Starts every worker anew, as users do.
LAUNCHER = [sys.executable, "-m", "keras_safe_ckpt", "launch"]
#: Forks the workers from a process that has imported TensorFlow: seconds less for each of them.
FORKING = [sys.executable, str(Path(__file__).with_name("forking_launcher.py"))]

#: What every worker begins with; `report` hands facts to the test.
WORKER = """
import json, os, sys, time
FOLDER, ARGUMENTS = sys.argv[1], sys.argv[2:]
INDEX = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import numpy as np
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras
import keras_safe_ckpt

FACTS = {}
def report(**facts):
    FACTS.update(facts)
    with open(f"{FOLDER}/facts-{INDEX}.json", "w") as file:
        json.dump(FACTS, file)
"""


def begin(command: Sequence[object], place: Path) -> subprocess.Popen[str] | Forked:
    """Start the launcher; `communicate` has what it prints, which may go to a ``place`` first."""
    if list(command[:2]) == FORKING:
        # That one is forked as well, so that nobody imports TensorFlow for it.
        script, prints_to = Path(FORKING[1]), place / "launcher"
        return shared_forking().start(environment(), script, *command[2:], prints_to=prints_to)
    return subprocess.Popen(
        list(map(str, command)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def completed(command: Sequence[object], timeout: float) -> subprocess.CompletedProcess[str]:
    """To its end, and what it has printed."""
    with tempfile.TemporaryDirectory() as place:
        process = begin(command, Path(place))
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def all_printed(
    done: subprocess.CompletedProcess[str],
) -> subprocess.CompletedProcess[str]:
    """Both of what it has printed as one."""
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout + done.stderr)


def launch(
    folder: Path,
    code: str,
    *arguments: object,
    workers: int = 2,
    options: tuple[str, ...] = (),
    timeout: float = 250,
    launcher: Sequence[str] = FORKING,
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` on each of the workers, to the end of all."""
    script = folder / "worker.py"
    script.write_text(code)
    command = [*launcher, "--workers", workers, *options, script, folder, *arguments]
    return completed(command, timeout)


def launch_ok(folder: Path, code: str, *arguments: object, workers: int = 2, **options: Any) -> Any:
    """Run ``code``, which must succeed on all workers; return what each of them reported."""
    done = launch(folder, code, *arguments, workers=workers, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return facts(folder, workers)


def facts(folder: Path, workers: int = 2) -> list[dict[str, Any]]:
    """What each worker reported."""
    paths = [folder / f"facts-{index}.json" for index in range(workers)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in paths]
