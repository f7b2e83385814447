"""What a directory's file system can do, found out by doing it."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keras_safe_ckpt.errors import SafeCheckpointError
from keras_safe_ckpt.storage.atomic import StagedFile, scratch_directory, write_atomically
from keras_safe_ckpt.storage.locks import LockManager
from keras_safe_ckpt.storage.paths import sync_directory

_RENAMES = 100
_SMALL_SYNCS = 5
_BLOCK_BYTES = 4 << 20
#: Enough to tell a fast disk from a slow one, and short enough to wait for.
_WRITE_SECONDS, _MOST_WRITE_BYTES = 0.1, 64 << 20

#: Run by another process, since a file system may well let two of one process have one lock.
_TRY_LOCK = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(10)
"""
_REFUSED = 10


@dataclass(frozen=True)
class Mount:
    """Where a directory is: the type of the file system, and how it is mounted."""

    type: str
    point: str
    source: str
    options: str


def mount_of(directory: Path, table: str = "/proc/self/mountinfo") -> Mount | None:
    """The file system of a directory; None where the system does not tell."""
    try:
        device = os.stat(directory).st_dev
        text = Path(table).read_text(errors="replace")
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = None
    for line in text.splitlines():
        # 36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/root rw,errors=continue
        fields, _, rest = line.partition(" - ")
        kind, source, options = [*rest.split(" "), "", "", ""][:3]
        parts = fields.split(" ")
        if len(parts) > 5 and parts[2] == wanted:
            point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), parts[4])
            mount = Mount(kind, point, source, f"{parts[5]},{options}")
            is_above = Path(point) in (directory, *directory.parents)
            if found is None or (is_above and len(point) >= len(found.point)):
                found = mount
    return found


@contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """A folder in ``directory`` that is gone afterwards, also after a crash (by the next save)."""
    with scratch_directory(directory, "doctor") as folder:
        yield folder


def why_locks_fail(folder: Path) -> str | None:
    """None if a lock keeps out other descriptors and other processes."""
    locks = LockManager(timeout=5)
    try:
        locks.check(folder)
        with locks.exclusive(folder / "probe") as held:
            code = subprocess.run(
                [sys.executable, "-S", "-E", "-c", _TRY_LOCK, folder / ".probe.lock"],
                check=False,
                capture_output=True,
                timeout=60,  # A network's file system may never answer.
            ).returncode
            held.ensure_held()
    except SafeCheckpointError as error:
        return str(error.facts.get("reason") or error)
    except subprocess.TimeoutExpired:
        return "another process that tries it hangs"
    if code == _REFUSED:
        return None
    return (
        "another process could take a lock that is held here"
        if code == 0
        else f"another process could not try it (exit code {code})"
    )


def why_renames_fail(folder: Path) -> str | None:
    """None if whoever reads a file while it is replaced sees the old or the new one, whole."""
    target = folder / "target"
    contents = [bytes([letter]) * 8192 for letter in (65, 66)]
    target.write_bytes(contents[0])
    failure: list[str] = []

    def replace() -> None:
        try:
            for number in range(_RENAMES):
                temporary = folder / f"temporary-{number}"
                temporary.write_bytes(contents[number % 2])
                os.replace(temporary, target)
        except OSError as error:
            failure.append(f"a file cannot be replaced ({error.strerror})")

    writer = threading.Thread(target=replace, daemon=True)
    writer.start()
    while writer.is_alive():
        try:
            if target.read_bytes() not in contents:
                failure.append("a reader saw neither the old nor the new file")
        except FileNotFoundError:
            failure.append("for a moment the file was not there")
        if failure:
            break
    writer.join()
    return failure[0] if failure else None


def why_no_links(folder: Path) -> str | None:
    """None if a file can have two names, by which the best one is set aside."""
    source = folder / "linked"
    source.write_bytes(b"x")
    try:
        os.link(source, folder / "link")
    except OSError as error:
        return str(error.strerror)
    return None


@dataclass(frozen=True)
class Speed:
    """Of a small durable file, and of a large one while it is written and synced (0: no room)."""

    small_file_seconds: float
    bytes_per_second: float


def measure_speed(folder: Path) -> Speed:
    """Takes some tenths of a second; `SafeCheckpointError` or `OSError` if a sync fails."""
    took = []
    for number in range(_SMALL_SYNCS):
        began = time.perf_counter()
        write_atomically(folder / f"small-{number}", b"x" * 4096)
        took.append(time.perf_counter() - began)
    sync_directory(folder)
    status = os.statvfs(folder)
    # What little room there is belongs to whoever trains here.
    most = min(_MOST_WRITE_BYTES, status.f_bavail * status.f_frsize // 4)
    if most < _BLOCK_BYTES:
        return Speed(statistics.median(took), 0.0)  # So little tells nothing of more.
    block = os.urandom(_BLOCK_BYTES)  # One that compresses must not look fast.
    began = time.perf_counter()
    with StagedFile(folder / "large") as staged:
        while staged.size < most and time.perf_counter() - began < _WRITE_SECONDS:
            staged.write(block)
        staged.sync()
        staged.commit()
        rate = staged.size / (time.perf_counter() - began)
    return Speed(statistics.median(took), rate)
