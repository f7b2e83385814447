"""Lay out an HDF5 file without its data, then stream it in file order.

HDF5 decides where everything goes while only the *structure* (groups, headers, attributes) is
written, into memory. The arrays are then streamed from where they are to where HDF5 reserved
their room: no copy, one pass, at the speed of the disk, and at any offset of any container.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import xxhash

from keras_safe_ckpt.storage.dtypes import dtype_to_name
from keras_safe_ckpt.storage.formats.seekable import SeekableFile
from keras_safe_ckpt.storage.manifest import ArrayRecord, Manifest

#: Small enough to be still in the processor's cache when it is written after being hashed.
CHUNK_BYTES = 1 << 20

_PAGE = 4096


@dataclass(frozen=True)
class ArraySpec:
    """What HDF5 must know about an array before its bytes are there."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @staticmethod
    def of(array: np.ndarray[Any, Any]) -> ArraySpec:
        return ArraySpec(array.shape, array.dtype)


@dataclass(frozen=True)
class Extent:
    """A run of bytes in the file: the data of ``array``, or structure where that is None."""

    offset: int
    size: int
    array: str | None


@dataclass(frozen=True)
class Hdf5Image:
    """The extents of a file in file order, and the bytes of its structure."""

    size: int
    extents: tuple[Extent, ...]
    structure: Mapping[int, bytes]


def lay_out(groups: Mapping[str, Mapping[str, str]], arrays: Mapping[str, ArraySpec]) -> Hdf5Image:
    """Plan the file that Keras would write for these groups (with attributes) and arrays."""
    return _lay_out(
        tuple((path, tuple(attributes.items())) for path, attributes in groups.items()),
        tuple(arrays.items()),
    )


# Kept for the next save, which has the same layout nearly always: planning is Python work that
# would take the interpreter from the training thread, about 0.4 ms an array.
@functools.lru_cache(maxsize=4)
def _lay_out(
    groups: tuple[tuple[str, tuple[tuple[str, str], ...]], ...],
    arrays: tuple[tuple[str, ArraySpec], ...],
) -> Hdf5Image:
    specs = dict(arrays)
    sparse = _SparseFile()
    reserved: dict[str, int | None] = {}
    with h5py.File(sparse, "w") as file:
        for path, attributes in groups:
            group = file.require_group(path)
            for key, value in attributes:
                group.attrs[key] = value
        for path, spec in arrays:
            reserved[path] = _reserve(file, path, spec)
    taken = sorted(
        (offset, specs[path].nbytes, path)
        for path, offset in reserved.items()
        if offset is not None
    )
    extents: list[Extent] = []
    structure: dict[int, bytes] = {}
    position = 0
    for offset, size, path in [*taken, (sparse.size, 0, "")]:
        if offset > position:
            extents.append(Extent(position, offset - position, None))
            structure[position] = sparse.content(position, offset)
        if size:
            extents.append(Extent(offset, size, path))
        position = offset + size
    return Hdf5Image(sparse.size, tuple(extents), structure)


def _reserve(file: h5py.File, path: str, spec: ArraySpec) -> int | None:
    """Create the dataset with room for its data, never filled; None for an empty one."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    parent, _, name = path.rpartition("/")
    group = file.require_group(parent) if parent else file
    dataset = h5py.h5d.create(
        group.id,
        name.encode(),
        h5py.h5t.py_create(spec.dtype, logical=True),
        h5py.h5s.create_simple(spec.shape) if spec.shape else h5py.h5s.create(h5py.h5s.SCALAR),
        creation,
    )
    if spec.dtype.name == "bfloat16":
        # HDF5 knows no bfloat16: Keras stores two opaque bytes and says so beside them.
        h5py.Dataset(dataset).attrs["dtype"] = "bfloat16"
    offset = dataset.get_offset()
    return int(offset) if offset is not None and spec.nbytes else None


class ImageWriter:
    """Stream the file that Keras would write for these groups and arrays, hashing on the way."""

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, str]],
        arrays: Mapping[str, np.ndarray[Any, Any]],
    ) -> None:
        self._arrays = arrays
        self._image = lay_out(groups, {path: ArraySpec.of(array) for path, array in arrays.items()})
        self._structure = xxhash.xxh3_128()
        self._digests: dict[str, str] = {}

    @property
    def size(self) -> int:
        return self._image.size

    def chunks(self) -> Iterator[memoryview]:
        """Every byte of the file, in order."""
        for extent in self._image.extents:
            if extent.array is None:
                content = self._image.structure[extent.offset]
                self._structure.update(content)
                yield memoryview(content)
            else:
                yield from self._hashed(extent.array)

    def complete(self, draft: Manifest) -> Manifest:
        """The manifest of what was streamed, to be asked for when `chunks` is exhausted."""
        offsets = {e.array: e.offset for e in self._image.extents if e.array is not None}
        nothing = xxhash.xxh3_128().hexdigest()
        records = {
            path: ArrayRecord(
                array.shape,
                dtype_to_name(array.dtype),
                self._digests.get(path, nothing),
                offsets.get(path, 0),
            )
            for path, array in self._arrays.items()
        }
        return dataclasses.replace(
            draft, arrays=records, size=self.size, structure=self._structure.hexdigest()
        )

    def _hashed(self, path: str) -> Iterator[memoryview]:
        digest = xxhash.xxh3_128()
        view = bytes_of(self._arrays[path])
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            digest.update(chunk)
            yield chunk
        self._digests[path] = digest.hexdigest()


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """The array's memory as bytes, copied only if it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class _SparseFile(SeekableFile):
    """A file in memory that costs only the pages written to.

    HDF5 writes the structure here and never touches the room that it reserved for data, so a
    plan for a model of any size takes kilobytes.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._pages: dict[int, bytearray] = {}

    def writable(self) -> bool:
        return True

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = self._position + len(view)
        view[:] = self.content(self._position, end)
        self._position = end
        return len(view)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            number, start = divmod(self._position + done, _PAGE)
            page = self._pages.setdefault(number, bytearray(_PAGE))
            piece = view[done : done + _PAGE - start]
            page[start : start + len(piece)] = piece
            done += len(piece)
        self._position += done
        self.size = max(self.size, self._position)
        return done

    def content(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` to ``end``; zeros where nothing was written."""
        content = bytearray(end - start)
        for number in range(start // _PAGE, -(-end // _PAGE)):
            page = self._pages.get(number)
            if page is None:
                continue
            first = max(start, number * _PAGE)
            last = min(end, (number + 1) * _PAGE)
            content[first - start : last - start] = page[
                first % _PAGE : first % _PAGE + last - first
            ]
        return bytes(content)
