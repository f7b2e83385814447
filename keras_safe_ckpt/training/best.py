"""Is it better? Decided by one rule in memory, at a restart and under the lock."""

from __future__ import annotations

import math
import os
from pathlib import Path

from keras_safe_ckpt.storage.lookup import checkpoints_of
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.path_template import PathTemplate
from keras_safe_ckpt.storage.retention import Checkpoint, Veto, unless_newer


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

    def veto(self, candidate: float | None) -> Veto:
        """The rule under the lock: what is in place stays unless ``candidate`` is better.

        A model without a value (None) never replaces one that has one.
        """

        def decide(incumbent: Manifest | None, new: Manifest) -> str | None:
            theirs = None if incumbent is None else self.value_in(incumbent)
            self.learn(theirs)
            if theirs is None:
                return unless_newer(incumbent, new) if candidate is None else None
            if candidate is None:
                return f"the one in place has {self.monitor}={theirs:.5f}, this one has none"
            if self.is_better(candidate, theirs):
                return None
            return (
                f"the one in place is as good or better: {self.monitor}={theirs:.5f}, "
                f"this one has {candidate:.5f}"
            )

        return decide


def learn_from_disk(best: Best, template: PathTemplate) -> tuple[Checkpoint | None, list[str]]:
    """Go on from the best of the files that a template named before.

    Returns that file, if it is better than what was known, and what the user should be told.
    """
    doubts = []

    def unknown(path: Path, reason: str) -> None:
        doubts.append(
            f"{path} is there, and its {best.monitor} is not known: {reason} The first model that "
            "is saved under this name replaces it. Pass initial_value_threshold to save only "
            "what is better than that."
        )

    present = [
        checkpoint
        for checkpoint in checkpoints_of([template], unknown)
        if checkpoint.manifest.series == template.name
    ]
    found = None
    for checkpoint in present:
        value = best.value_in(checkpoint.manifest)
        if value is not None and best.beaten_by(value):
            best.learn(value)
            found = checkpoint
    if present:
        other = best.other_standard(present[-1].manifest, present[-1].path)
        doubts += [other] if other else []
    return found, doubts
