"""Let each system call of an operation fail in turn, and judge what comes of it."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from crash_scenes import SCENES, SETUP
from killing import CHANGING, Call, Operation, calls_of
from warm import Trial, warm_process

TELL = "crash_scenes.tell(scene, context, folder, opened, unwatched)"
TELLING = f"{SETUP}\nopened = crash_scenes.opened()\n"

#: On files; others (futex, mmap) have nothing to do with a disk.
WRITES = ("write", "writev", "pwrite64", "pwritev", "pwritev2", "sendfile", "copy_file_range")
CREATES = ("mkdir", "rename", "link", "symlink", "ftruncate", "fallocate")
SYNCS = ("fsync", "fdatasync")
READS = ("read", "pread64", "preadv", "preadv2", "getdents64")
LOOKS = ("newfstatat", "stat", "lstat", "fstat", "statx", "statfs", "fstatfs", "access", "lseek")
REMOVES = ("unlink", "unlinkat", "rmdir")
OTHERS = ("openat", "close", "flock", "fcntl", "dup", "utimensat", "chmod", "fchmod", "readlink")
ON_FILES = (*WRITES, *CREATES, *SYNCS, *READS, *LOOKS, *REMOVES, *OTHERS)
#: Those that wait, and that a signal can end.
MAY_WAIT = (*WRITES, *SYNCS, *READS, "openat", "close", "flock", "fcntl", "ftruncate", "fallocate")


#: Where HDF5, or Python, keeps to itself what the system has said.
_HIDDEN = ("can't retrieve stat info", "file read failed", "unable to close file", "not seekable")

Prepare = Callable[[Path], object]


class Fault(NamedTuple):
    """An error that a call returns without having done anything."""

    call: Call
    error: str

    def __str__(self) -> str:
        return f"{self.error} of {self.call.name} {self.call.when}"


def faults_of(log: str) -> list[Fault]:
    """Every error that each of the calls in a trace can return."""
    calls, _ = calls_of(log)
    # A name is made by some of them only.
    creating = {
        number
        for number, line in enumerate(re.findall(r"^\d+ +openat\(.*$", log, re.MULTILINE), 1)
        if "O_CREAT" in line
    }
    found = []
    for call in calls:
        errors = []
        if call.name in (*WRITES, *CREATES, *SYNCS):
            errors += ["ENOSPC", "EDQUOT"]
        if call.name == "openat" and call.when in creating:
            errors += ["ENOSPC", "EDQUOT"]
        if call.name in ("rename", "link"):
            errors += ["EXDEV"]
        if call.name in ON_FILES:
            errors += ["EIO"]
        if call.name in MAY_WAIT:
            errors += ["EINTR"]
        found += [Fault(call, error) for error in errors]
    return found


def watch(
    name: str, folder: Path, *options: str, short: int = 0, prepare: Prepare | None = None
) -> Trial:
    """One trial of a scene in a new folder."""
    folder.mkdir(parents=True)
    (prepare or SCENES[name].prepare)(folder)
    watched = options if options else None
    return warm_process().run(TELL, folder, name, setup=TELLING, watched=watched, short=short)


def enumerate_faults(name: str, folder: Path, prepare: Prepare | None = None) -> list[Fault]:
    """All that can happen to a scene."""
    operation = Operation(TELL, TELLING, (name,))
    operation.rehearse(folder, prepare or SCENES[name].prepare)
    done = watch(name, folder / "enumeration", "-e", "trace=all", prepare=prepare)
    assert done.code == 0, done.err
    return faults_of(done.log)


class Outcome(NamedTuple):
    """Of one fault: whether it came, whether it was an error, and what is wrong with that."""

    came: bool
    failed: bool
    wrong: list[str]


def outcome_of(name: str, fault: Fault, folder: Path, prepare: Prepare | None = None) -> Outcome:
    injection = f"inject={fault.call.name}:error={fault.error}:when={fault.call.when}"
    traced = f"trace={fault.call.name},fsync,fdatasync,ftruncate,getpriority"
    done = watch(name, folder, "-e", traced, "-e", injection, prepare=prepare)
    before_end = done.log.partition("getpriority(")[0]
    came = "(INJECTED)" in before_end
    if done.code != 0:
        return Outcome(came, True, [f"ended with {done.code}: {done.err[-3000:]}"])
    told, again = (json.loads(line) for line in done.out.splitlines())
    return Outcome(
        came, told["error"] is not None, judge(name, fault, came, told, again, before_end)
    )


def judge(
    name: str,
    fault: Fault,
    came: bool,
    told: dict[str, Any],
    again: dict[str, Any],
    log: str,
) -> list[str]:
    """What is wrong with what came of it, in words."""
    scene, error, wrong = SCENES[name], told["error"], []
    if error is None:
        if told["seen"] not in (scene.new, *scene.as_good):
            wrong.append(f"no error, and there is {told['seen']!r}")
    else:
        if "SafeCheckpointError" not in error["kinds"]:
            wrong.append(f"not of the tree: {error['kinds'][0]}: {error['text']}")
        number = getattr(errno, fault.error)
        named = (fault.error, os.strerror(number), f"[Errno {number}]", *_HIDDEN)
        said = any(text in error["text"] for text in named)
        if not said and error["errno"] != number:
            wrong.append(f"does not say {fault.error}: {error['text']}")
        if "OSError" in error["kinds"] and error["errno"] not in (number, None):
            wrong.append(f"its errno is {error['errno']}: {error['text']}")
        if not came:
            wrong.append(f"an error of its own: {error['text']}")
        expected = (scene.new, *scene.as_good) if error["published"] else (scene.old,)
        if told["seen"] not in (*expected, *scene.between):
            wrong.append(f"published={error['published']}, and there is {told['seen']!r}")
    # What cannot be removed, or is not let go, stays.
    if told["left"] and fault.call.name not in REMOVES:
        wrong.append(f"left {told['left']}")
    if told["leaked"] > (fault.call.name == "close") * log.count("(INJECTED)"):
        wrong.append(f"{told['leaked']} descriptors are left open")
    if again["seen"] not in (scene.new, scene.new_again):
        wrong.append(f"afterwards there is {again['seen']!r}")
    wrong += [f"{path} was synced again" for path in synced_again(log)]
    return wrong


def synced_again(log: str) -> list[str]:
    """Files that were synced once more after a sync of them had failed."""
    failed: set[str] = set()
    found = []
    for name, path, rest in re.findall(r" (fsync|fdatasync|ftruncate)\(\d+<([^>]*)>(.*)", log):
        if Path(path).is_dir():
            continue  # A name that is taken back is synced as well.
        if name == "ftruncate":
            failed.discard(path)  # What was not synced is gone.
        elif path in failed:
            found.append(path)
        # EINTR is no failure: nothing was done, and Python does it again.
        elif "INJECTED" in rest and "EINTR" not in rest:
            failed.add(path)
    return found


class Tally(NamedTuple):
    """How many errors came, how many of them were raised, how many did not come again."""

    tried: int
    failed: int
    missed: int

    def __str__(self) -> str:
        return (
            f"{self.tried} errors of system calls ({self.missed} did not come again), "
            f"{self.failed} raised as they should, {self.tried - self.failed} did no harm"
        )


def check_faults(
    name: str, faults: list[Fault], folder: Path, prepare: Prepare | None = None
) -> Tally:
    """Try all of them."""
    failed, missed, wrong = 0, [], []
    for number, fault in enumerate(faults):
        outcome = outcome_of(name, fault, folder / str(number), prepare)
        failed += outcome.failed
        if not outcome.came:
            missed.append(fault)
        wrong += [f"{fault}: {text}" for text in outcome.wrong]
    assert not wrong, f"{len(wrong)} of {len(faults)}:\n" + "\n".join(wrong)
    assert len(missed) <= 0.1 * len(faults), missed
    return Tally(len(faults) - len(missed), failed, len(missed))


def of_what_changes_the_disk(faults: list[Fault]) -> list[Fault]:
    """Each call that does, with one of the errors that it can return, in turn."""
    errors: dict[Call, list[Fault]] = {}
    for fault in faults:
        if fault.call.name in CHANGING and fault.error != "EINTR":
            errors.setdefault(fault.call, []).append(fault)
    return [ways[number % len(ways)] for number, ways in enumerate(errors.values())]
