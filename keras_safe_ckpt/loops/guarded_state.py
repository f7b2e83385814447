"""What a guard restores when it is made, and saves at a notice."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from keras_safe_ckpt.cluster.cohort import Cohort
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.errors import AgreementError, CheckpointNotFoundError
from keras_safe_ckpt.loops.trackables import HeldVariables, add_seeds
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.lock_backend import Locks

#: As TensorFlow's handler calls the variable, so that each goes on from the other's checkpoints.
_RUNS = "checkpointed_runs"
#: One more than TensorFlow keeps: should the newest be damaged, there is another one.
_MAX_TO_KEEP = 2
_CHIEF_SECONDS = 600.0
#: How long another worker may take to see a file that the chief has seen.
_SHARED_SECONDS = 10.0

#: What loops of this process have trained, and for how many runs.
_trained: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class GuardedState(Protocol):
    """The state of a loop. ``events`` is the log of its directory, if it has one."""

    events: EventLog | None

    def restore(self, cohort: Cohort, role: Role) -> int:
        """Put back what was saved last, if anything was; how many runs had been made by then."""

    def save(self, runs: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Durable when it returns. All workers that train together call this."""

    def save_alone(self, runs: int) -> None:
        """The same for a worker whose companions are gone."""

    def hold(self) -> Callable[[], None]:
        """Remember what it is now; what is returned brings it back."""

    def ensure_ready(self) -> None:
        """Raise what would keep the chief from saving now, before anybody begins to."""

    def follow(self, runs: Callable[[], int]) -> None:
        """Whoever else saves is to save the number of runs, too; called after the first one."""

    def ended(self, runs: int | None) -> None:
        """The loop has ended after so many runs, or (None) nobody knows where."""


class FunctionState:
    """For a loop that saves by a function of its own, and restores itself."""

    events: EventLog | None = None

    def __init__(self, save_fn: Callable[..., object]) -> None:
        self._save_fn = save_fn

    def restore(self, cohort: Cohort, role: Role) -> int:
        return 0

    def save(self, runs: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._save_fn(*args, **kwargs)

    def save_alone(self, runs: int) -> None:
        self._save_fn()

    def hold(self) -> Callable[[], None]:
        return lambda: None

    def ensure_ready(self) -> None:
        """It is the function that knows."""

    def follow(self, runs: Callable[[], int]) -> None:
        """Nobody else does."""

    def ended(self, runs: int | None) -> None:
        """Whoever restores knows."""


class CheckpointState:
    """For a checkpoint of TensorFlow, with the number of runs in it.

    ``save_fn`` saves in place of the manager, if the user has one. ``trained`` is what the user
    trains: the checkpoint, unless it was made here around something else.
    """

    def __init__(
        self, manager: Any, save_fn: Callable[..., object] | None, trained: Any = None
    ) -> None:
        import tensorflow as tf

        self._manager = manager
        self._trained = manager.checkpoint if trained is None else trained
        self._save_fn = save_fn
        self.events: EventLog | None = EventLog(Path(os.path.abspath(manager.directory)))
        self._is_ours = hasattr(manager, "ensure_usable")
        if self._is_ours:
            manager.ensure_usable()
        checkpoint = manager.checkpoint
        if not hasattr(checkpoint, _RUNS):
            # Of another guard, or restored by one, it goes on.
            runs = tf.Variable(tf.constant(0, tf.int64), trainable=False, name=_RUNS)
            setattr(checkpoint, _RUNS, runs)
        self._runs = getattr(checkpoint, _RUNS)
        add_seeds(checkpoint)

    def restore(self, cohort: Cohort, role: Role) -> int:
        runs = _trained.pop(self._trained, None)
        if runs is not None:
            # By a guard before this one: what is in memory is newer than any checkpoint of it.
            return runs
        if not role.trains_together or not self._is_ours:
            self._manager.restore_or_initialize()
        elif role.chief:
            path = self._manager.restore_or_initialize()
            cohort.put("guard/restored", os.path.basename(path or ""))
        else:
            self._restore_as_chief(cohort)
        return int(self._runs.numpy())

    def _restore_as_chief(self, cohort: Cohort) -> None:
        """All go on from the same checkpoint, whatever this worker would find the newest."""
        name = cohort.await_word("guard/restored", _CHIEF_SECONDS)
        if name is None:
            raise AgreementError(cohort.members[:1], f"no word from {cohort.members[0]}")
        if not name:
            if self._manager.latest_checkpoint is not None:
                raise self._not_shared(self._manager.latest_checkpoint, "has not found")
            self._manager.restore_or_initialize()
            return
        path = os.path.join(self._manager.directory, name)
        deadline = time.monotonic() + _SHARED_SECONDS
        while True:
            try:
                self._manager.restore(path)
                return
            except CheckpointNotFoundError:
                if time.monotonic() > deadline:
                    raise self._not_shared(name, "sees, and this worker does not") from None
                time.sleep(0.05)

    def _not_shared(self, name: str, what: str) -> ValueError:
        return ValueError(
            "Expected a directory that all workers share. There is a checkpoint "
            f"{os.path.basename(name)!r} that the chief {what}. Received: "
            f"{self._manager.directory!r} on {socket.gethostname()}"
        )

    def save(self, runs: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        add_seeds(self._manager.checkpoint)  # Of layers that were built since.
        self._runs.assign(runs)
        if self._save_fn is not None:
            self._save_fn(*args, **kwargs)
            return
        if len(args) < 2:
            kwargs = {"check_interval": False, **kwargs}  # However short ago the last one was.
        self._manager.save(*args, **kwargs)
        if kwargs.get("options") is not None:
            self._manager.sync()  # It may have been begun in the background.

    def save_alone(self, runs: int) -> None:
        self._runs.assign(runs)
        if self._save_fn is not None:
            self._save_fn()
        elif self._is_ours:
            self._manager.save_alone()
        else:
            self._manager.save()

    def hold(self) -> Callable[[], None]:
        return HeldVariables(self._manager.checkpoint).put_back

    def ensure_ready(self) -> None:
        if self._is_ours and self._save_fn is None:
            self._manager.ensure_usable()

    def follow(self, runs: Callable[[], int]) -> None:
        add_seeds(self._manager.checkpoint)  # Of layers that the first step has built.
        if self._is_ours:
            self._manager.before_save = lambda: self._runs.assign(runs())

    def ended(self, runs: int | None) -> None:
        if runs is not None:
            _trained[self._trained] = runs


def guarded_state(
    given: Any,
    directory: str | os.PathLike[str] | None,
    save_fn: Callable[..., object] | None,
    *,
    resolver: Any,
    locks: Locks | None,
) -> GuardedState:
    """Of a checkpoint, a manager, a Keras model, or of nothing but a function that saves."""
    if given is None:
        if save_fn is None:
            raise ValueError(
                "Expected something to save: a tf.train.Checkpoint, a SafeCheckpointManager or a "
                "Keras model as checkpoint_or_checkpoint_manager, or a function as save_fn. "
                "Received: neither"
            )
        return FunctionState(save_fn)
    import tensorflow as tf

    if isinstance(given, tf.train.CheckpointManager):
        if directory is not None:
            raise ValueError(
                "Expected no checkpoint_dir with a manager, which has a directory. Received: "
                f"checkpoint_dir={os.fspath(directory)!r}"
            )
        return CheckpointState(given, save_fn)
    checkpoint = given if isinstance(given, tf.train.Checkpoint) else _checkpoint_of(given)
    if directory is None or not os.fspath(directory):
        raise ValueError(
            "When a checkpoint is passed, a checkpoint_dir must be passed as well. "
            f"Received: checkpoint_dir={directory!r}"
        )
    from keras_safe_ckpt.loops.checkpoint_manager import SafeCheckpointManager

    manager = SafeCheckpointManager(
        checkpoint, directory, _MAX_TO_KEEP, locks=locks, cluster_resolver=resolver
    )
    return CheckpointState(manager, save_fn, trained=given)


def _checkpoint_of(model: Any) -> Any:
    import keras
    import tensorflow as tf

    if not isinstance(model, keras.Model):
        raise ValueError(
            "Expected checkpoint_or_checkpoint_manager to be a tf.train.Checkpoint, a "
            f"SafeCheckpointManager or a Keras model. Received: {model!r}"
        )
    if not model.built:
        raise ValueError(
            "Expected a model that is built: what has no variables yet cannot be restored. Call "
            f"model.build(input_shape), or begin it with keras.Input. Received: {model.name!r}"
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        strategy = getattr(model, "distribute_strategy", None)
        with nullcontext() if strategy is None else strategy.scope():
            optimizer.build(model.trainable_variables)
    return tf.train.Checkpoint(model=model)
