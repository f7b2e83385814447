"""The connection to a lock server, and what its failures mean.

``redis`` is imported lazily: it is an optional dependency. The
url holds a password, so no message, ``repr`` or log line shows more of it than
host, port and database, and no lower error is chained to one of ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

from keras_safe_ckpt.errors import LockServerRefusedError, LockServerUnreachableError
from keras_safe_ckpt.storage.lock_owner import UNKNOWN_HOLDER, parse_owner

_ANSWER_SECONDS = 5.0
#: Owner records of killed holders go away after a day.
_RECORD_SECONDS = 86_400


def _redis() -> Any:
    try:
        import redis
    except ImportError as error:
        raise ImportError(
            "RedisLocks needs the redis package, which is not installed: "
            'pip install "keras_safe_ckpt[redis]"'
        ) from error
    return redis


class LockServer:
    """A Redis server by its url; holds no connection, so it can be pickled and copied.

    Example::

        >>> str(LockServer("redis://user:secret@lockhost:6379/0"))
        'redis://lockhost:6379/0'
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._secrets: tuple[str, ...] = ()
        options = None
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            self._shown = _without_credentials(url)
            options = _redis().connection.parse_url(url)
        # Raised out here, without a context: the error of the parser quotes the url.
        if options is None:
            raise ValueError(
                "url must begin with redis://, rediss:// or unix:// and be valid. "
                "Received: a url that is not (and not shown, as it may hold a password)"
            )
        found = [options.get("password"), options.get("username")]
        plain = [secret for secret in found if secret]
        self._secrets = tuple({*plain, *(quote(secret, safe="") for secret in plain)})

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"LockServer({self._shown!r})"

    def connect(self) -> Any:
        """A client that has proved to work, or the error that says why none does."""
        redis = _redis()
        client = redis.Redis.from_url(
            self._url,
            decode_responses=True,
            socket_connect_timeout=_ANSWER_SECONDS,
            socket_timeout=_ANSWER_SECONDS,
            health_check_interval=10,
            # redis-py's own retries would spend many seconds on a server that is down.
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        )
        try:
            with self.errors_explained():
                client.ping()
        except BaseException:
            client.close()
            raise
        return client

    @contextlib.contextmanager
    def errors_explained(self) -> Iterator[None]:
        """Turn errors of the client into the two that tell down from refused."""
        errors = _redis().exceptions
        refusals = (
            errors.AuthenticationError,
            errors.AuthorizationError,
            errors.NoPermissionError,
            errors.AuthenticationWrongNumberOfArgsError,
        )
        try:
            yield
        except refusals as error:
            raise LockServerRefusedError(self._shown, self._scrubbed(error)) from None
        except errors.RedisError as error:
            text = self._scrubbed(error)
            if "DENIED" in text:  # protected mode: no password, and not from this host
                raise LockServerRefusedError(self._shown, text) from None
            raise LockServerUnreachableError(self._shown, text) from None

    @contextlib.contextmanager
    def errors_ignored(self) -> Iterator[None]:
        """For what is not worth an error of its own, such as the record of an owner."""
        with contextlib.suppress(_redis().exceptions.RedisError, OSError):
            yield

    def _scrubbed(self, error: Exception) -> str:
        text = str(error).rstrip(".") or type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    # A password with an unquoted "/" ends the host early, and its rest would be shown.
    if "@" in parts.path or (parts.scheme != "unix" and parts.path[1:].strip("0123456789")):
        raise ValueError("the path is not the number of a database")
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host or 'localhost'}:{parts.port or 6379}{parts.path}"


class Fence:
    """The number that each grant of a lock raises, kept by the server.

    Example::

        fence = Fence(client, "keras_safe_ckpt:/shared/model.keras-fence")
        floor = fence.seed()
    """

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = key

    def seed(self) -> int:
        """Begin at the time of day, so that an emptied server still counts up."""
        if self._client.get(self._key) is None:
            self._client.set(self._key, self._now(), nx=True)
        return self.newest()

    def newest(self) -> int:
        return int(self._client.get(self._key) or 0)

    def restart_above(self, floor: int) -> int:
        """For the holder of the lock, when the server was emptied and counts from 1 again."""
        token = max(self._now(), floor + 1)
        self._client.set(self._key, token)
        return token

    def newest_and_subscribers(self, channel: str) -> tuple[int, int]:
        """Both in one round trip."""
        with self._client.pipeline(transaction=False) as batch:
            batch.get(self._key)
            batch.pubsub_numsub(channel)
            newest, subscribers = batch.execute()
        return int(newest or 0), int(subscribers[0][1])

    def _now(self) -> int:
        seconds, microseconds = self._client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000


class OwnerTable:
    """The owner records of a lock, by the id of the holder.

    Example::

        OwnerTable(client, key).add(lock.holder_id, stamp.record("shared"), alone=False)
    """

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = key

    def add(self, holder: str, record: bytes, *, alone: bool) -> None:
        with self._client.pipeline() as batch:
            if alone:
                batch.delete(self._key)  # records of holders that were killed
            batch.hset(self._key, holder, record)
            batch.expire(self._key, _RECORD_SECONDS)
            batch.execute()

    def remove(self, holder: str) -> None:
        self._client.hdel(self._key, holder)

    def describe(self, present: set[str] | None) -> str:
        """Those among ``present``, or all of them where nobody knows who is there."""
        records = self._client.hgetall(self._key)
        names = sorted(records if present is None else present & set(records))
        owners = [parse_owner(records[name]) for name in names]
        return "; ".join(o.describe() for o in owners if o is not None) or UNKNOWN_HOLDER
