"""One checkpoint of all workers of a run: their own parts first, the chief's file last."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from keras_safe_ckpt.cluster.cohort import Cohort
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.errors import AgreementError
from keras_safe_ckpt.preemption.pace import Pace
from keras_safe_ckpt.storage.snapshot import Snapshot
from keras_safe_ckpt.storage.writer import BackgroundWriter
from keras_safe_ckpt.training.backups import Backups
from keras_safe_ckpt.training.position import Position
from keras_safe_ckpt.training.run_state import Captured

_log = logging.getLogger(__name__)

#: How long the chief waits for the part of another worker; for one that has died it does not.
_PART_SECONDS = 60.0


class RunSaver:
    """Writes what was captured; every worker calls it for the same captures in the same order.

    A part that does not come is named in the checkpoint as missing: it is "degraded". A run goes on
    from it, with the chief's values for that worker, only if there is none of all workers.
    """

    def __init__(
        self, backups: Backups, role: Role, cohort: Cohort | None, pace: Pace, run: str
    ) -> None:
        self._backups = backups
        self._role = role
        self._cohort = cohort if role.trains_together else None
        self._pace = pace
        self._run = run
        self._name = ""
        self._writer = BackgroundWriter()
        self._last: Position | None = None

    def is_saved(self, position: Position) -> bool:
        """Whether the last save, which may still be going on, was of this position."""
        return position.same_place(self._last)

    def save(
        self,
        captured: Captured,
        *,
        reason: str,
        background: bool,
        missing: tuple[str, ...] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """``missing`` workers are known to be gone: nobody waits for them, nor for a chief."""
        # By the place, and not by a count: not all workers may have begun the same saves.
        name = self._name = f"{self._run}-{captured.position.name}"
        document = {**captured.document, **(facts or {}), "reason": reason, "save": name}

        def job() -> None:
            self._write(captured, document, name, missing)

        self._last = None  # Until it is submitted: an error of the one before comes first.
        if background:
            self._writer.submit(job)
        else:
            self._writer.run(job)
        self._last = captured.position

    def is_committed(self) -> bool:
        """Whether the chief's file of the last save is there."""
        return self._backups.holds(self._name)

    def has_backup(self) -> bool:
        """Whether a run that is started again finds one."""
        return self._backups.has_any()

    def poll(self) -> None:
        """Raise what went wrong in the background."""
        self._writer.raise_error()

    def wait(self) -> None:
        with self._backups.store.events.waiting():
            self._writer.wait()

    def wait_until_idle(self) -> None:
        self._writer.wait_until_idle()

    def _write(
        self,
        captured: Captured,
        document: dict[str, Any],
        name: str,
        missing: tuple[str, ...],
    ) -> None:
        began = time.perf_counter()
        place: dict[str, Any] = {
            "step": captured.step,
            "epoch": captured.position.epoch,
            "batch": captured.position.batch,
            "metrics": captured.metrics,
        }
        if self._cohort is not None and not missing:
            if not self._role.chief:
                own = Snapshot({}, {}, optimizer=captured.snapshot.optimizer)
                self._backups.publish(
                    own, document, captured.arrays, worker=self._role.number, **place
                )
                self._cohort.put(f"parts/{name}/{self._cohort.task}", True)
                return
            missing = self._missing_parts(self._cohort, name)
        document["writer"] = self._role.number
        document["missing"] = list(missing)
        document["degraded"] = bool(missing)
        if missing:
            _log.warning(
                "The checkpoint at %s is degraded: it has no part of %s.",
                captured.position,
                ", ".join(missing),
            )
        # Training stood still for all of it, not for the weights alone.
        snapshot = replace(captured.snapshot, seconds=captured.seconds)
        self._backups.publish(snapshot, document, captured.arrays, **place)
        self._pace.save_took(time.perf_counter() - began)

    def _missing_parts(self, cohort: Cohort, name: str) -> tuple[str, ...]:
        cohort.put(f"parts/{name}/{cohort.task}", True)
        try:
            _, missing = cohort.collect(f"parts/{name}", _PART_SECONDS)
        except AgreementError as gone:
            missing = [
                task for task in cohort.members if not _has_posted(cohort, f"parts/{name}/{task}")
            ]
            _log.warning("A worker has failed during a save: %s", gone)
        return tuple(missing)


def _has_posted(cohort: Cohort, key: str) -> bool:
    try:
        return cohort.get(key, 0) is not None
    except AgreementError:
        return False
