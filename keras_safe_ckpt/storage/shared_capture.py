"""One capture for all who save the same model at the same moment."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_safe_ckpt.storage.formats.format import StorageFormat
from keras_safe_ckpt.storage.keras_internals import walker
from keras_safe_ckpt.storage.snapshot import Snapshot


@dataclass(frozen=True)
class _Taken:
    """A snapshot and the variables that the model had; weakly, to live no longer than its save."""

    model: weakref.ref[Any]
    snapshot: weakref.ref[Snapshot]
    variables: tuple[int, ...]


_newest: dict[int, _Taken] = {}


def shared_capture(format: StorageFormat, model: Any, scratch: Path | None) -> Snapshot:
    """As ``format.capture``, or what somebody captured at this moment and is still saving.

    Not for workers that must capture together: whether there is something to share depends on
    how far the saves of each one are.
    """
    taken = _newest.get(id(model))
    if taken is not None and taken.model() is model:
        known = taken.snapshot()
        if known is not None and _serves(known, format, model, taken.variables):
            return known
    snapshot = format.capture(model, scratch)
    for key in [key for key, taken in _newest.items() if taken.model() is None]:
        del _newest[key]
    _newest[id(model)] = _Taken(weakref.ref(model), weakref.ref(snapshot), _variables(model))
    return snapshot


def _serves(snapshot: Snapshot, format: StorageFormat, model: Any, had: tuple[int, ...]) -> bool:
    """Whether a capture now would give the same.

    Between two callbacks at the same moment a third may have changed anything: swapped the
    weights, set a rate, added a layer, compiled the model anew.
    """
    if snapshot.assets or _variables(model) != had:
        return False
    if not is_current(snapshot):
        return False
    if not format.whole_model:
        return True
    fast, _ = walker()
    return fast is not None and snapshot.config == fast.serialize(model)[0]


def _variables(model: Any) -> tuple[int, ...]:
    optimizer = getattr(model, "optimizer", None)
    return tuple(map(id, [*model.variables, *getattr(optimizer, "variables", ()), optimizer]))


def is_current(snapshot: Snapshot) -> bool:
    """Whether no variable of it has changed since.

    While the snapshot holds the memory of a variable, whoever changes the variable must write
    elsewhere. The same address is therefore the same value.
    """
    if len(snapshot.sources) != len(snapshot.arrays):
        return False  # Something that is not a variable: it would have to be compared.
    for path, variable in snapshot.sources.items():
        then, now = snapshot.arrays[path], variable.value()
        # On another device an address means a copy of all of it.
        if "CPU" not in now.backing_device or _address(then) != _address(now):
            return False
    return True


def _address(tensor: Any) -> int:
    address: int = np.asarray(tensor).__array_interface__["data"][0]
    return address
