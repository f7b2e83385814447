"""Puts right what a process that was killed has left half-way in a directory of checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

from keras_safe_ckpt.errors import SafeCheckpointError
from keras_safe_ckpt.storage.atomic import find_orphans, sweep_orphans
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import stands_aside_of
from keras_safe_ckpt.storage.bundles.files import INDEX, double, remove
from keras_safe_ckpt.storage.bundles.state_file import State
from keras_safe_ckpt.storage.temp_names import target_of


def recover(directory: BundleDirectory) -> None:
    """Under the lock of those who publish: each folder of a dead process tells what it was at."""
    for folder in list(find_orphans(directory.path)):
        name = target_of(folder.name)
        if name is not None and folder.is_dir():
            # The index is the last thing that leaves the folder.
            _finish(directory, name, published=not (folder / f"{name}.{INDEX}").exists())
            shutil.rmtree(folder, ignore_errors=True)
            directory.events.record("recover", file=name)
    _finish_deleting(directory)
    sweep_orphans(directory.path)


def _finish(directory: BundleDirectory, name: str, *, published: bool) -> None:
    parts = directory.parts()
    asides = [other for other in parts if stands_aside_of(other, name)]
    if INDEX not in parts.get(name, ()):
        remove(directory.path, name, parts.get(name, ()))
        before = next((aside for aside in asides if _is_whole(directory.path, aside)), None)
        if before is not None:
            double(directory.path, before, parts[before], name)
    elif published:
        _list(directory, name)
    for aside in asides:
        remove(directory.path, aside, parts[aside])


def _list(directory: BundleDirectory, name: str) -> None:
    """It is whole, and its process did not come to say so."""
    time = Bundle(directory.path, name).index.stat().st_mtime
    state = directory.state() or State(preserved=time - 1)
    if name not in state.listed:
        listed = dict(sorted({**state.listed, name: time}.items(), key=lambda item: item[1]))
        directory.keep_state(State(listed, state.preserved))


def _finish_deleting(directory: BundleDirectory) -> None:
    state = directory.state()
    parts = directory.parts()
    for name in state.listed if state else ():
        if INDEX not in parts.get(name, [INDEX]):
            remove(directory.path, name, parts[name])


def _is_whole(directory: Path, name: str) -> bool:
    try:
        Bundle(directory, name).check()
    except SafeCheckpointError:
        return False
    return True
