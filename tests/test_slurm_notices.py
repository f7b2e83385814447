"""What a SLURM job knows of its end."""

from __future__ import annotations

import signal
import time

import pytest

from keras_safe_ckpt.preemption.slurm import describe_job, slurm_deadline, slurm_signals

JOB = {"SLURM_JOB_ID": "4711"}


def ending(seconds_from_now: float) -> dict[str, str]:
    return {**JOB, "SLURM_JOB_END_TIME": str(round(time.time() + seconds_from_now))}


def test_signals_are_those_of_a_job():
    assert slurm_signals(JOB) == (signal.SIGTERM, signal.SIGUSR1)


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": ""}, {"SLURM_PROCID": "0"}])
def test_outside_of_a_job_there_is_nothing(environment):
    environment = {**environment, "SLURM_JOB_END_TIME": str(round(time.time() + 100))}
    assert slurm_signals(environment) == ()
    assert slurm_deadline(environment, signal.SIGTERM) is None
    assert slurm_deadline(environment, signal.SIGUSR1) is None
    assert describe_job(environment) == {}


@pytest.mark.parametrize(
    ("to_end", "expected"),
    [
        (100_000, 30),  # Preempted or cancelled long before the end.
        (10, 30),
        (0, 30),  # The time limit: SIGKILL comes 30 s later.
        (-20, 10),
        (-29, 1),
        (-3600, 30),  # The limit was raised after the start.
    ],
)
def test_sigterm_leaves_the_wait_before_sigkill(to_end, expected):
    left = slurm_deadline(ending(to_end), signal.SIGTERM)
    assert left == pytest.approx(expected, abs=1)
    assert 0 <= left <= 30


@pytest.mark.parametrize("to_end", [1, 60, 120, 3500])
def test_sigusr1_leaves_the_time_to_the_end_of_the_job(to_end):
    assert slurm_deadline(ending(to_end), signal.SIGUSR1) == pytest.approx(to_end, abs=1)


@pytest.mark.parametrize("to_end", [-3600, -2, 3700, 100_000])
def test_sigusr1_at_another_time_is_not_the_time_limit(to_end):
    assert slurm_deadline(ending(to_end), signal.SIGUSR1) is None


@pytest.mark.parametrize(
    "end",
    ["", "soon", "0", "-5", "nan", "inf", "4294967294", "4294967295", "9" * 400, "-" + "9" * 400],
)
def test_end_time_that_says_nothing(end):
    environment = {**JOB, "SLURM_JOB_END_TIME": end}
    assert slurm_deadline(environment, signal.SIGTERM) == 30
    assert slurm_deadline(environment, signal.SIGUSR1) is None


def test_end_time_is_not_always_there():
    assert slurm_deadline(JOB, signal.SIGTERM) == 30
    assert slurm_deadline(JOB, signal.SIGUSR1) is None


@pytest.mark.parametrize("other", [signal.SIGINT, signal.SIGUSR2, signal.SIGCONT])
def test_other_signals_announce_nothing(other):
    assert slurm_deadline(ending(100), other) is None


def test_job_is_described():
    assert describe_job(
        {
            **JOB,
            "SLURM_RESTART_COUNT": "2",
            "SLURM_STEP_ID": "0",
            "SLURMD_NODENAME": "node17",
        }
    ) == {"job": "4711", "restarts": 2, "job_step": "0", "node": "node17"}


def test_first_run_of_a_batch_script_has_no_restarts_and_no_step():
    assert describe_job(JOB) == {"job": "4711", "restarts": 0}
    assert describe_job({**JOB, "SLURM_RESTART_COUNT": "?"})["restarts"] == 0
