"""What is wrong in the trainer of Keras 3 under MultiWorkerMirroredStrategy, and what is put there.

Keras (issue 20585) fails in three places of its trainer, all of them private:

1. ``_maybe_symbolic_build`` asks the strategy for the mean of a batch that is spread over the
   workers, to learn its shape. The part of the first local replica has all that it needs.
2. ``reduce_per_replica`` averages the metrics of all replicas along axis 0 of numbers that have
   no axes.
3. With ``steps_per_execution`` above 1, ``_make_function`` calls a `tf.function` within a loop of
   a graph, where TensorFlow cannot hand over the keys of the collectives.

Each place is tried out first, without a cluster: one that works is left alone, and where Keras
does anything else than what is known here, nothing at all is changed.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from keras_safe_ckpt.storage.keras_internals import import_keras


class UnknownKerasError(RuntimeError):
    """Keras is not as it is known here; carries what is different."""


class Place(NamedTuple):
    """A function of Keras that does not work, and what makes another one of it."""

    owner: Any
    name: str
    replacement: Callable[[Any], Any]


def trainer_module() -> Any:
    """The module of Keras that trains with TensorFlow; raises `UnknownKerasError`."""
    if import_keras().backend.backend() != "tensorflow":
        raise UnknownKerasError("its backend is not TensorFlow")
    try:
        from keras.src.backend.tensorflow import trainer
    except ImportError as error:
        raise UnknownKerasError(str(error)) from error
    return trainer


def broken_places(trainer: Any) -> list[Place]:
    """What has to be replaced, and by what; raises `UnknownKerasError`."""
    kind = getattr(trainer, "TensorFlowTrainer", None)
    places = (
        (kind, "_maybe_symbolic_build", _builds_from_a_mean, _build_from_a_local_batch),
        (trainer, "reduce_per_replica", _reduces_along_an_axis, _reduce_numbers),
        (kind, "_make_function", _nests_functions, _make_function_without_nesting),
    )
    broken = []
    for owner, name, is_broken, replacement in places:
        function = vars(owner).get(name) if owner is not None else None
        if function is None:
            raise UnknownKerasError(f"its trainer has no {name}")
        try:
            answer = is_broken(function)
        except Exception as error:
            reason = f"{name} raised {type(error).__name__}: {error}"
            raise UnknownKerasError(reason) from error
        if answer is None:
            raise UnknownKerasError(f"{name} does something else than expected")
        if answer:
            broken.append(Place(owner, name, replacement))
    return broken


def is_multi_worker(strategy: Any) -> bool:
    """Whether a strategy spans the tasks of a cluster, be it one."""
    import tensorflow as tf

    resolver = getattr(strategy, "cluster_resolver", None)
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and resolver is not None
        and bool(resolver.cluster_spec())
    )


def all_layers(model: Any) -> list[Any]:
    """The layers of a model, and those inside them if Keras can be asked."""
    flatten = getattr(model, "_flatten_layers", None)
    return list(model.layers if flatten is None else flatten())


# What takes the place of Keras's functions.


def _build_from_a_local_batch(original: Any) -> Any:
    def maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        strategy = self.distribute_strategy
        if not is_multi_worker(strategy):
            return original(self, iterator=iterator, data_batch=data_batch)
        for _, _, batches in () if iterator is None else iterator:
            data_batch = import_keras().tree.map_structure(
                lambda values: strategy.experimental_local_results(values)[0], next(batches)
            )
            break
        # Without an iterator Keras goes on as it should.
        return original(self, data_batch=data_batch)

    return maybe_symbolic_build


def _reduce_numbers(original: Any) -> Any:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction not in ("auto", "mean") or not is_multi_worker(strategy):
            return original(values, strategy, reduction)
        return import_keras().tree.map_structure(
            lambda value: strategy.reduce("MEAN", value, axis=None), values
        )

    return reduce_per_replica


def _make_function_without_nesting(original: Any) -> Any:
    def make_function(self: Any, step_function: Any) -> Any:
        if self.steps_per_execution > 1 and is_multi_worker(self.distribute_strategy):
            return original(_WithoutNesting(self), step_function)
        return original(self, step_function)

    return make_function


class _WithoutNesting:
    """A trainer whose single step is not a `tf.function`; the loop around it still is one."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def _autoconvert_optionals(self, step: Any) -> Any:
        return self._trainer._autoconvert_optionals(getattr(step, "python_function", step))


# Trying Keras out.


def _probe() -> Any:
    """A strategy that says it has several workers, and notes what it is asked to reduce."""
    import tensorflow as tf

    class Probe(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
        extended = types.SimpleNamespace(_in_multi_worker_mode=lambda: True)

        def __init__(self) -> None:
            self.reduced: list[tuple[Any, Any]] = []

        def reduce(self, operation: Any, value: Any, axis: Any) -> Any:
            self.reduced.append((value, axis))
            return value

        def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
            return (value,)

        def scope(self) -> Any:
            return contextlib.nullcontext()

    return Probe()


def _builds_from_a_mean(maybe_symbolic_build: Any) -> bool | None:
    import tensorflow as tf

    class Spread(tf.distribute.DistributedValues):  # type: ignore[misc]
        def __init__(self) -> None:
            """Nothing in it: it is only looked at."""

    built = []
    strategy = _probe()
    trainer = types.SimpleNamespace(
        _distribute_strategy=strategy,
        distribute_strategy=strategy,
        _symbolic_build=lambda data_batch: built.append(data_batch),
    )
    maybe_symbolic_build(trainer, iterator=[(0, 0, iter([(Spread(), Spread())]))])
    return bool(strategy.reduced) if built else None


def _reduces_along_an_axis(reduce_per_replica: Any) -> bool | None:
    strategy = _probe()
    # Not a tensor: the first one sets TensorFlow up, after which no strategy can be made.
    reduce_per_replica({"loss": 1.0}, strategy, "auto")
    if len(strategy.reduced) != 1:
        return None
    return strategy.reduced[0][1] is not None


def _nests_functions(make_function: Any) -> bool | None:
    steps = []

    def note(step: Any) -> Any:
        steps.append(step)
        return step

    trainer = types.SimpleNamespace(
        run_eagerly=False,
        jit_compile=False,
        steps_per_execution=2,
        distribute_strategy=_probe(),
        _autoconvert_optionals=note,
    )
    make_function(trainer, lambda data: data)
    return hasattr(steps[0], "python_function") if steps else None
