"""What each peer costs: how long it blocks training, is not durable, prolongs `fit`, restores.

All in one process, one after the other in an order that rotates from round to round.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from callback import build_model, small_model, state_bytes
from forked import Tell
from peers_known import (
    RESUMING,
    StoppedError,
    finish,
    hooks_wrapped,
    load_by_hand,
    make_callback,
    make_manager,
    of_kind,
    saves_logged,
    sync_what_it_left,
)
from storage import seconds, warm_up_memory

NONE = "none"


@dataclass(frozen=True)
class Plan:
    """How much is measured of one model; it is the small one without ``parameters``."""

    rounds: int  # fits with each callback
    epochs: int  # of a fit, each with a save
    batches: int  # of an epoch
    rows: int  # of a batch
    saves: int  # of each peer, until they are durable
    restores: int
    parameters: float | None = None

    def steps(self, names: list[str]) -> int:
        """How many times `measure` tells that it got on."""
        callbacks = len(of_kind(names, "callback"))
        all_of_them = callbacks + len(of_kind(names, "manager"))
        return self.rounds * (callbacks + 1) + (self.saves + self.restores) * all_of_them


class Costs:
    """Measures one model; the figures are in `found`: what, then who, then seconds."""

    def __init__(self, plan: Plan, names: list[str], folder: Path, tell: Tell) -> None:
        import keras

        self._plan, self._folder, self._tell = plan, folder, tell
        self._callbacks = of_kind(names, "callback")
        self._names = of_kind(names, "callback", "manager")
        adam = keras.optimizers.Adam()
        large = plan.parameters is not None
        self._model = build_model(plan.parameters, adam) if large else small_model()
        self.size = state_bytes(self._model)
        rows = plan.batches * plan.rows
        rng = np.random.default_rng(0)
        self._x = rng.random((rows, self._model.input_shape[-1]), "float32")
        self._y = rng.random((rows, self._model.output_shape[-1]), "float32")
        self._managers: dict[str, Any] = {}
        self.found: dict[str, dict[str, list[float]]] = {
            what: {} for what in ("blocked", "durable", "fits", "restore")
        }

    def measure(self) -> dict[str, Any]:
        warm_up_memory(3 * self.size)
        self._fit([], epochs=1, batches=self._plan.batches)  # Traces the training step.
        for name in self._callbacks:
            self._save_in_fit(name)  # Imports what it needs.
        for name in in_turns([NONE, *self._callbacks], self._plan.rounds):
            self._measure_fit(name)
        self._make_managers()
        for name in in_turns(self._names, self._plan.saves):
            self._measure_save(name)
        # All before the first of them is resumed: a model remembers where that one had been.
        for name in self._callbacks:
            self._save_in_fit(name, stop=True)
        for name in self._names:
            self._restore(name)  # Files that were read before are compared.
        for name in in_turns(self._names, self._plan.restores):
            self._measure_restore(name)
        return {"bytes": self.size, **self.found}

    def _note(self, what: str, name: str, *values: float) -> None:
        self.found[what].setdefault(name, []).extend(values)

    def _place(self, name: str) -> Path:
        return self._folder / "".join(filter(str.isalpha, name))

    def _emptied(self, name: str) -> Path:
        shutil.rmtree(self._place(name), ignore_errors=True)
        self._place(name).mkdir()
        return self._place(name)

    def _fit(self, callbacks: list[Any], *, epochs: int, batches: int) -> None:
        rows = self._plan.rows
        self._model.fit(
            self._x[: batches * rows], self._y[: batches * rows], batch_size=rows,
            epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks,
        )  # fmt: skip

    def _measure_fit(self, name: str) -> None:
        """A whole `fit`, and in it how long training waits at the change of epochs."""
        blocked: list[float] = []

        def ends(hook: Callable[[], None], *_: Any) -> None:
            blocked.append(seconds(hook))

        def begins(hook: Callable[[], None], *_: Any) -> None:
            took = seconds(hook)
            if blocked:
                blocked[-1] += took

        used = [] if name == NONE else [make_callback(name, self._emptied(name))]
        os.sync()  # What others left unwritten must not slow this one down.
        with hooks_wrapped(on_epoch_end=ends, on_epoch_begin=begins):
            took = seconds(
                lambda: self._fit(used, epochs=self._plan.epochs, batches=self._plan.batches)
            )
        self._note("fits", name, took)
        self._note("blocked", name, *blocked)
        if name != NONE:
            shutil.rmtree(self._place(name), ignore_errors=True)
        self._tell(note=f"{name}: fit {took:.2f} s, blocked", seconds=blocked)

    def _save_in_fit(self, name: str, stop: bool = False) -> float:
        """The second save of a `fit`, over the first one, until it is durable."""
        folder = self._emptied(name)
        callback = make_callback(name, folder)
        took: list[float] = []

        def ends(hook: Callable[[], None], *_: Any) -> None:
            logged = saves_logged(folder)
            os.sync()
            began = time.perf_counter()
            hook()
            finish(name, callback, folder, logged)
            sync_what_it_left(name, folder)
            took.append(time.perf_counter() - began)

        def begins(hook: Callable[[], None], epoch: int, *_: Any) -> None:
            if stop and epoch == 2:
                raise StoppedError
            hook()

        with hooks_wrapped(on_epoch_end=ends, on_epoch_begin=begins):
            self._fit([callback], epochs=3 if stop else 2, batches=1)
        return took[1]

    def _make_managers(self) -> None:
        import tensorflow as tf

        checkpoint = tf.train.Checkpoint(model=self._model)
        for name in of_kind(self._names, "manager"):
            self._managers[name] = make_manager(name, checkpoint, self._emptied(name))
            self._managers[name].save()

    def _measure_save(self, name: str) -> None:
        if name in self._managers:
            os.sync()
            blocked = seconds(self._managers[name].save)
            durable = blocked + seconds(lambda: sync_what_it_left(name, self._place(name)))
            self._note("blocked", name, blocked)
        else:
            durable = self._save_in_fit(name)
        self._note("durable", name, durable)
        self._tell(note=f"{name}: durable after", seconds=[durable])

    def _measure_restore(self, name: str) -> None:
        wanted = self._model.weights[0]
        before = wanted.numpy()
        wanted.assign(np.zeros_like(before))
        warm_up_memory(self.size)  # The host of a virtual machine may have to provide it again.
        took = self._restore(name)
        if not np.any(wanted.numpy()):
            raise RuntimeError(f"{name} has restored nothing")
        self._note("restore", name, took)
        self._tell(note=f"{name}: restored in", seconds=[took])

    def _restore(self, name: str) -> float:
        if name in self._managers:
            manager = self._managers[name]
            # Ours also has `restore`; this one both have.
            return seconds(manager.restore_or_initialize)
        if name not in RESUMING:
            return seconds(lambda: load_by_hand(name, self._model, self._place(name)))
        return self._resume(name)

    def _resume(self, name: str) -> float:
        """All that the callbacks do before the first batch of a `fit` that goes on."""
        took: list[float] = []

        def timed(hook: Callable[[], None], *_: Any) -> None:
            took.append(seconds(hook))

        def stops(hook: Callable[[], None], *_: Any) -> None:
            raise StoppedError

        with hooks_wrapped(on_train_begin=timed, on_epoch_begin=timed, on_train_batch_begin=stops):
            self._fit([make_callback(name, self._place(name))], epochs=3, batches=1)
        return sum(took)


def in_turns(names: list[str], rounds: int) -> Iterator[str]:
    """Everybody once in each round, and first in one of them."""
    for number in range(rounds):
        first = number % len(names)
        yield from names[first:] + names[:first]


def measure_costs(tell: Tell, plans: dict[str, Plan], names: list[str], folder: Path) -> None:
    """To be run in a process of its own."""
    for size, plan in plans.items():
        place = folder / size
        place.mkdir()
        tell(costs={size: Costs(plan, names, place, tell).measure()})
        shutil.rmtree(place)
