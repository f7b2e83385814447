"""What a notice makes of the time that is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from processes import wait_until

from keras_safe_ckpt.preemption import platforms
from keras_safe_ckpt.preemption.choosing import choose
from keras_safe_ckpt.preemption.desk import SAVE, STOP, WITHDRAW, NoticeDesk
from keras_safe_ckpt.preemption.notices import Notice, Poller, watching
from keras_safe_ckpt.preemption.pace import Pace
from keras_safe_ckpt.preemption.signals import SignalWatcher


class Office:
    """A desk, and what it asked for."""

    def __init__(self, pace: Pace | None = None, trains: bool = True, **options: Any) -> None:
        self.asked: list[str] = []
        self.notices: list[Notice] = []
        self.unanswered: list[str] = []
        self.trains = trains
        self.desk = NoticeDesk(
            pace or Pace(),
            ask=self._ask,
            on_notice=self.notices.append,
            unanswered=lambda notice: self.unanswered.append(notice.source),
            **options,
        )

    def _ask(self, purpose: str, reason: str, seconds_left: float | None) -> bool:
        self.asked.append(purpose)
        self.left = seconds_left
        return self.trains

    def tell(self, seconds: float | None, source: str = "a", **facts: Any) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        self.desk.tell(Notice(source, "ends", deadline, **facts))


@pytest.fixture
def office(request: Any) -> Any:
    made: list[Office] = []

    def make(*arguments: Any, **options: Any) -> Office:
        made.append(Office(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.desk.close()


@pytest.mark.parametrize("seconds", [None, 0, 5, 30])
def test_a_short_notice_stops_at_once(office, seconds):
    one = office()
    one.tell(seconds)
    assert one.asked == [STOP]


def test_a_long_notice_saves_and_stops_in_time(office):
    one = office(Pace(batch_seconds=0.1, save_seconds=1.0))
    one.tell(34.0)  # 3.7 s are needed: it trains on for 30.3 s.
    assert one.asked == [SAVE]
    assert 33 < one.left <= 34
    (timer,) = [t for t in stop_timers() if t.interval < 33]
    assert 30 < timer.interval < 30.4
    timer.function()
    assert one.asked == [SAVE, STOP]
    assert one.desk.pressing == one.notices[0]


def test_slow_saves_and_batches_shorten_what_is_left():
    pace = Pace()
    assert pace.seconds_to_train(120) == 118
    pace.save_took(20)
    assert pace.seconds_to_train(120) == 88
    pace.batch_took(10)
    assert pace.seconds_to_train(120) == 68
    assert pace.seconds_to_train(60) == 0
    assert not pace.can_save(19)
    assert pace.can_save(21)
    assert pace.can_save(None)
    assert Pace().can_save(0.1)  # Nobody knows: worth a try.


def test_a_slow_batch_is_forgotten_in_time():
    pace = Pace()
    pace.batch_took(10)  # The first one is compiled, too.
    for _ in range(100):
        pace.batch_took(0.01)
    assert pace.batch_seconds == pytest.approx(0.01, abs=0.01)
    pace.batch_took(3)
    assert pace.batch_seconds == 3


def test_a_grace_period_replaces_what_the_platform_says(office):
    one = office(grace_seconds=500)
    one.tell(1.0)
    assert one.asked == [SAVE]
    assert 499 < one.notices[0].seconds_left() <= 500


def test_a_grace_period_of_zero_stops_at_once_and_nobody_knows_how_long_there_is(office):
    """As in TensorFlow, whose default it is."""
    one = office(Pace(save_seconds=100.0), grace_seconds=0)
    one.tell(50)
    assert one.asked == [STOP]
    assert one.notices[0].deadline is None
    assert stop_timers() == []


def test_the_end_of_another_worker_is_planned_for_here_as_well(office):
    """Who writes knows how long that takes: the other one would have trained on for longer."""
    one = office(Pace(save_seconds=10.0))
    one.desk.learn(Notice("worker 1", "maintenance", time.monotonic() + 60))
    assert one.asked == []  # It has asked for a save itself.
    (timer,) = stop_timers()
    assert 42 < timer.interval < 43  # 15 s for the save, and 2 s.
    assert 59 < one.desk.seconds_left() <= 60
    timer.function()
    assert one.asked == [STOP]
    one = office(Pace(save_seconds=10.0))
    one.desk.learn(Notice("worker 1", "maintenance", time.monotonic() + 60))
    one.desk.forget("worker 1")
    assert one.desk.seconds_left() is None
    one.desk.close()
    one.desk.learn(Notice("worker 1", "maintenance", time.monotonic() + 60))
    assert one.desk.seconds_left() is None
    wait_until(lambda: len(stop_timers()) <= 1, "no timer is left")


def test_an_advisory_notice_saves_only(office):
    one = office(grace_seconds=5)
    one.tell(None, advisory=True)
    assert one.asked == [SAVE]
    assert one.left is None
    assert one.desk.pressing is None


def test_a_shorter_notice_after_a_long_one_stops(office):
    one = office()
    one.tell(500, "maintenance")
    one.tell(10, "preempted")
    assert one.asked == [SAVE, STOP]
    assert one.desk.pressing.source == "preempted"
    one.tell(5, "again")
    assert one.asked == [SAVE, STOP], "asked to stop once"


def test_a_withdrawn_notice_is_forgotten(office):
    one = office()
    one.tell(500)
    one.desk.withdraw("a")
    one.desk.withdraw("unknown")
    assert one.asked == [SAVE, WITHDRAW]
    wait_until(lambda: not stop_timers(), "no timer is left")
    assert one.desk.pressing is None


def test_nobody_answers_by_the_deadline(office):
    one = office()
    one.tell(0.05)
    wait_until(lambda: one.unanswered == ["a"], "the deadline has passed")


def test_whoever_has_stopped_training_answers(office):
    one = office()
    one.tell(0.2)
    one.desk.close()
    wait_until(lambda: not stop_timers(), "no timer is left")
    one.tell(0.0)
    assert one.asked == [STOP]


def test_a_notice_when_nobody_trains_falls_through(office):
    one = office(trains=False)
    one.tell(20)
    assert one.unanswered == ["a"]


def stop_timers() -> list[Any]:
    """Those that would act; one that was cancelled may take a moment to end."""
    timers: list[Any] = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    return [
        timer
        for timer in timers
        if timer.name == "keras_safe_ckpt-notice-timer" and not timer.finished.is_set()
    ]


# Pollers.


class Desk:
    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, notice: Notice) -> None:
        self.told.append(notice.reason)

    def withdraw(self, source: str) -> None:
        self.told.append(f"not {source}")


def test_a_poller_reports_each_change_once_and_survives_errors(caplog):
    answers = [None, Notice("a", "1"), Notice("a", "1"), OSError("no"), Notice("a", "2"), None]
    turn = iter(answers)
    done = threading.Event()

    def ask() -> Any:
        answer = next(turn, "end")
        if answer == "end":
            done.set()
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    desk = Desk()
    with watching([Poller("test", ask, interval_seconds=0.001)], desk):
        assert done.wait(10)
    assert desk.told == ["1", "2", "not a"]
    assert caplog.text.count("No answer from test") == 1


def test_a_stopped_poller_says_nothing_any_more():
    asked, answer = threading.Event(), threading.Event()

    def ask() -> Notice:
        asked.set()
        answer.wait(10)
        return Notice("a", "late")

    desk = Desk()
    poller = Poller("test", ask, interval_seconds=0.001)
    poller.start(desk)
    assert asked.wait(10)
    poller.stop()
    answer.set()
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name.endswith("notice-test")], "it ends"
    )
    assert desk.told == []


# Choosing.


@pytest.fixture
def no_cloud(monkeypatch: Any) -> None:
    """Whatever machine the tests run on."""
    monkeypatch.setattr(platforms, "_read", lambda root, path: "")


@pytest.mark.usefixtures("no_cloud")
def test_auto_is_sigterm_and_what_the_machine_is():
    plain = choose("auto", {})
    assert plain.signals == [signal.SIGTERM]
    assert (plain.clouds, plain.exit_code) == ([], 42)
    google = choose("auto", {"GCE_METADATA_HOST": "127.0.0.1:1"})
    assert (google.clouds, google.exit_code) == (["gcp"], 143)
    assert [watcher.name for watcher in google.pollers()]
    slurm = choose("auto", {"SLURM_JOB_ID": "7"})
    assert slurm.signals == [signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.usefixtures("no_cloud")
def test_a_termination_config_that_names_nobody_is_auto():
    config = SimpleNamespace(
        termination_watcher_fn=None, exit_fn=None, grace_period=None, save_fn=None
    )
    choice = choose(config, {"SLURM_JOB_ID": "7"})
    assert choice.signals == [signal.SIGTERM, signal.SIGUSR1]
    assert (choice.exit_fn, choice.save_fn, choice.grace_period) == (None, None, None)


def test_several_at_once():
    both = choose(["SIGUSR2", signal.SIGTERM, 15, "aws", "gcp", "aws", lambda: False], {})
    assert both.signals == [signal.SIGUSR2, signal.SIGTERM]
    assert both.clouds == ["aws", "gcp"]
    assert str(both) == "SIGUSR2, SIGTERM, aws, gcp, <lambda>"
    assert choose(None).signals == []
    assert choose("slurm", {}).signals == [signal.SIGTERM, signal.SIGUSR1]


def test_a_signal_in_a_slurm_job_has_the_time_that_slurm_gives():
    end = str(int(time.time()) + 200)
    choice = choose("auto", {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": end})
    assert 190 < choice.seconds_after(signal.SIGUSR1) <= 200
    assert choice.seconds_after(signal.SIGTERM) <= 30
    assert choose("auto", {}).seconds_after(signal.SIGTERM) == 30


@pytest.mark.parametrize(
    ("answer", "reason"), [(True, "says so"), ("why", "why"), (Notice("x", "y"), "y"), (0, None)]
)
def test_a_function_may_answer_in_several_ways(answer, reason):
    desk = Desk()
    asked = threading.Event()

    def function() -> Any:
        asked.set()
        return answer

    with watching(choose(function).watchers, desk):
        assert asked.wait(10)
        if reason is not None:
            wait_until(lambda: bool(desk.told), "it was told")
    assert desk.told == ([] if reason is None else [reason])


# Signals.


def test_a_handler_that_somebody_put_over_ours_stays():
    before = signal.getsignal(signal.SIGUSR2)
    watcher = SignalWatcher([signal.SIGUSR2])
    watcher.start(Desk())
    other = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGUSR2, other)
    watcher.stop()
    assert signal.getsignal(signal.SIGUSR2) is other
    signal.signal(signal.SIGUSR2, before)


def test_an_ignored_signal_stays_without_effect_when_nobody_trains():
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    watcher = SignalWatcher([signal.SIGUSR2], is_wanted=lambda frame: False)
    desk = Desk()
    watcher.start(desk)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert desk.told == []
    finally:
        watcher.stop()
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_is_reported_by_whoever_comes_first():
    before = signal.getsignal(signal.SIGUSR2)
    desk = Desk()
    watcher = SignalWatcher([signal.SIGUSR2])
    watcher.start(desk)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        watcher.report()
        wait_until(lambda: desk.told == ["received"], "it was told once")
        watcher.answered()
    finally:
        watcher.stop()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_another_signal_is_a_notice_of_its_own():
    """SLURM warns by one, and means it by another: the time that is left is that of the last."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    one = Office()
    lefts = {signal.SIGUSR1: 120.0, signal.SIGUSR2: 10.0}
    watcher = SignalWatcher(list(lefts), seconds=lefts.__getitem__)
    watcher.start(one.desk)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        watcher.report()
        os.kill(os.getpid(), signal.SIGUSR2)
        watcher.report()
        assert one.asked == [SAVE, STOP]
        assert one.desk.pressing.source == "SIGUSR2"
        watcher.answered()
    finally:
        watcher.stop()
        one.desk.close()
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_former_handler_that_fails_stops_nothing(caplog):
    def fails(number: int, frame: Any) -> None:
        raise RuntimeError("by design")

    before = signal.signal(signal.SIGUSR2, fails)
    desk = Desk()
    watcher = SignalWatcher([signal.SIGUSR2])
    watcher.start(desk)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        watcher.report()
        assert desk.told == ["received"]
        assert "by design" in caplog.text
        watcher.answered()
    finally:
        watcher.stop()
        signal.signal(signal.SIGUSR2, before)


def test_signals_are_handed_over_without_a_gap():
    heard: list[int] = []
    before = signal.getsignal(signal.SIGUSR2)
    watcher = SignalWatcher([signal.SIGUSR1, signal.SIGUSR2])
    watcher.start(Desk())
    foreign = lambda number, frame: None  # noqa: E731
    former = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, foreign)
    try:
        taken = watcher.hand_over(lambda number, frame: heard.append(number))
        assert taken == {signal.SIGUSR2: before}
        os.kill(os.getpid(), signal.SIGUSR2)
        watcher.stop()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == 2 * [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR1) is foreign
    finally:
        signal.signal(signal.SIGUSR2, before)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if former == watcher._receive else former)
