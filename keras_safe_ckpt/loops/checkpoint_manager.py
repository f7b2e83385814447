"""`SafeCheckpointManager`: TensorFlow's, for any number of threads and processes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.interruption.ending import is_whole, require
from keras_safe_ckpt.loops.checkpoint_writer import CheckpointWriter
from keras_safe_ckpt.loops.save_counter import whole_number
from keras_safe_ckpt.loops.training_role import role_in_loop
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import LARGEST_NUMBER, Family, Keep
from keras_safe_ckpt.storage.bundles.recovery import reading
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.paths import refuse_unsafe_name
from keras_safe_ckpt.storage.restore import none_is_whole

_Manager: Any = tf.train.CheckpointManager


class SafeCheckpointManager(_Manager):  # type: ignore[misc]
    """`tf.train.CheckpointManager` for any number of threads and processes in one directory.

    A checkpoint is there whole and durable, or not at all; two that save at the same time get two
    numbers; the newest one whose parts are whole is the latest, whatever the file ``checkpoint``
    says; and nothing is deleted while somebody restores it.

    The arguments are those of TensorFlow. Of workers that train together all call `save`, the chief
    writes the checkpoint, and the others return None.

    Args:
        checkpoint: a `tf.train.Checkpoint`.
        directory: where the checkpoints go.
        max_to_keep: how many stay; None keeps all.
        keep_checkpoint_every_n_hours: one of each so many hours stays beyond that.
        checkpoint_name: what their names begin with.
        step_counter: the variable that counts steps, for ``checkpoint_interval``.
        checkpoint_interval: `save` does nothing before so many steps have passed.
        init_fn: called by `restore_or_initialize` if there is nothing to restore.
        last_checkpoint_step: the step from which the interval counts.
        locks: a `LockManager` (default) or `RedisLocks`.
        cluster_resolver: of the workers that train together; found by the strategy otherwise.

    Example::

        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        manager = SafeCheckpointManager(checkpoint, "run/ckpts", max_to_keep=3)
        manager.restore_or_initialize()
        for epoch in range(10):
            model.fit(x, y)  # or a loop of your own
            manager.save()
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        last_checkpoint_step: int | None = None,
        *,
        locks: Locks | None = None,
        cluster_resolver: Any = None,
    ) -> None:
        # Not TensorFlow's own: it reads the state file, and raises for a damaged one.
        require(
            callable(getattr(checkpoint, "write", None)) and hasattr(checkpoint, "save_counter"),
            "checkpoint",
            "a tf.train.Checkpoint (around a model: tf.train.Checkpoint(model=model))",
            checkpoint,
        )
        require(
            max_to_keep is None or (is_whole(max_to_keep) and max_to_keep > 0),
            "max_to_keep", "a positive integer or `None`", max_to_keep,
        )  # fmt: skip
        hours = keep_checkpoint_every_n_hours
        require(
            hours is None or (_is_number(hours) and hours >= 0),
            "keep_checkpoint_every_n_hours", "a number of hours or None", hours,
        )  # fmt: skip
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError(
                "`step_counter` should be passed if `checkpoint_interval` is not None. "
                f"Received: checkpoint_interval={checkpoint_interval!r}, step_counter=None"
            )
        require(init_fn is None or callable(init_fn), "init_fn", "a function", init_fn)
        require(isinstance(checkpoint_name, str), "checkpoint_name", "a text", checkpoint_name)
        self._directory = os.fspath(directory)
        self._place = BundleDirectory(directory, locks=locks)
        refuse_unsafe_name(f"{checkpoint_name}-0", self._place.path)
        self._family = Family(checkpoint_name)
        self._keep = Keep(max_to_keep, hours * 3600 if hours else None)
        self._checkpoint = checkpoint
        self._step_counter = step_counter
        self._checkpoint_interval = checkpoint_interval
        self._last_checkpoint_step = last_checkpoint_step
        self._init_fn = init_fn
        self._cluster_resolver = cluster_resolver
        self._known_role: Role | None = None
        #: Called before each save, for what is to be brought up to date in the checkpoint.
        self.before_save: Callable[[], object] | None = None
        self._writer = CheckpointWriter(
            checkpoint, self._place, self._family, self._keep, self._path_of
        )

    # What there is.

    @property
    def directory(self) -> str:
        """Where the checkpoints go, as it was given."""
        return self._directory

    @property
    def checkpoint(self) -> Any:
        """The `tf.train.Checkpoint` that is saved and restored."""
        return self._checkpoint

    @property
    def checkpoint_interval(self) -> int | None:
        """How many steps must pass between two saves; None if none are counted."""
        return self._checkpoint_interval

    @property
    def locks(self) -> Locks:
        """Those that keep others from the directory."""
        return self._place.locks

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest one whose parts are whole; None if there is none.

        Another process may delete it before you restore it by its path: `restore` holds a lock.
        """
        with reading(self._place):
            newest = next(self._place.whole(self._family), None)
        return None if newest is None else self._path_of(newest)

    @property
    def checkpoints(self) -> list[str]:
        """Those that count for ``max_to_keep`` and are whole, from oldest to newest."""
        with reading(self._place):
            state = self._place.state()
            found = list(self._place.whole(self._family))
        listed = {} if state is None else state.listed
        return [self._path_of(bundle) for bundle in reversed(found) if bundle.name in listed]

    # Saving.

    def save(
        self, checkpoint_number: Any = None, check_interval: bool = True, options: Any = None
    ) -> str | None:
        """Write a checkpoint; its path, or None if none is due (or another worker writes it).

        ``checkpoint_number`` is used as it is given: a checkpoint of that number is replaced, and
        stays until the new one is whole. Without it, a number is taken that nobody has.
        ``check_interval=False`` saves whatever ``checkpoint_interval`` says; ``options`` is a
        `tf.train.CheckpointOptions`.
        """
        with self._writer.turn():
            step = None
            if self._checkpoint_interval is not None:
                step = whole_number(self._step_counter)
                if not self._is_due(step, check_interval):
                    return None
            number = None if checkpoint_number is None else whole_number(checkpoint_number)
            if number is not None and not 0 <= number <= LARGEST_NUMBER:
                raise ValueError(
                    "Expected checkpoint_number to be a whole number from 0 to 2**63 - 1. "
                    f"Received: checkpoint_number={number}"
                )
            if self.before_save is not None:
                self.before_save()
            path = self._save(number, options)
            self._last_checkpoint_step = step
            return path

    def sync(self) -> None:
        """Wait for a save that was begun with ``options.enable_async``, and raise its error."""
        self._checkpoint.sync()
        self._writer.finish()

    def save_alone(self) -> str | None:
        """`save` for a worker whose companions are gone: it writes, whoever it is."""
        before, self._known_role = self._known_role, Role()
        try:
            return self.save(check_interval=False)
        finally:
            self._known_role = before

    def ensure_usable(self) -> None:
        """Raise now if a save could not be written later."""
        self._place.ensure_usable()

    def _is_due(self, step: int, check_interval: bool) -> bool:
        last, interval = self._last_checkpoint_step, self._checkpoint_interval
        if last is None or interval is None:
            return True
        return step != last and not (check_interval and step < last + interval)

    def _save(self, number: int | None, options: Any) -> str | None:
        if self._role.trains_together and not self._role.chief:
            self._writer.take_part(options)
            return None
        return self._writer.write(number, options)

    @property
    def _role(self) -> Role:
        if self._known_role is None:
            self._known_role = role_in_loop(self._cluster_resolver, self._checkpoint)
        return self._known_role

    # Restoring.

    def restore(self, save_path: str | os.PathLike[str] | None = None, options: Any = None) -> Any:
        """Restore the newest checkpoint that is whole, or the one at ``save_path``.

        ``options`` is a `tf.train.CheckpointOptions`. Returns None if there is none at all, else
        what `tf.train.Checkpoint.restore` returns. Every byte is verified before the first variable
        changes, and nobody deletes the checkpoint meanwhile. Those that are damaged are passed
        over; `CorruptCheckpointError` if there are no others.
        """
        restored = self._restore(save_path, options)
        return None if restored is None else restored[1]

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint that is whole, and return its path.

        If there is none at all, ``init_fn`` is called.
        """
        restored = self._restore(None, None)
        if restored is not None:
            return restored[0]
        if self._init_fn is not None:
            self._init_fn()
        return None

    def _restore(
        self, save_path: str | os.PathLike[str] | None, options: Any
    ) -> tuple[str, Any] | None:
        self._writer.finish()  # It may be the newest one.
        began = time.perf_counter()
        with reading(self._place):
            bundle = self._newest() if save_path is None else self._given(os.fspath(save_path))
            if bundle is None:
                return None
            path = self._path_of(bundle)
            arguments = {} if options is None else {"options": options}
            status = self._checkpoint.restore(bundle.prefix, **arguments)
        if self._checkpoint_interval is not None:
            self._last_checkpoint_step = whole_number(self._step_counter)
        seconds = time.perf_counter() - began
        self._place.events.record("restore", file=bundle.name, seconds=seconds)
        return path, status

    def _newest(self) -> Bundle | None:
        there = self._place.ordered(self._family)
        for bundle in reversed(there):
            if self._place.is_whole(bundle, thoroughly=True):
                return bundle
        if there:
            raise none_is_whole(self._place.path, [bundle.name for bundle in there])
        return None

    def _given(self, save_path: str) -> Bundle:
        directory, name = os.path.split(save_path)
        bundle = Bundle(Path(directory or "."), name)
        bundle.verify()
        return bundle

    def _path_of(self, bundle: Bundle) -> str:
        """As the user calls the directory."""
        if bundle.directory != self._place.path:
            return bundle.prefix
        return os.path.join(self._directory, bundle.name)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
