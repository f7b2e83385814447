"""The page of a report in a real browser: seen, legible, and asking for nothing."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from histories import Process, busy_run, reported, write_log
from playwright.sync_api import Browser, Page, sync_playwright

from keras_safe_ckpt.reports.page import page_of

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

#: Of all texts with an element of their own: the contrast with what is behind them (WCAG 2).
CONTRASTS = """
() => {
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const light = colour => numbers(colour).slice(0, 3)
    .map(part => part / 255)
    .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const wanted = "h1,h2,p,li,b,span,small,th,td,footer,text";
  return [...document.querySelectorAll(wanted)].filter(one => one.textContent.trim()).map(one => {
    const style = getComputedStyle(one);
    const pair = [light(one.tagName === "text" ? style.fill : style.color), light(behind(one))];
    return [(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), one.outerHTML.slice(0, 90)];
  });
}
"""

#: The places of all drawn elements that a selector finds.
BOXES = """
selector => [...document.querySelectorAll(selector)].map(one => {
  const box = one.getBoundingClientRect();
  return {left: box.left, right: box.right, width: box.width, height: box.height,
          title: one.querySelector("title")?.textContent ?? ""};
})
"""

BOXES_OF_AXIS = """
axis => [...axis.querySelectorAll("text")].map(one => {
  const {left, right} = one.getBoundingClientRect();
  return {left, right};
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("needs a browser: chromium (a Debian package of this name)")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("page")
    path = folder / "report.html"
    path.write_text(page_of(reported(busy_run(folder / "run"))))
    return path


class Watched:
    """A page, and all that it said and asked for."""

    def __init__(self, browser: Browser, path: Path, **options: Any) -> None:
        self.page: Page = browser.new_page(**options)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def boxes(self, selector: str) -> list[dict[str, Any]]:
        return self.page.evaluate(BOXES, selector)


WIDE = {"width": 1200, "height": 900}
NARROW = {"width": 400, "height": 800}


def test_the_page_says_nothing_and_asks_for_nothing(browser, written):
    seen = Watched(browser, written, viewport=WIDE)
    seen.page.wait_for_load_state("networkidle")
    assert seen.said == []
    assert seen.asked == [written.as_uri()]
    assert seen.page.title() == "Training run in run"
    assert seen.page.locator("script, img").count() == 0


@pytest.mark.parametrize("viewport", [WIDE, NARROW])
def test_lanes_bars_and_marks_are_seen_inside_the_window(browser, written, viewport):
    seen = Watched(browser, written, viewport=viewport)
    lanes = seen.boxes(".lane > svg")
    assert len(lanes) == 2
    for lane in lanes:
        assert lane["width"] > 0.8 * viewport["width"] - 60
        assert lane["height"] > 40
    counted = seen.boxes("rect.counted")
    assert len(counted) == 6  # Three lives of each worker.
    assert all(box["width"] > 20 and box["height"] > 10 for box in counted)
    drawn = seen.boxes(".lane rect, .lane .mark use, .stem circle")
    for box in drawn:
        assert box["height"] > 0
        assert box["left"] > 0
        assert box["right"] < viewport["width"]
    # Above all others, and not behind something.
    found = seen.page.evaluate(
        """() => [...document.querySelectorAll(".lane rect.down")].map(one => {
            one.scrollIntoView();
            const box = one.getBoundingClientRect();
            const there = document.elementFromPoint(box.left + box.width / 4, box.top + 3);
            return there === one;
        })"""
    )
    assert found
    assert all(found)


def test_what_is_pointed_at_tells_its_name(browser, written):
    seen = Watched(browser, written, viewport=WIDE)
    titles = [box["title"] for box in seen.boxes("rect.background")]
    assert any(title.startswith("run-800.weights.h5\nepoch 1, batch 800") for title in titles)
    assert any("<script>alert(1)</script>\"'&.weights.h5" in title for title in titles)
    for selector, words in {
        "rect.lost": "Training that was done again",
        "rect.down": "Down for",
        "rect.blocked": "Training stood still for a save",
        "rect.starting": "Going on from run-3200.weights.h5, 200 batches read and dropped",
        ".mark:has(use.notice)": "Notice at",
        ".mark:has(use.error)": "the disk is full (ENOSPC)",
        ".mark:has(use.pass_over)": "digest differs",
        ".mark:has(use.resume)": "560 batches repeated",
        ".mark:has(use.preempted)": "exit code 143",
        ".mark:has(use.agreement)": "took 1.0 s",
        ".mark:has(use.vanished)": "Vanished",
        ".stem.size": "1.2 GB",
    }.items():
        titles = [box["title"] for box in seen.boxes(selector)]
        assert any(words in title for title in titles), (selector, titles)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser, written, scheme):
    seen = Watched(browser, written, viewport=WIDE, color_scheme=scheme)
    contrasts = seen.page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert [pair for pair in contrasts if pair[0] < 4.5] == []
    background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = sum(map(int, background.removeprefix("rgb(").rstrip(")").split(","))) < 200
    assert is_dark == (scheme == "dark")


@pytest.mark.parametrize("width", [400, 700, 1200])
def test_nothing_is_wider_than_the_window_and_no_labels_overlap(browser, written, width):
    seen = Watched(browser, written, viewport={"width": width, "height": 800})
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    cards = "[...document.querySelectorAll('.card')].map(c => c.scrollWidth - c.clientWidth)"
    assert max(seen.page.evaluate(cards)) == 0
    axes = [axis.evaluate(BOXES_OF_AXIS) for axis in seen.page.locator(".axis").all()]
    assert len(axes) == 4  # Of the timeline, and of three charts.
    for labels in axes:
        assert len(labels) >= 3
        for one, other in itertools.pairwise(labels):
            assert one["right"] < other["left"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_of_it_is_not_blank(browser, written, tmp_path, scheme):
    seen = Watched(browser, written, viewport=WIDE, color_scheme=scheme)
    picture = seen.page.screenshot()
    (tmp_path / "blank.html").write_text("<!DOCTYPE html><title>x</title>")
    blank = Watched(browser, tmp_path / "blank.html", viewport=WIDE).page.screenshot()
    assert len(picture) > 10 * len(blank)


def test_it_can_be_printed(browser, written):
    seen = Watched(browser, written, viewport=WIDE, color_scheme="dark")
    seen.page.emulate_media(media="print")
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert [pair for pair in seen.page.evaluate(CONTRASTS) if pair[0] < 4.5] == []


def test_a_log_of_one_event_makes_a_page_too(browser, tmp_path):
    write_log(tmp_path, [Process().save(0, "a")])
    path = tmp_path / "report.html"
    path.write_text(page_of(reported(tmp_path)))
    seen = Watched(browser, path, viewport=NARROW)
    assert seen.said == []
    assert seen.boxes("rect.background")[0]["height"] > 0
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 400
