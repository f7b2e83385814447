"""Thousands of saves in one process: what it holds at the end is what it held at the beginning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from processes import run_ok

#: Saves of mixed sizes into stores of two formats, in turn in the foreground and the background,
#: now and then a look at all of it, a deletion by somebody else, and arrays that are read again.
SOAK = """
import ctypes, gc, random
from keras_safe_ckpt import KeepNewest
folder, saves, warm_up, leaks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rng = random.Random(0)
sizes = [100] * 12 + [1000] * 6 + [10_000] * 2
ready = {size: snapshot(size, size) for size in sizes}
stores = [CheckpointStore(f"{folder}/{f}", format=f) for f in ("weights_h5", "keras")]
leaked, most_files = [], 0

def held():
    for store in stores:
        store.wait()
    gc.collect()
    # What was freed goes back to the system: else the figure is what malloc keeps for later.
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(open("/proc/self/statm").read().split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }

def save(step):
    store, saved = stores[step % 2], ready[rng.choice(sizes)]
    if leaks == "snapshot":
        leaked.append(snapshot(step, 1000))
    if leaks == "descriptor":
        leaked.append(os.open(folder, os.O_RDONLY))
    how = {"background": step % 3 == 0, "extra_arrays": {"seen": np.arange(10)}}
    if step % 5 == 0:
        store.publish(saved, step=step, name=f"best{store.format.suffix}", **how)
    else:
        store.publish(saved, step=step, retention=KeepNewest(5), **how)
    if step % 20 == 0:
        latest = store.latest()
        store.verify(latest.path)
        assert store.extra_arrays(latest.path)["seen"].sum() == 45
    if step % 50 == 0:
        store.prune(KeepNewest(2))

for step in range(1, saves + 1):
    save(step)
    if step == warm_up:
        before = held()
    if step > warm_up:
        most_files = max(most_files, *(len(os.listdir(store.directory)) for store in stores))
print(json.dumps({"before": before, "after": held(), "files": most_files}))
"""

#: Numbered ones and one more until the oldest is deleted, the best, one on its way, the log, and
#: the lock with its gate.
MOST_FILES = 5 + 1 + 1 + 1 + 1 + 2
#: What one small snapshot takes: three arrays of a thousand numbers.
SNAPSHOT_BYTES = 3 * 1000 * 4


def soak(folder: object, saves: int, warm_up: int, leaks: str = "") -> dict[str, Any]:
    return json.loads(run_ok(SOAK, folder, saves, warm_up, leaks, timeout=1200))


def check_flat(folder: object, saves: int, warm_up: int, leaks: str = "") -> str:
    """``fds`` and ``threads`` are the same at both ends; the memory grows by less than a leak."""
    return judged(soak(folder, saves, warm_up, leaks), saves, warm_up)


def judged(told: dict[str, Any], saves: int, warm_up: int) -> str:
    before, after = told["before"], told["after"]
    counts = [(one["fds"], one["threads"]) for one in (before, after)]
    assert counts[0] == counts[1], f"fds, threads: {counts}"
    grown = after["rss"] - before["rss"]
    assert grown < (saves - warm_up) * SNAPSHOT_BYTES / 4, f"grown by {grown}"
    assert told["files"] <= MOST_FILES, f"files: {told['files']}"
    return (
        f"{saves} saves in one process, from the {warm_up}th on: {before['fds']} descriptors and "
        f"{before['threads']} threads at both ends, memory grew by {grown / 1024:.0f} KiB of "
        f"{before['rss'] >> 20} MiB, at most {told['files']} files in a directory"
    )


def test_saves_leave_nothing_behind(tmp_path):
    check_flat(tmp_path, 150, 75)


@pytest.mark.parametrize(("leaks", "seen"), [("snapshot", "grown"), ("descriptor", "fds")])
def test_a_leak_would_be_seen(tmp_path, leaks, seen):
    with pytest.raises(AssertionError, match=seen):
        check_flat(tmp_path, 150, 75, leaks)


@pytest.mark.campaign
@pytest.mark.timeout(1500)
def test_two_thousand_saves_leave_nothing_behind(tmp_path, record_property):
    record_property("campaign", check_flat(tmp_path, 2000, 200))


#: The same of a `fit` that saves after each epoch, and keeps three.
FIT = """
import ctypes, gc
import keras
from keras_safe_ckpt import SafeModelCheckpoint
folder, saves, warm_up = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
counts = {}

class Count(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 in (warm_up, saves):
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            pages = int(open("/proc/self/statm").read().split()[1])
            counts[epoch + 1] = {
                "rss": pages * os.sysconf("SC_PAGE_SIZE"),
                "fds": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
            }

x = np.ones((4, 8), "float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100), keras.layers.Dense(1)])
model.compile("adam", "mse")
saving = SafeModelCheckpoint(folder + "/{epoch}.keras", max_to_keep=3, background=False)
model.fit(x, x[:, :1], epochs=saves, verbose=0, callbacks=[saving, Count()])
files = len(os.listdir(folder))
print(json.dumps({"before": counts[warm_up], "after": counts[saves], "files": files}))
"""


@pytest.mark.campaign
@pytest.mark.timeout(1500)
def test_a_fit_of_hundreds_of_saves_leaves_nothing_behind(tmp_path, record_property):
    told = json.loads(run_ok(FIT, tmp_path, 600, 200, timeout=1200).splitlines()[-1])
    record_property("campaign", f"SafeModelCheckpoint in fit: {judged(told, 600, 200)}")
