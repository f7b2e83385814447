"""A TensorFlow checkpoint that is being replaced under its name is in a temporary folder only.

Neither an error of the moment nor a sweep by somebody else may take it from there.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from bundle_files import copy_bundle, value_of, write_value
from processes import run_ok

from keras_safe_ckpt.storage.atomic import sweep_orphans
from keras_safe_ckpt.storage.bundles import recovery, staging
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import Family, Keep
from keras_safe_ckpt.storage.bundles.recovery import reading
from keras_safe_ckpt.storage.bundles.staging import StagedBundle, stage
from keras_safe_ckpt.storage.publishing import LOCK_NAME

KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from bundle_files import copy_bundle
from keras_safe_ckpt.storage.bundles import staging
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import Family, Keep

for value, last in ((1, False), (2, True)):
    place = BundleDirectory({directory!r})
    with staging.stage(place, Family("ckpt"), None, exactly="one") as staged:
        copy_bundle(Path({made!r}) / str(value), Path(staged.prefix))
        if last:
            staging.place = lambda *_: os._exit(0)  # The old one is out of its place by now.
        staged.publish(Keep(2))
"""


@pytest.fixture
def half_replaced(tmp_path):
    made, directory = tmp_path / "made", tmp_path / "run"
    made.mkdir()
    for value in (1, 2):
        write_value(made / str(value), value)
    tests = str(Path(__file__).parent)
    run_ok(KILLED.format(tests=tests, directory=str(directory), made=str(made)))
    assert "one.index" not in os.listdir(directory)
    return directory


def test_what_cannot_be_put_right_now_is_not_swept(half_replaced, monkeypatch):
    real, failures = recovery.double, []

    def fail_once(*arguments):
        if not failures:
            failures.append(1)
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(recovery, "double", fail_once)
    place = BundleDirectory(half_replaced)
    with place.locks.exclusive(half_replaced / LOCK_NAME):
        recovery.recover(place)
    assert failures
    with reading(place):
        assert [value_of(bundle.prefix) for bundle in place.whole(None)] == [1]


def test_another_writer_in_the_directory_does_not_sweep_what_was_replaced(half_replaced):
    sweep_orphans(half_replaced)  # As each save of a Keras checkpoint, and each data file does.
    place = BundleDirectory(half_replaced)
    with reading(place):
        assert [value_of(bundle.prefix) for bundle in place.whole(None)] == [1]


#: What is replaced is out of its place, the new one cannot come there, nor can the old one yet.
FAILING = KILLED.replace("os._exit(0)", "spoil()").replace(
    "for value, last",
    """
import errno
from keras_safe_ckpt.storage.bundles import recovery
def fail(*_):
    raise OSError(errno.EIO, "Input/output error")
def spoil():
    {spoil}
    fail()

for value, last""",
)


@pytest.mark.parametrize(
    "spoil",
    [
        "recovery.double = fail",  # Putting it right fails as well, once.
        "Path.exists = fail",  # A look at what was reached fails.
    ],
)
def test_what_could_not_be_put_right_outlives_its_process(tmp_path, spoil):
    made, directory = tmp_path / "made", tmp_path / "run"
    made.mkdir()
    for value in (1, 2):
        write_value(made / str(value), value)
    tests = str(Path(__file__).parent)
    code = FAILING.format(tests=tests, directory=str(directory), made=str(made), spoil=spoil)
    with pytest.raises(AssertionError, match="Input/output error"):
        run_ok(code)
    place = BundleDirectory(directory)
    with reading(place):
        assert [value_of(bundle.prefix) for bundle in place.whole(None)] == [1]


def test_an_interruption_while_it_is_put_right_keeps_what_was_replaced(tmp_path, monkeypatch):
    """Two of Ctrl-C, say: the second one comes before anything could be put right."""
    for value in (1, 2):
        write_value(tmp_path / str(value), value)
    place = BundleDirectory(tmp_path / "run")

    def interrupted(*_):
        raise KeyboardInterrupt

    def save(value):
        with stage(place, Family("ckpt"), None, exactly="one") as staged:
            copy_bundle(tmp_path / str(value), Path(staged.prefix))
            staged.publish(Keep(2))

    save(1)
    with monkeypatch.context() as patched:
        patched.setattr(staging, "place", interrupted)
        patched.setattr(StagedBundle, "_put_right", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(2)
    with reading(place):
        assert [value_of(bundle.prefix) for bundle in place.whole(None)] == [1]
    assert not list(tmp_path.rglob("*.kscktmp"))
