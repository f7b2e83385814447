"""Every checkpoint in a directory, whoever wrote it and whatever became of it; only looked at.

Unlike a `CheckpointStore` this makes no directory, takes no lock and writes no event: it is for
somebody who wants to know what is there, perhaps on a disk that can only be read.
"""

from __future__ import annotations

import enum
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    SafeCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.bundles.bundle import Bundle, part_of
from keras_safe_ckpt.storage.bundles.files import INDEX, find_parts, is_data
from keras_safe_ckpt.storage.bundles.index import read_index
from keras_safe_ckpt.storage.bundles.state_file import read_state
from keras_safe_ckpt.storage.events import saves_in
from keras_safe_ckpt.storage.foreign import is_plain_keras
from keras_safe_ckpt.storage.formats import FORMATS, format_of
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.paths import why_passed_over

#: Told of each so many bytes that were read.
Advance = Callable[[int], None]

_LEGACY = FORMATS["legacy_h5"].suffix
_ALWAYS = tuple(known.suffix for known in FORMATS.values() if known.suffix != _LEGACY)


class Condition(enum.Enum):
    """What became of a checkpoint."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    #: It may be whole: it could not be read now, is of a newer version, or Keras wrote it.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Surveyed:
    """``path`` is the file, or what the files of a checkpoint of TensorFlow begin with.

    ``verified``: every byte was compared; else only what the file says of itself, and its size.
    """

    path: Path
    kind: str
    size: int
    modified: float
    manifest: Manifest | None
    condition: Condition
    reason: str
    verified: bool


def find_checkpoints(directory: Path) -> list[Path]:
    """The paths of all that may be checkpoints, by name; `OSError` if that cannot be told.

    An ``.h5`` file may be anything: it is one if it carries our manifest, or is said to have been
    saved here. So may an ``.index`` file be, unless there is data beside it, or TensorFlow lists
    it.
    """
    found: list[Path] = []
    doubtful: list[Path] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith(".") or not name.endswith((*_ALWAYS, _LEGACY)):
                continue
            path = directory / name
            if entry.is_file(follow_symlinks=False):
                (found if name.endswith(_ALWAYS) else doubtful).append(path)
            elif name.endswith(_ALWAYS) and why_passed_over(path):
                found.append(path)  # To be named: whoever restores passes it over.
    saved = saves_in(directory) if doubtful else {}
    found += [path for path in doubtful if path.name in saved or _may_be_ours(path)]
    return sorted([*found, *_find_bundles(directory)])


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path means; a part of one of TensorFlow means all of it."""
    if path.is_file():
        part = part_of(path.name)
        if part is not None and not path.name.endswith((*_ALWAYS, _LEGACY)):
            return path.parent / part[0]
        format_of(path)  # Raises for what cannot be a checkpoint by its name.
        # Whoever names a link means what it leads to; in a directory one is passed over.
        return Path(os.path.realpath(path)) if path.is_symlink() else path
    if _bundle(path).index.is_file():
        return path
    if os.path.lexists(path):
        raise CorruptCheckpointError(path, "it is not a regular file")
    raise CheckpointNotFoundError(path, "there is no such file")


def is_bundle(path: Path) -> bool:
    """Whether it is what the files of a checkpoint of TensorFlow begin with."""
    return not path.name.endswith((*_ALWAYS, _LEGACY)) and not path.is_file()


def look_at(path: Path, *, verify: bool = False, advance: Advance | None = None) -> Surveyed:
    """One checkpoint; what is wrong with it is part of the answer.

    Raises `CheckpointNotFoundError` if it is gone: somebody has deleted it since it was listed.
    """
    bundle = is_bundle(path)
    kind = "tf_checkpoint" if bundle else _kind_of(path)
    condition, reason, manifest = Condition.WHOLE, "", None
    if not bundle and (reason := why_passed_over(path)):
        modified = os.lstat(path).st_mtime
        return Surveyed(path, kind, 0, modified, None, Condition.DAMAGED, reason, verify)
    size, modified = _measured(_files_of(path) if bundle else [path])
    try:
        if bundle:
            _bundle(path).verify(advance) if verify else _bundle(path).check()
        else:
            with format_of(path).open(path) as checkpoint:
                manifest = checkpoint.manifest
                if verify:
                    checkpoint.verify(advance)
    except (UnreadableCheckpointError, IncompatibleCheckpointError) as error:
        condition, reason = Condition.UNKNOWN, _reason(error)
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        condition, reason = Condition.DAMAGED, _reason(error)
        if bundle and not _bundle(path).index.is_file():
            if not _has_data(path):
                raise CheckpointNotFoundError(path, "it was deleted meanwhile") from None
            condition = Condition.UNKNOWN
            reason = "its index is missing: it is half written, or half deleted"
        elif isinstance(error, CheckpointNotFoundError) and not bundle:
            raise
        elif not bundle and manifest is None and is_plain_keras(path):
            condition = Condition.UNKNOWN
            reason = "Keras wrote it: it has no manifest, and no digests to verify it by"
    return Surveyed(path, kind, size, modified, manifest, condition, reason, verify)


def oldest_first(found: Sequence[Surveyed]) -> list[Surveyed]:
    """In the order in which they were published, as far as they say."""
    return sorted(
        found,
        key=lambda one: (
            one.manifest.sequence / 1000 if one.manifest else one.modified,
            one.path.name,
        ),
    )


def size_of(path: Path) -> int:
    """How many bytes there are to read."""
    return _measured(_files_of(path) if is_bundle(path) else [path])[0]


def _may_be_ours(path: Path) -> bool:
    try:
        with format_of(path).open(path):
            return True
    except (CorruptCheckpointError, CheckpointNotFoundError):
        return False
    except SafeCheckpointError:
        return True  # Of a newer version, or not to be read now: nobody can say that it is not.


def _find_bundles(directory: Path) -> list[Path]:
    listed: Collection[str] | None = None
    found = []
    for name, kinds in find_parts(directory, None).items():
        if any(map(is_data, kinds)):
            found.append(directory / name)
        elif INDEX in kinds:
            listed = _listed(directory) if listed is None else listed
            if name in listed:
                found.append(directory / name)
    return found


def _listed(directory: Path) -> Collection[str]:
    """What TensorFlow's list names; every index if it cannot be read: nobody can say that it does
    not.
    """
    try:
        state = read_state(directory)
    except OSError:
        return find_parts(directory, None)
    return state.listed if state else ()


def _has_data(path: Path) -> bool:
    return any(map(is_data, find_parts(path.parent, None).get(path.name, ())))


def _kind_of(path: Path) -> str:
    return next(
        (name for name, known in FORMATS.items() if path.name.endswith(known.suffix)), "unknown"
    )


def _bundle(path: Path) -> Bundle:
    return Bundle(path.parent, path.name)


def _files_of(path: Path) -> list[Path]:
    """By the index, not by looking through a directory that may be huge."""
    bundle = _bundle(path)
    try:
        shards = read_index(bundle.index).shards
    except SafeCheckpointError:
        shards = 0
    data = (bundle.data(shard, shards) for shard in range(shards))
    # An index may speak of a hundred thousand that are not there.
    return [bundle.index, *itertools.takewhile(Path.exists, data)]


def _measured(files: Sequence[Path]) -> tuple[int, float]:
    size, modified = 0, 0.0
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue  # Deleted meanwhile, or not ours to look at: said when it is opened.
        size += status.st_size
        modified = max(modified, status.st_mtime)
    return size, modified


def _reason(error: SafeCheckpointError) -> str:
    differences = error.facts.get("differences")
    if differences:
        return "; ".join(map(str, differences))
    return str(error.facts.get("reason") or error)
