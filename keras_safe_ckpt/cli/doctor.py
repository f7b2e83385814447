"""``doctor``: is this a good place for checkpoints, and what to change."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_safe_ckpt.cli.screen import (
    add_common_options,
    coloured,
    console,
    new_command,
    print_json,
    print_table,
    shown_path,
)

if TYPE_CHECKING:
    from keras_safe_ckpt.cli.examination import Finding

_EPILOG = """\
Some files are written to DIR for a moment, and nothing of them stays. Ends with 1 if something is
wrong there; what is only worth knowing does not count.

example:
  keras-safe-ckpt doctor run
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "doctor",
        help="is this directory, and this environment, good for checkpoints",
        description="Does this file system lock, rename atomically and sync; how fast is it; is "
        "there room; which Keras, TensorFlow, platform and notices are there; what to change.",
        epilog=_EPILOG,
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    add_common_options(parser)
    parser.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Return 0 if nothing is wrong, else 1."""
    from keras_safe_ckpt.cli.directories import existing_directory
    from keras_safe_ckpt.cli.examination import examine

    findings = examine(existing_directory(options.directory))
    if options.json:
        print_json(
            {
                "directory": str(options.directory),
                "healthy": all(finding.verdict != "bad" for finding in findings),
                "findings": [vars(finding) for finding in findings],
            }
        )
    else:
        _print(options.directory, findings)
    return 1 if any(finding.verdict == "bad" for finding in findings) else 0


def _print(directory: Path, findings: Sequence[Finding]) -> None:
    shown = {
        "good": coloured("good", "green"),
        "bad": coloured("BAD", "bold red"),
        "note": coloured("note", "yellow"),
        "fact": "",
    }
    print_table(
        (shown_path(directory), "", ""),
        [(one.subject, shown[one.verdict], one.detail) for one in findings],
    )
    advice = [finding for finding in findings if finding.advice]
    if not advice:
        console().print("Nothing to change.")
        return
    console().print("What to change:")
    for finding in advice:
        console().print(f"  - {finding.subject}: {finding.advice}")
