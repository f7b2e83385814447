"""A directory of checkpoints: order, choice, retention, events, background."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pickle
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from processes import require_root, run, run_ok, start, wait_until
from snapshots import make_snapshot, stored_seed

from keras_safe_ckpt import (
    CheckpointNotFoundError,
    CheckpointStore,
    CheckpointWriteError,
    CorruptCheckpointError,
    KeepAny,
    KeepBest,
    KeepNewest,
    LockLostError,
    LockManager,
    LockTimeoutError,
    UnsafePathError,
)
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.publishing import LOCK_NAME, Publisher


@pytest.fixture(params=["weights_h5", "keras"])
def store(request, tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "store", format=request.param)


def names(store: CheckpointStore) -> list[str]:
    return [checkpoint.path.name for checkpoint in store.checkpoints()]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def damage_data(store: CheckpointStore, path: Path) -> None:
    """Change one bit of the data of an array, and nothing else."""
    needle = make_snapshot(stored_seed(store, path)).arrays["layers/dense/vars/1"].tobytes()
    flip(path, path.read_bytes().index(needle) + 100)


def events(store: CheckpointStore, kind: str) -> list[dict]:
    return [event for event in store.events.read() if event["event"] == kind]


def test_what_is_published_comes_back(store):
    published = store.publish(
        make_snapshot(7),
        step=12,
        epoch=3,
        batch=4,
        metrics={"val_loss": np.float32(0.5)},
        monitor="val_loss",
        mode="min",
        extra={"history": [1, 2, {"a": None}]},
        extra_arrays={"seed_generator/0": np.arange(2, dtype="uint32")},
    )
    latest = CheckpointStore(store.directory).latest()
    assert latest == published
    manifest = latest.manifest
    assert (manifest.step, manifest.epoch, manifest.batch) == (12, 3, 4)
    assert manifest.metrics == {"val_loss": 0.5}
    assert (manifest.monitor, manifest.mode) == ("val_loss", "min")
    assert manifest.extra == {"history": [1, 2, {"a": None}]}
    assert manifest.pid == os.getpid()
    assert manifest.versions.keys() >= {"keras", "tensorflow", "python", "keras_safe_ckpt"}
    extra = store.extra_arrays(latest.path)
    assert list(extra) == ["seed_generator/0"]
    assert extra["seed_generator/0"].tolist() == [0, 1]
    assert type(extra["seed_generator/0"]) is np.ndarray


def test_newest_is_by_order_of_saving_not_by_step_or_clock(store, monkeypatch):
    store.publish(make_snapshot(1), step=1000)
    monkeypatch.setattr("time.time", lambda: 1000.0)  # The clock jumped back by decades,
    other = CheckpointStore(store.directory, format=store.format)
    other.publish(make_snapshot(2), step=10)  # and a new run began at a lower step.
    assert store.latest().manifest.step == 10
    first, second = (c.manifest.sequence for c in store.checkpoints())
    assert second == first + 1


def test_latest_of_an_empty_directory_is_none(store):
    assert store.latest() is None
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
        store.load(object())


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "garbage"])
def test_damaged_newest_is_passed_over_by_name_and_reason(store, damage, caplog):
    store.publish(make_snapshot(1), step=1)
    bad = store.publish(make_snapshot(2), step=2).path
    if damage == "flip":
        damage_data(store, bad)
    elif damage == "truncate":
        os.truncate(bad, bad.stat().st_size * 2 // 3)
    elif damage == "empty":
        os.truncate(bad, 0)
    else:
        bad.write_bytes(os.urandom(5000))
    reported: list[tuple[str, str]] = []
    fresh = CheckpointStore(store.directory)
    assert fresh.latest(lambda path, why: reported.append((path.name, why))).manifest.step == 1
    assert [name for name, _ in reported] == [bad.name]
    assert bad.name in reported[0][1]
    if damage == "flip":
        assert "layers/dense/vars/1" in reported[0][1]
    with caplog.at_level(logging.WARNING):
        assert fresh.latest().manifest.step == 1
    assert bad.name in caplog.text
    assert events(store, "pass_over")[0]["file"] == bad.name
    with pytest.raises(CorruptCheckpointError) as caught:
        fresh.verify(bad)
    assert caught.value.path == str(bad)


def test_all_damaged_are_all_named(store):
    paths = [store.publish(make_snapshot(n), step=n).path for n in (1, 2)]
    for path in paths:
        os.truncate(path, 100)
    with pytest.raises(CorruptCheckpointError) as caught:
        CheckpointStore(store.directory).load(object())
    assert all(path.name in str(caught.value) for path in paths)


def test_file_damaged_after_it_was_verified_is_noticed(store):
    path = store.publish(make_snapshot(1), step=1).path
    assert store.latest() is not None
    damage_data(store, path)
    assert store.latest() is None


def test_same_name_is_replaced(store):
    name = f"best{store.format.suffix}"
    store.publish(make_snapshot(1), step=1, name=name)
    store.publish(make_snapshot(2), step=2, name=name)
    assert names(store) == [name]
    assert stored_seed(store) == 2


def test_veto_under_the_lock_keeps_the_incumbent(store):
    name = f"best{store.format.suffix}"

    for seed, loss in enumerate([0.5, 0.7, 0.3, 0.4]):
        publisher = CheckpointStore(store.directory, format=store.format)
        publisher.publish(
            make_snapshot(seed), step=seed, name=name, metrics={"loss": loss}, veto=only_better
        )
    assert stored_seed(store) == 2
    assert [event["reason"] for event in events(store, "skip")] == ["worse", "worse"]
    assert sorted(os.listdir(store.directory)) == [
        f".{LOCK_NAME}.gate", f".{LOCK_NAME}.lock", name, "events.jsonl",
    ]  # fmt: skip


def test_slower_writer_does_not_replace_a_newer_checkpoint(store):
    """Between writing and publishing, another process published a later one."""
    name = f"model{store.format.suffix}"
    other = CheckpointStore(store.directory, format=store.format)
    real = store.format.write

    class Overtaken:
        suffix, whole_model = store.format.suffix, store.format.whole_model
        open = staticmethod(store.format.open)

        def write(self, staged, snapshot, draft):
            for seed in (5, 6):
                other.publish(make_snapshot(seed), step=seed, name=name)
            return real(staged, snapshot, draft)

    slow = CheckpointStore(store.directory, format=Overtaken())
    assert slow.publish(make_snapshot(1), step=1, name=name) is None
    assert stored_seed(store) == 6


def test_eight_processes_race_for_the_best(tmp_path):
    code = """
def only_better(incumbent, new):
    if incumbent is not None and incumbent.metrics["loss"] <= new.metrics["loss"]:
        return "worse"
store = CheckpointStore(sys.argv[1])
rng = np.random.default_rng(int(sys.argv[2]))
losses = rng.random(15).tolist()
for step, loss in enumerate(losses):
    store.publish(snapshot(0), step=step, name="best.weights.h5", metrics={"loss": loss},
                  veto=only_better)
print(min(losses))
"""
    children = [start(code, tmp_path, n) for n in range(8)]
    best = []
    for child in children:
        out, err = child.communicate(timeout=240)
        assert child.returncode == 0, err
        best.append(float(out))
    store = CheckpointStore(tmp_path)
    assert store.latest().manifest.metrics["loss"] == min(best)
    assert [n for n in os.listdir(tmp_path) if n.endswith(".kscktmp")] == []


def test_lock_timeout_leaves_everything_as_it_was(store):
    store.publish(make_snapshot(1), step=1)
    impatient = CheckpointStore(
        store.directory, format=store.format, locks=LockManager(timeout=0.05)
    )
    with LockManager().exclusive(store.directory / LOCK_NAME), pytest.raises(LockTimeoutError):
        impatient.publish(make_snapshot(2), step=2)
    assert names(store) == names(impatient) == [f"ckpt-0000000001{store.format.suffix}"]
    assert [n for n in os.listdir(store.directory) if n.endswith(".kscktmp")] == []
    assert events(store, "error")[0]["kind"] == "LockTimeoutError"


def test_lost_lock_prevents_the_commit(store):
    store.publish(make_snapshot(1), step=1)

    def delete_lock_file(incumbent, new):
        (store.directory / f".{LOCK_NAME}.lock").unlink()

    with pytest.raises(LockLostError):
        store.publish(make_snapshot(2), step=1, name=names(store)[0], veto=delete_lock_file)
    assert stored_seed(store) == 1


class NoLocks(LockManager):
    """What a holder has that lost its lock and does not know."""

    @contextlib.contextmanager
    def exclusive(self, path, timeout=None):
        yield SimpleNamespace(path=os.fspath(path), ensure_held=lambda: None)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_somebody_put_in_place_without_the_lock_is_judged_as_well(store, in_place):
    """After the decision: by one that was paused right before its rename, say."""
    name = f"best{store.format.suffix}"
    stale = CheckpointStore(store.directory, format=store.format, locks=NoLocks())
    if in_place:
        store.publish(make_snapshot(1), step=1, name=name, metrics={"loss": 0.9}, veto=only_better)
    resumed = []

    def decide(incumbent, new):
        reason = only_better(incumbent, new)
        if not resumed:
            resumed.append(incumbent)
            stale.publish(make_snapshot(2), step=2, name=name, metrics={"loss": 0.1})
        return reason

    late = make_snapshot(3)
    assert store.publish(late, step=3, name=name, metrics={"loss": 0.5}, veto=decide) is None
    assert stored_seed(store) == 2


def test_lock_that_is_lost_while_the_former_is_set_aside_prevents_the_commit(store):
    name = f"model{store.format.suffix}"
    store.publish(make_snapshot(1), step=1, name=name)

    def slow(incumbent, new):
        (store.directory / f".{LOCK_NAME}.lock").unlink()
        return True

    with pytest.raises(LockLostError):
        store.publish(make_snapshot(2), step=2, name=name, set_aside=slow)
    assert stored_seed(store, store.directory / name) == 1


def test_store_refuses_a_directory_where_locks_do_not_work(tmp_path):
    class NoLocks(LockManager):
        def check(self, directory):
            raise CheckpointWriteError(directory, "no locks here")

    with pytest.raises(CheckpointWriteError, match="no locks here"):
        CheckpointStore(tmp_path, locks=NoLocks())


def test_of_two_at_the_same_moment_the_later_capture_stays(store, monkeypatch):
    """Both saw the same directory; the slower one had the older model."""
    name = f"model{store.format.suffix}"
    fast = CheckpointStore(store.directory, format=store.format)
    real = store.format.write

    class Overtaken:
        suffix, whole_model = store.format.suffix, store.format.whole_model
        open = staticmethod(store.format.open)

        def write(self, staged, snapshot, draft):
            fast.publish(make_snapshot(2), step=200, name=name)
            return real(staged, snapshot, draft)

    monkeypatch.setattr(Publisher, "_next_sequence", lambda self: 7)
    slow = CheckpointStore(store.directory, format=Overtaken())
    assert slow.publish(make_snapshot(1), step=100, name=name) is None
    assert stored_seed(store) == 2


def only_better(incumbent, new):
    if incumbent is not None and incumbent.metrics["loss"] <= new.metrics["loss"]:
        return "worse"
    return None


def test_incumbent_that_cannot_be_read_now_is_not_replaced(tmp_path):
    require_root()
    code = """
store = CheckpointStore(sys.argv[1])
os.setgid(65534); os.setuid(65534)
try:
    store.publish(snapshot(2), step=2, name="best.weights.h5", metrics={"loss": 9.0})
except Exception as error:
    print(type(error).__name__, error)
"""
    folder = tmp_path / "store"
    store = CheckpointStore(folder)
    path = store.publish(
        make_snapshot(1), step=1, name="best.weights.h5", metrics={"loss": 0.1}
    ).path
    for parent in [*tmp_path.parents[:3], tmp_path]:
        os.chmod(parent, os.stat(parent).st_mode | 0o555)
    os.chmod(folder, 0o777)
    os.chmod(path, 0o600)
    for name in os.listdir(folder):
        if name.startswith(".") or name == "events.jsonl":
            os.chmod(folder / name, 0o666)
    out = run_ok(code, folder)
    assert out.startswith("CheckpointWriteError")
    assert "cannot be compared" in out
    assert stored_seed(store) == 1


def test_incumbent_of_a_newer_version_is_not_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.publish(make_snapshot(1), step=1, name="best.weights.h5").path
    data = path.read_bytes().replace(b'"format_version":1', b'"format_version":9')
    path.write_bytes(data)
    with pytest.raises(CheckpointWriteError, match="upgrade"):
        store.publish(make_snapshot(2), step=2, name="best.weights.h5")
    assert path.read_bytes() == data


def test_what_is_captured_does_not_change_any_more(store):
    """The caller goes on: its history grows, its arrays change, keys may be numbers."""
    go = threading.Event()
    history, array = {"loss": [1.0], 10: "ten", 9: "nine"}, np.zeros(1000)
    store.publish(
        make_snapshot(1),
        step=1,
        extra=history,
        extra_arrays={"a": array},
        veto=lambda incumbent, new: go.wait(60) and None,
        background=True,
    )
    history["loss"] += [2.0] * 10_000
    array[:] = 7
    go.set()
    store.wait()
    latest = CheckpointStore(store.directory).latest()
    assert latest.manifest.extra == {"loss": [1.0], "10": "ten", "9": "nine"}
    assert not store.extra_arrays(latest.path)["a"].any()


@pytest.mark.parametrize(
    "value",
    [
        np.array(["text"]),
        np.array([object()]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
    ],
    ids=["text", "object", "datetime", "structured"],
)
def test_extra_arrays_must_be_numbers(store, value):
    with pytest.raises(TypeError, match="array of numbers"):
        store.publish(make_snapshot(1), step=1, extra_arrays={"a": value})


@pytest.mark.parametrize("dtype", [">f4", "bool", "complex128", "S3", "float8_e4m3fn", "bfloat16"])
def test_extra_arrays_keep_their_dtype(store, dtype):
    import ml_dtypes

    array = np.zeros((2, 3), getattr(ml_dtypes, dtype, dtype))
    path = store.publish(make_snapshot(1), step=1, extra_arrays={"a/b": array}).path
    assert store.extra_arrays(path)["a/b"].dtype == array.dtype


@pytest.mark.parametrize("key", ["a//b", "/abs", "./x", "x/.", "ä/ü", "vars/1", "with blank"])
def test_strange_names_are_read_back_or_refused_before_anything_is_replaced(store, key):
    name = f"m{store.format.suffix}"
    store.publish(make_snapshot(1), step=1, name=name)
    try:
        store.publish(make_snapshot(2), step=2, name=name, extra_arrays={key: np.arange(3)})
        expected = 2
    except (CheckpointWriteError, ValueError):
        expected = 1
    fresh = CheckpointStore(store.directory, format=store.format)
    assert stored_seed(fresh) == expected
    if expected == 2:
        assert fresh.extra_arrays(name)[key].tolist() == [0, 1, 2]


def test_what_cannot_be_read_back_is_not_published(store, monkeypatch):
    name = f"m{store.format.suffix}"
    store.publish(make_snapshot(1), step=1, name=name)
    monkeypatch.setattr("keras_safe_ckpt.storage.manifest.LARGEST_BYTES", 100)
    monkeypatch.setattr("keras_safe_ckpt.storage.formats.weights_h5.LARGEST_BYTES", 100)
    monkeypatch.setattr("keras_safe_ckpt.storage.formats.keras_zip.LARGEST_BYTES", 100)
    store._catalog._manifests.clear()
    with pytest.raises(CheckpointWriteError, match="bytes"):
        store.publish(make_snapshot(2), step=2, name=name)
    monkeypatch.undo()
    assert stored_seed(store) == 1


# Retention


def publish_many(store: CheckpointStore, losses: list[float]) -> None:
    for step, loss in enumerate(losses):
        store.publish(make_snapshot(step), step=step, metrics={"loss": loss})


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.manifest.step for checkpoint in store.checkpoints()]


def test_prune_keeps_the_newest(store):
    publish_many(store, [1, 2, 3, 4])
    deleted = store.prune(KeepNewest(2))
    assert [path.name[:15] for path in deleted] == ["ckpt-0000000000", "ckpt-0000000001"]
    assert steps(store) == [2, 3]
    assert events(store, "prune")[0]["files"] == [path.name for path in deleted]


def test_retention_never_displaces_a_model_of_another_name(store):
    best = f"best{store.format.suffix}"
    store.publish(make_snapshot(9), step=0, name=best)
    for step in range(1, 6):
        store.publish(make_snapshot(step), step=step, retention=KeepNewest(2))
    assert steps(store) == [0, 4, 5]
    store.prune(KeepNewest(1))
    assert steps(store) == [0, 5]


def test_retention_leaves_other_workers_alone(store):
    for worker in ("0", "1"):
        mine = CheckpointStore(store.directory, format=store.format, worker=worker)
        for step in range(3):
            name = f"w{worker}-{step}{store.format.suffix}"
            mine.publish(
                make_snapshot(step), step=step, name=name, series="w", retention=KeepNewest(1)
            )
    assert sorted(names(store)) == [f"w{n}-2{store.format.suffix}" for n in "01"]


def test_retention_keeps_what_it_just_published(store):
    store.publish(make_snapshot(1), step=1, metrics={"loss": 1})
    worse = store.publish(
        make_snapshot(2), step=2, metrics={"loss": 2}, retention=KeepBest(1, "loss")
    )
    assert worse.path.exists()
    assert steps(store) == [1, 2]


def test_failing_retention_does_not_fail_the_save(tmp_path):
    """An old file of somebody else in a sticky directory cannot be deleted."""
    require_root()
    folder = tmp_path / "store"
    store = CheckpointStore(folder)
    store.publish(make_snapshot(1), step=1)
    code = """
store = CheckpointStore(sys.argv[1])
os.setgid(65534); os.setuid(65534)
print(store.publish(snapshot(2), step=2).manifest.step)
from keras_safe_ckpt import KeepNewest
print(store.publish(snapshot(3), step=3, retention=KeepNewest(1)).manifest.step)
"""
    for parent in [*tmp_path.parents[:3], tmp_path]:
        os.chmod(parent, os.stat(parent).st_mode | 0o555)
    os.chmod(folder, 0o1777)
    for name in os.listdir(folder):
        os.chmod(folder / name, 0o666)
    assert run_ok(code, folder) == "2\n3\n"
    assert steps(store) == [1, 3]  # Its own old one is gone, the other one stays.
    assert "Operation not permitted" in events(store, "error")[0]["error"]


def test_prune_keeps_the_best_and_the_newest(store):
    publish_many(store, [3, 1, 2, float("nan"), 5])
    store.prune(KeepAny((KeepBest(2, "loss"), KeepNewest(1))))
    assert steps(store) == [1, 2, 4]
    store.prune(KeepBest(1, "loss", mode="max"))
    assert steps(store) == [4]


def test_of_equals_the_newest_is_the_best(store):
    publish_many(store, [1, 1, 1])
    store.prune(KeepBest(1, "loss"))
    assert steps(store) == [2]


def test_retention_at_publishing(store):
    for step in range(5):
        store.publish(make_snapshot(step), step=step, retention=KeepNewest(2))
    assert steps(store) == [3, 4]


def test_prune_never_touches_what_is_not_ours(store):
    publish_many(store, [1, 2])
    foreign = {
        f"mine{store.format.suffix}": os.urandom(100),
        "notes.txt": b"x",
        f"ckpt-0000000000-copy{store.format.suffix}": b"",
    }
    for name, data in foreign.items():
        (store.directory / name).write_bytes(data)
    store.prune(KeepNewest(1))
    assert steps(store) == [1]
    for name, data in foreign.items():
        assert (store.directory / name).read_bytes() == data


def test_prune_deletes_nothing_unless_a_whole_one_stays(store):
    publish_many(store, [1, 2])
    newest = store.checkpoints()[-1].path
    damage_data(store, newest)
    assert CheckpointStore(store.directory).prune(KeepNewest(1)) == []
    assert CheckpointStore(store.directory).latest().manifest.step == 0


def test_prune_verifies_only_what_it_must(store, monkeypatch):
    """What this process just published is known to be whole: nothing is read again for it."""
    publish_many(store, [1, 2, 3])
    verified: list[str] = []
    real = type(store.format.open(store.checkpoints()[0].path)).verify
    monkeypatch.setattr(
        type(store.format.open(store.checkpoints()[0].path)),
        "verify",
        lambda self: verified.append("once") or real(self),
    )
    store.prune(KeepNewest(2))
    assert verified == []
    CheckpointStore(store.directory).prune(KeepNewest(1))
    assert verified == ["once"]


def test_policy_that_keeps_nothing_deletes_nothing(store):
    publish_many(store, [1, 2])
    assert store.prune(KeepBest(1, "accuracy")) == []
    assert steps(store) == [0, 1]


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_retention_refuses_nonsense(count):
    for policy in (lambda: KeepNewest(count), lambda: KeepBest(count, "loss")):
        with pytest.raises(ValueError, match="at least 1"):
            policy()


def test_retention_refuses_an_unknown_mode():
    with pytest.raises(ValueError, match="mode='up'"):
        KeepBest(1, "loss", mode="up")


# Bad input


def test_unknown_format():
    with pytest.raises(ValueError, match=r"'keras', 'legacy_h5', 'weights_h5'.*format='h5'"):
        CheckpointStore("x", format="h5")
    assert not os.path.exists("x")


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".hidden", "", "nul\0", "a\\b"])
def test_unsafe_names_are_refused(store, name):
    before = os.listdir(store.directory)
    with pytest.raises(UnsafePathError):
        store.publish(make_snapshot(), step=1, name=name + store.format.suffix if name else name)
    assert os.listdir(store.directory) == before


def test_wrong_ending_is_refused(store):
    with pytest.raises(ValueError, match="ends in"):
        store.publish(make_snapshot(), step=1, name="model.h5")


def test_what_is_not_json_is_refused_at_once(store):
    with pytest.raises(TypeError):
        store.publish(make_snapshot(), step=1, extra={"x": object()}, background=True)
    store.wait()


@pytest.mark.parametrize("argument", ["step", "epoch", "batch"])
def test_position_must_be_whole_numbers(store, argument):
    with pytest.raises(TypeError, match=f"{argument} to be a whole number. Received: 1.5"):
        store.publish(make_snapshot(), **{"step": 1, argument: 1.5})
    store.publish(make_snapshot(), **{"step": 1, argument: np.int64(2)})


def test_what_is_not_a_model_is_refused(store):
    with pytest.raises(TypeError, match=r"keras\.Model"):
        store.publish("model", step=1)


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket", "hf://me/model"])
def test_object_stores_are_refused(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafePathError, match="object stores"):
        CheckpointStore(url)
    assert os.listdir(tmp_path) == []


def test_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(UnsafePathError, match="directory was expected"):
        CheckpointStore(tmp_path / "file")


def test_missing_and_strange_files(store):
    with pytest.raises(CheckpointNotFoundError):
        store.verify(f"none{store.format.suffix}")
    with pytest.raises(CorruptCheckpointError, match="ends in"):
        store.verify("notes.txt")
    folder = store.directory / f"folder{store.format.suffix}"
    folder.mkdir()
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        store.verify(folder)
    os.mkfifo(store.directory / f"pipe{store.format.suffix}")
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        store.verify(f"pipe{store.format.suffix}")
    assert store.latest() is None


def test_weights_alone_make_no_model(tmp_path):
    store = CheckpointStore(tmp_path)
    store.publish(make_snapshot(), step=1)
    with pytest.raises(ValueError, match=r"This file holds weights"):
        store.load(path=store.latest().path)
    with pytest.raises(CheckpointNotFoundError):
        store.load()


def test_symlink_among_the_checkpoints_is_not_one(store):
    store.publish(make_snapshot(1), step=1)
    (store.directory / f"link{store.format.suffix}").symlink_to(store.checkpoints()[0].path)
    assert len(store.checkpoints()) == 1


def test_directory_removed_under_the_store(store):
    shutil.rmtree(store.directory)
    assert store.checkpoints() == []
    store.publish(make_snapshot(1), step=1)
    assert stored_seed(store) == 1


# Events


def test_events_tell_what_happened(store):
    store.publish(make_snapshot(1), step=1, epoch=0, batch=5, metrics={"loss": 0.5})
    (event,) = events(store, "save")
    assert event["step"] == 1
    assert event["batch"] == 5
    assert event["metrics"] == {"loss": 0.5}
    assert event["bytes"] == store.checkpoints()[0].path.stat().st_size
    assert 0 <= event["blocked_seconds"] < 10
    assert 0 < event["seconds"] < 60


def test_events_survive_a_cut_line_and_a_full_disk(store, caplog):
    store.events.path.write_bytes(b'{"event": "save", "st')
    store.events.record("first")
    assert [event["event"] for event in store.events.read()] == ["first"]
    store.events.path.unlink()
    store.events.path.mkdir()
    with caplog.at_level(logging.WARNING):
        store.publish(make_snapshot(1), step=1)
        store.publish(make_snapshot(2), step=2)
    assert caplog.text.count("events are lost") == 1
    assert stored_seed(store) == 2


def test_event_log_does_not_follow_a_link(store, tmp_path):
    (tmp_path / "victim").write_bytes(b"precious")
    store.events.path.symlink_to(tmp_path / "victim")
    store.publish(make_snapshot(1), step=1)
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_events_of_many_processes_are_whole_lines(tmp_path):
    code = """
from keras_safe_ckpt.storage.events import EventLog
from pathlib import Path
log = EventLog(Path(sys.argv[1]))
for n in range(200):
    log.record("tick", n=n, who=sys.argv[2], padding="x" * 200)
"""
    children = [start(code, tmp_path, n) for n in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    # Whoever looks while another line is being appended takes it for cut and begins a new
    # line: an empty line in between is harmless.
    lines = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if line]
    assert len(lines) == 800
    assert len({(e["who"], e["n"]) for e in map(json.loads, lines)}) == 800


def test_events_name_their_process_also_after_a_fork(tmp_path):
    code = """
import time
from keras_safe_ckpt.storage.events import EventLog
from pathlib import Path
log = EventLog(Path(sys.argv[1]))
log.record("parent")
log.record("parent")
before = time.time()
while time.time() < before + 0.002:
    pass
if not os.fork():
    log.record("child")
    os._exit(0)
os.wait()
"""
    run_ok(code, tmp_path)
    one, other, child = EventLog(tmp_path).read()
    assert one["started"] == other["started"] <= one["time"]
    assert one["time"] < child["started"] <= child["time"]


def test_a_listener_hears_what_is_recorded_also_where_nothing_can_be_written(tmp_path):
    heard: list[Any] = []
    log = EventLog(tmp_path, heard.append)
    log.record("first", n=1)
    assert heard == list(log.read())
    log.path.unlink()
    log.path.mkdir()
    log.record("second")
    assert [entry["event"] for entry in heard] == ["first", "second"]


def test_a_wait_is_recorded_if_it_was_one(tmp_path, monkeypatch):
    moments = iter([1.0, 1.0005, 2.0, 2.25])
    clock = SimpleNamespace(perf_counter=lambda: next(moments), time=time.time)
    monkeypatch.setattr("keras_safe_ckpt.storage.events.time", clock)
    log = EventLog(tmp_path)
    with log.waiting(file="a"):
        assert list(log.read()) == []
    assert list(log.read()) == []
    with contextlib.suppress(KeyboardInterrupt), log.waiting(file="a"):
        raise KeyboardInterrupt
    (entry,) = log.read()
    assert (entry["event"], entry["file"], entry["seconds"]) == ("wait", "a", 0.25)


def test_line_of_the_log_that_is_too_deep_is_left_out(store):
    store.events.path.write_bytes(b"[" * 200_000 + b"\n")
    store.events.record("first")
    assert [event["event"] for event in store.events.read()] == ["first"]


def test_reader_forgets_what_others_deleted(store):
    """Or it would remember every checkpoint that ever was."""
    reader = CheckpointStore(store.directory, format=store.format)
    for step in range(5):
        store.publish(make_snapshot(step), step=step, retention=KeepNewest(1))
        assert reader.latest().manifest.step == step
    assert len(reader._catalog._manifests) == 1
    assert len(reader._catalog._verified) == 1


# Background


def test_background_save_is_durable_after_wait(store):
    assert store.publish(make_snapshot(1), step=1, background=True) is None
    store.wait()
    assert stored_seed(store) == 1
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("keras_safe_ckpt")],
        "the thread ends",
    )


def test_background_error_comes_back_at_the_next_call(store, caplog):
    (store.directory / f"taken{store.format.suffix}").mkdir()
    for next_call in (
        store.wait,
        lambda: store.load(object()),
        lambda: store.prune(KeepNewest(1)),
        lambda: store.publish(make_snapshot(2), step=2),
        lambda: store.publish(make_snapshot(2), step=2, background=True),
    ):
        store.publish(make_snapshot(1), step=1, name=f"taken{store.format.suffix}", background=True)
        with pytest.raises(UnsafePathError, match="directory"):
            next_call()
    assert "in the background failed" in caplog.text
    store.wait()  # Once said, it is over.


def test_second_save_waits_for_the_first(store):
    first_may_go, order = threading.Event(), []

    def slow(incumbent, new):
        assert first_may_go.wait(60)
        order.append("first")

    def quick(incumbent, new):
        order.append("second")

    store.publish(make_snapshot(1), step=1, veto=slow, background=True)
    caller = threading.Thread(
        target=lambda: store.publish(make_snapshot(2), step=2, veto=quick, background=True)
    )
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    first_may_go.set()
    caller.join(60)
    store.wait()
    assert order == ["first", "second"]


@pytest.mark.parametrize("format", ["weights_h5", "keras"])
@pytest.mark.parametrize("ending", ["", "raise RuntimeError('boom')", "sys.exit(3)"])
def test_pending_save_finishes_before_the_interpreter_exits(tmp_path, ending, format):
    code = f"""
store = CheckpointStore(sys.argv[1], format={format!r})
store.publish(snapshot(1, 3_000_000), step=1, background=True)
{ending}
"""
    done = run(code, tmp_path)
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(ending, 1)
    assert CheckpointStore(tmp_path).latest().manifest.step == 1


def test_background_error_without_another_call_is_still_said(tmp_path):
    code = """
store = CheckpointStore(sys.argv[1])
os.mkdir(sys.argv[1] + "/taken.weights.h5")
store.publish(snapshot(1), step=1, name="taken.weights.h5", background=True)
"""
    done = run(code, tmp_path)
    assert "taken.weights.h5" in done.stderr


def test_interrupted_wait_forgets_nothing(tmp_path):
    """After a Ctrl-C in wait() the save is still pending, and the interpreter waits for it."""
    code = """
import signal, threading
store = CheckpointStore(sys.argv[1])
go = threading.Event()
store.publish(snapshot(1), step=1, veto=lambda i, n: go.wait(60) and None, background=True)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    store.wait()
except KeyboardInterrupt:
    print("interrupted", len(store.checkpoints()))
threading.Timer(0.2, go.set).start()
if sys.argv[2] == "wait":
    store.wait()
    print(len(store.checkpoints()))
"""
    assert run_ok(code, tmp_path / "a", "wait") == "interrupted 0\n1\n"
    assert run_ok(code, tmp_path / "b", "exit") == "interrupted 0\n"
    assert CheckpointStore(tmp_path / "b").latest().manifest.step == 1


def test_fork_while_another_thread_waits(tmp_path):
    code = """
import threading
store = CheckpointStore(sys.argv[1])
go = threading.Event()
store.publish(snapshot(1), step=1, veto=lambda i, n: go.wait(60) and None, background=True)
waiter = threading.Thread(target=store.wait)
waiter.start()
while not store._writer._turn.locked():
    pass
child = os.fork()
if child == 0:
    store.wait()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go.set()
"""
    assert run_ok(code, tmp_path) == "7\n"
    assert len(CheckpointStore(tmp_path).checkpoints()) == 1


def test_forked_child_neither_waits_nor_loses(tmp_path):
    """A fork (a data loader, say) in the middle of a save leaves the save to the parent."""
    code = """
store = CheckpointStore(sys.argv[1])
store.publish(snapshot(1, 5_000_000), step=1, background=True)
child = os.fork()
if child == 0:
    store.wait()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
store.wait()
print(store.latest().manifest.step)
"""
    assert run_ok(code, tmp_path) == "1\n"


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_are_stores_of_their_own(store, clone):
    store.publish(make_snapshot(1), step=1, background=True)
    twin = clone(store)
    twin.publish(make_snapshot(2), step=2)
    store.wait()
    assert steps(twin) == steps(store)
    assert len(steps(store)) == 2


def test_threads_share_a_store(store):
    def save(number: int) -> None:
        for step in range(5):
            store.publish(make_snapshot(number), step=10 * number + step, background=step % 2 == 0)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    store.wait()
    assert len(store.checkpoints()) == 20
    for checkpoint in store.checkpoints():
        store.verify(checkpoint.path)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"retention": 5}, "retention to be a policy"),
        ({"metrics": 5}, "metrics to be numbers by name"),
        ({"series": 5}, "series to be a text"),
        ({"veto": 5}, "veto to be a function"),
        ({"set_aside": 5}, "set_aside to be a function"),
    ],
)
def test_odd_options_are_refused_before_anything_is_written(tmp_path, option, expected):
    store = CheckpointStore(tmp_path)
    (name,) = option
    with pytest.raises(TypeError, match=f"Expected {expected}.*Received: {name}=5"):
        store.publish(make_snapshot(), step=1, **option)
    assert store.checkpoints() == []
    with pytest.raises(TypeError, match="Received: path=5"):
        store.verify(5)


def test_a_store_of_weights_says_that_they_need_a_model(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        store.load()
    store.publish(make_snapshot(), step=1)
    with pytest.raises(CheckpointNotFoundError, match="weights only: pass a model"):
        store.load()


def test_the_log_is_json_whatever_the_metrics_are(tmp_path):
    store = CheckpointStore(tmp_path)
    metrics = {"loss": float("nan"), "best": float("inf")}
    assert store.publish(make_snapshot(), step=1, metrics=metrics).manifest.metrics["best"] > 0

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    for line in store.events.path.read_text().splitlines():
        event = json.loads(line, parse_constant=refuse)
    assert event["metrics"] == {"loss": "nan", "best": "inf"}
