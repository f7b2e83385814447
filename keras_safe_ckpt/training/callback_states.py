"""What the other callbacks of a `fit` have in mind, to be kept and given back.

A callback with `get_state()` and `set_state(state)` keeps what it wants. For those of Keras the
attributes that matter are known here. One that is unknown and changes is named in a warning.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from keras_safe_ckpt.storage.keras_internals import import_keras
from keras_safe_ckpt.training.codec import UnknownValueError, encode

#: What makes the callbacks of Keras go on where they were.
_ATTRIBUTES = {
    "EarlyStopping": ("wait", "best", "best_weights", "best_epoch", "stopped_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "OrbaxCheckpoint": (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
        "_total_batches_seen",
    ),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch"),
}
_NOT_STATE = ("_model", "model", "params", "validation_data")


class CallbackStates:
    """Reads and gives back the states of ``callbacks``, in which each has its place.

    `begin_watching` when training begins, so that `warn_of_unknown` can tell later who has
    changed since.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = _by_key(callbacks)
        self._before: dict[str, dict[str, Any]] = {}

    def capture(self, arrays: MutableMapping[str, Any]) -> dict[str, Any]:
        """The state of each one that has any, by class and number; arrays go to ``arrays``."""
        states = {}
        for key, callback in self._callbacks.items():
            state = _state_of(callback)
            if state is not None:
                try:
                    states[key] = encode(state, arrays, f"callbacks/{key}")
                except UnknownValueError as error:
                    raise TypeError(
                        f"The state of {key} cannot be put into a checkpoint: {error}. "
                        "Its get_state() must return plain values."
                    ) from error
        return states

    def prepare(self, states: Mapping[str, Any]) -> None:
        """Before the others hear that training begins: what they would destroy then."""
        for key, callback in self._callbacks.items():
            if key in states and _is_keras(callback, "CSVLogger"):
                _continue_file(callback, states[key])

    def restore(self, states: Mapping[str, Any]) -> None:
        """After they have heard that training begins, and have reset themselves."""
        for key, callback in self._callbacks.items():
            if key in states:
                _give(callback, states[key])
        strangers = [key for key in states if key not in self._callbacks]
        if strangers:
            warnings.warn(
                "The checkpoint has the state of callbacks that are not in the list any more, "
                f"which is dropped: {', '.join(strangers)}.",
                stacklevel=2,
            )
        fresh = [
            key
            for key, callback in self._callbacks.items()
            if key not in states and _state_of(callback) is not None
        ]
        if fresh:
            warnings.warn(
                "The checkpoint has no state of these callbacks, which begin anew: "
                f"{', '.join(fresh)}.",
                stacklevel=2,
            )

    def begin_watching(self) -> None:
        """Remember what the unknown callbacks are like now."""
        self._before = {key: _fingerprint(callback) for key, callback in self._unknown().items()}

    def warn_of_unknown(self) -> None:
        """Name those that have changed since: they will not be as they were after a restart."""
        changed = {}
        for key, callback in self._unknown().items():
            now = _fingerprint(callback)
            names = [name for name in now if now[name] != self._before.get(key, {}).get(name)]
            if names and key in self._before:
                changed[key] = names
                del self._before[key]  # Said once.
        if changed:
            shown = "; ".join(f"{key} ({', '.join(names)})" for key, names in changed.items())
            warnings.warn(
                "These callbacks change during training, and their state is not in the "
                f"checkpoint: {shown}. After a restart they begin anew. Give them get_state() "
                "and set_state(state), which takes what the first one returned.",
                stacklevel=2,
            )

    def _unknown(self) -> dict[str, Any]:
        return {
            key: callback
            for key, callback in self._callbacks.items()
            if not has_state_methods(callback)
            and not type(callback).__module__.startswith("keras.")
        }


def has_state_methods(callback: Any) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(
        getattr(callback, "set_state", None)
    )


def _by_key(callbacks: Sequence[Any]) -> dict[str, Any]:
    """By class, and number among those of the class: the list may be made anew at each start."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        name = type(callback).__name__
        number = sum(1 for key in named if key.partition("-")[0] == name)
        named[f"{name}-{number}"] = callback
    return named


def _is_keras(callback: Any, *names: str) -> bool:
    """Whether it is one of these classes of Keras, or made from one without more of its own."""
    kinds = import_keras().callbacks
    return any(isinstance(callback, getattr(kinds, name, ())) for name in names)


def _state_of(callback: Any) -> Any:
    if has_state_methods(callback):
        return callback.get_state()
    if _is_keras(callback, "CSVLogger"):
        return _file_state(callback)
    for name, attributes in _ATTRIBUTES.items():
        if _is_keras(callback, name):
            return {key: getattr(callback, key) for key in attributes if hasattr(callback, key)}
    return None


def _give(callback: Any, state: Any) -> None:
    if has_state_methods(callback):
        callback.set_state(state)
        return
    if _is_keras(callback, "CSVLogger"):
        keys = state.get("keys") if isinstance(state, Mapping) else None
        if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
            callback.keys = keys
        return
    for name, attributes in _ATTRIBUTES.items():
        if _is_keras(callback, name):
            for key in attributes:  # Those only: a file must not set anything else.
                if isinstance(state, Mapping) and key in state and hasattr(callback, key):
                    setattr(callback, key, state[key])
            return


def _file_state(logger: Any) -> dict[str, Any]:
    """How long the file is, and what its columns are, which Keras takes from the first line."""
    file = getattr(logger, "csv_file", None)
    try:
        if file is None or getattr(file, "closed", True):
            size = os.path.getsize(logger.filename)
        else:
            file.flush()
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError):
        size = 0
    return {"size": size, "keys": getattr(logger, "keys", None)}


def _continue_file(logger: Any, state: Any) -> None:
    """Keep the lines up to the checkpoint, and only those, from being begun anew or doubled."""
    try:
        size = os.path.getsize(logger.filename)
    except OSError:
        size = 0
    kept = state.get("size") if isinstance(state, Mapping) else None
    if not isinstance(kept, int) or kept < 0:
        return  # Not what we wrote.
    if size < kept:
        warnings.warn(
            f"{logger.filename} has {size} bytes, and had {kept} when the checkpoint was "
            "taken: lines of earlier epochs are missing in it.",
            stacklevel=2,
        )
    elif size:
        os.truncate(logger.filename, kept)
    begin, was = logger.on_train_begin, logger.append

    def continue_file(logs: Any = None) -> None:
        vars(logger).pop("on_train_begin", None)
        logger.append = True
        try:
            begin(logs)
        finally:
            logger.append = was

    vars(logger)["on_train_begin"] = continue_file


def _fingerprint(callback: Any) -> dict[str, Any]:
    known = _names_in_keras(type(callback))
    return {name: _mark(value) for name, value in vars(callback).items() if name not in known}


def _names_in_keras(kind: type) -> set[str]:
    """The attributes that the classes of Keras which this one is made from deal with."""
    names = set(_NOT_STATE)
    for base in kind.__mro__:
        if base.__module__.startswith("keras."):
            for member in vars(base).values():
                names.update(getattr(getattr(member, "__code__", None), "co_names", ()))
    return names


def _mark(value: Any) -> Any:
    """Something that differs if the value has changed, without keeping it alive."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, (list, tuple, dict, set)):
        shown = repr(value) if len(value) <= 100 else ""
        return type(value).__name__, len(value), shown
    return id(value)
