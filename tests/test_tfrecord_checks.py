"""Is a TFRecord file whole, what can be saved of one that is not, and how to cut one up."""

from __future__ import annotations

import gzip
import os
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from killing import killed_at_each
from processes import environment
from record_files import cut, flip, framed, masked, plain_bytes, records_of, write_plain

from keras_safe_ckpt import (
    LockedTFRecordWriter,
    TFRecordShardWriter,
    repair_tfrecord,
    split_tfrecord,
    verify_tfrecord,
)
from keras_safe_ckpt.datasets import record_format
from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    CorruptRecordError,
    SafeCheckpointError,
    UnreadableCheckpointError,
)

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")

RECORDS = [b"first", b"", b"third" * 100, b"\0" * 50, b"last"]
STARTS = [sum(16 + len(record) for record in RECORDS[:number]) for number in range(5)]


def written(path: Path, records: list[bytes] = RECORDS, compression_type: str = "") -> Path:
    """With a count beside it."""
    with TFRecordShardWriter(path, 0, 1, compression_type=compression_type) as writer:
        for record in records:
            writer.write(record)
    return writer.path


def bad(path: Path, **options) -> CorruptRecordError:
    with pytest.raises(CorruptRecordError) as caught:
        verify_tfrecord(path, **options)
    assert caught.value.path == str(path)
    assert isinstance(caught.value, CorruptCheckpointError)
    return caught.value


# Verify.


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_whole_file(tmp_path, is_ours):
    path = written(tmp_path / "t") if is_ours else write_plain(tmp_path / "t", RECORDS)
    report = verify_tfrecord(path)
    assert report.records == 5
    assert report.size == path.stat().st_size
    assert report.path == path
    assert report.is_counted == is_ours


def test_verifying_needs_no_tensorflow(tmp_path):
    path = written(tmp_path / "t")
    code = """
import sys
from keras_safe_ckpt import verify_tfrecord, repair_tfrecord, split_tfrecord
verify_tfrecord(sys.argv[1])
repair_tfrecord(sys.argv[1], "repaired")
split_tfrecord(sys.argv[1], "split", 2)
print([name for name in ("tensorflow", "keras") if name in sys.modules])
"""
    command = [sys.executable, "-c", code, path]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("is_ours", [True, False])
def test_every_flipped_byte_is_found_with_its_record_and_offset(tmp_path, is_ours):
    path = written(tmp_path / "t") if is_ours else write_plain(tmp_path / "t", RECORDS)
    whole = path.read_bytes()
    for offset in range(len(whole)):
        flip(path, offset)
        number = max(index for index, start in enumerate(STARTS) if start <= offset)
        error = bad(path)
        assert (error.record, error.offset) == (number, STARTS[number])
        assert f"record {number} (counted from 0), offset {STARTS[number]:,}" in str(error)
        path.write_bytes(whole)


@pytest.mark.parametrize("is_ours", [True, False])
def test_every_cut_is_found(tmp_path, is_ours):
    """Between two records only by the count that is kept."""
    path = written(tmp_path / "t") if is_ours else write_plain(tmp_path / "t", RECORDS)
    whole = path.read_bytes()
    for size in range(len(whole)):
        cut(path, size)
        number = sum(start <= size for start in STARTS) - 1
        if size in STARTS and not is_ours:
            assert verify_tfrecord(path).records == number
            assert not verify_tfrecord(path).is_counted
        else:
            error = bad(path)
            assert error.record == number
            assert error.offset == STARTS[number]
        path.write_bytes(whole)
    assert verify_tfrecord(path).records == 5


def test_records_that_were_added_by_others_are_noticed(tmp_path):
    path = written(tmp_path / "t")
    with open(path, "ab") as file:
        file.write(plain_bytes([b"one more"]))
    error = bad(path)
    assert error.record == 5
    assert "it has 6 records in" in str(error)


def test_records_that_were_exchanged_are_noticed(tmp_path):
    path = written(tmp_path / "t", [b"one", b"two"])
    write_plain(path, [b"two", b"one"])
    assert "they are not those that were written" in bad(path).reason


def test_a_file_that_was_replaced_by_another_of_ours_is_fine(tmp_path):
    path = written(tmp_path / "t", [b"one", b"two"])
    written(tmp_path / "t", [b"three"])
    assert verify_tfrecord(path).records == 1


def test_an_empty_file(tmp_path):
    (tmp_path / "empty").touch()
    report = verify_tfrecord(tmp_path / "empty")
    assert (report.records, report.is_counted) == (0, False)
    path = written(tmp_path / "t")
    cut(path, 0)
    assert "it has 0 records in 0 bytes, and 5 in" in str(bad(path))


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_compressed_files(tmp_path, kind):
    path = written(tmp_path / "t", RECORDS * 1000, kind)
    assert verify_tfrecord(path).records == 5000
    assert verify_tfrecord(path, compression_type=kind).compression_type == kind
    error = bad(path, compression_type="")
    assert f"it looks like a file with compression_type='{kind}'" in str(error)
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 20, 3):
        cut(path, size)
        assert "damaged" in str(bad(path, compression_type=kind))
    path.write_bytes(whole)
    for offset in range(30, len(whole), len(whole) // 20):
        flip(path, offset)
        bad(path, compression_type=kind)
        path.write_bytes(whole)


def test_a_plain_file_opened_as_compressed(tmp_path):
    path = written(tmp_path / "t")
    for kind in ("GZIP", "ZLIB"):
        assert "looks like a file with compression_type=''" in str(bad(path, compression_type=kind))


def test_records_larger_than_the_blocks_that_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(record_format, "_BLOCK_BYTES", 100)
    for kind in ("", "GZIP", "ZLIB"):
        path = written(tmp_path / f"t{kind}", [b"x" * size for size in range(0, 1000, 37)], kind)
        assert verify_tfrecord(path).records == 28


def test_a_length_that_cannot_be_is_refused(tmp_path):
    """Its checksum is right: whoever wrote it meant it."""
    length = struct.pack("<Q", 1 << 50)
    path = tmp_path / "t"
    path.write_bytes(framed(b"good") + length + masked(length) + b"x" * 100)
    error = bad(path)
    assert (error.record, error.offset) == (1, 20)
    assert "it claims 1,125,899,906,842,624 bytes" in str(error)
    length = struct.pack("<Q", 1 << 30)
    path.write_bytes(length + masked(length) + b"x" * 100)
    assert "cut off after 100 of its 1,073,741,824 bytes" in str(bad(path))


def limited(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """With 300 MB of address space more than Python and NumPy take."""
    return subprocess.run(
        [sys.executable, "-c", LIMIT + code, *map(str, arguments)],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip


LIMIT = """
import resource, sys
from keras_safe_ckpt import verify_tfrecord, repair_tfrecord, split_tfrecord
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, resource.RLIM_INFINITY))
"""


def test_a_large_record_is_checked_without_being_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(record_format, "_LARGE_RECORD_BYTES", 1000)
    records = [b"small", os.urandom(3_000_000), b"", os.urandom(1001), b"last"]
    for kind in ("", "GZIP"):
        path = written(tmp_path / f"t{kind}", records, kind)
        assert verify_tfrecord(path).records == 5
    path = written(tmp_path / "t", records)
    whole = path.read_bytes()
    for offset in (len(framed(b"small")) + 2_000_000, 21 + 12 + 3_000_000):
        flip(path, offset)
        error = bad(path)
        assert (error.record, error.offset) == (1, 21)
        assert "checksum of its bytes" in str(error)
        path.write_bytes(whole)
    for size in (21 + 12, 21 + 12 + 2_000_000, 21 + 12 + 3_000_003):
        cut(path, size)
        assert "cut off after" in str(bad(path))


def test_a_large_record_in_damaged_data_has_its_offset(tmp_path, monkeypatch):
    monkeypatch.setattr(record_format, "_LARGE_RECORD_BYTES", 1000)
    path = written(tmp_path / "t", [b"first", os.urandom(5_000_000)], "GZIP")
    cut(path, path.stat().st_size // 2)
    error = bad(path)
    assert (error.record, error.offset) == (1, 21)


def test_an_empty_compressed_shard_is_one(tmp_path):
    for kind in ("GZIP", "ZLIB"):
        path = written(tmp_path / f"t{kind}", [], kind)
        report = verify_tfrecord(path)
        assert (report.records, report.compression_type) == (0, kind)


def test_pipes_and_links_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableCheckpointError, match="not a regular file"):
        verify_tfrecord(tmp_path / "pipe")
    path = written(tmp_path / "t")
    note = tmp_path / ".t-00000-of-00001.tfrecord.records"
    note.unlink()
    os.mkfifo(note)
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        verify_tfrecord(path)
    note.unlink()
    note.symlink_to("/etc/passwd")
    with pytest.raises(UnreadableCheckpointError):
        verify_tfrecord(path)


def test_a_record_that_claims_two_gigabytes_takes_little_memory(tmp_path):
    path = tmp_path / "claims"
    length = struct.pack("<Q", (1 << 31) - 1)
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    data = packer.compress(length + masked(length))
    for _ in range(512):
        data += packer.compress(bytes(1 << 20))
    path.write_bytes(data + packer.flush())
    done = limited("verify_tfrecord(sys.argv[1])", path)
    assert "CorruptRecordError" in done.stderr
    assert "cut off after 536,870,912 of its 2,147,483,647 bytes" in done.stderr


def test_a_small_file_that_unpacks_to_a_large_one_takes_little_memory(tmp_path):
    """A gigabyte of zeros is a length of zero with a wrong checksum, or one of records."""
    assert resource.RLIMIT_AS is not None
    bomb = tmp_path / "bomb"
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    record = framed(bytes(10_000_000))
    bomb.write_bytes(b"".join(packer.compress(record) for _ in range(60)) + packer.flush())
    assert bomb.stat().st_size < 5_000_000
    done = limited("print(verify_tfrecord(sys.argv[1]).records)", bomb)
    assert done.stdout == "60\n", done.stderr
    zeros = tmp_path / "zeros"
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    zeros.write_bytes(
        b"".join(packer.compress(bytes(1 << 20)) for _ in range(500)) + packer.flush()
    )
    done = limited("verify_tfrecord(sys.argv[1])", zeros)
    assert "CorruptRecordError" in done.stderr


@pytest.mark.parametrize(
    "note", [b"", b"{", b"[]", b'{"version": 1}', b'{"version": 1, "contents": []}', b"\xff" * 50,
             b'{"version": 1, "contents": [{"size": -1}]}',
             b'{"version": 1, "contents": [{"size": %d}]}' % 10**30, b" " * 100_000 + b"{}",
             b'{"version": 1, "contents": [{"size": 9}, {"size": 5, "tail_checksum": 1}]}',
             b'{"version": 1, "contents": [{"size": 1, "more": 2}]}', b"[" * 100_000],
)  # fmt: skip
def test_a_damaged_count_is_named(tmp_path, note):
    path = written(tmp_path / "t")
    beside = tmp_path / ".t-00000-of-00001.tfrecord.records"
    beside.write_bytes(note)
    with pytest.raises(
        CorruptCheckpointError, match=r"records.*if the records are fine, delete it"
    ):
        verify_tfrecord(path)
    beside.unlink()
    assert not verify_tfrecord(path).is_counted


def test_a_count_of_a_newer_version_is_named(tmp_path):
    path = written(tmp_path / "t")
    (tmp_path / ".t-00000-of-00001.tfrecord.records").write_text('{"version": 2, "contents": 0}')
    with pytest.raises(CorruptCheckpointError, match="expected version 1, received 2"):
        verify_tfrecord(path)


def test_what_cannot_be_verified_is_named(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"No data at .*nothing"):
        verify_tfrecord("nothing")
    with pytest.raises(CheckpointNotFoundError, match=r"No data at .*nothing"):
        split_tfrecord("nothing", "part", 2)
    assert list(tmp_path.iterdir()) == [], "lock files of nothing"
    (tmp_path / "folder").mkdir()
    with pytest.raises(SafeCheckpointError, match="folder") as caught:
        verify_tfrecord("folder")
    assert isinstance(caught.value, (UnreadableCheckpointError, ValueError))
    with pytest.raises(ValueError, match="compression_type: expected one of"):
        verify_tfrecord("nothing", compression_type="zip")


# Repair.


def test_all_good_records_are_kept(tmp_path):
    records = [b"record %d " % number * (number + 1) for number in range(50)]
    starts = [len(plain_bytes(records[:number])) for number in range(50)]
    path = written(tmp_path / "t", records)
    for number, place in ((0, 0), (7, 3), (8, 9), (20, 30), (21, 5), (49, 20)):
        flip(path, starts[number] + place)
    before = path.read_bytes()
    report = repair_tfrecord(path, tmp_path / "good")
    kept = [record for number, record in enumerate(records) if number not in (0, 7, 8, 20, 21, 49)]
    assert records_of(tmp_path / "good") == kept
    assert report.records == 44
    assert report.path == tmp_path / "good"
    assert sum(stop - start for start, stop in report.left_out) == sum(
        16 + len(records[number]) for number in (0, 7, 8, 20, 21, 49)
    )
    assert path.read_bytes() == before
    assert verify_tfrecord(tmp_path / "good").is_counted


def test_one_flipped_byte_costs_one_record(tmp_path):
    path = write_plain(tmp_path / "t", RECORDS)
    for offset in range(0, path.stat().st_size, 3):
        flip(path, offset)
        number = max(index for index, start in enumerate(STARTS) if start <= offset)
        repair_tfrecord(path, tmp_path / "good")
        assert records_of(tmp_path / "good") == RECORDS[:number] + RECORDS[number + 1 :]
        flip(path, offset)


def test_bytes_that_are_missing_or_too_many_cost_what_they_touch(tmp_path):
    records = [b"%d" % number * 100 for number in range(10)]
    data = plain_bytes(records)
    path = tmp_path / "t"
    path.write_bytes(data[:250] + data[300:600] + b"garbage" * 10 + data[600:-5])
    report = repair_tfrecord(path, tmp_path / "good")
    found = records_of(tmp_path / "good")
    assert set(found) == set(records) - {records[2], records[5], records[9]}
    assert report.records == 7
    assert len(report.left_out) == 3


def test_a_record_within_a_damaged_record_is_not_taken_for_one(tmp_path):
    inner = framed(b"not a record of this file")
    path = write_plain(tmp_path / "t", [b"a", b"x" * 20 + inner + b"x" * 20, b"b"])
    flip(path, len(framed(b"a")) + 15)
    repair_tfrecord(path, tmp_path / "good")
    assert records_of(tmp_path / "good") == [b"a", b"b"]


def test_a_search_across_blocks(tmp_path, monkeypatch):
    from keras_safe_ckpt.datasets import verification

    monkeypatch.setattr(verification, "_FIRST_SEARCH_BYTES", 64)
    monkeypatch.setattr(verification, "_SEARCH_BYTES", 64)
    records = [os.urandom(300), os.urandom(200), b"good"]
    path = write_plain(tmp_path / "t", records)
    flip(path, 2)
    flip(path, len(framed(records[0])) + 2)
    repair_tfrecord(path, tmp_path / "good")
    assert records_of(tmp_path / "good") == [b"good"]


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_of_a_compressed_file_what_comes_before_the_damage(tmp_path, kind):
    path = written(tmp_path / "t", [os.urandom(1000) for _ in range(100)], kind)
    whole = path.read_bytes()
    cut(path, len(whole) // 2)
    report = repair_tfrecord(path, tmp_path / "good")
    assert 40 < report.records < 60
    assert verify_tfrecord(tmp_path / "good").compression_type == kind
    assert report.left_out[0][1] == -1


def test_a_file_that_was_cut_between_two_records_is_as_good_as_it_is(tmp_path):
    path = written(tmp_path / "t")
    cut(path, STARTS[3])
    assert repair_tfrecord(path, tmp_path / "good").records == 3
    assert verify_tfrecord(tmp_path / "good").records == 3


def test_nothing_but_garbage(tmp_path):
    (tmp_path / "t").write_bytes(os.urandom(100_000))
    report = repair_tfrecord(tmp_path / "t", tmp_path / "good")
    assert (report.records, report.left_out) == (0, ((0, 100_000),))
    assert records_of(tmp_path / "good") == []


def test_repairs_that_cannot_be_are_named(tmp_path):
    path = written(tmp_path / "t")
    with pytest.raises(ValueError, match="out: expected another file than the damaged one"):
        repair_tfrecord(path, path)
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        repair_tfrecord("nothing", "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_damage_behind_the_last_record_costs_nothing(tmp_path, kind):
    """The checksum of the compressed data, which comes last."""
    path = written(tmp_path / "t", RECORDS * 200, kind)
    flip(path, path.stat().st_size - 2)
    assert repair_tfrecord(path, tmp_path / "good").records == 1000
    assert bad(path).record == 1000


def test_damage_near_the_end_of_a_compressed_file_costs_the_end(tmp_path):
    path = written(tmp_path / "t", [os.urandom(1000) for _ in range(3000)], "GZIP")
    flip(path, path.stat().st_size - 2000)
    assert repair_tfrecord(path, tmp_path / "good").records >= 2996


def test_a_last_record_with_records_in_it_is_one_record(tmp_path):
    inner = plain_bytes([b"not", b"of", b"this", b"file"])
    path = write_plain(tmp_path / "t", [b"first", b"x" + inner])
    flip(path, len(framed(b"first")) + 12)
    repair_tfrecord(path, tmp_path / "good")
    assert records_of(tmp_path / "good") == [b"first"]


def test_lengths_that_lead_nowhere_take_no_time(tmp_path):
    length = struct.pack("<Q", 20_000_000)
    path = tmp_path / "t"
    path.write_bytes(b"bad!" + (length + masked(length)) * 50_000 + framed(b"good"))
    report = repair_tfrecord(path, tmp_path / "good")
    assert report.records == 1
    assert records_of(tmp_path / "good") == [b"good"]


def test_a_length_that_looks_like_compression_is_a_length(tmp_path):
    """376 is how a ZLIB stream begins."""
    records = [os.urandom(376) for _ in range(100)]
    path = write_plain(tmp_path / "t", records)
    flip(path, 9)  # In the checksum of the length.
    assert "checksum of its length" in str(bad(path))
    repair_tfrecord(path, tmp_path / "good")
    assert records_of(tmp_path / "good") == records[1:]


def test_a_link_to_the_damaged_file_is_the_damaged_file(tmp_path):
    path = written(tmp_path / "t")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ValueError, match="out: expected another file"):
        repair_tfrecord(tmp_path / "link", path)
    cut(path, STARTS[3])
    with pytest.raises(CorruptRecordError, match="5 in"):
        verify_tfrecord(tmp_path / "link")


def test_a_record_in_a_damaged_record_before_a_damaged_one_is_not_taken_for_one(tmp_path):
    outer = b"x" * 50 + framed(b"phantom") + b"x" * 50
    path = write_plain(tmp_path / "t", [outer, b"second", b"good"])
    flip(path, 20)
    flip(path, len(framed(outer)) + 13)
    repair_tfrecord(path, tmp_path / "good")
    assert records_of(tmp_path / "good") == [b"good"]


# Split.


@pytest.mark.parametrize("kind", ["", "GZIP", "ZLIB"])
def test_the_shards_have_all_records_in_turn(tmp_path, kind):
    records = [b"%d" % number for number in range(10)]
    path = written(tmp_path / "t", records, kind)
    paths = split_tfrecord(path, tmp_path / "new/part", 3)
    assert [one.name for one in paths] == [f"part-0000{n}-of-00003.tfrecord" for n in range(3)]
    assert [records_of(one) for one in paths] == [records[0::3], records[1::3], records[2::3]]
    assert all(verify_tfrecord(one).compression_type == kind for one in paths)
    assert records_of(path) == records


def test_more_shards_than_records(tmp_path):
    path = written(tmp_path / "t", [b"one"])
    paths = split_tfrecord(path, tmp_path / "part", 3)
    assert [len(records_of(one)) for one in paths] == [1, 0, 0]


@pytest.mark.parametrize("damage", ["flip", "cut", "torn"])
def test_nothing_is_published_of_a_damaged_file(tmp_path, damage):
    path = written(tmp_path / "t", [b"%d" % number for number in range(100)])
    if damage == "flip":
        flip(path, path.stat().st_size - 10)
    else:
        cut(path, path.stat().st_size - (18 if damage == "cut" else 5))
    with pytest.raises(CorruptRecordError, match="record 99"):
        split_tfrecord(path, tmp_path / "part", 3)
    assert not list(tmp_path.glob("part*"))
    assert not list(tmp_path.glob(".part*kscktmp"))


def test_splits_that_cannot_be_are_named(tmp_path):
    path = written(tmp_path / "t")
    with pytest.raises(ValueError, match="num_shards: expected"):
        split_tfrecord(path, "part", 0)
    with pytest.raises(ValueError, match="prefix: expected other names"):
        split_tfrecord(path, tmp_path / "t", 1)
    assert records_of(path) == RECORDS
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        split_tfrecord("nothing", "part", 2)


def test_a_full_disk_leaves_no_mixture_of_shards(small_disk, tmp_path):
    folder = small_disk("size=3m")
    records = [os.urandom(1000) for _ in range(300)]
    split_tfrecord(write_plain(tmp_path / "old", records), folder / "part", 3)
    old = [path.read_bytes() for path in sorted(folder.glob("part*"))]
    with pytest.raises(CheckpointWriteError, match="full"):
        split_tfrecord(
            write_plain(tmp_path / "new", [os.urandom(1000) for _ in range(2900)]),
            folder / "part",
            3,
        )
    assert [path.read_bytes() for path in sorted(folder.glob("part*"))] == old
    assert not list(folder.glob(".*kscktmp"))


def test_errors_of_the_disk_are_those_of_what_is_written(small_disk, tmp_path):
    source = write_plain(tmp_path / "t", [os.urandom(1000) for _ in range(900)])
    with pytest.raises(CheckpointWriteError, match=r"good.*full"):
        repair_tfrecord(source, small_disk("size=500k") / "good")


SPLIT = """
from keras_safe_ckpt import split_tfrecord
split_tfrecord(sys.argv[1] + "/source", sys.argv[1] + "/part", 3)
"""


def prepare_split(folder: Path) -> None:
    write_plain(folder / "source", [b"%d" % number for number in range(10)])


def check_split(folder: Path) -> None:
    """Some shards may be there, each of them whole; the next split makes all."""
    for number, path in enumerate(folder / f"part-0000{n}-of-00003.tfrecord" for n in range(3)):
        if path.exists():
            assert records_of(path) == [b"%d" % index for index in range(number, 10, 3)]
            verify_tfrecord(path)
    assert len(split_tfrecord(folder / "source", folder / "part", 3)) == 3
    assert not list(folder.glob(".*kscktmp"))


def test_a_split_killed_at_some_system_calls(tmp_path):
    calls = [("rename", 2), ("rename", 5), ("fsync", 4)]
    assert killed_at_each(SPLIT, calls, tmp_path, check_split, prepare_split).tried == len(calls)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_split_killed_at_every_system_call(tmp_path, record_property):
    kills = killed_at_each(SPLIT, None, tmp_path, check_split, prepare_split)
    record_property("campaign", f"split: {kills}, each shard whole or not there")


def test_a_file_is_not_appended_to_while_it_is_verified(tmp_path):
    """Verification of a file that grows all the time finds whole ones only."""
    path = tmp_path / "all.tfrecord"
    for number in range(20):
        with LockedTFRecordWriter(path) as writer:
            writer.write(b"%d" % number)
        assert verify_tfrecord(path).records == number + 1


def test_several_streams_of_gzip_are_one_file(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(plain_bytes(RECORDS)) + gzip.compress(plain_bytes([b"more"])))
    assert verify_tfrecord(path).records == 6
