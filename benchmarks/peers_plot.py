"""How long training is blocked by a save, by peer, as an image."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from peers_known import PEERS
from tables import shown

#: Of Okabe and Ito: told apart with any kind of colour vision, and in grey.
OURS, THEIRS = "#0072B2", "#D55E00"
TEXT = "#1a1a1a"


class Row(NamedTuple):
    name: str
    ours: bool
    times: list[float]


def draw(costs: dict[str, Any], titles: dict[str, str], path: Path) -> None:
    """``costs`` as they are stored, by size of the model; the suffix says which format."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    # The same measurements give the same file.
    options = {"svg.hashsalt": "peers", "font.size": 10, "text.color": TEXT}
    with plt.rc_context(options):
        figure, panels = plt.subplots(
            1, len(costs), sharey=True, figsize=(5 * len(costs) + 2, 4.2), layout="constrained"
        )
        for axes, (size, cost) in zip(panels, costs.items(), strict=True):
            rows = rows_of(cost)
            draw_panel(axes, rows)
            if axes is panels[0]:
                name_rows(axes, rows)
            axes.set_title(titles[size], loc="left")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown_round(value)))
            axes.xaxis.set_minor_locator(NullLocator())
        figure.suptitle("How long training is blocked by one save", x=0.01, ha="left", size=13)
        figure.supxlabel(
            "time per save, logarithmic: each save (dots), their range (line), median (figure)",
            size=9,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        # Opaque: a page may be dark.
        figure.savefig(path, facecolor="white", dpi=160, metadata=metadata)
        plt.close(figure)


def rows_of(cost: dict[str, Any]) -> list[Row]:
    """From the bottom up. Ours of a manager is durable when it returns: theirs is shown so, too."""
    rows: list[Row] = []
    for peer in PEERS:
        if peer.name in cost["blocked"]:
            name = peer.name.replace("(", "\n(") + " (ours)" * peer.ours
            rows.append(Row(name, peer.ours, cost["blocked"][peer.name]))
            if peer.kind == "manager" and not peer.ours:
                rows.append(Row(f"{peer.name} plus fsync", False, cost["durable"][peer.name]))
    return rows[::-1]


def draw_panel(axes: Any, rows: list[Row]) -> None:
    for height, row in enumerate(rows):
        colour, middle = OURS if row.ours else THEIRS, statistics.median(row.times)
        axes.hlines(height, min(row.times), max(row.times), color=colour, lw=5, alpha=0.25)
        axes.plot(row.times, [height] * len(row.times), "o", color=colour, ms=4, alpha=0.45, mew=0)
        # Another shape, too: colour alone does not say who is ours.
        shape = "D" if row.ours else "s"
        axes.plot(middle, height, shape, color=colour, ms=8, mec="white", mew=0.8)
        axes.annotate(
            shown(middle), (middle, height), xytext=(0, 9), textcoords="offset points",
            ha="center", size=9, color=colour, weight="bold",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(min(min(row.times) for row in rows) / 2, max(max(r.times) for r in rows) * 2)
    axes.set_ylim(-0.6, len(rows) - 0.2)
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def name_rows(axes: Any, rows: list[Row]) -> None:
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(OURS if row.ours else TEXT)


def shown_round(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.999 * unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"
