"""What a callback can reach of the `fit` around it, and Keras does not hand to it.

Keras gives a callback neither the list in which it stands nor the data. Both are found in the
frames of the call, by names that are private to Keras: they are used here only, and every one is
looked for. `FitAround` has None where something was not found, and callers do without.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from keras_safe_ckpt.storage.keras_internals import import_keras
from keras_safe_ckpt.training.state import layers_of

#: The datasets of TensorFlow whose iterator makes those of its inputs at once, and once.
_DRAWN_AT_THE_BEGINNING = frozenset(
    f"{name}Dataset"
    for name in (
        "Batch", "Filter", "Map", "Options", "PaddedBatch",
        "ParallelBatch", "ParallelMap", "Prefetch", "Shard", "Shuffle", "Skip", "Take", "TakeWhile",
        "Unbatch", "Zip",
    )
) | {"DistributedDataset", "DistributedDatasetsFromFunction"}  # fmt: skip
#: What the iterator of `fit` must have for its epochs to be gone through again.
_NEEDED = ("catch_stop_iteration", "steps_per_execution", "steps_per_epoch", "data_adapter")


@dataclass(frozen=True)
class FitAround:
    """The `fit` (or `evaluate`) that calls a callback: its list of callbacks, epochs and code."""

    callback_list: Any = None
    epochs: EpochsOfFit | None = None
    code: CodeType | None = None


def find_fit() -> FitAround:
    """To be called by a hook of a callback, on the thread that trains."""
    kind = import_keras().callbacks.CallbackList
    callback_list, epochs, code = None, None, None
    for frame in _frames():
        if callback_list is None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, kind) and isinstance(getattr(owner, "callbacks", None), list):
                callback_list = owner
        elif frame.f_code.co_name in ("fit", "evaluate", "predict"):
            code = frame.f_code
            found = frame.f_locals.get("epoch_iterator")
            if found is not None and all(hasattr(found, name) for name in _NEEDED):
                epochs = EpochsOfFit(found, frame.f_locals.get("validation_data"))
            break
    return FitAround(callback_list, epochs, code)


def is_running(fit: FitAround, frame: FrameType | None) -> bool:
    """Whether this very `fit` is on the stack that ends in ``frame``; True if it is not known."""
    if fit.code is None:
        return True
    while frame is not None:
        if frame.f_code is fit.code and frame.f_locals.get("callbacks") is fit.callback_list:
            return True
        frame = frame.f_back
    return False


class EpochsOfFit:
    """The iterator with which `fit` goes through its data, epoch by epoch."""

    def __init__(self, iterator: Any, validation_data: Any = None) -> None:
        self._iterator = iterator
        self._validation = validation_data
        self._adapter = iterator.data_adapter

    @property
    def continues(self) -> bool:
        """Whether an epoch begins where the one before ended, instead of at the beginning.

        So does a PyDataset with several threads: what they have read too much is used next.
        """
        threads = getattr(self._adapter, "enqueuer", None) is not None
        return bool(self._iterator.steps_per_epoch) or self.is_generator or threads

    @property
    def must_be_read(self) -> bool:
        """Whether an epoch has to be read to its end for the next one to be in its order."""
        return self.continues or _draws_on_the_way(self._dataset())

    @property
    def is_generator(self) -> bool:
        return type(self._adapter).__name__ == "GeneratorDataAdapter"

    @property
    def batch_size(self) -> int | None:
        """Of the data, where Keras knows it."""
        size = getattr(self._adapter, "batch_size", None)
        return None if size is None else int(size)

    def asks_for_more_than(self, executions: int) -> bool:
        """Whether `fit` goes on after so many executions, until the data says that it ends."""
        batches = getattr(self._iterator, "num_batches", 0)
        return batches is None or executions * self._iterator.steps_per_execution < batches

    def order_is_drawn_anew(self, seeded: bool) -> str | None:
        """Why a restarted program would see its data in another order; None if it would not."""
        if self.is_generator:
            return (
                "The training data is a Python generator. After a restart it is called anew and "
                "the batches that were used are taken from it again: the run continues exactly "
                "only if it yields the same batches in every run."
            )
        if not seeded and getattr(self._adapter, "_shuffle", False):
            return (
                "The training data is shuffled without a seed, so that a restarted run sees it in "
                "another order: some samples twice, others not, in the epoch that was "
                "interrupted. Call keras.utils.set_random_seed(seed) before anything else, or "
                "use fit(shuffle=False)."
            )
        unseeded = [node for node in _chain(self._dataset()) if _is_unseeded_shuffle(node)]
        if unseeded:
            return (
                "The training data is a tf.data.Dataset with shuffle() without a seed, so that a "
                "restarted run sees it in another order: some samples twice, others not, in the "
                "epoch that was interrupted. Use shuffle(..., seed=...), or call "
                "keras.utils.set_random_seed(seed) before the dataset is made."
            )
        return None

    def validation_is_drawn_anew(self) -> str | None:
        """Why a restarted program would validate with other data; None if it would not."""
        nodes = _chain(self._validation) if hasattr(self._validation, "element_spec") else ()
        if any(_reshuffles(node) for node in nodes):
            return (
                "The validation data is shuffled anew in each epoch. A restarted run draws other "
                "orders, so that validation metrics differ slightly (and what is trained on, if "
                "both are parts of one shuffled dataset). Do not shuffle it, or use "
                "shuffle(..., reshuffle_each_iteration=False)."
            )
        kind, own = import_keras().utils.PyDataset, type(self._validation)
        if issubclass(own, kind) and any(
            getattr(own, hook, None) is not getattr(kind, hook, None)
            for hook in ("on_epoch_begin", "on_epoch_end")
        ):
            return (
                "The validation data is a PyDataset with on_epoch_begin or on_epoch_end of its "
                "own. A restarted run does not call them for the validations before: if they "
                "change the data, validation metrics differ."
            )
        return None

    def element_spec(self) -> Any:
        """What a batch looks like, if the data says so."""
        dataset = getattr(self._iterator, "_distributed_dataset", None)
        return getattr(dataset, "element_spec", None)

    def replay(self, executions: Sequence[int], tick: Callable[[int], None]) -> None:
        """Go through finished epochs again, of so many executions each, without training.

        Where each epoch begins anew, no batch is read: an iterator is made and dropped, as `fit`
        would, which is what seeded shuffles and `PyDataset.on_epoch_end` go by. ``tick`` is called
        now and then, with how many were read.
        """
        must_be_read = self.must_be_read
        for count in executions:
            tick(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "Your input ran out of data", a second time.
                with self._iterator.catch_stop_iteration():
                    self._replay_epoch(count, tick, must_be_read)

    def _replay_epoch(self, count: int, tick: Callable[[int], None], must_be_read: bool) -> None:
        for done, (_, _, iterator) in enumerate(self._iterator):
            if done >= count:
                # Of data of unknown length Keras learns the length by asking once too often.
                raise StopIteration
            if must_be_read:
                tick(drop(iterator, self._iterator.steps_per_execution)[0])

    def _dataset(self) -> Any:
        get = getattr(self._adapter, "get_tf_dataset", None)
        # Asked of those only that hold one: others would make one.
        return get() if get and type(self._adapter).__name__ == "TFDatasetAdapter" else None


def drop(iterator: Any, count: int) -> tuple[int, Any]:
    """Drop so many batches, or what is left; how many, and the last. StopIteration if none."""
    dropped, batch = 0, None
    for _ in range(count):
        try:
            batch = next(iterator)
        except StopIteration:
            if not dropped:
                raise
            break
        dropped += 1
    return dropped, batch


def is_built_whole(model: Any) -> bool:
    """Also its layers: a model that is told to build itself may leave them for later."""
    return bool(model.built) and all(layer.built for layer in layers_of(model))


def build_for(model: Any, batch: Any) -> str | None:
    """Make the variables that Keras makes when it first trains; why not, if that is not possible.

    ``batch`` is one of the data, or its `element_spec`.
    """
    build = getattr(model, "_symbolic_build", None)
    if build is None:
        return "this version of Keras has no _symbolic_build"
    import tensorflow as tf

    def known(value: Any) -> Any:
        # Where a generator leaves something out, TensorFlow hands over an empty "optional".
        optional = isinstance(value, (tf.experimental.Optional, tf.OptionalSpec))
        return None if optional else value

    try:
        build(data_batch=import_keras().tree.map_structure(known, batch))
    except Exception as error:  # noqa: BLE001  # the model's own code; the caller says it
        return f"Keras says: {str(error).strip().splitlines()[0]}"
    return None


def begin_at_epoch(model: Any, epoch: int | None) -> Any:
    """Make `fit` begin there; returns what was set before. `BackupAndRestore` does the same."""
    before = getattr(model, "_initial_epoch", None)
    model._initial_epoch = epoch
    return before


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _chain(dataset: Any) -> Iterator[Any]:
    """A dataset and those that it is made from."""
    if dataset is None:
        return
    yield dataset
    for source in _sources(dataset):
        yield from _chain(source)


def _sources(dataset: Any) -> Sequence[Any]:
    inputs = getattr(dataset, "_inputs", None)
    if callable(inputs):
        return list(inputs())
    # One that a strategy has distributed.
    original = getattr(dataset, "_original_dataset", None)
    return getattr(dataset, "_datasets", ()) if original is None else [original]


def _draws_on_the_way(dataset: Any, is_plain: bool = True) -> bool:
    """Whether an order is drawn while an epoch is read, and not when it begins."""
    if dataset is None:
        return False
    if not is_plain and _reshuffles(dataset):
        return True
    is_plain = is_plain and type(dataset).__name__.lstrip("_") in _DRAWN_AT_THE_BEGINNING
    return any(_draws_on_the_way(source, is_plain) for source in _sources(dataset))


def _reshuffles(dataset: Any) -> bool:
    again = getattr(dataset, "_reshuffle_each_iteration", None)
    return "Shuffle" in type(dataset).__name__ and again is not False


def _is_unseeded_shuffle(dataset: Any) -> bool:
    if "Shuffle" not in type(dataset).__name__:
        return False
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    return all(seed is not None and int(seed) == 0 for seed in seeds)
