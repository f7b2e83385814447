"""The write protocol: whole or not at all, durable, private until it is published."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
from processes import kill, run, run_ok, start, strace, wait_until

from keras_safe_ckpt import CheckpointWriteError, UnsafePathError
from keras_safe_ckpt.storage import atomic, temp_names
from keras_safe_ckpt.storage.atomic import (
    FOREIGN_ORPHAN_SECONDS,
    StagedFile,
    commit_in_order,
    scratch_directory,
    sweep_orphans,
    write_atomically,
)
from keras_safe_ckpt.storage.locks import claim
from keras_safe_ckpt.storage.paths import make_directory


def temps(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".kscktmp")]


def test_content_appears_only_at_the_commit(tmp_path):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with StagedFile(target) as staged:
        staged.write(b"new")
        staged.sync()
        assert target.read_bytes() == b"old"
        staged.commit()
    assert target.read_bytes() == b"new"
    assert temps(tmp_path) == []


def test_an_exception_rolls_back(tmp_path):
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def interrupted() -> None:
        with StagedFile(target) as staged:
            staged.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_bytes() == b"old"
    assert temps(tmp_path) == []


def test_unsynced_bytes_are_never_published(tmp_path):
    with StagedFile(tmp_path / "file") as staged:
        staged.write(b"new")
        with pytest.raises(RuntimeError, match="sync"):
            staged.commit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "write", [lambda staged: staged.write(b"more"), lambda staged: staged.write_at(0, b"N")]
)
def test_what_is_written_after_a_sync_needs_another(tmp_path, write):
    with StagedFile(tmp_path / "file") as staged:
        staged.write(b"new")
        staged.sync()
        write(staged)
        with pytest.raises(RuntimeError, match="sync"):
            staged.commit()
        staged.sync()
        staged.commit()
    assert (tmp_path / "file").read_bytes() in (b"newmore", b"New")


def test_file_that_took_the_temporary_name_is_not_published(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with StagedFile(tmp_path / "file") as staged:
        staged.write(b"new")
        staged.sync()
        os.unlink(staged.temp_path)
        staged.temp_path.write_bytes(b"planted")
        with pytest.raises(CheckpointWriteError, match="something else has its temporary name"):
            staged.commit()
    assert (tmp_path / "file").read_bytes() == b"old"


def test_two_writers_of_one_target_do_not_meet(tmp_path):
    with StagedFile(tmp_path / "file") as first, StagedFile(tmp_path / "file") as second:
        first.write(b"1" * 10)
        second.write(b"2" * 10)
        for staged in (first, second):
            staged.sync()
            staged.commit()
    assert (tmp_path / "file").read_bytes() == b"2" * 10


def test_many_threads_leave_one_whole_file(tmp_path):
    def write(number: int) -> None:
        for _ in range(20):
            write_atomically(tmp_path / "file", bytes([number]) * 50_000)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "file").exists():
            content = (tmp_path / "file").read_bytes()
            assert len(content) == 50_000
            assert len(set(content)) == 1
    assert temps(tmp_path) == []


def test_mode_is_what_the_umask_allows(tmp_path):
    old = os.umask(0o027)
    try:
        with StagedFile(tmp_path / "file") as staged:
            assert stat.S_IMODE(os.stat(staged.temp_path).st_mode) == 0o640
            staged.sync()
            staged.commit()
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(tmp_path / "file").st_mode) == 0o640


def test_order_of_system_calls(tmp_path):
    """Synced before renamed, directory synced after, and the parent of a new directory too."""
    log = tmp_path / "trace"
    prefix = ("strace", "-f", "-qq", "-y", "-o", str(log), "-e", "trace=fsync,rename,mkdir")
    strace()  # Skips where it is missing.
    folder = tmp_path / "a" / "b"
    code = """
from keras_safe_ckpt.storage.atomic import write_atomically
write_atomically(sys.argv[1], b"data")
"""
    run_ok(code, folder / "file", prefix=prefix)
    calls = [
        re.sub(r"^\d+ +", "", line).split(" = ")[0]
        for line in log.read_text().splitlines()
        if str(tmp_path / "a") in line or f"<{tmp_path}>" in line
    ]
    kinds = []
    for call in calls:
        name = call.split("(")[0]
        if name == "fsync":
            path = call.split("<")[1].split(">")[0]
            path = "temp" if path.endswith(".kscktmp") else os.path.relpath(path, tmp_path)
            kinds.append(f"fsync {path}")
        elif name == "mkdir":
            kinds.append("mkdir " + os.path.relpath(call.split('"')[1], tmp_path))
        else:
            kinds.append(name)
    assert kinds == [
        "mkdir a", "fsync .", "mkdir a/b", "fsync a", "fsync temp", "rename", "fsync a/b",
    ]  # fmt: skip


def test_group_is_committed_by_its_last_file(tmp_path):
    log = tmp_path / "trace"
    strace()
    prefix = ("strace", "-f", "-qq", "-y", "-o", str(log), "-e", "trace=fsync,rename")
    folder = tmp_path / "group"
    folder.mkdir()
    code = """
from keras_safe_ckpt.storage.atomic import StagedFile, commit_in_order
staged = [StagedFile(f"{sys.argv[1]}/{name}") for name in ("data-0", "data-1", "index")]
for one in staged:
    one.write(b"x")
    one.sync()
commit_in_order(staged)
"""
    run_ok(code, folder, prefix=prefix)
    kinds = []
    for line in log.read_text().splitlines():
        if "rename(" in line:
            kinds.append("rename " + os.path.basename(line.split('"')[3]))
        elif f"<{folder}>" in line:
            kinds.append("fsync directory")
    assert kinds == [
        "rename data-0", "rename data-1", "fsync directory", "rename index", "fsync directory",
    ]  # fmt: skip


def test_group_that_fails_publishes_no_index(tmp_path):
    staged = [StagedFile(tmp_path / name) for name in ("data", "index")]
    staged[0].sync()
    staged[1].sync()
    (tmp_path / "data").mkdir()
    with pytest.raises(UnsafePathError):
        commit_in_order(staged)
    for one in staged:
        one.rollback()
    assert sorted(os.listdir(tmp_path)) == ["data"]


@pytest.mark.parametrize("dangling", [False, True])
def test_symlink_at_the_target_is_refused(tmp_path, dangling):
    victim = tmp_path / "victim"
    if not dangling:
        victim.write_bytes(b"precious")
    (tmp_path / "file").symlink_to(victim)
    with pytest.raises(UnsafePathError, match="symbolic link"):
        write_atomically(tmp_path / "file", b"data")
    assert victim.exists() is not dangling
    assert temps(tmp_path) == []


def test_symlink_planted_during_the_write_is_refused(tmp_path):
    (tmp_path / "victim").write_bytes(b"precious")
    with StagedFile(tmp_path / "file") as staged:
        staged.sync()
        (tmp_path / "file").symlink_to(tmp_path / "victim")
        with pytest.raises(UnsafePathError, match="symbolic link"):
            staged.commit()
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_symlink_at_the_temp_path_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / ".planted").symlink_to(tmp_path / "victim")
    monkeypatch.setattr("keras_safe_ckpt.storage.atomic.new_temp_name", lambda name: ".planted")
    with pytest.raises(CheckpointWriteError):
        write_atomically(tmp_path / "file", b"data")
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_directory_at_the_target_is_refused(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(UnsafePathError, match="directory"):
        write_atomically(tmp_path / "file", b"data")


def test_pipe_at_the_target_is_refused(tmp_path):
    os.mkfifo(tmp_path / "file")
    with pytest.raises(UnsafePathError, match="regular"):
        write_atomically(tmp_path / "file", b"data")


def test_file_where_a_directory_should_be(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises((UnsafePathError, CheckpointWriteError)):
        write_atomically(tmp_path / "file" / "inner", b"data")
    with pytest.raises(UnsafePathError, match="directory was expected"):
        make_directory(tmp_path / "file")


def test_linked_directory_on_the_way_is_the_users_own_layout(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link" / "file", b"data")
    assert (tmp_path / "real" / "file").read_bytes() == b"data"


def test_longest_name_is_written(tmp_path):
    name = "n" * 255
    write_atomically(tmp_path / name, b"data")
    assert (tmp_path / name).read_bytes() == b"data"
    with pytest.raises(CheckpointWriteError, match="too long"):
        write_atomically(tmp_path / (name + "n"), b"data")


WRITER = """
from keras_safe_ckpt.storage.atomic import StagedFile
with StagedFile(sys.argv[1]) as staged:
    staged.write(b"x" * 1000)
    print(staged.temp_path, flush=True)
    __import__("time").sleep(600)
"""


def test_temp_of_a_killed_writer_is_swept(tmp_path):
    process = start(WRITER, tmp_path / "file")
    path = process.stdout.readline().strip()
    assert sweep_orphans(tmp_path) == []
    assert os.path.exists(path)
    kill(process)
    assert sweep_orphans(tmp_path) == [os.path.basename(path)]
    assert os.listdir(tmp_path) == []


def test_temp_of_a_stopped_writer_is_not_swept(tmp_path):
    process = start(WRITER, tmp_path / "file")
    process.stdout.readline()
    process.send_signal(19)
    assert sweep_orphans(tmp_path) == []
    kill(process)


def test_own_temp_is_not_swept(tmp_path):
    with StagedFile(tmp_path / "file") as staged:
        assert sweep_orphans(tmp_path) == []
        staged.write(b"data")
        staged.sync()
        staged.commit()
    assert (tmp_path / "file").read_bytes() == b"data"


def foreign_name(
    folder: Path, *, boot: str = "0badb007", space: int = 1, pid: int = 1, start_time: int = 1
) -> Path:
    path = folder / f".file.{boot}-{space}-{pid}-{start_time}-0123456789ab.kscktmp"
    path.write_bytes(b"x")
    return path


def test_temp_of_another_machine_is_swept_only_when_it_is_old(tmp_path):
    path = foreign_name(tmp_path)
    assert sweep_orphans(tmp_path) == []
    old = time.time() - FOREIGN_ORPHAN_SECONDS - 60
    os.utime(path, (old, old))
    assert sweep_orphans(tmp_path) == [path.name]


def test_old_temp_of_another_machine_that_is_locked_is_not_swept(tmp_path):
    path = foreign_name(tmp_path)
    old = time.time() - FOREIGN_ORPHAN_SECONDS - 60
    os.utime(path, (old, old))
    code = """
import fcntl
file = open(sys.argv[1], "r+"); fcntl.flock(file, fcntl.LOCK_EX); print("locked", flush=True)
__import__("time").sleep(600)
"""
    process = start(code, path)
    assert process.stdout.readline() == "locked\n"
    assert sweep_orphans(tmp_path) == []
    kill(process)
    assert sweep_orphans(tmp_path) == [path.name]


def test_temp_of_an_earlier_process_with_our_number_is_swept(tmp_path):
    """Process 7 of a restarted container is not the process 7 that was killed."""
    me = temp_names.owner_of(temp_names.new_temp_name("x"))
    path = foreign_name(tmp_path, boot=me.boot, space=me.space, pid=me.pid, start_time=1)
    assert sweep_orphans(tmp_path) == [path.name]
    mine = foreign_name(tmp_path, boot=me.boot, space=me.space, pid=me.pid, start_time=me.start)
    assert sweep_orphans(tmp_path) == []
    assert mine.exists()


def test_process_of_another_container_is_judged_by_its_lock_alone(tmp_path):
    """Its process id means nothing here, however alive a process of that number may be."""
    me = temp_names.owner_of(temp_names.new_temp_name("x"))
    path = foreign_name(tmp_path, boot=me.boot, space=me.space + 1, pid=me.pid, start_time=me.start)
    code = """
import fcntl
file = open(sys.argv[1], "r+"); fcntl.flock(file, fcntl.LOCK_SH); print("locked", flush=True)
__import__("time").sleep(600)
"""
    process = start(code, path)
    assert process.stdout.readline() == "locked\n"
    assert sweep_orphans(tmp_path) == []
    kill(process)
    assert sweep_orphans(tmp_path) == [path.name]


def test_temp_is_locked_until_it_is_renamed(tmp_path, monkeypatch):
    """Else a sweeper in another container could take it for abandoned at the last moment."""
    claimed: list[bool] = []
    real = os.replace

    def watched(source, target):
        descriptor = os.open(source, os.O_RDWR)
        claimed.append(claim(descriptor))
        os.close(descriptor)
        real(source, target)

    monkeypatch.setattr(os, "replace", watched)
    write_atomically(tmp_path / "file", b"data")
    assert claimed == [False]


def test_reader_that_locks_what_it_reads_is_not_disturbed(tmp_path, monkeypatch):
    """HDF5 takes a shared lock; a claim on the published file would turn it away."""
    import fcntl

    real = os.replace

    def read_at_once(source, target):
        real(source, target)
        with open(target) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    monkeypatch.setattr(os, "replace", read_at_once)
    write_atomically(tmp_path / "file", b"data")
    assert (tmp_path / "file").read_bytes() == b"data"


def test_what_cannot_be_swept_stops_nothing(tmp_path):
    import socket

    me = temp_names.owner_of(temp_names.new_temp_name("x"))
    path = foreign_name(tmp_path, boot=me.boot, pid=1, start_time=1)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as plug:
        old = os.getcwd()
        os.chdir(tmp_path)
        try:
            plug.bind(path.name)
        finally:
            os.chdir(old)
    orphan = foreign_name(tmp_path, boot=me.boot, pid=2, start_time=1)
    assert sweep_orphans(tmp_path) == [orphan.name]
    assert path.exists()


def test_failing_cleanup_does_not_hide_the_error(tmp_path):
    code = """
from keras_safe_ckpt import CheckpointWriteError
from keras_safe_ckpt.storage.atomic import write_atomically
try:
    write_atomically(sys.argv[1], b"new")
except CheckpointWriteError as error:
    print(error.cause)
"""
    prefix = strace("fsync:error=EIO:when=1", "unlink:error=EROFS:when=1")
    assert "input/output error" in run_ok(code, tmp_path / "file", prefix=prefix)


def test_sweeping_touches_nothing_else(tmp_path):
    boot = temp_names.owner_of(temp_names.new_temp_name("x")).boot
    (tmp_path / "victim").write_bytes(b"precious")
    link = tmp_path / f".file.{boot}-1-999999999-1-0123456789ab.kscktmp"
    link.symlink_to(tmp_path / "victim")
    (tmp_path / "mine.kscktmp").write_bytes(b"x")
    (tmp_path / ".file.tmp").write_bytes(b"x")
    before = sorted(os.listdir(tmp_path))
    assert sweep_orphans(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("call", ["unlink", "rmdir", "open", "fstat", "lstat", "scandir"])
def test_scratch_directory_is_removed_although_a_call_fails_once(tmp_path, monkeypatch, call):
    """No sweep comes before this process has ended."""
    real, failed = getattr(os, call), []

    def failing(*args, **kwargs):
        if not failed:
            failed.append(args)
            raise OSError(5, "Input/output error")
        return real(*args, **kwargs)

    with scratch_directory(tmp_path) as directory:
        (directory / "file").touch()
        monkeypatch.setattr(os, call, failing)
    assert failed
    assert temps(tmp_path) == []


def test_scratch_directory_that_cannot_be_opened_is_not_left(tmp_path, monkeypatch):
    opened = os.open

    def failing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECTORY and str(path).endswith(".kscktmp"):
            monkeypatch.setattr(os, "open", opened)
            raise OSError(24, "Too many open files")
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(OSError, match="Too many"), scratch_directory(tmp_path):
        pytest.fail("it was not opened")
    assert os.open is opened
    assert temps(tmp_path) == []


def test_scratch_directory_of_a_dead_process_is_swept(tmp_path):
    code = """
from pathlib import Path
from keras_safe_ckpt.storage.atomic import scratch_directory
with scratch_directory(Path(sys.argv[1])) as directory:
    (directory / "big").write_bytes(b"x")
    print(directory, flush=True)
    __import__("time").sleep(600)
"""
    process = start(code, tmp_path)
    path = process.stdout.readline().strip()
    assert sweep_orphans(tmp_path) == []
    assert os.listdir(path) == ["big"]
    kill(process)
    assert sweep_orphans(tmp_path) == [os.path.basename(path)]
    with scratch_directory(tmp_path) as directory:
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert os.listdir(tmp_path) == []


def test_sweepers_and_writers_at_once_lose_nothing(tmp_path):
    """A sweeper that meets a temp in the instant before it is claimed takes nothing away."""
    code = """
from pathlib import Path
from keras_safe_ckpt.storage.atomic import sweep_orphans, write_atomically
for i in range(150):
    write_atomically(f"{sys.argv[1]}/{sys.argv[2]}", b"data" * 100)
    sweep_orphans(Path(sys.argv[1]))
"""
    children = [start(code, tmp_path, n) for n in range(4)]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3"]


def test_killed_at_the_rename_leaves_the_old_file_and_the_next_save_sweeps(tmp_path):
    write_atomically(tmp_path / "file", b"old")
    code = """
from keras_safe_ckpt.storage.atomic import write_atomically
write_atomically(sys.argv[1], b"new")
"""
    done = run(code, tmp_path / "file", prefix=strace("rename:signal=KILL:when=1"))
    assert done.returncode != 0
    assert (tmp_path / "file").read_bytes() == b"old"
    assert len(temps(tmp_path)) == 1
    sweep_orphans(tmp_path)
    assert temps(tmp_path) == []


def test_descriptors_are_not_inherited(tmp_path):
    with StagedFile(tmp_path / "file") as staged:
        listing = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False
        )
        assert staged.temp_path.name not in listing.stdout


def test_no_descriptor_leaks(tmp_path):
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    write_atomically(tmp_path / "file", b"x")
    before = count()
    for number in range(50):
        write_atomically(tmp_path / "file", b"x")
        with StagedFile(tmp_path / "other"):
            pass
        (tmp_path / "d").mkdir(exist_ok=True)
        with pytest.raises(UnsafePathError):
            write_atomically(tmp_path / "d", b"x")
        assert sweep_orphans(tmp_path) == [], number
    assert count() == before


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data[:3]), at))
    with StagedFile(tmp_path / "file") as staged:
        staged.write(b"0123456789" * 10)
        staged.write_at(5, b"abcdefgh")
        staged.sync()
        staged.commit()
    expected = bytearray(b"0123456789" * 10)
    expected[5:13] = b"abcdefgh"
    assert (tmp_path / "file").read_bytes() == expected


def test_wait_helper_fails_when_nothing_happens():
    with pytest.raises(AssertionError, match="waited"):
        wait_until(lambda: False, "never", seconds=0.01)


def test_a_temporary_file_that_is_swept_before_it_is_claimed_costs_a_name_only(
    tmp_path, monkeypatch
):
    swept = []

    def sweep_first(descriptor):
        if not swept:
            (name,) = [name for name in os.listdir(tmp_path) if name.endswith(".kscktmp")]
            swept.append(name)
            os.unlink(tmp_path / name)
        return claim(descriptor)

    monkeypatch.setattr(atomic, "claim", sweep_first)
    write_atomically(tmp_path / "x", b"all of it")
    assert swept
    assert (tmp_path / "x").read_bytes() == b"all of it"
