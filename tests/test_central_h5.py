"""One process owns an HDF5 file, and others feed it: each row is in it once, whoever is killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from killing import killed_at_each
from processes import (
    children_of,
    ending,
    environment,
    kill,
    require_root,
    run,
    run_ok,
    start,
    strace,
    wait_until,
)
from warm import warm_process

from keras_safe_ckpt import CentralH5Writer
from keras_safe_ckpt.datasets import feed as feed_module
from keras_safe_ckpt.datasets import feed_line, spool
from keras_safe_ckpt.datasets.feed import Feed
from keras_safe_ckpt.datasets.feed_line import line_to
from keras_safe_ckpt.datasets.frames import Message
from keras_safe_ckpt.datasets.unfinished import find_unfinished
from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    LockTimeoutError,
    SafeCheckpointError,
    UnsafePathError,
)
from keras_safe_ckpt.storage.temp_names import owner_of

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


def seen(folder: Path) -> list[str]:
    """The files that are not lock files."""
    return sorted(name for name in os.listdir(folder) if not name.endswith((".lock", ".gate")))


def values(path: Path, name: str) -> list:
    with h5py.File(path) as file:
        dataset = file[name]
        return (dataset.asstr() if h5py.check_string_dtype(dataset.dtype) else dataset)[()].tolist()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def writer(tmp_path) -> Iterator[CentralH5Writer]:
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        yield writer


# What is written.


def test_rows_of_all_kinds_are_in_the_file(tmp_path):
    with CentralH5Writer(tmp_path / "new/all.h5") as writer:
        feed = writer.feed()
        feed.append("score", np.array([[1.5, 2.5]], "float32"), attributes={"unit": "°C", "n": 3})
        feed.append("score", np.array([[3.5, 4.5], [5.5, 6.5]], "float32"))
        feed.append("group/text", ["first", "zweites ß"], compression="gzip")
        feed.append("group/text", np.array([b"bytes"]))
        feed.append("flag", [True, False])
        feed.append("number", [1, 2])
        feed.append("number", 3 + np.arange(2))
        feed.append("empty", np.zeros((0, 3)))
        assert not (tmp_path / "new/all.h5").exists(), "seen before it is whole"
    with h5py.File(tmp_path / "new/all.h5") as file:
        assert file["score"][:].tolist() == [[1.5, 2.5], [3.5, 4.5], [5.5, 6.5]]
        assert file["score"].dtype == "float32"
        assert file["score"].attrs["unit"] == "°C"
        assert file["score"].attrs["n"] == 3
        assert file["group/text"].asstr()[:].tolist() == ["first", "zweites ß", "bytes"]
        assert file["group/text"].compression == "gzip"
        assert file["flag"].dtype == bool
        assert file["number"][:].tolist() == [1, 2, 3, 4]
        assert file["empty"].shape == (0, 3)
    assert seen(tmp_path / "new") == ["all.h5"]


def test_a_flush_is_a_promise_for_power_cuts(writer):
    """What was flushed is in the unfinished file, as another process would recover it."""
    feed = writer.feed()
    feed.append("x", [1.0])
    feed.append("x", [2.0, 3.0])
    feed.flush()
    note = json.loads(_journal_note(writer.path))
    (((segment, offset, size), _),) = note.values()
    assert segment == 0
    assert offset == size > 0


def _journal_note(path: Path) -> bytes:
    journal = path.with_name(f".{path.name}.unfinished.journal").read_bytes()
    length = int.from_bytes(journal[16:24], "little")
    return journal[40 : 40 + length]


def test_a_file_that_is_there_is_gone_on_with(tmp_path):
    for number in range(3):
        with CentralH5Writer(tmp_path / "all.h5") as writer:
            writer.feed().append("x", [float(number)])
    assert values(tmp_path / "all.h5", "x") == [0, 1, 2]


def test_an_error_in_the_block_keeps_the_rows_for_the_next_one(tmp_path):
    def fail() -> None:
        with CentralH5Writer(tmp_path / "all.h5") as writer:
            writer.feed().append("x", [1.0])
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert not (tmp_path / "all.h5").exists()
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        writer.feed().append("x", [2.0])
    assert values(tmp_path / "all.h5", "x") == [1, 2]
    assert seen(tmp_path) == ["all.h5"]


def test_closing_twice_is_closing_once(tmp_path):
    writer = CentralH5Writer(tmp_path / "all.h5")
    writer.feed().append("x", [1.0])
    writer.close()
    writer.close()
    writer.abandon()
    assert values(tmp_path / "all.h5", "x") == [1]
    assert not is_running(writer.pid)


def test_nothing_appended_is_an_empty_file(tmp_path):
    with CentralH5Writer(tmp_path / "all.h5"):
        pass
    with h5py.File(tmp_path / "all.h5") as file:
        assert list(file) == []


def test_large_arrays_go_in_pieces(tmp_path):
    rows = np.random.default_rng(0).random((5000, 1000))
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feed = writer.feed()
        feed.append("x", rows)  # 40 MB
        feed.append("x", rows[::-1][:, ::-1])
    with h5py.File(tmp_path / "all.h5") as file:
        assert np.array_equal(file["x"][:5000], rows)
        assert np.array_equal(file["x"][5000:], rows[::-1][:, ::-1])


# Feeders.


def feed_some(feed: Feed, number: int) -> None:
    for index in range(20):
        feed.append("x", np.array([[number, index]]))


def check_pairs(path: Path, feeders: int, count: int) -> None:
    """All rows of each feeder, once, in their order."""
    found = values(path, "x")
    assert len(found) == feeders * count
    for number in range(feeders):
        assert [row for row in found if row[0] == number] == [[number, i] for i in range(count)]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_of_multiprocessing_feed(tmp_path, method):
    context = multiprocessing.get_context(method)
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feed = writer.feed()
        feed.append("other", [1])  # A forked child inherits a feed that is in use.
        processes = [context.Process(target=feed_some, args=(feed, number)) for number in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    check_pairs(tmp_path / "all.h5", 3, 20)


def test_threads_and_handles_feed(tmp_path):
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feeds = [writer.feed(), pickle.loads(pickle.dumps(writer.feed()))]
        threads = [
            threading.Thread(target=feed_some, args=(feeds[number % 2], number))
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    check_pairs(tmp_path / "all.h5", 4, 20)


def test_a_feed_of_a_path_is_a_feed(tmp_path, writer):
    """A process that was started by somebody else knows the path only."""
    code = "from keras_safe_ckpt.datasets.feed import Feed\nFeed(sys.argv[1]).append('x', [7])"
    run_ok(code, writer.path)
    assert repr(Feed(writer.path)) == f"Feed({str(writer.path)!r}, timeout=60.0)"
    writer.close()
    assert values(writer.path, "x") == [7]


def test_a_relative_path_is_where_the_writer_was_made(tmp_path, monkeypatch):
    with CentralH5Writer("all.h5") as writer:
        feed = writer.feed()
        (tmp_path / "else").mkdir()
        monkeypatch.chdir(tmp_path / "else")
        feed.append("x", [1])
    assert values(tmp_path / "all.h5", "x") == [1]


def test_a_feed_can_be_closed_and_used_again(tmp_path):
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        with writer.feed() as feed:
            feed.append("x", [1])
        feed.append("x", [2])
        feed.flush()
        feed.close()
        feed.flush()
    assert values(tmp_path / "all.h5", "x") == [1, 2]


# Errors reach who caused them.


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        (np.zeros((1, 3)), ValueError, r"'x': expected rows of shape \(2,\), as before"),
        (np.zeros((1, 2), complex), TypeError, "'x': expected float64, as before"),
        ([["a", "b"]], TypeError, "'x': expected float64, as before"),
        ([[1.0, 2.0], [3.0]], ValueError, "'x': expected rows of one shape"),
        (3.0, ValueError, "'x': expected rows, an array of at least one dimension"),
        (np.zeros((1, 2), "datetime64[s]"), TypeError, "numbers, booleans or text"),
    ],
)
def test_rows_that_do_not_fit_are_refused(writer, rows, kind, message):
    """To a feeder that knows the dataset, and to one that does not."""
    feed = writer.feed()
    feed.append("x", np.zeros((1, 2)))
    for _ in range(2):
        with pytest.raises(kind, match=message):
            feed.append("x", rows)
        feed.append("x", np.ones((1, 2)))
        line_to(writer.path).known.clear()  # As in a process that has not fed it yet.
    writer.close()
    assert values(writer.path, "x") == [[0, 0], [1, 1], [1, 1]]


def test_other_arguments_that_do_not_fit_are_refused(writer):
    feed = writer.feed()
    feed.append("x", [1], compression="gzip")
    with pytest.raises(
        ValueError, match=r"expected compression='gzip', as before. Received: 'lzf'"
    ):
        feed.append("x", [1], compression="lzf")
    with pytest.raises(ValueError, match="compression: expected None, 'gzip'"):
        feed.append("x", [1], compression="zip")
    with pytest.raises(ValueError, match="name: expected a name such as"):
        feed.append("a//b", [1])
    with pytest.raises(ValueError, match=r"expected a new name. There is a dataset 'x'"):
        feed.append("x/y", [1])
    with pytest.raises(TypeError, match="attribute a"):
        feed.append("y", [1], attributes={"a": object()})
    feed.append("x", [2])
    writer.close()
    assert values(writer.path, "x") == [1, 2]


def test_the_error_of_one_feeder_is_not_that_of_another(writer):
    good, bad = writer.feed(), writer.feed()
    good.append("x", [1])
    with pytest.raises(ValueError, match="rows of shape"):
        bad.append("x", [[1, 2]])
    good.append("x", [2])
    good.flush()
    bad.append("y", [3])
    bad.flush()


def test_two_feeders_that_begin_at_once_agree_on_what_a_dataset_is(writer):
    """Whoever comes second hears that its rows do not fit."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(6)

    def begin(columns: int) -> None:
        feed = writer.feed()
        barrier.wait()
        try:
            feed.append("x", np.zeros((1, columns)))
        except ValueError as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=(1 + number % 2,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert len(errors) == 3
    assert len(values(writer.path, "x")) == 3


# The end.


def test_a_closed_writer_takes_no_more(tmp_path):
    writer = CentralH5Writer(tmp_path / "all.h5")
    feed = writer.feed()
    feed.append("x", [1])
    writer.close()
    feed.flush()  # All is in the file.
    for one in (feed, writer.feed()):
        with pytest.raises(CheckpointWriteError, match="its CentralH5Writer is closed"):
            one.append("x", [2])
    assert values(tmp_path / "all.h5", "x") == [1]


@pytest.mark.parametrize("turns", [1, pytest.param(10, marks=pytest.mark.campaign)])
def test_what_was_appended_before_the_end_is_in_the_file(tmp_path, turns):
    """Feeders that go on while the writer is closed: what returned is there, nothing else."""
    code = """
from keras_safe_ckpt.datasets.feed import Feed
from keras_safe_ckpt.errors import CheckpointWriteError
path, me = sys.argv[1:]
feed, count = Feed(path), 0
feed.append("x", [[int(me), 0]])
print("ready", flush=True)
try:
    while True:
        count += 1
        feed.append("x", [[int(me), count]])
except CheckpointWriteError as error:
    assert "is closed" in str(error), error
    print(count, "not known" in str(error))
"""
    for turn in range(turns):
        path = tmp_path / f"{turn}.h5"
        with CentralH5Writer(path) as writer:
            feeders = [start(code, path, me) for me in range(4)]
            for feeder in feeders:
                assert feeder.stdout is not None
                assert feeder.stdout.readline() == "ready\n"
            assert writer.path == path
        found = values(path, "x")
        for me, feeder in enumerate(feeders):
            out, err = feeder.communicate(timeout=60)
            assert feeder.returncode == 0, err
            count, is_uncertain = out.split()
            mine = [row[1] for row in found if row[0] == me]
            assert mine == list(range(len(mine)))
            allowed = (int(count), int(count) + 1) if is_uncertain == "True" else (int(count),)
            assert len(mine) in allowed


def test_who_waits_when_the_writer_is_closed_does_not_wait_for_ever(tmp_path, monkeypatch):
    """The reply goes with the folder, and a feeder that looks too late never sees it."""
    writer = CentralH5Writer(tmp_path / "all.h5")
    feed = writer.feed()
    feed.append("x", [1.0])
    send = feed_line.FeedLine.send

    def close_then(self, message, timeout):
        size = send(self, message, timeout)
        writer.close()
        return size

    monkeypatch.setattr(feed_line.FeedLine, "send", close_then)
    feed.flush()
    assert values(tmp_path / "all.h5", "x") == [1]
    writer = CentralH5Writer(tmp_path / "all.h5")
    with pytest.raises(
        CheckpointWriteError, match="whether these rows are still in it is not known"
    ):
        feed.append("y", [2.0])
    assert values(tmp_path / "all.h5", "y") == []


def test_a_writer_that_is_left_alone_ends(tmp_path):
    """The program is killed: its process takes what is there, and the rest is for the next one."""
    code = """
from keras_safe_ckpt import CentralH5Writer
writer = CentralH5Writer(sys.argv[1])
writer.feed().append("x", [1.0])
print(writer.pid, flush=True)
import time; time.sleep(600)
"""
    path = tmp_path / "all.h5"
    program = start(code, path)
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    feed = Feed(path)
    feed.append("x", [2.0])
    kill(program)
    wait_until(lambda: not is_running(pid), "the process of a killed program has ended")
    feed.append("x", [3.0])  # Nobody is there: it waits in its stream.
    assert not path.exists()
    with CentralH5Writer(path) as writer:
        feed.append("x", [4.0])
        writer.feed().append("x", [5.0])
    assert sorted(values(path, "x")) == [1, 2, 3, 4, 5]
    assert seen(tmp_path) == ["all.h5"]


def test_a_program_that_ends_without_closing_loses_nothing(tmp_path):
    code = """
from keras_safe_ckpt import CentralH5Writer
CentralH5Writer(sys.argv[1]).feed().append("x", [1.0])
"""
    done = run(code, tmp_path / "all.h5")
    assert (done.returncode, done.stderr) == (0, "")
    with CentralH5Writer(tmp_path / "all.h5"):
        pass
    assert values(tmp_path / "all.h5", "x") == [1]


def test_ctrl_c_keeps_what_was_appended(tmp_path):
    code = """
from keras_safe_ckpt import CentralH5Writer
count = 0
try:
    with CentralH5Writer(sys.argv[1]) as writer:
        feed = writer.feed()
        feed.append("x", [count])
        print("ready", flush=True)
        while True:
            count += 1
            feed.append("x", [count])
except KeyboardInterrupt:
    print(count)
"""
    path = tmp_path / "all.h5"
    # Ctrl-C in a terminal goes to all processes of the group.
    program = subprocess.Popen(
        [sys.executable, "-c", "import sys, signal\n"
         "signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code, path],
        env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    os.killpg(program.pid, signal.SIGINT)
    out, _ = program.communicate(timeout=60)
    assert program.returncode == 0
    with CentralH5Writer(path):
        pass
    found = values(path, "x")
    assert found == list(range(len(found)))
    assert len(found) - int(out) in (0, 1)


def test_two_writers_of_one_path_are_refused(writer):
    with pytest.raises(LockTimeoutError, match=f"held by pid {writer.pid} on"):
        CentralH5Writer(writer.path)
    writer.feed().append("x", [1])
    writer.close()
    assert values(writer.path, "x") == [1]


def test_places_that_cannot_be_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    for name in ("folder", "link"):
        with pytest.raises(UnsafePathError):
            CentralH5Writer(tmp_path / name)
    with pytest.raises(ValueError, match="timeout"):
        CentralH5Writer("x.h5", timeout=-1)
    with pytest.raises(CheckpointWriteError, match="is closed"):
        Feed(tmp_path / "nothing.h5").append("x", [1])


def test_links_in_the_way_are_not_followed(tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / ".all.h5.feeds").symlink_to(target)
    with pytest.raises(UnsafePathError, match=r"feeds.*is a symbolic link"):
        CentralH5Writer(tmp_path / "all.h5")
    (tmp_path / ".all.h5.feeds").unlink()
    (tmp_path / ".all.h5.unfinished").symlink_to(target / "file")
    (tmp_path / ".all.h5.unfinished.journal").symlink_to(target / "file")
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        writer.feed().append("x", [1])
    assert os.listdir(target) == []
    assert values(tmp_path / "all.h5", "x") == [1]


def test_a_folder_of_another_user_is_refused(tmp_path):
    require_root()
    (tmp_path / ".all.h5.feeds").mkdir()
    os.chown(tmp_path / ".all.h5.feeds", 65534, 65534)
    with pytest.raises(UnsafePathError, match="belongs to another user"):
        CentralH5Writer(tmp_path / "all.h5")


def test_a_file_that_is_no_hdf5_is_left_as_it_is(tmp_path):
    (tmp_path / "all.h5").write_bytes(b"something else")
    with pytest.raises((SafeCheckpointError, OSError), match=r"all.h5"):
        CentralH5Writer(tmp_path / "all.h5")
    assert (tmp_path / "all.h5").read_bytes() == b"something else"


# Kills.

FEEDER = """
from keras_safe_ckpt.datasets.feed import Feed
path, me, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
feed = Feed(path)
for index in range(count):
    feed.append("x", np.full((3, 50), [me] + [index] * 49))
    feed.append("text", [f"{me} {index}"])
    print(index, flush=True)
"""


def check_fed(path: Path, said: dict[int, int], victims: set[int]) -> int:
    """Each feeder's rows once, whole, in order; of a killed one maybe one more than it said."""
    with h5py.File(path) as file:
        rows, texts = file["x"][:].astype(int), file["text"].asstr()[:].tolist()
    assert (rows[:, 1:] == rows[:, 1:2]).all()
    for me, count in said.items():
        mine = rows[rows[:, 0] == me][:, 1].tolist()
        assert mine == [index for index in range(len(mine) // 3) for _ in range(3)]
        allowed = (count, count + 1) if me in victims else (count,)
        assert len(mine) // 3 in allowed
        mine = [text for text in texts if text.startswith(f"{me} ")]
        assert mine == [f"{me} {index}" for index in range(len(mine))]
        assert len(mine) in allowed
    return len(rows)


def check_feeding(path: Path, count: int, seed: int, *, feeders_killed: int, kills: int) -> int:
    """Eight feeders and four readers; some feeders are killed, and the writer again and again."""
    rng = random.Random(seed)
    reading = """
import h5py
path, reads = sys.argv[1], 0
while not os.path.exists(path + ".over"):
    # Before it is closed nobody sees anything; afterwards everybody sees everything.
    if os.path.exists(path):
        with h5py.File(path) as file:
            assert len(file["x"]) >= int(sys.argv[2]), len(file["x"])
        reads += 1
print(reads)
"""
    least = 3 * (8 - feeders_killed) * count
    readers = [start(reading, path, least) for _ in range(4)]
    with ending(*readers):
        rows = _fed_and_killed(path, count, rng, feeders_killed, kills)
        Path(f"{path}.over").touch()
        for reader in readers:
            _, err = reader.communicate(timeout=60)
            assert reader.returncode == 0, err
    assert set(seen(path.parent)) == {path.name, f"{path.name}.over"}
    return rows


def _fed_and_killed(
    path: Path, count: int, rng: random.Random, feeders_killed: int, kills: int
) -> int:
    with CentralH5Writer(path) as writer, contextlib.ExitStack() as stack:
        feeders = {me: start(FEEDER, path, me, count) for me in range(8)}
        stack.enter_context(ending(*feeders.values()))
        said = dict.fromkeys(feeders, 0)

        def hear(me: int, lines: int) -> None:
            for _ in range(lines):
                said[me] += bool(feeders[me].stdout.readline())

        victims = set(rng.sample(sorted(feeders), feeders_killed))
        for me in victims:
            hear(me, rng.randrange(1, count // 2))
            os.kill(feeders[me].pid, signal.SIGKILL)
        for _ in range(kills):
            # While rows are on their way: after some of a feeder that is still at work.
            hear(rng.choice(sorted(set(feeders) - victims)), rng.randrange(1, 1 + count // kills))
            pid = writer.pid
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: writer.pid != pid, "it was started again")
        for me, feeder in feeders.items():
            # Not by `communicate`, which knows nothing of lines that were read ahead.
            said[me] += len(feeder.stdout.read().split())
            code = feeder.wait(60)
            # A victim may have been faster than its end.
            assert code == 0 or (me in victims and code == -signal.SIGKILL), feeder.stderr.read()
    return check_fed(path, said, victims)


@pytest.mark.long
def test_eight_feeders_and_four_readers(tmp_path):
    assert check_feeding(tmp_path / "all.h5", 30, 0, feeders_killed=0, kills=0) == 8 * 30 * 3


def test_feeders_and_the_writer_are_killed(tmp_path):
    check_feeding(tmp_path / "all.h5", 40, 1, feeders_killed=3, kills=3)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_feeders_and_the_writer_are_killed_again_and_again(tmp_path, record_property):
    rows = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        rows += check_feeding(folder / "all.h5", 60, seed, feeders_killed=3, kills=4)
    record_property(
        "campaign",
        f"central writer: 20 runs of 8 feeders (3 killed), the writer killed 4 times in each, "
        f"{rows:,} rows once and in order",
    )


OWNER = """
from keras_safe_ckpt.datasets import central_file, central_process
central_file._COMMIT_SECONDS = 0.0
sys.argv = ["", sys.argv[1] + "/all.h5"]
sys.exit(central_process.main())
"""


def prepare_streams(folder: Path, turns: int = 4) -> None:
    """Two feeders have appended, the file is closed, and its owner was killed before it began."""
    path = folder / "all.h5"
    (folder / ".all.h5.feeds").mkdir()
    code = """
from keras_safe_ckpt.datasets.feed_folder import FeedFolder
from keras_safe_ckpt.datasets.frames import Message
from keras_safe_ckpt.datasets.spool import SpoolWriter
from keras_safe_ckpt.storage.temp_names import new_temp_name
from pathlib import Path
folder = FeedFolder(Path(sys.argv[1]))
for me in range(2):
    spool = SpoolWriter(folder.path, new_temp_name("feed"))
    for index in range(int(sys.argv[2])):
        spool.write(Message("x", np.full((3, 50), [me] + [index] * 49)))
        spool.write(Message("text", np.array([f"{me} {index}".encode()], object)))
folder.write("closed", {})
"""
    done = warm_process().run(code, path, turns)
    assert done.code == 0, done.err


def check_owned(folder: Path, turns: int = 4) -> None:
    """Whoever comes next finishes what the killed owner has begun, and nothing twice."""
    path = folder / "all.h5"
    # The guardian starts it again as long as it does not come to its end.
    if not path.exists() or list(folder.glob(".all.h5.feeds*")):
        done = warm_process().run(OWNER, folder)
        assert done.code == 0, done.out + done.err
    assert check_fed(path, {0: turns, 1: turns}, set()) == 6 * turns
    assert seen(folder) == ["all.h5"]


def test_the_owner_killed_at_some_system_calls(tmp_path):
    calls = [("rename", 1), ("rename", 3), ("fsync", 2), ("unlink", 2), ("pwrite64", 8)]
    kills = killed_at_each(OWNER, calls, tmp_path, check_owned, prepare_streams)
    assert kills.tried == len(calls)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_the_owner_killed_at_every_system_call(tmp_path, record_property):
    kills = killed_at_each(OWNER, None, tmp_path, check_owned, prepare_streams)
    record_property("campaign", f"central writer, its process: {kills}, each row once")


def test_an_answer_that_was_committed_but_not_given_is_given_later(tmp_path):
    """The writer is killed in between; its feeder waits for the answer."""
    code = """
from keras_safe_ckpt.datasets import central_process, feed_folder
answer = feed_folder.FeedFolder.answer
def killed(self, stream, reply):
    os.kill(os.getpid(), signal.SIGKILL)
if not os.path.exists(sys.argv[1] + ".again"):
    feed_folder.FeedFolder.answer = killed
open(sys.argv[1] + ".again", "w").close()
sys.exit(central_process.main())
"""
    path = tmp_path / "all.h5"
    (tmp_path / ".all.h5.feeds").mkdir()
    found: list[object] = []

    def ask(rows: object) -> None:
        try:
            Feed(path, timeout=30).append("x", rows)
            found.append(None)
        except ValueError as error:
            found.append(error)

    for rows in ([1.0], [[2.0, 3.0]]):
        asking = threading.Thread(target=ask, args=(rows,))
        asking.start()
        Path(f"{path}.again").unlink(missing_ok=True)
        assert start(code, path, stdin=subprocess.PIPE).wait(60) == -signal.SIGKILL
        owner = start(code, path, stdin=subprocess.PIPE)
        asking.join(60)
        owner.stdin.close()
        assert owner.wait(60) == 0, owner.stderr.read()
    assert found[0] is None
    assert "rows of shape" in str(found[1])


APPENDING = """
from keras_safe_ckpt.datasets.feed import Feed
feed = Feed(sys.argv[1])
for index in range(4):
    feed.append("x", np.full((3, 50), [0] + [index] * 49))
    print(index, flush=True)
"""


@pytest.mark.parametrize("when", [2, 3])
def test_a_feeder_killed_at_an_append(tmp_path, when):
    path = tmp_path / "all.h5"
    with CentralH5Writer(path):
        done = run(APPENDING, path, prefix=strace(f"writev:signal=KILL:when={when}"))
        assert done.returncode != 0
    said = len(done.stdout.split())
    found = [row[1] for row in values(path, "x")]
    assert found == [index for index in range(len(found) // 3) for _ in range(3)]
    assert len(found) // 3 in (said, said + 1)


def test_nobody_waits_for_the_rest_of_a_frame_whose_feeder_was_killed(tmp_path):
    code = """
from keras_safe_ckpt.datasets import central_file, central_process
central_file._LAST_WORDS_SECONDS = 600
sys.argv = ["", sys.argv[1] + "/all.h5"]
sys.exit(central_process.main())
"""
    prepare_streams(tmp_path)
    stream = min((tmp_path / ".all.h5.feeds").glob("*.0"))
    with open(stream, "ab") as file:
        file.write(stream.read_bytes()[:100])
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its feeder was killed in the middle of an append" in done.stderr
    assert check_fed(tmp_path / "all.h5", {0: 4, 1: 4}, set()) == 24


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    writev = os.writev

    def short(descriptor, parts):
        return writev(descriptor, [memoryview(parts[0])[:1000]])

    monkeypatch.setattr(os, "writev", short)
    rows = np.random.default_rng(0).random((50, 200))
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feed = writer.feed()
        feed.append("x", rows)
        feed.append("x", rows)
    assert np.array_equal(values(tmp_path / "all.h5", "x"), np.concatenate([rows, rows]))


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_append_that_is_interrupted_is_whole_or_not_there(tmp_path, monkeypatch, is_whole):
    """Ctrl-C within the system call, and right after it."""
    write_all = spool._write_all
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feed = writer.feed()
        feed.append("x", [1])

        def interrupted(descriptor, parts):
            data = b"".join(parts)
            write_all(descriptor, [data if is_whole else data[:-1]])
            wait_until(lambda: not is_whole or has_read(), "the other side has read it")
            raise KeyboardInterrupt

        def has_read() -> bool:
            replies = list((tmp_path / ".all.h5.feeds").glob("*.reply"))
            return json.loads(replies[0].read_text())["committed"] > before

        (reply,) = (tmp_path / ".all.h5.feeds").glob("*.reply")
        before = json.loads(reply.read_text())["committed"]
        monkeypatch.setattr(spool, "_write_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            feed.append("x", [2])
        monkeypatch.setattr(spool, "_write_all", write_all)
        feed.append("x", [3])
        feed.flush()
    assert values(tmp_path / "all.h5", "x") == ([1, 2, 3] if is_whole else [1, 3])


def test_half_a_frame_of_a_killed_feeder_is_left_out(tmp_path):
    path = tmp_path / "all.h5"
    code = """
from keras_safe_ckpt.datasets import spool
from keras_safe_ckpt.datasets.feed import Feed
feed = Feed(sys.argv[1])
feed.append("x", [1.0])
def killed(descriptor, parts):
    data = b"".join(parts)
    os.write(descriptor, data[:-1])
    os.kill(os.getpid(), signal.SIGKILL)
spool._write_all = killed
feed.append("x", [2.0])
"""
    with CentralH5Writer(path) as writer:
        assert run(code, path).returncode == -signal.SIGKILL
        writer.feed().append("x", [3.0])
    assert values(path, "x") == [1, 3]


def test_a_writer_that_ends_again_and_again_is_given_up(tmp_path):
    writer = CentralH5Writer(tmp_path / "all.h5")
    feed = writer.feed()
    feed.append("x", [1])
    for _ in range(6):
        pid = writer.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda pid=pid: writer.pid != pid or (tmp_path / ".all.h5.feeds/failed").exists(),
            "it was started again, or given up",
        )
    feed.append("x", [2])
    with pytest.raises(SafeCheckpointError, match="has ended 6 times within a minute"):
        feed.flush()
    with pytest.raises(SafeCheckpointError, match="has ended 6 times within a minute"):
        writer.close()
    with CentralH5Writer(tmp_path / "all.h5"):
        pass
    assert values(tmp_path / "all.h5", "x") == [1, 2]


# Limits.


def test_a_feeder_waits_for_a_writer_that_is_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(feed_line, "_MOST_AHEAD_BYTES", 100_000)
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feed = Feed(writer.path, timeout=30)
        feed.append("x", np.zeros((1, 1000)))
        os.kill(writer.pid, signal.SIGSTOP)
        ended = threading.Event()
        count = 0

        def work() -> None:
            nonlocal count
            for _ in range(100):
                feed.append("x", np.zeros((1, 1000)))
                count += 1
            ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: count >= 12, "some were appended")
        assert not ended.wait(0.5), "nothing holds the feeder back"
        assert count < 20
        size = sum(path.stat().st_size for path in (tmp_path / ".all.h5.feeds").iterdir())
        assert size < 300_000
        os.kill(writer.pid, signal.SIGCONT)
        assert ended.wait(60)
        thread.join()
    with h5py.File(tmp_path / "all.h5") as file:
        assert len(file["x"]) == 101


def test_who_waits_too_long_is_told(tmp_path):
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feed = Feed(writer.path, timeout=0.2)
        feed.append("x", [1])
        os.kill(writer.pid, signal.SIGSTOP)
        feed.append("x", [2])
        with pytest.raises(CheckpointWriteError, match=r"has not come forward for 0.2 s"):
            feed.flush()
        with pytest.raises(CheckpointWriteError, match=r"has not come forward for 0.2 s"):
            feed.append("new", [3])
        os.kill(writer.pid, signal.SIGCONT)
        feed.flush()
    assert values(tmp_path / "all.h5", "x") == [1, 2]


def test_memory_is_bounded(tmp_path):
    """The process takes no more for a large file than for a small one."""
    rows = np.zeros((100, 10_000))  # 8 MB
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feed = writer.feed()

        def peak() -> int:
            status = Path(f"/proc/{writer.pid}/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0])

        for _ in range(10):
            feed.append("x", rows)
        feed.flush()
        before = peak()
        for _ in range(60):
            feed.append("x", rows)
        feed.flush()
        assert peak() < before + 100_000
        spooled = sum(path.stat().st_size for path in (tmp_path / ".all.h5.feeds").iterdir())
        assert spooled < 50_000_000, "what is in the file is still in the streams"


def test_feeders_that_come_and_go_leave_nothing(tmp_path):
    code = """
from keras_safe_ckpt.datasets.feed import Feed
Feed(sys.argv[1]).append("x", [int(sys.argv[2])])
"""
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        for number in range(3):
            run_ok(code, writer.path, number)
        feed = writer.feed()
        feed.append("x", [3])
        feed.flush()
        folder = tmp_path / ".all.h5.feeds"
        wait_until(lambda: len([p for p in folder.iterdir() if p.suffix == ".0"]) == 1, "only one")
    assert values(tmp_path / "all.h5", "x") == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["numbers", "texts"])
def test_a_full_disk_is_waited_out(small_disk, kind):
    """HDF5 by itself crashes if it happens in the middle of texts."""
    folder = small_disk("size=10m")
    filler = folder / "filler"
    rows = np.random.default_rng(0).random((100, 1000))  # 0.8 MB
    if kind == "texts":
        rows = np.array([f"{number:08d}" * 1000 for number in range(100)], object)
    with CentralH5Writer(folder / "all.h5") as writer:
        feed, owner = writer.feed(), writer.pid
        feed.append("x", rows)
        filler.write_bytes(bytes(6_500_000))
        feed.timeout = 1.0
        count = 1
        with contextlib.suppress(CheckpointWriteError):
            for _ in range(20):
                feed.append("x", rows)
                count += 1
        assert count < 8, "it was not full"
        with pytest.raises(CheckpointWriteError):
            feed.flush()
        filler.unlink()
        feed.timeout = 60.0
        feed.flush()
        assert writer.pid == owner, "it crashed"
    assert values(folder / "all.h5", "x") == rows.tolist() * count
    assert seen(folder) == ["all.h5"]


def test_what_is_left_is_listed_by_recover(tmp_path):
    def fail() -> None:
        with CentralH5Writer(tmp_path / "all.h5") as writer:
            feed = writer.feed()
            feed.append("x", [1.0, 2.0])
            feed.flush()
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    (left,) = find_unfinished(tmp_path)
    assert left.rows == {"x": 2}
    assert left.target == tmp_path / "all.h5"


@pytest.mark.parametrize(
    "fault",
    [
        "fsync:error=EIO:when=2",
        *[f"rename:error=ENOSPC:when={when}" for when in (1, 3)],
        *[f"pwrite64:error=ENOSPC:when={when}" for when in (3, 9)],
    ],
)
def test_errors_of_the_disk_are_waited_out(tmp_path, fault):
    """The process tries again; each row is there once."""
    prepare_streams(tmp_path)
    owner = start(OWNER, tmp_path, prefix=strace(fault), stdin=subprocess.PIPE)
    out, err = owner.stdout.read(), owner.stderr.read()
    assert owner.wait(60) == 0, err
    assert out.startswith("ready\n")
    assert "CheckpointWriteError" in out, "the starter does not hear of it"
    assert "Trying again" in err
    check_owned(tmp_path)


def test_a_commit_in_between_keeps_the_places_in_the_streams(tmp_path):
    """Many datasets: changes pile up in memory, and are committed before it is time for it."""
    code = """
from keras_safe_ckpt.datasets import central_file, central_process, growing_file
growing_file._MOST_WAITING_BYTES = -1
central_file._COMMIT_SECONDS, central_file._TURN_BYTES = 60, 1
commits = 0
flush = growing_file.GrowingFile.flush
def counted(self, note=b""):
    global commits
    flush(self, note)
    commits += 1
    assert note, "committed without the places in the streams"
    if commits == 5:
        os.kill(os.getpid(), signal.SIGKILL)
growing_file.GrowingFile.flush = counted
sys.argv = ["", sys.argv[1] + "/all.h5"]
sys.exit(central_process.main())
"""
    prepare_streams(tmp_path, turns=12)
    done = run(code, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    check_owned(tmp_path, turns=12)


def test_a_feed_that_outlives_its_writer_feeds_the_next_one(tmp_path):
    path = tmp_path / "all.h5"
    large = np.zeros(17 << 20, "u1")  # More than a segment.
    with CentralH5Writer(path) as writer:
        feed = writer.feed()
        feed.append("x", large)
        feed.append("x", large)
    with CentralH5Writer(path):
        feed.append("x", np.ones(5, "u1"))
    with h5py.File(path) as file:
        assert len(file["x"]) == 2 * len(large) + 5
        assert file["x"][-5:].tolist() == 5 * [1]


def test_segments_are_removed_from_the_oldest_on(tmp_path, monkeypatch):
    """A kill in between leaves no gap, behind which the rest would be found as something new."""
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 10)
    writer = spool.SpoolWriter(tmp_path, "stream")
    for number in range(5):
        writer.write(Message("x", np.full(3, number)))
    writer.rest()
    reader = spool.SpoolReader(tmp_path, "stream")
    for _ in range(5):
        assert reader.read() is not None
    removed: list[str] = []
    unlink = Path.unlink

    def noted(path: Path, **options) -> None:
        removed.append(path.name)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", noted)
    (tmp_path / "stream.0").rename(tmp_path / "aside")  # Somebody was killed here before.
    reader.release(4)
    assert removed == ["stream.1", "stream.2", "stream.3"]
    assert sorted(spool.segments_of(tmp_path, "stream")) == [4]


def test_what_was_appended_between_two_looks_is_not_skipped(tmp_path, monkeypatch):
    """The end of a segment was reached, and then it grew, and the next one was begun."""
    writer = spool.SpoolWriter(tmp_path, "stream")
    writer.write(Message("x", np.full(3, 0)))
    reader = spool.SpoolReader(tmp_path, "stream")
    assert reader.read() is not None
    has_next = spool.SpoolReader._has_next_segment

    def look(self: spool.SpoolReader) -> bool:
        monkeypatch.undo()
        writer.write(Message("x", np.full(3, 1)))
        monkeypatch.setattr(spool, "SEGMENT_BYTES", 10)
        writer.write(Message("x", np.full(3, 2)))
        return has_next(self)

    monkeypatch.setattr(spool.SpoolReader, "_has_next_segment", look)
    for number in (1, 2):
        message = reader.read()
        assert message is not None
        assert message.rows.tolist() == 3 * [number]
    writer.rest()
    reader.close()


@pytest.mark.parametrize("left_of_it", [None, 0, 40])
def test_nothing_behind_a_gap_is_read(tmp_path, monkeypatch, caplog, left_of_it):
    """A power cut takes what was not flushed, and need not take the last of it first."""
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 10)
    writer = spool.SpoolWriter(tmp_path, "stream")
    for number in range(4):
        writer.write(Message("x", np.full(3, number)))
    writer.rest()
    if left_of_it is None:
        (tmp_path / "stream.1").unlink()
    else:
        os.truncate(tmp_path / "stream.1", left_of_it)
    reader = spool.SpoolReader(tmp_path, "stream")
    assert reader.read().rows.tolist() == [0, 0, 0]
    assert reader.read() is None
    assert not reader.has_more()
    is_said = "stream.2: rows that were not flushed are lost, by a power cut" in caplog.text
    assert is_said or left_of_it is None, "without the next segment it looks like the end"


def test_a_stream_without_its_beginning_is_refused_unless_a_power_cut_took_it(
    tmp_path, monkeypatch, caplog
):
    prepare_streams(tmp_path)
    folder = tmp_path / ".all.h5.feeds"
    for first in folder.glob("*.kscktmp.0"):
        (first.with_suffix(".1")).write_bytes(first.read_bytes())
        first.unlink()
    with (
        pytest.raises(CorruptCheckpointError, match="the file that has those before is gone"),
        CentralH5Writer(tmp_path / "all.h5"),
    ):
        pass
    for stream in folder.glob("*.kscktmp.1"):
        owner = owner_of(stream.stem)
        stream.rename(stream.with_name(stream.name.replace(owner.boot, "0badb007")))
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        writer.feed().append("x", [5])
    assert values(tmp_path / "all.h5", "x") == [5]


@pytest.mark.parametrize("when", [1, 2])
def test_killed_when_it_tidies_up_after_publishing(tmp_path, when):
    prepare_streams(tmp_path)
    done = run(OWNER, tmp_path, prefix=strace(f"unlinkat:signal=KILL:when={when}"))
    assert done.returncode != 0
    with CentralH5Writer(tmp_path / "all.h5"):
        pass
    assert check_fed(tmp_path / "all.h5", {0: 4, 1: 4}, set()) == 24
    assert seen(tmp_path) == ["all.h5"]


def test_what_was_drained_is_published_by_the_next_writer_which_goes_on(tmp_path):
    prepare_streams(tmp_path)
    code = """
from keras_safe_ckpt.datasets import central_process, growing_file
def killed(self):
    os.kill(os.getpid(), signal.SIGKILL)
growing_file.GrowingFile.publish = killed
sys.argv = ["", sys.argv[1] + "/all.h5"]
sys.exit(central_process.main())
"""
    assert run(code, tmp_path).returncode == -signal.SIGKILL
    assert (tmp_path / ".all.h5.feeds/drained").exists()
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        writer.feed().append("text", ["9 0"])
    assert check_fed(tmp_path / "all.h5", {0: 4, 1: 4}, set()) == 24
    assert values(tmp_path / "all.h5", "text")[-1] == "9 0"


def test_what_hdf5_refuses_harms_nobody_else(writer, monkeypatch):
    """An attribute that is too large for HDF5, and was not noticed before."""
    good, bad = writer.feed(), writer.feed()
    good.append("x", [1.0])
    with pytest.raises(ValueError, match=r"attribute 'classes': expected at most 32 KiB"):
        bad.append("t", [1.0], attributes={"classes": ["x"] * 4096})
    with pytest.raises(ValueError, match="attributes: expected names as text"):
        bad.append("t", [1.0], attributes={"a" * 70_000: 1})
    monkeypatch.setattr(feed_module, "checked_attributes", lambda found: {
        key: np.asarray(value) for key, value in (found or {}).items()
    })  # fmt: skip
    with pytest.raises((ValueError, SafeCheckpointError), match=r"expected|OSError"):
        bad.append("t", [1.0], attributes={"numbers": np.zeros(9000)})
    with pytest.raises(ValueError, match="expected attributes of a megabyte in all at most"):
        bad.append("t", [1.0], attributes={f"a{n}": np.zeros(4000) for n in range(40)})
    bad.append("x", [2.0])
    good.append("x", [3.0])
    writer.close()
    assert values(writer.path, "x") == [1, 2, 3]


def test_attributes_keep_their_types(writer):
    attributes = {"single": np.float32(0.1), "bytes": b"raw", "complex": 1j, "texts": ["a", "ß"]}
    writer.feed().append("x", [1], attributes=attributes)
    writer.close()
    with h5py.File(writer.path) as file:
        found = dict(file["x"].attrs)
    assert found["single"].dtype == "float32"
    assert found["single"] == np.float32(0.1)
    assert found["bytes"] in ("raw", b"raw")
    assert found["complex"] == 1j
    assert list(found["texts"]) == ["a", "ß"]


def test_lists_of_typed_values_keep_their_type(writer):
    feed = writer.feed()
    feed.append("u1", [np.zeros(3, "u1")])
    feed.append("f4", [np.float32(1)])
    feed.append("u8", [np.uint64(2**63)])
    feed.append("f4", [2])
    writer.close()
    with h5py.File(writer.path) as file:
        assert {name: item.dtype.str for name, item in file.items()} == {
            "u1": "|u1",
            "f4": "<f4",
            "u8": "<u8",
        }


def fork_while_busy(act: str) -> str:
    return f"""
import threading, time
from keras_safe_ckpt import CentralH5Writer, WorkerH5Writer, LockedTFRecordWriter
os.chdir(sys.argv[1])
central = CentralH5Writer("all.h5")
feed, worker = central.feed(), WorkerH5Writer("workers", 0)
records = LockedTFRecordWriter("all.tfrecord")
over = threading.Event()
def work():
    while not over.is_set():
        {act}
thread = threading.Thread(target=work, daemon=True)  # Else a failure would fill the disk.
thread.start()
refused = 0
for _ in range(10):
    time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        try:
            {act}
        except RuntimeError:
            os._exit(3)
        os._exit(0)
    deadline = time.monotonic() + 20
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            refused += os.waitstatus_to_exitcode(status) == 3
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            sys.exit("the child hangs")
        time.sleep(0.001)
over.set()
thread.join()
records.close()
worker.close()
central.close()
print(refused)
"""


@pytest.mark.parametrize(
    ("act", "refused"),
    [
        ("feed.append('x', np.zeros(1_000_000))", 0),
        ("worker.append('x', np.zeros(1_000_000)); worker.flush()", 10),
        ("records.write(b'x' * 2_000_000)", 10),
    ],
)
def test_a_child_that_is_forked_while_a_thread_is_at_work_does_not_hang(tmp_path, act, refused):
    assert int(run_ok(fork_while_busy(act), tmp_path)) == refused


def test_a_pool_with_a_feed_for_each_task_leaves_nothing_open(tmp_path):
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        handle = pickle.dumps(writer.feed())
        for number in range(150):
            pickle.loads(handle).append("x", [number])
        folder = tmp_path / ".all.h5.feeds"
        wait_until(lambda: len(spool.streams_in(folder)) < 5, "streams that are over are forgotten")
        descriptors = len(os.listdir(f"/proc/{writer.pid}/fd"))
        assert descriptors < 30
        assert len(_open_feeds(folder)) < 5
    assert values(tmp_path / "all.h5", "x") == list(range(150))
    assert _open_feeds(folder) == []


def _open_feeds(folder: Path) -> list[str]:
    """What this process has open in there."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith(str(folder)):
                found.append(target)
    return found


def test_closing_says_what_is_wrong_and_can_be_done_again(small_disk):
    folder = small_disk("size=6m")
    writer = CentralH5Writer(folder / "all.h5", timeout=3)
    feed = writer.feed()
    feed.append("x", [0.0])
    feed.append("x", np.random.default_rng(0).random(450_000))  # 3.6 MB, twice.
    with pytest.raises(CheckpointWriteError, match="disk is full"):
        writer.close()
    subprocess.run(["mount", "-o", "remount,size=20m", folder], check=True)
    writer.close()
    with h5py.File(folder / "all.h5") as file:
        assert len(file["x"]) == 450_001
    assert seen(folder) == ["all.h5"]


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "all.h5"
    path.write_text("notes")
    with pytest.raises(CorruptCheckpointError, match="expected an HDF5 file to go on with"):
        CentralH5Writer(path)
    assert path.read_text() == "notes"
    assert seen(tmp_path) == ["all.h5"]
    with pytest.raises(CheckpointWriteError, match="is closed"):  # It does not wait for an owner.
        Feed(path).append("x", [1])


def test_rows_that_wait_for_a_writer_stay_when_one_is_refused(tmp_path):
    path = tmp_path / "all.h5"
    writer = CentralH5Writer(path)
    writer.feed().append("x", [1])  # Now it knows what x is.
    writer.abandon()
    writer.feed().append("x", [2])
    path.write_text("notes")
    (tmp_path / ".all.h5.unfinished").rename(tmp_path / "elsewhere")
    (tmp_path / ".all.h5.unfinished.journal").rename(tmp_path / "elsewhere.journal")
    with pytest.raises(CorruptCheckpointError):
        CentralH5Writer(path)
    path.unlink()
    (tmp_path / "elsewhere").rename(tmp_path / ".all.h5.unfinished")
    (tmp_path / "elsewhere.journal").rename(tmp_path / ".all.h5.unfinished.journal")
    CentralH5Writer(path).close()
    assert values(path, "x") == [1, 2]


def test_modules_of_the_working_directory_are_not_taken(tmp_path):
    (tmp_path / "select.py").write_text("raise SystemExit('the wrong module')")
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        writer.feed().append("x", [1])
    assert values(tmp_path / "all.h5", "x") == [1]


def test_long_texts_go_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(feed_module, "_FRAME_BYTES", 1000)
    texts = ["ß" * length for length in (10, 5000, 1, 2, 300, 300, 300, 0)]
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feed = writer.feed()
        feed.append("text", texts)
        feed.append("text", np.array(texts, object))
        feed.append("text", [])
    assert values(tmp_path / "all.h5", "text") == texts + texts


def test_a_feed_of_a_relative_path_stays_where_it_is(tmp_path, monkeypatch):
    with CentralH5Writer("all.h5"):
        feed = Feed("all.h5")
        (tmp_path / "else").mkdir()
        monkeypatch.chdir(tmp_path / "else")
        pickle.loads(pickle.dumps(feed)).append("x", [1])
    assert values(tmp_path / "all.h5", "x") == [1]


def test_ctrl_c_at_any_moment_of_many_appends_loses_and_doubles_nothing(tmp_path):
    """And an error of the disk afterwards takes back its own frame only."""
    code = """
import random, resource
from keras_safe_ckpt import CentralH5Writer
from keras_safe_ckpt.datasets.feed_line import line_to
def handler(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, handler)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
random.seed(1)
sent, maybe, number = [], [], 0
with CentralH5Writer(sys.argv[1]) as writer:
    feed = writer.feed()
    feed.append("x", [-1])
    for turn in range(60):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-5, 2e-3))
            while True:
                number += 1
                feed.append("x", [number])
                sent.append(number)
        except KeyboardInterrupt:
            maybe.append(number)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if turn % 10 == 9:
            size = os.fstat(line_to(feed.path)._spool._opened()).st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, -1))
            try:
                feed.append("x", np.full(100, -5))
                sys.exit("it was not full")
            except OSError:
                resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    feed.flush()
json.dump([sent, maybe], open(sys.argv[1] + ".json", "w"))
"""
    path = tmp_path / "all.h5"
    run_ok(code, path)
    sent, maybe = json.loads(Path(f"{path}.json").read_text())
    found = values(path, "x")[1:]
    assert found == sorted(set(found)), "doubled, or out of order"
    assert set(sent) <= set(found) <= set(sent) | set(maybe)


def test_of_a_long_append_that_does_not_fit_nothing_is_in_the_file(writer):
    first = writer.feed()
    first.append("x", np.zeros(1, "i4"))
    line_to(writer.path).known.clear()  # As in a process that has not fed it yet.
    with pytest.raises(TypeError, match="expected int32, as before"):
        first.append("x", [1] * (5 << 20) + [1 << 40])
    first.append("x", [5])
    writer.close()
    assert values(writer.path, "x") == [0, 5]


@pytest.mark.parametrize(
    ("name", "rows"), [("x", np.empty((0, 1 << 40))), ("link/y", [1.0]), ("references", ["text"])]
)
def test_a_feeder_with_something_impossible_harms_nobody(tmp_path, name, rows):
    path = tmp_path / "all.h5"
    with h5py.File(path, "w") as file:
        file["link"] = h5py.SoftLink("/nowhere")
        file.create_dataset("references", (0,), h5py.ref_dtype, maxshape=(None,))
    with CentralH5Writer(path) as writer:
        feed = writer.feed()
        feed.append("y", [1.0])
        with pytest.raises((ValueError, SafeCheckpointError)):
            feed.append(name, rows)
        feed.append("y", [2.0])
    assert values(path, "y") == [1, 2]


def test_rows_that_are_rejected_after_all_are_said_once(writer, monkeypatch):
    feed = writer.feed()
    feed.append("x", [1.0])
    line_to(writer.path).known["x"] = (np.dtype("c16"), ())  # As if it were wrong about it.
    feed.append("x", np.array([1j]))
    with pytest.raises(TypeError, match="expected float64, as before"):
        feed.flush()
    feed.flush()
    line_to(writer.path).known.clear()
    feed.append("x", [2.0])
    writer.close()
    assert values(writer.path, "x") == [1, 2]


def test_a_full_disk_and_a_kill_are_waited_out(small_disk):
    folder = small_disk("size=24m")
    writer = CentralH5Writer(folder / "all.h5", timeout=30)
    feed = writer.feed()
    feed.append("x", np.zeros(10))
    feed.flush()
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    pid = writer.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: writer.pid != pid, "it was started again")
    wait_until(lambda: writer._trouble is not None, "it has found the disk full")
    threading.Timer(1.0, ballast.unlink).start()
    writer.close()
    assert len(values(folder / "all.h5", "x")) == 10
    writer.close()
    assert seen(folder) == ["all.h5"]


def test_closing_again_after_it_has_published_is_fine(tmp_path):
    writer = CentralH5Writer(tmp_path / "all.h5")
    writer.feed().append("x", [1])
    writer._folder.write("closed", {})  # As a `close` does that is interrupted then.
    wait_until(lambda: not (tmp_path / ".all.h5.feeds").exists(), "it has published")
    writer.close()
    assert values(tmp_path / "all.h5", "x") == [1]


def test_the_order_of_a_process_is_kept_over_several_handles(tmp_path):
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feed = writer.feed()
        feed.append("x", np.zeros(1, "u1"))
        os.kill(writer.pid, signal.SIGSTOP)
        with feed:
            for _ in range(8):
                feed.append("x", np.zeros(1 << 20, "u1"))
        pickle.loads(pickle.dumps(feed)).append("x", np.full(1, 9, "u1"))
        os.kill(writer.pid, signal.SIGCONT)
    with h5py.File(tmp_path / "all.h5") as file:
        assert len(file["x"]) == (8 << 20) + 2
        assert file["x"][-1] == 9


BUSY = """
from keras_safe_ckpt.datasets.feed import Feed
from keras_safe_ckpt.errors import CheckpointWriteError
feed, count = Feed(sys.argv[1]), 0
print("ready", flush=True)
while not os.path.exists(sys.argv[1] + ".over"):
    feed.append("x", np.full(100_000, count, "f8"))
    count += 1
print(count)
"""


def test_who_leaves_does_not_wait_for_busy_feeders(tmp_path):
    path = tmp_path / "all.h5"
    code = (
        "from keras_safe_ckpt import CentralH5Writer\nimport time, subprocess\n"
        + """
writer = CentralH5Writer(sys.argv[1])
if os.fork() == 0:
    time.sleep(600)  # It has the other end of the pipe.
print(writer.pid, flush=True)
time.sleep(600)
"""
    )
    program = start(code, path)
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    children = children_of(program.pid)
    feeder = start(BUSY, path)
    with ending(program, feeder):
        assert feeder.stdout is not None
        assert feeder.stdout.readline() == "ready\n"
        kill(program)
        wait_until(lambda: not is_running(pid), "its process has left as well")
        CentralH5Writer(path).abandon()  # While the feeder goes on and on.
        with CentralH5Writer(path):
            Path(f"{path}.over").touch()
            count = int(feeder.stdout.read())
    for orphan in children.keys() - {pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)
    with h5py.File(path) as file:
        assert file["x"][::100_000].tolist() == list(range(count))


def test_a_feeder_in_another_process_may_flush_after_the_end(tmp_path):
    code = """
from keras_safe_ckpt.datasets.feed import Feed
feed = Feed(sys.argv[1])
feed.append("x", [1])
print("appended", flush=True)
sys.stdin.readline()
feed.flush()
feed.close()
feed.flush()
print("flushed")
"""
    with CentralH5Writer(tmp_path / "all.h5") as writer:
        feeder = start(code, writer.path, stdin=subprocess.PIPE)
        assert feeder.stdout.readline() == "appended\n"
    out, err = feeder.communicate("go on\n", timeout=60)
    assert out == "flushed\n", err
    assert values(tmp_path / "all.h5", "x") == [1]


def test_a_name_that_leaves_no_room_for_its_journal_is_refused_at_once(tmp_path):
    """Not at the first commit, again and again."""
    with CentralH5Writer(tmp_path / ("x" * 232 + ".h5")) as writer:
        writer.feed().append("x", [1])
    assert values(writer.path, "x") == [1]
    with pytest.raises(UnsafePathError, match="has 236 bytes, and more than 235 leave no room"):
        CentralH5Writer(tmp_path / "other" / ("x" * 233 + ".h5"))
    assert not (tmp_path / "other").exists()
