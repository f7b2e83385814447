"""LockManager: the contract of every backend, and what files add to it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import portalocker
import pytest
from lock_contract import PATIENCE, ROOT, LockContract, wait_until
from processes import run_ok

from keras_safe_ckpt import (
    CheckpointStore,
    LockedTFRecordWriter,
    SafeModelCheckpoint,
    SafeSaver,
    TFRecordShardWriter,
    WorkerH5Writer,
    locked_tfrecord_dataset,
    verify_tfrecord,
)
from keras_safe_ckpt.errors import (
    LockLostError,
    LocksUnsupportedError,
    LockTimeoutError,
    UnsafePathError,
)
from keras_safe_ckpt.storage import lock_descriptors
from keras_safe_ckpt.storage import locks as locks_module
from keras_safe_ckpt.storage.lock_owner import parse_owner
from keras_safe_ckpt.storage.locks import LockManager, claim

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


class TestFileLocks(LockContract):
    @pytest.fixture
    def locks(self):
        return LockManager()

    @pytest.fixture
    def lock_file(self, tmp_path):
        return tmp_path / ".model.keras.lock"

    @pytest.fixture
    def gate_file(self, tmp_path):
        return tmp_path / ".model.keras.gate"

    # The files

    def test_the_files_stay_and_the_target_is_not_touched(self, locks, path, lock_file, gate_file):
        path.write_bytes(b"a model")
        with locks.exclusive(path):
            pass
        first = lock_file.stat().st_ino
        with locks.shared(path):
            pass
        assert {file.name for file in path.parent.iterdir()} == {
            path.name,
            lock_file.name,
            gate_file.name,
        }
        assert lock_file.stat().st_ino == first
        assert path.read_bytes() == b"a model"

    @pytest.mark.parametrize("when", [1, 2])
    def test_ctrl_c_at_the_gate_or_at_the_end_keeps_nothing_locked(
        self, locks, path, monkeypatch, when
    ):
        """Even while the traceback is still there, which keeps every object of it alive."""
        release, calls = locks_module._unlock_and_close, 0

        def interrupted(file):
            nonlocal calls
            calls += 1
            if calls == when:
                raise KeyboardInterrupt
            release(file)

        monkeypatch.setattr(locks_module, "_unlock_and_close", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught, locks.exclusive(path):
            pass
        monkeypatch.undo()
        with LockManager(timeout=0).exclusive(path):
            pass
        assert caught.tb is not None

    def test_dropping_a_lock_that_was_given_back_runs_no_code(self, locks, path):
        """Python ignores what is raised in a `__del__`: a Ctrl-C at that moment would be lost."""
        lock = locks.exclusive(path)
        with lock as held:
            pass
        ran = []
        sys.setprofile(lambda frame, event, _: ran.append((event, frame.f_code.co_name)))
        del lock, held
        sys.setprofile(None)
        assert [what for what in ran if what[0] == "call"] == []

    @pytest.mark.parametrize("which", [".model.keras.lock", ".model.keras.gate"])
    def test_a_symbolic_link_is_refused_and_its_target_untouched(self, locks, path, which):
        target = path.parent / "precious"
        target.write_text("precious")
        (path.parent / which).symlink_to(target)
        with pytest.raises(UnsafePathError, match="symbolic link"):
            locks.exclusive(path).__enter__()
        assert target.read_text() == "precious"

    def test_a_dangling_link_creates_nothing(self, locks, path, lock_file):
        lock_file.symlink_to(path.parent / "elsewhere")
        with pytest.raises(UnsafePathError, match="symbolic link"):
            locks.exclusive(path).__enter__()
        assert not (path.parent / "elsewhere").exists()

    def test_a_directory_or_a_pipe_at_the_lock_path_is_refused(self, locks, path, lock_file):
        lock_file.mkdir()
        with pytest.raises(UnsafePathError, match="directory"):
            locks.exclusive(path).__enter__()
        lock_file.rmdir()
        os.mkfifo(lock_file)
        with pytest.raises(UnsafePathError, match="regular file"):
            locks.exclusive(path).__enter__()

    def test_a_missing_directory_is_named(self, locks, tmp_path):
        for attempt in (
            lambda: locks.exclusive(tmp_path / "no" / "x").__enter__(),
            lambda: locks.check(tmp_path / "no"),
        ):
            with pytest.raises(LocksUnsupportedError, match="/no' does not exist"):
                attempt()
        assert not (tmp_path / "no").exists()

    def test_a_directory_that_takes_no_files_is_not_called_missing(self, locks):
        with pytest.raises(LocksUnsupportedError, match=r"No such file|Permission denied"):
            locks.exclusive("/proc/x").__enter__()

    def test_a_directory_without_permission_is_named(self, path, start):
        path.parent.chmod(0o500)
        peer = start(
            """
            if os.geteuid() == 0:
                os.setuid(65534)  # root may write anywhere
            for attempt in (
                lambda: locks.exclusive(path).__enter__(),
                lambda: locks.check(os.path.dirname(path)),
            ):
                try:
                    attempt()
                except LocksUnsupportedError as error:
                    say(error.reason)
            """
        )
        assert peer.expect() == ["Permission", "denied", "(EACCES)"]
        assert peer.expect() == ["Permission", "denied", "(EACCES)"]
        path.parent.chmod(0o700)

    def test_a_name_that_is_too_long_is_named(self, locks, tmp_path):
        with pytest.raises(LocksUnsupportedError, match="ENAMETOOLONG"):
            locks.exclusive(tmp_path / ("x" * 255)).__enter__()

    def test_waiting_does_not_truncate_the_record(self, locks, path, lock_file, hold):
        holder = hold("exclusive")
        before = lock_file.read_bytes()
        self.assert_locked(locks, path)
        assert lock_file.read_bytes() == before
        assert json.loads(before)["pid"] == holder.pid

    def test_a_record_replaces_a_longer_one(self, path, lock_file):
        with LockManager(worker="w" * 500).exclusive(path):
            pass
        with LockManager().exclusive(path):
            owner = parse_owner(lock_file.read_bytes())
        assert owner is not None
        assert (owner.pid, owner.worker) == (os.getpid(), None)

    # Lock files that disappear

    def test_a_deleted_lock_file_is_a_lost_lock(self, locks, path, lock_file):
        with locks.exclusive(path) as held:  # leaving the block raises nothing by itself
            held.ensure_held()
            lock_file.unlink()
            with pytest.raises(LockLostError, match="deleted"):
                held.ensure_held()

    @pytest.mark.parametrize("mode", ["shared", "exclusive"])
    def test_a_replaced_lock_file_is_a_lost_lock(self, locks, path, lock_file, mode):
        with getattr(locks, mode)(path) as held:
            lock_file.unlink()
            with locks.exclusive(path, timeout=0) as other:
                with pytest.raises(LockLostError, match="replaced"):
                    held.ensure_held()
                other.ensure_held()

    def test_a_link_to_the_locked_file_is_a_lost_lock(self, locks, path, lock_file):
        with locks.exclusive(path) as held:
            lock_file.rename(path.parent / "moved")
            lock_file.symlink_to("moved")
            with pytest.raises(LockLostError, match="replaced"):
                held.ensure_held()

    def test_a_file_deleted_while_another_waits(self, locks, path, lock_file, start):
        """The waiter has the old file open; it must end up with the lock on the new one."""
        with locks.exclusive(path):
            waiter = start(
                """
                say("waiting")
                with locks.exclusive(path) as held:
                    held.ensure_held()
                    from keras_safe_ckpt.storage import lock_descriptors
                    say("held", len(lock_descriptors._files))
                    hear()
                """
            )
            waiter.expect("waiting")
            gate = os.open(path.parent / ".model.keras.gate", os.O_RDWR)
            wait_until(lambda: not claim_and_release(gate))  # it is through the gate
            os.close(gate)
            lock_file.unlink()
        assert waiter.expect("held") == ["1"]
        self.assert_locked(locks, path)

    def test_a_lock_taken_by_somebody_else_is_a_lost_lock(self, locks, path, hold):
        """As on a network file system that dropped the lock."""
        with locks.exclusive(path) as held:
            fcntl.flock(held._file.fileno(), fcntl.LOCK_UN)
            other = hold("exclusive")
            with pytest.raises(LockLostError, match=f"taken by pid {other.pid}"):
                held.ensure_held()

    # The owner

    @pytest.mark.parametrize(
        "record",
        [
            b"",
            b"\0\xff\xfe garbage",
            b"[" * 100_000,
            b"x" * 10_000_000,
            b"[1, 2]",
            b"null",
            b"{}",
            b'{"host": "h", "pid": "1", "since": "s", "mode": "m"}',
            b'{"host": 5, "pid": 1, "since": "s", "mode": "m"}',
            b'{"host": "a\\nb", "pid": 1, "since": "s", "mode": "m"}',
            b'{"host": "h", "pid": 1, "since": "s", "mode": "m", "worker": 7}',
        ],
    )
    def test_a_record_that_makes_no_sense_costs_only_the_name(self, locks, path, lock_file, record):
        with locks.exclusive(path):
            lock_file.write_bytes(record)
            with pytest.raises(LockTimeoutError) as caught:
                locks.exclusive(path, timeout=0).__enter__()
        # The kernel still knows the process.
        assert caught.value.holder == f"pid {os.getpid()} on host {os.uname().nodename} (exclusive)"

    def test_without_any_knowledge_the_holder_is_unknown(self, locks, path, lock_file, monkeypatch):
        monkeypatch.setattr(
            "keras_safe_ckpt.storage.lock_owner.flock_holders", lambda fd: {}
        )  # as on another system than Linux
        with locks.exclusive(path):
            lock_file.write_bytes(b"garbage")
            with pytest.raises(LockTimeoutError) as caught:
                locks.exclusive(path, timeout=0).__enter__()
        assert caught.value.holder == "an unknown process"

    def test_a_holder_on_another_host_is_taken_at_its_word(self, locks, path, lock_file):
        with locks.exclusive(path):
            record = json.loads(lock_file.read_bytes())
            lock_file.write_text(json.dumps({**record, "host": "far-away", "pid": 4}))
            with pytest.raises(LockTimeoutError, match="pid 4 on host far-away, since 2"):
                locks.exclusive(path, timeout=0).__enter__()

    def test_who_waits_at_the_gate_learns_the_holder_not_the_queue(self, locks, path, hold, start):
        holder = hold("exclusive")
        start("locks.exclusive(path).__enter__()")
        gate = os.open(path.parent / ".model.keras.gate", os.O_RDWR)
        wait_until(lambda: not claim_and_release(gate))
        os.close(gate)
        with pytest.raises(LockTimeoutError, match=f"held by pid {holder.pid} on host"):
            locks.exclusive(path, timeout=0.1).__enter__()

    def test_a_busy_gate_before_a_free_lock_is_called_a_queue(self, locks, path, gate_file):
        with locks.exclusive(path):
            pass
        with open(gate_file, "rb+") as gate:
            assert claim(gate.fileno())
            with pytest.raises(LockTimeoutError, match="another process in the queue"):
                locks.exclusive(path, timeout=0.1).__enter__()
        with locks.exclusive(path, timeout=0):
            pass

    def test_timeout_zero_waits_out_somebody_who_only_passes_the_gate(self, locks, path, gate_file):
        with locks.shared(path):
            gate = os.open(gate_file, os.O_RDWR)
            assert claim(gate)
            threading.Timer(0.004, os.close, (gate,)).start()
            with locks.shared(path, timeout=0) as held:
                held.ensure_held()

    @needs_root
    def test_a_full_disk_does_not_prevent_locking(self, locks, tmp_path, start):
        small = tmp_path / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("tmpfs cannot be mounted here")
        try:
            with contextlib.suppress(OSError), open(small / "filler", "wb", 0) as filler:
                while True:
                    filler.write(b"x" * 4096)
            with locks.exclusive(small / "x") as held:
                held.ensure_held()
                assert (small / ".x.lock").read_bytes() == b""
                self.assert_locked(locks, small / "x")
        finally:
            subprocess.run(["umount", str(small)], check=True)

    # Descriptors

    def test_descriptors_do_not_leak(self, locks, path):
        with locks.exclusive(path):
            pass
        before = open_files()
        gc.collect()  # Another test may have left some; it is not the one that is looked at.
        known = set(lock_descriptors._files)
        for _ in range(1000):
            with locks.exclusive(path), contextlib.suppress(LockTimeoutError):
                pass
        for _ in range(20):
            with locks.exclusive(path):
                self.assert_locked(locks, path)
        with contextlib.suppress(UnsafePathError):
            (path.parent / ".link.lock").symlink_to("nowhere")
            locks.exclusive(path.parent / "link").__enter__()
        locks.check(path.parent)
        assert open_files() == before
        assert set(lock_descriptors._files) <= known

    def test_threads_do_not_hold_together_even_if_portalocker_is_told_to_use_lockf(
        self, locks, path, monkeypatch
    ):
        monkeypatch.setattr(portalocker.portalocker, "LOCKER", fcntl.lockf)
        with locks.exclusive(path):
            self.assert_locked(locks, path)

    def test_a_waiter_killed_in_the_queue_does_not_block_it(
        self, locks, path, gate_file, hold, start
    ):
        holder = hold("exclusive")
        waiter = start("locks.exclusive(path).__enter__()")
        gate = os.open(gate_file, os.O_RDWR)
        wait_until(lambda: not claim_and_release(gate))
        os.kill(waiter.pid, signal.SIGKILL)
        wait_until(lambda: claim_and_release(gate))
        os.close(gate)
        holder.tell()
        with locks.exclusive(path, timeout=PATIENCE) as held:
            held.ensure_held()

    def test_a_stopped_holder_keeps_the_lock(self, locks, path, hold):
        holder = hold("exclusive")
        os.kill(holder.pid, signal.SIGSTOP)
        with pytest.raises(LockTimeoutError, match=f"pid {holder.pid} "):
            locks.exclusive(path, timeout=0.3).__enter__()

    def test_a_process_forked_by_c_code_does_not_keep_the_lock(self, locks, path):
        """No hook runs in it, so its copy of the descriptor stays open."""
        with locks.exclusive(path) as held:
            copy = os.dup(held._file.fileno())  # what such a child has: the same open file
        try:
            with locks.exclusive(path, timeout=0) as again:
                again.ensure_held()
                self.assert_locked(locks, path)
        finally:
            os.close(copy)

    def test_a_fork_while_a_thread_waits_leaves_no_lock_in_the_child(self, locks, path, start):
        with locks.exclusive(path):
            parent = start(
                """
                def wait_for_it():
                    with locks.exclusive(path):
                        say("held")
                        time.sleep(60)
                threading.Thread(target=wait_for_it, daemon=True).start()
                from keras_safe_ckpt.storage import lock_descriptors
                while len(lock_descriptors._files) < 2:
                    time.sleep(0.001)
                if not os.fork():
                    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
                    links = [os.readlink(file) for file in files if os.path.exists(file)]
                    say("child", [link for link in links if "keras" in link])
                    time.sleep(60)
                hear()
                """
            )
            assert parent.expect("child") == ["[]"]
        parent.expect("held")
        os.kill(parent.pid, signal.SIGKILL)
        with locks.exclusive(path, timeout=self.orphan_freed_within):
            pass

    def test_a_fork_in_the_middle_of_open_knows_the_descriptor(self, path, start):
        """Forks while another thread opens and closes, without a break."""
        parent = start(
            """
            from keras_safe_ckpt.storage import lock_descriptors
            stop = threading.Event()
            def open_and_close():
                while not stop.is_set():
                    lock_descriptors.close_lock_file(lock_descriptors.open_lock_file(path))
            threads = [threading.Thread(target=open_and_close) for _ in range(2)]
            for thread in threads:
                thread.start()
            leaks = 0
            for _ in range(150):
                child = os.fork()
                if not child:
                    found = 0
                    for fd in range(3, 30):
                        try:
                            found += os.readlink(f"/proc/self/fd/{fd}") == path
                        except OSError:
                            pass
                    os._exit(found)
                leaks += os.waitpid(child, 0)[1] != 0
            stop.set()
            say("leaks", leaks)
            """
        )
        assert parent.expect("leaks") == ["0"]

    def test_a_signal_handler_may_fork_while_a_file_is_opened(self, start):
        peer = start(
            """
            from keras_safe_ckpt.storage import lock_descriptors
            with lock_descriptors._mutex:  # where the handler would strike
                child = os.fork()
                if not child:
                    os._exit(0)
                os.waitpid(child, 0)
            say("no deadlock")
            """
        )
        peer.expect("no", "deadlock")

    # Does the file system lock at all?

    @needs_strace
    @pytest.mark.parametrize(
        ("injected", "reason"),
        [
            ("error=ENOLCK", "No locks available (ENOLCK)"),
            ("error=EOPNOTSUPP", "(ENOTSUP)"),
            ("error=EINVAL", "(EINVAL)"),
            ("error=ENOSYS", "(ENOSYS)"),
            ("retval=0", "two descriptors could lock the same file at once"),
        ],
    )
    def test_a_file_system_without_locks_is_found(self, start, path, injected, reason):
        strace = ["strace", "-f", "-o", "/dev/null", "-e", "trace=flock"]
        peer = start(
            """
            from keras_safe_ckpt.storage.locks import claim
            directory = os.path.dirname(path)
            for attempt in (
                lambda: locks.check(directory),
                lambda: locks.exclusive(path).__enter__(),
            ):
                try:
                    attempt()
                    say("fine")
                except LocksUnsupportedError as error:
                    say(error.reason)
            try:
                claim(os.open(path, os.O_RDWR | os.O_CREAT))
                say("fine")
            except OSError as error:
                say(type(error).__name__, error.errno)
            """,
            under=[*strace, "-e", f"inject=flock:{injected}"],
        )
        assert reason in " ".join(peer.expect())
        if injected != "retval=0":
            assert reason in " ".join(peer.expect())
            assert peer.expect() == ["OSError", str(number_of(reason))]
        peer.finish()
        assert not [file for file in path.parent.iterdir() if "probe" in file.name]

    def test_claim_is_for_one(self, path):
        path.write_text("")
        first, second = (os.open(path, os.O_RDWR) for _ in range(2))
        assert claim(first)
        assert claim(first)
        assert not claim(second)
        os.close(first)
        assert claim(second)
        os.close(second)
        with pytest.raises(OSError, match="Bad file descriptor"):
            claim(second)

    # The manager

    @pytest.mark.parametrize("timeout", [-1, float("nan"), "5", None, True])
    def test_a_bad_default_timeout_is_refused(self, timeout):
        with pytest.raises(ValueError, match="Received: timeout="):
            LockManager(timeout=timeout)

    def test_a_copy_in_another_process_signs_with_its_own_pid(self, locks, path, lock_file, hold):
        holder = hold("shared")
        assert json.loads(lock_file.read_bytes())["pid"] == holder.pid


def claim_and_release(fd):
    if claimed := claim(fd):
        fcntl.flock(fd, fcntl.LOCK_UN)
    return claimed


def number_of(reason):
    return getattr(errno, reason.rpartition("(")[2].rstrip(")"))


def test_locks_come_without_tensorflow():
    code = (
        "import sys, keras_safe_ckpt.storage.locks, keras_safe_ckpt.storage.redis_locks\n"
        "print([m for m in ('tensorflow', 'keras', 'h5py', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("locks", ["x", 0, LockManager])
def test_what_cannot_lock_is_refused_at_once(tmp_path, locks):
    import tensorflow as tf

    (tmp_path / "a.tfrecord").touch()
    for make in (
        lambda: LockedTFRecordWriter(tmp_path / "a.tfrecord", locks=locks),
        lambda: TFRecordShardWriter(tmp_path / "a", 0, 1, locks=locks),
        lambda: verify_tfrecord(tmp_path / "a.tfrecord", locks=locks),
        lambda: locked_tfrecord_dataset(tmp_path / "a.tfrecord", locks=locks),
        lambda: WorkerH5Writer(tmp_path, locks=locks),
        lambda: CheckpointStore(tmp_path, locks=locks),
        lambda: SafeSaver({"v": tf.Variable(1.0)}, locks=locks),
        lambda: SafeModelCheckpoint(tmp_path / "m.keras", locks=locks),
    ):
        with pytest.raises(ValueError, match="Expected locks to be a LockManager") as caught:
            make()
        assert f"Received: locks={locks!r}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tfrecord"]


INTERRUPTED = """
import json, os, random, signal, sys, threading
from keras_safe_ckpt import LockManager
from keras_safe_ckpt.errors import SafeCheckpointError
path, turns, lost, held = sys.argv[1], int(sys.argv[2]), [], []
sys.unraisablehook = lambda unraisable: lost.append(repr(unraisable.exc_value))
signal.signal(signal.SIGALRM, signal.default_int_handler)
locks = LockManager(timeout=0)
def lock():
    with locks.exclusive(path):
        pass
before = len(os.listdir("/proc/self/fd"))
random.seed(1)
for _ in range(turns):
    try:
        # The second one is for one that got lost, which is counted.
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 3e-4), 10)
        while True:
            with locks.exclusive(path) as mine:
                mine.ensure_held()
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        lock()
    except SafeCheckpointError as error:
        held.append(str(error))
thread = threading.Thread(target=lock, daemon=True)  # Meets every mutex.
thread.start()
thread.join(30)
open_files = len(os.listdir("/proc/self/fd")) - before
print(json.dumps([len(lost), len(held), open_files, thread.is_alive()]))
"""


@pytest.mark.parametrize("turns", [3000, pytest.param(300_000, marks=pytest.mark.campaign)])
def test_ctrl_c_at_any_moment_is_not_lost_and_leaves_nothing(tmp_path, turns, record_property):
    """No lock, no open file, no mutex: in a loop that does nothing but take and give back."""
    out = run_ok(INTERRUPTED, tmp_path / "x", turns, timeout=280)
    assert json.loads(out) == [0, 0, 0, False], "lost, still held, open files, a thread hangs"
    if turns > 3000:
        record_property("campaign", f"{turns:,} Ctrl-C at a lock: none lost, nothing left behind")
