"""Beside the others: what a save costs, and what is left of a run, in one run with all peers.

    python benchmarks/peers.py                        # 1.2 GB and 100 kB: about 20 minutes
    python benchmarks/peers.py --quick                # 60 MB and 100 kB: about 2 minutes
    python benchmarks/peers.py --refresh              # and renews what the README shows of it
    python benchmarks/peers.py --from FILE --markdown # the tables again, from stored measurements

Blocked is the time that all callbacks together keep `fit` waiting at the change of epochs, for a
manager that of its `save`. Durable is from the beginning of a save until what it wrote is synced,
with training held; where a peer does not sync, or not all, an fsync of its files and directories
is added and counted. A whole `fit` is shown relative to one without a callback. A restore is
what a program must call, or what the callbacks do before the first batch of a `fit` that goes on;
of files that were read before. All of these are medians, measured in one process in an order that
rotates, and every measurement is printed to standard error and stored by ``--json``. What happens
after a SIGTERM and a `kill -9` is tried with real processes, see `peers_lives.py` and
`peers_killed.py`. The peers are in `peers_known.py`. Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from forked import Job, side_by_side
from peers_cost import Plan, measure_costs
from peers_killed import measure_kills
from peers_known import PEERS, left_out, of_kind
from peers_lives import PROGRAMS, measure_lives, measure_undisturbed
from peers_plot import draw
from peers_table import Report
from tables import shown

PROJECT = Path(__file__).resolve().parent.parent
RESULTS, PLOT, README = "benchmarks/results/peers.json", "docs/peers.svg", "README.md"
#: A save of this size takes long enough to be killed in its middle.
KILLED_PARAMETERS = 5e6


def plans_of(arguments: argparse.Namespace) -> dict[str, Plan]:
    large = Plan(arguments.rounds, epochs=4, batches=6, rows=128, saves=6, restores=7)
    small = Plan(arguments.rounds, epochs=20, batches=200, rows=8, saves=20, restores=20)
    if arguments.quick:
        large = dataclasses.replace(large, epochs=2, saves=2, restores=2)
        small = dataclasses.replace(small, epochs=5, saves=3, restores=3)
    large = dataclasses.replace(large, parameters=arguments.parameters)
    return {"large": large, "small": small}


class Progress:
    """A bar on a terminal; everywhere a line for each thing that was measured."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        # Drawn when something is told, not by a thread: this process forks.
        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=self._console,
            auto_refresh=False, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total)

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        with self._bar:
            yield

    def tell(self, message: dict[str, Any]) -> None:
        times = " ".join(map(shown, message.get("seconds", ())))
        self._console.print(message["note"], times, markup=False)
        self._bar.update(self._task, advance=1)
        self._bar.refresh()


def merged(into: dict[str, Any], new: dict[str, Any]) -> None:
    """What several processes have told, put together."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merged(into[key], value)
        else:
            into[key] = value


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    # Imported, and never used here: all that uses it is forked from this process.
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    missing = {name: why for name, why in left_out().items() if name in arguments.only}
    names = [name for name in arguments.only if name not in missing]
    saved = of_kind(names, "callback", "manager")
    plans = plans_of(arguments)
    parameters = min(arguments.parameters, KILLED_PARAMETERS)
    total = sum(plan.steps(names) for plan in plans.values()) + len(saved) * (arguments.kills + 1)
    progress = Progress(total + (len(names) + 2) * len(PROGRAMS))
    found: dict[str, Any] = {
        "made": made_by(arguments),
        "left_out": missing,
        "options": {
            **{size: dataclasses.asdict(plan) for size, plan in plans.items()},
            "kills": {"kills": arguments.kills, "megabytes": parameters * 12 / 1e6},
        },
    }
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="ksc-bench-") as temporary:
        folder = Path(temporary).resolve()
        lives = [(measure_undisturbed, (kind, folder / kind)) for kind in ("fit", "loop")]
        lives += [(measure_lives, (name, folder / f"l-{name}")) for name in names]
        kills = [
            (measure_kills, (name, parameters, arguments.kills, folder / f"k-{name}"))
            for name in saved
        ]
        # Alone, then as many at once as there are cores: nothing of those is a time.
        parts: list[tuple[list[Job], int]] = [
            ([(measure_costs, (plans, names, folder))], 1),
            ([*lives, *kills], os.cpu_count() or 1),
        ]
        with progress.showing():
            for jobs, at_once in parts:
                for message in side_by_side(jobs, folder, at_once):
                    if "note" in message:
                        progress.tell(message)
                    message = {k: v for k, v in message.items() if k not in ("note", "seconds")}
                    merged(found, message)
    return found


def made_by(arguments: argparse.Namespace) -> dict[str, Any]:
    versions = {"Python": platform.python_version()}
    packages = {"Keras": ("keras",), "TensorFlow": ("tensorflow", "tensorflow-cpu"),
                "Orbax": ("orbax-checkpoint",)}  # fmt: skip
    for name, candidates in packages.items():
        for package in candidates:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions.setdefault(name, importlib.metadata.version(package))
    given = [f"--{name}" for name in ("quick", "refresh") if getattr(arguments, name)]
    given += [f"--{name} {value:g}" for name, value in arguments.changed.items()]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpu = Path("/proc/cpuinfo").read_text()
    kind = "a virtual machine with " if "hypervisor" in cpu else ""
    model = re.search(r"^model name\s*: (.*)$", cpu, re.MULTILINE)
    return {
        "command": " ".join(["python benchmarks/peers.py", *given]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{kind}{os.cpu_count()} cores"
        f"{f' ({model[1]})' if model else ''} and {memory / 2**30:.0f} GB, without an accelerator",
        "versions": versions,
    }


def stored_text(measured: dict[str, Any]) -> str:
    """As JSON, with a list of figures on one line."""
    text = json.dumps(measured, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def put_into(document: Path, lines: list[str]) -> None:
    """Replace what is between the marks for it."""
    begin, end = "<!-- peers:begin -->\n", "<!-- peers:end -->"
    before, found, rest = document.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{document} has no place for the tables: {begin.strip()} ... {end}")
    document.write_text(before + begin + "\n".join(lines) + "\n" + end + after)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parameters", type=float, help="of the large model (100e6, quick: 5e6)")
    add("--rounds", type=int, help="fits with each callback (3, quick: 1)")
    add("--kills", type=int, help="tries to kill each of them in a save (20, quick: 3)")
    add("--quick", action="store_true", help="a smaller model and fewer measurements")
    add("--only", default=",".join(peer.name for peer in PEERS), help="names of peers (all)")
    add("--directory", help="where to write; a temporary one by default")
    add("--markdown", action="store_true", help="print the tables of the README")
    add("--json", type=Path, help="store all measurements in this file")
    add("--plot", type=Path, help="draw the time that training is blocked: .svg or .png")
    add("--from", dest="stored", type=Path, help="measure nothing: read a file of --json")
    add("--refresh", action="store_true",
        help=f"write {RESULTS}, {PLOT} and the tables of {README}")  # fmt: skip
    arguments = parser.parse_args()
    defaults = {"parameters": (100e6, 5e6), "rounds": (3, 1), "kills": (20, 3)}
    arguments.changed = {}
    for name, (usual, quick) in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else usual)
        else:
            arguments.changed[name] = getattr(arguments, name)
    arguments.only = arguments.only.split(",")
    unknown = set(arguments.only) - {peer.name for peer in PEERS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return arguments


def main() -> int:
    arguments = parsed()
    if arguments.stored is not None:
        measured = json.loads(arguments.stored.read_text())
    else:
        measured = measure(arguments)
    report = Report(measured)
    stores = [arguments.json] + [PROJECT / RESULTS] * arguments.refresh
    plots = [arguments.plot] + [PROJECT / PLOT] * arguments.refresh
    for path in filter(None, stores):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stored_text(measured))
    for path in filter(None, plots):
        titles = {size: f"{report.size(size)} of state" for size in measured["costs"]}
        draw(measured["costs"], titles, path)
    if arguments.refresh:
        put_into(PROJECT / README, report.lines(markdown=True))
    print("\n".join(report.lines(markdown=arguments.markdown)))
    return 0 if all(goal.reached for goal in report.goals()) else 1


if __name__ == "__main__":
    sys.exit(main())
