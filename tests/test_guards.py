"""Each of these is what a single line is there for: a mutation check found it untested."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import warnings

import numpy as np
import pytest
import tensorflow as tf
from driven import drive, files, held_lock, losses, tiny_model, weight
from keras_setup import keras

from keras_safe_ckpt import (
    CheckpointStore,
    CheckpointWriteError,
    ChiefOnly,
    SafeModelCheckpoint,
    UnsafePathError,
)
from keras_safe_ckpt.callbacks import checkpoint_run
from keras_safe_ckpt.cluster.roles import Role, role_from_environment
from keras_safe_ckpt.storage import atomic, block_writer
from keras_safe_ckpt.storage.atomic import StagedFile, write_atomically
from keras_safe_ckpt.storage.block_writer import BLOCK_BYTES
from keras_safe_ckpt.storage.formats import FORMATS
from keras_safe_ckpt.storage.overlap import OverlappedWriter
from keras_safe_ckpt.storage.room import ensure_room
from keras_safe_ckpt.storage.shared_capture import is_current, shared_capture
from keras_safe_ckpt.storage.snapshot import Snapshot
from keras_safe_ckpt.training.cadence import AnyOf, EveryEpoch

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


# Blocks


class OutOfMemory:
    """A sink that fails, and not with what a disk says."""

    def write(self, offset: int, block: memoryview) -> None:
        raise MemoryError("no room for the block")

    def close(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_error_that_is_not_of_the_disk_is_raised_as_well():
    writer = OverlappedWriter(OutOfMemory())
    writer.write(0, memoryview(b"a"))
    with pytest.raises(MemoryError, match="no room for the block"):
        writer.drain()
    writer.close()


def test_file_that_took_the_name_is_not_left_open(tmp_path):
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.rename(tmp_path / "file", tmp_path / "moved")
    (tmp_path / "file").write_bytes(b"not ours")
    before = len(os.listdir("/proc/self/fd"))
    assert block_writer._open_direct(tmp_path / "file", descriptor) is None
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


def test_aligned_rest_of_a_short_write_goes_past_the_cache_as_well(tmp_path, monkeypatch):
    real, used = os.pwrite, []

    def short(descriptor: int, data: memoryview, offset: int) -> int:
        used.append(descriptor)
        return real(descriptor, data if len(used) > 1 else data[: 4096 * 3], offset)

    monkeypatch.setattr(os, "pwrite", short)
    # Whatever the file system can: which descriptor is used is the point.
    monkeypatch.setattr(block_writer, "_open_direct", lambda path, descriptor: os.dup(descriptor))
    content = random.Random(0).randbytes(BLOCK_BYTES)
    write_atomically(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content
    assert len(used) == 2
    assert used[0] == used[1]


# Staged files


def failing(*arguments: object) -> None:
    raise OSError(5, "Input/output error")


def test_lock_that_cannot_be_relaxed_is_no_reason_to_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "relax", failing)
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_temporary_file_that_cannot_be_removed_is_said_and_hides_no_error(
    tmp_path, monkeypatch, caplog
):
    staged = StagedFile(tmp_path / "file")
    monkeypatch.setattr(os, "unlink", failing)
    staged.rollback()
    assert f"Left {staged.temp_path} behind" in caplog.text


# The best


def test_threshold_holds_also_after_the_best_was_deleted():
    callback = SafeModelCheckpoint(
        "m.keras", save_best_only=True, initial_value_threshold=0.3, background=False
    )
    drive(callback, losses(0.1, 0.5), between=lambda epoch: epoch or os.remove("m.keras"))
    assert files() == []
    assert callback.best == 0.3


def test_best_of_before_that_is_deleted_during_training_is_no_best_any_more():
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.1))
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    drive(callback, losses(0.2, 0.5), between=lambda epoch: epoch or os.remove("m.keras"))
    assert weight("m.keras") == 2.0
    assert callback.best == 0.5


def test_best_of_another_process_that_is_deleted_during_training_is_no_best_any_more():
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, background=False)
    callback.set_model(tiny_model(1.0))
    callback.on_train_begin()
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.1))
    callback.on_epoch_end(0, {"val_loss": 0.3})
    assert callback.best == 0.1
    os.remove("m.keras")
    callback.on_epoch_end(1, {"val_loss": 0.2})
    callback.on_train_end()
    assert files() == ["m.keras"]
    assert callback.best == 0.2


def test_best_of_a_run_before_is_overwritten_as_in_keras_where_nothing_is_deleted():
    drive(SafeModelCheckpoint("{epoch}.keras"), losses(0.1))
    drive(SafeModelCheckpoint("{epoch}.keras"), losses(0.5))
    assert files() == ["1.keras"]


def test_run_replaces_what_it_named_itself():
    callback = SafeModelCheckpoint("{epoch}.keras", max_to_keep=5)
    callback.set_model(tiny_model())
    callback.on_train_begin()
    for value in (0.1, 0.5):  # The same epoch twice, as a loop of the user's own may do.
        callback.on_epoch_end(0, {"val_loss": value})
    callback.on_train_end()
    assert files() == ["1.keras"]


def test_save_that_another_process_turned_away_does_not_count_as_saved(caplog):
    drive(SafeModelCheckpoint("m.keras", save_best_only=True), losses(0.5))
    callback = SafeModelCheckpoint("m.keras", save_best_only=True)
    callback.set_model(tiny_model())
    callback.on_train_begin()
    other = SafeModelCheckpoint("m.keras", save_best_only=True, background=False)
    drive(other, losses(0.1), first_epoch=6)
    callback.on_epoch_end(0, {"val_loss": 0.3})
    caplog.clear()
    callback.on_train_end()
    assert weight("m.keras") == 7.0
    assert "never got better than 0.10000 of" in caplog.text
    assert "which this training did not write" in caplog.text


# Room


def test_room_is_asked_for_before_a_model_is_built(small_disk):
    path = small_disk("size=640k") / "m.weights.h5"
    model = keras.Sequential([keras.layers.Dense(300)])
    model.compile("sgd", "mse")
    callback = SafeModelCheckpoint(path, save_weights_only=True)
    model.build((None, 300))
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_end(0, {})
    callback.on_train_end()
    callback.set_model(keras.Sequential([keras.layers.Dense(300)]))
    with pytest.raises(CheckpointWriteError, match="needs about"):
        callback.on_train_begin()


def test_room_is_that_of_the_disk_on_which_directories_will_be_made(tmp_path):
    target = tmp_path / "not" / "there" / "yet" / "m.keras"
    ensure_room(target, 1)
    with pytest.raises(CheckpointWriteError, match="needs about"):
        ensure_room(target, 1 << 60)


def test_disk_that_cannot_be_asked_for_room_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", failing)
    with pytest.raises(CheckpointWriteError, match=r"m\.keras"):
        ensure_room(tmp_path / "m.keras", 1)


def test_step_that_found_no_room_is_said(tmp_path):
    with pytest.raises(CheckpointWriteError) as raised:
        ensure_room(tmp_path / "m.keras", 1 << 60, step=7)
    assert raised.value.step == 7


def save_once(callback, model) -> None:
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_end(0, {})
    callback.on_train_end()


def large_model():
    """Of about 360 kB."""
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.filterwarnings("ignore:You are saving your model")
def test_size_of_a_fit_before_to_another_path_is_not_asked_for(small_disk):
    disk = small_disk("size=200k")
    callback = SafeModelCheckpoint("large.h5")
    save_once(callback, large_model())
    callback.filepath = str(disk / "m.h5")
    save_once(callback, tiny_model())
    assert files(disk) == ["m.h5"]


def test_size_of_a_larger_file_of_another_series_is_not_asked_for(small_disk):
    disk = small_disk("size=640k")
    other = SafeModelCheckpoint(disk / "other.weights.h5", save_weights_only=True)
    save_once(other, large_model())
    callback = SafeModelCheckpoint(disk / "m{epoch}.weights.h5", save_weights_only=True)
    callback.set_model(large_model())
    callback.on_train_begin()  # No error: how much it needs is not known yet.
    callback.on_train_end()
    assert files(disk) == ["other.weights.h5"]


# One capture for all


def test_optimizer_that_is_built_in_between_is_captured_again():
    model = tiny_model()
    model.compile("adam", "mse")
    before = shared_capture(FORMATS["keras"], model, None)
    model.optimizer.build(model.trainable_variables)
    after = shared_capture(FORMATS["keras"], model, None)
    assert len(after.arrays) > len(before.arrays)


class OnAnotherDevice:
    """A variable whose address is that of a copy, which may lie where another copy lay."""

    backing_device = "/job:localhost/replica:0/task:0/device:GPU:0"

    def __init__(self, copy: np.ndarray) -> None:
        self.__array_interface__ = copy.__array_interface__

    def value(self) -> OnAnotherDevice:
        return self


def test_address_says_nothing_of_a_variable_on_another_device():
    copy = np.ones(3)
    snapshot = Snapshot({}, {"a": copy}, sources={"a": OnAnotherDevice(copy)})
    assert not is_current(snapshot)


# Several workers


class Resolver:
    """What a strategy would hand out; real workers are needed to build a real one."""

    task_type = "worker"

    def __init__(self, number: int) -> None:
        self.task_id = number

    def cluster_spec(self):
        return tf.train.ClusterSpec({"worker": ["a:1", "b:1"]})


def one_of_two(number, model):
    """The model as one of two workers that train it together has it."""
    kind = tf.distribute.MultiWorkerMirroredStrategy
    strategy = type("Together", (kind,), {"cluster_resolver": Resolver(number)})
    model._distribute_strategy = strategy.__new__(strategy)
    return model


def test_chief_is_who_the_cluster_says_and_not_the_first():
    assert ChiefOnly().writes(Role(1, 2, chief=True))
    assert not ChiefOnly().writes(Role(0, 2, chief=False))


@pytest.mark.parametrize(("job", "chief"), [("master", True), ("worker", False)])
def test_master_is_the_chief(job, chief):
    config = {"cluster": {"master": ["a:1"], "worker": ["b:1"]}, "task": {"type": job, "index": 0}}
    assert role_from_environment({"TF_CONFIG": json.dumps(config)}).chief is chief


class Unserializable(keras.layers.Layer):
    def call(self, x):
        return x

    def get_config(self):
        raise RuntimeError("no config")


def test_common_capture_that_fails_is_one_failure():
    layers = [keras.Input((1,)), keras.layers.Dense(1), Unserializable()]
    callback = SafeModelCheckpoint("m.keras", on_error="warn")
    callback.set_model(one_of_two(0, keras.Sequential(layers)))
    callback.on_train_begin()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        callback.on_epoch_end(0, {})
    with pytest.warns(UserWarning, match="1 save failed"):
        callback.on_train_end()
    assert files() == []
    with open("events.jsonl") as file:
        errors = [event for event in map(json.loads, file) if event["event"] == "error"]
    assert [event["kind"] for event in errors] == ["RuntimeError"]


def test_common_capture_that_fails_is_raised_also_where_nothing_is_written():
    layers = [keras.Input((1,)), keras.layers.Dense(1), Unserializable()]
    callback = SafeModelCheckpoint("m.keras")
    callback.set_model(one_of_two(1, keras.Sequential(layers)))
    callback.on_train_begin()
    with pytest.raises(RuntimeError, match="no config"):
        callback.on_epoch_end(0, {})


class Watching(keras.layers.Layer):
    """Notes what is there at each capture of a whole model."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = {"files": []}

    def call(self, x):
        return x

    def get_config(self):
        self.seen["files"].append(files())
        return super().get_config()


def watched(number, watching):
    return one_of_two(number, keras.Sequential([keras.Input((1,)), watching]))


def test_worker_that_does_not_write_takes_part_in_the_capture():
    watching = Watching()
    callback = SafeModelCheckpoint("m.keras")
    callback.set_model(watched(1, watching))
    callback.on_train_begin()
    callback.on_epoch_end(0, {})
    callback.on_train_end()
    assert watching.seen["files"]
    assert files() == []


def test_next_common_capture_is_made_when_the_save_before_is_durable():
    watching = Watching()
    callback = SafeModelCheckpoint("{epoch}.keras")
    callback.set_model(watched(0, watching))
    callback.on_train_begin()
    lock = held_lock()
    lock.__enter__()
    callback.on_epoch_end(0, {})
    threading.Timer(0.2, lock.__exit__, (None, None, None)).start()
    callback.on_epoch_end(1, {})
    callback.on_train_end()
    assert watching.seen["files"][-1] == ["1.keras"]
    assert files() == ["1.keras", "2.keras"]


# When, and how early


def test_each_of_several_cadences_counts_every_batch_and_epoch():
    counting = [Counting(), Counting()]
    cadence = AnyOf(counting)
    for batch in range(3):
        assert cadence.after_batch(batch)
    assert cadence.after_epoch()
    assert [one.seen for one in counting] == [4, 4]


class Counting(EveryEpoch):
    """Always due."""

    def __init__(self) -> None:
        self.seen = 0

    def after_batch(self, batch: int) -> bool:
        return self.after_epoch()

    def after_epoch(self) -> bool:
        self.seen += 1
        return True


def with_unknown_metric(**options):
    callback = SafeModelCheckpoint("m.keras", monitor="val_made_up", **options)
    callback.set_model(tiny_model())
    callback.on_train_begin()
    return callback


def test_metric_of_unknown_direction_is_found_after_the_first_batch():
    callback = with_unknown_metric(save_best_only=True)
    with pytest.raises(ValueError, match="mode"):
        callback.on_train_batch_end(0, {"loss": 0.5})


def test_metric_of_unknown_direction_that_decides_nothing_is_asked_for_once(monkeypatch):
    callback = with_unknown_metric()
    real, asked = checkpoint_run.better_direction, []
    monkeypatch.setattr(
        checkpoint_run, "better_direction", lambda one: asked.append(1) or real(one)
    )
    for batch in range(5):
        callback.on_train_batch_end(batch, {"loss": 0.5})
    callback.on_train_end()
    assert asked == [1]


def test_nan_is_warned_of_and_not_said_to_be_no_improvement(capsys):
    callback = SafeModelCheckpoint("m.keras", save_best_only=True, verbose=1)
    with pytest.warns(UserWarning, match="NaN"):
        drive(callback, losses(float("nan")))
    assert "did not improve" not in capsys.readouterr().out
    assert files() == []


def test_one_file_may_be_saved_by_batches_where_one_is_kept():
    drive(SafeModelCheckpoint("m.keras", save_freq=1, max_to_keep=1), losses(0.5, 0.4), batches=3)
    assert files() == ["m.keras"]


def test_workers_that_train_each_for_itself_may_save_by_seconds(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    callback = SafeModelCheckpoint("m.keras", save_every_seconds=3600)
    drive(callback, losses(0.5))
    assert files("worker-1") == ["m.keras"]


def test_weights_are_captured_once_for_two_who_save_weights():
    model = tiny_model()
    first = shared_capture(FORMATS["weights_h5"], model, None)
    assert shared_capture(FORMATS["weights_h5"], model, None) is first


def test_unsafe_target_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(UnsafePathError):
        StagedFile(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["link"]


def test_whole_model_is_not_made_of_a_snapshot_of_weights(tmp_path):
    snapshot = FORMATS["weights_h5"].capture(tiny_model(), None)
    store = CheckpointStore(tmp_path, format="keras")
    with pytest.raises(ValueError, match="whole model"):
        store.publish(snapshot, step=1)
    assert store.latest() is None
