"""What a model in training is, beyond the weights and the optimizer that Keras saves.

Seeds of the layers, the state of recurrent ones, metrics in mid-epoch, and what differs between
the replicas of a strategy (BatchNormalization's moving statistics). Reading a metric through its
strategy would be a collective, for which all workers must be alive: the local part of each variable
is read instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_safe_ckpt.storage.keras_internals import import_keras

SEEDS, METRICS, WEIGHTS, STATES = "seeds", "metrics", "weights", "states"


def capture_variables(model: Any, *, own_weights: bool = False) -> dict[str, Any]:
    """Tensors by name, which share the memory of the variables until these change.

    ``own_weights``: also what the first replica has for the weights that are not trained, which
    may differ between workers; otherwise only where another replica differs from the first.
    """
    found: dict[str, Any] = {}
    for kind, index, variable in _variables_beyond_keras(model):
        parts = [part.value() for part in local_parts(variable)]
        if kind == WEIGHTS and not own_weights and not _differ(parts):
            continue
        for replica, value in enumerate(parts):
            found[f"{kind}/{index}/{replica}"] = value
    return found


def differences(model: Any, arrays: Mapping[str, Any], kinds: tuple[str, ...]) -> list[str]:
    """Why `restore_variables` could not be done, in words; nothing if it can."""
    wanted = {
        f"{kind}/{index}": variable
        for kind, index, variable in _variables_beyond_keras(model)
        if kind in kinds
    }
    found = []
    seen = set()
    for name, array in arrays.items():
        kind, _, index = name.rpartition("/")[0].partition("/")
        if kind not in kinds:
            continue
        place = f"{kind}/{index}"
        seen.add(place)
        if place not in wanted:
            found.append(f"{place}: the model has nothing, the checkpoint {_shape(array)}")
        elif _shape(array) != _shape(local_parts(wanted[place])[0]):
            there = _shape(local_parts(wanted[place])[0])
            found.append(f"{place}: the model has {there}, the checkpoint {_shape(array)}")
    for place, variable in wanted.items():
        if place not in seen and not place.startswith(WEIGHTS):
            there = _shape(local_parts(variable)[0])
            found.append(f"{place}: the model has {there}, the checkpoint nothing")
    return found


def restore_variables(model: Any, arrays: Mapping[str, Any], kinds: tuple[str, ...]) -> None:
    """Put back what `capture_variables` found; a replica that had none gets the first one's."""
    for kind, index, variable in _variables_beyond_keras(model):
        if kind not in kinds or f"{kind}/{index}/0" not in arrays:
            continue
        first = arrays[f"{kind}/{index}/0"]
        for replica, part in enumerate(local_parts(variable)):
            part.assign(arrays.get(f"{kind}/{index}/{replica}", _filling(kind, first)))


def unbuilt_optimizers(model: Any) -> list[str]:
    """The optimizers that a model holds beside the one it was compiled with, and did not build."""
    kind = import_keras().optimizers.Optimizer
    return [
        name
        for name, value in _held_by(model)
        if isinstance(value, kind) and value is not model.optimizer and not value.built
    ]


def unknown_variables(model: Any) -> list[str]:
    """Plain variables of TensorFlow that a model holds, and that Keras does not know of."""
    import tensorflow as tf

    return [name for name, value in _held_by(model) if isinstance(value, tf.Variable)]


def _held_by(model: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a model and its layers, and what is in lists and dictionaries of them."""
    for layer in layers_of(model):
        prefix = "" if layer is model else f"{layer.name}."
        for name, value in list(vars(layer).items()):
            # Private ones are Keras's, and hold again what others do.
            if not name.startswith("_"):
                yield from _unfolded(f"{prefix}{name}", value)


def _unfolded(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and depth:
        for key, item in value.items():
            yield from _unfolded(f"{name}[{key!r}]", item, depth - 1)
    elif isinstance(value, (list, tuple)) and depth:
        for index, item in enumerate(value):
            yield from _unfolded(f"{name}[{index}]", item, depth - 1)
    else:
        yield name, value


def layers_of(model: Any) -> list[Any]:
    """The model itself, and all layers in it."""
    flatten = getattr(model, "_flatten_layers", None)
    return [model, *model.layers] if flatten is None else list(flatten())


def local_parts(variable: Any) -> list[Any]:
    """The TensorFlow variables of a Keras variable, one for each replica of this process."""
    inner = getattr(variable, "value", variable)
    replicas = getattr(inner, "values", None)
    if isinstance(replicas, (tuple, list)) and replicas:
        return list(replicas)
    return [inner]


def _variables_beyond_keras(model: Any) -> Iterator[tuple[str, int, Any]]:
    weights = {id(variable) for variable in model.weights}
    for index, variable in enumerate(v for v in model.variables if id(v) not in weights):
        yield SEEDS, index, variable
    for index, variable in enumerate(_states(model, model.variables)):
        yield STATES, index, variable
    for index, variable in enumerate(model.metrics_variables):
        yield METRICS, index, variable
    for index, variable in enumerate(model.non_trainable_weights):
        yield WEIGHTS, index, variable


def _states(model: Any, known: list[Any]) -> Iterator[Any]:
    """Those of stateful recurrent layers, which Keras does not count as variables."""
    keras = import_keras()
    seen = {id(variable) for variable in known}
    for layer in layers_of(model):
        for variable in keras.tree.flatten(getattr(layer, "states", None)):
            if isinstance(variable, keras.Variable) and id(variable) not in seen:
                seen.add(id(variable))
                yield variable


def _differ(parts: list[Any]) -> bool:
    first = np.asarray(parts[0])
    # By bytes: NaN is equal to itself here.
    return any(np.asarray(part).tobytes() != first.tobytes() for part in parts[1:])


def _filling(kind: str, first: Any) -> Any:
    # A metric is summed up over the replicas: what the first one has must not count twice.
    return np.zeros_like(first) if kind == METRICS else first


def _shape(value: Any) -> str:
    return f"{getattr(value.dtype, 'name', value.dtype)}{list(value.shape)}"
