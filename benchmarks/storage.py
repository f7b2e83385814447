"""What a save, a load and a lock cost, as ratios within one run.

    python benchmarks/storage.py                       # 100M parameters with Adam: 1.2 GB
    python benchmarks/storage.py --parameters 5e6      # smaller and quicker
    python benchmarks/storage.py --markdown            # the table of the README

What is compared is measured in turn, in one process. Times and ratios are the best of ``--rounds``
rounds: what else happens on a shared machine only ever adds time, and on a virtual one the host
may take a second to provide memory again. The ratio of the medians stands beside them, so that
the choice hides nothing, and every round is printed to standard error.
Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from tables import shown, table_lines


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def build_model(parameters: float):
    import keras

    layers = 12
    width = max(4, int((parameters / layers) ** 0.5))
    model = keras.Sequential(
        [keras.Input((width,))] + [keras.layers.Dense(width, use_bias=False) for _ in range(layers)]
    )
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def state_views(model) -> list[np.ndarray]:
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(variable.value.read_value()) for variable in variables]


def raw_write(views: list[np.ndarray], path: Path) -> None:
    """What any save must do at least: all the bytes beside the old file, fsync, replace it.

    The old file stays until the end, as it must: removing it first would also hand its warm
    pages to the new one, which no safe save can have.
    """
    temp = path.with_suffix(".new")
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for view in views:
        data = view.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), 8 << 20):
            os.write(descriptor, data[start : start + (8 << 20)])
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(temp, path)


def warm_up_memory(size: int) -> None:
    """Touch memory once, so that no measurement pays for the host's page tables.

    On a virtual machine the first use of a page costs several times as much as any later one,
    and page cache is memory too: without this the first files measured would lose.
    """
    np.zeros(size, np.uint8)[:: os.sysconf("SC_PAGE_SIZE")] = 1


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """The highest resident size while the block runs."""

    def __enter__(self) -> PeakMemory:
        self.peak = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()


def measure_saves_and_loads(model, views, folder: Path, rounds: int) -> dict[str, list[float]]:
    import keras

    from keras_safe_ckpt import CheckpointStore
    from keras_safe_ckpt.storage.snapshot import capture

    weights = CheckpointStore(folder / "weights")
    whole = CheckpointStore(folder / "whole", format="keras")
    target = np.empty(sum(view.nbytes for view in views), np.uint8)
    target[:] = 0  # Page faults are not part of a memcpy.

    def memcpy() -> None:
        start = 0
        for view in views:
            target[start : start + view.nbytes] = view.reshape(-1).view(np.uint8)
            start += view.nbytes

    our_weights = folder / "weights" / "m.weights.h5"
    our_whole = folder / "whole" / "m.keras"
    # What is compared stands in one group and is measured in turn, so that the state of the
    # machine (page cache, memory that the host must provide again) is the same for all of it.
    groups: list[dict[str, Callable[[], object]]] = [
        {
            "memcpy": memcpy,
            "capture": lambda: capture(model),
            "capture .keras": lambda: capture(model, whole_model=True),
        },
        {
            "raw write + fsync": lambda: raw_write(views, folder / "raw"),
            "save .weights.h5": lambda: weights.publish(model, step=1, name="m.weights.h5"),
            "save .keras": lambda: whole.publish(model, step=1, name="m.keras"),
        },
        {
            "Keras save_weights": lambda: model.save_weights(folder / "k.weights.h5"),
            "Keras save": lambda: model.save(folder / "k.keras"),
        },
        {
            "load .weights.h5": lambda: weights.load(model, our_weights),
            "Keras load_weights": lambda: model.load_weights(folder / "k.weights.h5"),
        },
        {
            "load .keras": lambda: whole.load(model, our_whole),
            "Keras load_weights .keras": lambda: model.load_weights(folder / "k.keras"),
        },
        {
            "load .keras as a new model": lambda: whole.load(None, our_whole),
            "Keras load_model": lambda: keras.models.load_model(folder / "k.keras"),
        },
    ]
    measured: dict[str, list[float]] = {}
    for group in groups:
        taken: dict[str, list[float]] = {name: [] for name in group}
        for number in range(rounds + 2):
            # Whoever goes first pays for what the machine forgot meanwhile: take turns.
            first = number % len(group)
            for name, action in [*group.items()][first:] + [*group.items()][:first]:
                elapsed = seconds(action)
                if number >= 2:  # The first rounds warm up.
                    taken[name].append(elapsed)
            os.sync()  # Keras does not: what it left unwritten must not slow the next one down.
        for name, values in taken.items():
            measured[name] = values
            print(name, *map(shown, values), sep="  ", file=sys.stderr)
    return measured


def measure_memory(parameters: float, folder: Path) -> float:
    """Extra resident memory of a background save while training goes on, per state byte.

    To be run in a process of its own: memory that was used before hides what is used now.
    """
    from keras_safe_ckpt import CheckpointStore

    model = build_model(parameters)
    state_bytes = sum(view.nbytes for view in state_views(model))
    width = model.input_shape[-1]
    x, y = np.ones((16, width), "float32"), np.ones((16, width), "float32")

    def train() -> None:
        model.fit(x, y, batch_size=4, epochs=1, verbose=0)

    train()
    with PeakMemory() as without:
        train()
    store = CheckpointStore(folder / "memory")
    with PeakMemory() as with_saves:
        for step in range(3):
            store.publish(model, step=step, name="m.weights.h5", background=True)
            train()
        store.wait()
    return (with_saves.peak - without.peak) / state_bytes


def measure_memory_apart(parameters: float, folder: Path) -> float:
    command = [sys.executable, __file__, "--parameters", str(parameters)]
    command += ["--directory", str(folder), "--only-memory"]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def measure_lock(folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    import portalocker

    from keras_safe_ckpt import LockManager

    locks, path = LockManager(), folder / "resource"

    def ours() -> None:
        for _ in range(500):
            with locks.exclusive(path):
                pass

    def bare() -> None:
        for _ in range(500):
            with portalocker.Lock(folder / "bare.lock", "a", timeout=1):
                pass

    pairs = [(seconds(ours) / 500, seconds(bare) / 500) for _ in range(max(5, rounds))]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


#: what, measured, compared with, at most
GOALS = [
    ("capture (training is blocked)", "capture", "memcpy", 0.1),
    ("`.weights.h5` durable", "save .weights.h5", "raw write + fsync", 1.25),
    ("`.keras` durable", "save .keras", "raw write + fsync", 1.6),
    ("`.weights.h5` verified load", "load .weights.h5", "Keras load_weights", 1.2),
    ("`.keras` verified load into a model", "load .keras", "Keras load_weights .keras", 1.2),
    (
        "`.keras` verified load as a new model",
        "load .keras as a new model",
        "Keras load_model",
        1.2,
    ),
    ("lock, uncontended", "lock", "bare portalocker lock", 2.0),
]
#: For comparison, without a goal.
OTHERS = [
    ("capture for `.keras`", "capture .keras", "memcpy"),
    ("`.weights.h5` durable", "save .weights.h5", "Keras save_weights"),
    ("`.keras` durable", "save .keras", "Keras save"),
]


def row(what: str, ours: list[float], other: str, theirs: list[float], goal: float | None):
    ratio = min(ours) / min(theirs)
    medians = statistics.median(ours) / statistics.median(theirs)
    verdict = "" if goal is None else f"<= {goal} {'yes' if ratio <= goal else 'NO'}"
    comparison = f"{other}: {shown(min(theirs))}"
    return (what, shown(min(ours)), comparison, f"{ratio:.2f}", f"{medians:.2f}", verdict)


def rows(times: dict[str, list[float]], memory: float) -> list[tuple[str, ...]]:
    table = [row(what, times[o], other, times[other], goal) for what, o, other, goal in GOALS]
    verdict = "yes" if memory <= 1.15 else "NO"
    what = "extra memory, saving while training"
    table.append((what, "", "size of the state", f"{memory:.2f}", "", f"<= 1.15 {verdict}"))
    return table + [row(what, times[o], other, times[other], None) for what, o, other in OTHERS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6, help="of the model (100e6)")
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds (8)")
    parser.add_argument("--directory", help="where to write; a temporary one by default")
    parser.add_argument("--markdown", action="store_true", help="print a table for the README")
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_memory:
        print(measure_memory(arguments.parameters, Path(arguments.directory)))
        return 0

    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="ksc-bench-") as name:
        folder = Path(name)
        model = build_model(arguments.parameters)
        views = state_views(model)
        state_bytes = sum(view.nbytes for view in views)
        warm_up_memory(6 * state_bytes)
        times = measure_saves_and_loads(model, views, folder, arguments.rounds)
        times["lock"], times["bare portalocker lock"] = measure_lock(folder, arguments.rounds)
        memory = measure_memory_apart(arguments.parameters, folder)

    head = ("what", "time", "compared with", "ratio", "of medians", "goal")
    table = rows(times, memory)
    print(
        f"{model.count_params() / 1e6:.0f}M parameters, state {state_bytes / 1e9:.2f} GB, "
        f"best of {arguments.rounds} rounds\n"
    )
    print("\n".join(table_lines(head, table, markdown=arguments.markdown)))
    return 1 if any(row[5].endswith("NO") for row in table) else 0


if __name__ == "__main__":
    sys.exit(main())
