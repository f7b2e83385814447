"""One of several workers that train together, interrupted as its plan says.

``preempted_worker.py FOLDER PLAN [OPTIONS]``: in the plan ``1:5`` is SIGTERM to worker 1 at its
fifth hook (counted through all lives), ``1:5k`` is kill -9; each happens once. A process that has
SIGTERM gets no second one, which would end it at once: the next life gets it.

With the option ``storm`` it is interrupted from outside: it says in the files ``pid-1`` and
``hooks-1`` who and where it is, and gets no further than the number in the file ``allowed``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

FOLDER, PLAN = sys.argv[1], sys.argv[2]
OPTIONS: dict[str, Any] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
#: How long a batch takes at least, as long as something of the plan is to come.
PAUSE = OPTIONS.pop("pause", 0.0)
#: How long the chief takes a save for, from its second batch on.
SLOW = OPTIONS.pop("slow", None)
#: How long a worker waits for a file of the chief's to appear in the directory.
SHARED = OPTIONS.pop("shared", None)
STORM = OPTIONS.pop("storm", False)
EPOCHS = OPTIONS.pop("epochs", 4)
TASK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def say(name: str, value: int) -> None:
    """To whoever interrupts from outside."""
    with open(f"{FOLDER}/.{name}-{TASK}", "w") as file:
        file.write(str(value))
    os.replace(f"{FOLDER}/.{name}-{TASK}", f"{FOLDER}/{name}-{TASK}")


if STORM:
    say("pid", os.getpid())

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy()

import keras  # noqa: E402

import keras_safe_ckpt  # noqa: E402

if SHARED:
    from keras_safe_ckpt.callbacks import run_directory

    run_directory._SHARED_SECONDS = SHARED
keras_safe_ckpt.enable_multi_worker_fit()
keras.utils.set_random_seed(7)

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(48, 4)).astype("f4"), rng.normal(size=(48, 1)).astype("f4")
FACTS: dict[str, Any] = {}


def exact(variables: Any) -> list[str]:
    return [np.asarray(variable.numpy()).tobytes().hex() for variable in variables]


def is_allowed(hook: int) -> bool:
    with open(f"{FOLDER}/allowed") as file:
        return hook <= int(file.read())


def happened(part: str) -> str:
    """The file that says that this part of the plan is done."""
    return f"{FOLDER}/done-{part.replace(':', '-')}"


def to_come() -> list[str]:
    return [part for part in PLAN.split(",") if part and not os.path.exists(happened(part))]


class Hit(keras.callbacks.Callback):
    seen = 0
    was_told = False

    def get_state(self) -> int:
        return self.seen

    def set_state(self, state: int) -> None:
        self.seen = state

    def _hook(self) -> None:
        self.seen += 1
        if STORM:
            say("hooks", self.seen)
            while not is_allowed(self.seen):
                time.sleep(0.01)
        for part in to_come():
            worker, _, hook = part.partition(":")
            kills = hook.endswith("k")
            if int(worker) != TASK or self.seen < int(hook.rstrip("k")):
                continue
            if kills or not self.was_told:
                self.was_told = True
                with open(happened(part), "w"):
                    pass
                os.kill(os.getpid(), signal.SIGKILL if kills else signal.SIGTERM)
                return

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if PAUSE and to_come():
            time.sleep(PAUSE)
        if "begin" not in FACTS:
            FACTS["begin"] = exact(model.non_trainable_variables)
        if SLOW and TASK == 0 and batch == 1:
            callbacks[-1]._run._pace.save_took(SLOW)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._hook()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._hook()


def batches() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


layers = keras.layers
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
callbacks: list[Any] = [Hit(), keras.callbacks.EarlyStopping("val_loss", patience=50)]
if not OPTIONS.pop("undisturbed", False):
    directory = OPTIONS.pop("directory", f"{FOLDER}/state").format(task=TASK)
    callbacks.append(keras_safe_ckpt.PreemptionAwareCallback(directory, **OPTIONS))
history = model.fit(
    batches().shuffle(48, seed=3).batch(12),
    validation_data=batches().batch(12),
    epochs=EPOCHS,
    verbose=0,
    callbacks=callbacks,
)

FACTS.update(
    history=history.history,
    weights=exact(model.variables),
    optimizer=exact(model.optimizer.variables),
    hooks=callbacks[0].seen,
)
with open(f"{FOLDER}/facts-{TASK}.json", "w") as file:
    json.dump(FACTS, file)
