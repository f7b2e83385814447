"""``recover``: what interrupted writers of HDF5 files have left."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_safe_ckpt.cli.screen import add_common_options, new_command, print_json
from keras_safe_ckpt.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from keras_safe_ckpt.datasets.unfinished import Unfinished

_EPILOG = """\
A WorkerH5Writer or CentralH5Writer that was killed leaves its rows up to the last flush. Without
--out this only tells what there is. To go on with it in Python:

  WorkerH5Writer(directory, worker=3, resume=True)
  CentralH5Writer(path)

example:
  keras-safe-ckpt recover predictions
  keras-safe-ckpt recover predictions/.worker-00003.h5.unfinished --out rescued.h5
"""

_TAKEN = "from keras_safe_ckpt import CentralH5Writer; CentralH5Writer({!r}).close()"


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "recover",
        help="show and rescue what interrupted writers of HDF5 files have left",
        epilog=_EPILOG,
    )
    parser.add_argument("path", type=Path, help="a directory, or an unfinished file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="copy the unfinished file to here")
    add_common_options(parser)
    parser.set_defaults(run=run_recover)


def run_recover(options: argparse.Namespace) -> int:
    """Return 0, also if there is nothing to rescue."""
    # Needs h5py, which the other commands do not.
    from keras_safe_ckpt.datasets.unfinished import find_unfinished, rescue

    path: Path = options.path
    if options.out is not None:
        rescued = rescue(path.absolute(), options.out)
        if options.json:
            print_json({"path": str(path), "rescued": str(rescued)})
        else:
            print(f"Rescued {path} as {rescued}")
            print("The unfinished file stays; delete it when nobody is to go on with it.")
        return 0
    if not path.exists():
        raise CheckpointNotFoundError(path, "there is no such file or directory", what="data")
    is_folder = path.is_dir()
    found = find_unfinished(path if is_folder else path.absolute().parent)
    chosen = found if is_folder else [one for one in found if one.path.name == path.name]
    if options.json:
        print_json({"unfinished": [vars(one) for one in chosen]})
        return 0
    if not chosen:
        print(f"Nothing unfinished in {path}.")
    for one in chosen:
        print(_described(one))
    return 0


def _described(one: Unfinished) -> str:
    if one.holder:
        return f"{one.path}\n  is being written by {one.holder}"
    if one.damage:
        return f"{one.path}\n  cannot be read: {one.damage}"
    if one.has_waiting_rows:
        return (
            f"{one.path}\n  rows that were appended wait beside it: a CentralH5Writer of this path "
            f"takes them\n  python -c {shlex.quote(_TAKEN.format(str(one.target)))}"
        )
    if not one.rows:
        return f"{one.path}\n  nothing: its writer was interrupted before its first flush"
    rows = ", ".join(f"{name}: {count:,} rows" for name, count in one.rows.items())
    return (
        f"{one.path}\n  {rows} up to the last flush\n"
        f"  keras-safe-ckpt recover {shlex.quote(str(one.path))} --out FILE"
    )
