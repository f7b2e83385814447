"""Do the compressed chunks of a dataset unpack to what they should?

HDF5 unpacks a chunk to its end, however much that is, before it looks at how large the chunk is:
a megabyte can become a gigabyte, or more if it was packed twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import h5py

_DEFLATE, _CHECKSUM = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32
#: What deflate makes of one byte at most.
_MOST_BYTES_PER_BYTE = 1032
#: A chunk that cannot become more than that is not looked at.
_HARMLESS_BYTES = 16 << 20
#: Checksums that are packed with a chunk.
_SPARE_BYTES = 1024
_STEP_BYTES = 1 << 20


def trouble_with(dataset: h5py.Dataset, chunk_bytes: int) -> str | None:
    """What is wrong with the chunks of ``chunk_bytes`` each; None if nothing is."""
    creation = dataset.id.get_create_plist()
    filters = [creation.get_filter(number)[0] for number in range(creation.get_nfilters())]
    if _DEFLATE not in filters:
        return None
    after = filters[filters.index(_DEFLATE) + 1 :]
    if set(after) - {_CHECKSUM}:
        return f"chunks that were packed more than once (filters {filters})"
    for offset, size in _stored(dataset):
        # A chunk that deflate would have made larger is not stored so much larger.
        if size > 2 * chunk_bytes + _SPARE_BYTES:
            return f"a chunk of {size:,} bytes that should unpack to {chunk_bytes:,}"
        if size * _MOST_BYTES_PER_BYTE > max(chunk_bytes, _HARMLESS_BYTES):
            _, data = dataset.id.read_direct_chunk(offset)
            if _unpacks_to_more(data, chunk_bytes + _SPARE_BYTES):
                return f"a chunk that unpacks to more than its {chunk_bytes:,} bytes"
    return None


def _stored(dataset: h5py.Dataset) -> Iterator[tuple[tuple[int, ...], int]]:
    """Where each packed chunk is in the dataset, and how large in the file."""
    found: list[tuple[tuple[int, ...], int]] = []
    if hasattr(dataset.id, "chunk_iter"):  # All at once; one by one takes the square of the time.
        dataset.id.chunk_iter(lambda chunk: found.append((chunk.chunk_offset, chunk.size)))
        yield from found
    else:
        for number in range(dataset.id.get_num_chunks()):
            chunk = dataset.id.get_chunk_info(number)
            yield chunk.chunk_offset, chunk.size


def _unpacks_to_more(data: bytes, most: int) -> bool:
    stream = zlib.decompressobj()
    total = 0
    try:
        while data and not stream.eof:
            total += len(stream.decompress(data, _STEP_BYTES))
            if total > most:
                return True
            data = stream.unconsumed_tail
    except zlib.error:
        return False  # Damaged, or not packed at all: HDF5 says so when it is read.
    return False
