"""Datasets that grow: rows are collected to whole chunks, and written a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import h5py
import numpy as np

from keras_safe_ckpt.datasets.rows import (
    PLAIN_KINDS,
    Array,
    as_array,
    as_rows,
    checked_attributes,
    checked_compression,
    checked_name,
    fitted,
    is_empty_list,
    is_text,
)

#: A chunk is what is read and written at once.
_CHUNK_BYTES = 1 << 18
#: Rows that are larger are cut up.
_LARGEST_CHUNK_BYTES = 16 << 20
_MOST_ROW_BYTES = 2 << 30
#: Text takes as much room in a row as a pointer, whatever its length.
_TEXT_CHUNK_ROWS = 1024


#: Around what changes rows in the file: it is done whole, or the file is not written any more.
Whole = Callable[[], AbstractContextManager[None]]


class Tables:
    """The datasets of one open file."""

    def __init__(self, file: h5py.File, whole: Whole = nullcontext) -> None:
        self._file = file
        self._whole = whole
        self._tables: dict[str, _Table] = {}

    def append(
        self,
        name: str,
        rows: Any,
        compression: str | int | None,
        attributes: Mapping[str, Any] | None,
        *,
        has_type: bool | None = None,
    ) -> None:
        """Add rows to the end of a dataset, which is made if it is not there.

        ``has_type``: see `fitted`; None looks at ``rows``.
        """
        checked = checked_attributes(attributes) if attributes else None
        table = self._tables.get(name)
        if table is None:
            if self._says_nothing(name, rows, has_type):
                return
            table = self._opened(checked_name(name), rows, compression)
        elif compression is not None:
            table.check_compression(checked_compression(compression))
        array = table.fitted(rows, hasattr(rows, "dtype") if has_type is None else has_type)
        # Before the rows: what HDF5 refuses here must not leave rows behind.
        if checked:
            table.dataset.attrs.update(checked)
        with self._whole():
            table.append(array)

    def write(
        self,
        name: str,
        values: Any,
        compression: str | int | None,
        attributes: Mapping[str, Any] | None,
    ) -> None:
        """A dataset that is there at once, and does not grow."""
        array = as_array(checked_name(name), values)
        compression = checked_compression(compression)
        checked = checked_attributes(attributes)
        self._refuse_taken(name)
        if compression is not None and (array.ndim == 0 or array.size == 0):
            compression = None  # There is nothing to compress, and HDF5 has no chunks for it.
        dtype = h5py.string_dtype() if is_text(array.dtype) else array.dtype
        dataset = self._file.create_dataset(name, array.shape, dtype, compression=compression)
        try:
            dataset.attrs.update(checked)
        except Exception:
            del self._file[name]  # Else there were zeros that nobody wrote.
            raise
        if array.size:
            with self._whole():
                dataset[()] = array

    def kind_of(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """The type and the shape of the rows of a dataset, if it is there."""
        dataset = self._tables[name].dataset if name in self._tables else self._found(name)
        return (dataset.dtype, dataset.shape[1:]) if isinstance(dataset, h5py.Dataset) else None

    def rows(self, name: str) -> int:
        """How many rows a dataset has, those included that wait for their chunk to be full."""
        if name in self._tables:
            return self._tables[name].rows
        found = self._file.get(name)
        return int(found.shape[0]) if isinstance(found, h5py.Dataset) and found.shape else 0

    def flush(self) -> None:
        """Let everything be in the file."""
        with self._whole():
            for table in self._tables.values():
                table.flush()
            self._file.flush()

    def _says_nothing(self, name: str, rows: Any, has_type: bool | None) -> bool:
        """An empty list as the first rows: what the others will be, it does not tell."""
        return is_empty_list(rows, has_type) and self._found(checked_name(name)) is None

    def _found(self, name: str) -> Any:
        """What has this name by now, if anything."""
        try:
            return self._file.get(name)
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise ValueError(f"{name!r}: expected a dataset. It cannot be read: {error}") from error

    def _opened(self, name: str, rows: Any, compression: str | int | None) -> _Table:
        compression = checked_compression(compression)
        found = self._found(name)
        if found is None:
            array = as_rows(name, rows)
            self._refuse_taken(name)
            table = _Table(name, _created(self._file, name, array, compression))
        else:
            if not isinstance(found, h5py.Dataset) or not found.chunks or found.maxshape[0]:
                raise ValueError(
                    f"{name!r}: expected a dataset that grows. Received: a name that was used for "
                    "something else (a group, or an array that was written whole)"
                )
            if found.dtype.kind not in PLAIN_KINDS and not h5py.check_string_dtype(found.dtype):
                raise ValueError(
                    f"{name!r}: expected a dataset of numbers, booleans or text. Received: one of "
                    f"{found.dtype}"
                )
            table = _Table(name, found)
            if compression is not None:
                table.check_compression(compression)
        self._tables[name] = table
        return table

    def _refuse_taken(self, name: str) -> None:
        parts = name.split("/")
        for count in range(1, len(parts) + 1):
            prefix = "/".join(parts[:count])
            found = self._found(prefix)
            if found is not None and (count == len(parts) or isinstance(found, h5py.Dataset)):
                kind = "dataset" if isinstance(found, h5py.Dataset) else "group"
                raise ValueError(f"{name!r}: expected a new name. There is a {kind} {prefix!r}")


class _Table:
    """One dataset: whole chunks of it are in the file, the last one is in memory."""

    def __init__(self, name: str, dataset: h5py.Dataset) -> None:
        self.name = name
        self.dataset = dataset
        self._shape: tuple[int, ...] = dataset.shape[1:]
        self._dtype = dataset.dtype
        self._is_text = is_text(dataset.dtype)
        self._chunk_rows = int(dataset.chunks[0])
        # As bytes, without HDF5's own copy, where a chunk is whole rows that nothing changes.
        self._is_direct = (
            not self._is_text
            and dataset.chunks[1:] == self._shape
            and dataset.id.get_create_plist().get_nfilters() == 0
        )
        #: The first row of the chunk in memory, its rows, and how many of them are in the file.
        rows = int(dataset.shape[0])
        self._filled = rows % self._chunk_rows
        self._first = rows - self._filled
        self._written = self._filled
        self._chunk = np.empty(
            (self._chunk_rows, *self._shape), object if self._is_text else self._dtype
        )
        if self._filled:
            self._chunk[: self._filled] = dataset[self._first :]

    @property
    def rows(self) -> int:
        return self._first + self._filled

    def check_compression(self, compression: str | int | None) -> None:
        now = self.dataset.compression
        wanted = "gzip" if isinstance(compression, int) else compression
        if now != wanted:
            raise ValueError(
                f"{self.name!r}: expected compression={now!r}, as before. Received: {compression!r}"
            )

    def fitted(self, values: Any, has_type: bool) -> Array:
        rows = as_rows(self.name, values)
        return fitted(self.name, rows, self._dtype, self._shape, has_type=has_type)

    def append(self, rows: Array) -> None:
        done, count = 0, len(rows)
        while done < count:
            whole = (count - done) // self._chunk_rows
            if not self._filled and whole:
                stop = done + whole * self._chunk_rows
                self._write_whole(rows[done:stop])
                done = stop
                continue
            part = rows[done : done + self._chunk_rows - self._filled]
            self._chunk[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            done += len(part)
            if self._filled == self._chunk_rows:
                self._write_chunk()

    def flush(self) -> None:
        if self._written < self._filled:
            self._put(self._first + self._written, self._chunk[self._written : self._filled])
            self._written = self._filled

    def _write_chunk(self) -> None:
        if self._is_direct:
            self._write_whole(self._chunk)
        else:
            self._put(self._first + self._written, self._chunk[self._written :])
            self._first += self._chunk_rows
        self._filled = self._written = 0

    def _write_whole(self, rows: Array) -> None:
        """Whole chunks, from ``self._first`` on."""
        if not self._is_direct:
            self._put(self._first, rows)
            self._first += len(rows)
            return
        self.dataset.resize(self._first + len(rows), axis=0)
        rows = np.ascontiguousarray(rows)
        rest = (0,) * len(self._shape)
        for start in range(0, len(rows), self._chunk_rows):
            chunk = rows[start : start + self._chunk_rows]
            self.dataset.id.write_direct_chunk((self._first, *rest), chunk)
            self._first += self._chunk_rows

    def _put(self, first: int, rows: Array) -> None:
        if first + len(rows) > self.dataset.shape[0]:
            self.dataset.resize(first + len(rows), axis=0)
        self.dataset[first : first + len(rows)] = rows


def _created(
    file: h5py.File, name: str, array: Array, compression: str | int | None
) -> h5py.Dataset:
    shape = array.shape[1:]
    if 0 in shape:
        raise ValueError(f"{name!r}: expected rows that hold something. Received: rows of {shape}")
    text = is_text(array.dtype)
    row_items = math.prod(shape)
    if text:
        chunk = (max(1, _TEXT_CHUNK_ROWS // row_items), *shape)
    else:
        row_bytes = row_items * array.dtype.itemsize
        if row_bytes > _MOST_ROW_BYTES:
            raise ValueError(
                f"{name!r}: expected rows of at most 2 GiB. Received: rows of {shape}, "
                f"{row_bytes:,} bytes"
            )
        chunk = (max(1, _CHUNK_BYTES // row_bytes), *shape)
        if row_bytes > _LARGEST_CHUNK_BYTES:
            chunk = (1, *_halved(shape, _LARGEST_CHUNK_BYTES // array.dtype.itemsize))
    return file.create_dataset(
        name,
        shape=(0, *shape),
        maxshape=(None, *shape),
        chunks=chunk,
        dtype=h5py.string_dtype() if text else array.dtype,
        compression=compression,
    )


def _halved(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The longest side is halved until there are not more elements than this."""
    sides = list(shape)
    while np.prod(sides, dtype=np.int64) > most:
        longest = sides.index(max(sides))
        sides[longest] = -(-sides[longest] // 2)
    return tuple(sides)
