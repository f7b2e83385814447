"""When a save is due."""

from __future__ import annotations

import pytest

from keras_safe_ckpt.training.cadence import AnyOf, EveryBatches, EveryEpoch, EverySeconds


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def due(cadence, batches) -> list[int]:
    return [batch for batch in batches if cadence.after_batch(batch)]


def test_every_epoch_is_never_due_in_between():
    assert due(EveryEpoch(), range(10)) == []
    assert EveryEpoch().after_epoch()


def test_every_batches_counts():
    assert due(EveryBatches(3), range(10)) == [2, 5, 8]
    assert not EveryBatches(1).after_epoch()


def test_every_batches_counts_on_over_epochs():
    cadence = EveryBatches(4)
    assert due(cadence, range(3)) == []
    assert due(cadence, range(3)) == [0]
    assert due(cadence, range(3)) == [1]


def test_every_batches_with_several_steps_per_execution():
    """Only batches 3, 7 and 8 of 9 are reported with steps_per_execution=4."""
    cadence = EveryBatches(5)
    assert due(cadence, [3, 7, 8]) == [7]
    assert due(cadence, [3, 7, 8]) == [3, 8]


@pytest.mark.parametrize("count", [0, -1])
def test_every_batches_refuses_less_than_one(count):
    with pytest.raises(ValueError, match=f"save_freq={count}"):
        EveryBatches(count)


def test_every_seconds_is_due_once_each_time():
    clock = Clock()
    cadence = EverySeconds(10, clock)
    assert not cadence.after_batch(0)
    clock.now += 10
    assert cadence.after_batch(1)
    assert not cadence.after_batch(2)
    clock.now += 10
    assert cadence.after_epoch()
    assert not cadence.after_epoch()


def test_every_seconds_counts_from_the_last_save():
    clock = Clock()
    cadence = EverySeconds(10, clock)
    clock.now += 9
    cadence.saved()
    clock.now += 9
    assert not cadence.after_batch(0)
    clock.now += 1
    assert cadence.after_batch(1)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_every_seconds_refuses_what_is_not_positive(seconds):
    with pytest.raises(ValueError, match=f"save_every_seconds={seconds}"):
        EverySeconds(seconds)


def test_any_of_asks_all_each_time():
    clock = Clock()
    batches, seconds = EveryBatches(2), EverySeconds(10, clock)
    cadence = AnyOf([seconds, batches])
    clock.now += 10
    assert cadence.after_batch(0)  # Because of the time; the batch counts all the same.
    assert cadence.after_batch(1)
    assert not cadence.after_epoch()
    assert AnyOf([seconds, EveryEpoch()]).after_epoch()


def test_any_of_tells_all_of_a_save():
    clock = Clock()
    cadence = AnyOf([EveryEpoch(), EverySeconds(10, clock)])
    clock.now += 9
    cadence.saved()
    clock.now += 9
    assert not cadence.after_batch(0)
