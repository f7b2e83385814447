"""Notices of one worker, as the others hear of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from preempted_fit import Bell
from processes import wait_until

from keras_safe_ckpt.cluster.cohort import Cohort
from keras_safe_ckpt.cluster.coordination import LocalStore
from keras_safe_ckpt.interruption.lookout import Lookout, ends_run, stops
from keras_safe_ckpt.preemption.choosing import choose
from keras_safe_ckpt.preemption.pace import Pace

MEMBERS = ("worker 0", "worker 1")


class Group:
    """Two workers that train in step; the second one has a bell."""

    def __init__(self) -> None:
        store = LocalStore()
        self.bell = Bell()
        self.cohorts = [Cohort(store, task, MEMBERS, 1) for task in MEMBERS]
        self.lookouts = [
            Lookout(
                choose(self.bell if cohort.task == "worker 1" else None),
                cohort,
                Pace(),
                grace_seconds=None,
                is_wanted=lambda frame: True,
                on_notice=lambda notice: None,
            )
            for cohort in self.cohorts
        ]
        for lookout in self.lookouts:
            lookout.start()

    def each(self, method: str) -> list[Any]:
        """Of both at the same time, since they wait for each other."""
        found: list[Any] = [None, None]

        def work(number: int) -> None:
            found[number] = getattr(self.lookouts[number], method)()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found[0] == found[1], "both do the same"
        return list(found[0])

    def train_until(self, purpose: str) -> None:
        def is_due() -> bool:
            return [request.purpose for request in self.each("after_step")] == [purpose]

        wait_until(is_due, f"all are asked to {purpose}")

    def close(self) -> None:
        for lookout, cohort in zip(self.lookouts, self.cohorts, strict=True):
            lookout.close()
            cohort.close()


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.close()


def test_all_know_how_long_one_of_them_has_until_it_is_withdrawn(group):
    chief, other = (lookout.desk for lookout in group.lookouts)
    assert chief.seconds_left() is None
    group.bell.ring(deadline=time.monotonic() + 500)
    group.train_until("save")
    assert 400 < chief.seconds_left() <= 500
    other.withdraw("bell")

    def is_forgotten() -> bool:
        assert group.each("after_step") == []
        return chief.seconds_left() is None

    wait_until(is_forgotten, "the chief has heard of it")
    # Nobody stops at the end for a notice that does not hold any more.
    assert group.each("at_end") == []


def test_whoever_comes_first_to_the_end_of_training_stops_all(group):
    group.bell.ring(deadline=time.monotonic() + 500)
    group.train_until("save")
    # The one without a notice of its own, which would have ended the log of requests.
    chief, other = group.lookouts
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(chief.at_end()))
    first.start()
    first.join(30)
    found.append(other.at_end())
    assert [stops(due) is not None for due in found] == [True, True]


def test_a_notice_that_comes_with_the_last_step_is_the_end_as_well(group):
    """All have agreed to save after a step that does not come."""
    group.each("after_step")
    group.bell.ring(deadline=time.monotonic() + 500)
    wait_until(lambda: all(lookout.expects for lookout in group.lookouts), "all have heard")
    due = group.each("at_end")
    assert ends_run(tuple(due)) is not None


def test_advice_does_not_end_anything(group):
    group.bell.ring(advisory=True)
    group.train_until("save")
    assert group.lookouts[0].desk.seconds_left() is None
    due = group.each("at_end")
    assert ends_run(tuple(due)) is None
