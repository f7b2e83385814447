"""The files of the workers in a directory: their names, and what each says about itself."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import h5py

from keras_safe_ckpt.cluster.roles import role_from_environment, role_under
from keras_safe_ckpt.datasets.inspection import inspect
from keras_safe_ckpt.datasets.rows import RESERVED
from keras_safe_ckpt.errors import CorruptCheckpointError, MergeConflictError

_NAME = re.compile(r"worker-(\d{5,})\.h5")
_UNFINISHED = re.compile(r"\.(.+)\.(unfinished|interrupted)")
_VERSION = 1


@dataclass(frozen=True)
class Label:
    """Which worker wrote a file, and how many there are (None: nobody knows)."""

    worker: int
    workers: int | None

    def to_text(self) -> str:
        return json.dumps({"version": _VERSION, "worker": self.worker, "workers": self.workers})

    @staticmethod
    def of(file: h5py.File) -> Label | None:
        """What the file says; None if it is none of ours."""
        text = file.attrs.get(RESERVED)
        try:
            found = json.loads(text)
            worker, workers = found["worker"], found["workers"]
        except (TypeError, ValueError, KeyError, RecursionError):
            return None
        if not _is_count(worker) or not (workers is None or _is_count(workers)):
            return None
        return Label(worker, workers)

    def mark(self, file: h5py.File) -> None:
        file.attrs[RESERVED] = self.to_text()


def file_of(directory: Path, worker: int) -> Path:
    return directory / f"worker-{worker:05d}.h5"


def worker_of(name: str) -> int | None:
    """The number in the name of a worker's file; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def unfinished_of(path: Path) -> Path:
    """Where a file is written before it is published."""
    return path.with_name(f".{path.name}.unfinished")


def interrupted_of(path: Path) -> Path:
    """What an earlier life of its writer has left, while a new one is at work."""
    return path.with_name(f".{path.name}.interrupted")


def target_of_unfinished(path: Path) -> Path | None:
    """What an unfinished file was to become; None if it is none."""
    match = _UNFINISHED.fullmatch(path.name)
    return None if match is None else path.with_name(match[1])


def rows_in(path: Path) -> dict[str, int]:
    """How many rows each dataset of a file has."""
    try:
        # Not by HDF5's own way through a file: of groups in groups without end it finds none.
        datasets = inspect(path, unpacks=False).datasets
    except MergeConflictError as error:
        where = "" if error.dataset == "/" else f"{error.dataset}: "
        raise CorruptCheckpointError(path, f"{where}{error.reason}") from error
    return {name: int(facts.shape[0]) if facts.shape else 1 for name, facts in datasets.items()}


def this_worker() -> Label:
    """By the strategy in whose scope this is called, else by the launcher's variables."""
    tf = sys.modules.get("tensorflow")
    if tf is not None and getattr(tf, "distribute", None) and tf.distribute.has_strategy():
        role = role_under(tf.distribute.get_strategy(), os.environ)
    else:
        role = role_from_environment(os.environ, synchronous=True)
    return Label(role.number, role.world)


def checked_label(worker: Any, workers: Any) -> Label:
    """What the user says, completed by the role of this process."""
    if workers is not None and not (_is_count(workers) and workers > 0):
        raise ValueError(f"workers: expected a number of workers, or None. Received: {workers!r}")
    if worker is None:
        found = this_worker()
        return Label(found.worker, found.workers if workers is None else int(workers))
    if not _is_count(worker) or (workers is not None and worker >= workers):
        below = "" if workers is None else f" below workers={workers}"
        raise ValueError(
            f"worker: expected a whole number from 0{below}, or None. Received: {worker!r}"
        )
    return Label(int(worker), None if workers is None else int(workers))


def is_whole_number(value: Any) -> bool:
    """NumPy's as well; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return is_whole_number(value) and value >= 0
