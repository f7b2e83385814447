"""Who holds a lock: a small record, read only by whoever waited in vain.

Nothing but an error message depends on it, so everything here gives way: a
record that cannot be written or understood costs the message its name, never
the lock.
"""

from __future__ import annotations

import json
import os
import time
from typing import NamedTuple

UNKNOWN_HOLDER = "an unknown process"

#: A record has some 150 bytes. Whatever else was put into the file is not read whole.
RECORD_LIMIT = 4096


class LockOwner(NamedTuple):
    """One holder, as it described itself.

    Example::

        >>> LockOwner("node1", 123, "0", "2026-01-01T00:00:00Z", "exclusive").describe()
        'worker 0, pid 123 on host node1, since 2026-01-01T00:00:00Z (exclusive)'
    """

    host: str
    pid: int
    worker: str | None
    since: str
    mode: str

    def describe(self) -> str:
        who = "" if self.worker is None else f"worker {self.worker}, "
        return f"{who}pid {self.pid} on host {self.host}, since {self.since} ({self.mode})"


class OwnerStamp:
    """Makes the records of one manager; what does not change is encoded only once.

    Example::

        >>> parse_owner(OwnerStamp("0").record("shared")).worker
        '0'
    """

    __slots__ = ("_fixed",)

    def __init__(self, worker: str | None) -> None:
        host = json.dumps(os.uname().nodename)
        self._fixed = f'"host": {host}, "worker": {json.dumps(worker)}'

    def record(self, mode: str) -> bytes:
        # The pid is asked for each time: a fork changes it.
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = f'{{{self._fixed}, "pid": {os.getpid()}, "mode": "{mode}", "since": "{since}"}}\n'
        return text.encode()


def parse_owner(data: bytes | str) -> LockOwner | None:
    """The owner in a record, or None for anything that is not a record."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    owner = LockOwner._make(found.get(field) for field in LockOwner._fields)
    texts = [owner.host, owner.since, owner.mode, owner.worker or "-"]
    # It ends up in a message: no control characters from a file that anybody can write.
    readable = all(isinstance(text, str) and text and text.isprintable() for text in texts)
    return owner if readable and type(owner.pid) is int else None


def describe_owner_of(fd: int) -> str:
    """The holder of the lock file behind a descriptor, in words.

    The record names the last process that came in. Of several readers that one
    may have left already; then the kernel knows better, on Linux and on this host.
    """
    try:
        owner = parse_owner(os.pread(fd, RECORD_LIMIT, 0))
    except OSError:
        owner = None
    host = os.uname().nodename
    if owner is not None and owner.host != host:
        return owner.describe()  # the kernel lists only what is locked from here
    holders = flock_holders(fd)
    if holders and (owner is None or owner.pid not in holders):
        pids = ", ".join(f"pid {pid}" for pid in sorted(holders))
        mode = ", ".join(sorted(set(holders.values())))
        return f"{pids} on host {host} ({mode})"
    return UNKNOWN_HOLDER if owner is None else owner.describe()


def flock_holders(fd: int) -> dict[int, str]:
    """Pid and mode of each holder that /proc/locks knows; empty where it cannot tell."""
    try:
        status = os.fstat(fd)
        with open("/proc/locks", encoding="ascii", errors="replace") as table:
            lines = table.read().splitlines()
    except OSError:
        return {}
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    wanted = f"{device}:{status.st_ino}"
    holders = {}
    for line in lines:
        # "1: FLOCK  ADVISORY  WRITE 123 fd:00:456 0 EOF"; a waiter has "->" after the number.
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted:
            holders[int(fields[4])] = "exclusive" if fields[3] == "WRITE" else "shared"
    return holders
