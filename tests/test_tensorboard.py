"""What happens to checkpoints, as scalars that TensorBoard itself reads back."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from driven import drive, losses
from keras_setup import keras, tf
from preempted_fit import DATA, At, Bell, build, callback, events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from keras_safe_ckpt import SafeModelCheckpoint
from keras_safe_ckpt.callbacks.scalars import Scalars, check_log_dir, scalars_for
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.storage.events import EventLog

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


def scalars(folder: str) -> dict[str, list[tuple[int, float]]]:
    """By TensorBoard's own reader: for each tag that it takes for scalars, steps and values."""
    found = EventAccumulator(folder, size_guidance={"tensors": 0})
    found.Reload()
    return {
        tag: [
            (event.step, float(tf.make_ndarray(event.tensor_proto))) for event in found.Tensors(tag)
        ]
        for tag in found.PluginTagToContent("scalars")
    }


def fit(*callbacks: Any, epochs: int = 2) -> None:
    build().fit(epochs=epochs, callbacks=[*callbacks], **DATA)


def test_saves_are_scalars_at_their_steps():
    fit(SafeModelCheckpoint("run/{epoch}.weights.h5", save_weights_only=True, log_dir="logs"))
    (run,) = os.listdir("logs/checkpoints")
    assert run == "epoch-.weights.h5"
    found = scalars(f"logs/checkpoints/{run}")
    saves = [event for event in EventLog(Path("run")).read() if event["event"] == "save"]
    assert [event["step"] for event in saves] == [5, 10]
    for tag in ("bytes", "seconds", "blocked_seconds"):
        expected = [(event["step"], pytest.approx(event[tag])) for event in saves]
        assert found[f"checkpoint/{tag}"] == expected
    assert found["checkpoint/saves"] == [(5, 1), (10, 2)]


def test_the_folder_of_keras_own_callback_is_used_and_left_as_it_is():
    fit(
        keras.callbacks.TensorBoard("logs"),
        SafeModelCheckpoint("run/best.keras", monitor="loss", save_best_only=True),
        SafeModelCheckpoint("run/{epoch}.keras"),
    )
    # Each callback is a run of its own, beside those of Keras.
    assert sorted(os.listdir("logs")) == ["checkpoints", "train"]
    assert sorted(os.listdir("logs/checkpoints")) == ["best.keras", "epoch-.keras"]
    assert scalars("logs/checkpoints/best.keras")["checkpoint/saves"] == [(5, 1), (10, 2)]
    assert "epoch_loss" in scalars("logs/train")


def test_nothing_is_recorded_unless_it_is_asked_for():
    fit(SafeModelCheckpoint("run/best.keras", monitor="loss"))
    assert sorted(os.listdir()) == ["run"]


def test_notices_and_what_is_repeated_are_scalars_of_both_lives():
    bell = Bell()
    fit(callback(bell, log_dir="logs"), At("batch", 1, 2, bell.ring), epochs=3)
    fit(callback(log_dir="logs"), epochs=3)
    found = scalars("logs/checkpoints/state")
    (resumed,) = events("resume")
    assert found["checkpoint/notices"] == [(8, 1)]
    assert found["checkpoint/repeated_batches"] == [(8, 0)]
    assert found["checkpoint/dropped_batches"] == [(8, 3)]
    assert found["checkpoint/resume_seconds"] == [(8, pytest.approx(resumed["seconds"]))]
    assert [step for step, _ in found["checkpoint/stop_seconds"]] == [8]
    assert [step for step, _ in found["checkpoint/bytes"]] == [5, 8, 10, 15]


def test_a_notice_is_recorded_while_keras_own_callback_records_other_steps_only():
    """It says on the thread that trains that nothing is recorded now; that is not for us."""
    bell = Bell()
    own = keras.callbacks.TensorBoard("logs", update_freq=1000)
    fit(own, callback(bell), At("batch", 1, 2, bell.ring))
    assert scalars("logs/checkpoints/state")["checkpoint/notices"] == [(8, 1)]


def test_errors_are_counted():
    one = SafeModelCheckpoint("run/{epoch}.keras", log_dir="logs", on_error="warn")
    with pytest.warns(UserWarning, match="A save failed"):
        # From now on there is a folder where a file is to go.
        drive(one, losses(3, 2, 1), between=lambda _: os.makedirs("run/2.keras", exist_ok=True))
    found = scalars("logs/checkpoints/epoch-.keras")
    assert [value for _, value in found["checkpoint/errors"]] == [1]
    assert [value for _, value in found["checkpoint/saves"]] == [1, 2]


def test_what_is_written_is_there_at_once_for_a_reader():
    log = EventLog(Path.cwd(), listener=Scalars("logs/a", lambda: 7))
    log.record("notice")
    (file,) = Path("logs/a").iterdir()
    records = [tf.compat.v1.Event.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(file))]
    assert [(e.step, v.tag) for e in records for v in e.summary.value] == [
        (7, "checkpoint/notices")
    ]


def test_threads_take_turns():
    inside, most = 0, 0

    def step() -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.001)  # Whoever does not wait for its turn comes in now.
        inside -= 1
        return 3

    log = EventLog(Path.cwd(), Scalars("logs/a", step))

    def record() -> None:
        for _ in range(20):
            log.record("notice")

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert scalars("logs/a")["checkpoint/notices"] == [(3, n) for n in range(1, 81)]


def test_a_log_dir_that_cannot_be_written_is_said_once_and_stops_nothing(caplog):
    Path("logs").write_text("a file")
    with caplog.at_level(logging.WARNING):
        fit(SafeModelCheckpoint("run/{epoch}.keras", log_dir="logs"), epochs=3)
    assert sorted(Path("run").glob("*.keras")) == [Path(f"run/{n}.keras") for n in (1, 2, 3)]
    assert caplog.text.count("No scalars for TensorBoard in logs/checkpoints/") == 1
    assert Path("logs").read_text() == "a file"


def test_whatever_goes_wrong_with_scalars_no_save_fails(caplog):
    from keras_safe_ckpt.callbacks.scalars import Scalars

    scalars = Scalars("logs", step=lambda: 1 // 0)
    with caplog.at_level(logging.WARNING):
        scalars({"event": "notice"})
        scalars({"event": "notice"})
    assert caplog.text.count("No scalars for TensorBoard in logs: ") == 1
    assert not Path("logs").exists()


def test_a_disk_that_is_full_on_the_way_stops_nothing(small_disk, caplog):
    disk = small_disk("size=64k")
    log = EventLog(Path.cwd(), Scalars(str(disk / "logs"), lambda: 0))
    log.record("notice")
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with caplog.at_level(logging.WARNING):
        for step in range(300):
            log.record("save", step=step, bytes=1)
    assert len(list(log.read())) == 301
    assert caplog.text.count("No scalars for TensorBoard") == 1


@pytest.mark.parametrize("kind", ["checkpoint", "preemption"])
@pytest.mark.parametrize("wrong", ["", 3, ["logs"], True])
def test_a_log_dir_that_is_no_path_is_refused_at_once(kind, wrong):
    make = {"checkpoint": partial(SafeModelCheckpoint, "a.keras"), "preemption": callback}[kind]
    with pytest.raises(ValueError, match="Expected log_dir to be the path of a folder"):
        make(log_dir=wrong)


def test_without_tensorflow_a_log_dir_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"pip install .*tensorflow-cpu"):
        check_log_dir("logs")
    assert check_log_dir(None) is None


def test_another_backend_leaves_keras_own_callback_alone(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    found = []

    class Asking(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            found.append(scalars_for(self.model, None, Role(), "a"))

    own = keras.callbacks.TensorBoard("logs")
    container = keras.callbacks.CallbackList([own, Asking()], model=build())
    container.on_train_begin()
    assert found == [None]
    monkeypatch.undo()
    container.on_train_begin()
    assert found[1] is not None


def test_who_has_scalars_in_a_cluster():
    members = ("worker 0", "worker 1")
    chief = Role(0, 2, True, synchronous=True, members=members)
    other = Role(1, 2, False, synchronous=True, members=members)
    independent = Role(1, 2, False)
    assert scalars_for(None, "logs", other, "a") is None
    for role, folder in (
        (chief, "logs/checkpoints/a"),
        (independent, "logs/checkpoints/worker-1/a"),
    ):
        listener = scalars_for(None, "logs", role, "a")
        assert listener is not None
        listener({"event": "notice"})
        assert scalars(folder)["checkpoint/notices"] == [(0, 1)]


def test_a_copy_of_the_callback_has_the_log_dir_too():
    one = SafeModelCheckpoint("run/a.keras", monitor="loss", log_dir="logs")
    fit(copy.deepcopy(one), epochs=1)
    assert os.listdir("logs/checkpoints") == ["a.keras"]
