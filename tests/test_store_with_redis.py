"""The store on the second lock backend, against a real server."""

from __future__ import annotations

import sys

import pytest
from processes import run, start
from redis_server import own_redis, shared_redis
from snapshots import make_snapshot, stored_seed

from keras_safe_ckpt import CheckpointStore, LockServerUnreachableError, RedisLocks

__all__ = ["own_redis", "shared_redis"]  # Fixtures.


def test_publish_and_latest(tmp_path, shared_redis):
    store = CheckpointStore(tmp_path, locks=RedisLocks(shared_redis.url))
    store.publish(make_snapshot(1), step=1)
    store.publish(make_snapshot(2), step=2, background=True)
    store.wait()
    assert stored_seed(store) == 2
    assert [path.name for path in tmp_path.glob(".*")] == []  # No lock files.


def test_processes_race_for_the_best(tmp_path, shared_redis):
    code = """
from keras_safe_ckpt import RedisLocks
def only_better(incumbent, new):
    if incumbent is not None and incumbent.metrics["loss"] <= new.metrics["loss"]:
        return "worse"
store = CheckpointStore(sys.argv[1], locks=RedisLocks(sys.argv[2]))
losses = np.random.default_rng(int(sys.argv[3])).random(6).tolist()
for step, loss in enumerate(losses):
    store.publish(snapshot(0), step=step, name="best.weights.h5", metrics={"loss": loss},
                  veto=only_better)
print(min(losses))
"""
    children = [start(code, tmp_path, shared_redis.url, n) for n in range(4)]
    best = []
    for child in children:
        out, err = child.communicate(timeout=240)
        assert child.returncode == 0, err
        best.append(float(out))
    store = CheckpointStore(tmp_path)
    assert store.latest().manifest.metrics["loss"] == min(best)


def test_server_that_is_gone_is_named_at_construction(tmp_path, own_redis):
    server = own_redis()
    server.kill()
    with pytest.raises(LockServerUnreachableError, match=str(server.port)):
        CheckpointStore(tmp_path, locks=RedisLocks(server.url))


def test_server_that_dies_leaves_the_previous_checkpoint(tmp_path, own_redis):
    server = own_redis()
    store = CheckpointStore(tmp_path, locks=RedisLocks(server.url, timeout=2))
    store.publish(make_snapshot(1), step=1, name="m.weights.h5")
    server.kill()
    with pytest.raises(LockServerUnreachableError):
        store.publish(make_snapshot(2), step=2, name="m.weights.h5")
    assert stored_seed(store) == 1


@pytest.mark.skipif(
    sys.version_info[:3] in [(3, 12, 0), (3, 12, 1)],
    reason="Python 3.12.0 and 3.12.1 start no thread at exit, which this lock needs (gh-113964)",
)
def test_pending_save_finishes_before_the_interpreter_exits(tmp_path, shared_redis):
    code = """
from keras_safe_ckpt import RedisLocks
store = CheckpointStore(sys.argv[1], locks=RedisLocks(sys.argv[2]))
store.publish(snapshot(1, 3_000_000), step=1, background=True)
"""
    done = run(code, tmp_path, shared_redis.url)
    assert done.returncode == 0, done.stderr
    assert CheckpointStore(tmp_path).latest().manifest.step == 1, done.stderr
