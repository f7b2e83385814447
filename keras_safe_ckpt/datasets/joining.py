"""Datasets of several files become one: copied piece by piece, sorted, or shown where they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from keras_safe_ckpt.datasets.inspection import DatasetFacts, FileFacts, count_of, opened
from keras_safe_ckpt.datasets.rows import Array
from keras_safe_ckpt.datasets.text_bounds import text_bytes, texts_in
from keras_safe_ckpt.errors import MergeConflictError

#: How much is in memory at once.
_BLOCK_BYTES = 8 << 20
#: Of texts it is only known how long they are at most: so much, if all were like that.
_TEXT_BYTES = 64 << 20
_MOST_TEXTS = 1 << 16

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Piece:
    """What one file contributes: ``length`` along the axis, beginning at ``start``."""

    path: Path
    start: int
    length: int
    #: What all its texts can have at most: they are in the file, and not packed.
    most_text_bytes: int
    #: And one of them.
    longest_text: int


@dataclass(frozen=True)
class Joined:
    """A dataset of the new file, and the pieces of it."""

    facts: DatasetFacts
    shape: tuple[int, ...]
    axis: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class SortedRows:
    """For each row of the new file: in which of the pieces it is, and where there."""

    piece: Array
    row: Array

    @staticmethod
    def of(joined: Mapping[str, Joined], key: str, files: Sequence[FileFacts]) -> SortedRows:
        """By the values of the dataset ``key``; equal ones stay in the order of the files."""
        names = [str(file.path) for file in files]
        if key not in joined:
            raise MergeConflictError(key, names, f"sort_key={key!r} is not in them")
        keys = joined[key]
        if len(keys.shape) != 1 or keys.facts.dtype.kind not in "iufbOS":
            raise MergeConflictError(
                key, names, f"sort_key={key!r} has the shape {keys.shape}, expected one value a row"
            )
        for name, one in joined.items():
            lengths = [piece.length for piece in one.pieces]
            wanted = [piece.length for piece in keys.pieces]
            if one.shape and lengths != wanted:
                raise MergeConflictError(
                    name, names, f"it has {lengths} rows, and the sort key {key!r} has {wanted}"
                )
        values = [_keys_in(keys, piece, key) for piece in keys.pieces]
        order = np.argsort(np.concatenate(values), kind="stable")
        starts = np.array([piece.start for piece in keys.pieces])
        piece = np.searchsorted(starts, order, side="right") - 1
        return SortedRows(piece, order - starts[piece])


def copy(
    out: h5py.File, name: str, joined: Joined, order: SortedRows | None, advance: Advance
) -> None:
    """Make the dataset and fill it."""
    dataset = _created(out, name, joined)
    for key, value in joined.facts.attributes.items():
        dataset.attrs[key] = value
    if not joined.shape:
        dataset[()] = _whole(joined.pieces[0].path, name)
    elif order is None:
        for piece in joined.pieces:
            _copy_piece(dataset, name, joined, piece, advance)
    else:
        _copy_sorted(dataset, name, joined, order, advance)


def link(out: h5py.File, name: str, joined: Joined, folder: Path) -> None:
    """A virtual dataset: its rows stay where they are, found from ``folder``."""
    layout = h5py.VirtualLayout(joined.shape, joined.facts.dtype)
    for piece in joined.pieces:
        if piece.length:
            shape = _with_length(joined, piece.length)
            source = os.path.relpath(piece.path, folder)
            # HDF5 takes a single one for the beginning of a pattern.
            names = (text.replace("%", "%%") for text in (source, name))
            layout[_along(joined, piece.start, piece.length)] = h5py.VirtualSource(
                *names, shape, joined.facts.dtype
            )
    dataset = out.create_virtual_dataset(name, layout)
    for key, value in joined.facts.attributes.items():
        dataset.attrs[key] = value


def _created(out: h5py.File, name: str, joined: Joined) -> h5py.Dataset:
    with opened(joined.pieces[0].path) as source:
        model = source[name]
        options: dict[str, Any] = {}
        if joined.shape and model.compression is not None:
            options = {
                # Of files that are shorter than a chunk.
                "chunks": tuple(map(min, model.chunks, map(partial(max, 1), joined.shape))),
                "compression": model.compression,
                "compression_opts": model.compression_opts,
                "shuffle": model.shuffle,
            }
    if count_of(joined.shape) == 0:
        options = {}
    return out.create_dataset(name, joined.shape, joined.facts.dtype, **options)


def _copy_piece(
    out: h5py.Dataset, name: str, joined: Joined, piece: Piece, advance: Advance
) -> None:
    if not piece.length or not count_of(joined.shape):
        return
    with opened(piece.path) as file:
        source = file[name]
        start = 0
        for block in _blocks(source, name, joined, piece):
            count = block.shape[joined.axis]
            out[_along(joined, piece.start + start, count)] = block
            advance(block.nbytes)
            start += count


def _blocks(source: h5py.Dataset, name: str, joined: Joined, piece: Piece) -> Iterator[Array]:
    """All that one file contributes, block by block."""
    start, rows, texts = 0, _block_rows(joined, source), _Texts(name, joined, piece)
    while start < piece.length:
        count = min(rows, piece.length - start)
        ranges = [(0, length) for length in source.shape]
        ranges[joined.axis] = (start, start + count)
        yield texts.read(source, ranges)
        start += count


def _keys_in(keys: Joined, piece: Piece, name: str) -> Array:
    with opened(piece.path) as file:
        blocks = list(_blocks(file[name], name, keys, piece))
    return np.concatenate(blocks) if blocks else np.empty(0, keys.facts.dtype)


class _Texts:
    """The texts of one file, counted: any number of rows can show the same one.

    Else a small file would become as large as one likes, on the disk and before that in memory.
    """

    def __init__(self, name: str, joined: Joined, piece: Piece) -> None:
        self._name = name
        self._piece = piece
        self._at_once = _texts_at_once(joined)
        self._total = 0

    def read(self, source: h5py.Dataset, ranges: list[tuple[int, int]]) -> Array:
        """From and to along each axis, in pieces if there are too many texts for one."""
        lengths = [stop - start for start, stop in ranges]
        if self._at_once is None or count_of(tuple(lengths)) <= self._at_once:
            block: Array = source[tuple(slice(*one) for one in ranges)]
            self.add(text_bytes(block))
            return block
        axis = int(np.argmax(lengths))
        start, stop = ranges[axis]
        middle = (start + stop) // 2
        halves = [
            [*ranges[:axis], half, *ranges[axis + 1 :]]
            for half in ((start, middle), (middle, stop))
        ]
        return np.concatenate([self.read(source, half) for half in halves], axis)

    def add(self, count: int) -> None:
        self._total += count
        if self._total > self._piece.most_text_bytes:
            raise MergeConflictError(
                self._name,
                [str(self._piece.path)],
                f"its texts have more bytes than the file ({self._total:,})",
            )


def _copy_sorted(
    out: h5py.Dataset, name: str, joined: Joined, order: SortedRows, advance: Advance
) -> None:
    start, step = 0, _block_rows(joined, out)
    texts = [_Texts(name, joined, piece) for piece in joined.pieces]
    spread = 4 if _texts_at_once(joined) is None else 1
    while start < len(order.piece):
        pieces, rows = order.piece[start : start + step], order.row[start : start + step]
        block = np.empty((len(rows), *joined.shape[1:]), joined.facts.dtype)
        for number in np.unique(pieces):
            here = np.flatnonzero(pieces == number)
            with opened(joined.pieces[number].path) as file:
                # What lies between the wanted rows is read with them, and counts for this time.
                reading = _Texts(name, joined, joined.pieces[number])
                _gather(file[name], reading, rows[here], block, here, spread * len(block))
            texts[number].add(text_bytes(block[here]))
        out[start : start + len(rows)] = block
        advance(block.nbytes)
        start += len(rows)


def _gather(
    source: h5py.Dataset, texts: _Texts, rows: Array, block: Array, places: Array, most: int
) -> None:
    """``block[places] = source[rows]``, with a few reads of what lies together."""
    by_row = np.argsort(rows, kind="stable")
    rows, places = rows[by_row], places[by_row]
    for start, stop in _runs(rows, most):
        first, last = int(rows[start]), int(rows[stop - 1])
        inner = [(0, length) for length in source.shape[1:]]
        found = texts.read(source, [(first, last + 1), *inner])
        block[places[start:stop]] = found[rows[start:stop] - first]


def _runs(rows: Array, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of sorted ``rows`` that span less than ``most`` rows each, without large gaps."""
    start = 0
    gaps = np.flatnonzero(np.diff(rows) > 64) + 1
    for stop in [*gaps.tolist(), len(rows)]:
        while start < stop:
            end = int(np.searchsorted(rows[start:stop], rows[start] + most)) + start
            yield start, min(end, stop)
            start = min(end, stop)


def _block_rows(joined: Joined, dataset: h5py.Dataset) -> int:
    """How many positions along the axis make a block; whole chunks if there are any."""
    one = max(1, count_of(_with_length(joined, 1)) * max(1, joined.facts.dtype.itemsize))
    at_once = _texts_at_once(joined)
    if at_once is not None:
        return max(1, at_once // max(1, count_of(_with_length(joined, 1))))
    rows = max(1, _BLOCK_BYTES // one)
    chunk = dataset.chunks[joined.axis] if dataset.chunks else 1
    return max(1, rows // chunk) * int(chunk) if rows >= chunk else rows


def _texts_at_once(joined: Joined) -> int | None:
    """How many elements may be read at once, if each text is as long as can be; None: any."""
    texts = texts_in(joined.facts.dtype)
    if not texts:
        return None
    longest = max(1, *(piece.longest_text for piece in joined.pieces))
    return max(1, min(_TEXT_BYTES // longest, _MOST_TEXTS) // texts)


def _along(joined: Joined, start: int, count: int) -> tuple[slice, ...]:
    return (*[slice(None)] * joined.axis, slice(start, start + count))


def _with_length(joined: Joined, length: int) -> tuple[int, ...]:
    shape = list(joined.shape)
    shape[joined.axis] = length
    return tuple(shape)


def _whole(path: Path, name: str) -> Array:
    with opened(path) as file:
        return file[name][()]  # type: ignore[no-any-return]
