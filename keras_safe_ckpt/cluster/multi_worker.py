"""Makes `fit`, `evaluate` and `predict` of Keras 3 run under MultiWorkerMirroredStrategy."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from keras_safe_ckpt.cluster.cohort import common_run
from keras_safe_ckpt.cluster.coordination import is_coordinated
from keras_safe_ckpt.cluster.keras_trainer import (
    UnknownKerasError,
    all_layers,
    broken_places,
    is_multi_worker,
    trainer_module,
)
from keras_safe_ckpt.cluster.roles import role_of
from keras_safe_ckpt.storage.keras_internals import import_keras

_log = logging.getLogger(__name__)

#: The line that a program needs, for messages.
LINE_TO_ADD = "keras_safe_ckpt.enable_multi_worker_fit()"

_BATCH_NORMALIZATION = (
    "This model has BatchNormalization layers that are not synchronized (%s). Each worker "
    "normalizes by its own part of a batch, and keeps moving statistics of its own; evaluate "
    "uses them, and those of the chief are what is saved. Weights and optimizer are equal on all "
    "workers nevertheless. BatchNormalization(synchronized=True) makes the statistics equal too, "
    "as with one process and the whole batch."
)


class MultiWorkerFit:
    """What ``enable_multi_worker_fit`` has done; `disable`, or the end of a ``with``, undoes it."""

    def __init__(self, message: str, was_enabled: bool) -> None:
        #: What was found out about this Keras, in words.
        self.message = message
        self._was_enabled = was_enabled

    @property
    def enabled(self) -> bool:
        """Whether functions of Keras are replaced at the moment."""
        return bool(_replaced)

    def disable(self) -> None:
        """Give Keras its own functions back."""
        for owner, name, original in reversed(_replaced):
            setattr(owner, name, original)
        _replaced.clear()

    def __enter__(self) -> MultiWorkerFit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._was_enabled:
            self.disable()

    def __repr__(self) -> str:
        return f"<MultiWorkerFit: {self.message}>"


#: What stood where something of ours stands now: owner, name, original.
_replaced: list[tuple[Any, str, Any]] = []


def enable_multi_worker_fit() -> MultiWorkerFit:
    """Let `fit`, `evaluate` and `predict` run under `tf.distribute.MultiWorkerMirroredStrategy`.

    Call it once, before `fit`, on every worker. Models that train without such a strategy are not
    affected. An error in one worker also ends the others, with an `AgreementError` that names it,
    instead of leaving them waiting. Do it for a while only by ``with enable_multi_worker_fit():``.

    On a Keras that needs no help, or that is not known, nothing is changed, and it is logged; see
    ``message`` of what is returned.

    Example::

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        enable_multi_worker_fit()
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(dataset, epochs=10)
    """
    was_enabled = bool(_replaced)
    if was_enabled:
        return MultiWorkerFit("enabled", was_enabled)
    version = import_keras().__version__
    try:
        trainer = trainer_module()
        broken = broken_places(trainer)
    except UnknownKerasError as unknown:
        message = (
            f"Keras {version} is not known to this library ({unknown}): nothing was changed. "
            "If fit fails under MultiWorkerMirroredStrategy, install keras 3.15."
        )
        warnings.warn(message, stacklevel=2)
        return MultiWorkerFit(message, was_enabled)
    if not broken:
        message = f"Keras {version} needs no help under MultiWorkerMirroredStrategy"
        _log.info(message)
        return MultiWorkerFit(message, was_enabled)
    for owner, name, replacement in broken:
        _replace(owner, name, replacement)
    for name in ("fit", "evaluate", "predict"):
        _replace(trainer.TensorFlowTrainer, name, _run_together)
    return MultiWorkerFit("enabled", was_enabled)


def warn_if_needed() -> None:
    """Warn in a multi-worker job whose `fit` will fail, with the line that is missing."""
    if _replaced or not is_coordinated():
        return
    try:
        broken = broken_places(trainer_module())
    except UnknownKerasError:
        return  # Nothing is known to be wrong.
    if broken:
        warnings.warn(
            "fit of this Keras fails under MultiWorkerMirroredStrategy. Add this line before it:\n"
            f"    {LINE_TO_ADD}",
            stacklevel=3,
        )


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    setattr(owner, name, functools.wraps(original)(make(original)))
    _replaced.append((owner, name, original))


def _run_together(original: Any) -> Any:
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        if not is_multi_worker(self.distribute_strategy):
            return original(self, *arguments, **options)
        role = role_of(self)
        if not role.trains_together:
            return original(self, *arguments, **options)
        _explain_batch_normalization(self)
        with common_run(role):
            return original(self, *arguments, **options)

    return run


_explained = False


def _explain_batch_normalization(model: Any) -> None:
    global _explained
    if _explained:
        return
    kind = import_keras().layers.BatchNormalization
    plain = [
        layer.name
        for layer in all_layers(model)
        if isinstance(layer, kind) and not getattr(layer, "synchronized", False)
    ]
    if plain:
        _explained = True
        shown = ", ".join(plain[:3]) + (", ..." if len(plain) > 3 else "")
        warnings.warn(_BATCH_NORMALIZATION % shown, stacklevel=3)
