"""The lives of a run: which process trained from when to when, and how each of them ended."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from keras_safe_ckpt.reports.history import Event
from keras_safe_ckpt.reports.intervals import Interval, union

FINISHED = "finished"
PREEMPTED = "preempted"
#: Another life has followed, and this one has not said that it ends.
VANISHED = "vanished"
#: The last one, which may still be running.
OPEN = "no end recorded"

#: What a process does before it trains; after the end of a `fit` it belongs to the next one.
_BEFORE_TRAINING = ("restore", "pass_over", "notice", "sweep", "recover")
#: Whoever records nothing else has not trained.
_OF_READERS = ("restore", "pass_over", "prune", "sweep", "recover")
_WORKER_FOLDER = re.compile(r"worker-(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint: captured, written from ``began`` on, and durable at ``ended``."""

    event: Event
    captured: float
    began: float
    ended: float
    #: How long training waited for it afterwards, or for it to make room for the next one.
    waited: float = 0.0

    @property
    def blocked(self) -> float:
        """How long training stood still for it."""
        return (self.event.blocked_seconds or 0.0) + self.waited


@dataclass
class Life:
    """One `fit` (or loop) in one process, from its first event to its last."""

    host: str
    pid: int
    first: float
    last: float
    started: float | None = None
    worker: int | None = None
    #: False for a worker of several whose steps another one counts and saves.
    leads: bool = True
    ending: str = OPEN
    end: Event | None = None
    #: What it went on from, if it did.
    resume: Event | None = None
    events: list[Event] = field(default_factory=list, repr=False)
    saves: list[Save] = field(default_factory=list, repr=False)
    begun: set[tuple[str | None, ...]] = field(default_factory=set, repr=False)
    began: float | None = None

    @functools.cached_property
    def standing(self) -> list[Interval]:
        """When training stood still for a save: captures and waits, each moment once."""
        found = [(save.captured, save.began) for save in self.saves]
        found += [
            (event.time - (event.seconds or 0.0), event.time)
            for event in self.events
            if event.event == "wait"
        ]
        return union(found)

    @property
    def is_over(self) -> bool:
        return self.ending in (FINISHED, PREEMPTED)

    @property
    def trains(self) -> bool:
        """Whether it does more than to look at what others have saved."""
        return any(event.event not in _OF_READERS for event in self.events)

    @property
    def trained_from(self) -> float:
        """When the first new batch could begin."""
        resumed = None if self.resume is None else self.resume.time
        known = [moment for moment in (self.began, resumed) if moment is not None]
        if known:
            return min(max(known), self.stopped)
        return min([self.first, *(save.captured for save in self.saves[:1])])

    @property
    def stopped(self) -> float:
        """When the last batch had ended; of one that vanished, the last that is known of it."""
        if self.ending == PREEMPTED and self.end is not None:
            return max(self.first, self.end.time - (self.end.seconds or 0.0))
        if self.end is not None:
            return self.end.time
        return self.last

    def add(self, event: Event) -> None:
        """Events come in the order of their times."""
        self.events.append(event)
        self.last = max(self.last, event.time)
        if event.worker is not None:
            self.worker = event.worker
        elif self.worker is None and (match := _WORKER_FOLDER.fullmatch(event.folder)):
            self.worker = int(match[1])
        if event.leads is False:
            self.leads = False
        _TAKE.get(event.event, _nothing)(self, event)

    def _begin(self, event: Event) -> None:
        self.begun.add(_key(event))
        self.began = event.time

    def _save(self, event: Event) -> None:
        began = event.time - (event.seconds or 0.0)
        captured = began - (event.blocked_seconds or 0.0)
        self.saves.append(Save(event, captured, began, event.time))

    def _resume(self, event: Event) -> None:
        if event.file is None and self.resume is not None:
            # Of a loop, whose manager has said what it restored.
            event = event._replace(file=self.resume.file, folder=self.resume.folder)
        self.resume = event

    def _restore(self, event: Event) -> None:
        # Before training; what is loaded afterwards is for something else.
        if self.began is None and not self.saves and self.resume is None:
            self.resume = event

    def _preempted(self, event: Event) -> None:
        if self.ending != PREEMPTED:
            self.ending, self.end = PREEMPTED, event

    def _finished(self, event: Event) -> None:
        if self.ending != PREEMPTED:
            self.ending, self.end = FINISHED, event


def _nothing(life: Life, event: Event) -> None:
    """Most events are only kept."""


_TAKE: dict[str, Callable[[Life, Event], None]] = {
    "begin": Life._begin,
    "save": Life._save,
    "resume": Life._resume,
    "restore": Life._restore,
    "preempted": Life._preempted,
    "finished": Life._finished,
}


def _key(event: Event) -> tuple[str | None, ...]:
    """Several callbacks of one `fit` say that it begins, each of them once."""
    return event.folder, event.callback, event.file


def _begins_another(life: Life, event: Event) -> bool:
    if life.is_over:
        return event.event in ("begin", "resume")
    return event.event == "begin" and _key(event) in life.begun


class _Process:
    """Divides the events of one process into lives."""

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self._pending: list[Event] = []

    def take(self, event: Event) -> None:
        life = self.lives[-1] if self.lives else None
        if life is None or _begins_another(life, event):
            self._new(event)
        elif life.is_over and event.event in _BEFORE_TRAINING:
            self._pending.append(event)
        else:
            life.add(event)

    def close(self) -> None:
        """What came after the last end belongs to nobody else."""
        for event in self._pending:
            self.lives[-1].events.append(event)
        self._pending = []

    def _new(self, event: Event) -> None:
        events, self._pending = [*self._pending, event], []
        first = events[0]
        life = Life(event.host, event.pid, first.time, first.time, event.started)
        self.lives.append(life)
        for one in events:
            life.add(one)


def lives_in(events: Iterable[Event]) -> tuple[list[Life], int]:
    """All lives that trained, by their beginnings; and how many processes only read."""
    processes: dict[tuple[str, int, float | None], _Process] = {}
    for event in events:
        key = (event.host, event.pid, event.started)
        processes.setdefault(key, _Process()).take(event)
    lives: list[Life] = []
    readers = 0
    for process in processes.values():
        process.close()
        training = [life for life in process.lives if life.trains]
        readers += not training
        lives += training
    for life in lives:
        _assign_waits(life)
    lives.sort(key=lambda life: life.first)
    return lives, readers


def _assign_waits(life: Life) -> None:
    """Each wait to the save that was waited for: of the same file, and the nearest in time."""
    waits = [event for event in life.events if event.event == "wait"]
    if not waits or not life.saves:
        return
    by_file: dict[tuple[str, str | None], list[int]] = {}
    for number, save in enumerate(life.saves):
        by_file.setdefault((save.event.folder, save.event.file), []).append(number)
        by_file.setdefault((save.event.folder, None), []).append(number)
    waited: dict[int, float] = {}
    for wait in waits:
        numbers = by_file.get((wait.folder, wait.file), [])
        nearest = _nearest(life.saves, numbers, wait.time)
        if nearest is not None:
            waited[nearest] = waited.get(nearest, 0.0) + (wait.seconds or 0.0)
    for number, seconds in waited.items():
        save = life.saves[number]
        life.saves[number] = replace(save, waited=seconds)


def _nearest(saves: list[Save], numbers: list[int], moment: float) -> int | None:
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if saves[numbers[middle]].ended <= moment:
            low = middle + 1
        else:
            high = middle
    near = numbers[max(0, low - 1) : low + 1]
    return min(near, key=lambda number: abs(saves[number].ended - moment), default=None)
