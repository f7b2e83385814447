"""Random schedules of processes that take a lock, die, fork, are stopped and interrupted."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from lock_schedules import Pool, judged, schedules
from redis_server import shared_redis

from keras_safe_ckpt import LockManager, RedisLocks

__all__ = ["shared_redis"]  # Fixtures.

#: To repeat what a campaign has printed.
SEED = "LOCK_SCHEDULES_SEED"

QUICK = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(params=["files", "redis"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pool]:
    if request.param == "files":
        locks: Any = LockManager()
    else:
        locks = RedisLocks(request.getfixturevalue("shared_redis").url)
    one = Pool(tmp_path, locks, ("keras_safe_ckpt.storage.redis_locks", "portalocker.redis"))
    yield one
    one.close()


def obeyed(pool: Pool, how: settings, seed: int | None = None) -> None:
    @how
    @given(schedules())
    def never_two_and_never_a_dead_lock(schedule: list[tuple[Any, ...]]) -> None:
        pool.run(schedule)

    if seed is not None:
        never_two_and_never_a_dead_lock = hypothesis.seed(seed)(never_two_and_never_a_dead_lock)
    never_two_and_never_a_dead_lock()


def test_nobody_is_beside_a_writer_and_nobody_waits_for_ever(pool):
    obeyed(pool, QUICK)
    assert pool.count["stays"] > pool.count["schedules"], pool.count


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_random_schedules(pool, request, record_property):
    seed = int(os.environ.get(SEED) or secrets.randbelow(1 << 32))
    examples = 600 if "files" in request.node.name else 250
    print(f"{SEED}={seed}")
    obeyed(pool, settings(QUICK, derandomize=False, max_examples=examples), seed)
    count = pool.count
    record_property(
        "campaign",
        f"{request.node.name}, {SEED}={seed}: {count['schedules']} schedules, "
        f"{count['acquire']} acquisitions ordered, {count['stays']} stays, "
        f"{count['kill'] + count['exit']} deaths, {count['fork']} forks, {count['stop']} stops, "
        f"{count['interrupt']} Ctrl-C: nobody beside a writer, no dead-lock, nothing left open",
    )


@pytest.mark.parametrize(
    "lines",
    [
        ["1 7 enter 7-0 exclusive", "3 8 enter 8-0 exclusive", "4 7 leave 7-0 -"],
        ["1 7 enter 7-0 shared", "3 8 enter 8-0 exclusive", "4 7 leave 7-0 -"],
        ["1 7 enter 7-0 exclusive", "3 8 enter 8-0 shared", "4 8 leave 8-0 -"],
        [
            *("1 7 enter 7-0 shared", "2 8 enter 8-0 shared", "3 8 leave 8-0 -"),
            *("4 9 enter 9-0 exclusive", "5 7 leave 7-0 -"),
        ],
    ],
)
def test_the_judge_sees_who_is_beside_a_writer(tmp_path, lines):
    notes = tmp_path / "notes"
    notes.write_text("\n".join(lines))
    with pytest.raises(AssertionError, match="came in beside"):
        judged(notes, {7: 5})


def test_the_judge_lets_those_pass_who_were_alone(tmp_path):
    notes = tmp_path / "notes"
    lines = ["1 7 enter 7-0 exclusive", "3 8 enter 8-0 shared", "4 9 enter 9-0 shared"]
    notes.write_text("\n".join([*lines, "5 8 leave 8-0 -", "6 9 exit all -"]))
    assert len(judged(notes, {7: 2})) == 3
