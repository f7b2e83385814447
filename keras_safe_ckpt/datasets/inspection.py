"""What is in an HDF5 file of somebody else: only datasets whose bytes are in that very file.

HDF5 follows links to other files, reads datasets from other files, and believes any size that a
file claims. What is read here may come from anywhere, so all of that is refused, by name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from keras_safe_ckpt.datasets.packed_chunks import trouble_with
from keras_safe_ckpt.datasets.rows import Array
from keras_safe_ckpt.datasets.text_bounds import longest_text, texts_in
from keras_safe_ckpt.errors import MergeConflictError

_MOST_OBJECTS = 100_000
_MOST_LEVELS = 64
#: Deflate packs at most about 1,030 bytes into one; what claims more than that has no bytes.
_MOST_BYTES_PER_BYTE = 1100
_SPARE_BYTES = 64 << 20
#: A chunk is in memory as a whole. Ours are much smaller.
_MOST_CHUNK_BYTES = 256 << 20
#: A single value, and an attribute, is in memory as a whole.
_MOST_SINGLE_BYTES = 64 << 20
#: So are its texts, each of which may be the longest of the file.
_MOST_TEXT_BYTES = 512 << 20


@dataclass(frozen=True)
class DatasetFacts:
    """What must agree between the files."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attributes: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return count_of(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileFacts:
    """The datasets of a file by name, the attributes of its groups, and which file it was."""

    path: Path
    datasets: dict[str, DatasetFacts]
    groups: dict[str, dict[str, Any]]
    identity: tuple[int, ...]
    #: The bytes of this file and of those that its virtual datasets show.
    size: int
    #: Device and number of all of these.
    inodes: frozenset[tuple[int, ...]]
    #: No text that is read from it is longer; 0 if there are none.
    longest_text: int = 0

    def check_unchanged(self) -> None:
        """Raise `MergeConflictError` if it is another file by now."""
        if not self.path.exists() or identity_of(self.path) != self.identity:
            raise MergeConflictError("/", [str(self.path)], "it has changed meanwhile")


def count_of(shape: tuple[int, ...]) -> int:
    """Elements, as a number that does not overflow."""
    count = 1
    for length in shape:
        count *= int(length)
    return count


def identity_of(path: Path) -> tuple[int, ...]:
    """The same as long as nobody replaces or changes the file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """For reading; `MergeConflictError` if it is no whole HDF5 file, or cannot be closed."""
    # A pipe of this name would be waited for, for ever.
    if not path.is_file():
        raise MergeConflictError("/", [str(path)], "there is no such file")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        reason = f"it is not a whole HDF5 file, or is being written ({_first_line(error)})"
        raise MergeConflictError("/", [str(path)], reason) from error
    try:
        yield file
    except BaseException:
        # What went wrong before says more.
        with contextlib.suppress(OSError, RuntimeError):
            file.close()
        raise
    try:
        file.close()
    except (OSError, RuntimeError) as error:
        reason = f"HDF5 cannot close it ({_first_line(error)})"
        raise MergeConflictError("/", [str(path)], reason) from error


def inspect(path: Path, *, unpacks: bool = True) -> FileFacts:
    """Everything that is in the file, or `MergeConflictError` for what is refused.

    ``unpacks``: rows will be read, so that compressed ones must unpack to what they should.
    """
    return _Inspection(path, unpacks).facts()


class _Inspection:
    def __init__(self, path: Path, unpacks: bool, seen: frozenset[str] = frozenset()) -> None:
        self._path = path
        self._unpacks = unpacks
        self._longest_text: int | None = None
        self._seen = seen | {path.name}
        self._sources: dict[Path, FileFacts] = {}
        #: Virtual datasets, and those of this file that they show.
        self._within: dict[str, set[str]] = {}
        self._datasets: dict[str, DatasetFacts] = {}
        self._groups: dict[str, dict[str, Any]] = {}
        self._addresses: set[int] = set()
        self._count = 0
        #: What all datasets claim, and what there is at most.
        self._claimed = 0
        self._size = os.path.getsize(path) if path.is_file() else 0

    def facts(self) -> FileFacts:
        with opened(self._path) as file:
            # By the open file, so that a replacement in between is noticed afterwards.
            identity = identity_of(self._path)
            try:
                self._walk(file, "", 0)
                self._check_sources_within()
            except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
                if isinstance(error, MergeConflictError):
                    raise
                raise self._refused("/", f"it is damaged ({_first_line(error)})") from error
        inodes = {identity[:2]}.union(*(source.inodes for source in self._sources.values()))
        return FileFacts(
            self._path,
            self._datasets,
            self._groups,
            identity,
            self._size,
            frozenset(inodes),
            self._longest_text or 0,
        )

    def _refused(self, name: str, reason: str) -> MergeConflictError:
        return MergeConflictError(name, [str(self._path)], reason)

    def _walk(self, group: h5py.Group, prefix: str, level: int) -> None:
        if level > _MOST_LEVELS:
            raise self._refused(prefix, f"more than {_MOST_LEVELS} groups in each other")
        address = h5py.h5o.get_info(group.id).addr
        if address in self._addresses:
            raise self._refused(prefix or "/", "a group that has two names, or contains itself")
        self._addresses.add(address)
        self._groups[prefix] = self._attributes(group, prefix)
        for name in group:
            path = f"{prefix}/{name}" if prefix else name
            self._count += 1
            if self._count > _MOST_OBJECTS:
                raise self._refused(prefix or "/", f"more than {_MOST_OBJECTS:,} objects")
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise self._refused(path, f"an external link, to {link.filename!r}")
            if isinstance(link, h5py.SoftLink):
                raise self._refused(path, f"a soft link, to {link.path!r}")
            found = group[name]
            if isinstance(found, h5py.Group):
                self._walk(found, path, level + 1)
            elif isinstance(found, h5py.Dataset):
                self._datasets[path] = self._dataset(found, path)
            else:
                raise self._refused(path, "a stored type, which is neither dataset nor group")

    def _dataset(self, dataset: h5py.Dataset, name: str) -> DatasetFacts:
        if dataset.external:
            file = dataset.external[0][0]
            raise self._refused(name, f"external storage, in {file!r}")
        if dataset.shape is None:
            raise self._refused(name, "a dataset without a shape")
        if dataset.is_virtual:
            self._check_sources(dataset, name)
        chunk = count_of(dataset.chunks or ()) * dataset.dtype.itemsize
        if dataset.chunks and chunk > _MOST_CHUNK_BYTES:
            # HDF5 unpacks a whole one for each row.
            raise self._refused(
                name, f"a chunk of {chunk:,} bytes; at most {_MOST_CHUNK_BYTES:,} are taken"
            )
        if dataset.chunks and self._unpacks:
            trouble = trouble_with(dataset, chunk)
            if trouble is not None:
                raise self._refused(name, trouble)
        for part in _parts(dataset.dtype):
            if h5py.check_ref_dtype(part) is not None:
                raise self._refused(
                    name, "references to other objects, which mean nothing elsewhere"
                )
            if part.kind == "O" and h5py.check_string_dtype(part) is None:
                raise self._refused(name, "rows of different lengths, which cannot be merged")
        if not dataset.shape and dataset.dtype.itemsize > _MOST_SINGLE_BYTES:
            raise self._refused(
                name,
                f"a single value of {dataset.dtype.itemsize:,} bytes; at most "
                f"{_MOST_SINGLE_BYTES:,} are taken",
            )
        self._check_texts(name, "an element", texts_in(dataset.dtype))
        facts = DatasetFacts(dataset.shape, dataset.dtype, self._attributes(dataset, name))
        self._claimed += facts.nbytes
        if self._claimed > _MOST_BYTES_PER_BYTE * self._size + _SPARE_BYTES:
            raise self._refused(
                name,
                f"it claims {facts.nbytes:,} bytes (shape {dataset.shape}), all datasets up to it "
                f"{self._claimed:,}, in a file of {self._size:,}",
            )
        return facts

    def _check_sources(self, dataset: h5py.Dataset, name: str) -> None:
        for source in dataset.virtual_sources():
            file, source_name = (
                text.replace("%%", "%") for text in (source.file_name, source.dset_name)
            )
            if file in (".", self._path.name):
                # Looked at in the end, when it is certain that there are no links.
                self._within.setdefault(name, set()).add(source_name.strip("/"))
                continue
            if os.path.basename(file) != file or file in ("", ".."):
                raise self._refused(name, f"a virtual source outside of its folder, {file!r}")
            if os.path.islink(self._path.parent / file):
                raise self._refused(name, f"a virtual source that is a symbolic link, {file!r}")
            if file in self._seen or len(self._seen) > _MOST_LEVELS:
                raise self._refused(name, f"virtual sources that lead on and on, to {file!r}")
            other = self._path.parent / file
            if other not in self._sources:
                self._sources[other] = _Inspection(other, self._unpacks, self._seen).facts()
                self._size += self._sources[other].size
            if source_name.strip("/") not in self._sources[other].datasets:
                raise self._refused(
                    name, f"a virtual source that is not there, {source_name!r} in {file!r}"
                )

    def _check_sources_within(self) -> None:
        """HDF5 follows them as far as they lead, and crashes if that has no end."""
        left = dict(self._within)
        for name, sources in left.items():
            for source in sources - set(self._datasets):
                raise self._refused(name, f"a virtual source that is not there, {source!r}")
        for _ in range(_MOST_LEVELS):
            ends = [name for name, sources in left.items() if not sources & left.keys()]
            for name in ends:
                del left[name]
        if left:
            raise self._refused(min(left), "virtual sources that lead on and on, in this file")

    def _attributes(self, item: h5py.Group | h5py.Dataset, name: str) -> dict[str, Any]:
        found = {}
        for key in item.attrs:
            kind = item.attrs.get_id(key)
            for part in _parts(kind.dtype):
                if part.kind == "O" and h5py.check_string_dtype(part) is None:
                    raise self._refused(name or "/", f"the attribute {key!r} holds references")
            count = count_of(kind.shape or ())
            if count * kind.dtype.itemsize > _MOST_SINGLE_BYTES:
                raise self._refused(
                    name or "/",
                    f"the attribute {key!r} has {count * kind.dtype.itemsize:,} bytes; at most "
                    f"{_MOST_SINGLE_BYTES:,} are taken",
                )
            # All of them are read at once.
            self._check_texts(name or "/", f"the attribute {key!r}", count * texts_in(kind.dtype))
            found[key] = item.attrs[key]
        return found

    def _check_texts(self, name: str, what: str, count: int) -> None:
        """Of what can be read as a whole only; one text is as long as it is."""
        if not count:
            return
        if self._longest_text is None:
            self._longest_text = longest_text(self._path)
        sources = (source.longest_text for source in self._sources.values())
        self._longest_text = longest = max(self._longest_text, *sources, 0)
        if count > 1 and count * longest > _MOST_TEXT_BYTES:
            raise self._refused(
                name,
                f"{what} has {count:,} texts, and the longest text of the file may have "
                f"{longest:,} bytes: at most {_MOST_TEXT_BYTES:,} in all are taken",
            )


def same_values(one: Any, other: Any) -> bool:
    """Whether two attributes are the same, NaN being the same as NaN."""
    first, second = np.asarray(one), np.asarray(other)
    if first.dtype != second.dtype or first.shape != second.shape:
        return (
            first.dtype.kind in "UO" and second.dtype.kind in "UO" and _text(first) == _text(second)
        )
    if first.dtype.kind in "fc":
        return bool(np.array_equal(first, second, equal_nan=True))
    return bool(np.array_equal(first, second))


def _text(array: Array) -> Any:
    return array.astype(str).tolist()


def _parts(dtype: np.dtype[Any]) -> Iterator[np.dtype[Any]]:
    if dtype.fields:
        for part, *_ in dtype.fields.values():
            yield from _parts(part)
    elif dtype.subdtype:
        yield from _parts(dtype.subdtype[0])
    else:
        yield dtype


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
