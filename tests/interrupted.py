"""Short trainings that are interrupted, started again, and compared with an undisturbed one.

Run as a program it imports TensorFlow once and lives each life in a forked child, which takes
a fraction of a second: ``python interrupted.py FOLDER OPTIONS CASE PLAN [CASE PLAN ...]``. A plan
is a list of lives, each ended by what it says: ``5`` is SIGTERM at the fifth hook of the run,
``5k`` kill -9, ``5w`` the same as soon as there is a backup, ``5t`` SIGTERM twice, ``5e`` SIGTERM
and its echo. The last life is never disturbed.
An empty plan is the undisturbed run, without the callback. Prints a line of JSON for each plan.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

if __name__ == "__main__" and sys.argv[3].startswith("mirrored"):
    _cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(_cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

import keras

from keras_safe_ckpt import CheckpointStore, PreemptionAwareCallback, SafeModelCheckpoint

BATCH, EPOCHS = 8, 3
_rng = np.random.default_rng(0)
X, Y = _rng.normal(size=(40, 4)).astype("f4"), _rng.normal(size=(40, 1)).astype("f4")


class Hit(keras.callbacks.Callback):
    """Ends the process at a hook of the run, counted through all lives."""

    def __init__(self, plan: str | None, folder: str) -> None:
        super().__init__()
        self.plan = plan
        self.folder = folder
        self.seen = 0

    def get_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def _hook(self) -> None:
        self.seen += 1
        if self.plan is None or self.seen != int(self.plan.rstrip("kwte")):
            return
        while self.plan.endswith("w") and not checkpoints_in(self.folder):
            time.sleep(0.001)
        if self.plan.endswith(("k", "w")):
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGTERM)
        if self.plan.endswith(("t", "e")):
            time.sleep(0.7 if self.plan.endswith("t") else 0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._hook()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._hook()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._hook()

    def on_test_begin(self, logs: Any = None) -> None:
        self._hook()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._hook()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._hook()

    def on_train_end(self, logs: Any = None) -> None:
        self._hook()


class Watching(keras.callbacks.Callback):
    """Writes down what a callback is told, to a file that outlives the process."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def _note(self, *words: object) -> None:
        with open(self.path, "a") as file:
            print(*words, file=file)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._note("epoch", epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._note("batch", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("end", batch, logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._note("epoch end", epoch, sorted(logs.items()))


def dense(**options: Any) -> Any:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"], **options)
    return model


def light() -> Any:
    """Traced in half the time, for cases in which all depends on the data."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


@functools.cache
def two_devices() -> Any:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


class Own(keras.Model):
    """Not built before it is trained; a step of its own, with logs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = keras.layers.Dense(6, activation="tanh")
        self.drop = keras.layers.Dropout(0.2)
        self.two = keras.layers.Dense(1)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.two(self.drop(self.one(inputs), training=training))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        # From the generator of Keras that has no seed of its own.
        x = x + 0.01 * keras.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.apply_gradients(
            zip(
                tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True
            )
        )
        self.mean.update_state(loss)
        return {"loss": loss, "running": self.mean.result(), "lr": self.optimizer.learning_rate}


def slices() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


class Rows(keras.utils.PyDataset):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.turn = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return X[part].copy() + self.turn, Y[part].copy()

    def on_epoch_end(self) -> None:
        self.turn += 1


def rows_for_ever() -> Any:
    rng = np.random.default_rng(5)
    while True:
        chosen = rng.integers(0, len(X), BATCH)
        yield X[chosen], Y[chosen]


def data_of(case: str) -> dict[str, Any]:
    """What `fit` is given."""
    validation = {"validation_data": (X[:16], Y[:16])}
    if case == "dataset":
        return {"x": slices().shuffle(40, seed=3).batch(BATCH), **validation}
    if case == "drawn on the way":
        # The second half, and what is in the cache, depend on what was read before.
        halves = slices().take(16).shuffle(16, seed=3).repeat(2).cache()
        data = halves.concatenate(slices().skip(16).shuffle(24, seed=4))
        return {"x": data.batch(BATCH), **validation}
    if case == "global seed":
        return {"x": slices().shuffle(40).batch(BATCH), **validation}
    if case == "repeated":
        repeated = slices().shuffle(40, seed=3).repeat().batch(BATCH)
        return {"x": repeated, "steps_per_epoch": 4, **validation}
    if case == "unknown size":
        return {"x": slices().filter(lambda x, y: x[0] < 0.9).batch(BATCH), **validation}
    if case == "generator":
        return {"x": rows_for_ever(), "steps_per_epoch": 4, **validation}
    if case.startswith("python"):
        options = {"workers": 2} if "two" in case else {}
        return {"x": Rows(**options), "shuffle": "in order" not in case, **validation}
    if case == "split":
        return {"x": X, "y": Y, "batch_size": BATCH, "validation_split": 0.2}
    if case == "weighted":
        weights = np.linspace(0, 1, len(X))
        return {"x": X, "y": Y, "sample_weight": weights, "batch_size": BATCH, **validation}
    if case.startswith("mirrored"):
        data = slices().shuffle(40, seed=3).batch(BATCH)
        if "distributed" in case:
            data = two_devices().experimental_distribute_dataset(data)
        return {"x": data, "validation_data": slices().batch(8)}
    return {"x": X, "y": Y, "batch_size": BATCH, **validation}


def model_of(case: str) -> tuple[Any, list[Any]]:
    """The model, and callbacks that only this case has."""
    if case == "averages":
        layers = [keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True), "mse")
        return model, [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    if case == "several steps":
        return dense(steps_per_execution=3), []
    if case == "own step":
        model = Own()
        model.compile("adam", "mse")
        return model, []
    if case == "eager":
        return dense(run_eagerly=True), []
    if case == "compiled":
        return dense(jit_compile=True), []
    if case == "stopping":
        stopping = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
        return dense(), [stopping]
    if case.startswith("mirrored"):
        with two_devices().scope():
            return dense(), []
    return dense(), []


def noise(model: Any) -> Any:
    """Draws from the generators of the process in each batch, and lets the model feel it."""
    import random

    def draw(batch: int, logs: Any = None) -> None:
        number = random.random() + np.random.rand() + float(tf.random.uniform(()))
        bias = model.layers[-1].bias
        bias.assign(bias + 1e-3 * number)

    return keras.callbacks.LambdaCallback(on_train_batch_begin=draw)


def live(case: str, folder: str, plan: str | None, **options: Any) -> None:
    """One life: the whole program, as a user would write it."""
    keras.utils.set_random_seed(7)
    os.makedirs(folder, exist_ok=True)
    model, callbacks = (light(), []) if options.pop("light", False) else model_of(case)
    if case == "random":
        callbacks.append(noise(model))
    callbacks += [
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5, min_delta=0.2),
        keras.callbacks.EarlyStopping("loss", patience=50, restore_best_weights=True),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        Watching(f"{folder}/seen.txt"),
        SafeModelCheckpoint(f"{folder}/best.weights.h5", "loss", save_best_only=True,
                            save_weights_only=True, save_freq=2),
    ]  # fmt: skip
    if options.pop("resume", True):
        callbacks.insert(1, PreemptionAwareCallback(f"{folder}/state", verbose=0, **options))
    callbacks.append(Hit(plan, folder))
    history = model.fit(**data_of(case), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    result = {
        "history": history.history,
        "epochs": history.epoch,
        "weights": [local(v) for v in model.variables],
        "optimizer": [local(v) for v in model.optimizer.variables],
        "csv": Path(f"{folder}/log.csv").read_text(),
        "best": best_of(folder),
        "hooks": callbacks[-1].seen,
    }
    with open(f"{folder}/result.json", "w") as file:
        json.dump(result, file)


def best_of(folder: str) -> Any:
    manifest = CheckpointStore(folder).verify("best.weights.h5")
    digests = {name: array.digest for name, array in manifest.arrays.items()}
    return manifest.epoch, manifest.batch, manifest.step, dict(manifest.metrics), digests


def local(variable: Any) -> list[Any]:
    """The value of each replica, to the last bit."""
    value = variable.value
    parts = getattr(value, "values", None) or [value]
    return [np.asarray(part.numpy()).tobytes().hex() for part in parts]


def fork(*arguments: Any, **options: Any) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        live(*arguments, **options)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001  # the parent sees the code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def follow(case: str, folder: str, plan: str, **options: Any) -> dict[str, Any]:
    """All lives of a plan, how each ended, and the newest checkpoint that each has left."""
    shutil.rmtree(folder, ignore_errors=True)
    codes: list[int] = []
    newest: list[str | None] = []
    for part in [*filter(None, plan.split(",")), None]:
        codes.append(fork(case, folder, part, **options))
        if codes[-1] == 0:
            break
        newest.append(max(checkpoints_in(folder), default=None))
    return {"plan": plan, "codes": codes, "newest": newest, **results(folder)}


def checkpoints_in(folder: str) -> list[str]:
    names = os.listdir(f"{folder}/state") if os.path.exists(f"{folder}/state") else []
    return sorted(name for name in names if name.startswith("run-"))


def results(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if os.path.exists(f"{folder}/result.json"):
        with open(f"{folder}/result.json") as file:
            found = json.load(file)
    if os.path.exists(f"{folder}/seen.txt"):
        with open(f"{folder}/seen.txt") as file:
            found["seen"] = file.read()
    found["left"] = checkpoints_in(folder)
    if os.path.exists(f"{folder}/state"):
        events = CheckpointStore(f"{folder}/state").events.read()
        found["resumes"] = [event for event in events if event["event"] == "resume"]
    return found


def main() -> None:
    folder, text, *steps = sys.argv[1:]
    options = json.loads(text)
    for number, (case, plan) in enumerate(zip(steps[::2], steps[1::2], strict=True)):
        place = f"{folder}/{number}"
        if plan:
            found = follow(case, place, plan, **options)
        else:
            code = fork(case, place, None, resume=False, light=options.get("light", False))
            found = {"plan": plan, "codes": [code], **results(place)}
        print(json.dumps({"case": case, **found}), flush=True)


if __name__ == "__main__":
    main()
