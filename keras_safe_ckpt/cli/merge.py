"""``merge``: one HDF5 file from those of all workers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from keras_safe_ckpt.cli.screen import (
    add_common_options,
    console,
    new_command,
    print_json,
    shown_path,
    shown_size,
)
from keras_safe_ckpt.errors import CheckpointNotFoundError

_EPILOG = """\
example:
  keras-safe-ckpt merge predictions -o predictions.h5 --sort-key id
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "merge",
        help="make one HDF5 file from those of all workers",
        description="Make one HDF5 file from those of all workers (merge_worker_files): all of "
        "it, or nothing is written.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "sources", nargs="+", type=Path, metavar="DIR|FILE", help="a directory, or the files"
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--workers", type=int, metavar="N", help="how many there must be")
    parser.add_argument(
        "--how",
        choices=("concat", "virtual"),
        default="concat",
        help="copy the rows, or show them where they are (default: %(default)s)",
    )
    parser.add_argument(
        "--axis", type=int, default=0, help="along which arrays are put together (default: 0)"
    )
    parser.add_argument("--sort-key", metavar="DATASET", help="sort the rows by its values")
    add_common_options(parser)
    parser.set_defaults(run=run_merge)


def run_merge(options: argparse.Namespace) -> int:
    """Return 0; what does not fit together is an error."""
    # Needs h5py.
    from keras_safe_ckpt.datasets.merge import merge_worker_files

    for source in options.sources:
        if not source.exists():
            raise CheckpointNotFoundError(source, "there is no such file or directory", what="data")
    alone = len(options.sources) == 1 and not options.sources[0].is_file()
    out = merge_worker_files(
        options.sources[0] if alone else options.sources,
        options.out,
        workers=options.workers,
        how=options.how,
        axis=options.axis,
        sort_key=options.sort_key,
    )
    size = out.stat().st_size
    if options.json:
        print_json({"path": str(out), "bytes": size})
    else:
        console().print(f"Wrote {shown_path(out)} ({shown_size(size)}).")
    return 0
