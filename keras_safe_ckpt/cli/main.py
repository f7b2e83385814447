"""The entry point of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_safe_ckpt import __version__
from keras_safe_ckpt.cli.launch import add_parser as add_launch
from keras_safe_ckpt.cli.recover import add_parser as add_recover
from keras_safe_ckpt.cli.report import add_parser as add_report
from keras_safe_ckpt.errors import SafeCheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 1 for an error, 2 for wrong usage, 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (SafeCheckpointError, ImportError) as error:
        if options.debug:
            raise
        print(f"keras-safe-ckpt: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-safe-ckpt",
        description="Checkpoints for Keras 3 that nothing can lose or tear.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small model, save it in the background, restore it and compare",
        description="Train a small model, save it in the background, restore it and compare.",
    )
    demo.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave the checkpoints here (default: remove them)"
    )
    demo.set_defaults(run=_demo)
    add_launch(commands)
    add_recover(commands)
    add_report(commands)
    return parser


def _demo(options: argparse.Namespace) -> int:
    # Needs Keras, which takes seconds to import.
    from keras_safe_ckpt.cli.demo import run_demo

    return run_demo(options.keep)
