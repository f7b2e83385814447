"""``launch``: local workers for one script, restarted when they ask for it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from keras_safe_ckpt.cli.screen import add_common_options, new_command, print_json
from keras_safe_ckpt.cluster.launch_plan import RESTART_CODES, Outcome, Plan, describe_code

_EPILOG = """\
Each worker gets a TF_CONFIG with free ports of this machine, so that
tf.distribute.MultiWorkerMirroredStrategy() finds the others. When a worker ends with a restart
code, all are started again, with new ports; any other failure ends the group. SIGTERM and Ctrl-C
go to all workers; a second one kills them.

example:
  keras-safe-ckpt launch --workers 2 train.py --epochs 10
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "launch",
        help="run a script as several local workers, and restart them when they ask for it",
        epilog=_EPILOG,
    )
    parser.add_argument("--workers", type=_at_least(1), required=True, metavar="N")
    parser.add_argument(
        "--max-restarts",
        type=_at_least(0),
        default=Plan.max_restarts,
        metavar="R",
        help="give up after so many restarts (default: %(default)s)",
    )
    parser.add_argument(
        "--restart-codes",
        type=_codes,
        default=RESTART_CODES,
        metavar="CODES",
        help="exit codes after which all are started again, 128 + n for signal n "
        f"(default: {','.join(map(str, RESTART_CODES))})",
    )
    parser.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=Plan.grace_seconds,
        metavar="S",
        help="kill workers that have not ended so long after a signal (default: %(default)g)",
    )
    parser.add_argument(
        "--pause-seconds",
        type=_seconds,
        default=Plan.first_pause_seconds,
        metavar="S",
        help="wait so long before the first restart, and twice as long before each next one that "
        "comes within a minute (default: %(default)g)",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is a module, as in python -m"
    )
    add_common_options(parser)
    parser.add_argument("script", help="what each worker runs, with this Python")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run_launch)


def run_launch(options: argparse.Namespace) -> int:
    """Return 0 if all workers finished, else the code of the one that failed."""
    if not options.module and not Path(options.script).is_file():
        print(
            f"keras-safe-ckpt launch: there is no script {options.script!r} "
            "(for a module: launch -m NAME)",
            file=sys.stderr,
        )
        return 2
    start = ["-m", options.script] if options.module else [options.script]
    plan = Plan(
        [sys.executable, *start, *options.arguments],
        options.workers,
        options.max_restarts,
        options.restart_codes,
        options.pause_seconds,
        grace_seconds=options.grace_seconds,
    )
    for stream in (sys.stdout, sys.stderr):
        # A worker may print what this screen cannot show.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    if options.json:
        return _launch_for_a_program(plan)
    # Needs asyncio, which takes as long to import as all commands together.
    from keras_safe_ckpt.cluster.launch import launch
    from keras_safe_ckpt.cluster.worker_output import Printer

    printer = Printer(options.workers)
    outcome = launch(plan, printer)
    for line in summary(outcome):
        printer.note(line)
    return outcome.code


def _launch_for_a_program(plan: Plan) -> int:
    """What the workers print goes to standard error, and the outcome alone to standard output."""
    from keras_safe_ckpt.cluster.launch import launch
    from keras_safe_ckpt.cluster.worker_output import Printer

    with contextlib.redirect_stdout(sys.stderr):
        outcome = launch(plan, Printer(plan.workers))
    print_json(
        {
            "code": outcome.code,
            "verdict": outcome.verdict,
            "lives": [
                {"seconds": attempt.seconds, "codes": dict(sorted(attempt.codes.items()))}
                for attempt in outcome.attempts
            ],
        }
    )
    return outcome.code


def summary(outcome: Outcome) -> list[str]:
    """What happened, one line for each life of the group."""
    lines = []
    if len(outcome.attempts) > 1:
        for number, attempt in enumerate(outcome.attempts):
            ends = ", ".join(
                f"worker {worker}: {describe_code(code)}"
                for worker, code in sorted(attempt.codes.items())
            )
            name = "start" if number == 0 else f"restart {number}"
            lines.append(f"{name:<11} {attempt.seconds:7.1f} s  {ends}")
    restarts = len(outcome.attempts) - 1
    often = "1 restart" if restarts == 1 else f"{restarts} restarts"
    seconds = sum(attempt.seconds for attempt in outcome.attempts)
    lines.append(f"{outcome.verdict} ({often}, {seconds:.1f} s of running)")
    return lines


def _at_least(least: int) -> Any:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, received {text}")
        return value

    return whole_number


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, received {text}")
    return value


def _codes(text: str) -> tuple[int, ...]:
    try:
        codes = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        codes = (0,)
    if not all(0 < code < 256 for code in codes):
        raise argparse.ArgumentTypeError(
            f"expected exit codes from 1 to 255, separated by commas, received {text!r}"
        )
    return codes
