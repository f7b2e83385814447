"""``locks``: who holds the locks of a directory."""

from __future__ import annotations

import argparse
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
    from keras_safe_ckpt.storage.lock_survey import SurveyedLock

_EPILOG = """\
Lock files stay when a lock is free; they need not be deleted, and must not be while somebody
trains. A process that was killed has freed its locks at once. Locks of RedisLocks are in Redis, not
here.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "locks",
        help="who holds the locks of a directory, since when, and is it alive",
        epilog=_EPILOG,
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    add_common_options(parser)
    parser.set_defaults(run=run_locks)


def run_locks(options: argparse.Namespace) -> int:
    """Return 0."""
    from keras_safe_ckpt.cli.directories import existing_directory
    from keras_safe_ckpt.storage.lock_survey import survey_locks

    found = survey_locks(existing_directory(options.directory))
    if options.json:
        print_json({"locks": [_facts(one) for one in found]})
    elif found:
        print_table(("lock of", "state", "holder", "since", "alive"), [_row(one) for one in found])
    else:
        console().print(f"No lock files in {shown_path(options.directory)}.")
    return 0


def _facts(one: SurveyedLock) -> dict[str, Any]:
    return {
        "target": one.target,
        "path": str(one.path),
        "held": one.held,
        "owner": one.owner and one.owner._asdict(),
        "alive": one.alive,
        "pids": list(one.pids),
    }


def _row(one: SurveyedLock) -> tuple[object, ...]:
    state = {
        True: coloured("HELD", "bold yellow"),
        False: coloured("free", "green"),
        None: coloured("?", "yellow"),
    }[one.held]
    owner = one.owner
    if owner is None:
        pids = ", ".join(f"pid {pid}" for pid in one.pids)
        return one.target, state, pids or "-", "-", "-"
    worker = "" if owner.worker is None else f"worker {owner.worker}, "
    who = f"{worker}pid {owner.pid} on {owner.host} ({owner.mode})"
    if one.pids and owner.pid not in one.pids:
        who = ", ".join(f"pid {pid}" for pid in one.pids) + " (several readers)"
    alive = {True: "yes", False: "no", None: "on another host"}[one.alive]
    return one.target, state, who if one.held else f"last: {who}", owner.since, alive
