"""The power is cut while checkpoints are saved: what was promised is there, the rest whole or not.

See `power_cut` for the disk. The states come from the calls of real processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from power_cut import Tried, cut_everywhere, swept_an_hour_later
from snapshots import make_snapshot

from keras_safe_ckpt import CheckpointStore
from keras_safe_ckpt.storage.events import EventLog

QUICK, THOROUGH = 6, 300

HEADER = """
from snapshots import make_snapshot
from keras_safe_ckpt.storage.retention import KeepBest, KeepNewest
"""


def is_snapshot(store: CheckpointStore, path: Path, seed: int, size: int = 1000) -> bool:
    """Every byte, and not only as its own manifest has it."""
    manifest = store.verify(path)
    arrays = make_snapshot(seed, size).arrays
    return {name: about.digest for name, about in manifest.arrays.items()} == {
        name: xxhash.xxh3_128(np.ascontiguousarray(array).tobytes()).hexdigest()
        for name, array in arrays.items()
    }


class StoreCheck:
    """Of a directory where each step was made from the snapshot of its number.

    ``is_right(done, there)``: whether these may be there when those have been promised.
    """

    def __init__(
        self,
        is_right: Callable[[list[int], set[int]], bool],
        folder: str = "",
        size: int = 1000,
    ) -> None:
        self._is_right, self._folder, self._size = is_right, folder, size

    def __call__(self, disk: Path, done: list[str], format: str) -> None:
        folder = disk / self._folder
        if not done and not folder.exists():
            return
        assert folder.is_dir(), "the directory is gone"
        events = {event["event"] for event in EventLog(folder).read()}
        assert events <= {"save", "skip", "prune", "set_aside", "sweep"}
        store = CheckpointStore(folder, format=format)
        broken: list[str] = []
        found = store.checkpoints(lambda path, reason: broken.append(f"{path.name}: {reason}"))
        assert broken == []
        for one in found:
            assert is_snapshot(store, one.path, one.manifest.step, self._size), one.path
        there = {one.manifest.step for one in found}
        assert self._is_right(list(map(int, done)), there), f"{there} are there"
        if found:
            assert store.latest() == found[-1]
        self._save_again(store)

    def _save_again(self, store: CheckpointStore) -> None:
        store.publish(make_snapshot(77), step=77)
        assert store.latest().manifest.step == 77
        assert swept_an_hour_later(store.directory)


def all_of_them(done: list[int], there: set[int]) -> bool:
    return there >= set(done)


def the_last_or_newer(done: list[int], there: set[int]) -> bool:
    return max(there) >= done[-1]


def one_that_is_never_worse(done: list[int], there: set[int]) -> bool:
    (step,) = there
    return step >= done[-1] and step != 3


def the_other_series(done: list[int], there: set[int]) -> bool:
    """And what was deleted is gone for good."""
    return 9 in there and (there == {9} or not done)


FIRST = """
mark("begin")
store = CheckpointStore(os.path.join(ROOT, "a", "b"), format=FORMAT)
for step in (1, 2):
    store.publish(make_snapshot(step), step=step)
    mark(step)
"""
REPLACED = """
store = CheckpointStore(ROOT, format=FORMAT)
store.publish(make_snapshot(1), step=1, name="it" + store.format.suffix)
mark("begin")
mark(1)
for step in (2, 3):
    store.publish(make_snapshot(step), step=step, name="it" + store.format.suffix)
    mark(step)
"""
PRUNED = """
store = CheckpointStore(ROOT, format=FORMAT)
store.publish(make_snapshot(1), step=1)
mark("begin")
mark(1)
for step in (2, 3, 4):
    store.publish(make_snapshot(step), step=step, retention=KeepNewest(1))
    mark(step)
"""
SET_ASIDE = """
store = CheckpointStore(ROOT, format=FORMAT)
name = "it" + store.format.suffix
store.publish(make_snapshot(1), step=1, name=name)
mark("begin")
mark(1)
for step in (2, 3):
    store.publish(make_snapshot(step), step=step, name=name, set_aside=lambda old, new: True)
    mark(step)
"""
LARGE = """
from keras_safe_ckpt.storage import block_writer
block_writer.BLOCK_BYTES = 64 << 10
store = CheckpointStore(ROOT, format=FORMAT)
store.publish(make_snapshot(1, 30_000), step=1)
mark("begin")
mark(1)
store.publish(make_snapshot(2, 30_000), step=2, retention=KeepNewest(1))
mark(2)
"""
BEST = """
from keras_safe_ckpt.training.best import Best
store = CheckpointStore(ROOT, format=FORMAT)
best = Best("loss", "min")
def save(step, loss):
    store.publish(make_snapshot(step), step=step, metrics={"loss": loss}, monitor="loss",
                  mode="min", name="best" + store.format.suffix, veto=best.veto(loss))
save(1, 1.0)
mark("begin")
mark(1)
save(2, 0.5)
mark(2)
save(3, 0.7)  # Worse: it must not come in place of 2.
save(4, 0.2)
mark(4)
"""
PRUNE = """
store = CheckpointStore(ROOT, format=FORMAT)
for step in (1, 2, 3, 4):
    store.publish(make_snapshot(step), step=step, metrics={"loss": abs(2 - step)})
store.publish(make_snapshot(9), step=9, name="other" + store.format.suffix)
mark("begin")
store.prune(KeepBest(1, "loss"))
store.delete_series("ckpt-*" + store.format.suffix)
mark(9)
"""


SCENES = {
    "first": (FIRST, StoreCheck(all_of_them, "a/b")),
    "replaced": (REPLACED, StoreCheck(the_last_or_newer)),
    "pruned": (PRUNED, StoreCheck(the_last_or_newer)),
    "set aside": (SET_ASIDE, StoreCheck(all_of_them)),
    "large": (LARGE, StoreCheck(the_last_or_newer, size=30_000)),
    "best": (BEST, StoreCheck(one_that_is_never_worse)),
    "prune": (PRUNE, StoreCheck(the_other_series)),
}


def cut_store(scene: str, format: str, folder: Path, place: Path, most: int) -> Tried:
    code, check = SCENES[scene]
    code = f"FORMAT = {format!r}\n{HEADER}{code}"
    checked = functools.partial(check, format=format)
    return cut_everywhere(code, folder, checked, most=most, place=place)


@pytest.mark.parametrize(
    ("scene", "format"),
    [
        ("first", "weights_h5"),
        ("replaced", "keras"),
        ("pruned", "weights_h5"),
        ("set aside", "keras"),
        ("large", "weights_h5"),
        ("best", "keras"),
        ("prune", "weights_h5"),
    ],
)
def test_a_save_that_returned_outlives_a_power_cut(tmp_path, place, scene, format):
    tried = cut_store(scene, format, tmp_path, place, QUICK)
    assert tried.states >= 10


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("format", ["weights_h5", "keras"])
@pytest.mark.parametrize("scene", SCENES)
def test_no_power_cut_takes_a_save_that_returned(tmp_path, place, scene, format, record_property):
    tried = cut_store(scene, format, tmp_path, place, THOROUGH)
    record_property("campaign", f"power cut, store, {scene}, {format}: {tried}")
