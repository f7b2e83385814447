"""Locks on a Redis server: ``RedisLocks``, for file systems that do not lock.

A lock is a live subscription (``portalocker.RedisLock``): it ends with the
connection of its holder, not with a lease. A holder that is paused for long is
taken for dead and loses it without noticing, so each grant draws a number that
only grows (the fence), and ``ensure_held`` asks the server whether a newer one
was given out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import quote

from portalocker import LockFlags
from portalocker.exceptions import AlreadyLocked, LockException

from keras_safe_ckpt.errors import (
    LockLostError,
    LockServerUnreachableError,
    LockTimeoutError,
    StaleHolderError,
)
from keras_safe_ckpt.storage.lock_backend import HeldLock, Hold, checked_path, checked_timeout
from keras_safe_ckpt.storage.lock_owner import OwnerStamp
from keras_safe_ckpt.storage.lock_server import Fence, LockServer, OwnerTable

#: The subscription is read this often; leaving the lock takes as long.
_READ_SECONDS = 0.005
#: A waiter asks again this often.
_RETRY_SECONDS = 0.05
#: How long whoever waited in vain asks around for the name of the holder.
_WHO_SECONDS = 0.5
#: Its own generator: drawing from the global one would change the user's shuffling.
_JITTER = random.Random()

# A forked child shares the sockets of its parent: as long as the child lives the
# server would not see the parent die. So the child closes its copies. Adding to
# the set and forking need no mutex: the set is only read in the child, alone.
_held: weakref.WeakSet[RedisLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for hold in list(_held):
        hold.close_inherited_socket()


os.register_at_fork(after_in_child=_after_fork_in_child)


@functools.cache
def _lock_class() -> Any:
    import portalocker.redis

    class QuietRedisLock(portalocker.redis.RedisLock):
        # portalocker draws its jitter from the global random generator, which
        # would change the user's shuffling whenever a lock was contended.
        def _timeout_generator(
            self, timeout: float | None, check_interval: float | None
        ) -> Iterator[int]:
            deadline = time.monotonic() + (timeout or 0.0)
            interval = check_interval or self.thread_sleep_time
            yield 0
            while (remaining := deadline - time.monotonic()) > 0:
                time.sleep(min(remaining, interval * _JITTER.uniform(0.5, 1.5)))
                yield 0

    return QuietRedisLock


class RedisLock:
    """One acquisition of one lock.

    Its stages: connect (with errors that tell down from refused), seed the
    fence, subscribe and win, read the fence, sign (the owner record).
    """

    _fence: Fence
    _owners: OwnerTable

    def __init__(self, locks: RedisLocks, path: str, flags: LockFlags, timeout: float) -> None:
        # Quoted, since the path becomes part of a client name, which Redis wants without
        # blanks. Prefix and path are all that hosts must agree on.
        name = quote(os.fsencode(path))
        self.path = path
        self.token = 0
        self._locks = locks
        self._flags = flags
        self._timeout = timeout
        self._channel = f"{locks.prefix}:{name}"
        self._owner_key = f"{locks.prefix}:owner:{name}"
        self._client: Any = None
        self._lock: Any = None
        self._pid = -1

    def acquire(self) -> None:
        """Take the lock; what is left of it after an error, `release` gives back."""
        start = time.monotonic()
        self._pid = os.getpid()
        self.token = 0
        server = self._locks.server
        self._client = server.connect()
        with server.errors_explained():
            lock = self._new_lock()
            self._fence = Fence(self._client, lock.fence_key)
            self._owners = OwnerTable(self._client, self._owner_key)
            self._lock = lock
            _held.add(self)
            floor = self._fence.seed()
            try:
                self._lock.acquire(timeout=self._timeout)
            except AlreadyLocked:
                # A server that died while we waited looks the same to portalocker.
                holder = self._describe_holders()
                raise LockTimeoutError(self.path, holder, time.monotonic() - start) from None
            except LockException as error:
                raise LockServerUnreachableError(str(server), str(error.strerror)) from None
            self.token = self._draw_token(floor)
        with server.errors_ignored():
            alone = self._flags == LockFlags.EXCLUSIVE
            record = self._locks.stamp.record("exclusive" if alone else "shared")
            self._owners.add(self._lock.holder_id, record, alone=alone)

    def _new_lock(self) -> Any:
        return _lock_class()(
            self._channel,
            self._client,
            check_interval=_RETRY_SECONDS,
            thread_sleep_time=_READ_SECONDS,
            unavailable_timeout=self._locks.unavailable_timeout,
            flags=self._flags,
            fencing=self._flags == LockFlags.EXCLUSIVE,
            # No KeyboardInterrupt in the main thread; ensure_held tells of the loss.
            interrupt_on_lost=False,
        )

    def _draw_token(self, floor: int) -> int:
        if self._flags == LockFlags.SHARED:
            # Readers draw no number, but while one of them holds the lock no writer
            # does either: a number other than this one means that it is lost.
            return self._fence.newest()
        token = int(self._lock.fence_token)
        if token <= floor:
            # The server was emptied while we waited. We hold the lock, so nobody
            # else draws a number at this moment.
            return self._fence.restart_above(floor)
        return token

    def _describe_holders(self) -> str:
        present = None  # if somebody does not answer: name all of them
        with contextlib.suppress(LockException):
            answers = self._lock.probe(timeout=_WHO_SECONDS)
            present = {answer.holder_id for answer in answers if answer.mode.value != "pending"}
        return self._owners.describe(present)

    def ensure_held(self) -> None:
        """Raise ``LockLostError`` or ``StaleHolderError`` if the lock is not ours any more."""
        if self._lock is None:
            raise LockLostError(self.path, "it was released")
        if self._pid != os.getpid():
            raise LockLostError(self.path, "it is held by the parent process, not by its fork")
        if self._lock.lost:
            raise LockLostError(self.path, "the connection to the lock server broke")
        newest = None
        with self._locks.server.errors_ignored():
            newest, subscribers = self._fence.newest_and_subscribers(self._channel)
        if newest is None:
            raise LockLostError(self.path, "the lock server does not answer")
        if newest > self.token:
            raise StaleHolderError(self.path, self.token, newest)
        if newest < self.token:
            raise LockLostError(self.path, "the lock server was emptied")
        if not subscribers:
            # Restarted with its data; our own subscription has yet to notice.
            raise LockLostError(self.path, "the lock server was restarted")

    def release(self) -> None:
        """Give everything back; ``LockLostError`` if the lock was not ours any more."""
        client, lock = self._client, self._lock
        if client is None or self._pid != os.getpid():
            self._client = self._lock = None
            return  # in a forked child all of it belongs to the parent
        newest, subscribers, lost = self.token, 0, False
        ignored = self._locks.server.errors_ignored
        try:
            if lock is not None:
                with ignored():
                    # Asked, since our own subscription may have yet to notice its end.
                    newest, subscribers = self._fence.newest_and_subscribers(self._channel)
                with ignored():
                    self._owners.remove(lock.holder_id)
                lost = True
                with ignored():
                    lock.release()
                    lost = lock.lost
        finally:
            client.close()
        _held.discard(self)
        # Not before all is done: after a Ctrl-C in here it is done once more.
        self._client = self._lock = None
        if self.token and newest > self.token:
            # Too late to prevent what was done in between, but not to say so.
            reason = f"fencing token {newest} was given out while it was held with {self.token}"
            raise LockLostError(self.path, reason)
        if not subscribers or lost:
            raise LockLostError(self.path, "the connection to the lock server broke")

    def close_inherited_socket(self) -> None:
        """Close this process's copy of the subscription; the parent keeps its own."""
        subscription = None if self._lock is None else self._lock.pubsub
        connection = None if subscription is None else subscription.connection
        if connection is not None:
            connection.disconnect()  # in another process than its own it only closes


class RedisLocks:
    """Locks on a Redis server that every host reaches, for file systems that do not lock.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://``, with user and password
            if the server wants them. One standalone server: not a cluster, where
            each node would count its own holders.
        timeout: seconds to wait for a lock unless a call says otherwise; 0 tries once.
        worker: the name of this worker, shown to whoever waits for it in vain.
        prefix: what the names of all keys and channels begin with.
        unavailable_timeout: a holder that does not answer for so many seconds
            (paused, swapping, cut off) is taken for dead when somebody else wants
            the lock; waiting may take that much longer than ``timeout``.

    The name of a lock is the absolute path as it is written, so all hosts must
    see the shared directory under the same path.

    Example::

        locks = RedisLocks("redis://:secret@lockhost:6379/0", timeout=10)
        callback = SafeModelCheckpoint("/shared/best.keras", save_best_only=True, locks=locks)
        with locks.exclusive("/shared/results.csv") as held:
            held.ensure_held()  # right before you commit anything
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        worker: str | None = None,
        prefix: str = "keras_safe_ckpt",
        unavailable_timeout: float = 5.0,
    ) -> None:
        if quote(prefix, safe=":/") != prefix or not prefix:
            raise ValueError(
                "prefix must consist of letters, digits and any of '_.-~:/'. "
                f"Received: prefix={prefix!r}"
            )
        if checked_timeout(unavailable_timeout) <= 1:
            # At portalocker's own second a garbage collection would pass for a death.
            raise ValueError(
                "unavailable_timeout must be more than 1 second. "
                f"Received: unavailable_timeout={unavailable_timeout!r}"
            )
        self.server = LockServer(url)
        self.timeout = checked_timeout(timeout)
        self.worker = None if worker is None else str(worker)
        self.prefix = prefix
        self.unavailable_timeout = float(unavailable_timeout)
        self.stamp = OwnerStamp(self.worker)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "stamp"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.stamp = OwnerStamp(self.worker)  # names the host, which may be another one now

    def __repr__(self) -> str:
        return (
            f"RedisLocks({str(self.server)!r}, timeout={self.timeout!r}, worker={self.worker!r}, "
            f"prefix={self.prefix!r}, unavailable_timeout={self.unavailable_timeout!r})"
        )

    def exclusive(
        self, path: str | os.PathLike[str], timeout: float | None = None
    ) -> AbstractContextManager[HeldLock]:
        """Hold the lock on ``path`` alone, after waiting ``timeout`` seconds at most."""
        return self._hold(path, LockFlags.EXCLUSIVE, timeout)

    def shared(
        self, path: str | os.PathLike[str], timeout: float | None = None
    ) -> AbstractContextManager[HeldLock]:
        """Hold the lock on ``path`` together with other readers, and without any writer.

        ``timeout`` as for `exclusive`.
        """
        return self._hold(path, LockFlags.SHARED, timeout)

    def _hold(self, path: str | os.PathLike[str], flags: LockFlags, timeout: float | None) -> Hold:
        seconds = self.timeout if timeout is None else checked_timeout(timeout)
        return Hold(RedisLock(self, checked_path(path), flags, seconds))

    def check(self, directory: str | os.PathLike[str]) -> None:
        """Raise now if the server is down or does not let us in, whatever ``directory`` is."""
        self.server.connect().close()
