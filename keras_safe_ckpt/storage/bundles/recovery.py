"""Puts right what was left half-way in a directory of checkpoints, by a kill or an error.

A checkpoint on its way has a folder of its own, which stands there until all is done. What it has
begun to change is in a journal in it, and what it replaces is kept in it, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from keras_safe_ckpt.errors import SafeCheckpointError
from keras_safe_ckpt.storage.atomic import (
    JOURNAL_NAME,
    find_orphans,
    remove_tree,
    sweep_orphans,
    sync_file,
)
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.files import INDEX, double, is_data, remove
from keras_safe_ckpt.storage.bundles.state_file import State, read_state, write_state
from keras_safe_ckpt.storage.paths import sync_directory
from keras_safe_ckpt.storage.publishing import LOCK_NAME
from keras_safe_ckpt.storage.temp_names import owner_of, target_of
from keras_safe_ckpt.storage.translation import reading_only

_log = logging.getLogger(__name__)

#: Its process lives, and could not finish it.
_ABANDONED = "abandoned"
#: What is replaced, until the new one is in its place.
_OLD = "old"


@dataclass(frozen=True)
class Journal:
    """What is about to happen: files of these ``kinds`` come into place as ``name``.

    It is then listed in ``state_name``, if it ``is_listed`` at all, for ever or not.
    """

    name: str
    kinds: list[str]
    state_name: str
    is_listed: bool
    for_ever: bool

    def write(self, folder: Path, *, durably: bool) -> None:
        path = folder / JOURNAL_NAME
        path.write_text(json.dumps(asdict(self)))
        if durably:
            sync_file(path)
            sync_directory(folder)
            sync_directory(folder.parent)  # Its own name: what is replaced is in there only.

    @staticmethod
    def read(folder: Path) -> Journal | None:
        """None if there is none: nothing was changed. `OSError` if that cannot be told now."""
        try:
            return Journal(**json.loads((folder / JOURNAL_NAME).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None


def keep_old(directory: Path, folder: Path, name: str, kinds: list[str]) -> None:
    """Before it is replaced."""
    (folder / _OLD).mkdir()
    double(directory, name, kinds, folder / _OLD)


def abandon(folder: Path) -> None:
    """Leave it to a later save, of whatever process."""
    with contextlib.suppress(OSError):
        (folder / _ABANDONED).touch()


@contextlib.contextmanager
def reading(directory: BundleDirectory) -> Iterator[None]:
    """Nothing is deleted or replaced meanwhile; what is half-way is put right before.

    `UnreadableCheckpointError` for what the system says to any of it.
    """
    with reading_only(directory.path):
        if any(_unfinished(directory.path)) and os.access(directory.path, os.W_OK):
            with directory.locks.exclusive(directory.path / LOCK_NAME):
                recover(directory)
        with directory.reading():
            yield


def recover(directory: BundleDirectory) -> None:
    """Under the lock of those who publish."""
    for folder in list(_unfinished(directory.path)):
        try:
            finish(directory, folder)
        except (OSError, SafeCheckpointError) as error:
            # A later save may have more luck, and this one is not to fail for it.
            _log.warning("%s cannot be put right yet: %s", target_of(folder.name), error)
            continue
        directory.events.record("recover", file=target_of(folder.name))
    _finish_deleting(directory)
    sweep_orphans(directory.path)


def finish(directory: BundleDirectory, folder: Path) -> None:
    """Under the lock: to its end if the checkpoint is in its place, else back to what was."""
    journal = Journal.read(folder)
    if journal is not None:
        # The index is the last thing that leaves the folder.
        if (folder / f"{journal.name}.{INDEX}").exists():
            _undo(directory, folder, journal)
        elif journal.is_listed:
            _list(directory, journal)
        # First of all: without the other files it would tell something else.
        os.unlink(folder / JOURNAL_NAME)
    remove_tree(folder)


def _unfinished(directory: Path) -> Iterator[Path]:
    try:
        folders = [name for name in os.listdir(directory) if owner_of(name)]
    except FileNotFoundError:
        return
    if not folders:
        return
    # A journal is written and removed under the lock of those who publish: whoever has that lock
    # and finds one knows that its owner is gone, or was stopped by a power cut, however late it is.
    orphans = set(find_orphans(directory, lambda path: (path / JOURNAL_NAME).exists()))
    for path in (directory / name for name in folders):
        if path.is_symlink():
            continue  # Nobody's folder: what it leads to would be taken for a journal, and removed.
        if (path in orphans and path.is_dir()) or (path / _ABANDONED).exists():
            yield path


def _undo(directory: BundleDirectory, folder: Path, journal: Journal) -> None:
    kinds = directory.parts().get(journal.name, [])
    old = folder / _OLD
    kept = [path.name.removeprefix(f"{journal.name}.") for path in old.glob("*")]
    if INDEX in kinds and (not kept or _is_whole(directory.path, journal.name)):
        return  # It had not come to change anything.
    touched = {*journal.kinds, *kept}
    remove(directory.path, journal.name, [kind for kind in kinds if kind in touched])
    if INDEX in kept:
        double(old, journal.name, kept, directory.path)


def _list(directory: BundleDirectory, journal: Journal) -> None:
    """It is in its place, and nobody came to say so."""
    path, name = directory.path, journal.name
    try:
        time = Bundle(path, name).index.stat().st_mtime
    except FileNotFoundError:
        return  # Deleted meanwhile, by somebody who found it.
    state = read_state(path, journal.state_name) or State(preserved=time - 1)
    if state.listed.get(name) != time:
        listed = {**state.listed, name: time}
        listed = dict(sorted(listed.items(), key=lambda item: item[1]))
        newest = next(reversed(listed))
        for_ever = journal.for_ever and newest == name
        write_state(path, State(listed, state.preserved, for_ever), newest, journal.state_name)


def _finish_deleting(directory: BundleDirectory) -> None:
    state = directory.state()
    parts = directory.parts()
    for name in state.listed if state else ():
        kinds = parts.get(name, [])
        if INDEX not in kinds and any(map(is_data, kinds)):
            remove(directory.path, name, kinds)


def _is_whole(directory: Path, name: str) -> bool:
    try:
        Bundle(directory, name).check()
    except SafeCheckpointError:
        return False
    return True
