"""What a checkpoint says about itself, read without trust."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_safe_ckpt import CorruptCheckpointError, SafeCheckpointError
from keras_safe_ckpt.storage.dtypes import dtype_from_name, dtype_to_name
from keras_safe_ckpt.storage.manifest import (
    LARGEST_BYTES,
    ArrayRecord,
    Manifest,
    describe_writer,
)


def example() -> Manifest:
    return Manifest(
        step=3,
        epoch=1,
        metrics={"loss": 0.1, "nan": math.nan, "inf": math.inf},
        extra={"deep": [1, {"a": "ä"}]},
        arrays={"layers/dense/vars/0": ArrayRecord((2, 3), "<f4", "ab" * 16, 2048)},
        members={"config.json": "cd" * 16},
        **describe_writer("worker 1"),
    )


def test_survives_writing_and_reading():
    manifest = example()
    again = Manifest.from_json(manifest.to_json(), "x")
    assert again.to_json() == manifest.to_json()
    assert again.arrays == manifest.arrays
    assert again.worker == "worker 1"
    assert math.isnan(again.metrics["nan"])


def test_padding_is_allowed():
    assert Manifest.from_json(example().to_json() + b" " * 100, "x").step == 3


@pytest.mark.parametrize("dtype", ["float32", ">i8", "S5", "bool", "complex64", "float8_e4m3fn"])
def test_dtypes_have_names_that_come_back(dtype):
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert dtype_from_name(dtype_to_name(dtype)) == dtype


@pytest.mark.parametrize("name", ["O", "V0", "nonsense", "i4,O", "", "f4,,"])
def test_dtypes_that_are_no_plain_numbers_are_refused(name):
    with pytest.raises(ValueError, match="no dtype"):
        dtype_from_name(name)


def test_any_changed_value_is_noticed():
    document = json.loads(example().to_json())
    document["manifest"]["metrics"]["loss"] = 0.2
    with pytest.raises(CorruptCheckpointError, match="own digest"):
        Manifest.from_json(json.dumps(document).encode(), "x")


def resigned(**changes: object) -> bytes:
    """A manifest with these fields whose digest is right: only its content is wrong."""
    import xxhash

    body = json.loads(example().to_json())["manifest"]
    body.update(changes)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps(
        {"digest": xxhash.xxh3_128(text.encode()).hexdigest(), "manifest": body}
    ).encode()


def test_a_resigned_manifest_is_read():
    assert Manifest.from_json(resigned(step=9), "x").step == 9


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "3"},
        {"sequence": None},
        {"metrics": [1]},
        {"metrics": {"loss": "low"}},
        {"arrays": {"a": {"shape": [-1], "dtype": "|i1", "digest": "", "offset": 0}}},
        {"arrays": {"a": {"shape": [1 << 40] * 2, "dtype": "|i1", "digest": "", "offset": 0}}},
        {"arrays": {"a": {"shape": "3", "dtype": "|i1", "digest": "", "offset": 0}}},
        {"arrays": {"a": {"shape": [3], "dtype": "O", "digest": "", "offset": 0}}},
        {"arrays": {"a": {"shape": [3], "dtype": "|i1", "digest": "", "offset": -1}}},
        {"arrays": {"a": {"dtype": "int8"}}},
        {"arrays": []},
        {"unknown_field": 1},
        {"wall_time": "now"},
        {"format_version": "new"},
    ],
)
def test_malformed_fields_are_refused(changes):
    with pytest.raises(CorruptCheckpointError) as caught:
        Manifest.from_json(resigned(**changes), "some/path")
    assert caught.value.path == "some/path"


def test_huge_and_deep_documents_are_refused():
    with pytest.raises(CorruptCheckpointError, match="bytes"):
        Manifest.from_json(b" " * (LARGEST_BYTES + 1), "x")
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_json(b"[" * 1_000_000, "x")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_an_error_of_the_tree(data):
    with pytest.raises(SafeCheckpointError):
        Manifest.from_json(data, "x")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(json.loads(example().to_json())["manifest"])), json_values)
def test_any_json_in_any_field_is_read_or_refused(field, value):
    def outcome() -> str:
        try:
            Manifest.from_json(resigned(**{field: value}), "x").to_json()
        except SafeCheckpointError:
            return "refused"
        return "read"

    # Either is right; any other exception goes through and fails.
    assert outcome() in ("read", "refused")
