"""``ls``: the checkpoints of a directory."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_safe_ckpt.cli.screen import (
    add_common_options,
    coloured,
    console,
    new_command,
    print_json,
    print_table,
    printable,
    shown_age,
    shown_metrics,
    shown_or_dash,
    shown_path,
    shown_size,
)

if TYPE_CHECKING:
    from keras_safe_ckpt.storage.survey import Surveyed

#: So many folders with checkpoints below a directory are named.
_MOST_HINTS = 3

_EPILOG = """\
"valid" is by what each file says of itself and by its size; with --verify every byte is compared.

example:
  keras-safe-ckpt ls run
  keras-safe-ckpt ls run --recursive --verify --json
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "ls",
        help="list the checkpoints of a directory",
        description="List the checkpoints of a directory, oldest first. Nothing is changed.",
        epilog=_EPILOG,
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("-r", "--recursive", action="store_true", help="and of those below it")
    parser.add_argument("--verify", action="store_true", help="compare every byte")
    parser.add_argument(
        "-n", "--newest", type=int, metavar="N", help="only the newest N of each directory"
    )
    add_common_options(parser)
    parser.set_defaults(run=run_ls)


def run_ls(options: argparse.Namespace) -> int:
    """Return 1 if one is damaged."""
    # Needs NumPy, which takes longer to import than all of the rest.
    from keras_safe_ckpt.cli.directories import checkpoints_below, existing_directory
    from keras_safe_ckpt.cli.looking import look_at_all
    from keras_safe_ckpt.storage.events import saves_in
    from keras_safe_ckpt.storage.survey import Condition, find_checkpoints, oldest_first

    if options.newest is not None and options.newest < 1:
        raise ValueError(f"--newest: expected a number of at least 1, received {options.newest}")
    top = existing_directory(options.directory)
    closed: list[str] = []
    below = (
        (directory, paths)
        for directory, paths in checkpoints_below(top, lambda path, _: closed.append(str(path)))
        if paths
    )
    places = [(top, find_checkpoints(top))]
    hints: list[str] = []
    if options.recursive:
        places += below
    else:
        hints = [shown_path(directory) for directory, _ in itertools.islice(below, _MOST_HINTS)]
    rows: list[tuple[Surveyed, Mapping[str, Any]]] = []
    for directory, paths in places:
        listed = oldest_first(look_at_all(paths, verify=options.verify))
        writers = saves_in(directory)
        chosen = listed[-options.newest :] if options.newest else listed
        rows += [(one, writers.get(one.path.name, {})) for one in chosen]
    if options.json:
        facts = [_facts(one, event) for one, event in rows]
        print_json({"checkpoints": facts, "not_looked_into": closed if options.recursive else []})
    else:
        _print(options, rows, hints)
        if closed and options.recursive:
            console().print(f"Not looked into: {', '.join(map(printable, closed))}.")
    return 1 if any(one.condition is Condition.DAMAGED for one, _ in rows) else 0


def _print(
    options: argparse.Namespace,
    rows: Sequence[tuple[Surveyed, Mapping[str, Any]]],
    below: Sequence[str],
) -> None:
    if rows:
        print_table(
            (
                "file",
                "step>",
                "epoch>",
                "batch>",
                "metrics",
                "size>",
                "age>",
                "valid",
                "written by",
            ),
            [_row(options, one, event) for one, event in rows],
        )
    else:
        console().print(f"No checkpoints in {shown_path(options.directory)}.")
    if below:
        shown = ", ".join(below) + (", ..." if len(below) == _MOST_HINTS else "")
        console().print(f"There are more below it, in {shown}: --recursive lists them.")
    if rows and not options.verify:
        console().print("valid: by manifest and size; --verify compares every byte.", style="dim")


def _row(
    options: argparse.Namespace, one: Surveyed, event: Mapping[str, Any]
) -> tuple[object, ...]:
    name = one.path.name
    if options.recursive:
        name = str(one.path.relative_to(options.directory))
    facts = _facts(one, event)
    return (
        name,
        shown_or_dash(facts["step"]),
        shown_or_dash(facts["epoch"]),
        shown_or_dash(facts["batch"]),
        shown_or_dash(shown_metrics(facts["metrics"])),
        shown_size(one.size),
        shown_age(facts["time"]),
        _shown_condition(one),
        _shown_writer(facts),
    )


def _facts(one: Surveyed, event: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of itself; of one of TensorFlow, what the log says."""
    manifest = one.manifest
    return {
        "path": str(one.path),
        "kind": one.kind,
        "step": _number_of(one) if manifest is None else manifest.step,
        "epoch": manifest and manifest.epoch,
        "batch": manifest and manifest.batch,
        "metrics": dict(manifest.metrics) if manifest else {},
        "monitor": manifest and manifest.monitor,
        "bytes": one.size,
        "time": manifest.wall_time if manifest else one.modified,
        "valid": {"whole": True, "damaged": False}.get(one.condition.value),
        "verified": one.verified,
        "reason": one.reason or None,
        "host": manifest.host if manifest else event.get("host"),
        "pid": manifest.pid if manifest else event.get("pid"),
        "worker": manifest and manifest.worker,
    }


def _number_of(one: Surveyed) -> int | None:
    """TensorFlow's ``ckpt-7`` is number 7."""
    number = one.path.name.rpartition("-")[2]
    return int(number) if one.kind == "tf_checkpoint" and number.isdecimal() else None


def _shown_writer(facts: Mapping[str, Any]) -> str:
    if not facts["host"]:
        return "-"
    who = f"{facts['worker']} " if facts["worker"] else ""
    return f"{who}pid {facts['pid']} on {facts['host']}"


def _shown_condition(one: Surveyed) -> Any:
    if one.condition.value == "whole":
        return coloured("yes", "green")
    word, style = ("NO", "bold red") if one.condition.value == "damaged" else ("?", "yellow")
    return coloured(f"{word}: {one.reason}", style)
