"""How far a run had come when its process was gone, however it went."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

#: A file that begins with anything else is not ours.
_LAYOUT = struct.Struct("<8sq")
_MAGIC = b"KSCmark1"


class ProgressMark:
    """A number in a small file that is mapped into memory: writing it costs no system call.

    It outlives a process that is killed, though not a power cut (it is not synced); it tells how
    much is repeated, and nothing depends on it. Where it cannot be kept, nothing is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None

    def read(self) -> int | None:
        """What was written last, by this process or one before it."""
        try:
            magic, steps = _LAYOUT.unpack(self._path.read_bytes())
        except (OSError, struct.error):
            return None
        return steps if magic == _MAGIC and steps >= 0 else None

    def open(self) -> None:
        """Write from now on."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path, flags, 0o666)
            try:
                os.ftruncate(descriptor, _LAYOUT.size)
                self._memory = mmap.mmap(descriptor, _LAYOUT.size)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            self._memory = None

    def write(self, steps: int) -> None:
        if self._memory is not None:
            _LAYOUT.pack_into(self._memory, 0, _MAGIC, steps)

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
