"""One test for each line that could have been deleted without any other test noticing."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import shutil
import signal
import struct
import subprocess
import threading
import warnings
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from processes import require_root, run, run_ok, start, strace, wait_until
from snapshots import make_snapshot

from keras_safe_ckpt import (
    CheckpointStore,
    CheckpointWriteError,
    CorruptCheckpointError,
    KeepNewest,
    LockLostError,
    LockManager,
    UnsafePathError,
)
from keras_safe_ckpt.storage import temp_names
from keras_safe_ckpt.storage.atomic import StagedFile, sweep_orphans, write_atomically
from keras_safe_ckpt.storage.catalog import Catalog
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.locks import claim
from keras_safe_ckpt.storage.manifest import LARGEST_BYTES, Manifest
from keras_safe_ckpt.storage.paths import make_directory
from keras_safe_ckpt.storage.pruning import Pruner
from keras_safe_ckpt.storage.publishing import LOCK_NAME

ARRAY = "layers/dense/vars/1"


@pytest.fixture(params=["weights_h5", "keras"])
def store(request, tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "store", format=request.param)


# ------------------------------------------------------------- a manifest that lies


@pytest.fixture
def weights(tmp_path) -> tuple[CheckpointStore, Path]:
    store = CheckpointStore(tmp_path / "lies")
    return store, store.publish(make_snapshot(3), step=1).path


def with_manifest(path: Path, **changes: object) -> None:
    """Give a ``.weights.h5`` a manifest with a right digest and wrong facts."""
    data = path.read_bytes()
    length = int.from_bytes(data[-24:-16], "little")
    manifest = Manifest.from_json(data[-24 - length : -24], str(path))
    new = dataclasses.replace(manifest, **changes).to_json()
    path.write_bytes(data[: -24 - length] + new + len(new).to_bytes(8, "little") + data[-16:])


def test_manifest_can_be_replaced_by_an_equal_one(weights):
    store, path = weights
    with_manifest(path)
    store.verify(path)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1 << 40},
        {"offset": (1 << 63) - 1},
        {"shape": (1 << 30,)},
        {"shape": (10_000,)},
        {"dtype": "<f8"},
        {"offset": 0},
    ],
    ids=str,
)
def test_array_that_is_said_to_be_elsewhere(weights, change):
    store, path = weights
    arrays = dict(store.verify(path).arrays)
    arrays[ARRAY] = dataclasses.replace(arrays[ARRAY], **change)
    with_manifest(path, arrays=arrays)
    with pytest.raises(CorruptCheckpointError):
        store.verify(path)


def test_arrays_that_overlap_are_refused_before_they_are_read(weights):
    store, path = weights
    arrays = dict(store.verify(path).arrays)
    arrays.update({f"more/vars/{n}": arrays[ARRAY] for n in range(100)})
    with_manifest(path, arrays=arrays)
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        store.format.open(path)


def test_size_that_is_not_the_one_of_the_file(weights):
    store, path = weights
    with_manifest(path, size=store.verify(path).size - 1)
    with pytest.raises(CorruptCheckpointError, match="the manifest says"):
        store.verify(path)


def test_structure_that_was_changed(weights):
    store, path = weights
    with_manifest(path, structure="0" * 32)
    with pytest.raises(CorruptCheckpointError, match="structure"):
        store.verify(path)


@pytest.mark.parametrize("length", [LARGEST_BYTES + 1, (1 << 64) - 1, 10_000_000])
def test_manifest_said_to_be_huge_is_not_read(weights, length):
    store, path = weights
    data = path.read_bytes()
    path.write_bytes(data[:-24] + length.to_bytes(8, "little") + data[-16:])
    with pytest.raises(CorruptCheckpointError, match=f"manifest has {length} bytes"):
        store.verify(path)


def test_file_cut_while_it_is_open(weights):
    store, path = weights
    with store.format.open(path) as checkpoint:
        os.truncate(path, 3000)
        with pytest.raises(CorruptCheckpointError, match="ends too early"):
            checkpoint.verify()


def test_plain_keras_and_h5py_files_are_not_ours(tmp_path):
    store = CheckpointStore(tmp_path)
    with h5py.File(tmp_path / "plain.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.ones(3)
    with pytest.raises(CorruptCheckpointError, match="not written by this library"):
        store.verify("plain.weights.h5")


def test_damaged_structure_is_found_without_asking_hdf5(weights):
    """A free list of a heap that points to itself makes HDF5 loop and allocate for ever."""
    store, path = weights
    data = bytearray(path.read_bytes())
    heap = data.index(b"HEAP")
    free = int.from_bytes(data[heap + 16 : heap + 24], "little")
    segment = int.from_bytes(data[heap + 24 : heap + 32], "little")
    data[segment + free : segment + free + 8] = free.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="structure"):
        CheckpointStore(store.directory).verify(path)
    assert CheckpointStore(store.directory).latest() is None


def test_array_changed_after_it_was_verified_is_not_handed_out(store):
    path = store.publish(make_snapshot(3), step=1).path
    data = bytearray(path.read_bytes())
    needle = make_snapshot(3).arrays[ARRAY].tobytes()
    with store.format.open(path) as checkpoint:
        checkpoint.verify()
        data[data.index(needle) + 100] ^= 1
        with open(path, "r+b") as file:  # The same inode, as a failing disk would have it.
            file.write(data)
        with pytest.raises(CorruptCheckpointError, match=ARRAY):
            checkpoint.read_array(ARRAY)


# ------------------------------------------------------------- a zip archive that lies


@pytest.fixture
def archive(tmp_path) -> tuple[CheckpointStore, Path]:
    store = CheckpointStore(tmp_path / "zip", format="keras")
    return store, store.publish(make_snapshot(3), step=1).path


def rewritten(path: Path, change, compression=zipfile.ZIP_STORED) -> None:
    """The archive made anew by Python's own zipfile, all checksums right."""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    members = change(members)
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in members.items():
            new.writestr(name, data)


def assert_refused(archive, reason: str) -> None:
    store, path = archive
    with pytest.raises(CorruptCheckpointError) as caught:
        store.verify(path)
    assert reason in str(caught.value)


def test_two_members_of_one_name(archive):
    with warnings.catch_warnings(), zipfile.ZipFile(archive[1], "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("config.json", "{}")
    assert_refused(archive, "same name")


def test_compressed_members(archive):
    rewritten(archive[1], lambda members: members, zipfile.ZIP_DEFLATED)
    assert_refused(archive, "is not stored plainly")


def test_member_that_the_manifest_does_not_know(archive):
    rewritten(archive[1], lambda members: {**members, "assets/evil.txt": b"x"})
    assert_refused(archive, "members do not fit: ['assets/evil.txt']")


def test_asset_that_is_missing(archive):
    gone = "assets/layers/text/vocabulary.txt"
    rewritten(archive[1], lambda m: {k: v for k, v in m.items() if k != gone})
    assert_refused(archive, f"members do not fit: ['{gone}']")


@pytest.mark.parametrize("name", ["config.json", "metadata.json", "model.weights.h5"])
def test_essential_member_that_is_missing(archive, name):
    rewritten(archive[1], lambda m: {k: v for k, v in m.items() if k != name})
    assert_refused(archive, f"its member '{name}' is missing")


@pytest.mark.parametrize("name", ["config.json", "assets/layers/text/vocabulary.txt"])
def test_member_changed_together_with_its_checksum(archive, name):
    rewritten(archive[1], lambda m: {**m, name: m[name].replace(b"e", b"f")})
    assert_refused(archive, f"'{name}' does not match its digest")


def central(path: Path, name: str) -> int:
    """Where the entry of a member in the central directory begins."""
    data = path.read_bytes()
    return data.rindex(name.encode()) - 46


@pytest.mark.parametrize("name", ["config.json", "metadata.json", "model.weights.h5"])
def test_checksum_that_plain_keras_would_stumble_over(archive, name):
    path = archive[1]
    data = bytearray(path.read_bytes())
    data[central(path, name) + 16] ^= 1
    path.write_bytes(data)
    assert_refused(archive, f"'{name}' does not match its digest")


@pytest.mark.parametrize("name", ["config.json", "metadata.json", "model.weights.h5"])
def test_local_header_of_another_name(archive, name):
    path = archive[1]
    data = bytearray(path.read_bytes())
    data[data.index(name.encode()) + 1] ^= 1
    path.write_bytes(data)
    assert_refused(archive, f"the header of '{name}' is damaged")


@pytest.mark.parametrize("sizes", [(0x7FFFFFF0, 0x7FFFFFF0), (None, 0x7FFFFFF0)])
def test_member_said_to_be_larger_than_the_file(archive, sizes):
    path = archive[1]
    data = bytearray(path.read_bytes())
    at = central(path, "metadata.json") + 20
    compressed, size = struct.unpack("<II", data[at : at + 8])
    data[at : at + 8] = struct.pack("<II", sizes[0] or compressed, sizes[1] or size)
    path.write_bytes(data)
    assert_refused(archive, "its member 'metadata.json' is cut off")


def test_huge_metadata_is_not_read(archive):
    rewritten(archive[1], lambda m: {**m, "metadata.json": b" " * (LARGEST_BYTES + 1)})
    assert_refused(archive, f"its metadata.json has {LARGEST_BYTES + 1} bytes")


def test_disk_that_is_full_at_any_of_the_last_bytes(tmp_path):
    """The end of the archive is written by another thread: its error must not be lost."""
    code = """
import resource
store = CheckpointStore(sys.argv[1], format="keras")
size = os.path.getsize(store.publish(snapshot(1), step=1, name="m.keras").path)
outcomes = []
for limit in range(size - 120, size + 60, 5):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        store.publish(snapshot(1), step=1, name="m.keras")
        outcomes.append("saved")
    except OSError:
        outcomes.append("error")
    store.verify("m.keras")
print(sorted(set(outcomes)))
"""
    assert run_ok(code, tmp_path) == "['error', 'saved']\n"


# ------------------------------------------------------------- atomic files


def test_unsafe_target_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        StagedFile(tmp_path / "file")


def test_published_file_is_not_locked(tmp_path):
    """HDF5 locks what it reads: the mark of the living writer must be gone with the commit."""
    with StagedFile(tmp_path / "file") as staged:
        staged.sync()
        staged.commit()
        reader = os.open(tmp_path / "file", os.O_RDWR)
        try:
            assert claim(reader)
        finally:
            os.close(reader)


def test_living_temp_is_locked_for_sweepers_of_other_machines(tmp_path):
    with StagedFile(tmp_path / "file") as staged:
        other = os.open(staged.temp_path, os.O_RDWR)
        try:
            assert not claim(other)
        finally:
            os.close(other)


def test_temp_swept_in_the_instant_before_it_is_claimed(tmp_path):
    """The writer is stopped at its claim, the name is taken away: it must take another one."""
    code = """
from keras_safe_ckpt.storage.atomic import write_atomically
print(os.getpid(), flush=True)
write_atomically(sys.argv[1], b"data")
"""
    process = start(code, tmp_path / "file", prefix=strace("flock:signal=STOP:when=1"))
    pid = int(process.stdout.readline())

    def claimed() -> bool:
        locks = Path("/proc/locks").read_text()
        return any(f":{path.stat().st_ino} " in locks for path in tmp_path.iterdir())

    wait_until(claimed, "the temporary file is claimed")
    for path in tmp_path.iterdir():
        path.unlink()
    os.kill(pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert os.listdir(tmp_path) == ["file"]


def test_file_at_the_temp_path_is_not_taken_over(tmp_path, monkeypatch):
    (tmp_path / ".planted").write_bytes(b"precious")
    monkeypatch.setattr("keras_safe_ckpt.storage.atomic.new_temp_name", lambda name: ".planted")
    with pytest.raises(CheckpointWriteError, match="exists"):
        StagedFile(tmp_path / "file")
    assert (tmp_path / ".planted").read_bytes() == b"precious"


def test_where_nothing_can_be_locked_the_process_number_decides(tmp_path):
    code = """
from pathlib import Path
from keras_safe_ckpt.storage import temp_names
from keras_safe_ckpt.storage.atomic import StagedFile, sweep_orphans
folder = Path(sys.argv[1])
boot = temp_names.owner_of(temp_names.new_temp_name("x")).boot
dead = f".file.{boot}-1-999999999-1-0123456789ab.kscktmp"
(folder / dead).touch()
with StagedFile(folder / "file") as staged:
    assert sweep_orphans(folder) == [dead]
    staged.sync()
    staged.commit()
"""
    run_ok(code, tmp_path, prefix=strace("flock:error=ENOLCK"), timeout=30)
    assert os.listdir(tmp_path) == ["file"]


def test_pipe_with_the_name_of_a_temp_is_not_swept(tmp_path):
    boot = temp_names.owner_of(temp_names.new_temp_name("x")).boot
    pipe = tmp_path / f".file.{boot}-1-999999999-1-0123456789ab.kscktmp"
    os.mkfifo(pipe)
    assert sweep_orphans(tmp_path) == []
    assert pipe.exists()


def test_temp_of_somebody_else_is_left_and_stops_nothing(tmp_path):
    require_root()
    boot = temp_names.owner_of(temp_names.new_temp_name("x")).boot
    temp = tmp_path / f".file.{boot}-1-999999999-1-0123456789ab.kscktmp"
    temp.touch(0o600)
    for folder in [*tmp_path.parents[:3], tmp_path]:
        os.chmod(folder, os.stat(folder).st_mode | 0o555)
    code = """
from pathlib import Path
from keras_safe_ckpt.storage.atomic import sweep_orphans
sweep_orphans(Path(sys.argv[2]))  # Nobody may not be allowed to read Python's own modules.
os.setgid(65534); os.setuid(65534)
assert sweep_orphans(Path(sys.argv[1])) == []
"""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / temp.name).touch()
    run_ok(code, tmp_path, tmp_path / "other")
    assert temp.exists()


@pytest.mark.parametrize("error", ["EINVAL", "EOPNOTSUPP"])
def test_file_system_that_cannot_sync_directories(tmp_path, error):
    code = """
from keras_safe_ckpt.storage.atomic import write_atomically
write_atomically(sys.argv[1], b"data")
"""
    run_ok(code, tmp_path / "file", prefix=strace(f"fsync:error={error}:when=2+"))
    assert (tmp_path / "file").read_bytes() == b"data"


def test_many_make_one_directory_at_once(tmp_path):
    failures: list[CheckpointWriteError] = []
    workers, rounds = 8, 40
    barrier = threading.Barrier(workers)

    def work() -> None:
        for number in range(rounds):
            barrier.wait()
            try:
                make_directory(tmp_path / str(number) / "a" / "b" / "c")
            except CheckpointWriteError as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_nul_in_a_path_is_an_unsafe_path(tmp_path):
    with pytest.raises(UnsafePathError, match="NUL"):
        write_atomically(f"{tmp_path}/a\0b", b"data")


def test_long_name_is_not_cut_within_a_character(tmp_path):
    for name in ("€" * 80, "a" + "€" * 80, "aa" + "€" * 80):
        write_atomically(tmp_path / name, b"data")
        assert (tmp_path / name).read_bytes() == b"data"


def test_owner_is_recognised_whatever_its_process_is_called():
    code = """
from keras_safe_ckpt.storage import temp_names
owner = temp_names.owner_of(temp_names.new_temp_name("x"))
before = owner.is_running()
with open("/proc/self/comm", "w") as file:
    file.write("a) b c")
print(before, owner.is_running())
"""
    assert run_ok(code) == "True True\n"


# ------------------------------------------------------------- store


def publish_steps(store: CheckpointStore, count: int) -> list[Path]:
    return [store.publish(make_snapshot(n), step=n).path for n in range(count)]


def damage(path: Path, seed: int) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(make_snapshot(seed).arrays[ARRAY].tobytes()) + 100] ^= 1
    path.write_bytes(data)


class LosesTheLock:
    """Keeps the newest, and takes the lock file away while it thinks."""

    def __init__(self, store: CheckpointStore) -> None:
        self.lock_file = store.directory / f".{LOCK_NAME}.lock"

    def keep(self, checkpoints):
        self.lock_file.unlink()
        return checkpoints[-1:]


def test_lost_lock_prevents_the_pruning(store):
    paths = publish_steps(store, 3)
    with pytest.raises(LockLostError):
        store.prune(LosesTheLock(store))
    assert all(path.exists() for path in paths)


def test_lost_lock_prevents_the_pruning_after_a_save(store):
    paths = publish_steps(store, 3)
    with pytest.raises(LockLostError):
        store.publish(make_snapshot(3), step=3, retention=LosesTheLock(store))
    assert all(path.exists() for path in paths)


def test_one_whole_checkpoint_that_stays_is_enough(store):
    paths = publish_steps(store, 4)
    damage(paths[2], 2)
    assert CheckpointStore(store.directory).prune(KeepNewest(2)) == paths[:2]


def test_pruning_is_durable(tmp_path):
    log = tmp_path / "trace"
    strace()
    prefix = ("strace", "-f", "-qq", "-y", "-o", str(log), "-e", "trace=fsync,unlink")
    code = """
from keras_safe_ckpt import KeepNewest
store = CheckpointStore(sys.argv[1])
store.prune(KeepNewest(1))
"""
    store = CheckpointStore(tmp_path / "store")
    publish_steps(store, 2)
    run_ok(code, store.directory, prefix=prefix)
    lines = log.read_text().splitlines()
    (deleted,) = [n for n, line in enumerate(lines) if "unlink(" in line and ".weights.h5" in line]
    assert any(f"<{store.directory}>" in line and "fsync(" in line for line in lines[deleted:])


def test_error_of_the_background_comes_before_any_other(store, caplog):
    (store.directory / f"taken{store.format.suffix}").mkdir()
    store.publish(make_snapshot(1), step=1, name=f"taken{store.format.suffix}", background=True)
    wait_until(lambda: "in the background failed" in caplog.text, "the save failed")
    with pytest.raises(UnsafePathError, match="directory"):
        store.publish("not a model", step=2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_any_exception_of_the_background_comes_back(store, error):
    def veto(incumbent, new):
        raise error

    store.publish(make_snapshot(1), step=1, veto=veto, background=True)
    with pytest.raises(error):
        store.wait()


def test_sweeping_is_an_event(store):
    boot = temp_names.owner_of(temp_names.new_temp_name("x")).boot
    name = f".file.{boot}-1-999999999-1-0123456789ab.kscktmp"
    (store.directory / name).touch()
    store.publish(make_snapshot(1), step=1)
    assert [e["files"] for e in store.events.read() if e["event"] == "sweep"] == [[name]]


def test_directory_that_cannot_be_written_is_found_when_the_store_is_opened(small_disk):
    """Also where the locks are not in the directory (Redis), and so do not find it."""

    class Elsewhere(LockManager):
        def check(self, directory):
            pass

    folder = small_disk("size=1m")
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    with pytest.raises(CheckpointWriteError, match="read-only"):
        CheckpointStore(folder, locks=Elsewhere())


def test_hidden_file_is_no_checkpoint(store):
    path = store.publish(make_snapshot(1), step=1).path
    shutil.copy(path, path.with_name(f".{path.name}"))
    assert [checkpoint.path for checkpoint in store.checkpoints()] == [path]


def test_files_pruned_while_they_are_listed(store):
    publish_steps(store, 4)
    suffix = store.format.suffix
    listed = [entry.path for entry in os.scandir(store.directory) if entry.name.endswith(suffix)]
    os.truncate(listed[0], 0)
    fresh = CheckpointStore(store.directory)

    def prune_the_others(path, reason):
        for other in listed[1:]:
            os.unlink(other)

    assert fresh.checkpoints(prune_the_others) == []


def test_file_pruned_before_it_is_verified_is_passed_over(store):
    paths = publish_steps(store, 2)
    damage(paths[1], 1)
    reported = []

    def prune_the_other(path, reason):
        reported.append(path)
        paths[0].unlink(missing_ok=True)

    assert CheckpointStore(store.directory).latest(prune_the_other) is None
    assert reported == [paths[1], paths[0]]


def test_store_that_knows_a_name_sees_that_another_replaced_it(store):
    name = f"best{store.format.suffix}"
    store.publish(make_snapshot(1), step=1, name=name)
    CheckpointStore(store.directory, format=store.format).publish(
        make_snapshot(2), step=2, name=name
    )
    assert [checkpoint.manifest.step for checkpoint in store.checkpoints()] == [2]


# ------------------------------------------------------------- events


def test_line_that_is_no_event_is_left_out(tmp_path):
    log = EventLog(tmp_path)
    log.path.write_bytes(b"3\n[1]\nnull\n")
    log.record("first")
    assert [event["event"] for event in log.read()] == ["first"]


def test_pipe_in_place_of_the_log_stops_nothing(tmp_path):
    code = """
from pathlib import Path
from keras_safe_ckpt.storage.events import EventLog
log = EventLog(Path(sys.argv[1]))
os.mkfifo(log.path)
pipe = os.open(log.path, os.O_RDWR | os.O_NONBLOCK)
try:
    while True:
        os.write(pipe, b"x" * 1000)
except BlockingIOError:
    pass
log.record("first")
log.record("second")
print("went on")
"""
    done = run(code, tmp_path, timeout=30)
    assert done.stdout == "went on\n", done.stderr
    assert done.stderr.count("events are lost") == 1


# ------------------------------------------------------------- models (TensorFlow)


def dense():
    from keras_setup import keras

    model = keras.Sequential([keras.Input((6,))] + [keras.layers.Dense(4) for _ in range(2)])
    model.compile("adam", "mse")
    model.fit(np.ones((8, 6)), np.ones((8, 4)), verbose=0)
    return model


def test_load_goes_on_to_the_older_one_if_the_data_of_the_newest_is_damaged(tmp_path, caplog):
    from test_formats import assert_same, values

    model = dense()
    store = CheckpointStore(tmp_path)
    store.publish(model, step=1)
    expected = values(model)
    model.fit(np.ones((8, 6)), np.ones((8, 4)), verbose=0)
    bad = store.publish(model, step=2).path
    data = bytearray(bad.read_bytes())
    data[data.index(np.array(model.layers[-1].kernel).tobytes()) + 5] ^= 4
    bad.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        _, manifest = store.load(model)
    assert manifest.step == 1
    assert_same(values(model), expected)
    assert bad.name in caplog.text
    assert [e["file"] for e in store.events.read() if e["event"] == "pass_over"] == [bad.name]


def test_load_goes_on_if_the_next_one_is_pruned_meanwhile(tmp_path):
    model = dense()
    store = CheckpointStore(tmp_path)
    paths = [store.publish(model, step=step).path for step in (1, 2, 3)]
    data = bytearray(paths[2].read_bytes())
    data[data.index(np.array(model.layers[-1].kernel).tobytes()) + 5] ^= 4
    paths[2].write_bytes(data)

    class Prunes(logging.Handler):
        """Another process that prunes at the moment at which the newest is passed over."""

        def emit(self, record):
            if paths[2].name in record.getMessage():
                paths[1].unlink()

    logger, handler = logging.getLogger("keras_safe_ckpt"), Prunes()
    logger.addHandler(handler)
    try:
        _, manifest = store.load(model)
    finally:
        logger.removeHandler(handler)
    assert manifest.step == 1


def test_old_values_are_let_go_before_the_new_ones_are_read(tmp_path, monkeypatch):
    """Or a load would hold the model twice."""
    from keras_safe_ckpt.storage.formats.weights_h5 import OpenWeightsH5
    from keras_safe_ckpt.storage.snapshot import Snapshot

    model = dense()
    store = CheckpointStore(tmp_path)
    store.publish(model, step=1)
    gc.collect()
    real, alive = OpenWeightsH5.read_array, []

    def counted(self, name):
        alive.append(sum(isinstance(thing, Snapshot) for thing in gc.get_objects()))
        return real(self, name)

    monkeypatch.setattr(OpenWeightsH5, "read_array", counted)
    store.load(model)
    assert alive
    assert set(alive) == {0}


def test_optimizer_that_writes_what_it_likes_is_asked(tmp_path):
    from keras_setup import keras
    from test_formats import h5_content

    class Own(keras.optimizers.SGD):
        def save_own_variables(self, store):
            super().save_own_variables(store)
            store["note"] = np.arange(3)

    model = dense()
    model.compile(Own(momentum=0.9), "mse")
    model.fit(np.ones((8, 6)), np.ones((8, 4)), verbose=0)
    model.save_weights(tmp_path / "keras.weights.h5")
    ours = CheckpointStore(tmp_path / "ours").publish(model, step=1)
    content = h5_content(ours.path)
    assert "optimizer/vars/note" in content
    assert content == h5_content(tmp_path / "keras.weights.h5")


def test_optimizer_that_fails_half_way_is_undone(tmp_path):
    from keras_setup import keras
    from test_formats import assert_same, values

    from keras_safe_ckpt import IncompatibleCheckpointError

    class Picky(keras.optimizers.SGD):
        refused = None

        def load_own_variables(self, store):
            self.variables[0].assign(store["0"])
            if Picky.refused is not None and int(store["0"]) == Picky.refused:
                raise RuntimeError("not today")
            super().load_own_variables(store)

    model = dense()
    model.compile(Picky(momentum=0.9), "mse")
    model.fit(np.ones((8, 6)), np.ones((8, 4)), verbose=0)
    store = CheckpointStore(tmp_path)
    store.publish(model, step=1)
    Picky.refused = int(model.optimizer.variables[0])
    model.fit(np.ones((8, 6)), np.ones((8, 4)), verbose=0)
    before = values(model)
    with pytest.raises(IncompatibleCheckpointError, match="not today"):
        store.load(model)
    assert_same(values(model), before)


def test_state_of_an_inner_optimizer_is_not_copied():
    import model_zoo

    from keras_safe_ckpt.storage.snapshot import capture

    model = model_zoo.mixed_float16_with_loss_scaling()
    inner = model.optimizer.inner_optimizer
    variables = [*model.optimizer.variables, *inner.variables]
    memory = {np.asarray(v.value.read_value()).ctypes.data for v in variables}
    arrays = capture(model).host_arrays()
    names = [name for name in arrays if name.startswith("optimizer/inner_optimizer/")]
    assert len(names) == len(inner.variables)
    assert {arrays[name].ctypes.data for name in names} <= memory
    assert "save_own_variables" not in vars(inner)


def test_key_that_contains_vars_comes_back(tmp_path):
    from keras_setup import keras

    class Nested(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), name="scale")

        def call(self, inputs):
            return inputs * self.scale

        def save_own_variables(self, store):
            store["deep/vars/scale"] = self.scale

        def load_own_variables(self, store):
            self.scale.assign(store["deep/vars/scale"])

    model = keras.Sequential([keras.Input((6,)), Nested()])
    store = CheckpointStore(tmp_path)
    expected = np.array(model.layers[0].scale)
    store.publish(model, step=1)
    model.layers[0].scale.assign(np.ones(6))
    store.load(model)
    assert np.array_equal(model.layers[0].scale, expected)


def test_loaded_memory_is_aligned_as_tensorflow_wants_it():
    from keras_setup import tf

    from keras_safe_ckpt.storage.tensor_array import empty_tensor_array

    for size in (1, 7, 1000, 1_000_003):
        array = empty_tensor_array((size,), np.dtype("float32"))
        array[:] = 1
        assert array.ctypes.data % 64 == 0
        tensor = tf.convert_to_tensor(array)
        assert np.asarray(tensor).ctypes.data == array.ctypes.data  # Taken over, not copied.


def test_tensor_of_another_dtype_is_cast():
    from keras_setup import tf

    from keras_safe_ckpt.storage.tensor_array import empty_tensor_array

    array = empty_tensor_array((3,), np.dtype("float32"))
    array[:] = 1.5
    assert tf.convert_to_tensor(array, dtype="float16").dtype == tf.float16


class Held:
    def ensure_held(self):
        pass


def test_what_was_published_anew_meanwhile_is_not_pruned(tmp_path):
    """By somebody who does not know our lock."""
    path = tmp_path / "x.weights.h5"
    path.write_bytes(b"former")
    catalog = Catalog(tmp_path)
    catalog.remember(path, object())
    write_atomically(path, b"the new one")
    Pruner(catalog, EventLog(tmp_path))._unlink([path], Held())
    assert path.read_bytes() == b"the new one"
