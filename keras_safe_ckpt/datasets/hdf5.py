"""Each worker writes a file of its own: `WorkerH5Writer`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from keras_safe_ckpt.datasets.growing_file import GrowingFile
from keras_safe_ckpt.datasets.rows import checked_attributes
from keras_safe_ckpt.datasets.turns import Turn
from keras_safe_ckpt.datasets.worker_files import checked_label, file_of
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.locks import chosen_locks
from keras_safe_ckpt.storage.paths import absolute, make_directory

#: Another life of this worker may be on its way out.
_LOCK_SECONDS = 10.0


class WorkerH5Writer:
    """Writes ``directory/worker-00003.h5``, which is there when it is whole, and not before.

    Args:
        directory: of all workers; made if it is not there.
        worker: the number of this worker. None takes it from the strategy in whose scope this is
            made, or from TF_CONFIG, torchrun or SLURM; without any of these it is 0.
        workers: how many there are, so that a merge notices if one is missing. None: as known
            from where the number comes from.
        resume: go on after the rows of the last `flush` of an interrupted writer, or those of the
            finished file; `rows` tells how many there are. Otherwise the file begins anew; what
            was there before stays until the new one is finished.
        attributes: of the file.
        locks: a `LockManager` or `RedisLocks`; two processes cannot be the same worker.

    Example::

        with WorkerH5Writer("predictions") as writer:
            for start in range(0, len(x), 32):
                writer.append("id", np.arange(start, start + 32))
                writer.append("score", model.predict_on_batch(x[start : start + 32]))
                writer.flush()  # this far it survives a crash

    Use it from any number of threads of one process. If the block ends by an error the file is not
    published; what was appended can be recovered (``keras-safe-ckpt recover``).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        worker: int | None = None,
        *,
        workers: int | None = None,
        resume: bool = False,
        attributes: Mapping[str, Any] | None = None,
        locks: Locks | None = None,
    ) -> None:
        label = checked_label(worker, workers)
        checked = checked_attributes(attributes)
        folder = absolute(os.path.join(directory, "-")).parent
        make_directory(folder)
        self.path: Path = file_of(folder, label.worker)
        self.worker = label.worker
        self._turn = Turn(self.path)
        self._is_open = False
        with contextlib.ExitStack() as stack:
            self._held = stack.enter_context(
                chosen_locks(locks, timeout=_LOCK_SECONDS).exclusive(self.path)
            )
            self._file = GrowingFile(self.path, resume=resume)
            try:
                label.mark(self._file.h5)
                self._file.h5.attrs.update(checked)
            except BaseException:
                self._file.abandon()
                raise
            self._locked = stack.pop_all()
        self._is_open = True

    def write(
        self,
        name: str,
        array: Any,
        *,
        compression: str | int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """A dataset that is written at once, of any shape; its name must be new.

        Args:
            name: with groups if you like, such as ``"validation/labels"``.
            array: numbers, booleans or text.
            compression: None, "gzip", "lzf" or a level of gzip.
            attributes: of the dataset.
        """
        with self._turn.taken():
            self._check_open()
            self._file.write(name, array, compression, attributes)

    def append(
        self,
        name: str,
        rows: Any,
        *,
        compression: str | int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Rows at the end of a dataset; the first ones decide on its type and their shape.

        ``name``, ``compression`` and ``attributes`` as for `write`. All ``rows`` have one shape:
        pad what has different lengths, or append the values to one dataset and the lengths to
        another.
        """
        with self._turn.taken():
            self._check_open()
            self._file.append(name, rows, compression, attributes)
            if self._file.is_heavy:
                self._file.flush()

    def rows(self, name: str) -> int:
        """How many rows the dataset ``name`` has by now."""
        with self._turn.taken():
            self._check_open()
            return self._file.tables.rows(name)

    def flush(self) -> None:
        """What was appended and written by now survives a crash, and a power cut."""
        with self._turn.taken():
            self._check_open()
            self._file.flush()

    def close(self) -> None:
        """The file is whole: publish it. Nothing happens if that was done before."""
        with self._turn.taken():
            if not self._is_open:
                return
            self._is_open = False
            with self._locked:
                try:
                    self._held.ensure_held()
                    self._file.publish()
                except BaseException:
                    self._file.abandon()
                    raise

    def abandon(self) -> None:
        """Do not publish it; what was appended by now can be recovered."""
        if self._turn.is_of_parent:
            return
        with self._turn.taken():
            if not self._is_open:
                return
            self._is_open = False
            with self._locked:
                self._file.abandon()

    def __enter__(self) -> WorkerH5Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"The writer of {str(self.path)!r} is closed.")
