"""``demo``: the same training twice, once undisturbed and once interrupted, and the results."""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shlex
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from keras_safe_ckpt.cli.screen import add_common_options, new_command
from keras_safe_ckpt.errors import SafeCheckpointError, UnsafePathError

_EPILOG = """\
Nothing is downloaded: the pictures are made by the program. Takes about half a minute on 2 cores,
longer with --kill -9, where the other worker first has to miss the killed one.

example:
  keras-safe-ckpt demo
  keras-safe-ckpt demo --workers 1 --kill -9 --keep demo-run
"""
INTERRUPTIONS = 2
#: SIGINT is Ctrl-C, which ends the demonstration itself.
_ENDING = [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT]


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "demo",
        help="train on two workers, preempt one of them twice, and compare with a run in peace",
        description="Train a small network on two local workers, preempt one of them twice at "
        "random, let the launcher start them again, and compare the result with that of an "
        "undisturbed run. Ends with 1 if they differ.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="how many (default: %(default)s)"
    )
    parser.add_argument(
        "--kill",
        type=_signal,
        default=signal.SIGTERM,
        metavar="SIGNAL",
        help="what to interrupt with: -9, or any other (default: TERM, as a preemption)",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave the runs here (default: remove them)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="interrupt at the same places as with this N before"
    )
    add_common_options(parser)
    parser.set_defaults(run=run_demo)


def run_demo(options: argparse.Namespace) -> int:
    """Return 0 if the interrupted run has the weights of the other one, bit by bit."""
    if not 1 <= options.workers <= 16:
        raise ValueError(f"--workers: expected 1 to 16, received {options.workers}")
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            'TensorFlow is missing: pip install "keras_safe_ckpt[tensorflow-cpu]" (or [tensorflow])'
        )
    with ExitStack() as stack:
        if options.keep is None:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="keras_safe_ckpt-demo-")
            )
            return _demonstrate(options, Path(folder))
        return _demonstrate(options, _kept(options.keep))


def _kept(directory: Path) -> Path:
    if directory.exists() and not directory.is_dir():
        raise UnsafePathError(directory, "it is a file, and a directory was expected")
    if directory.is_dir() and any(directory.iterdir()):
        raise UnsafePathError(directory, "it is not empty; the demonstration needs a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    return directory.absolute()


def _demonstrate(options: argparse.Namespace, folder: Path) -> int:
    from keras_safe_ckpt.cli.demo_results import interruptions_of, print_results
    from keras_safe_ckpt.cli.demo_runs import Ambush, run
    from keras_safe_ckpt.cli.demo_screen import DemoScreen
    from keras_safe_ckpt.cli.demo_worker import BATCHES, EPOCHS

    began = time.monotonic()
    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    ambush = Ambush.at_random(random.Random(seed), options.workers, options.kill, INTERRUPTIONS)
    screen = DemoScreen(quiet=options.json)
    workers = "1 worker" if options.workers == 1 else f"{options.workers} workers"
    screen.say(
        f"Training a small convolutional network on {workers}, {EPOCHS} epochs of {BATCHES} "
        f"batches, twice: undisturbed, and interrupted {INTERRUPTIONS} times by "
        f"{options.kill.name} (again at the same places: --seed {seed})"
    )
    for name, disturber in (("undisturbed", None), ("interrupted", ambush)):
        with screen.running(name) as shown:
            outcome = run(folder / name, options.workers, shown, disturber)
        if outcome.code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if outcome.code:
            raise SafeCheckpointError(
                f"The {name} run failed ({outcome.verdict}). The last lines of the workers: "
                + " | ".join(shown.last_lines() or ["none"])
            )
    same = print_results(
        folder,
        interruptions_of(folder / "interrupted" / "state", ambush, shown.pids),
        workers=options.workers,
        seconds=time.monotonic() - began,
        as_json=options.json,
    )
    if options.keep is not None and not options.json:
        kept = shlex.quote(os.fspath(options.keep))
        screen.say(f"Look at what is left: keras-safe-ckpt ls --recursive {kept}")
    return 0 if same else 1


def _signal(text: str) -> signal.Signals:
    """``-9``, ``9``, ``KILL`` or ``SIGKILL``; one that ends a process, not one that stops it."""
    name = text.lstrip("-").upper()
    try:
        number = int(name) if name.isdecimal() else signal.Signals[f"SIG{name.removeprefix('SIG')}"]
        return _ENDING[_ENDING.index(signal.Signals(number))]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(
            f"expected -9, or one of {', '.join(one.name for one in _ENDING)}, received {text!r}"
        ) from None
