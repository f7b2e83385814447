"""The numbers of a run, and the same as plain values for JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from keras_safe_ckpt.reports.accounting import Account, Lane, Times, lanes_of, seconds_of_batch
from keras_safe_ckpt.reports.history import Event, History
from keras_safe_ckpt.reports.lives import Life, Save, lives_in


@dataclass(frozen=True)
class Summary:
    """What stands at the head of the page. Times are in seconds."""

    first: float
    last: float
    #: Of all lanes that count: training that counted, divided by the time from first to last event.
    goodput: float | None
    times: Times
    saves: int
    bytes: int
    blocked: float
    blocked_median: float | None
    blocked_most: float | None
    #: Whose time it is; of those that train together, one.
    workers: int
    lives: int
    restarts: int
    notices: int
    repeated: int
    #: Some restarts do not say how much is repeated: there may be more.
    repeated_is_least: bool
    #: Estimated by the mean time of a batch; None if that is not known.
    repeated_seconds: float | None
    batch_seconds: float | None
    errors: int
    passed_over: int
    skipped: int
    readers: int
    broken_lines: int
    unfit_lines: int

    @property
    def wall(self) -> float:
        return self.last - self.first


@dataclass(frozen=True)
class Report:
    """All that the page and the JSON show."""

    directory: str
    summary: Summary
    lanes: list[Lane]
    #: All checkpoints, in the order in which they were durable.
    saves: list[tuple[Life, Save]]
    #: Notices, errors and what was passed over.
    incidents: list[Event]

    def as_dict(self) -> dict[str, Any]:
        """Plain values; times are seconds since 1970."""
        return {
            "directory": self.directory,
            "summary": {
                **asdict(self.summary),
                "times": self.summary.times._asdict(),
                "wall": self.summary.wall,
            },
            "lives": [
                life_as_dict(number, account)
                for number, lane in enumerate(self.lanes)
                for account in lane.accounts
            ],
            "checkpoints": [save_as_dict(life, save) for life, save in self.saves],
        }


_INCIDENTS = ("notice", "error", "pass_over")


def report_on(history: History) -> Report:
    """Everything from the events, in one go."""
    lives, readers = lives_in(history.events)
    lanes = lanes_of(lives)
    counting = [lane for lane in lanes if lane.leads] or lanes
    saves = sorted(
        ((life, save) for life in lives for save in life.saves), key=lambda pair: pair[1].ended
    )
    kinds = Counter(event.event for event in history.events)
    accounts = [account for lane in counting for account in lane.accounts]
    repeated = sum(account.repeated or 0 for account in accounts)
    batch = seconds_of_batch(counting)
    times = Times()
    for lane in counting:
        times = times.plus(lane.times)
    blocked = [save.blocked for _, save in saves]
    restarts = [account for account in accounts if account.is_restart]
    first, last = _span(lives, history)
    summary = Summary(
        first=first,
        last=last,
        goodput=times.counted / times.total if times.total > 0 else None,
        times=times,
        saves=len(saves),
        bytes=sum(save.event.bytes or 0 for _, save in saves),
        blocked=times.blocked,
        blocked_median=statistics.median(blocked) if blocked else None,
        blocked_most=max(blocked, default=None),
        workers=len(counting),
        lives=len(accounts),
        restarts=len(restarts),
        notices=kinds["notice"],
        repeated=repeated,
        repeated_is_least=any(one.repeated is None or one.repeated_at_least for one in restarts),
        repeated_seconds=None if batch is None else repeated * batch,
        batch_seconds=batch,
        errors=kinds["error"],
        passed_over=kinds["pass_over"],
        skipped=kinds["skip"],
        readers=readers,
        broken_lines=history.broken,
        unfit_lines=history.unfit,
    )
    incidents = [event for event in history.events if event.event in _INCIDENTS]
    return Report(str(history.directory), summary, lanes, saves, incidents)


def _span(lives: list[Life], history: History) -> tuple[float, float]:
    if not lives:
        return history.events[0].time, history.events[-1].time
    return min(life.first for life in lives), max(life.last for life in lives)


def life_as_dict(lane: int, account: Account) -> dict[str, Any]:
    life = account.life
    resume = life.resume
    return {
        "lane": lane,
        "host": life.host,
        "pid": life.pid,
        "worker": life.worker,
        "leads": life.leads,
        "first": life.first,
        "last": life.last,
        "ending": life.ending,
        "began_at": position(life, first=True),
        "stopped_at": position(life, first=False),
        "resumed_from": None if resume is None else resume.file,
        "is_restart": account.is_restart,
        "repeated": account.repeated,
        "repeated_is_least": account.repeated_at_least,
        "counts_until": account.counts_until,
        "times": account.times._asdict(),
    }


def save_as_dict(life: Life, save: Save) -> dict[str, Any]:
    event = save.event
    return {
        "file": event.file,
        "folder": event.folder,
        "time": save.ended,
        "step": event.step,
        "epoch": event.epoch,
        "batch": event.batch,
        "bytes": event.bytes,
        "seconds": event.seconds,
        "blocked": save.blocked,
        "host": life.host,
        "pid": life.pid,
    }


def position(life: Life, *, first: bool) -> dict[str, int]:
    """Where a life was when it began, or when it was heard of last; empty if nobody knows.

    An epoch is a number of finished ones, a batch of finished batches of the one after.
    """
    if not first:
        return next(filter(None, map(_place, reversed(life.events))), {})
    found: dict[str, int] = {}
    for event in life.events:  # Each callback says what it knows.
        if event.event in ("begin", "resume", "restore"):
            found = {**_place(event), **found}
    return found


def _place(event: Event) -> dict[str, int]:
    epoch = event.epochs if event.event == "finished" else event.epoch
    facts = {"epoch": epoch, "batch": event.batch, "step": event.step, "runs": event.runs}
    return {name: value for name, value in facts.items() if value is not None}
