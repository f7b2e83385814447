"""Plain Python values as JSON, with the arrays among them beside it; nothing is ever executed."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from keras_safe_ckpt.storage.dtypes import dtype_to_name

#: What JSON cannot tell apart is written as an object with one of these keys alone.
_ARRAY, _TUPLE, _MAPPING, _SCALAR = "<array>", "<tuple>", "<mapping>", "<scalar>"
_TAGS = (_ARRAY, _TUPLE, _MAPPING, _SCALAR)
#: A state that refers to itself would go on for ever.
_DEEPEST = 50


class UnknownValueError(TypeError):
    """A value that a checkpoint cannot hold, and where it was found."""

    def __init__(self, where: str, value: object) -> None:
        kind = type(value)
        super().__init__(
            f"{where} is a {kind.__module__}.{kind.__qualname__}; expected numbers, strings, "
            "None, arrays, or lists, tuples and dictionaries of them"
        )


def encode(
    value: Any, arrays: MutableMapping[str, Any], where: str = "state", depth: int = 0
) -> Any:
    """``value`` as JSON can hold it; arrays in it go to ``arrays``, by names below ``where``."""
    if depth > _DEEPEST:
        raise UnknownValueError(where, value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {_SCALAR: [value.dtype.name, value.item()]}
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, (list, tuple)):
        items = [
            encode(item, arrays, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)
        ]
        return items if type(value) is list else {_TUPLE: items}
    if isinstance(value, Mapping):
        pairs = [
            (key, encode(item, arrays, f"{where}.{str(key).replace('/', '_')}", depth + 1))
            for key, item in value.items()
        ]
        if all(isinstance(key, str) for key, _ in pairs) and not set(value) & set(_TAGS):
            return dict(pairs)
        return {_MAPPING: [[encode(key, arrays, where, depth + 1), item] for key, item in pairs]}
    if _is_array(value):
        name = f"{where}/{len(arrays)}"
        arrays[name] = np.array(value)
        return {_ARRAY: name}
    raise UnknownValueError(where, value)


def decode(value: Any, arrays: Mapping[str, Any]) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == _ARRAY:
            return np.asarray(arrays[content])
        if tag == _SCALAR:
            return np.dtype(content[0]).type(content[1])
        if tag == _TUPLE:
            return tuple(decode(item, arrays) for item in content)
        if tag == _MAPPING:
            return {decode(key, arrays): decode(item, arrays) for key, item in content}
    return {key: decode(item, arrays) for key, item in value.items()}


def _is_array(value: Any) -> bool:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    dtype = np.asarray(value).dtype
    # bfloat16 and its kin are of kind V, as records are.
    return dtype.kind not in "OUMmV" or dtype_to_name(dtype) == dtype.name
