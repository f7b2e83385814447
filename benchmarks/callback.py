"""What a checkpoint callback costs a run of `fit`, beside Keras's own and Orbax's.

    python benchmarks/callback.py                  # states of 0.8 and 1.2 GB: about 25 minutes
    python benchmarks/callback.py --parameters 5e6 # smaller and quicker
    python benchmarks/callback.py --markdown       # the table of the README
    python benchmarks/callback.py --small          # the small model and the idle batch only
    python benchmarks/callback.py --floor          # beside a thread that only writes the bytes

All callbacks save the same model, each in fits of its own, in turn, in one process; `--rounds`
times, the order rotating. Blocked is the time that a callback keeps `fit` waiting at the end of
an epoch, the median over all saves. The time of a whole `fit` includes waiting for the last save
at its end; the ratio is that of the medians over the rounds. Every measurement is printed to
standard error. OrbaxCheckpoint is compared if it is installed (`pip install orbax-checkpoint`).
Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from tables import shown, table_lines

LAYERS = 12
RAW = "a thread that writes as many bytes"


def build_model(parameters: float, optimizer: Any) -> Any:
    import keras

    width = max(4, int((parameters / LAYERS) ** 0.5))
    model = keras.Sequential(
        [keras.Input((width,))] + [keras.layers.Dense(width, use_bias=False) for _ in range(LAYERS)]
    )
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def small_model() -> Any:
    """About 100 kB with its optimizer."""
    import keras

    layers = [keras.Input((32,))]
    layers += [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(64)]
    model = keras.Sequential([*layers, keras.layers.Dense(32)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def state_bytes(model: Any) -> int:
    variables = [*model.variables, *model.optimizer.variables]
    return sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables)


def timed(callback: Any, blocked: list[float]) -> Any:
    """The same callback; how long each end of an epoch takes is added to ``blocked``."""
    save = callback.on_epoch_end

    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        began = time.perf_counter()
        save(epoch, logs)
        blocked.append(time.perf_counter() - began)

    callback.on_epoch_end = on_epoch_end
    return callback


def callbacks(folder: Path, whole_model: bool) -> dict[str, Callable[[], Any]]:
    """By name: how to make each callback, writing to a fresh path."""
    import keras

    from keras_safe_ckpt import SafeModelCheckpoint

    name = "m.keras" if whole_model else "m.weights.h5"
    options = {} if whole_model else {"save_weights_only": True}
    made: dict[str, Callable[[], Any]] = {
        "SafeModelCheckpoint": lambda: SafeModelCheckpoint(folder / "ours" / name, **options),
        "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint(
            folder / "keras" / name, **options
        ),
    }
    if importlib.util.find_spec("orbax") is not None:
        made["OrbaxCheckpoint"] = lambda: keras.callbacks.OrbaxCheckpoint(
            str(folder / "orbax"), save_weights_only=not whole_model
        )
    return made


def raw_writer(folder: Path, size: int) -> Any:
    """No checkpoint at all: a thread writes as many bytes, syncs and renames, epoch by epoch."""
    import keras

    data = np.ones(size, np.uint8).data

    class RawWriter(keras.callbacks.Callback):
        thread: threading.Thread | None = None

        def write(self) -> None:
            descriptor = os.open(folder / "ours" / "new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for start in range(0, size, 8 << 20):
                os.write(descriptor, data[start : start + (8 << 20)])
            os.fsync(descriptor)
            os.close(descriptor)
            os.replace(folder / "ours" / "new", folder / "ours" / "raw")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.on_train_end()
            self.thread = threading.Thread(target=self.write)
            self.thread.start()

        def on_train_end(self, logs: Any = None) -> None:
            if self.thread is not None:
                self.thread.join()

    return RawWriter()


class Measured:
    """Seconds blocked at each save and seconds of each whole fit, by the name of the callback."""

    def __init__(self) -> None:
        self.blocked: dict[str, list[float]] = {}
        self.fits: dict[str, list[float]] = {}


def measure_fits(
    model: Any,
    folder: Path,
    *,
    whole_model: bool,
    floor: bool = False,
    rounds: int,
    epochs: int,
    batches: int,
    rows: int,
) -> Measured:
    width = model.input_shape[-1]
    rng = np.random.default_rng(0)
    x = rng.random((batches * rows, width), "float32")
    y = rng.random((batches * rows, model.output_shape[-1]), "float32")
    makers: dict[str, Callable[[], Any] | None] = {"none": None, **callbacks(folder, whole_model)}
    if floor:
        size = state_bytes(model)
        makers = {name: makers[name] for name in ("none", "SafeModelCheckpoint")}
        makers[RAW] = lambda: raw_writer(folder, size)
    measured = Measured()

    def fit(name: str) -> tuple[float, list[float]]:
        for child in folder.iterdir():
            shutil.rmtree(child)
        for child in ("ours", "keras", "orbax"):
            (folder / child).mkdir()
        blocked: list[float] = []
        maker = makers[name]
        used = [] if maker is None else [timed(maker(), blocked)]
        os.sync()  # What others left unwritten must not slow this one down.
        began = time.perf_counter()
        model.fit(x, y, batch_size=rows, epochs=epochs, verbose=0, shuffle=False, callbacks=used)
        return time.perf_counter() - began, blocked

    fit("none")  # Traces the training step, and touches the memory once.
    for number in range(rounds):
        first = number % len(makers)
        for name in [*makers][first:] + [*makers][:first]:
            seconds, blocked = fit(name)
            measured.fits.setdefault(name, []).append(seconds)
            measured.blocked.setdefault(name, []).extend(blocked)
            print(name, f"fit {seconds:.2f} s", *map(shown, blocked), sep="  ", file=sys.stderr)
    return measured


def idle_batch(folder: Path, calls: int = 20000) -> float:
    """Seconds of one call at the end of a batch at which nothing is due."""
    from keras_safe_ckpt import SafeModelCheckpoint

    callback = SafeModelCheckpoint(
        folder / "idle.weights.h5",
        save_weights_only=True,
        save_freq=10**9,
        save_every_seconds=10**9,
        save_best_only=True,
    )
    callback.set_model(small_model())
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    logs = {"loss": 0.5}
    took = []
    for start in range(0, calls, 1000):
        began = time.perf_counter()
        for batch in range(start, start + 1000):
            callback.on_train_batch_end(batch, logs)
        took.append((time.perf_counter() - began) / 1000)
    callback.on_train_end()
    print("idle batch", *map(shown, took), sep="  ", file=sys.stderr)
    return statistics.median(took)


Row = tuple[str, str, str, str, str]


def row(what: str, ours: float, other: str, theirs: float, goal: float | None) -> Row:
    ratio = ours / theirs
    verdict = "" if goal is None else f"<= {goal:.3g} {'yes' if ratio <= goal else 'NO'}"
    return what, shown(ours), f"{other}: {shown(theirs)}", f"{ratio:.3g}", verdict


def rows_of(
    title: str, measured: Measured, blocked_goal: float, fit_goal: float | None
) -> list[Row]:
    ours = "SafeModelCheckpoint"
    others = [name for name in measured.blocked if name not in ("none", ours)]
    blocked = {name: statistics.median(measured.blocked[name]) for name in [ours, *others]}
    fits = {name: statistics.median(values) for name, values in measured.fits.items()}
    table = [
        row(f"{title}: blocked by a save", blocked[ours], name, blocked[name], blocked_goal)
        for name in sorted(others)
    ]
    if fit_goal is not None:
        table.append(
            row(f"{title}: whole fit", fits[ours], "without a callback", fits["none"], fit_goal)
        )
        table += [
            row(
                f"{title}: whole fit with {name}",
                fits[name],
                "without a callback",
                fits["none"],
                None,
            )
            for name in sorted(others)
        ]
    return table


def show_floor(arguments: argparse.Namespace) -> int:
    """How much of the time of a fit any buffered write in the background takes on this machine."""
    import keras

    model = build_model(arguments.parameters, keras.optimizers.Adam())
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="ksc-bench-") as name:
        measured = measure_fits(
            model,
            Path(name),
            whole_model=False,
            floor=True,
            rounds=arguments.rounds,
            epochs=arguments.epochs,
            batches=arguments.batches,
            rows=arguments.rows,
        )
    fits = {name: statistics.median(values) for name, values in measured.fits.items()}
    for name, seconds in fits.items():
        size, ratio = state_bytes(model) / 1e9, seconds / fits["none"]
        print(f"{size:.1f} GB, whole fit with {name}: {seconds:.2f} s, {ratio:.2f}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6, help="of the model (100e6)")
    parser.add_argument("--rounds", type=int, default=3, help="fits with each callback (3)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs, and saves, of a fit (4)")
    parser.add_argument("--batches", type=int, default=6, help="batches of an epoch (6)")
    parser.add_argument("--rows", type=int, default=128, help="rows of a batch (128)")
    parser.add_argument("--directory", help="where to write; a temporary one by default")
    parser.add_argument("--small", action="store_true", help="leave the large models out")
    parser.add_argument("--floor", action="store_true", help="compare with a raw write only")
    parser.add_argument("--markdown", action="store_true", help="print a table for the README")
    arguments = parser.parse_args()
    import keras

    if arguments.floor:
        return show_floor(arguments)
    table: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="ksc-bench-") as name:
        folder = Path(name) / "fits"
        folder.mkdir()
        large = (keras.optimizers.SGD(momentum=0.9), keras.optimizers.Adam())
        for optimizer in () if arguments.small else large:
            model = build_model(arguments.parameters, optimizer)
            size = f"{state_bytes(model) / 1e9:.1f} GB"
            for whole_model in (False, True):
                title = f"{size} `{'.keras' if whole_model else '.weights.h5'}`"
                print(f"--- {title}", file=sys.stderr)
                measured = measure_fits(
                    model,
                    folder,
                    whole_model=whole_model,
                    rounds=arguments.rounds,
                    epochs=arguments.epochs,
                    batches=arguments.batches,
                    rows=arguments.rows,
                )
                table += rows_of(title, measured, 1 / 100, 1.15)
            del model
        model = small_model()
        for whole_model in (False, True):
            title = (
                f"{state_bytes(model) / 1e3:.0f} kB `{'.keras' if whole_model else '.weights.h5'}`"
            )
            print(f"--- {title}", file=sys.stderr)
            # Enough batches for a save to be written before the next one is due.
            measured = measure_fits(
                model, folder, whole_model=whole_model, rounds=arguments.rounds,
                epochs=20, batches=200, rows=8,
            )  # fmt: skip
            table += rows_of(title, measured, 1 / 3, None)
        idle = idle_batch(Path(name))
        verdict = "yes" if idle <= 20e-6 else "NO"
        table.append(("batch at which nothing is due", shown(idle), "", "", f"<= 20 µs {verdict}"))

    head: Row = ("what", "time", "compared with", "ratio", "goal")
    print("\n".join(table_lines(head, table, markdown=arguments.markdown)))
    return 1 if any(line[4].endswith("NO") for line in table) else 0


if __name__ == "__main__":
    sys.exit(main())
