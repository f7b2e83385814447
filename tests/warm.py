"""A process that has imported all but TensorFlow, and forks one child for each trial.

The child makes ready, waits until it is watched, and does one thing: so the system calls that are
seen are those of that one thing, and a trial costs a fraction of the start of an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forking import LARGEST_MESSAGE, die_with_parent, fork_on_request
from processes import PRELUDE, environment, wait_until

#: What is waited for, but never in vain.
PATIENCE_SECONDS = 60.0

#: Parts of the library that need TensorFlow, Keras or Redis, or a terminal.
_NOT_WARM = ("callbacks", "loops", "cluster", "cli", "reports", "redis_locks", "lock_server")


#: What a child says: it waits to be watched, or to be watched no more.
_READY, _DONE = b"r", b"d"


class Trial(NamedTuple):
    """What came of one: the exit code (negative: the signal), the output, and strace's log."""

    code: int
    out: str
    err: str
    log: str


# In the process that forks, and in its children.


def import_all() -> None:
    """Everything that a trial may need; and what is found out once only is found out now."""
    import h5py  # noqa: F401

    import keras_safe_ckpt

    for module in pkgutil.walk_packages(keras_safe_ckpt.__path__, "keras_safe_ckpt."):
        if not any(part in module.name.split(".") for part in (*_NOT_WARM, "__main__")):
            importlib.import_module(module.name)
    from snapshots import make_snapshot

    for format in ("weights_h5", "keras"):
        with tempfile.TemporaryDirectory() as folder:
            store = keras_safe_ckpt.CheckpointStore(folder, format=format)
            store.publish(make_snapshot(), step=1)
            assert store.latest() is not None


def perform(wanted: dict[str, Any]) -> int:
    """In the child: what was asked for; the exit code."""
    die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    *outputs, go = wanted["outputs"]
    for number, descriptor in enumerate((nothing, *outputs)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["-c", *wanted["arguments"]]
    for name in wanted["modules"]:
        # What was imported in the rehearsal; a name may have been put there by hand.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    asking = socket.socket(fileno=go)
    names: dict[str, Any] = {"__name__": "__main__", "unwatched": lambda: _unwatched(asking)}
    try:
        exec(compile(PRELUDE + wanted["setup"], "<setup>", "exec"), names)
        code = compile(wanted["code"], "<code>", "exec")
        if wanted["short"]:
            ctypes.CDLL(None).shorten_writes(wanted["short"])
        known = set(sys.modules)
        begin = select.poll()
        begin.register(go, select.POLLIN)
        asking.send(_READY)
        begin.poll()  # No trial uses this call itself.
        exec(code, names)
        ended = 0
    except SystemExit as error:
        ended = int(error.code or 0)
    except BaseException:  # noqa: BLE001  # Told, as every Python process does.
        traceback.print_exc()
        ended = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if wanted["learn"]:
        Path(wanted["learn"]).write_text(json.dumps(sorted(set(sys.modules) - known)))
    sys.stdout.flush()
    sys.stderr.flush()
    return ended


def _unwatched(asking: socket.socket) -> int:
    """In the child: from now on nothing is disturbed any more; how many writes were shortened.

    strace counts for each thread, so that a call that failed in one would fail in the next.
    """
    os.getpriority(os.PRIO_PROCESS, 0)  # Seen in the log: the end.
    asking.send(_DONE)
    asking.recv(1)  # That it may begin.
    asking.recv(1)  # That nobody watches.
    count = getattr(ctypes.CDLL(None), "shortened_writes", int)
    return int(count())


def main() -> None:
    die_with_parent()
    with socket.socket(fileno=int(sys.argv[1])) as asking:
        import_all()
        gc.collect()
        gc.freeze()  # What is not touched is not copied either.
        wanted = fork_on_request(asking)
    # Not as an interpreter ends: hundreds of calls that have nothing to do with the trial.
    os._exit(0 if wanted is None else perform(wanted))


# On the side of a test.


class WarmProcess:
    """The process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        # Threads of a library would not be in the children.
        quiet = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        preloaded = {"LD_PRELOAD": str(shim)} if (shim := short_writes_shim()) else {}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(number)],
            env={**environment(), **quiet, **preloaded},
            pass_fds=[number],
        )
        theirs.close()
        self.shortens = bool(preloaded)
        self._modules: dict[tuple[str, str], list[str]] = {}

    def close(self) -> None:
        self._socket.close()
        self._process.wait(PATIENCE_SECONDS)

    def rehearse(self, code: str, *arguments: object, setup: str = "") -> Trial:
        """Undisturbed, and from now on without the imports that it made on its way."""
        with tempfile.TemporaryDirectory() as folder:
            learnt = Path(folder, "modules")
            trial = self.run(code, *arguments, setup=setup, learn=learnt)
            if learnt.exists():
                self._modules[setup, code] = json.loads(learnt.read_text())
        return trial

    def knows(self, code: str, setup: str = "") -> bool:
        return (setup, code) in self._modules

    def run(
        self,
        code: str,
        *arguments: object,
        setup: str = "",
        watched: tuple[str, ...] | None = None,
        learn: Path | None = None,
        short: int = 0,
    ) -> Trial:
        """Run ``code`` after ``setup`` in a child; ``watched`` are strace's options, if any."""
        with tempfile.TemporaryDirectory() as folder:
            out, err, log = (Path(folder, name) for name in ("out", "err", "log"))
            request = {
                "code": code,
                "setup": setup,
                "arguments": [str(argument) for argument in arguments],
                "modules": self._modules.get((setup, code), []),
                "learn": learn and str(learn),
                "short": short,
            }
            with self._started(request, out, err) as (pid, go):
                try:
                    go.settimeout(PATIENCE_SECONDS)
                    is_ready = go.recv(1) == _READY  # Else it has failed before it began.
                    if is_ready and watched is not None:
                        with _attached(pid, log, watched) as tracer:
                            go.send(b"g")
                            heard = b""
                            # Its end, if it does not say that it is done.
                            with contextlib.suppress(ConnectionResetError):
                                heard = go.recv(1)
                            if heard != _DONE:
                                # strace ends by itself. Told to end while threads of a killed
                                # process are still there, it was seen to wait for them for ever.
                                tracer.wait(PATIENCE_SECONDS)
                    elif is_ready:
                        go.send(b"g")
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        go.send(b"u")
                    ended = self._end_of(pid)
                except BaseException:
                    # Not by a wait: it hangs, or nobody let it go.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                    self._end_of(pid)
                    raise
            return Trial(
                ended,
                out.read_text(errors="replace"),
                err.read_text(errors="replace"),
                log.read_text(errors="replace") if log.exists() else "",
            )

    @contextlib.contextmanager
    def _started(
        self, request: dict[str, Any], out: Path, err: Path
    ) -> Iterator[tuple[int, socket.socket]]:
        go, waiting = socket.socketpair()
        message = json.dumps(request).encode()
        assert len(message) < LARGEST_MESSAGE
        with open(out, "w") as to, open(err, "w") as bad:
            socket.send_fds(self._socket, [message], [to.fileno(), bad.fileno(), waiting.fileno()])
        waiting.close()
        with go:
            yield int(self._hear()["started"]), go

    def _end_of(self, pid: int) -> int:
        message = self._hear()
        assert message["ended"] == pid
        return int(message["code"])

    def _hear(self) -> dict[str, Any]:
        if not select.select([self._socket], [], [], PATIENCE_SECONDS)[0]:
            raise AssertionError(f"no end within {PATIENCE_SECONDS} s")
        heard = self._socket.recv(LARGEST_MESSAGE)
        assert heard, "the process that forks is gone"
        found: dict[str, Any] = json.loads(heard)
        return found


@functools.cache
def warm_process() -> WarmProcess:
    """The one of this test process; it ends with it."""
    require_attaching()
    return WarmProcess()


@functools.cache
def _why_nothing_can_be_watched() -> str | None:
    if shutil.which("strace") is None:
        return "strace is not installed (apt-get install strace)"
    with subprocess.Popen(["sleep", "60"]) as asleep:
        try:
            command = ["strace", "-o", os.devnull, "-p", str(asleep.pid)]
            tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            wait_until(
                lambda: tracer.poll() is not None or _tracer_of(asleep.pid) != 0,
                "strace has attached or given up",
            )
            if tracer.poll() is None:
                tracer.kill()
            _, said = tracer.communicate(timeout=PATIENCE_SECONDS)
        finally:
            asleep.kill()
    refused = "not permitted" in said
    return f"no process may be traced here: {said.strip()}" if refused else None


def require_attaching() -> None:
    reason = _why_nothing_can_be_watched()
    if reason is not None:
        pytest.skip(reason)


def _tracer_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    (found,) = re.findall(r"^TracerPid:\s*(\d+)", status, re.MULTILINE)
    return int(found)


def _waits_in(pid: int) -> str:
    """The number of the system call in which it sleeps; "" if it does not."""
    try:
        number = Path(f"/proc/{pid}/syscall").read_text().split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return number if number.isdecimal() else ""


@contextlib.contextmanager
def _attached(pid: int, log: Path, options: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    command = ["strace", "-f", "-y", "-qq", "-o", str(log), *options, "-p", str(pid)]
    wait_until(lambda: _waits_in(pid) != "", "it waits to be let go")
    waits_in = _waits_in(pid)
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        # It is stopped for a moment, and goes on waiting in another call (`restart_syscall`):
        # before that, strace is its tracer already, and does not see yet what it does.
        wait_until(
            lambda: tracer.poll() is not None or _waits_in(pid) not in ("", waits_in),
            "strace has attached",
        )
        assert tracer.poll() is None, tracer.stderr and tracer.stderr.read()
        yield tracer
    finally:
        tracer.terminate()  # It lets go of what it watches.
        tracer.communicate(timeout=PATIENCE_SECONDS)


#: Writes that really take less than they were asked to, as the kernel may: in libc, so that those
#: of Python and of HDF5 are met alike. Every n-th one to a regular file takes half of it.
_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
static int every, seen, shortened;
void shorten_writes(int n) { every = n; seen = shortened = 0; }
int shortened_writes(void) { return shortened; }
static size_t less(int fd, size_t count) {
    struct stat status;
    if (!every || fd < 3 || count < 2) return count;
    if (fstat(fd, &status) || !S_ISREG(status.st_mode)) return count;
    if (++seen % every) return count;
    shortened++;
    return count / 2;
}
#define REAL(name, type) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)
typedef ssize_t (*write_t)(int, const void *, size_t);
typedef ssize_t (*pwrite_t)(int, const void *, size_t, off_t);
ssize_t write(int fd, const void *data, size_t count) {
    REAL("write", write_t);
    return real(fd, data, less(fd, count));
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) {
    REAL("pwrite", pwrite_t);
    return real(fd, data, less(fd, count), at);
}
ssize_t pwrite64(int fd, const void *data, size_t count, off_t at) {
    REAL("pwrite64", pwrite_t);
    return real(fd, data, less(fd, count), at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    typedef ssize_t (*writev_t)(int, const struct iovec *, int);
    REAL("writev", writev_t);
    size_t size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    size_t taken = less(fd, size);
    if (taken == size) return real(fd, parts, count);
    struct iovec fewer[64];
    int used = 0;
    for (; used < count && used < 64 && taken; used++) {
        fewer[used] = parts[used];
        if (fewer[used].iov_len > taken) fewer[used].iov_len = taken;
        taken -= fewer[used].iov_len;
    }
    return real(fd, fewer, used);
}
"""


@functools.cache
def short_writes_shim() -> Path | None:
    """The library to preload; none where there is no compiler."""
    if shutil.which("gcc") is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="short-writes-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "shim.c").write_text(_SHIM)
    library = folder / "shim.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(folder / "shim.c"), "-ldl"]
    subprocess.run(command, check=True)
    return library


if __name__ == "__main__":
    main()
