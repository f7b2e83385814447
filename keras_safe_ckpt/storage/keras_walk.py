"""Keras's walk over the attributes of an object, without listing them anew at each save.

Keras sorts `dir` of every layer, loss, metric and optimizer each time, a good part of what a
capture costs. The result depends on the class and on the names in the instance's dictionary
alone, so it is remembered by these. The private function that does it is replaced only while we
walk, and only if it is, to the letter, one that is known here.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: SHA-256 of the source of ``_walk_saveable`` in Keras 3.12 to 3.15.
KNOWN_SOURCES = frozenset({"c71ae4a33956e66e58381e4f3b3cca8a5bcc041b732ce8daac6ee925be3d5190"})

_Walk = Callable[[Any], Iterator[tuple[str, Any]]]


def quicker_walk(saving_lib: Any) -> Callable[[], Any]:
    """A context manager in which Keras walks quicker; one that does nothing if it is unknown."""
    original = getattr(saving_lib, "_walk_saveable", None)
    replacement = _remembering_walk(saving_lib) if _is_known(original) else original

    @contextmanager
    def quicker() -> Iterator[None]:
        saving_lib._walk_saveable = replacement
        try:
            yield
        finally:
            # Always Keras's own, also if two threads are in here at the same time.
            saving_lib._walk_saveable = original

    return quicker


def _is_known(walk: Any) -> bool:
    try:
        source = inspect.getsource(walk)
    except (OSError, TypeError):
        return False
    return hashlib.sha256(source.encode()).hexdigest() in KNOWN_SOURCES


def _remembering_walk(saving_lib: Any) -> _Walk:
    remembered: dict[tuple[type, tuple[str, ...]], list[str]] = {}

    def names_of(saveable: Any, skipped: set[str]) -> list[str]:
        kind = type(saveable)
        key = (kind, tuple(vars(saveable)))
        usual = getattr(kind, "__dir__", None) is object.__dir__
        names = remembered.get(key) if usual else None
        if names is None:
            everything = sorted(dir(saveable), key=saving_lib._name_key)
            names = [n for n in everything if not n.startswith("__") and n not in skipped]
            if len(remembered) >= 10_000:  # Classes that are made again and again.
                remembered.clear()
            remembered[key] = names
        return names

    def walk(saveable: Any) -> Iterator[tuple[str, Any]]:
        kind = saveable._obj_type()
        if kind in ("Sequential", "Functional"):
            yield "layers", saveable.layers
        for name in names_of(saveable, saving_lib.get_attr_skipset(kind)):
            try:
                value = getattr(saveable, name)
            except Exception:  # noqa: BLE001  # As Keras does: a property may not be ready.
                continue
            yield name, value

    return walk
