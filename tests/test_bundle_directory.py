"""Checkpoints of TensorFlow in a directory: published, listed, replaced, and put right."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bundle_files import PUBLISHING, copy_bundle, leftovers, names_in, value_of, write_value
from crash_scenes import BUNDLES, prepare_bundles
from failing import check_faults, enumerate_faults, of_what_changes_the_disk
from keras_setup import tf
from killing import Kills, Operation, killed_at_each
from processes import kill, run_ok, start, wait_until
from warm import warm_process

from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    LockLostError,
    UnreadableCheckpointError,
    UnsafePathError,
)
from keras_safe_ckpt.storage.bundles import staging
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import Family, Keep
from keras_safe_ckpt.storage.bundles.recovery import reading
from keras_safe_ckpt.storage.bundles.staging import StagedBundle, stage
from keras_safe_ckpt.storage.bundles.state_file import State, read_state, write_state
from keras_safe_ckpt.storage.lock_backend import HeldLock
from keras_safe_ckpt.storage.locks import claim

CKPT = Family("ckpt", bare=True)
TWO = Keep(2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints that say 1 to 6, to be published."""
    folder = tmp_path_factory.mktemp("made")
    for value in range(1, 7):
        write_value(folder / str(value), value)
    return folder


def publish(
    directory: Path,
    made: Path,
    value: int,
    *,
    exactly: str | None = None,
    keep: Keep = TWO,
) -> Bundle:
    place = BundleDirectory(directory)
    with stage(place, CKPT, 1, exactly=exactly) as staged:
        copy_bundle(made / str(value), Path(staged.prefix))
        return staged.publish(keep)


def newest(directory: Path) -> float:
    return value_of(next(BundleDirectory(directory).whole(CKPT)).prefix)


# The state file.


@pytest.mark.parametrize("name", ["ckpt-7", 'quo"te', "back\\slash", "größe 7", "new\nline"])
def test_tensorflow_reads_what_is_written(tmp_path, name):
    write_state(tmp_path, State({"old": 1.5, name: 2.25}, 0.5), name)
    found = tf.train.get_checkpoint_state(str(tmp_path))
    assert found.model_checkpoint_path == str(tmp_path / name)
    assert list(found.all_model_checkpoint_paths) == [str(tmp_path / "old"), str(tmp_path / name)]
    assert list(found.all_model_checkpoint_timestamps) == [1.5, 2.25]
    assert found.last_preserved_timestamp == 0.5
    assert read_state(tmp_path) == State({"old": 1.5, name: 2.25}, 0.5)


@pytest.mark.parametrize("name", ["ckpt-7", 'quo"te', "größe 7"])
def test_what_tensorflow_writes_is_read(tmp_path, name):
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), 3, checkpoint_name=name)
    manager.save()
    manager.save()
    state = read_state(tmp_path)
    assert list(state.listed) == [f"{name}-1", f"{name}-2"]
    assert all(abs(time.time() - since) < 600 for since in state.listed.values())


def test_absolute_names_of_the_v1_saver_are_read(tmp_path):
    write_value(tmp_path / "model-1", 1)
    tf.compat.v1.train.update_checkpoint_state(str(tmp_path), str(tmp_path / "model-1"))
    state = read_state(tmp_path)
    assert list(state.listed) == ["model-1"]
    assert state.listed["model-1"] == (tmp_path / "model-1.index").stat().st_mtime


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\0\xff\xfe binary",
        b'model_checkpoint_path: "ckpt-1',
        b"model_checkpoint_path: ckpt",
        b"all_model_checkpoint_timestamps: nonsense\n" * 2,
        b'model_checkpoint_path: ""\n',
        b"[1, 2]",
    ],
)
def test_a_damaged_state_file_says_nothing(tmp_path, content):
    (tmp_path / "checkpoint").write_bytes(content)
    state = read_state(tmp_path)
    assert state is None or state.listed == {}


def test_names_of_other_directories_are_not_ours(tmp_path):
    text = 'model_checkpoint_path: "/etc/ckpt-1"\n'
    for path in ("/etc/ckpt-1", "../x/ckpt-2", "a\\000b/ckpt-3", "sub/ckpt-4", "ckpt-5"):
        text += f'all_model_checkpoint_paths: "{path}"\n'
    (tmp_path / "checkpoint").write_text(text)
    assert list(read_state(tmp_path).listed) == ["ckpt-5"]


# Publishing.


def test_numbers_are_taken_once(tmp_path, made):
    place = BundleDirectory(tmp_path)
    with stage(place, CKPT, 1) as one, stage(place, CKPT, 1) as two:
        assert (one.name, two.name) == ("ckpt-1", "ckpt-2")  # Nothing is there yet.
        for staged in (two, one):
            copy_bundle(made / "1", Path(staged.prefix))
            staged.publish(Keep())
    assert names_in(tmp_path) == ["ckpt-1", "ckpt-2"]
    assert next(place.whole(CKPT)).name == "ckpt-1"  # The last one that was published.
    assert publish(tmp_path, made, 3).name == "ckpt-3"
    with stage(place, CKPT, 10) as far:
        assert far.name == "ckpt-10"


@pytest.mark.parametrize("exactly", [None, "ckpt-1"])
def test_bytes_are_durable_before_names_and_data_before_the_index(
    tmp_path, made, monkeypatch, exactly
):
    publish(tmp_path, made, 1)
    happened: list[tuple[str, object]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        happened.append(("synced", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def replaced(source: str, target: str) -> None:
        happened.append(("placed", (os.stat(source).st_ino, Path(target).name)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    publish(tmp_path, made, 2, exactly=exactly)
    names = [what[1].rpartition(".")[2] for kind, what in happened if kind == "placed"]
    assert names[:3] == ["data-00000-of-00001", "index", "checkpoint"]
    directory = ("synced", tmp_path.stat().st_ino)
    placed = [number for number, (kind, _) in enumerate(happened) if kind == "placed"]
    for number in placed:
        assert ("synced", happened[number][1][0]) in happened[:number]
    for one, other in zip(placed, [*placed[1:], len(happened)], strict=True):
        assert directory in happened[one:other]  # Its name, before the next one.


def test_only_so_many_stay(tmp_path, made):
    for value in range(1, 6):
        publish(tmp_path, made, value)
    assert names_in(tmp_path) == ["ckpt-4", "ckpt-5"]
    assert leftovers(tmp_path) == []
    assert list(read_state(tmp_path).listed) == ["ckpt-4", "ckpt-5"]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-5")


def test_families_do_not_delete_each_other(tmp_path, made):
    publish(tmp_path, made, 1)
    place = BundleDirectory(tmp_path)
    for base in ("ckpt-a", "ck", "ckpt-a", "ckpt-a"):
        with stage(place, Family(base), 1) as staged:
            copy_bundle(made / "2", Path(staged.prefix))
            staged.publish(Keep(1))
    assert names_in(tmp_path) == ["ck-1", "ckpt-1", "ckpt-a-3"]


def test_one_of_each_hour_stays(tmp_path, made, monkeypatch):
    now = time.time()
    keep = Keep(1, every_seconds=3600)
    for hours in (0, 0.5, 1.2, 1.4, 2.9, 3.0):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * 3600)
        publish(tmp_path, made, 1, keep=keep)
    # 0.5 after the first and so on: one when an hour has passed since the one before.
    assert names_in(tmp_path) == ["ckpt-3", "ckpt-5", "ckpt-6"]
    # They stay, whoever saves next, and however few are kept.
    monkeypatch.setattr(time, "time", lambda: now + 4 * 3600)
    publish(tmp_path, made, 1, keep=Keep(1))
    assert names_in(tmp_path) == ["ckpt-3", "ckpt-5", "ckpt-7"]


def test_a_clock_that_was_set_back(tmp_path, made, monkeypatch):
    publish(tmp_path, made, 1)
    then = time.time()
    monkeypatch.setattr(time, "time", lambda: then - 1e6)
    publish(tmp_path, made, 2)
    assert newest(tmp_path) == 2
    publish(tmp_path, made, 3)
    assert names_in(tmp_path) == ["ckpt-2", "ckpt-3"]
    assert newest(tmp_path) == 3


def test_the_same_name_again_replaces_it(tmp_path, made):
    for value in (1, 2, 3):
        publish(tmp_path, made, value, exactly="ckpt")
        assert newest(tmp_path) == value
    assert names_in(tmp_path) == ["ckpt"]
    assert leftovers(tmp_path) == []


def test_without_links_it_is_copied(tmp_path, made, monkeypatch):
    def refused(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    publish(tmp_path, made, 1, exactly="ckpt")
    monkeypatch.setattr(os, "link", refused)
    replace = os.replace
    monkeypatch.setattr(os, "replace", _disk_is_full)
    with pytest.raises(CheckpointWriteError):
        publish(tmp_path, made, 2, exactly="ckpt")
    assert newest(tmp_path) == 1  # Put back by copying.
    monkeypatch.setattr(os, "replace", replace)
    publish(tmp_path, made, 2, exactly="ckpt")
    assert newest(tmp_path) == 2
    assert names_in(tmp_path) == ["ckpt"]


def test_what_is_copied_for_want_of_links_is_on_the_disk(tmp_path, made, monkeypatch):
    """Soon it is the only one."""

    def refused(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    publish(tmp_path, made, 1, exactly="ckpt")
    monkeypatch.setattr(os, "link", refused)
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noted)
    publish(tmp_path, made, 2, exactly="ckpt")
    kept = {Path(path).name for path in synced if Path(path).parent.name == "old"}
    assert kept == {"ckpt.data-00000-of-00001", "ckpt.index"}


@pytest.mark.parametrize("exactly", [None, "ckpt-1"])
@pytest.mark.parametrize("when", [1, 2])
def test_a_failed_rename_leaves_what_was_there(tmp_path, made, monkeypatch, exactly, when):
    publish(tmp_path, made, 1)
    replace, calls = os.replace, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == when:
            raise OSError(5, "Input/output error")
        return replace(*args, **kwargs)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(CheckpointWriteError, match="EIO"):
        publish(tmp_path, made, 2, exactly=exactly)
    monkeypatch.undo()
    assert names_in(tmp_path) == ["ckpt-1"]
    assert leftovers(tmp_path) == []
    assert newest(tmp_path) == 1
    publish(tmp_path, made, 3, exactly=exactly)
    assert newest(tmp_path) == 3


def test_what_could_not_be_listed_is_counted_later(tmp_path, made, monkeypatch):
    place = BundleDirectory(tmp_path)

    def save(value: int) -> None:
        with stage(place, CKPT, 1) as staged:
            copy_bundle(made / str(value), Path(staged.prefix))
            staged.publish(Keep(2))

    save(1)
    with monkeypatch.context() as patched:
        patched.setattr(BundleDirectory, "keep_state", _disk_is_full)
        with pytest.raises(CheckpointWriteError):
            save(2)
    assert newest(tmp_path) == 2  # It is there all the same.
    save(3)
    save(4)
    assert names_in(tmp_path) == ["ckpt-3", "ckpt-4"]


def _disk_is_full(*args: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(5, "Input/output error")])
@pytest.mark.parametrize("exactly", [None, "ckpt-1"])
def test_errors_after_it_is_in_its_place(tmp_path, made, monkeypatch, caplog, error, exactly):
    """It is there, and counts from the next save on, of whatever process."""

    def broken(*args: object) -> None:
        raise error

    publish(tmp_path, made, 1, exactly=exactly)
    with monkeypatch.context() as patched:
        patched.setattr(StagedBundle, "_record", broken)
        patched.setattr("keras_safe_ckpt.storage.bundles.recovery.write_state", broken)
        with pytest.raises((KeyboardInterrupt, CheckpointWriteError)) as raised:
            publish(tmp_path, made, 2, exactly=exactly)
    assert newest(tmp_path) == 2
    assert raised.type is KeyboardInterrupt or raised.value.published
    publish(tmp_path, made, 5, exactly=exactly)
    publish(tmp_path, made, 6, exactly=exactly)
    assert newest(tmp_path) == 6
    assert len(names_in(tmp_path)) == (2 if exactly is None else 1)
    assert leftovers(tmp_path) == []
    assert "left half-way" in caplog.text


@pytest.mark.parametrize("exactly", [None, "ckpt-1"])
def test_an_error_at_each_step(tmp_path, made, monkeypatch, exactly):
    """Of those that change a directory: nothing is left half-way, whichever it is."""
    publish(tmp_path, made, 1)
    tried = 0
    for name in ("replace", "link", "fsync", "utime", "mkdir", "unlink"):
        for when in range(1, 12):
            calls: list[object] = []
            real = getattr(os, name)

            def failing(*args, real=real, calls=calls, when=when, **kwargs):
                calls.append(args)
                if len(calls) == when:
                    raise OSError(5, "Input/output error")
                return real(*args, **kwargs)

            with monkeypatch.context() as patched:
                patched.setattr(os, name, failing)
                try:
                    publish(tmp_path, made, 2, exactly=exactly)
                except CheckpointWriteError:
                    tried += 1
            assert newest(tmp_path) in (1, 2), (name, when)
            assert value_of(tf.train.latest_checkpoint(str(tmp_path))) in (1, 2), (name, when)
            publish(tmp_path, made, 1, exactly=exactly)
            assert newest(tmp_path) == 1, (name, when)
            # What cannot be unlinked stays until the process is gone.
            assert leftovers(tmp_path) == [] or name == "unlink", (name, when)
            assert len(names_in(tmp_path)) <= 3, (name, when)
            if len(calls) < when:
                break
    assert tried >= 5
    publish(tmp_path, made, 5, exactly=exactly)
    publish(tmp_path, made, 6, exactly=exactly)
    assert len(names_in(tmp_path)) == (2 if exactly is None else 1)


def test_a_state_file_that_cannot_be_replaced_is_known_before(tmp_path, made):
    publish(tmp_path, made, 1)
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "checkpoint").symlink_to(tmp_path / "elsewhere")
    for _ in range(3):
        with pytest.raises(UnsafePathError):
            publish(tmp_path, made, 2)
    assert names_in(tmp_path) == ["ckpt-1"]


def test_one_directory_has_one_lock(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert BundleDirectory(tmp_path / "link").path == BundleDirectory(tmp_path / "real").path


def test_a_checkpoint_that_is_called_as_a_copy_would_be(tmp_path, made):
    publish(tmp_path, made, 1, exactly="ckpt~2", keep=Keep())
    publish(tmp_path, made, 2, exactly="ckpt", keep=Keep())
    publish(tmp_path, made, 3, exactly="ckpt", keep=Keep())
    assert value_of(tmp_path / "ckpt~2") == 1


def test_reading_on_a_full_disk(small_disk, made):
    folder = small_disk("size=200k")
    publish(folder, made, 1)
    for path in folder.glob(".keras_safe_ckpt*"):
        path.unlink()
    with pytest.raises(OSError), open(folder / "filling", "wb") as file:  # noqa: PT011, PT012
        while True:
            file.write(bytes(4096))
            file.flush()
    place = BundleDirectory(folder)
    with reading(place):
        assert value_of(next(place.whole(CKPT)).prefix) == 1


def test_what_tensorflow_did_not_write_is_not_published(tmp_path, made):
    place = BundleDirectory(tmp_path)
    with stage(place, CKPT, 1) as staged:
        copy_bundle(made / "1", Path(staged.prefix))
        Path(f"{staged.prefix}.data-00000-of-00001").write_bytes(b"short")
        with pytest.raises(ValueError, match="should have"):
            staged.publish(Keep())
    assert names_in(tmp_path) == []
    assert leftovers(tmp_path) == []


def test_bad_names_and_places_are_refused(tmp_path, made):
    place = BundleDirectory(tmp_path)
    for name in ("", "a/b", ".hidden", "x" * 250):
        with pytest.raises(UnsafePathError):
            stage(place, CKPT, None, exactly=name)
    (tmp_path / "file").touch()
    with pytest.raises(UnsafePathError):
        BundleDirectory(tmp_path / "file")
    (tmp_path / "elsewhere").touch()
    (tmp_path / "ckpt-1.index").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError):
        publish(tmp_path, made, 1, exactly="ckpt-1")
    assert (tmp_path / "elsewhere").read_bytes() == b""


# Which one is the newest.


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "\0garbage",
        'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n',
        'model_checkpoint_path: "ckpt-9"\nall_model_checkpoint_paths: "ckpt-9"\n',
        'model_checkpoint_path: "/elsewhere/ckpt-9"\n',
    ],
)
def test_a_state_file_that_lies(tmp_path, made, text):
    for value in (1, 2, 3):
        publish(tmp_path, made, value, keep=Keep())
    state = tmp_path / "checkpoint"
    state.unlink() if text is None else state.write_text(text)
    assert newest(tmp_path) == 3
    publish(tmp_path, made, 4, keep=Keep(2))
    assert newest(tmp_path) == 4
    # What nobody knows to be managed is not deleted.
    assert {"ckpt-2", "ckpt-3", "ckpt-4"} <= set(names_in(tmp_path))


def test_a_copied_directory_has_the_same_order(tmp_path, made):
    place = tmp_path / "one"
    for value in range(1, 6):
        publish(place, made, value, keep=Keep())
    files = sorted(place.glob("ckpt-*"), reverse=True)
    for number, path in enumerate(files):  # As `cp -r` may date them.
        os.utime(path, (number, number))
    assert newest(place) == 5
    place.rename(tmp_path / "two")
    assert newest(tmp_path / "two") == 5


def test_copies_that_have_other_times(tmp_path, made):
    """Those that are kept for ever are not listed, and their numbers tell that they are old."""
    for value in range(1, 6):
        publish(tmp_path, made, value, keep=Keep(2, every_seconds=1e-9))
    assert len(names_in(tmp_path)) == 5
    for number, path in enumerate(sorted(tmp_path.glob("ckpt-*.index"), reverse=True)):
        os.utime(path, (2e9 + number, 2e9 + number))
    assert newest(tmp_path) == 5
    for path in tmp_path.glob("ckpt-*.index"):
        os.utime(path, (1e9, 1e9))
    assert newest(tmp_path) == 5


def test_the_order_of_a_file_without_times(tmp_path, made):
    """As the v1 Saver of TensorFlow writes it, and in a copy."""
    names = [f"ckpt-{value}" for value in range(1, 6)]
    for value, name in enumerate(names, 1):
        copy_bundle(made / str(value), tmp_path / name)
        os.utime(tmp_path / f"{name}.index", (2000 - value, 2000 - value))
    lines = [f'all_model_checkpoint_paths: "{name}"' for name in names]
    text = "\n".join(['model_checkpoint_path: "ckpt-5"', *lines])
    (tmp_path / "checkpoint").write_text(text)
    assert newest(tmp_path) == 5
    publish(tmp_path, made, 6, keep=Keep(3, every_seconds=36e6))
    assert names_in(tmp_path) == ["ckpt-4", "ckpt-5", "ckpt-6"]


@pytest.mark.parametrize("times", ["1e300", "inf", "-inf", "nan", "1e18"])
def test_times_that_cannot_be(tmp_path, made, times):
    publish(tmp_path, made, 1)
    state = tmp_path / "checkpoint"
    lines = [line.partition(":") for line in state.read_text().splitlines()]
    new = [f"{k}: {times}" if "timestamp" in k else f"{k}:{v}" for k, _, v in lines]
    state.write_text("\n".join(new))
    for value in (2, 3, 4, 5):
        publish(tmp_path, made, value)
        assert newest(tmp_path) == value
    assert len(names_in(tmp_path)) <= 3  # The first one may count as kept for ever.


def test_a_clock_that_was_set_back_without_a_state_file(tmp_path, made, monkeypatch):
    publish(tmp_path, made, 1)
    then = time.time()
    monkeypatch.setattr(time, "time", lambda: then - 1e6)
    (tmp_path / "checkpoint").unlink()
    publish(tmp_path, made, 2)
    (tmp_path / "checkpoint").unlink()
    assert newest(tmp_path) == 2


def test_one_that_cannot_be_read_now_is_not_taken_for_damaged(tmp_path, made, monkeypatch):
    publish(tmp_path, made, 1)
    publish(tmp_path, made, 2)
    opened = open

    def no_more_files(path, *args, **kwargs):
        if str(path).endswith("ckpt-2.index"):
            raise OSError(24, "Too many open files")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", no_more_files)
    with pytest.raises(UnreadableCheckpointError, match="EMFILE"):
        newest(tmp_path)


@pytest.fixture
def failing_looks(monkeypatch):
    """Lets a look at each path that ends so fail, as often as is said."""
    stat = os.stat

    def fail(ending: str, times: int = 1_000_000) -> None:
        left = [times]

        def failing(path, *args, **kwargs):
            if left[0] and str(path).endswith(ending):
                left[0] -= 1
                raise OSError(5, "Input/output error")
            return stat(path, *args, **kwargs)

        monkeypatch.setattr(os, "stat", failing)

    return fail


def test_the_newest_is_not_taken_for_the_oldest_when_its_time_cannot_be_told(
    tmp_path, made, failing_looks
):
    publish(tmp_path, made, 1)
    publish(tmp_path, made, 2)
    place = BundleDirectory(tmp_path)
    failing_looks("ckpt-2.index")
    with pytest.raises(UnreadableCheckpointError, match="EIO"), reading(place):
        place.ordered(CKPT)


def test_a_list_that_cannot_be_read_now_is_not_forgotten(tmp_path, made, monkeypatch):
    publish(tmp_path, made, 1)
    publish(tmp_path, made, 2)
    opened = open

    def broken(path, *args, **kwargs):
        if str(path).endswith("/checkpoint"):
            raise OSError(5, "Input/output error")
        return opened(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", broken)
        with pytest.raises(CheckpointWriteError, match="EIO"):
            publish(tmp_path, made, 3)
        with pytest.raises(UnreadableCheckpointError, match="EIO"):
            read_in_turn(tmp_path)
    publish(tmp_path, made, 4)
    assert len(names_in(tmp_path)) == 2  # Those of before are still managed, and pruned.
    assert newest(tmp_path) == 4


def read_in_turn(directory: Path) -> list[str]:
    place = BundleDirectory(directory)
    with reading(place):
        return [bundle.name for bundle in place.ordered(CKPT)]


@pytest.mark.parametrize("what", ["directory", "pipe", "socket", "link to itself"])
def test_a_list_that_is_no_file_lists_nothing(tmp_path, made, monkeypatch, what):
    publish(tmp_path, made, 1)
    state = tmp_path / "checkpoint"
    state.unlink()
    if what == "directory":
        state.mkdir()
    elif what == "pipe":
        os.mkfifo(state)
    elif what == "link to itself":
        state.symlink_to(state)
    else:
        monkeypatch.chdir(tmp_path)  # A whole path may be too long for one.
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(state.name)
    assert read_state(tmp_path) is None
    assert read_in_turn(tmp_path) == ["ckpt-1"]


def test_a_list_of_old_without_times_whose_time_cannot_be_told(tmp_path, made, failing_looks):
    """As the v1 Saver of TensorFlow writes it."""
    copy_bundle(made / "1", tmp_path / "ckpt-1")
    lines = 'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n'
    long_name = f'all_model_checkpoint_paths: "{"x" * 300}"\n'
    (tmp_path / "checkpoint").write_text(lines + long_name)
    assert set(read_state(tmp_path).listed) == {"ckpt-1", "x" * 300}
    failing_looks("ckpt-1.index")
    with pytest.raises(OSError, match="Input/output"):
        read_state(tmp_path)


def test_a_directory_that_cannot_be_looked_at_now(tmp_path, failing_looks):
    failing_looks(tmp_path.name)
    with pytest.raises(UnreadableCheckpointError, match="EIO"):
        BundleDirectory(tmp_path)


def test_a_damaged_one_is_passed_over(tmp_path, made, caplog):
    for value in (1, 2, 3):
        publish(tmp_path, made, value, keep=Keep())
    (tmp_path / "ckpt-3.data-00000-of-00001").unlink()
    (tmp_path / "ckpt-2.index").write_bytes(b"nonsense")
    assert newest(tmp_path) == 1
    assert "ckpt-3" in caplog.text
    assert "ckpt-2" in caplog.text


# Readers.


def test_nothing_is_deleted_under_a_reader(tmp_path, made, monkeypatch):
    publish(tmp_path, made, 1)
    publish(tmp_path, made, 2)
    monkeypatch.setattr("keras_safe_ckpt.storage.bundles.staging._READERS_SECONDS", 0.1)
    with BundleDirectory(tmp_path).reading():
        publish(tmp_path, made, 3)
        publish(tmp_path, made, 4)
        assert names_in(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3", "ckpt-4"]
    publish(tmp_path, made, 5)
    assert names_in(tmp_path) == ["ckpt-4", "ckpt-5"]


def test_nothing_is_replaced_under_a_reader(tmp_path, made):
    publish(tmp_path, made, 1, exactly="ckpt")
    with BundleDirectory(tmp_path).reading():
        other = threading.Thread(
            target=publish, args=(tmp_path, made, 2), kwargs={"exactly": "ckpt"}
        )
        other.start()
        other.join(0.3)
        assert other.is_alive()
        assert value_of(tmp_path / "ckpt") == 1
    other.join(30)
    assert value_of(tmp_path / "ckpt") == 2


def test_a_directory_that_cannot_be_written_can_be_read(tmp_path, made, monkeypatch):
    publish(tmp_path, made, 1)
    for path in tmp_path.glob(".keras_safe_ckpt*"):
        path.unlink()
    # Root may write everywhere: ask as somebody who may not.
    code = """
import os
os.setuid(65534)
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
place = BundleDirectory(sys.argv[1])
with place.reading():
    print([bundle.name for bundle in place.whole(None)])
"""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    assert run_ok(code, tmp_path) == "['ckpt-1']\n"


def test_nothing_to_read_is_nothing(tmp_path):
    place = BundleDirectory(tmp_path / "missing")
    with place.reading():
        assert list(place.whole(None)) == []
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("lock", ["keras_safe_ckpt", "keras_safe_ckpt-readers"])
def test_whoever_has_lost_a_lock_replaces_nothing(tmp_path, made, monkeypatch, lock):
    publish(tmp_path, made, 1, exactly="ckpt")
    keep_old = staging.keep_old

    def lose(*arguments: object) -> None:
        keep_old(*arguments)
        (tmp_path / f".{lock}.lock").unlink()

    monkeypatch.setattr(staging, "keep_old", lose)
    removed: list[object] = []
    monkeypatch.setattr(staging, "remove", lambda *arguments: removed.append(arguments))
    with pytest.raises(LockLostError, match="was deleted"):
        publish(tmp_path, made, 2, exactly="ckpt")
    assert removed == []
    assert newest(tmp_path) == 1
    assert leftovers(tmp_path) == []


def test_whoever_has_lost_the_lock_of_the_readers_deletes_nothing(tmp_path, made, monkeypatch):
    for value in (1, 2):
        publish(tmp_path, made, value)
    without_readers = BundleDirectory.without_readers

    @contextlib.contextmanager
    def lose(self: BundleDirectory, seconds: float | None = None) -> Iterator[HeldLock]:
        with without_readers(self, seconds) as held:
            (tmp_path / ".keras_safe_ckpt-readers.lock").unlink()
            yield held

    monkeypatch.setattr(BundleDirectory, "without_readers", lose)
    with pytest.raises(LockLostError, match="was deleted"):
        publish(tmp_path, made, 3)
    assert names_in(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3"]


@pytest.fixture
def synced_names(tmp_path, monkeypatch) -> list[dict[str, int]]:
    """What was in the directory at each sync of it: names, and which files they are of."""
    found: list[dict[str, int]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            found.append({entry.name: entry.inode() for entry in os.scandir(tmp_path)})

    monkeypatch.setattr(os, "fsync", noted)
    return found


DATA = "ckpt.data-00000-of-00001"


def test_an_index_is_gone_for_good_before_its_data_goes(tmp_path, made, synced_names):
    """With the next data, which are as long, it would look whole after a power cut."""
    publish(tmp_path, made, 1, exactly="ckpt")
    former = (tmp_path / DATA).stat().st_ino
    synced_names.clear()
    publish(tmp_path, made, 2, exactly="ckpt")
    assert any(names.get(DATA) == former and "ckpt.index" not in names for names in synced_names)


def test_the_former_data_is_back_for_good_before_its_index_is(
    tmp_path, made, monkeypatch, synced_names
):
    publish(tmp_path, made, 1, exactly="ckpt")
    former = (tmp_path / DATA).stat().st_ino

    def half(directory: Path, name: str, kinds: list[str], source: Path) -> None:
        os.replace(source / DATA, directory / DATA)
        synced_names.clear()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(staging, "place", half)
    with pytest.raises(CheckpointWriteError, match="EIO"):
        publish(tmp_path, made, 2, exactly="ckpt")
    assert newest(tmp_path) == 1
    assert any(names.get(DATA) == former and "ckpt.index" not in names for names in synced_names)


# What a killed process leaves.

SCENES = {
    # What is there before, what the killed process does, and how many stay.
    "first": ("", "publish(FOLDER, MADE + '/3')"),
    "pruning": (
        "publish(FOLDER, MADE + '/1'); publish(FOLDER, MADE + '/2')",
        "publish(FOLDER, MADE + '/3')",
    ),
    "replacing": (
        "publish(FOLDER, MADE + '/1', exactly='ckpt-1')",
        "publish(FOLDER, MADE + '/3', exactly='ckpt-1')",
    ),
    "only one stays": (
        "publish(FOLDER, MADE + '/1', keep=Keep(1))",
        "publish(FOLDER, MADE + '/3', keep=Keep(1))",
    ),
}
HEADER = PUBLISHING + "FOLDER, MADE = sys.argv[1:3]\n"


def prepare_scene(scene: str, folder: Path, made: Path) -> None:
    before = SCENES[scene][0]
    if before:
        done = warm_process().run(before, folder, made, setup=HEADER)
        assert done.code == 0, done.err


def check_scene(scene: str, folder: Path, made: Path) -> None:
    """Old or new, for TensorFlow as well; the next ones put everything right."""
    place = BundleDirectory(folder)
    with reading(place):
        whole = [value_of(bundle.prefix) for bundle in place.whole(CKPT)]
    old = {"first": [], "pruning": [2.0, 1.0]}.get(scene, [1.0])
    if old:
        assert whole, "nothing is left"
        assert whole[0] in (old[0], 3.0), whole
        # Now that one of ours has looked, TensorFlow finds it, too.
        assert value_of(tf.train.latest_checkpoint(str(folder))) in (*old, 3.0)
    # The next one puts everything right.
    keep = Keep(1) if scene == "only one stays" else Keep(2)
    publish(folder, made, 4, keep=keep)
    assert leftovers(folder) == []
    publish(folder, made, 5, keep=keep)
    assert newest(folder) == 5
    assert len(names_in(folder)) == keep.most, names_in(folder)
    assert list(read_state(folder).listed) == [
        bundle.name for bundle in BundleDirectory(folder).ordered(CKPT)
    ]
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / names_in(folder)[-1])


def kill_scene(
    scene: str, calls: list[tuple[str, int]] | None, tmp_path: Path, made: Path
) -> Kills:
    return killed_at_each(
        Operation(SCENES[scene][1], HEADER, (made,)),
        calls,
        tmp_path,
        lambda folder: check_scene(scene, folder, made),
        lambda folder: prepare_scene(scene, folder, made),
    )


@pytest.mark.parametrize("scene", SCENES)
def test_killed_at_some_system_calls(tmp_path, made, scene):
    sample = [("rename", 2), ("rename", 3), ("unlink", 1), ("fsync", 5), ("rmdir", 1)]
    if scene == "first":
        sample.remove(("unlink", 1))  # Nothing to be removed.
    if scene == "replacing":
        sample = [("link", 2), ("unlink", 1), ("unlink", 2), ("rename", 1), ("rename", 2)]
    assert kill_scene(scene, sample, tmp_path, made).tried == len(sample)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scene", SCENES)
def test_killed_at_every_system_call(tmp_path, made, scene, record_property):
    kills = kill_scene(scene, None, tmp_path, made)
    record_property("campaign", f"bundles, {scene}: {kills}, all put right")


def prepare_faults(made: Path, name: str) -> Callable[[Path], None]:
    return lambda folder: prepare_bundles(name, made, folder)


@pytest.mark.parametrize("name", BUNDLES)
def test_each_call_that_changes_the_disk_fails(tmp_path, made, name):
    prepare = prepare_faults(made, name)
    faults = of_what_changes_the_disk(enumerate_faults(name, tmp_path, prepare))
    assert check_faults(name, faults[::6], tmp_path, prepare).failed > 0


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", BUNDLES)
def test_every_call_fails_in_every_way(tmp_path, made, name, record_property):
    prepare = prepare_faults(made, name)
    faults = enumerate_faults(name, tmp_path, prepare)
    record_property("campaign", f"{name}: {check_faults(name, faults, tmp_path, prepare)}")


def test_killed_at_random_while_others_save_and_read(tmp_path, made):
    folder = tmp_path / "shared"
    saving = PUBLISHING + "while True: publish(sys.argv[1], sys.argv[2] + '/3')"
    rng = random.Random(3)
    publish(folder, made, 1)
    for _ in range(4):
        children = [start(saving, folder, made) for _ in range(3)]
        before = read_state(folder).listed
        wait_until(lambda before=before: read_state(folder).listed != before, "they save")
        deadline = time.monotonic() + rng.uniform(0.05, 0.4)
        while time.monotonic() < deadline:
            with reading(BundleDirectory(folder)):
                bundle = next(BundleDirectory(folder).whole(CKPT))
                assert value_of(bundle.prefix) in (1.0, 3.0, 4.0)
        for child in children:
            kill(child)
        publish(folder, made, 4)
        assert newest(folder) == 4
        assert leftovers(folder) == []
        assert len(names_in(folder)) == 2


def test_what_was_half_deleted_is_deleted(tmp_path, made):
    """Its index was gone when the process was killed."""
    publish(tmp_path, made, 1)
    publish(tmp_path, made, 2)
    (tmp_path / "ckpt-1.index").unlink()
    publish(tmp_path, made, 3)
    assert leftovers(tmp_path) == []
    assert names_in(tmp_path) == ["ckpt-2", "ckpt-3"]


@pytest.mark.parametrize("exactly", [None, "ckpt-1"])
def test_killed_while_it_was_put_right(tmp_path, made, monkeypatch, exactly):
    """What is left of a folder must not tell another story than the whole of it."""
    for value in (1, 2):
        publish(tmp_path, made, value)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", _disk_is_full)
        patched.setattr("shutil.rmtree", _only_the_index)
        with pytest.raises(CheckpointWriteError):
            publish(tmp_path, made, 3, exactly=exactly)
    (folder,) = tmp_path.glob("*.kscktmp")
    (folder / "abandoned").touch()  # As if its process was gone.
    with reading(BundleDirectory(tmp_path)):
        assert newest(tmp_path) == 2
    assert list(read_state(tmp_path).listed) == ["ckpt-1", "ckpt-2"]
    assert leftovers(tmp_path) == []


def _only_the_index(folder: Path, **options: object) -> None:
    for path in Path(folder).glob("*.index"):
        path.unlink()


def test_a_folder_of_a_living_process_is_claimed(tmp_path):
    """A sweeper in another container does not see the process, and tries this."""
    with stage(BundleDirectory(tmp_path), CKPT, 1) as living:
        descriptor = os.open(os.path.dirname(living.prefix), os.O_RDONLY)
        try:
            assert not claim(descriptor)
        finally:
            os.close(descriptor)


def test_a_folder_of_a_living_process_stays(tmp_path, made):
    place = BundleDirectory(tmp_path)
    with stage(place, CKPT, 1) as living:
        assert isinstance(living, StagedBundle)
        publish(tmp_path, made, 2)
        assert os.path.isdir(os.path.dirname(living.prefix))
    assert leftovers(tmp_path) == []
