"""A feeder: any process that has rows for a file that another process owns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from keras_safe_ckpt.datasets.feed_line import line_to
from keras_safe_ckpt.datasets.frames import Message
from keras_safe_ckpt.datasets.rows import (
    Array,
    as_rows,
    checked_attributes,
    checked_compression,
    checked_name,
    fitted,
    is_empty_list,
)
from keras_safe_ckpt.storage.lock_backend import checked_timeout
from keras_safe_ckpt.storage.paths import absolute

#: What is larger goes in several frames.
_FRAME_BYTES = 16 << 20


class Feed:
    """Hands rows to a ``CentralH5Writer``, from any process of its machine.

    It can be pickled and copied, sent to a process or inherited by one. The rows of one process
    keep their order.

    Args:
        path: the file of the writer.
        timeout: seconds to wait for a writer that does not come forward.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        self.path = absolute(path)
        self.timeout = checked_timeout(timeout)

    def append(
        self,
        name: str,
        rows: Any,
        *,
        compression: str | int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Rows at the end of a dataset, as for ``WorkerH5Writer.append``.

        When it returns they will be in the file, even if this process or the writer's is killed
        at once; after a power cut, if `flush` has returned. It waits while the writer is 64 MiB
        behind. Up to 16 MiB are in the file together or not at all.
        """
        checked_name(name)
        compression = checked_compression(compression)
        checked = checked_attributes(attributes)
        array = as_rows(name, rows)
        has_type = hasattr(rows, "dtype")
        line = line_to(self.path)
        with line.mutex:
            line.open()
            if name not in line.known and is_empty_list(rows):
                return  # What the others will be, it does not tell.
            is_news = compression is not None and line.asked.get(name) != compression
            if name not in line.known or checked or is_news:
                # No row goes before it is known that all of them fit.
                question = Message(name, array[:0], compression, checked, True, has_type)
                line.known[name] = line.ask(question, self.timeout)
                line.asked[name] = compression
            array = fitted(name, array, *line.known[name], has_type=has_type)
            for part in _pieces(array):
                line.send(Message(name, part), self.timeout)

    def flush(self) -> None:
        """When it returns, all that this process has appended is in the file and on the disk."""
        line = line_to(self.path)
        with line.mutex:
            if line.is_open:
                line.flush(self.timeout)

    def close(self) -> None:
        """This process has no more rows at the moment; what was appended is not waited for."""
        line = line_to(self.path)
        with line.mutex:
            line.rest()

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Feed({str(self.path)!r}, timeout={self.timeout!r})"


def _pieces(array: Array) -> Iterator[Array]:
    """Rows that go in one frame."""
    if array.dtype.kind != "O":
        step = max(1, _FRAME_BYTES // max(1, array[:1].nbytes))
        for start in range(0, len(array), step):
            yield array[start : start + step]
        return
    start = size = 0
    for number, row in enumerate(array):
        texts = np.asarray(row, object).flat
        size += sum(4 * len(text) if isinstance(text, str) else len(text) for text in texts)
        if size > _FRAME_BYTES:
            yield array[start : number + 1]
            start, size = number + 1, 0
    if start < len(array):
        yield array[start:]
