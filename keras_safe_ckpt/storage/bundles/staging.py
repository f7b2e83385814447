"""The way of a checkpoint of TensorFlow: written to a folder of its own, published under the lock.

::

    stage     a folder that nobody else has; its name says which checkpoint it is to be
    write     by TensorFlow
    sync      fsync of all files
    place     data first, index last: now it is there
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
from keras_safe_ckpt.storage.bundles.family import Family, Keep, aside_of
from keras_safe_ckpt.storage.bundles.files import INDEX, double, place, remove
from keras_safe_ckpt.storage.bundles.recovery import recover
from keras_safe_ckpt.storage.bundles.state_file import State
from keras_safe_ckpt.storage.lock_backend import HeldLock
from keras_safe_ckpt.storage.paths import make_directory, refuse_unsafe_name, refuse_unsafe_target
from keras_safe_ckpt.storage.publishing import LOCK_NAME
from keras_safe_ckpt.storage.temp_names import LONGEST_STEM_BYTES, owner_of, target_of

_log = logging.getLogger(__name__)

#: How long deleting waits for those who read; what they hold up is deleted after a later save.
_READERS_SECONDS = 5.0


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
        """Remove what was not published."""
        self._held.close()

    def publish(self, keep: Keep | None) -> Bundle:
        """Durable when it returns; what was there before stays if it raises.

        ``keep`` is None for one that TensorFlow is not told of, and that nobody deletes.
        """
        directory, target = self._directory, Bundle(self._directory.path, self.name)
        try:
            with _translated(target.prefix):
                files = sorted(os.listdir(self._folder))
                for file in files:
                    sync_file(self._folder / file)
                Bundle(self._folder, self.name).check()
                size = sum(os.path.getsize(self._folder / file) for file in files)
                # Locked only now: the bytes are on the disk already.
                with directory.locks.exclusive(directory.path / LOCK_NAME) as lock:
                    with self._making_way(lock) as aside:
                        self._place(files)
                    if keep is not None:
                        self._record(keep, aside)
                    elif aside is not None:
                        self._delete([aside], directory.parts())
        except BaseException as error:
            self._directory.events.record(
                "error", file=self.name, error=str(error), kind=type(error).__name__
            )
            raise
        finally:
            self.discard()
        self._directory.events.record(
            "save", file=self.name, bytes=size, seconds=time.perf_counter() - self._began
        )
        return target

    def _place(self, files: list[str]) -> None:
        now = self._next_time()
        os.utime(self._folder / f"{self.name}.{INDEX}", (now, now))
        own = f"{self.name}."
        for file in files:
            if not file.startswith(own):  # Something for debugging, which TensorFlow adds.
                os.replace(self._folder / file, self._directory.path / file)
        kinds = [file.removeprefix(own) for file in files if file.startswith(own)]
        try:
            place(self._directory.path, self.name, kinds, self._folder)
        except BaseException:
            if (self._folder / f"{self.name}.{INDEX}").exists():
                remove(self._directory.path, self.name, kinds)
            raise

    def _next_time(self) -> float:
        """Now, or just after the newest one if the clock was set back."""
        state = self._directory.state()
        newest = max(state.listed.values(), default=0.0) if state else 0.0
        return max(time.time(), newest + 0.001)

    @contextlib.contextmanager
    def _making_way(self, lock: HeldLock) -> Iterator[str | None]:
        """What is there under this name has another one until the new one is whole."""
        directory, path = self._directory, self._directory.path
        parts = directory.parts()
        kinds = parts.get(self.name)
        if kinds is None:
            lock.ensure_held()
            yield None
            return
        for kind in kinds:
            refuse_unsafe_target(path / f"{self.name}.{kind}")
        number = 2
        while (aside := aside_of(self.name, number)) in parts:
            number += 1
        with directory.without_readers() as readers:
            keeps = INDEX in kinds
            if keeps:
                double(path, self.name, kinds, aside)
            lock.ensure_held()
            readers.ensure_held()
            remove(path, self.name, kinds)
            try:
                yield aside if keeps else None
            except BaseException:
                if keeps and INDEX not in directory.parts().get(self.name, ()):
                    double(path, aside, kinds, self.name)
                    remove(path, aside, kinds)
                raise

    def _record(self, keep: Keep, aside: str | None) -> None:
        directory = self._directory
        parts = directory.parts()
        saved = Bundle(directory.path, self.name).index.stat().st_mtime
        state = directory.state()
        if state is None:
            self._say_what_stays(parts)
            state = State(preserved=saved - 1)
        listed = {
            name: since
            for name, since in state.listed.items()
            if INDEX in parts.get(name, ()) and name != self.name
        }
        listed = {**listed, **directory.unrecorded}
        listed.pop(self.name, None)
        listed[self.name] = directory.unrecorded[self.name] = saved
        managed = {
            name: since
            for name, since in listed.items()
            if self._family.includes(name) and since > state.preserved
        }
        doomed, spared, preserved = keep.divide(managed, state.preserved)
        for name in spared:
            del listed[name]
        # Twice, as TensorFlow does: it must never name what is gone, and what is about to go must
        # not be forgotten half-way.
        directory.keep_state(State(listed, preserved))
        directory.unrecorded = {}
        going = [*doomed, *([aside] if aside else [])]
        if going and self._delete(going, parts):
            directory.keep_state(
                State({n: t for n, t in listed.items() if n not in doomed}, preserved)
            )

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
    with directory.locks.exclusive(directory.path / LOCK_NAME):
        recover(directory)
        if exactly is None:
            taken = max(map(family.number, _taken(directory)), default=-1)
            name = f"{family.base}-{max(number or 0, taken + 1)}"
        with _translated(os.path.join(directory.path, name)):
            return StagedBundle(directory, family, name)


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


@contextlib.contextmanager
def _translated(prefix: str) -> Iterator[None]:
    try:
        yield
    except SafeCheckpointError:
        raise
    except OSError as error:
        raise CheckpointWriteError(prefix, error) from error
