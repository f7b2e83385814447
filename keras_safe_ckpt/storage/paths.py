"""Which paths may be written, and directories that survive a power cut."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
from pathlib import Path

from keras_safe_ckpt.errors import CheckpointWriteError, UnsafePathError

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

#: Of a file, on any file system in use.
_MOST_NAME_BYTES = 255
#: Some network file systems cannot sync a directory and say so with these.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path with its directory resolved; the last component is not followed.

    Symbolic links on the way are the user's own layout and fine. One at the end would send the
    bytes elsewhere and is refused by `refuse_unsafe_target`.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"Expected a path of type str. Received: {path!r}")
    if "\0" in text:
        raise UnsafePathError(text, "it contains a NUL character")
    if _REMOTE.match(text):
        raise UnsafePathError(
            text, "object stores have neither locks nor an atomic rename; use a file system"
        )
    parent, name = os.path.split(text)
    if name in ("", ".", ".."):
        return Path(os.path.realpath(text))
    return Path(os.path.realpath(parent or "."), name)


def open_regular(path: Path) -> io.FileIO:
    """For reading, without a buffer; `OSError` for what is no file: a pipe would be waited for."""
    file = open(path, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def refuse_unsafe_target(path: Path) -> None:
    """Raise unless ``path`` is free or a regular file, which a rename may replace."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointWriteError(path, error) from error
    if not stat.S_ISREG(mode):
        raise UnsafePathError(path, _no_file(mode))


def why_passed_over(path: Path) -> str:
    """Why what has the name of a checkpoint is none, in words; nothing if there is no need to say.

    A link to a file beside it is another name of what is found by its own.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"it cannot be looked at ({error.strerror})"
    if stat.S_ISLNK(mode):
        file = os.path.realpath(path)
        if os.path.dirname(file) == os.path.realpath(path.parent) and os.path.isfile(file):
            return ""
    return "" if stat.S_ISREG(mode) else _no_file(mode)


def _no_file(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "it is a symbolic link"
    if stat.S_ISDIR(mode):
        return "it is a directory, and a file was expected"
    return "it is not a regular file"


def closed_as(*paths: Path) -> int:
    """The mode for a new file that holds what these hold, or replaces them; less the umask.

    Who may not read one of them may not read the new one either, nor while it is on its way. Its
    owner always may: a file that nobody can write to could not be gone on with.
    """
    mode = 0o666
    for path in paths:
        try:
            mode &= os.lstat(path).st_mode | 0o600
        except FileNotFoundError:
            continue
        except OSError:
            mode &= 0o600  # Nobody knows: it is rather closed than open to whom it was not.
    return mode


def refuse_linked_directory(path: Path) -> None:
    """Raise if ``path``, a folder that this library makes in a directory of the user's, is a link.

    On the way to that directory links are the user's own layout. In it nobody but us makes such a
    folder: who may write there could send the files of a worker, and what is deleted, elsewhere.
    """
    if os.path.islink(path):
        raise UnsafePathError(path, "it is a symbolic link, and a directory was expected")


def refuse_long_name(path: Path, longest: Path) -> None:
    """Raise if ``longest``, a file that comes to stand beside ``path``, cannot have its name."""
    size = len(os.fsencode(path.name))
    room = _MOST_NAME_BYTES - (len(os.fsencode(longest.name)) - size)
    if size > room:
        raise UnsafePathError(
            path,
            f"its name has {size} bytes, and more than {room} leave no room for the names of the "
            "files beside it",
        )


def refuse_unsafe_name(name: str, directory: Path) -> None:
    """Raise unless ``name`` is the plain name of a file in ``directory``."""
    shown = os.path.join(directory, name.replace("\0", "\\0"))
    if "\0" in name:
        raise UnsafePathError(shown, "the name contains a NUL character")
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        raise UnsafePathError(
            shown, f"expected the name of a file without any directory, received {name!r}"
        )
    if name.startswith("."):
        raise UnsafePathError(shown, "names with a leading dot are kept for lock and temp files")


def let_go(descriptor: int) -> None:
    """Close what was only read, or is synced: no byte depends on what the system says to that.

    Whatever it says, the descriptor is gone. On a network an error of before may come up here, and
    must not make a file that is in place look like one that is not.
    """
    with contextlib.suppress(OSError):
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable; without it a rename may come undone."""
    if os.name == "nt":  # Windows cannot open a directory; its renames are journaled.
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        let_go(descriptor)


def make_directory(directory: Path) -> None:
    """Create ``directory`` and what is missing above it, each one durable in its parent."""
    missing = []
    current = directory
    try:
        while not current.exists():
            missing.append(current)
            current = current.parent
        for path in reversed(missing):
            # Another worker may create it at the same moment: that is as good as ours.
            path.mkdir(exist_ok=True)
            sync_directory(path.parent)
        is_directory = directory.is_dir()
    except OSError as error:
        raise CheckpointWriteError(directory, error) from error
    if not is_directory:
        raise UnsafePathError(directory, "it is a file, and a directory was expected")
