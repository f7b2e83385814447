"""TensorFlow's documented examples for its handler, with only the class name changed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import clusters
import pytest
from bundle_files import leftovers
from clusters import FORKING, all_printed, completed, facts
from forking import Forking
from histories import reported
from processes import environment

from keras_safe_ckpt.storage.events import EventLog

PROGRAM = Path(__file__).with_name("guarded_loops.py")
EXAMPLES = ("handler", "run", "scope")


def run(
    forking: Forking, folder: Path, plan: str = "", strategy: str = "none"
) -> tuple[list[int], str]:
    """Start it until it does not ask for it any more; the codes with which it ended."""
    folder.mkdir(exist_ok=True)
    program = Path(shutil.copy(PROGRAM, folder))  # Its output goes beside it.
    codes: list[int] = []
    output = ""
    while not codes or codes[-1] == 42:
        process = forking.start(environment(), program, folder, plan, strategy)
        output += "".join(process.communicate(120))
        codes.append(process.returncode)
        assert len(codes) < 10, output
    return codes, output


def launch(
    folder: Path, plan: str = "", *, codes: str = "42,143,137", restarts: int = 9
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    command = [*FORKING, "--workers=2"]
    command += [f"--max-restarts={restarts}", f"--restart-codes={codes}", "--pause-seconds=0"]
    return all_printed(completed([*command, PROGRAM, folder, plan, "workers"], 250))


def events(folder: Path, example: str, name: str) -> list[dict[str, Any]]:
    return [event for event in EventLog(folder / example).read() if event["event"] == name]


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "facts-0.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any, forking: Forking) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    codes, output = run(forking, folder)
    assert codes == [0], output
    found = result(folder)
    assert found["handler"]["runs"] == found["run"]["runs"] == found["scope"]["steps"] == 6
    return found


def test_interrupted_in_each_example(tmp_path, undisturbed, forking):
    """In the second one after its last step: the loop ends before the step that was agreed on."""
    codes, output = run(forking, tmp_path, "0:handler:4,0:run:6,0:scope:3")
    assert codes == [42, 42, 42, 0], output
    assert result(tmp_path) == undisturbed
    for example in EXAMPLES:
        assert leftovers(tmp_path / example) == []
    (ended,) = events(tmp_path, "handler", "preempted")
    assert ended["outcome"] == "saved"
    assert ended["runs"] == 4  # Right after that step, with what the loop did since.
    assert output.count("After 6 runs: saved") == 1
    assert output.count("Going on after 6 runs") == 2  # Nothing is trained again.
    (lane,) = reported(tmp_path / "handler").lanes
    first, second, *_ = [account.life for account in lane.accounts]
    assert (first.ending, second.ending) == ("preempted", "finished")
    assert (second.resume.runs, second.resume.file) == (4, first.saves[-1].event.file)
    assert lane.accounts[0].times.lost == 0
    assert all(save.blocked > 0 for save in first.saves)


@pytest.mark.long
def test_mirrored(tmp_path, forking):
    codes, output = run(forking, tmp_path / "undisturbed", strategy="mirrored")
    assert codes == [0], output
    codes, output = run(forking, tmp_path / "interrupted", "0:scope:5", strategy="mirrored")
    assert codes == [42, 0], output
    assert result(tmp_path / "interrupted") == result(tmp_path / "undisturbed")


@pytest.fixture(scope="module")
def two_undisturbed(tmp_path_factory: Any) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = launch(folder)
    assert done.returncode == 0, done.stdout
    first, second = found = facts(folder)
    assert first == second
    assert first["handler"]["runs"] == 6
    return found


@pytest.mark.long
def test_two_workers_interrupted_in_each_example(tmp_path, two_undisturbed):
    """In the second one after its last step, on one of them: both save, or the one alone if the
    other had ended its loop before it heard of it."""
    done = launch(tmp_path, "1:handler:4,0:run:6,1:scope:3")
    assert done.returncode == 0, done.stdout
    assert facts(tmp_path) == two_undisturbed
    for example in EXAMPLES:
        assert leftovers(tmp_path / example) == []
        assert len(events(tmp_path, example, "save")) == 1  # The chief's.
        ends = events(tmp_path, example, "backup" if example == "run" else "preempted")
        assert ends
        assert all(event["outcome"].startswith("saved") for event in ends)
        assert len(ends) == 2 or example == "run"
        assert len({event["runs"] for event in ends}) == 1


def test_workers_that_die(tmp_path, two_undisturbed):
    """Without a notice nothing is saved. With one, whoever is left does not wait for the dead."""
    done = launch(tmp_path, "1:run:4k,0:scope:3d,1:scope:3k")
    assert done.returncode == 0, done.stdout
    assert facts(tmp_path) == two_undisturbed
    assert events(tmp_path, "run", "preempted") == []
    preempted = events(tmp_path, "scope", "preempted")
    assert len(preempted) == 1, done.stdout
    ended = preempted[0]
    assert ended["degraded"], done.stdout
    assert ended["outcome"].startswith("saved, degraded"), done.stdout
    assert ended["runs"] == 3
    # From when on it could be known.
    (notice,) = events(tmp_path, "scope", "notice")
    assert ended["time"] - notice["time"] < 25


ERRORS = """
import json, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
TASK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
from keras_safe_ckpt import AgreementError, PreemptionGuard
FOLDER = sys.argv[1]
with strategy.scope():
    v = tf.Variable(0.0)
    guard = PreemptionGuard(strategy.cluster_resolver, tf.train.Checkpoint(v=v), f"{FOLDER}/c")

@tf.function
def step():
    one = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", v + 1.0))
    return strategy.reduce("SUM", one, axis=None)

def data_ends():
    raise tf.errors.OutOfRangeError(None, None, "End of sequence")

guard.run(step)
for end in (data_ends, lambda: next(iter(()))):
    try:
        guard.run(end)
    except (StopIteration, tf.errors.OutOfRangeError):
        pass  # On all of them: not an error of anybody.
def broken():
    if TASK == 1:
        raise KeyError("no such column")
    return step()
heard = None
try:
    guard.run(step)
    guard.run(broken)
except (KeyError, AgreementError) as error:
    heard = f"{type(error).__name__}: {error}"
with open(f"{FOLDER}/facts-{TASK}.json", "w") as file:
    json.dump({"heard": heard, "runs": guard.total_run_calls}, file)
"""


def test_an_error_in_one_worker_reaches_all(tmp_path):
    done = clusters.launch(tmp_path, ERRORS)
    first, second = facts(tmp_path)
    assert "heard" in first, done.stdout + done.stderr
    assert "no such column" in first["heard"], done.stdout
    assert "AgreementError" in first["heard"]
    assert "worker 1 failed with KeyError" in first["heard"]
    assert second["heard"].startswith("KeyError")
    assert second["runs"] == 2
    # The news may come before it has left the step that both have made.
    assert first["runs"] in (1, 2)
