"""The report of a run: what the events mean in numbers, and what cannot disturb it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from histories import ZERO, Process, busy_run, reported, write_log
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import environment

from keras_safe_ckpt.cli.main import main
from keras_safe_ckpt.errors import CheckpointNotFoundError
from keras_safe_ckpt.reports.charts import round_up, ticks
from keras_safe_ckpt.reports.history import event_from
from keras_safe_ckpt.reports.intervals import length_within, union
from keras_safe_ckpt.reports.page import MOST_ROWS, page_of
from keras_safe_ckpt.reports.words import duration, place, size

PROGRAM = Path(__file__).with_name("interrupted.py")


def only_lane(folder: Path) -> list[Any]:
    (lane,) = reported(folder).lanes
    return lane.accounts


# Where the time went: all results were computed by hand.


def test_an_undisturbed_run_loses_only_what_saves_block(tmp_path):
    one = Process()
    write_log(
        tmp_path,
        [one.at(0, "begin"), one.save(50, "a"), one.save(80, "b"), one.at(100, "finished")],
    )
    summary = reported(tmp_path).summary
    assert summary.goodput == pytest.approx(0.98)
    assert summary.times._asdict() == pytest.approx(
        {"starting": 0, "counted": 98, "lost": 0, "blocked": 2, "stopping": 0, "down": 0}
    )
    assert (summary.saves, summary.bytes, summary.blocked) == (2, 2000, pytest.approx(2))
    assert (summary.restarts, summary.lives, summary.wall) == (0, 1, 100)


def killed_and_resumed() -> list[dict[str, Any]]:
    one, other = Process(1), Process(2)
    return [
        one.at(0, "begin"),
        one.save(50, "a", step=100),  # Captured from 47 to 48, durable at 50.
        other.at(75, "begin"),
        other.at(80, "resume", file="a", step=100, repeated=20, seconds=5.0),
        other.at(180, "finished", step=300),
    ]


def test_training_of_a_killed_process_counts_up_to_the_capture_that_was_gone_on_from(tmp_path):
    write_log(tmp_path, killed_and_resumed())
    first, second = only_lane(tmp_path)
    assert first.life.ending == "vanished"
    assert first.times._asdict() == pytest.approx(
        {"starting": 0, "counted": 47, "lost": 2, "blocked": 1, "stopping": 0, "down": 0}
    )
    assert second.times._asdict() == pytest.approx(
        {"starting": 5, "counted": 100, "lost": 0, "blocked": 0, "stopping": 0, "down": 25}
    )
    summary = reported(tmp_path).summary
    assert summary.goodput == pytest.approx(147 / 180)
    assert (summary.restarts, summary.repeated) == (1, 20)
    assert summary.repeated_is_least is False
    # 100 s for the 200 steps from 100 to 300; in the first life only one place is known.
    assert summary.batch_seconds == pytest.approx(0.5)
    assert summary.repeated_seconds == pytest.approx(10)


def test_the_times_of_a_lane_leave_no_rest(tmp_path):
    write_log(tmp_path, killed_and_resumed())
    summary = reported(tmp_path).summary
    assert summary.times.total == pytest.approx(summary.wall)


def test_the_last_save_at_a_notice_is_stopping_and_nothing_is_lost(tmp_path):
    one, other = Process(1), Process(2)
    write_log(
        tmp_path,
        [
            one.at(0, "begin"),
            one.at(60, "notice", source="SIGTERM", reason="received"),
            one.save(64, "a"),
            one.at(64, "preempted", seconds=3.0, outcome="saved", ending="exit code 42"),
            other.at(70, "resume", file="a", repeated=0),
            other.at(70, "begin"),
            other.at(110, "finished"),
        ],
    )
    first, second = only_lane(tmp_path)
    assert first.life.ending == "preempted"
    assert (first.times.counted, first.times.stopping, first.times.lost) == (61, 3, 0)
    assert (second.down_before, second.repeated, second.times.counted) == (6, 0, 40)
    summary = reported(tmp_path).summary
    assert (summary.notices, summary.goodput) == (1, pytest.approx(101 / 110))


def test_what_came_after_an_older_checkpoint_is_lost_in_all_lives_before(tmp_path):
    one, other, third = Process(1), Process(2), Process(3)
    write_log(
        tmp_path,
        [
            one.at(0, "begin"),
            one.save(13, "a"),  # Captured at 10.
            one.save(23, "b"),
            other.at(30, "resume", file="b", repeated=0),
            other.at(30, "begin"),
            other.save(53, "c"),
            third.at(60, "pass_over", file="c", reason="damaged"),
            third.at(60, "pass_over", file="b", reason="damaged"),
            third.at(60, "resume", file="a", repeated=40),
            third.at(60, "begin"),
            third.at(100, "finished"),
        ],
    )
    first, second, last = only_lane(tmp_path)
    assert (first.times.counted, first.times.lost) == (10, 11)  # Two of its 23 s were blocked.
    assert (second.times.counted, second.times.lost) == (0, 22)
    assert last.times.counted == 40
    assert reported(tmp_path).summary.passed_over == 2


def test_a_fresh_start_throws_away_what_was_not_finished(tmp_path):
    one, other, third = Process(1), Process(2), Process(3)
    write_log(
        tmp_path,
        [
            one.at(0, "begin", step=0),
            one.at(40, "finished", step=80),
            other.at(50, "begin", step=0),
            other.save(73, "a", step=40),
            third.at(80, "begin", step=0),
            third.at(100, "finished", step=40),
        ],
    )
    first, second, last = only_lane(tmp_path)
    assert [account.times.counted for account in (first, second, last)] == [40, 0, 20]
    assert second.times.lost == 22
    # After a run that has finished, another one is not its restart.
    assert [account.is_restart for account in (first, second, last)] == [False, False, True]
    assert (last.repeated, last.repeated_at_least) == (40, True)
    assert reported(tmp_path).summary.repeated_is_least


def test_time_in_which_training_waits_is_counted_once(tmp_path):
    one = Process()
    write_log(
        tmp_path,
        [
            one.at(0, "begin"),
            one.save(20, "a", blocked_seconds=1.0, seconds=5.0),  # 14 to 15 captured.
            one.at(20, "wait", file="a", seconds=5.0),  # 15 to 20: it was in the foreground.
            one.at(21, "wait", file="a", seconds=3.0),  # 18 to 21.
            one.save(50, "b", blocked_seconds=1.0, seconds=5.0),
            one.at(100, "finished"),
        ],
    )
    report = reported(tmp_path)
    assert report.summary.blocked == pytest.approx(8)
    assert [save.blocked for _, save in report.saves] == [9, 1]
    assert (report.summary.blocked_median, report.summary.blocked_most) == (5, 9)


def test_an_open_end_counts_up_to_the_last_event(tmp_path):
    one = Process()
    write_log(tmp_path, [one.at(0, "begin"), one.save(50, "a")])
    (account,) = only_lane(tmp_path)
    assert (account.life.ending, account.times.counted) == ("no end recorded", 49)


def test_a_guard_goes_on_from_what_its_manager_restored(tmp_path):
    one, other = Process(1), Process(2)
    write_log(
        tmp_path,
        [
            one.at(0, "begin", runs=0),
            one.save(23, "ckpt-1"),  # Captured at 20.
            other.at(50, "restore", file="ckpt-1", seconds=1.0),
            other.at(50, "resume", runs=40),
            other.at(50, "begin", runs=40),
            other.at(80, "finished", runs=100),
        ],
    )
    first, second = only_lane(tmp_path)
    assert (first.times.counted, first.times.lost, second.times.counted) == (20, 2, 30)


def test_what_is_loaded_during_training_is_not_where_it_went_on_from(tmp_path):
    one, other = Process(1), Process(2)
    write_log(
        tmp_path,
        [
            one.at(0, "begin"),
            one.save(23, "a"),
            other.at(50, "begin"),
            other.at(60, "restore", file="a"),
            other.at(80, "finished"),
        ],
    )
    first, second = only_lane(tmp_path)
    assert (first.times.counted, second.times.counted) == (0, 30)


def test_checkpoints_of_tensorflow_without_a_beginning(tmp_path):
    one, other = Process(1), Process(2)
    write_log(
        tmp_path,
        [
            one.at(10, "save", file="ckpt-1", bytes=5, seconds=4.0),
            one.at(10, "wait", file="ckpt-1", seconds=4.0),
            other.at(20, "restore", file="ckpt-1", seconds=1.0),
            other.at(30, "save", file="ckpt-2", bytes=5, seconds=4.0),
        ],
    )
    first, second = only_lane(tmp_path)
    assert first.times.counted == 0
    assert second.times.counted == 10
    assert second.is_restart


# Who is who.


def test_several_callbacks_of_one_fit_are_one_life_and_a_second_fit_is_another(tmp_path):
    one = Process()
    names = [{"callback": "SafeModelCheckpoint", "file": file} for file in ("best", "every")]
    write_log(
        tmp_path,
        [
            *(one.at(0, "begin", **name) for name in names),
            one.save(10, "best"),
            *(one.at(20, "finished", **name) for name in names),
            one.at(25, "restore", file="best"),
            *(one.at(30, "begin", **name) for name in names),
            *(one.at(50, "finished", **name) for name in names),
        ],
    )
    first, second = only_lane(tmp_path)
    assert (first.life.first, first.life.last) == (ZERO, ZERO + 20)
    assert (second.life.first, second.life.resume.file) == (ZERO + 25, "best")
    assert reported(tmp_path).summary.restarts == 0


def test_a_container_that_is_started_again_has_the_same_process_id(tmp_path):
    one, other = Process(7, started=-1), Process(7, started=48)
    entries = [one.at(0, "begin"), one.save(40, "a"), other.at(50, "resume", file="a", repeated=3)]
    write_log(tmp_path, [*entries, other.at(50, "begin"), other.at(90, "finished")])
    first, second = only_lane(tmp_path)
    assert (first.life.ending, second.life.ending) == ("vanished", "finished")
    assert second.repeated == 3


def test_workers_of_folders_have_lanes_of_their_own(tmp_path):
    for worker in (0, 1):
        one = Process(worker + 5)
        write_log(
            tmp_path / f"worker-{worker}",
            [one.at(0, "begin"), one.save(20, "a"), one.at(50 + worker, "finished")],
        )
    report = reported(tmp_path)
    assert [lane.worker for lane in report.lanes] == [0, 1]
    assert report.summary.saves == 2
    assert report.summary.goodput == pytest.approx((49 + 50) / (50 + 51))


def test_workers_that_train_together_are_not_counted_twice(tmp_path):
    report = reported(busy_run(tmp_path))
    assert [(lane.worker, lane.leads) for lane in report.lanes] == [(0, True), (1, False)]
    assert [len(lane.accounts) for lane in report.lanes] == [3, 3]
    assert (report.summary.restarts, report.summary.repeated) == (2, 560)
    assert report.summary.notices == 2


def test_processes_that_overlap_are_not_restarts_of_each_other(tmp_path):
    one, other = Process(1), Process(2)
    write_log(
        tmp_path,
        [one.at(0, "begin"), other.at(10, "begin"), one.at(50, "finished"), other.save(60, "a")],
    )
    report = reported(tmp_path)
    assert len(report.lanes) == 2
    assert report.summary.restarts == 0


def test_who_only_reads_has_not_lived(tmp_path):
    one, reader = Process(1), Process(2)
    entries = [one.at(0, "begin"), reader.at(20, "restore", file="a"), one.at(50, "finished")]
    write_log(tmp_path, [*entries, reader.at(500, "pass_over", file="b")])
    report = reported(tmp_path)
    assert (report.summary.lives, report.summary.readers, report.summary.wall) == (1, 1, 50)
    assert "1 process that only read" in page_of(report)


# Words.


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 ms"), (0.0032, "3.2 ms"), (0.25, "250 ms"), (41.5, "41.5 s"), (99.96, "1 min 40 s"),
        (725, "12 min 5 s"), (3599.7, "1 h"), (12_000, "3 h 20 min"), (86_399.9, "1 d"),
        (441_000, "5 d 2 h"), (1e9, "11,574 d 1 h"),
    ],
)  # fmt: skip
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_sizes():
    sizes = (0, 999, 1000, 999_600, 1_200_000_000, 2**63)
    assert [*map(size, sizes)] == ["0 B", "999 B", "1 kB", "1 MB", "1.2 GB", "9.22 EB"]


def test_places():
    assert place({"epoch": 1, "batch": 5, "step": 9}) == "epoch 2, batch 5 · step 9"
    assert place({"epoch": 0, "batch": 0}) == "the beginning"
    assert place({"epoch": 3}) == "end of epoch 3"
    assert place({"runs": 12}) == "12 runs"


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 1), (5e-324, 1), (0.03, 0.05), (1, 1), (1.2, 2), (7e8, 1e9)]
)
def test_axes_end_at_round_numbers(value, expected):
    assert round_up(value) == pytest.approx(expected)


@pytest.mark.parametrize("span", [0, 5e-324, 1e-7, 0.3, 1, 59, 3600, 20_000, 1e6, 2.5e11])
def test_an_axis_has_few_ticks_within_it(span):
    found = ticks(span)
    assert found[0] == 0
    assert len(found) <= 7
    assert found[-1] <= span * (1 + 1e-6)
    assert len(found) >= 3 or span < 1e-6


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple)))
def test_a_union_covers_the_same_moments_once(intervals):
    covered = {moment for a, b in intervals for moment in range(a, b)}
    joined = union(intervals)
    assert {moment for a, b in joined for moment in range(a, b)} == covered
    assert length_within(joined, 0, 30) == len(covered)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(joined))


# What cannot be trusted.


class Elements(HTMLParser):
    """Which elements a page has, and all attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {value for name, value in attrs if name in ("href", "src")}


HOSTILE = "\"'><script>alert(1)</script></title></svg></style><img src=x onerror=alert(1)>"


def test_hostile_texts_are_only_texts(tmp_path):
    folder = tmp_path / "run <script>&"
    one = Process(host=HOSTILE)
    texts = {"reason": HOSTILE, "error": HOSTILE, "source": HOSTILE, "outcome": HOSTILE}
    entries = [
        one.at(0, "begin", callback=HOSTILE, file=HOSTILE),
        one.save(10, HOSTILE),
        one.at(20, HOSTILE),
        *(
            one.at(30, event, file=HOSTILE, ending=HOSTILE, **texts)
            for event in ("notice", "error", "pass_over", "agreement", "resume", "preempted")
        ),
    ]
    write_log(folder / HOSTILE.replace("/", ":"), entries)
    page = page_of(reported(folder))
    found = Elements(page)
    assert not {"script", "img", "iframe", "link", "object", "a"} & found.tags
    assert not any(name.startswith("on") for name in found.attributes)
    assert found.links
    assert all(link.startswith("#") for link in found.links), "nothing comes from elsewhere"
    assert "default-src 'none'" in page
    assert "&lt;script&gt;alert(1)" in page


GOOD = {"event": "save", "time": ZERO, "host": "a", "pid": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"time": "1"}, {"time": True}, {"time": float("nan")}, {"time": 1e300}, {"time": -1},
        {"time": 10**400}, {"time": None}, {"host": 3}, {"pid": 1.5}, {"pid": "1"}, {"event": []},
        {"seconds": "x"}, {"seconds": float("inf")}, {"seconds": -1}, {"seconds": 1e10},
        {"bytes": 2**64}, {"bytes": 1.5}, {"step": [1]}, {"file": {}}, {"leads": 1},
        {"repeated": -1}, {"reason": 5},
    ],
)  # fmt: skip
def test_an_entry_with_something_wrong_is_left_out(wrong):
    assert event_from(GOOD) is not None
    assert event_from({**GOOD, **wrong}) is None


def test_what_is_left_out_is_counted_on_the_page(tmp_path):
    write_log(tmp_path, [GOOD, {**GOOD, "time": "x"}, {**GOOD, "pid": None}, {"event": "save"}])
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('[1]\n\nnonsense\n{"event": "sav')
    report = reported(tmp_path)
    assert (report.summary.broken_lines, report.summary.unfit_lines) == (3, 3)
    assert "Left out: 3 lines of the log that were cut or broken, and 3 in which" in page_of(report)


def test_unknown_facts_and_events_disturb_nothing(tmp_path):
    write_log(tmp_path, [GOOD, {**GOOD, "event": "new", "time": ZERO + 9, "weather": ["fine"]}])
    assert reported(tmp_path).summary.wall == 9


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path):
    (tmp_path / "events.jsonl").write_text(json.dumps({**GOOD, "file": "\ud800"}))
    assert page_of(reported(tmp_path)).encode()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
MOMENTS = st.sampled_from([0, 5e-324, 1e-9, 1.5, 1e9, ZERO, ZERO + 1e-7, ZERO + 50, 2.5e11])
COUNTS = st.sampled_from([0, 1, 2, 2**40, 2**63 - 1])
KINDS = (
    "begin", "save", "wait", "notice", "agreement", "preempted", "finished", "resume", "restore",
    "pass_over", "error", "prune", "backup", "skip", "other",
)  # fmt: skip
LIKELY = st.fixed_dictionaries(
    {"event": st.sampled_from(KINDS), "time": MOMENTS, "host": st.text(max_size=3),
     "pid": st.integers(0, 3)},
    optional={
        "seconds": MOMENTS, "blocked_seconds": MOMENTS, "started": MOMENTS, "bytes": COUNTS,
        "step": COUNTS, "epoch": COUNTS, "batch": COUNTS, "repeated": COUNTS, "worker": COUNTS,
        "leads": st.booleans(), "file": st.sampled_from("ab"), "reason": st.text(max_size=9),
    },
)  # fmt: skip
ENTRIES = st.builds(lambda entry, more: {**entry, **more}, LIKELY, st.just({})) | st.builds(
    lambda entry, name, value: {**entry, name: value}, LIKELY, st.sampled_from(["time", "pid",
    "seconds", "step", "file", "event", "bytes"]), JUNK,
)  # fmt: skip
LINES = ENTRIES.map(json.dumps) | JUNK.map(json.dumps) | st.text(max_size=20)


@settings(max_examples=150, deadline=None)
@given(lines=st.lists(LINES, max_size=12))
def test_no_line_whatsoever_disturbs_the_report(lines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("junk")
    text = "\n".join(lines)
    (folder / "events.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        report = reported(folder)
    except CheckpointNotFoundError:
        return
    page = page_of(report)
    assert len(page.encode()) < 200_000
    for number in ("nan", "inf"):
        assert f'"{number}' not in page.split("</style>")[1]
    json.dumps(report.as_dict(), allow_nan=False)
    summary = report.summary
    assert summary.goodput is None or -1e-6 <= summary.goodput <= 1 + 1e-6
    assert min(summary.times) >= -1e-3


def test_a_hundred_thousand_events_make_a_small_page_in_seconds(tmp_path):
    one = Process()
    with open(tmp_path / "events.jsonl", "w") as file:
        for number in range(100_000):
            kind = ("save", "wait", "notice", "error", "backup")[number % 5]
            facts = {"file": f"{number}.keras", "seconds": 0.5, "bytes": number, "step": number}
            file.write(json.dumps(one.at(number, kind, **facts)) + "\n")
    began = time.perf_counter()
    report = reported(tmp_path)
    page = page_of(report)
    assert time.perf_counter() - began < 60
    assert report.summary.saves == 20_000
    assert len(page) < 1_000_000
    assert f"{20_000 - MOST_ROWS:,} older checkpoints not listed" in page
    assert "the largest of" in page


def test_thousands_of_workers_make_a_small_page(tmp_path):
    entries = (Process(n).at(n % 7, "begin", worker=n % 4000) for n in range(8000))
    page = page_of(reported(write_log(tmp_path, entries)))
    assert "more lanes not drawn" in page
    assert "later lives not listed" in page
    assert len(page) < 1_000_000


# The command.


def test_the_page_goes_where_it_is_told_and_that_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = busy_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == "Wrote report.html\n"
    assert main(["report", str(run), "-o", "other/page.html"]) == 0
    assert (tmp_path / "report.html").read_text() == (tmp_path / "other/page.html").read_text()
    assert "Training run in run" in (tmp_path / "report.html").read_text()


def test_json_has_the_same_numbers(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = busy_run(tmp_path / "run")
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    report = reported(run)
    assert found["summary"]["goodput"] == report.summary.goodput
    assert found["summary"]["times"]["counted"] == report.summary.times.counted
    assert [life["ending"] for life in found["lives"] if life["worker"] == 0] == [
        "preempted", "vanished", "finished",
    ]  # fmt: skip
    assert found["lives"][0]["stopped_at"] == {"epoch": 1, "batch": 990}
    assert len(found["checkpoints"]) == report.summary.saves
    assert not (tmp_path / "report.html").exists(), "no page unless -o asks for it"
    assert main(["report", str(run), "--json", "-o", "page.html"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("what", ["missing", "empty", "without events", "only junk", "a folder"])
def test_without_events_there_is_one_line(what, tmp_path, capsys):
    folder = tmp_path / "run"
    if what != "missing":
        folder.mkdir()
    if what == "without events":
        (folder / "events.jsonl").touch()
    if what == "only junk":
        (folder / "events.jsonl").write_text("junk\n" * 5)
    if what == "a folder":
        (folder / "events.jsonl").mkdir()
    assert main(["report", str(folder), "-o", str(tmp_path / "x.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("keras-safe-ckpt: No events at ")
    assert error.count("\n") == 1
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("what", ["folder", "link", "pipe"])
def test_what_is_not_a_file_is_never_replaced(what, tmp_path, capsys):
    target = tmp_path / "report.html"
    (tmp_path / "victim").write_text("mine")
    if what == "folder":
        target.mkdir()
    elif what == "link":
        target.symlink_to(tmp_path / "victim")
    else:
        os.mkfifo(target)
    before = os.lstat(target).st_mode
    assert main(["report", str(busy_run(tmp_path / "run")), "-o", str(target)]) == 2
    assert "Refused to use" in capsys.readouterr().err
    assert os.lstat(target).st_mode == before
    assert (tmp_path / "victim").read_text() == "mine"


def test_it_needs_neither_tensorflow_nor_h5py(tmp_path):
    busy_run(tmp_path / "run")
    code = (
        "import sys; from keras_safe_ckpt.cli.main import main; main(['report', 'run']); "
        "print(sorted({'tensorflow', 'keras', 'h5py', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "Wrote report.html\n[]\n", done.stderr


# Real runs.


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: Any) -> Path:
    """Ended by SIGTERM, then by kill -9, then finished; with a SafeModelCheckpoint beside it."""
    folder = tmp_path_factory.mktemp("real")
    options = json.dumps({"save_freq": 2, "light": True})
    done = subprocess.run(
        [sys.executable, PROGRAM, folder, options, "arrays", "14,34w"],
        env=environment(), capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert json.loads(done.stdout)["codes"] == [42, -9, 0], done.stderr
    return folder / "0"


def test_a_real_run_is_told_as_it_was(real_run):
    report = reported(real_run)
    (lane,) = report.lanes  # The events of both callbacks, from two folders.
    assert [account.life.ending for account in lane.accounts] == [
        "preempted", "vanished", "finished",
    ]  # fmt: skip
    summary = report.summary
    assert (summary.restarts, summary.notices, summary.errors) == (2, 1, 0)
    first, second, third = lane.accounts
    assert second.repeated == 0, "it was told before"
    assert third.repeated is not None
    assert (first.times.counted, second.times.starting, third.down_before) > (0, 0, 0)
    assert summary.times.total == pytest.approx(summary.wall, abs=1e-3)
    assert 0 < summary.goodput < 1
    files = {save.event.file for _, save in report.saves}
    assert "best.weights.h5" in files
    assert any(file.startswith("run-") for file in files)
    assert all(save.blocked > 0 for _, save in report.saves)
    assert "exit code 42" in page_of(report)
    assert "Going on from run-" in page_of(report)


def test_only_a_report_is_replaced(tmp_path, capsys):
    run = busy_run(tmp_path / "run")
    target = tmp_path / "page.html"
    assert main(["report", str(run), "-o", str(target)]) == 0
    target.write_text(target.read_text().replace("</html>", "older</html>"))
    assert main(["report", str(run), "-o", str(target)]) == 0
    assert "older" not in target.read_text()
    target.write_bytes(b"a checkpoint")
    assert main(["report", str(run), "-o", str(target)]) == 2
    assert "it is there, and is no report" in capsys.readouterr().err
    assert target.read_bytes() == b"a checkpoint"


def test_a_run_whose_name_is_no_text(tmp_path):
    run = busy_run(tmp_path / "run")
    odd = tmp_path / "\udcff"
    run.rename(odd)
    target = tmp_path / "page.html"
    assert main(["report", str(odd), "-o", str(target)]) == 0
    assert r"\udcff" in target.read_text()
