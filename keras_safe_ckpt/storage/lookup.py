"""Find and load the best or the newest among the files that a path or template names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_safe_ckpt.errors import CheckpointNotFoundError
from keras_safe_ckpt.storage.catalog import NOT_USABLE, OnSkip, oldest_first
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.formats import format_of
from keras_safe_ckpt.storage.path_template import PathTemplate
from keras_safe_ckpt.storage.paths import why_passed_over
from keras_safe_ckpt.storage.restore import load_first_whole, none_is_whole
from keras_safe_ckpt.storage.retention import Checkpoint, KeepBest
from keras_safe_ckpt.storage.writer import wait_for_all_writers

_log = logging.getLogger(__name__)

#: Puts the checkpoints that are there (oldest first) into the order in which to try them.
Order = Callable[[Sequence[Checkpoint]], Sequence[Checkpoint]]


def checkpoints_of(template: PathTemplate, on_skip: OnSkip) -> list[Checkpoint]:
    """The files of a template that carry our manifest, oldest first."""
    found: dict[Path, Checkpoint] = {}
    for path in template.obstacles():
        # A link to a file is the user's own layout.
        if not path.is_file() and (reason := why_passed_over(path)):
            on_skip(path, reason)
    for path in template.existing():
        try:
            with format_of(path).open(path) as checkpoint:
                found[path] = Checkpoint(path, checkpoint.manifest)
        except CheckpointNotFoundError:
            continue  # Pruned since it was listed.
        except NOT_USABLE as error:
            on_skip(path, str(error))
    return oldest_first(found.values())


def of_series(checkpoints: Sequence[Checkpoint], template: PathTemplate) -> list[Checkpoint]:
    """Those that were saved under the template, not only named alike.

    "{loss}.keras" fits "best.keras" too; a path without placeholders is what it is.
    """
    return [
        checkpoint
        for checkpoint in checkpoints
        if not template.fields or template.is_series(checkpoint.manifest.series)
    ]


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
            known = sorted({f"{m.monitor} ({m.mode or 'no mode'})" for m in judged})
            raise ValueError(
                "Expected monitor= and mode=, since the files do not say which is the best by "
                f"that; they were judged by: {', '.join(known) or 'nothing'}. "
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
    """Load the first one that is whole, verified; each one passed over is named in the log.

    It is looked for under the first of the templates that named any file.
    """
    # A save that is still pending (the run was interrupted a moment ago) counts as well.
    wait_for_all_writers()
    skipped: list[str] = []

    def report(path: Path, reason: str) -> None:
        skipped.append(reason)
        _log.warning("Passed over %s: %s", path, reason)

    template = next((one for one in templates if one.existing()), templates[0])
    present = checkpoints_of(template, report)
    present = of_series(present, template) or present
    began = time.perf_counter()
    candidates = order(present) if present else []
    loaded = load_first_whole(candidates, model, custom_objects, report)
    if loaded is not None:
        path, model, manifest = loaded
        EventLog(path.parent).report_restore(path, manifest, time.perf_counter() - began)
        return model
    if skipped:
        raise none_is_whole(template.text, skipped)
    raise CheckpointNotFoundError(templates[0].text, "no file of this name is there")
