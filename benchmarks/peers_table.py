"""From what was measured to the two tables and the goals; nothing is measured here."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from peers_killed import MIXTURE, NEW, NOTHING, PREVIOUS
from peers_known import (
    AWARE,
    BACKUP,
    KERAS,
    MANAGER,
    ORBAX,
    PEERS,
    RESUMING,
    SAFE,
    SAFE_MANAGER,
    Peer,
)
from tables import shown, table_lines

#: The goals of the large model are for states of this size and more.
LARGE_BYTES = 1e9
BLOCKED_GOALS = {"large": 1 / 100, "small": 1 / 3}
FIT_GOAL = 1.15
RESTORE_GOAL = 1.2
#: Who is measured against whom, for the goals: those that do the same job.
BLOCKED_PAIRS = ((SAFE, KERAS), (SAFE, ORBAX), (AWARE, BACKUP))
RESTORE_PAIRS = ((SAFE, KERAS), (AWARE, BACKUP), (SAFE_MANAGER, MANAGER))
NONE = "none"
EMPTY = ""


@dataclass(frozen=True)
class Goal:
    what: str
    ratio: float
    limit: float

    @property
    def reached(self) -> bool:
        return self.ratio <= self.limit

    def row(self) -> list[str]:
        return [self.what, f"{self.ratio:.3g}", f"<= {self.limit:.3g}",
                "yes" if self.reached else "NO"]  # fmt: skip


class Report:
    """``measured`` is what `peers.py` stores: seconds of each measurement, and facts."""

    def __init__(self, measured: dict[str, Any]) -> None:
        self._measured = measured
        self._costs: dict[str, Any] = measured["costs"]
        self._killed: dict[str, Any] = measured["killed"]

    def middle(self, size: str, what: str, name: str) -> float | None:
        values = self._costs[size][what].get(name)
        return statistics.median(values) if values else None

    def size(self, size: str) -> str:
        count = self._costs[size]["bytes"]
        for unit, name in ((1e9, "GB"), (1e6, "MB")):
            if count >= unit:
                return f"{count / unit:.1f} {name}"
        return f"{count / 1e3:.0f} kB"

    # The goals.

    def goals(self) -> list[Goal]:
        found: list[Goal] = []
        for size in self._costs:
            if size == "large" and self._costs[size]["bytes"] < LARGE_BYTES:
                continue
            pairs = [("blocked", *pair, BLOCKED_GOALS[size]) for pair in BLOCKED_PAIRS]
            if size == "large":
                pairs += [("fits", ours, NONE, FIT_GOAL) for ours in (SAFE, AWARE)]
                pairs += [("restore", *pair, RESTORE_GOAL) for pair in RESTORE_PAIRS]
            for what, ours, theirs, limit in pairs:
                ratio = self._ratio(size, what, ours, theirs)
                if ratio is not None:
                    found.append(Goal(self._said(size, what, ours, theirs), ratio, limit))
        return found

    def _said(self, size: str, what: str, ours: str, theirs: str) -> str:
        words = {"blocked": "blocked by a save", "fits": "whole fit", "restore": "restore"}
        against = "without a callback" if theirs == NONE else theirs
        return f"{self.size(size)}, {words[what]}: {ours} / {against}"

    def _ratio(self, size: str, what: str, one: str, other: str) -> float | None:
        first, second = self.middle(size, what, one), self.middle(size, what, other)
        return None if first is None or second is None else first / second

    # The tables.

    def costs(self, *, markdown: bool) -> list[str]:
        head = ["state", "", "training is blocked by a save", "until it is durable",
                "syncs by itself", "whole `fit`", "restore"]  # fmt: skip
        rows = [
            [
                self.size(size),
                peer.name,
                self._cell(size, "blocked", peer),
                self._cell(size, "durable", peer),
                self._killed[peer.name]["syncs"],
                self._fit_cell(size, peer),
                self._cell(size, "restore", peer),
            ]
            for size in self._costs
            for peer in PEERS
            if self.middle(size, "durable", peer.name) is not None
        ]
        return table_lines(head, rows, markdown=markdown)

    def _cell(self, size: str, what: str, peer: Peer) -> str:
        value = self.middle(size, what, peer.name)
        if value is None:
            return EMPTY
        ratio = None if peer.against is None else self._ratio(size, what, peer.name, peer.against)
        return shown(value) if ratio is None else f"{shown(value)} ({ratio:.3g} x ours)"

    def _fit_cell(self, size: str, peer: Peer) -> str:
        ratio = self._ratio(size, "fits", peer.name, NONE)
        return EMPTY if ratio is None else f"{ratio:.2f}"

    def behaviour(self, *, markdown: bool) -> list[str]:
        head = ["", "restores", "batches repeated after SIGTERM", "weights as if undisturbed",
                "with Dropout, shuffled data", "loadable after `kill -9` in a save",
                "a flipped bit"]  # fmt: skip
        rows = []
        for peer in PEERS:
            lives = self._measured["lives"].get(peer.name)
            if lives is None:
                continue
            repeated = {life["trained"] - life["needed"] for life in lives.values()}
            rows.append(
                [
                    peer.name,
                    "by hand"
                    if peer.kind == "callback" and peer.name not in RESUMING
                    else "itself",
                    " or ".join(map(str, sorted(repeated))),
                    self._exact(peer, "plain"),
                    self._exact(peer, "dropout"),
                    self._after_kill(peer),
                    self._after_flip(peer),
                ]
            )
        return table_lines(head, rows, markdown=markdown)

    def _exact(self, peer: Peer, program: str) -> str:
        kind = "fit" if peer.kind == "callback" else "loop"
        wanted = self._measured["undisturbed"][kind][program]
        return "yes" if self._measured["lives"][peer.name][program]["digest"] == wanted else "no"

    def _after_kill(self, peer: Peer) -> str:
        if peer.kind == "guard":
            return "as its manager"
        tries = self._killed[peer.name]["tries"]
        good = sum(one["found"] in (PREVIOUS, NEW) for one in tries)
        return f"{good} of {len(tries)} times"

    def _after_flip(self, peer: Peer) -> str:
        if peer.kind == "guard":
            return "as its manager"
        found = self._killed[peer.name]["flipped"]
        words = {
            MIXTURE: "loaded in silence",
            NEW: "without effect",
            PREVIOUS: "passed over",
            NOTHING: "starts over",
        }
        return words.get(found, "an error")

    # All of it.

    def lines(self, *, markdown: bool) -> list[str]:
        lines = [*self.costs(markdown=markdown), "", *self.behaviour(markdown=markdown), ""]
        goals = [goal.row() for goal in self.goals()]
        lines += table_lines(["goal, ours / theirs", "", "at most", "reached"], goals,
                             markdown=markdown)  # fmt: skip
        if self._costs["large"]["bytes"] < LARGE_BYTES:
            lines += ["", f"No goals for {self.size('large')}: those of the large model are for "
                      f"{LARGE_BYTES / 1e9:.0f} GB and more."]  # fmt: skip
        for name, reason in self._measured["left_out"].items():
            lines += ["", f"{name} is left out: {reason}."]
        return [*lines, "", *self.remarks()]

    def remarks(self) -> list[str]:
        made, options = self._measured["made"], self._measured["options"]
        versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
        large, small = options["large"], options["small"]
        return [
            f"Made by `{made['command']}` in one run on {made['date']}: {made['machine']}; "
            f"{versions}. Medians of {large['rounds'] * large['epochs']} saves in "
            f"{large['rounds']} fits, {large['saves']} saves until they were durable and "
            f"{large['restores']} restores (small model: {small['rounds'] * small['epochs']}, "
            f"{small['rounds']}, {small['saves']} and {small['restores']}), the order rotating; "
            f"{options['kills']['kills']} kills each, in saves of "
            f"{options['kills']['megabytes']:.2g} MB. {self._noise()}"
        ]

    def _noise(self) -> str:
        """How much the figures can tell: what was not changed differs by as much."""
        fits = self._costs["large"]["fits"][NONE]
        return (
            f"The fits of {self.size('large')} without a callback took {shown(min(fits))} to "
            f"{shown(max(fits))}: smaller differences between whole fits say nothing."
        )
