"""A lock server that is stopped, killed, restarted, emptied and paused while processes publish."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import ending, kill, start, wait_until
from redis_server import RedisServer, own_redis
from snapshots import make_snapshot

from keras_safe_ckpt import CheckpointStore, LockLostError, RedisLocks
from keras_safe_ckpt.storage.publishing import LOCK_NAME

redis = pytest.importorskip("redis")
__all__ = ["own_redis"]  # Fixtures.

#: To repeat what a campaign has printed.
SEED = "REDIS_FAULTS_SEED"
#: A holder that is silent for so long is taken for dead.
UNAVAILABLE = 1.5

#: Publishes for ever. What it does to the files it writes down itself, from what Python says
#: right before the rename: the token of its lock, and what it puts in place.
PUBLISHER = """
import contextlib, random, time
from keras_safe_ckpt import RedisLocks
from keras_safe_ckpt.errors import SafeCheckpointError
from keras_safe_ckpt.storage import lock_server
lock_server._ANSWER_SECONDS = 0.5
folder, url, unavailable, gap = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "gap"
notes = os.open(folder + "/notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
token = loss = 0

def note(*words):
    words = (time.monotonic_ns(), os.getpid(), *words)
    os.write(notes, (" ".join(map(str, words)) + "\\n").encode())

class Witnessed(RedisLocks):
    @contextlib.contextmanager
    def exclusive(self, path, timeout=None):
        global token
        with super().exclusive(path, timeout) as held:
            token = held.token
            yield held

def heard(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith(".weights.h5"):
        if gap:
            note("gap", token, loss)
            os.kill(os.getpid(), signal.SIGSTOP)
        note("rename", token, os.path.basename(arguments[1]), loss)
sys.addaudithook(heard)

def only_better(incumbent, new):
    if incumbent is not None and incumbent.metrics["loss"] <= new.metrics["loss"]:
        return "worse"

store = CheckpointStore(folder + "/store", locks=Witnessed(url, timeout=3,
                        unavailable_timeout=unavailable))
rng = random.Random(os.getpid())
for step in range(1, 1_000_000):
    # Slowly downwards, so that there is always something better to come.
    loss = rng.random() + 1_000_000 / (step + time.monotonic())
    best = rng.random() < 0.7
    began = time.monotonic()
    try:
        store.publish(snapshot(step, 50), step=step, metrics={"loss": loss},
                      **({"name": "best.weights.h5", "veto": only_better} if best
                         else {"name": "shared.weights.h5"}))
        note("saved", time.monotonic() - began)
    except SafeCheckpointError as error:
        note("failed", time.monotonic() - began, type(error).__name__, *str(error).split())
    if gap:
        break
"""

servers = st.one_of(
    st.tuples(st.just("stop"), st.floats(0.05, 1.2)),
    st.tuples(st.sampled_from(["restart", "flushall", "kill pubsub", "kill normal"]), st.just(0)),
    st.tuples(st.just("pause clients"), st.floats(0.05, 1.2)),
)
publishers = st.tuples(
    st.sampled_from(["publisher is stopped", "publisher is killed"]), st.sampled_from([0.2, 2.0])
)
#: A fault, and how long it is left alone afterwards.
faults = st.lists(
    st.tuples(st.one_of(servers, servers, publishers), st.floats(0, 0.3)), min_size=1, max_size=5
)


class Run:
    """Processes that publish on and on, and what was noted of them."""

    def __init__(self, folder: Path, server: RedisServer, count: int) -> None:
        self.folder = folder
        self.server = server
        self.processes: list[subprocess.Popen[str]] = []
        self.count: Counter[str] = Counter()
        for _ in range(count):
            self.begin()

    def begin(self, how: str = "on") -> subprocess.Popen[str]:
        process = start(PUBLISHER, self.folder, self.server.url, UNAVAILABLE, how)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                kill(process)
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()

    def notes(self, *kinds: str) -> list[list[str]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "notes").read_text().splitlines()
            return sorted((n for n in map(str.split, lines) if n[2] in kinds), key=_moment)
        return []

    def until_all_publish(self) -> None:
        """Each of them once more from now on."""
        now = time.monotonic_ns()

        def published() -> bool:
            for process in self.processes:
                if process.poll() is not None:
                    raise AssertionError(process.communicate()[1])
            done = {int(note[1]) for note in self.notes("saved") if _moment(note) > now}
            return done >= {process.pid for process in self.processes}

        wait_until(published, "all of them publish again", 60)

    def suffer(self, fault: str, seconds: float, which: int) -> None:
        self.count[fault] += 1
        victim = self.processes[which % len(self.processes)]
        # A connection of its own: the server may be asked to end them all.
        admin = redis.Redis(port=self.server.port, socket_timeout=5)
        with contextlib.closing(admin), contextlib.suppress(redis.exceptions.ConnectionError):
            if fault == "stop":
                _paused(self.server.process.pid, seconds)
            elif fault == "restart":
                self.server.kill()
                self.server.start()
            elif fault == "flushall":
                admin.flushall()
            elif fault == "pause clients":
                admin.client_pause(int(1000 * seconds))
            elif fault == "publisher is stopped":
                _paused(victim.pid, seconds)
            elif fault == "publisher is killed":
                self.processes.remove(victim)
                kill(victim)
                victim.communicate()
                self.begin()
            else:
                admin.client_kill_filter(_type=fault.split()[1], skipme=True)

    def check(self) -> None:
        """Nobody commits after somebody who got the lock later."""
        renames = self.notes("rename")
        for before, after in itertools.pairwise(renames):
            assert int(before[3]) <= int(after[3]), f"stale: {after} after {before}"
        best = [note for note in renames if note[4].startswith("best")]
        for before, after in itertools.pairwise(best):
            assert float(after[5]) < float(before[5]), f"worse: {after} after {before}"
        # Waiting for the lock, for the server, and for itself while it was stopped.
        for note in self.notes("saved", "failed"):
            assert float(note[3]) < 30, note
        store = CheckpointStore(self.folder / "store")
        names = {checkpoint.path.name for checkpoint in store.checkpoints()}
        assert names >= {note[4] for note in renames[:-1]}
        if best:
            manifest = store.verify("best.weights.h5")
            assert manifest.metrics["loss"] <= float(best[-2 if len(best) > 1 else -1][5])


def _moment(note: list[str]) -> int:
    return int(note[0])


def _paused(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)  # It is the pause that is tried.
    os.kill(pid, signal.SIGCONT)


@pytest.fixture(params=["with persistence", "without"])
def publishing(request, own_redis: Any, tmp_path: Path) -> Iterator[Run]:
    kept = ("--appendonly", "yes", "--appendfsync", "always")
    one = Run(tmp_path, own_redis(*(kept if request.param == "with persistence" else ())), 3)
    try:
        one.until_all_publish()
        yield one
    finally:
        one.close()


def suffered(run: Run, examples: int, seed: int) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(faults, st.integers(0, 2))
    def stale_holders_publish_nothing(schedule: list[Any], which: int) -> None:
        for (fault, seconds), pause in schedule:
            run.suffer(fault, seconds, which)
            time.sleep(pause)
        run.until_all_publish()
        run.check()
        run.count["schedules"] += 1

    stale_holders_publish_nothing()


def test_stale_holders_publish_nothing(publishing):
    for number, fault in enumerate(["restart", "flushall", "kill pubsub"]):
        publishing.suffer(fault, 0, number)
    publishing.suffer("publisher is stopped", UNAVAILABLE + 0.5, 0)
    publishing.until_all_publish()
    publishing.check()


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_random_faults_of_server_and_publishers(publishing, request, record_property):
    seed = int(os.environ.get(SEED) or secrets.randbelow(1 << 32))
    print(f"{SEED}={seed}")
    suffered(publishing, 25, seed)
    count = publishing.count
    tried = count.total() - count["schedules"]
    failed = Counter(note[4] for note in publishing.notes("failed"))
    record_property(
        "campaign",
        f"{request.node.name}, {SEED}={seed}: {count['schedules']} schedules, {tried} faults, "
        f"{len(publishing.notes('saved'))} saves, {len(publishing.notes('rename'))} commits, "
        f"errors of the tree {dict(failed)}: no commit of a stale holder, all publish again",
    )


def test_holder_paused_at_the_rename_itself_is_told_that_it_was_late(own_redis, tmp_path):
    """The one gap: nothing is between the last check and the rename, and it stops there."""
    run = Run(tmp_path, own_redis(), 0)
    stale = run.begin("gap")
    with ending(stale):
        wait_until(lambda: len(run.notes("gap")) == 1, "it is about to rename")
        locks = RedisLocks(run.server.url, timeout=30, unavailable_timeout=UNAVAILABLE)
        other = CheckpointStore(tmp_path / "store", locks=locks)
        other.publish(make_snapshot(1), step=1, name="other.weights.h5")
        with locks.exclusive(tmp_path / "store" / LOCK_NAME) as held:
            os.kill(stale.pid, signal.SIGCONT)
            wait_until(lambda: len(run.notes("saved", "failed")) == 1, "it has ended its save")
            held.ensure_held()
        (note,) = run.notes("saved", "failed")
        assert (note[2], note[4]) == ("failed", LockLostError.__name__), note
    run.close()
