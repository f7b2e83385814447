"""Every error this library raises on purpose.

::

    SafeCheckpointError                              (Exception)
      UnsafePathError             (ValueError)        path, reason
      LockTimeoutError            (TimeoutError)      path, holder, waited
      LockLostError               (RuntimeError)      path, reason
      StaleHolderError            (RuntimeError)      path, token, newest
      LocksUnsupportedError       (OSError)           path, reason
      LockServerUnreachableError  (ConnectionError)   server, reason
      LockServerRefusedError      (PermissionError)   server, reason
      CheckpointNotFoundError     (FileNotFoundError) path, reason
      CorruptCheckpointError      (ValueError)        path, reason
        CorruptRecordError        (ValueError)        path, record, offset, reason
      UnreadableCheckpointError   (OSError)           path, reason
      IncompatibleCheckpointError (ValueError)        path, differences
      CheckpointWriteError        (OSError)           path, step, cause
      MergeConflictError          (ValueError)        dataset, files, reason
      ClusterConfigError          (ValueError)        key, reason
      AgreementError              (RuntimeError)      missing, reason

Each is also the built-in exception that a caller would expect, carries its
facts as attributes, and survives pickling, so that a worker process can hand
it to its parent.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any


class SafeCheckpointError(Exception):
    """The root of the tree: ``except SafeCheckpointError`` catches all of it.

    The ``facts`` are attributes as well; ``message`` is what is shown.

    Example::

        try:
            store.load(model)
        except SafeCheckpointError as error:
            print(type(error).__name__, error.facts)
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        # OSError would print its (missing) errno and file name instead.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.facts))


def _rebuild(
    kind: type[SafeCheckpointError], message: str, facts: dict[str, Any]
) -> SafeCheckpointError:
    error = kind.__new__(kind)
    SafeCheckpointError.__init__(error, message, **facts)
    return error


class UnsafePathError(SafeCheckpointError, ValueError):
    """A path that is never written to: a symbolic link, ``..``, a NUL byte, a directory.

    ``path`` is the path, ``reason`` says what is wrong with it.
    """

    path: str
    reason: str

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        path = os.fspath(path)
        super().__init__(f"Refused to use {path!r}: {reason}.", path=path, reason=reason)


class LockTimeoutError(SafeCheckpointError, TimeoutError):
    """Somebody else held the lock for the whole time that we were willing to wait.

    ``path`` is what was to be locked, ``holder`` says who has it (host, pid, worker, since when),
    and ``waited`` is in seconds.
    """

    path: str
    holder: str
    waited: float

    def __init__(self, path: str | os.PathLike[str], holder: str, waited: float) -> None:
        path = os.fspath(path)
        super().__init__(
            f"Waited {waited:.1f} s for the lock on {path!r}, held by {holder}. "
            "Wait longer with timeout=..., or stop the holder if it hangs.",
            path=path,
            holder=holder,
            waited=waited,
        )


class LockLostError(SafeCheckpointError, RuntimeError):
    """A lock that was held is not held any more; nothing was committed under it.

    ``path`` is what was locked, ``reason`` says how the lock was lost.
    """

    path: str
    reason: str

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        path = os.fspath(path)
        super().__init__(
            f"Lost the lock on {path!r}: {reason}. Nothing was committed.",
            path=path,
            reason=reason,
        )


class StaleHolderError(SafeCheckpointError, RuntimeError):
    """Another process was granted the lock while this one believed to hold it.

    ``path`` is what was locked, by ``token``; ``newest`` is that of the other process.
    """

    path: str
    token: int
    newest: int

    def __init__(self, path: str | os.PathLike[str], token: int, newest: int) -> None:
        path = os.fspath(path)
        super().__init__(
            f"This process holds the lock on {path!r} with fencing token {token}, but token "
            f"{newest} has been given out since (was the process paused?). Nothing was committed.",
            path=path,
            token=token,
            newest=newest,
        )


class LocksUnsupportedError(SafeCheckpointError, OSError):
    """Nothing can be locked here, so nothing can be shared safely.

    ``path`` is the directory or file, ``reason`` what its file system says or does.
    """

    path: str
    reason: str

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        path = os.fspath(path)
        super().__init__(
            f"Files at {path!r} cannot be locked: {reason}. Use a directory on a file system "
            "with working locks, or locks=RedisLocks(...).",
            path=path,
            reason=reason,
        )


class LockServerUnreachableError(SafeCheckpointError, ConnectionError):
    """The lock server did not answer, or not as a lock server should.

    ``server`` is its address without the password, ``reason`` what went wrong.
    """

    server: str
    reason: str

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(
            f"The lock server {server} cannot be used: {reason}. "
            "Check that it runs and that host and port are right.",
            server=server,
            reason=reason,
        )


class LockServerRefusedError(SafeCheckpointError, PermissionError):
    """The lock server answered, and does not let us in.

    ``server`` is its address without the password, ``reason`` its answer.
    """

    server: str
    reason: str

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(
            f"The lock server {server} refused the credentials: {reason}. "
            "Check user name, password and the permissions of that user.",
            server=server,
            reason=reason,
        )


class CheckpointNotFoundError(SafeCheckpointError, FileNotFoundError):
    """There is no (usable) checkpoint where one was asked for.

    ``path`` is where it was looked for, ``reason`` says what was found; ``what`` names something
    else that is missing.
    """

    path: str
    reason: str

    def __init__(
        self,
        path: str | os.PathLike[str],
        reason: str = "there is no such file",
        *,
        what: str = "checkpoint",
    ) -> None:
        path = os.fspath(path)
        super().__init__(f"No {what} at {path!r}: {reason}.", path=path, reason=reason)


class CorruptCheckpointError(SafeCheckpointError, ValueError):
    """The file is damaged, or is not what it says.

    ``path`` is the file, ``reason`` what is wrong with it.
    """

    path: str
    reason: str

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        path = os.fspath(path)
        super().__init__(
            f"The checkpoint {path!r} cannot be used: {reason}.", path=path, reason=reason
        )


class CorruptRecordError(CorruptCheckpointError):
    """A record of a TFRecord file is damaged, or records are missing.

    ``record`` is its number in ``path``, from 0, ``offset`` the byte where it begins, ``reason``
    what is wrong there.
    """

    record: int
    offset: int

    def __init__(self, path: str | os.PathLike[str], record: int, offset: int, reason: str) -> None:
        path = os.fspath(path)
        SafeCheckpointError.__init__(
            self,
            f"The file {path!r} is damaged at record {record:,} (counted from 0), offset "
            f"{offset:,}: {reason}.",
            path=path,
            record=record,
            offset=offset,
            reason=reason,
        )


class UnreadableCheckpointError(SafeCheckpointError, OSError):
    """The file could not be read now; what is in it may be fine, so it is never replaced.

    ``path`` is the file, ``cause`` the error of the system, which ``reason`` says in words.
    """

    path: str
    reason: str

    def __init__(self, path: str | os.PathLike[str], cause: OSError) -> None:
        path = os.fspath(path)
        reason = _describe(cause)
        super().__init__(
            f"The checkpoint {path!r} cannot be read: {reason}.",
            path=path,
            reason=reason,
            errno=cause.errno,
        )


class IncompatibleCheckpointError(SafeCheckpointError, ValueError):
    """The file is sound but does not fit this model or this version; nothing was changed.

    ``path`` is the file; ``differences`` are texts, one for each array that does not fit.
    """

    path: str
    differences: tuple[str, ...]

    def __init__(self, path: str | os.PathLike[str], differences: Sequence[str]) -> None:
        path = os.fspath(path)
        shown = "\n  ".join(differences[:10])
        more = f"\n  ... and {len(differences) - 10} more" if len(differences) > 10 else ""
        super().__init__(
            f"The checkpoint {path!r} does not fit; nothing was changed:\n  {shown}{more}",
            path=path,
            differences=tuple(differences),
        )


#: What to do about the errors that disks really give.
_ADVICE = {
    errno.ENOSPC: "the disk is full or has no inodes left; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space or raise the quota",
    errno.EROFS: "the file system is mounted read-only",
    errno.EACCES: "permission denied; check the owner and mode of the directory",
    errno.EPERM: "not permitted; check the attributes of the directory",
    errno.EFBIG: "larger than the file size limit (ulimit -f) or than the file system allows",
    errno.EIO: "the device reported an input/output error; check the disk",
    errno.EXDEV: "temporary file and target are on different file systems",
    errno.ENOENT: "the directory, or the temporary file in it, was removed meanwhile",
    errno.EMFILE: "too many open files; close some, or raise the limit (ulimit -n)",
    errno.ENAMETOOLONG: "the file name is too long for this file system",
}


class CheckpointWriteError(SafeCheckpointError, OSError):
    """A save failed; whatever was there before is untouched.

    ``path`` is the file, ``cause`` what the system said and what to do about it, ``step`` that of
    the checkpoint.

    With ``published=True`` the new file took the place of the old one, whole, and only the
    directory could not be synced: a power cut now may bring the old one back.
    """

    path: str
    step: int | None
    cause: str
    published: bool

    def __init__(
        self,
        path: str | os.PathLike[str],
        cause: str | OSError,
        step: int | None = None,
        *,
        published: bool = False,
    ) -> None:
        path = os.fspath(path)
        number = None
        if isinstance(cause, OSError):
            number = cause.errno
            cause = _describe(cause)
        at = "" if step is None else f" (step {step})"
        outcome = (
            "The new file is in place, but a power cut now may bring the old one back."
            if published
            else "What was there before is unchanged."
        )
        super().__init__(
            f"Could not write {path!r}{at}: {cause}. {outcome}",
            path=path,
            cause=cause,
            step=step,
            published=published,
            errno=number,
        )


def _describe(error: OSError) -> str:
    text = error.strerror or str(error)
    if error.errno is None:
        return text
    name = errno.errorcode.get(error.errno, str(error.errno))
    advice = _ADVICE.get(error.errno)
    return f"{advice} ({name}: {text})" if advice else f"{text} ({name})"


class MergeConflictError(SafeCheckpointError, ValueError):
    """Files that were to become one do not fit together; nothing was written.

    ``dataset`` is the first one with a conflict, ``files`` are those that disagree, ``reason`` says
    how.
    """

    dataset: str
    files: tuple[str, ...]
    reason: str

    def __init__(self, dataset: str, files: Sequence[str], reason: str) -> None:
        super().__init__(
            f"Cannot merge {dataset!r} from {', '.join(map(repr, files))}: {reason}. "
            "Nothing was written.",
            dataset=dataset,
            files=tuple(files),
            reason=reason,
        )


class ClusterConfigError(SafeCheckpointError, ValueError):
    """The description of the cluster (TF_CONFIG, SLURM_*, ...) is wrong.

    ``key`` is the variable, or the key within it, ``reason`` what was expected and received.
    """

    key: str
    reason: str

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"Wrong cluster configuration in {key}: {reason}.", key=key, reason=reason)


class AgreementError(SafeCheckpointError, RuntimeError):
    """The workers of a cluster cannot go on together: one failed, died or did not answer.

    ``missing`` are the workers (such as ``"worker 1"``) that did, ``reason`` says what is known.
    """

    missing: tuple[str, ...]
    reason: str

    def __init__(self, missing: Sequence[str], reason: str) -> None:
        unsaid = [task for task in missing if task not in reason]
        who = f" Missing: {', '.join(unsaid)}." if unsaid else ""
        super().__init__(
            f"The workers cannot go on together: {reason}.{who}",
            missing=tuple(missing),
            reason=reason,
        )
