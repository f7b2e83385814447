"""Delete the older checkpoints of TensorFlow in a directory, at somebody's wish."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keras_safe_ckpt.errors import CheckpointWriteError
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.files import INDEX, remove
from keras_safe_ckpt.storage.bundles.recovery import recover
from keras_safe_ckpt.storage.bundles.state_file import State
from keras_safe_ckpt.storage.publishing import LOCK_NAME

_NUMBERED = re.compile(r"(.*)-\d{1,19}", re.DOTALL)


@dataclass(frozen=True)
class Surplus:
    """What would go, what stays, and what is not TensorFlow's to delete (kept for ever, or of
    another day: the file ``checkpoint`` does not list it).
    """

    doomed: tuple[str, ...]
    staying: tuple[str, ...]
    unlisted: tuple[str, ...]


def find_surplus(directory: BundleDirectory, most: int) -> Surplus:
    """All but the newest ``most`` of those that belong together by their names."""
    parts = directory.parts()
    there = [name for name, kinds in parts.items() if INDEX in kinds]
    state = directory.state() or State()
    managed = [
        name for name, since in state.listed.items() if name in there and since > state.preserved
    ]
    if state.newest_stays and state.listed:
        newest = next(reversed(state.listed))
        managed = [name for name in managed if name != newest]
    families: dict[str, list[str]] = {}
    for name in managed:
        match = _NUMBERED.fullmatch(name)
        families.setdefault(match[1] if match else name, []).append(name)
    doomed = [name for members in families.values() for name in members[:-most]]
    staying = [name for name in managed if name not in doomed]
    unlisted = sorted(set(there) - set(managed))
    return Surplus(tuple(doomed), tuple(staying), tuple(unlisted))


def trim(directory: BundleDirectory, most: int) -> list[str]:
    """Delete the surplus; nothing unless one that stays was verified."""
    with directory.locks.exclusive(directory.path / LOCK_NAME) as lock:
        recover(directory)
        surplus = find_surplus(directory, most)
        if not surplus.doomed or not _has_a_whole_one(directory, surplus):
            return []
        state = directory.state() or State()
        left = {name: t for name, t in state.listed.items() if name not in surplus.doomed}
        with directory.without_readers() as readers:
            lock.ensure_held()
            readers.ensure_held()
            try:
                # First the list: it must never name what is gone.
                directory.keep_state(State(left, state.preserved, state.newest_stays))
                parts = directory.parts()
                for name in surplus.doomed:
                    remove(directory.path, name, parts.get(name, ()))
            except OSError as error:
                raise CheckpointWriteError(directory.path, error) from error
        directory.events.record("prune", files=list(surplus.doomed))
    return list(surplus.doomed)


def _has_a_whole_one(directory: BundleDirectory, surplus: Surplus) -> bool:
    return any(
        directory.is_whole(Bundle(directory.path, name), thoroughly=True)
        for name in reversed(surplus.staying)
    )
