"""Capture a model in milliseconds, whatever its size, while training goes on.

Reading a TensorFlow variable gives a tensor that shares its memory; the next update of the
variable writes elsewhere. A snapshot is therefore a dictionary of tensors: nothing is copied
until training overwrites it, and then by TensorFlow, one variable at a time.
"""

from __future__ import annotations

import logging
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from keras_safe_ckpt.errors import CheckpointWriteError
from keras_safe_ckpt.storage.atomic import scratch_directory
from keras_safe_ckpt.storage.keras_internals import (
    Walker,
    compile_record_kept,
    import_keras,
    walker,
)

_log = logging.getLogger(__name__)
_said_slow = False

#: Dtypes that no HDF5 file holds as they are; those of machine learning are named otherwise.
_NO_NUMBERS = ("object", "str", "datetime", "timedelta", "void", "record")


@dataclass(frozen=True)
class Snapshot:
    """What a model was at one moment, laid out as in Keras's own files.

    ``arrays`` maps the HDF5 path of each array to a tensor or NumPy array, in Keras's order;
    ``variables`` names those that are variables of the model; ``groups`` holds the attributes
    of each HDF5 group; ``optimizer`` is the class of the optimizer. ``config``, ``metadata`` and
    ``assets`` are there only for a whole model (``.keras``). ``sources`` are the TensorFlow
    variables that were read, ``seconds`` is how long that took.
    """

    groups: Mapping[str, Mapping[str, str]]
    arrays: Mapping[str, Any]
    variables: frozenset[str] = frozenset()
    optimizer: str | None = None
    config: str | None = None
    metadata: str | None = None
    assets: Mapping[str, bytes] = field(default_factory=dict)
    sources: Mapping[str, Any] = field(default_factory=dict, repr=False)
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """The size of arrays and assets, about that of the file; no array is touched for it."""
        arrays = sum(_nbytes(value) for value in self.arrays.values())
        return arrays + sum(len(content) for content in self.assets.values())

    def host_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Every array in host memory: a view of the tensor where it is there already."""
        return {path: np.asarray(value) for path, value in self.arrays.items()}


def capture(model: Any, *, whole_model: bool = False, scratch: Path | None = None) -> Snapshot:
    """Take a snapshot of ``model``: its weights and optimizer, or (``whole_model``) all of it.

    Call it on the thread that trains. ``scratch`` is a directory with room for one save; it is
    only used where this version of Keras leaves no faster way.
    """
    began = time.perf_counter()
    _require_built(model)
    fast, reason = walker()
    if fast is None:
        _say_slow_once(reason)
        snapshot = _capture_by_saving(model, whole_model, scratch)
    else:
        snapshot = _capture_by_walking(fast, model, whole_model)
    return replace(snapshot, seconds=time.perf_counter() - began)


def capture_file(model: Any, name: str, scratch: Path | None) -> Snapshot:
    """Let Keras write the whole model to a file of this name, and take its bytes."""
    began = time.perf_counter()
    _require_built(model)
    with _written_below(scratch) as directory, compile_record_kept(model):
        model.save(directory / name)
        content = (directory / name).read_bytes()
    return Snapshot(
        {}, {}, optimizer=_optimizer_class(model), assets={name: content},
        seconds=time.perf_counter() - began,
    )  # fmt: skip


def _capture_by_walking(fast: Walker, model: Any, whole_model: bool) -> Snapshot:
    keras_variable = import_keras().Variable
    optimizer = _optimizer_class(model)
    groups: dict[str, Mapping[str, str]] = {}
    arrays: dict[str, Any] = {}
    variables: set[str] = set()
    sources: dict[str, Any] = {}

    def receive(group: str, attributes: Mapping[str, str], key: str | None, value: Any) -> None:
        groups.setdefault(group, attributes)
        if key is not None:
            path = f"{group}/{key}"
            arrays[path], source = _without_copy(value)
            if source is not None:
                sources[path] = source
            if isinstance(value, keras_variable):
                variables.add(path)

    if not whole_model:
        fast.record(model, receive, None)
        return Snapshot(groups, arrays, frozenset(variables), optimizer, sources=sources)
    config, metadata = fast.serialize(model)
    with ExitStack() as stack:
        made: list[Path] = []

        def directory() -> Path:
            # Few models have assets: none is made before it is needed.
            if not made:
                temporary = tempfile.TemporaryDirectory(prefix="keras_safe_ckpt-")
                made.append(Path(stack.enter_context(temporary)))
            return made[0]

        fast.record(model, receive, directory)
        assets = _files_below(made[0]) if made else {}
    return Snapshot(
        groups, arrays, frozenset(variables), optimizer, config, metadata, assets, sources
    )


def _require_built(model: Any) -> None:
    keras = import_keras()
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a keras.Model. Received: {model!r} of type {type(model)}")
    if not model.built:
        raise ValueError(
            "The model has no weights yet, to be saved or loaded. Call it on some data or "
            f"use `model.build(input_shape)` first. Received: model={model.name!r}"
        )


def _optimizer_class(model: Any) -> str | None:
    optimizer = getattr(model, "optimizer", None)
    return None if optimizer is None else type(optimizer).__name__


def freeze(value: Any) -> Any:
    """What ``value`` (an array, a tensor or a variable) is now, not to change any more."""
    if isinstance(value, (np.ndarray, np.generic, int, float, list, tuple)):
        array = np.array(value)
        if array.dtype.kind in "OUMmV" and array.dtype.name.startswith(_NO_NUMBERS):
            raise TypeError(f"Expected an array of numbers or bytes. Received: {value!r}")
        return array
    return _without_copy(value)[0]


def _without_copy(value: Any) -> tuple[Any, Any]:
    """What ``value`` is now, not to change any more; and the TensorFlow variable it came from."""
    import tensorflow as tf

    keras = import_keras()
    if isinstance(value, keras.Variable):
        value = value.value
    replicas = getattr(value, "values", None)
    if isinstance(replicas, (tuple, list)) and replicas:
        # A mirrored variable: the local copy is at hand, reading through the strategy is slow.
        value = replicas[0]
    if isinstance(value, tf.Variable):
        return value.value(), value  # As read_value(), at half its price.
    if tf.is_tensor(value):
        return value, None
    # Memory that the layer may overwrite at any time: this one must be copied.
    return np.array(keras.ops.convert_to_numpy(value)), None


def _nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    return int(value.shape.num_elements() * value.dtype.size)


def _files_below(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _say_slow_once(reason: str) -> None:
    global _said_slow
    if not _said_slow:
        _said_slow = True
        _log.warning(
            "Saving through Keras's public functions, which blocks training while it copies "
            "the model: %s.",
            reason,
        )


def _capture_by_saving(model: Any, whole_model: bool, scratch: Path | None) -> Snapshot:
    """Let Keras write its own file, and take the snapshot from that."""
    with _written_below(scratch) as directory:
        if not whole_model:
            path = directory / "model.weights.h5"
            model.save_weights(path)
            return Snapshot(*_read_keras_h5(path), _optimizer_class(model))
        path = directory / "model.keras"
        model.save(path)
        with zipfile.ZipFile(path) as archive:
            weights = Path(archive.extract("model.weights.h5", directory))
            assets = {
                name.removeprefix("assets/"): archive.read(name)
                for name in archive.namelist()
                if name.startswith("assets/")
            }
            return Snapshot(
                *_read_keras_h5(weights),
                _optimizer_class(model),
                archive.read("config.json").decode(),
                archive.read("metadata.json").decode(),
                assets,
            )


@contextmanager
def _written_below(scratch: Path | None) -> Iterator[Path]:
    """A directory for a file that Keras writes; what the disk says is an error of the tree."""
    try:
        with scratch_directory(scratch) as directory:
            yield directory
    except OSError as error:
        raise CheckpointWriteError(scratch or tempfile.gettempdir(), error) from error


def _read_keras_h5(
    path: Path,
) -> tuple[dict[str, dict[str, str]], dict[str, Any], frozenset[str]]:
    groups: dict[str, dict[str, str]] = {}
    arrays: dict[str, Any] = {}

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Group):
            groups[name] = dict(node.attrs)
        else:
            array = np.asarray(node[()])
            if node.attrs.get("dtype") == "bfloat16":
                import ml_dtypes

                array = array.view(ml_dtypes.bfloat16)
            arrays[name] = array

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return groups, arrays, frozenset(arrays)
