"""The demonstration: what it claims is what happened, and it says so when it did not."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from command_line import cli, one_line_of

from keras_safe_ckpt.cli.demo_results import Interruption, interruptions_of, print_results
from keras_safe_ckpt.cli.demo_runs import Ambush, Strike
from keras_safe_ckpt.cli.demo_worker import BATCHES, EPOCHS
from keras_safe_ckpt.storage.events import EventLog


@pytest.mark.long
def test_two_workers_are_interrupted_twice_and_end_as_if_nothing_had_happened(tmp_path, capsys):
    """As the README has it; one run for all that is to be seen of it."""
    done = cli("demo", "--keep", "kept", tensorflow=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    check_table(lines)
    check_story(lines)
    assert lines[-1].endswith("keras-safe-ckpt ls --recursive kept")
    kept = tmp_path / "kept"
    check_log(kept)
    listed = cli("ls", "--recursive", kept, "--json")
    assert len(json.loads(listed.stdout)["checkpoints"]) > 4
    check_that_other_weights_are_not_called_equal(kept, capsys)


def check_table(lines: list[str]) -> None:
    header = next(n for n, line in enumerate(lines) if line.startswith("interruption "))
    for row in lines[header + 1 : header + 3]:
        interrupted, resumed, repeated = [c.strip() for c in row.split("  ") if c.strip()][2:]
        assert interrupted == resumed
        assert repeated == "0"
    (equal,) = [line for line in lines if "equal to the undisturbed run" in line]
    assert equal.split()[-1] == "yes"
    assert any(line.startswith("training blocked per save") and " ms" in line for line in lines)


def check_story(lines: list[str]) -> None:
    told = [line.strip() for line in lines]
    assert sum(line.startswith("SIGTERM to worker ") for line in told) == 2
    assert sum("all start again" in line for line in told) == 2
    assert sum("Resumed at epoch" in line for line in told) == 2
    assert sum(line.startswith("undisturbed: ") for line in told) == EPOCHS
    assert not any("oneDNN" in line for line in told)


def check_log(kept: Path) -> None:
    """The log of the run says the same as the table."""
    events = list(EventLog(kept / "interrupted" / "state").read())
    stops = {(e["epoch"], e["batch"]) for e in events if e["event"] == "preempted"}
    resumes = {(e["epoch"], e["batch"]) for e in events if e["event"] == "resume"}
    assert stops == resumes
    assert len(stops) == 2
    assert {e["repeated"] for e in events if e["event"] == "resume"} == {0}
    in_peace = EventLog(kept / "undisturbed" / "state").read()
    assert "notice" not in {event["event"] for event in in_peace}


def check_that_other_weights_are_not_called_equal(kept: Path, capsys) -> None:
    assert print_results(kept, [], workers=2, seconds=1.0, as_json=True)
    assert json.loads(capsys.readouterr().out)["weights_equal"] is True
    # Those of an earlier batch.
    earlier = min((kept / "interrupted" / "state").glob("run-*.weights.h5"))
    (kept / "interrupted" / "worker-1" / "final.weights.h5").write_bytes(earlier.read_bytes())
    assert not print_results(kept, [], workers=2, seconds=1.0, as_json=False)
    assert " NO" in capsys.readouterr().out


@pytest.mark.campaign
def test_one_worker_that_is_killed(tmp_path):
    done = cli(
        "demo", "--workers", 1, "--kill", "-9", "--json", "--seed", 5, tensorflow=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["weights_equal"] is True
    assert len(document["interruptions"]) == 2
    for one in document["interruptions"]:
        place = [epoch * BATCHES + batch for epoch, batch in (one["struck"], one["resumed"])]
        # As many as were trained after the backup from which it went on; that it had finished
        # the last one, in which it was killed, was not noted yet.
        assert one["repeated"] == max(0, place[0] - place[1] - 1)
        assert one["repeated"] < BATCHES // 3
    assert "SIGKILL to worker 0" in done.stderr
    assert os.listdir(tmp_path) == []


def test_the_places_are_random_and_can_be_had_again():
    def places(seed):
        ambush = Ambush.at_random(random.Random(seed), 2, signal.SIGTERM, 2)
        return [(strike.worker, strike.after) for strike in ambush.strikes]

    assert places(1) == places(1)
    assert len({tuple(places(seed)) for seed in range(20)}) > 15
    for seed in range(200):
        (_, first), (_, second) = places(seed)
        assert 0 < first < EPOCHS * BATCHES // 2 < second < EPOCHS * BATCHES - 1


def test_each_interruption_is_put_together_from_the_lives_before_and_after(tmp_path):
    log = EventLog(tmp_path)
    stop = {"epoch": 0, "batch": 7}
    for event in (
        {"event": "preempted", "pid": 10, **stop},
        {"event": "resume", "pid": 20, **stop, "repeated": 0},
        {"event": "resume", "pid": 21, **stop, "repeated": 0},
        {"event": "resume", "pid": 30, "epoch": 2, "batch": 5, "repeated": 3},
    ):
        with open(log.path, "a") as file:
            file.write(json.dumps(event) + "\n")
    ambush = Ambush(signal.SIGTERM, [Strike(1, 0, 0, 6), Strike(0, 0, 2, 8)])
    assert interruptions_of(tmp_path, ambush, [10, 20, 30]) == [
        Interruption(1, (0, 6), (0, 7), (0, 7), 0),
        Interruption(0, (2, 8), None, (2, 5), 3),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "--workers: expected 1 to 16, received 0"),
        (["--keep", "file"], "a directory was expected"),
        (["--keep", "."], "it is not empty"),
    ],
)
def test_bad_options_are_said_before_anything_starts(tmp_path, options, message):
    (tmp_path / "file").write_text("x")
    done = cli("demo", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert message in one_line_of(done)
    assert os.listdir(tmp_path) == ["file"]


def test_a_signal_that_is_none_is_wrong_usage(tmp_path):
    for text in ("SOFTLY", "STOP", "0", "999"):
        done = cli("demo", "--kill", text, cwd=tmp_path)
        assert done.returncode == 2
        assert "expected -9, or one of SIGTERM, SIGKILL" in done.stderr


def test_a_run_that_fails_says_why(tmp_path):
    """Its workers cannot import TensorFlow."""
    done = cli("demo", "--workers", 1, cwd=tmp_path)
    assert done.returncode == 2
    assert "tensorflow was imported" in one_line_of(done)
