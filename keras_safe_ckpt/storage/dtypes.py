"""Names of dtypes that survive a file, the ones of machine learning included."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


@functools.cache
def dtype_to_name(dtype: np.dtype[Any]) -> str:
    """``"<f4"``, ``">i8"``, ``"|S5"``, or ``"bfloat16"`` and its kin, which NumPy cannot spell."""
    name: str = dtype.name if _extension(dtype.name) is not None else dtype.str
    return name


@functools.cache
def dtype_from_name(name: str) -> np.dtype[Any]:
    """The dtype of a name from a file; ValueError unless it is one of plain numbers or bytes."""
    extension = _extension(name)
    dtype: np.dtype[Any]
    try:
        dtype = np.dtype(name) if extension is None else extension
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"{name!r} is no dtype") from error
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"{name!r} is no dtype of plain numbers")
    return dtype


def describe(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """``float32[6, 4]``"""
    return f"{dtype.name}{list(shape)}"


def _extension(name: str) -> np.dtype[Any] | None:
    import ml_dtypes

    kind = getattr(ml_dtypes, name, None)
    return np.dtype(kind) if isinstance(kind, type) and issubclass(kind, np.generic) else None
