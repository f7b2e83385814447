"""``diff``: which arrays of two checkpoints differ, and by how much."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_safe_ckpt.cli.screen import (
    add_common_options,
    console,
    new_command,
    print_json,
    print_table,
    printable,
    shown_metrics,
    shown_or_dash,
    shown_path,
)

if TYPE_CHECKING:
    from keras_safe_ckpt.storage.comparison import Difference
    from keras_safe_ckpt.storage.manifest import Manifest

_EPILOG = """\
Arrays are compared bit by bit. Ends with 0 if all are the same, with 1 if one differs, is missing
or has another shape or type. Step, epoch and metrics are shown, and do not count.

example:
  keras-safe-ckpt diff before/final.weights.h5 after/final.weights.h5
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "diff",
        help="which arrays of two checkpoints differ, and by how much",
        epilog=_EPILOG,
    )
    parser.add_argument("one", type=Path, metavar="A")
    parser.add_argument("other", type=Path, metavar="B")
    add_common_options(parser)
    parser.set_defaults(run=run_diff)


def run_diff(options: argparse.Namespace) -> int:
    """Return 0 if all arrays are the same, else 1."""
    from keras_safe_ckpt.datasets.progress import Progress
    from keras_safe_ckpt.storage.array_source import open_arrays
    from keras_safe_ckpt.storage.comparison import bytes_to_compare, compare
    from keras_safe_ckpt.storage.survey import checkpoint_at

    paths = checkpoint_at(options.one), checkpoint_at(options.other)
    with open_arrays(paths[0]) as one, open_arrays(paths[1]) as other:
        total = bytes_to_compare(one, other)
        with Progress("Comparing", total) as progress:
            differences = compare(one, other, progress.advance)
        same = len(one.arrays.keys() & other.arrays.keys()) - sum(
            difference.is_in_both for difference in differences
        )
        if options.json:
            print_json(
                {
                    "paths": [str(path) for path in paths],
                    "same": same,
                    "different": [vars(difference) for difference in differences],
                }
            )
        else:
            _print(paths, (one.manifest, other.manifest), differences, same)
    return 1 if differences else 0


def _print(
    paths: tuple[Path, Path],
    manifests: tuple[Manifest | None, Manifest | None],
    differences: list[Difference],
    same: int,
) -> None:
    print_table(
        ("", "file", "step>", "epoch>", "batch>", "metrics"),
        [(name, *_facts(p, m)) for name, p, m in zip("AB", paths, manifests, strict=True)],
    )
    if differences:
        print_table(
            ("array", "what", "largest |A-B|>", "mean |A-B|>", "elements>"),
            [_row(difference) for difference in differences],
        )
    verdict = f"{len(differences):,} different" if differences else "nothing differs"
    console().print(f"{same:,} arrays are the same bit by bit, {verdict}.")


def _facts(path: Path, manifest: Manifest | None) -> tuple[str, ...]:
    if manifest is None:
        return (shown_path(path), "-", "-", "-", "-")
    return (
        shown_path(path),
        str(manifest.step),
        shown_or_dash(manifest.epoch),
        shown_or_dash(manifest.batch),
        shown_or_dash(shown_metrics(manifest.metrics)),
    )


def _row(one: Difference) -> tuple[str, ...]:
    if one.largest is None or one.mean is None:
        return (printable(one.name), one.what, "", "", "")
    share = f"{one.elements_different:,} of {one.elements:,}"
    return (printable(one.name), one.what, f"{one.largest:.4g}", f"{one.mean:.4g}", share)
