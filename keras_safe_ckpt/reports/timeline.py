"""The timeline: a strip for each worker, with what its lives did and what happened to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TypeVar

from keras_safe_ckpt.reports.accounting import Account, Lane, Times
from keras_safe_ckpt.reports.charts import Scale, bar, mark, text, time_axis
from keras_safe_ckpt.reports.history import Event
from keras_safe_ckpt.reports.intervals import Interval
from keras_safe_ckpt.reports.lives import FINISHED, PREEMPTED, VANISHED, Life, Save
from keras_safe_ckpt.reports.summary import position
from keras_safe_ckpt.reports.words import clock, count, duration, place, size

#: A page of a thousand lanes would show nothing.
MOST_LANES = 24
#: Of all lanes together: what is denser is drawn as one, and says so.
_MOST_DRAWN = 1200
_FEWEST_COLUMNS, _MOST_COLUMNS = 60, 300
_TRAINING_Y, _TRAINING_HEIGHT = 34, 22
_SAVES_Y, _SAVES_HEIGHT = 59, 9
_HEIGHT = 72
#: From so many per cent of the width on, a gap has room for words.
_WIDE = 13

#: What comes from outside stands above what a life does.
_MARK_Y = {
    **dict.fromkeys(("notice", "agreement", "error", "pass_over"), 8),
    **dict.fromkeys(("restore", "resume", "preempted", "finished", "vanished"), 24),
}
_DENSE = "Too dense to be drawn one by one: what is close together is drawn as one, and says so."
_Item = TypeVar("_Item")


class _Columns:
    """Draws things one by one, or, if there are too many, those of each column together."""

    def __init__(self, scale: Scale, columns: int) -> None:
        self.scale = scale
        self._columns = columns
        self.is_dense = False

    def of(
        self, items: Sequence[_Item], moment: Callable[[_Item], float], *, width: int = 1
    ) -> list[list[_Item]]:
        """A column is ``width`` times as wide where things need more room."""
        columns = max(_FEWEST_COLUMNS // 5, self._columns // width)
        if len(items) <= columns:
            return [[item] for item in items]
        self.is_dense = True
        groups: dict[int, list[_Item]] = {}
        for item in items:
            groups.setdefault(self.scale.column(moment(item), columns), []).append(item)
        return list(groups.values())


def timeline(lanes: Sequence[Lane], scale: Scale) -> str:
    """All lanes under one axis."""
    shown = lanes[:MOST_LANES]
    columns = min(_MOST_COLUMNS, max(_FEWEST_COLUMNS, _MOST_DRAWN // max(1, len(shown))))
    parts = [_lane(lane, _Columns(scale, columns)) for lane in shown]
    if len(lanes) > len(shown):
        more = count(len(lanes) - len(shown), "more lane")
        parts.append(f'<p class="more">{more} not drawn; all are in the output of --json.</p>')
    return "".join([*parts, time_axis(scale)])


def _lane(lane: Lane, columns: _Columns) -> str:
    accounts, scale = lane.accounts, columns.scale
    groups = columns.of(accounts, lambda account: account.life.first)
    parts: list[str] = []
    for number, group in enumerate(groups):
        if number:
            parts.append(_gap(groups[number - 1][-1], group[0], scale))
        parts += _life(group[0], scale) if len(group) == 1 else [_merged(group, scale)]
    parts += _blocked(accounts, columns)
    parts += _saves(accounts, columns)
    parts += _marks(accounts, columns)
    dense = f'<p class="more">{_DENSE}</p>' if columns.is_dense else ""
    return (
        f'<figure class="lane"><figcaption>{_caption(lane)}</figcaption>'
        f'<svg width="100%" height="{_HEIGHT}" role="img" aria-label="{escape(_name(lane))}">'
        f"{''.join(parts)}</svg>{dense}</figure>"
    )


def _name(lane: Lane) -> str:
    return "Process" if lane.worker is None else f"Worker {lane.worker}"


def _caption(lane: Lane) -> str:
    lives = [account.life for account in lane.accounts]
    who = dict.fromkeys(f"{life.host} · pid {life.pid}" for life in lives)
    shown = ", ".join(list(who)[:3]) + (f" and {len(who) - 3:,} more" if len(who) > 3 else "")
    role = "" if lane.leads else " (follows the chief, not counted twice)"
    words = f"{count(len(lives), 'life', 'lives')} · {shown}{role}"
    return f"<b>{escape(_name(lane))}</b> <small>{escape(words)}</small>"


def _life(account: Account, scale: Scale) -> list[str]:
    life = account.life
    begin, stop = min(max(life.trained_from, life.first), life.stopped), life.stopped
    cut = stop if account.counts_until is None else min(max(account.counts_until, begin), stop)
    who = f"{life.host}, pid {life.pid}"
    spans: list[tuple[str, float, float, str]] = [
        ("starting", life.first, begin, _started(life)),
        ("counted", begin, cut, f"Training that counted, {duration(account.times.counted)}"),
        ("lost", cut, stop, f"Training that was done again, {duration(account.times.lost)}"),
        ("stopping", stop, life.last, f"Stopping, {duration(account.times.stopping)}"),
    ]
    return [
        bar(
            scale, a, b, _TRAINING_Y, _TRAINING_HEIGHT, kind,
            f"{words}\n{clock(a)} to {clock(b)}\n{who}",
        )
        for kind, a, b, words in spans
        if b > a
    ]  # fmt: skip


def _started(life: Life) -> str:
    words = "Starting"
    if life.resume is not None:
        words = f"Going on from {life.resume.file or 'a checkpoint'}"
        if life.resume.dropped:
            words += f", {count(life.resume.dropped, 'batch', 'batches')} read and dropped"
    return words


def _merged(group: Sequence[Account], scale: Scale) -> str:
    times = Times()
    for account in group:
        times = times.plus(account.times)
    words = (
        f"{count(len(group), 'life', 'lives')}, too short to be drawn\n"
        f"{duration(times.counted)} of training that counted, {duration(times.lost)} done again"
    )
    last = max(account.life.last for account in group)
    first = group[0].life.first
    return bar(scale, first, last, _TRAINING_Y, _TRAINING_HEIGHT, "mixed", words)


def _gap(before: Account, after: Account, scale: Scale) -> str:
    begin, end = before.life.last, after.life.first
    if end <= begin:
        return ""
    life = before.life
    words = [f"Down for {duration(end - begin)}", f"{clock(begin)} to {clock(end)}"]
    if life.ending == VANISHED:
        words.append("It ended some time after its last event: that is all that is known.")
    started = after.life.started
    if started is not None and begin < started < end:
        words.append(f"The next process began {duration(end - started)} before its first event.")
    drawn = bar(scale, begin, end, _TRAINING_Y, _TRAINING_HEIGHT, "down", "\n".join(words))
    middle, width = scale.at((begin + end) / 2), scale.at(end) - scale.at(begin)
    return drawn + (
        text(middle, _TRAINING_Y + 15, f"down {duration(end - begin)}") if width > _WIDE else ""
    )


def _blocked(accounts: Iterable[Account], columns: _Columns) -> list[str]:
    found: list[Interval] = []
    for account in accounts:
        begin, stop = account.life.trained_from, account.life.stopped
        clipped = ((max(a, begin), min(b, stop)) for a, b in account.life.standing)
        found += [interval for interval in clipped if interval[1] > interval[0]]
    parts = []
    for group in columns.of(found, lambda interval: interval[0], width=3):
        seconds = sum(b - a for a, b in group)
        times = "" if len(group) == 1 else f" in {count(len(group), 'time')}"
        title = f"Training stood still for a save, {duration(seconds)}{times}\n{clock(group[0][0])}"
        begin, end = group[0]
        kind = "blocked"
        if len(group) > 1:
            # Without a border: many that are drawn wider than they are would look like hours.
            kind, end = "blocked true", begin + seconds
        parts.append(bar(columns.scale, begin, end, _TRAINING_Y, _TRAINING_HEIGHT, kind, title))
    return parts


def _saves(accounts: Iterable[Account], columns: _Columns) -> list[str]:
    saves = [save for account in accounts for save in account.life.saves]
    parts = []
    for group in columns.of(saves, lambda save: save.ended):
        title = save_title(group[-1])
        if len(group) > 1:
            written = sum(save.event.bytes or 0 for save in group)
            title = f"{count(len(group), 'save')}, {size(written)}; the last one:\n{title}"
        begin, end = min(save.began for save in group), max(save.ended for save in group)
        parts.append(bar(columns.scale, begin, end, _SAVES_Y, _SAVES_HEIGHT, "background", title))
    return parts


def save_title(save: Save) -> str:
    """What is to be known about a checkpoint, line by line."""
    event = save.event
    lines = [event.file or "a checkpoint"]
    known = {"epoch": event.epoch, "batch": event.batch, "step": event.step}
    lines.append(place({name: value for name, value in known.items() if value is not None}))
    if event.bytes is not None:
        lines.append(size(event.bytes))
    if event.seconds is not None:
        lines.append(f"written in {duration(event.seconds)}")
    lines.append(f"training stood still for {duration(save.blocked)}")
    lines.append(f"durable at {clock(save.ended)}")
    return "\n".join(lines)


def _marks(accounts: Iterable[Account], columns: _Columns) -> list[str]:
    lives = [account.life for account in accounts]
    found: list[tuple[str, float, Callable[[], str]]] = [
        (event.event, event.time, functools.partial(incident_title, event))
        for life in lives
        for event in life.events
        if event.event in _MARK_Y
    ]
    found += [("vanished", life.last, _vanished) for life in lives if life.ending == VANISHED]
    parts = []
    for kind, y in _MARK_Y.items():
        chosen = [one for one in found if one[0] == kind]
        for group in columns.of(chosen, lambda one: one[1], width=8):
            _, time, words = group[-1]
            many = f"{len(group):,} of this kind; the last one:\n" if len(group) > 1 else ""
            parts.append(mark(columns.scale, time, y, kind, many + words()))
    return parts


def _vanished() -> str:
    return "Vanished: killed, or ended by an error, some time after this"


def incident_title(event: Event) -> str:
    """What happened, in words."""
    lines = [f"{incident_name(event.event)} at {clock(event.time)}"]
    lines += [str(fact) for fact in (event.source, event.file, event.reason) if fact]
    lines += [str(fact) for fact in (event.outcome, event.ending, event.error) if fact]
    if event.repeated is not None:
        lines.append(f"{count(event.repeated, 'batch', 'batches')} repeated")
    if event.seconds is not None:
        lines.append(f"took {duration(event.seconds)}")
    return "\n".join(lines)


def incident_name(kind: str) -> str:
    names = {"pass_over": "Damaged file passed over", "preempted": "Preempted"}
    return names.get(kind, kind.replace("_", " ").capitalize())


def ending(account: Account) -> str:
    """How a life ended, for the table."""
    life = account.life
    if life.ending == PREEMPTED and life.end is not None:
        how = life.end.ending or "stopped"
        return f"preempted, {life.end.outcome or 'nothing said'}; {how}"
    if life.ending == FINISHED:
        return "finished"
    if life.ending == VANISHED:
        return "vanished (killed, or an error)"
    return "no end recorded: it runs, or has vanished"


def places(life: Life) -> tuple[str, str]:
    """Where it began and where it was last."""
    return place(position(life, first=True)), place(position(life, first=False))
