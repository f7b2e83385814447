"""Several real workers with plain BatchNormalization and validation, preempted together."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from clusters import FORKING, LAUNCHER, all_printed, completed, facts
from histories import reported

from keras_safe_ckpt import CheckpointStore

PROGRAM = Path(__file__).with_name("preempted_worker.py")
#: Batches and validation batches of a run: one hook each.
HOOKS = 4 * (4 + 4)


def launch(
    folder: Path,
    plan: str,
    *,
    workers: int = 2,
    restarts: int = 10,
    seconds: float | None = None,
    launcher: Sequence[str] = FORKING,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    command = [*launcher, "--workers", str(workers), "--pause-seconds=0"]
    command += [f"--max-restarts={restarts}", "--restart-codes=42,143,137"]
    command += [PROGRAM, folder, plan, json.dumps(options)]
    return all_printed(completed(command, seconds or 60 + 60 * (1 + plan.count(":"))))


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    found = CheckpointStore(folder / "state").events.read()
    return [event for event in found if event["event"] == name]


def ends(folder: Path) -> list[dict[str, Any]]:
    """What each worker ended with, without what it began with, which is another thing."""
    return [{k: v for k, v in found.items() if k != "begin"} for found in facts(folder)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = launch(folder, "", undisturbed=True)
    assert done.returncode == 0, done.stdout
    found = ends(folder)
    # Each worker has statistics of its own, or there would be little to keep apart.
    assert found[0]["weights"] != found[1]["weights"]
    assert found[0]["history"] == found[1]["history"]
    return found


def test_workers_stop_after_the_same_batch_and_go_on_there(tmp_path, undisturbed):
    """A notice in training on one, in validation on the other."""
    done = launch(tmp_path, "1:3,0:14")
    assert done.returncode == 0, done.stdout
    assert "2 restarts" in done.stdout
    assert ends(tmp_path) == undisturbed
    stops = [(event["epoch"], event["batch"]) for event in events(tmp_path, "preempted")]
    assert len(stops) == 4
    assert stops[0] == stops[1]
    assert stops[2] == stops[3]
    assert all(event["repeated"] == 0 for event in events(tmp_path, "resume"))
    assert {event["outcome"] for event in events(tmp_path, "preempted")} <= {
        "saved",
        "saved before",
    }
    report = reported(tmp_path / "state")
    assert [(lane.worker, lane.leads) for lane in report.lanes] == [(0, True), (1, False)]
    assert [len(lane.accounts) for lane in report.lanes] == [3, 3]
    assert (report.summary.restarts, report.summary.repeated) == (2, 0)


def test_after_kill_9_the_workers_go_on_from_a_backup(tmp_path, undisturbed):
    done = launch(tmp_path, "1:19k", save_freq=3, save_every_seconds=0.05)
    assert done.returncode == 0, done.stdout
    assert "1 restart" in done.stdout
    assert ends(tmp_path) == undisturbed
    # One kind of backup does not keep the other from being made.
    found = events(tmp_path, "backup")
    places = [(event["pid"], event["epoch"], event["batch"]) for event in found]
    killed, other = sorted({pid for pid, *_ in places})[:2]
    of_one = [place for pid, *place in places if pid == killed]
    of_other = [place for pid, *place in places if pid == other]
    # After the same batches on both; one of them may have come further before it ended.
    shorter = min(len(of_one), len(of_other))
    assert shorter > 3
    assert of_one[:shorter] == of_other[:shorter]
    resumed = events(tmp_path, "resume")
    assert len(resumed) == 2, "a fresh start would end in the same way"
    assert resumed[0]["file"] == resumed[1]["file"]
    assert resumed[0]["repeated"] == resumed[1]["repeated"] < 12
    kinds = [event["reason"] for event in found]
    assert "0.05 s have passed" in kinds
    assert "backup" in kinds[kinds.index("0.05 s have passed") :]


@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_worker_that_dies_on_the_way_leaves_a_marked_checkpoint(tmp_path, worker):
    """It gets the notice, tells the others, and is gone before the step that all agreed on."""
    plan = f"{worker}:2,{worker}:3k"
    for attempt in range(5):
        tmp_path = tmp_path / str(attempt)
        done = launch(tmp_path, plan, save_freq=None, restarts=2, pause=0.3)
        assert done.returncode == 0, done.stdout
        (first_life,) = [
            line for line in done.stdout.splitlines() if line.startswith("[launch] start ")
        ]
        if f"worker {worker}: code 137" in first_life:
            break
        # Else all had agreed on the very step in which the notice came.
    assert f"worker {1 - worker}: code 42" in first_life, done.stdout
    (preempted,) = events(tmp_path, "preempted")
    assert preempted["outcome"].startswith("saved, ")
    resumed = events(tmp_path, "resume")
    assert [event["degraded"] for event in resumed] == 2 * [[f"worker {worker}"]]
    assert {(event["epoch"], event["batch"]) for event in resumed} == {(0, preempted["batch"])}
    assert len(facts(tmp_path)[0]["history"]["loss"]) == 4


@pytest.mark.long
def test_fewer_and_more_workers_go_on_with_the_chiefs_values(tmp_path):
    done = launch(tmp_path, "1:3", restarts=0, save_every_seconds=0.01)
    assert done.returncode == 42, done.stdout
    # By seconds all save after the same batch, too.
    assert events(tmp_path, "backup")
    done = launch(tmp_path, "0:9", workers=1, restarts=0)
    assert done.returncode == 42, done.stdout
    assert "workers was 2 and is 1" in done.stdout
    done = launch(tmp_path, "", workers=2, restarts=0)
    assert done.returncode == 0, done.stdout
    assert "this worker takes the chief's" in done.stdout
    chief, other = facts(tmp_path)
    assert chief["begin"] == other["begin"], "the statistics of the one that was alone"
    assert other["hooks"] == HOOKS
    assert chief["history"] == other["history"]
    assert len(chief["history"]["loss"]) == 4
    assert chief["hooks"] == HOOKS


@pytest.mark.long
def test_the_chief_knows_how_long_another_worker_has(tmp_path, undisturbed):
    """It has no notice itself, and begins no save that cannot be finished in time."""
    done = launch(tmp_path, "1:14", grace_period=20, slow=1000)
    assert done.returncode == 0, done.stdout
    assert ends(tmp_path) == undisturbed
    outcomes = {event["pid"]: event["outcome"] for event in events(tmp_path, "preempted")}
    assert len(outcomes) == 2
    assert any(
        outcome.startswith("not saved: ") and "a save takes 1000.0 s" in outcome
        for outcome in outcomes.values()
    ), outcomes
    # From the backup of the epoch before; the batches since then are known.
    assert [event["batch"] for event in events(tmp_path, "resume")] == [0, 0]
    assert {event["repeated"] for event in events(tmp_path, "resume")} == {4}


@pytest.mark.long
def test_training_that_ends_in_time_is_there_on_all_workers_after_a_restart(tmp_path, undisturbed):
    """One of them has a notice that leaves time to train on; all stop where training ends."""
    done = launch(tmp_path, "1:14", grace_period=500, save_freq=None)
    assert done.returncode == 0, done.stdout
    assert "1 restart" in done.stdout
    assert ends(tmp_path) == undisturbed
    assert {event["epoch"] for event in events(tmp_path, "backup")} == {1}, "saved at the notice"
    assert {event["outcome"] for event in events(tmp_path, "preempted")} == {"saved"}
    assert [event["epoch"] for event in events(tmp_path, "resume")] == [4, 4]


def test_a_directory_that_is_not_shared_is_refused(tmp_path):
    folders = str(tmp_path / "state-{task}")
    done = launch(tmp_path, "", restarts=0, directory=folders, shared=1.0)
    assert done.returncode == 1
    assert "Expected a directory that all workers share" in done.stdout
    assert not os.path.exists(tmp_path / "facts-0.json")


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_ten_notices(tmp_path, undisturbed, seed, record_property):
    rng = random.Random(seed)
    hooks = [hook + rng.randint(0, 1) for hook in range(1, HOOKS - 2, 3)]
    plan = ",".join(f"{rng.randint(0, 1)}:{hook}" for hook in hooks)
    done = launch(tmp_path, plan, restarts=20, seconds=850, launcher=LAUNCHER)
    assert done.returncode == 0, done.stdout
    assert ends(tmp_path) == undisturbed
    stops = [event["task"] for event in events(tmp_path, "preempted")]
    assert len(stops) == 2 * len(hooks) == 20, done.stdout
    assert all(event["repeated"] == 0 for event in events(tmp_path, "resume"))
    record_property("campaign", f"two workers, plan {plan}: 10 stops, both equal at the end")
