"""Put a verified checkpoint into a model, all of it or nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_safe_ckpt.errors import IncompatibleCheckpointError
from keras_safe_ckpt.storage.atomic import StagedFile, scratch_directory
from keras_safe_ckpt.storage.formats import format_of
from keras_safe_ckpt.storage.formats.format import OpenCheckpoint
from keras_safe_ckpt.storage.formats.hdf5_image import stored_dtype
from keras_safe_ckpt.storage.formats.weights_h5 import WeightsH5
from keras_safe_ckpt.storage.keras_internals import (
    Walker,
    has_loader_of_its_own,
    import_keras,
    walker,
)
from keras_safe_ckpt.storage.manifest import ArrayRecord, Manifest
from keras_safe_ckpt.storage.snapshot import Snapshot, capture

_log = logging.getLogger(__name__)

_OPTIMIZER = "optimizer/"


def load_file(
    path: Path, model: Any, custom_objects: Mapping[str, Any] | None
) -> tuple[Any, Manifest]:
    """Load a verified checkpoint into ``model``, or make a new model of it if that is None."""
    if model is None and not format_of(path).whole_model:
        raise ValueError(
            "Only a .keras file holds a whole model. Build the model and pass it: "
            f"load(model, path). Received: path={str(path)!r}"
        )
    with format_of(path).open(path) as checkpoint:
        checkpoint.verify()
        if model is not None:
            _load_into(model, checkpoint, path)
            return model, checkpoint.manifest
    # Keras's safe mode stays on: nothing in a checkpoint is ever executed.
    model = import_keras().models.load_model(path, custom_objects=custom_objects)
    return model, checkpoint.manifest


def _load_into(model: Any, checkpoint: OpenCheckpoint, path: Path) -> None:
    """Everything that can go wrong is looked at before the first variable changes.

    The file was compared with its digests, names, shapes and dtypes are compared here, and then
    the arrays go one by one from the file into the variables: holding all the old or all the new
    ones in memory would double the model and take longer than the load itself.
    """
    records = checkpoint.manifest.arrays
    with_optimizer = any(name.startswith(_OPTIMIZER) for name in records)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        saved = sum(name.startswith(_OPTIMIZER) for name in records)
        if saved > len(optimizer.variables):
            # Keras would skip an optimizer that has no slots yet, and training would go on
            # with its momentum lost. (One that was saved before its first step has none.)
            optimizer.build(model.trainable_variables)
    if optimizer is not None and not with_optimizer:
        _log.warning("%s holds no optimizer state; the optimizer was left as it is.", path)
    # No copy, but it keeps the old values alive while it is there.
    before = capture(model, scratch=path.parent)
    differences = _differences(before, records, with_optimizer)
    if differences:
        if all(name.startswith(_OPTIMIZER) for name in differences):
            differences.append(
                "the weights fit, the optimizer does not: compile the model with the optimizer "
                "that was saved, or again with this one if it was saved before its first step"
            )
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
    except KeyboardInterrupt:
        # Half a model is worse than either: finish, then let the interrupt have its way.
        fast.load(model, names, checkpoint.read_array)
        raise


def _load_with_undo(
    fast: Walker, model: Any, checkpoint: OpenCheckpoint, path: Path, before: Snapshot
) -> None:
    try:
        fast.load(model, checkpoint.manifest.arrays, checkpoint.read_array)
    except BaseException as error:
        old = before.host_arrays()
        fast.load(model, old, old.__getitem__)
        if isinstance(error, Exception):
            raise IncompatibleCheckpointError(path, [str(error)]) from error
        raise


def _load_publicly(model: Any, path: Path, before: Snapshot) -> None:
    try:
        model.load_weights(path)
    except BaseException as error:
        _put_back(model, before, path.parent)
        if isinstance(error, Exception):
            raise IncompatibleCheckpointError(path, [str(error)]) from error
        raise


def _differences(
    model: Snapshot, records: Mapping[str, ArrayRecord], with_optimizer: bool
) -> list[str]:
    """What the model's own variables need and the file does not have, and the reverse."""
    wanted = {name: _described(array) for name, array in model.host_arrays().items()}
    offered = {name: f"{r.dtype}{list(r.shape)}" for name, r in records.items()}
    differences = []
    for name in sorted(model.variables):
        if name.startswith(_OPTIMIZER) and not with_optimizer:
            continue
        if wanted[name] != offered.get(name):
            there = offered.get(name, "nothing")
            differences.append(f"{name}: the model has {wanted[name]}, the file {there}")
    groups = {name.rpartition("/")[0] for name in model.variables}
    for name in sorted(set(offered) - set(wanted)):
        # Groups that the model does not have at all are left alone, as Keras does (the
        # optimizer of a model that is not compiled); one array too many is another model.
        if name.rpartition("/")[0] in groups:
            differences.append(f"{name}: the file has {offered[name]}, the model nothing")
    return differences


def _described(array: np.ndarray[Any, Any]) -> str:
    return f"{stored_dtype(array.dtype)}{list(array.shape)}"


def _put_back(model: Any, before: Snapshot, scratch: Path) -> None:
    with scratch_directory(scratch) as directory:
        path = directory / "before.weights.h5"
        with StagedFile(path) as staged:
            WeightsH5().write(staged, before, Manifest())
            staged.sync()
            staged.commit()
        model.load_weights(path)
