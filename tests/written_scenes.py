"""Operations that write files: those that are killed elsewhere, and what else the library writes.

All of them without TensorFlow, and each with a folder of its own.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import h5py
from crash_scenes import SCENES, Scene
from histories import busy_run
from record_files import records_of
from snapshots import make_snapshot

from keras_safe_ckpt import (
    CentralH5Writer,
    LockedTFRecordWriter,
    WorkerH5Writer,
    repair_tfrecord,
)
from keras_safe_ckpt.callbacks.run_directory import RunDirectory
from keras_safe_ckpt.cli.main import main
from keras_safe_ckpt.cluster.membership import Membership
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.datasets.unfinished import rescue
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.training.progress_mark import ProgressMark


def _itself(folder: Path) -> Path:
    return folder


def _nothing(folder: Path) -> None:
    """There is nothing to be prepared."""


# The log.


def _look_at_events(folder: Path) -> str:
    return ",".join(event["event"] for event in EventLog(folder).read())


# The directory of a run, with all that a `PreemptionAwareCallback` keeps there.


def _run(folder: Path, role: Role) -> None:
    place = RunDirectory(str(folder), role, Membership(role), locks=None, max_to_keep=2)
    try:
        mark = ProgressMark(place.backups.directory / ".progress")
        mark.open()
        mark.write(7)
        mark.close()
        for worker in (1, None):  # The part of another worker comes first.
            place.backups.publish(
                make_snapshot(1),
                {"save": "one", "workers": 2},
                {},
                step=1,
                epoch=0,
                batch=1,
                metrics={},
                worker=worker,
            )
    finally:
        place.close()


def _look_at_run(folder: Path) -> str:
    found = sorted(path.name for path in folder.rglob("run-*.weights.h5"))
    return ",".join(found)


#: Each of these has a run of its own, in a folder ``worker-1``.
_APART = Role(number=1, world=2, chief=False, synchronous=False)
_RUN_FILES = "run-0000000001-one.weights.h5,run-0000000001.weights.h5"


# Files that processes feed.


def _feed(folder: Path) -> None:
    with CentralH5Writer(folder / "all.h5", timeout=20) as writer:
        feed = writer.feed()
        feed.append("x", [1, 2])
        feed.flush()
        feed.append("x", [3])


def _look_at_fed(folder: Path) -> str:
    with h5py.File(folder / "all.h5") as file:
        return ",".join(map(str, file["x"][:].tolist()))


# Files whose writer was interrupted.


def _interrupt(folder: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), WorkerH5Writer(folder) as writer:
        writer.append("x", [1, 2])
        writer.flush()
        raise ZeroDivisionError


def _rescue(folder: Path) -> None:
    rescue(folder / ".worker-00000.h5.unfinished", folder / "rescued.h5")


def _write_again(folder: Path) -> None:
    with WorkerH5Writer(folder) as writer:
        writer.append("x", [5])
        writer.flush()


def _go_on(folder: Path) -> None:
    with WorkerH5Writer(folder, resume=True) as writer:
        writer.append("x", [3])
        writer.flush()


def _rows_of(name: str) -> Callable[[Path], str]:
    def look(folder: Path) -> str:
        with h5py.File(folder / name) as file:
            return ",".join(map(str, file["x"][:].tolist()))

    return look


# What the program makes.


def _report(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        main(["--debug", "report", str(folder / "run"), "-o", str(folder / "report.html")])


def _look_at_report(folder: Path) -> str:
    return "whole" if "</html>" in (folder / "report.html").read_text() else "torn"


def _damage(folder: Path) -> None:
    with LockedTFRecordWriter(folder / "all.tfrecord") as writer:
        for record in (b"one", b"two"):
            writer.write(record)
    with open(folder / "all.tfrecord", "ab") as file:
        file.write(b"half a record")


def _repair(folder: Path) -> None:
    repair_tfrecord(folder / "all.tfrecord", folder / "good.tfrecord")


def _look_at_repaired(folder: Path) -> str:
    return b",".join(records_of(folder / "good.tfrecord")).decode()


OTHERS: dict[str, Scene] = {
    "events": Scene(
        _nothing,
        EventLog,
        lambda log: log.record("save"),
        _look_at_events,
        "",
        "save",
    ),
    "run": Scene(
        _nothing, _itself, lambda folder: _run(folder, Role()), _look_at_run, "", _RUN_FILES
    ),
    "run of a worker": Scene(
        _nothing, _itself, lambda folder: _run(folder, _APART), _look_at_run, "", _RUN_FILES
    ),
    "central": Scene(_nothing, _itself, _feed, _look_at_fed, "", "1,2,3"),
    "central, gone on with": Scene(_feed, _itself, _feed, _look_at_fed, "1,2,3", "1,2,3,1,2,3"),
    "recover": Scene(_interrupt, _itself, _rescue, _rows_of("rescued.h5"), "", "1,2"),
    "worker file, set aside": Scene(
        _interrupt, _itself, _write_again, _rows_of("worker-00000.h5"), "", "5"
    ),
    "worker file, gone on with": Scene(
        _write_again, _itself, _go_on, _rows_of("worker-00000.h5"), "5", "5,3"
    ),
    "report": Scene(
        lambda folder: busy_run(folder / "run"), _itself, _report, _look_at_report, "", "whole"
    ),
    "repair": Scene(_damage, _itself, _repair, _look_at_repaired, "", "one,two"),
}

#: Without the one whose witness is the test's own file.
WRITTEN: dict[str, Scene] = {
    name: scene for name, scene in {**SCENES, **OTHERS}.items() if name != "witnessed lock"
}
