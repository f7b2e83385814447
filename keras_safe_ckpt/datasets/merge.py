"""One file from those of all workers: `merge_worker_files`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py

from keras_safe_ckpt.datasets.inspection import (
    DatasetFacts,
    FileFacts,
    count_of,
    opened,
    same_values,
)
from keras_safe_ckpt.datasets.joining import Joined, Piece, SortedRows, copy, link
from keras_safe_ckpt.datasets.merge_sources import checked_workers, given_paths, in_order
from keras_safe_ckpt.datasets.progress import Progress
from keras_safe_ckpt.datasets.rows import RESERVED, described
from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    MergeConflictError,
    SafeCheckpointError,
)
from keras_safe_ckpt.storage.atomic import StagedFile, sweep_orphans
from keras_safe_ckpt.storage.journaled_file import JournaledFile
from keras_safe_ckpt.storage.paths import absolute
from keras_safe_ckpt.storage.room import ensure_room
from keras_safe_ckpt.storage.translation import writing

_HOW = ("concat", "virtual")
#: Texts count as one byte at least, also empty ones.
_SPARE_TEXT_BYTES = 16 << 20
SortKey = str | Callable[[Path], Any]


def merge_worker_files(
    directory_or_files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    workers: int | Iterable[int] | None = None,
    how: str = "concat",
    axis: int = 0,
    sort_key: SortKey | None = None,
) -> Path:
    """Make one HDF5 file from the files of all workers; all of it, or nothing is written.

    Args:
        directory_or_files: where `WorkerH5Writer` has written, or the files themselves (any HDF5
            files).
        out: the new file. It takes its name when it is whole.
        workers: how many there must be, or their numbers. None: as many as the files say.
        how: ``"concat"`` copies, with a few MiB of memory however large the files are.
            ``"virtual"`` makes datasets that show the rows where they are: the files must stay
            beside the new one.
        axis: along which the arrays are put together.
        sort_key: None for the order of the workers (of files that name no worker: as given). The
            name of a dataset, such as ``"id"``, to put the rows of all datasets in the order of
            its values, for ``"concat"`` and ``axis=0``. A function of the path to order the files.

    Single values (of no dimension) must be the same in all files. A file without any dataset has
    no rows.

    Returns:
        The path of the new file.

    Raises:
        MergeConflictError: files that do not fit together, with the dataset and the files.

    Example::

        merge_worker_files("predictions", "predictions.h5", workers=2, sort_key="id")
    """
    if how not in _HOW:
        raise ValueError(f"how: expected one of {_HOW}. Received: {how!r}")
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"axis: expected a whole number. Received: {axis!r}")
    if not (sort_key is None or isinstance(sort_key, str) or callable(sort_key)):
        raise TypeError(
            "sort_key: expected None, the name of a dataset, or a function of the path. "
            f"Received: {sort_key!r}"
        )
    by_rows = isinstance(sort_key, str)
    if by_rows and (how == "virtual" or axis != 0):
        raise ValueError(
            "sort_key: rows are sorted with how='concat' and axis=0 only. "
            f"Received: how={how!r}, axis={axis}"
        )
    target = absolute(out)
    with writing(target):
        paths = given_paths(directory_or_files)
        if target in paths:
            raise MergeConflictError("/", [str(target)], "it is one of the files to be merged")
        expected = checked_workers(workers)
        facts = in_order(paths, expected, sort_key if callable(sort_key) else None)
        _refuse_source(target, facts)
        joined = _joined(facts, axis)
        order = SortedRows.of(joined, sort_key, facts) if isinstance(sort_key, str) else None
        _write(target, facts, joined, how, order)
    return target


def _refuse_source(target: Path, files: Sequence[FileFacts]) -> None:
    """By the file, not by its name: there may be a link to it, or a virtual dataset shows it."""
    if target.exists():
        status = target.stat()
        for file in files:
            if (status.st_dev, status.st_ino) in file.inodes:
                raise MergeConflictError(
                    "/", [str(target), str(file.path)], "the rows to be merged are in it"
                )


def _joined(files: Sequence[FileFacts], axis: int) -> dict[str, Joined]:
    """What each dataset will be, or the first conflict."""
    filled = [file for file in files if file.datasets]
    if not filled:
        raise MergeConflictError(
            "/", [str(file.path) for file in files], "none of them has a dataset"
        )
    _check_groups(files)
    first, *others = filled
    for other in others:
        for name in sorted(set(first.datasets) ^ set(other.datasets)):
            has, lacks = (first, other) if name in first.datasets else (other, first)
            raise MergeConflictError(
                name, [str(lacks.path), str(has.path)], "the first of them does not have it"
            )
    return {name: _joined_dataset(name, filled, axis) for name in first.datasets}


def _joined_dataset(name: str, files: Sequence[FileFacts], axis: int) -> Joined:
    first = files[0]
    model = first.datasets[name]
    rank = len(model.shape)
    if rank and not -rank <= axis < rank:
        raise MergeConflictError(
            name, [str(first.path)], f"axis={axis}, and it has {rank} dimensions"
        )
    along = axis % rank if rank else 0
    pieces, start = [], 0
    for file in files:
        found = file.datasets[name]
        _compare(name, first, file, model, found, along)
        length = found.shape[along] if rank else 0
        pieces.append(
            Piece(file.path, start, length, file.size + _SPARE_TEXT_BYTES, file.longest_text)
        )
        start += length
    if not rank:
        _check_single(name, files)
        return Joined(model, (), 0, tuple(pieces[:1]))
    shape = (*model.shape[:along], start, *model.shape[along + 1 :])
    return Joined(model, shape, along, tuple(pieces))


def _compare(
    name: str,
    first: FileFacts,
    file: FileFacts,
    model: DatasetFacts,
    found: DatasetFacts,
    along: int,
) -> None:
    files = [str(first.path), str(file.path)]
    if (
        found.dtype != model.dtype
        or h5py.check_string_dtype(found.dtype) != h5py.check_string_dtype(model.dtype)
        or h5py.check_enum_dtype(found.dtype) != h5py.check_enum_dtype(model.dtype)
    ):
        raise MergeConflictError(
            name, files, f"the types are {described(model.dtype)} and {described(found.dtype)}"
        )
    if len(found.shape) != len(model.shape) or any(
        one != other
        for number, (one, other) in enumerate(zip(model.shape, found.shape, strict=True))
        if number != along
    ):
        raise MergeConflictError(name, files, f"the shapes are {model.shape} and {found.shape}")
    _compare_attributes(name, files, model.attributes, found.attributes)


def _check_groups(files: Sequence[FileFacts]) -> None:
    seen: dict[str, FileFacts] = {}
    for file in files:
        for name in file.groups:
            first = seen.setdefault(name, file)
            one, other = (
                {key: value for key, value in found.groups[name].items() if key != RESERVED}
                for found in (first, file)
            )
            _compare_attributes(name or "/", [str(first.path), str(file.path)], one, other)


def _compare_attributes(
    name: str, files: list[str], one: dict[str, Any], other: dict[str, Any]
) -> None:
    for key in sorted({*one, *other}):
        if key not in one or key not in other:
            raise MergeConflictError(name, files, f"only one of them has the attribute {key!r}")
        if not same_values(one[key], other[key]):
            raise MergeConflictError(
                name, files, f"the attribute {key!r} is {one[key]!r} and {other[key]!r}"
            )


def _check_single(name: str, files: Sequence[FileFacts]) -> None:
    values = []
    for file in files:
        with opened(file.path) as source:
            values.append(source[name][()])
        if not same_values(values[0], values[-1]):
            raise MergeConflictError(
                name,
                [str(files[0].path), str(file.path)],
                f"a single value that is {values[0]!r} and {values[-1]!r}",
            )


def _write(
    target: Path,
    files: Sequence[FileFacts],
    joined: dict[str, Joined],
    how: str,
    order: SortedRows | None,
) -> None:
    total = sum(count_of(one.shape) * one.facts.dtype.itemsize for one in joined.values())
    if how == "concat":
        stored = sum(file.path.stat().st_size for file in files)
        ensure_room(target, stored)
    with StagedFile(target, closed_like=[file.path for file in files]) as staged:
        sweep_orphans(target.parent)
        try:
            with (
                _written_at(staged.temp_path, target) as file,
                h5py.File(file, "w") as out,
                Progress(f"Merging {len(files)} files", total) as progress,
            ):

                def advance(count: int) -> None:
                    file.raise_error()
                    progress.advance(count)

                _put_groups(out, files)
                for name, one in joined.items():
                    if how == "virtual" and one.shape:
                        link(out, name, one, target.parent)
                    else:
                        copy(out, name, one, order, advance)
        except (OSError, RuntimeError, TypeError, ValueError, KeyError) as error:
            _check_unchanged(files)
            if isinstance(error, SafeCheckpointError):
                raise
            names = [str(file.path) for file in files]
            raise MergeConflictError("/", names, f"HDF5 cannot copy them ({error})") from error
        _check_unchanged(files)
        staged.sync()
        staged.commit()


def _check_unchanged(files: Sequence[FileFacts]) -> None:
    for file in files:
        file.check_unchanged()


@contextlib.contextmanager
def _written_at(path: Path, target: Path) -> Iterator[JournaledFile]:
    """A file for HDF5, which crashes if it cannot write a text: errors are kept from it.

    Nothing is ever committed here, so that all of it is written at once. In the end what the disk
    has said is raised, before anything that HDF5 made of it.
    """
    try:
        file = JournaledFile(path)
    except OSError as error:
        raise CheckpointWriteError(target, error) from error
    with contextlib.closing(file):
        try:
            yield file
        finally:
            try:
                file.finish()
            except OSError as error:
                raise CheckpointWriteError(target, error) from error


def _put_groups(out: h5py.File, files: Sequence[FileFacts]) -> None:
    groups: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, attributes in file.groups.items():
            groups.setdefault(name, {}).update(attributes)
    for name, attributes in sorted(groups.items()):
        group = out.require_group(name) if name else out
        for key, value in attributes.items():
            if name or key != RESERVED:
                group.attrs[key] = value
