"""Delete the older checkpoints of TensorFlow in a directory, at somebody's wish."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.files import INDEX, remove
from keras_safe_ckpt.storage.bundles.recovery import recover
from keras_safe_ckpt.storage.bundles.state_file import State
from keras_safe_ckpt.storage.publishing import LOCK_NAME
from keras_safe_ckpt.storage.translation import writing

_NUMBERED = re.compile(r"(.*)-\d{1,19}", re.DOTALL)


@dataclass(frozen=True)
class Surplus:
    """Of those that belong together: what would go, and what stays."""

    doomed: tuple[str, ...]
    staying: tuple[str, ...]


@dataclass(frozen=True)
class Trimming:
    """``unlisted`` are not TensorFlow's to delete: kept for ever, or of another day, so that the
    file ``checkpoint`` does not list them.
    """

    families: tuple[Surplus, ...] = ()
    unlisted: tuple[str, ...] = ()

    @property
    def doomed(self) -> list[str]:
        return [name for family in self.families for name in family.doomed]

    @property
    def staying(self) -> list[str]:
        return [name for family in self.families for name in family.staying]


def plan_trimming(directory: BundleDirectory, most: int) -> Trimming:
    """All but the newest ``most`` of those that belong together by their names."""
    there = [name for name, kinds in directory.parts().items() if INDEX in kinds]
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
    return Trimming(
        tuple(Surplus(tuple(names[:-most]), tuple(names[-most:])) for names in families.values()),
        tuple(sorted(set(there) - set(managed))),
    )


def trim(directory: BundleDirectory, most: int) -> list[str]:
    """Delete what is planned; nothing of a family unless one of it that stays was verified."""
    with (
        writing(directory.path),
        directory.locks.exclusive(directory.path / LOCK_NAME) as lock,
    ):
        recover(directory)
        doomed = [
            name
            for family in plan_trimming(directory, most).families
            if family.doomed and _has_a_whole_one(directory, family)
            for name in family.doomed
        ]
        if not doomed:
            return []
        state = directory.state() or State()
        left = {name: time for name, time in state.listed.items() if name not in doomed}
        # Whoever reads one of them comes to its end first.
        with directory.without_readers() as readers:
            lock.ensure_held()
            readers.ensure_held()
            # First the list: it must never name what is gone.
            directory.keep_state(State(left, state.preserved, state.newest_stays))
            parts = directory.parts()
            for name in doomed:
                remove(directory.path, name, parts.get(name, ()))
        directory.events.record("prune", files=doomed)
    return doomed


def _has_a_whole_one(directory: BundleDirectory, family: Surplus) -> bool:
    return any(
        directory.is_whole(Bundle(directory.path, name), thoroughly=True)
        for name in reversed(family.staying)
    )
