"""All of a run at one position: captured in passing, and put back in the order Keras needs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keras_safe_ckpt.errors import IncompatibleCheckpointError
from keras_safe_ckpt.storage.snapshot import Snapshot, capture
from keras_safe_ckpt.training import state
from keras_safe_ckpt.training.backups import Backup
from keras_safe_ckpt.training.callback_states import CallbackStates
from keras_safe_ckpt.training.codec import decode, encode
from keras_safe_ckpt.training.logs import numbers_in
from keras_safe_ckpt.training.position import Position
from keras_safe_ckpt.training.random_states import capture_random, restore_random

_VARIABLES = "variables/"


@dataclass(frozen=True)
class Captured:
    """A run at ``position``: the model, and everything else as a document with arrays."""

    position: Position
    step: int
    snapshot: Snapshot
    document: Mapping[str, Any]
    arrays: Mapping[str, Any]
    metrics: Mapping[str, float]
    seconds: float


class RunState:
    """Captures the state of ``model`` and of the callbacks in its `fit`.

    ``history`` is the callback that Keras returns from `fit`. ``facts`` go into every checkpoint.
    """

    def __init__(
        self, model: Any, callbacks: Sequence[Any], history: Any, facts: Mapping[str, Any]
    ) -> None:
        self._model = model
        self._history = history
        self._facts = facts
        self._epoch_random: dict[str, Any] | None = None
        self.callbacks = CallbackStates(callbacks)

    def epoch_begins(self) -> None:
        """The order of the epoch is drawn next, by some kinds of data from these generators."""
        self._epoch_random = capture_random()

    def capture(self, position: Position, *, own_weights: bool = False) -> Captured:
        """What the run is now, on the thread that trains.

        ``own_weights``: also what this worker has of the weights that may differ from the chief's.
        """
        began = time.perf_counter()
        arrays: dict[str, Any] = {}
        document = {
            **self._facts,
            "position": encode(asdict(position), arrays, "position"),
            "history": encode(
                {"history": self._history.history, "epoch": self._history.epoch}, arrays, "history"
            ),
            "callbacks": self.callbacks.capture(arrays),
            "random": encode(capture_random(), arrays, "random"),
            "epoch_random": encode(
                self._epoch_random if position.executions else None, arrays, "epoch_random"
            ),
        }
        variables = state.capture_variables(self._model, own_weights=own_weights)
        arrays.update({f"{_VARIABLES}{name}": value for name, value in variables.items()})
        snapshot = capture(self._model)
        return Captured(
            position,
            self._step(position),
            snapshot,
            document,
            arrays,
            numbers_in(position.logs),
            time.perf_counter() - began,
        )

    def _step(self, position: Position) -> int:
        iterations = getattr(getattr(self._model, "optimizer", None), "iterations", None)
        if iterations is None:
            return sum(position.finished) + position.executions
        return int(iterations.numpy())


class Restoring:
    """A checkpoint on its way into a run, stage by stage.

    ``part`` is what this worker has added to it; without one, the chief's values are used.
    """

    def __init__(self, run: RunState, model: Any, backup: Backup, part: Backup | None) -> None:
        self._run = run
        self._model = model
        self._backup = backup
        self._arrays = backup.arrays()
        self._document = backup.document
        self.has_own_part = part is not None
        self._own_arrays = self._arrays if part is None else part.arrays()
        self._own_document = self._document if part is None else part.document
        self.position = position_in(self._document, self._arrays)

    def prepare_callbacks(self) -> None:
        """Before the others hear that training begins."""
        self._run.callbacks.prepare(self._own_document["callbacks"], self._own_arrays)

    def load_model(self) -> None:
        """Weights, optimizer and seeds; the metrics come when their epoch has begun."""
        kinds = (state.SEEDS, state.WEIGHTS)
        variables = self._variables(kinds)
        differences = state.differences(self._model, variables, kinds)
        if differences:
            raise IncompatibleCheckpointError(self._backup.path, differences)
        self._backup.load_into(self._model)
        state.restore_variables(self._model, variables, kinds)

    def restore_callbacks(self, history: Any) -> None:
        """After the others have heard that training begins."""
        self._run.callbacks.restore(self._own_document["callbacks"], self._own_arrays)
        found = decode(self._document["history"], self._arrays)
        history.history = found["history"]
        history.epoch = found["epoch"]

    def restore_epoch_random(self) -> None:
        """Before the data of the epoch is asked for."""
        document, arrays = self._own_document, self._own_arrays
        states = decode(document.get("epoch_random"), arrays)
        if states is not None:
            restore_random(states)

    def restore_random(self) -> None:
        """When the place is reached: what was drawn on the way there does not count."""
        restore_random(decode(self._own_document["random"], self._own_arrays))

    def restore_metrics(self) -> list[str]:
        """Returns why not, if the metrics are others than they were."""
        kinds = (state.METRICS,)
        variables = self._variables(kinds)
        differences = state.differences(self._model, variables, kinds)
        if not differences:
            state.restore_variables(self._model, variables, kinds)
        return differences

    def close(self) -> None:
        self._backup.close()

    def _variables(self, kinds: tuple[str, ...]) -> dict[str, Any]:
        return {
            name.removeprefix(_VARIABLES): self._value(name)
            for name in self._own_arrays
            if name.startswith(tuple(f"{_VARIABLES}{kind}/" for kind in kinds))
        }

    def _value(self, name: str) -> Any:
        return self._own_arrays[name]


def position_in(document: Mapping[str, Any], arrays: Mapping[str, Any]) -> Position:
    found = decode(document["position"], arrays)
    return Position(**{**found, "finished": tuple(found["finished"])})
