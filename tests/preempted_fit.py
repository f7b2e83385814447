"""Short fits in this process, interrupted by a watcher of the test's own."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from keras_setup import keras

from keras_safe_ckpt import CheckpointStore, PreemptionAwareCallback
from keras_safe_ckpt.preemption.notices import Notice

X = np.arange(40, dtype="float32").reshape(10, 4) / 40
Y = X.sum(axis=1, keepdims=True)
#: Five batches an epoch, always in the same order.
DATA: dict[str, Any] = {"x": X, "y": Y, "batch_size": 2, "shuffle": False, "verbose": 0}


class Bell:
    """A watcher of the test's own."""

    name = "bell"

    def __init__(self) -> None:
        self.desk: Any = None
        self.stopped = 0

    def start(self, desk: Any) -> None:
        self.desk = desk

    def stop(self) -> None:
        self.stopped += 1

    def ring(self, **facts: Any) -> None:
        self.desk.tell(Notice("bell", "rings", **facts))


class At(keras.callbacks.Callback):
    """Does something at a moment of training, once."""

    def __init__(self, hook: str, epoch: int, batch: int, action: Any) -> None:
        super().__init__()
        self._wanted, self._action, self._epoch = (hook, epoch, batch), action, 0
        self.done = False

    def _at(self, hook: str, batch: int) -> None:
        if (hook, self._epoch, batch) == self._wanted and not self.done:
            self.done = True
            self._action()

    def get_state(self) -> bool:
        return self.done

    def set_state(self, state: bool) -> None:
        self.done = state

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._at("batch", batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._at("test", batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._at("predict", batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._at("epoch", epoch)

    def on_train_end(self, logs: Any = None) -> None:
        self._at("train", 0)


class Told(keras.callbacks.Callback):
    """Remembers what it is told; has no state to keep, being a list outside."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self._log = log

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._log.append(batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._log.append(f"test {batch}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._log.append(f"end of {epoch}")


def build(units: int = 3, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse", run_eagerly=True, **options)
    return model


def callback(bell: Bell | None = None, **options: Any) -> Any:
    options = {"on_preempted": "stop", "verbose": 0, "notices": bell, **options}
    return PreemptionAwareCallback(options.pop("directory", "state"), **options)


def interrupted_at(hook: str, epoch: int, batch: int, model: Any = None, **options: Any) -> Any:
    """A run that a notice has stopped, and its callback."""
    bell = Bell()
    mine = callback(bell, **options)
    model = model or build()
    fit = {"epochs": 3, **DATA}
    if hook == "test":
        fit["validation_data"] = (X, Y)
        fit["validation_batch_size"] = 2
    model.fit(callbacks=[mine, At(hook, epoch, batch, bell.ring)], **fit)
    return mine


def events(name: str | None = None, folder: str = "state") -> list[dict[str, Any]]:
    found = CheckpointStore(folder).events.read()
    return [event for event in found if name in (None, event["event"])]


def run_files(folder: str = "state") -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("run-"))


def weights(model: Any) -> list[bytes]:
    return [value.tobytes() for value in model.get_weights()]
