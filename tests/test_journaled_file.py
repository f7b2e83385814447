"""A file that after a crash is what it was at its last commit."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from killing import killed_at_each

from keras_safe_ckpt.errors import CheckpointWriteError, CorruptCheckpointError
from keras_safe_ckpt.storage import early_sync, journaled_file
from keras_safe_ckpt.storage.journaled_file import JournaledFile, journal_of, recover


def put(file: JournaledFile, offset: int, data: bytes) -> None:
    file.seek(offset)
    assert file.write(memoryview(data)) == len(data)


def content(file: JournaledFile) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return file.read(size)


def crashed(path: Path, into: Path) -> Path:
    """The files as a crash at this moment would leave them."""
    for source in (path, journal_of(path)):
        if source.exists():
            shutil.copy(source, into / source.name)
    return into / path.name


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 30_000), st.integers(1, 9_000)),
        st.tuples(st.just("truncate"), st.integers(0, 30_000), st.just(0)),
        st.tuples(st.just("commit"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@given(STEPS)
@settings(deadline=None, max_examples=60)
def test_what_is_read_is_what_was_written_and_a_crash_leaves_the_last_commit(
    tmp_path_factory, steps
):
    folder = tmp_path_factory.mktemp("journaled")
    path = folder / "file"
    file = JournaledFile(path)
    model, committed = bytearray(), None
    for number, (what, place, size) in enumerate(steps):
        if what == "write":
            data = bytes([number % 255 + 1]) * size
            put(file, place, data)
            model.extend(bytes(max(0, place + size - len(model))))
            model[place : place + size] = data
        elif what == "truncate":
            # As HDF5 does it: only to make the file longer, or at the end of all.
            if place >= len(model):
                file.truncate(place)
                model.extend(bytes(place - len(model)))
        else:
            file.commit(b"note %d" % number)
            committed = (bytes(model), b"note %d" % number)
        assert content(file) == bytes(model)
        copy = crashed(path, tmp_path_factory.mktemp("crashed"))
        if committed is None:
            assert recover(copy) is None
        else:
            assert recover(copy) == committed[1]
            assert copy.read_bytes() == committed[0]
            assert recover(copy) == committed[1], "as often as one likes"
    file.close()


def test_a_file_that_was_recovered_is_gone_on_with(tmp_path):
    path = tmp_path / "file"
    file = JournaledFile(path)
    put(file, 0, b"a" * 5000)
    file.commit()
    put(file, 100, b"lost")
    put(file, 5000, b"lost as well")
    file.close()
    assert recover(path) == b""
    file = JournaledFile(path)
    put(file, 4999, b"bc")
    file.commit()
    file.close()
    assert recover(path) == b""
    assert path.read_bytes() == b"a" * 4999 + b"bc"


@pytest.mark.parametrize("damage", ["cut", "flip", "other", "empty", "link", "pipe"])
def test_what_cannot_be_recovered_stays_as_it_is(tmp_path, damage):
    """To take it for a file without a commit would delete all that was committed."""
    path = tmp_path / "file"
    file = JournaledFile(path)
    put(file, 0, b"a" * 5000)
    file.commit()
    put(file, 10, b"b")
    file.commit()
    file.close()
    journal = journal_of(path)
    data = bytearray(journal.read_bytes())
    if damage == "cut":
        del data[-1]
    elif damage == "flip":
        data[-1] ^= 1
    elif damage == "other":
        data[:4] = b"none"
    else:
        data.clear()
    journal.write_bytes(data)
    if damage in ("link", "pipe"):
        journal.unlink()
        journal.symlink_to(tmp_path / "elsewhere") if damage == "link" else os.mkfifo(journal)
    before = path.read_bytes()
    with pytest.raises(CorruptCheckpointError, match="Move both away to begin anew"):
        recover(path)
    assert path.read_bytes() == before


def test_publishing_leaves_the_file_alone(tmp_path):
    file = JournaledFile(tmp_path / "work")
    put(file, 0, b"x" * 10_000)
    file.commit()
    put(file, 5, b"y")
    file.publish(tmp_path / "done")
    assert os.listdir(tmp_path) == ["done"]
    assert (tmp_path / "done").read_bytes() == b"xxxxxy" + b"x" * 9_994


def test_memory_is_only_for_what_was_committed_before(tmp_path):
    file = JournaledFile(tmp_path / "work")
    put(file, 0, bytes(10 << 20))
    assert file.waiting_bytes == 0
    file.commit()
    put(file, 8000, b"across two pages" * 20)
    assert file.waiting_bytes == 2 * 4096
    file.commit()
    assert file.waiting_bytes == 0
    file.close()


def test_a_forked_child_writes_nothing(tmp_path):
    path = tmp_path / "work"
    file = JournaledFile(path)
    put(file, 0, b"parent")
    file.commit()
    child = os.fork()
    if child == 0:
        put(file, 0, b"child!")
        put(file, 6, b"behind")
        os._exit(0)
    os.waitpid(child, 0)
    assert path.read_bytes() == b"parent"
    file.close()


def test_after_an_error_nothing_is_written(tmp_path, small_disk):
    folder = small_disk("size=64k")
    file = JournaledFile(folder / "work")
    put(file, 0, b"a" * 20_000)
    file.commit(b"first")
    put(file, 20_000, bytes(100_000))  # HDF5 would not survive an error here.
    assert isinstance(file.error, OSError)
    assert file.error.errno == errno.ENOSPC
    put(file, 0, b"swallowed")
    with pytest.raises(OSError, match="No space"):
        file.commit()
    file.close()
    assert recover(folder / "work") == b"first"
    assert (folder / "work").read_bytes() == b"a" * 20_000


def test_a_journal_that_does_not_fit_leaves_the_commit_before(tmp_path, small_disk):
    folder = small_disk("size=100k")
    file = JournaledFile(folder / "work")
    put(file, 0, b"a" * 60_000)
    file.commit(b"first")
    for page in range(12):
        put(file, page * 4096, b"b")
    with pytest.raises(CheckpointWriteError):
        file.commit(b"second")
    file.close()
    assert recover(folder / "work") == b"first"
    assert (folder / "work").read_bytes() == b"a" * 60_000


#: Rows that say which commit they belong to; three commits, with changes all over the file.
COMMITS = """
import h5py
from pathlib import Path
from keras_safe_ckpt.storage.journaled_file import JournaledFile
FOLDER = Path(sys.argv[1])
file = JournaledFile(FOLDER / "work")
h5 = h5py.File(file, "w")
numbers = h5.create_dataset("numbers", (0, 50), maxshape=(None, 50), chunks=(7, 50), dtype="i8")
texts = h5.create_dataset("texts", (0,), maxshape=(None,), dtype=h5py.string_dtype())
for commit in range(1, 4):
    numbers.resize(commit * 40, 0)
    numbers[-40:] = commit
    texts.resize(commit * 10, 0)
    texts[-10:] = [f"text {commit}"] * 10
    h5.attrs["commit"] = commit
    h5.create_group(f"group {commit}")
    h5.flush()
    file.commit(b"%d" % commit)
h5.close()
file.publish(FOLDER / "done")
"""


def check_commit(folder: Path) -> int:
    """The number of the commit that is there; everything must be of it."""
    work, done = folder / "work", folder / "done"
    if done.exists():
        path, commit = done, 3
    else:
        note = recover(work) if work.exists() else None
        if note is None:
            return 0
        path, commit = work, int(note or b"3")  # That of `publish` has no note.
    with h5py.File(path) as file:
        assert file.attrs["commit"] == commit
        assert [name for name in file if name.startswith("group")] == [
            f"group {number}" for number in range(1, commit + 1)
        ]
        expected = np.repeat(np.arange(1, commit + 1), 40)
        assert (file["numbers"][:] == expected[:, None]).all()
        assert file["texts"].asstr()[:].tolist() == [
            f"text {number}" for number in range(1, commit + 1) for _ in range(10)
        ]
    return commit


def test_killed_at_some_system_calls(tmp_path):
    calls = [("fsync", 5), ("rename", 2), ("rename", 4), ("pwrite64", 30), ("unlink", 1)]
    assert killed_at_each(COMMITS, calls, tmp_path, check_commit).tried == len(calls)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_killed_at_every_system_call(tmp_path, record_property):
    found: list[int] = []
    kills = killed_at_each(COMMITS, None, tmp_path, lambda place: found.append(check_commit(place)))
    assert set(found) == {0, 1, 2, 3}
    record_property("campaign", f"journaled file: {kills}, none torn")


# What was written is on its way to the disk before the commit.


def test_an_error_of_the_early_sync_is_that_of_the_commit(tmp_path, monkeypatch):
    """The kernel tells each error once, and the sync of the commit would not hear of it."""
    monkeypatch.setattr(early_sync, "_STEP_BYTES", 100)

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    file = JournaledFile(tmp_path / "file")
    file.write(memoryview(b"committed"))
    file.commit()
    monkeypatch.setattr(os, "fdatasync", fails)
    file.write(memoryview(b"x" * 200))
    with pytest.raises(OSError, match="Input/output error"):
        file.commit()
    file.close()
    assert recover(tmp_path / "file") == b""
    assert (tmp_path / "file").read_bytes() == b"committed"


def test_the_early_sync_is_not_waited_for_until_it_starts(tmp_path, monkeypatch):
    """Whoever writes holds h5py's lock, and what a new thread collects may need that, too."""
    monkeypatch.setattr(early_sync, "_STEP_BYTES", 100)
    held, came_by = threading.Lock(), []

    def collecting(phase: str, info: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            came_by.append(held.acquire(timeout=10))
            if came_by[-1]:
                held.release()

    file = JournaledFile(tmp_path / "file")
    thresholds = gc.get_threshold()
    gc.callbacks.append(collecting)
    try:
        with held:
            gc.set_threshold(1)
            file.write(memoryview(b"x" * 200))
        file.commit()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collecting)
        file.close()
    assert came_by, "the thread collected nothing"
    assert all(came_by), "it waited for the writer, which waited for it"


def test_the_early_sync_is_on_a_thread_of_its_own_and_ends_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(early_sync, "_STEP_BYTES", 100)
    began, go_on, synced = threading.Event(), threading.Event(), []
    fdatasync = os.fdatasync

    def slow(descriptor: int) -> None:
        began.set()
        assert go_on.wait(30)
        fdatasync(descriptor)
        synced.append(threading.current_thread())

    monkeypatch.setattr(os, "fdatasync", slow)
    file = JournaledFile(tmp_path / "file")
    file.write(memoryview(b"x" * 200))
    assert began.wait(30)
    file.write(memoryview(b"y" * 200))  # While the other one is at it.
    go_on.set()
    file.commit()
    assert len(synced) == 1
    assert synced[0] is not threading.current_thread()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"x" * 200 + b"y" * 200


def test_the_changed_pages_are_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    """The journal, which has them as well, is of no use under another name."""
    file = JournaledFile(tmp_path / "work")
    file.write(memoryview(bytes(10_000)))
    file.commit()
    file.seek(5)
    file.write(memoryview(b"changed"))
    done = []

    def noted(module, name):
        real = getattr(module, name)

        def call(first, *others):
            done.append((name, first))
            return real(first, *others)

        monkeypatch.setattr(module, name, call)

    noted(os, "fsync")
    noted(os, "replace")
    noted(journaled_file, "write_all")
    descriptor = file._descriptor
    file.publish(tmp_path / "done")
    last_write = max(n for n, call in enumerate(done) if call == ("write_all", descriptor))
    renamed = done.index(("replace", tmp_path / "work"))
    assert ("fsync", descriptor) in done[last_write:renamed]
