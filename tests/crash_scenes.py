"""Operations that are killed, or that fail, at each of their system calls in turn.

A scene is prepared by the test, made ready and done in a process of its own, and looked at by
whoever comes afterwards: all of it without TensorFlow.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from record_files import records_of
from snapshots import make_snapshot

from keras_safe_ckpt import (
    CheckpointStore,
    LockedTFRecordWriter,
    LockManager,
    TFRecordShardWriter,
    WorkerH5Writer,
    merge_worker_files,
    split_tfrecord,
    verify_tfrecord,
)
from keras_safe_ckpt.errors import CheckpointWriteError
from keras_safe_ckpt.storage.block_writer import BLOCK_BYTES
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import Family, Keep
from keras_safe_ckpt.storage.bundles.recovery import reading
from keras_safe_ckpt.storage.bundles.staging import stage
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.retention import KeepNewest
from keras_safe_ckpt.storage.snapshot import Snapshot

#: Two whole blocks, which go past the page cache, and a tail.
LARGE = (2 * BLOCK_BYTES + 100_000) // (3 * 4)


@dataclass(frozen=True)
class Scene:
    """``look`` says in a word what is there, and that it is whole; it raises if it is not."""

    prepare: Callable[[Path], object]
    #: Before it is watched; what it returns is handed to ``act``.
    ready: Callable[[Path], Any]
    act: Callable[[Any], object]
    look: Callable[[Path], str]
    old: str
    new: str
    #: What else may be there when it was killed, or failed, half-way.
    between: tuple[str, ...] = ()
    #: What else may be there when it succeeded although something failed that it can do without.
    as_good: tuple[str, ...] = ()
    #: Of a second ``act``.
    new_again: str = ""
    #: What an ``act`` has begun is done when this returns.
    finish: Callable[[Any], object] = lambda context: None

    def check_killed(self, folder: Path) -> None:
        """Old or new, whole; the next one works, and sweeps what is left."""
        seen = self.look(folder)
        assert seen in (self.old, self.new, *self.between), seen
        context = self.ready(folder)
        self.act(context)
        self.finish(context)
        again = self.look(folder)
        assert again in (self.new, self.new_again), (seen, again)
        left = leftovers(folder)
        assert left == [], left


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.kscktmp"))


def _named(store: CheckpointStore) -> str:
    return f"m{store.format.suffix}"


def _publish(steps: tuple[int, ...], named: bool = True, **options: Any) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        store = CheckpointStore(folder, **options)
        for step in steps:
            name = _named(store) if named else None
            store.publish(_content(store, step), step=step, name=name)

    return prepare


def _content(store: CheckpointStore, seed: int, size: int = 1000) -> Snapshot:
    if store.format.suffix != ".h5":
        return make_snapshot(seed, size)
    # As Keras hands it over when it has written the file of a model.
    with h5py.File(file := io.BytesIO(), "w") as h5:
        h5["model_weights/kernel"] = np.full(size, seed, "float32")
        h5.attrs["model_config"] = '{"class_name": "Sequential"}'
    return Snapshot({}, {}, assets={"model.h5": file.getvalue()})


def steps_of(folder: Path, **options: Any) -> str:
    """The steps of all checkpoints, each of which must be whole, for HDF5 as well."""
    store = CheckpointStore(folder, **options)
    found = []
    for checkpoint in store.checkpoints(_refuse):
        store.verify(checkpoint.path)
        if store.format.suffix != ".keras":
            with h5py.File(checkpoint.path) as file:
                file.visititems(lambda name, item: item[()] if hasattr(item, "shape") else None)
        found.append(checkpoint.manifest.step)
    return ",".join(map(str, sorted(found)))


def _refuse(path: Path, reason: str) -> None:
    """But for a link that a test has planted, which is passed over and not read."""
    assert path.is_symlink(), f"{path} is damaged: {reason}"
    assert reason == "it is a symbolic link"


def _store_scene(
    before: tuple[int, ...],
    old: str,
    new: str,
    *,
    size: int = 1000,
    named: bool = True,
    format: str = "weights_h5",
    between: tuple[str, ...] = (),
    as_good: tuple[str, ...] = (),
    publishing: Mapping[str, Any] | None = None,
    wait: bool = False,
) -> Scene:
    step = max(before, default=1) + 1

    def ready(folder: Path) -> tuple[CheckpointStore, Snapshot]:
        store = CheckpointStore(folder, format=format)
        return store, _content(store, step, size)

    def act(context: tuple[CheckpointStore, Snapshot]) -> None:
        store, snapshot = context
        name = _named(store) if named else None
        store.publish(snapshot, step=step, name=name, **(publishing or {}))
        if wait:
            store.wait()

    return Scene(
        _publish(before, named, format=format),
        ready,
        act,
        lambda folder: steps_of(folder, format=format),
        old,
        new,
        between,
        as_good,
        # Set aside once more.
        f"{new},{step}" if "set_aside" in (publishing or {}) else "",
        lambda context: context[0].wait(),
    )


def _unless_there(old: Manifest | None, new: Manifest) -> str | None:
    """As if what is in place were better: whatever cannot be read, it stays."""
    return None if old is None else "it is better"


def _prune(store: CheckpointStore) -> None:
    store.prune(KeepNewest(1))


_SOME_PRUNED = tuple(",".join(steps) for steps in ("234", "134", "124", "34", "24", "14"))

# Data files.

SHARD = [b"%04d" % index * 20_000 for index in range(8)]


def _write_shard(folder: Path, records: list[bytes]) -> None:
    with TFRecordShardWriter(folder / "t", 0, 1) as writer:
        for record in records:
            writer.write(record)


def _look_at_shard(folder: Path) -> str:
    path = folder / "t-00000-of-00001.tfrecord"
    verify_tfrecord(path)
    return {1: "old", len(SHARD): "new"}[len(records_of(path))]


def _append(folder: Path) -> None:
    with LockedTFRecordWriter(folder / "all.tfrecord") as writer:
        for index in range(10):
            writer.write(b"%d" % index)


def _look_at_appended(folder: Path) -> str:
    path = folder / "all.tfrecord"
    groups, rest = divmod(verify_tfrecord(path).records, 10)
    assert rest == 0
    assert records_of(path) == [b"%d" % index for index in range(10)] * groups
    return str(groups)


def _split(folder: Path) -> None:
    split_tfrecord(folder / "source.tfrecord", folder / "part", 3)


def _prepare_split(folder: Path) -> None:
    with LockedTFRecordWriter(folder / "source.tfrecord") as writer:
        for index in range(10):
            writer.write(b"%d" % index)


def _look_at_split(folder: Path) -> str:
    found = sorted(folder.glob("part-*"))
    for path in found:
        number = int(path.name.split("-")[1])
        assert records_of(path) == [b"%d" % index for index in range(number, 10, 3)]
        verify_tfrecord(path)
    return str(len(found))


def _write_worker(folder: Path, worker: int, value: int) -> None:
    with WorkerH5Writer(folder, worker) as writer:
        for _ in range(2):
            writer.append("number", np.full((40, 50), value))
            writer.append("text", [f"text {value}"] * 30)
            writer.flush()


def _look_at_worker(folder: Path) -> str:
    path = folder / "worker-00000.h5"
    if not path.exists():
        return "none"
    with h5py.File(path) as file:
        numbers, texts = file["number"][:], file["text"].asstr()[:]
    (value,) = set(numbers.ravel().tolist())
    assert (len(numbers), texts.tolist()) == (80, [f"text {value}"] * 60)
    return str(value)


def _prepare_merge(folder: Path) -> None:
    for worker in range(2):
        _write_worker(folder / "run", worker, worker)
    with h5py.File(folder / "all.h5", "w") as file:
        file["number"] = np.zeros((1, 50))


def _look_at_merged(folder: Path) -> str:
    with h5py.File(folder / "all.h5") as file:
        numbers = file["number"][:]
    if len(numbers) == 1:
        return "old"
    assert numbers[:, 0].tolist() == [0] * 80 + [1] * 80
    assert (numbers == numbers[:, :1]).all()
    return "new"


# Checkpoints of TensorFlow, which somebody has made before in a folder ``made``.

_CKPT = Family("ckpt", bare=True)


def publish_bundle(folder: Path, value: int, *, exactly: str | None = None) -> None:
    with stage(BundleDirectory(folder / "place"), _CKPT, 1, exactly=exactly) as staged:
        try:
            for path in (folder / "made").glob(f"{value}.*"):
                shutil.copyfile(path, staged.prefix + path.name.removeprefix(str(value)))
        except OSError as error:  # TensorFlow would write here: nothing of ours fails.
            raise CheckpointWriteError(staged.prefix, error) from error
        staged.publish(Keep(2))


#: The scenes of them, and what each is called that is published there: None for the next number.
BUNDLES: dict[str, str | None] = {"bundles": None, "replaced bundle": "ckpt"}


def prepare_bundles(name: str, made: Path, folder: Path) -> None:
    shutil.copytree(made, folder / "made")
    for value in (1, 2):
        publish_bundle(folder, value, exactly=BUNDLES[name])


def _look_at_bundles(folder: Path) -> str:
    """Which are there, newest first, by their bytes."""
    data = {
        path.read_bytes(): path.name.partition(".")[0] for path in (folder / "made").glob("*data*")
    }
    place = BundleDirectory(folder / "place")
    with reading(place):
        found = [Path(f"{bundle.prefix}.data-00000-of-00001") for bundle in place.whole(_CKPT)]
    return ",".join(data[path.read_bytes()] for path in found)


# Locks.


def _hold(folder: Path) -> None:
    with LockManager(timeout=30).exclusive(folder / "shared") as held:
        held.ensure_held()


def _hold_and_see(folder: Path) -> None:
    """Take the lock and give it back; a plain `flock` is the witness that nobody else has it."""
    with LockManager(timeout=30).exclusive(folder / "shared"), open(folder / "witness", "a") as one:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _look_at_lock(folder: Path) -> str:
    with LockManager(timeout=0).exclusive(folder / "shared"):
        return "free"


def _nothing(folder: Path) -> None:
    """There is nothing to be prepared."""


def _itself(folder: Path) -> Path:
    return folder


SCENES: dict[str, Scene] = {
    "first": _store_scene((), "", "2"),
    "replacing": _store_scene((1,), "1", "2"),
    "pruning": _store_scene(
        (1, 2, 3),
        "1,2,3",
        "3,4",
        named=False,
        between=("1,2,3,4", "2,3,4", "1,3,4"),
        as_good=("1,2,3,4", "2,3,4", "1,3,4"),
        publishing={"retention": KeepNewest(2)},
    ),
    "set aside": _store_scene(
        (1,), "1", "1,2", between=("1,1",), publishing={"set_aside": lambda old, new: True}
    ),
    "keras": _store_scene((1,), "1", "2", format="keras"),
    "kept": _store_scene((1,), "1", "1", publishing={"veto": _unless_there}),
    "kept, keras": _store_scene((1,), "1", "1", format="keras", publishing={"veto": _unless_there}),
    "legacy": _store_scene((1,), "1", "2", format="legacy_h5"),
    "background": _store_scene((1,), "1", "2", publishing={"background": True}),
    "background, waited for": _store_scene(
        (1,), "1", "2", publishing={"background": True}, wait=True
    ),
    "large": _store_scene((1,), "1", "2", size=LARGE),
    "prune": Scene(
        _publish((1, 2, 3, 4), named=False),
        CheckpointStore,
        _prune,
        steps_of,
        "1,2,3,4",
        "4",
        ("4", *_SOME_PRUNED),
        as_good=("1,2,3,4", *_SOME_PRUNED),  # What cannot be read stays.
    ),
    "open": Scene(
        _publish((1,)),
        _itself,
        CheckpointStore,
        steps_of,
        "1",
        "1",
        new_again="2",
        finish=_publish((2,)),  # To open it sweeps nothing.
    ),
    "lock": Scene(_nothing, _itself, _hold, _look_at_lock, "free", "free"),
    "witnessed lock": Scene(_nothing, _itself, _hold_and_see, _look_at_lock, "free", "free"),
    "shard": Scene(
        lambda folder: _write_shard(folder, [b"old"]),
        _itself,
        lambda folder: _write_shard(folder, SHARD),
        _look_at_shard,
        "old",
        "new",
    ),
    "append": Scene(_append, _itself, _append, _look_at_appended, "1", "2", new_again="3"),
    "split": Scene(_prepare_split, _itself, _split, _look_at_split, "0", "3", ("1", "2", "3")),
    "worker file": Scene(
        lambda folder: _write_worker(folder, 0, 1),
        _itself,
        lambda folder: _write_worker(folder, 0, 2),
        _look_at_worker,
        "1",
        "2",
    ),
    "bundles": Scene(
        lambda folder: None,
        _itself,
        lambda folder: publish_bundle(folder, 3),
        _look_at_bundles,
        "2,1",
        "3,2",
        ("3,2,1",),
        as_good=("3,2,1",),
        new_again="3,3",
    ),
    "replaced bundle": Scene(
        lambda folder: None,
        _itself,
        lambda folder: publish_bundle(folder, 3, exactly="ckpt"),
        _look_at_bundles,
        "2",
        "3",
    ),
    "merge": Scene(
        _prepare_merge,
        _itself,
        lambda folder: merge_worker_files(folder / "run", folder / "all.h5"),
        _look_at_merged,
        "old",
        "new",
    ),
}

#: In the process of the trial.
SETUP = """
import crash_scenes
from pathlib import Path
scene, folder = crash_scenes.SCENES[sys.argv[2]], Path(sys.argv[1])
context = scene.ready(folder)
"""


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def tell(
    scene: Scene,
    context: Any,
    folder: Path,
    opened_before: int,
    unwatched: Callable[[], int],
) -> None:
    """Do it, and print what came of it; then do it again in the same process."""
    error: dict[str, Any] | None = None
    try:
        scene.act(context)
    except BaseException as raised:  # noqa: BLE001  # Of whatever kind: the test judges.
        error = {
            "kinds": [kind.__name__ for kind in type(raised).__mro__],
            "text": str(raised),
            "errno": getattr(raised, "errno", None),
            "published": getattr(raised, "published", False),
        }
    shortened = unwatched()
    left, open_now = leftovers(folder), opened()
    told = {"error": error, "left": left, "leaked": open_now - opened_before}
    told["shortened"] = shortened
    told["seen"] = scene.look(folder)
    print(json.dumps(told), flush=True)
    scene.act(context)
    print(json.dumps({"seen": scene.look(folder), "left": leftovers(folder)}), flush=True)
