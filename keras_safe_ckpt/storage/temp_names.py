"""Names of temporary files that tell who is writing them, so that orphans can be swept.

A name carries the boot id of the kernel (rather than a host name, which clones and containers
share), the namespace in which the process id means something (each container has its own), the
process id, and the time at which that process started (process 7 of a restarted container is not
process 7 of the one before).
"""

from __future__ import annotations

import functools
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

_PATTERN = re.compile(
    r"^\.(?P<stem>.+)\.(?P<boot>[0-9a-f]{8})-(?P<space>\d+)-(?P<pid>\d+)-(?P<start>\d+)"
    r"-[0-9a-f]{12}\.kscktmp$"
)
#: Room for the owner's part within the 255 bytes that file systems allow.
LONGEST_STEM_BYTES = 160


class TempOwner(NamedTuple):
    """Who created a temporary file."""

    boot: str
    space: int
    pid: int
    start: int

    def is_on_this_machine(self) -> bool:
        return self.boot == _boot_id()

    def is_running(self) -> bool:
        """Whether that very process still runs, as far as we can see it."""
        same_space = self.is_on_this_machine() and self.space == _pid_namespace()
        return same_space and _start_time(self.pid) == self.start

    def has_ended(self) -> bool:
        """Whether that process has ended for sure; of one elsewhere nobody here can tell."""
        same_space = self.is_on_this_machine() and self.space == _pid_namespace()
        return same_space and _start_time(self.pid) != self.start


def new_temp_name(target_name: str) -> str:
    """A name that nobody else has, for the file that is to become ``target_name``."""
    stem = target_name.encode(errors="surrogateescape")[:LONGEST_STEM_BYTES]
    pid = os.getpid()
    process = f"{_pid_namespace()}-{pid}-{_start_time(pid) or 0}"
    owner = f"{_boot_id()}-{process}-{secrets.token_hex(6)}"
    return f".{stem.decode(errors='ignore')}.{owner}.kscktmp"


def owner_of(name: str) -> TempOwner | None:
    """The owner in the name of a temporary file of ours; None for any other file."""
    match = _PATTERN.match(name)
    if match is None:
        return None
    return TempOwner(match["boot"], *(int(match[key]) for key in ("space", "pid", "start")))


def target_of(name: str) -> str | None:
    """What a temporary file was to become, if its name is not too long; None for any other."""
    match = _PATTERN.match(name)
    return None if match is None else match["stem"]


@functools.cache
def _boot_id() -> str:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        return text.replace("-", "")[:8]
    except OSError:
        # No such file outside Linux: the machine's node number is the next best thing.
        import uuid

        return f"{uuid.getnode() & 0xFFFFFFFF:08x}"


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0  # No namespaces: there is only one.


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of ``pid``; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return None
        return _start_time_without_proc(pid)
    except ProcessLookupError:
        return None
    # The command name in parentheses may contain blanks; field 22 counts from after it.
    return int(text.rpartition(")")[2].split()[19])


def _start_time_without_proc(pid: int) -> int | None:
    if os.name == "nt":
        return 0  # os.kill would end the process there; the file lock alone decides.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # Alive, and somebody else's.
    return 0
