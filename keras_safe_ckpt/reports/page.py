"""One HTML page from a report: no scripts, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from keras_safe_ckpt import __version__
from keras_safe_ckpt.reports.charts import Point, Scale, chart
from keras_safe_ckpt.reports.lives import Save
from keras_safe_ckpt.reports.style import STYLE, SYMBOLS
from keras_safe_ckpt.reports.summary import Report, Summary
from keras_safe_ckpt.reports.timeline import (
    ending,
    incident_name,
    places,
    save_title,
    timeline,
)
from keras_safe_ckpt.reports.words import count, duration, moment, place, size

MOST_ROWS = 200

#: Whatever got past the escaping could still neither run nor ask for anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_SHARES = {
    "counted": "training that counted",
    "lost": "training done again",
    "blocked": "stood still for saves",
    "starting": "starting and going back",
    "stopping": "stopping",
    "down": "down",
}
_MARKS = {
    "notice": "notice",
    "agreement": "agreement to stop",
    "preempted": "preempted",
    "vanished": "vanished",
    "resume": "resumed",
    "restore": "restored",
    "finished": "finished",
    "error": "error",
    "pass_over": "damaged file passed over",
}


#: By which a report is known from any other page.
GENERATOR = '<meta name="generator" content="keras-safe-ckpt report">'


def page_of(report: Report) -> str:
    """The whole document."""
    summary = report.summary
    name = Path(report.directory).name or report.directory
    scale = Scale(summary.first, summary.last)
    title = f"Training run in {name}"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">{GENERATOR}
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>{SYMBOLS}<main>
<header><h1>{escape(title)}</h1><p class="soft">{escape(_period(summary))}</p></header>
<div class="cards">{"".join(_cards(summary))}</div>
{_shares(summary)}
<section><h2>Timeline</h2><p class="soft">Time since {moment(summary.first)} UTC. Above: training,
and where it stood still. Below it, thin: saves in the background. Point at anything for details.
</p><div class="panel">{timeline(report.lanes, scale)}{_mark_legend(report)}</div></section>
{_charts(report, scale)}
{_lives(report)}
{_checkpoints(report)}
{_incidents(report)}
{_notes(summary)}
<footer>Made by keras_safe_ckpt {__version__} from the events in {escape(report.directory)}</footer>
</main></body></html>
"""


def _period(summary: Summary) -> str:
    begin, end = moment(summary.first), moment(summary.last)
    if begin[:10] == end[:10]:
        end = end[11:]
    return f"{begin} to {end} UTC · {duration(summary.wall)}"


def _cards(summary: Summary) -> Iterator[str]:
    goodput = "not known" if summary.goodput is None else f"{100 * summary.goodput:.1f} %"
    yield _card(goodput, "goodput: training that counted, of all time", "main")
    yield _card(f"{summary.saves:,}", f"checkpoints saved, {size(summary.bytes)}")
    yield _card(duration(summary.blocked), "training stood still for saves")
    if summary.blocked_median is None or summary.blocked_most is None:
        yield _card("–", "per save")  # noqa: RUF001
    else:
        most = duration(summary.blocked_most)
        yield _card(duration(summary.blocked_median), f"per save (median), at most {most}")
    yield _card(f"{summary.restarts:,}", "restart" if summary.restarts == 1 else "restarts")
    yield _card(f"{summary.notices:,}", "notice" if summary.notices == 1 else "notices")
    least = "≥ " if summary.repeated_is_least and summary.restarts else ""
    about = ""
    if summary.repeated and summary.repeated_seconds is not None:
        about = f", about {duration(summary.repeated_seconds)}"
    label = f"{'batch' if summary.repeated == 1 else 'batches'} repeated{about}"
    yield _card(f"{least}{summary.repeated:,}", label, "warn" if summary.repeated else "")
    yield _card(
        f"{summary.errors:,}",
        "error" if summary.errors == 1 else "errors",
        "bad" if summary.errors else "",
    )
    yield _card(
        f"{summary.passed_over:,}",
        f"damaged {'file' if summary.passed_over == 1 else 'files'} passed over",
        "bad" if summary.passed_over else "",
    )


def _card(value: str, label: str, kind: str = "") -> str:
    return f'<div class="card {kind}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _shares(summary: Summary) -> str:
    total = summary.times.total
    if not total > 0:
        return ""
    together = f", {summary.workers:,} workers together" if summary.workers > 1 else ""
    parts, words = [], []
    for kind, label in _SHARES.items():
        seconds = getattr(summary.times, kind)
        share = 100 * seconds / total
        text = f"{label}: {duration(seconds)}, {share:.1f} %"
        parts.append(f'<i class="{kind}" style="width:{share:.3f}%" title="{escape(text)}"></i>')
        words.append(f'<li><i class="{kind}"></i>{escape(text)}</li>')
    return (
        f'<section><h2>Where the time went{together}</h2><div class="shares" role="img" '
        f'aria-label="Shares of the time">{"".join(parts)}</div>'
        f'<ul class="legend">{"".join(words)}</ul></section>'
    )


def _mark_legend(report: Report) -> str:
    seen = {event.event for lane in report.lanes for a in lane.accounts for event in a.life.events}
    if any(a.life.ending == "vanished" for lane in report.lanes for a in lane.accounts):
        seen.add("vanished")
    items = [
        f'<li><svg viewBox="-8 -8 16 16"><use href="#{kind}" class="{kind}"/></svg>{words}</li>'
        for kind, words in _MARKS.items()
        if kind in seen
    ]
    items.append('<li><i class="background"></i>save in the background</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _charts(report: Report, scale: Scale) -> str:
    saves = [save for _, save in report.saves]
    sizes = [_point(s, s.event.bytes) for s in saves if s.event.bytes is not None]
    written = [_point(s, s.event.seconds) for s in saves if s.event.seconds is not None]
    blocked = [_point(s, s.blocked) for s in saves]
    charts = [
        chart(title, kind, points, scale, words)
        for title, kind, points, words in (
            ("Size of a checkpoint", "size", sizes, size),
            ("Written in the background for", "background", written, duration),
            ("Training stood still for", "blocked", blocked, duration),
        )
        if points
    ]
    if not charts:
        return ""
    panels = "".join(f'<div class="panel">{one}</div>' for one in charts)
    return f'<section><h2>Saves over time</h2><div class="charts">{panels}</div></section>'


def _point(save: Save, value: float) -> Point:
    return Point(save.ended, value, lambda: save_title(save))


def _lives(report: Report) -> str:
    rows = []
    accounts = [account for lane in report.lanes for account in lane.accounts]
    accounts.sort(key=lambda account: account.life.first)
    for account in accounts[:MOST_ROWS]:
        life = account.life
        began, stopped = places(life)
        least = "at least " if account.repeated_at_least else ""
        known = "not known" if account.is_restart else ""
        again = known if account.repeated is None else f"{least}{account.repeated:,}"
        worker = "" if life.worker is None else f"worker {life.worker}, "
        ended = moment(life.last)[11:] if life.is_over else f"after {moment(life.last)[11:]}"
        cells = [
            ("words", f"{worker}{life.host}, pid {life.pid}"),
            ("t", moment(life.first)),
            ("t", ended),
            ("words", ending(account)),
            ("words", began),
            ("words", stopped),
            ("n", again),
            ("n", duration(account.times.counted)),
        ]
        rows.append(cells)
    head = ["process", "start", "end", "how it ended", "began at", "was last at"]
    table = _table([*head, "repeated", "counted"], rows, numbers=2)
    more = _more(len(accounts), "later life", "later lives")
    return f"<section><h2>Lives</h2>{table}{more}</section>"


def _checkpoints(report: Report) -> str:
    if not report.saves:
        return ""
    rows = []
    for _, save in reversed(report.saves[-MOST_ROWS:]):
        event = save.event
        at = {"epoch": event.epoch, "batch": event.batch, "step": event.step}
        folder = f"{event.folder}/" if event.folder else ""
        cells = [
            ("file", f"{folder}{event.file or ''}"),
            ("t", moment(save.ended)),
            ("words", place({name: value for name, value in at.items() if value is not None})),
            ("n", "" if event.bytes is None else size(event.bytes)),
            ("n", "" if event.seconds is None else duration(event.seconds)),
            ("n", duration(save.blocked)),
        ]
        rows.append(cells)
    head = ["file", "durable (UTC)", "taken at", "size", "written in", "stood still"]
    more = _more(len(report.saves), "older checkpoint")
    table = _table(head, rows, numbers=3)
    return f"<section><h2>Checkpoints, newest first</h2>{table}{more}</section>"


def _incidents(report: Report) -> str:
    if not report.incidents:
        return ""
    rows = []
    for event in reversed(report.incidents[-MOST_ROWS:]):
        words = [event.source, event.file, event.reason, event.error]
        rows.append(
            [
                ("t", moment(event.time)),
                ("t", incident_name(event.event)),
                ("words", f"{event.host}, pid {event.pid}"),
                ("words", " · ".join(word for word in words if word)),
            ]
        )
    table = _table(["time (UTC)", "what", "process", "details"], rows)
    more = _more(len(report.incidents), "older one", "older ones")
    return f"<section><h2>Notices, errors and damage</h2>{table}{more}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]], numbers: int = 0) -> str:
    first_number = len(head) - numbers
    titles = "".join(
        f'<th class="{"n" if number >= first_number else ""}">{escape(title)}</th>'
        for number, title in enumerate(head)
    )
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="table"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _more(total: int, one: str, many: str | None = None) -> str:
    if total <= MOST_ROWS:
        return ""
    more = count(total - MOST_ROWS, one, many)
    return f'<p class="more">{more} not listed; all are in the output of --json.</p>'


def _notes(summary: Summary) -> str:
    notes = [
        "Goodput is training that counted, divided by the time from the first event of a worker "
        "to its last. Training counts up to the moment at which the checkpoint was captured from "
        "which the next life went on; all of a life counts that has finished. A life that begins "
        "without loading a checkpoint is a new beginning: what was before it, and not finished, "
        "is lost.",
        "Estimated: when a process ended that was killed is not known, only that it was after its "
        "last event. What it trained after that is counted as down, not as training done again.",
        "Time blocked by a save is its capture, and waiting for it to be written where training "
        "had to. Saves of a CheckpointStore without a callback tell their captures only.",
    ]
    if summary.batch_seconds is not None:
        batch = duration(summary.batch_seconds)
        notes.append(
            f"Estimated: the time of repeated batches, by the mean of {batch} for a batch with all "
            "that comes between batches, such as validation."
        )
    if summary.repeated_is_least and summary.restarts:
        notes.append(
            "Estimated: not every restart says how many batches it repeats. The steps in the log "
            "tell how many there were at least."
        )
    if summary.broken_lines or summary.unfit_lines:
        notes.append(
            f"Left out: {count(summary.broken_lines, 'line')} of the log that were cut or broken, "
            f"and {summary.unfit_lines:,} in which something was not what it should be."
        )
    if summary.readers:
        notes.append(f"Not shown: {count(summary.readers, 'process', 'processes')} that only read.")
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section><h2>How to read this</h2><ul class="notes soft">{items}</ul></section>'
