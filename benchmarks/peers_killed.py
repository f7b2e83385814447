"""What is left of a checkpoint when a process is killed in the middle of saving the next one.

A real `kill -9` at random moments inside a save over (or beside) the checkpoint before, in a
process of its own; then another process restores as a program would, and looks whether it has got
exactly what one of the two saves has saved. The page cache outlives the process: this is not a
power cut. One bit of a whole checkpoint is flipped, too: does a restore notice?
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from callback import build_model
from forked import Child, Tell
from peers_known import (
    RESUMING,
    StoppedError,
    finish,
    hooks_wrapped,
    kind_of,
    load_by_hand,
    make_callback,
    make_manager,
    saves_logged,
)
from peers_synced import UNKNOWN, judged, traced

LIMIT_SECONDS = 120.0
#: What a restore may find.
NOTHING, PREVIOUS, NEW = "nothing", "the previous one", "the new one"
MIXTURE = "values of no save"


class Marked:
    """A model whose values tell which save they are from."""

    def __init__(self, parameters: float) -> None:
        import keras

        keras.utils.set_random_seed(1)
        self.model = build_model(parameters, keras.optimizers.Adam())
        slots = [v for v in self.model.optimizer.variables if len(v.shape) > 0]
        self._variables = [*self.model.weights, *slots]

    def _values(self, number: int) -> Any:
        for index, variable in enumerate(self._variables):
            rng = np.random.default_rng(index)  # Not equal values: those can be compressed away.
            yield variable, rng.random(variable.shape, "float32") + np.float32(number)

    def mark(self, number: int) -> None:
        for variable, values in self._values(number):
            variable.assign(values)

    def marked(self) -> int | None:
        """The number that all of them are marked with."""
        for number in range(3):
            if all(np.array_equal(v.numpy(), values) for v, values in self._values(number)):
                return number
        return None

    def fit(self, callback: Any) -> None:
        x = np.ones((1, self.model.input_shape[-1]), "float32")
        self.model.fit(x, x, epochs=4, verbose=0, callbacks=[callback])


def save_twice(tell: Tell, name: str, parameters: float, folder: Path) -> None:
    """Saves what is marked 1, whole; then what is marked 2, to be killed meanwhile.

    The folder is there when it may begin.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    while not folder.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    marked = Marked(parameters)

    def announced(number: int, save: Callable[[], object]) -> None:
        marked.mark(number)
        tell(saving=number)
        began = time.perf_counter()
        save()
        tell(saved=number, seconds=time.perf_counter() - began)
        if number == 2:
            raise StoppedError

    with contextlib.suppress(StoppedError):
        if kind_of(name) == "manager":
            import tensorflow as tf

            manager = make_manager(name, tf.train.Checkpoint(model=marked.model), folder)
            for number in (1, 2):
                announced(number, manager.save)
        else:
            callback = make_callback(name, folder)

            def ends(hook: Callable[[], None], epoch: int, *_: Any) -> None:
                def save() -> None:
                    logged = saves_logged(folder)
                    hook()
                    finish(name, callback, folder, logged)

                announced(epoch + 1, save)

            with hooks_wrapped(on_epoch_end=ends):
                marked.fit(callback)
    os._exit(0)  # As it is: what is left by a program that ends well is not the question.


def restore(tell: Tell, name: str, parameters: float, folder: Path) -> None:
    """Restores as a program would, and tells what it has got."""
    try:
        tell(found=whose(name, parameters, folder))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
        text = " ".join(str(error).replace(str(folder), "").split())
        tell(found=f"{type(error).__name__}: {text[:100]}")


def whose(name: str, parameters: float, folder: Path) -> str:
    """Which of the two saves the restored values are from."""
    marked = Marked(parameters)
    marked.mark(0)
    epochs: list[int] = []
    if kind_of(name) == "manager":
        import tensorflow as tf

        manager = make_manager(name, tf.train.Checkpoint(model=marked.model), folder)
        manager.restore_or_initialize()
    elif name in RESUMING:

        def begins(hook: Callable[[], None], epoch: int, *_: Any) -> None:
            hook()
            epochs.append(epoch)
            raise StoppedError

        with hooks_wrapped(on_epoch_begin=begins):
            marked.fit(make_callback(name, folder))
    else:
        load_by_hand(name, marked.model, folder)
    number = marked.marked()
    if number is None:
        return MIXTURE
    if epochs not in ([], [number]):
        return "the weights of one, the epoch of the other"
    return (NOTHING, PREVIOUS, NEW)[number]


def found_by(name: str, parameters: float, folder: Path, log: Path) -> str:
    child = Child((restore, (name, parameters, folder)), log)
    try:
        facts = child.hear_all(LIMIT_SECONDS)
    except TimeoutError:
        facts = {"found": f"no answer within {LIMIT_SECONDS:g} s"}
    child.end()
    child.close()
    return str(facts.get("found", "crashed"))


def kill_in_save(job: tuple[Any, ...], log: Path, delay: float) -> tuple[bool, float]:
    """Whether it was killed before its second save had ended, and how long that took if not."""
    job[2].mkdir()
    child = Child((save_twice, job), log)
    took = float("inf")
    while (message := child.hear(LIMIT_SECONDS)) is not None:
        if message.get("saving") == 2 and delay != float("inf"):
            time.sleep(delay)
            child.kill()
        if message.get("saved") == 2:
            took = message["seconds"]
    code = child.end()
    child.close()
    if took == float("inf") and code >= 0:
        raise RuntimeError(f"{job[0]} could not save:\n{child.last_words()}")
    return took == float("inf"), took


def measure_kills(tell: Tell, name: str, parameters: float, kills: int, folder: Path) -> None:
    """To be run in a process of its own: one peer."""
    folder.mkdir()
    place, log = folder / "saved", folder / "log"
    job = (name, parameters, place)
    # How long a save takes, so that the moments are spread all over it.
    _, whole = kill_in_save(job, log, float("inf"))
    found = found_by(name, parameters, place, log)
    if found != NEW:
        raise RuntimeError(f"{name}: an undisturbed save was restored as {found}")
    flip_a_bit(place)
    flipped = found_by(name, parameters, place, log)
    draw = random.Random(name)
    tries: list[dict[str, Any]] = []
    too_late = 0
    while len(tries) < kills and too_late < 10 * kills:
        shutil.rmtree(place)
        delay = whole * (len(tries) + draw.random()) / kills
        killed, took = kill_in_save(job, log, delay)
        if killed:
            tries.append({"after": delay, "found": found_by(name, parameters, place, log)})
            tell(note=f"{name}, killed after {1e3 * delay:.0f} ms: {tries[-1]['found']}")
        else:  # It was quicker than the first one.
            too_late += 1
            whole = min(whole, took)
    syncs = watch_syncs(job, folder)
    tell(note=f"{name}, a flipped bit: {flipped}; syncs: {syncs}")
    facts = {"save_seconds": whole, "tries": tries, "too_late": too_late}
    tell(killed={name: {**facts, "flipped": flipped, "syncs": syncs}})


def flip_a_bit(folder: Path) -> None:
    """In the middle of what was saved last: the newest of the large files."""
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    size = max(facts.st_size for facts in found.values())
    large = [path for path, facts in found.items() if facts.st_size > size / 2]
    newest = max(large, key=lambda path: found[path].st_mtime_ns)
    with open(newest, "r+b") as file:
        file.seek(found[newest].st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def watch_syncs(job: tuple[Any, ...], folder: Path) -> str:
    """Whether it syncs what it saves."""
    shutil.rmtree(job[2])
    child = Child((save_twice, job), folder / "log")
    with traced(child.pid, folder / "calls") as watching:
        job[2].mkdir()
        child.hear_all(LIMIT_SECONDS)
        code = child.end()
    child.close()
    if code != 0:
        raise RuntimeError(f"{job[0]} could not save:\n{child.last_words()}")
    return judged(folder / "calls", job[2]) if watching else UNKNOWN
