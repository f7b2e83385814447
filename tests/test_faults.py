"""Real faults of disks and files: the right error, the previous checkpoint whole, no temp left."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import kill, require_root, run, run_ok, start, strace, wait_until
from snapshots import make_snapshot, stored_seed

from keras_safe_ckpt import CheckpointStore, IncompatibleCheckpointError

FORMATS = ["weights_h5", "keras"]

#: Publishes over a good checkpoint, and tells what came of it.
SAVE = """
store = CheckpointStore(sys.argv[1], format=sys.argv[2])
prepare = sys.argv[4] if len(sys.argv) > 4 else ""
exec(prepare)
try:
    store.publish(snapshot(2, int(sys.argv[3])), step=2, name="m." + store.format.suffix[1:])
except Exception as error:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    print(json.dumps({"kinds": kinds, "text": str(error), "errno": getattr(error, "errno", None),
                      "path": getattr(error, "path", None), "step": getattr(error, "step", None)}))
else:
    print(json.dumps(None))
"""


def good_checkpoint(folder: Path, format: str) -> CheckpointStore:
    store = CheckpointStore(folder, format=format)
    store.publish(make_snapshot(1, size=100), step=1, name=f"m{store.format.suffix}")
    return store


def assert_untouched(store: CheckpointStore) -> None:
    assert stored_seed(store) == 1
    assert [name for name in os.listdir(store.directory) if "kscktmp" in name] == []


def assert_write_error(printed: str, store: CheckpointStore, text: str) -> dict:
    error = json.loads(printed)
    assert error is not None, "the save succeeded"
    assert error["kinds"][:1] == ["CheckpointWriteError"]
    assert "SafeCheckpointError" in error["kinds"]
    assert "OSError" in error["kinds"]
    assert text in error["text"]
    assert error["path"].startswith(str(store.directory))
    return error


@pytest.mark.parametrize("format", FORMATS)
def test_disk_full(small_disk, format):
    store = good_checkpoint(small_disk("size=300k"), format)
    out = run_ok(SAVE, store.directory, format, 1_000_000)
    error = assert_write_error(out, store, "disk is full")
    assert "ENOSPC" in error["text"]
    assert error["step"] == 2
    assert_untouched(store)
    run_ok(SAVE, store.directory, format, 10)  # With less to write it goes on.
    assert store.latest().manifest.step == 2


@pytest.mark.parametrize("format", FORMATS)
def test_inodes_gone(small_disk, format):
    folder = small_disk("size=10m,nr_inodes=12")
    store = good_checkpoint(folder, format)
    store.locks.check(folder)
    for number in range(20):
        try:
            (folder / f"filler{number}").touch()
        except OSError:
            break
    assert number < 19
    with pytest.raises(OSError, match="no inodes left"):
        store.publish(make_snapshot(2), step=2, name=f"m{store.format.suffix}")
    assert_untouched(store)


@pytest.mark.parametrize("format", FORMATS)
def test_read_only_file_system(small_disk, format):
    folder = small_disk("size=10m")
    store = good_checkpoint(folder, format)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    with pytest.raises(OSError, match="read-only"):
        store.publish(make_snapshot(2), step=2, name=f"m{store.format.suffix}")
    with pytest.raises(OSError, match=r"read-only|Read-only|Permission") as raised:
        CheckpointStore(folder)
    assert raised.value.path == str(folder)  # Nobody asked for a file in it.
    assert_untouched(store)


@pytest.mark.parametrize("format", FORMATS)
def test_file_size_limit(tmp_path, format):
    store = good_checkpoint(tmp_path, format)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    out = run_ok(SAVE, tmp_path, format, 1_000_000, limit)
    assert_write_error(out, store, "EFBIG")
    assert_untouched(store)


@pytest.mark.parametrize("format", FORMATS)
def test_permission_denied(tmp_path, format):
    require_root()
    store = good_checkpoint(tmp_path / "store", format)
    for folder in [*tmp_path.parents[:3], tmp_path, store.directory]:
        os.chmod(folder, os.stat(folder).st_mode | 0o555)
    # A save and a read elsewhere first: nobody may not be allowed to read Python's own modules.
    become_nobody = """
other = CheckpointStore(sys.argv[1] + "/../other", format=sys.argv[2])
other.verify(other.publish(snapshot(0), step=0).path)
os.setgid(65534); os.setuid(65534)
"""
    out = run_ok(SAVE, store.directory, format, 100, become_nobody)
    assert_write_error(out, store, "EACCES")
    assert_untouched(store)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("injection", "text"),
    [
        ("fsync:error=EIO:when=1", "input/output error"),
        ("rename:error=EXDEV:when=1", "different file systems"),
        ("rename:error=EIO:when=1", "EIO"),
        ("fsync:error=ENOSPC:when=1", "disk is full"),
        ("fsync:error=EDQUOT:when=1", "quota"),
    ],
)
def test_injected_errors(tmp_path, format, injection, text):
    store = good_checkpoint(tmp_path, format)
    out = run_ok(SAVE, tmp_path, format, 100, prefix=strace(injection))
    assert_write_error(out, store, text)
    assert_untouched(store)


@pytest.mark.parametrize("format", FORMATS)
def test_failed_fsync_is_not_tried_again(tmp_path, format):
    """Once an fsync failed the kernel may call lost pages clean: a second one proves nothing."""
    store = good_checkpoint(tmp_path, format)
    log = tmp_path.parent / f"{tmp_path.name}.trace"
    command = list(strace("fsync:error=EIO:when=1"))
    command[command.index("-o") + 1] = str(log)
    out = run_ok(SAVE, tmp_path, format, 100, prefix=tuple(command))
    assert_write_error(out, store, "EIO")
    assert log.read_text().count("fsync(") == 1


@pytest.mark.parametrize("format", FORMATS)
def test_failed_sync_of_the_directory_says_that_the_new_file_is_in_place(tmp_path, format):
    good_checkpoint(tmp_path, format)
    out = run_ok(SAVE, tmp_path, format, 100, prefix=strace("fsync:error=EIO:when=2"))
    assert "The new file is in place" in json.loads(out)["text"]


@pytest.mark.parametrize("call", ["write", "pwrite64", "fsync", "rename", "flock", "unlink"])
@pytest.mark.parametrize("format", FORMATS)
def test_killed_at_a_system_call_leaves_old_or_new(tmp_path, format, call):
    """The first such call of the child kills it."""
    store = good_checkpoint(tmp_path, format)
    done = run(SAVE, tmp_path, format, 1000, prefix=strace(f"{call}:signal=KILL:when=1"))
    assert done.returncode != 0
    assert done.stdout == ""
    assert CheckpointStore(tmp_path).latest().manifest.step in (1, 2)
    out = run_ok(SAVE, tmp_path, format, 1000)
    assert json.loads(out) is None
    assert store.latest().manifest.step == 2
    assert [name for name in os.listdir(tmp_path) if "kscktmp" in name] == []


@pytest.mark.parametrize("format", FORMATS)
def test_killed_at_random_moments_leaves_a_whole_file_each_time(tmp_path, format):
    store = good_checkpoint(tmp_path, format)
    code = """
store = CheckpointStore(sys.argv[1], format=sys.argv[2])
print("ready", flush=True)
for step in range(100_000):
    store.publish(snapshot(step % 50, 200_000), step=step, name="m." + store.format.suffix[1:])
    print(step, flush=True)
"""
    for round_number in range(6):
        process = start(code, tmp_path, format)
        assert process.stdout.readline() == "ready\n"
        done = process.stdout.readline()
        wait_until(
            lambda: any("kscktmp" in name for name in os.listdir(tmp_path)), "a save is under way"
        )
        for _ in range(round_number * 200):
            os.stat(tmp_path)  # Some more moments, of no fixed length.
        kill(process)
        latest = CheckpointStore(tmp_path, format=format).latest()
        assert latest is not None
        assert latest.manifest.step >= int(done)
    store.publish(make_snapshot(1), step=1, name=f"m{store.format.suffix}")
    assert_untouched(store)


def test_manifest_of_a_newer_version_is_named(tmp_path):
    store = good_checkpoint(tmp_path, "weights_h5")
    path = store.checkpoints()[0].path
    data = path.read_bytes()
    assert data.count(b'"format_version":1') == 1
    path.write_bytes(data.replace(b'"format_version":1', b'"format_version":9'))
    with pytest.raises(IncompatibleCheckpointError, match="reads up to 1, the file has 9; upgrade"):
        store.verify(path)
    reasons: list[str] = []
    assert store.latest(lambda path, reason: reasons.append(reason)) is None
    assert "format version" in reasons[0]


def flips(size: int, step: int) -> list[tuple[int, int]]:
    return [(offset, 1 << (offset % 8)) for offset in range(0, size, step)]


def bits_around_the_members(
    archive_bytes: bytes, bits: range = range(8)
) -> Iterator[tuple[int, int]]:
    """In each byte of a zip archive that is not data of a member: headers and directory."""
    import io
    import zipfile

    data: set[int] = set()
    with zipfile.ZipFile(io.BytesIO(archive_bytes)) as archive:
        for info in archive.infolist():
            header = archive_bytes[info.header_offset : info.header_offset + 30]
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(
                header[28:30], "little"
            )
            start = info.header_offset + 30 + lengths
            data.update(range(start, start + info.file_size))
    for offset in range(len(archive_bytes)):
        if offset not in data:
            yield from ((offset, 1 << bit) for bit in bits)


def check_flips(
    tmp_path: Path, format: str, choose: Callable[[bytes], Iterator[tuple[int, int]]]
) -> tuple[int, int]:
    """Flip bits of a file: each one is found, or changes nothing that is loaded."""
    import io
    import zipfile

    import h5py
    import numpy as np

    store = CheckpointStore(tmp_path, format=format)
    snapshot = make_snapshot(3, size=40)
    path = store.publish(snapshot, step=1).path
    good = path.read_bytes()
    found = harmless = 0
    for offset, bit in choose(good):
        data = bytearray(good)
        data[offset] ^= bit
        path.write_bytes(data)
        try:
            CheckpointStore(tmp_path).verify(path)
        except (ValueError, OSError):
            found += 1
            continue
        # Not found: then plain h5py and zipfile must read exactly what was written.
        if format == "keras":
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None, offset
                assert archive.read("config.json") == snapshot.config.encode()
                source = io.BytesIO(archive.read("model.weights.h5"))
        else:
            source = io.BytesIO(path.read_bytes())
        with h5py.File(source, "r") as file:
            for name, array in snapshot.arrays.items():
                assert np.array_equal(file[name][()], array), (offset, name)
            assert file["layers/dense/vars"].attrs["name"] == "dense", offset
        harmless += 1
    return found, harmless


@pytest.mark.parametrize("format", FORMATS)
def test_flipped_bits_are_found_or_harmless(tmp_path, format):
    found, harmless = check_flips(tmp_path, format, lambda data: flips(len(data), 23))
    assert found > 10 * harmless


def test_a_bit_of_each_byte_of_the_headers_of_an_archive_is_found_or_harmless(tmp_path):
    found, harmless = check_flips(
        tmp_path, "keras", lambda data: bits_around_the_members(data, range(5, 6))
    )
    assert found > harmless > 0  # Dates and the like are nobody's business.


@pytest.mark.campaign
def test_every_bit_of_the_headers_of_an_archive_is_found_or_harmless(tmp_path, record_property):
    found, harmless = check_flips(tmp_path, "keras", bits_around_the_members)
    record_property("campaign", f"headers of an archive: {found} flips found, {harmless} harmless")
    assert found > harmless > 0


@pytest.mark.campaign
@pytest.mark.parametrize("format", FORMATS)
def test_every_byte_flipped(tmp_path, format, record_property):
    found, harmless = check_flips(tmp_path, format, lambda data: flips(len(data), 1))
    record_property("campaign", f"{format}: {found} flips found, {harmless} harmless")
    assert found > 10 * harmless


@pytest.mark.parametrize("format", FORMATS)
def test_every_truncation_is_found(tmp_path, format):
    store = CheckpointStore(tmp_path, format=format)
    path = store.publish(make_snapshot(3, size=40), step=1).path
    good = path.read_bytes()
    for size in range(0, len(good), 37):
        path.write_bytes(good[:size])
        with pytest.raises(ValueError, match="cannot be used"):
            CheckpointStore(tmp_path).verify(path)
