"""The way from a checkpoint of a run back into a `fit`: chosen, loaded, and fast-forwarded."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from keras_safe_ckpt.callbacks.run_facts import fitting_position, refuse_finished
from keras_safe_ckpt.cluster.cohort import Cohort
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError
from keras_safe_ckpt.storage.shared_capture import is_current
from keras_safe_ckpt.storage.snapshot import Snapshot, capture
from keras_safe_ckpt.training.backups import Backup, Backups
from keras_safe_ckpt.training.keras_fit import (
    FitAround,
    begin_at_epoch,
    build_for,
    drop,
    is_built_whole,
)
from keras_safe_ckpt.training.position import FastForward, Position
from keras_safe_ckpt.training.run_state import Restoring, RunState

_log = logging.getLogger(__name__)

_CHOICE_SECONDS = 600.0
#: A way back that takes longer than this says how far it is, now and then.
_PATIENCE_SECONDS = 5.0


class Resuming:
    """For one run: `open`, `begin`, then `epoch_begins` and `is_fast_forwarding` on the way.

    Without a checkpoint all of them do nothing. ``facts`` are compared with those of the
    checkpoint; ``reached`` is how many executions the run had made, if that is known; ``say``
    tells the user.
    """

    def __init__(
        self,
        model: Any,
        fit: FitAround,
        state: RunState,
        backups: Backups,
        *,
        role: Role,
        cohort: Cohort | None,
        restore: bool | str,
        makes_backups: bool,
        facts: Mapping[str, Any],
        reached: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._fit = fit
        self._state = state
        self._backups = backups
        self._role = role
        self._cohort = cohort if role.trains_together else None
        self._restore = restore
        self._makes_backups = makes_backups
        self._facts = facts
        self._reached = reached
        self._say = say
        self._missing: list[str] = []
        self._restoring: Restoring | None = None
        self._loaded: Snapshot | None = None
        self.position = Position()
        self._forward: FastForward | None = None
        self._hidden: list[Any] | None = None
        self._is_there = False
        self._initial_epoch: tuple[Any] | None = None
        self._began = time.perf_counter()
        self._said = 0.0

    def open(self) -> None:
        """Choose, verify and load, before anything else has changed."""
        self._began = time.perf_counter()
        try:
            backup = self._choose()
            if backup is None:
                return
            refuse_finished(backup)
            part = None
            if self._role.trains_together and not self._role.chief:
                part = self._backups.part(self._role.number, str(backup.document.get("save")))
            self._restoring = Restoring(self._state, self._model, backup, part)
            self.position = fitting_position(self._restoring.position, backup, self._facts)
            self._build()
            self._restoring.load_model()
        except (CorruptCheckpointError, IncompatibleCheckpointError) as error:
            self._restoring, self.position = None, Position()
            if self._restore != "if_possible":
                raise
            warnings.warn(f"Training starts afresh: {error}", stacklevel=2)
            return
        if part is None and self._role.trains_together and not self._role.chief:
            self._say("No values of its own in the checkpoint: this worker takes the chief's.")
        self._backup = backup
        self._loaded = capture(self._model)
        self._restoring.prepare_callbacks()

    def begin(self, history: Any, callback: Any, check: Callable[[], None]) -> Position:
        """After the others have heard that training begins: their states, and the epoch.

        ``check`` is called now and then on the way, and may raise `SystemExit`.
        """
        self._callback = callback
        self._check = check
        restoring = self._restoring
        if restoring is None:
            return self.position
        self._undo_changes()  # Of a callback, when training began.
        self._history = history
        restoring.restore_callbacks(history)
        position = self.position
        last = int(self._facts["epochs"] or 0)
        self._initial_epoch = (
            begin_at_epoch(self._model, last if position.ended else position.epoch),
        )
        if self._fit.epochs is not None:
            self._fit.epochs.replay(position.finished, self._tick_and_check)
        if not position.executions:
            self._loaded = None
            restoring.restore_random()
            self._arrived(0)
        return position

    def epoch_begins(self) -> bool:
        """Whether the epoch begins with batches that were trained on before the restart."""
        restoring = self._restoring
        if restoring is None or not self.position.executions or self._forward is not None:
            return False
        restoring.restore_epoch_random()
        if self._fit.callback_list is not None:
            # The others have seen these batches: they get to hear of what is new.
            self._hidden = self._fit.callback_list.callbacks
            self._fit.callback_list.callbacks = [self._callback]
        steps = int(self._facts["steps_per_execution"])
        self._forward = FastForward(
            self._model,
            self.position,
            drop=lambda iterator: self._drop(iterator, steps),
            arrive=self._arrive,
            cut_short=self._cut_short,
            end=self._show_others,
        )
        return True

    def batch_begins(self) -> None:
        """The next call of the training step comes from this `fit`."""
        if self._forward is not None:
            self._forward.is_wanted = True

    def is_fast_forwarding(self) -> bool:
        """Whether the batch that ends now was only dropped."""
        if self._forward is None or self._is_there:
            return False
        if not self._forward.left:
            self._is_there = True
            if not self._is_asked_once_more():
                self._show_others()
        return True

    def batches_end(self) -> None:
        """The epoch has no more batches."""
        if self._forward is not None:
            self._forward.give_back()
        self._show_others()

    def close(self) -> None:
        self.forget_epoch()
        self.batches_end()
        if self._restoring is not None:
            self._restoring.close()
            self._restoring = None

    # Choosing.

    def _choose(self) -> Backup | None:
        if self._restore is False:
            return None
        if self._cohort is None:
            return self._backups.newest()
        if self._role.chief:
            # Less than what lies between two backups would be repeated, as it is later on.
            found = self._backups.newest(self._role.world, else_degraded=not self._makes_backups)
            name = None
            if found is not None:
                name = found.path.name
                parts = self._backups.missing_parts(found, self._role.world)
                self._missing = [self._role.members[number] for number in parts]
            self._cohort.put("preemption/resume", [name, self._reached, self._missing])
            return found
        word = self._cohort.await_word("preemption/resume", _CHOICE_SECONDS)
        name, self._reached, self._missing = (None, None, []) if word is None else word
        return None if name is None else self._backups.named(name)

    # Going there.

    def _build(self) -> None:
        if is_built_whole(self._model):
            return
        epochs = self._fit.epochs
        spec = None if epochs is None else epochs.element_spec()
        reason = "its data does not say what a batch looks like" if spec is None else None
        if spec is not None:
            reason = build_for(self._model, spec)
        if not self._model.built:
            raise ValueError(
                "There is a checkpoint to go on from, and the model has no weights yet, to load "
                "it into. Call the model on a batch, or use model.build(input_shape), before fit. "
                f"(It could not be built here: {reason}.) Received: model={self._model.name!r}"
            )

    def _drop(self, iterator: Any, steps: int) -> tuple[int, Any]:
        count, batch = drop(iterator, steps)
        self._tick(count)
        return count, batch

    def _tick_and_check(self, batches: int) -> None:
        self._tick(batches)
        self._check()

    def _tick(self, batches: int) -> None:
        now = time.perf_counter()
        if now - max(self._began, self._said) > _PATIENCE_SECONDS:
            self._said = now
            self._say(f"On the way back to {self.position} ({now - self._began:.0f} s) ...")

    def _arrive(self, batch: Any) -> None:
        restoring = self._restoring
        assert restoring is not None
        # A callback may have set the learning rate again when the epoch began; and the metrics are
        # built now, while what is built stays as it is.
        self._undo_changes()
        self._loaded = None
        build_for(self._model, batch)
        differences = restoring.restore_metrics()
        if differences:
            shown = "; ".join(differences[:3])
            warnings.warn(
                "The metrics of the epoch that was interrupted begin anew, since they are others "
                f"than before: {shown}.",
                stacklevel=2,
            )
        # Again: they have heard meanwhile that the epoch begins, as if it were a new one.
        restoring.restore_callbacks(self._history)
        restoring.restore_random()
        self._model.stop_training = self.position.stopping
        self._arrived(self.position.executions if self._forward is None else self._forward.dropped)

    def _undo_changes(self) -> None:
        assert self._restoring is not None
        if self._loaded is None or not is_current(self._loaded):
            self._restoring.load_model()
            self._loaded = capture(self._model)

    def _is_asked_once_more(self) -> bool:
        """Whether Keras begins a batch that there is not, to learn that the epoch is over.

        The others have heard of it before, since their validation had begun.
        """
        at, epochs = self.position, self._fit.epochs
        if not at.trained or at.stopping or epochs is None:
            return False
        return epochs.asks_for_more_than(at.executions)

    def _cut_short(self, executions: int) -> None:
        warnings.warn(
            f"The data ended after {executions} of {self.position.executions} steps of the epoch "
            "that were trained on before: it is shorter now. The epoch ends here.",
            stacklevel=2,
        )
        if self._restoring is not None:
            self._restoring.restore_metrics()
            self._restoring.restore_random()
        self._is_there = True
        self._show_others()

    def _arrived(self, dropped: int) -> None:
        seconds = time.perf_counter() - self._began
        backup, document = self._backup, self._backup.document
        repeated = self._batches_repeated()
        self._backups.store.events.record(
            "resume",
            file=backup.path.name,
            step=backup.manifest.step,
            epoch=self.position.epoch,
            batch=self.position.batch,
            reason=document.get("reason"),
            degraded=self._missing,
            dropped=dropped,
            repeated=repeated,
            seconds=seconds,
        )
        lost = "what came after it is repeated"
        if repeated is not None:
            lost = "1 batch is repeated" if repeated == 1 else f"{repeated} batches are repeated"
        degraded = f", degraded: without {', '.join(self._missing)}" if self._missing else ""
        self._say(
            f"Resumed at {self.position} from {backup.path.name} ({document.get('reason')}"
            f"{degraded}); {lost} ({seconds:.2f} s)"
        )

    def _batches_repeated(self) -> int | None:
        """How many the run before had finished beyond this place; None if it is not known."""
        if self._reached is None or self._reached < self.position.total:
            return None
        steps = int(self._facts["steps_per_execution"])
        return (self._reached - self.position.total) * steps

    def _show_others(self) -> None:
        hidden, self._hidden = self._hidden, None
        if hidden is not None and self._fit.callback_list is not None:
            self._fit.callback_list.callbacks = hidden

    def forget_epoch(self) -> None:
        """A later `fit` of the model is to begin where it is told."""
        if self._initial_epoch is not None:
            begin_at_epoch(self._model, self._initial_epoch[0])
            self._initial_epoch = None
