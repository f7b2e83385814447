"""What every lock backend must do: inherit `LockContract` and provide `locks`.

Other processes are real ones: a `Peer` is a fresh interpreter that gets the
backend by pickle and speaks through its pipes.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import queue
import random
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from keras_safe_ckpt.errors import LockLostError, LockTimeoutError, UnsafePathError

ROOT = Path(__file__).parent.parent
PATIENCE = 30.0  # for what must happen, however loaded the machine is

PRELUDE = """
import os, pickle, signal, subprocess, sys, threading, time
from keras_safe_ckpt.errors import *
from keras_safe_ckpt.errors import LockLostError, LockTimeoutError
locks = pickle.loads(bytes.fromhex(sys.argv[1]))
path = sys.argv[2]
# A shell lets its background jobs ignore Ctrl-C, and that is handed down.
signal.signal(signal.SIGINT, signal.default_int_handler)
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write: forks share the pipe
def hear():
    if not sys.stdin.readline():
        os._exit(3)
"""


class Peer:
    """Another process that runs `code` with `locks`, `path`, `say()` and `hear()`."""

    def __init__(self, locks, path, code, under=()):
        program = PRELUDE + textwrap.dedent(code)
        self.process = subprocess.Popen(
            [*under, sys.executable, "-c", program, pickle.dumps(locks).hex(), os.fspath(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            },
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.split())
        self._lines.put(None)

    def expect(self, *words):
        """Wait for a line that starts with `words`; the rest of it is returned."""
        line = self._lines.get(timeout=PATIENCE)
        assert line is not None, self.process.communicate()[1]
        assert line[: len(words)] == list(words)
        return line[len(words) :]

    def tell(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self):
        # A grandchild may keep the pipes open, so the exit code is all we wait for.
        if self.process.wait(PATIENCE) != 0:
            raise AssertionError(self.process.stderr.read())

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its children too
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


HOLD = """
with locks.{mode}(path) as held:
    say("held")
    hear()
    say("leaving", time.monotonic())
say("left")
hear()
"""


def wait_until(condition, patience=PATIENCE):
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class LockContract:
    #: A freed lock is taken within so many seconds, with slack for a loaded machine.
    taken_within = 0.1
    #: A client library may be interrupted with a socket that only its own frames know.
    closes_before_the_traceback_is_gone = True
    #: The lock of a dead process is free within so many seconds.
    orphan_freed_within = 2.0

    @pytest.fixture
    def locks(self):
        raise NotImplementedError("each backend provides its own")

    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "model.keras"

    @pytest.fixture
    def start(self, locks, path):
        peers = []

        def start(code, **options):
            peers.append(Peer(locks, path, code, **options))
            return peers[-1]

        yield start
        for peer in peers:
            peer.end()

    @pytest.fixture
    def hold(self, start):
        def hold(mode):
            peer = start(HOLD.format(mode=mode))
            peer.expect("held")
            return peer

        return hold

    def assert_locked(self, locks, path, mode="exclusive"):
        with pytest.raises(LockTimeoutError), getattr(locks, mode)(path, timeout=0):
            pass

    # Exclusion

    def test_no_increment_is_lost_between_processes(self, start, tmp_path):
        counter = tmp_path / "counter"
        counter.write_text("0")
        increment = f"""
            for _ in range(25):
                with locks.exclusive(path) as held:
                    with open({str(counter)!r}) as file:
                        value = int(file.read())
                    held.ensure_held()
                    with open({str(counter)!r}, "w") as file:
                        file.write(str(value + 1))
        """
        for peer in [start(increment) for _ in range(4)]:
            peer.finish()
        assert counter.read_text() == "100"

    def test_no_increment_is_lost_between_threads(self, locks, path):
        value = 0
        errors = []

        def increment():
            nonlocal value
            try:
                for _ in range(10):
                    with locks.exclusive(path):
                        seen = value
                        time.sleep(0.001)
                        value = seen + 1
            except Exception as error:  # noqa: BLE001  (asserted below)
                errors.append(error)

        threads = [threading.Thread(target=increment) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (value, errors) == (40, [])

    def test_readers_share(self, locks, path, hold):
        hold("shared")
        with locks.shared(path, timeout=PATIENCE) as held, locks.shared(path, PATIENCE) as other:
            held.ensure_held()
            other.ensure_held()
            self.assert_locked(locks, path, "exclusive")

    def test_a_reader_keeps_writers_out(self, locks, path, hold):
        reader = hold("shared")
        self.assert_locked(locks, path, "exclusive")
        reader.tell()
        with locks.exclusive(path, timeout=PATIENCE) as held:
            held.ensure_held()

    @pytest.mark.parametrize("mode", ["shared", "exclusive"])
    def test_a_writer_keeps_everybody_out(self, locks, path, hold, mode):
        writer = hold("exclusive")
        self.assert_locked(locks, path, mode)
        writer.tell()
        with getattr(locks, mode)(path, timeout=PATIENCE) as held:
            held.ensure_held()

    def test_one_manager_in_one_thread_does_not_get_the_lock_twice(self, locks, path):
        with locks.exclusive(path):
            self.assert_locked(locks, path)

    def test_different_paths_do_not_disturb_each_other(self, locks, tmp_path):
        with locks.exclusive(tmp_path / "a") as a, locks.exclusive(tmp_path / "b", 0) as b:
            a.ensure_held()
            b.ensure_held()
        assert (a.path, b.path) == (str(tmp_path / "a"), str(tmp_path / "b"))

    def test_a_relative_path_is_the_same_lock(self, locks, path, monkeypatch):
        monkeypatch.chdir(path.parent)
        with locks.exclusive(path.name) as held:
            monkeypatch.chdir("/")
            held.ensure_held()
            self.assert_locked(locks, path)

    # Waiting

    def test_a_stream_of_readers_does_not_starve_a_writer(self, locks, path):
        """Each reader leaves only after the next one came in, so one is always there.

        It gives up on that only if no other can come in: when a waiting writer
        keeps new readers out.
        """
        came = 0
        turn = threading.Condition()
        stop = threading.Event()
        errors = []

        def wait_for_the_next():
            nonlocal came
            came = mine = came + 1
            turn.notify_all()
            turn.wait_for(lambda: came > mine or stop.is_set(), timeout=0.5)

        def read_on_and_on():
            try:
                while not stop.is_set():
                    with locks.shared(path, timeout=PATIENCE), turn:
                        wait_for_the_next()
            except Exception as error:  # noqa: BLE001  (asserted below)
                errors.append(error)

        readers = [threading.Thread(target=read_on_and_on) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            wait_until(lambda: came > 5 or errors)
            with locks.exclusive(path, timeout=15) as held:
                held.ensure_held()
        finally:
            stop.set()
            for reader in readers:
                reader.join()
        assert errors == []

    def test_a_freed_lock_is_taken_soon(self, locks, path, start):
        holder = start(
            """
            while True:
                with locks.exclusive(path):
                    say("held")
                    hear()
                    say("leaving", time.monotonic())
                hear()
            """
        )
        times = []
        for _ in range(5):
            holder.expect("held")
            # Just after a poll of portalocker's default interval: it would take 0.22 s.
            threading.Timer(0.78, holder.tell).start()
            with locks.exclusive(path, timeout=PATIENCE):
                taken = time.monotonic()
            times.append(taken - float(holder.expect("leaving")[0]))
            holder.tell()
        assert statistics.median(times) <= self.taken_within, times

    def test_waiting_is_not_a_busy_loop(self, locks, path, hold):
        hold("exclusive")
        before = time.process_time()
        with pytest.raises(LockTimeoutError), locks.exclusive(path, timeout=1.0):
            pass
        assert time.process_time() - before < 0.5

    def test_waiting_leaves_the_global_random_generator_alone(self, locks, path, hold):
        hold("exclusive")
        before = random.getstate()
        with pytest.raises(LockTimeoutError), locks.exclusive(path, timeout=0.2):
            pass
        assert random.getstate() == before

    def test_ctrl_c_while_waiting_leaves_nothing_behind(self, locks, path, start, hold):
        holder = hold("exclusive")
        waiter = start(
            """
            before = set(os.listdir("/proc/self/fd"))
            for _ in range(3):
                try:
                    say("waiting")
                    with locks.exclusive(path):
                        say("held")
                except KeyboardInterrupt as error:  # whose traceback keeps everything alive
                    say("interrupted", len(set(os.listdir("/proc/self/fd")) - before))
            import gc
            deadline = time.monotonic() + 10  # A thread of the client may be about to end.
            while (left := set(os.listdir("/proc/self/fd")) - before):
                gc.collect()
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
            say("leaked", len(left))
            hear()
            """
        )
        for _ in range(3):
            waiter.expect("waiting")
            while waiter._lines.empty():  # whatever it is doing at the moment
                time.sleep(random.uniform(0.05, 0.1))
                waiter.process.send_signal(signal.SIGINT)
                # And again, as anybody would: Python drops one that arrives in a `__del__`.
                heard = time.monotonic() + 10
                while waiter._lines.empty() and time.monotonic() < heard:
                    time.sleep(0.005)
            left = waiter.expect("interrupted")
            assert left == ["0"] or not self.closes_before_the_traceback_is_gone
        assert waiter.expect("leaked") == ["0"]
        holder.tell()
        with locks.exclusive(path, timeout=PATIENCE) as held:
            held.ensure_held()

    # Timeouts

    @pytest.mark.parametrize("mode", ["shared", "exclusive"])
    def test_a_timeout_names_the_holder(self, path, hold, locks, mode):
        named = copy.copy(locks)
        named.__setstate__({**locks.__getstate__(), "worker": "chief 0"})
        holder = Peer(named, path, HOLD.format(mode=mode))
        try:
            holder.expect("held")
            with pytest.raises(LockTimeoutError) as caught, locks.exclusive(path, timeout=0.2):
                pass
        finally:
            holder.end()
        error = caught.value
        today = time.strftime("%Y-%m-", time.gmtime())
        host = os.uname().nodename
        assert error.holder.startswith(
            f"worker chief 0, pid {holder.pid} on host {host}, since {today}"
        )
        assert error.holder.endswith(f"Z ({mode})")
        assert 0.2 <= error.waited < PATIENCE
        assert error.path == str(path)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.holder) == (str(error), error.holder)

    def test_a_reader_that_left_is_not_named(self, locks, path, hold):
        stays = hold("shared")
        leaves = hold("shared")  # the last one that came in
        leaves.tell()
        leaves.expect("leaving")
        leaves.expect("left")
        with pytest.raises(LockTimeoutError) as caught, locks.exclusive(path, timeout=0.2):
            pass
        assert f"pid {stays.pid} on host" in caught.value.holder
        assert f"pid {leaves.pid}" not in caught.value.holder

    def test_timeout_zero_tries_once(self, locks, path):
        with locks.exclusive(path, timeout=0):
            start = time.monotonic()
            self.assert_locked(locks, path)
            assert time.monotonic() - start < 2
        with locks.shared(path, timeout=0) as held:
            held.ensure_held()

    def test_the_default_timeout_is_the_managers(self, locks, path, hold):
        hold("exclusive")
        impatient = copy.copy(locks)
        impatient.timeout = 0.1
        start = time.monotonic()
        with pytest.raises(LockTimeoutError), impatient.exclusive(path):
            pass
        assert 0.1 <= time.monotonic() - start < PATIENCE

    @pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "5", b"5", True, [], 1j])
    def test_a_bad_timeout_is_refused(self, locks, path, timeout):
        for mode in (locks.exclusive, locks.shared):
            with pytest.raises(ValueError, match="Received: timeout=") as caught:
                mode(path, timeout=timeout)
            assert repr(timeout) in str(caught.value)

    @pytest.mark.parametrize("path", ["", "/", "..", "a/..", "a\0b", Path("..")])
    def test_an_unsafe_path_is_refused(self, locks, path):
        with pytest.raises(UnsafePathError):
            locks.exclusive(path)
        with pytest.raises(UnsafePathError):
            locks.shared(path)

    def test_two_spellings_of_one_file_are_one_lock(self, locks, tmp_path):
        (tmp_path / "real" / "inner").mkdir(parents=True)
        (tmp_path / "link").symlink_to(tmp_path / "real" / "inner")
        # Through the link, ".." is "real": read as text it would be tmp_path itself.
        with locks.exclusive(tmp_path / "link" / ".." / "file"):
            self.assert_locked(locks, tmp_path / "real" / "file")

    @pytest.mark.parametrize(
        "name", ["with blank", "ümläut", "..keras", "a%20b", "-lock-", "\udcff"]
    )
    def test_any_file_name_can_be_locked(self, locks, tmp_path, name):
        with locks.exclusive(tmp_path / name, timeout=PATIENCE) as held:
            held.ensure_held()
            self.assert_locked(locks, tmp_path / name)

    # The end of a hold

    def test_an_exception_in_the_body_releases_and_passes(self, locks, path):
        with pytest.raises(ZeroDivisionError), locks.exclusive(path):
            _ = 1 / 0
        with locks.exclusive(path, timeout=0) as held:
            held.ensure_held()

    def test_a_released_lock_is_not_held(self, locks, path):
        with locks.exclusive(path) as held:
            pass
        with pytest.raises(LockLostError, match="released"):
            held.ensure_held()

    def test_one_object_holds_once_at_a_time(self, locks, path):
        lock = locks.exclusive(path)
        with lock as held:
            with pytest.raises(RuntimeError, match="already"):
                lock.__enter__()
            held.ensure_held()
        with lock as held:
            held.ensure_held()

    def test_a_lock_without_an_owner_is_released(self, locks, path):
        """As after Ctrl-C between __enter__ and the body."""
        locks.exclusive(path).__enter__()
        with locks.exclusive(path, timeout=PATIENCE) as held:
            held.ensure_held()
            self.assert_locked(locks, path)

    def test_a_failed_attempt_can_be_made_again(self, locks, path, hold):
        holder = hold("exclusive")
        lock = locks.exclusive(path, timeout=0)
        with pytest.raises(LockTimeoutError), lock:
            pass
        holder.tell()
        holder.expect("leaving")
        holder.expect("left")
        with lock as held:
            held.ensure_held()

    def test_killed_holder_frees_the_lock(self, locks, path, hold):
        holder = hold("exclusive")
        self.assert_locked(locks, path)
        os.kill(holder.pid, signal.SIGKILL)
        with locks.exclusive(path, timeout=self.orphan_freed_within) as held:
            held.ensure_held()

    # Children

    def test_a_spawned_child_does_not_hold(self, locks, path, start):
        parent = start(
            """
            with locks.exclusive(path):
                child = subprocess.Popen(["sleep", "60"], close_fds=False)
                say("spawned", child.pid)
                hear()
            """
        )
        child = psutil.Process(int(parent.expect("spawned")[0]))
        try:
            self.assert_locked(locks, path)
            os.kill(parent.pid, signal.SIGKILL)
            with locks.exclusive(path, timeout=self.orphan_freed_within):
                assert child.is_running()
        finally:
            child.kill()

    def test_a_forked_child_neither_holds_nor_releases(self, locks, path, start):
        parent = start(
            """
            with locks.exclusive(path) as held:
                child = os.fork()
                if not child:
                    try:
                        held.ensure_held()
                    except LockLostError as error:
                        say("child", "parent" in str(error))
                else:
                    say("parent", child)
                    hear()
                    held.ensure_held()
                    say("parent still holds")
                    hear()
            # Only the child comes here. Its with block has ended; the parent's goes on.
            import gc; del held; gc.collect()
            try:
                with locks.exclusive(path, timeout=0):
                    say("child got it")
            except LockTimeoutError:
                say("child locked out")
            time.sleep(60)
            """
        )
        lines = sorted([parent.expect(), parent.expect(), parent.expect()])
        assert lines[:2] == [["child", "True"], ["child", "locked", "out"]]
        child = psutil.Process(int(lines[2][1]))
        try:
            self.assert_locked(locks, path)
            parent.tell()
            parent.expect("parent", "still", "holds")
            os.kill(parent.pid, signal.SIGKILL)
            with locks.exclusive(path, timeout=self.orphan_freed_within) as held:
                held.ensure_held()
                assert child.is_running()
        finally:
            child.kill()

    def test_a_forked_child_can_lock_for_itself(self, locks, path, start):
        parent = start(
            """
            with locks.exclusive(path):
                pass
            def hold_it():
                with locks.exclusive(path) as held:
                    held.ensure_held()
                    say("child holds")
                    hear()
            if not os.fork():
                thread = threading.Thread(target=hold_it)  # meets every mutex of the parent
                thread.start()
                thread.join()
            else:
                time.sleep(60)
            """
        )
        parent.expect("child", "holds")
        self.assert_locked(locks, path)
        parent.tell()
        with locks.exclusive(path, timeout=PATIENCE):
            pass

    # The manager

    @pytest.mark.parametrize(
        "clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
    )
    def test_copies_are_the_same_locks(self, locks, path, clone):
        other = clone(locks)
        assert repr(other) == repr(locks)
        with other.exclusive(path) as held:
            held.ensure_held()
            self.assert_locked(locks, path)

    def test_check_is_content_where_locks_work(self, locks, tmp_path):
        locks.check(tmp_path)
        assert list(tmp_path.iterdir()) == []
