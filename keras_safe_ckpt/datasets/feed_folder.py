"""``.NAME.feeds``: where the feeders of a file and the process that owns it meet."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_safe_ckpt.errors import CheckpointWriteError, UnsafePathError
from keras_safe_ckpt.storage.atomic import remove_tree, write_atomically
from keras_safe_ckpt.storage.error_facts import from_facts
from keras_safe_ckpt.storage.paths import refuse_linked_directory, sync_directory

_NO_REPLY: dict[str, Any] = {"committed": 0, "asked": {}}


@dataclass(frozen=True)
class FeedFolder:
    """The streams of the feeders, a reply to each, and what the owner says of itself."""

    target: Path

    @property
    def path(self) -> Path:
        return self.target.with_name(f".{self.target.name}.feeds")

    # What the feeders ask.

    def refuse_closed(self) -> None:
        if self.is_closed():
            self.raise_closed()

    def is_closed(self) -> bool:
        return not os.path.exists(self.path) or os.path.exists(self.path / "closed")

    def raise_closed(self, more: str = "") -> None:
        raise CheckpointWriteError(self.target, f"its CentralH5Writer is closed{more}")

    def raise_failure(self) -> None:
        """What keeps the owner from working, if it has given up."""
        failure = self._read("failed")
        if failure:
            raise from_facts(failure)

    def reply(self, stream: str) -> dict[str, Any]:
        return self._read(f"{stream}.reply") or _NO_REPLY

    def described(self) -> str:
        """The state of the owner, in words."""
        trouble = self._read("trouble")
        return str(trouble["message"]) if trouble else "is its CentralH5Writer still there?"

    # What the owner says.

    def answer(self, stream: str, reply: dict[str, Any]) -> None:
        self.write(f"{stream}.reply", reply)

    def write(self, name: str, facts: dict[str, Any]) -> None:
        """In one piece, though not durable: after a power cut nobody waits for it any more."""
        temporary = self.path / f"{name}.new"
        try:
            # Of one that was killed; or a link, which must not send the bytes elsewhere.
            self.remove(temporary.name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps(facts))
            os.replace(temporary, self.path / name)
        except OSError as error:
            raise CheckpointWriteError(self.target, error) from error

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.path / name).unlink()

    def sync(self) -> None:
        """What was removed by now does not come back after a power cut."""
        try:
            sync_directory(self.path)
        except OSError as error:
            raise CheckpointWriteError(self.target, error) from error

    def make(self) -> None:
        """Only our own user can write into it: what is in there is believed."""
        try:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            status = os.lstat(self.path)
        except OSError as error:
            raise CheckpointWriteError(self.target, error) from error
        refuse_linked_directory(self.path)
        if not stat.S_ISDIR(status.st_mode):
            raise UnsafePathError(self.path, "it is a file, and a directory was expected")
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            raise UnsafePathError(self.path, "it belongs to another user")
        if status.st_mode & 0o022:
            raise UnsafePathError(self.path, "other users can write into it")

    def say_drained(self) -> None:
        """Durable: without it what is in the file now would be read once more."""
        write_atomically(self.path / "drained", b"{}")

    def clear(self) -> None:
        """All of it at one moment: half of it would look like something new."""
        self.sweep()
        try:
            os.replace(self.path, self._past)
            # Before anything of it goes: after a power cut half of it could else be back.
            sync_directory(self.path.parent)
        except FileNotFoundError:
            pass  # The one before was killed when it had done this.
        except OSError as error:
            raise CheckpointWriteError(self.target, error) from error
        self.sweep()

    def remove_if_empty(self) -> None:
        """No owner has come of it, and feeders would wait for one as long as it is there."""
        with contextlib.suppress(OSError):  # There are streams in it, which the next one takes.
            os.rmdir(self.path)

    def sweep(self) -> None:
        """What `clear` has left when it was killed."""
        if self._past.is_symlink():  # Nothing of ours, and a folder could not take its name.
            self._past.unlink()
        remove_tree(self._past)

    @property
    def _past(self) -> Path:
        return self.path.with_name(f"{self.path.name}.past")

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            # What a link leads to was not said by the owner: what it says takes the link's place.
            found = None if path.is_symlink() else json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if found is None else dict(found)
