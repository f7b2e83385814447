"""All workers act after the same step: workers that are threads, over a store in memory."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import wait_until

from keras_safe_ckpt import AgreementError
from keras_safe_ckpt.cluster.agreement import (
    ClusterAgreement,
    LocalAgreement,
    Request,
    agreement_in,
)
from keras_safe_ckpt.cluster.cohort import Cohort, open_cohort
from keras_safe_ckpt.cluster.coordination import LocalStore
from keras_safe_ckpt.cluster.roles import Role

_generations = itertools.count(1000)
_opened: list = []


@pytest.fixture(autouse=True)
def everything_closed(monkeypatch):
    # Threads see soon that nobody wants them any more: each test waits for their end.
    for module in ("agreement", "cohort"):
        monkeypatch.setattr(f"keras_safe_ckpt.cluster.{module}._SLICE_SECONDS", 0.05)
    yield
    close_all()
    wait_until(lambda: not threads(), "the threads end")


def close_all():
    while _opened:
        _opened.pop().close()


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("keras_safe_ckpt-")]


def opened(one):
    _opened.append(one)
    return one


class Cluster:
    """Workers that train in step: each step waits for all of them, as a collective does."""

    def __init__(self, workers: int, patience: float = 20.0) -> None:
        store, generation = LocalStore(), next(_generations)
        members = tuple(f"worker {index}" for index in range(workers))
        self.cohorts = [opened(Cohort(store, task, members, generation)) for task in members]
        self.agreements = [
            opened(agreement_in(cohort, "stop", patience_seconds=patience))
            for cohort in self.cohorts
        ]
        self._together = threading.Barrier(workers, timeout=30)
        self.errors: list[BaseException] = []

    def train(self, steps, before_step=lambda worker, step: None):
        """Per worker: after which step it saw what was due; "end" for what was due at the end."""
        seen = [[] for _ in self.agreements]

        def work(worker):
            agreement = self.agreements[worker]
            try:
                for step in range(1, steps + 1):
                    before_step(worker, step)
                    self._together.wait()
                    due = agreement.after_step()
                    if due:
                        seen[worker].append((step, due))
                    if any(request.purpose == "stop" for request in due):
                        agreement.close()
                        return
                due = agreement.at_end()
                if due:
                    seen[worker].append(("end", due))
            except BaseException as error:  # noqa: BLE001  # raised by the test
                self.errors.append(error)
                self._together.abort()

        self.run(work)
        close_all()
        if self.errors:
            raise self.errors[0]
        return seen

    def run(self, work):
        threads = [
            threading.Thread(target=work, args=(worker,)) for worker in range(len(self.agreements))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a worker hangs"


STEPS = 5


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("position", range(1, STEPS + 1))
def test_a_notice_at_any_worker_before_any_step_stops_all_after_the_same_step(workers, position):
    for asked in [*((one,) for one in range(workers)), tuple(range(workers))]:
        cluster = Cluster(workers)

        def notice(worker, step, cluster=cluster, asked=asked):
            if step == position and worker in asked:
                assert cluster.agreements[worker].request("stop", "SIGTERM")

        seen = cluster.train(STEPS, notice)
        assert all(one == seen[0] for one in seen)
        (step, due), *more = seen[0]
        assert not more
        # How soon depends on when the threads that read the log get their turn.
        assert step == "end" or position <= step
        assert {request.task for request in due} <= {f"worker {one}" for one in asked} | {
            "this process"
        }
        assert {(request.purpose, request.reason) for request in due} == {("stop", "SIGTERM")}


def test_a_notice_at_a_random_moment_from_another_thread():
    rng = random.Random(1)
    stops = set()
    for _ in range(60):
        cluster = Cluster(3)
        moment, who = rng.random() * 0.004, rng.randrange(3)

        def notice(cluster=cluster, moment=moment, who=who):
            time.sleep(moment)
            cluster.agreements[who].request("stop", "maintenance")

        thread = threading.Thread(target=notice)
        thread.start()
        seen = cluster.train(12)
        thread.join()
        assert all(one == seen[0] for one in seen)
        stops.add(seen[0][0][0] if seen[0] else None)
    assert len(stops) > 3, stops  # In truth at many moments.


def test_nobody_asks_and_nothing_is_due():
    assert Cluster(2).train(4) == [[], []]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 6), st.sampled_from(["save", "stop"])),
        max_size=6,
    )
)
@settings(max_examples=40, deadline=None)
def test_any_number_of_requests_is_seen_by_all_in_the_same_order(requests):
    cluster = Cluster(3)

    def ask(worker, step):
        for who, when, purpose in requests:
            if (who, when) == (worker, step):
                cluster.agreements[worker].request(purpose, f"{who}{when}")

    seen = cluster.train(6, ask)
    assert seen[0] == seen[1] == seen[2]
    delivered = [request.purpose for _, due in seen[0] for request in due]
    asked = [purpose for _, _, purpose in requests]
    if "stop" in asked:
        assert "stop" in delivered
    else:
        assert delivered == ["save"] * len(asked)


def test_a_request_after_the_end_is_refused():
    cluster = Cluster(2)
    cluster.train(2)
    assert not cluster.agreements[0].request("stop", "too late")
    assert not cluster.agreements[1].request("stop", "too late")


def test_training_that_ends_on_one_worker_first_agrees_on_what_came_before():
    """The other still has its request in the log, or it comes too late for both."""
    for _ in range(30):
        cluster = Cluster(2)
        second = cluster.agreements[1]
        results = {}

        def end(cluster=cluster, results=results):
            results["first"] = cluster.agreements[0].at_end()

        thread = threading.Thread(target=end)
        thread.start()
        taken = second.request("stop", "late")
        results["second"] = second.at_end()
        thread.join(30)
        assert results["first"] == results["second"]
        assert bool(results["first"]) == taken


def test_the_flag_of_a_running_step_is_never_overtaken():
    """Whatever the reader does between a count and a look at the flag, nobody passes the target."""
    cluster = Cluster(2, patience=20)
    agreement = cluster.agreements[0]
    assert isinstance(agreement, ClusterAgreement)
    for _ in range(7):
        assert agreement.after_step() == ()
        assert cluster.agreements[1].after_step() == ()
    cluster.agreements[1].request("save", "x")
    wait_until(lambda: agreement._rounds and agreement._rounds[0].settled.is_set(), "agreed")
    wait_until(lambda: bool(cluster.agreements[1]._rounds), "seen")
    assert agreement._rounds[0].target == 8
    request = Request("save", "x", "worker 1")
    assert agreement.after_step() == (request,)
    assert cluster.agreements[1].after_step() == (request,)


class SlowStore(LocalStore):
    """One whose readers hear late of what is there."""

    def get(self, key, seconds):
        value = super().get(key, seconds)
        if value is not None and "/log/" in key:
            threading.Event().wait(0.3)
        return value


def test_whoever_asks_after_a_step_halts_there():
    """A step more would fail if another worker has died, and nothing be saved."""
    members = ("worker 0", "worker 1")
    cohort = opened(Cohort(SlowStore(), "worker 0", members, next(_generations)))
    # The other one never answers.
    agreement = opened(agreement_in(cohort, "stop", patience_seconds=0.1))
    assert agreement.request("stop", "SIGTERM")
    assert agreement.expects


def test_the_time_that_is_left_comes_with_a_request():
    cluster = Cluster(2)
    seen = cluster.train(
        3,
        lambda worker, step: (
            (worker, step) == (1, 1)
            and cluster.agreements[1].request("stop", "x", seconds_left=50.0)
        ),
    )
    for ((_, (request,)),) in seen:
        assert 40 < request.seconds_left() <= 50
        assert time.monotonic() - 10 < request.heard <= time.monotonic()
    local = LocalAgreement()
    local.request("stop", "x", seconds_left=50.0)
    local.request("stop", "x")
    assert [request.deadline is None for request in local.after_step()] == [False, True]


def test_a_worker_that_does_not_answer_is_named():
    store = LocalStore()
    members = ("worker 0", "worker 1", "worker 2")
    generation = next(_generations)
    present = [opened(Cohort(store, task, members, generation)) for task in members[:2]]
    agreements = [opened(ClusterAgreement(one, "stop", patience_seconds=0.3)) for one in present]
    agreements[1].request("stop", "x")
    for agreement in agreements:
        wait_until(lambda agreement=agreement: bool(agreement._rounds), "seen")
        with pytest.raises(AgreementError, match=r"worker 2 did not answer within 0.3 s") as caught:
            agreement.after_step()
        assert caught.value.missing == ("worker 2",)


def test_a_leader_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr("keras_safe_ckpt.cluster.agreement._MARGIN_SECONDS", 0.1)
    store = LocalStore()
    cohort = opened(Cohort(store, "worker 1", ("worker 0", "worker 1"), next(_generations)))
    agreement = opened(ClusterAgreement(cohort, "stop", patience_seconds=0.2))
    agreement.request("stop", "x")
    wait_until(lambda: bool(agreement._rounds), "seen")
    with pytest.raises(AgreementError, match="no word from worker 0"):
        agreement.after_step()
    with pytest.raises(AgreementError, match="no word from worker 0"):
        agreement.at_end()


class BrokenStore(LocalStore):
    """A store whose server goes away."""

    broken = False

    def get(self, key, seconds):
        value = super().get(key, min(seconds, 0.05))
        if self.broken:
            raise AgreementError(["worker 0"], "the coordination service is gone")
        return value


def test_a_store_that_goes_away_ends_the_wait():
    store = BrokenStore()
    cohort = opened(Cohort(store, "worker 1", ("worker 0", "worker 1"), next(_generations)))
    agreement = opened(ClusterAgreement(cohort, "stop"))
    agreement.request("stop", "x")
    wait_until(lambda: bool(agreement._rounds), "seen")
    store.broken = True
    with pytest.raises(AgreementError, match="service is gone"):
        agreement.after_step()
    with pytest.raises(AgreementError, match="service is gone"):
        agreement.at_end()


def test_the_failure_of_a_worker_ends_the_wait_for_an_agreement():
    # One does not answer: its reader is not there.
    store, members = LocalStore(), ("worker 0", "worker 1")
    generation = next(_generations)
    cohorts = [opened(Cohort(store, task, members, generation)) for task in members]
    agreement = opened(ClusterAgreement(cohorts[0], "stop", patience_seconds=60))
    agreement.request("stop", "x")
    wait_until(lambda: bool(agreement._rounds), "seen")
    cohorts[1].fail(ValueError("bad batch"))
    with pytest.raises(AgreementError, match="worker 1 failed with ValueError: bad batch"):
        agreement.after_step()
    with pytest.raises(AgreementError, match="bad batch"):
        agreement.at_end()


def test_a_request_after_a_failure_blames_who_failed():
    store, members = LocalStore(), ("worker 0", "worker 1", "worker 2")
    generation = next(_generations)
    cohorts = [opened(Cohort(store, task, members, generation)) for task in members]
    agreements = [opened(ClusterAgreement(cohorts[n], "stop")) for n in (0, 2)]
    cohorts[1].fail(ValueError("boom"))
    for cohort in (cohorts[0], cohorts[2]):
        with pytest.raises(AgreementError, match="boom"):
            wait_until(lambda cohort=cohort: cohort.check(), "never")
    agreements[1].request("stop", "x")
    for agreement in agreements:
        wait_until(lambda agreement=agreement: bool(agreement._rounds), "seen")
        began = time.monotonic()
        with pytest.raises(AgreementError, match="worker 1 failed with ValueError: boom"):
            agreement.after_step()
        assert time.monotonic() - began < 10


def test_readers_end_with_their_cohort():
    cluster = Cluster(2)
    for cohort in cluster.cohorts:
        cohort.close()
    wait_until(lambda: not threads(), "the threads end", 10)


def test_alone_what_is_asked_is_due_after_the_running_step():
    cohort = open_cohort(Role())
    agreement = agreement_in(cohort, "stop")
    assert isinstance(agreement, LocalAgreement)
    assert agreement.after_step() == ()
    agreement.request("save", "a")
    agreement.request("stop", "b")
    assert [request.purpose for request in agreement.after_step()] == ["save", "stop"]
    assert agreement.after_step() == ()
    agreement.close()
    assert not agreement.request("stop", "c")
    assert agreement.at_end() == ()


def test_threads_end_when_the_agreement_is_closed():
    wait_until(lambda: not threads(), "those of other tests end", 10)
    Cluster(2)
    assert len(threads()) == 4
    close_all()
    wait_until(lambda: not threads(), "the threads end", 10)


class NeverReads(LocalStore):
    """Its log has no entries, not even in the end."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()

    def get(self, key, seconds):
        if "/log/" in key:
            self.released.wait(60)
        return super().get(key, seconds)


def test_a_log_of_requests_that_does_not_end_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr("keras_safe_ckpt.cluster.agreement._MARGIN_SECONDS", 0.1)
    store = NeverReads()
    cohort = opened(Cohort(store, "worker 0", ("worker 0", "worker 1"), next(_generations)))
    agreement = opened(agreement_in(cohort, "stop", patience_seconds=0.1))
    try:
        with pytest.raises(AgreementError, match="does not end"):
            agreement.at_end()
        assert not store.released.is_set()
    finally:
        store.released.set()
