"""The file in which TensorFlow keeps which checkpoints a directory has (``checkpoint``)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_safe_ckpt.storage.atomic import write_atomically

DEFAULT_NAME = "checkpoint"


@dataclass(frozen=True)
class State:
    """Names of checkpoints with the time at which they were saved, oldest first.

    ``preserved`` is the time of the last one that is kept for ever: what is not younger than that
    is not ours to delete.
    """

    listed: dict[str, float] = field(default_factory=dict)
    preserved: float = 0.0


def read_state(directory: Path, name: str = DEFAULT_NAME) -> State | None:
    """What the file says of this directory; None if it is not there or says nothing sensible.

    It is what TensorFlow goes by. Nothing here does, where the files themselves tell more.
    """
    import tensorflow as tf

    path = directory / name
    try:
        # TensorFlow would log a warning, and raise for some of what a crash can leave behind.
        if not path.is_file() or not path.read_text(encoding="utf-8").strip():
            return None
        proto = tf.train.get_checkpoint_state(str(directory), name)
    except (OSError, ValueError, tf.errors.OpError):
        return None
    if proto is None:
        return None
    times = list(proto.all_model_checkpoint_timestamps)
    if len(times) != len(proto.all_model_checkpoint_paths):
        # The v1 Saver of TensorFlow keeps none.
        times = [_time_of(directory, path) for path in proto.all_model_checkpoint_paths]
    entries = [
        (time, own)
        for path, time in zip(proto.all_model_checkpoint_paths, times, strict=True)
        if (own := _name_in(directory, path)) is not None
    ]
    preserved = float(proto.last_preserved_timestamp)
    return State({name: time for time, name in sorted(entries)}, preserved)


def write_state(directory: Path, state: State, newest: str, name: str = DEFAULT_NAME) -> None:
    """Durable and whole, or the old one; with names relative to the directory, which may move."""
    import tensorflow as tf
    from google.protobuf import text_format

    others = [listed for listed in state.listed if listed != newest]
    times = [state.listed[listed] for listed in others]
    proto: Any = tf.compat.v1.train.generate_checkpoint_state_proto(
        str(directory),
        newest,
        all_model_checkpoint_paths=[*others, newest],
        all_model_checkpoint_timestamps=[*times, state.listed[newest]],
        last_preserved_timestamp=state.preserved,
    )
    write_atomically(directory / name, text_format.MessageToString(proto).encode())


def _time_of(directory: Path, path: str) -> float:
    try:
        return os.stat(os.path.join(directory, f"{path}.index")).st_mtime
    except OSError:
        return 0.0


def _name_in(directory: Path, path: str) -> str | None:
    """The name of a checkpoint of this directory; None for one that is elsewhere."""
    parent, name = os.path.split(path)
    there = os.path.realpath(os.path.join(directory, parent))
    return name if name and there == os.path.realpath(directory) else None
