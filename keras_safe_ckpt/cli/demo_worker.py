"""What each worker of the demonstration runs: an ordinary training with two callbacks.

It tells the demonstration how far it is, by lines that begin with `MARK`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

MARK = "@demo "
#: Who is to be interrupted after which batch, and the sign that it has been done.
AMBUSH, STRUCK = "ambush.json", "struck-{}"
_LONGEST_WAIT_SECONDS = 60.0
EPOCHS, BATCHES, BATCH_SIZE = 4, 30, 32
_CLASSES, _SIDE = 4, 12


def main() -> None:
    """Train; preempted and started again, go on at that batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--together", action="store_true")
    options = parser.parse_args()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    # Before anything else uses TensorFlow.
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if options.together else None
    import keras

    import keras_safe_ckpt

    if options.together:
        keras_safe_ckpt.enable_multi_worker_fit()
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = _model(keras)
    model.fit(
        _data(tf),
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            keras_safe_ckpt.PreemptionAwareCallback(
                options.directory / "state",
                save_freq=BATCHES // 3,
                delete_checkpoint=False,
            ),
            # What each worker has in the end, to be compared.
            keras_safe_ckpt.SafeModelCheckpoint(
                options.directory / "worker-{worker}" / "final.weights.h5",
                save_weights_only=True,
                monitor="loss",
                write_policy="per_worker",
            ),
            _progress(keras, options.directory),
        ],
    )


def _model(keras: Any) -> Any:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((_SIDE, _SIDE, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(64, activation="relu"),
            layers.Dense(_CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    return model


def _data(tf: Any) -> Any:
    """Small noisy pictures of bars in four directions, made here: nothing is downloaded."""
    import numpy as np

    rng = np.random.default_rng(0)
    count = BATCHES * BATCH_SIZE
    labels = rng.integers(0, _CLASSES, count)
    pictures = rng.normal(0, 0.9, (count, _SIDE, _SIDE, 1)).astype("float32")
    places = rng.integers(2, _SIDE - 2, count)
    along = np.arange(_SIDE)
    for picture, label, place in zip(pictures, labels, places, strict=True):
        shifted = (along + place) % _SIDE
        rows = {0: along, 1: np.full(_SIDE, place), 2: along, 3: along}[int(label)]
        columns = {0: np.full(_SIDE, place), 1: along, 2: shifted, 3: shifted[::-1]}[int(label)]
        picture[rows, columns] += 1.5
    data = tf.data.Dataset.from_tensor_slices((pictures, labels))
    return data.shuffle(count, seed=2).batch(BATCH_SIZE, drop_remainder=True)


def _progress(keras: Any, directory: Path) -> Any:
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    worker = config.get("task", {}).get("index", 0)
    now = {"epoch": 0}

    def tell(**facts: Any) -> None:
        print(MARK + json.dumps({"worker": worker, "pid": os.getpid(), **facts}), flush=True)

    def begin(epoch: int, logs: Any) -> None:
        now["epoch"] = epoch

    def after_batch(batch: int, logs: Any) -> None:
        tell(epoch=now["epoch"], batch=batch + 1)
        _wait_for_what_comes(directory, worker, now["epoch"] * BATCHES + batch + 1)

    def after_epoch(epoch: int, logs: Any) -> None:
        tell(epoch=epoch, batch=BATCHES, logs={name: float(logs[name]) for name in logs})

    return keras.callbacks.LambdaCallback(
        on_epoch_begin=begin, on_train_batch_end=after_batch, on_epoch_end=after_epoch
    )


def _wait_for_what_comes(directory: Path, worker: int, done: int) -> None:
    """Where this worker is to be interrupted, wait for it: on a busy machine it may be late."""
    if not (directory / AMBUSH).exists():
        return
    deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
    for number, strike in enumerate(json.loads((directory / AMBUSH).read_text())):
        if strike["worker"] == worker and strike["after"] <= done:
            sign = directory / STRUCK.format(number)
            while not sign.exists() and time.monotonic() < deadline:
                time.sleep(0.002)


if __name__ == "__main__":
    main()
