"""Real workers on this machine, started by the launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    return subprocess.run(
        [*launcher, "--workers", str(workers), *options, script, folder, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def launch_ok(folder: Path, code: str, *arguments: object, workers: int = 2, **options: Any) -> Any:
    """Run ``code``, which must succeed on all workers; return what each of them reported."""
    done = launch(folder, code, *arguments, workers=workers, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return facts(folder, workers)


def facts(folder: Path, workers: int = 2) -> list[dict[str, Any]]:
    """What each worker reported."""
    paths = [folder / f"facts-{index}.json" for index in range(workers)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in paths]
