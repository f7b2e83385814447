"""`SafeModelCheckpoint` in `fit` of two real workers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from clusters import WORKER, facts, launch, launch_ok
from keras_setup import keras

from keras_safe_ckpt import CheckpointStore, SafeModelCheckpoint

TRAINING = (
    WORKER
    + """
from keras_safe_ckpt import AgreementError, SafeModelCheckpoint
keras_safe_ckpt.enable_multi_worker_fit()

def build(units=8):
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((4,)), keras.layers.Dense(units), keras.layers.BatchNormalization(),
            keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    return model

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(24, 4)).astype("f4"), rng.normal(size=(24, 1)).astype("f4")
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

def weights(model):
    return [np.asarray(v.numpy()).tolist() for v in model.weights]
"""
)

WRITING = (
    TRAINING
    + """
os.chdir(FOLDER)
# With other initial weights an early epoch may be the best, and be kept for that.
keras.utils.set_random_seed(0)
model = build()
chief = SafeModelCheckpoint("chief/{epoch}.keras", max_to_keep=2)
best = SafeModelCheckpoint("best.weights.h5", monitor="loss", save_best_only=True,
                           save_weights_only=True)
each = SafeModelCheckpoint("each/m.weights.h5", save_weights_only=True,
                           write_policy="per_worker", save_freq=2)
history = model.fit(DATA, validation_data=DATA, epochs=3, verbose=0,
                    callbacks=[chief, best, each]).history
there = {
    "chief": os.path.exists("chief/3.keras"),
    "other": os.path.exists("each/worker-0/m.weights.h5"),
    "mine": os.path.exists(f"each/worker-{INDEX}/m.weights.h5"),
}
# A second fit in the same processes, with the same callbacks.
model.fit(DATA, initial_epoch=3, epochs=4, verbose=0, callbacks=[chief, best, each])
report(history=history, weights=weights(model), there=there, best=best.best,
       loaded=weights(SafeModelCheckpoint.load_latest("chief/{epoch}.keras", build())))
"""
)


def test_the_chief_writes_or_each_worker_for_itself(tmp_path):
    chief, other = launch_ok(tmp_path, WRITING)
    assert chief["history"] == other["history"]
    # When fit returns, on whatever worker, the files of all workers are there.
    assert chief["there"] == other["there"] == {"chief": True, "other": True, "mine": True}
    saved = sorted(path.name for path in (tmp_path / "chief").glob("*.keras"))
    assert saved == ["3.keras", "4.keras"]
    assert not list((tmp_path / "chief").glob("worker-*"))
    assert (chief["best"] is None, other["best"] is None) == (False, True)
    # The files hold what the workers had, and plain Keras opens them.
    model = keras.models.load_model(tmp_path / "chief" / "4.keras")
    for kept, trained in zip(model.weights, chief["weights"], strict=True):
        np.testing.assert_array_equal(kept.numpy(), np.asarray(trained, "float32"))
    assert chief["loaded"] == chief["weights"]
    # Their own moving statistics are all in which the workers differ.
    names = [variable.path for variable in model.weights]
    differing = [
        name
        for name, one, two in zip(names, chief["weights"], other["weights"], strict=True)
        if one != two
    ]
    assert differing
    assert all("moving" in name for name in differing)
    for index, result in enumerate((chief, other)):
        store = CheckpointStore(tmp_path / "each" / f"worker-{index}")
        (checkpoint,) = store.checkpoints()
        assert checkpoint.manifest.worker == f"worker-{index}"
        restored, _ = store.load(model)
        # Saved after every second batch: the last one of twelve was one.
        for kept, trained in zip(restored.weights, result["weights"], strict=True):
            np.testing.assert_array_equal(kept.numpy(), np.asarray(trained, "float32"))


FULL = (
    TRAINING
    + """
moment, disk = ARGUMENTS
model = build(4000)
path = (disk if INDEX == 0 else FOLDER) + "/m.weights.h5"
frequency = 1 if moment == "during training" else "epoch"
callback = SafeModelCheckpoint(path, save_weights_only=True, save_freq=frequency)
try:
    model.fit(DATA, epochs=1 if moment == "in the end" else 200, verbose=0, callbacks=[callback])
except Exception as error:
    report(error=f"{type(error).__name__}: {error}")
    raise
"""
)


@pytest.mark.parametrize("moment", ["during training", "in the end"])
def test_nobody_hangs_when_the_disk_of_the_chief_is_full(tmp_path, small_disk, moment):
    disk = small_disk("size=64k")
    done = launch(tmp_path, FULL, moment, disk, timeout=120)
    assert done.returncode == 1
    chief, other = facts(tmp_path)
    assert chief["error"].startswith("CheckpointWriteError: Could not write ")
    assert other["error"].startswith(
        "AgreementError: The workers cannot go on together: worker 0 failed with "
        "CheckpointWriteError: Could not write "
    )
    assert not list(disk.glob("*.h5"))


WITHOUT = (
    WORKER
    + """
import warnings
from keras_safe_ckpt import SafeModelCheckpoint

def said():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SafeModelCheckpoint("m.keras")
    return [str(one.message) for one in caught]

before = said()
with keras_safe_ckpt.enable_multi_worker_fit():
    during = said()
report(before=before, during=during, after=said())
"""
)


def test_a_callback_says_which_line_is_missing(tmp_path):
    for result in launch_ok(tmp_path, WITHOUT):
        (message,) = result["before"]
        assert "keras_safe_ckpt.enable_multi_worker_fit()" in message
        assert result["during"] == []
        assert result["after"] == result["before"]


def test_no_cluster_no_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SafeModelCheckpoint("m.keras")
    assert caught == []


BY_HAND = (
    TRAINING.replace("keras_safe_ckpt.enable_multi_worker_fit()", "")
    + """
import threading
def listeners():
    return [t for t in threading.enumerate() if t.name == "keras_safe_ckpt-cohort"]
def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

model = build(4000)
with strategy.scope():
    model.optimizer.build(model.trainable_variables)
path = (ARGUMENTS[0] if INDEX == 0 else FOLDER) + "/m.weights.h5"
callback = SafeModelCheckpoint(path, save_weights_only=True)
callback.set_model(model)
callback.on_train_begin()  # And then it was interrupted.
callback.on_train_begin()
until(lambda: len(listeners()) == 1)
callback.on_epoch_begin(0)
try:
    callback.on_epoch_end(0, {"loss": 1.0})
    if INDEX == 0:
        until(lambda: not callback._saver._writer.busy)
    callback.on_train_batch_end(0)  # Where the chief hears of it, and tells the other.
    callback.on_train_end()
except Exception as error:
    report(error=f"{type(error).__name__}: {error}")
"""
)


def test_without_fit_a_failed_save_reaches_the_others_too(tmp_path, small_disk):
    """As on a Keras that needs no `enable_multi_worker_fit`."""
    chief, other = launch_ok(tmp_path, BY_HAND, small_disk("size=64k"))
    assert chief["error"].startswith("CheckpointWriteError: Could not write ")
    assert "worker 0 failed with CheckpointWriteError: Could not write " in other["error"]


RESTARTED = (
    TRAINING
    + """
os.chdir(FOLDER)
first = not os.path.exists(f"life-{INDEX}")
open(f"life-{INDEX}", "w").close()
model = build()
done = 0
if not first:
    SafeModelCheckpoint.load_latest("m-{epoch}.weights.h5", model)
    done = int(model.optimizer.iterations.numpy()) // 3

class Leaving(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if first and epoch == 2 and INDEX == 1:
            sys.exit(42)

saver = SafeModelCheckpoint("m-{epoch}.weights.h5", save_weights_only=True, background=False)
model.fit(DATA, initial_epoch=done, epochs=4, verbose=0, callbacks=[saver, Leaving()])
report(done=done, iterations=int(model.optimizer.iterations.numpy()))
"""
)


@pytest.mark.long
def test_real_workers_that_are_started_again_go_on_from_their_checkpoint(tmp_path):
    done = launch(tmp_path, RESTARTED)
    assert done.returncode == 0, done.stderr
    assert "worker 1 ended with code 42: all start again" in done.stderr
    assert "[launch] all workers finished (1 restart, " in done.stderr
    for result in facts(tmp_path):
        assert result == {"done": 2, "iterations": 12}
    saved = sorted(path.name for path in tmp_path.glob("*.weights.h5"))
    assert saved == [f"m-{epoch}.weights.h5" for epoch in (1, 2, 3, 4)]
