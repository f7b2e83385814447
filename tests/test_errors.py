"""The error tree: complete, drawn as it is, picklable, and saying what to do."""

from __future__ import annotations

import errno
import inspect
import json
import pickle
import re

import pytest

from keras_safe_ckpt import errors
from keras_safe_ckpt.storage.error_facts import as_facts, from_facts

EXAMPLES = [
    errors.UnsafePathError("p", "it is a link"),
    errors.LockTimeoutError("p", "pid 1", 2.5),
    errors.LockLostError("p", "it was deleted"),
    errors.StaleHolderError("p", 1, 2),
    errors.LocksUnsupportedError("p", "ENOLCK"),
    errors.LockServerUnreachableError("host:1", "refused"),
    errors.LockServerRefusedError("host:1", "wrong password"),
    errors.CheckpointNotFoundError("p"),
    errors.CorruptCheckpointError("p", "it is short"),
    errors.CorruptRecordError("p", 3, 100, "its checksum is wrong"),
    errors.UnreadableCheckpointError("p", OSError(errno.EIO, "Input/output error")),
    errors.IncompatibleCheckpointError("p", [f"difference {n}" for n in range(12)]),
    errors.CheckpointWriteError("p", OSError(errno.ENOSPC, "No space left"), 7),
    errors.MergeConflictError("d", ["a", "b"], "shapes differ"),
    errors.ClusterConfigError("TF_CONFIG", "it is not JSON"),
    errors.AgreementError(["worker 1"], "no answer in 5 s"),
]


def classes() -> dict[str, type]:
    return {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.SafeCheckpointError)
    }


def test_every_error_has_an_example():
    kinds = {type(error).__name__ for error in EXAMPLES}
    assert kinds == classes().keys() - {"SafeCheckpointError"}


def test_drawing_matches_the_classes():
    drawn = re.findall(r"^ +(\w+Error) +\((\w+)\) +(.+)$", errors.__doc__, re.MULTILINE)
    assert {name for name, _, _ in drawn} == classes().keys() - {"SafeCheckpointError"}
    by_name = {type(error).__name__: error for error in EXAMPLES}
    for name, builtin, attributes in drawn:
        assert builtin in [kind.__name__ for kind in classes()[name].__mro__]
        for attribute in attributes.split(", "):
            assert hasattr(by_name[name], attribute), (name, attribute)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.facts == error.facts
    for name, value in error.facts.items():
        assert getattr(again, name) == value


@pytest.mark.parametrize(
    "error", [*EXAMPLES, ValueError("v"), TypeError("t")], ids=lambda error: type(error).__name__
)
def test_errors_survive_the_way_through_json(error):
    again = from_facts(json.loads(json.dumps(as_facts(error))))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert getattr(again, "path", None) == getattr(error, "path", None)


def test_an_error_of_another_kind_keeps_its_name():
    again = from_facts(as_facts(ZeroDivisionError("division")))
    assert type(again) is errors.SafeCheckpointError
    assert str(again) == "ZeroDivisionError: division"


def test_write_error_says_what_to_do_and_keeps_the_number():
    error = errors.CheckpointWriteError("file", OSError(errno.ENOSPC, "No space left"), 7)
    assert error.errno == errno.ENOSPC
    assert error.step == 7
    assert "free some space" in str(error)
    assert "(step 7)" in str(error)
    assert "unchanged" in str(error)


def test_long_lists_of_differences_are_cut():
    text = str(errors.IncompatibleCheckpointError("p", [f"difference {n}" for n in range(12)]))
    assert "difference 9" in text
    assert "difference 10" not in text
    assert "and 2 more" in text
