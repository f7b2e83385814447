"""What goes wrong in the middle of HDF5, or of a writer: nothing is lost, and nothing made up."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from processes import PROJECT, environment, run, run_ok, wait_until
from record_files import records_of

from keras_safe_ckpt import (
    CentralH5Writer,
    TFRecordShardWriter,
    WorkerH5Writer,
    split_tfrecord,
    verify_tfrecord,
)
from keras_safe_ckpt.datasets import central_process, spool, tables, tfrecord
from keras_safe_ckpt.datasets.central_file import CentralFile
from keras_safe_ckpt.datasets.feed_folder import FeedFolder
from keras_safe_ckpt.datasets.feed_line import FeedLine, line_to
from keras_safe_ckpt.datasets.frames import Message
from keras_safe_ckpt.datasets.tables import Tables
from keras_safe_ckpt.datasets.unfinished import find_unfinished, rescue
from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    SafeCheckpointError,
    UnsafePathError,
)
from keras_safe_ckpt.storage.error_facts import as_facts

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")

WORK = ".worker-00000.h5.unfinished"


def values(path: Path, name: str) -> list:
    with h5py.File(path) as file:
        dataset = file[name]
        return (dataset.asstr() if h5py.check_string_dtype(dataset.dtype) else dataset)[()].tolist()


def recovered(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "keras_safe_ckpt", "recover", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment())


# In the middle of HDF5.


@pytest.mark.parametrize("flush_every", [0, 50])
@pytest.mark.parametrize("length", [1000, 16_000])
def test_a_full_disk_in_the_middle_of_texts_does_not_crash(small_disk, length, flush_every):
    """HDF5 does not survive a failed write of texts: it is not told."""
    folder = small_disk("size=3m")
    code = """
from keras_safe_ckpt import WorkerH5Writer
from keras_safe_ckpt.errors import CheckpointWriteError
length, flush_every = map(int, sys.argv[2:])
writer = WorkerH5Writer(sys.argv[1], 0)
try:
    for number in range(100_000):
        writer.append("x", ["%08d" % number * (length // 8)])
        if flush_every and number % flush_every == 0:
            writer.flush()
except CheckpointWriteError as error:
    print(error)
writer.abandon()
"""
    assert "disk is full" in run_ok(code, folder, length, flush_every)
    if flush_every:
        (left,) = find_unfinished(folder)
        assert left.rows["x"] % flush_every == 1


class Broken:
    """The dataset's methods of HDF5, the third chunk of which goes wrong."""

    def __init__(self, dataset_id, error):
        self._id, self._count, self._error = dataset_id, 0, error

    def __getattr__(self, name):
        return getattr(self._id, name)

    def write_direct_chunk(self, *arguments):
        self._count += 1
        if self._count == 3:
            raise self._error
        return self._id.write_direct_chunk(*arguments)


class AlarmError(Exception):
    """Of a signal handler of the user's."""


def from_ctrl_c() -> SystemError:
    """As HDF5 and h5py make it, if it comes between two calls of theirs."""
    error = SystemError("returned a result with an exception set")
    error.__cause__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (AlarmError("late"), AlarmError),
        (TimeoutError("late"), TimeoutError),
        (OSError("Can't write data (memory allocation failed)"), CheckpointWriteError),
        (MemoryError("no room"), CheckpointWriteError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (from_ctrl_c(), KeyboardInterrupt),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whoever_goes_on_after_half_an_append_publishes_nothing(
    tmp_path, monkeypatch, error, raised
):
    writer = WorkerH5Writer(tmp_path, 0)
    writer.append("x", [5.0])
    writer.flush()
    table = writer._file.tables._tables["x"]
    monkeypatch.setattr(table.dataset, "_id", Broken(table.dataset.id, error))
    with pytest.raises(raised):
        append_when_told_to_end(writer)
    for call in (lambda: writer.append("x", [6.0]), writer.flush, writer.close):
        with pytest.raises(CheckpointWriteError, match="did not come to its end"):
            call()
    assert not (tmp_path / "worker-00000.h5").exists()
    with WorkerH5Writer(tmp_path, 0, resume=True) as writer:
        writer.append("x", [7.0])
    assert values(tmp_path / "worker-00000.h5", "x") == [5, 7]


def test_a_ctrl_c_that_was_kept_from_hdf5_is_not_lost(tmp_path, monkeypatch):
    """HDF5 reads what was not written any more, and fails for that."""
    writer = WorkerH5Writer(tmp_path, 0)
    writer.append("x", [5.0])
    writer.flush()

    def interrupted(*_: object) -> None:
        writer._file._file.fail(KeyboardInterrupt())
        raise OSError("Can't read data (bad object header)")

    monkeypatch.setattr(tables._Table, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.append("x", [6.0])
    writer.abandon()


def append_when_told_to_end(writer: WorkerH5Writer) -> None:
    """Whose Ctrl-C that was does not matter here: it was handled."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        writer.append("x", np.ones(200_000))


def test_an_array_whose_attributes_are_refused_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "checked_attributes", lambda found: found or {})
    with WorkerH5Writer(tmp_path, 0) as writer:
        with pytest.raises(OSError, match="too large"):
            writer.write("x", [1.0, 2.0], attributes={"large": np.zeros(9000)})
        writer.write("y", [3.0])
    with h5py.File(tmp_path / "worker-00000.h5") as file:
        assert list(file) == ["y"]


def test_an_empty_list_tells_nothing_of_the_rows_to_come(tmp_path):
    with WorkerH5Writer(tmp_path, np.int64(0), workers=np.int32(1)) as writer:
        writer.append("x", [])
        assert writer.rows("x") == 0
        writer.append("x", [[1, 2]])
        writer.append("x", [])
    assert values(tmp_path / "worker-00000.h5", "x") == [[1, 2]]
    with CentralH5Writer(tmp_path / "all.h5") as central:
        central.feed().append("x", [])
        central.feed().append("x", [["a", "b"]])
    assert values(tmp_path / "all.h5", "x") == [["a", "b"]]


# In the middle of a writer.


def test_a_signal_handler_in_an_append_is_told(tmp_path, monkeypatch):
    writer = WorkerH5Writer(tmp_path, 0)
    writer.append("x", [1.0])
    append = tables._Table.append
    told: list[str] = []

    def interrupted(self, rows) -> None:
        handler = (lambda: writer.append("x", [9.0]), writer.flush, writer.close, writer.abandon)
        for call in handler:
            with pytest.raises(RuntimeError) as caught:
                call()
            told.append(str(caught.value))
        append(self, rows)

    monkeypatch.setattr(tables._Table, "append", interrupted)
    writer.append("x", [2.0])
    monkeypatch.undo()
    assert len(told) == 4
    assert all("a signal handler cannot do that as well" in text for text in told)
    writer.append("x", [3.0])
    writer.close()
    assert values(tmp_path / "worker-00000.h5", "x") == [1, 2, 3]


def test_a_signal_handler_in_the_write_of_a_record_is_told(tmp_path, monkeypatch):
    writer = TFRecordShardWriter(tmp_path / "x", 0, 1)
    add = tfrecord.Encoder.add
    told: list[str] = []

    def interrupted(self, record) -> None:
        for call in (lambda: writer.write(b"handler"), writer.finish, writer.close):
            with pytest.raises(RuntimeError) as caught:
                call()
            told.append(str(caught.value))
        add(self, record)

    monkeypatch.setattr(tfrecord.Encoder, "add", interrupted)
    writer.write(b"a")
    monkeypatch.undo()
    assert len(told) == 3
    assert all("a signal handler cannot do that as well" in text for text in told)
    writer.write(b"b")
    writer.close()
    assert records_of(writer.path) == [b"a", b"b"]
    assert verify_tfrecord(writer.path).is_counted


# What cannot be read any more.


def damage_journal(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return bytes(data)


@pytest.mark.parametrize("resume", [True, False])
def test_a_damaged_journal_costs_nothing_that_was_flushed(tmp_path, resume):
    code = """
from keras_safe_ckpt import WorkerH5Writer
writer = WorkerH5Writer(sys.argv[1], 0)
for _ in range(2):
    writer.append("x", np.ones(1000))
    writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(code, tmp_path).returncode == -signal.SIGKILL
    data = (tmp_path / WORK).read_bytes()
    journal = damage_journal(tmp_path / f"{WORK}.journal")
    with pytest.raises(CorruptCheckpointError, match="Move both away to begin anew"):
        WorkerH5Writer(tmp_path, 0, resume=resume)
    assert (tmp_path / WORK).read_bytes() == data
    assert (tmp_path / f"{WORK}.journal").read_bytes() == journal
    listed = recovered(tmp_path)
    assert listed.returncode == 0
    assert "cannot be read: its checksum does not hold" in listed.stdout
    assert "Traceback" not in listed.stderr


def test_a_damaged_group_does_not_end_the_list(tmp_path):
    for name in ("a", "b"):
        with h5py.File(tmp_path / f".{name}.h5.interrupted", "w") as file:
            file["group/x"] = [1.0]
    damaged = tmp_path / ".a.h5.interrupted"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:500] + data[500:].replace(b"TREE", b"EERT"))
    first, second = find_unfinished(tmp_path)
    assert "it is damaged" in first.damage
    assert (first.rows, second.rows) == ({}, {"group/x": 1})


def test_of_earlier_lives_the_one_with_the_most_rows_stays(tmp_path):
    """However large the files are: the second one is compressed."""

    def interrupted(rows: str, compression: str) -> None:
        code = f"""
from keras_safe_ckpt import WorkerH5Writer
writer = WorkerH5Writer(sys.argv[1], 0)
writer.append("x", {rows}, compression={compression})
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
        assert run(code, tmp_path).returncode == -signal.SIGKILL

    interrupted("np.random.default_rng(0).random(10_000)", "None")
    interrupted("np.zeros(30_000)", "'gzip'")
    interrupted("np.zeros(10)", "None")
    interrupted("np.zeros(20)", "None")
    found = {one.path.name: one.rows["x"] for one in find_unfinished(tmp_path)}
    assert found == {".worker-00000.h5.interrupted": 30_000, WORK: 20}


# The process that owns a file.


class Stays:
    """A starter that does."""

    def has_left(self) -> bool:
        return False


def prepared(folder: Path, segment: int = 0) -> tuple[Path, FeedFolder]:
    """A feeder has asked, and has appended three rows."""
    target = folder / "all.h5"
    feeds = FeedFolder(target)
    feeds.make()
    stream = spool.SpoolWriter(feeds.path, "stream")
    stream.write(Message("x", np.empty(0), asks=True))
    stream.write(Message("x", np.arange(3.0)))
    stream.rest()
    os.rename(feeds.path / "stream.0", feeds.path / f"stream.{segment}")
    return target, feeds


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError("memory allocation failed")])
def test_rows_stay_in_their_stream_when_there_is_no_memory(tmp_path, monkeypatch, error):
    """They were appended, and fit: nobody may leave them out."""
    target, feeds = prepared(tmp_path)
    append = Tables.append
    calls: list[int] = []

    def fails_once(self, *arguments, **options) -> None:
        calls.append(1)
        if len(calls) == 2:  # That of the rows.
            raise error
        append(self, *arguments, **options)

    monkeypatch.setattr(Tables, "append", fails_once)
    monkeypatch.setattr(central_process, "_RETRY_SECONDS", 0.0)
    feeds.write("closed", {})
    central_process._work(target, False, Stays())
    assert len(calls) == 4, "all of it again"
    assert values(target, "x") == [0, 1, 2]


def test_memory_that_is_missing_elsewhere_is_waited_for(tmp_path, monkeypatch):
    target, feeds = prepared(tmp_path)
    read = spool.SpoolReader.read
    calls: list[int] = []

    def fails_once(self) -> Message | None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return read(self)

    monkeypatch.setattr(spool.SpoolReader, "read", fails_once)
    monkeypatch.setattr(central_process, "_RETRY_SECONDS", 0.0)
    feeds.write("closed", {})
    central_process._work(target, False, Stays())
    assert len(calls) > 2
    assert values(target, "x") == [0, 1, 2]


def test_rows_behind_a_gap_are_not_taken_for_all(tmp_path):
    """The journal that has their place is gone, and so are the rows before."""
    target, feeds = prepared(tmp_path, segment=1)
    file = CentralFile(target, Stays().has_left)
    with pytest.raises(CorruptCheckpointError, match=r"go on in stream\.1"):
        file.run()
    file.close()
    assert (feeds.path / "stream.1").exists()


def test_a_damaged_journal_costs_no_row_that_was_appended(tmp_path):
    code = """
from keras_safe_ckpt import CentralH5Writer
writer = CentralH5Writer(sys.argv[1])
feed = writer.feed()
for _ in range(2):
    feed.append("x", np.ones(1000))
    feed.flush()
os.kill(writer.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "all.h5"
    assert run(code, path).returncode == -signal.SIGKILL
    damage_journal(tmp_path / ".all.h5.unfinished.journal")
    work, feeds = tmp_path / ".all.h5.unfinished", tmp_path / ".all.h5.feeds"
    before = work.read_bytes(), sorted(os.listdir(feeds))
    with pytest.raises(CorruptCheckpointError, match="Move both away"):
        CentralH5Writer(path)
    assert (work.read_bytes(), sorted(os.listdir(feeds))) == before
    assert not path.exists()


def test_recover_knows_of_rows_that_wait(tmp_path):
    code = """
from keras_safe_ckpt import CentralH5Writer
writer = CentralH5Writer(sys.argv[1])
feed = writer.feed()
feed.append("x", [1.0])
feed.flush()
os.kill(writer.pid, signal.SIGSTOP)
feed.append("x", [2.0])
os.kill(writer.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "all.h5"
    assert run(code, path).returncode == -signal.SIGKILL
    wait_until(lambda: not find_unfinished(tmp_path)[0].holder, "the owner is gone")
    listed = recovered(tmp_path).stdout
    assert "rows that were appended wait beside it" in listed
    with pytest.raises(SafeCheckpointError, match="would be left out"):
        rescue(tmp_path / ".all.h5.unfinished", tmp_path / "out.h5")
    refused = recovered(tmp_path / ".all.h5.unfinished", "--out", tmp_path / "out.h5")
    assert refused.returncode == 2
    assert not (tmp_path / "out.h5").exists()
    advice = listed.splitlines()[-1].strip().replace("python", sys.executable, 1)
    subprocess.run(advice, shell=True, check=True, env=environment(), cwd=PROJECT)
    assert values(path, "x") == [1, 2]
    assert "Nothing unfinished" in recovered(tmp_path).stdout


# Feeders.


@pytest.fixture
def writer(tmp_path):
    with CentralH5Writer(tmp_path / "all.h5") as one:
        yield one


def test_compression_is_asked_for_once(writer, monkeypatch):
    """To ask is to wait for a commit."""
    asked: list[str] = []
    ask = FeedLine.ask
    monkeypatch.setattr(
        FeedLine, "ask", lambda self, *rest: (asked.append("asked"), ask(self, *rest))[1]
    )
    feed = writer.feed()
    for _ in range(10):
        feed.append("x", [1.0], compression="gzip")
        feed.append("x", [1.0])
    assert len(asked) == 1
    with pytest.raises(ValueError, match="expected compression='gzip'"):
        feed.append("x", [1.0], compression="lzf")


def test_a_stray_line_of_the_process_is_not_for_us(writer):
    error = CheckpointWriteError(writer.path, OSError(errno.ENOSPC, "No space"))
    writer._listen(io.StringIO(f"something else\n{json.dumps(as_facts(error))}\n"))
    assert str(writer._trouble.error) == str(error)


@pytest.mark.parametrize("method", ["_opened", "__init__"])
def test_a_disk_without_room_for_a_name_is_said(writer, monkeypatch, method):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    feed = writer.feed()
    with monkeypatch.context() as patched:
        patched.setattr(spool.SpoolWriter, method, full)
        with pytest.raises(CheckpointWriteError, match="disk is full"):
            feed.append("x", [1.0])
    feed.append("x", [2.0])
    writer.close()
    assert values(writer.path, "x") == [2]


def test_a_feed_into_a_folder_that_is_gone_says_that_it_is_closed(writer, monkeypatch):
    """At the very moment between the frame and the look at how much there is."""
    feed = writer.feed()
    feed.append("x", [1.0])
    line = line_to(writer.path)
    with monkeypatch.context() as patched:
        patched.setattr(spool.SpoolWriter, "size", property(lambda self: os.stat("/none").st_size))
        with pytest.raises(CheckpointWriteError, match="is closed"):
            feed.append("x", [2.0])
    assert not line.is_open


def test_all_threads_of_a_process_have_one_line(tmp_path):
    mine = line_to(tmp_path / "a.h5")
    assert line_to(tmp_path / "a.h5") is mine
    pid = os.fork()
    if not pid:
        os._exit(line_to(tmp_path / "a.h5") is mine)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "a child has its own"


def test_a_folder_that_others_can_write_into_is_refused(tmp_path):
    """What is in there is believed."""
    folder = tmp_path / ".all.h5.feeds"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UnsafePathError, match="other users can write into it"):
        CentralH5Writer(tmp_path / "all.h5")


def test_what_python_prints_when_it_starts_is_not_for_us(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    code = """
import sys
from pathlib import Path
from keras_safe_ckpt import CentralH5Writer
sys.path.append(Path("no text"))
with CentralH5Writer(sys.argv[1] + "/all.h5", timeout=float("inf")) as writer:
    writer.feed().append("x", [1.0])
"""
    variables = {**environment(), "PYTHONPATH": f"{tmp_path}:{PROJECT}"}
    program = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(program, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello\n"
    assert values(tmp_path / "all.h5", "x") == [1]


def test_a_process_that_cannot_even_start_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("keras_safe_ckpt.datasets.central_writer._PROGRAM", "raise SystemExit(3)")
    with pytest.raises(SafeCheckpointError, match=r"all\.h5' ended with code 3\."):
        CentralH5Writer(tmp_path / "all.h5")


# Many shards.


def test_a_split_sweeps_once(tmp_path, monkeypatch):
    """Each sweep looks at the temporary files of all shards."""
    with TFRecordShardWriter(tmp_path / "x", 0, 1) as shard:
        for number in range(30):
            shard.write(b"%d" % number)
    swept: list[Path] = []
    monkeypatch.setattr(tfrecord, "sweep_orphans", swept.append)
    paths = split_tfrecord(shard.path, tmp_path / "part", 20)
    assert len(swept) == 1
    assert sum(verify_tfrecord(path).records for path in paths) == 30
