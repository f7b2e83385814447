"""The entry point of the command line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from keras_safe_ckpt import __version__
from keras_safe_ckpt.cli import (
    demo,
    diff,
    doctor,
    launch,
    listing,
    lock_listing,
    merge,
    prune,
    recover,
    report,
    show,
    tfrecord,
    verify,
)
from keras_safe_ckpt.errors import SafeCheckpointError

_EPILOG = """\
exit codes:
  0    fine
  1    the answer is no: damaged, different, something to be put right
  2    it could not be done, or the command is wrong
  130  Ctrl-C
  141  whoever read the output is gone
(demo and launch end with the code of what they run)
"""

_COMMANDS = (
    demo,
    listing,
    show,
    verify,
    diff,
    prune,
    lock_listing,
    doctor,
    report,
    launch,
    merge,
    tfrecord,
    recover,
)

NOT_DONE = 2
_INTERRUPTED = 128 + signal.SIGINT
_CLOSED_PIPE = 128 + 13  # SIGPIPE, which is not known everywhere.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; see ``--help`` for what it means."""
    _make_output_usable()
    options = _parser().parse_args(arguments)
    try:
        code = int(options.run(options))
        # Here, where it can be said, rather than while the interpreter ends.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read this has seen enough (`| head`).
        _drop_output()
        return _CLOSED_PIPE
    except (SafeCheckpointError, ImportError, OSError, ValueError) as error:
        if options.debug:
            raise
        _say(error)
        return NOT_DONE
    except KeyboardInterrupt:
        if options.debug:
            raise
        _say("interrupted")
        return _INTERRUPTED
    except Exception as error:  # said, and shown whole by --debug
        if options.debug:
            raise
        _say(f"unexpected {type(error).__name__}: {error} (--debug shows where)")
        return NOT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-safe-ckpt",
        description="Checkpoints for Keras 3 that nothing can lose or tear.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def _make_output_usable() -> None:
    """A closed standard output, or one that does not know a letter, is no reason to fail."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for the rest of the program
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _say(problem: object) -> None:
    from keras_safe_ckpt.cli.screen import printable

    line = printable(" ".join(str(problem).splitlines()))
    try:
        print(f"keras-safe-ckpt: {line or type(problem).__name__}", file=sys.stderr)
        sys.stdout.flush()
    except OSError:
        _drop_output()  # The disk of the output is full, say: nobody can be told more.


def _drop_output() -> None:
    """What is still in the buffer must not fail again while the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
