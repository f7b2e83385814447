"""`SafeModelCheckpoint`: what Keras does, and what is better."""

from __future__ import annotations

import copy
import datetime
import gc
import inspect
import json
import logging
import math
import os
import pickle
import re
import shutil
import threading
import time
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
from driven import (
    drive,
    files,
    flip_a_bit,
    held_lock,
    losses,
    saver_threads,
    set_weight,
    tiny_model,
    weight,
)
from keras_setup import keras, mirrored_strategy
from processes import run_ok, wait_until

from keras_safe_ckpt import (
    CheckpointNotFoundError,
    CheckpointStore,
    CheckpointWriteError,
    ClusterConfigError,
    CorruptCheckpointError,
    LockManager,
    LockTimeoutError,
    PerWorker,
    SafeModelCheckpoint,
    UnsafePathError,
)
from keras_safe_ckpt.storage import manifest as manifest_module
from keras_safe_ckpt.storage.formats import FORMATS, keras_zip, weights_h5
from keras_safe_ckpt.storage.shared_capture import is_current, shared_capture
from keras_safe_ckpt.storage.snapshot import Snapshot, capture

X = np.ones((6, 1), "float32")
Y = np.zeros((6, 1), "float32")
pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


def events(kind: str, folder: str = ".") -> list[dict]:
    with open(f"{folder}/events.jsonl") as file:
        return [e for e in map(json.loads, file) if e["event"] == kind]


# As Keras does

SAME = {
    "each epoch": ("m.keras", {}),
    "weights": ("m.weights.h5", {"save_weights_only": True}),
    "templates": ("{epoch:02d}-{val_loss:.2f}-{loss}.weights.h5", {"save_weights_only": True}),
    "best": ("m.weights.h5", {"save_weights_only": True, "save_best_only": True}),
    "best max": ("{epoch}.keras", {"save_best_only": True, "mode": "max"}),
    "best of another": ("{epoch}.keras", {"save_best_only": True, "monitor": "loss"}),
    "threshold": ("{epoch}.keras", {"save_best_only": True, "initial_value_threshold": 0.4}),
    "batches": ("{epoch}-{batch:02d}.keras", {"save_freq": 2}),
    "batches, one name": ("m.keras", {"save_freq": 3}),
    "folders": ("a/{epoch}/m.keras", {}),
    "missing metric": ("{epoch}.keras", {"save_best_only": True, "monitor": "f1", "mode": "max"}),
}


def outcome(kind, path, options, capsys, **more):
    """Files with the weights in them, what was printed, what was warned of."""
    folder = kind.__name__
    os.makedirs(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = kind(f"{folder}/{path}", verbose=1, **options, **more)
        drive(callback, losses(0.5, 0.3, 0.4, 0.1, 0.1), batches=3)
    printed = capsys.readouterr().out.replace(folder, "FOLDER")
    if "finished saving" not in inspect.getsource(keras.callbacks.ModelCheckpoint):
        # Keras says this since 3.13; we do with any.
        printed = re.sub(r"\nEpoch \d+: finished saving .*\n", "", printed)
    found = {}
    for directory, _, names in os.walk(folder):
        for name in files(directory) if names else []:
            file = os.path.join(directory, name)
            if os.path.isfile(file):
                found[os.path.relpath(file, folder)] = weight(file)
    texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return found, printed, texts


@pytest.mark.parametrize("case", SAME)
def test_files_messages_and_warnings_are_those_of_keras(case, capsys):
    path, options = SAME[case]
    theirs = outcome(keras.callbacks.ModelCheckpoint, path, options, capsys)
    ours = outcome(SafeModelCheckpoint, path, options, capsys, background=False)
    assert theirs[0]
    assert ours == theirs


def test_background_saves_say_the_same_when_they_are_done(capsys):
    path, options = SAME["best"]
    theirs = outcome(keras.callbacks.ModelCheckpoint, path, options, capsys)
    ours = outcome(SafeModelCheckpoint, path, options, capsys)
    assert ours[0] == theirs[0]
    assert sorted(ours[1].splitlines()) == sorted(theirs[1].splitlines())


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("m.txt", {}),
        ("m.keras", {"save_weights_only": True}),
        ("m.keras", {"save_freq": "sometimes"}),
        ("m.keras", {"save_freq": 2.5}),
    ],
)
def test_wrong_arguments_are_refused_in_the_words_of_keras(path, options):
    with pytest.raises(ValueError, match=r"Received|Expected") as theirs:
        keras.callbacks.ModelCheckpoint(path, **options)
    with pytest.raises(ValueError, match=r"Received|Expected") as ours:
        SafeModelCheckpoint(path, **options)
    assert str(ours.value) == str(theirs.value)


def test_unknown_placeholder_is_refused_in_the_words_of_keras():
    texts = []
    for kind in (keras.callbacks.ModelCheckpoint, SafeModelCheckpoint):
        with pytest.raises(KeyError) as caught:
            drive(kind("{epoch}-{accuracy}.keras"), losses(0.5))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert files() == []


def test_batch_in_the_name_of_an_epoch_is_refused_before_training():
    callback = SafeModelCheckpoint("{epoch}-{batch}.keras")
    callback.set_model(tiny_model())
    with pytest.raises(KeyError, match=r"Failed to format this callback filepath.*batch"):
        callback.on_train_begin()


def test_unknown_direction_is_refused_after_the_first_batch():
    callback = SafeModelCheckpoint("m.keras", monitor="novelty", save_best_only=True)
    with pytest.raises(ValueError, match=r"novelty.*mode='max'"):
        drive(callback, [{"novelty": 1.0}], between=lambda epoch: pytest.fail("too late"))


def test_unknown_direction_does_not_matter_where_it_is_not_used():
    drive(SafeModelCheckpoint("m.keras", monitor="novelty"), [{"novelty": 1.0}])
    assert files() == ["m.keras"]


def test_direction_of_a_metric_is_found_out():
    model = tiny_model()
    model.compile("sgd", "mse", metrics=[keras.metrics.BinaryAccuracy(name="hits")])
    callback = SafeModelCheckpoint("m.keras", monitor="hits", save_best_only=True, save_freq=1)
    model.fit(X, Y, verbose=0, callbacks=[callback])
    (saved,) = CheckpointStore(".").checkpoints()
    assert (saved.manifest.monitor, saved.manifest.mode) == ("hits", "max")


def test_several_steps_per_execution():
    model = tiny_model()
    model.compile("sgd", "mse", steps_per_execution=2)
    callback = SafeModelCheckpoint("{epoch}-{batch}.keras", save_freq=3)
    model.fit(X, Y, batch_size=1, epochs=2, verbose=0, callbacks=[callback])
    reference = tiny_model()
    reference.compile("sgd", "mse", steps_per_execution=2)
    os.mkdir("keras")
    theirs = keras.callbacks.ModelCheckpoint("keras/{epoch}-{batch}.keras", save_freq=3)
    reference.fit(X, Y, batch_size=1, epochs=2, verbose=0, callbacks=[theirs])
    assert [name for name in files() if name != "keras"] == files("keras") != []


def test_is_a_model_checkpoint_for_whoever_asks():
    assert isinstance(SafeModelCheckpoint("m.keras"), keras.callbacks.ModelCheckpoint)


def test_path_objects_and_unicode(tmp_path):
    drive(SafeModelCheckpoint(tmp_path / "módel-{epoch}.keras"), losses(0.1))
    assert files() == ["módel-1.keras"]


def test_relative_path_is_that_of_the_beginning(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    drive(
        SafeModelCheckpoint("{epoch}.keras"),
        losses(0.1, 0.1),
        between=lambda epoch: os.chdir(tmp_path / "elsewhere"),
    )
    assert files(tmp_path) == ["1.keras", "2.keras", "elsewhere"]


def test_called_by_hand_without_a_beginning():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, background=False)
    callback.set_model(tiny_model(5.0))
    callback.on_epoch_end(0, {"val_loss": 0.5})
    assert weight("m.keras") == 5.0
    assert callback.best == 0.5


def test_metrics_that_are_not_numbers_are_left_out():
    logs = {"val_loss": np.float32(0.5), "image": np.ones((2, 2)), "note": "x", "none": None}
    drive(SafeModelCheckpoint("m.keras"), [logs])
    (saved,) = CheckpointStore(".").checkpoints()
    assert saved.manifest.metrics == {"val_loss": 0.5}


@pytest.mark.parametrize("value", [np.ones(2), keras.ops.ones(3)], ids=["array", "tensor"])
def test_metric_that_is_no_scalar_is_saved_with_the_warning_of_keras(value):
    with pytest.warns(UserWarning, match="scalar value"):
        drive(SafeModelCheckpoint("m.keras", save_best_only=True), [{"val_loss": value}])
    assert files() == ["m.keras"]


# Where in the run it was


def test_manifest_says_where_in_the_run_it_was():
    callback = SafeModelCheckpoint("{epoch}-{batch}.keras", save_freq=2)
    model = tiny_model()
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[callback])
    first, second, third = CheckpointStore(".").checkpoints()
    positions = [(c.manifest.epoch, c.manifest.batch, c.manifest.step) for c in (first, second)]
    assert positions == [(0, 2, 2), (1, 1, 4)]
    assert third.path.name == "2-3.keras"


def test_manifest_at_the_end_of_an_epoch_counts_it_as_finished():
    drive(SafeModelCheckpoint("m.keras"), losses(0.1, 0.1), batches=4)
    (saved,) = CheckpointStore(".").checkpoints()
    assert (saved.manifest.epoch, saved.manifest.batch) == (2, None)
    assert saved.manifest.monitor == "val_loss"


def test_without_an_optimizer_the_batches_are_counted():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    drive(SafeModelCheckpoint("m.keras"), losses(0.1, 0.1), model=model, batches=3)
    (saved,) = CheckpointStore(".").checkpoints()
    assert saved.manifest.step == 6


# In the background


def test_training_goes_on_while_the_save_is_written():
    callback = SafeModelCheckpoint("m.keras")
    callback.set_model(tiny_model(1.0))
    callback.on_train_begin()
    with held_lock():
        callback.on_epoch_end(0, {"val_loss": 0.5})
        assert files() == []
        set_weight(callback.model, 2.0)  # The next batches.
    callback.on_train_end()
    assert weight("m.keras") == 1.0
    wait_until(lambda: not saver_threads(), "the thread ends", 5)


@pytest.mark.parametrize("name", ["m.weights.h5", "m.keras"])
def test_training_thread_does_no_more_for_a_large_model_than_for_a_small_one(name):
    """The processor time of the thread: a copy of 200 MB would be most of it."""

    def work(width: int) -> float:
        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width)])
        model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
        callback = SafeModelCheckpoint(f"{width}/{name}", save_weights_only="weights" in name)
        callback.set_model(model)
        callback.on_train_begin()
        took = []
        for epoch in range(8):
            callback._saver.wait()
            began = time.thread_time()
            callback.on_epoch_end(epoch, {"val_loss": 0.5})
            took.append(time.thread_time() - began)
        callback.on_train_end()
        return min(took)

    small, large = work(2), work(5000)
    assert large < 3 * small


def test_foreground_saves_are_durable_when_the_epoch_ends():
    callback = SafeModelCheckpoint("m.keras", background=False)
    seen = []
    drive(callback, losses(0.5), between=lambda epoch: seen.extend(files()))
    assert seen == ["m.keras"]


def test_next_save_waits_for_the_one_before():
    lock = held_lock()
    lock.__enter__()
    callback = SafeModelCheckpoint("{epoch}.keras")
    callback.set_model(tiny_model())
    callback.on_train_begin()
    callback.on_epoch_end(0, {})
    threading.Timer(0.2, lock.__exit__, (None, None, None)).start()
    callback.on_epoch_end(1, {})  # Returns when the first one is there.
    assert "1.keras" in files()
    callback.on_train_end()
    assert files() == ["1.keras", "2.keras"]


# Best is best


def test_best_advances_only_when_its_file_is_durable():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    callback.set_model(tiny_model())
    callback.on_train_begin()
    with held_lock():
        callback.on_epoch_end(0, {"val_loss": 0.5})
        assert callback.best is None
    callback.on_train_end()
    assert callback.best == 0.5


def test_best_does_not_advance_when_the_save_fails():
    locks = LockManager(timeout=0.05)
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, on_error="warn", locks=locks)
    callback.set_model(tiny_model())
    callback.on_train_begin()
    with held_lock():
        callback.on_epoch_end(0, {"val_loss": 0.5})
        wait_until(lambda: not saver_threads(), "the save gave up")
    assert callback.best is None
    with pytest.warns(UserWarning, match="A save failed"):
        callback.on_epoch_end(1, {"val_loss": 0.6})  # Worse than what was lost, and saved.
    with pytest.warns(UserWarning, match="1 save failed"):
        callback.on_train_end()
    assert callback.best == 0.6
    assert files() == ["m.keras"]


def test_a_better_one_is_not_missed_while_another_is_being_written():
    """0.4 is pending and fails; 0.45 was better than all that is durable, so it must be saved."""
    locks = LockManager(timeout=1.0)
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, on_error="warn", locks=locks)
    model = drive(callback, losses(0.5))
    callback.on_train_begin()
    wait_until(lambda: not saver_threads(), "the save before has ended")
    lock = held_lock()
    lock.__enter__()
    set_weight(model, 4.0)
    callback.on_epoch_end(1, {"val_loss": 0.4})
    (pending,) = [t for t in threading.enumerate() if t.name == "keras_safe_ckpt-save"]

    def release_when_it_has_failed() -> None:
        pending.join()
        lock.__exit__(None, None, None)

    threading.Thread(target=release_when_it_has_failed).start()
    set_weight(model, 45.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback.on_epoch_end(2, {"val_loss": 0.45})
        callback.on_train_end()
    assert weight("m.keras") == 45.0
    assert callback.best == 0.45


@pytest.mark.parametrize("path", ["m.keras", "{epoch}-{val_loss:.2f}.keras", "{epoch}/m.keras"])
def test_best_survives_a_restart(path, capsys):
    drive(SafeModelCheckpoint(path, save_best_only=True), losses(0.5, 0.2))
    before = files()
    again = SafeModelCheckpoint(path, save_best_only=True, verbose=1)
    drive(again, losses(0.3, 0.4), first_epoch=2)
    assert files() == before
    assert again.best == 0.2
    assert "Best so far: val_loss was 0.20000" in capsys.readouterr().out
    drive(SafeModelCheckpoint(path, save_best_only=True), losses(0.1), first_epoch=9)
    assert weight(SafeModelCheckpoint.load_best(path)) == 10.0


def test_best_of_a_restart_is_that_of_its_own_files():
    """A better model of another callback in the same folder does not count."""
    drive(SafeModelCheckpoint("other-{epoch}.keras"), losses(0.01))
    callback = SafeModelCheckpoint("{loss}.keras", save_best_only=True)
    drive(callback, losses(0.5))
    assert callback.best == 0.5


def test_threshold_and_file_the_better_one_counts():
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.5))
    strict = SafeModelCheckpoint("m.keras", save_best_only=True, initial_value_threshold=0.3)
    drive(strict, losses(0.4))
    assert strict.best == 0.3
    lax = SafeModelCheckpoint("m.keras", save_best_only=True, initial_value_threshold=0.9)
    drive(lax, losses(0.8))
    assert lax.best == 0.5
    assert weight("m.keras") == 1.0


def test_best_can_be_read_and_set_as_in_keras():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    callback.best = np.float32(0.25)
    drive(callback, losses(0.3, 0.2))
    assert callback.best == 0.2
    assert weight("m.keras") == 2.0


def test_another_process_with_a_better_model_is_not_overwritten(capsys):
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, verbose=1)
    callback.set_model(tiny_model(1.0))
    callback.on_train_begin()
    other = SafeModelCheckpoint("m.keras", save_best_only=True, background=False)
    drive(other, losses(0.2), first_epoch=6)
    callback.on_epoch_end(0, {"val_loss": 0.3})
    callback.on_train_end()
    assert weight("m.keras") == 7.0
    assert callback.best == 0.2
    assert "kept the model that is in m.keras" in capsys.readouterr().out
    assert "0.20000" in events("skip")[0]["reason"]


@pytest.mark.parametrize(("mode", "first", "worse"), [("min", 0.2, 0.3), ("max", 0.8, 0.7)])
def test_a_worse_model_never_replaces_a_better_one_even_if_nothing_is_remembered(
    mode, first, worse
):
    drive(SafeModelCheckpoint("m.keras", save_best_only=True, mode=mode), losses(first))
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, mode=mode)
    callback.set_model(tiny_model(9.0))
    callback.on_train_begin()
    callback.best = None
    callback.on_epoch_end(0, {"val_loss": worse})
    callback.on_train_end()
    assert weight("m.keras") == 1.0


def test_nan_is_never_the_best():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    with pytest.warns(UserWarning, match="val_loss is NaN"):
        drive(callback, losses(math.nan, 0.5, math.nan))
    assert callback.best == 0.5
    assert weight("m.keras") == 2.0


def test_model_without_the_metric_does_not_replace_one_that_was_judged():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    with pytest.warns(UserWarning, match="Can save best model only with val_loss available"):
        drive(callback, [{}, {"val_loss": 0.9}, {}])
    assert weight("m.keras") == 2.0
    assert [event["epoch"] for event in events("save")] == [1, 2]


def test_a_fit_says_when_it_begins_and_finishes_and_for_what_it_waits():
    callback = SafeModelCheckpoint("m.keras", "loss", background=False)
    tiny_model().fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[callback])
    (begun,), (finished,) = events("begin"), events("finished")
    assert (begun["file"], begun["step"], begun["epochs"], begun["steps"]) == ("m.keras", 0, 2, 3)
    assert finished["step"] == 6
    assert begun["callback"] == finished["callback"] == "SafeModelCheckpoint"
    saves, waits = events("save"), events("wait")
    assert [wait["file"] for wait in waits[:2]] == ["m.keras", "m.keras"]
    assert all(w["seconds"] > s["seconds"] for w, s in zip(waits[:2], saves, strict=True))


def test_a_fit_that_fails_does_not_finish():
    def fail(epoch: int, logs: Any) -> None:
        raise RuntimeError("no more")

    failing = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    callback = SafeModelCheckpoint("m.keras", "loss")
    with pytest.raises(RuntimeError, match="no more"):
        tiny_model().fit(X, Y, verbose=0, callbacks=[callback, failing])
    assert events("begin")
    assert events("finished") == []


def test_best_by_batches():
    callback = SafeModelCheckpoint("m.keras", "loss", save_best_only=True, save_freq=1)
    model = tiny_model(1.0)
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[callback])
    assert len(events("save")) == 6
    assert weight("m.keras") == weight(model)


@pytest.mark.parametrize("change", [{"monitor": "loss"}, {"mode": "max"}])
def test_another_standard_is_said(change):
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.5))
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, **change)
    with pytest.warns(UserWarning, match="was judged by monitor='val_loss', mode='min'"):
        drive(callback, [])


def test_unknown_value_of_another_standard_is_replaced_and_said():
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), [{"val_loss": 0.5}])
    callback = SafeModelCheckpoint("m.keras", "auc", save_best_only=True, mode="max")
    with pytest.warns(UserWarning, match="auc is not known.*replaces it"):
        drive(callback, [{"auc": 0.1}], first_epoch=3)
    assert weight("m.keras") == 4.0


def test_file_of_keras_in_place_is_said():
    tiny_model(3.0).save("m.keras")
    with pytest.warns(UserWarning, match=r"m\.keras is there, and its val_loss is not known"):
        drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.5))
    assert weight("m.keras") == 1.0
    tiny_model(3.0).save("m.keras")
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, initial_value_threshold=0.4)
    with pytest.warns(UserWarning, match=r"The first model that is better than 0\.40000 replaces"):
        drive(callback, losses(0.5))
    assert weight("m.keras") == 3.0


def test_nothing_saved_because_of_an_older_file_is_said(caplog):
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.1))
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.5))
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert re.search(r"Nothing was saved.*0\.10000.*m\.keras", record.getMessage())


def test_damaged_best_does_not_keep_whole_models_away():
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.1))
    flip_a_bit("m.keras", 0.3)
    CheckpointStore(".").checkpoints(on_skip=lambda path, reason: pytest.fail(reason))
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    with pytest.warns(UserWarning, match=r"m\.keras does not count as the best model"):
        drive(callback, losses(0.5, 0.4, 0.6))
    assert callback.best == 0.4
    assert weight(SafeModelCheckpoint.load_best("m.keras")) == 2.0


def test_best_that_is_damaged_during_training_is_replaced():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, background=False)
    other = SafeModelCheckpoint("m.keras", save_best_only=True, background=False)
    callback.set_model(tiny_model(7.0))
    callback.on_train_begin()
    drive(other, losses(0.1))
    flip_a_bit("m.keras", 0.3)
    callback.on_epoch_end(0, {"val_loss": 0.5})
    callback.on_train_end()
    assert weight("m.keras") == 7.0


def test_best_that_was_deleted_is_no_best_any_more():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    drive(callback, losses(0.1))
    os.remove("m.keras")
    drive(callback, losses(0.5))
    assert files() == ["m.keras"]
    assert callback.best == 0.5


def test_incumbent_that_cannot_be_compared_is_found_before_training(monkeypatch):
    drive(SafeModelCheckpoint("m.keras"), losses(0.1))
    monkeypatch.setattr(manifest_module, "FORMAT_VERSION", 0)  # As if written by a newer one.
    for best_only in (True, False):
        callback = SafeModelCheckpoint("m.keras", save_best_only=best_only)
        callback.set_model(tiny_model())
        with pytest.raises(CheckpointWriteError, match="upgrade keras_safe_ckpt"):
            callback.on_train_begin()


def test_best_that_was_deleted_during_training_is_no_best_any_more():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, background=False)
    drive(
        callback,
        losses(0.1, 0.5, 0.6),
        between=lambda epoch: epoch or os.remove("m.keras"),
    )
    assert weight("m.keras") == 2.0
    assert callback.best == 0.5


def test_threshold_holds_also_when_no_file_is_there():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, initial_value_threshold=0.3)
    drive(callback, losses(0.4, 0.5))
    assert files() == []


def test_nothing_is_said_of_an_older_file_where_nothing_was_judged(caplog):
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.1))
    with pytest.warns(UserWarning, match="val_loss available"):
        drive(SafeModelCheckpoint("m.keras", save_best_only=True), [{}])
    assert "Nothing was saved" not in caplog.text


# Attributes that Keras leaves public


def test_attributes_may_be_set_before_each_fit():
    callback = SafeModelCheckpoint("x.keras", save_best_only=True)
    for fold in range(2):
        callback.filepath = f"fold{fold}.keras"
        drive(callback, losses(0.1 + fold))
    assert files() == ["fold0.keras", "fold1.keras"]
    callback.filepath, callback.save_freq, callback.monitor = "{batch}.keras", 2, "loss"
    drive(callback, losses(0.9), batches=4)
    assert files() == ["2.keras", "fold0.keras", "fold1.keras"]
    assert CheckpointStore(".").checkpoints()[-1].manifest.monitor == "loss"


@pytest.mark.parametrize("path", ["m.txt", "m.weights.h5"])
def test_wrong_ending_in_an_attribute_is_found_before_training(path):
    callback = SafeModelCheckpoint("m.keras")
    callback.filepath = path
    with pytest.raises(ValueError, match="Expected a filepath that ends in"):
        drive(callback, losses(0.1))


def test_direction_is_that_of_the_monitor_that_is_set_now():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    drive(callback, losses(0.5))
    callback.filepath, callback.monitor = "n.keras", "hits"
    model = tiny_model()
    model.compile("sgd", "mse", metrics=[keras.metrics.BinaryAccuracy(name="hits")])
    model.fit(X, Y, verbose=0, callbacks=[callback])
    assert CheckpointStore(".").verify("n.keras").mode == "max"
    callback.filepath, callback.monitor = "o.keras", "novelty"
    with pytest.raises(ValueError, match="novelty"):
        drive(callback, [{"novelty": 1.0}])


def test_wrong_attribute_is_found_before_training():
    callback = SafeModelCheckpoint("{epoch}.keras", max_to_keep=2)
    callback.filepath = "m.keras"
    with pytest.raises(ValueError, match=r"m\.keras"):
        drive(callback, losses(0.1))


# Who writes


def test_independent_workers_write_to_places_of_their_own(monkeypatch):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        drive(SafeModelCheckpoint("run/{epoch}.keras", max_to_keep=1), losses(0.3, 0.2))
    assert files("run") == ["worker-0", "worker-1"]
    assert files("run/worker-0") == files("run/worker-1") == ["2.keras"]
    (saved,) = CheckpointStore("run/worker-1").checkpoints()
    assert saved.manifest.worker == "worker-1"
    monkeypatch.delenv("RANK")
    assert weight(SafeModelCheckpoint.load_latest("run/{epoch}.keras", worker=0)) == 2.0
    assert weight(SafeModelCheckpoint.load_best("run/{epoch}.keras")) == 2.0


def test_each_worker_loads_what_it_saved(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):  # The newest is that of the first.
        monkeypatch.setenv("RANK", str(rank))
        drive(SafeModelCheckpoint("m.keras"), losses(0.3), first_epoch=10 * (rank + 1))
    monkeypatch.setenv("RANK", "1")
    assert weight(SafeModelCheckpoint.load_latest("m.keras")) == 21.0
    assert weight(SafeModelCheckpoint.load_latest("m.keras", worker=0)) == 11.0
    monkeypatch.delenv("RANK")
    assert weight(SafeModelCheckpoint.load_latest("m.keras")) == 11.0
    drive(SafeModelCheckpoint("m.keras"), losses(0.3), first_epoch=2)
    monkeypatch.setenv("RANK", "0")
    drive(SafeModelCheckpoint("m.keras"), losses(0.3), first_epoch=4)
    monkeypatch.delenv("RANK")
    assert weight(SafeModelCheckpoint.load_latest("m.keras")) == 3.0  # The path itself.


def test_number_in_the_name_does_not_hide_the_series():
    drive(SafeModelCheckpoint("{worker}-{val_loss}.keras"), losses(0.3))
    drive(SafeModelCheckpoint("0-best.keras"), losses(0.2), first_epoch=4)
    assert weight(SafeModelCheckpoint.load_latest("{worker}-{val_loss}.keras")) == 1.0


def test_number_of_the_worker_in_the_name(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    drive(SafeModelCheckpoint("m-{worker}.keras"), losses(0.3))
    assert files() == ["m-3.keras"]


def test_chief_alone_writes_if_it_is_told_so(monkeypatch):
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    drive(SafeModelCheckpoint("run/m.keras", write_policy="chief"), losses(0.3))
    assert files() == []
    config["task"]["index"] = 0
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    drive(SafeModelCheckpoint("run/m.keras", write_policy="chief"), losses(0.3))
    assert files("run") == ["m.keras"]


def test_policy_object():
    drive(SafeModelCheckpoint("m.keras", write_policy=PerWorker()), losses(0.3))
    assert files() == ["worker-0"]


def test_a_linked_folder_is_refused_where_the_policy_makes_it_and_the_users_own_elsewhere():
    os.mkdir("outside")
    os.symlink("outside", "worker-0")
    with pytest.raises(UnsafePathError, match=r"worker-0.*symbolic link"):
        drive(SafeModelCheckpoint("m.keras", write_policy=PerWorker()), losses(0.3))
    assert os.listdir("outside") == []
    path = "worker-{worker}/m.keras"
    drive(SafeModelCheckpoint(path, write_policy=PerWorker()), losses(0.3))
    assert files("outside") == ["m.keras"]


def test_choice_is_logged_once(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "keras_safe_ckpt")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    callback = SafeModelCheckpoint("m.keras")
    drive(callback, losses(0.3))
    drive(callback, losses(0.3))
    (text,) = [r.getMessage() for r in caplog.records if "write policy" in r.getMessage()]
    assert "worker-1/m.keras" in text
    assert "RANK" in text


def test_wrong_cluster_configuration_is_found_before_training(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    callback = SafeModelCheckpoint("m.keras")
    callback.set_model(tiny_model())
    with pytest.raises(ClusterConfigError):
        callback.on_train_begin()


def test_mirrored_strategy():
    with mirrored_strategy().scope():
        model = tiny_model(1.0)
    callback = SafeModelCheckpoint("m.keras", "loss", save_best_only=True)
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[callback])
    assert files() == ["m.keras"]
    assert weight("m.keras") == weight(model)


# What stays


def test_newest_and_best_stay():
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=2), losses(0.5, 0.1, 0.4, 0.3, 0.2))
    assert files() == ["2.keras", "4.keras", "5.keras"]


def test_best_ones_and_the_newest_stay():
    drive(SafeModelCheckpoint("{epoch}.keras", keep_best=2), losses(0.5, 0.1, 0.4, 0.3, 0.9))
    assert files() == ["2.keras", "4.keras", "5.keras"]


def test_one_of_every_so_many_epochs_stays():
    callback = SafeModelCheckpoint("{epoch}.keras", max_to_keep=1, keep_every=3)
    drive(callback, losses(*[1 - 0.1 * n for n in range(8)]))
    assert files() == ["3.keras", "6.keras", "8.keras"]


def test_one_of_every_so_many_hours_stays():
    callback = SafeModelCheckpoint("{epoch}.keras", keep_every=datetime.timedelta(days=3650))
    drive(callback, losses(0.5, 0.4, 0.3))
    assert files() == ["3.keras"]


def test_retention_goes_on_after_a_restart():
    for first in (0, 2, 4):
        callback = SafeModelCheckpoint("{epoch}.keras", max_to_keep=2)
        drive(callback, losses(0.9 - first / 10, 0.8 - first / 10), first_epoch=first)
    assert files() == ["5.keras", "6.keras"]


def test_retention_touches_nobody_elses_files():
    tiny_model().save("77.keras")
    drive(SafeModelCheckpoint("best.keras", save_best_only=True), losses(0.9))
    drive(SafeModelCheckpoint("other-{epoch}.keras"), losses(0.9))
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=1), losses(0.5, 0.4))
    assert files() == ["2.keras", "77.keras", "best.keras", "other-1.keras"]


def test_copy_of_the_users_own_stays():
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=1), losses(0.5, 0.4))
    shutil.copy("2.keras", "final.keras")
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=1), losses(0.3), first_epoch=2)
    assert files() == ["3.keras", "final.keras"]


def test_best_of_a_run_before_makes_way_and_stays():
    """A second fit counts its epochs from one again."""
    drive(SafeModelCheckpoint("{epoch}.keras", keep_best=1), losses(0.1, 0.5))
    again = tiny_model()
    drive(SafeModelCheckpoint("{epoch}.keras", keep_best=1), losses(0.9, 0.4), model=again)
    assert files() == ["1~2.keras", "2.keras"]
    (aside,) = events("set_aside")
    assert (aside["file"], aside["now"]) == ("1.keras", "1~2.keras")
    best = SafeModelCheckpoint.load_best("{epoch}.keras")
    assert weight(best) == weight("1~2.keras") == 1.0
    assert weight(SafeModelCheckpoint.load_latest("{epoch}.keras")) == 2.0
    # It is ours: when there is a better one it goes as the others do.
    drive(SafeModelCheckpoint("{epoch}.keras", keep_best=1), losses(0.05), first_epoch=8)
    assert files() == ["9.keras"]


def test_best_of_another_process_makes_way_and_stays():
    callback = SafeModelCheckpoint("{epoch}.keras", max_to_keep=3)
    callback.set_model(tiny_model(7.0))
    callback.on_train_begin()
    code = """
store = CheckpointStore(".", format="keras")
store.publish(snapshot(1), step=1, epoch=1, name="1.keras", series="{epoch}.keras",
              metrics={"val_loss": 0.1}, monitor="val_loss", mode="min")
"""
    run_ok(code)
    callback.on_epoch_end(0, {"val_loss": 0.9})
    callback.on_train_end()
    assert files() == ["1.keras", "1~2.keras"]
    assert weight("1.keras") == 7.0


def test_worse_files_of_a_run_before_are_overwritten_as_in_keras():
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=5), losses(0.5, 0.1))
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=5), losses(0.9), model=tiny_model())
    assert files() == ["1.keras", "2.keras"]


def test_retention_goes_on_with_nan():
    callback = SafeModelCheckpoint("{epoch}.keras", max_to_keep=2, keep_best=1)
    drive(callback, losses(0.5, 0.4, math.nan, math.nan, math.nan))
    assert files() == ["2.keras", "4.keras", "5.keras"]


def test_other_standard_is_said_where_files_are_deleted_by_it():
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=2), losses(0.5))
    callback = SafeModelCheckpoint("{epoch}.keras", "loss", mode="max", max_to_keep=2)
    with pytest.warns(UserWarning, match="was judged by monitor='val_loss', mode='min'"):
        drive(callback, losses(0.5), first_epoch=1)


def test_number_of_the_worker_does_not_split_what_is_kept(monkeypatch):
    path = "w{worker}-{epoch}.keras"
    drive(SafeModelCheckpoint(path, max_to_keep=1), losses(0.5))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    drive(SafeModelCheckpoint(path, max_to_keep=1), losses(0.4), first_epoch=1)
    assert files() == ["w0-2.keras"]


def test_nothing_is_deleted_while_the_best_is_not_known():
    callback = SafeModelCheckpoint("{epoch}.keras", keep_best=1)
    with pytest.warns(UserWarning, match="Can keep the best models only with val_loss available"):
        drive(callback, [{"loss": 1.0}] * 3)
    assert files() == ["1.keras", "2.keras", "3.keras"]


# When


def test_every_so_many_seconds():
    callback = SafeModelCheckpoint("{epoch}-{batch}.keras", save_every_seconds=1e-9)
    tiny_model().fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[callback])
    assert files() == [f"{epoch}-{batch}.keras" for epoch in (1, 2) for batch in (1, 2, 3)]


def test_seconds_that_have_not_passed():
    callback = SafeModelCheckpoint("{epoch}-{batch}.keras", save_every_seconds=1000)
    drive(callback, losses(0.1, 0.1), batches=3)
    assert files() == ["1-3.keras", "2-3.keras"]


# Room


def test_too_little_room_is_said_with_both_numbers(small_disk):
    disk = small_disk("size=64k")
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300)])
    callback = SafeModelCheckpoint(disk / "m.weights.h5", save_weights_only=True)
    model.compile("sgd", "mse")
    with pytest.raises(CheckpointWriteError, match=r"needs about 361,2\d\d bytes") as error:
        model.fit(np.ones((4, 300)), np.ones((4, 300)), verbose=0, callbacks=[callback])
    assert re.search(r"and [\d,]+ bytes are free", str(error.value))
    assert files(disk) == []


def test_too_little_room_for_another_one_like_the_last_is_said_before_training(small_disk):
    disk = small_disk("size=1m")
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    callback = SafeModelCheckpoint(disk / "m.weights.h5", save_weights_only=True)
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_end(0, {})
    callback.on_train_end()
    (disk / "ballast").write_bytes(bytes(400_000))
    with pytest.raises(CheckpointWriteError, match="needs about"):
        callback.on_train_begin()
    model.load_weights(disk / "m.weights.h5")


def test_room_for_a_larger_model_is_not_asked_for(small_disk):
    disk = small_disk("size=1500k")
    large = keras.Sequential([keras.Input((300,)), keras.layers.Dense(1000)])
    large.compile("sgd", "mse")
    first = SafeModelCheckpoint(disk / "m.weights.h5", save_weights_only=True)
    first.set_model(large)
    first.on_train_begin()
    first.on_epoch_end(0, {})
    first.on_train_end()
    drive(SafeModelCheckpoint(disk / "m.weights.h5", save_weights_only=True), losses(0.5))
    assert weight(disk / "m.weights.h5") == 1.0


# When a save fails


def failing_callback(**options) -> SafeModelCheckpoint:
    """Saves wait in vain for a lock that the caller holds."""
    callback = SafeModelCheckpoint("m.keras", locks=LockManager(timeout=0.05), **options)
    callback.set_model(tiny_model(1.0))
    callback.on_train_begin()
    return callback


@pytest.mark.parametrize("boundary", ["batch", "epoch", "end"])
def test_error_is_raised_at_the_next_boundary(boundary):
    callback = failing_callback()
    with held_lock():
        callback.on_epoch_end(0, {})
        wait_until(lambda: not saver_threads(), "the save gave up")
    hooks = {
        "batch": lambda: callback.on_train_batch_end(0, {}),
        "epoch": lambda: callback.on_epoch_end(1, {}),
        "end": lambda: callback.on_train_end(),
    }
    with pytest.raises(LockTimeoutError):
        hooks[boundary]()
    callback.on_train_end()  # Raised once, not for ever.


def test_error_of_a_foreground_save_is_raised_at_once():
    callback = failing_callback(background=False)
    with held_lock(), pytest.raises(LockTimeoutError):
        callback.on_epoch_end(0, {})


@pytest.mark.parametrize("background", [True, False])
def test_warning_instead_of_an_error(background):
    callback = failing_callback(on_error="warn", background=background)
    callback.on_epoch_end(0, {})
    callback._saver.wait()
    with held_lock():
        set_weight(callback.model, 2.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callback.on_epoch_end(1, {})
            wait_until(lambda: not saver_threads(), "the save gave up")
            callback.on_train_batch_end(0, {})
    assert any("A save failed, training goes on" in str(w.message) for w in caught)
    with pytest.warns(UserWarning, match="1 save failed during training:\n.*LockTimeoutError"):
        callback.on_train_end()
    assert weight("m.keras") == 1.0
    assert events("error")[0]["kind"] == "LockTimeoutError"


def test_a_disk_that_stays_full_does_not_flood():
    callback = failing_callback(on_error="warn", background=False)
    with held_lock(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(8):
            callback.on_epoch_end(epoch, {})
        callback.on_train_end()
    assert len([w for w in caught if "A save failed" in str(w.message)]) == 3
    assert "8 saves failed" in str(caught[-1].message)
    assert "All of them are in events.jsonl" in str(caught[-1].message)
    assert len(events("error")) == 8


def test_failures_of_one_run_are_not_those_of_the_next():
    callback = failing_callback(on_error="warn")
    with held_lock():
        callback.on_epoch_end(0, {})
        wait_until(lambda: not saver_threads(), "the save gave up")
    with pytest.warns(UserWarning, match="1 save failed"):
        callback.on_train_end()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drive(callback, losses(0.5))


class Unserializable(keras.layers.Layer):
    def call(self, x):
        return x

    def get_config(self):
        raise RuntimeError("no config")


def test_capture_that_fails_is_in_the_log_as_well():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), Unserializable()])
    callback = SafeModelCheckpoint("m.keras", on_error="warn")
    callback.set_model(model)
    callback.on_train_begin()
    with pytest.warns(UserWarning, match="no config"):
        callback.on_epoch_end(0, {})
    with pytest.warns(UserWarning, match="no config"):
        callback.on_train_end()
    assert [event["kind"] for event in events("error")] == ["RuntimeError"]


def test_directory_that_becomes_a_file_during_training_is_warned_of_each_time():
    callback = SafeModelCheckpoint("run/m.keras", on_error="warn", background=False)

    def replace(epoch):
        if epoch == 0:
            shutil.rmtree("run")
            open("run", "w").close()

    with pytest.warns(UserWarning, match="2 saves failed during training:\n  CheckpointWriteError"):
        drive(callback, losses(0.5, 0.4, 0.3), between=replace)


def test_full_disk_during_training_leaves_the_previous_checkpoint(small_disk):
    disk = small_disk("size=1m")
    callback = SafeModelCheckpoint(disk / "m.keras", on_error="warn")

    def fill(epoch):
        wait_until(lambda: not saver_threads(), "the save is over")
        if epoch == 0:
            with pytest.raises(OSError, match="No space"):
                (disk / "ballast").write_bytes(bytes(2_000_000))

    with pytest.warns(UserWarning, match="2 saves failed"):
        drive(callback, losses(0.5, 0.4, 0.3), between=fill)
    assert weight(disk / "m.keras") == 1.0


# Interrupted


class Interrupt(keras.callbacks.Callback):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")], ids=type)
def test_pending_save_is_finished_after_an_interrupted_fit(error):
    callback = SafeModelCheckpoint("{epoch}.keras")
    model = tiny_model(1.0)
    callbacks = [callback, Interrupt(error)]
    with held_lock():
        with pytest.raises(type(error)):
            model.fit(X, Y, epochs=3, initial_epoch=1, verbose=0, callbacks=callbacks)
        assert saver_threads()
    newest = SafeModelCheckpoint.load_latest("{epoch}.keras")  # Waits for what is pending.
    assert weight(newest) == weight(model)
    wait_until(lambda: not saver_threads(), "the thread ends", 5)
    model.fit(X, Y, epochs=3, initial_epoch=2, verbose=0, callbacks=[callback])
    assert files() == ["2.keras", "3.keras"]


def test_error_of_an_interrupted_fit_is_said_at_the_next_one():
    callback = failing_callback()
    with held_lock():
        callback.on_epoch_end(0, {})
        wait_until(lambda: not saver_threads(), "the save gave up")
    with pytest.warns(UserWarning, match="A save of the run before failed"):
        drive(callback, losses(0.5))
    assert files() == ["m.keras"]


def test_second_fit_with_the_same_object():
    callback = SafeModelCheckpoint("m.keras", "loss", save_best_only=True)
    model = tiny_model(1.0)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[callback])
    first = callback.best
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[callback])
    assert callback.best < first
    assert weight("m.keras") == weight(model)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_copies_are_callbacks_of_their_own(duplicate):
    callback = SafeModelCheckpoint("{epoch}.keras", save_best_only=True, keep_best=3)
    callback.set_model(tiny_model())
    callback.on_train_begin()
    with held_lock():
        callback.on_epoch_end(0, {"val_loss": 0.5})
        copied = duplicate(callback)
        assert copied.model is None
        assert copied._saver is not callback._saver
    callback.on_train_end()
    drive(copied, losses(0.4), first_epoch=1)
    assert copied.best == 0.4
    assert callback.best == 0.5
    assert files() == ["1.keras", "2.keras"]


def test_evaluation_between_epochs():
    model = tiny_model(1.0)
    callback = SafeModelCheckpoint("{epoch}.keras", monitor="loss")
    evaluate = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.evaluate(X, Y, verbose=0, callbacks=[callback])
    )
    callbacks = [callback, evaluate]
    model.fit(X, Y, epochs=3, verbose=0, validation_data=(X, Y), callbacks=callbacks)
    assert files() == ["1.keras", "2.keras", "3.keras"]


def test_many_fits_leave_nothing_behind():
    model = tiny_model(1.0)
    callback = SafeModelCheckpoint("m.keras")

    def snapshots() -> int:
        # Those of other tests may live on in the tracebacks of their errors.
        gc.collect()
        return sum(isinstance(one, Snapshot) for one in gc.get_objects())

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    model.fit(X, Y, verbose=0, callbacks=[callback])
    before, kept = descriptors(), snapshots()
    for _ in range(10):
        model.fit(X, Y, verbose=0, callbacks=[callback])
    assert descriptors() <= before
    assert snapshots() == kept
    wait_until(lambda: not saver_threads(), "the thread ends", 5)
    assert [name for name in os.listdir(".") if name.endswith(".kscktmp")] == []


# Several at the same moment


@pytest.fixture
def captures(monkeypatch):
    count = []

    def counted(*arguments, **options):
        count.append(1)
        return capture(*arguments, **options)

    for module in (keras_zip, weights_h5):
        monkeypatch.setattr(module, "capture", counted)
    return count


def pair() -> list[SafeModelCheckpoint]:
    return [
        SafeModelCheckpoint("best.keras", save_best_only=True),
        SafeModelCheckpoint("{epoch}.weights.h5", save_weights_only=True),
    ]


def test_callbacks_that_save_at_the_same_moment_share_one_capture(captures):
    with held_lock():
        callbacks = pair()
        model = tiny_model()
        for callback in callbacks:
            callback.set_model(model)
            callback.on_train_begin()
        for callback in callbacks:
            callback.on_epoch_end(0, {"val_loss": 0.5})
        assert len(captures) == 1
    for callback in callbacks:
        callback.on_train_end()
    assert files() == ["1.weights.h5", "best.keras"]


def test_changed_weights_are_captured_again(captures):
    """As SwapEMAWeights does between two callbacks."""
    with held_lock():
        callbacks = pair()
        model = tiny_model(1.0)
        for callback in callbacks:
            callback.set_model(model)
            callback.on_train_begin()
        callbacks[0].on_epoch_end(0, {"val_loss": 0.5})
        set_weight(model, 2.0)
        callbacks[1].on_epoch_end(0, {"val_loss": 0.5})
        assert len(captures) == 2
    for callback in callbacks:
        callback.on_train_end()
    assert weight("best.keras") == 1.0
    assert weight("1.weights.h5") == 2.0


def test_weights_alone_do_not_serve_for_a_whole_model(captures):
    with held_lock():
        callbacks = pair()[::-1]
        model = tiny_model(1.0)
        for callback in callbacks:
            callback.set_model(model)
            callback.on_train_begin()
            callback.on_epoch_end(0, {"val_loss": 0.5})
        assert len(captures) == 2
    for callback in callbacks:
        callback.on_train_end()
    assert weight("best.keras") == weight("1.weights.h5") == 1.0


def set_rate(model):
    model.layers[0].rate = 0.9


def freeze_layer(model):
    model.layers[-1].trainable = False


def compile_anew(model):
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)


def add_layer(model):
    model.add(keras.layers.Dense(1))


@pytest.mark.parametrize("change", [set_rate, freeze_layer, compile_anew, add_layer])
@pytest.mark.parametrize("name", ["b.keras", "b.weights.h5"])
def test_whatever_changes_the_model_in_between_is_saved(change, name):
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dropout(0.1), keras.layers.Dense(1, use_bias=False)]
    )
    model.compile("sgd", "mse")
    callbacks = [
        SafeModelCheckpoint("a.keras"),
        SafeModelCheckpoint(name, save_weights_only=name.endswith(".h5")),
    ]
    with held_lock():
        for callback in callbacks:
            callback.set_model(model)
            callback.on_train_begin()
        callbacks[0].on_epoch_end(0, {})
        change(model)
        callbacks[1].on_epoch_end(0, {})
    for callback in callbacks:
        callback.on_train_end()
    if name.endswith(".h5"):
        SafeModelCheckpoint.load_latest(name, model)  # Fits the model as it is now.
        assert type(model.optimizer).__name__ == CheckpointStore(".").verify(name).optimizer
    else:
        loaded = keras.models.load_model(name)
        assert len(loaded.layers) == len(model.layers)
        assert type(loaded.optimizer) is type(model.optimizer)
        assert loaded.layers[0].rate == model.layers[0].rate
        assert [x.trainable for x in loaded.layers] == [x.trainable for x in model.layers]


def test_training_a_single_step_is_noticed():
    model = tiny_model(1.0)
    snapshot = shared_capture(FORMATS["keras"], model, None)
    assert is_current(snapshot)
    assert shared_capture(FORMATS["weights_h5"], model, None) is snapshot
    model.train_on_batch(X, Y)
    assert not is_current(snapshot)
    assert shared_capture(FORMATS["weights_h5"], model, None) is not snapshot


def test_snapshots_are_not_kept_alive():
    model = tiny_model(1.0)
    watched = weakref.ref(shared_capture(FORMATS["keras"], model, None))
    gc.collect()
    assert watched() is None


# Loading


def test_load_best_and_latest():
    drive(SafeModelCheckpoint("{epoch}.keras"), losses(0.5, 0.1, 0.3))
    assert weight(SafeModelCheckpoint.load_best("{epoch}.keras")) == 2.0
    assert weight(SafeModelCheckpoint.load_latest("{epoch}.keras")) == 3.0
    assert weight(SafeModelCheckpoint.load_latest("2.keras")) == 2.0
    by_loss = SafeModelCheckpoint.load_best("{epoch}.keras", monitor="loss", mode="max")
    assert weight(by_loss) == 1.0


def test_load_into_a_model():
    callback = SafeModelCheckpoint("{epoch}.weights.h5", save_weights_only=True, max_to_keep=3)
    drive(callback, losses(0.5, 0.1, 0.3))
    model = tiny_model(0.0)
    assert SafeModelCheckpoint.load_best("{epoch}.weights.h5", model) is model
    assert weight(model) == 2.0
    SafeModelCheckpoint.load_latest("{epoch}.weights.h5", model)
    assert weight(model) == 3.0
    assert [event["file"] for event in events("restore")] == ["2.weights.h5", "3.weights.h5"]


def test_weights_need_a_model():
    drive(SafeModelCheckpoint("m.weights.h5", save_weights_only=True), losses(0.5))
    with pytest.raises(ValueError, match=r"holds weights.*`model`"):
        SafeModelCheckpoint.load_latest("m.weights.h5")


def test_damaged_file_is_passed_over_and_said(caplog):
    drive(SafeModelCheckpoint("{epoch}.keras", keep_best=3), losses(0.5, 0.1, 0.3))
    flip_a_bit("2.keras")
    assert weight(SafeModelCheckpoint.load_best("{epoch}.keras")) == 3.0
    assert "2.keras" in caplog.text


def test_nothing_to_load():
    with pytest.raises(CheckpointNotFoundError, match=r"best\.keras"):
        SafeModelCheckpoint.load_best("run/best.keras")
    tiny_model().save("plain.keras")
    with pytest.raises(CorruptCheckpointError, match=r"plain\.keras"):
        SafeModelCheckpoint.load_latest("plain.keras")
    with pytest.raises(CorruptCheckpointError, match=r"not written by this.*may open it\.$"):
        SafeModelCheckpoint.load_latest("plain.keras")
    assert files() == ["plain.keras"]


def test_what_was_not_judged_is_not_the_best():
    drive(SafeModelCheckpoint("m.keras"), [{}])
    with pytest.raises(CheckpointNotFoundError, match="'val_loss'"):
        SafeModelCheckpoint.load_best("m.keras")
    with pytest.raises(CheckpointNotFoundError, match="'auc'"):
        SafeModelCheckpoint.load_best("m.keras", monitor="auc", mode="max")
    drive(SafeModelCheckpoint("n.keras", monitor="novelty"), [{"novelty": 1.0}])
    with pytest.raises(ValueError, match=r"monitor= and mode=.*novelty \(no mode\)"):
        SafeModelCheckpoint.load_best("n.keras")
    assert weight(SafeModelCheckpoint.load_best("n.keras", mode="max")) == 1.0


# The format of Keras 2


def test_legacy_files_are_published_the_same_way():
    loss = keras.losses.MeanSquaredError()
    model = drive(
        [SafeModelCheckpoint("m.h5", save_best_only=True), SafeModelCheckpoint("m.keras")],
        losses(0.5, 0.3, 0.4),
        model=tiny_model(loss=loss),
    )
    assert weight("m.h5") == 2.0  # By Keras alone.
    assert weight(SafeModelCheckpoint.load_best("m.h5")) == 2.0
    assert SafeModelCheckpoint.load_best("m.h5", model) is model
    assert weight(model) == 2.0
    # Saving as .h5 makes Keras forget the optimizer of the model; the other file has it.
    assert keras.models.load_model("m.keras").optimizer.name.lower().startswith("sgd")
    flip_a_bit("m.h5")
    with pytest.raises(CorruptCheckpointError):
        SafeModelCheckpoint.load_latest("m.h5")


@pytest.mark.parametrize("names", [["m.keras", "m.h5"], ["m.h5", "m.keras"]])
def test_legacy_files_do_not_share_a_capture(names):
    callbacks = [SafeModelCheckpoint(name) for name in names]
    model = tiny_model(3.0, loss=keras.losses.MeanSquaredError())
    with held_lock():
        for callback in callbacks:
            callback.set_model(model)
            callback.on_train_begin()
        for callback in callbacks:
            callback.on_epoch_end(0, {})
    for callback in callbacks:
        callback.on_train_end()
    assert [weight(name) for name in names] == [3.0, 3.0]


def test_legacy_file_into_a_model_says_that_the_optimizer_is_left(caplog):
    loss = keras.losses.MeanSquaredError()
    drive(SafeModelCheckpoint("m.h5"), losses(0.5), model=tiny_model(loss=loss))
    SafeModelCheckpoint.load_latest("m.h5", tiny_model(loss=loss))
    assert "only the weights" in caplog.text


def test_legacy_file_in_a_directory_that_was_removed():
    callback = SafeModelCheckpoint("run/m.h5")
    loss = keras.losses.MeanSquaredError()
    drive(
        callback,
        losses(0.5, 0.4),
        model=tiny_model(loss=loss),
        between=lambda epoch: epoch or (callback._saver.wait(), shutil.rmtree("run")),
    )
    assert weight("run/m.h5") == 2.0


def test_legacy_files_of_others_are_not_looked_at():
    with open("data.h5", "wb") as file:
        file.write(b"not a checkpoint")
    drive(SafeModelCheckpoint("{epoch}.h5", max_to_keep=1), losses(0.5, 0.3))
    assert files() == ["2.h5", "data.h5"]
    store = CheckpointStore(".")
    assert store.checkpoints(on_skip=lambda path, reason: pytest.fail(reason)) == []


# Bad input


@pytest.mark.parametrize(
    "options",
    [
        {"write_policy": "everyone"},
        {"on_error": "ignore"},
        {"save_freq": 0},
        {"save_freq": -3},
        {"save_every_seconds": 0},
        {"save_every_seconds": -1.5},
        {"max_to_keep": 0},
        {"keep_best": -1},
        {"keep_every": 0},
        {"max_to_keep": 3},  # of one file
        {"save_every_seconds": "5"},
        {"save_every_seconds": True},
        {"save_every_seconds": math.inf},
        {"locks": "redis"},
        {"monitor": None},
    ],
)
def test_wrong_options_are_refused_at_construction(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=name) as caught:
        SafeModelCheckpoint("m.keras", **options)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "{epoch:zz}.keras", "{epoch!z}.keras", "{epoch.foo}.keras", "{batch[0]}.keras", "{}.keras",
        "{loss:q}.keras", "{loss:03d}.keras",
    ],
)  # fmt: skip
def test_placeholders_that_cannot_be_filled_are_refused_at_construction(path):
    with pytest.raises(ValueError, match="Expected placeholders") as caught:
        SafeModelCheckpoint(path)
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize(
    "path", ["gs://bucket/m.keras", "m\0.keras", ".hidden.keras", "a\\b.keras"]
)
def test_paths_that_no_file_system_has_are_refused_at_construction(path):
    with pytest.raises(UnsafePathError):
        SafeModelCheckpoint(path)


def test_whole_model_in_a_file_for_weights_is_refused():
    with pytest.raises(ValueError, match="save_weights_only=True"):
        SafeModelCheckpoint("m.weights.h5")


class NoPlace(PerWorker):
    def place(self, template, role):
        return None


class PlainPath(PerWorker):
    def place(self, template, role):
        return f"mine-{role.number}.keras"


class LosesEpochs(PerWorker):
    def place(self, template, role):
        return "last.keras"


class WrongEnding(PerWorker):
    def place(self, template, role):
        return "{epoch}.txt"


@pytest.mark.parametrize("policy", [LosesEpochs(), WrongEnding()], ids=lambda p: type(p).__name__)
def test_path_of_a_policy_is_checked_before_training(policy):
    callback = SafeModelCheckpoint("{epoch}.keras", write_policy=policy, max_to_keep=3)
    with pytest.raises(ValueError, match="xpected"):
        drive(callback, losses(0.5))


def test_policy_of_the_users_own_may_return_a_plain_path():
    drive(SafeModelCheckpoint("m.keras", write_policy=PlainPath()), losses(0.5))
    assert files() == ["mine-0.keras"]
    callback = SafeModelCheckpoint("m.keras", write_policy=NoPlace())
    with pytest.raises(ValueError, match="return a path"):
        drive(callback, losses(0.5))


class OnePlace(PerWorker):
    def place(self, template, role):
        return template


@pytest.mark.parametrize(("rank", "said"), [("0", "Workers 0 and 1"), ("1", "Workers 1 and 0")])
def test_workers_that_would_delete_each_others_files_are_noticed(monkeypatch, rank, said):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    callback = SafeModelCheckpoint("{epoch}.keras", write_policy=OnePlace(), max_to_keep=2)
    callback.set_model(tiny_model())
    with pytest.raises(ValueError, match=said):
        callback.on_train_begin()


def begin(path: str) -> None:
    callback = SafeModelCheckpoint(path)
    callback.set_model(tiny_model())
    callback.on_train_begin()


@pytest.mark.parametrize("path", ["m.keras", "m{epoch}.keras"])
def test_directory_where_a_file_should_be_is_found_before_training(path):
    os.mkdir(path.format(epoch=3))
    with pytest.raises(UnsafePathError, match="directory"):
        begin(path)


def test_saves_of_one_epoch_that_would_overwrite_each_other_are_noticed():
    for options in ({"save_freq": 5}, {"save_every_seconds": 5}):
        with pytest.raises(ValueError, match=r"\{batch\}"):
            SafeModelCheckpoint("{epoch}.keras", max_to_keep=2, **options)
        SafeModelCheckpoint("{epoch}-{batch}.keras", max_to_keep=2, **options)


@pytest.mark.parametrize("path", ["file/m.keras", "file/{epoch}/m.keras"])
def test_file_where_a_directory_should_be_is_found_before_training(path):
    open("file", "w").close()
    with pytest.raises((UnsafePathError, CheckpointWriteError), match="file"):
        begin(path)


@pytest.mark.parametrize("path", ["m.keras", "{epoch}/m.keras"])
def test_directory_that_cannot_be_written_is_found_before_training(path, small_disk):
    disk = small_disk("size=1m,ro")
    with pytest.raises(CheckpointWriteError, match="read-only"):
        begin(f"{disk}/{path}")


def test_symbolic_link_is_found_before_training():
    os.symlink("/etc/passwd", "m.keras")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        begin("m.keras")
