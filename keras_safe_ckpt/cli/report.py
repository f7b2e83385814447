"""``report``: a page about a run, made from its events."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_safe_ckpt.cli.screen import add_common_options, new_command, print_json
from keras_safe_ckpt.errors import UnsafePathError

_DEFAULT_OUTPUT = Path("report.html")

_EPILOG = """\
DIR is the directory of a PreemptionAwareCallback, of the files of a SafeModelCheckpoint, or of a
SafeCheckpointManager; the events of folders in it (worker-0, worker-1, ...) belong to it.

example:
  keras-safe-ckpt report run/state -o report.html
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "report",
        help="make a page about a run: goodput, timeline, saves, restarts",
        description="Make one HTML page about a run, from the events beside its checkpoints.",
        epilog=_EPILOG,
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


def _refuse_what_is_no_report(path: Path) -> None:
    """An older report is replaced; a checkpoint, or anything else, is not."""
    from keras_safe_ckpt.reports.page import GENERATOR

    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            head = file.read(1024)
    except (FileNotFoundError, IsADirectoryError):
        return  # Nothing there, or something that is never replaced.
    if GENERATOR.encode() not in head:
        raise UnsafePathError(path, "it is there, and is no report")


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
    if output is not None:
        _refuse_what_is_no_report(output)
    with _uncollected():
        report = report_on(read_history(options.directory.absolute()))
        if output is not None:
            # A name that is no text stands there as one.
            write_atomically(output, page_of(report).encode(errors="backslashreplace"))
    if options.json:
        print_json(report.as_dict())
    else:
        print(f"Wrote {output}")
    return 0
