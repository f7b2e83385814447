"""TFRecord files: shards that are there when they are whole, and one file that many append to."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from killing import killed_at_each
from processes import children_of, ending, press_ctrl_c, run, run_ok, start, strace, wait_until
from record_files import cut, flip, plain_bytes, records_of, write_plain
from redis_server import own_redis, shared_redis

from keras_safe_ckpt import (
    LockedTFRecordWriter,
    LockManager,
    RedisLocks,
    TFRecordShardWriter,
    verify_tfrecord,
)
from keras_safe_ckpt.datasets import appending, record_format, tfrecord
from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    CorruptRecordError,
    LockLostError,
    LockTimeoutError,
    UnsafePathError,
)

__all__ = ["own_redis", "shared_redis"]  # Fixtures.

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")

RECORDS = [b"", b"a", b"\0" * 100, bytes(range(256)) * 50, b"last"]


def temporary(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".kscktmp")]


def append(path: Path, *records: bytes, compression_type: str = "") -> None:
    with LockedTFRecordWriter(path, compression_type=compression_type) as writer:
        for record in records:
            writer.write(record)


# Shards.


@pytest.mark.parametrize("compression_type", ["", None, "GZIP", "ZLIB"])
def test_a_shard_holds_what_was_written(tmp_path, compression_type):
    with TFRecordShardWriter(
        tmp_path / "new/train", 3, 8, compression_type=compression_type
    ) as writer:
        for record in RECORDS:
            writer.write(record)
        assert writer.path == tmp_path / "new/train-00003-of-00008.tfrecord"
        assert not writer.path.exists(), "seen before it is whole"
        assert writer.records == 5
    assert records_of(writer.path) == RECORDS
    report = verify_tfrecord(writer.path)
    assert (report.records, report.is_counted) == (5, True)
    assert report.compression_type == (compression_type or "")
    assert not temporary(writer.path.parent)


def test_records_may_be_messages_and_buffers(tmp_path):
    class Example:
        def SerializeToString(self) -> bytes:  # noqa: N802
            return b"message"

    with TFRecordShardWriter(tmp_path / "t", 0, 1) as writer:
        writer.write(bytearray(b"one"))
        writer.write(memoryview(b"two"))
        writer.write(Example())
    assert records_of(writer.path) == [b"one", b"two", b"message"]


def test_the_level_of_compression_counts(tmp_path):
    sizes = []
    for level in (0, 9):
        with TFRecordShardWriter(
            tmp_path / str(level), 0, 1, compression_type="GZIP", compression_level=level
        ) as writer:
            writer.write(b"again" * 10_000)
        sizes.append(writer.path.stat().st_size)
    assert sizes[1] < 0.1 * sizes[0]


def test_an_empty_shard_is_a_shard(tmp_path):
    for kind in ("", "GZIP"):
        with TFRecordShardWriter(tmp_path / f"t{kind}", 0, 1, compression_type=kind) as writer:
            pass
        assert records_of(writer.path) == []
        assert verify_tfrecord(writer.path).records == 0


def write_and_fail(prefix: Path) -> None:
    with TFRecordShardWriter(prefix, 0, 1) as writer:
        writer.write(b"new" * 1_000_000)
        raise RuntimeError("in the middle")


def test_the_old_shard_stays_if_the_block_fails(tmp_path):
    with TFRecordShardWriter(tmp_path / "t", 0, 1) as writer:
        writer.write(b"old")
    with pytest.raises(RuntimeError, match="in the middle"):
        write_and_fail(tmp_path / "t")
    assert records_of(writer.path) == [b"old"]
    assert verify_tfrecord(writer.path).is_counted
    assert not temporary(tmp_path)


def test_a_shard_that_is_written_again_has_its_new_count(tmp_path):
    for count in (3, 1, 2):
        with TFRecordShardWriter(tmp_path / "t", 0, 1) as writer:
            for _ in range(count):
                writer.write(b"x")
        assert verify_tfrecord(writer.path).records == count


def test_a_closed_writer_says_so(tmp_path):
    writer = TFRecordShardWriter(tmp_path / "t", 0, 1)
    writer.write(b"x")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write(b"y")
    assert records_of(writer.path) == [b"x"]


def test_threads_share_a_writer(tmp_path):
    with TFRecordShardWriter(tmp_path / "t", 0, 1) as writer:

        def work(number: int) -> None:
            for index in range(500):
                writer.write(b"%d-%d" % (number, index))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = records_of(writer.path)
    for number in range(4):
        mine = [record for record in found if record.startswith(b"%d-" % number)]
        assert mine == [b"%d-%d" % (number, index) for index in range(500)]


@pytest.mark.parametrize("kind", ["TFRecordShardWriter('t', 0, 1)", "LockedTFRecordWriter('t')"])
def test_a_forked_child_has_no_part_in_it(tmp_path, kind):
    code = f"""
os.chdir(sys.argv[1])
from keras_safe_ckpt import TFRecordShardWriter, LockedTFRecordWriter
writer = {kind}
writer.write(b"parent")
if os.fork() == 0:
    try:
        writer.write(b"child")
    except RuntimeError as error:
        print("refused:", error)
    with writer:
        os._exit(0)  # As if the block of the child ended without its end.
os.wait()
if os.fork() == 0:
    writer.__exit__(ValueError, ValueError(), None)
    os._exit(0)
os.wait()
writer.close()
print(writer.path)
"""
    *said, path = run_ok(code, tmp_path).splitlines()
    assert "belongs to process" in said[0]
    assert records_of(Path(path)) == [b"parent"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("t", 8, 8), "shard: expected a whole number from 0 to 7. Received: 8"),
        (("t", -1, 8), "shard: expected a whole number from 0 to 7. Received: -1"),
        (("t", 0.0, 8), "shard: expected a whole number from 0 to 7. Received: 0.0"),
        (("t", True, 8), "shard: expected a whole number from 0 to 7. Received: True"),
        (("t", 0, 0), "num_shards: expected a whole number from 1 to 99,999. Received: 0"),
        (("t", 0, 100_000), "num_shards: .* Received: 100000"),
        (("t", 0, "8"), "num_shards: .* Received: '8'"),
        (("folder/", 0, 1), "prefix: expected a path with the beginning of a name"),
        (("", 0, 1), "prefix: expected a path with the beginning of a name"),
    ],
)
def test_shards_that_cannot_be_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        TFRecordShardWriter(*arguments)
    assert not os.listdir("."), "something was left behind"


@pytest.mark.parametrize("make", [lambda **o: TFRecordShardWriter("t", 0, 1, **o),
                                  lambda **o: LockedTFRecordWriter("t", **o)])  # fmt: skip
def test_arguments_that_cannot_be_are_named(make):
    with pytest.raises(ValueError, match=r"compression_type: expected one of .* Received: 'gzip'"):
        make(compression_type="gzip")
    with pytest.raises(ValueError, match=r"compression_level: .* from -1 to 9. Received: 10"):
        make(compression_level=10)
    with make() as writer:
        for record in ("text", 7, None, [b"a"]):
            with pytest.raises(TypeError, match="record: expected bytes, or a message"):
                writer.write(record)
        writer.write(b"x")
    assert records_of(writer.path) == [b"x"]


def test_places_that_cannot_be_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "t-00000-of-00001.tfrecord").symlink_to("elsewhere")
    for path, make in (
        ("folder", lambda: LockedTFRecordWriter("folder")),
        ("link", lambda: LockedTFRecordWriter("link")),
        ("t-", lambda: TFRecordShardWriter("t", 0, 1)),
    ):
        with pytest.raises(UnsafePathError, match=path):
            make()
    assert not (tmp_path / "elsewhere").exists()


def test_several_streams_of_zlib_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Received: 'ZLIB', of which TensorFlow reads only"):
        LockedTFRecordWriter("t", compression_type="ZLIB")


SHARD = """
from keras_safe_ckpt import TFRecordShardWriter
with TFRecordShardWriter(sys.argv[1] + "/t", 0, 1) as writer:
    for index in range(40):
        writer.write(b"%04d" % index * 20_000)
"""
NEW = [b"%04d" % index * 20_000 for index in range(40)]


def old_shard(folder: Path) -> None:
    with TFRecordShardWriter(folder / "t", 0, 1) as writer:
        writer.write(b"old")


def check_shard(folder: Path) -> None:
    """Old or new, with its count; the next one can be written and leaves nothing behind."""
    path = folder / "t-00000-of-00001.tfrecord"
    assert records_of(path) in ([b"old"], NEW)
    verify_tfrecord(path)
    old_shard(folder)
    assert verify_tfrecord(path).is_counted
    assert not temporary(folder)


def test_a_shard_killed_at_some_system_calls(tmp_path):
    calls = [("rename", 1), ("rename", 2), ("rename", 3), ("fsync", 1), ("fsync", 3)]
    assert killed_at_each(SHARD, calls, tmp_path, check_shard, old_shard).tried == len(calls)


@pytest.mark.campaign
def test_a_shard_killed_at_every_system_call(tmp_path, record_property):
    kills = killed_at_each(SHARD, None, tmp_path, check_shard, old_shard)
    record_property("campaign", f"shard: {kills}, old or new each time")


@pytest.mark.parametrize(
    ("injection", "text"),
    [
        ("pwrite64:error=ENOSPC", "ENOSPC"),
        ("fsync:error=EIO:when=1", "EIO"),
        ("rename:error=EIO:when=2", "EIO"),
    ],
)
def test_errors_of_the_disk_leave_the_old_shard(tmp_path, injection, text):
    old_shard(tmp_path)
    done = run(SHARD, tmp_path, prefix=strace(injection))
    assert "CheckpointWriteError" in done.stderr
    assert text in done.stderr
    check_shard(tmp_path)


def test_a_full_disk_leaves_the_old_shard(small_disk):
    folder = small_disk("size=500k")
    old_shard(folder)

    def fill() -> None:
        with TFRecordShardWriter(folder / "t", 0, 1) as writer:
            for record in NEW:
                writer.write(record)

    with pytest.raises(CheckpointWriteError, match="full"):
        fill()
    assert records_of(folder / "t-00000-of-00001.tfrecord") == [b"old"]
    assert not temporary(folder)


# One file that many append to.


@pytest.mark.parametrize("compression_type", ["", "GZIP"])
def test_what_is_appended_in_turn_is_there(tmp_path, compression_type):
    path = tmp_path / "new/all.tfrecord"
    for number in range(3):
        append(path, b"%d" % number, b"again", compression_type=compression_type)
    assert records_of(path) == [b"0", b"again", b"1", b"again", b"2", b"again"]
    report = verify_tfrecord(path)
    assert (report.records, report.is_counted) == (6, True)


def test_records_wait_for_flush_or_a_megabyte(tmp_path):
    path = tmp_path / "all.tfrecord"
    writer = LockedTFRecordWriter(path)
    writer.write(b"small")
    assert not path.exists()
    writer.flush()
    assert records_of(path) == [b"small"]
    writer.write(bytes(600_000))
    assert len(records_of(path)) == 1
    writer.write(bytes(600_000))
    assert len(records_of(path)) == 3
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write(b"y")


def test_what_was_written_before_an_error_is_appended(tmp_path):
    path = tmp_path / "all.tfrecord"

    def fail() -> None:
        with LockedTFRecordWriter(path) as writer:
            writer.write(b"before")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert records_of(path) == [b"before"]


def test_nothing_to_append_makes_no_file(tmp_path):
    append(tmp_path / "all.tfrecord")
    assert not (tmp_path / "all.tfrecord").exists()


@pytest.mark.parametrize("compression_type", ["", "GZIP"])
def test_a_file_that_others_made_is_gone_on_with(tmp_path, compression_type):
    path = write_plain(tmp_path / "all.tfrecord", [b"theirs", b"too"])
    if compression_type:
        import gzip

        path.write_bytes(gzip.compress(path.read_bytes()))
    append(path, b"ours", compression_type=compression_type)
    assert records_of(path) == [b"theirs", b"too", b"ours"]
    assert verify_tfrecord(path).records == 3


def test_what_others_appended_is_counted(tmp_path):
    path = tmp_path / "all.tfrecord"
    append(path, b"ours")
    with open(path, "ab") as file:
        file.write(plain_bytes([b"theirs"]))
    append(path, b"ours again")
    assert records_of(path) == [b"ours", b"theirs", b"ours again"]
    assert verify_tfrecord(path).records == 3


def test_nothing_is_appended_to_what_is_damaged(tmp_path):
    path = write_plain(tmp_path / "theirs.tfrecord", [b"one", b"two"])
    flip(path, 13)
    before = path.read_bytes()
    writer = LockedTFRecordWriter(path)
    writer.write(b"x")
    with pytest.raises(CorruptRecordError, match=r"record 0 .*offset 0"):
        writer.flush()
    assert path.read_bytes() == before
    path.unlink()
    writer.close()
    assert records_of(path) == [b"x"], "what could not be appended was lost"


def test_nothing_is_appended_to_what_was_cut_off(tmp_path):
    path = tmp_path / "all.tfrecord"
    append(path, b"one")
    size = path.stat().st_size
    append(path, b"two")
    cut(path, size)
    with pytest.raises(CorruptCheckpointError, match="were written; see verify_tfrecord"):
        append(path, b"three")
    assert records_of(path) == [b"one"]


@pytest.mark.parametrize(("first", "second"), [("", "GZIP"), ("GZIP", "")])
def test_one_file_has_one_compression(tmp_path, first, second):
    path = tmp_path / "all.tfrecord"
    append(path, b"one", compression_type=first)
    with pytest.raises(CorruptCheckpointError, match="expected compression_type="):
        append(path, b"two", compression_type=second)
    assert records_of(path) == [b"one"]


def test_it_waits_its_turn_and_keeps_what_it_could_not_append(tmp_path):
    path = tmp_path / "all.tfrecord"
    writer = LockedTFRecordWriter(path, locks=LockManager(timeout=0.1))
    writer.write(b"first")
    with LockManager().shared(path), pytest.raises(LockTimeoutError):
        writer.flush()
    writer.write(b"second")
    writer.flush()
    assert records_of(path) == [b"first", b"second"]


def test_a_name_that_leaves_no_room_for_its_count_is_refused_at_once(tmp_path):
    with LockedTFRecordWriter(tmp_path / ("x" * 237 + ".tfrecord")) as writer:
        writer.write(b"fits")
    assert records_of(writer.path) == [b"fits"]
    with pytest.raises(UnsafePathError, match="has 247 bytes, and more than 246 leave no room"):
        LockedTFRecordWriter(tmp_path / "other" / ("x" * 238 + ".tfrecord"))
    with pytest.raises(UnsafePathError, match="has 247 bytes"):
        TFRecordShardWriter(tmp_path / "other" / ("x" * 223), 0, 1)
    assert not (tmp_path / "other").exists()


def test_any_lock_backend_will_do(tmp_path, shared_redis):
    path = tmp_path / "all.tfrecord"
    locks = RedisLocks(shared_redis.url)
    with LockedTFRecordWriter(path, locks=locks) as writer:
        writer.write(b"one")
    with TFRecordShardWriter(tmp_path / "t", 0, 1, locks=locks) as writer:
        writer.write(b"two")
    assert verify_tfrecord(path, locks=locks).records == 1
    with locks.exclusive(path):
        other = RedisLocks(shared_redis.url, timeout=0.1)
        writer = LockedTFRecordWriter(path, locks=other)
        writer.write(b"late")
        with pytest.raises(LockTimeoutError):
            writer.flush()
    writer.close()
    assert records_of(path) == [b"one", b"late"]


APPEND = """
from keras_safe_ckpt import LockedTFRecordWriter
with LockedTFRecordWriter(sys.argv[1] + "/all.tfrecord") as writer:
    for group in range(3):
        for index in range(10):
            writer.write(b"new-%d-%d" % (group, index))
        writer.flush()
        print("flushed", group, flush=True)
"""


def old_file(folder: Path) -> None:
    append(folder / "all.tfrecord", b"old")


def check_appended(folder: Path) -> None:
    """Whole groups; the next one cuts off what is left half-way, and can append."""
    path = folder / "all.tfrecord"
    append(path, b"after")
    found = records_of(path)
    groups = (len(found) - 2) // 10
    new = [b"new-%d-%d" % (group, index) for group in range(groups) for index in range(10)]
    assert found == [b"old", *new, b"after"]
    report = verify_tfrecord(path)
    assert (report.records, report.is_counted) == (len(found), True)
    assert not temporary(folder)


def test_an_append_killed_at_some_system_calls(tmp_path):
    calls = [("pwrite64", 1), ("pwrite64", 2), ("rename", 1), ("rename", 4), ("fsync", 3)]
    assert killed_at_each(APPEND, calls, tmp_path, check_appended, old_file).tried == len(calls)


@pytest.mark.campaign
def test_an_append_killed_at_every_system_call(tmp_path, record_property):
    kills = killed_at_each(APPEND, None, tmp_path, check_appended, old_file)
    record_property("campaign", f"locked append: {kills}, groups whole")


def test_an_append_that_was_torn_is_undone(tmp_path):
    """As a kill within the write, or a power cut before its sync, would leave it."""
    path = tmp_path / "all.tfrecord"
    old_file(tmp_path)
    run(APPEND, tmp_path, prefix=strace("fsync:signal=KILL:when=3"))
    whole = path.read_bytes()
    note = (tmp_path / ".all.tfrecord.records").read_bytes()
    assert note.count(b"size") == 2, "not in the middle of an append"
    for torn in (whole[:-1], whole[:-100] + bytes(100), whole[: len(whole) // 2]):
        path.write_bytes(torn)
        (tmp_path / ".all.tfrecord.records").write_bytes(note)
        check_appended(tmp_path)


RETRY = """
from keras_safe_ckpt import LockedTFRecordWriter
from keras_safe_ckpt.errors import CheckpointWriteError
with LockedTFRecordWriter(sys.argv[1] + "/all.tfrecord") as writer:
    for group in range(3):
        for index in range(10):
            writer.write(b"new-%d-%d" % (group, index))
        try:
            writer.flush()
        except (CheckpointWriteError, KeyboardInterrupt) as error:
            print(type(error).__name__)
"""


@pytest.mark.parametrize(
    "fault",
    [
        *[f"pwrite64:error=ENOSPC:when={when}" for when in (2, 3, 4)],
        *[f"fsync:error=EIO:when={when}" for when in (1, 3, 4, 5)],
        *[f"rename:error=EIO:when={when}" for when in (1, 2)],
        *[f"{call}:signal=INT:when={when}" for call in ("pwrite64", "fsync") for when in (3, 4)],
    ],
)
def test_what_is_tried_again_after_an_error_is_there_once(tmp_path, fault):
    old_file(tmp_path)
    done = run(RETRY, tmp_path, prefix=strace(fault))
    assert done.returncode == 0, done.stderr
    check_appended(tmp_path)
    assert len(records_of(tmp_path / "all.tfrecord")) == 32


def test_an_error_of_the_disk_is_said(tmp_path):
    old_file(tmp_path)
    done = run(APPEND, tmp_path, prefix=strace("pwrite64:error=ENOSPC:when=5+"))
    assert "CheckpointWriteError" in done.stderr
    assert "disk is full" in done.stderr
    assert done.stdout == "flushed 0\n"
    check_appended(tmp_path)


def test_a_full_disk_keeps_the_records_until_there_is_room(small_disk):
    folder = small_disk("size=1m")
    path = folder / "all.tfrecord"
    append(path, b"old")
    filler = folder / "filler"
    filler.write_bytes(bytes(600_000))
    writer = LockedTFRecordWriter(path)
    writer.write(b"large" * 100_000)
    with pytest.raises(CheckpointWriteError, match="full"):
        writer.flush()
    filler.unlink()
    writer.close()
    assert records_of(path) == [b"old", b"large" * 100_000]
    assert verify_tfrecord(path).is_counted


MANY = """
from keras_safe_ckpt import LockedTFRecordWriter
folder, me, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with LockedTFRecordWriter(folder + "/all.tfrecord") as writer:
    print("ready", flush=True)
    for group in range(count):
        for index in range(5):
            writer.write(b"%d %d %d " % (me, group, index) + b"x" * (me * 1000))
        writer.flush()
        print(group, flush=True)
"""
READING = """
import os
from keras_safe_ckpt import verify_tfrecord, LockedTFRecordWriter
from keras_safe_ckpt.errors import CheckpointNotFoundError
folder = sys.argv[1]
reads = last = 0
print("ready", flush=True)
while not os.path.exists(folder + "/over"):
    try:
        report = verify_tfrecord(folder + "/all.tfrecord")
    except CheckpointNotFoundError:
        continue
    assert report.is_counted and report.records >= last and report.records % 5 == 0, report
    last = report.records
    reads += 1
print(reads)
"""


def check_groups(path: Path, flushed: dict[int, int], *, killed: set[int]) -> int:
    """Each group whole and once, in the order of its writer, none that was flushed missing."""
    groups: dict[int, list[int]] = {}
    records = [tuple(map(int, record.split()[:3])) for record in records_of(path)]
    assert len(records) % 5 == 0
    for start_ in range(0, len(records), 5):
        group = records[start_ : start_ + 5]
        me, number, _ = group[0]
        assert group == [(me, number, index) for index in range(5)]
        groups.setdefault(me, []).append(number)
    for me, count in flushed.items():
        mine = groups.get(me, [])
        assert mine == list(range(len(mine)))
        # One more may be there, of which the writer was killed before it could say so.
        assert len(mine) in ((count, count + 1) if me in killed else (count,))
    return len(records)


def check_appending(folder: Path, count: int, kills: int, seed: int) -> tuple[int, int]:
    """Eight writers, four readers; some writers are killed."""
    rng = random.Random(seed)
    readers = [start(READING, folder) for _ in range(4)]
    writers = {me: start(MANY, folder, me, count) for me in range(8)}
    with ending(*readers, *writers.values()):
        return _appended_by_many(folder, readers, writers, rng, kills, count)


def _appended_by_many(folder, readers, writers, rng, kills, count) -> tuple[int, int]:
    for process in (*readers, *writers.values()):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    victims = set(rng.sample(sorted(writers), kills))
    flushed = dict.fromkeys(writers, 0)
    for me in victims:
        # Killed while it appends: after a group that it has said, at some time in the next one.
        for _ in range(rng.randrange(1, count // 2)):
            flushed[me] += bool(writers[me].stdout.readline())
        os.kill(writers[me].pid, signal.SIGKILL)
    for me, process in writers.items():
        # Not by `communicate`, which knows nothing of lines that were read ahead.
        flushed[me] += len(process.stdout.read().split())
        code = process.wait(60)
        # A victim may have been faster than its end.
        assert code == 0 or (me in victims and code == -signal.SIGKILL), process.stderr.read()
    (folder / "over").touch()
    reads = 0
    for process in readers:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        reads += int(out)
    append(folder / "all.tfrecord", *[b"99 0 %d" % index for index in range(5)])
    records = check_groups(folder / "all.tfrecord", flushed, killed=victims)
    assert verify_tfrecord(folder / "all.tfrecord").records == records
    assert not temporary(folder)
    return records, reads


@pytest.mark.long
def test_eight_writers_and_four_readers(tmp_path):
    records, reads = check_appending(tmp_path, 20, 0, 0)
    assert records == 8 * 20 * 5 + 5
    assert reads > 0


def test_eight_writers_of_which_three_are_killed(tmp_path):
    check_appending(tmp_path, 20, 3, 1)


@pytest.mark.campaign
def test_writers_killed_at_random(tmp_path, record_property):
    total = reads = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found = check_appending(folder, 40, 4, seed)
        total, reads = total + found[0], reads + found[1]
    record_property(
        "campaign",
        f"locked append: 20 runs of 8 writers (4 killed) and 4 readers, {total:,} records whole "
        f"and in order, {reads:,} sound reads",
    )


@pytest.mark.long
def test_eight_writers_of_one_shard_and_four_readers(tmp_path):
    """Whoever is last wins, and nobody ever sees a mixture."""
    code = """
from keras_safe_ckpt import TFRecordShardWriter
folder, me = sys.argv[1], int(sys.argv[2])
for turn in range(15):
    with TFRecordShardWriter(folder + "/t", 0, 1) as writer:
        for index in range(50):
            writer.write(b"%d %d" % (me, turn) * 100)
"""
    reading = """
from keras_safe_ckpt import verify_tfrecord
folder, reads = sys.argv[1], 0
while not os.path.exists(folder + "/over"):
    report = verify_tfrecord(folder + "/t-00000-of-00001.tfrecord")
    assert report.is_counted and report.records == 50, report
    reads += 1
print(reads)
"""
    with TFRecordShardWriter(tmp_path / "t", 0, 1) as writer:
        for _ in range(50):
            writer.write(b"first")
    readers = [start(reading, tmp_path) for _ in range(4)]
    writers = [start(code, tmp_path, me) for me in range(8)]
    with ending(*readers, *writers):
        for process in writers:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
        (tmp_path / "over").touch()
        for process in readers:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert int(out) > 0
    found = records_of(writer.path)
    assert len(found) == 50
    assert len(set(found)) == 1
    assert not temporary(tmp_path)


def test_ctrl_c_in_a_flush_loses_nothing(tmp_path):
    code = """
from keras_safe_ckpt import LockedTFRecordWriter
try:
    with LockedTFRecordWriter(sys.argv[1] + "/all.tfrecord") as writer:
        number = 0
        print("ready", flush=True)
        while True:
            writer.write(b"%d" % number)
            number += 1
            if number % 10 == 0:
                writer.flush()
except KeyboardInterrupt:
    print(number)
"""
    for turn in range(3):
        folder = tmp_path / str(turn)
        folder.mkdir()
        process = start(code, folder)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with ending(process):
            press_ctrl_c(process)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        path = folder / "all.tfrecord"
        found = records_of(path) if path.exists() else []
        assert found == [b"%d" % number for number in range(len(found))]
        assert len(found) - int(out) in (0, 1)


def test_ctrl_c_in_a_write_keeps_count_and_records_together(tmp_path):
    """At many moments of `write`, `flush` and `close`: what is there is counted, and once."""
    code = """
import random
from keras_safe_ckpt import LockedTFRecordWriter, TFRecordShardWriter, verify_tfrecord
signal.signal(signal.SIGALRM, signal.default_int_handler)
random.seed(int(sys.argv[2]))
caught = 0
for turn in range(60):
    path = f"{sys.argv[1]}/{turn}.tfrecord"
    number = 0
    try:
        with LockedTFRecordWriter(path) as writer:
            # Python itself may swallow one (in a weak reference's callback): press it again.
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.01), 20)
            while True:
                writer.write(b"%d" % number)
                number += 1
                if number % 50 == 0:
                    writer.flush()
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        caught += 1
    if os.path.exists(path):
        found = verify_tfrecord(path).records
        assert found - number in (0, 1), (found, number)
print(caught)
"""
    assert int(run_ok(code, tmp_path, 1)) == 60
    for path in tmp_path.glob("*.tfrecord"):
        found = records_of(path)
        assert found == [b"%d" % number for number in range(len(found))]


def test_a_shard_whose_write_was_interrupted_is_not_published(tmp_path, monkeypatch):
    """Even if somebody catches the error and goes on."""
    old_shard(tmp_path)
    writer = TFRecordShardWriter(tmp_path / "t", 0, 1)
    writer.write(b"one")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tfrecord.Encoder, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.write(b"two")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is closed"):
        writer.write(b"three")
    with pytest.raises(CheckpointWriteError, match="an earlier write did not come to its end"):
        writer.close()
    assert records_of(tmp_path / "t-00000-of-00001.tfrecord") == [b"old"]
    assert not temporary(tmp_path)


@pytest.mark.parametrize("when", [1, 2, 3])
def test_a_paused_writer_that_lost_its_lock_writes_nothing(tmp_path, own_redis, when):
    """Stopped in an fsync of its note or of its data, while somebody else appends."""
    code = """
from keras_safe_ckpt import LockedTFRecordWriter, RedisLocks
from keras_safe_ckpt.errors import LockLostError, StaleHolderError
locks = RedisLocks(sys.argv[2], unavailable_timeout=1.5)
writer = LockedTFRecordWriter(sys.argv[1], locks=locks)
for index in range(3):
    writer.write(sys.argv[3].encode() + b"%d" % index)
print("ready", flush=True)
try:
    writer.flush()
    print("flushed")
except (LockLostError, StaleHolderError) as error:
    print(type(error).__name__)
os._exit(0)
"""
    path, server = tmp_path / "all.tfrecord", own_redis()
    stopped = strace(f"fsync:signal=STOP:when={when}")
    first = start(code, path, server.url, "AAAA", prefix=stopped)
    with ending(first):
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"

        def is_stopped() -> bool:
            return [state in "tT" for state in children_of(first.pid).values()] == [True]

        wait_until(is_stopped, "the first one is stopped")
        second = run_ok(code, path, server.url, "BB", timeout=60)
        assert "flushed" in second
        (pid,) = children_of(first.pid)
        os.kill(pid, signal.SIGCONT)
        said = first.stdout.read()
    found = records_of(path)
    second_one = [b"BB0", b"BB1", b"BB2"]
    if when < 3:
        assert found == second_one
        assert "flushed" not in said
    else:
        # All of it was there before the other one began, which has found it whole.
        assert found == [b"AAAA0", b"AAAA1", b"AAAA2", *second_one]
    append(path, b"x")  # What is noted is right as well.
    assert records_of(path) == [*found, b"x"]
    assert verify_tfrecord(path).is_counted


def test_a_file_of_others_is_not_taken_for_half_an_append(tmp_path):
    """A shard was about to be replaced, and somebody else has put a file there."""
    old_shard(tmp_path)
    run(SHARD, tmp_path, prefix=strace("rename:signal=KILL:when=2"))
    path = tmp_path / "t-00000-of-00001.tfrecord"
    write_plain(path, [b"theirs"] * 10)
    before = path.read_bytes()
    with pytest.raises(CorruptCheckpointError, match="were written"):
        append(path, b"x")
    assert path.read_bytes() == before


def test_an_append_is_not_undone_in_another_file(tmp_path):
    path = tmp_path / "all.tfrecord"
    append(path, b"first")
    run(APPEND, tmp_path, prefix=strace("fsync:signal=KILL:when=3"))
    write_plain(path, [b"other", b"x"])
    before = path.read_bytes()
    with pytest.raises(CorruptCheckpointError, match="not the file that was appended to"):
        append(path, b"x")
    assert path.read_bytes() == before


def test_a_killed_publisher_leaves_the_count_of_the_old_file(tmp_path):
    old_shard(tmp_path)
    run(SHARD, tmp_path, prefix=strace("rename:signal=KILL:when=2"))
    report = verify_tfrecord(tmp_path / "t-00000-of-00001.tfrecord")
    assert (report.records, report.is_counted) == (1, True)


def test_a_new_file_of_the_same_size_is_told_from_the_old_one(tmp_path):
    """A writer is killed at the rename, and the file is gone on with by appending."""
    with TFRecordShardWriter(tmp_path / "t", 0, 1) as writer:
        for record in NEW:
            writer.write(record[::-1])
    path = writer.path
    old = path.read_bytes()
    run(SHARD, tmp_path, prefix=strace("rename:signal=KILL:when=2"))
    assert path.read_bytes() == old
    append(path, b"more")
    assert verify_tfrecord(path).records == 41


def test_a_file_that_was_deleted_begins_anew(tmp_path):
    path = tmp_path / "all.tfrecord"
    append(path, b"old")
    path.unlink()
    append(path, b"new")
    assert records_of(path) == [b"new"]
    assert verify_tfrecord(path).records == 1


def test_the_first_append_is_undone_as_well(tmp_path):
    """Nothing of it but its size has reached the disk: that is no GZIP file."""
    path = tmp_path / "all.tfrecord"
    code = APPEND.replace('.tfrecord")', '.tfrecord", compression_type="GZIP")')
    run(code, tmp_path, prefix=strace("fsync:signal=KILL:when=3"))
    assert path.stat().st_size > 20
    path.write_bytes(bytes(path.stat().st_size))
    append(path, b"x", compression_type="GZIP")
    assert records_of(path) == [b"x"]


def test_a_group_that_could_not_be_undone_is_there_once(tmp_path, monkeypatch):
    """Interrupted after the last byte, and once more when that was to be undone."""
    path = tmp_path / "all.tfrecord"
    append(path, b"old")
    put, cut_ = appending._put, appending._cut

    def interrupted(*arguments):
        put(*arguments)
        raise KeyboardInterrupt

    def interrupted_again(*_):
        raise OSError(errno.EIO, "Input/output error")

    writer = LockedTFRecordWriter(path)
    writer.write(b"new")
    monkeypatch.setattr(appending, "_put", interrupted)
    monkeypatch.setattr(appending, "_cut", interrupted_again)
    with pytest.raises((KeyboardInterrupt, OSError)):
        writer.flush()
    monkeypatch.setattr(appending, "_put", put)
    monkeypatch.setattr(appending, "_cut", cut_)
    writer.write(b"newer")
    writer.flush()
    assert records_of(path) == [b"old", b"new", b"newer"]


def test_what_a_killed_writer_has_left_is_synced_before_it_counts(tmp_path, monkeypatch):
    old_file(tmp_path)
    run(APPEND, tmp_path, prefix=strace("fsync:signal=KILL:when=3"))
    path = tmp_path / "all.tfrecord"
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with LockManager().exclusive(path) as held:
        appending.put_right(path, held)
    assert synced[0] == str(path)


def test_a_signal_handler_that_flushes_in_a_flush_is_told(tmp_path, monkeypatch):
    path = tmp_path / "all.tfrecord"
    writer = LockedTFRecordWriter(path)
    told: list[str] = []

    def handler(*_) -> None:
        try:
            writer.close()
        except RuntimeError as error:
            told.append(str(error))

    whole = tfrecord.Encoder.whole
    monkeypatch.setattr(tfrecord.Encoder, "whole", lambda self: (handler(), whole(self))[1])
    writer.write(b"x")
    writer.flush()
    assert "a signal handler cannot do that as well" in told[0]
    assert records_of(path) == [b"x"]
    monkeypatch.undo()
    writer.write(b"y")
    writer.close()
    assert records_of(path) == [b"x", b"y"]


def test_a_shard_that_could_not_be_published_says_so_again(tmp_path):
    old_shard(tmp_path)
    writer = TFRecordShardWriter(tmp_path / "t", 0, 1, locks=LockManager(timeout=0.1))
    writer.write(b"new")
    with LockManager().shared(writer.path), pytest.raises(LockTimeoutError):
        writer.close()
    with pytest.raises(CheckpointWriteError, match="did not come to its end"):
        writer.close()
    assert records_of(writer.path) == [b"old"]
    assert not temporary(tmp_path)


def test_a_record_that_nobody_could_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(record_format, "_MOST_RECORD_BYTES", 100)
    with TFRecordShardWriter(tmp_path / "t", 0, 1) as writer:
        with pytest.raises(ValueError, match=r"at most 100 bytes. Received: 101"):
            writer.write(bytes(101))
        writer.write(bytes(100))
    assert verify_tfrecord(writer.path).records == 1


class LosesIt(LockManager):
    """A lock that is lost after so many looks."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    @contextlib.contextmanager
    def exclusive(self, path, timeout=None):
        with super().exclusive(path, timeout):
            yield self

    def ensure_held(self):
        self.looks -= 1
        if self.looks < 0:
            raise LockLostError("x", "lost")


def test_whoever_has_lost_the_lock_does_not_append(tmp_path):
    path = tmp_path / "all.tfrecord"
    append(path, b"one")
    before = path.read_bytes()
    for looks in range(2):  # Before the note, and before the bytes.
        writer = LockedTFRecordWriter(path, locks=LosesIt(looks))
        writer.write(b"two")
        with pytest.raises(LockLostError):
            writer.close()
        assert path.read_bytes() == before, looks
    append(path, b"three")
    assert records_of(path) == [b"one", b"three"]


def test_whoever_has_lost_the_lock_does_not_undo_its_append(tmp_path, monkeypatch):
    """Somebody else may have appended by then, and would lose that."""
    path = tmp_path / "all.tfrecord"
    append(path, b"one")
    longer = path.read_bytes() + plain_bytes([b"of somebody else"])

    def overtaken(*_):
        path.write_bytes(longer)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(appending, "_put", overtaken)
    writer = LockedTFRecordWriter(path, locks=LosesIt(2))
    writer.write(b"two")
    with pytest.raises(LockLostError):
        writer.flush()
    assert path.read_bytes() == longer


def torn_append(path: Path, monkeypatch) -> bytes:
    """A file with half a group, as a killed writer leaves it, and its note."""

    def torn(path, data, offset):
        path.write_bytes(path.read_bytes() + data[: len(data) // 2])
        raise OSError(errno.EIO, "Input/output error")

    def not_undone(*_):
        raise OSError(errno.EIO, "Input/output error")

    append(path, b"one")
    with monkeypatch.context() as patched:
        patched.setattr(appending, "_put", torn)
        patched.setattr(appending, "_cut", not_undone)
        writer = LockedTFRecordWriter(path)
        writer.write(b"two" * 100)
        with pytest.raises(CheckpointWriteError):
            writer.flush()
    return path.read_bytes()


def test_whoever_has_lost_the_lock_does_not_put_right(tmp_path, monkeypatch):
    path = tmp_path / "all.tfrecord"
    torn = torn_append(path, monkeypatch)
    writer = LockedTFRecordWriter(path, locks=LosesIt(0))
    writer.write(b"three")
    with pytest.raises(LockLostError):
        writer.flush()
    assert path.read_bytes() == torn
    append(path, b"three")
    assert records_of(path) == [b"one", b"three"]


def test_what_is_cut_off_is_gone_for_good_before_the_note_says_so(tmp_path, monkeypatch):
    """Else it came back with a power cut, and nobody knew what it is."""
    path = tmp_path / "all.tfrecord"
    torn_append(path, monkeypatch)
    happened: list[tuple[str, object]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        happened.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))
        fsync(descriptor)

    def replaced(source, target) -> None:
        happened.append(("renamed", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    append(path, b"three")
    first = happened.index(("renamed", ".all.tfrecord.records"))
    assert (str(path), len(plain_bytes([b"one"]))) in happened[:first]
