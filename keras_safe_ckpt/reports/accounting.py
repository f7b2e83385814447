"""What became of the time of a run: pure computation on its lives, no files.

The time of a lane is divided without a rest::

    starting   from the first event of a life to its first new batch
    counted    training that the finished run, or the next life, was built on
    lost       training that was done again, or thrown away
    blocked    training stood still for a save
    stopping   the last save at a notice, and the way out
    down       nobody ran, or nobody knows

Training counts up to the moment at which the checkpoint was captured that the next life went on
from; so it needs no guess how long a batch takes. All of a life that has finished counts.
"""

from __future__ import annotations

import bisect
import heapq
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keras_safe_ckpt.reports.history import Event
from keras_safe_ckpt.reports.intervals import length_within
from keras_safe_ckpt.reports.lives import FINISHED, OPEN, VANISHED, Life

_Saved = dict[tuple[str, str | None], list[tuple[float, float]]]


class Times(NamedTuple):
    """Seconds of each kind."""

    starting: float = 0.0
    counted: float = 0.0
    lost: float = 0.0
    blocked: float = 0.0
    stopping: float = 0.0
    down: float = 0.0

    @property
    def total(self) -> float:
        return math.fsum(self)

    def plus(self, other: Times) -> Times:
        return Times(*map(operator.add, self, other))


@dataclass
class Account:
    """A life, and what it was worth."""

    life: Life
    times: Times
    #: Until when its training counts; None: all of it.
    counts_until: float | None = None
    #: Between the end of the one before and its own first event; None for the first of a lane.
    down_before: float | None = None
    #: Batches of the one before that it did again; None if nobody knows.
    repeated: int | None = None
    #: They were not counted by the run: so many at least, by the steps in the log.
    repeated_at_least: bool = False
    is_restart: bool = False


@dataclass
class Lane:
    """The lives of one worker, one after the other."""

    worker: int | None
    accounts: list[Account] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        return self.accounts[-1].life.leads

    @property
    def times(self) -> Times:
        return _sum(account.times for account in self.accounts)


def lanes_of(lives: Sequence[Life]) -> list[Lane]:
    """Lives that overlap are in different lanes, and those of one worker in one if they can be."""
    rows: dict[int | None, list[list[Life]]] = {}
    busy: dict[int | None, list[tuple[float, int]]] = {}
    free: dict[int | None, list[int]] = {}
    for life in lives:  # By their beginnings.
        own = rows.setdefault(life.worker, [])
        ends, idle = busy.setdefault(life.worker, []), free.setdefault(life.worker, [])
        while ends and ends[0][0] <= life.first:
            idle.append(heapq.heappop(ends)[1])
        if not idle:
            own.append([])
        # That which ended last: the one that was started again.
        number = idle.pop() if idle else len(own) - 1
        own[number].append(life)
        heapq.heappush(ends, (life.last, number))
    saved = _saves_by_file(lives)
    lanes = [Lane(worker, accounts_of(row, saved)) for worker, own in rows.items() for row in own]
    lanes.sort(key=lambda lane: (lane.worker or 0, lane.accounts[0].life.first))
    return lanes


def accounts_of(lives: Sequence[Life], saved: _Saved | None = None) -> list[Account]:
    """For the lives of one lane; ``saved`` are the saves of all lanes."""
    saved = _saves_by_file(lives) if saved is None else saved
    limits = _limits(lives, saved)
    accounts: list[Account] = []
    before: Life | None = None
    for life, limit in zip(lives, limits, strict=True):
        is_last = life is lives[-1]
        if life.ending == OPEN and not is_last:
            life.ending = VANISHED
        times = _times(life, limit)
        account = Account(life, times, None if limit == math.inf else max(limit, life.first))
        if before is not None:
            account.down_before = max(0.0, life.first - before.last)
            account.times = times._replace(down=account.down_before)
            account.is_restart = before.ending != FINISHED
            if account.is_restart:
                account.repeated, account.repeated_at_least = _repeated(before, life)
        accounts.append(account)
        before = life
    return accounts


def _limits(lives: Sequence[Life], saved: _Saved) -> list[float]:
    """Up to which moment the training of each life counts, seen from those after it."""
    limits = [math.inf] * len(lives)
    limit = math.inf
    for number in range(len(lives) - 1, -1, -1):
        life = lives[number]
        if life.ending == FINISHED:
            limit = math.inf
        limits[number] = limit
        if life.resume is None:
            limit = -math.inf  # It began anew: what was before it is not part of it.
        else:
            captured = _captured(life.resume, saved)
            limit = limit if captured is None else min(limit, captured)
    return limits


def _saves_by_file(lives: Iterable[Life]) -> _Saved:
    saved: _Saved = {}
    for life in lives:
        for save in life.saves:
            key = (save.event.folder, save.event.file)
            saved.setdefault(key, []).append((save.ended, save.captured))
    for moments in saved.values():
        moments.sort()
    return saved


def _captured(resume: Event, saved: _Saved) -> float | None:
    """When the checkpoint was captured from which a life went on."""
    moments = saved.get((resume.folder, resume.file), [])
    number = bisect.bisect_right(moments, (resume.time, math.inf))
    return moments[number - 1][1] if number else None


def _times(life: Life, limit: float) -> Times:
    begin, stop = life.trained_from, life.stopped
    begin = min(max(begin, life.first), stop)
    cut = min(max(begin, limit), stop)
    standing = life.standing
    return Times(
        starting=begin - life.first,
        counted=cut - begin - length_within(standing, begin, cut),
        lost=stop - cut - length_within(standing, cut, stop),
        blocked=length_within(standing, begin, stop),
        stopping=life.last - stop,
    )


def _repeated(before: Life, life: Life) -> tuple[int | None, bool]:
    resume = life.resume
    if resume is not None and resume.repeated is not None:
        return resume.repeated, False
    reached = max((event.step for event in before.events if event.step is not None), default=None)
    at = 0 if resume is None else resume.step
    if reached is None or at is None or reached < at:
        return None, False
    return reached - at, True


def seconds_of_batch(lanes: Iterable[Lane]) -> float | None:
    """The mean, by steps between two places of a life; validation and the like are in it."""
    seconds, steps = 0.0, 0
    for lane in lanes:
        for account in lane.accounts:
            points = _points(account.life)
            if len(points) < 2 or points[-1][1] <= points[0][1]:
                continue
            (begin, first), (end, last) = points[0], points[-1]
            standing = length_within(account.life.standing, begin, end)
            seconds += max(0.0, end - begin - standing)
            steps += last - first
    return seconds / steps if steps else None


def _points(life: Life) -> list[tuple[float, int]]:
    """When the life was at which step."""
    points = [(save.captured, save.event.step) for save in life.saves]
    points += [
        (event.time, event.step)
        for event in life.events
        if event.event in ("begin", "finished") or event is life.resume
    ]
    return sorted((moment, step) for moment, step in points if step is not None)


def _sum(times: Iterable[Times]) -> Times:
    total = Times()
    for one in times:
        total = total.plus(one)
    return total
