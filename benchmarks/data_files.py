"""What safe data files cost, as ratios within one run.

    python benchmarks/data_files.py                # 512 MB of each kind
    python benchmarks/data_files.py --megabytes 64 # smaller and quicker
    python benchmarks/data_files.py --markdown     # the table of the README

What is compared is measured in turn, each way first every other time; times and ratios are the
best of ``--rounds`` rounds, with the ratio of the medians beside them, and every round is printed
to standard error. "plus fsync" means that the other way, too, ends when the file is on the disk.
All files are read from memory, as they were written just before. Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from loops import Comparison, print_table, sync
from storage import warm_up_memory

from keras_safe_ckpt import (
    CentralH5Writer,
    TFRecordShardWriter,
    WorkerH5Writer,
    locked_tfrecord_dataset,
    merge_worker_files,
    verify_tfrecord,
)

FEEDERS = 4
RECORD_BYTES = 16384
CHUNK_BYTES = 256 << 10
#: Feeds one stream, when it is told to begin.
FEEDER = """
import pickle, sys
import numpy as np
feed = pickle.load(sys.stdin.buffer)
rows = np.random.default_rng(0).random((int(sys.argv[1]), 256), "float32")
print("ready", flush=True)
sys.stdin.buffer.read(1)
for _ in range(int(sys.argv[2])):
    feed.append("x", rows)
feed.close()
print("done", flush=True)
"""


class Throughput(Comparison):
    """The goal is a least part of the other's speed."""

    @property
    def ratio(self) -> float:
        return 1 / super().ratio

    @property
    def of_medians(self) -> float:
        return 1 / super().of_medians

    @property
    def reached(self) -> bool:
        return self.goal is None or self.ratio >= self.goal

    def row(self) -> list[str]:
        *cells, goal = super().row()
        return [*cells, goal.replace("<=", ">=")]


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def batches_of(rows: int, columns: int, megabytes: float) -> list[np.ndarray]:
    batch = np.random.default_rng(0).random((rows, columns), "float32")
    return [batch] * max(1, int(megabytes * 1e6 / batch.nbytes))


def plain_h5py(path: Path, batches: list[np.ndarray], end: Callable[[Path], object]) -> None:
    with h5py.File(path, "w") as file:
        shape = batches[0].shape[1:]
        # As large as ours: those that h5py chooses by itself make it slower.
        chunks = (CHUNK_BYTES // batches[0][0].nbytes, *shape)
        dataset = file.create_dataset(
            "x", (0, *shape), "f4", maxshape=(None, *shape), chunks=chunks
        )
        for batch in batches:
            count = len(dataset)
            dataset.resize(count + len(batch), axis=0)
            dataset[count:] = batch
    end(path)


def worker_h5(folder: Path, batches: list[np.ndarray]) -> None:
    with WorkerH5Writer(emptied(folder), 0) as writer:
        for batch in batches:
            writer.append("x", batch)


def compare_append(folder: Path, megabytes: float) -> list[Comparison]:
    found = []
    for rows, columns, share in ((256, 256, 1.0), (32, 10, 0.1)):
        batches = batches_of(rows, columns, share * megabytes)
        what = f"{sum(b.nbytes for b in batches) / 1e6:.0f} MB in batches of {rows} x {columns}"
        found.append(
            Comparison(
                f"`WorkerH5Writer`, {what}, durable",
                lambda batches=batches: worker_h5(folder / "worker", batches),
                "h5py plus fsync",
                lambda batches=batches: plain_h5py(folder / "plain.h5", batches, sync),
                1.2,
            )
        )
        found.append(
            Comparison(
                f"`WorkerH5Writer`, {what}, durable",
                lambda batches=batches: worker_h5(folder / "worker", batches),
                "h5py, not durable",
                lambda batches=batches: plain_h5py(folder / "plain.h5", batches, lambda _: None),
                None,
            )
        )
    return found


def copied(files: list[Path], out: Path) -> None:
    """The same bytes, one file after another, beside the old file, which is then replaced."""
    beside = out.with_suffix(".new")
    with open(beside, "wb", buffering=0) as target:
        for file in files:
            with open(file, "rb", buffering=0) as source:
                shutil.copyfileobj(source, target, 8 << 20)
    sync(beside)
    beside.replace(out)
    sync(out.parent)


def compare_merge(folder: Path, megabytes: float) -> Comparison:
    source = emptied(folder / "to_merge")
    for worker in range(4):
        with WorkerH5Writer(source, worker, workers=4) as writer:
            for batch in batches_of(256, 256, megabytes / 4):
                writer.append("x", batch)
    files = sorted(source.glob("worker-*.h5"))
    return Comparison(
        f"`merge_worker_files`, 4 files, {megabytes:.0f} MB, durable",
        lambda: merge_worker_files(source, folder / "merged.h5"),
        "copy of the same bytes plus fsync",
        lambda: copied(files, folder / "copy.h5"),
        1.3,
    )


class Feeding:
    """Four processes that feed one file; that they and the writer start is not measured."""

    def __init__(self, folder: Path, megabytes: float) -> None:
        self._path = folder / "central.h5"
        self._count = len(batches_of(1024, 256, megabytes)) // FEEDERS
        self.batches = batches_of(1024, 256, megabytes)[: FEEDERS * self._count]
        self._feeders: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for feeder in self._feeders:
            feeder.wait()
        self._path.unlink(missing_ok=True)
        self._writer = CentralH5Writer(self._path)
        handle = pickle.dumps(self._writer.feed())
        command = [sys.executable, "-c", FEEDER, "1024", str(self._count)]
        self._feeders = []
        for _ in range(FEEDERS):
            feeder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert feeder.stdin is not None
            feeder.stdin.write(handle)
            feeder.stdin.flush()
            self._feeders.append(feeder)
        for feeder in self._feeders:
            assert feeder.stdout is not None
            assert feeder.stdout.readline() == b"ready\n"

    def feed(self) -> None:
        """Until everything is in the file, and that is published."""
        for feeder in self._feeders:
            assert feeder.stdin is not None
            feeder.stdin.close()
        for feeder in self._feeders:
            assert feeder.stdout is not None
            assert feeder.stdout.readline() == b"done\n"
        self._writer.close()


def compare_central(folder: Path, megabytes: float) -> Comparison:
    feeding = Feeding(folder, megabytes)
    return Throughput(
        f"`CentralH5Writer`, {FEEDERS} feeders, {megabytes:.0f} MB, durable",
        feeding.feed,
        "one process with h5py plus fsync",
        lambda: plain_h5py(folder / "plain.h5", feeding.batches, sync),
        0.7,
        feeding.start,
    )


def records_of(megabytes: float, size: int) -> list[bytes]:
    random = np.random.default_rng(0)
    return [random.bytes(size) for _ in range(int(megabytes * 1e6 / size))]


def read_all(dataset: Any) -> None:
    for _ in dataset.batch(256):
        pass


def compare_shard_writing(folder: Path, megabytes: float) -> Comparison:
    import tensorflow as tf

    records = records_of(megabytes, RECORD_BYTES)
    path = folder / "plain.tfrecord"

    def ours() -> None:
        with TFRecordShardWriter(folder / "ours", 0, 1) as writer:
            for record in records:
                writer.write(record)

    def theirs() -> None:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
        sync(path)
        sync(folder)

    what = f"`TFRecordShardWriter`, {megabytes:.0f} MB, durable"
    return Comparison(what, ours, "tf.io.TFRecordWriter plus fsync", theirs, 1.15)


def compare_reading(folder: Path, megabytes: float) -> list[Comparison]:
    """An epoch: the datasets are made once, as for `fit`."""
    import tensorflow as tf

    first = records_of(1, RECORD_BYTES)[:1]
    records = records_of(megabytes, RECORD_BYTES)
    found = []
    for name, content, what, goal in (
        ("epoch", records, f"an epoch of {4 * megabytes / 1e3:.2g} GB", 1.05),
        ("start", first, "an epoch of 4 records", None),
    ):
        paths = []
        for shard in range(4):
            with TFRecordShardWriter(folder / name, shard, 4) as writer:
                for record in content:
                    writer.write(record)
            paths.append(str(writer.path))
        ours, theirs = locked_tfrecord_dataset(paths), tf.data.TFRecordDataset(paths)
        found.append(
            Comparison(f"`locked_tfrecord_dataset`, {what} in 4 shards",
                       lambda ours=ours: read_all(ours), "tf.data.TFRecordDataset",
                       lambda theirs=theirs: read_all(theirs), goal)
        )  # fmt: skip
    return found


def verify_speed(folder: Path, megabytes: float, size: int) -> tuple[list[str], bool]:
    with TFRecordShardWriter(folder / "verify", 0, 1) as writer:
        for record in records_of(megabytes, size):
            writer.write(record)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        verify_tfrecord(writer.path)
        times.append(time.perf_counter() - began)
    speed = writer.path.stat().st_size / min(times) / 1e6
    reached = speed >= 500
    row = [f"`verify_tfrecord`, {megabytes:.0f} MB, records of {size:,} bytes",
           f"{speed:,.0f} MB/s", "", "", f">= 500 MB/s {'yes' if reached else 'NO'}"]  # fmt: skip
    return row, reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=512)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--directory", help="where to write (default: a temporary folder)")
    parser.add_argument("--only", default="", help="what has this in its name")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        folder, megabytes = Path(temporary), options.megabytes
        warm_up_memory(int(3e6 * megabytes))
        comparisons = [
            comparison
            for comparison in (
                *compare_append(folder, megabytes),
                compare_merge(folder, megabytes),
                compare_central(folder, megabytes),
                compare_shard_writing(folder, megabytes),
                *compare_reading(folder, megabytes),
            )
            if options.only in comparison.what
        ]
        for comparison in comparisons:
            comparison.measure_all(options.rounds)
        rows = [comparison.row() for comparison in comparisons]
        reached = all(comparison.reached for comparison in comparisons)
        for size in (RECORD_BYTES, 1024):
            row, is_fast = verify_speed(folder, megabytes, size)
            rows.append(row)
            reached = reached and (is_fast or size < RECORD_BYTES)
        print_table(rows, options.markdown)
        return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
