"""The power is cut while data files are written: rows and records that were promised are there."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest
from power_cut import Tried, cut_everywhere, swept_an_hour_later
from record_files import records_of

from keras_safe_ckpt import (
    LockedTFRecordWriter,
    TFRecordShardWriter,
    WorkerH5Writer,
    merge_worker_files,
    repair_tfrecord,
    split_tfrecord,
    verify_tfrecord,
)
from keras_safe_ckpt.datasets import central_file, central_process
from keras_safe_ckpt.datasets.feed_folder import FeedFolder
from keras_safe_ckpt.storage.locks import LockManager

QUICK, THOROUGH = 4, 150
STEP = 700
#: The rows of the second life of a worker that begins anew.
ANEW = 100_000

# The files of workers.

WORKER = f"""
from keras_safe_ckpt import WorkerH5Writer
FOLDER = os.path.join(ROOT, "a", "rows")

def add(writer, *begins):
    for begin in begins:
        writer.append("x", np.arange(begin, begin + {STEP}))
        writer.append("text", [f"from {{begin}}"])
        writer.flush()
        mark(begin + {STEP})

def finish(writer):
    writer.close()
    mark("closed")
"""
FLUSHED = f"""
mark("begin")
writer = WorkerH5Writer(FOLDER, 0)
add(writer, 0, {STEP})
finish(writer)
"""
RESUMED = f"""
writer = WorkerH5Writer(FOLDER, 0)
add(writer, 0)
writer.close()
mark("begin")
mark({STEP})
mark("closed")
writer = WorkerH5Writer(FOLDER, 0, resume=True)
add(writer, {STEP})
finish(writer)
"""
#: The journal of a finished file must not come back beside the next one.
BEGUN_ANEW = f"""
writer = WorkerH5Writer(FOLDER, 0)
add(writer, 0, {STEP})
mark("begin")
mark({2 * STEP})
finish(writer)
writer = WorkerH5Writer(FOLDER, 0)
add(writer, {ANEW})
writer.abandon()
"""
WORKERS = {"flushed": FLUSHED, "resumed": RESUMED, "begun anew": BEGUN_ANEW}


def check_worker(disk: Path, done: list[str]) -> None:
    path = disk / "a" / "rows" / "worker-00000.h5"
    counts = [int(text) for text in done if text != "closed"]
    finished = max((count for count in counts if count < ANEW), default=0)
    if path.exists():
        rows = _rows(path)
        assert rows == list(range(len(rows)))
        assert len(rows) >= finished or done[-1] != "closed"
    else:
        assert "closed" not in done
    with WorkerH5Writer(path.parent, 0, resume=True) as writer:
        found = writer.rows("x")
        assert found % STEP == 0
        assert writer.rows("text") == found // STEP
        writer.append("x", [-1])
    rows = _rows(path)
    begin = ANEW if rows[0] == ANEW else 0
    assert rows == [*range(begin, begin + found), -1]
    assert begin + found >= max(counts, default=0)
    assert swept_an_hour_later(path.parent)
    assert not list(path.parent.glob("*unfinished*"))


def _rows(path: Path) -> list[int]:
    with h5py.File(path) as file:
        return [int(row) for row in file["x"][:]] if "x" in file else []


MERGE = f"""
from keras_safe_ckpt import WorkerH5Writer, merge_worker_files
for worker in (0, 1):
    with WorkerH5Writer(os.path.join(ROOT, "rows"), worker, workers=2) as writer:
        writer.append("x", np.arange(worker * {STEP}, (worker + 1) * {STEP}))
mark("begin")
for number in (1, 2):
    merge_worker_files(os.path.join(ROOT, "rows"), os.path.join(ROOT, "a", "b", "all.h5"))
    mark(number)
"""


def check_merge(disk: Path, done: list[str]) -> None:
    path = disk / "a" / "b" / "all.h5"
    assert path.exists() or not done
    if path.exists():
        assert _rows(path) == list(range(2 * STEP))
    merge_worker_files(disk / "rows", path)
    assert _rows(path) == list(range(2 * STEP))


# Files of records.


def records(count: int) -> list[bytes]:
    return [b"%d" % number * 300 for number in range(count)]


RECORDS = """
def records(count):
    return [b"%d" % number * 300 for number in range(count)]
"""
SHARD = """
from keras_safe_ckpt import TFRecordShardWriter
mark("begin")
for count in (3, 5):
    with TFRecordShardWriter(os.path.join(ROOT, "a", "train"), 0, 1) as writer:
        for record in records(count):
            writer.write(record)
    mark(count)
"""


def check_shard(disk: Path, done: list[str]) -> None:
    path = disk / "a" / "train-00000-of-00001.tfrecord"
    assert path.exists() or not done
    if path.exists():
        found = verify_tfrecord(path)
        assert records_of(path) == records(found.records)
        assert found.is_counted
        assert found.records in (3, 5)
        assert found.records >= max(map(int, done), default=0)
    with TFRecordShardWriter(disk / "a" / "train", 0, 1) as writer:
        writer.write(b"next")
    assert verify_tfrecord(path).is_counted
    assert records_of(path) == [b"next"]


APPENDED = """
from keras_safe_ckpt import LockedTFRecordWriter
mark("begin")
writer = LockedTFRecordWriter(os.path.join(ROOT, "a", "all.tfrecord"))
for count in (1, 2, 3):
    writer.write(records(3)[count - 1])
    writer.flush()
    mark(count)
"""


def check_appended(disk: Path, done: list[str]) -> None:
    path = disk / "a" / "all.tfrecord"
    least = max(map(int, done), default=0)
    assert path.exists() or not least
    if path.exists():
        found = verify_tfrecord(path)
        assert records_of(path) == records(found.records)
        assert found.records >= least
        least = found.records
    with LockedTFRecordWriter(path) as writer:
        writer.write(b"next")
    assert records_of(path) == [*records(least), b"next"]
    assert verify_tfrecord(path).is_counted


SPLIT = """
from record_files import write_plain
from pathlib import Path
from keras_safe_ckpt import repair_tfrecord, split_tfrecord
source = write_plain(Path(ROOT) / "source.tfrecord", records(6))
mark("begin")
repair_tfrecord(source, os.path.join(ROOT, "a", "repaired.tfrecord"))
mark("repaired")
split_tfrecord(source, os.path.join(ROOT, "b", "train"), 2)
mark("split")
"""


def check_split(disk: Path, done: list[str]) -> None:
    wanted = {"repaired": [(disk / "a" / "repaired.tfrecord", records(6))]}
    wanted["split"] = [
        (disk / "b" / f"train-{shard:05d}-of-00002.tfrecord", records(6)[shard::2])
        for shard in (0, 1)
    ]
    for mark, files in wanted.items():
        for path, content in files:
            assert path.exists() or mark not in done
            if path.exists():
                assert records_of(path) == content
                assert verify_tfrecord(path).is_counted
    source = disk / "source.tfrecord"
    assert repair_tfrecord(source, disk / "a" / "repaired.tfrecord").records == 6
    assert len(split_tfrecord(source, disk / "b" / "train", 2)) == 2


# One process owns the file.

CENTRAL = f"""
from keras_safe_ckpt import CentralH5Writer
from keras_safe_ckpt.datasets import spool
spool.SEGMENT_BYTES = 4096
mark("begin")
path = os.path.join(ROOT, "a", "all.h5")
with CentralH5Writer(path) as writer:
    feed = writer.feed()
    for number in range(2):
        feed.append("x", np.arange(number * {STEP}, (number + 1) * {STEP}))
        feed.flush()
        mark((number + 1) * {STEP})
    for number in range(2, 4):
        feed.append("x", np.arange(number * {STEP}, (number + 1) * {STEP}))
mark({4 * STEP})
mark("closed")
"""


class CentralCheck:
    """What the next writer makes of it; its process is this one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Whoever was in the middle of an append is not there any more.
        monkeypatch.setattr(central_file, "_LAST_WORDS_SECONDS", 0.0)
        self._patch = monkeypatch

    def __call__(self, disk: Path, done: list[str]) -> None:
        path = disk / "a" / "all.h5"
        least = max((int(text) for text in done if text != "closed"), default=0)
        if path.exists():
            assert _rows(path) == list(range(4 * STEP))
        assert path.exists() or "closed" not in done
        if not path.parent.exists():
            assert not done
            return
        self._next_writer(path)
        if path.exists():
            rows = _rows(path)
            assert rows == list(range(len(rows)))
            assert len(rows) >= least
        assert path.exists() or not least
        left = [one.name for one in path.parent.iterdir() if one.name.startswith(".all.h5.feeds")]
        assert left == []

    def _next_writer(self, path: Path) -> None:
        folder = FeedFolder(path)

        def say(line: str) -> None:
            assert line == "ready"
            folder.write("closed", {})

        self._patch.setattr(central_process, "_say", say)
        with LockManager(timeout=10).exclusive(path):
            central_process._work(path, True, central_process.Starter())


SCENES = {
    **{f"worker, {name}": (WORKER + code, check_worker) for name, code in WORKERS.items()},
    "merge": (MERGE, check_merge),
    "shard": (RECORDS + SHARD, check_shard),
    "appended": (RECORDS + APPENDED, check_appended),
    "split": (RECORDS + SPLIT, check_split),
    "central": (CENTRAL, CentralCheck),
}


def cut_data(scene: str, folder: Path, place: Path, most: int, monkeypatch) -> Tried:
    code, check = SCENES[scene]
    if check is CentralCheck:
        check = CentralCheck(monkeypatch)
    return cut_everywhere(code, folder, check, most=most, place=place)


@pytest.mark.parametrize("scene", [scene for scene in SCENES if scene not in ("merge", "split")])
def test_what_was_flushed_outlives_a_power_cut(tmp_path, place, scene, monkeypatch):
    tried = cut_data(scene, tmp_path, place, QUICK, monkeypatch)
    assert tried.states >= 10


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scene", SCENES)
def test_no_power_cut_takes_rows_that_were_promised(
    tmp_path, place, scene, record_property, monkeypatch
):
    tried = cut_data(scene, tmp_path, place, THOROUGH, monkeypatch)
    record_property("campaign", f"power cut, data files, {scene}: {tried}")
