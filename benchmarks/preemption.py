"""What a notice and a resume cost, as ratios within one run.

    python benchmarks/preemption.py                    # 100M parameters with Adam: 1.2 GB
    python benchmarks/preemption.py --parameters 5e6   # smaller and quicker
    python benchmarks/preemption.py --markdown         # the table of the README

A real SIGTERM comes in the middle of a batch of a real `fit`; the time is taken from the end of
that batch to the moment at which the checkpoint is durable and the callback would exit. "Raw write"
is the same bytes, written and synced with nothing else, beside the file before. All loads are of
files that were read before. What is compared is measured in turn, in one process; times and ratios
are the best of ``--rounds`` rounds, with the ratio of the medians beside them, and every round is
printed to standard error. Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from storage import build_model, raw_write, seconds, state_views, warm_up_memory
from tables import shown, table_lines

CALLS = 20_000
BATCHES = 20_000


def compiled(parameters: float) -> Any:
    model = build_model(parameters)
    model.compile("adam", "mse", run_eagerly=False)
    model.optimizer.build(model.trainable_variables)
    return model


def callback(folder: Path, **options: Any) -> Any:
    from keras_safe_ckpt import PreemptionAwareCallback

    return PreemptionAwareCallback(folder, on_preempted="stop", verbose=0, **options)


def measure_notice(model: Any, data: Any, folder: Path) -> tuple[float, float, float]:
    """From the signal to the end of its batch, from there to the durable checkpoint; a batch."""
    import keras

    sent: list[float] = []
    ends: list[float] = []
    durable: list[float] = []

    class Sender(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if len(ends) == 3:
                threading.Timer((ends[2] - ends[1]) / 2, self.send).start()

        def send(self) -> None:
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGTERM)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())

    mine = callback(folder, save_freq=None, exit_fn=lambda: durable.append(time.perf_counter()))
    model.fit(data, epochs=1, verbose=0, callbacks=[Sender(), mine])
    assert mine.preempted is not None
    # Of the batch in which the signal came, or of the next one if it came at its very end.
    return ends[-1] - sent[0], durable[0] - ends[-1], ends[2] - ends[1]


def measure_resume(model: Any, data: Any, folder: Path, size: int) -> tuple[float, float]:
    """A resume at the beginning of an epoch; and Keras's load of the same file."""
    import keras

    from keras_safe_ckpt import CheckpointStore

    class Crash(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise InterruptedError

    mine = callback(folder, notices=None)
    try:
        model.fit(data.take(1), epochs=2, verbose=0, callbacks=[mine, Crash()])
    except InterruptedError:
        mine._run._saver.wait()
    path = next(Path(folder).glob("run-*"))
    model.load_weights(path)  # Both find the file in the cache,
    warm_up_memory(size)  # and memory that the host has provided already.
    try:
        model.fit(
            data.take(1), epochs=2, verbose=0, callbacks=[callback(folder, notices=None), Crash()]
        )
    except InterruptedError:
        (event,) = [e for e in CheckpointStore(folder).events.read() if e["event"] == "resume"]
    warm_up_memory(size)
    plain = seconds(lambda: model.load_weights(path))
    return float(event["seconds"]), plain


def measure_fast_forward(folder: Path) -> tuple[float, float]:
    """Per batch: going back to a place, and the data by itself."""
    import keras
    import numpy as np
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(np.zeros((BATCHES * 4, 16), "float32"))
    data = data.map(lambda x: (x * 2.0, x[:1])).batch(4)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 == BATCHES // 2:
                os.kill(os.getpid(), signal.SIGTERM)

    model.fit(data, epochs=1, verbose=0, callbacks=[Stop(), callback(folder, save_freq=None)])
    came: list[float] = []

    class Ready(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            came.append(time.perf_counter())

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if len(came) == 1:
                came.append(time.perf_counter())
                self.model.stop_training = True

    def bare() -> None:
        iterator = iter(data)
        for _ in range(BATCHES // 2):
            next(iterator)

    plain = seconds(bare)
    model.fit(data, epochs=1, verbose=0, callbacks=[Ready(), callback(folder, save_freq=None)])
    return (came[1] - came[0]) / (BATCHES // 2), plain / (BATCHES // 2)


def measure_idle(folder: Path) -> float:
    """The end of a batch at which nothing is due."""
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    mine = callback(folder)
    model.history = keras.callbacks.History()
    model.history.on_train_begin()
    model.make_train_function()
    mine.set_model(model)
    mine.set_params({"epochs": 1, "steps": CALLS})
    mine.on_train_begin()
    mine.on_epoch_begin(0)
    logs = {"loss": 1.0}

    def loop() -> None:
        for batch in range(CALLS):
            mine.on_train_batch_end(batch, logs)

    found = seconds(loop) / CALLS
    mine.on_epoch_end(0)
    mine.on_train_end()
    return found


def measure(parameters: float, rounds: int) -> tuple[dict[str, list[float]], float]:
    import numpy as np
    import tensorflow as tf

    model = compiled(parameters)
    width = model.input_shape[-1]
    x = np.random.default_rng(0).normal(size=(8, width)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(1)
    model.fit(data.take(1), verbose=0)
    views = state_views(model)
    size = sum(view.nbytes for view in views)
    warm_up_memory(2 * size)
    del views
    times: dict[str, list[float]] = {}

    def note(round: int, **found: float) -> None:
        for name, value in found.items():
            times.setdefault(name, []).append(value)
        shown = ", ".join(f"{name} {value:.3g} s" for name, value in found.items())
        print(f"round {round + 1}: {shown}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir=".") as folder:
        place = Path(folder)
        for round in range(rounds):
            raw = seconds(lambda: raw_write(state_views(model), place / "raw"))
            wait, save, batch = measure_notice(model, data, place / "notice")
            resume, load = measure_resume(model, data, place / "resume", size)
            forward, bare = measure_fast_forward(place / "forward")
            idle = measure_idle(place / "idle")
            note(round, raw=raw, wait=wait, batch=batch, save=save, resume=resume,
                 load=load, forward=forward, bare=bare, idle=idle)  # fmt: skip
            for name in ("notice", "resume", "forward", "idle"):
                shutil.rmtree(place / name, ignore_errors=True)
    return times, size / 1e9


def rows(times: dict[str, list[float]], gigabytes: float) -> list[tuple[str, str, str, str, str]]:
    def row(what: str, name: str, other: str, label: str, goal: float) -> Any:
        best = min(times[name]) / min(times[other])
        medians = statistics.median(times[name]) / statistics.median(times[other])
        verdict = f"<= {goal:g} {'yes' if best <= goal else 'NO'}"
        return (
            what, f"{shown(min(times[name]))}, {label}: {shown(min(times[other]))}",
            f"{best:.2f}", f"{medians:.2f}", verdict,
        )  # fmt: skip

    idle = min(times["idle"])
    return [
        row(
            f"a durable checkpoint of {gigabytes:.1f} GB, from the end of the batch with SIGTERM",
            "save", "raw", "raw write + fsync", 1.3,
        ),
        row("resume at an epoch", "resume", "load", "Keras load_weights", 1.2),
        row("fast-forward, each batch", "forward", "bare", "the data alone", 1.5),
        ("end of a batch at which nothing is due", shown(idle), "", "", ""),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    table = rows(*measure(arguments.parameters, arguments.rounds))
    header = ("what", "time", "ratio", "of medians", "goal")
    print("\n".join(table_lines(header, table, markdown=arguments.markdown)))
    sys.exit(any("NO" in line[-1] for line in table))


if __name__ == "__main__":
    main()
