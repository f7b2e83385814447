"""Files that somebody made to do harm, handed to whoever would read them.

What is expected: an error of the tree, or a whole reading, in bounded time and memory; nothing of
the file is executed, and nothing outside of it is read or written.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attacked
import pytest
import xxhash
from hostile_files import (
    entry,
    head,
    signed_manifest,
    signed_weights,
    table,
    with_footer,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import PROJECT, environment
from record_files import framed
from snapshots import make_snapshot

from keras_safe_ckpt import (
    CheckpointStore,
    SafeCheckpointError,
    repair_tfrecord,
    verify_tfrecord,
)
from keras_safe_ckpt.datasets.frames import HEADER, MAGIC
from keras_safe_ckpt.datasets.spool import SpoolReader
from keras_safe_ckpt.errors import CorruptCheckpointError
from keras_safe_ckpt.reports.history import read_history
from keras_safe_ckpt.storage.array_source import open_arrays
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.survey import look_at

PACKAGE = PROJECT / "keras_safe_ckpt"
#: Of what training looks at some; the readers of storage have seen them all.
TRAINED_ON = ("lambda", "external_link, weights.h5", "deep extra", "overlapping members")


def attack(tmp_path: Path, amount: str, asked: list[str]) -> dict[str, dict[str, Any]]:
    """What each reader made of each file, in processes of their own."""
    done = subprocess.run(
        [sys.executable, attacked.__file__, str(tmp_path), amount, *asked],
        env={**environment(), "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads((tmp_path / "results.json").read_text())
    assert sorted(found) == sorted(asked)
    wrong = {
        f"{file}, {reader}": outcome["wrong"]
        for file, outcomes in found.items()
        for reader, outcome in outcomes.items()
        if outcome["wrong"]
    }
    assert not wrong, json.dumps(wrong, indent=1)
    for file, outcomes in found.items():
        kind, _, name = file.partition(":")
        if kind == "training":
            continue
        accepted = [
            reader
            for reader in attacked.KINDS[kind][name].refused_by
            if outcomes[reader]["refused"] is None
        ]
        assert not accepted, f"{file} was taken by {accepted}"
    return found


def all_files() -> list[str]:
    return [f"{kind}:{name}" for kind, files in attacked.KINDS.items() for name in files]


def test_no_hostile_file_does_any_harm(tmp_path):
    trained = [f"training:{name}" for name in TRAINED_ON]
    attack(tmp_path, "few", [*all_files(), *trained])


@pytest.mark.campaign
@pytest.mark.parametrize("kind", [*attacked.KINDS, "training"])
def test_no_reader_at_all_is_harmed(tmp_path, kind, record_property):
    names = attacked.KINDS["checkpoint" if kind == "training" else kind]
    found = attack(tmp_path, "all", [f"{kind}:{name}" for name in names])
    outcomes = [one for readers in found.values() for one in readers.values()]
    record_property(
        "campaign",
        f"{kind}: {len(found)} hostile files, {len(outcomes)} readings, "
        f"{sum(one['refused'] is not None for one in outcomes)} refused, at most "
        f"{max(one['seconds'] for one in outcomes):.1f} s and "
        f"{max(one['growth'] for one in outcomes) >> 20} MiB each",
    )


# What no source says.


def calls_in(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def unsafe_parts(path: Path) -> list[str]:
    found = []
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("safe_mode", "allow_pickle"):
            found.append(f"{node.arg}=")
        elif isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in ("enable_unsafe_deserialization", "eval", "exec", "SafeModeScope"):
                found.append(name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names]
            found += [f"import {name}" for name in names if name in _UNSAFE_MODULES]
    return found


_UNSAFE_MODULES = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve",
                   "marshal")  # fmt: skip


def test_nothing_switches_the_safe_mode_off_or_reads_a_pickle(tmp_path):
    unsafe = {
        str(path.relative_to(PACKAGE)): parts
        for path in sorted(PACKAGE.rglob("*.py"))
        if (parts := unsafe_parts(path))
    }
    assert not unsafe
    (tmp_path / "bad.py").write_text("import pickle\nload(x, safe_mode=False)\neval('1')")
    assert sorted(unsafe_parts(tmp_path / "bad.py")) == ["eval", "import pickle", "safe_mode="]


# Frames of feeders: their folder is our own user's, and still nothing in it is believed.


def frame(description: bytes, data: bytes = b"") -> bytes:
    digest = xxhash.xxh3_64_intdigest(description + data)
    return HEADER.pack(MAGIC, len(description), len(data), digest) + description + data


@pytest.mark.parametrize(
    "facts",
    [
        b"", b"7", b"[" * 100_000, b"{}",
        b'{"name": "x", "compression": null, "asks": true}',
        *(
            b'{"name": "x", "compression": null, "asks": false, "has_type": true, '
            b'"dtype": "%s", "shape": %s}' % pair
            for pair in [
                (b"|O", b"[1]"), (b"text", b"[1099511627776]"), (b"text", b"[-1]"),
                (b"<f8", b"[-1, 2]"), (b"nothing", b"[1]"), (b"<f8", b"7"),
            ]
        ),
    ],
)  # fmt: skip
def test_a_frame_of_nonsense_is_an_error_of_the_tree(tmp_path, facts):
    (tmp_path / "s.0").write_bytes(frame(facts, bytes(12)))
    reader = SpoolReader(tmp_path, "s")
    with pytest.raises(CorruptCheckpointError, match="cannot be understood"):
        reader.read()
    reader.close()


# Bytes that nobody has thought of.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
FIELDS = sorted(signed_manifest(b"")["manifest"])
changes = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=8)


def changed(data: bytes, places: list[tuple[int, int]]) -> bytes:
    found = bytearray(data)
    for place, value in places:
        found[place % len(found)] = value
    return bytes(found)


def in_folder(read: Callable[[Path], object]) -> None:
    """Either is right, to read or to refuse; any other exception goes through and fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            read(Path(folder))
        except SafeCheckpointError:
            return


def fuzz_manifest(data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3))
    array = st.fixed_dictionaries(
        {
            "shape": json_values | st.lists(st.integers(-2, 1 << 64), max_size=4),
            "dtype": json_values | st.sampled_from(["|u1", "<f4", "O", "bfloat16", "3f4", "V9"]),
            "digest": json_values,
            "offset": json_values | st.integers(-5, 2000),
        }
    )
    arrays = data.draw(st.dictionaries(st.text(max_size=5), array, max_size=3))

    def read(folder: Path) -> None:
        path = folder / "a.weights.h5"
        path.write_bytes(signed_weights(bytes(1000), **{"arrays": arrays, **fields}))
        look_at(path, verify=True)
        with open_arrays(path) as source:
            for name in source.arrays:
                source.read(name)

    in_folder(read)


def _saved(format: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(folder, format=format)
        found = store.publish(make_snapshot(size=20), step=1)
        assert found is not None
        return found.path.read_bytes()


def fuzz_archive(data: st.DataObject) -> None:
    """The bytes of headers and of the list in the end, where no digest is."""
    whole = _ARCHIVE
    places = data.draw(changes)
    end = len(whole) - 400
    moved = [(place % 60 if place % 2 else end + place % 400, value) for place, value in places]

    def read(folder: Path) -> None:
        path = folder / "a.keras"
        path.write_bytes(changed(whole, moved))
        look_at(path, verify=True)

    in_folder(read)


def fuzz_weights(data: st.DataObject) -> None:
    """HDF5's own bytes, with a manifest that is right: they are never given to HDF5."""
    whole = _WEIGHTS
    content = changed(whole[:2000], data.draw(changes)) + whole[2000:]
    cut = data.draw(st.integers(0, len(content)))

    def read(folder: Path) -> None:
        path = folder / "a.weights.h5"
        path.write_bytes(content[:cut] if cut % 3 == 0 else content)
        look_at(path, verify=True)
        path.write_bytes(signed_weights(content))
        look_at(path, verify=True)

    in_folder(read)


def fuzz_footer(data: st.DataObject) -> None:
    manifest, content = data.draw(st.binary(max_size=300)), data.draw(st.binary(max_size=100))

    def read(folder: Path) -> None:
        path = folder / "a.weights.h5"
        path.write_bytes(with_footer(content, manifest))
        CheckpointStore(folder).verify(path)

    in_folder(read)


def fuzz_records(data: st.DataObject) -> None:
    pieces = st.one_of(
        st.binary(max_size=40).map(framed),
        st.integers(0, 1 << 64 - 1).map(lambda n: head(n % (1 << 64))),
        st.integers(0, 300).map(head),
        st.binary(max_size=30),
    )
    content = b"".join(data.draw(st.lists(pieces, max_size=12)))

    def read(folder: Path) -> None:
        path = folder / "r"
        path.write_bytes(content)
        report = repair_tfrecord(path, folder / "good")
        assert verify_tfrecord(folder / "good").records == report.records
        verify_tfrecord(path)

    in_folder(read)


def fuzz_bundle(data: st.DataObject) -> None:
    value = st.binary(max_size=30) | st.lists(
        st.tuples(st.integers(1, 8), st.integers(0, 1 << 63)), max_size=6
    ).map(lambda fields: b"".join(bytes([n << 3]) + _varint(v) for n, v in fields))
    entries = st.tuples(st.integers(0, 4), st.binary(max_size=6), value)
    listed = b"".join(entry(*one) for one in data.draw(st.lists(entries, max_size=6)))
    index = table(entry(0, b"", b"\x08\x01") + listed, data.draw(st.integers(1, 3)))
    content = data.draw(st.binary(max_size=60))

    def read(folder: Path) -> None:
        (folder / "b.index").write_bytes(index)
        (folder / "b.data-00000-of-00001").write_bytes(content)
        look_at(folder / "b", verify=True)
        with open_arrays(folder / "b") as source:
            for name in source.arrays:
                source.read(name)
        Bundle(folder, "b").verify()

    in_folder(read)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def fuzz_events(data: st.DataObject) -> None:
    good = {"event": "save", "time": 1.0, "host": "h", "pid": 1}
    keys = st.sampled_from(["event", "time", "pid", "step", "file", "seconds", "worker", "x"])
    lines = data.draw(st.lists(st.dictionaries(keys, json_values, max_size=4), max_size=4))
    junk = data.draw(st.binary(max_size=50))
    text = b"\n".join([json.dumps({**good, **line}).encode() for line in lines] + [junk])

    def read(folder: Path) -> None:
        (folder / "events.jsonl").write_bytes(text)
        read_history(folder)
        CheckpointStore(folder).latest()

    in_folder(read)


FUZZED = {
    "manifests": fuzz_manifest,
    "archives": fuzz_archive,
    "weights": fuzz_weights,
    "footers": fuzz_footer,
    "records": fuzz_records,
    "bundles": fuzz_bundle,
    "events": fuzz_events,
}
_ARCHIVE, _WEIGHTS = _saved("keras"), _saved("weights_h5")


def run_fuzz(what: str, examples: int) -> int:
    count = 0

    @settings(
        max_examples=examples, deadline=20_000, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        nonlocal count
        count += 1
        FUZZED[what](data)

    one()
    return count


@pytest.mark.parametrize("what", FUZZED)
def test_fuzzed_bytes_are_read_or_refused(what):
    assert run_fuzz(what, 40) >= 40


@pytest.mark.campaign
@pytest.mark.parametrize("what", FUZZED)
def test_many_fuzzed_bytes_are_read_or_refused(what, record_property):
    record_property("campaign", f"{run_fuzz(what, 3000):,} fuzzed {what}: read, or refused")
