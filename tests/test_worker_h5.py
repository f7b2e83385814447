"""Each worker writes an HDF5 file of its own, which is there when it is whole."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from clusters import WORKER as WORKER_OF_A_CLUSTER
from clusters import launch_ok
from killing import killed_at_each
from processes import ending, environment, kill, press_ctrl_c, run, run_ok, start
from redis_server import shared_redis

from keras_safe_ckpt import MergeConflictError, RedisLocks, WorkerH5Writer, merge_worker_files
from keras_safe_ckpt.datasets import growing_file, hdf5, tables
from keras_safe_ckpt.datasets.unfinished import find_unfinished, rescue
from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CheckpointWriteError,
    LockTimeoutError,
    UnsafePathError,
)

__all__ = ["shared_redis"]  # A fixture.

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


def seen(folder: Path) -> list[str]:
    """The files that are not lock files."""
    return sorted(name for name in os.listdir(folder) if not name.endswith((".lock", ".gate")))


def values(path: Path, name: str) -> list:
    with h5py.File(path) as file:
        dataset = file[name]
        return (dataset.asstr() if h5py.check_string_dtype(dataset.dtype) else dataset)[()].tolist()


# What is written.


def test_rows_arrays_and_attributes_are_read_again(tmp_path):
    with WorkerH5Writer(tmp_path, 3, workers=8, attributes={"run": "a", "seed": 7}) as writer:
        assert writer.path == tmp_path / "worker-00003.h5"
        writer.append("score", np.array([[1.5, 2.5]], "float32"), attributes={"unit": "°C"})
        writer.append("score", np.array([[3.5, 4.5], [5.5, 6.5]], "float32"))
        writer.append("validation/name", ["first", "zweites ß"])
        writer.append("validation/name", np.array([b"bytes"]))
        writer.append("flag", [True, False])
        writer.write("classes", ["cat", "dog"], attributes={"sizes": [1, 2]})
        writer.write("matrix", np.eye(3), compression="gzip")
        writer.write("single", 2.5)
        assert writer.rows("score") == 3
        assert writer.rows("validation/name") == 3
        assert writer.rows("unknown") == 0
        assert seen(tmp_path) == [".worker-00003.h5.unfinished"]
    assert seen(tmp_path) == ["worker-00003.h5"]
    with h5py.File(tmp_path / "worker-00003.h5") as file:
        assert file.attrs["run"] == "a"
        assert file.attrs["seed"] == 7
        assert json.loads(file.attrs["keras_safe_ckpt"])["workers"] == 8
        assert file["score"].dtype == "float32"
        assert file["score"][:].tolist() == [[1.5, 2.5], [3.5, 4.5], [5.5, 6.5]]
        assert file["score"].attrs["unit"] == "°C"
        assert file["score"].maxshape == (None, 2)
        assert file["validation/name"].asstr()[:].tolist() == ["first", "zweites ß", "bytes"]
        assert file["flag"][:].tolist() == [True, False]
        assert file["flag"].dtype == bool
        assert file["classes"].asstr()[:].tolist() == ["cat", "dog"]
        assert file["classes"].attrs["sizes"].tolist() == [1, 2]
        assert file["matrix"].compression == "gzip"
        assert (file["matrix"][:] == np.eye(3)).all()
        assert file["single"][()] == 2.5


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i1", "i8", "u2", ">f4", "c16", "?"])
def test_types_stay_as_they_are(tmp_path, kind):
    rows = np.arange(30).reshape(10, 3).astype(kind)
    with WorkerH5Writer(tmp_path) as writer:
        writer.append("x", rows[:7])
        writer.append("x", rows[7:])
    with h5py.File(tmp_path / "worker-00000.h5") as file:
        assert file["x"].dtype == np.dtype(kind)
        assert (file["x"][:] == rows).all()


@pytest.mark.parametrize("compression", [None, "gzip", "lzf", 1])
@pytest.mark.parametrize("row", [(), (3,), (40, 50), (100_000,)])
def test_rows_in_any_pieces_are_the_same_rows(tmp_path, row, compression):
    """Smaller than a chunk, larger than several, with and without flushes in between."""
    rng = np.random.default_rng(0)
    count = 200_000 // max(1, int(np.prod(row))) + 11
    rows = rng.integers(0, 9, (count, *row)).astype("float32")
    cuts = sorted(rng.integers(0, count, 9).tolist())
    with WorkerH5Writer(tmp_path) as writer:
        for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, count], strict=True)):
            writer.append("x", rows[start:stop], compression=compression)
            if number % 3 == 1:
                writer.flush()
            assert writer.rows("x") == stop
    with h5py.File(tmp_path / "worker-00000.h5") as file:
        assert file["x"].compression == ("gzip" if compression == 1 else compression)
        assert np.array_equal(file["x"][:], rows)


def test_texts_in_any_pieces_are_the_same_texts(tmp_path):
    texts = [f"text {number} {'é' * (number % 50)}" for number in range(5000)]
    with WorkerH5Writer(tmp_path) as writer:
        for start in range(0, 5000, 700):
            writer.append("x", texts[start : start + 700])
            if start % 3 == 0:
                writer.flush()
    assert values(tmp_path / "worker-00000.h5", "x") == texts


def test_tensors_and_lists_are_rows(tmp_path):
    from keras_setup import tf

    with WorkerH5Writer(tmp_path) as writer:
        writer.append("x", tf.constant([[1.0, 2.0]]))
        writer.append("x", [[3, 4]])
        writer.append("x", np.array([[5, 6]], "float16"))
        writer.append("text", tf.constant(["a", "b"]))
    assert values(tmp_path / "worker-00000.h5", "x") == [[1, 2], [3, 4], [5, 6]]
    assert values(tmp_path / "worker-00000.h5", "text") == ["a", "b"]


def test_memory_is_bounded(tmp_path, monkeypatch):
    """What changes of what was flushed waits in memory, and is flushed when it is too much."""
    monkeypatch.setattr(growing_file, "_MOST_WAITING_BYTES", 1 << 20)
    with WorkerH5Writer(tmp_path) as writer:
        for number in range(20):
            writer.append(f"x{number}", np.zeros(30_000))
        writer.flush()
        for _ in range(40):
            for number in range(20):
                writer.append(f"x{number}", np.zeros(10))
                writer._file.tables.flush()
            assert writer._file._file.waiting_bytes <= 2 << 20


# Which worker.


def test_the_number_comes_from_the_cluster(tmp_path, monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with WorkerH5Writer(tmp_path) as writer:
        assert writer.worker == 2
    with h5py.File(tmp_path / "worker-00002.h5") as file:
        label = json.loads(file.attrs["keras_safe_ckpt"])
    assert (label["worker"], label["workers"]) == (2, 3), "the parameter server writes none"


def test_without_a_cluster_it_is_number_0_of_1(tmp_path):
    with WorkerH5Writer(tmp_path):
        pass
    with h5py.File(tmp_path / "worker-00000.h5") as file:
        label = json.loads(file.attrs["keras_safe_ckpt"])
    assert (label["worker"], label["workers"]) == (0, 1)


def test_two_processes_cannot_be_the_same_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5, "_LOCK_SECONDS", 0.1)
    with WorkerH5Writer(tmp_path, 1) as writer:
        writer.append("x", [1])
        with pytest.raises(LockTimeoutError, match="worker-00001"):
            WorkerH5Writer(tmp_path, 1)
        with WorkerH5Writer(tmp_path, 2) as other:
            other.append("x", [2])
    assert values(tmp_path / "worker-00001.h5", "x") == [1]


def test_any_lock_backend_will_do(tmp_path, shared_redis):
    locks = RedisLocks(shared_redis.url)
    with WorkerH5Writer(tmp_path, locks=locks) as writer:
        writer.append("x", [1])
        with (
            pytest.raises(LockTimeoutError),
            locks.exclusive(tmp_path / "worker-00000.h5", timeout=0),
        ):
            pass
    assert seen(tmp_path) == ["worker-00000.h5"]


# The end, and what is there before it.


def test_an_error_in_the_block_publishes_nothing(tmp_path):
    with WorkerH5Writer(tmp_path) as writer:
        writer.append("x", [1])
    with contextlib.suppress(KeyError), WorkerH5Writer(tmp_path) as writer:
        writer.append("x", [2, 3])
        raise KeyError("of the user")
    assert values(tmp_path / "worker-00000.h5", "x") == [1], "the one before"
    (left,) = find_unfinished(tmp_path)
    assert left.rows == {"x": 2}


def test_the_one_before_stays_until_the_new_one_is_whole(tmp_path):
    for number in range(2):
        with WorkerH5Writer(tmp_path) as writer:
            writer.append("x", [number])
            if number:
                assert values(tmp_path / "worker-00000.h5", "x") == [0]
    assert values(tmp_path / "worker-00000.h5", "x") == [1]


def test_closing_twice_is_closing_once(tmp_path):
    writer = WorkerH5Writer(tmp_path)
    writer.append("x", [1])
    writer.close()
    writer.close()
    writer.abandon()
    for call in (lambda: writer.append("x", [1]), writer.flush, lambda: writer.rows("x")):
        with pytest.raises(ValueError, match="is closed"):
            call()
    assert values(tmp_path / "worker-00000.h5", "x") == [1]
    with WorkerH5Writer(tmp_path):
        pass  # The lock is free.


def test_many_threads_append(tmp_path):
    with WorkerH5Writer(tmp_path) as writer:

        def work(number: int) -> None:
            for _ in range(50):
                writer.append("x", np.full((7, 3), number))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = np.array(values(tmp_path / "worker-00000.h5", "x"))
    assert (found == found[:, :1]).all()
    assert np.bincount(found[:, 0]).tolist() == [350] * 8
    assert (found.reshape(-1, 7, 3) == found[::7][:, None]).all(), "each append in one piece"


def test_a_forked_child_leaves_the_file_alone(tmp_path):
    code = """
import os
from keras_safe_ckpt import WorkerH5Writer
writer = WorkerH5Writer(sys.argv[1])
writer.append("x", np.arange(100_000))
child = os.fork()
if child == 0:
    try:
        writer.append("x", [1])
    except RuntimeError as error:
        print(error)
    sys.exit()  # h5py closes what is open, with all that it has not written.
os.waitpid(child, 0)
writer.append("x", np.arange(100_000))
writer.close()
"""
    assert "make one in each process" in run_ok(code, tmp_path)
    assert values(tmp_path / "worker-00000.h5", "x") == 2 * list(range(100_000))


def test_a_program_that_ends_without_closing_says_nothing_wrong(tmp_path):
    code = """
from keras_safe_ckpt import WorkerH5Writer
writer = WorkerH5Writer(sys.argv[1])
writer.append("x", [1, 2])
writer.flush()
writer.append("x", [3])
"""
    done = run(code, tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    (left,) = find_unfinished(tmp_path)
    assert left.rows == {"x": 2}


def test_a_writer_that_outlives_the_interpreter_does_no_harm(tmp_path):
    """Something that is never thrown away holds it, such as an error in some module."""
    code = """
from keras_safe_ckpt import WorkerH5Writer
def fail():
    writer = WorkerH5Writer(sys.argv[1], 0)
    writer.append("x", [1.0])
    writer.flush()
    writer.append("x", [2.0])
    raise ValueError
try:
    fail()
except ValueError as error:
    sys.modules["something"] = error
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    (left,) = find_unfinished(tmp_path)
    assert left.rows == {"x": 1}


# Crashes.

WORKER = """
import itertools
from keras_safe_ckpt import WorkerH5Writer
FOLDER = sys.argv[1]
writer = WorkerH5Writer(FOLDER, 0)
writer.write("classes", ["a", "b"])
for number in range(1, 5):
    writer.append("number", np.full((40, 500), number))
    writer.append("text", [f"text {number}"] * 30)
    writer.flush()
    print(number, flush=True)
writer.close()
print("closed", flush=True)
"""


def check_rows(folder: Path) -> int:
    """Resume, and look what is there: all of each flush, or nothing."""
    is_there = (folder / "worker-00000.h5").exists()
    with WorkerH5Writer(folder, 0, resume=True) as writer:
        flushed, rest = divmod(writer.rows("number"), 40)
        assert rest == 0
        assert writer.rows("text") == flushed * 30
        assert writer.rows("classes") in ((2,) if flushed else (0, 2))
        if is_there:
            assert flushed == 4
        writer.append("number", np.full((1, 500), 9))
    expected = [number for number in range(1, flushed + 1) for _ in range(40)]
    found = np.array(values(folder / "worker-00000.h5", "number"))
    assert found[:, 0].tolist() == [*expected, 9]
    assert (found == found[:, :1]).all()
    assert seen(folder) == ["worker-00000.h5"]
    return flushed


def test_killed_at_some_system_calls(tmp_path):
    calls = [("fsync", 4), ("rename", 1), ("rename", 5), ("pwrite64", 40), ("unlink", 1)]
    assert killed_at_each(WORKER, calls, tmp_path, check_rows).tried == len(calls)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_killed_at_every_system_call(tmp_path, record_property):
    found: list[int] = []
    kills = killed_at_each(WORKER, None, tmp_path, lambda place: found.append(check_rows(place)))
    assert set(found) == {0, 1, 2, 3, 4}
    record_property("campaign", f"worker file: {kills}, all rows of a flush")


def test_killed_at_random(tmp_path):
    """A worker that is started again and again goes on, until all rows are there once."""
    code = """
from keras_safe_ckpt import WorkerH5Writer
with WorkerH5Writer(sys.argv[1], 0, resume=True) as writer:
    print("open", flush=True)
    for number in range(writer.rows("x"), 400):
        writer.append("x", np.full((1, 3000), number))
        if number % 10 == 9:
            writer.flush()
"""
    rng = random.Random(5)
    for _ in range(6):
        process = start(code, tmp_path)
        assert process.stdout.readline() == "open\n"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, 0.15))
        kill(process)
    run_ok(code, tmp_path)
    found = np.array(values(tmp_path / "worker-00000.h5", "x"))
    assert (found == np.arange(400)[:, None]).all()


def test_a_worker_that_begins_anew_leaves_what_was_flushed_until_it_is_done(tmp_path):
    def interrupted(rows: int, flush: bool = True) -> None:
        code = f"""
from keras_safe_ckpt import WorkerH5Writer
writer = WorkerH5Writer(sys.argv[1], 0)
writer.append("x", np.zeros(({rows}, 1000)))
{"writer.flush()" if flush else ""}
os.kill(os.getpid(), signal.SIGKILL)
"""
        assert run(code, tmp_path).returncode == -signal.SIGKILL

    interrupted(3000)
    interrupted(10)
    interrupted(9000, flush=False)
    found = {one.path.name: one.rows for one in find_unfinished(tmp_path)}
    assert found == {
        ".worker-00000.h5.interrupted": {"x": 3000},
        ".worker-00000.h5.unfinished": {},
    }, "the longest one of earlier lives"
    with WorkerH5Writer(tmp_path, 0) as writer:
        writer.append("x", np.zeros((1, 1000)))
        assert (tmp_path / ".worker-00000.h5.interrupted").exists()
    assert seen(tmp_path) == ["worker-00000.h5"]


def test_resume_goes_on_with_a_finished_file(tmp_path):
    for number in range(3):
        with WorkerH5Writer(tmp_path, resume=True) as writer:
            assert writer.rows("x") == number
            writer.append("x", [number])
            writer.append("text", [f"{number}"])
    assert values(tmp_path / "worker-00000.h5", "x") == [0, 1, 2]
    assert values(tmp_path / "worker-00000.h5", "text") == ["0", "1", "2"]


def test_resume_of_what_was_never_flushed_begins_anew(tmp_path):
    code = """
from keras_safe_ckpt import WorkerH5Writer
writer = WorkerH5Writer(sys.argv[1])
writer.append("x", np.zeros((3000, 1000)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    run(code, tmp_path)
    with WorkerH5Writer(tmp_path, resume=True) as writer:
        assert writer.rows("x") == 0
        writer.append("x", ["of another type"])


def test_ctrl_c_leaves_what_was_flushed(tmp_path):
    code = """
from keras_safe_ckpt import WorkerH5Writer
with WorkerH5Writer(sys.argv[1]) as writer:
    writer.append("x", np.zeros((10, 100_000)))
    writer.flush()
    print("open", flush=True)
    while True:
        writer.append("x", np.zeros((10, 100_000)))
"""
    process = start(code, tmp_path)
    assert process.stdout.readline() == "open\n"
    with ending(process):
        press_ctrl_c(process)
    assert "KeyboardInterrupt" in process.stderr.read()
    assert seen(tmp_path) == [".worker-00000.h5.unfinished", ".worker-00000.h5.unfinished.journal"]
    (left,) = find_unfinished(tmp_path)
    assert left.rows["x"] >= 10


def fill(writer: WorkerH5Writer) -> None:
    with writer:
        while True:
            writer.append("x", np.zeros((100, 1000)))


def test_a_full_disk_is_said_and_what_was_flushed_stays(small_disk):
    folder = small_disk("size=8m")
    writer = WorkerH5Writer(folder)
    writer.append("x", np.zeros((100, 1000)))
    writer.flush()
    with pytest.raises(CheckpointWriteError, match=r"worker-00000.h5.*disk is full"):
        fill(writer)
    (left,) = find_unfinished(folder)
    assert left.rows == {"x": 100}
    writer = WorkerH5Writer(folder, resume=True)
    with pytest.raises(CheckpointWriteError, match="disk is full"):
        writer.write("y", np.zeros(10_000_000))
    writer.abandon()
    (left,) = find_unfinished(folder)
    assert left.rows == {"x": 100}


def test_a_disk_that_is_full_at_the_end_is_said(small_disk):
    folder = small_disk("size=2m")
    writer = WorkerH5Writer(folder)
    writer.append("x", np.zeros(50_000))
    writer.flush()
    (folder / "else").write_bytes(bytes(os.statvfs(folder).f_bavail * 4096))
    writer.append("x", np.zeros(10))
    with pytest.raises(CheckpointWriteError, match="disk is full"):
        writer.close()
    (folder / "else").unlink()
    writer.abandon()
    (left,) = find_unfinished(folder)
    assert left.rows == {"x": 50_000}
    with WorkerH5Writer(folder, resume=True) as writer:
        assert writer.rows("x") == 50_000


# What is recovered by hand.


def test_what_is_left_is_listed_and_rescued(tmp_path):
    code = """
from keras_safe_ckpt import WorkerH5Writer
writer = WorkerH5Writer(sys.argv[1], 3)
writer.append("x", np.arange(1000))
writer.flush()
writer.append("x", np.arange(1000))
print("open", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, numpy as np\n" + code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert process.stdout.readline() == "open\n"
    (busy,) = find_unfinished(tmp_path)
    assert f"pid {process.pid}" in busy.holder
    with pytest.raises(LockTimeoutError):
        rescue(busy.path, tmp_path / "rescued.h5")
    kill(process)
    (left,) = find_unfinished(tmp_path)
    assert (left.rows, left.holder) == ({"x": 1000}, "")

    def recover(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "keras_safe_ckpt", "recover", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment())

    listed = recover(tmp_path)
    assert "x: 1,000 rows up to the last flush" in listed.stdout
    advice = listed.stdout.splitlines()[-1].strip()
    assert advice.startswith("keras-safe-ckpt recover ")
    done = recover(*advice.split()[2:-1], tmp_path / "rescued.h5")
    assert done.returncode == 0, done.stderr
    assert values(tmp_path / "rescued.h5", "x") == list(range(1000))
    assert left.path.exists(), "it stays"
    (tmp_path / "empty").mkdir()
    assert recover(tmp_path / "empty").stdout.startswith("Nothing unfinished")
    assert recover(tmp_path / "missing").returncode == 2
    failed = recover(tmp_path / "rescued.h5", "--out", tmp_path / "b.h5")
    assert failed.returncode == 2
    assert "expected an unfinished file" in failed.stderr


def test_nothing_can_be_rescued_of_what_was_never_flushed(tmp_path):
    code = """
from keras_safe_ckpt import WorkerH5Writer
writer = WorkerH5Writer(sys.argv[1])
writer.append("x", np.zeros((3000, 1000)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    run(code, tmp_path)
    (left,) = find_unfinished(tmp_path)
    assert left.rows == {}
    with pytest.raises(CheckpointNotFoundError, match="before its first flush"):
        rescue(left.path, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


# Bad input.


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        (5.0, ValueError, r"expected rows, .* pass \[.*5.0"),
        ([[1, 2], [3]], ValueError, r"rows of length 2 and \(row 1\) of length 1.*x_lengths"),
        (np.array([[1, 2], [3]], object), ValueError, "rows of length 2 and"),
        ([[1, 2], 3], ValueError, "expected rows of one shape"),
        (["a", None], TypeError, "Received: None of type NoneType"),
        ([{}], TypeError, "of type dict"),
        ([b"a\0b"], ValueError, "a zero in them"),
        (np.array(["2020-01-01"], "M8[D]"), TypeError, "datetime64"),
        (np.zeros((2, 0)), ValueError, "rows that hold something"),
        (np.zeros((1,) * 33), ValueError, "at most 32 dimensions, as HDF5 has. Received: 33"),
        (np.ma.array([1, 2], mask=[0, 1]), TypeError, "Received: an array with a mask"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_are_named(tmp_path, rows, kind, message):
    with WorkerH5Writer(tmp_path) as writer:
        with pytest.raises(kind, match=message):
            writer.append("x", rows)
        writer.append("x", [1])
    assert values(tmp_path / "worker-00000.h5", "x") == [1], "and nothing is lost"


def test_tensors_that_cannot_be_are_named(tmp_path):
    from keras_setup import tf

    with WorkerH5Writer(tmp_path) as writer:
        with pytest.raises(ValueError, match="a ragged tensor"):
            writer.append("x", tf.ragged.constant([[1], [2, 3]]))
        with pytest.raises(TypeError, match="bfloat16"):
            writer.append("x", tf.constant([1.0], tf.bfloat16))


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        (np.zeros((1, 3), "f4"), ValueError, r"rows of shape \(2,\).*Received: rows of shape \(3,"),
        (np.zeros(2, "f4"), ValueError, r"rows of shape \(2,\)"),
        (np.zeros((1, 2), "f8"), TypeError, "expected float32.*Received: float64"),
        (np.zeros((1, 2), "i8"), TypeError, "Received: int64"),
        ([["a", "b"]], TypeError, "Received: text"),
        ([[1j, 2]], TypeError, "Received: complex128"),
    ],
)
def test_rows_of_another_kind_are_named(tmp_path, rows, kind, message):
    with WorkerH5Writer(tmp_path) as writer:
        writer.append("x", np.zeros((2, 2), "f4"))
        with pytest.raises(kind, match=message):
            writer.append("x", rows)
        assert writer.rows("x") == 2


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    with WorkerH5Writer(tmp_path) as writer:
        writer.append("x", np.array([1], "int8"))
        writer.append("x", [100])
        for wrong in ([300], [1.5]):
            with pytest.raises(TypeError, match="without loss"):
                writer.append("x", wrong)
        writer.append("f2", np.array([1], "float16"))
        writer.append("f4", np.array([1], "float32"))
        writer.append("f8", [float(1 << 53)])
        for name, wrong in (
            ("f4", [1e300]), ("f4", [16777217]), ("f2", [100_000.0]), ("f4", [(1 << 60) + 1]),
            # NumPy calls these safe, and rounds them.
            ("f8", np.array([(1 << 53) + 1])), ("f8", np.array([(1 << 63) - 1])),
            ("f8", np.array([(1 << 64) - 1], "u8")),
        ):  # fmt: skip
            with pytest.raises(TypeError, match="without loss"):
                writer.append(name, wrong)
        writer.append("f4", [0.1, float("nan"), float("inf"), 16777216])
        writer.append("f4", [])
        writer.append("f8", np.array([1 << 53, -(1 << 62)]))
        writer.append("f8", np.array([1 << 63], "u8"))
        writer.append("f8", [True, False])
    assert values(tmp_path / "worker-00000.h5", "x") == [1, 100]
    assert len(values(tmp_path / "worker-00000.h5", "f4")) == 5
    expected = [1 << 53, 1 << 53, -(1 << 62), 1 << 63, 1, 0]
    assert values(tmp_path / "worker-00000.h5", "f8") == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, ValueError) for name in ("", "/x", "a//b", "../x", "x/..", "a\0b", ".")),
        ("keras_safe_ckpt/x", ValueError),
        (7, TypeError),
    ],
)
def test_names_that_cannot_be_are_named(tmp_path, name, kind):
    with WorkerH5Writer(tmp_path) as writer:
        for call in (writer.append, writer.write):
            with pytest.raises(kind, match=r"name: .*Received: "):
                call(name, [1])


def test_a_name_is_for_one_thing(tmp_path):
    with WorkerH5Writer(tmp_path) as writer:
        writer.write("whole", [1])
        writer.append("rows", [1])
        for name in ("whole", "rows"):
            with pytest.raises(ValueError, match="expected a new name"):
                writer.write(name, [1])
        with pytest.raises(ValueError, match="expected a dataset that grows"):
            writer.append("whole", [1])
        with pytest.raises(ValueError, match="There is a dataset 'rows'"):
            writer.append("rows/below", [1])
        writer.append("group/x", [1])
        with pytest.raises(ValueError, match=r"There is a group|something else"):
            writer.append("group", [1])


@pytest.mark.parametrize("compression", ["zip", True, -1, 10, 1.5])
def test_compression_that_is_not_known_is_named(tmp_path, compression):
    with WorkerH5Writer(tmp_path) as writer:
        with pytest.raises(ValueError, match=r"compression: expected .*Received: "):
            writer.append("x", [1], compression=compression)
        writer.append("x", [1], compression="gzip")
        with pytest.raises(ValueError, match="expected compression='gzip'"):
            writer.append("x", [1], compression="lzf")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [({"": 1}, "names as text"), ({1: 1}, "names as text"), ({"a": {}}, "attribute a"),
     ({"a": np.zeros(10_000)}, "make it a dataset"), (["a"], "expected names and values")],
)  # fmt: skip
def test_attributes_that_cannot_be_are_named(tmp_path, attributes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        WorkerH5Writer(tmp_path, attributes=attributes)
    with WorkerH5Writer(tmp_path) as writer, pytest.raises((ValueError, TypeError), match=message):
        writer.append("x", [1], attributes=attributes)


@pytest.mark.parametrize(
    ("worker", "workers"), [(-1, None), (True, None), ("1", None), (2, 2), (0, 0), (0, "4")]
)
def test_workers_that_cannot_be_are_named(tmp_path, worker, workers):
    with pytest.raises(ValueError, match=r"workers?: expected .*Received: "):
        WorkerH5Writer(tmp_path, worker, workers=workers)
    assert seen(tmp_path) == []


def test_places_that_cannot_be_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsafePathError, match="a directory was expected"):
        WorkerH5Writer(tmp_path / "file")
    (tmp_path / "worker-00000.h5").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        WorkerH5Writer(tmp_path)
    with pytest.raises(UnsafePathError, match="object stores"):
        WorkerH5Writer("gs://bucket/run")


def test_links_in_the_way_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".worker-00000.h5.unfinished", ".worker-00000.h5.unfinished.journal"):
        (folder / name).symlink_to(victim)
    with WorkerH5Writer(folder) as writer:
        writer.append("x", [1])
    assert victim.read_text() == "precious"
    assert seen(folder) == ["worker-00000.h5"]


def test_text_and_names_that_are_not_unicode_are_named(tmp_path):
    with WorkerH5Writer(tmp_path) as writer:
        with pytest.raises(ValueError, match="'x': expected text"):
            writer.append("x", ["\udc80"])
        for name in ("\udc80", "n" * 1001):
            with pytest.raises(ValueError, match="name: expected a name such as"):
                writer.append(name, [1])


def test_what_belongs_to_the_library_cannot_be_overwritten(tmp_path):
    with pytest.raises(ValueError, match="what this library calls its own"):
        WorkerH5Writer(tmp_path, attributes={"keras_safe_ckpt": "mine"})
    assert not [name for name in os.listdir(tmp_path) if name.startswith("worker")]


def test_an_append_that_is_refused_leaves_no_trace(tmp_path):
    with WorkerH5Writer(tmp_path) as writer:
        with pytest.raises(TypeError, match="attribute a"):
            writer.append("x", [1.0], attributes={"a": object()})
        writer.write("x", [[1.0]])
    assert values(tmp_path / "worker-00000.h5", "x") == [[1.0]]


def test_rows_are_not_there_if_their_attributes_are_refused_by_hdf5(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "checked_attributes", dict)
    with WorkerH5Writer(tmp_path) as writer:
        writer.append("x", [1.0])
        with pytest.raises(OSError, match="too large"):
            writer.append("x", [2.0], attributes={"large": np.zeros(9000)})
        assert writer.rows("x") == 1


def test_ctrl_c_in_an_append_leaves_no_rows_that_nobody_wrote(tmp_path, monkeypatch):
    """Between two chunks: the dataset is as long as if all were there."""
    rows = np.ones(200_000)
    assert rows.nbytes > 5 * (1 << 18)

    class Chunks:
        """The dataset's methods of HDF5, the third chunk of which is interrupted."""

        def __init__(self, dataset_id):
            self._id, self._count = dataset_id, 0

        def __getattr__(self, name):
            return getattr(self._id, name)

        def write_direct_chunk(self, *arguments):
            self._count += 1
            if self._count == 3:
                raise KeyboardInterrupt
            return self._id.write_direct_chunk(*arguments)

    def interrupted() -> None:
        with WorkerH5Writer(tmp_path, 0) as writer:
            writer.append("x", [5.0])
            writer.flush()
            table = writer._file.tables._tables["x"]
            monkeypatch.setattr(table.dataset, "_id", Chunks(table.dataset.id))
            writer.append("x", rows)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with WorkerH5Writer(tmp_path, 0, resume=True) as writer:
        assert writer.rows("x") == 1
    assert values(tmp_path / "worker-00000.h5", "x") == [5.0]


def test_large_rows_take_the_memory_of_a_row(tmp_path):
    code = """
import resource
from keras_safe_ckpt import WorkerH5Writer
rows = np.zeros((1, 48, 512, 512), "f4")  # 50 MB
writer = WorkerH5Writer(sys.argv[1], 0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400_000_000,) * 2)
for _ in range(6):
    writer.append("x", rows)
    writer.flush()
writer.close()
"""
    run_ok(code, tmp_path)
    with h5py.File(tmp_path / "worker-00000.h5") as file:
        assert file["x"].shape == (6, 48, 512, 512)


def test_chunks_that_did_not_change_are_not_in_the_journal(tmp_path):
    """Of many datasets with a row more, only what the rows are."""
    with WorkerH5Writer(tmp_path, 0) as writer:
        for _ in range(2):
            for number in range(100):
                writer.append(f"d{number}", np.ones((1, 100)))
            writer.flush()
        journal = tmp_path / ".worker-00000.h5.unfinished.journal"
        assert journal.stat().st_size < 100 * 20_000
    assert len(values(tmp_path / "worker-00000.h5", "d99")) == 2


def test_a_pipe_in_the_place_of_the_journal_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".worker-00000.h5.unfinished.journal")
    with WorkerH5Writer(tmp_path, 0) as writer:
        writer.append("x", [1])
    assert values(tmp_path / "worker-00000.h5", "x") == [1]


def test_recover_passes_over_what_is_no_hdf5_and_follows_no_link(tmp_path):
    (tmp_path / ".a.h5.interrupted").write_bytes(b"something else")
    (tmp_path / ".b.h5.interrupted").symlink_to("/etc/passwd")
    done = subprocess.run(
        [sys.executable, "-m", "keras_safe_ckpt", "recover", tmp_path],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cannot be read: it is not a whole HDF5 file" in done.stdout
    assert "Traceback" not in done.stderr
    assert ".b.h5" not in done.stdout
    with pytest.raises(CheckpointNotFoundError, match="expected an unfinished file"):
        rescue(tmp_path / ".b.h5.interrupted", tmp_path / "out.h5")


# Real workers.

PREDICTING = """
from keras_safe_ckpt import WorkerH5Writer, enable_multi_worker_fit
enable_multi_worker_fit()
with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).random((40, 4), "float32")
    model.fit(x, x[:, :2], batch_size=20, epochs=1, verbose=0, shuffle=False)
    with WorkerH5Writer(FOLDER + "/predictions") as writer:
        for start in range(INDEX * 5, 40, 10):
            ids = np.arange(start, start + 5)
            writer.append("id", ids)
            writer.append("prediction", np.asarray(model(x[ids])))
            writer.flush()
weights = [array.tolist() for array in model.get_weights()]
report(worker=writer.worker, name=writer.path.name, weights=weights, x=x.tolist())
"""


def test_two_workers_predict_into_files_that_are_merged(tmp_path):
    facts = launch_ok(tmp_path, WORKER_OF_A_CLUSTER + PREDICTING)
    assert [fact["worker"] for fact in facts] == [0, 1]
    assert [fact["name"] for fact in facts] == ["worker-00000.h5", "worker-00001.h5"]
    assert facts[0]["weights"] == facts[1]["weights"]
    out = merge_worker_files(tmp_path / "predictions", tmp_path / "all.h5", sort_key="id")
    kernel, bias = map(np.array, facts[0]["weights"])
    with h5py.File(out) as file:
        assert file["id"][:].tolist() == list(range(40))
        wanted = np.array(facts[0]["x"]) @ kernel + bias
        assert np.allclose(file["prediction"][:], wanted, atol=1e-5)
    (tmp_path / "predictions/worker-00001.h5").unlink()
    with pytest.raises(MergeConflictError, match="the file of worker 1 is missing"):
        merge_worker_files(tmp_path / "predictions", tmp_path / "all.h5")
