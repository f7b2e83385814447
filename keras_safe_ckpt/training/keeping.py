"""Which of the saved files stay: the keywords of a callback, made into one policy."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from keras_safe_ckpt.storage.path_template import WORKER, PathTemplate
from keras_safe_ckpt.storage.retention import (
    Checkpoint,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepNewest,
    Retention,
)

_SOME_EPOCHS = (1, 2, 9, 10, 11, 99, 100, 101, 110)


@dataclass(frozen=True)
class _KeepBestOnceJudged:
    """The best ones; all as long as none has a value, for nobody knows which one is the best."""

    best: KeepBest

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        return self.best.keep(checkpoints) or checkpoints


@dataclass(frozen=True)
class Keeping:
    """What stays: the newest n, the best k, one of every n epochs or hours; all if none is set."""

    max_to_keep: int | None = None
    keep_best: int | None = None
    keep_every: int | datetime.timedelta | None = None

    def __post_init__(self) -> None:
        for name in ("max_to_keep", "keep_best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"Expected {name} to be None or a whole number of at least 1. "
                    f"Received: {name}={value!r}"
                )
        every = self.keep_every
        if every is not None and not (
            (type(every) is int and every >= 1)
            or (isinstance(every, datetime.timedelta) and every > datetime.timedelta())
        ):
            raise ValueError(
                "Expected keep_every to be a number of epochs of at least 1 or a positive "
                f"datetime.timedelta. Received: keep_every={every!r}"
            )

    @property
    def deletes(self) -> bool:
        return (self.max_to_keep, self.keep_best, self.keep_every) != (None, None, None)

    def ensure_fits(self, template: PathTemplate, *, by_batch: bool) -> None:
        """Raise if the files that are to be kept would overwrite each other.

        ``by_batch``: several may be saved in one epoch.
        """
        if not self.deletes:
            return
        names = {template.count_text("epoch", epoch) for epoch in _SOME_EPOCHS}
        if len(names) < len(_SOME_EPOCHS) and (template.fields or self != Keeping(max_to_keep=1)):
            raise ValueError(
                "To keep several checkpoints each needs a name of its own: expected {epoch} in "
                f"the path, with {self}. Received: filepath={template.text!r}"
            )
        if by_batch and template.fields and "batch" not in template.fields:
            raise ValueError(
                "Saved by batches or seconds, each checkpoint of an epoch needs a name of its own: "
                f"expected {{batch}} in the path, with {self}. "
                f"Received: filepath={template.text!r}"
            )
        if template.parent.fields - {WORKER}:
            raise ValueError(
                f"Expected the checkpoints in one directory, with {self}: move the placeholders "
                f"to the name of the file. Received: filepath={template.text!r}"
            )

    def policy(self, monitor: str, mode: str | None) -> Retention | None:
        """The policy for checkpoints judged by ``monitor``; None if nothing is to be deleted.

        The best stays whatever else is asked for; without a mode it is not known which it is.
        """
        if not self.deletes:
            return None
        policies: list[Retention] = []
        if self.max_to_keep is not None:
            policies.append(KeepNewest(self.max_to_keep))
        if mode is not None:
            best = KeepBest(self.keep_best or 1, monitor, mode)
            policies.append(best if policies or self.keep_every else _KeepBestOnceJudged(best))
        if isinstance(self.keep_every, datetime.timedelta):
            policies.append(KeepEvery(hours=self.keep_every.total_seconds() / 3600))
        elif self.keep_every is not None:
            policies.append(KeepEvery(epochs=self.keep_every))
        return KeepAny(tuple(policies))

    def __str__(self) -> str:
        settings = {
            "max_to_keep": self.max_to_keep,
            "keep_best": self.keep_best,
            "keep_every": self.keep_every,
        }
        return ", ".join(f"{name}={value!r}" for name, value in settings.items() if value)
