"""Callbacks driven as `fit` drives them, with metrics and weights of our choice."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from keras_setup import keras

from keras_safe_ckpt import LockManager
from keras_safe_ckpt.storage.publishing import LOCK_NAME


def tiny_model(value: float = 0.0, loss: Any = "mse") -> Any:
    """One weight, so that a file can say which model it holds."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile("sgd", loss)
    set_weight(model, value)
    return model


def set_weight(model: Any, value: float) -> None:
    model.set_weights([np.full((1, 1), value, "float32")])


def weight(source: Any) -> float:
    """The weight of a model, or of the model in a file, opened by Keras alone."""
    if isinstance(source, (str, Path)):
        if str(source).endswith(".weights.h5"):
            model = tiny_model(-1.0)
            model.load_weights(source)
        else:
            model = keras.models.load_model(source)
        source = model
    return float(source.get_weights()[0][0, 0])


def drive(
    callback: Any,
    epochs: Sequence[Mapping[str, Any]],
    *,
    model: Any = None,
    batches: int = 1,
    first_epoch: int = 0,
    between: Callable[[int], None] | None = None,
) -> Any:
    """A run of `fit` without the training: each epoch ends with the given logs.

    The weight of the model is the number of the epoch, counted from one.
    """
    callbacks = callback if isinstance(callback, list) else [callback]
    model = tiny_model() if model is None else model
    for one in callbacks:
        one.set_model(model)
    _each(callbacks, "on_train_begin")
    for epoch, logs in enumerate(epochs, first_epoch):
        _each(callbacks, "on_epoch_begin", epoch)
        set_weight(model, epoch + 1)
        for batch in range(batches):
            _each(callbacks, "on_train_batch_end", batch, dict(logs))
        _each(callbacks, "on_epoch_end", epoch, dict(logs))
        if between is not None:
            between(epoch)
    _each(callbacks, "on_train_end")
    return model


def losses(*values: float) -> list[dict[str, float]]:
    return [{"loss": value, "val_loss": value} for value in values]


def files(folder: object = ".") -> list[str]:
    """What a user sees: no events, no locks."""
    return sorted(
        name for name in os.listdir(folder) if not name.startswith(".") and name != "events.jsonl"
    )


def flip_a_bit(path: str, where: float = 0.3) -> None:
    """Damage a file without changing its size."""
    with open(path, "rb+") as file:
        place = int(os.path.getsize(path) * where)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def saver_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("keras_safe_ckpt")]


def held_lock(folder: object = "."):
    """Whoever holds this keeps every save from being published."""
    return LockManager().exclusive(os.path.join(folder, LOCK_NAME))


def release_soon(lock: Any) -> None:
    """While the caller waits for what the lock keeps from happening."""
    threading.Timer(0.2, lock.__exit__, (None, None, None)).start()


def _each(callbacks: Sequence[Any], hook: str, *arguments: Any) -> None:
    for callback in callbacks:
        getattr(callback, hook)(*arguments)
