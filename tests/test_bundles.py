"""Checkpoints of TensorFlow, read and verified without it."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
from bundle_files import write_value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras_setup import mirrored_strategy, tf

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SafeCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.bundles.bundle import Bundle, part_of
from keras_safe_ckpt.storage.checksum import extended, masked


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    """One of everything: numbers, strings, nothing, an iterator (a variant), a table."""
    folder = tmp_path_factory.mktemp("rich")
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    table.insert(["a", "b"], tf.constant([1, 2], tf.int64))
    checkpoint = tf.train.Checkpoint(
        numbers=tf.Variable([1.0, 2.0]),
        strings=tf.Variable(["x" * 300, "yy", ""]),
        truth=tf.Variable(True),
        nothing=tf.Variable(tf.zeros((0, 3))),
        halves=tf.Variable(tf.cast([1, 2], tf.bfloat16)),
        table=table,
        iterator=iter(tf.data.Dataset.range(9).shuffle(3)),
    )
    next(checkpoint.iterator)
    checkpoint.write(str(folder / "rich"))
    return Bundle(folder, "rich")


def test_everything_that_tensorflow_writes_is_whole(rich):
    rich.verify()
    entries = {entry.name: entry for entry in rich.check().entries}
    assert entries["numbers/.ATTRIBUTES/VARIABLE_VALUE"].size == 8
    assert entries["strings/.ATTRIBUTES/VARIABLE_VALUE"].count == 3
    assert {7, 21} <= {entry.dtype for entry in entries.values()}


def damaged(bundle: Bundle, tmp_path: Path, file: Path, data: bytes) -> Bundle:
    for path in (bundle.index, bundle.data(0, 1)):
        shutil.copy(path, tmp_path)
    (tmp_path / file.name).write_bytes(data)
    return Bundle(tmp_path, bundle.name)


@pytest.mark.parametrize("part", ["index", "data"])
def test_every_flipped_byte_is_seen_or_says_nothing(rich, tmp_path, part):
    path = rich.index if part == "index" else rich.data(0, 1)
    data, index, unseen = path.read_bytes(), rich.check(), []
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        copy = damaged(rich, tmp_path, path, bytes(flipped))
        try:
            copy.verify()
        except CorruptCheckpointError:
            continue
        unseen.append(position)
        assert copy.check() == index, position
    # Behind the checksums of an index there are only bytes that nobody reads, about fifty.
    assert len(unseen) <= (60 if part == "index" else 0)


@pytest.mark.parametrize("part", ["index", "data"])
def test_every_cut_is_seen_without_reading_the_tensors(rich, tmp_path, part):
    path = rich.index if part == "index" else rich.data(0, 1)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        with pytest.raises(CorruptCheckpointError):
            damaged(rich, tmp_path, path, data[:length]).check()


def test_missing_parts_are_named(rich, tmp_path):
    shutil.copy(rich.index, tmp_path)
    with pytest.raises(CorruptCheckpointError, match=r"rich\.data-00000-of-00001 is missing"):
        Bundle(tmp_path, "rich").check()
    with pytest.raises(CheckpointNotFoundError, match="other"):
        Bundle(tmp_path, "other").check()
    (tmp_path / "folder.index").mkdir()
    with pytest.raises(UnreadableCheckpointError):
        Bundle(tmp_path, "folder").check()


def test_several_data_files(tmp_path):
    many = {f"v{number}": tf.Variable(tf.zeros(1000)) for number in range(8)}
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=8000)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    tf.train.Checkpoint(**many).write(str(tmp_path / "many"), options=options)
    bundle = Bundle(tmp_path, "many")
    index = bundle.check()
    assert index.shards > 2
    bundle.verify()
    last = bundle.data(index.shards - 1, index.shards)
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=last.name):
        bundle.check()


def test_parts_of_a_partitioned_variable_are_read(tmp_path):
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        v1.get_variable("v", (4, 2), partitioner=v1.fixed_size_partitioner(2))
        saver = v1.train.Saver(sharded=True)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            saver.save(session, str(tmp_path / "model"))
    bundle = Bundle(tmp_path, "model")
    bundle.verify()
    assert any(entry.sliced for entry in bundle.check().entries)
    data = bytearray(bundle.data(0, 1).read_bytes())
    data[20] ^= 1  # In the second part.
    bundle.data(0, 1).write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        bundle.verify()


def test_variables_of_a_strategy(tmp_path):
    with mirrored_strategy().scope():
        variable = tf.Variable([1.0, 2.0])
    tf.train.Checkpoint(v=variable).write(str(tmp_path / "m"))
    Bundle(tmp_path, "m").verify()


@pytest.fixture(scope="module")
def small_index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write_value(folder / "small", 1.0)
    return (folder / "small.index").read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_hostile_index_is_an_error_of_the_tree(tmp_path_factory, small_index, data):
    """With checksums that are right, so that what is behind them is reached."""
    folder = tmp_path_factory.mktemp("hostile")
    block = bytearray(data.draw(st.binary(max_size=80)))
    block += struct.pack("<II", 0, 1)
    trailer = b"\0" + struct.pack("<I", masked(extended(0, bytes(block) + b"\0")))
    handle = bytes([0, *_varint(len(block))])
    outer = bytes([0, 1, len(handle)]) + b"k" + handle + struct.pack("<II", 0, 1)
    start = len(block) + 5
    outer_trailer = b"\0" + struct.pack("<I", masked(extended(0, outer + b"\0")))
    footer = bytes([0, 0, *_varint(start), *_varint(len(outer))]).ljust(40, b"\0")
    footer += struct.pack("<Q", 0xDB4775248B80FB57)
    (folder / "x.index").write_bytes(bytes(block) + trailer + outer + outer_trailer + footer)
    with pytest.raises(SafeCheckpointError):
        Bundle(folder, "x").verify()


def _varint(value: int) -> list[int]:
    out = []
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return [*out, value]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(junk=st.binary(max_size=300))
def test_junk_is_no_index(tmp_path_factory, small_index, junk):
    folder = tmp_path_factory.mktemp("junk")
    for content in (junk, junk + small_index[-48:], small_index[:40] + junk + small_index[-48:]):
        (folder / "x.index").write_bytes(content)
        with pytest.raises(CorruptCheckpointError):
            Bundle(folder, "x").check()


def test_names_of_parts():
    assert part_of("ckpt-7.index") == ("ckpt-7", "index")
    assert part_of("a.b.data-00001-of-00012") == ("a.b", "data-00001-of-00012")
    assert part_of("m.meta", "meta") == ("m", "meta")
    assert part_of("new\nline.index") == ("new\nline", "index")
    for other in (
        "m.meta",
        "checkpoint",
        "ckpt-7",
        ".ckpt-7.index",
        "events.jsonl",
        "x.data-1-of-2",
    ):
        assert part_of(other) is None
