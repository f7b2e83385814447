"""What a checkpoint says about its run beside the state, and what follows if it is not so now."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.errors import IncompatibleCheckpointError
from keras_safe_ckpt.training.backups import Backup
from keras_safe_ckpt.training.keras_fit import FitAround
from keras_safe_ckpt.training.position import Position
from keras_safe_ckpt.training.random_states import global_seed_is_set
from keras_safe_ckpt.training.state import unbuilt_optimizers, unknown_variables

_DATA_NOT_FOUND = (
    "The data of `fit` was not found in this version of Keras: after a restart an epoch begins "
    "where its data begins, which is exact only for data that comes in the same order in every "
    "epoch."
)


def facts_of(
    model: Any, params: Mapping[str, Any], fit: FitAround, role: Role, life: str
) -> dict[str, Any]:
    """What must be the same for a run to go on as if nothing had happened."""
    strategy = getattr(model, "distribute_strategy", None)
    return {
        "life": life,
        "steps": params.get("steps"),
        "epochs": params.get("epochs"),
        "batch_size": None if fit.epochs is None else fit.epochs.batch_size,
        "steps_per_execution": int(getattr(model, "steps_per_execution", 1) or 1),
        "workers": role.world if role.trains_together else 1,
        "replicas": int(getattr(strategy, "num_replicas_in_sync", 1)),
    }


def what_cannot_hold(model: Any, fit: FitAround) -> list[str]:
    """Why a restarted run would not end as this one, in words, and what to do about it."""
    if fit.epochs is None:
        reasons: list[str | None] = [_DATA_NOT_FOUND]
    else:
        reasons = [
            fit.epochs.order_is_drawn_anew(global_seed_is_set()),
            fit.epochs.validation_is_drawn_anew(),
        ]
    unbuilt = unbuilt_optimizers(model)
    if unbuilt:
        reasons.append(
            f"The model has optimizers that are not built yet: {', '.join(unbuilt)}. A restarted "
            "run could not load their state. Call optimizer.build(variables) on each before fit."
        )
    unknown = unknown_variables(model)
    if unknown:
        reasons.append(
            f"The model holds plain tf.Variables, which Keras does not save: {', '.join(unknown)}. "
            "After a restart they begin anew. Use self.add_weight(...) or keras.Variable."
        )
    return [reason for reason in reasons if reason is not None]


#: The lives in which a `fit` of this process has come to its end.
_finished_here: set[str] = set()


def finished_here(life: str) -> None:
    """Remember that a `fit` of this process was this life, and has come to its end."""
    _finished_here.add(life)


def refuse_finished(backup: Backup) -> None:
    """Raise for the last checkpoint of a run that this process has brought to its end.

    To another `fit` it would say that there is nothing to do. In a process that was started again
    there is none, indeed: the one before was interrupted between `fit` and its own end.
    """
    if backup.document.get("finished") and backup.document.get("life") in _finished_here:
        raise IncompatibleCheckpointError(
            backup.path,
            [
                f"the run that it belongs to is finished, after {backup.manifest.epoch} epochs, by "
                "this program; delete it or use another directory to train anew (or "
                "restore='if_possible'), or load the finished model by "
                "CheckpointStore(directory).load(model)"
            ],
        )


def fitting_position(position: Position, backup: Backup, now: Mapping[str, Any]) -> Position:
    """Where to go on in a `fit` of which ``now`` holds; what is different from before is said."""
    before, epochs = backup.document, now["epochs"]
    if epochs is not None and position.epoch + bool(position.executions) > epochs:
        raise IncompatibleCheckpointError(
            backup.path,
            [
                f"epochs: it was taken at {position}, and fit is to train {epochs} in all; use "
                "more epochs, or another directory"
            ],
        )
    if position.ended and not position.stopping and epochs is not None:
        # It had trained all the epochs it was to; now there may be more.
        position = replace(position, ended=position.epoch >= epochs)
    changed = [
        f"{name.replace('_', ' ')} was {before.get(name)} and is {now[name]}"
        for name in ("steps", "batch_size", "steps_per_execution", "workers", "replicas")
        if before.get(name) != now[name]
        and not (name in ("steps", "batch_size") and None in (before.get(name), now[name]))
    ]
    if before.get("steps_per_execution") != now["steps_per_execution"]:
        position = _converted(position, _steps(before), _steps(now))
    if now["steps"] is not None:
        # Where the epoch has become shorter than what was done of it, it ends.
        most = math.ceil(now["steps"] / now["steps_per_execution"])
        done = min(position.executions, most)
        position = replace(position, executions=done, batch=min(position.batch, now["steps"]))
    if changed:
        warnings.warn(
            f"This is not the run that was interrupted: {'; '.join(changed)}. It goes on at "
            f"{position}, from the weights of the checkpoint, and will not end as that one would "
            "have. ('steps' are the batches of an epoch.)",
            stacklevel=2,
        )
    return position


def _steps(facts: Mapping[str, Any]) -> int:
    return max(1, int(facts.get("steps_per_execution") or 1))


def _converted(position: Position, before: int, now: int) -> Position:
    """In executions of another size; a batch too many is trained on again."""
    return replace(
        position,
        executions=position.executions * before // now,
        batch=position.executions * before // now * now,
        finished=tuple(math.ceil(count * before / now) for count in position.finished),
    )
