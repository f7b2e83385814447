"""Find and load the best or the newest among the files that a path or template names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_safe_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from keras_safe_ckpt.storage.catalog import NOT_USABLE, OnSkip
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.formats import format_of
from keras_safe_ckpt.storage.path_template import PathTemplate
from keras_safe_ckpt.storage.restore import load_first_whole
from keras_safe_ckpt.storage.retention import Checkpoint, KeepBest
from keras_safe_ckpt.storage.writer import wait_for_all_writers

_log = logging.getLogger(__name__)

#: Puts the checkpoints that are there (oldest first) into the order in which to try them.
Order = Callable[[Sequence[Checkpoint]], Sequence[Checkpoint]]


def checkpoints_of(templates: Sequence[PathTemplate], on_skip: OnSkip) -> list[Checkpoint]:
    """The files of any of the templates that carry our manifest, oldest first."""
    found: dict[Path, Checkpoint] = {}
    for path in [path for template in templates for path in template.existing()]:
        try:
            with format_of(path).open(path) as checkpoint:
                found[path] = Checkpoint(path, checkpoint.manifest)
        except CheckpointNotFoundError:
            continue  # Pruned since it was listed.
        except NOT_USABLE as error:
            on_skip(path, str(error))
    return sorted(
        found.values(), key=lambda c: (c.manifest.sequence, c.manifest.wall_time, c.path.name)
    )


def of_series(checkpoints: Sequence[Checkpoint], *templates: PathTemplate) -> list[Checkpoint]:
    """Those that were saved under one of the templates, not only named alike.

    "{loss}.keras" fits "best.keras" too; a path without placeholders is what it is.
    """
    names = {template.name for template in templates}
    fixed = not any(template.fields for template in templates)
    return [c for c in checkpoints if fixed or c.manifest.series in names]


def newest_first(checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    """The newest, then the one before, ..."""
    return checkpoints[::-1]


def best_first(monitor: str | None, mode: str | None) -> Order:
    """The best, then the second best, ...; those without a value are left out.

    Without a monitor or mode the newest checkpoint says by what it was judged.
    """

    def order(checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        judged = [c.manifest for c in reversed(checkpoints) if c.manifest.monitor]
        by = monitor or next((manifest.monitor for manifest in judged), None)
        how = mode or next((m.mode for m in judged if m.monitor == by and m.mode), None)
        if by is None or how is None:
            raise ValueError(
                "None of the files says by what it was judged: expected monitor= and mode=. "
                f"Received: monitor={monitor!r}, mode={mode!r}"
            )
        ordered = KeepBest(len(checkpoints), by, how).keep(checkpoints)
        if not ordered:
            raise CheckpointNotFoundError(
                checkpoints[-1].path.parent, f"none of {len(checkpoints)} files has {by!r}"
            )
        return ordered

    return order


def load_in_order(
    templates: Sequence[PathTemplate],
    order: Order,
    model: Any = None,
    custom_objects: Mapping[str, Any] | None = None,
) -> Any:
    """Load the first one that is whole, verified; each one passed over is named in the log."""
    # A save that is still pending (the run was interrupted a moment ago) counts as well.
    wait_for_all_writers()
    skipped: list[str] = []

    def report(path: Path, reason: str) -> None:
        skipped.append(reason)
        _log.warning("Passed over %s: %s", path, reason)

    present = checkpoints_of(templates, report)
    present = of_series(present, *templates) or present
    began = time.perf_counter()
    candidates = order(present) if present else []
    loaded = load_first_whole(candidates, model, custom_objects, report)
    if loaded is not None:
        path, model, manifest = loaded
        EventLog(path.parent).report_restore(path, manifest, time.perf_counter() - began)
        return model
    if skipped:
        raise CorruptCheckpointError(
            templates[0].text, "none of its files is whole:\n  " + "\n  ".join(skipped)
        )
    raise CheckpointNotFoundError(templates[0].text, "no file of this name is there")
