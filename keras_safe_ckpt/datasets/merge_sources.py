"""Which files are to be merged, and in which order: those of all workers, each once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_safe_ckpt.datasets.inspection import FileFacts, inspect, opened
from keras_safe_ckpt.datasets.worker_files import (
    Label,
    is_whole_number,
    target_of_unfinished,
    worker_of,
)
from keras_safe_ckpt.errors import CheckpointNotFoundError, MergeConflictError
from keras_safe_ckpt.storage.paths import absolute


@dataclass(frozen=True)
class _Source:
    facts: FileFacts
    label: Label | None

    @property
    def name(self) -> str:
        return str(self.facts.path)


def given_paths(given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    if not isinstance(given, (str, os.PathLike)):
        if not isinstance(given, Iterable):
            raise TypeError(
                f"directory_or_files: expected a directory, or several files. Received: {given!r}"
            )
        paths = [absolute(path) for path in given]
        if not paths:
            raise ValueError("directory_or_files: expected at least one file. Received: none")
        return paths
    folder = absolute(os.path.join(given, "-")).parent
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            folder, "expected a directory of worker files, or a list of files", what="data"
        )
    names = sorted(os.listdir(folder))
    paths = [folder / name for name in names if worker_of(name) is not None]
    for name in names:
        finished = target_of_unfinished(folder / name)
        if finished is not None and worker_of(finished.name) is not None:
            # Also if there is a file of before: rows of two runs are not one result.
            raise MergeConflictError(
                "/",
                [str(folder / name)],
                f"worker {worker_of(finished.name)} has not finished (wait for it; if it was "
                f"interrupted, 'keras-safe-ckpt recover {folder}' tells what can be had)",
            )
    if not paths:
        raise CheckpointNotFoundError(
            folder, "there are no files such as worker-00000.h5 in it", what="data"
        )
    return paths


def checked_workers(workers: Any) -> Sequence[int] | None:
    if workers is None:
        return None
    numbers: Sequence[int] = []
    if is_whole_number(workers):
        numbers = range(int(workers))
    elif isinstance(workers, range):
        numbers = workers  # It may be long, and nothing of it is looked at.
    elif isinstance(workers, Iterable):
        given = list(workers)
        if all(map(is_whole_number, given)):
            numbers = sorted(set(map(int, given)))
    if not numbers or numbers[0] < 0 or numbers[-1] < 0:
        raise ValueError(
            f"workers: expected how many there are, or their numbers. Received: {workers!r}"
        )
    return numbers


def in_order(
    paths: Sequence[Path], expected: Sequence[int] | None, key: Callable[[Path], Any] | None
) -> list[FileFacts]:
    """What is in each file, by ``key``, or by the workers that wrote them."""
    sources: list[_Source] = []
    by_identity: dict[tuple[int, ...], Path] = {}
    for path in paths:
        facts = inspect(path)
        # By the file, not by its name: it may have several.
        if facts.identity in by_identity:
            files = [str(by_identity[facts.identity]), str(path)]
            raise MergeConflictError("/", files, "the same file is given twice")
        by_identity[facts.identity] = path
        with opened(path) as file:
            label = Label.of(file)
        named = worker_of(path.name)
        if label is not None and named is not None and named != label.worker:
            raise MergeConflictError(
                "/",
                [str(path)],
                f"it was written by worker {label.worker}, and its name says {named}",
            )
        sources.append(_Source(facts, label))
    _check_workers(sources, expected)
    if key is not None:
        sources.sort(key=lambda source: key(source.facts.path))
    elif all(source.label for source in sources):
        sources.sort(key=lambda source: source.label.worker)  # type: ignore[union-attr]
    return [source.facts for source in sources]


def _check_workers(sources: Sequence[_Source], expected: Sequence[int] | None) -> None:
    unknown = [source.name for source in sources if source.label is None]
    if unknown:
        if expected is not None:
            raise MergeConflictError("/", unknown, "it does not say which worker wrote it")
        if len(unknown) < len(sources):
            raise MergeConflictError(
                "/", unknown, "it does not say which worker wrote it, and other files do"
            )
        return
    by_worker: dict[int, str] = {}
    said: dict[int, str] = {}
    for source in sources:
        label = source.label
        assert label is not None
        if label.worker in by_worker:
            files = [by_worker[label.worker], source.name]
            raise MergeConflictError("/", files, f"both were written by worker {label.worker}")
        by_worker[label.worker] = source.name
        if label.workers is not None:
            said.setdefault(label.workers, source.name)
    if expected is None:
        if len(said) > 1:
            counts = " and ".join(f"{count} workers" for count in sorted(said))
            raise MergeConflictError("/", list(said.values()), f"they are of runs with {counts}")
        expected = range(next(iter(said), max(by_worker) + 1))
    absent = (number for number in expected if number not in by_worker)
    missing = list(itertools.islice(absent, 11))
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise MergeConflictError(
            "/", list(by_worker.values()), f"the file of worker {shown} is missing"
        )
    surplus = sorted(number for number in by_worker if number not in expected)
    if surplus:
        files = [by_worker[number] for number in surplus]
        raise MergeConflictError("/", files, f"expected the files of workers {list(expected)}")
