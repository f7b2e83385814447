"""The names of shards, and whether all of them are there."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from keras_safe_ckpt.datasets.shared_reading import resolved
from keras_safe_ckpt.errors import CheckpointNotFoundError
from keras_safe_ckpt.storage.paths import absolute

_NAME = re.compile(r"(?P<prefix>.*)-(?P<shard>\d{5,})-of-(?P<count>\d{5,})(?P<ending>\.[^/]*)?")
_MOST_SHARDS = 99_999


def shard_path(prefix: str | os.PathLike[str], shard: int, num_shards: int) -> str:
    """``PREFIX-00003-of-00008.tfrecord``, or an error."""
    if not _is_whole(num_shards) or not 1 <= num_shards <= _MOST_SHARDS:
        raise ValueError(
            f"num_shards: expected a whole number from 1 to {_MOST_SHARDS:,}. "
            f"Received: {num_shards!r}"
        )
    if not _is_whole(shard) or not 0 <= shard < num_shards:
        raise ValueError(
            f"shard: expected a whole number from 0 to {num_shards - 1}. Received: {shard!r}"
        )
    text = os.fspath(prefix)
    if not isinstance(text, str) or not os.path.basename(text):
        raise ValueError(
            f"prefix: expected a path with the beginning of a name, such as 'data/train'. "
            f"Received: {prefix!r}"
        )
    return f"{text}-{shard:05d}-of-{num_shards:05d}.tfrecord"


def found_files(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, allow_missing_shards: bool
) -> list[Path]:
    """The files that are meant, in order; patterns (``train-*``) stand for what they match."""
    if not isinstance(paths, (str, os.PathLike, Iterable)) or isinstance(paths, bytes):
        raise TypeError(f"paths: expected a path, or several. Received: {paths!r}")
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise ValueError("paths: expected at least one file. Received: none")
    found: list[Path] = []
    for one in given:
        text = os.fspath(one)
        if not glob.has_magic(text) or os.path.exists(text):
            found.append(absolute(text))
            continue
        matches = sorted(name for name in glob.glob(text) if os.path.isfile(name))
        if not matches:
            raise CheckpointNotFoundError(text, "no file matches this pattern", what="data")
        found += map(absolute, matches)
    if not allow_missing_shards:
        check_complete(found)
    found = [resolved(path) for path in found]
    twice = sorted(str(path) for path, count in Counter(found).items() if count > 1)
    if twice:
        raise ValueError(f"paths: expected each file once. Received twice: {', '.join(twice)}")
    for path in found:
        if not path.is_file():
            raise CheckpointNotFoundError(path, what="data")
    return found


def check_complete(paths: Sequence[Path]) -> None:
    """Raise if these are some of the shards of a set, and others of it are not among them."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for path in paths:
        match = _NAME.fullmatch(str(path))
        if match is not None and int(match["count"]) <= _MOST_SHARDS:
            key = (match["prefix"], match["count"], match["ending"] or "")
            sets.setdefault(key, set()).add(int(match["shard"]))
    for (prefix, count, ending), shards in sets.items():
        missing = sorted(set(range(int(count))) - shards)
        if missing:
            shown = ", ".join(map(str, missing[:10]))
            more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
            raise CheckpointNotFoundError(
                f"{prefix}-*-of-{count}{ending}",
                f"expected {int(count)} shards, and these are missing: {shown}{more}",
                what="data",
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
