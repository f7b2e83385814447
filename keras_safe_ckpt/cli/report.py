"""``report``: a page about a run, made from its events."""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_safe_ckpt.cli.screen import add_common_options, print_json

_DEFAULT_OUTPUT = Path("report.html")

_EPILOG = """\
DIR is the directory of a PreemptionAwareCallback, of the files of a SafeModelCheckpoint, or of a
SafeCheckpointManager; the events of folders in it (worker-0, worker-1, ...) belong to it.

example:
  keras-safe-ckpt report run/state -o report.html
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = commands.add_parser(
        "report",
        help="make a page about a run: goodput, timeline, saves, restarts",
        description="Make one HTML page about a run, from the events beside its checkpoints.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the checkpoints are")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"where the page goes (default: {_DEFAULT_OUTPUT})",
    )
    add_common_options(parser, json_help="print the numbers as JSON; a page is made only with -o")
    parser.set_defaults(run=run_report)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """A million events are kept to the end, and looking for garbage among them takes longest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_report(options: argparse.Namespace) -> int:
    """Return 0; what cannot be read or written raises."""
    from keras_safe_ckpt.reports.history import read_history
    from keras_safe_ckpt.reports.page import page_of
    from keras_safe_ckpt.reports.summary import report_on
    from keras_safe_ckpt.storage.atomic import write_atomically

    output: Path | None = options.output
    if output is None and not options.json:
        output = _DEFAULT_OUTPUT
    with _uncollected():
        report = report_on(read_history(options.directory.absolute()))
        if output is not None:
            write_atomically(output, page_of(report).encode())
    if options.json:
        print_json(report.as_dict())
    else:
        print(f"Wrote {output}")
    return 0
