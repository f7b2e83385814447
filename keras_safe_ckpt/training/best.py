"""Is it better? Decided by one rule in memory, at a restart and under the lock."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from keras_safe_ckpt.storage.catalog import NOT_USABLE
from keras_safe_ckpt.storage.formats import format_of
from keras_safe_ckpt.storage.lookup import checkpoints_of, of_series
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.path_template import PathTemplate
from keras_safe_ckpt.storage.retention import Checkpoint, KeepBest, SetAside, unless_newer


class Best:
    """The best value whose file is durable.

    Nothing advances it but `learn`, which is called when a file is on the disk. ``mode`` is None
    until it is known which direction is better.

    Example::

        best = Best("val_loss", "min")
        best.beaten_by(0.3)  # True: there was nothing yet
        best.learn(0.3)      # its file is durable
        best.beaten_by(0.4)  # False
    """

    def __init__(self, monitor: str, mode: str | None = None, value: float | None = None) -> None:
        self.monitor = monitor
        self.mode = mode
        self.value = value

    def is_better(self, candidate: float, reference: float | None) -> bool:
        """Strictly; NaN is better than nothing, not even than no value at all."""
        if self.mode is None:
            raise RuntimeError(f"It is not known yet which {self.monitor} is better.")
        if math.isnan(candidate):
            return False
        if reference is None or math.isnan(reference):
            return True
        return candidate < reference if self.mode == "min" else candidate > reference

    def beaten_by(self, candidate: float) -> bool:
        """Whether it is better than what is durable."""
        return self.is_better(candidate, self.value)

    def learn(self, durable: float | None) -> None:
        """A file with this value is on the disk, written by us or by another process."""
        if durable is not None and self.beaten_by(durable):
            self.value = durable

    def value_in(self, manifest: Manifest) -> float | None:
        """What a checkpoint is worth by our monitor; None if that is not known."""
        value = manifest.metrics.get(self.monitor)
        return None if value is None or math.isnan(value) else float(value)

    def other_standard(self, manifest: Manifest, path: str | os.PathLike[str]) -> str | None:
        """What to tell the user if a file was judged otherwise; None if it was not."""
        judged_by = (manifest.monitor, manifest.mode)
        if manifest.monitor is None or judged_by == (self.monitor, self.mode):
            return None
        known = self.value_in(manifest)
        consequence = (
            f"its {self.monitor} is not known, so the first model that is saved replaces it"
            if known is None
            else f"its {self.monitor} is {known:.5f}, and only what is better replaces it"
        )
        return (
            f"{os.fspath(path)} was judged by monitor={manifest.monitor!r}, "
            f"mode={manifest.mode!r}. Now monitor={self.monitor!r}, mode={self.mode!r} decide: "
            f"{consequence}. Use another filepath to keep both."
        )

    def veto(self, candidate: float | None) -> UnlessBetter:
        """The rule under the lock for a model with this value, or without one (None)."""
        return UnlessBetter(self, candidate)


class UnlessBetter:
    """What is in place stays unless the candidate is better; a `Veto`.

    A model without a value never replaces one that has one. ``kept`` is the value of the one in
    place, if the last call decided that it stays.
    """

    def __init__(self, best: Best, candidate: float | None) -> None:
        self._best = best
        self._candidate = candidate
        self.kept: float | None = None

    def __call__(self, incumbent: Manifest | None, new: Manifest) -> str | None:
        self.kept = None
        theirs = None if incumbent is None else self._best.value_in(incumbent)
        if theirs is None:
            return unless_newer(incumbent, new) if self._candidate is None else None
        if self._candidate is not None and self._best.is_better(self._candidate, theirs):
            return None
        self.kept = theirs
        has = "has none" if self._candidate is None else f"has {self._candidate:.5f}"
        return (
            f"the one in place is as good or better: {self._best.monitor}={theirs:.5f}, "
            f"this one {has}"
        )


def learn_from_disk(best: Best, template: PathTemplate) -> tuple[Checkpoint | None, list[str]]:
    """Go on from the best of the files that a template named before, if it is whole.

    Returns that file, if it is better than what was known, and what the user should be told.
    """
    doubts = []
    consequence = (
        "The first model that is saved replaces it. Pass initial_value_threshold to save only "
        "what is better than that."
        if best.value is None
        else f"The first model that is better than {best.value:.5f} replaces it."
    )

    def unknown(path: Path, reason: str) -> None:
        if not template.fields:
            doubts.append(
                f"{path} is there, and its {best.monitor} is not known: {reason} {consequence}"
            )

    present = of_series(checkpoints_of(template, unknown), template)
    doubts += other_standards(best, present)
    for checkpoint in KeepBest(max(1, len(present)), best.monitor, best.mode or "").keep(present):
        value = best.value_in(checkpoint.manifest)
        if value is None or not best.beaten_by(value):
            break
        try:
            # One look at every byte now, so that a damaged file does not keep whole ones away.
            with format_of(checkpoint.path).open(checkpoint.path) as opened:
                opened.verify()
        except NOT_USABLE as error:
            doubts.append(f"{checkpoint.path} does not count as the best model: {error}")
        else:
            best.learn(value)
            return checkpoint, doubts
    return None, doubts


def other_standards(best: Best, present: Sequence[Checkpoint]) -> list[str]:
    """What to tell the user if the newest of the files was judged otherwise than now."""
    texts = [best.other_standard(c.manifest, c.path) for c in present[-1:]]
    return [text for text in texts if text is not None]


def is_best_of_others(best: Best, template: PathTemplate, began: float) -> SetAside:
    """For files that are kept: whether one is the best of all, and of another run than ours.

    Ours began at ``began``, in this process; what it named itself it may replace.
    """

    def decide(incumbent: Manifest, new: Manifest) -> bool:
        theirs = best.value_in(incumbent)
        ours = (incumbent.host, incumbent.pid) == (socket.gethostname(), os.getpid())
        if theirs is None or (ours and incumbent.wall_time >= began):
            return False
        series = of_series(checkpoints_of(template, _ignore), template)
        values = [best.value_in(manifest) for manifest in [new, *[c.manifest for c in series]]]
        return not any(value is not None and best.is_better(value, theirs) for value in values)

    return decide


def _ignore(path: Path, reason: str) -> None:
    """A file that cannot be read is not the best one."""
