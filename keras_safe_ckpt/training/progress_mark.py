"""How far a run had come when its process was gone, however it went."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from keras_safe_ckpt.storage.paths import open_regular

#: A file that begins with anything else is not ours.
_LAYOUT = struct.Struct("<8sq")
_MAGIC = b"KSCmark1"


class ProgressMark:
    """A number in a small file, which outlives a process that is killed.

    Not a power cut: it is not synced. It tells how much is repeated, and nothing depends on it:
    where it cannot be kept, nothing is. (Not mapped into memory, which would be quicker: on a full
    disk, or when somebody truncates the file, the process would be killed by SIGBUS.)
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def read(self) -> int | None:
        """What was written last, by this process or one before it."""
        try:
            with open_regular(self._path) as file:
                magic, steps = _LAYOUT.unpack(file.read(_LAYOUT.size + 1))
        except (OSError, struct.error):
            return None
        return steps if magic == _MAGIC and steps >= 0 else None

    def open(self) -> None:
        """Write from now on."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._descriptor = os.open(self._path, flags, 0o666)
        except OSError:
            self._descriptor = None

    def write(self, steps: int) -> None:
        if self._descriptor is None:
            return
        try:
            os.pwrite(self._descriptor, _LAYOUT.pack(_MAGIC, steps), 0)
        except OSError:
            self.close()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
