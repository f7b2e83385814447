"""The private names of Keras, each one looked for before it is used (and see `keras_walk`).

Keras walks a model and hands every variable to a *store*. A store of our own, instead of the one
that writes HDF5, is all it takes to learn the exact layout of a Keras file without writing one,
and to load arrays that are already in memory. Where Keras has changed, `walker` returns None
with a reason, and the callers use the slower public functions.
"""

from __future__ import annotations

import functools
import inspect
import pathlib
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from keras_safe_ckpt.storage.keras_walk import quicker_walk

_TENSORFLOW_MISSING = (
    "Keras is set to its TensorFlow backend, and TensorFlow is not installed. Install one of\n"
    '  pip install "keras_safe_ckpt[tensorflow-cpu]"\n'
    '  pip install "keras_safe_ckpt[tensorflow]"\n'
    "(not both: they overwrite each other), or set KERAS_BACKEND to the backend you have."
)


def import_keras() -> Any:
    """Keras, or an error that says which of its backends to install."""
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "tensorflow":
            raise ImportError(_TENSORFLOW_MISSING) from error
        raise
    return keras


class ObjectsNotLoadedError(ValueError):
    """Keras goes on when an object cannot be loaded; these are the objects and their errors."""

    def __init__(self, failures: list[tuple[Any, Exception]]) -> None:
        super().__init__("; ".join(f"{saveable}: {error}" for saveable, error in failures))
        self.causes = [error for _, error in failures]


class Walker(NamedTuple):
    """Keras's own traversal of a model, with stores of our choice."""

    #: record(model, receive, how to make a directory for assets, or None)
    record: Callable[[Any, RecordValue, Callable[[], pathlib.Path] | None], None]
    #: load(model, names, read): raises ObjectsNotLoadedError
    load: Callable[[Any, Iterable[str], ReadArray], None]
    #: config.json and metadata.json of a .keras file
    serialize: Callable[[Any], tuple[str, str]]


#: Gives the array of a name, read at the moment at which it is needed.
ReadArray = Callable[[str], Any]
#: Called with the HDF5 group path, its attributes, and (None for the group itself) key and value.
RecordValue = Callable[[str, Mapping[str, str], str | None, Any], None]

_SAVE_PARAMETERS = {"weights_store", "assets_store", "inner_path", "visited_saveables"}
_LOAD_PARAMETERS = _SAVE_PARAMETERS | {"failed_saveables", "error_msgs"}


@functools.cache
def walker() -> tuple[Walker | None, str]:
    """The fast path into Keras, or None and why there is none."""
    keras = import_keras()
    if keras.backend.backend() != "tensorflow":
        return None, f"the Keras backend is {keras.backend.backend()!r}, not 'tensorflow'"
    try:
        from keras.src.saving import saving_lib

        save_state, load_state = saving_lib._save_state, saving_lib._load_state
        serialize = saving_lib._serialize_model_as_json
        h5_store, disk_store = saving_lib.H5IOStore, saving_lib.DiskIOStore
        for function, expected in ((save_state, _SAVE_PARAMETERS), (load_state, _LOAD_PARAMETERS)):
            missing = expected - set(inspect.signature(function).parameters)
            if missing:
                return None, f"{function.__name__} of Keras takes no {sorted(missing)}"
    except (ImportError, AttributeError) as error:
        return None, f"Keras {keras.__version__} has changed: {error}"

    dictionary_store = _dictionary_store(h5_store)
    recording_store = _recording_store(dictionary_store)
    loading_store = _loading_store(dictionary_store)
    assets_store = _assets_store(disk_store)
    quicker = quicker_walk(saving_lib)

    def record(model: Any, receive: RecordValue, assets: Callable[[], pathlib.Path] | None) -> None:
        _remember_skipped_attributes(saving_lib)
        with quicker(), _variables_instead_of_copies(model):
            save_state(
                model,
                weights_store=recording_store(receive),
                assets_store=None if assets is None else assets_store(assets),
                inner_path="",
                visited_saveables=set(),
            )

    def load(model: Any, names: Iterable[str], read: ReadArray) -> None:
        _remember_skipped_attributes(saving_lib)
        messages: dict[int, tuple[Any, Exception]] = {}
        load_state(
            model,
            weights_store=loading_store(names, read),
            assets_store=None,
            inner_path="",
            visited_saveables=set(),
            failed_saveables=set(),
            error_msgs=messages,
        )
        if messages:
            raise ObjectsNotLoadedError(list(messages.values()))

    return Walker(record, load, serialize), ""


def _dictionary_store(base: type) -> type:
    class DictionaryStore(base):  # type: ignore[misc]  # Keras checks for its own class
        """The part of an object's variables that is being saved or loaded, without a file."""

        _here: dict[str, Any]

        def __bool__(self) -> bool:
            return True

        def __contains__(self, key: str) -> bool:
            return key in self._here

        def __len__(self) -> int:
            return len(self._here)

        def keys(self) -> KeysView[str]:
            return self._here.keys()

        def close(self) -> None:
            self._here = {}

    return DictionaryStore


def _recording_store(base: type) -> Callable[[RecordValue], Any]:
    class RecordingStore(base):  # type: ignore[misc]
        def __init__(self, receive: RecordValue) -> None:
            self._receive = receive
            self._here: dict[str, Any] = {}
            self._group = "vars"
            self._attributes: Mapping[str, str] = {}

        def make(self, path: str, metadata: Mapping[str, str] | None = None) -> RecordingStore:
            self._group = f"{path}/vars" if path else "vars"
            self._attributes = dict(metadata or {})
            self._here = {}
            if metadata:  # Keras creates the group at once then, also if it stays empty.
                self._receive(self._group, self._attributes, None, None)
            return self

        def __setitem__(self, key: str, value: Any) -> None:
            self._here[key] = value
            self._receive(self._group, self._attributes, key, value)

        # A layer may treat the store as the dictionary that Keras documents.
        def __getitem__(self, key: str) -> Any:
            return self._here[key]

    return RecordingStore


def _loading_store(base: type) -> Callable[[Iterable[str], ReadArray], Any]:
    class LoadingStore(base):  # type: ignore[misc]
        """Looks names up as Keras does in a file: the group of an object, in it "vars"."""

        def __init__(self, names: Iterable[str], read: ReadArray) -> None:
            self._read = read
            self._group = ""
            self._here: dict[str, None] = {}
            self._children: dict[str, dict[str, None]] = {}
            for name in names:
                parts = name.split("/")
                for depth in range(len(parts)):
                    group = "/".join(parts[:depth])
                    self._children.setdefault(group, {})[parts[depth]] = None

        def get(self, path: str) -> LoadingStore:
            self._group = f"{path}/vars" if path else "vars"
            self._here = self._children.get(self._group, {})
            return self

        def has_path(self, path: str) -> bool:
            return path in self._children

        def __getitem__(self, key: str) -> Any:
            return self._read(f"{self._group}/{key}")

    return LoadingStore


def _assets_store(base: type) -> Callable[[Callable[[], pathlib.Path]], Any]:
    class AssetsStore(base):  # type: ignore[misc]  # Keras checks for its own class
        def __init__(self, directory: Callable[[], pathlib.Path]) -> None:
            self._directory = directory

        def make(self, path: str) -> str:
            target = self._directory() / path
            target.mkdir(parents=True, exist_ok=True)
            return target.as_posix()

    return AssetsStore


def has_loader_of_its_own(model: Any) -> bool:
    """Whether a class outside Keras loads its own variables, which may fail half-way."""
    flatten = getattr(model, "_flatten_layers", None)
    if flatten is None:
        return True  # A Keras that cannot be asked: assume the worst.
    owners = [*flatten(), *_optimizers_of(getattr(model, "optimizer", None), set())]
    return any(
        not getattr(type(owner).load_own_variables, "__module__", "").startswith("keras.")
        for owner in owners
        if hasattr(type(owner), "load_own_variables")
    )


@contextmanager
def compile_record_kept(model: Any) -> Iterator[None]:
    """Undo what Keras's writer of ``.h5`` files does to the model.

    It takes the optimizer out of the record of how the model was compiled, and the next
    ``.keras`` file of the model would come without one.
    """
    record = getattr(getattr(model, "_compile_config", None), "config", None)
    before = dict(record) if isinstance(record, dict) else {}
    try:
        yield
    finally:
        if isinstance(record, dict):
            record.update(before)


def better_direction(callback: Any) -> str:
    """``"min"`` or ``"max"``, whichever is better for what a callback of Keras monitors.

    With ``mode="auto"`` Keras knows it of the metrics that the model was compiled with, as soon
    as they are built; ValueError for others.
    """
    if callback.mode in ("min", "max"):
        return str(callback.mode)
    ask = getattr(callback, "_set_monitor_op", None)
    if ask is None:
        return _direction_by_name(callback.monitor)
    callback.monitor_op = None  # Keras would go on with that of another monitor before.
    ask()
    return "min" if callback.monitor_op is import_keras().ops.less else "max"


def _direction_by_name(monitor: str) -> str:
    """For a Keras that cannot be asked: only what cannot be misunderstood."""
    name = monitor.removeprefix("val_")
    if name == "loss" or name.endswith("_loss"):
        return "min"
    if name in ("acc", "accuracy", "auc"):
        return "max"
    raise ValueError(
        f"Expected mode='min' or mode='max', since it is not known which is better for "
        f"monitor={monitor!r}. Received: mode='auto'"
    )


def _remember_skipped_attributes(saving_lib: Any) -> None:
    """Fill the cache that Keras means to have, a millisecond for each layer otherwise.

    Keras (3.12 to 3.15) stores the attributes that a walk leaves out under one name and looks
    them up under another, so it builds a layer to compare with for every layer that it visits.
    """
    try:
        from keras.src.backend.common import global_state

        for kind in ("Functional", "Layer", "Loss", "Metric", "Optimizer", "Sequential"):
            name = f"saving_attr_skiplist_{kind}"
            if global_state.get_global_attribute(name) is None:
                global_state.set_global_attribute(name, saving_lib.get_attr_skipset(kind))
    except (ImportError, AttributeError, ValueError):
        return  # Another Keras: it walks as fast as it does.


@contextmanager
def _variables_instead_of_copies(model: Any) -> Iterator[None]:
    """Let optimizers hand over their variables; Keras's own method copies each one first."""
    keras = import_keras()
    slow = keras.optimizers.Optimizer.save_own_variables
    replaced = [
        optimizer
        for optimizer in _optimizers_of(getattr(model, "optimizer", None), set())
        if type(optimizer).save_own_variables is slow
    ]
    for optimizer in replaced:
        # Into the instance's dictionary: nothing global changes, and Keras's attribute
        # tracking does not see it.
        vars(optimizer)["save_own_variables"] = functools.partial(_hand_over, optimizer)
    try:
        yield
    finally:
        for optimizer in replaced:
            vars(optimizer).pop("save_own_variables", None)


def _hand_over(optimizer: Any, store: Any) -> None:
    for index, variable in enumerate(optimizer.variables):
        store[str(index)] = variable


def _optimizers_of(candidate: Any, seen: set[int]) -> Iterator[Any]:
    """An optimizer and those inside it (loss scaling, several for several layers)."""
    optimizer_class = import_keras().optimizers.Optimizer
    if isinstance(candidate, optimizer_class):
        if id(candidate) in seen:
            return
        seen.add(id(candidate))
        yield candidate
        inside = list(vars(candidate).values())
    elif isinstance(candidate, Mapping):
        inside = list(candidate.values())
    elif isinstance(candidate, (list, tuple)):
        inside = list(candidate)
    else:
        return
    for item in inside:
        # Most of them are variables, of which there may be thousands.
        if isinstance(item, (optimizer_class, list, tuple, dict, Mapping)):
            yield from _optimizers_of(item, seen)
