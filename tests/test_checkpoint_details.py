"""`SafeModelCheckpoint` in detail: each test is what one line is there for."""

from __future__ import annotations

import copy
import gc
import logging
import os
import shutil
import threading
import warnings
import weakref

import numpy as np
import pytest
import tensorflow as tf
from driven import (
    drive,
    files,
    flip_a_bit,
    held_lock,
    losses,
    release_soon,
    saver_threads,
    set_weight,
    tiny_model,
    weight,
)
from keras_setup import keras
from processes import wait_until

from keras_safe_ckpt import (
    CheckpointStore,
    CheckpointWriteError,
    LockManager,
    LockTimeoutError,
    PerWorker,
    SafeModelCheckpoint,
    UnsafePathError,
)
from keras_safe_ckpt.storage.formats import FORMATS
from keras_safe_ckpt.storage.keras_walk import quicker_walk
from keras_safe_ckpt.storage.lookup import checkpoints_of
from keras_safe_ckpt.storage.path_template import PathTemplate
from keras_safe_ckpt.storage.room import ensure_room
from keras_safe_ckpt.storage.shared_capture import _newest, shared_capture
from keras_safe_ckpt.storage.writer import BackgroundWriter
from keras_safe_ckpt.training.cadence import AnyOf, EveryEpoch, EverySeconds
from keras_safe_ckpt.training.keeping import Keeping

from keras.src.saving import saving_lib  # isort: skip

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


# What a restart finds


def test_files_of_others_that_fit_a_template_are_not_mentioned(no_warnings):
    tiny_model().save("77.keras")
    callback = SafeModelCheckpoint("{epoch}.keras", save_best_only=True)
    drive(callback, losses(0.5))
    assert files() == ["1.keras", "77.keras"]


def test_second_best_counts_if_the_best_is_damaged():
    drive(SafeModelCheckpoint("{epoch}.keras", save_best_only=True), losses(0.5, 0.3, 0.1))
    flip_a_bit("3.keras")
    callback = SafeModelCheckpoint("{epoch}.keras", save_best_only=True)
    with pytest.warns(UserWarning, match=r"3\.keras does not count as the best model"):
        drive(callback, losses(0.4), first_epoch=3)
    assert callback.best == 0.3
    assert files() == ["1.keras", "2.keras", "3.keras"]


def test_threshold_that_no_file_reaches_is_not_said_to_be_that_of_a_file(caplog):
    caplog.set_level(logging.INFO, "keras_safe_ckpt")
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.5))
    strict = SafeModelCheckpoint("m.keras", save_best_only=True, initial_value_threshold=0.3)
    drive(strict, losses(0.4))
    assert "Best so far" not in caplog.text
    assert "Nothing was saved" not in caplog.text


def test_the_newest_file_says_by_what_was_judged(no_warnings):
    drive(SafeModelCheckpoint("{epoch}.keras", "loss", max_to_keep=5), losses(0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=5), losses(0.4), first_epoch=1)
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=5), losses(0.3), first_epoch=2)
    assert files() == ["1.keras", "2.keras", "3.keras"]


def test_other_standard_does_not_matter_where_nothing_is_judged(no_warnings):
    drive(SafeModelCheckpoint("m.keras", "loss"), losses(0.5))
    drive(SafeModelCheckpoint("m.keras"), losses(0.4), first_epoch=1)
    assert weight("m.keras") == 2.0


def test_other_standard_of_another_series_does_not_matter(no_warnings):
    drive(SafeModelCheckpoint("{batch}.keras", "loss", save_freq=7), losses(0.1), batches=7)
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=5), losses(0.5))
    assert files() == ["1.keras", "7.keras"]


def test_best_of_before_is_in_the_log(caplog):
    caplog.set_level(logging.INFO, "keras_safe_ckpt")
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.5))
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.4), first_epoch=1)
    assert "Best so far: val_loss was 0.50000" in caplog.text
    assert "Nothing was saved" not in caplog.text  # Something was.


def test_worker_that_does_not_write_does_not_look_at_the_disk(monkeypatch, no_warnings):
    tiny_model().save("m.keras")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, write_policy="chief")
    drive(callback, losses(0.5))
    assert callback.best is None


def test_monitor_that_is_set_later_decides_what_is_on_the_disk():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    callback.monitor = "loss"
    drive(callback, [{"loss": 0.5, "val_loss": 0.1}])
    callback.on_train_begin()
    assert callback.best == 0.5
    callback.on_train_end()


def test_number_of_the_worker_in_the_name_does_not_hide_the_best_of_before(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    drive(SafeModelCheckpoint("w{worker}-{epoch}.keras", save_best_only=True), losses(0.1))
    callback = SafeModelCheckpoint("w{worker}-{epoch}.keras", save_best_only=True)
    drive(callback, losses(0.5), first_epoch=1)
    assert callback.best == 0.1
    assert files() == ["w1-1.keras"]


def test_process_that_is_alone_is_no_worker():
    drive(SafeModelCheckpoint("m.keras"), losses(0.5))
    (saved,) = CheckpointStore(".").checkpoints()
    assert saved.manifest.worker is None


# Which direction is better


def test_direction_that_was_given_before_is_forgotten():
    callback = SafeModelCheckpoint("{epoch}.keras", "novelty", mode="max")
    drive(callback, [{"novelty": 1.0}])
    callback.mode = "auto"
    drive(callback, [{"novelty": 1.0}], first_epoch=1)
    modes = [c.manifest.mode for c in CheckpointStore(".").checkpoints()]
    assert modes == ["max", None]


def test_unknown_direction_is_refused_where_files_are_deleted_by_it():
    callback = SafeModelCheckpoint("{epoch}.keras", monitor="novelty", max_to_keep=2)
    with pytest.raises(ValueError, match=r"novelty.*mode='max'"):
        drive(callback, [{"novelty": 1.0}])
    assert files() == []


def test_direction_is_found_out_by_whoever_ends_an_epoch_without_batches():
    model = tiny_model()
    model.compile("sgd", "mse", metrics=[keras.metrics.BinaryAccuracy(name="hits")])
    callback = SafeModelCheckpoint("m.keras", "hits", save_best_only=True)
    callback.set_model(model)
    callback.on_train_begin()
    model.train_on_batch(np.ones((1, 1)), np.ones((1, 1)))
    callback.on_epoch_end(0, {"hits": 0.5})
    callback.on_train_end()
    assert CheckpointStore(".").verify("m.keras").mode == "max"


# The best of the runs before


def test_file_of_a_run_before_without_a_value_is_overwritten():
    for value in (1.0, 2.0):
        model = tiny_model()
        callback = SafeModelCheckpoint("{epoch}.keras", max_to_keep=2, background=False)
        callback.set_model(model)
        callback.on_train_begin()
        set_weight(model, value)
        callback.on_epoch_end(0, {})
        callback.on_train_end()
    assert weight("1.keras") == 2.0


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        ([0.05], {"1.keras": 0.05, "2.keras": 0.5}),  # Better than the best itself.
        # Worse than the best, which makes way, and than one that is not.
        ([0.9, 0.6], {"1.keras": 0.9, "1~2.keras": 0.1, "2.keras": 0.6}),
    ],
)
def test_only_the_best_of_a_run_before_is_spared(again, expected):
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=5), losses(0.1, 0.5))
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=5), losses(*again))
    found = {
        c.path.name: c.manifest.metrics["val_loss"] for c in CheckpointStore(".").checkpoints()
    }
    assert found == expected


def test_best_of_a_run_before_is_that_of_its_own_series():
    drive(SafeModelCheckpoint("{batch}.keras", save_freq=7), losses(0.1), batches=7)
    for value in (0.5, 0.9):
        drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=5), losses(value))
    found = {
        c.path.name: c.manifest.metrics["val_loss"] for c in CheckpointStore(".").checkpoints()
    }
    assert found == {"1.keras": 0.9, "1~2.keras": 0.5, "7.keras": 0.1}


# What stays


def test_true_is_no_number_of_epochs():
    with pytest.raises(ValueError, match="keep_every=True"):
        Keeping(keep_every=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"max_to_keep": 1}, ["4.keras"]), ({"keep_every": 2}, ["2.keras", "4.keras"])],
)
def test_without_a_metric_the_other_rules_still_delete(options, expected):
    drive(SafeModelCheckpoint("{epoch}.keras", **options), [{}] * 4)
    assert files() == expected


# What the logs hold


def test_array_of_one_number_is_no_number():
    """Neither for the best, as in Keras, nor in the manifest, which a restart reads."""
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    with pytest.warns(UserWarning, match="scalar value"):
        drive(callback, [{"val_loss": np.ones(1)}])
    (saved,) = CheckpointStore(".").checkpoints()
    assert saved.manifest.metrics == {}
    assert callback.best is None


@pytest.mark.parametrize(
    "value", [np.float32(0.5), keras.ops.convert_to_tensor(0.5)], ids=["numpy", "tensor"]
)
def test_best_is_a_plain_number_whatever_the_logs_hold(value):
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    drive(callback, [{"val_loss": value}])
    assert type(callback.best) is float


def test_metric_that_is_missing_does_not_matter_where_nothing_is_judged(no_warnings):
    drive(SafeModelCheckpoint("m.keras"), [{"loss": 0.5}])
    drive(SafeModelCheckpoint("{epoch}.keras", max_to_keep=2), [{"loss": 0.5}])
    assert files() == ["1.keras", "m.keras"]


def test_metric_called_batch_goes_into_the_name_as_in_keras():
    names = {}
    for kind in (keras.callbacks.ModelCheckpoint, SafeModelCheckpoint):
        os.mkdir(kind.__name__)
        drive(kind(f"{kind.__name__}/{{batch}}.keras", save_freq=1), [{"batch": 77}])
        names[kind] = files(kind.__name__)
    assert list(names.values()) == [["77.keras"], ["77.keras"]]


def test_metric_called_epoch_does_not_go_into_the_name():
    drive(SafeModelCheckpoint("{epoch}.keras"), [{"epoch": 99}])
    assert files() == ["1.keras"]


def test_step_is_that_of_the_optimizer():
    model = tiny_model()
    x = np.ones((4, 1), "float32")
    for _ in range(5):
        model.train_on_batch(x, x)
    model.fit(x, x, batch_size=2, verbose=0, callbacks=[SafeModelCheckpoint("m.keras")])
    assert CheckpointStore(".").verify("m.keras").step == 7


# One after the other


def test_messages_keep_their_order(capsys):
    callback = SafeModelCheckpoint("{epoch}.keras", verbose=1)
    callback.set_model(tiny_model())
    callback.on_train_begin()
    lock = held_lock()
    lock.__enter__()
    callback.on_epoch_end(0, {})
    release_soon(lock)
    callback.on_epoch_end(1, {})
    callback.on_train_end()
    assert capsys.readouterr().out.split("\n") == [
        "",
        "Epoch 1: saving model to 1.keras",
        "",
        "Epoch 1: finished saving model to 1.keras",
        "",
        "Epoch 2: saving model to 2.keras",
        "",
        "Epoch 2: finished saving model to 2.keras",
        "",
    ]


class Watching(keras.layers.Layer):
    """Notes what is there at each capture of a whole model."""

    def __init__(self, **options):
        super().__init__(**options)
        self.there = {}

    def call(self, x):
        return x

    def get_config(self):
        self.there["now"] = files()
        return super().get_config()


def test_next_capture_is_made_when_the_save_before_is_durable():
    watching = Watching()
    callback = SafeModelCheckpoint("{epoch}.keras")
    callback.set_model(model_with(watching))
    callback.on_train_begin()
    lock = held_lock()
    lock.__enter__()
    callback.on_epoch_end(0, {})
    assert watching.there["now"] == []
    release_soon(lock)
    callback.on_epoch_end(1, {})
    callback.on_train_end()
    assert watching.there["now"] == ["1.keras"]


# When


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def by_the_clock(clock: Clock, **options) -> SafeModelCheckpoint:
    """Each epoch, and ten seconds after the last save."""
    path = "{epoch}-{batch}.keras"
    callback = SafeModelCheckpoint(path, save_every_seconds=10, background=False, **options)
    callback._cadence = AnyOf([EveryEpoch(), EverySeconds(10, clock)])
    callback.set_model(tiny_model())
    return callback


def test_seconds_count_from_the_beginning_of_the_training():
    clock = Clock()
    callback = by_the_clock(clock)
    clock.now += 60
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_train_batch_end(0, {})
    assert files() == []
    callback.on_train_end()


def test_seconds_count_from_the_last_save_for_whatever_reason():
    clock = Clock()
    callback = by_the_clock(clock)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    clock.now += 6
    callback.on_epoch_end(0, {})
    clock.now += 6
    callback.on_train_batch_end(0, {})
    assert files() == ["1-0.keras"]
    clock.now += 4
    callback.on_train_batch_end(1, {})
    assert files() == ["1-0.keras", "1-2.keras"]
    callback.on_train_end()


def test_seconds_do_not_count_from_what_was_not_worth_saving():
    clock = Clock()
    callback = by_the_clock(clock, save_best_only=True)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_epoch_end(0, {"val_loss": 0.5})
    clock.now += 6
    callback.on_epoch_end(1, {"val_loss": 0.9})
    clock.now += 6
    callback.on_epoch_begin(2)
    callback.on_train_batch_end(0, {"val_loss": 0.3})
    assert files() == ["1-0.keras", "3-1.keras"]
    callback.on_train_end()


class Resolver:
    """What a strategy would hand out; real workers are needed to build a real one."""

    task_type, task_id = "worker", 0

    def __init__(self, workers: list[str]) -> None:
        self._workers = workers

    def cluster_spec(self):
        return tf.train.ClusterSpec({"worker": self._workers})


def test_clock_of_a_synchronous_worker_that_is_alone_may_decide():
    kind = tf.distribute.MultiWorkerMirroredStrategy
    callback = SafeModelCheckpoint("m.keras", save_every_seconds=5)
    for workers in (["a:1"], ["a:1", "b:1"]):
        model = tiny_model()
        strategy = type("Together", (kind,), {"cluster_resolver": Resolver(workers)})
        model._distribute_strategy = strategy.__new__(strategy)
        callback.set_model(model)
        if len(workers) == 1:
            callback.on_train_begin()
            callback.on_train_end()
        else:
            with pytest.raises(ValueError, match="save_every_seconds=5"):
                callback.on_train_begin()


def test_batches_of_a_fit_before_are_not_counted():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    callback = SafeModelCheckpoint("m.keras")
    for _ in range(2):
        drive(callback, losses(0.1), model=model, batches=3)
        assert CheckpointStore(".").verify("m.keras").step == 3


# What is left of a run before


def test_interrupted_run_leaves_no_format_behind():
    callback = SafeModelCheckpoint("m.keras")
    callback.set_model(tiny_model())
    callback.on_train_begin()
    callback.on_epoch_end(0, {})  # And no end.
    callback.filepath, callback.save_weights_only = "m.weights.h5", True
    drive(callback, losses(0.5))
    assert files() == ["m.keras", "m.weights.h5"]
    assert weight("m.weights.h5") == 1.0


def large_model():
    """Of about 360 kB."""
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300)])
    model.compile("sgd", "mse")
    return model


def save_once(callback, model) -> None:
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_end(0, {})
    callback.on_train_end()


def test_size_of_another_model_is_not_asked_for(small_disk):
    disk = small_disk("size=256k")
    callback = SafeModelCheckpoint("m.weights.h5", save_weights_only=True)
    save_once(callback, large_model())
    callback.filepath = str(disk / "m.weights.h5")
    save_once(callback, tiny_model(3.0))
    assert weight(disk / "m.weights.h5") == 3.0


def test_size_of_another_series_is_not_asked_for(small_disk):
    disk = small_disk("size=640k")
    save_once(SafeModelCheckpoint(disk / "a.weights.h5", save_weights_only=True), large_model())
    callback = SafeModelCheckpoint(disk / "b.weights.h5", save_weights_only=True)
    save_once(callback, tiny_model(3.0))
    assert weight(disk / "b.weights.h5") == 3.0


def test_too_little_room_at_the_beginning_is_warned_of_if_errors_are(small_disk):
    disk = small_disk("size=640k")
    path = disk / "m.weights.h5"
    callback = SafeModelCheckpoint(path, save_weights_only=True, on_error="warn")
    save_once(callback, large_model())
    callback.on_train_begin()  # No error.
    with pytest.warns(UserWarning, match="needs about"):
        callback.on_train_batch_end(0, {})
    with pytest.warns(UserWarning, match="1 save failed"):
        callback.on_train_end()


def test_as_much_room_is_asked_for_as_the_newest_took(small_disk):
    disk = small_disk("size=640k")
    for first_epoch, model in enumerate([tiny_model(), large_model()]):
        callback = SafeModelCheckpoint(disk / "{epoch}.weights.h5", save_weights_only=True)
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_end(first_epoch, {})
        callback.on_train_end()
    assert files(disk) == ["1.weights.h5", "2.weights.h5"]
    with pytest.raises(CheckpointWriteError, match=r"needs about 3\d\d,\d\d\d bytes"):
        callback.on_train_begin()


class Counting(keras.layers.Layer):
    """Its configuration is asked for once in each capture of a whole model."""

    def __init__(self, **options):
        super().__init__(**options)
        self.captures = 0

    def call(self, x):
        return x

    def get_config(self):
        self.captures += 1
        return super().get_config()


def test_legacy_model_is_not_written_for_a_disk_without_room(small_disk):
    disk = small_disk("size=1m")
    counting = Counting()
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300), counting])
    callback = SafeModelCheckpoint(disk / "m.h5", background=False)
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_end(0, {})
    before = counting.captures
    assert before
    (disk / "ballast").write_bytes(bytes(500_000))
    with pytest.raises(CheckpointWriteError, match="needs about"):
        callback.on_epoch_end(1, {})
    assert counting.captures == before


def test_the_last_free_byte_may_be_used(small_disk):
    disk = small_disk("size=64k")
    free = shutil.disk_usage(disk).free
    ensure_room(disk / "m.keras", free)
    with pytest.raises(CheckpointWriteError, match="needs about"):
        ensure_room(disk / "m.keras", free + 1)


def test_store_asks_for_as_much_room_as_its_last_file_took(small_disk):
    """A file is more than its arrays: of a tiny model, nearly all of it."""
    disk = small_disk("size=64k")
    store = CheckpointStore(disk, format="keras")
    model = tiny_model()
    store.publish(model, step=1)
    (name,) = [name for name in files(disk) if name.endswith(".keras")]
    size = os.path.getsize(disk / name)
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - 8192))
    with pytest.raises(CheckpointWriteError, match=f"needs about {size:,} bytes"):
        store.publish(model, step=2)


def test_room_for_a_file_that_keras_built_is_asked_for(small_disk, tmp_path):
    store = CheckpointStore(small_disk("size=64k"), format="legacy_h5")
    snapshot = FORMATS["legacy_h5"].capture(large_model(), tmp_path)
    with pytest.raises(CheckpointWriteError, match=r"needs about 3\d\d,\d\d\d bytes"):
        store.publish(snapshot, step=1)


# One capture for several


class Worded(keras.layers.Layer):
    """Has an asset, as layers with a vocabulary do."""

    words = "old"

    def call(self, x):
        return x

    def save_assets(self, directory):
        with open(os.path.join(directory, "words.txt"), "w") as file:
            file.write(self.words)


class Remembering(keras.layers.Layer):
    """Saves what is not a variable."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = np.zeros(3, "float32")

    def call(self, x):
        return x

    def save_own_variables(self, store):
        store["seen"] = self.seen


def model_with(layer):
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), layer])


def test_changed_asset_is_captured_again():
    layer = Worded()
    model = model_with(layer)
    before = shared_capture(FORMATS["keras"], model, None)
    layer.words = "new"
    after = shared_capture(FORMATS["keras"], model, None)
    assert [*before.assets.values(), *after.assets.values()] == [b"old", b"new"]


def test_changed_array_that_is_no_variable_is_captured_again():
    layer = Remembering()
    model = model_with(layer)
    before = shared_capture(FORMATS["weights_h5"], model, None)
    layer.seen = np.ones(3, "float32")
    after = shared_capture(FORMATS["weights_h5"], model, None)
    (path,) = [path for path in before.arrays if path.endswith("/seen")]
    assert [s.host_arrays()[path].sum() for s in (before, after)] == [0.0, 3.0]


def test_models_that_are_gone_are_forgotten():
    for _ in range(3):
        shared_capture(FORMATS["weights_h5"], tiny_model(), None)
    gc.collect()
    model = tiny_model()
    shared_capture(FORMATS["weights_h5"], model, None)
    assert [taken.model() for taken in _newest.values() if taken.model() is None] == []


def test_classes_that_are_made_again_and_again_are_let_go():
    """What the quicker walk remembers of them does not grow for ever."""
    quicker = quicker_walk(saving_lib)

    def walk_a_new_class() -> weakref.ref:
        kind = type("Made", (), {"_obj_type": lambda self: "Layer"})
        list(saving_lib._walk_saveable(kind()))
        return weakref.ref(kind)

    with quicker():
        first = walk_a_new_class()
        for _ in range(10_000):
            walk_a_new_class()
        gc.collect()
        assert first() is None


# When a save fails


def test_damaged_file_is_judged_as_no_file_by_a_veto_of_the_users_own():
    store = CheckpointStore(".", format="keras")
    store.publish(tiny_model(1.0), step=1, name="m.keras")
    flip_a_bit("m.keras")
    asked = []

    def never(incumbent, new):
        asked.append(incumbent and incumbent.step)
        return "not today"

    assert store.publish(tiny_model(2.0), step=2, name="m.keras", veto=never) is None
    assert asked == [1, None]


class Hidden(PerWorker):
    def place(self, template, role):
        return ".m.keras"


def test_unfit_name_of_a_policy_of_the_users_own_is_found_before_training():
    callback = SafeModelCheckpoint("m.keras", write_policy=Hidden())
    callback.set_model(tiny_model())
    with pytest.raises(UnsafePathError):
        callback.on_train_begin()


def test_model_without_weights_is_not_saved_in_the_format_of_keras_2():
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="no weights yet"):
        FORMATS["legacy_h5"].capture(model, None)


def failing(**options) -> SafeModelCheckpoint:
    """Saves wait in vain for a lock that the caller holds."""
    callback = SafeModelCheckpoint("m.keras", locks=LockManager(timeout=0.05), **options)
    callback.set_model(tiny_model(1.0))
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    return callback


def test_error_is_raised_at_the_end_of_an_epoch_also_if_no_save_is_due():
    callback = failing(save_freq=1)
    with held_lock():
        callback.on_train_batch_end(0, {})
        wait_until(lambda: not saver_threads(), "the save gave up")
    with pytest.raises(LockTimeoutError):
        callback.on_epoch_end(0, {})


def test_end_that_is_told_twice_is_said_once():
    callback = failing(on_error="warn")
    with held_lock():
        callback.on_epoch_end(0, {})
        wait_until(lambda: not saver_threads(), "the save gave up")
    with pytest.warns(UserWarning, match="1 save failed"):
        callback.on_train_end()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_train_end()


# Interrupted and copied


def test_save_that_runs_when_its_start_is_interrupted_is_waited_for(monkeypatch):
    writer, begun, go, done = BackgroundWriter(), threading.Event(), threading.Event(), []
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        assert begun.wait(60)
        raise KeyboardInterrupt

    def save():
        begun.set()
        assert go.wait(60)
        done.append(1)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.submit(save)
    assert writer.busy
    go.set()
    writer.wait()
    assert done == [1]


def test_save_that_was_given_up_does_not_begin_later(monkeypatch):
    writer, ran, threads = BackgroundWriter(), [], []
    start = threading.Thread.start

    def interrupted(thread):
        threads.append(thread)  # The system lets it run only later.
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.submit(lambda: ran.append(1))
    writer.wait()
    start(threads[0])
    threads[0].join()
    assert ran == []


def test_next_run_begins_when_what_an_interrupted_one_left_is_durable():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    callback.set_model(tiny_model(1.0))
    callback.on_train_begin()
    lock = held_lock()
    lock.__enter__()
    callback.on_epoch_end(0, {"val_loss": 0.1})  # And no end.
    threading.Timer(0.2, lock.__exit__, (None, None, None)).start()
    callback.on_train_begin()
    assert files() == ["m.keras"]
    assert callback.best == 0.1
    callback.on_train_end()


class CountedLocks(LockManager):
    taken = 0

    def exclusive(self, *arguments, **options):
        self.taken += 1
        return super().exclusive(*arguments, **options)


def test_copy_uses_the_same_locks():
    locks = CountedLocks()
    copied = copy.copy(SafeModelCheckpoint("m.keras", locks=locks))
    drive(copied, losses(0.5))
    assert locks.taken == 1


def test_copy_counts_its_own_batches():
    callback = SafeModelCheckpoint("{epoch}-{batch}.keras", save_freq=2)
    callback.set_model(tiny_model())
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    copied = copy.copy(callback)
    callback.on_train_batch_end(0, {})
    copied.set_model(tiny_model())
    copied.on_train_batch_end(0, {})
    copied.on_train_end()
    assert files() == []
    callback.on_train_end()


def test_copy_made_during_training_is_not_in_that_training():
    callback = SafeModelCheckpoint("m.keras", background=False)
    callback.set_model(tiny_model(1.0))
    callback.on_train_begin()
    copied = copy.copy(callback)
    copied.set_model(tiny_model(2.0))
    copied.on_epoch_end(0, {})
    assert weight("m.keras") == 2.0
    callback.on_train_end()


def test_called_by_hand_without_logs():
    callback = SafeModelCheckpoint("m.keras", background=False)
    callback.set_model(tiny_model(1.0))
    callback.on_epoch_end(0)
    assert weight("m.keras") == 1.0


def test_best_that_is_set_becomes_a_plain_number():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    callback.best = np.float32(0.25)
    assert type(callback.best) is float


# Paths


def test_braces_in_the_name_are_those_of_the_file():
    os.mkdir("a{b}.keras")
    callback = SafeModelCheckpoint("a{{b}}.keras")
    callback.set_model(tiny_model())
    with pytest.raises(UnsafePathError, match="directory"):
        callback.on_train_begin()


def touch(*paths: str) -> None:
    for path in paths:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        open(path, "w").close()


def existing(text: str) -> list[str]:
    return [os.path.relpath(path) for path in PathTemplate(text).existing()]


def test_directory_of_a_file_in_the_root_is_the_root():
    template = PathTemplate("/m.keras")
    assert template.parent.text == "/"
    assert template.in_folder("worker-1").text == "/worker-1/m.keras"


@pytest.mark.parametrize("text", ["{epoch:3d}", "{epoch!s:3}", "{epoch!r}"])
def test_counts_that_are_padded_are_found_again(text):
    template = PathTemplate(f"{text}.keras")
    touch(template.fill({"epoch": 7}))
    assert existing(f"{text}.keras") == [template.fill({"epoch": 7})]


def test_files_below_a_directory_with_braces_are_found_again():
    touch("a{b}/1.keras")
    assert existing("a{{b}}/{epoch}.keras") == ["a{b}/1.keras"]


def test_file_beside_the_directories_of_a_template_is_not_mentioned(caplog):
    touch("run/1", "run/2/m.keras")
    assert existing("run/{epoch}/m.keras") == ["run/2/m.keras"]
    assert caplog.text == ""


def test_directory_that_no_one_can_list_hides_no_other_and_is_said(caplog):
    os.mkdir("run")
    os.symlink("1", "run/1")  # Round in a circle.
    touch("run/2/m.keras")
    assert existing("run/{epoch}/m.keras") == ["run/2/m.keras"]
    assert "run/1" in caplog.text


# Loading


class Pruned(PathTemplate):
    """Somebody deletes the files as soon as they are listed."""

    def existing(self):
        found = super().existing()
        for path in found:
            path.unlink()
        return found


def test_file_that_is_pruned_while_it_is_looked_for_is_not_mentioned():
    drive(SafeModelCheckpoint("m.keras"), losses(0.5))
    assert checkpoints_of(Pruned("m.keras"), lambda path, reason: pytest.fail(reason)) == []


def test_name_without_placeholders_is_what_it_is_whoever_saved_it():
    drive(SafeModelCheckpoint("{epoch}.keras"), losses(0.1))
    callback = SafeModelCheckpoint("1.keras", save_best_only=True)
    callback.set_model(tiny_model())
    callback.on_train_begin()
    assert callback.best == 0.1
    callback.on_train_end()


def test_newest_is_not_the_last_of_the_alphabet():
    drive(SafeModelCheckpoint("{epoch}.keras"), losses(0.5, 0.4), first_epoch=8)
    assert files() == ["10.keras", "9.keras"]
    assert weight(SafeModelCheckpoint.load_latest("{epoch}.keras")) == 10.0


def test_best_is_by_what_the_newest_says_unless_another_monitor_is_asked_for():
    logs = [{"loss": 0.1, "hits": 0.1}, {"loss": 0.2, "hits": 0.2}]
    drive(SafeModelCheckpoint("{epoch}.keras", "loss"), logs)
    drive(SafeModelCheckpoint("{epoch}.keras", "hits", mode="max"), logs, first_epoch=2)
    assert weight(SafeModelCheckpoint.load_best("{epoch}.keras")) == 4.0
    assert weight(SafeModelCheckpoint.load_best("{epoch}.keras", monitor="loss")) == 3.0


def test_model_of_another_series_is_not_loaded_because_its_name_fits():
    drive(SafeModelCheckpoint("{loss}.keras"), losses(0.5))
    drive(SafeModelCheckpoint("other.keras"), losses(0.1), first_epoch=6)
    assert weight(SafeModelCheckpoint.load_latest("{loss}.keras")) == 1.0
    assert weight(SafeModelCheckpoint.load_best("{loss}.keras")) == 1.0


class Unregistered(keras.layers.Layer):
    def call(self, x):
        return x


@pytest.mark.parametrize("load", [SafeModelCheckpoint.load_best, SafeModelCheckpoint.load_latest])
def test_objects_of_the_users_own_are_given_to_keras(load):
    drive(SafeModelCheckpoint("m.keras"), losses(0.5), model=unregistered_model())
    loaded = load("m.keras", custom_objects={"Unregistered": Unregistered})
    assert isinstance(loaded.layers[-1], Unregistered)


def unregistered_model():
    dense = keras.layers.Dense(1, use_bias=False)
    return keras.Sequential([keras.Input((1,)), dense, Unregistered()])


def test_best_of_one_worker_is_not_that_of_another(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, loss in enumerate([0.1, 0.5]):
        monkeypatch.setenv("RANK", str(rank))
        drive(SafeModelCheckpoint("m.keras"), losses(loss), first_epoch=rank)
    assert weight(SafeModelCheckpoint.load_best("m.keras")) == 2.0  # This is worker 1.
    monkeypatch.delenv("RANK")
    assert weight(SafeModelCheckpoint.load_best("m.keras")) == 1.0
    assert weight(SafeModelCheckpoint.load_best("m.keras", worker=1)) == 2.0
