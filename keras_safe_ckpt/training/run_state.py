"""All of a run at one position: captured in passing, and put back in the order Keras needs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keras_safe_ckpt.errors import (
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    SafeCheckpointError,
)
from keras_safe_ckpt.storage.snapshot import Snapshot, capture
from keras_safe_ckpt.training import state
from keras_safe_ckpt.training.backups import Backup
from keras_safe_ckpt.training.callback_states import CallbackStates
from keras_safe_ckpt.training.codec import decode, encode
from keras_safe_ckpt.training.logs import numbers_in
from keras_safe_ckpt.training.position import Position
from keras_safe_ckpt.training.random_states import capture_random, check_random, restore_random

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
        self._dropped: set[str] = set()
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
            "position": encode(
                {**asdict(position), "logs": self._kept(position.logs)}, arrays, "position"
            ),
            # In pairs: its order is Keras's, and the manifest sorts.
            "history": encode(
                {
                    "history": [[k, v] for k, v in self._kept(self._history.history).items()],
                    "epoch": list(self._history.epoch),
                },
                arrays,
                "history",
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

    def _kept(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the logs that a file can hold; what else a step returns is no reason to fail."""
        kept = {}
        for name, value in logs.items():
            try:
                encode(value, {}, name)
                kept[name] = value
            except (TypeError, ValueError):
                if name not in self._dropped:
                    self._dropped.add(name)
                    warnings.warn(
                        f"{name!r} in the logs is not kept in checkpoints: expected numbers or "
                        f"arrays of them. Received: {type(value).__name__}",
                        stacklevel=2,
                    )
        return kept

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
        own = backup if part is None else part
        try:
            arrays = backup.arrays()
            self._own_arrays = arrays if part is None else part.arrays()
            self.position = _position(decode(backup.document["position"], arrays))
            found = decode(backup.document["history"], arrays)
            self._history = {str(name): list(values) for name, values in found["history"]}
            self._epochs = [int(epoch) for epoch in found["epoch"]]
            self._callbacks = {
                key: decode(value, self._own_arrays)
                for key, value in own.document["callbacks"].items()
            }
            self._random = decode(own.document["random"], self._own_arrays)
            self._epoch_random = decode(own.document["epoch_random"], self._own_arrays)
            check_random(self._random)
            if self._epoch_random is not None:
                check_random(self._epoch_random)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, SafeCheckpointError):
                raise
            kind = f"{type(error).__name__}: {error}"
            raise CorruptCheckpointError(
                own.path, f"what it says of its run cannot be understood ({kind})"
            ) from error

    def prepare_callbacks(self) -> None:
        """Before the others hear that training begins."""
        self._run.callbacks.prepare(self._callbacks)

    def load_model(self) -> None:
        """Weights, optimizer and seeds; the metrics come when their epoch has begun."""
        kinds = (state.SEEDS, state.WEIGHTS, state.STATES)
        variables = self._variables(kinds)
        differences = state.differences(self._model, variables, kinds)
        if differences:
            raise IncompatibleCheckpointError(self._backup.path, differences)
        self._backup.load_into(self._model)
        state.restore_variables(self._model, variables, kinds)

    def restore_callbacks(self, history: Any) -> None:
        """After the others have heard that training begins."""
        self._run.callbacks.restore(self._callbacks)
        history.history = {name: list(values) for name, values in self._history.items()}
        history.epoch = list(self._epochs)

    def restore_epoch_random(self) -> None:
        """Before the data of the epoch is asked for."""
        if self._epoch_random is not None:
            restore_random(self._epoch_random)

    def restore_random(self) -> None:
        """When the place is reached: what was drawn on the way there does not count."""
        restore_random(self._random)

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
            name.removeprefix(_VARIABLES): value
            for name, value in self._own_arrays.items()
            if name.startswith(tuple(f"{_VARIABLES}{kind}/" for kind in kinds))
        }


def _position(found: Mapping[str, Any]) -> Position:
    counts = [found["epoch"], found["executions"], found["batch"], *found["finished"]]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(f"a count is not a whole number: {counts[:9]}")
    return Position(
        epoch=found["epoch"],
        executions=found["executions"],
        batch=found["batch"],
        logs=dict(found["logs"]),
        finished=tuple(found["finished"]),
        trained=bool(found["trained"]),
        stopping=bool(found["stopping"]),
        ended=bool(found["ended"]),
    )
