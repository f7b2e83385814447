"""What a `tf.train.Checkpoint` holds: its variables, their strategy, and what Keras leaves out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

#: The attribute of a checkpoint under which a guard keeps the seeds of Keras's layers.
SEEDS = "keras_safe_ckpt_seeds"


def variables_in(checkpoint: Any) -> Iterator[Any]:
    """The variables of TensorFlow in it, also those that Keras wraps; each one once."""
    import tensorflow as tf

    seen: set[int] = set()
    for part in _parts(checkpoint):
        variable = part if isinstance(part, tf.Variable) else getattr(part, "value", None)
        if isinstance(variable, tf.Variable) and id(variable) not in seen:
            seen.add(id(variable))
            yield variable


def strategy_in(checkpoint: Any) -> Any:
    """That of several workers which has made a variable of it, or is in scope; None if neither."""
    if checkpoint is None or "tensorflow" not in sys.modules:
        return None
    import tensorflow as tf

    several = tf.distribute.MultiWorkerMirroredStrategy
    if isinstance(tf.distribute.get_strategy(), several):
        return tf.distribute.get_strategy()
    for variable in variables_in(checkpoint):
        strategy = getattr(variable, "distribute_strategy", None)
        if isinstance(strategy, several):
            return strategy
    return None


def add_seeds(checkpoint: Any) -> None:
    """Let it keep the seeds of Keras's layers as well, which TensorFlow does not see.

    Without them Dropout begins anew after a restart, and the run is another one.
    """
    if "keras" not in sys.modules:
        return
    import keras

    found: dict[int, Any] = {}
    for part in _parts(checkpoint):
        if isinstance(part, keras.layers.Layer):
            weights = {id(variable) for variable in part.weights}
            found.update({id(v): v.value for v in part.variables if id(v) not in weights})
    if found:
        setattr(checkpoint, SEEDS, list(found.values()))


class HeldVariables:
    """The values that all variables of this process had at one moment, without copying them."""

    def __init__(self, checkpoint: Any) -> None:
        self._values = [
            (part, part.read_value())
            for variable in variables_in(checkpoint)
            for part in _local_parts(variable)
        ]

    def put_back(self) -> None:
        for part, value in self._values:
            part.assign(value)


def _parts(checkpoint: Any) -> list[Any]:
    import tensorflow as tf

    return list(tf.train.TrackableView(checkpoint).descendants())


def _local_parts(variable: Any) -> list[Any]:
    """One for each replica of this process; reading them is no collective."""
    replicas = getattr(variable, "values", None)
    return list(replicas) if isinstance(replicas, (tuple, list)) and replicas else [variable]
