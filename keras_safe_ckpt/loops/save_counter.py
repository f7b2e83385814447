"""The number of a checkpoint, which TensorFlow counts in a variable of the checkpoint itself."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class SaveCounter:
    """``checkpoint.save_counter``, in eager mode or in the default session of a graph."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint
        self._is_ready = False

    def value(self) -> int:
        return whole_number(self._variable())

    def set(self, number: int) -> None:
        variable = self._variable()
        if tf.executing_eagerly():
            variable.assign(number)
        else:
            variable.load(number, _session())

    def _variable(self) -> Any:
        variable = self._checkpoint.save_counter
        if not tf.executing_eagerly() and not self._is_ready:
            # Newly made, unless the user has initialized it together with all others.
            if not _session().run(tf.compat.v1.is_variable_initialized(variable)):
                _session().run(variable.initializer)
            self._is_ready = True
        return variable


def whole_number(value: Any) -> int:
    """Of a variable or a tensor, too."""
    if isinstance(value, (tf.Tensor, tf.Variable)):
        value = value.numpy() if tf.executing_eagerly() else _session().run(value)
    return int(value)


def _session() -> Any:
    session = tf.compat.v1.get_default_session()
    if session is None:
        raise RuntimeError(
            "In a graph a session is needed: call this within `with tf.compat.v1.Session():`."
        )
    return session
