"""Large files go to the disk in blocks, past the page cache where that is possible."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import require_root, run, run_ok, strace, writing_threads
from snapshots import make_snapshot

from keras_safe_ckpt import CheckpointStore, CheckpointWriteError
from keras_safe_ckpt.storage import block_writer
from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.block_writer import BLOCK_BYTES, BlockWriter

#: Not a multiple of anything, and three blocks and a bit.
SIZE = 3 * BLOCK_BYTES + 12_345
CONTENT = random.Random(0).randbytes(SIZE)


def write_content(path: Path, pieces: int = 777_777) -> None:
    with StagedFile(path) as staged:
        for start in range(0, SIZE, pieces):
            staged.write(CONTENT[start : start + pieces])
        assert staged.size == SIZE
        staged.sync()
        staged.commit()


def open_descriptors() -> set[str]:
    return {f"{name}->{os.readlink(f'/proc/self/fd/{name}')}" for name in _listed()}


def _listed() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{name}"):
            yield name


@pytest.mark.parametrize("pieces", [777_777, BLOCK_BYTES, SIZE])
def test_every_byte_arrives(tmp_path, pieces):
    before = open_descriptors()
    write_content(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert open_descriptors() == before
    assert writing_threads() == []


def test_parts_are_overwritten_wherever_they_are(tmp_path):
    expected = bytearray(CONTENT)
    with StagedFile(tmp_path / "file") as staged:
        staged.write(CONTENT)
        # On the disk, across two blocks on the disk, into the one in memory, at the very end.
        for place in (5, BLOCK_BYTES - 2, 3 * BLOCK_BYTES - 2, SIZE - 4):
            expected[place : place + 4] = b"abcd"
            staged.write_at(place, b"abcd")
        staged.sync()
        staged.commit()
    assert (tmp_path / "file").read_bytes() == expected


def test_more_can_be_written_after_a_sync(tmp_path):
    with StagedFile(tmp_path / "file") as staged:
        staged.write(CONTENT[: BLOCK_BYTES + 1000])
        staged.sync()
        staged.write(CONTENT[BLOCK_BYTES + 1000 :])
        staged.sync()
        staged.commit()
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_nothing_is_left_to_wait_for_after_a_sync(tmp_path):
    """What follows happens under the lock of the directory."""
    with StagedFile(tmp_path / "file") as staged:
        staged.write(CONTENT)
        assert writing_threads() != []
        staged.sync()
        assert writing_threads() == []


def test_overwriting_waits_for_the_block_that_is_being_written(tmp_path, monkeypatch):
    gate = threading.Event()
    real = block_writer._BlockFile.write

    def slow(self, offset, block):
        assert gate.wait(30)
        real(self, offset, block)

    monkeypatch.setattr(block_writer._BlockFile, "write", slow)
    with StagedFile(tmp_path / "file") as staged:
        staged.write(CONTENT[:BLOCK_BYTES])
        threading.Timer(0.05, gate.set).start()
        staged.write_at(0, b"head")  # Were it written now, the block would undo it.
        staged.sync()
        staged.commit()
    assert (tmp_path / "file").read_bytes() == b"head" + CONTENT[4:BLOCK_BYTES]


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache, as the system tells (util-linux)."""
    command = ["fincore", "--bytes", "--noheadings", "--raw", "--output", "RES", str(path)]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)


def test_large_files_leave_the_page_cache_alone(tmp_path):
    kind = subprocess.run(["stat", "-fc", "%T", tmp_path], check=True, capture_output=True).stdout
    if not hasattr(os, "O_DIRECT") or kind.strip() in (b"tmpfs", b"ramfs"):
        pytest.skip("files are nowhere but in memory here, or there is no O_DIRECT")
    if shutil.which("fincore") is None:
        pytest.skip("fincore is not installed (apt-get install util-linux)")
    write_content(tmp_path / "file")
    assert cached_bytes(tmp_path / "file") < BLOCK_BYTES  # Only its tail.


def test_small_files_take_no_thread_and_no_direct_write(tmp_path, monkeypatch):
    def refuse(path: Path, descriptor: int) -> None:
        raise AssertionError("opened for blocks")

    monkeypatch.setattr(block_writer, "_BlockFile", refuse)
    with StagedFile(tmp_path / "file") as staged:
        staged.write(CONTENT[: BLOCK_BYTES - 1])
        staged.sync()
        staged.commit()
    assert (tmp_path / "file").read_bytes() == CONTENT[: BLOCK_BYTES - 1]


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system that refuses O_DIRECT when a file is opened."""
    require_root()
    folder = tmp_path / "ramfs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ramfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_file_system_that_refuses_direct_writes(ramfs):
    probe = ramfs / "probe"
    probe.touch()
    with pytest.raises(OSError, match="Invalid argument"):
        os.close(os.open(probe, os.O_WRONLY | os.O_DIRECT))
    write_content(ramfs / "file")
    assert (ramfs / "file").read_bytes() == CONTENT


def test_file_system_that_tells_no_size_has_room(ramfs):
    assert shutil.disk_usage(ramfs).total == 0
    store = CheckpointStore(ramfs)
    store.publish(make_snapshot(1), step=1)
    assert store.latest().manifest.step == 1


def test_system_without_direct_writes(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    write_content(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


#: Three blocks and no tail: each is one pwrite64 of the writing thread (strace counts by thread).
BLOCKS = 3 * BLOCK_BYTES
#: A tail and no block: one pwrite64 of the main thread.
TAIL = 256

WRITE = """
from keras_safe_ckpt import CheckpointWriteError
from keras_safe_ckpt.storage.atomic import write_atomically
content = bytes(range(256)) * (int(sys.argv[2]) // 256)
opened = len(os.listdir("/proc/self/fd"))
try:
    write_atomically(sys.argv[1], content)
except CheckpointWriteError as error:
    print(error)
else:
    with open(sys.argv[1], "rb") as file:
        print(file.read() == content)
assert len(os.listdir("/proc/self/fd")) == opened
"""


@pytest.mark.parametrize("error", ["EINVAL", "EOPNOTSUPP", "EACCES"])
@pytest.mark.parametrize("block", [1, 2])
def test_file_system_that_opens_but_does_not_write_directly(tmp_path, error, block):
    prefix = strace(f"pwrite64:error={error}:when={block}")
    assert run_ok(WRITE, tmp_path / "file", BLOCKS, prefix=prefix) == "True\n"


@pytest.mark.parametrize(
    ("error", "text"),
    [("EIO", "EIO"), ("ENOSPC", "disk is full"), ("EDQUOT", "quota"), ("EFBIG", "EFBIG")],
)
@pytest.mark.parametrize(("size", "block"), [(BLOCKS, 1), (BLOCKS, 3), (TAIL, 1)])
def test_error_of_any_block_is_raised_and_the_old_file_stays(tmp_path, error, text, size, block):
    (tmp_path / "file").write_bytes(b"old")
    prefix = strace(f"pwrite64:error={error}:when={block}")
    assert text in run_ok(WRITE, tmp_path / "file", size, prefix=prefix)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(("size", "block"), [(BLOCKS, 1), (BLOCKS, 2), (BLOCKS, 3), (TAIL, 1)])
def test_killed_at_any_block_the_old_file_stays(tmp_path, size, block):
    (tmp_path / "file").write_bytes(b"old")
    prefix = strace(f"pwrite64:signal=KILL:when={block}")
    assert run(WRITE, tmp_path / "file", size, prefix=prefix).returncode == -signal.SIGKILL
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("taken", [4096 * 3, 5000])
def test_short_writes_are_continued_aligned_or_not(tmp_path, monkeypatch, taken):
    real, calls = os.pwrite, []

    def short(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(len(data))
        # Not always: three blocks in pieces of a page would take long.
        return real(descriptor, data[:taken] if len(calls) % 2 else data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    if taken % 512:  # No device takes such a part itself: write it as if one had.
        monkeypatch.setattr(
            block_writer, "_open_direct", lambda path, descriptor: os.dup(descriptor)
        )
    write_content(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert len(calls) == 8


def test_unaligned_rest_of_a_short_write_goes_through_the_cache(tmp_path, monkeypatch):
    direct: list[int] = []
    descriptors: list[int] = []
    real, opened = os.pwrite, block_writer._open_direct

    def open_direct(path: Path, descriptor: int) -> int | None:
        descriptors.append(opened(path, descriptor) or -1)
        return descriptors[-1]

    def short(descriptor: int, data: memoryview, offset: int) -> int:
        if descriptor not in descriptors:
            return real(descriptor, data, offset)
        direct.append(offset % 4096)
        real(descriptor, data, offset)
        return 5000

    monkeypatch.setattr(os, "pwrite", short)
    monkeypatch.setattr(block_writer, "_open_direct", open_direct)
    write_content(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert direct == [0, 0, 0]


def test_nothing_is_written_to_a_file_that_took_the_name(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"not ours")
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.unlink(tmp_path / "file")
    os.link(other, tmp_path / "file")
    writer = BlockWriter(tmp_path / "file", descriptor)
    writer.append(memoryview(CONTENT))
    writer.flush()
    writer.close()
    assert other.read_bytes() == b"not ours"
    assert os.pread(descriptor, SIZE + 1, 0) == CONTENT
    os.close(descriptor)


def test_nothing_is_written_through_a_link_that_took_the_name(tmp_path):
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.rename(tmp_path / "file", tmp_path / "moved")
    os.symlink("moved", tmp_path / "file")  # The same file, but by a name that may change.
    assert block_writer._open_direct(tmp_path / "file", descriptor) is None
    os.close(descriptor)


def test_pipe_that_took_the_name_is_not_waited_for(tmp_path):
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.unlink(tmp_path / "file")
    os.mkfifo(tmp_path / "file")
    assert block_writer._open_direct(tmp_path / "file", descriptor) is None
    os.close(descriptor)


def test_interrupted_save_writes_to_no_file_that_was_opened_since(tmp_path, monkeypatch):
    """The thread may be in the middle of a block when a Ctrl-C ends every wait for it."""
    gate, ended = threading.Event(), threading.Event()
    real_write, real_close = block_writer._BlockFile.write, block_writer._BlockFile.close

    def slow(self, offset, block):
        assert gate.wait(30)
        real_write(self, offset, block)

    def close(self):
        real_close(self)
        ended.set()

    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(block_writer._BlockFile, "write", slow)
    monkeypatch.setattr(block_writer._BlockFile, "close", close)
    staged = StagedFile(tmp_path / "file")
    staged.write(CONTENT[:BLOCK_BYTES])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            staged.rollback()
    staged.rollback()
    # As many as were closed, so that their numbers are taken.
    flags = os.O_RDWR | os.O_CREAT
    victims = [os.open(tmp_path / f"victim{number}", flags) for number in range(8)]
    gate.set()
    assert ended.wait(30)
    assert [os.fstat(victim).st_size for victim in victims] == [0] * 8
    for victim in victims:
        os.close(victim)
    assert not (tmp_path / "file").exists()


def test_blocks_are_where_direct_writes_want_them():
    assert BLOCK_BYTES % mmap.PAGESIZE == 0


def test_error_of_a_block_carries_path_and_step(tmp_path, monkeypatch):
    def fail(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fail)
    with StagedFile(tmp_path / "file", step=7) as staged:
        with pytest.raises(CheckpointWriteError) as raised:
            staged.write(CONTENT)
        assert raised.value.step == 7
        with pytest.raises(CheckpointWriteError):
            staged.sync()
    assert os.listdir(tmp_path) == []
