"""`PreemptionAwareCallback` in one process: what each of its promises hangs on."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driven import flip_a_bit, held_lock, release_soon
from keras_setup import keras, mirrored_strategy, tf
from preempted_fit import (
    DATA,
    At,
    Bell,
    Told,
    X,
    Y,
    build,
    callback,
    events,
    interrupted_at,
    run_files,
    weights,
)
from processes import wait_until
from redis_server import shared_redis

from keras_safe_ckpt import (
    IncompatibleCheckpointError,
    PreemptionAwareCallback,
    RedisLocks,
    SafeModelCheckpoint,
)
from keras_safe_ckpt.errors import AgreementError
from keras_safe_ckpt.training.position import Position
from keras_safe_ckpt.training.progress_mark import ProgressMark

__all__ = ["shared_redis"]  # A fixture.

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    model = build()
    history = model.fit(epochs=3, **DATA).history
    return weights(model), history


def said_in(caught: Any, text: str) -> int:
    return sum(text in str(warning.message) for warning in caught)


def closed_for_saves(folder: str) -> Any:
    os.mkdir(folder)
    lock = held_lock(folder)
    lock.__enter__()
    return lock


def fail() -> None:
    raise RuntimeError("by design")


# Where a run goes on.


def test_a_damaged_newest_checkpoint_makes_way_for_the_one_before():
    interrupted_at("batch", 1, 2, save_freq=2, max_to_keep=3)
    files = run_files()
    flip_a_bit(f"state/{files[-1]}")
    log: list[Any] = []
    build().fit(epochs=2, callbacks=[callback(), At("batch", 9, 0, None), Told(log)], **DATA)
    (resumed,) = events("resume")
    assert resumed["file"] == files[-2]
    # Batch 3 of epoch 2 was the last before the notice, and the one before has batch 1.
    assert (resumed["epoch"], resumed["batch"], resumed["repeated"]) == (1, 1, 2)
    assert log == [1, 2, 3, 4, "end of 1"]


def test_what_is_repeated_after_a_failure_is_counted(capsys):
    with pytest.raises(RuntimeError, match="by design"):
        build().fit(epochs=3, callbacks=[callback(save_freq=3), At("batch", 1, 3, fail)], **DATA)
    rest = At("batch", 9, 0, None)
    build().fit(epochs=3, callbacks=[callback(verbose=1), rest], **DATA)
    (resumed,) = events("resume")
    # Of 8 batches that were finished, a backup has 6, or 3 if that one was still on its way.
    assert resumed["repeated"] == {6: 2, 3: 5}[resumed["step"]]
    assert f"{resumed['repeated']} batches are repeated" in capsys.readouterr().out


def test_where_no_mark_is_kept_what_is_repeated_is_not_known(capsys):
    interrupted_at("batch", 1, 2)
    os.unlink("state/.run-progress")
    os.mkdir("state/.run-progress")
    build().fit(epochs=2, callbacks=[callback(verbose=1), At("batch", 9, 0, None)], **DATA)
    assert events("resume")[0]["repeated"] is None
    assert "what came after it is repeated" in capsys.readouterr().out


def test_a_mark_outlives_its_process_and_nonsense_is_no_mark(tmp_path):
    path = tmp_path / "mark"
    mark = ProgressMark(path)
    assert mark.read() is None
    mark.write(7)  # Not open: nothing happens.
    assert not path.exists()
    mark.open()
    mark.write(7)
    assert ProgressMark(path).read() == 7
    mark.close()
    path.write_bytes(b"x" * 16)
    assert ProgressMark(path).read() is None
    path.write_bytes(b"")
    assert ProgressMark(path).read() is None
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    path.unlink()
    path.symlink_to(target)
    mark.open()
    mark.write(7)
    assert target.read_bytes() == b"precious"


def test_a_mark_on_a_full_disk_or_in_a_file_that_was_cut_stops_nothing(small_disk):
    """Mapped into memory, either would end the process by SIGBUS."""
    disk = small_disk("size=64k")
    early = ProgressMark(disk / "early")
    early.open()
    early.write(1)
    with open(disk / "rubbish", "wb", buffering=0) as file:
        while os.statvfs(disk).f_bavail:
            file.write(b"x" * 4096)
    late = ProgressMark(disk / "late")
    late.open()
    late.write(7)
    late.write(8)
    assert late.read() is None
    early.write(2)
    assert early.read() == 2
    os.truncate(disk / "early", 0)
    early.write(3)
    early.close()


def test_epochs_that_were_finished_are_not_read_again():
    read: list[int] = []

    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return X[2 * index : 2 * index + 2], Y[2 * index : 2 * index + 2]

    def fit(*callbacks: Any) -> None:
        build().fit(Rows(), shuffle=False, epochs=20, verbose=0, callbacks=list(callbacks))

    bell = Bell()
    fit(callback(bell), At("batch", 18, 2, bell.ring))
    read.clear()
    fit(callback(), At("batch", 9, 0, None))
    # Two epochs are left, and Keras looks at a batch now and then.
    assert len(read) < 40, "there are 90 batches before the epoch"


def test_a_notice_on_the_way_through_finished_epochs_is_not_kept_waiting():
    read: list[int] = []

    def rows() -> Any:
        while True:
            read.append(1)
            yield X[:2], Y[:2]

    def fit(*callbacks: Any) -> None:
        options = {"steps_per_epoch": 5, "epochs": 40, "verbose": 0}
        build().fit(rows(), callbacks=list(callbacks), **options)

    class Early(Bell):
        def start(self, desk: Any) -> None:
            super().start(desk)
            self.ring()

    bell = Bell()
    fit(callback(bell, save_freq=None), At("batch", 30, 2, bell.ring))
    before = run_files()
    read.clear()
    with pytest.raises(SystemExit):
        fit(callback(Early(), on_preempted="exit"), At("batch", 9, 0, None))
    assert len(read) < 100, "there are 150 batches before the epoch"
    assert events("preempted")[-1]["outcome"] == "nothing new to save"
    assert run_files() == before


def test_a_change_by_a_callback_is_undone_at_the_beginning_of_an_epoch_as_well(undisturbed):
    class Warm(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.set_weights([np.zeros_like(value) for value in self.model.get_weights()])

    with pytest.raises(RuntimeError, match="by design"):
        build().fit(epochs=3, callbacks=[callback(), At("batch", 1, 3, fail)], **DATA)
    model = build()
    model.fit(epochs=3, callbacks=[callback(), Warm(), At("batch", 9, 0, None)], **DATA)
    assert [event["batch"] for event in events("resume")] == [0]
    assert weights(model) == undisturbed[0]


def test_data_of_unknown_length_that_is_shorter_now_ends_the_epoch():
    def fit(rows: int, *callbacks: Any) -> None:
        data = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows]))
        data = data.filter(lambda x, y: True).batch(2)
        build().fit(data, epochs=3, verbose=0, callbacks=list(callbacks))

    bell = Bell()
    fit(10, callback(bell), At("batch", 1, 3, bell.ring))
    log: list[Any] = []
    with pytest.warns(UserWarning, match="The data ended after 2 of 4 steps"):
        fit(4, callback(), Told(log), At("batch", 9, 0, None))
    assert log == ["end of 1", 0, 1, "end of 2"]


def test_layers_that_are_not_built_are_built_for_the_checkpoint():
    """`model.build` of a model that does not say what it does leaves its layers for later."""

    class Late(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def build(self, shape: Any) -> None:
            self.built = True

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    def fit(*callbacks: Any) -> Any:
        keras.utils.set_random_seed(3)
        model = Late()
        model.compile("adam", "mse")
        model.build((None, 4))
        model.fit(epochs=2, callbacks=list(callbacks), **DATA)
        return weights(model)

    wanted = fit()
    bell = Bell()
    fit(callback(bell), At("batch", 1, 2, bell.ring))
    assert fit(callback(), At("batch", 9, 0, None)) == wanted


def test_one_of_several_workers_that_train_apart_has_a_folder_of_its_own(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    interrupted_at("batch", 1, 2)
    assert run_files("state/worker-1")
    assert run_files("state") == []


def test_locks_of_redis(shared_redis):
    locks = RedisLocks(shared_redis.url)
    interrupted_at("batch", 1, 2, locks=locks)
    assert not list(Path("state").glob(".*.lock"))
    log: list[Any] = []
    mine = callback(locks=RedisLocks(shared_redis.url))
    build().fit(epochs=2, callbacks=[mine, Told(log), At("batch", 9, 0, None)], **DATA)
    assert log == [3, 4, "end of 1"]


class Canary(keras.layers.Layer):
    """Counts how often it was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add(1)
        return inputs


@pytest.mark.parametrize(
    ("save_freq", "hook", "batch", "last"), [(1, "batch", 3, 8), ("epoch", "epoch", 1, 5)]
)
def test_it_does_what_backup_and_restore_does(save_freq, hook, batch, last):
    """The same model and callback after an error: what was trained is trained once."""
    model = keras.Sequential([keras.Input((4,)), Canary(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    mine = callback(save_freq=save_freq)
    with pytest.raises(RuntimeError, match="by design"):
        model.fit(epochs=4, callbacks=[mine, At(hook, 1, batch, fail)], **DATA)
    wait_until(lambda: f"run-{last:010d}.weights.h5" in run_files(), "the last backup is there")
    model.layers[0].count.assign(99)
    history = model.fit(epochs=4, callbacks=[mine, At("batch", 9, 0, None)], **DATA)
    assert model.layers[0].count.numpy() == 20
    assert history.epoch == [0, 1, 2, 3]
    assert events("resume")[0]["step"] == last
    assert run_files() == []


# What is saved, and when.


def test_backups_by_seconds_say_so():
    build().fit(epochs=1, callbacks=[callback(save_freq=None, save_every_seconds=1e-6)], **DATA)
    backups = events("backup")
    assert [event["batch"] for event in backups] == [1, 2, 3, 4, 5]
    assert {event["reason"] for event in backups} == {"1e-06 s have passed"}


def test_training_goes_on_while_a_backup_is_written():
    log: list[Any] = []
    at_the_lock: list[Any] = []

    def look() -> None:
        assert run_files() == []
        at_the_lock.extend(log)

    lock = closed_for_saves("state")
    looking = At("batch", 1, 2, lambda: (look(), lock.__exit__(None, None, None)))
    build().fit(epochs=2, callbacks=[Told(log), looking, callback()], **DATA)
    # The backup of the first epoch could not be published before this batch.
    assert at_the_lock[-2:] == [1, 2]


def test_how_long_batches_and_saves_take_is_measured():
    mine = callback(save_freq=1)
    pace: list[Any] = []

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            threading.Event().wait(0.05)

    keep = At("batch", 0, 4, lambda: pace.append(mine._run._pace))
    build().fit(epochs=1, callbacks=[mine, Slow(), keep], **DATA)
    assert pace[0].batch_seconds >= 0.05
    assert pace[0].save_seconds > 0


def test_a_backup_that_would_be_too_late_is_not_begun(capsys):
    bell = Bell()
    mine = callback(bell, save_freq=1, verbose=1)

    def ring() -> None:
        mine._run._pace.save_took(100.0)
        bell.ring(deadline=time.monotonic() + 300)  # It trains on, and saves no more.
        mine._run._pace.save_took(1000.0)

    build().fit(epochs=2, callbacks=[mine, At("batch", 0, 1, ring)], **DATA)
    assert [event["batch"] for event in events("backup")] == [1]
    out = capsys.readouterr().out
    assert out.count("No more backups: ") == 1
    assert "a save takes 1000.0 s" in out
    (preempted,) = events("preempted")
    assert preempted["outcome"].startswith("not saved: ")
    assert run_files() == ["run-0000000001.weights.h5"]


def test_a_notice_at_the_place_of_a_backup_waits_for_it():
    """Saved before: but it must be there before the process ends."""
    bell = Bell()
    mine = callback(bell, save_freq=3)
    lock = closed_for_saves("state")

    class Later(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            release_soon(lock)
            bell.ring()

    build().fit(
        epochs=2,
        callbacks=[Later(), mine],
        validation_data=(X[:2], Y[:2]),
        **{**DATA, "x": X[:6], "y": Y[:6]},
    )
    assert events("preempted")[0]["outcome"] == "saved before"
    assert run_files() == ["run-0000000003.weights.h5"]


def test_pending_saves_of_others_are_finished_before_exit_fn():
    bell = Bell()
    other = SafeModelCheckpoint("other/{epoch}.weights.h5", save_weights_only=True, save_freq=3)
    found: list[Any] = []
    lock = closed_for_saves("other")
    mine = callback(bell, exit_fn=lambda: found.extend(os.listdir("other")))

    def ring() -> None:
        release_soon(lock)
        bell.ring()

    build().fit(epochs=1, callbacks=[other, mine, At("batch", 0, 2, ring)], **DATA)
    assert "1.weights.h5" in found


def test_save_fn_is_all_that_saves_and_nothing_is_restored():
    interrupted_at("batch", 1, 2)
    shutil.copytree("state", "other")
    log: list[Any] = []
    mine = callback(save_fn=lambda: None, save_freq=1, save_every_seconds=1e-6)
    build().fit(epochs=1, callbacks=[mine, Told(log)], **DATA)
    assert log[0] == 0
    assert run_files() == run_files("other")
    assert events("backup") == events("backup", "other")


def test_a_save_fn_that_fails_is_said_and_no_backup_is_spoken_of():
    mine = interrupted_at("batch", 1, 2, save_fn=fail)
    assert mine.preempted is not None
    assert events("preempted")[0]["outcome"] == "not saved: by design"


def test_what_happens_has_its_duration():
    interrupted_at("batch", 1, 2)
    build().fit(epochs=2, callbacks=[callback(), At("batch", 9, 0, None)], **DATA)
    for name in ("backup", "save", "agreement", "preempted", "resume"):
        assert all(event["seconds"] > 0 for event in events(name)), name
        assert events(name), name


# A notice that leaves time.


@pytest.mark.parametrize("on_preempted", ["stop", "exit"])
def test_training_that_ends_in_time_is_there_after_a_restart(undisturbed, on_preempted):
    """The process will be gone before what comes after training: it must find what was trained."""
    bell = Bell()
    mine = callback(bell, on_preempted=on_preempted)
    ring = At("batch", 1, 2, lambda: bell.ring(deadline=time.monotonic() + 500))
    model = build()
    if on_preempted == "exit":
        with pytest.raises(SystemExit):
            model.fit(epochs=3, callbacks=[mine, ring], **DATA)
    else:
        model.fit(epochs=3, callbacks=[mine, ring], **DATA)
    assert mine.preempted == "bell: rings"
    assert weights(model) == undisturbed[0]
    log: list[Any] = []
    again = build()
    rest = At("batch", 9, 0, None)
    history = again.fit(epochs=3, callbacks=[callback(), Told(log), rest], **DATA)
    assert log == []
    assert (weights(again), history.history) == undisturbed


def test_an_evaluation_that_ends_in_time_asks_to_be_started_again_then():
    bell = Bell()
    ring = At("test", 0, 1, lambda: bell.ring(deadline=time.monotonic() + 500))
    log: list[Any] = []
    options = {"batch_size": 2, "verbose": 0, "callbacks": [ring, Told(log), callback(bell)]}
    assert build().evaluate(X, Y, **options) > 0
    assert log[-1] == "test 4"
    assert options["callbacks"][-1].preempted == "bell: rings"
    ring.done = False
    options["callbacks"][-1] = callback(bell, on_preempted="exit")
    with pytest.raises(SystemExit) as exit:
        build().evaluate(X, Y, **options)
    assert exit.value.code == 42
    assert log[-1] == "test 4"


def test_a_grace_period_of_zero_saves_at_once():
    mine = callback("SIGTERM", grace_period=0)
    ring = At("batch", 1, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    build().fit(epochs=3, callbacks=[mine, ring], **DATA)
    assert mine.preempted == "SIGTERM: received"
    assert events("preempted")[0]["outcome"] == "saved"


def test_a_second_signal_of_another_kind_stops_now():
    mine = callback(["SIGUSR1", "SIGUSR2"], grace_period=None)

    def both() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)

    build().fit(epochs=3, callbacks=[mine, At("batch", 1, 2, both)], **DATA)
    assert mine.preempted is not None
    assert events("preempted")[0]["outcome"] == "saved"


# The end.


@pytest.mark.parametrize("reason", ["rings", "Wartung um fünf"])
def test_a_screen_that_is_gone_does_not_lose_the_checkpoint(monkeypatch, reason):
    class Gone:
        encoding = "ascii"

        def write(self, text: str) -> int:
            text.encode("ascii")
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    mine = callback(lambda: reason if rings.is_set() else None, verbose=1)
    rings = threading.Event()

    def ring() -> None:
        rings.set()
        wait_until(lambda: bool(events("notice")), "it was noticed")

    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", Gone())
        build().fit(epochs=3, callbacks=[mine, At("batch", 0, 2, ring)], **DATA)
    assert mine.preempted is not None
    assert events("preempted")[0]["outcome"] == "saved"


def test_lines_for_backups_and_the_exit(capsys):
    with pytest.raises(SystemExit):
        interrupted_at("batch", 1, 2, verbose=1, on_preempted="exit", exit_code=7)
    lines = [line for line in capsys.readouterr().out.splitlines() if "[preemption]" in line]
    assert len(lines) == 4
    assert "Saving the end of epoch 1 in the background (backup; " in lines[0]
    assert lines[-1].startswith("[preemption] Saved (")
    assert lines[-1].endswith("; exit code 7")
    assert events("preempted")[0]["ending"] == "exit code 7"


def test_a_program_that_catches_the_exit_has_its_signals_back_at_the_next_fit():
    heard: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(SystemExit):
            interrupted_at("batch", 1, 2, notices=["SIGTERM", lambda: "now"], on_preempted="exit")
        build().fit(epochs=3, callbacks=[callback("SIGTERM"), At("batch", 9, 0, None)], **DATA)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, former)


# Other workers.


def test_a_step_that_fails_while_all_agree_leaves_what_was_held(undisturbed):
    """As it does when a worker has died in the collective of that step."""
    mine = callback()
    model = build()

    def break_the_step() -> None:
        run = mine._run
        run._held = run._capture()
        run._lookout.__class__ = type("Expecting", (type(run._lookout),), {"expects": True})

        def fails(iterator: Any) -> Any:
            raise tf.errors.UnavailableError(None, None, "a worker is gone")

        model.train_function = fails
        run._guard_steps()

    at = At("batch", 1, 2, break_the_step)
    with pytest.raises(tf.errors.UnavailableError):
        model.fit(epochs=3, callbacks=[at, mine], **DATA)
    (preempted,) = events("preempted")
    assert preempted["outcome"] == "saved, degraded: a step failed (a worker is gone)"
    assert (preempted["epoch"], preempted["batch"]) == (1, 3)
    assert AgreementError([], "x").reason == "x"


def test_saves_are_named_by_their_place():
    assert Position(2, 3).name == "2-3"
    assert not Position(2, 3).same_place(Position(2, 4))
    assert Position(2, 3, trained=True).same_place(Position(2, 3))
    assert not Position(3, ended=True).same_place(Position(3))


# Other callbacks.


def test_a_callback_that_nobody_knows_is_named_at_a_notice_as_well():
    class Counting(keras.callbacks.Callback):
        count = 0

        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1

    bell = Bell()
    mine = callback(bell, save_freq=None)
    with pytest.warns(UserWarning, match=r"not in the checkpoint: Counting-0 \(count\)"):
        build().fit(epochs=3, callbacks=[mine, Counting(), At("batch", 1, 2, bell.ring)], **DATA)


def test_the_counters_of_model_checkpoint_and_the_like_go_on():
    def fit(folder: str, *callbacks: Any) -> list[str]:
        keeping = keras.callbacks.ModelCheckpoint(
            folder + "/{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=4
        )
        build().fit(epochs=3, callbacks=[*callbacks, keeping], **DATA)
        return sorted(os.listdir(folder))

    os.mkdir("a")
    os.mkdir("b")
    wanted = fit("a")
    bell = Bell()
    fit("b", callback(bell), At("batch", 1, 1, bell.ring))
    assert fit("b", callback(), At("batch", 9, 0, None)) == wanted
    assert len(wanted) == 3


def test_safe_model_checkpoint_goes_on_counting():
    def fit(folder: str, *callbacks: Any) -> list[str]:
        keeping = SafeModelCheckpoint(
            folder + "/{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=4
        )
        build().fit(epochs=3, callbacks=[*callbacks, keeping], **DATA)
        return sorted(name for name in os.listdir(folder) if name.endswith(".weights.h5"))

    wanted = fit("a")
    bell = Bell()
    fit("b", callback(bell), At("batch", 1, 1, bell.ring))
    assert fit("b", callback(), At("batch", 9, 0, None)) == wanted
    assert len(wanted) == 3


@pytest.mark.parametrize(("hook", "batch"), [("batch", 2), ("test", 0), ("epoch", 1)])
def test_averages_that_are_in_the_model_for_the_validation(hook, batch):
    def fit(*callbacks: Any) -> Any:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
        swapping = keras.callbacks.SwapEMAWeights()
        history = model.fit(
            epochs=3, validation_data=(X, Y), callbacks=[swapping, *callbacks], **DATA
        )
        return weights(model), history.history

    wanted = fit()
    bell = Bell()
    mine = callback(bell)
    fit(mine, At(hook, 1, batch, bell.ring))
    assert mine.preempted is not None
    assert fit(callback(), At("batch", 9, 0, None)) == wanted


def test_the_counters_of_tensorboard_are_kept():
    from keras_safe_ckpt.training.callback_states import CallbackStates

    one, other = (keras.callbacks.TensorBoard("logs") for _ in range(2))
    one._global_train_batch, one._global_test_batch = 7, 3
    arrays: dict[str, Any] = {}
    kept = CallbackStates([one]).capture(arrays)
    CallbackStates([other]).restore(kept)
    assert (other._global_train_batch, other._global_test_batch) == (7, 3)


def test_the_columns_of_a_csv_file_stay_what_they_were():
    """Keras takes them from the first epoch of a process, in which there was a validation."""

    def fit(name: str, *callbacks: Any) -> str:
        csv = keras.callbacks.CSVLogger(name)
        # Its name comes after "val_": without a validation the columns have another order.
        model = build(metrics=[keras.metrics.MeanAbsoluteError(name="zmae")])
        validation = {"validation_data": (X, Y), "validation_freq": [1, 3]}
        model.fit(epochs=3, callbacks=[*callbacks, csv], **validation, **DATA)
        return Path(name).read_text()

    wanted = fit("a.csv")
    bell = Bell()
    fit("b.csv", callback(bell), At("batch", 1, 2, bell.ring))
    assert fit("b.csv", callback(), At("batch", 9, 0, None)) == wanted


def test_a_csv_file_that_cannot_be_asked_for_its_size_stops_nothing(tmp_path):
    bell = Bell()
    csv = keras.callbacks.CSVLogger("log.csv")

    def go_elsewhere() -> None:
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")

    mine = callback(bell)
    moving = At("batch", 0, 1, go_elsewhere)
    ring = At("batch", 1, 2, bell.ring)
    build().fit(epochs=3, callbacks=[mine, csv, moving, ring], **DATA)
    os.chdir(tmp_path)
    assert mine.preempted is not None
    assert len(Path("log.csv").read_text().splitlines()) == 2
    build().fit(
        epochs=3,
        callbacks=[callback(), keras.callbacks.CSVLogger("log.csv"), moving, ring],
        **DATA,
    )
    assert len(Path("log.csv").read_text().splitlines()) == 4


def test_weights_of_half_precision_in_the_state_of_a_callback():
    def fit(*callbacks: Any) -> Any:
        keras.utils.set_random_seed(3)
        dtype = {"dtype": "bfloat16"}
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, **dtype)])
        model.compile("sgd", "mse")
        stopping = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
        model.fit(epochs=3, callbacks=[*callbacks, stopping], **DATA)
        return weights(model)

    wanted = fit()
    bell = Bell()
    fit(callback(bell), At("batch", 1, 2, bell.ring))
    assert fit(callback(), At("batch", 9, 0, None)) == wanted


# Said, or refused.


@pytest.mark.parametrize("how", ["distribute", "from function"])
def test_an_unseeded_shuffle_in_a_distributed_dataset_is_said(how):
    strategy = mirrored_strategy()

    def data(context: Any = None) -> Any:
        return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9).batch(2)

    tf.random.set_seed(None)
    if how == "distribute":
        distributed = strategy.experimental_distribute_dataset(data())
    else:
        distributed = strategy.distribute_datasets_from_function(data)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"shuffle\(\) without a seed"):
        model.fit(distributed, epochs=1, verbose=0, callbacks=[callback()])


def test_a_shuffle_by_the_global_seed_is_not_complained_of():
    model = build()  # Sets the global seed.
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9).batch(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, epochs=1, verbose=0, callbacks=[callback()])
    assert said_in(caught, "restart") == 0


def test_validation_data_that_changes_by_itself_is_said():
    class Plain(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return X[:2], Y[:2]

    class Changing(Plain):
        def on_epoch_end(self) -> None:
            return None

    for kind, times in ((Plain, 0), (Changing, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build().fit(epochs=1, validation_data=kind(), callbacks=[callback()], **DATA)
        assert said_in(caught, "The validation data is a PyDataset with on_epoch_begin") == times


def test_optimizers_and_variables_that_keras_does_not_know_of_are_named():
    model = build()
    model.pair = {"one": keras.optimizers.SGD(), "two": [keras.optimizers.SGD()]}
    model.layers[0].count = tf.Variable(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(epochs=1, callbacks=[callback()], **DATA)
    assert said_in(caught, "not built yet: pair['one'], pair['two'][0]") == 1
    assert said_in(caught, f"does not save: {model.layers[0].name}.count") == 1


def test_off_the_main_thread_it_is_said_once_for_all(caplog, monkeypatch):
    monkeypatch.setattr("keras_safe_ckpt.preemption.signals._said_off_main_thread", False)

    def train() -> None:
        for _ in range(2):
            build().fit(epochs=1, callbacks=[callback("SIGTERM")], **DATA)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert caplog.text.count("does not run on the main thread") == 1


def test_a_model_with_one_more_seed_is_refused_and_left_alone():
    interrupted_at("batch", 1, 2)
    other = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3),
            keras.layers.Dense(1),
            keras.layers.Dropout(0.5),
        ]
    )
    other.compile("adam", "mse")
    other.optimizer.build(other.trainable_variables)
    before = weights(other), [v.numpy().tobytes() for v in other.optimizer.variables]
    with pytest.raises(IncompatibleCheckpointError, match="seeds/0"):
        other.fit(epochs=3, callbacks=[callback()], **DATA)
    assert (weights(other), [v.numpy().tobytes() for v in other.optimizer.variables]) == before


@pytest.mark.parametrize("directory", [None, "", 3])
def test_a_directory_that_is_none(directory):
    with pytest.raises(ValueError, match="directory to be the path of a folder"):
        PreemptionAwareCallback(directory)


@pytest.mark.parametrize("verbose", ["auto", 3, None])
def test_verbose_is_checked_at_once(verbose):
    with pytest.raises(ValueError, match="verbose to be 0, 1 or 2"):
        PreemptionAwareCallback("state", verbose=verbose)


def test_an_event_log_full_of_nonsense_does_not_matter(caplog):
    interrupted_at("batch", 1, 2)
    Path("state/events.jsonl").write_text('{}\n[]\n{"event": 3}\nnonsense\n')
    log: list[Any] = []
    build().fit(epochs=2, callbacks=[callback(), Told(log), At("batch", 9, 0, None)], **DATA)
    assert log == [3, 4, "end of 1"]
    shutil.rmtree("state")
    interrupted_at("batch", 1, 2)
    os.unlink("state/events.jsonl")
    os.mkdir("state/events.jsonl")
    log.clear()
    with caplog.at_level(logging.WARNING):
        build().fit(epochs=2, callbacks=[callback(), Told(log), At("batch", 9, 0, None)], **DATA)
    assert log == [3, 4, "end of 1"]
    assert caplog.text.count("events are lost") >= 1
