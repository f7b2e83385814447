"""`SafeCheckpointManager`: as TensorFlow's, for any number of threads and processes."""

from __future__ import annotations

import inspect
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bundle_files import leftovers, names_in
from keras_setup import keras, tf
from redis_server import shared_redis

from keras_safe_ckpt import (
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    LockManager,
    LockTimeoutError,
    RedisLocks,
    SafeCheckpointManager,
    UnsafePathError,
)
from keras_safe_ckpt.storage.bundles.staging import StagedBundle
from keras_safe_ckpt.storage.events import EventLog

__all__ = ["shared_redis"]  # A fixture.

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


def checkpoint_of(value: float = 0.0) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(v=tf.Variable(value), w=tf.Variable(tf.zeros(100)))


# As TensorFlow's.


def test_the_signature_is_that_of_tensorflow():
    for method in ("__init__", "save"):
        theirs = inspect.signature(getattr(tf.train.CheckpointManager, method)).parameters
        ours = inspect.signature(getattr(SafeCheckpointManager, method)).parameters
        assert list(ours)[: len(theirs)] == list(theirs)
        for name, parameter in theirs.items():
            assert ours[name].default == parameter.default, name
    public = {name for name in vars(tf.train.CheckpointManager) if not name.startswith("_")}
    assert public <= set(vars(SafeCheckpointManager))
    manager = SafeCheckpointManager(checkpoint_of(), "d", 1)
    assert isinstance(manager, tf.train.CheckpointManager)


def test_the_documented_example():
    """https://www.tensorflow.org/guide/checkpoint, with either class."""
    theirs = documented_example(tf.train.CheckpointManager, "theirs")
    assert documented_example(SafeCheckpointManager, "ours") == theirs


def documented_example(kind, folder):
    """What the net has learned in the end."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.l1 = keras.layers.Dense(5)

        def call(self, x):
            return self.l1(x)

    def toy_dataset():
        inputs = tf.range(10.0)[:, None]
        labels = inputs * 5.0 + tf.range(5.0)[None, :]
        return tf.data.Dataset.from_tensor_slices({"x": inputs, "y": labels}).repeat().batch(2)

    def train_step(net, example, optimizer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(net(example["x"]) - example["y"]))
        variables = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def train_and_checkpoint(steps):
        keras.utils.set_random_seed(1)
        net, optimizer = Net(), keras.optimizers.Adam(0.1)
        net(tf.zeros((1, 1)))
        optimizer.build(net.trainable_variables)
        iterator = iter(toy_dataset())
        ckpt = tf.train.Checkpoint(
            step=tf.Variable(1), optimizer=optimizer, net=net, iterator=iterator
        )
        manager = kind(ckpt, f"./{folder}", max_to_keep=3)
        ckpt.restore(manager.latest_checkpoint)
        restored = int(ckpt.step)
        for _ in range(steps):
            example = next(iterator)
            train_step(net, example, optimizer)
            ckpt.step.assign_add(1)
            if int(ckpt.step) % 10 == 0:
                save_path = manager.save()
                assert save_path == f"./{folder}/ckpt-{int(ckpt.step) // 10}"
        return manager, restored, net

    manager, restored, _ = train_and_checkpoint(49)
    assert restored == 1
    assert manager.checkpoints == [f"./{folder}/ckpt-{n}" for n in (3, 4, 5)]
    manager, restored, net = train_and_checkpoint(50)
    assert restored == 50
    assert manager.latest_checkpoint == f"./{folder}/ckpt-10"
    assert manager.checkpoints == [f"./{folder}/ckpt-{n}" for n in (8, 9, 10)]
    assert tf.train.latest_checkpoint(f"./{folder}") == f"./{folder}/ckpt-10"
    return net.l1.bias.numpy().tolist()


def test_either_manager_goes_on_from_the_other(tmp_path):
    checkpoint = checkpoint_of()
    theirs = tf.train.CheckpointManager(checkpoint, str(tmp_path), 3)
    for value in (1.0, 2.0):
        checkpoint.v.assign(value)
        theirs.save()
    ours = SafeCheckpointManager(checkpoint, tmp_path, 3)
    assert ours.checkpoints == theirs.checkpoints
    for value in (3.0, 4.0):
        checkpoint.v.assign(value)
        ours.save()
    assert names_in(tmp_path) == ["ckpt-2", "ckpt-3", "ckpt-4"]
    other = checkpoint_of()
    theirs = tf.train.CheckpointManager(other, str(tmp_path), 2)
    assert theirs.restore_or_initialize() == str(tmp_path / "ckpt-4")
    assert other.v.numpy() == 4
    theirs.save()
    assert names_in(tmp_path) == ["ckpt-4", "ckpt-5"]
    assert ours.latest_checkpoint == str(tmp_path / "ckpt-5")


def test_a_restart_without_restoring_overwrites_nothing(tmp_path):
    SafeCheckpointManager(checkpoint_of(1), tmp_path, None).save()
    again = checkpoint_of(2)
    assert SafeCheckpointManager(again, tmp_path, None).save() == str(tmp_path / "ckpt-2")
    assert int(again.save_counter) == 2  # And the number is in the checkpoint, too.
    assert names_in(tmp_path) == ["ckpt-1", "ckpt-2"]


def test_a_number_of_the_users_is_used_as_it_is(tmp_path):
    checkpoint = checkpoint_of()
    manager = SafeCheckpointManager(checkpoint, tmp_path, 2)
    for number, value in ((5, 1.0), (tf.Variable(7), 2.0), (5, 3.0)):
        checkpoint.v.assign(value)
        manager.save(checkpoint_number=number)
    assert names_in(tmp_path) == ["ckpt-5", "ckpt-7"]
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-5")  # Saved last.
    assert manager.checkpoints == [str(tmp_path / "ckpt-7"), str(tmp_path / "ckpt-5")]
    manager.restore(tmp_path / "ckpt-7")
    assert checkpoint.v.numpy() == 2
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-5")
    assert checkpoint.v.numpy() == 3
    for number in (-1, 2**63):
        with pytest.raises(ValueError, match="checkpoint_number"):
            manager.save(checkpoint_number=number)
    # As long as it gets: nanoseconds, say.
    path = manager.save(checkpoint_number=1794918727550096123)
    assert manager.latest_checkpoint == path
    assert manager.save().endswith("-1794918727550096124")


def test_saves_at_an_interval(tmp_path):
    step = tf.Variable(0)
    checkpoint = tf.train.Checkpoint(step=step)
    manager = SafeCheckpointManager(
        checkpoint, tmp_path, None, step_counter=step, checkpoint_interval=3
    )
    saved = []
    for _ in range(8):
        saved.append(manager.save() is not None)
        step.assign_add(1)
    assert saved == [True, False, False, True, False, False, True, False]
    assert manager.save(check_interval=False) is not None
    assert manager.save(check_interval=False) is None  # Nothing new.
    # A restarted program counts from what it restores.
    again = SafeCheckpointManager(
        checkpoint, tmp_path, None, step_counter=step, checkpoint_interval=3
    )
    again.restore_or_initialize()
    assert again.save() is None


def test_a_failed_save_does_not_count_for_the_interval(tmp_path, monkeypatch):
    step = tf.Variable(0)
    manager = SafeCheckpointManager(
        tf.train.Checkpoint(step=step), tmp_path, None, step_counter=step, checkpoint_interval=3
    )
    monkeypatch.setattr(os, "replace", _broken_disk)
    with pytest.raises(CheckpointWriteError):
        manager.save()
    monkeypatch.undo()
    assert manager.save() is not None


def _broken_disk(*args: object) -> None:
    raise OSError(5, "Input/output error")


def test_nothing_to_restore_is_initialized(tmp_path):
    checkpoint = checkpoint_of()
    manager = SafeCheckpointManager(
        checkpoint, tmp_path / "new", 1, init_fn=lambda: checkpoint.v.assign(7.0)
    )
    assert manager.latest_checkpoint is None
    assert manager.checkpoints == []
    assert manager.restore() is None
    assert manager.restore_or_initialize() is None
    assert checkpoint.v.numpy() == 7


def test_options_callbacks_and_background(tmp_path):
    checkpoint, heard = checkpoint_of(), []
    manager = SafeCheckpointManager(checkpoint, tmp_path, 2)
    for background in (False, True, True):
        options = tf.train.CheckpointOptions(
            enable_async=background,
            experimental_write_callbacks=[heard.append, lambda: heard.append("done")],
        )
        path = manager.save(options=options)
        manager.sync()
        assert heard == [path, "done"]
        assert manager.latest_checkpoint == path
        assert len(options.experimental_write_callbacks) == 2
        heard.clear()
    assert names_in(tmp_path) == ["ckpt-2", "ckpt-3"]


def test_an_error_in_the_background_comes_back(tmp_path, monkeypatch):
    manager = SafeCheckpointManager(checkpoint_of(), tmp_path, 2)
    options = tf.train.CheckpointOptions(enable_async=True)
    monkeypatch.setattr(os, "replace", _broken_disk)
    manager.save(options=options)
    with pytest.raises(CheckpointWriteError):
        manager.sync()
    manager.save(options=options)
    with pytest.raises(CheckpointWriteError):
        manager.save(options=options)  # Who does not wait hears of it then.
    monkeypatch.undo()
    assert leftovers(tmp_path) == []
    manager.save(options=options)
    manager.sync()
    assert len(manager.checkpoints) == 1


def test_what_tensorflow_cannot_write_in_the_background_is_said(tmp_path, monkeypatch):
    checkpoint = checkpoint_of()
    manager = SafeCheckpointManager(checkpoint, tmp_path, 2)
    options = tf.train.CheckpointOptions(enable_async=True)
    monkeypatch.setattr(StagedBundle, "prefix", property(lambda self: "/proc/nowhere/ckpt"))
    manager.save(options=options)
    with pytest.raises(CheckpointWriteError, match="TensorFlow has not written it"):
        manager.sync()
    with pytest.raises(CheckpointWriteError, match="/proc/nowhere"):
        manager.save(options=options)
    assert leftovers(tmp_path) == []


def test_a_save_in_the_background_is_what_is_restored(tmp_path):
    checkpoint = checkpoint_of(3.0)
    manager = SafeCheckpointManager(checkpoint, tmp_path, 2)
    manager.save(options=tf.train.CheckpointOptions(enable_async=True))
    checkpoint.v.assign(4.0)
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert checkpoint.v.numpy() == 3


def test_the_checkpoint_of_version_1(tmp_path):
    checkpoint = tf.compat.v1.train.Checkpoint(v=tf.Variable(3.0))
    manager = SafeCheckpointManager(checkpoint, tmp_path, 2)
    manager.save()
    checkpoint.v.assign(4.0)
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert checkpoint.v.numpy() == 3


def test_in_a_graph(tmp_path):
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=1.0)
        manager = SafeCheckpointManager(tf.train.Checkpoint(v=variable), tmp_path, 2)
        with pytest.raises(RuntimeError, match="session"):
            manager.save()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for value in (1.0, 2.0, 3.0):
                session.run(variable.assign(value))
                manager.save(checkpoint_number=tf.constant(5) if value == 3 else None)
            assert names_in(tmp_path) == ["ckpt-2", "ckpt-5"]
            session.run(variable.assign(9.0))
            manager.restore().run_restore_ops()
            assert session.run(variable) == 3


# Whole, or not at all.


def test_a_damaged_one_is_passed_over_and_named(tmp_path, caplog):
    checkpoint = checkpoint_of()
    manager = SafeCheckpointManager(checkpoint, tmp_path, None)
    for value in (1.0, 2.0, 3.0):
        checkpoint.v.assign(value)
        manager.save()
    data = tmp_path / "ckpt-3.data-00000-of-00001"
    flipped = bytearray(data.read_bytes())
    flipped[10] ^= 1
    data.write_bytes(flipped)
    (tmp_path / "ckpt-2.data-00000-of-00001").unlink()
    # Whether a byte has changed is known only to who reads all of them.
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-3")
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert checkpoint.v.numpy() == 1
    assert "ckpt-3" in caplog.text
    checkpoint.v.assign(9.0)
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        manager.restore(tmp_path / "ckpt-3")
    with pytest.raises(CheckpointNotFoundError):
        manager.restore(tmp_path / "ckpt-8")
    (tmp_path / "ckpt-1.index").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"ckpt-1\n.*ckpt-2\n.*ckpt-3"):
        manager.restore_or_initialize()
    assert checkpoint.v.numpy() == 9  # Untouched.
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-3")


@pytest.mark.parametrize("text", ["", "\0", 'model_checkpoint_path: "ckpt-1"\n', None])
def test_a_state_file_that_lies(tmp_path, text):
    checkpoint = checkpoint_of()
    manager = SafeCheckpointManager(checkpoint, tmp_path, 3)
    for value in (1.0, 2.0, 3.0):
        checkpoint.v.assign(value)
        manager.save()
    state = tmp_path / "checkpoint"
    state.unlink() if text is None else state.write_text(text)
    again = SafeCheckpointManager(checkpoint_of(), tmp_path, 3)
    assert again.latest_checkpoint == str(tmp_path / "ckpt-3")
    again.restore_or_initialize()
    assert again.checkpoint.v.numpy() == 3
    assert again.save() == str(tmp_path / "ckpt-4")
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-4")


def test_a_full_disk_is_an_error_and_costs_nothing(small_disk):
    folder = small_disk("size=400k") / "ckpts"
    checkpoint = tf.train.Checkpoint(v=tf.Variable(tf.zeros(25_000)))  # 100 kB
    manager = SafeCheckpointManager(checkpoint, folder, None)
    for _ in range(2):
        manager.save()
    with pytest.raises(CheckpointWriteError, match=r"(?i)space|full|free"):
        deque(manager.save() for _ in range(10))
    saved = len(names_in(folder))
    assert 2 <= saved <= 4
    assert leftovers(folder) == []
    assert manager.restore_or_initialize() == str(folder / f"ckpt-{saved}")
    # A save that TensorFlow itself could not write, since nobody knew how large it would be.
    large = tf.train.Checkpoint(v=tf.Variable(tf.zeros(250_000)))
    with pytest.raises(CheckpointWriteError, match=r"(?i)space"):
        SafeCheckpointManager(large, folder, None, checkpoint_name="large").save()
    assert leftovers(folder) == []
    (folder / "ckpt-1.data-00000-of-00001").unlink()
    assert manager.save() is not None


# Many at once.


def test_a_thread_pool(tmp_path):
    checkpoint = checkpoint_of()
    shared = SafeCheckpointManager(checkpoint, tmp_path, 4)
    own = SafeCheckpointManager(checkpoint_of(), tmp_path, 4)
    stop, errors = threading.Event(), []

    def read() -> None:
        reader = SafeCheckpointManager(checkpoint_of(), tmp_path, 4)
        while not stop.is_set():
            try:
                reader.restore_or_initialize()
            except Exception as error:  # noqa: BLE001  # asserted below
                errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda n: (shared, own)[n % 2].save(), range(24)))
    stop.set()
    for thread in readers:
        thread.join(30)
    assert errors == []
    assert len(set(paths)) == 24
    assert len(names_in(tmp_path)) == 4
    assert leftovers(tmp_path) == []
    assert [e for e in EventLog(tmp_path).read() if e["event"] == "error"] == []


def test_a_reader_is_not_disturbed_and_does_not_disturb(tmp_path, monkeypatch):
    """Another process restores while this one saves and deletes."""
    monkeypatch.setattr("keras_safe_ckpt.storage.bundles.staging._READERS_SECONDS", 0.1)
    manager = SafeCheckpointManager(checkpoint_of(), tmp_path, 1)
    manager.save()
    reader = checkpoint_of()
    restore = reader.restore

    def slowly(path, options=None):
        manager.save()
        manager.save()
        assert Path(f"{path}.index").exists()
        return restore(path, options)

    monkeypatch.setattr(reader, "restore", slowly)
    reading = SafeCheckpointManager(reader, tmp_path, 1)
    assert reading.restore_or_initialize() == str(tmp_path / "ckpt-1")
    manager.save()
    assert names_in(tmp_path) == ["ckpt-4"]


def test_locks_of_redis(tmp_path, shared_redis):
    locks = RedisLocks(shared_redis.url)
    checkpoint = checkpoint_of()
    manager = SafeCheckpointManager(checkpoint, tmp_path, 2, locks=locks)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: manager.save(), range(6)))
    assert len(names_in(tmp_path)) == 2
    manager.restore_or_initialize()
    assert list(tmp_path.glob(".*lock")) == []
    assert manager.locks is locks


def test_whoever_holds_the_lock_is_named(tmp_path):
    locks = LockManager(timeout=0.1, worker="the other one")
    manager = SafeCheckpointManager(checkpoint_of(), tmp_path, 2, locks=LockManager(timeout=0.1))
    manager.save()
    with (
        locks.exclusive(tmp_path / "keras_safe_ckpt"),
        pytest.raises(LockTimeoutError, match="the other one"),
    ):
        manager.save()
    assert leftovers(tmp_path) == []
    manager.save()


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_to_keep": 0}, "max_to_keep to be a positive integer"),
        ({"max_to_keep": -1}, "Received: max_to_keep=-1"),
        ({"max_to_keep": True}, "max_to_keep"),
        ({"max_to_keep": 2.5}, "max_to_keep"),
        ({"keep_checkpoint_every_n_hours": "1"}, "keep_checkpoint_every_n_hours"),
        ({"keep_checkpoint_every_n_hours": float("nan")}, "keep_checkpoint_every_n_hours"),
        ({"checkpoint_interval": 3}, "step_counter"),
        ({"init_fn": 7}, "init_fn"),
        ({"checkpoint_name": 7}, "checkpoint_name"),
        ({"checkpoint_name": "a/b"}, "without any directory"),
        ({"checkpoint_name": ""}, None),
        ({"directory": "gs://bucket/x"}, "object stores"),
        ({"directory": "a\0b"}, "NUL"),
        ({"checkpoint": None}, "tf.train.Checkpoint"),
    ],
)
def test_bad_arguments_are_named_at_once(arguments, message):
    all_arguments = {"checkpoint": checkpoint_of(), "directory": "d", "max_to_keep": 1, **arguments}
    if message is None:
        SafeCheckpointManager(**all_arguments)  # TensorFlow takes it: "-1", "-2" and so on.
        return
    with pytest.raises(ValueError, match=message):
        SafeCheckpointManager(**all_arguments)
    assert not os.path.exists("d")


def test_a_model_is_to_be_wrapped():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"tf.train.Checkpoint\(model=model\)"):
        SafeCheckpointManager(model, "d", 1)


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnsafePathError, match="file"):
        SafeCheckpointManager(checkpoint_of(), tmp_path / "file", 1)
