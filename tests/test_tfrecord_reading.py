"""Read TFRecord files that others write: the whole file, under a lock, by TensorFlow."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from keras_setup import tf
from processes import ending, environment, run, start, strace, wait_until
from record_files import cut, flip, records_of, write_plain
from redis_server import shared_redis

from keras_safe_ckpt import (
    LockedTFRecordWriter,
    LockManager,
    RedisLocks,
    TFRecordShardWriter,
    locked_tfrecord_dataset,
    verify_tfrecord,
)
from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LockTimeoutError,
)

__all__ = ["shared_redis"]  # A fixture.

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


def read(dataset) -> list[bytes]:
    return [record.numpy() for record in dataset]


def shards(folder: Path, count: int, each: int = 10, compression_type: str = "") -> str:
    for shard in range(count):
        with TFRecordShardWriter(
            folder / "t", shard, count, compression_type=compression_type
        ) as writer:
            for index in range(each):
                writer.write(b"%d-%d" % (shard, index))
    return str(folder / "t-*")


def expected(count: int, each: int = 10) -> list[bytes]:
    return [b"%d-%d" % (shard, index) for shard in range(count) for index in range(each)]


@pytest.mark.parametrize("compression_type", ["", None, "GZIP", "ZLIB"])
def test_all_records_of_all_files_in_order(tmp_path, compression_type):
    pattern = shards(tmp_path, 3, compression_type=compression_type or "")
    dataset = locked_tfrecord_dataset(pattern, compression_type=compression_type)
    assert read(dataset) == expected(3)
    assert read(dataset) == expected(3), "a second epoch differs"
    files = sorted(tmp_path.glob("t-*"))
    assert read(locked_tfrecord_dataset(files, compression_type=compression_type)) == expected(3)


def test_tensorflow_reads_what_was_written(tmp_path):
    for kind in ("", "GZIP", "ZLIB"):
        shards(tmp_path / kind, 1, compression_type=kind)
        path = str(tmp_path / kind / "t-00000-of-00001.tfrecord")
        assert read(tf.data.TFRecordDataset(path, kind)) == expected(1)
    path = tmp_path / "all.tfrecord"
    for _ in range(3):
        with LockedTFRecordWriter(path, compression_type="GZIP") as writer:
            writer.write(tf.train.Example())
            writer.write(tf.constant(b"tensor"))
    found = read(tf.data.TFRecordDataset(str(path), "GZIP"))
    assert found == 3 * [tf.train.Example().SerializeToString(), b"tensor"]


def test_what_tensorflow_has_written_is_read_and_verified(tmp_path):
    for kind in ("", "GZIP", "ZLIB"):
        path = str(tmp_path / f"theirs{kind}")
        with tf.io.TFRecordWriter(path, kind) as writer:
            for record in expected(2):
                writer.write(record)
        assert read(locked_tfrecord_dataset(path, compression_type=kind)) == expected(2)
        report = verify_tfrecord(path)
        assert (report.records, report.compression_type, report.is_counted) == (20, kind, False)


def test_several_files_at_once(tmp_path):
    pattern = shards(tmp_path, 4)
    found = read(locked_tfrecord_dataset(pattern, num_parallel_reads=4))
    assert found[:4] == [b"0-0", b"1-0", b"2-0", b"3-0"]
    assert sorted(found) == sorted(expected(4))
    assert len(read(locked_tfrecord_dataset(pattern, num_parallel_reads=-1))) == 40


@pytest.mark.parametrize(("files", "readers"), [(4, 2), (4, 4), (5, 3), (2, 3), (1, 4)])
@pytest.mark.parametrize("parallel", [None, 2])
def test_readers_share_what_there_is(tmp_path, files, readers, parallel):
    pattern = shards(tmp_path, files)
    parts = [
        read(locked_tfrecord_dataset(pattern, shard=(readers, me), num_parallel_reads=parallel))
        for me in range(readers)
    ]
    assert all(parts), "a reader has nothing"
    assert sorted(record for part in parts for record in part) == sorted(expected(files))
    if files >= readers:
        of_file = {record.split(b"-")[0]: me for me, part in enumerate(parts) for record in part}
        for me, part in enumerate(parts):
            assert all(of_file[record.split(b"-")[0]] == me for record in part), "files are shared"


# Locks.


def can_write(path: Path) -> bool:
    try:
        with LockManager(timeout=0).exclusive(path):
            return True
    except LockTimeoutError:
        return False


@pytest.mark.parametrize("parallel", [None, 1])
def test_a_file_is_locked_as_long_as_it_is_read(tmp_path, parallel):
    """TensorFlow reads some records ahead, but not these many."""
    shards(tmp_path, 2, each=20_000)
    first, second = sorted(tmp_path.glob("t-*"))
    dataset = locked_tfrecord_dataset([first, second], num_parallel_reads=parallel)
    assert can_write(first), "before it is read"
    iterator = iter(dataset)
    for record in expected(2)[:10]:
        assert next(iterator).numpy() == record
        assert not can_write(first)
    if parallel is None:
        assert can_write(second), "before its turn"
    while next(iterator).numpy() != b"1-0":
        pass
    wait_until(lambda: can_write(first), "the first file is free")
    assert not can_write(second)
    assert len(list(iterator)) == 19_999
    wait_until(lambda: can_write(second), "the second file is free")


def leave(dataset) -> None:
    next(iter(dataset))


def stop(dataset) -> None:
    for _ in dataset:
        break


def take(dataset) -> None:
    assert len(list(dataset.take(2))) == 2


def batch(dataset) -> None:
    next(iter(dataset.repeat().shuffle(100).batch(4).prefetch(2)))


def fail(dataset) -> None:
    failing = dataset.map(lambda record: tf.strings.to_number(record))
    with pytest.raises(tf.errors.InvalidArgumentError):
        list(failing)


@pytest.mark.parametrize("use", [leave, stop, take, batch, fail])
@pytest.mark.parametrize("parallel", [None, 2])
def test_who_does_not_want_the_rest_holds_nothing(tmp_path, use, parallel):
    dataset = locked_tfrecord_dataset(shards(tmp_path, 2), num_parallel_reads=parallel)
    use(dataset)
    for path in tmp_path.glob("t-*"):
        wait_until(lambda path=path: can_write(path), f"{path.name} is free after {use.__name__}")


def test_readers_do_not_exclude_each_other(tmp_path):
    pattern = shards(tmp_path, 1)
    one, other = iter(locked_tfrecord_dataset(pattern)), iter(locked_tfrecord_dataset(pattern))
    for record in expected(1):
        assert next(one).numpy() == next(other).numpy() == record


def test_a_writer_is_waited_for_and_the_wait_is_bounded(tmp_path):
    pattern = shards(tmp_path, 1)
    path = tmp_path / "t-00000-of-00001.tfrecord"
    dataset = locked_tfrecord_dataset(pattern, locks=LockManager(timeout=0.1))
    with (
        LockManager().exclusive(path),
        pytest.raises(tf.errors.OpError, match=r"LockTimeoutError.*held by"),
    ):
        read(dataset)
    assert read(dataset) == expected(1)


def test_any_lock_backend_will_do(tmp_path, shared_redis):
    pattern = shards(tmp_path, 1)
    path = tmp_path / "t-00000-of-00001.tfrecord"
    locks = RedisLocks(shared_redis.url, timeout=0)

    def is_free() -> bool:
        try:
            with locks.exclusive(path):
                return True
        except LockTimeoutError:
            return False

    iterator = iter(locked_tfrecord_dataset(pattern, locks=RedisLocks(shared_redis.url)))
    assert next(iterator).numpy() == b"0-0"
    assert not is_free()
    del iterator
    wait_until(is_free, "the lock is given back")


def test_files_in_a_folder_that_is_read_only_are_read(tmp_path, shared_redis):
    """By somebody who may not write there, and can make no lock."""
    pattern = shards(tmp_path / "data", 2)
    code = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow
from keras_safe_ckpt import LockTimeoutError, RedisLocks, locked_tfrecord_dataset, verify_tfrecord
os.setuid(65534)
print(len(list(locked_tfrecord_dataset(sys.argv[1]))))
path = sys.argv[1].replace("*", "00000-of-00002.tfrecord")
print(verify_tfrecord(path).records)
try:
    verify_tfrecord(path, locks=RedisLocks(sys.argv[2], timeout=0.1))
except LockTimeoutError:
    print("locked")
"""
    if os.geteuid() != 0:
        pytest.skip("only root may become somebody else")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if not os.stat(folder).st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    (tmp_path / "data").chmod(0o755)
    for path in (tmp_path / "data").iterdir():
        path.chmod(0o644)
    locked = tmp_path / "data/t-00000-of-00002.tfrecord"
    with RedisLocks(shared_redis.url).exclusive(locked):
        done = subprocess.run(
            [sys.executable, "-c", code, pattern, shared_redis.url],
            env=environment(), capture_output=True, text=True,
        )  # fmt: skip
    assert done.stdout.split() == ["20", "10", "locked"], done.stderr


def test_readers_do_not_wait_for_each_other_after_a_kill(tmp_path):
    path = tmp_path / "all.tfrecord"
    with LockedTFRecordWriter(path) as writer:
        for number in range(20_000):
            writer.write(b"%d" % number)
    code = """
from keras_safe_ckpt import LockedTFRecordWriter
with LockedTFRecordWriter(sys.argv[1]) as writer:
    writer.write(b"more")
"""
    assert run(code, path, prefix=strace("fsync:signal=KILL:when=3")).returncode != 0
    locks = LockManager(timeout=2)
    one = iter(locked_tfrecord_dataset(path, locks=locks))
    assert next(one).numpy() == b"0"
    other = iter(locked_tfrecord_dataset(path, locks=locks))
    assert next(other).numpy() == b"0"
    assert verify_tfrecord(path, locks=locks).records in (20_000, 20_001)


def test_records_are_shared_however_the_readers_read_and_the_files_grow(tmp_path):
    paths = []
    for name, count in (("a", 5), ("b", 6)):
        paths.append(tmp_path / name)
        with LockedTFRecordWriter(paths[-1]) as writer:
            for index in range(count):
                writer.write(b"%s%d" % (name.encode(), index))
    found = read(locked_tfrecord_dataset(paths, shard=(3, 0), num_parallel_reads=1))
    with LockedTFRecordWriter(paths[0]) as writer:
        writer.write(b"new")
    for me, parallel in ((1, 2), (2, None)):
        found += read(locked_tfrecord_dataset(paths, shard=(3, me), num_parallel_reads=parallel))
    old = [b"a%d" % index for index in range(5)] + [b"b%d" % index for index in range(6)]
    assert sorted(set(found) - {b"new"}) == old
    assert len(found) == len(set(found))


def test_files_are_shared_by_name_however_they_are_given(tmp_path):
    shards(tmp_path, 6)
    files = sorted(map(str, tmp_path.glob("t-*")))
    found = read(locked_tfrecord_dataset(files, shard=(2, 0)))
    found += read(locked_tfrecord_dataset(files[::-1], shard=(2, 1)))
    assert sorted(found) == sorted(expected(6))
    one, other = files[:2]
    paths = [(one, other), (other, one), {one, other}]
    found = []
    for me, given in enumerate(paths):
        found += read(locked_tfrecord_dataset(given, shard=(3, me), allow_missing_shards=True))
    assert sorted(found) == sorted(expected(2))


def test_a_link_is_the_file_that_it_leads_to(tmp_path):
    shards(tmp_path, 1)
    path = tmp_path / "t-00000-of-00001.tfrecord"
    (tmp_path / "link").symlink_to(path)
    dataset = locked_tfrecord_dataset(tmp_path / "link", locks=LockManager(timeout=0.1))
    with (
        LockManager().exclusive(path),
        pytest.raises(tf.errors.OpError, match="LockTimeoutError"),
    ):
        read(dataset)
    assert read(dataset) == expected(1)
    with pytest.raises(ValueError, match="expected each file once"):
        locked_tfrecord_dataset([path, tmp_path / "link"])
    cut(path, path.stat().st_size - 19)
    with pytest.raises(tf.errors.OpError, match="were written"):
        read(dataset)


# What is not as it was written.


def test_a_cut_between_two_records_is_an_error(tmp_path):
    pattern = shards(tmp_path, 2)
    path = tmp_path / "t-00001-of-00002.tfrecord"
    dataset = locked_tfrecord_dataset(pattern)
    cut(path, path.stat().st_size - len(b"1-9") - 16)
    assert len(records_of(path)) == 9, "TensorFlow would read it without a word"
    with pytest.raises(tf.errors.OpError, match="171 bytes, and 190 were written"):
        read(dataset)


def test_a_flipped_byte_is_an_error(tmp_path):
    pattern = shards(tmp_path, 1)
    flip(tmp_path / "t-00000-of-00001.tfrecord", 40)
    with pytest.raises(tf.errors.DataLossError):
        read(locked_tfrecord_dataset(pattern))


@pytest.mark.parametrize(("real", "given"), [("GZIP", ""), ("ZLIB", ""), ("", "GZIP")])
def test_another_compression_is_said_at_once(tmp_path, real, given):
    pattern = shards(tmp_path, 1, compression_type=real)
    with pytest.raises(
        CorruptCheckpointError,
        match=f"compression_type='{given}', .* begins like one with '{real}'",
    ):
        locked_tfrecord_dataset(pattern, compression_type=given)


def test_an_empty_file_has_no_records(tmp_path):
    (tmp_path / "empty").touch()
    for kind in ("", "GZIP", "ZLIB"):
        assert read(locked_tfrecord_dataset("empty", compression_type=kind)) == []


def test_a_file_that_should_not_be_empty_is_an_error(tmp_path):
    pattern = shards(tmp_path, 1)
    cut(tmp_path / "t-00000-of-00001.tfrecord", 0)
    with pytest.raises(tf.errors.OpError, match="0 bytes, and 190 were written"):
        read(locked_tfrecord_dataset(pattern))


def test_a_missing_shard_is_said_at_once(tmp_path):
    pattern = shards(tmp_path, 4)
    (tmp_path / "t-00001-of-00004.tfrecord").unlink()
    (tmp_path / "t-00003-of-00004.tfrecord").unlink()
    for paths in (pattern, sorted(tmp_path.glob("t-*"))):
        with pytest.raises(
            CheckpointNotFoundError, match=r"expected 4 shards, and these are missing: 1, 3\."
        ):
            locked_tfrecord_dataset(paths)
    assert len(read(locked_tfrecord_dataset(pattern, allow_missing_shards=True))) == 20


def test_a_file_that_is_gone_is_said(tmp_path):
    pattern = shards(tmp_path, 1)
    dataset = locked_tfrecord_dataset(pattern)
    (tmp_path / "t-00000-of-00001.tfrecord").unlink()
    with pytest.raises(tf.errors.OpError, match=r"t-00000-of-00001.tfrecord"):
        read(dataset)


def test_what_a_killed_writer_has_left_is_cut_off_by_a_reader(tmp_path):
    path = tmp_path / "all.tfrecord"
    with LockedTFRecordWriter(path) as writer:
        writer.write(b"whole")
    whole = path.read_bytes()
    code = """
from keras_safe_ckpt import LockedTFRecordWriter
from keras_safe_ckpt.datasets import appending
def killed(path, data, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data[:10])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
appending._put = killed
with LockedTFRecordWriter(sys.argv[1]) as writer:
    writer.write(b"half of this is there")
"""
    assert start(code, path).wait(60) == -signal.SIGKILL
    assert len(path.read_bytes()) == len(whole) + 10
    dataset = locked_tfrecord_dataset(path)
    assert read(dataset) == [b"whole"]
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shard": (2, 2)},
            r"shard: expected \(n, i\) with i from 0 to n - 1.* Received: \(2, 2\)",
        ),
        ({"shard": (0, 0)}, "shard: expected"),
        ({"shard": 3}, "shard: expected"),
        ({"shard": (2, 1.0)}, "shard: expected"),
        ({"num_parallel_reads": True}, "num_parallel_reads: expected .* Received: True"),
        ({"buffer_size": -1}, "buffer_size: expected .* Received: -1"),
        ({"num_parallel_reads": 0}, "num_parallel_reads: expected .* Received: 0"),
        ({"buffer_size": "1"}, "buffer_size: expected .* Received: '1'"),
        ({"compression_type": "gzip"}, "compression_type: expected one of"),
    ],
)
def test_arguments_that_cannot_be_are_named(tmp_path, options, message):
    pattern = shards(tmp_path, 1)
    with pytest.raises(ValueError, match=message):
        locked_tfrecord_dataset(pattern, **options)


def test_paths_that_cannot_be_are_named(tmp_path):
    path = write_plain(tmp_path / "a", [b"x"])
    with pytest.raises(CheckpointNotFoundError, match=r"No data at .*nothing"):
        locked_tfrecord_dataset("nothing")
    with pytest.raises(CheckpointNotFoundError, match="no file matches this pattern"):
        locked_tfrecord_dataset("none-*")
    for paths in (None, 5, b"x"):
        with pytest.raises(TypeError, match="paths: expected a path, or several"):
            locked_tfrecord_dataset(paths)
    with pytest.raises(ValueError, match="paths: expected at least one file"):
        locked_tfrecord_dataset([])
    with pytest.raises(ValueError, match=r"paths: expected each file once. Received twice: .*a"):
        locked_tfrecord_dataset([path, "a"])
    with pytest.raises(CheckpointNotFoundError, match="No data at"):
        locked_tfrecord_dataset(tmp_path)


def test_a_name_of_more_shards_than_there_can_be_is_a_name(tmp_path):
    write_plain(tmp_path / "n-00000-of-99999999999.tfrecord", [b"x"])
    assert read(locked_tfrecord_dataset("n-*")) == [b"x"]


def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path):
    path = write_plain(tmp_path / "what[1]?*.tfrecord", [b"x"])
    assert read(locked_tfrecord_dataset(path)) == [b"x"]


# Many at once.

WRITER = """
from keras_safe_ckpt import LockedTFRecordWriter
folder, me = sys.argv[1], int(sys.argv[2])
with LockedTFRecordWriter(folder + "/all.tfrecord") as writer:
    print("ready", flush=True)
    for group in range(int(sys.argv[3])):
        for index in range(5):
            writer.write(b"%d %d %d" % (me, group, index))
        writer.flush()
"""
READER = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
from keras_safe_ckpt import locked_tfrecord_dataset
folder = sys.argv[1]
dataset = locked_tfrecord_dataset(folder + "/all.tfrecord").batch(1000)
last = reads = 0
print("ready", flush=True)
while not os.path.exists(folder + "/over"):
    records = [record for batch in dataset for record in batch.numpy()]
    groups = [tuple(map(int, record.split())) for record in records[1:]]
    assert len(groups) >= last and len(groups) % 5 == 0, len(groups)
    for start in range(0, len(groups), 5):
        me, group, _ = groups[start]
        assert groups[start : start + 5] == [(me, group, index) for index in range(5)]
    last = len(groups)
    reads += 1
print(reads)
"""


@pytest.mark.long
def test_eight_writers_and_four_readers_of_tensorflow(tmp_path, forking):
    groups = 15
    with LockedTFRecordWriter(tmp_path / "all.tfrecord") as writer:
        writer.write(b"first")
    readers = []
    for number in range(4):
        script = tmp_path / f"reader{number}.py"
        script.write_text(READER)
        readers.append(forking.start(environment(), script, tmp_path))
    with ending(*readers):
        for number in range(4):
            output = tmp_path / f"reader{number}.out"
            wait_until(lambda output=output: output.read_text() == "ready\n", "it reads")
        writers = [start(WRITER, tmp_path, me, groups) for me in range(8)]
        for process in writers:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        victims = random.Random(0).sample(writers, 3)
        for process in victims:
            process.kill()
        for process in writers:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0 or process in victims, err
        (tmp_path / "over").touch()
        for process in readers:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert int(out.split()[1]) > 0
    assert len(records_of(tmp_path / "all.tfrecord")) >= 1 + 5 * groups * 5
