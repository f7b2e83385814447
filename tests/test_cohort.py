"""Workers that pass barriers together and fail together: threads, over a store in memory."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from keras_setup import tf
from processes import wait_until

from keras_safe_ckpt import AgreementError
from keras_safe_ckpt.cluster import cohort as cohort_module
from keras_safe_ckpt.cluster.cohort import Cohort, common_run, current_cohort, open_cohort
from keras_safe_ckpt.cluster.coordination import (
    LocalStore,
    coordination_store,
    is_coordinated,
    unreachable_tasks,
)
from keras_safe_ckpt.cluster.roles import Role

_generations = itertools.count(5000)
MEMBERS = ("worker 0", "worker 1", "worker 2")


class Store(LocalStore):
    """Notes which collectives are aborted; tasks can be lost."""

    def __init__(self):
        super().__init__()
        self.aborted = []
        self.dead = []

    def lost(self):
        return list(self.dead)

    def abort_collectives(self, reason):
        self.aborted.append(reason)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(cohort_module, "_SLICE_SECONDS", 0.05)
    monkeypatch.setattr(cohort_module, "_SETTLE_SECONDS", 0.2)
    monkeypatch.setattr(cohort_module, "_DEPARTURE_SECONDS", 0.5)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def cohorts(store):
    generation = next(_generations)
    members = [Cohort(store, task, MEMBERS, generation) for task in MEMBERS]
    yield members
    for cohort in members:
        cohort.close()
    wait_until(lambda: not listeners(), "the listeners have ended")


def together(cohorts, work):
    """What each worker's ``work(cohort)`` returned or raised."""
    results = [None] * len(cohorts)

    def run(number, cohort):
        try:
            results[number] = work(cohort)
        except Exception as error:  # noqa: BLE001  # handed to the test
            results[number] = error

    threads = [
        threading.Thread(target=run, args=(number, cohort)) for number, cohort in enumerate(cohorts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results


# Barriers


def test_nobody_passes_a_barrier_before_all_are_there(cohorts):
    arrived, passed = [], []

    def work(cohort):
        for name in ("save", "save", "end"):
            if cohort.task == "worker 2":
                time.sleep(0.05)
                assert len(passed) % 3 == 0, "somebody went ahead"
            arrived.append(cohort.task)
            cohort.barrier(name, seconds=10)
            assert len(arrived) >= 3 * (len(passed) // 3 + 1)
            passed.append(cohort.task)
            cohort.barrier("between", seconds=10)

    assert together(cohorts, work) == [None] * 3
    assert len(passed) == 9


@pytest.mark.parametrize("failing", MEMBERS)
def test_the_error_of_one_reaches_all(cohorts, failing):
    broken = OSError("disk full")

    def work(cohort):
        cohort.barrier("save", broken if cohort.task == failing else None, seconds=10)

    for cohort, result in zip(cohorts, together(cohorts, work), strict=True):
        if cohort.task == failing:
            assert result is broken
        else:
            assert isinstance(result, AgreementError)
            assert result.missing == (failing,)
            assert f"{failing} failed with OSError: disk full" in str(result)


def test_who_does_not_come_is_named(cohorts):
    results = together(cohorts[:2], lambda cohort: cohort.barrier("save", seconds=0.3))
    for result in results:
        assert isinstance(result, AgreementError)
        assert result.missing == ("worker 2",)
        assert "1 of 3 workers did not come to 'save'" in str(result)


def test_an_own_error_stays_when_others_do_not_come(cohorts):
    broken = OSError("disk full")
    for cohort in cohorts[:2]:
        with pytest.raises(OSError, match="disk full"):
            cohort.barrier(f"save {cohort.task}", broken, seconds=0.2)


def test_the_dead_are_not_waited_for(store, cohorts):
    store.dead = ["worker 2"]
    began = time.monotonic()
    results = together(cohorts[:2], lambda cohort: cohort.barrier("save", seconds=60))
    assert time.monotonic() - began < 20
    assert all(result.missing == ("worker 2",) for result in results)


def test_a_missing_leader_is_named(cohorts):
    with pytest.raises(AgreementError, match="no word from worker 0") as caught:
        cohorts[1].barrier("save", seconds=0.2)
    assert caught.value.missing == ("worker 0",)


def test_a_failure_elsewhere_ends_the_wait_at_a_barrier(cohorts):
    def work(cohort):
        if cohort.task == "worker 2":
            cohort.fail(ValueError("bad batch"))
        else:
            cohort.barrier("end", seconds=60)

    results = together(cohorts, work)
    for result in results[:2]:
        assert isinstance(result, AgreementError)
        assert "worker 2 failed with ValueError: bad batch" in str(result)


def test_the_leader_stays_until_the_others_have_heard(store, cohorts, monkeypatch):
    """With it goes the store."""
    monkeypatch.setattr(cohort_module, "_DEPARTURE_SECONDS", 20.0)
    left = []
    real_get = store.get

    def slow_get(key, seconds):
        value = real_get(key, seconds)
        if key.endswith("verdict"):
            time.sleep(0.1)
        return value

    monkeypatch.setattr(store, "get", slow_get)

    def work(cohort):
        cohort.barrier("end", seconds=10)
        left.append(cohort.task)

    together(cohorts, work)
    assert left[-1] == "worker 0" or set(left[:2]) == {"worker 1", "worker 2"}
    assert left.index("worker 0") > 0


def test_a_leader_that_failed_and_took_the_store_with_it_is_quoted(store, cohorts, monkeypatch):
    cohorts[0].fail(OSError("disk full"))
    with pytest.raises(AgreementError, match="disk full"):
        wait_until(lambda: cohorts[1].check(), "never")

    def gone(*arguments):
        raise AgreementError(["worker 0"], "the coordination service is gone")

    monkeypatch.setattr(store, "put", gone)
    monkeypatch.setattr(store, "get", gone)
    with pytest.raises(AgreementError, match="worker 0 failed with OSError: disk full"):
        cohorts[1].barrier("end", seconds=10)
    with pytest.raises(AgreementError, match="service is gone"):
        cohorts[0].barrier("end", seconds=10)


def test_alone_a_barrier_raises_what_it_is_given():
    cohort = open_cohort(Role())
    cohort.barrier("save")
    with pytest.raises(OSError, match="disk full"):
        cohort.barrier("save", OSError("disk full"))


def test_a_leader_that_came_late_is_not_blamed_for_who_did_not_come(cohorts):
    def work(cohort):
        if cohort.leads:
            time.sleep(0.8)
        cohort.barrier("save", seconds=1.0)

    for result in together(cohorts[:2], work):
        assert isinstance(result, AgreementError)
        assert result.missing == ("worker 2",)


# Failures


def test_a_failure_is_heard_after_somebody_has_finished(cohorts):
    cohorts[0].close()
    cohorts[1].fail(ValueError("in the last callback"))
    with pytest.raises(AgreementError, match="worker 1 failed with ValueError: in the last"):
        wait_until(lambda: cohorts[2].check(), "never")
    cohorts[0].check()  # For that one it is over.


def test_who_ends_well_hears_who_did_not(store, cohorts):
    cohorts[1].fail(ValueError("boom"))
    told = "worker 1 failed with ValueError: boom"
    with pytest.raises(AgreementError, match=told), cohorts[0].guarding():
        wait_until(lambda: bool(store.aborted), "heard")


def test_others_hear_of_a_failure_and_leave_their_collectives(store, cohorts):
    called = []
    cohorts[1].on_failure(lambda: called.append(1))
    cohorts[0].fail(ValueError("mine"))
    wait_until(lambda: len(store.aborted) == 2, "both others are torn out")
    assert set(store.aborted) == {"worker 0 failed with ValueError: mine"}
    assert called == [1]
    cohorts[0].check()  # Its own error is what it ends with.
    for cohort in cohorts[1:]:
        with pytest.raises(AgreementError, match="worker 0 failed with ValueError: mine"):
            cohort.check()


def test_who_fails_by_itself_keeps_its_collectives(store, cohorts):
    """All meet the same error: the next `fit` needs them."""
    for cohort in cohorts:
        with pytest.raises(ValueError, match="everywhere"), cohort.guarding():
            raise ValueError("everywhere")
    for cohort in cohorts:
        cohort.close()
    wait_until(lambda: not listeners(), "the listeners have ended")
    assert store.aborted == []


def listeners():
    return [t for t in threading.enumerate() if t.name == "keras_safe_ckpt-cohort"]


def test_after_the_end_a_failure_concerns_nobody(store, cohorts):
    for cohort in cohorts:
        cohort.close()
        cohort.close()
    cohorts[0].fail(ValueError("late"))
    wait_until(lambda: not listeners(), "the listeners have ended")
    cohorts[1].check()
    assert store.aborted == []


def test_the_next_generation_knows_nothing_of_the_last(store, cohorts):
    cohorts[0].fail(ValueError("old"))
    for cohort in cohorts:
        cohort.close()
    generation = next(_generations)
    again = [Cohort(store, task, MEMBERS, generation) for task in MEMBERS]
    assert together(again, lambda cohort: cohort.barrier("end", seconds=10)) == [None] * 3
    for cohort in again:
        cohort.check()
        cohort.close()


ABORTED = """Graph execution error:
Detected at node sgd/CollectiveReduceV2 defined at /job:worker/replica:0/task:0/device:CPU:0
Collective ops is aborted by: {reason}
The error could be from a previous operation. Restart your program to reset."""
CLOSED = """Socket closed
Additional GRPC error information from remote target /job:worker/replica:0/task:2 while calling
:UNKNOWN:Error received from peer {{grpc_status:14}}"""
SILENT = """Error reported from /job:worker/task:2: The following tasks are unhealthy
/job:worker/replica:0/task:2
The tasks have crashed."""


def unavailable(reason):
    return tf.errors.UnavailableError(None, None, ABORTED.format(reason=reason))


@pytest.mark.parametrize("reason", [CLOSED, SILENT])
def test_a_collective_that_loses_a_worker_names_it(cohorts, reason):
    with (
        pytest.raises(AgreementError, match="worker 2 ended without a word") as caught,
        cohorts[0].guarding(),
    ):
        raise unavailable(reason)
    assert caught.value.missing == ("worker 2",)
    assert isinstance(caught.value.__cause__, tf.errors.UnavailableError)
    with pytest.raises(AgreementError, match="worker 2 ended without a word") as caught:
        wait_until(lambda: cohorts[1].check(), "never")  # Not: worker 0 failed.
    assert caught.value.missing == ("worker 2",)


def test_a_collective_that_was_aborted_names_who_failed(store, cohorts):
    cohorts[1].fail(ValueError("mine"))
    wait_until(lambda: bool(store.aborted), "aborted")
    told = "worker 1 failed with ValueError: mine"
    with pytest.raises(AgreementError, match=told), cohorts[0].guarding():
        raise unavailable(store.aborted[0])


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(42), unavailable("no task")]
)
def test_an_error_of_its_own_passes_and_is_told(cohorts, error):
    with pytest.raises(type(error)) as caught, cohorts[2].guarding():
        raise error
    assert caught.value is error
    with pytest.raises(AgreementError, match=f"worker 2 failed with {type(error).__name__}"):
        wait_until(lambda: cohorts[0].check(), "never")


def test_messages_that_name_no_worker_blame_nobody():
    assert unreachable_tasks(ValueError("/job:worker/task:1")) == []
    assert unreachable_tasks(unavailable("timeout")) == []
    assert unreachable_tasks(unavailable(CLOSED)) == ["worker 2"]
    assert unreachable_tasks(unavailable(SILENT)) == ["worker 2"]


# Runs


def test_nested_runs_share_one_cohort():
    assert current_cohort() is None
    with common_run(Role()):
        outer = current_cohort()
        assert outer is not None
        with common_run(Role()):
            assert current_cohort() is outer
        assert current_cohort() is outer
    assert current_cohort() is None
    with pytest.raises(ValueError, match="x"), common_run(Role()):
        raise ValueError("x")
    assert current_cohort() is None


def test_no_cluster_no_coordination(caplog):
    assert not is_coordinated()
    store, reason = coordination_store([("worker", 2)])
    assert store is None
    assert "MultiWorkerMirroredStrategy" in reason
    role = Role(0, 2, True, True, "worker 0", members=("worker 0", "worker 1"))
    assert open_cohort(role) is None
    assert "no MultiWorkerMirroredStrategy was made" in caplog.text
    with common_run(role):
        assert current_cohort() is None


def test_a_tensorflow_without_these_names_is_said(monkeypatch):
    from tensorflow.python.eager import context

    monkeypatch.delattr(context.Context, "abort_collective_ops")
    store, reason = coordination_store([("worker", 2)])
    assert store is None
    assert "its context has no abort_collective_ops" in reason
