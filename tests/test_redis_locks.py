"""RedisLocks: the contract of every backend, and what a server adds to it."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

import pytest
from lock_contract import HOLD, PATIENCE, ROOT, LockContract, Peer, wait_until
from redis_server import own_redis, shared_redis

from keras_safe_ckpt.errors import (
    LockLostError,
    LockServerRefusedError,
    LockServerUnreachableError,
    LockTimeoutError,
    StaleHolderError,
)
from keras_safe_ckpt.storage import lock_server
from keras_safe_ckpt.storage.redis_locks import RedisLocks

redis = pytest.importorskip("redis")
__all__ = ["own_redis", "shared_redis"]  # Fixtures.

SECRET = "s3cr3t/p@ss"
QUOTED = "s3cr3t%2Fp%40ss"


class TestRedisLocks(LockContract):
    taken_within = 1.0
    closes_before_the_traceback_is_gone = False
    # Less than unavailable_timeout: freed because the connection ended, not because
    # somebody lost patience with it.
    orphan_freed_within = 3.0

    @pytest.fixture
    def locks(self, shared_redis):
        return RedisLocks(shared_redis.url)


@contextlib.contextmanager
def running(locks, path, code):
    peer = Peer(locks, path, code)
    try:
        yield peer
    finally:
        peer.end()


def client_of(server):
    return redis.Redis(port=server.port, decode_responses=True)


def url_of_user(server, *rights):
    admin = client_of(server)
    admin.execute_command("ACL", "SETUSER", "worker7", "on", f">{SECRET}", *rights)
    return f"redis://worker7:{QUOTED}@127.0.0.1:{server.port}/0"


def connect_both_ways(locks):
    """The two ways to meet the server must tell the same."""
    yield lambda: locks.check("/any")
    yield lambda: locks.exclusive("/any/path").__enter__()


# The server is not there


def test_a_closed_port_is_unreachable():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        locks = RedisLocks(f"redis://127.0.0.1:{unused.getsockname()[1]}/0")
        for attempt in connect_both_ways(locks):
            start = time.monotonic()
            with pytest.raises(LockServerUnreachableError, match="refused"):
                attempt()
            assert time.monotonic() - start < 5, "it waited for the lock instead"


def test_an_unknown_host_is_unreachable():
    with pytest.raises(LockServerUnreachableError, match=r"no-such-host\.invalid"):
        RedisLocks("redis://no-such-host.invalid:6379/0").check("/any")


def test_a_silent_server_is_unreachable(monkeypatch):
    monkeypatch.setattr(lock_server, "_ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        locks = RedisLocks(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        for attempt in connect_both_ways(locks):
            with pytest.raises(LockServerUnreachableError, match=r"(?i)time"):
                attempt()


def test_a_server_that_dies_while_we_wait_is_unreachable(own_redis, tmp_path):
    server = own_redis()
    locks = RedisLocks(server.url)
    with running(locks, tmp_path / "x", HOLD.format(mode="exclusive")) as holder:
        holder.expect("held")
        threading.Timer(0.3, server.kill).start()
        with pytest.raises(LockServerUnreachableError):
            locks.exclusive(tmp_path / "x", timeout=1.0).__enter__()


# The server does not let us in


def test_wrong_and_missing_passwords_are_refused(own_redis):
    server = own_redis("--requirepass", SECRET)
    RedisLocks(f"redis://:{QUOTED}@127.0.0.1:{server.port}/0").check("/any")
    for login in ("", ":wrong@", f"nobody:{QUOTED}@"):
        locks = RedisLocks(f"redis://{login}127.0.0.1:{server.port}/0")
        for attempt in connect_both_ways(locks):
            with pytest.raises(LockServerRefusedError):
                attempt()


@pytest.mark.parametrize("rights", ["-ping", "-subscribe", "resetkeys ~other:*", "resetchannels"])
def test_missing_permissions_are_refused(own_redis, rights):
    url = url_of_user(own_redis(), "~*", "&*", "+@all", *rights.split())
    locks = RedisLocks(url, timeout=5)
    with pytest.raises(LockServerRefusedError) as caught:
        locks.exclusive("/any/path").__enter__()
    assert "worker7" not in str(caught.value)


def test_a_user_who_cannot_write_owner_records_can_still_lock(own_redis):
    locks = RedisLocks(url_of_user(own_redis(), "~*", "&*", "+@all", "-hset", "-hdel"))
    with locks.exclusive("/any/path") as held:
        held.ensure_held()
        with pytest.raises(LockTimeoutError, match="unknown process"):
            locks.exclusive("/any/path", timeout=0).__enter__()


# Nobody learns the password


def test_the_password_is_shown_nowhere(own_redis, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    server = own_redis()
    url = url_of_user(server, "~*", "&*", "+@all")
    closed = url.replace(str(server.port), "1")
    wrong = url.replace(QUOTED, QUOTED + "x")
    errors = []

    def collect(locks, timeout=0.0):
        texts.append(repr(locks) + str(locks) + repr(locks.server))
        try:
            with locks.exclusive(tmp_path / "x", timeout=timeout) as held:
                yield held
        except Exception as error:  # noqa: BLE001  (their kinds are asserted below)
            errors.append(error)

    texts = []
    good = RedisLocks(url)
    assert repr(good).startswith(f"RedisLocks('redis://127.0.0.1:{server.port}/0', timeout=60.0")
    for _ in collect(good):
        for _ in collect(good):  # LockTimeoutError
            pass
        for _ in collect(RedisLocks(closed)):
            pass
        for _ in collect(RedisLocks(wrong)):
            pass
        url_of_user(server, "-get")
        for _ in collect(good):  # no permission
            pass
        url_of_user(server, "+get")
    for held in collect(good, timeout=PATIENCE):
        server.kill()
        with pytest.raises(LockLostError) as caught:
            held.ensure_held()
        errors.append(caught.value)
    kinds = [type(error).__name__ for error in errors]
    assert kinds == [
        "LockTimeoutError",
        "LockServerUnreachableError",
        "LockServerRefusedError",
        "LockServerRefusedError",
        "LockLostError",
        "LockLostError",
    ]
    for error in errors:
        assert error.__cause__ is None  # a lower error could quote what it was given
        texts.append(repr(error) + str(error) + "".join(traceback.format_exception(error)))
        texts.append(pickle.dumps(error).decode("latin-1"))
    assert "redis.exceptions" not in "".join(texts)
    assert caplog.text
    for text in [*texts, caplog.text]:
        for secret in (SECRET, QUOTED, "s3cr3t"):
            assert secret not in text


@pytest.mark.parametrize(
    "url",
    [
        "http://:s3cr3t@host/0",
        "redis://:s3cr3t@host:port/0",
        "redis://user:s3cr3t@[::1/0",
        "redis://:123/s3cr3t@host/0",
        "redis://:123/s3cr3t",
        "unix://user:pa/s3cr3t@/run/redis.sock",
        "redis://:s3cr3t#x@host/0",
        "s3cr3t",
        None,
        6379,
    ],
)
def test_a_bad_url_is_refused_without_showing_it(url):
    with pytest.raises(ValueError, match="redis://") as caught:
        RedisLocks(url)
    text = "".join(traceback.format_exception(caught.value.with_traceback(None)))
    assert "s3cr3t" not in text
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:p@host:1/2?password=x", "redis://host:1/2"),
        ("rediss://:p@host", "rediss://host:6379"),
        ("redis://u:p@[::1]:5/0", "redis://[::1]:5/0"),
        ("unix://u:p@/run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("redis://", "redis://localhost:6379"),
        ("redis://:12?s3cr3t@host", "redis://localhost:12"),
    ],
)
def test_what_is_shown_of_a_url(url, shown):
    assert str(RedisLocks(url).server) == shown


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": -1},
        {"timeout": "1"},
        {"prefix": ""},
        {"prefix": "with blank"},
        {"unavailable_timeout": 1},
        {"unavailable_timeout": float("nan")},
    ],
)
def test_bad_options_are_refused(options):
    ((_, value),) = options.items()
    with pytest.raises(ValueError, match="Received: ") as caught:
        RedisLocks("redis://localhost", **options)
    assert repr(value) in str(caught.value)


# The lock is lost


def client_id_of(server, held):
    clients = client_of(server).client_list()
    return next(c["id"] for c in clients if c["name"].endswith(held._lock.holder_id))


def lost_locally(held):
    wait_until(lambda: held._lock.lost)


def test_a_killed_server_loses_the_lock(own_redis, tmp_path):
    server = own_redis()
    lock = RedisLocks(server.url).exclusive(tmp_path / "x")
    held = lock.__enter__()
    server.kill()
    with pytest.raises(LockLostError):
        held.ensure_held()
    with pytest.raises(LockLostError, match="broke"):
        lock.__exit__(None, None, None)  # the body was content, so the block must tell


def test_a_loss_does_not_mask_the_error_of_the_body(own_redis, tmp_path):
    server = own_redis()

    def body():
        with RedisLocks(server.url).exclusive(tmp_path / "x") as held:
            server.kill()
            lost_locally(held)
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        body()


@pytest.mark.parametrize("mode", ["shared", "exclusive"])
def test_a_server_that_stops_answering_loses_the_lock(own_redis, tmp_path, mode, monkeypatch):
    monkeypatch.setattr(lock_server, "_ANSWER_SECONDS", 0.5)
    server = own_redis()
    with contextlib.suppress(LockLostError), contextlib.ExitStack() as stack:
        held = stack.enter_context(getattr(RedisLocks(server.url), mode)(tmp_path / "x"))
        held.ensure_held()
        os.kill(server.process.pid, signal.SIGSTOP)
        with pytest.raises(LockLostError, match="does not answer"):
            held.ensure_held()
        os.kill(server.process.pid, signal.SIGCONT)


def test_a_killed_connection_loses_the_lock(own_redis, tmp_path):
    server = own_redis()
    admin = client_of(server)
    lock = RedisLocks(server.url).exclusive(tmp_path / "x")
    held = lock.__enter__()
    admin.client_kill_filter(_type="pubsub")
    # At once: the fence is still ours, but nobody is subscribed any more.
    with pytest.raises(LockLostError, match=r"broke|restarted"):
        held.ensure_held()
    lost_locally(held)
    with pytest.raises(LockLostError):
        lock.__exit__(None, None, None)


def test_a_lost_subscription_is_found_before_the_connection_breaks(own_redis, tmp_path):
    server = own_redis()
    admin = client_of(server)
    lock = RedisLocks(server.url).exclusive(tmp_path / "x")
    held = lock.__enter__()
    held._lock.pubsub.unsubscribe()  # the connection itself stays
    wait_until(lambda: admin.pubsub_numsub(held._lock.channel)[0][1] == 0)
    with pytest.raises(LockLostError, match="restarted"):
        held.ensure_held()
    with pytest.raises(LockLostError):
        lock.__exit__(None, None, None)


def test_a_loss_that_only_the_own_connection_noticed_is_told(own_redis, tmp_path):
    server = own_redis()
    locks = RedisLocks(server.url)
    lock = locks.shared(tmp_path / "x")
    held = lock.__enter__()
    with locks.shared(tmp_path / "x") as other:  # so that there is a subscriber
        client_of(server).client_kill_filter(_id=client_id_of(server, held))
        lost_locally(held)
        with pytest.raises(LockLostError, match="broke"):
            held.ensure_held()
        with pytest.raises(LockLostError, match="broke"):
            lock.__exit__(None, None, None)
        other.ensure_held()


@pytest.mark.parametrize("mode", ["shared", "exclusive"])
def test_an_emptied_server_loses_the_lock(own_redis, tmp_path, mode):
    server = own_redis()
    with getattr(RedisLocks(server.url), mode)(tmp_path / "x") as held:
        held.ensure_held()
        client_of(server).flushall()
        with pytest.raises(LockLostError, match="emptied"):
            held.ensure_held()


def test_a_newer_token_makes_the_holder_stale(own_redis, tmp_path):
    server = own_redis()
    lock = RedisLocks(server.url).exclusive(tmp_path / "x")
    held = lock.__enter__()
    client_of(server).incr(held._lock.fence_key)
    with pytest.raises(StaleHolderError) as caught:
        held.ensure_held()
    # Whoever did not ask hears of it at the end, though the connection never broke.
    with pytest.raises(LockLostError, match=f"token {held.token + 1} was given out"):
        lock.__exit__(None, None, None)
    assert (caught.value.token, caught.value.newest) == (held.token, held.token + 1)


def test_tokens_grow_even_when_the_server_is_emptied(own_redis, tmp_path):
    server = own_redis()
    locks = RedisLocks(server.url)
    tokens = []
    for _ in range(3):
        with locks.exclusive(tmp_path / "x") as held:
            tokens.append(held.token)
            held.ensure_held()
        with locks.exclusive(tmp_path / "x") as held:
            tokens.append(held.token)
        client_of(server).flushall()
    assert tokens == sorted(set(tokens))


def test_a_server_emptied_while_we_wait_gives_no_old_token(own_redis, tmp_path):
    server = own_redis()
    locks = RedisLocks(server.url)
    admin = client_of(server)
    tokens = []

    def wait_for_it():
        with locks.exclusive(tmp_path / "x") as held:
            held.ensure_held()
            tokens.append(held.token)

    with locks.exclusive(tmp_path / "x") as held:
        waiter = threading.Thread(target=wait_for_it)
        waiter.start()
        channel = held._lock.channel
        wait_until(lambda: admin.pubsub_numsub(channel)[0][1] > 1)  # it is past the seeding
        admin.flushall()
    waiter.join()
    assert tokens[0] > held.token


# A holder that was paused

PAUSED = """
with locks.{mode}(path) as held:
    say("held")
    hear()
    try:
        held.ensure_held()
        say("passed")
    except (LockLostError, StaleHolderError) as error:
        say("refused", type(error).__name__)
        os._exit(0)
"""


@pytest.mark.parametrize("mode", ["shared", "exclusive"])
def test_a_paused_holder_does_not_commit(own_redis, tmp_path, mode):
    locks = RedisLocks(own_redis().url, unavailable_timeout=1.5)
    with running(locks, tmp_path / "x", PAUSED.format(mode=mode)) as holder:
        holder.expect("held")
        os.kill(holder.pid, signal.SIGSTOP)
        start = time.monotonic()
        with locks.exclusive(tmp_path / "x", timeout=PATIENCE) as held:
            assert time.monotonic() - start > 1.4, "reaped too eagerly"
            holder.tell()
            os.kill(holder.pid, signal.SIGCONT)
            holder.expect("refused")
            held.ensure_held()


def test_a_short_pause_does_not_cost_the_lock(own_redis, tmp_path):
    locks = RedisLocks(own_redis().url)
    with running(locks, tmp_path / "x", PAUSED.format(mode="exclusive")) as holder:
        holder.expect("held")
        os.kill(holder.pid, signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (holder.pid, signal.SIGCONT)).start()
        with pytest.raises(LockTimeoutError, match=f"pid {holder.pid}"):
            locks.exclusive(tmp_path / "x", timeout=2).__enter__()
        holder.tell()
        holder.expect("passed")


# What is left behind


def test_nothing_piles_up(shared_redis, tmp_path):
    locks = RedisLocks(shared_redis.url, prefix=f"pile{os.getpid()}")
    client = client_of(shared_redis)
    for _ in range(3):
        with locks.exclusive(tmp_path / "x"):
            client.ping()
        with locks.shared(tmp_path / "x"):
            pass
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with locks.exclusive(tmp_path / "x"):
            (owners,) = client.keys(f"{locks.prefix}:owner:*")
            assert 0 < client.ttl(owners) <= 86_400
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= files
    assert client.keys(f"{locks.prefix}*") == [f"{locks.prefix}:{tmp_path}/x-fence"]


def test_the_record_of_a_killed_holder_goes_with_the_next_writer(shared_redis, tmp_path):
    locks = RedisLocks(shared_redis.url)
    with running(locks, tmp_path / "x", HOLD.format(mode="exclusive")) as holder:
        holder.expect("held")
    with locks.exclusive(tmp_path / "x", timeout=PATIENCE):
        with pytest.raises(LockTimeoutError) as caught:
            locks.exclusive(tmp_path / "x", timeout=0).__enter__()
        records = client_of(shared_redis).hlen(f"{locks.prefix}:owner:{tmp_path}/x")
    assert records == 1
    assert f"pid {os.getpid()} " in caught.value.holder


# Without the package


def test_a_missing_redis_package_is_explained():
    code = (
        "import sys; sys.modules['redis'] = None\n"
        "import keras_safe_ckpt.storage.locks\n"
        "from keras_safe_ckpt.storage.redis_locks import RedisLocks\n"
        "try:\n    RedisLocks('redis://localhost')\n"
        "except ImportError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 'pip install "keras_safe_ckpt[redis]"' in result.stdout


def test_ctrl_c_in_the_release_does_not_keep_the_lock(own_redis, tmp_path, monkeypatch):
    """At each step of it, and while the traceback keeps every object alive."""
    locks = RedisLocks(own_redis().url, timeout=2)
    path = tmp_path / "model.keras"
    for step in (
        "_owners.remove",
        "_lock.release",
        "_client.close",
        "_fence.newest_and_subscribers",
    ):
        hold = locks.exclusive(path)
        held = hold.__enter__()
        name, method = step.split(".")
        target, interrupted = getattr(held, name), []

        def once(*arguments, target=target, method=method, interrupted=interrupted):
            if not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            return getattr(type(target), method)(target, *arguments)

        monkeypatch.setattr(target, method, once)
        with pytest.raises(KeyboardInterrupt) as caught:
            hold.__exit__(None, None, None)
        assert interrupted
        with locks.exclusive(path):
            pass
        assert caught.tb is not None
