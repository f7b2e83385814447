"""Whether a peer syncs what it saves, seen by `strace` where that is installed and permitted."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

CALLS = "fsync,fdatasync,rename,renameat,renameat2"
_SYNC = re.compile(r"\bf(?:data)?sync\(\d+<([^>]*)>")
_RENAME = re.compile(r'\brename\w*\(.*"([^"]+)"[^"]*$')
ATTACH_SECONDS = 20.0

YES, FILES, NO, UNKNOWN = "yes", "its files, not the rename", "no", "not known: no strace"


@contextlib.contextmanager
def traced(pid: int, log: Path) -> Iterator[bool]:
    """While the block runs, the calls of a process and all its threads are written to ``log``."""
    program = shutil.which("strace")
    if program is None:
        yield False
        return
    command = [program, "-f", "-y", "-s", "4096", "-e", f"trace={CALLS}", "-p", str(pid)]
    with open(log.with_suffix(".said"), "w") as said:
        tracer = subprocess.Popen([*command, "-o", str(log)], stderr=said)
    deadline = time.monotonic() + ATTACH_SECONDS
    while "attached" not in log.with_suffix(".said").read_text() and tracer.poll() is None:
        if time.monotonic() > deadline:
            tracer.kill()
        time.sleep(0.005)
    try:
        yield tracer.poll() is None
        with contextlib.suppress(subprocess.TimeoutExpired):
            tracer.wait(ATTACH_SECONDS)  # It ends with the process.
    finally:
        tracer.kill()
        tracer.wait()


def judged(log: Path, folder: Path) -> str:
    """Were files in ``folder`` synced, and the directory after the last rename into it?"""
    synced = renamed_into = None
    for line in log.read_text(errors="replace").splitlines():
        if (sync := _SYNC.search(line)) and Path(sync[1]).is_relative_to(folder):
            synced = sync[1]
            if renamed_into == sync[1]:
                renamed_into = None
        rename = _RENAME.search(line)
        if rename and Path(rename[1]).is_relative_to(folder):
            renamed_into = str(Path(rename[1]).parent)
    if synced is None:
        return NO
    return YES if renamed_into is None else FILES
