"""Many processes save into one directory, of all sizes and under all kinds of names."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from processes import ending, start, wait_until

from keras_safe_ckpt import CheckpointStore
from keras_safe_ckpt.storage.temp_names import owner_of

#: How many of its own a process keeps.
KEPT = 3

#: Saves in turn under names of its own, under one that all share, and as the best of all.
SAVER = """
import random
from keras_safe_ckpt import KeepNewest
folder, number, saves, kept = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rng = random.Random(number)
store = CheckpointStore(folder + "/store")
offered, last = [], 0

def only_better(incumbent, new):
    if incumbent is not None and incumbent.metrics["loss"] <= new.metrics["loss"]:
        return "worse"

# From a kilobyte to some megabytes, a few of them large enough to pass by the page cache.
sizes = [80] * 60 + [1000] * 25 + [20_000] * 10 + [300_000] * 4 + [1_500_000]
ready = {size: snapshot(number, size) for size in set(sizes)}
for step in range(1, saves + 1):
    saved = ready[rng.choice(sizes)]
    background = step % 7 == 0
    kind = rng.choice(["own", "shared", "best"])
    if kind == "own":
        store.publish(saved, step=step, name=f"own{number}-{step}.weights.h5",
                      series=f"own{number}", retention=KeepNewest(kept), background=background)
    elif kind == "shared":
        published = store.publish(saved, step=step, name="shared.weights.h5")
        if published is not None:
            last = max(last, published.manifest.sequence)
    else:
        offered.append(rng.random())
        store.publish(saved, step=step, name="best.weights.h5", veto=only_better,
                      metrics={"loss": offered[-1]}, background=background)
store.wait()
print(json.dumps({"offered": min(offered, default=1.0), "last": last}))
"""

#: Verifies all that is there, until there is "stop"; what was pruned meanwhile is no error.
READER = """
from keras_safe_ckpt.errors import CheckpointNotFoundError
folder, looked, skipped = sys.argv[1], 0, []
store = CheckpointStore(folder + "/store")
def skip(path, reason):
    if "no such" not in reason.lower() and "not found" not in reason.lower():
        skipped.append(f"{path}: {reason}")
while not os.path.exists(folder + "/stop"):
    if store.latest(skip) is not None:
        looked += 1
    for checkpoint in store.checkpoints(skip):
        try:
            store.verify(checkpoint.path)
            looked += 1
        except CheckpointNotFoundError:
            pass
print(json.dumps({"looked": looked, "skipped": skipped}))
"""

PRUNER = """
from keras_safe_ckpt import KeepNewest
import time
folder, pruned = sys.argv[1], 0
store = CheckpointStore(folder + "/store")
while not os.path.exists(folder + "/stop"):
    pruned += len(store.prune(KeepNewest(int(sys.argv[2]))))
    time.sleep(0.01)
print(json.dumps({"pruned": pruned}))
"""


class Most:
    """The most that was ever seen of each, by looking again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.of_one_process = self.temporary = self.checkpoints = 0

    def look(self) -> bool:
        names = os.listdir(self._folder) if self._folder.exists() else []
        owners = Counter(owner.pid for name in names if (owner := owner_of(name)) is not None)
        self.of_one_process = max(self.of_one_process, *owners.values(), 0)
        self.temporary = max(self.temporary, owners.total())
        visible = [name for name in names if name.endswith(".weights.h5") and name[0] != "."]
        self.checkpoints = max(self.checkpoints, len(visible))
        return True


def ended(process: subprocess.Popen[str]) -> dict[str, float]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out)


def under_load(folder: Path, *, savers: int, saves: int, readers: int, seconds: float) -> str:
    most = Most(folder / "store")
    saving = [start(SAVER, folder, n, saves, KEPT) for n in range(savers)]
    reading = [start(READER, folder) for _ in range(readers)]
    pruning = start(PRUNER, folder, KEPT)
    with ending(*saving, *reading, pruning):
        wait_until(
            lambda: most.look() and all(process.poll() is not None for process in saving),
            "all have saved",
            seconds,
        )
        (folder / "stop").touch()
        told = [ended(process) for process in saving]
        seen = [ended(process) for process in reading]
        pruned = ended(pruning)["pruned"]
    assert [one["skipped"] for one in seen] == [[]] * readers
    looked = sum(int(one["looked"]) for one in seen)
    assert looked > 0
    store = CheckpointStore(folder / "store")
    errors = [event for event in store.events.read() if event["event"] in ("error", "skipped")]
    assert errors == []
    best = store.verify("best.weights.h5")
    assert best.metrics["loss"] == min(one["offered"] for one in told)
    # Of those that were put in place under the shared name, the newest.
    assert store.verify("shared.weights.h5").sequence == max(one["last"] for one in told)
    # One that is being written, and one in the instant that a lock is tried.
    assert most.of_one_process <= 2
    assert most.temporary <= 2 * (savers + readers + 1)
    # Of each its own, one more until those are pruned; the shared one and the best.
    assert most.checkpoints <= savers * (KEPT + 1) + 2
    left = os.listdir(folder / "store")
    assert [name for name in left if owner_of(name)] == []
    assert len([name for name in left if name.endswith(".weights.h5")]) <= savers * KEPT + 2
    return (
        f"{savers} processes saved {saves} times each into one directory: no error, none torn in "
        f"{looked} looks of {readers} readers, the best stayed, at most {most.temporary} temporary "
        f"and {most.checkpoints} checkpoint files, {pruned:.0f} pruned by somebody else"
    )


def test_many_processes_save_read_and_prune(tmp_path):
    under_load(tmp_path, savers=4, saves=20, readers=1, seconds=120)


@pytest.mark.campaign
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("saves", [1000])
def test_sixteen_processes_save_a_thousand_times(tmp_path, saves, record_property):
    told = under_load(tmp_path, savers=16, saves=saves, readers=3, seconds=1400)
    record_property("campaign", told)
