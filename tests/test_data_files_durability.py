"""A power cut forgets what was not synced: the order of syncs and renames of data files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from processes import run_ok

from keras_safe_ckpt import LockedTFRecordWriter, WorkerH5Writer
from keras_safe_ckpt.datasets import central_process, spool
from keras_safe_ckpt.datasets.central_file import CentralFile
from keras_safe_ckpt.datasets.feed_folder import FeedFolder
from keras_safe_ckpt.datasets.frames import Message
from keras_safe_ckpt.errors import LockLostError

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


@pytest.fixture
def log(monkeypatch) -> list[tuple[str, str]]:
    """Each sync, and each rename by its new name; names without what makes them unique."""
    calls: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("sync", "directory" if path.is_dir() else path.name))
        fsync(descriptor)

    def noted_replace(source, target, **options) -> None:
        calls.append(("rename", Path(target).name))
        replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return calls


@pytest.fixture
def durable_names(monkeypatch) -> list[tuple[Path, set[str]]]:
    """Each directory that was synced, with what was in it then."""
    found: list[tuple[Path, set[str]]] = []
    fsync = os.fsync

    def noted_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)
        if path.is_dir():
            found.append((path, set(os.listdir(path))))

    monkeypatch.setattr(os, "fsync", noted_fsync)
    return found


def in_order(log: list[tuple[str, str]], *wanted: tuple[str, str]) -> bool:
    """Whether these come one after another, with anything in between."""
    rest = iter(log)
    return all(call in rest for call in wanted)


WORK, JOURNAL = ".worker-00000.h5.unfinished", ".worker-00000.h5.unfinished.journal"


def test_a_flush_is_on_the_disk_before_the_journal_says_so(tmp_path, log):
    writer = WorkerH5Writer(tmp_path, 0)
    writer.append("x", [1.0])
    log.clear()
    writer.flush()
    assert in_order(log, ("sync", WORK), ("rename", JOURNAL), ("sync", "directory"))
    writer.abandon()


def test_a_worker_file_is_on_the_disk_before_it_has_its_name(tmp_path, log):
    with WorkerH5Writer(tmp_path, 0) as writer:
        writer.append("x", [1.0])
        writer.flush()
        log.clear()
    last = len(log) - log[::-1].index(("rename", JOURNAL)) - 1
    assert log[last + 1 :] == [
        ("sync", "directory"),
        ("sync", WORK),  # The pages of the journal are in the file.
        ("rename", "worker-00000.h5"),
        ("sync", "directory"),
    ]


def test_an_append_is_on_the_disk_before_the_note_says_so(tmp_path, log):
    note, path = ".all.tfrecord.records", "all.tfrecord"
    for is_new in (True, False):
        log.clear()
        with LockedTFRecordWriter(tmp_path / path) as writer:
            writer.write(b"record")
        first = log.index(("rename", note))
        data = log.index(("sync", path))
        second = log.index(("rename", note), data)
        assert first < data < second
        # The name of a new file as well.
        assert (("sync", "directory") in log[data:second]) == is_new


def test_that_all_was_read_is_on_the_disk_before_the_file_has_its_name(tmp_path, log):
    target = tmp_path / "all.h5"
    folder = FeedFolder(target)
    folder.make()
    stream = spool.SpoolWriter(folder.path, "stream")
    stream.write(Message("x", np.arange(3.0)))
    stream.rest()
    folder.write("closed", {})
    central_process._work(target, False, central_process.Starter())
    drained, published = log.index(("rename", "drained")), log.index(("rename", "all.h5"))
    assert drained < published
    assert log[drained + 1] == ("sync", "directory")
    kind, name = log[drained - 1]
    assert kind == "sync"
    assert "drained" in name


@pytest.mark.parametrize("resume", [False, True])
def test_the_journal_of_an_earlier_file_is_gone_for_good_before_the_next_one(
    tmp_path, durable_names, resume
):
    """As a kill right after publishing leaves it; with it the next file would be recovered."""
    with WorkerH5Writer(tmp_path, 0) as writer:
        writer.append("x", [1.0])
        writer.flush()
        journal = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(journal)
    durable_names.clear()
    writer = WorkerH5Writer(tmp_path, 0, resume=resume)
    assert any(path == tmp_path and not names & {WORK, JOURNAL} for path, names in durable_names), (
        durable_names
    )
    writer.abandon()


def test_rows_of_an_earlier_life_have_their_new_name_before_their_journal_goes(
    tmp_path, durable_names
):
    """Without it they would be taken for nothing after a power cut, and removed."""
    writer = WorkerH5Writer(tmp_path, 0)
    writer.append("x", [1.0])
    writer.abandon()
    durable_names.clear()
    writer = WorkerH5Writer(tmp_path, 0)
    aside = ".worker-00000.h5.interrupted"
    assert any(path == tmp_path and {aside, JOURNAL} <= names for path, names in durable_names), (
        durable_names
    )
    writer.abandon()


def test_a_feeder_is_forgotten_when_its_rows_are_gone_for_good(tmp_path, durable_names):
    """Else they came back after a power cut, and nobody knew that they are in the file."""
    name = run_ok(
        "from keras_safe_ckpt.storage.temp_names import new_temp_name\n"
        "print(new_temp_name('feed'), end='')"
    )
    target = tmp_path / "all.h5"
    folder = FeedFolder(target)
    folder.make()
    stream = spool.SpoolWriter(folder.path, name)
    stream.write(Message("x", np.arange(3.0)))
    stream.rest()
    file = CentralFile(target, lambda: False)
    assert file._turn()
    durable_names.clear()
    file._commit()
    assert name not in file._streams
    assert any(path == folder.path and f"{name}.0" not in names for path, names in durable_names)
    file.close()


def test_the_streams_have_left_for_good_before_any_of_them_goes(tmp_path, durable_names):
    """Half of them would look like something new after a power cut."""
    folder = FeedFolder(tmp_path / "all.h5")
    folder.make()
    (folder.path / "stream.0").touch()
    folder.clear()
    past = f"{folder.path.name}.past"
    assert any(
        path == tmp_path and past in names and folder.path.name not in names
        for path, names in durable_names
    )
    assert not list(tmp_path.iterdir())


def test_a_worker_that_lost_its_lock_publishes_nothing(tmp_path):
    writer = WorkerH5Writer(tmp_path, 0)
    writer.append("x", [1.0])
    (tmp_path / ".worker-00000.h5.lock").unlink()
    with pytest.raises(LockLostError, match="was deleted"):
        writer.close()
    assert not (tmp_path / "worker-00000.h5").exists()


def test_a_frame_that_is_not_what_was_written_is_not_read(tmp_path):
    """As a power cut leaves it: the size is there, and some of the bytes are not."""
    writer = spool.SpoolWriter(tmp_path, "stream")
    writer.write(Message("x", np.arange(1000.0)))
    path = tmp_path / "stream.0"
    data = path.read_bytes()
    path.write_bytes(data[:-500] + bytes(500))
    reader = spool.SpoolReader(tmp_path, "stream")
    assert reader.read() is None
    path.write_bytes(data)
    found = reader.read()
    assert found is not None
    assert found.rows.tolist() == list(range(1000))
    reader.close()
    writer.rest()
