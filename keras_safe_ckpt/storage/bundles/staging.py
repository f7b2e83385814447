"""The way of a checkpoint of TensorFlow: written to a folder of its own, published under the lock.

::

    stage     a folder that nobody else has; its name says which checkpoint it is to be
    write     by TensorFlow
    sync      fsync of all files
    place     data first, index last: now it is there (what it replaces is kept in the folder)
    record    in the file that TensorFlow looks at; then what is too old is deleted
    discard   the folder, which until now tells what a killed process was at
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    LockTimeoutError,
    SafeCheckpointError,
    UnsafePathError,
)
from keras_safe_ckpt.storage.atomic import scratch_directory, sync_file
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import LARGEST_NUMBER, Family, Keep
from keras_safe_ckpt.storage.bundles.files import INDEX, is_data, place, remove
from keras_safe_ckpt.storage.bundles.recovery import Journal, abandon, finish, keep_old, recover
from keras_safe_ckpt.storage.bundles.state_file import State
from keras_safe_ckpt.storage.lock_backend import HeldLock
from keras_safe_ckpt.storage.paths import (
    make_directory,
    refuse_unsafe_name,
    refuse_unsafe_target,
    sync_directory,
)
from keras_safe_ckpt.storage.publishing import LOCK_NAME
from keras_safe_ckpt.storage.temp_names import LONGEST_STEM_BYTES, owner_of, target_of

_log = logging.getLogger(__name__)

#: How long deleting waits for those who read; what they hold up is deleted after a later save.
_READERS_SECONDS = 5.0

#: Of this process: their folders stay until somebody has put them right.
_abandoned: list[contextlib.ExitStack] = []


class StagedBundle:
    """A checkpoint on its way into ``directory``; a context manager, which discards it.

    Example::

        with stage(directory, Family("ckpt"), 7) as staged:
            checkpoint.write(staged.prefix)
            staged.publish(Keep(5))
    """

    def __init__(self, directory: BundleDirectory, family: Family, name: str) -> None:
        self._directory = directory
        self._family = family
        self._began = time.perf_counter()
        self._held = contextlib.ExitStack()
        self.name = name
        self.is_published = False
        #: What was there may be in the folder only, and what is to be done is told by it only.
        self._is_half_way = False
        self._folder = self._held.enter_context(scratch_directory(directory.path, name))

    @property
    def prefix(self) -> str:
        """Where it is to be written."""
        return os.path.join(self._folder, self.name)

    def __enter__(self) -> StagedBundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove what was not published; not what is needed to put right what was there."""
        if self._is_half_way:  # Interrupted while it was put right.
            self._abandon()
        self._held.close()

    def _abandon(self) -> None:
        """Leave the folder to a later save: it tells what is to be done, and has what was there."""
        self._is_half_way = False
        abandon(self._folder)
        _abandoned.append(self._held.pop_all())

    def publish(self, keep: Keep | None) -> Bundle:
        """Durable when it returns; what was there before stays if it raises.

        ``keep`` is None for one that TensorFlow is not told of, and that nobody deletes.
        """
        directory, target = self._directory, Bundle(self._directory.path, self.name)
        try:
            with self._translated():
                files = sorted(os.listdir(self._folder))
                for file in files:
                    sync_file(self._folder / file)
                Bundle(self._folder, self.name).check()
                size = sum(os.path.getsize(self._folder / file) for file in files)
                # Locked only now: the bytes are on the disk already.
                with directory.locks.exclusive(directory.path / LOCK_NAME) as lock:
                    try:
                        self._place(files, keep, lock)
                        self.is_published = True
                        if keep is not None:
                            self._record(keep)
                        self._is_half_way = False
                    except BaseException:
                        self._put_right()
                        raise
        except BaseException as error:
            directory.events.record(
                "error", file=self.name, error=str(error), kind=type(error).__name__
            )
            raise
        finally:
            self.discard()
        directory.events.record(
            "save", file=self.name, bytes=size, seconds=time.perf_counter() - self._began
        )
        return target

    def _place(self, files: list[str], keep: Keep | None, lock: HeldLock) -> None:
        path, own = self._directory.path, f"{self.name}."
        kinds = [file.removeprefix(own) for file in files if file.startswith(own)]
        if keep is not None:
            refuse_unsafe_target(path / self._directory.state_name)
        # A graph beside it stays, unless there is a new one.
        there = [
            kind
            for kind in self._directory.parts().get(self.name, [])
            if kind == INDEX or is_data(kind) or kind in kinds
        ]
        for kind in {*there, *kinds}:
            refuse_unsafe_target(path / f"{self.name}.{kind}")
        with contextlib.ExitStack() as held:
            if there:
                readers = held.enter_context(self._directory.without_readers())
                if INDEX in there:
                    keep_old(path, self._folder, self.name, there)
                readers.ensure_held()
            journal = Journal(
                self.name,
                kinds,
                self._directory.state_name,
                is_listed=keep is not None,
                for_ever=keep is not None and keep.for_ever,
            )
            self._is_half_way = True
            journal.write(self._folder, durably=bool(there))
            now = self._next_time()
            os.utime(self._folder / f"{self.name}.{INDEX}", (now, now))
            lock.ensure_held()
            if there:
                remove(path, self.name, [INDEX])
                sync_directory(path)  # No index with other data, also after a power cut.
                remove(path, self.name, there)
            for file in files:
                if not file.startswith(own):  # Something for debugging, which TensorFlow adds.
                    os.replace(self._folder / file, path / file)
            place(path, self.name, kinds, self._folder)

    def _put_right(self) -> None:
        """Still under the lock."""
        try:
            self.is_published = not (self._folder / f"{self.name}.{INDEX}").exists()
            finish(self._directory, self._folder)
            self._is_half_way = False
        except BaseException as error:  # noqa: BLE001  # what led here is raised, and this said
            _log.error("%s is left half-way until the next save: %r", self.name, error)
            self._abandon()

    def _next_time(self) -> float:
        """Now, or just after the newest one if the clock was set back."""
        times = [self._directory.time_of(name) for name in self._directory.parts()]
        state = self._directory.state()
        times += list(state.listed.values()) if state else []
        return max(time.time(), max(times, default=0.0) + 0.001)

    def _record(self, keep: Keep) -> None:
        directory = self._directory
        parts = directory.parts()
        saved = directory.time_of(self.name)
        state = directory.state()
        if state is None:
            self._say_what_stays(parts)
            state = State(preserved=saved - 1)
        listed = {
            name: since
            for name, since in state.listed.items()
            if name != self.name and (INDEX in parts.get(name, ()) or directory.has_file(name))
        }
        if state.newest_stays and state.listed:
            listed.pop(next(reversed(state.listed)), None)
        listed[self.name] = saved
        managed = {
            name: since
            for name, since in listed.items()
            if self._family.includes(name) and name in parts and since > state.preserved
        }
        doomed, spared, preserved = keep.divide(managed, state.preserved)
        for name in spared:
            del listed[name]
        # Twice, as TensorFlow does: it must never name what is gone, and what is about to go must
        # not be forgotten half-way.
        directory.keep_state(State(listed, preserved, keep.for_ever))
        if doomed and self._delete(doomed, parts):
            left = {name: since for name, since in listed.items() if name not in doomed}
            directory.keep_state(State(left, preserved, keep.for_ever))

    def _say_what_stays(self, parts: dict[str, list[str]]) -> None:
        others = [n for n in parts if self._family.includes(n) and n != self.name]
        if others:
            _log.warning(
                "%s has no usable file %r: %d older checkpoints are not managed any more, and "
                "stay until you delete them.",
                self._directory.path,
                self._directory.state_name,
                len(others),
            )

    def _delete(self, names: list[str], parts: dict[str, list[str]]) -> bool:
        try:
            with self._directory.without_readers(_READERS_SECONDS) as readers:
                readers.ensure_held()
                for name in names:
                    remove(self._directory.path, name, parts.get(name, ()))
        except LockTimeoutError as error:
            _log.info("Not deleted yet, since somebody reads: %s (%s)", ", ".join(names), error)
            return False
        except OSError as error:
            # The save itself has succeeded, and the next one will try again.
            _log.warning("Could not delete %s: %s", ", ".join(names), error)
            return False
        self._directory.events.record("prune", files=names)
        return True

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        prefix = os.path.join(self._directory.path, self.name)
        try:
            yield
        except CheckpointWriteError as error:
            if error.published or not self.is_published:
                raise
            # Of the list of what is there: the checkpoint itself is in its place.
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error.cause
            raise CheckpointWriteError(prefix, cause, published=True) from error
        except SafeCheckpointError:
            raise
        except OSError as error:
            raise CheckpointWriteError(prefix, error, published=self.is_published) from error


def stage(
    directory: BundleDirectory, family: Family, number: int | None, *, exactly: str | None = None
) -> StagedBundle:
    """A place for a new checkpoint, with a number that is free: ``number``, or the next one.

    ``exactly``: under this name, whatever is there.
    """
    name = f"{family.base}-{number}" if exactly is None else exactly
    refuse_unsafe_name(name, directory.path)
    if len(os.fsencode(name)) > LONGEST_STEM_BYTES - 20:
        raise UnsafePathError(os.path.join(directory.path, name), "the name is too long")
    make_directory(directory.path)
    try:
        with directory.locks.exclusive(directory.path / LOCK_NAME):
            recover(directory)
            if exactly is None:
                taken = max(map(family.number, _taken(directory)), default=-1)
                free = max(number or 0, taken + 1)
                if free > LARGEST_NUMBER:
                    raise UnsafePathError(directory.path, f"no number is left after {taken}")
                name = f"{family.base}-{free}"
            return StagedBundle(directory, family, name)
    except SafeCheckpointError:
        raise
    except OSError as error:
        raise CheckpointWriteError(os.path.join(directory.path, name), error) from error


def _taken(directory: BundleDirectory) -> Iterator[str]:
    """The names that checkpoints have, or are to have."""
    yield from directory.parts()
    for name in os.listdir(directory.path):
        if owner_of(name):
            yield target_of(name) or ""


@contextlib.contextmanager
def taking_part(directory: Path) -> Iterator[str]:
    """For a worker that is not the chief: where to write what nobody is to see."""
    with scratch_directory(directory, ".part") as folder:
        yield os.path.join(folder, "part")
