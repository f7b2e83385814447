"""A program that gets a real SIGTERM in the middle of an epoch and is started again, by peer.

What is trained twice is counted, batch by batch, in a file that outlives the process; the weights
and the optimizer's state at the end are compared with those of a run that nobody disturbed. Each
life is a process of its own. Two programs: a "plain" one, and one with Dropout and, in `fit`,
shuffled data.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from forked import Child, Tell
from peers_known import (
    GUARD,
    HANDLER,
    KERAS,
    ORBAX,
    SAFE,
    finish,
    kind_of,
    load_by_hand,
    make_callback,
    make_manager,
)

EPOCHS, BATCHES, ROWS = 3, 20, 8
#: The batch of the second epoch at whose beginning the signal comes: so many are done in it.
STOP_AFTER = 13
STOP_AT = BATCHES + STOP_AFTER
PROGRAMS = ("plain", "dropout")
MOST_LIVES = 4
FILE = "{epoch:02d}.weights.h5"


def make_model(program: str) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.Input((16,)), keras.layers.Dense(32, activation="relu")]
    if program == "dropout":
        layers.append(keras.layers.Dropout(0.3))
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def make_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (BATCHES * ROWS, 16)
    return rng.random(shape, "float32"), rng.random((shape[0], 1), "float32")


class Counter:
    """Counts the batches that were trained, through all lives, and sends the signal in the first.

    The signal goes to this process itself, so that it comes at the same batch for everybody.
    """

    def __init__(
        self, folder: Path, *, stop: bool, before: Callable[[], object] = lambda: None
    ) -> None:
        self._path = folder / "batches"
        self._stop = stop
        self._before = before

    def count(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def begins(self) -> None:
        if self._stop and self.count() == STOP_AT:
            self._stop = False
            self._before()
            os.kill(os.getpid(), signal.SIGTERM)

    def ends(self) -> None:
        with open(self._path, "ab", buffering=0) as file:
            file.write(b".")


def digest_of(model: Any) -> str:
    digest = hashlib.sha256()
    for variable in [*model.weights, *model.optimizer.variables]:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()


def train_by_fit(tell: Tell, name: str | None, program: str, folder: Path, stop: bool) -> None:
    """One life of a program that calls `fit`, with the callback or without any."""
    import keras
    import tensorflow as tf

    place = folder / "saved"
    place.mkdir(exist_ok=True)
    callback = None if name is None else make_callback(name, place, FILE)
    # An epoch of these is shorter than a save in the background, which is nobody's fault.
    counter = Counter(folder, stop=stop, before=lambda: finish(str(name), callback, place, 0))

    class Counting(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            counter.begins()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            counter.ends()

    model = make_model(program)
    data = tf.data.Dataset.from_tensor_slices(make_data())
    if program == "dropout":
        data = data.shuffle(BATCHES * ROWS, seed=3)
    first = 0 if name is None else load_last(name, model, place)
    callbacks = [Counting()] if callback is None else [Counting(), callback]
    model.fit(data.batch(ROWS), epochs=EPOCHS, initial_epoch=first, verbose=0, callbacks=callbacks)
    tell(digest=digest_of(model))


def load_last(name: str, model: Any, folder: Path) -> int:
    """What a user writes where a callback only saves; the epoch to begin with."""
    if name in (SAFE, KERAS):
        epochs = [int(path.name.partition(".")[0]) for path in folder.glob("[0-9]*.weights.h5")]
        newest = FILE.format(epoch=max(epochs, default=0))
    elif name == ORBAX:
        epochs = [int(path.name) + 1 for path in folder.iterdir() if path.name.isdigit()]
        newest = ""
    else:
        return 0  # It does so itself.
    if epochs:
        load_by_hand(name, model, folder, newest)
    return max(epochs, default=0)


def train_by_loop(tell: Tell, name: str | None, program: str, folder: Path, stop: bool) -> None:
    """One life of a program with a loop of its own, which saves after each epoch or at a notice."""
    import tensorflow as tf

    from keras_safe_ckpt import PreemptionGuard

    counter = Counter(folder, stop=stop)
    model = make_model(program)
    x, y = make_data()
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, step=step)
    manager = guard = None
    if name is not None:
        manager = make_manager(name, checkpoint, folder / "saved")
    if name == GUARD:
        guard = PreemptionGuard(None, manager, verbose=0)
    elif name == HANDLER:
        guard = tf.distribute.experimental.PreemptionCheckpointHandler(None, manager)
    elif manager is not None:
        manager.restore_or_initialize()

    def train(number: int) -> None:
        counter.begins()
        rows = slice(number % BATCHES * ROWS, (number % BATCHES + 1) * ROWS)
        model.train_on_batch(x[rows], y[rows])
        counter.ends()

    while (number := int(step.numpy())) < EPOCHS * BATCHES:
        if guard is not None:
            guard.run(train, number)
        else:
            train(number)
        step.assign_add(1)
        if guard is None and manager is not None and (number + 1) % BATCHES == 0:
            manager.save()
    tell(digest=digest_of(model))


TRAINING = {"fit": train_by_fit, "loop": train_by_loop}


def live_until_done(kind: str, name: str | None, program: str, folder: Path) -> dict[str, Any]:
    """All lives of one program: how each ended, what was trained, and the digest of the end.

    Without a name nobody saves, and nobody disturbs.
    """
    folder.mkdir(parents=True)
    exits: list[int] = []
    facts: dict[str, Any] = {}
    child: Child | None = None
    while len(exits) < MOST_LIVES and 0 not in exits:
        stop = name is not None and not exits
        child = Child((TRAINING[kind], (name, program, folder, stop)), folder / "log")
        facts = child.hear_all(120)
        exits.append(child.end())
        child.close()
    if "digest" not in facts:
        assert child is not None
        raise RuntimeError(f"{name}, {program}: ended with {exits}\n{child.last_words()}")
    trained = Counter(folder, stop=False).count()
    return {"exits": exits, "trained": trained, "needed": EPOCHS * BATCHES, **facts}


def measure_lives(tell: Tell, name: str, folder: Path) -> None:
    """To be run in a process of its own: one peer, with both programs."""
    kind = "fit" if kind_of(name) == "callback" else "loop"
    for program in PROGRAMS:
        facts = live_until_done(kind, name, program, folder / program)
        tell(
            note=f"{name}, {program}: {facts['trained'] - facts['needed']} batches repeated",
            lives={name: {program: facts}},
        )


def measure_undisturbed(tell: Tell, kind: str, folder: Path) -> None:
    """To be run in a process of its own: what the end must be, of a "fit" or a "loop"."""
    for program in PROGRAMS:
        facts = live_until_done(kind, None, program, folder / program)
        tell(note=f"undisturbed {kind}, {program}", undisturbed={kind: {program: facts["digest"]}})
