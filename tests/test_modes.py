"""Nothing is readable by more than the umask allows, at any moment, temporary files included."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import h5py
import pytest
from crash_scenes import BUNDLES
from file_calls import Call
from planting import watch
from snapshots import make_snapshot
from written_scenes import WRITTEN

from keras_safe_ckpt import (
    CentralH5Writer,
    CheckpointStore,
    LockedTFRecordWriter,
    WorkerH5Writer,
    merge_worker_files,
    repair_tfrecord,
    split_tfrecord,
)
from keras_safe_ckpt.storage.atomic import StagedFile, write_atomically

#: The mode is the last argument of these.
_MAKING = ("open", "openat", "creat", "mkdir", "mkdirat", "mknod", "mknodat")
_CHANGING = ("chmod", "fchmod", "fchmodat")
#: With a umask of 0 all may use what others are to use; these only the process and its feeders.
_OWN = re.compile(r"(^|/)\.probe\.[^/]*$|\.feeds(/|$)")


def modes_asked(calls: list[Call], folder: Path) -> list[tuple[str, str, int]]:
    """Each call that makes something or changes a mode: its name, the path and the mode."""
    found = []
    for call in calls:
        makes = call.name in _MAKING and ("open" not in call.name or "O_CREAT" in call.arguments)
        if makes or call.name in _CHANGING:
            mode = int(call.arguments.rpartition(",")[2].strip(), 8)
            path = call.files()[0][1] if call.name == "fchmod" else call.paths()[0]
            found.append((call.name, os.path.relpath(path, os.path.realpath(folder)), mode))
    return found


def check_modes(name: str, folder: Path, umask: int, prepare=None) -> tuple[int, int]:
    """How many calls gave a mode, and how many files and folders there are in the end."""
    before = os.umask(umask)  # Also of what is there when it begins.
    try:
        calls = watch(name, folder, prepare or WRITTEN[name].prepare, f"{umask:03o}")
    finally:
        os.umask(before)
    place = folder / "place"
    asked = modes_asked(calls, place)
    assert asked
    wrong = [
        f"{call} of {path}: {mode:o}"
        for call, path, mode in asked
        # What is made gets less than it asks for; what is changed gets all of it.
        if call in _CHANGING and mode & umask
    ]
    there = [path for path in place.rglob("*") if not path.is_symlink()]
    for path in there:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & umask:
            wrong.append(f"{path.name} is {mode:o}")
    if umask == 0:
        for call, path, mode in asked:
            wanted = 0o777 if "mkdir" in call else 0o666
            if mode != wanted and not (_OWN.search(path) and mode == wanted & 0o700):
                wrong.append(f"{call} of {path}: {mode:o}")
    assert not wrong, "\n".join(wrong)
    return len(asked), len(there)


@pytest.mark.parametrize("umask", [0o077, 0o000])
@pytest.mark.parametrize("name", ["set aside", "append", "run", "worker file, set aside"])
def test_never_more_than_the_umask_allows(tmp_path, name, umask):
    check_modes(name, tmp_path / "watched", umask)


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in BUNDLES])
def test_never_more_than_any_umask_allows(tmp_path, name, record_property):
    counts = [check_modes(name, tmp_path / f"{u:o}", u) for u in (0o077, 0o027, 0o022, 0)]
    made, there = (sum(numbers) for numbers in zip(*counts, strict=True))
    told = f"{name}: {made} calls that give a mode and {there} files, none beyond four umasks"
    record_property("campaign", told)


# What is replaced may be closed to others, whatever the umask allows.


@pytest.fixture
def open_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("former", "new"), [(0o600, 0o600), (0o640, 0o640), (0o644, 0o644), (0o666, 0o644)]
)
@pytest.mark.usefixtures("open_umask")
def test_what_replaces_a_closed_file_is_closed_too(tmp_path, former, new):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(former)
    with StagedFile(path) as staged:
        assert mode_of(staged.temp_path) == new  # From its first moment on.
        staged.write(b"new")
        staged.sync()
        staged.commit()
    assert mode_of(path) == new


@pytest.mark.usefixtures("open_umask")
def test_its_owner_can_always_go_on(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o400)
    write_atomically(path, b"new")
    assert mode_of(path) == 0o600


@pytest.mark.usefixtures("open_umask")
def test_a_closed_checkpoint_stays_closed(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        saved = store.publish(make_snapshot(step), step=step, name="m.weights.h5")
        saved.path.chmod(0o600) if step == 1 else None
    assert mode_of(tmp_path / "m.weights.h5") == 0o600


@pytest.mark.usefixtures("open_umask")
def test_a_closed_data_file_stays_closed_on_its_way(tmp_path):
    """Also where it is gone on with: the copy beside it holds the same rows."""
    for again in (False, True):
        writer = WorkerH5Writer(tmp_path, resume=again)
        writer.append("x", [1])
        writer.flush()
        for name in (".worker-00000.h5.unfinished", ".worker-00000.h5.unfinished.journal"):
            assert mode_of(tmp_path / name) == (0o600 if again else 0o644)
        writer.close()
        (tmp_path / "worker-00000.h5").chmod(0o600)
    with h5py.File(tmp_path / "worker-00000.h5") as file:
        assert file["x"][:].tolist() == [1, 1]


@pytest.mark.usefixtures("open_umask")
def test_what_is_rescued_of_a_closed_file_is_closed(tmp_path):
    WRITTEN["recover"].prepare(tmp_path)
    (tmp_path / ".worker-00000.h5.unfinished").chmod(0o600)
    WRITTEN["recover"].act(tmp_path)
    assert mode_of(tmp_path / "rescued.h5") == 0o600


@pytest.mark.usefixtures("open_umask")
def test_what_is_merged_of_closed_files_is_closed(tmp_path):
    for worker in range(2):
        with WorkerH5Writer(tmp_path, worker, workers=2) as writer:
            writer.append("x", [worker])
    writer.path.chmod(0o640)  # The others are open.
    assert mode_of(merge_worker_files(tmp_path, tmp_path / "all.h5")) == 0o640


@pytest.mark.usefixtures("open_umask")
def test_what_is_repaired_or_cut_of_a_closed_file_is_closed(tmp_path):
    path = tmp_path / "all.tfrecord"
    with LockedTFRecordWriter(path) as writer:
        writer.write(b"one")
    path.chmod(0o600)
    repaired = repair_tfrecord(path, tmp_path / "repaired.tfrecord").path
    made = [repaired, *split_tfrecord(path, tmp_path / "part", 2)]
    assert [mode_of(one) for one in made] == [0o600] * 3


@pytest.mark.usefixtures("open_umask")
def test_a_closed_file_that_is_appended_to_stays_closed(tmp_path):
    for _ in range(2):
        with LockedTFRecordWriter(tmp_path / "all.tfrecord") as writer:
            writer.write(b"one")
        (tmp_path / "all.tfrecord").chmod(0o600)
    assert mode_of(tmp_path / "all.tfrecord") == 0o600


@pytest.mark.usefixtures("open_umask")
def test_only_their_user_sees_what_feeders_say(tmp_path):
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feed = writer.feed()
        feed.append("x", [1])
        feed.flush()
        folder = tmp_path / ".all.h5.feeds"
        assert mode_of(folder) == 0o700
        modes = {mode_of(path) for path in folder.iterdir()}
    assert modes == {0o600}
