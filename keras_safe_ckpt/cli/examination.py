"""What ``doctor`` looks at: the file system, the room, what is there, and the environment."""

from __future__ import annotations

import errno
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from keras_safe_ckpt import __version__
from keras_safe_ckpt.cli.looking import look_at_all
from keras_safe_ckpt.cli.screen import shown_seconds, shown_size
from keras_safe_ckpt.errors import SafeCheckpointError
from keras_safe_ckpt.preemption.choosing import choose
from keras_safe_ckpt.preemption.platforms import find_platforms
from keras_safe_ckpt.storage.atomic import find_orphans
from keras_safe_ckpt.storage.file_system import (
    measure_speed,
    mount_of,
    why_locks_fail,
    why_no_links,
    why_renames_fail,
    workplace,
)
from keras_safe_ckpt.storage.survey import Condition, Surveyed, find_checkpoints

#: What is known of file systems, by the beginning of their names.
_KNOWN = {
    "nfs": "locks and renames depend on the server; if `locks` above is bad, or several hosts "
    "save here and one of them does not see the locks, use locks=RedisLocks(...)",
    "cifs": "mount it without `nobrl`, which makes locks local to each host; else use "
    "locks=RedisLocks(...)",
    "smb": "mount it without `nobrl`, which makes locks local to each host; else use "
    "locks=RedisLocks(...)",
    "lustre": "mount it with `flock`; with `localflock` hosts do not see each other's locks",
    "fuse": "it is as good as the program behind it; one for an object store (gcsfuse, s3fs) has "
    "no atomic rename, so save to a disk and copy from there",
    "tmpfs": "it is in memory: a restart of the machine or container loses all of it",
    "ramfs": "it is in memory: a restart of the machine or container loses all of it",
    "overlay": "it belongs to a container, and is gone with it: use a volume",
}
_LITTLE_ROOM_BYTES = 1 << 30
_SLOW_BYTES_PER_SECOND = 50e6
_PACKAGES = ("keras", "h5py", "numpy", "portalocker", "redis", "orbax-checkpoint")
_CLUSTER_VARIABLES = ("TF_CONFIG", "RANK", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_PROCID")


@dataclass(frozen=True)
class Finding:
    """``verdict`` is "good", "bad", "note" (worth knowing) or "fact"."""

    subject: str
    verdict: str
    detail: str
    advice: str = ""


def examine(directory: Path) -> list[Finding]:
    """All findings, those about the directory first."""
    looked_at = look_at_all(find_checkpoints(directory), verify=False)
    return [
        *_file_system(directory),
        *_abilities(directory),
        *_room(directory, looked_at),
        *_contents(directory, looked_at),
        *_environment(),
    ]


def _file_system(directory: Path) -> Iterator[Finding]:
    mount = mount_of(Path(os.path.realpath(directory)))
    if mount is None:
        yield Finding("file system", "fact", "the system does not tell")
        return
    advice = next((text for name, text in _KNOWN.items() if mount.type.startswith(name)), "")
    where = f"{mount.type} at {mount.point} ({mount.source})"
    yield Finding("file system", "note" if advice else "fact", where, advice)


def _abilities(directory: Path) -> Iterator[Finding]:
    try:
        with workplace(directory) as folder:
            yield _judged(
                "locks",
                why_locks_fail(folder),
                "two processes cannot hold one lock",
                "use a directory on a file system with working locks, or locks=RedisLocks(...)",
            )
            yield _judged(
                "rename",
                why_renames_fail(folder),
                "readers see the old or the new file, whole",
                "save to another file system: here a reader may see a torn checkpoint",
            )
            reason = why_no_links(folder)
            yield Finding(
                "hard links",
                "good" if reason is None else "note",
                reason or "a file can have two names",
                ""
                if reason is None
                else "a best file that a second run overwrites cannot be "
                "set aside here: give each run a directory of its own",
            )
            speed = measure_speed(folder)
    except (OSError, SafeCheckpointError) as error:
        yield Finding(
            "write and sync",
            "bad",
            str(error),
            "make room on it"
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            else "make the directory writable for this user, and check the disk",
        )
        return
    if not speed.bytes_per_second:
        small = shown_seconds(speed.small_file_seconds)
        yield Finding(
            "write and sync", "note", f"a small durable file takes {small}; no room to measure more"
        )
        return
    slow = speed.bytes_per_second < _SLOW_BYTES_PER_SECOND
    yield Finding(
        "write and sync",
        "note" if slow else "good",
        f"{shown_size(speed.bytes_per_second)}/s; a small durable file takes "
        f"{shown_seconds(speed.small_file_seconds)}",
        "a save of 1 GB would take "
        f"{1e9 / speed.bytes_per_second:.0f} s: save less often, or to a faster disk"
        if slow
        else "",
    )


def _judged(subject: str, problem: str | None, good: str, advice: str) -> Finding:
    if problem is None:
        return Finding(subject, "good", good)
    return Finding(subject, "bad", problem, advice)


def _room(directory: Path, looked_at: Sequence[Surveyed]) -> Iterator[Finding]:
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    largest = max((one.size for one in looked_at), default=0)
    detail = f"{shown_size(free)} free"
    if largest:
        detail += f", {free // largest:,} times the largest checkpoint here"
    # A new one is written beside the old one.
    if free < max(2 * largest, 1):
        yield Finding("room", "bad", detail, "free some space: the next save may not fit")
    elif free < _LITTLE_ROOM_BYTES:
        yield Finding("room", "note", detail, "little is left: use max_to_keep=..., or `prune`")
    else:
        yield Finding("room", "good", detail)
    if status.f_files and status.f_favail < 100:
        yield Finding(
            "inodes", "bad", f"{status.f_favail} free", "delete files: no new one can be made"
        )


def _contents(directory: Path, looked_at: Sequence[Surveyed]) -> Iterator[Finding]:
    damaged = [one.path.name for one in looked_at if one.condition is Condition.DAMAGED]
    detail = f"{len(looked_at):,} checkpoints (by manifest and size; `verify` reads every byte)"
    if damaged:
        shown = ", ".join(damaged[:3]) + (" ..." if len(damaged) > 3 else "")
        yield Finding(
            "contents",
            "bad",
            f"{detail}, damaged: {shown}",
            "they are passed over by every load; delete them when you know why",
        )
    else:
        yield Finding("contents", "good" if looked_at else "fact", detail)
    orphans = sum(1 for _ in find_orphans(directory))
    if orphans:
        yield Finding(
            "leftovers",
            "note",
            f"{orphans} temporary files of processes that are gone",
            "nothing: the next save removes them",
        )


def _environment() -> Iterator[Finding]:
    yield Finding(
        "this library",
        "fact",
        f"keras_safe_ckpt {__version__}, Python {platform.python_version()} on {sys.platform}",
    )
    yield from _packages()
    platforms = find_platforms()
    yield Finding("platform", "fact", ", ".join(platforms) or "no cloud and no SLURM recognised")
    choice = choose("auto")
    yield Finding(
        "notices",
        "fact",
        f"{choice} (what PreemptionAwareCallback listens to; it exits with {choice.exit_code})",
    )
    set_here = [name for name in _CLUSTER_VARIABLES if os.environ.get(name)]
    if set_here:
        yield Finding("cluster", "fact", f"{', '.join(set_here)} set: this is one of several")


def _packages() -> Iterator[Finding]:
    installed = {name: _version(name) for name in (*_PACKAGES, "tensorflow", "tensorflow-cpu")}
    known = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    advice = ""
    if installed["tensorflow"] and installed["tensorflow-cpu"]:
        advice = "tensorflow and tensorflow-cpu break each other: uninstall both, install one"
    elif not (installed["tensorflow"] or installed["tensorflow-cpu"]):
        advice = (
            'pip install "keras_safe_ckpt[tensorflow-cpu]" (or [tensorflow]); with another '
            "backend of Keras saves are not in the background"
        )
    problem = _keras_problem(installed["keras"])
    if problem:
        yield Finding("packages", "bad", known or "none", problem)
    else:
        yield Finding("packages", "note" if advice else "good", known, advice)


def _keras_problem(version: str | None) -> str:
    if version is None:
        return 'Keras is missing: pip install "keras>=3.12.4,!=3.13.*,<4"'
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < (3, 12, 4) or numbers[:2] == (3, 13) or numbers >= (4,):
        return f'Keras {version} is not supported: pip install "keras>=3.12.4,!=3.13.*,<4"'
    return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
