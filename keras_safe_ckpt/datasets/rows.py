"""What may be appended to a dataset: rows of one shape and of a type that HDF5 has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

# Not as np.ma: NumPy would import it at the first use, and a child that is forked while another
# thread does so waits for that thread for ever.
from numpy import ma

#: NumPy's letters for what HDF5 stores as it is: booleans, integers, floats, complex numbers.
PLAIN_KINDS = "biufc"
#: Names in a file that are our own.
RESERVED = "keras_safe_ckpt"

_MOST_DIMENSIONS = 32

Array = np.ndarray[Any, Any]


def checked_name(name: object) -> str:
    """The name of a dataset, with groups (``"validation/loss"``), or an error."""
    expected = "expected a name such as 'predictions' or 'validation/loss'"
    if not isinstance(name, str):
        raise TypeError(f"name: {expected}. Received: {name!r}")
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts) or not _is_short(name):
        raise ValueError(f"name: {expected}. Received: {_shown(name)}")
    if parts[0] == RESERVED:
        raise ValueError(
            f"name: {RESERVED!r} is what this library calls its own. Received: {name!r}"
        )
    return name


def checked_compression(compression: object) -> str | int | None:
    """As h5py takes it: None, "gzip", "lzf", or a level of gzip."""
    is_level = isinstance(compression, int) and not isinstance(compression, bool)
    if compression in (None, "gzip", "lzf") or (is_level and 0 <= compression <= 9):  # type: ignore[operator]
        return compression  # type: ignore[return-value]
    raise ValueError(
        "compression: expected None, 'gzip', 'lzf' or a level of gzip from 0 to 9. "
        f"Received: {compression!r}"
    )


def as_array(name: str, values: Any) -> Array:
    """``values`` as an array that HDF5 can hold; text as an array of objects."""
    if hasattr(values, "to_tensor") and hasattr(values, "row_splits"):  # tf.RaggedTensor
        raise _ragged(name, "a ragged tensor")
    if ma.is_masked(values):
        raise TypeError(
            f"{name!r}: expected numbers, booleans or text. Received: an array with a mask, which "
            "HDF5 does not have; fill it (.filled(value)), or append the mask to another dataset"
        )
    try:
        array = np.asarray(values)
    except ValueError as error:
        if "inhomogeneous" in str(error):
            raise _ragged(name, _lengths(values)) from None
        raise
    if array.ndim > _MOST_DIMENSIONS:
        raise ValueError(
            f"{name!r}: expected at most {_MOST_DIMENSIONS} dimensions, as HDF5 has. Received: "
            f"{array.ndim}"
        )
    if array.dtype.kind in "USO":
        return _as_text(name, array, values)
    if array.dtype.kind not in PLAIN_KINDS or array.dtype.type.__module__ != "numpy":
        raise TypeError(
            f"{name!r}: expected numbers, booleans or text. Received: values of type "
            f"{array.dtype.name}, which HDF5 does not have; convert them (such as with "
            ".astype('float32'))"
        )
    return array


def is_empty_list(values: Any, has_type: bool | None = None) -> bool:
    """No rows, of no type and no shape: nothing that a dataset could be made of.

    ``has_type``: see `fitted`; None looks at ``values``.
    """
    typed = hasattr(values, "dtype") if has_type is None else has_type
    return not typed and isinstance(values, (list, tuple)) and not values


def as_rows(name: str, values: Any) -> Array:
    """As `as_array`, with at least one dimension."""
    array = as_array(name, values)
    if array.ndim == 0:
        raise ValueError(
            f"{name!r}: expected rows, an array of at least one dimension. Received: the single "
            f"value {array[()]!r}; for one row of it pass [{array[()]!r}]"
        )
    return array


def fitted(
    name: str, rows: Array, dtype: np.dtype[Any], shape: tuple[int, ...], *, has_type: bool
) -> Array:
    """``rows`` in the type of a dataset whose rows have this shape, or an error.

    ``has_type``: they came as an array. A list has no type of its own: what matters is that its
    values fit.
    """
    if rows.shape == (0,) and not has_type:
        return np.empty((0, *shape), dtype)  # An empty list is no rows of any kind.
    if rows.shape[1:] != shape:
        raise ValueError(
            f"{name!r}: expected rows of shape {shape}, as before. Received: rows of shape "
            f"{rows.shape[1:]} (an array of shape {rows.shape})"
        )
    if rows.dtype == dtype:
        return rows
    rule = "safe" if has_type else "same_kind"
    if is_text(dtype) == is_text(rows.dtype) and np.can_cast(rows.dtype, dtype, rule):  # type: ignore[arg-type]
        with np.errstate(over="ignore"):
            cast = rows.astype(dtype)
        if is_text(dtype) or _holds(cast, rows):
            return cast
    raise TypeError(
        f"{name!r}: expected {described(dtype)}, as before. Received: {described(rows.dtype)}, "
        "which it cannot hold without loss"
    )


def is_text(dtype: np.dtype[Any]) -> bool:
    """Whether it is text of any length, which HDF5 keeps apart from the rows."""
    return h5py.check_string_dtype(dtype) is not None or dtype.kind == "O"


def described(dtype: np.dtype[Any]) -> str:
    return "text" if is_text(dtype) else dtype.name


def checked_attributes(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Attributes as they will be read again, or an error that names the one."""
    checked: dict[str, Any] = {}
    if not isinstance(attributes, Mapping | None):
        raise TypeError(f"attributes: expected names and values. Received: {_shown(attributes)}")
    for key, value in (attributes or {}).items():
        if not isinstance(key, str) or not key or "\0" in key or not _is_short(key):
            raise ValueError(f"attributes: expected names as text. Received: {_shown(key)}")
        if key == RESERVED:
            raise ValueError(
                f"attributes: {RESERVED!r} is what this library calls its own. Received: {key!r}"
            )
        array = as_array(f"attribute {key}", value)
        size = 16 * array.size if array.dtype.kind == "O" else array.nbytes
        if size > 32768:
            raise ValueError(
                f"attribute {key!r}: expected at most 32 KiB (2,048 texts). Received: {size:,} "
                "bytes; make it a dataset"
            )
        checked[key] = array.astype(h5py.string_dtype()) if array.dtype.kind == "O" else array
    return checked


def _holds(cast: Array, rows: Array) -> bool:
    """Whether it is the same, but for the rounding of numbers that are not whole anyway."""
    if rows.dtype.kind in "iu" and cast.dtype.kind in "fc":
        # Not compared as they are: NumPy makes floats of both, and large ones are the same then.
        whole, limit = cast.real, 2.0 ** (8 * rows.itemsize - (rows.dtype.kind == "i"))
        with np.errstate(invalid="ignore"):
            return bool((whole < limit).all() and np.array_equal(whole.astype(rows.dtype), rows))
    if rows.dtype.kind in "iub" or cast.dtype.kind in "iub":
        return bool(np.array_equal(cast, rows))
    return bool(np.array_equal(np.isfinite(cast), np.isfinite(rows)))


def _is_short(name: str) -> bool:
    """What HDF5 can have as a name, and a person can read."""
    try:
        return len(name.encode()) <= 1000
    except UnicodeEncodeError:
        return False


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) < 100 else f"{text[:100]}..."


def _as_text(name: str, array: Array, values: Any) -> Array:
    if array.dtype.kind == "S" and not hasattr(values, "dtype"):
        array = np.asarray(values, dtype=object)  # NumPy cuts zeros off at the end of bytes.
    objects = array.astype(object)
    for value in objects.flat:
        try:
            text = value.encode() if isinstance(value, str) else value
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name!r}: expected text. Received: {_shown(value)}, which is no text ({error})"
            ) from None
        if not isinstance(text, bytes):
            if isinstance(value, (list, tuple, np.ndarray)):
                raise _ragged(name, _lengths(values))
            raise TypeError(
                f"{name!r}: expected numbers, booleans or text. Received: {value!r} of type "
                f"{type(value).__name__}"
            )
        if b"\0" in text:
            raise ValueError(
                f"{name!r}: expected text. Received: bytes with a zero in them, which HDF5 cuts "
                "off there; append numbers (numpy.frombuffer(data, 'uint8')), or use TFRecord"
            )
    return objects


def _lengths(values: Any) -> str:
    """Which lengths the rows have, if they have different ones."""
    found: dict[int, int] = {}
    try:
        for number, row in enumerate(values):
            found.setdefault(len(row), number)
    except TypeError:
        return "rows of different depth" if found else ""
    if len(found) < 2:
        return "rows of different lengths inside" if found else ""
    (first, _), (second, number) = list(found.items())[:2]
    return f"rows of length {first} and (row {number}) of length {second}"


def _ragged(name: str, received: str) -> ValueError:
    return ValueError(
        f"{name!r}: expected rows of one shape. Received: {received}. Pad them to one length, or "
        f"append their values to one dataset and their lengths to another ('{name}_lengths')"
    )
