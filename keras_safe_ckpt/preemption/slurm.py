"""SLURM: which of its signals announce the end of a job, and how much time they leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping

#: Between SIGTERM and SIGKILL: the default of SLURM's KillWait.
_KILL_WAIT_SECONDS = 30.0
#: Nobody asks to be told earlier than that before the end (``--signal=USR1@3600``).
_LONGEST_WARNING_SECONDS = 3600.0


def slurm_signals(environment: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """The signals that mean the end is near in a SLURM job; none outside of one.

    SIGTERM comes at preemption, at the time limit and with ``scancel``. SIGUSR1 is what
    ``sbatch --signal=USR1@120`` sends before the time limit.
    """
    return (signal.SIGTERM, signal.SIGUSR1) if environment.get("SLURM_JOB_ID") else ()


def slurm_deadline(environment: Mapping[str, str], received: signal.Signals) -> float | None:
    """How many seconds are left after this signal; None if that is not known.

    SLURM does not tell a job the GraceTime of its partition, so that the wait before SIGKILL
    is taken for granted after SIGTERM, and nothing beyond it.
    """
    if received not in slurm_signals(environment):
        return None
    to_end = _seconds_to_end(environment)
    if received == signal.SIGTERM:
        if to_end is None or to_end + _KILL_WAIT_SECONDS <= 0:
            # A job that has outlived its end was given another one since it was started.
            return _KILL_WAIT_SECONDS
        return min(_KILL_WAIT_SECONDS, to_end + _KILL_WAIT_SECONDS)
    if to_end is None or not 0 <= to_end <= _LONGEST_WARNING_SECONDS:
        # Long before the end it is not the time limit: a preemption may send this signal, too
        # (PreemptParameters=send_user_signal).
        return None
    return to_end


def describe_job(environment: Mapping[str, str]) -> dict[str, str | int]:
    """What an event log should know of the job: its id, its restarts, its step, its node.

    In a log ``step`` is that of the training.

    ::

        {"job": "4711", "restarts": 2, "job_step": "0", "node": "node17"}
    """
    if not environment.get("SLURM_JOB_ID"):
        return {}
    # SLURM sets the count at the first restart only.
    restarts = _whole_number(environment.get("SLURM_RESTART_COUNT", "")) or 0
    job: dict[str, str | int] = {"job": environment["SLURM_JOB_ID"], "restarts": restarts}
    for name, variable in (("job_step", "SLURM_STEP_ID"), ("node", "SLURMD_NODENAME")):
        if environment.get(variable):
            job[name] = environment[variable]
    return job


def _seconds_to_end(environment: Mapping[str, str]) -> float | None:
    end = _whole_number(environment.get("SLURM_JOB_END_TIME", ""))
    # SLURM says "no limit" by numbers of its own, and a moment far away says as little.
    return end - time.time() if end is not None and 0 < end < 2**32 - 2 else None


def _whole_number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
