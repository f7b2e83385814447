"""`PreemptionGuard`: hand-written loops that may be interrupted."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from keras_safe_ckpt.interruption.ending import Ending, with_defaults
from keras_safe_ckpt.loops.guard_run import GuardRun, is_end_of_data, last_error
from keras_safe_ckpt.loops.guarded_state import guarded_state
from keras_safe_ckpt.loops.training_role import role_in_loop
from keras_safe_ckpt.preemption.choosing import choose
from keras_safe_ckpt.storage.lock_backend import Locks

#: Those of this process that may still have to save when the program ends.
_guards: weakref.WeakSet[PreemptionGuard] = weakref.WeakSet()


class PreemptionGuard:
    """Lets a hand-written training loop be interrupted, saved, and continued.

    It has the arguments and methods of `tf.distribute.experimental.PreemptionCheckpointHandler`:
    change the class name in a program that uses it. When the platform says that the end is near,
    all workers stop after the same step, save, and exit with a code that means "start me again".
    When it is made, it restores the newest checkpoint that is whole.

    Args:
        cluster_resolver: of the strategy; None finds the role by the variables' strategy.
        checkpoint_or_checkpoint_manager: a `tf.train.Checkpoint`, a `SafeCheckpointManager` (or
            TensorFlow's own, with its risks), or a Keras model that is built. None, if there is
            only ``save_fn``.
        checkpoint_dir: where checkpoints go, unless a manager knows. Workers must share it.
        termination_config: a `tf.distribute.experimental.TerminationConfig`.
        notices: whom to listen to, unless the config says so, as in `PreemptionAwareCallback`.
        grace_period: seconds between a notice and the end; None is what the platform gives.
        on_preempted: ``"exit"``, or ``"stop"`` to let the loop look at `preempted` and end (a step
            that `run` was called for is still made, and not part of the checkpoint).
        exit_code: 42, on Google's machines 143, unless given.
        exit_fn: called instead of exiting.
        save_fn: called at a notice instead of saving the checkpoint. Alone it makes a guard for
            loops without TensorFlow, which restore by themselves.
        verbose: 1 says in a line what happens.
        locks: a `LockManager` (default) or `RedisLocks`, for the manager that is made here.

    Example::

        step = tf.Variable(0, dtype=tf.int64)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
        with PreemptionGuard(strategy.cluster_resolver, checkpoint, "run/ckpts") as guard:
            while step < 100:
                guard.run(train_step, next(iterator))
                step.assign_add(1)
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        checkpoint_or_checkpoint_manager: Any = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: Any = None,
        *,
        notices: Any = "auto",
        grace_period: float | None = None,
        on_preempted: str = "exit",
        exit_code: int | None = None,
        exit_fn: Callable[[], object] | None = None,
        save_fn: Callable[..., object] | None = None,
        verbose: int = 1,
        locks: Locks | None = None,
    ) -> None:
        if termination_config is not None and notices != "auto":
            raise ValueError(
                "Expected either termination_config or notices. Received: both, "
                f"notices={notices!r}"
            )
        choice = choose(notices if termination_config is None else termination_config)
        ending = Ending(
            choice=choice,
            on_preempted=on_preempted,
            verbose=verbose,
            locks=locks,
            **with_defaults(
                choice,
                grace_period=grace_period,
                exit_code=exit_code,
                exit_fn=exit_fn,
                save_fn=save_fn,
            ),
        )
        state = guarded_state(
            checkpoint_or_checkpoint_manager,
            checkpoint_dir,
            ending.save_fn,
            resolver=cluster_resolver,
            locks=locks,
        )
        given = checkpoint_or_checkpoint_manager
        role = role_in_loop(cluster_resolver, getattr(given, "checkpoint", given))
        self._run = GuardRun(ending, role, state)
        self._error_before = last_error()  # Of a notebook, say.
        if not _guards:
            # After TensorFlow's own, and so before it at the end.
            atexit.unregister(_end_with_program)
            atexit.register(_end_with_program)
        _guards.add(self)

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that trains one step, and return what it returns.

        ``distributed_train_function`` is called with ``args`` and ``kwargs``. Before it, at the end
        of the step before and of what the loop has done since, a checkpoint is saved if it is due.
        An error in the function ends the other workers, too.
        """
        self._run.boundary()
        return self._run.step(distributed_train_function, args, kwargs)

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """In place of `run`, after each step: save and stop if it is due.

        ``args`` and ``kwargs`` are handed to the manager's ``save``, or to ``save_fn``.
        """
        self._run.counts()
        self._run.boundary(args, kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """An error in here ends the other workers, too; at its end a save is due as in `run`."""
        with self._run.guarding():
            yield
        self._run.boundary()

    @property
    def total_run_calls(self) -> int:
        """How many steps were made, those before a restart included."""
        return self._run.runs

    @property
    def preempted(self) -> str | None:
        """Why the loop was stopped; None if it was not."""
        return self._run.preempted

    def close(self) -> None:
        """The loop has come to its end. A notice of which nobody was told yet is acted on now.

        It is called at the end of a ``with`` block. Without either, a last checkpoint is written
        when the program ends.
        """
        self._run.end()

    def __enter__(self) -> PreemptionGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or is_end_of_data(error):
            self.close()
        else:
            self._run.fail(error)

    def __del__(self) -> None:
        run = getattr(self, "_run", None)
        if run is not None and not sys.is_finalizing():
            run.let_go()

    def end_with_program(self) -> None:
        """When the interpreter ends: save what a notice asked for, or let go."""
        if last_error() is not self._error_before:
            self._run.give_up()
        else:
            self._run.end_with_program()


def _end_with_program() -> None:
    for guard in list(_guards):
        guard.end_with_program()
