"""`PreemptionAwareCallback` in one process: what it is told, what it says, what it refuses."""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driven import flip_a_bit
from keras_setup import keras, tf
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

from keras_safe_ckpt import (
    CheckpointStore,
    CheckpointWriteError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    LockManager,
    LockTimeoutError,
    PreemptionAwareCallback,
    UnsafePathError,
)
from keras_safe_ckpt.callbacks import preemption_run, run_facts
from keras_safe_ckpt.training import keras_fit

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    model = build()
    history = model.fit(epochs=3, **DATA).history
    return weights(model), history


# Stopping and going on.


def test_fit_stops_after_the_batch_and_goes_on_there(undisturbed):
    log: list[Any] = []
    bell = Bell()
    mine = callback(bell)
    stopped = build()
    at = At("batch", 1, 2, bell.ring)
    history = stopped.fit(epochs=3, callbacks=[Told(log), at, mine], **DATA)
    assert mine.preempted == "bell: rings"
    # The epoch that is not whole is nobody's business.
    assert history.epoch == [0]
    assert log == [0, 1, 2, 3, 4, "end of 0", 0, 1, 2]
    assert run_files() == ["run-0000000005.weights.h5", "run-0000000008.weights.h5"]

    again = build()
    mine = callback(Bell())
    history = again.fit(epochs=3, callbacks=[Told(log), mine], **DATA)
    assert mine.preempted is None
    assert log[9:] == [3, 4, "end of 1", 0, 1, 2, 3, 4, "end of 2"]
    assert (weights(again), history.history) == undisturbed
    assert history.epoch == [0, 1, 2]
    assert run_files() == []


def test_an_interrupted_validation_is_all_that_is_repeated(undisturbed):
    log: list[Any] = []
    interrupted_at("test", 1, 1)
    model = build()
    history = model.fit(
        epochs=3,
        validation_data=(X, Y),
        validation_batch_size=2,
        callbacks=[callback(), Told(log)],
        **DATA,
    )
    assert log[:6] == [*(f"test {batch}" for batch in range(5)), "end of 1"]
    assert weights(model) == undisturbed[0]
    assert history.history["loss"] == undisturbed[1]["loss"]
    assert len(history.history["val_loss"]) == 3


def test_a_notice_when_training_has_ended_is_kept_for_the_next_start(undisturbed):
    mine = interrupted_at("train", 2, 0)
    assert mine.preempted is not None
    assert len(run_files()) == 2
    log: list[Any] = []
    model = build()
    history = model.fit(epochs=3, callbacks=[callback(), Told(log)], **DATA)
    assert log == []
    assert (weights(model), history.history) == undisturbed
    assert run_files() == []


def test_a_notice_on_the_way_back_saves_nothing_and_loses_nothing(undisturbed):
    interrupted_at("batch", 1, 2)
    bell = Bell()
    mine = callback(bell)

    class Early(Bell):
        def start(self, desk: Any) -> None:
            super().start(desk)
            self.ring()  # Before the first batch.

    mine = callback(Early())
    build().fit(epochs=3, callbacks=[mine], **DATA)
    assert mine.preempted is not None
    assert events("preempted")[-1]["outcome"] == "nothing new to save"
    model = build()
    history = model.fit(epochs=3, callbacks=[callback()], **DATA)
    assert (weights(model), history.history) == undisturbed


def test_the_same_callback_and_model_can_be_used_again():
    mine = callback()
    model = build()
    model.fit(epochs=2, callbacks=[mine], **DATA)
    # Keras keeps the epoch to begin at in the model.
    interrupted_at("batch", 1, 2, directory="other")
    log: list[Any] = []
    other = callback(directory="other")
    model = build()
    model.fit(epochs=2, callbacks=[other, Told(log)], **DATA)
    assert log == [3, 4, "end of 1"]
    log.clear()
    model.fit(epochs=1, callbacks=[other, Told(log)], **DATA)
    assert log == [0, 1, 2, 3, 4, "end of 0"]


def test_exit_code_exit_fn_and_save_fn():
    with pytest.raises(SystemExit) as exit:
        interrupted_at("batch", 0, 1, on_preempted="exit")
    assert exit.value.code == 42
    with pytest.raises(SystemExit) as exit:
        interrupted_at("batch", 0, 1, on_preempted="exit", exit_code=7, directory="b")
    assert exit.value.code == 7
    called: list[str] = []
    interrupted_at("batch", 0, 1, exit_fn=lambda: called.append("exit"), directory="c")
    assert called == ["exit"]
    interrupted_at("batch", 0, 1, save_fn=lambda: called.append("save"), directory="d")
    assert called == ["exit", "save"]
    assert run_files("d") == []


def test_a_termination_config_of_tensorflow_is_taken_as_it_is():
    rings = threading.Event()
    called: list[str] = []
    config = tf.distribute.experimental.TerminationConfig(
        termination_watcher_fn=rings.is_set,
        exit_fn=lambda: called.append("exit"),
        save_fn=lambda: called.append("save"),
        grace_period=5,
    )
    mine = callback(config)

    def wait_for_the_poll() -> None:
        rings.set()
        wait_until(lambda: bool(events("notice")), "the function was asked")

    model = build()
    model.fit(epochs=3, callbacks=[At("batch", 0, 0, wait_for_the_poll), mine], **DATA)
    assert called == ["save", "exit"]
    assert 4 < events("notice")[0]["seconds_left"] <= 5


def test_a_function_is_asked_and_may_say_why():
    mine = callback(lambda: "the moon is full")

    def wait() -> None:
        wait_until(lambda: bool(events("notice")), "the function was asked")

    build().fit(epochs=3, callbacks=[At("batch", 0, 0, wait), mine], **DATA)
    assert mine.preempted == "<lambda>: the moon is full"


def test_what_happens_is_one_line_each_and_an_event(capsys):
    interrupted_at("batch", 1, 2, verbose=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "[preemption]" in line]
    assert [line.partition("] ")[2].partition(" (")[0] for line in lines] == [
        "Saving the end of epoch 1 in the background",
        "Notice from bell: rings",
        "Stopping after epoch 2, batch 3",
        "Saved",
    ]
    kinds = [event["event"] for event in events()]
    assert kinds == ["begin", "backup", "save", "notice", "agreement", "save", "preempted"]
    build().fit(epochs=3, callbacks=[callback(verbose=1)], **DATA)
    line, *_ = [line for line in capsys.readouterr().out.splitlines() if "[preemption]" in line]
    assert "Resumed at epoch 2, batch 3 from run-0000000008.weights.h5" in line
    assert "0 batches are repeated" in line
    (resumed,) = events("resume")
    assert (resumed["repeated"], resumed["dropped"], resumed["epoch"]) == (0, 3, 1)
    assert [event["event"] for event in events()][-1] == "finished"


def test_verbose_0_says_nothing(capsys):
    interrupted_at("batch", 1, 2)
    assert capsys.readouterr().out == ""


def test_the_progress_bar_goes_on_at_the_batch(capsys):
    interrupted_at("batch", 1, 2)
    build().fit(epochs=2, callbacks=[callback()], **{**DATA, "verbose": 1})
    out = capsys.readouterr().out
    assert "Epoch 2/2" in out
    assert "Epoch 1/2" not in out
    assert "4/5" in out.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "3/5" not in out.replace("\x1b[1m", "").replace("\x1b[0m", "")


# Other callbacks.


class Counting(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1


class Kept(Counting):
    def get_state(self) -> dict[str, Any]:
        return {"count": self.count, "array": np.arange(3), ("a", 1): None}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["array"].tolist() == [0, 1, 2]
        assert state[("a", 1)] is None
        self.count = state["count"]


def test_state_of_callbacks_is_kept_and_an_unknown_one_is_named():
    bell = Bell()
    first, unknown = Kept(), Counting()
    with pytest.warns(UserWarning, match=r"state is not in the checkpoint: Counting-0 \(count\)"):
        build().fit(
            epochs=3,
            callbacks=[callback(bell), first, unknown, At("batch", 1, 2, bell.ring)],
            **DATA,
        )
    second = Kept()
    build().fit(epochs=3, callbacks=[second, callback(), At("batch", 9, 0, None)], **DATA)
    assert second.count == 15
    assert first.count == 8


def test_an_unknown_callback_is_named_once_and_a_quiet_one_never():
    quiet = keras.callbacks.Callback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build().fit(epochs=3, callbacks=[callback(), Counting(), quiet], **DATA)
    said = [str(w.message) for w in caught if "state is not in" in str(w.message)]
    assert len(said) == 1
    assert "Callback-0" not in said[0].replace("Counting-0", "")


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_first_save():
    class Bad(Kept):
        def get_state(self) -> Any:
            return {"file": object()}

    with pytest.raises(
        TypeError, match=r"The state of Bad-0 cannot be put into a checkpoint.*file"
    ):
        build().fit(epochs=2, callbacks=[callback(), Bad()], **DATA)


def test_callbacks_that_came_or_went_are_named():
    interrupted_at("batch", 1, 2)
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    with pytest.warns(UserWarning, match="the list|begin anew") as caught:
        build().fit(epochs=3, callbacks=[callback(), stopping], **DATA)
    said = " ".join(str(w.message) for w in caught)
    assert "not in the list any more, which is dropped: At-0" in said
    assert "begin anew: EarlyStopping-0" in said


def test_a_csv_file_that_lost_lines_is_said():
    bell = Bell()
    csv = keras.callbacks.CSVLogger("log.csv")
    build().fit(epochs=3, callbacks=[callback(bell), csv, At("batch", 1, 2, bell.ring)], **DATA)
    whole = Path("log.csv").read_text()
    assert len(whole.splitlines()) == 2
    Path("log.csv").write_text("")
    with pytest.warns(UserWarning, match=r"log\.csv has 0 bytes, and had \d+"):
        build().fit(epochs=3, callbacks=[callback(), keras.callbacks.CSVLogger("log.csv")], **DATA)


def test_the_order_of_callbacks_does_not_matter(undisturbed):
    """CSVLogger truncates its file when training begins, EarlyStopping forgets what it knew."""
    for front in (True, False):
        folder = f"state-{front}"
        log = f"log-{front}.csv"

        def others(log: str = log) -> list[Any]:
            stopping = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=99.0)
            return [keras.callbacks.CSVLogger(log), stopping]

        bell = Bell()
        mine = callback(bell, directory=folder)
        ring = At("batch", 1, 2, bell.ring)
        everybody = [mine, *others(), ring] if front else [*others(), ring, mine]
        build().fit(epochs=5, callbacks=everybody, **DATA)
        mine = callback(directory=folder)
        rest = [*others(), At("batch", 9, 0, None)]
        history = build().fit(epochs=5, callbacks=[mine, *rest] if front else [*rest, mine], **DATA)
        # The first epoch is the best, the second one is one too many.
        assert history.epoch == [0, 1]
        lines = Path(log).read_text().splitlines()
        assert [line.partition(",")[0] for line in lines] == ["epoch", "0", "1"]


def test_a_callback_that_changes_the_model_at_the_beginning_is_overruled(undisturbed):
    class Warm(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.set_weights([np.zeros_like(value) for value in self.model.get_weights()])

    interrupted_at("batch", 1, 2)
    model = build()
    model.fit(epochs=3, callbacks=[callback(), Warm()], **DATA)
    assert weights(model) == undisturbed[0]


# What cannot be exact is said.


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"x": X, "y": Y, "batch_size": 2}, "shuffled without a seed"),
        ({"x": tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9).batch(2)}, "without a seed"),
        ({"x": ((X, Y) for _ in range(99)), "steps_per_epoch": 2}, "a Python generator"),
    ],
)
def test_what_a_restart_cannot_keep_is_said_once(data, said, monkeypatch):
    model = build()
    monkeypatch.setattr(run_facts, "global_seed_is_set", lambda: False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(epochs=3, verbose=0, callbacks=[callback()], **data)
    assert sum(said in str(warning.message) for warning in caught) == 1


def test_seeded_data_is_not_complained_of():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9, seed=1).batch(2)
    model = build()  # Sets the global seed.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, epochs=1, verbose=0, callbacks=[callback()])
        model.fit(X, Y, batch_size=2, epochs=1, verbose=0, callbacks=[callback()])
    assert [str(w.message) for w in caught if "restart" in str(w.message)] == []


def test_a_keras_that_hides_everything(monkeypatch, undisturbed, caplog):
    """Without its list and data: the same weights for data in a fixed order, and it is said."""
    for module in (keras_fit, preemption_run):
        monkeypatch.setattr(module, "find_fit", keras_fit.FitAround)
    monkeypatch.setattr("keras_safe_ckpt.callbacks.preemption.find_fit", keras_fit.FitAround)
    with pytest.warns(UserWarning, match="The data of `fit` was not found"):
        interrupted_at("batch", 1, 2)
    assert "list of callbacks was not found" in caplog.text
    model = build()
    with pytest.warns(UserWarning, match="The data of `fit` was not found"):
        history = model.fit(epochs=3, callbacks=[callback()], **DATA)
    assert weights(model) == undisturbed[0]
    assert history.history == undisturbed[1]


# Refused.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"save_freq": "batch"}, "save_freq to be 'epoch', a number of batches or None"),
        ({"save_freq": 0}, "save_freq to be 'epoch' or at least 1"),
        ({"save_freq": True}, "save_freq"),
        ({"save_every_seconds": -1}, "save_every_seconds to be a number of more than 0"),
        ({"max_to_keep": 0}, "max_to_keep to be a whole number of at least 1"),
        ({"restore": "maybe"}, "restore to be True, False or 'if_possible'"),
        ({"on_preempted": "pause"}, "on_preempted to be 'exit' or 'stop'"),
        ({"exit_code": 300}, "exit_code to be a whole number from 0 to 255"),
        ({"grace_period": -1}, "grace_period to be seconds"),
        ({"exit_fn": 3}, "exit_fn to be a function"),
        ({"save_fn": "x"}, "save_fn to be a function"),
        ({"locks": 3}, "locks to be a LockManager"),
        ({"notices": "gpc"}, "Expected notices to be 'auto'.*Received: notices='gpc'"),
        ({"notices": signal.SIGKILL}, "SIGKILL cannot be handled"),
        ({"notices": 999}, "no signal"),
        ({"notices": 1.5}, "Expected notices"),
    ],
)
def test_bad_arguments(options, said):
    with pytest.raises(ValueError, match=said):
        PreemptionAwareCallback("state", **options)


def test_a_directory_that_is_a_file_is_refused():
    Path("state").write_text("x")
    with pytest.raises(UnsafePathError, match=r"state.*a directory was expected"):
        build().fit(epochs=1, callbacks=[callback()], **DATA)


def test_a_full_disk_is_said_before_the_first_batch_or_at_the_save(small_disk):
    disk = small_disk("size=64k")
    log: list[Any] = []
    with pytest.raises(CheckpointWriteError, match="disk"):
        build(4000).fit(
            epochs=2, callbacks=[callback(directory=str(disk / "state")), Told(log)], **DATA
        )
    # The first backup comes after the first epoch; its error at the next batch at the latest.
    assert log[:6] == [0, 1, 2, 3, 4, "end of 0"][: len(log)]
    assert run_files(str(disk / "state")) == []


def test_a_full_disk_at_a_notice_leaves_the_last_backup(small_disk, undisturbed):
    disk = small_disk("size=256k")
    folder = str(disk / "state")
    bell = Bell()

    def fill_and_ring() -> None:
        with open(disk / "rubbish", "wb", buffering=0) as file:
            while os.statvfs(disk).f_bavail:
                file.write(b"x" * 4096)
        bell.ring()

    mine = callback(bell, directory=folder)
    build().fit(epochs=3, callbacks=[mine, At("batch", 1, 2, fill_and_ring)], **DATA)
    assert mine.preempted is not None
    os.unlink(disk / "rubbish")
    model = build()
    history = model.fit(epochs=3, callbacks=[callback(directory=folder)], **DATA)
    assert (weights(model), history.history) == undisturbed


def test_another_live_job_in_the_directory_is_named(monkeypatch):
    monkeypatch.setattr("keras_safe_ckpt.callbacks.run_directory._LOCK_SECONDS", 0.2)
    log: list[Any] = []
    os.makedirs("state")
    with (
        LockManager().exclusive("state/run"),
        pytest.raises(LockTimeoutError, match=f"pid {os.getpid()}"),
    ):
        build().fit(epochs=1, callbacks=[callback(), Told(log)], **DATA)
    assert log == []


def test_a_run_that_failed_does_not_keep_its_directory(undisturbed):
    def fail() -> None:
        raise RuntimeError("by design")

    with pytest.raises(RuntimeError, match="by design"):
        build().fit(epochs=3, callbacks=[callback(), At("batch", 1, 2, fail)], **DATA)
    model = build()
    history = model.fit(epochs=3, callbacks=[callback(), At("batch", 9, 0, None)], **DATA)
    assert (weights(model), history.history) == undisturbed


def test_a_resume_that_failed_leaves_no_trace_in_the_model(undisturbed):
    """Not the epoch at which Keras begins, nor a training step that drops batches."""

    class Fails(keras.callbacks.Callback):
        def __init__(self, hook: str) -> None:
            super().__init__()
            setattr(self, hook, self.fail)

        def fail(self, *arguments: Any, **options: Any) -> None:
            raise RuntimeError("by design")

    interrupted_at("batch", 1, 2)
    for hook in ("on_train_begin", "on_epoch_begin"):
        model = build()
        first = model.get_weights()
        with pytest.raises(RuntimeError, match="by design"):
            model.fit(epochs=3, callbacks=[callback(), Fails(hook)], **DATA)
        again = build()
        again.set_weights(first)
        log: list[Any] = []
        model.fit(epochs=1, callbacks=[Told(log)], **DATA)
        assert log == [0, 1, 2, 3, 4, "end of 0"]
    interrupted = build()

    def broken() -> Any:
        for number in range(99):
            if number == 6:  # On the way back to the batch.
                raise RuntimeError("no more data")
            yield X[:2], Y[:2]

    with pytest.raises(tf.errors.OpError, match="no more data"):
        interrupted.fit(broken(), steps_per_epoch=5, epochs=3, verbose=0, callbacks=[callback()])
    log = []
    interrupted.fit(epochs=1, callbacks=[Told(log)], **DATA)
    assert log == [0, 1, 2, 3, 4, "end of 0"]


def test_a_failed_run_does_not_answer_for_the_next_one():
    """Its signal handler is still there, below that of the next run."""

    def fail() -> None:
        raise RuntimeError("by design")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="by design"):
        build().fit(
            epochs=3,
            callbacks=[callback("SIGTERM", directory="a"), At("batch", 0, 1, fail)],
            **DATA,
        )
    mine = callback("SIGTERM", directory="b")
    ring = At("batch", 0, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    build().fit(epochs=3, callbacks=[mine, ring], **DATA)
    assert mine.preempted == "SIGTERM: received"
    assert events("notice", "a") == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_fit_within_a_fit_has_a_run_of_its_own():
    inner: list[Any] = []

    class Nested(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            mine = callback(directory=f"inner-{epoch}")
            inner.append(build().fit(epochs=1, callbacks=[mine], **DATA).epoch)

    history = build().fit(epochs=2, callbacks=[callback(), Nested()], **DATA)
    assert history.epoch == [0, 1]
    assert inner == [[0], [0]]
    assert events("finished")


def test_two_of_them_in_one_list_are_refused():
    with pytest.raises(ValueError, match="Expected one PreemptionAwareCallback"):
        build().fit(epochs=1, callbacks=[callback(), callback(directory="b")], **DATA)


def test_a_deep_copy_trains_by_itself():
    mine = callback(lambda: False)
    build().fit(epochs=1, callbacks=[mine], **DATA)
    other = copy.deepcopy(mine)
    history = build().fit(epochs=2, callbacks=[other], **DATA)
    assert history.epoch == [0, 1]


def test_a_read_only_file_system_is_refused(small_disk):
    disk = small_disk("size=1m,ro")
    with pytest.raises(CheckpointWriteError, match=r"[Rr]ead-only"):
        build().fit(epochs=1, callbacks=[callback(directory=str(disk / "state"))], **DATA)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"position": 3},
        {"position": {"epoch": -1}},
        {"position": {"<array>": "missing"}},
        {"history": None},
        {"history": {"history": [1], "epoch": 2}},
        {"callbacks": 7},
        {"callbacks": {"At-0": {"<tuple>": 5}}},
        {"history": {"history": [["loss", {"<array>": "no"}]], "epoch": []}},
        {"random": [1, 2]},
    ],
)
def test_a_hostile_checkpoint_is_an_error_of_the_tree(nonsense):
    interrupted_at("batch", 1, 2)
    store = CheckpointStore("state")
    model = build()
    _, manifest = store.load(model)
    found = {**manifest.extra["training"], **nonsense}
    store.publish(
        model,
        step=99,
        name="run-0000000099.weights.h5",
        series="run-*.weights.h5",
        extra={"training": found},
        extra_arrays=store.extra_arrays(run_files()[-1]),
    )
    before = weights(model)
    with pytest.raises(CorruptCheckpointError, match="cannot be understood"):
        model.fit(epochs=3, callbacks=[callback()], **DATA)
    assert weights(model) == before


def test_an_evaluation_by_a_callback_in_mid_epoch_is_no_validation(undisturbed):
    """What is saved must not say that the epoch has been trained."""
    bell = Bell()
    mine = callback(bell)

    class Evaluating(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            ring = At("test", 0, 1, bell.ring if batch == 2 else lambda: None)
            saved = self.model.metrics_variables
            values = [variable.numpy() for variable in saved]
            self.model.evaluate(X, Y, batch_size=2, verbose=0, callbacks=[ring, mine])
            for variable, value in zip(saved, values, strict=True):
                variable.assign(value)

    build().fit(epochs=3, callbacks=[Evaluating(), mine], **DATA)
    assert mine.preempted is not None
    model = build()
    history = model.fit(epochs=3, callbacks=[callback()], **DATA)
    assert (weights(model), history.history) == undisturbed


def test_fewer_epochs_than_were_trained_are_refused_and_more_go_on(undisturbed):
    interrupted_at("batch", 2, 2)
    before = run_files()
    with pytest.raises(IncompatibleCheckpointError, match=r"taken at epoch 3, batch 3.* 2 in all"):
        build().fit(epochs=2, callbacks=[callback()], **DATA)
    assert run_files() == before
    # A run that had come to its end, and is to train more now.
    bell = Bell()
    at = At("train", 1, 0, bell.ring)
    build().fit(epochs=2, callbacks=[callback(bell, directory="b"), at], **DATA)
    model = build()
    rest = At("batch", 9, 0, None)
    history = model.fit(epochs=3, callbacks=[callback(directory="b"), rest], **DATA)
    assert (weights(model), history.history) == undisturbed


def test_a_learning_rate_that_is_set_when_an_epoch_begins_is_set_once():
    def fit(*callbacks: Any) -> Any:
        halving = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        model = build()
        history = model.fit(epochs=3, callbacks=[*callbacks, halving], **DATA)
        return weights(model), history.history

    wanted = fit()
    bell = Bell()
    fit(callback(bell), At("batch", 1, 2, bell.ring))
    assert fit(callback(), At("batch", 9, 0, None)) == wanted


@pytest.mark.parametrize(("hook", "batch"), [("batch", 2), ("epoch", 1), ("train", 0)])
def test_a_run_that_somebody_has_stopped_stays_stopped(hook, batch):
    class Stopping(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hook == "batch" and batch == 2 and self.model.optimizer.iterations.numpy() > 5:
                self.model.stop_training = True

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.stop_training = True

    def fit(*callbacks: Any) -> Any:
        model = build()
        history = model.fit(epochs=4, callbacks=[Stopping(), *callbacks], **DATA)
        return weights(model), history.history, history.epoch

    wanted = fit()
    bell = Bell()
    mine = callback(bell)
    fit(mine, At(hook, 1, batch, bell.ring))
    assert mine.preempted is not None
    assert fit(callback(), At("batch", 9, 0, None)) == wanted


def test_the_state_of_a_recurrent_layer_is_kept():
    def fit(*callbacks: Any) -> Any:
        keras.utils.set_random_seed(3)
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((2, 2), batch_size=2), layers.GRU(3, stateful=True), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        data = {**DATA, "x": X.reshape(10, 2, 2)}
        model.fit(epochs=3, callbacks=list(callbacks), **data)
        return weights(model)

    wanted = fit()
    bell = Bell()
    fit(callback(bell), At("batch", 1, 2, bell.ring))
    assert fit(callback(), At("batch", 9, 0, None)) == wanted


def test_logs_that_no_file_can_hold_are_left_out_and_said():
    class Odd(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def train_step(self, data: Any) -> dict[str, Any]:
            return {**super().train_step(data), "text": tf.constant("x")}

    model = Odd()
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match="'text' in the logs is not kept"):
        model.fit(epochs=1, callbacks=[callback()], **DATA)


def test_a_model_whose_own_optimizers_are_not_built_is_named():
    model = build()
    model.other = keras.optimizers.SGD()
    with pytest.warns(UserWarning, match="optimizers that are not built yet: other"):
        model.fit(epochs=1, callbacks=[callback()], **DATA)


def test_what_cannot_be_captured_is_known_after_the_first_batch():
    class Late(Kept):
        def get_state(self) -> Any:
            return object()

    log: list[Any] = []
    with pytest.raises(TypeError, match="The state of Late-0"):
        build().fit(epochs=2, callbacks=[Told(log), callback(), Late()], **DATA)
    assert log == [0]


def test_a_state_that_fails_at_a_notice_leaves_the_last_backup():
    class Shy(Kept):
        def get_state(self) -> Any:
            if self.count > 6:
                raise OSError("no state now")
            return super().get_state()

    bell = Bell()
    mine = callback(bell)
    build().fit(epochs=3, callbacks=[mine, Shy(), At("batch", 1, 2, bell.ring)], **DATA)
    assert mine.preempted is not None
    assert "not saved: no state now" in events("preempted")[0]["outcome"]
    assert run_files() == ["run-0000000005.weights.h5"]


def test_a_callback_made_from_one_of_keras_is_named_for_what_it_adds():
    class Mine(keras.callbacks.EarlyStopping):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            self.mine = epoch

    stopping = Mine("loss", patience=9)
    stopping.mine = -1
    with pytest.warns(UserWarning, match=r"Mine-0 \(mine\)"):
        build().fit(epochs=2, callbacks=[callback(), stopping], **DATA)


def test_a_callback_can_be_pickled():
    pickle = importlib.import_module("pickle")
    mine = callback("auto")
    build().fit(epochs=1, callbacks=[mine], **DATA)
    other = pickle.loads(pickle.dumps(mine))
    assert build().fit(epochs=1, callbacks=[other], **DATA).epoch == [0]


def test_shuffled_validation_data_is_said():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9, seed=1)
    model = build()
    with pytest.warns(UserWarning, match="The validation data is shuffled anew"):
        model.fit(epochs=1, validation_data=data.batch(2), callbacks=[callback()], **DATA)
    fixed = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(
        9, seed=1, reshuffle_each_iteration=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(epochs=1, validation_data=fixed.batch(2), callbacks=[callback()], **DATA)
    assert not [w for w in caught if "validation data" in str(w.message)]


def test_a_checkpoint_of_another_model_is_refused_and_the_model_left_alone():
    interrupted_at("batch", 1, 2)
    other = build(5)
    before = weights(other)
    with pytest.raises(
        IncompatibleCheckpointError, match=r"dense/vars/0: the model has .*\[4, 5\]"
    ):
        other.fit(epochs=3, callbacks=[callback()], **DATA)
    assert weights(other) == before
    with pytest.warns(UserWarning, match="Training starts afresh: "):
        history = other.fit(epochs=3, callbacks=[callback(restore="if_possible")], **DATA)
    assert history.epoch == [0, 1, 2]


def test_a_finished_run_is_not_continued_by_a_second_fit(undisturbed):
    build().fit(epochs=3, callbacks=[callback(delete_checkpoint=False)], **DATA)
    assert len(run_files()) == 2
    with pytest.raises(IncompatibleCheckpointError, match="is finished, after 3 epochs"):
        build().fit(epochs=3, callbacks=[callback()], **DATA)
    # As the message says:
    model, manifest = CheckpointStore("state").load(build())
    assert weights(model) == undisturbed[0]
    assert manifest.epoch == 3
    with pytest.warns(UserWarning, match="starts afresh"):
        build().fit(epochs=1, callbacks=[callback(restore="if_possible")], **DATA)


def test_a_program_that_was_killed_after_fit_goes_on_behind_it(undisturbed, monkeypatch):
    log: list[Any] = []
    build().fit(epochs=3, callbacks=[callback(delete_checkpoint=False)], **DATA)
    monkeypatch.setattr(run_facts, "_finished_here", set())  # As in another process.
    model = build()
    again = [Told(log), callback(delete_checkpoint=False)]
    history = model.fit(epochs=3, callbacks=again, **DATA)
    assert log == []
    assert (weights(model), history.history) == undisturbed
    with pytest.raises(IncompatibleCheckpointError, match="is finished, after 3 epochs"):
        build().fit(epochs=3, callbacks=[callback()], **DATA)
    monkeypatch.setattr(run_facts, "_finished_here", set())
    history = build().fit(epochs=4, callbacks=[Told(log), callback()], **DATA)
    assert history.epoch == [0, 1, 2, 3]
    assert log == [0, 1, 2, 3, 4, "end of 3"], "more epochs are trained"


def test_a_damaged_checkpoint_is_passed_over_and_all_damaged_ones_are_named(undisturbed):
    interrupted_at("batch", 1, 2, save_freq=2, max_to_keep=3)
    files = run_files()
    assert len(files) == 3
    flip_a_bit(f"state/{files[-1]}")
    model = build()
    history = model.fit(
        epochs=3, callbacks=[callback(delete_checkpoint=False, max_to_keep=3)], **DATA
    )
    assert (weights(model), history.history) == undisturbed
    names = run_files()
    for name in names:
        Path(f"state/{name}").write_bytes(b"nothing of the kind")
    with pytest.raises(CorruptCheckpointError) as caught:
        build().fit(epochs=3, callbacks=[callback()], **DATA)
    assert all(name in str(caught.value) for name in names)
    model = build()
    with pytest.warns(UserWarning, match="Training starts afresh: "):
        model.fit(epochs=3, callbacks=[callback(restore="if_possible")], **DATA)
    assert weights(model) == undisturbed[0]


def test_restore_false_starts_afresh(undisturbed):
    interrupted_at("batch", 1, 2)
    model = build()
    history = model.fit(epochs=3, callbacks=[callback(restore=False)], **DATA)
    assert history.epoch == [0, 1, 2]
    assert (weights(model), history.history) == undisturbed


def test_another_batch_size_is_said_with_what_follows():
    interrupted_at("batch", 1, 2)
    log: list[Any] = []
    with pytest.warns(
        UserWarning, match=r"steps was 5 and is 10; batch size was 2 and is 1.*epoch 2"
    ):
        build().fit(epochs=2, callbacks=[callback(), Told(log)], **{**DATA, "batch_size": 1})
    assert log == [*range(3, 10), "end of 1"]


def test_data_that_is_shorter_now_ends_the_epoch():
    interrupted_at("batch", 1, 3)
    log: list[Any] = []
    short = {**DATA, "x": X[:4], "y": Y[:4]}
    with pytest.warns(UserWarning, match="not the run") as caught:
        build().fit(epochs=3, callbacks=[callback(), Told(log)], **short)
    said = " ".join(str(w.message) for w in caught)
    assert "steps was 5 and is 2" in said
    assert log == ["end of 1", 0, 1, "end of 2"]


def test_other_steps_per_execution_are_converted():
    interrupted_at("batch", 1, 3)
    log: list[Any] = []
    model = build()
    model.steps_per_execution = 3
    model.run_eagerly = False
    with pytest.warns(UserWarning, match="steps per execution was 1 and is 3"):
        model.fit(epochs=2, callbacks=[callback(), Told(log)], **DATA)
    assert log[0] == 5  # The second execution has the batches 3 to 5.


def test_other_metrics_begin_anew_and_are_said():
    interrupted_at("batch", 1, 2)
    with pytest.warns(UserWarning, match="metrics of the epoch that was interrupted begin anew"):
        build(metrics=["mae"]).fit(epochs=3, callbacks=[callback()], **DATA)


def test_other_files_in_the_directory_are_left_alone():
    store = CheckpointStore("state")
    model = build()
    model.build((None, 4))
    store.publish(model, step=1, name="mine.weights.h5")
    Path("state/run-notes.txt").write_text("x")
    Path("state/foreign.weights.h5").write_bytes(b"not one of ours")
    build().fit(epochs=2, callbacks=[callback()], **DATA)
    names = set(os.listdir("state"))
    assert {"mine.weights.h5", "run-notes.txt", "foreign.weights.h5"} <= names


# Notices and time.


def test_an_advisory_notice_saves_and_training_goes_on(undisturbed):
    bell = Bell()
    model = build()
    mine = callback(bell, save_freq=None, delete_checkpoint=False)
    ring = At("batch", 1, 2, lambda: bell.ring(advisory=True))
    history = model.fit(epochs=3, callbacks=[mine, ring], **DATA)
    assert mine.preempted is None
    assert (weights(model), history.history) == undisturbed
    (backup,) = events("backup")
    assert (backup["epoch"], backup["batch"], backup["reason"]) == (1, 3, "bell: rings")


def test_with_a_long_grace_period_training_goes_on_after_a_save(undisturbed):
    """Saved at the notice, and once in time before the end, which comes (soon) here."""
    bell = Bell()
    mine = callback(bell, save_freq=None)
    model = build()
    timers: list[Any] = []

    def ring() -> None:
        # 34 s are left, of which some 2 s are kept for the end: it would go on for 32 s.
        bell.ring(deadline=time.monotonic() + 34)
        (timer,) = [
            t
            for t in threading.enumerate()
            if t.name.endswith("timer") and t.interval < 33 and not t.finished.is_set()
        ]
        assert 30 <= timer.interval <= 32.1
        timer.cancel()
        timers.append(timer)

    def time_passes() -> None:
        timers[0].function()

    ringing, passing = At("batch", 0, 2, ring), At("batch", 1, 1, time_passes)
    model.fit(epochs=3, callbacks=[mine, ringing, passing], **DATA)
    assert mine.preempted == "bell: rings"
    assert [event["batch"] for event in events("backup")] == [3]
    (preempted,) = events("preempted")
    assert (preempted["epoch"], preempted["batch"]) == (1, 2)
    again = build()
    rest = [At("batch", 9, 0, None), At("batch", 9, 0, None)]
    history = again.fit(epochs=3, callbacks=[callback(), *rest], **DATA)
    assert (weights(again), history.history) == undisturbed


def test_what_cannot_be_saved_in_time_is_not_begun(undisturbed, monkeypatch):
    bell = Bell()
    mine = callback(bell)

    def ring() -> None:
        mine._run._pace.save_took(100.0)
        bell.ring(deadline=time.monotonic() + 10)

    build().fit(epochs=3, callbacks=[mine, At("batch", 1, 2, ring)], **DATA)
    assert mine.preempted is not None
    (preempted,) = events("preempted")
    assert preempted["outcome"].startswith("not saved: ")
    assert "a save takes 100.0 s; the last backup stands" in preempted["outcome"]
    assert run_files() == ["run-0000000005.weights.h5"]
    model = build()
    history = model.fit(epochs=3, callbacks=[callback(), At("batch", 9, 0, None)], **DATA)
    assert (weights(model), history.history) == undisturbed


def test_a_withdrawn_notice_lets_training_go_on():
    bell = Bell()
    mine = callback(bell)

    def ring() -> None:
        bell.ring(deadline=time.monotonic() + 100)
        bell.desk.withdraw("bell")

    build().fit(epochs=3, callbacks=[mine, At("batch", 1, 2, ring)], **DATA)
    assert mine.preempted is None
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name.endswith("notice-timer")],
        "no timer is left",
    )


def test_an_evaluation_by_itself_is_ended_by_a_notice():
    bell = Bell()
    mine = callback(bell)
    model = build()
    log: list[Any] = []
    at = At("test", 0, 1, bell.ring)
    model.evaluate(X, Y, batch_size=2, verbose=0, callbacks=[at, Told(log), mine])
    assert log == ["test 0", "test 1"]
    assert mine.preempted == "bell: rings"
    assert bell.stopped == 1
    at = At("predict", 0, 1, bell.ring)
    predicted = model.predict(X, batch_size=2, verbose=0, callbacks=[at, mine])
    assert len(predicted) == 4
    bell = Bell()
    with pytest.raises(SystemExit):
        model.predict(
            X,
            batch_size=2,
            verbose=0,
            callbacks=[At("predict", 0, 1, bell.ring), callback(bell, on_preempted="exit")],
        )


def test_a_prediction_in_a_callback_is_interrupted_as_well(undisturbed):
    bell = Bell()
    mine = callback(bell)
    seen: list[int] = []

    class Predicting(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ring = At("predict", 0, 1, bell.ring if epoch == 1 else lambda: None)
            found = self.model.predict(X, batch_size=2, verbose=0, callbacks=[ring, mine])
            seen.append(len(found))

    validation = {"validation_data": (X, Y)}
    build().fit(epochs=3, callbacks=[Predicting(), mine], **validation, **DATA)
    assert seen == [10, 4]
    assert mine.preempted is not None
    model = build()
    history = model.fit(epochs=3, callbacks=[callback()], **validation, **DATA)
    assert weights(model) == undisturbed[0]
    assert history.history["loss"] == undisturbed[1]["loss"]


def test_watchers_are_stopped_and_no_thread_is_left():
    before = set(threading.enumerate())
    bell = Bell()
    build().fit(epochs=1, callbacks=[callback(bell)], **DATA)
    bell.stopped = 0
    handler = signal.getsignal(signal.SIGTERM)
    mine = callback([bell, "SIGTERM", lambda: False])
    build().fit(epochs=1, callbacks=[mine], **DATA)
    assert bell.stopped == 1
    assert signal.getsignal(signal.SIGTERM) == handler
    wait_until(
        lambda: (
            not [
                thread
                for thread in threading.enumerate()
                if thread.name.startswith("keras_safe_ckpt") and thread not in before
            ]
        ),
        "no thread is left",
    )


def test_off_the_main_thread_other_notices_work_and_it_is_said(caplog, monkeypatch):
    monkeypatch.setattr("keras_safe_ckpt.preemption.signals._said_off_main_thread", False)
    bell = Bell()
    mine = callback(["SIGTERM", bell])
    results: list[Any] = []

    def train() -> None:
        at = At("batch", 1, 2, bell.ring)
        results.append(build().fit(epochs=3, callbacks=[mine, at], **DATA).epoch)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert results == [[0]]
    assert mine.preempted is not None
    assert caplog.text.count("does not run on the main thread") == 1


def test_the_checkpoint_is_an_ordinary_file_of_keras():
    interrupted_at("batch", 1, 2)
    model = build()
    model.load_weights(f"state/{run_files()[-1]}")
    manifest = CheckpointStore("state").verify(run_files()[-1])
    assert (manifest.epoch, manifest.batch, manifest.step) == (1, 3, 8)
    assert json.dumps(manifest.extra)


def test_max_to_keep():
    interrupted_at("batch", 2, 2, save_freq=1, max_to_keep=4)
    assert len(run_files()) == 4
