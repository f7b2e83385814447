"""One capture for all who save the same model at the same moment."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np

from keras_safe_ckpt.storage.formats.format import StorageFormat
from keras_safe_ckpt.storage.snapshot import Snapshot

#: By the id of the model: the model and the newest snapshot of it. Both weakly, so that a
#: snapshot lives no longer than its save.
_newest: dict[int, tuple[weakref.ref[Any], weakref.ref[Snapshot]]] = {}


def shared_capture(format: StorageFormat, model: Any, scratch: Path | None) -> Snapshot:
    """As ``format.capture``, or what somebody captured at this moment and is still saving.

    Not for workers that must capture together: whether there is something to share depends on
    how far the saves of each one are.
    """
    known = _known_snapshot(model)
    if known is not None and _serves(known, format) and is_current(known):
        return known
    snapshot = format.capture(model, scratch)
    for key in [key for key, (owner, _) in _newest.items() if owner() is None]:
        del _newest[key]
    _newest[id(model)] = (weakref.ref(model), weakref.ref(snapshot))
    return snapshot


def _serves(snapshot: Snapshot, format: StorageFormat) -> bool:
    """A whole model holds the weights as well; the reverse is not so."""
    return bool(snapshot.groups) and (snapshot.config is not None or not format.whole_model)


def is_current(snapshot: Snapshot) -> bool:
    """Whether no variable has changed since.

    While the snapshot holds the memory of a variable, whoever changes the variable must write
    elsewhere. The same address is therefore the same value; another callback may have swapped
    weights in between.
    """
    if len(snapshot.sources) != len(snapshot.arrays):
        return False  # Something that is not a variable: it would have to be compared.
    for path, variable in snapshot.sources.items():
        then, now = snapshot.arrays[path], variable.value()
        # On another device an address means a copy of all of it.
        if "CPU" not in now.backing_device or _address(then) != _address(now):
            return False
    return True


def _known_snapshot(model: Any) -> Snapshot | None:
    owner, snapshot = _newest.get(id(model), (None, None))
    if owner is None or snapshot is None or owner() is not model:
        return None
    return snapshot()


def _address(tensor: Any) -> int:
    address: int = np.asarray(tensor).__array_interface__["data"][0]
    return address
