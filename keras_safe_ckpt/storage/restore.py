"""Put a verified checkpoint into a model, all of it or nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    SafeCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.atomic import StagedFile, scratch_directory
from keras_safe_ckpt.storage.catalog import OnSkip
from keras_safe_ckpt.storage.dtypes import describe
from keras_safe_ckpt.storage.formats import format_of
from keras_safe_ckpt.storage.formats.format import EXTRA_GROUP, NOT_ITS_FAULT, OpenCheckpoint
from keras_safe_ckpt.storage.formats.legacy_h5 import LegacyH5
from keras_safe_ckpt.storage.formats.weights_h5 import WeightsH5
from keras_safe_ckpt.storage.keras_internals import (
    ObjectsNotLoadedError,
    Walker,
    has_loader_of_its_own,
    import_keras,
    walker,
)
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.retention import Checkpoint
from keras_safe_ckpt.storage.snapshot import Snapshot, capture

_log = logging.getLogger(__name__)

_OPTIMIZER = "optimizer/"
#: Keras shows whole configurations.
_LONGEST_REASON = 2000


def load_file(
    path: Path, model: Any, custom_objects: Mapping[str, Any] | None
) -> tuple[Any, Manifest]:
    """Load a verified checkpoint into ``model``, or make a new model of it if that is None."""
    if model is None and not format_of(path).whole_model:
        raise ValueError(
            "This file holds weights, not a whole model: expected the model to load them into, "
            f"as the argument `model`. Received: path={str(path)!r}"
        )
    with format_of(path).open(path) as checkpoint:
        checkpoint.verify()
        if model is not None:
            load_opened(model, checkpoint, path)
            return model, checkpoint.manifest
        before = _inode(path)
    # Keras opens the path itself; what is there now may have been published a moment ago.
    # Its safe mode stays on: nothing in a checkpoint is ever executed.
    try:
        model = import_keras().models.load_model(path, custom_objects=custom_objects)
    except Exception as error:
        if _inode(path) is None:
            raise CheckpointNotFoundError(path, "it was pruned while it was loaded") from error
        if isinstance(error, OSError) and error.errno in NOT_ITS_FAULT:
            raise UnreadableCheckpointError(path, error) from error
        # What Keras refuses (a Lambda, a link), does not know, or fails at in any other way.
        raise IncompatibleCheckpointError(path, [_said(error)]) from error
    if _inode(path) != before:
        return load_file(path, None, custom_objects)
    return model, checkpoint.manifest


def _said(error: Exception) -> str:
    text = str(error)
    shown = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."
    return f"Keras cannot load it ({type(error).__name__}): {shown}"


def load_first_whole(
    candidates: Iterable[Checkpoint],
    model: Any,
    custom_objects: Mapping[str, Any] | None,
    on_skip: OnSkip,
) -> tuple[Path, Any, Manifest] | None:
    """Load the first one that is whole; None if there is none. What does not fit is an error."""
    for checkpoint in candidates:
        try:
            return checkpoint.path, *load_file(checkpoint.path, model, custom_objects)
        except (
            CheckpointNotFoundError,
            CorruptCheckpointError,
            UnreadableCheckpointError,
        ) as error:
            on_skip(checkpoint.path, str(error))
    return None


def none_is_whole(where: str | os.PathLike[str], reasons: Sequence[str]) -> CorruptCheckpointError:
    """The error for whoever finds files and none that can be used."""
    shown = "\n  ".join(reason.rstrip(".") for reason in reasons)
    return CorruptCheckpointError(where, f"none of its files is whole and ours:\n  {shown}")


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def load_opened(model: Any, checkpoint: OpenCheckpoint, path: Path) -> None:
    """Load a checkpoint that was verified; if it does not fit, the model stays as it was.

    Everything that can go wrong is looked at before the first variable changes: the file was
    compared with its digests, names, shapes and dtypes are compared here, and then the arrays go
    one by one from the file into the variables: holding all the old or all the new ones in memory
    would double the model and take longer than the load itself.
    """
    manifest = checkpoint.manifest
    if isinstance(format_of(path), LegacyH5):
        _load_publicly(model, path, capture(model, scratch=path.parent))
        _log.warning(
            "%s: from a .h5 file only the weights go into a model, not the state of the "
            "optimizer. Load it without a model to have both.",
            path,
        )
        return
    with_optimizer = any(name.startswith(_OPTIMIZER) for name in manifest.arrays)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        saved = sum(name.startswith(_OPTIMIZER) for name in manifest.arrays)
        if saved > len(optimizer.variables):
            # Keras would skip an optimizer that has no slots yet, and training would go on
            # with its momentum lost. (One that was saved before its first step has none.)
            strategy = getattr(model, "distribute_strategy", None)
            with nullcontext() if strategy is None else strategy.scope():
                optimizer.build(model.trainable_variables)
    if optimizer is not None and not with_optimizer:
        _log.warning("%s holds no optimizer state; the optimizer was left as it is.", path)
    # No copy, but it keeps the old values alive while it is there.
    before = capture(model, scratch=path.parent)
    differences = _differences(before, manifest, with_optimizer)
    if differences:
        raise IncompatibleCheckpointError(path, differences)

    fast, _ = walker()
    if fast is None:
        _load_publicly(model, path, before)
    elif has_loader_of_its_own(model):
        _load_with_undo(fast, model, checkpoint, path, before)
    else:
        del before
        _load_through(fast, model, checkpoint)


def _load_through(fast: Walker, model: Any, checkpoint: OpenCheckpoint) -> None:
    """Only Keras's own code, which has no reason left to fail."""
    names = checkpoint.manifest.arrays
    try:
        fast.load(model, names, checkpoint.read_array)
    except BaseException as interruption:
        # Ctrl-C, a signal handler that raises, memory that was short for a moment: half a model
        # is worse than either, so finish first.
        try:
            fast.load(model, names, checkpoint.read_array)
        except ObjectsNotLoadedError as error:
            raise error.causes[0] from error
        if not isinstance(interruption, ObjectsNotLoadedError):
            raise
        for cause in interruption.causes:
            if not isinstance(cause, SafeCheckpointError):
                raise cause from None  # Not ours: Keras took it for an object that failed.


def _load_with_undo(
    fast: Walker, model: Any, checkpoint: OpenCheckpoint, path: Path, before: Snapshot
) -> None:
    def read(name: str) -> np.ndarray[Any, Any]:
        # A plain array: what the user's own code does with it is its own business.
        return np.array(checkpoint.read_array(name))

    try:
        fast.load(model, checkpoint.manifest.arrays, read)
    except BaseException as error:
        old = before.host_arrays()
        fast.load(model, old, old.__getitem__)
        if isinstance(error, ObjectsNotLoadedError):
            raise _first_cause(error, path) from error
        raise


def _first_cause(error: ObjectsNotLoadedError, path: Path) -> Exception:
    for cause in error.causes:
        if isinstance(cause, SafeCheckpointError):
            return cause
    return IncompatibleCheckpointError(path, [str(error)])


def _load_publicly(model: Any, path: Path, before: Snapshot) -> None:
    try:
        model.load_weights(path)
    except BaseException as error:
        _put_back(model, before, path.parent)
        if isinstance(error, Exception):
            raise IncompatibleCheckpointError(path, [str(error)]) from error
        raise


def _differences(model: Snapshot, manifest: Manifest, with_optimizer: bool) -> list[str]:
    """What the model needs and the file does not have, and the reverse."""
    has = {name: describe(a.dtype, a.shape) for name, a in model.host_arrays().items()}
    offered = {name: str(record) for name, record in manifest.arrays.items()}
    differences = []
    if with_optimizer and model.optimizer and model.optimizer != manifest.optimizer:
        differences.append(
            f"optimizer: the model has {model.optimizer}, the file {manifest.optimizer}"
        )
    for name in sorted(model.variables):
        if name.startswith(_OPTIMIZER) and not with_optimizer:
            continue
        if has[name] != offered.get(name):
            there = offered.get(name, "nothing")
            differences.append(f"{name}: the model has {has[name]}, the file {there}")
    for name in sorted(offered.keys() - has.keys()):
        # Only a model that is not compiled may leave something: the optimizer's state.
        left = name.startswith(_OPTIMIZER) and model.optimizer is None
        if not left and not name.startswith(f"{EXTRA_GROUP}/"):
            differences.append(f"{name}: the model has nothing, the file {offered[name]}")
    if differences and all(text.startswith("optimizer") for text in differences):
        differences.append(
            "the weights fit, the optimizer does not: compile the model with the optimizer that "
            "was saved, or again with this one if it was saved before its first step"
        )
    return differences


def _put_back(model: Any, before: Snapshot, scratch: Path) -> None:
    with scratch_directory(scratch) as directory:
        path = directory / "before.weights.h5"
        with StagedFile(path) as staged:
            WeightsH5().write(staged, before, Manifest())
            staged.sync()
            staged.commit()
        model.load_weights(path)
