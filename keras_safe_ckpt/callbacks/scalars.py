"""The events of a run as scalars for TensorBoard, while it trains."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.storage.keras_internals import import_keras
from keras_safe_ckpt.training.keras_fit import find_fit

_log = logging.getLogger(__name__)

#: The runs of all callbacks are below this folder of the ``log_dir``.
FOLDER = "checkpoints"

#: Which facts of an event are shown, and as what.
_NUMBERS = {
    "save": {"bytes": "bytes", "seconds": "seconds", "blocked_seconds": "blocked_seconds"},
    "wait": {"seconds": "waited_seconds"},
    "resume": {
        "repeated": "repeated_batches",
        "dropped": "dropped_batches",
        "seconds": "resume_seconds",
    },
    "agreement": {"seconds": "agreement_seconds"},
    "preempted": {"seconds": "stop_seconds"},
}
#: Events that are counted, from the beginning of this `fit`.
_COUNTS = {"save": "saves", "notice": "notices", "error": "errors", "pass_over": "passed_over"}


class Scalars:
    """Listens to an `EventLog`; each number goes to ``folder`` as a scalar ``checkpoint/...``.

    Events come from the thread that trains, from those that save and from those that watch for
    notices. ``step`` is asked for where an event does not say it. What cannot be written is said
    once, and stops nothing.
    """

    def __init__(self, folder: str, step: Callable[[], int]) -> None:
        self._folder = folder
        self._step = step
        self._turn = threading.Lock()
        self._counts: dict[str, int] = {}
        self._writer: Any = None
        self._has_failed = False

    def __call__(self, entry: Mapping[str, Any]) -> None:
        with self._turn:
            values = self._values(entry)
            if not values or self._has_failed:
                return
            try:
                import tensorflow as tf

                step = entry.get("step")
                self._write(tf, self._step() if step is None else int(step), values)
            except Exception as error:  # noqa: BLE001  # said, and no reason for a save to fail
                self._has_failed = True
                reason = str(error).partition("\n")[0]
                _log.warning("No scalars for TensorBoard in %s: %s", self._folder, reason)

    def _values(self, entry: Mapping[str, Any]) -> dict[str, float]:
        event = entry["event"]
        values = {
            name: float(entry[fact])
            for fact, name in _NUMBERS.get(event, {}).items()
            if entry.get(fact) is not None
        }
        if event in _COUNTS:
            name = _COUNTS[event]
            self._counts[name] = self._counts.get(name, 0) + 1
            values[name] = self._counts[name]
        return values

    def _write(self, tf: Any, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._folder)
        # Not `tf.summary.scalar`, which needs the package of TensorBoard where only training is
        # to be done. Keras's own callback may have said that nothing is recorded at this step.
        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"),
            data_class=1,  # DATA_CLASS_SCALAR, of which there is no public name.
        )
        with self._writer.as_default(), tf.summary.record_if(True):
            for name, value in values.items():
                tensor = tf.constant(value, tf.float32)
                tf.summary.write(f"checkpoint/{name}", tensor, step=step, metadata=metadata)
        # Which has flushed them: the process may be killed at any moment.


def check_log_dir(log_dir: str | os.PathLike[str] | None) -> str | None:
    """Raise for what could not be written to later."""
    if log_dir is None:
        return None
    if not isinstance(log_dir, (str, os.PathLike)) or not os.fspath(log_dir):
        raise ValueError(
            f"Expected log_dir to be the path of a folder. Received: log_dir={log_dir!r}"
        )
    try:
        import tensorflow  # noqa: F401  # now, and not on a thread that saves
    except ImportError as error:
        raise ImportError(
            "log_dir needs TensorFlow, which writes the files that TensorBoard reads. Install it "
            'with: pip install "keras_safe_ckpt[tensorflow-cpu]". '
            f"Received: log_dir={os.fspath(log_dir)!r}"
        ) from error
    return str(os.fspath(log_dir))


def scalars_for(model: Any, log_dir: str | None, role: Role, name: str) -> Scalars | None:
    """For the callback ``name`` in the `fit` of ``model``; None if nobody wants scalars.

    Without a ``log_dir`` that of a ``keras.callbacks.TensorBoard`` in the same `fit` is used. Of
    workers that train together only the one that writes the checkpoints has scalars; others, of
    which each trains a model of its own, have folders of their own.
    """
    place = log_dir or _log_dir_of_tensorboard()
    if place is None or not role.leads:
        return None
    parts = [FOLDER] if role.alone or role.trains_together else [FOLDER, f"worker-{role.number}"]
    # Each callback is a run of its own to TensorBoard, which reads one file of a folder at a time.
    run = re.sub(r"[^\w.-]+", "-", name).strip("-") or "run"
    return Scalars(os.path.join(place, *parts, run), lambda: step_of(model) or 0)


def _log_dir_of_tensorboard() -> str | None:
    keras = import_keras()
    if keras.backend.backend() != "tensorflow":
        return None
    for callback in getattr(find_fit().callback_list, "callbacks", ()):
        if isinstance(callback, keras.callbacks.TensorBoard):
            return str(callback.log_dir)
    return None


def step_of(model: Any) -> int | None:
    """How many steps its optimizer has made, if it has one."""
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    return None if iterations is None else int(iterations.numpy())
