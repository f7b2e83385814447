"""One run of `fit` with a `SafeModelCheckpoint`: who writes, and what is worth saving."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from keras_safe_ckpt.callbacks.scalars import scalars_for, step_of
from keras_safe_ckpt.cluster.membership import Membership
from keras_safe_ckpt.cluster.roles import role_of
from keras_safe_ckpt.cluster.write_policies import WritePolicy, ensure_places_differ, place
from keras_safe_ckpt.interruption.messages import say
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.formats import FORMATS
from keras_safe_ckpt.storage.keras_internals import better_direction
from keras_safe_ckpt.storage.lookup import checkpoints_of, of_series
from keras_safe_ckpt.storage.path_template import WORKER, PathTemplate
from keras_safe_ckpt.storage.paths import refuse_linked_directory, refuse_unsafe_name
from keras_safe_ckpt.storage.retention import Checkpoint, SetAside, Veto, unless_newer
from keras_safe_ckpt.training.best import (
    Best,
    UnlessBetter,
    is_best_of_others,
    learn_from_disk,
    other_standards,
)
from keras_safe_ckpt.training.keeping import Keeping
from keras_safe_ckpt.training.logs import monitored_value, numbers_in
from keras_safe_ckpt.training.saver import Saver, SaveRequest

_log = logging.getLogger(__name__)

#: How long the workers wait at the end for the last save of one of them; for one that has died
#: they do not wait.
_LAST_SAVE_SECONDS = 3600.0


@dataclass(frozen=True)
class Settings:
    """What of a callback's arguments a run needs."""

    template: PathTemplate
    format: str
    policy: WritePolicy
    keeping: Keeping
    save_freq: str | int
    save_every_seconds: float | None
    log_dir: str | None = None

    def check(self, template: PathTemplate) -> None:
        """Raise for a path that would fail at the first save, or lose what is to be kept."""
        template.refuse_unfit_placeholders()
        refuse_unsafe_name(template.name, Path(template.parent.text))
        suffix = FORMATS[self.format].suffix
        if not template.name.endswith(suffix):
            raise ValueError(
                f"Expected a path that ends in {suffix!r}. Received: filepath={template.text!r}"
            )
        by_batch = self.save_freq != "epoch" or self.save_every_seconds is not None
        self.keeping.ensure_fits(template, by_batch=by_batch)


class Moment(NamedTuple):
    """The end of a batch, or (``batch`` is None) of an epoch; both are counted from zero."""

    epoch: int
    batch: int | None
    batches_of_epoch: int
    batches: int


class CheckpointRun:
    """Begins where everything that can be wrong is found, before the first batch.

    ``callback`` gives the model and Keras's public attributes (``monitor``, ``verbose``, ...);
    ``best`` and ``saver`` outlive the run.
    """

    def __init__(self, callback: Any, settings: Settings, best: Best, saver: Saver) -> None:
        self._callback = callback
        self._settings = settings
        self._best = best
        self._saver = saver
        self._role = role_of(callback.model)
        self._writes = settings.policy.writes(self._role)
        self._shown = place(settings.policy, settings.template, self._role)
        # As it is now: the program may change its directory during training.
        self._template = self._shown.below(os.getcwd())
        self._began = time.time()
        self._threshold = best.value
        self._was_judged = False
        self._saves = 0
        self._found: Checkpoint | None = None
        self._seen = False  # Whether there was a file in this run, whoever wrote it.
        self._news: deque[str] = deque()
        self._check_cluster()
        self._membership = Membership(self._role)
        saver.use_format(settings.format)
        self._events: EventLog | None = None
        if self._writes:
            name = self._template.name
            saver.listener = scalars_for(callback.model, settings.log_dir, self._role, name)
            apart = self._shown.text != settings.template.text
            worker = f"worker-{self._role.number}" if apart else None
            self._refuse_linked_folder(worker)
            with self._membership.others_told():
                saver.open(self._template, worker, _largest_size(callback.model))
            self._events = saver.events
        params = getattr(callback, "params", None) or {}
        plan = {name: params.get(name) for name in ("epochs", "steps")}
        self._note("begin", **plan, **self._role.facts())
        best.mode = None
        self.direction_is_open = True
        self.settle_direction(final=False)

    def _refuse_linked_folder(self, worker: str | None) -> None:
        """The one that a policy of ours has added; those of a path are the user's."""
        parent = self._template.parent
        is_ours = WORKER not in self._settings.template.fields
        if is_ours and not parent.fields and os.path.basename(parent.text) == worker:
            refuse_linked_directory(Path(parent.fill({})))

    def __str__(self) -> str:
        task = f"writes {self._shown.text}" if self._writes else "does not write"
        return f"write policy {self._settings.policy!r}: this process {task}; it is {self._role}"

    def settle_direction(self, final: bool = True) -> None:
        """Learn whether less or more is better; Keras knows once the metrics are built."""
        try:
            self._best.mode = better_direction(self._callback)
        except ValueError:
            if final and (self._callback.save_best_only or self._settings.keeping.deletes):
                raise
            self.direction_is_open = not final
            return
        self.direction_is_open = False
        if self._writes:
            self._look_at_disk()

    def save(self, moment: Moment, logs: Mapping[str, Any]) -> bool:
        """Save if it is worth it, and say whether."""
        with self._membership.others_told():
            return self._save(moment, logs)

    def _save(self, moment: Moment, logs: Mapping[str, Any]) -> bool:
        if self.direction_is_open:
            self.settle_direction()
        epoch, batch = moment.epoch, moment.batch
        values = self._values(moment, logs)
        shown = self._fill(self._shown, values)
        source = self._callback.model
        if self._role.trains_together:
            # Reading a variable may be a collective: all workers, whatever they do with it.
            self._wait_for_save()
            source = self._saver.capture(source)
        if not self._writes or source is None:
            return False
        best_only, monitor = self._callback.save_best_only, self._callback.monitor
        value = None
        if best_only:
            value = monitored_value(logs, monitor)
        elif self._settings.keeping.keep_best is not None:
            monitored_value(logs, monitor, "keep the best models")
        if best_only and not self._is_worth_saving(epoch, value, shown):
            return False
        self._wait_for_save()
        if not best_only:
            self._say(f"\nEpoch {epoch + 1}: saving model to {shown}")
        veto = self._veto(value)
        request = SaveRequest(
            path=self._fill(self._template, values),
            series=self._template.name,
            step=self._step(moment),
            # Finished epochs, and finished batches of the one after.
            epoch=epoch + 1 if batch is None else epoch,
            batch=None if batch is None else batch + 1,
            metrics=numbers_in(logs),
            monitor=monitor,
            mode=self._best.mode,
            veto=veto,
            set_aside=self._set_aside(),
            retention=self._settings.keeping.policy(monitor, self._best.mode),
        )

        def done(checkpoint: Checkpoint | None) -> None:
            if checkpoint is not None:
                self._saves += 1
            self._seen = True
            if isinstance(veto, UnlessBetter):
                self._best.learn(value if checkpoint is not None else veto.kept)
            outcome = "finished saving model to" if checkpoint else "kept the model that is in"
            self._news.append(f"\nEpoch {epoch + 1}: {outcome} {shown}")

        self._saver.save(source, request, done)
        self.report()
        return True

    def report(self) -> None:
        """Say what was finished; raise or warn of what failed."""
        if self._news:
            self._say_news()
        try:
            self._saver.poll()
        except Exception as error:
            self._membership.tell_others(error)
            raise

    def finish(self) -> None:
        """Wait for the last save, of all workers; say what there is to say at the end."""
        error: Exception | None = None
        try:
            self._saver.finish()
        except Exception as failed:  # noqa: BLE001  # not swallowed: the barrier raises it
            error = failed
        finally:
            self._say_news()
        # Who returns from `fit` can rely on the files of the others.
        self._membership.finish("SafeModelCheckpoint", error, _LAST_SAVE_SECONDS)
        self._note("finished")
        if self._found is not None and self._was_judged and not self._saves:
            _log.warning(
                "Nothing was saved: %s never got better than %.5f of %s, which this training did "
                "not write. To start over, delete that file or use another filepath.",
                self._best.monitor, self._best.value, self._found.path,
            )  # fmt: skip

    def close(self) -> None:
        """Also of a run that was interrupted, before the next one."""
        self._membership.close()

    def _check_cluster(self) -> None:
        seconds = self._settings.save_every_seconds
        if seconds is not None and self._role.trains_together:
            raise ValueError(
                "Expected no save_every_seconds where several workers train one model: their "
                "clocks differ, and all must capture after the same batch. Use save_freq. "
                f"Received: save_every_seconds={seconds}"
            )
        if self._settings.keeping.deletes:
            ensure_places_differ(self._settings.policy, self._settings.template, self._role)
        if self._shown.text != self._settings.template.text:
            self._settings.check(self._shown)  # A policy of the user's may return anything.

    def _look_at_disk(self) -> None:
        """A restart must not forget what the best was, nor by what it was judged."""
        doubts: list[str] = []
        if self._callback.save_best_only:
            self._found, doubts = learn_from_disk(self._best, self._template)
        elif self._settings.keeping.deletes:
            present = checkpoints_of(self._template, lambda path, reason: None)
            doubts = other_standards(self._best, of_series(present, self._template))
        for doubt in doubts:
            warnings.warn(doubt, stacklevel=2)
        if self._found is not None:
            self._seen = True
            monitor, value = self._best.monitor, self._best.value
            text = f"Best so far: {monitor} was {value:.5f} in {self._found.path}, from before"
            _log.info(text)
            self._say(f"\n{text}")

    def _is_worth_saving(self, epoch: int, value: float | None, shown: str) -> bool:
        """As Keras decides, against what is durable, and with the words of Keras."""
        if value is None:
            return True  # Keras saves what it cannot judge; it replaces nothing that is judged.
        monitor = self._best.monitor
        if math.isnan(value):
            warnings.warn(f"{monitor} is NaN: not saved as the best model.", stacklevel=2)
            return False
        self._was_judged = True
        self._forget_deleted()
        if self._best.beaten_by(value):
            # What is being written now is the best only when it is durable.
            self._wait_for_save()
        before = "None" if self._best.value is None else f"{self._best.value:.5f}"
        if not self._best.beaten_by(value):
            self._say(f"\nEpoch {epoch + 1}: {monitor} did not improve from {before}")
            return False
        self._say(
            f"\nEpoch {epoch + 1}: {monitor} improved from {before} to {value:.5f}, "
            f"saving model to {shown}"
        )
        return True

    def _forget_deleted(self) -> None:
        """A file that somebody removed during training is not the best any more."""
        if not self._seen or self._template.fields:
            return
        if not os.path.exists(self._template.fill({})):
            self._best.value = self._threshold

    def _veto(self, value: float | None) -> Veto:
        return self._best.veto(value) if self._callback.save_best_only else unless_newer

    def _set_aside(self) -> SetAside | None:
        if not self._settings.keeping.deletes or not self._template.fields:
            return None
        return is_best_of_others(self._best, self._template, self._began)

    def _wait_for_save(self) -> None:
        """Until the one before is durable: memory holds one capture, and messages their order."""
        self._saver.wait()
        self.report()

    def _values(self, moment: Moment, logs: Mapping[str, Any]) -> dict[str, Any]:
        """What the placeholders of the path stand for, counted from one as Keras does."""
        values = {**logs, "epoch": moment.epoch + 1}
        if moment.batch is not None or self._settings.save_every_seconds is not None:
            values.setdefault("batch", moment.batches_of_epoch)
        return values

    def _fill(self, template: PathTemplate, values: Mapping[str, Any]) -> str:
        try:
            return template.fill(values)
        except KeyError as error:
            raise cannot_format(self._callback.filepath, str(error)) from None

    def _step(self, moment: Moment) -> int:
        step = step_of(self._callback.model)
        return moment.batches if step is None else step

    def _note(self, event: str, **facts: Any) -> None:
        if self._events is None:
            return  # Another worker writes, or to folders that are not known yet.
        facts = {"file": self._template.name, "step": step_of(self._callback.model), **facts}
        self._events.record(event, callback="SafeModelCheckpoint", **facts)

    def _say(self, text: str) -> None:
        if self._callback.verbose > 0:
            say(text)

    def _say_news(self) -> None:
        while self._news:
            self._say(self._news.popleft())


def cannot_format(filepath: str, reason: str) -> KeyError:
    """In the words of Keras."""
    return KeyError(f'Failed to format this callback filepath: "{filepath}". Reason: {reason}')


def _largest_size(model: Any) -> float:
    """More than its file can have; not known before the model is built."""
    if not getattr(model, "built", False):
        return math.inf
    # Far more than any optimizer keeps for a weight, and than HDF5 needs for an array.
    sizes: list[int] = [math.prod(variable.shape) for variable in model.variables]
    return 2.0**16 + sum(64 * size + 8192 for size in sizes)
