"""``show``: what a checkpoint says about itself, and its arrays."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_safe_ckpt.cli.screen import (
    add_common_options,
    console,
    new_command,
    print_json,
    print_table,
    shown_metrics,
    shown_or_dash,
    shown_path,
    shown_size,
)

if TYPE_CHECKING:
    from keras_safe_ckpt.storage.array_source import ArraySource
    from keras_safe_ckpt.storage.manifest import Manifest


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "show",
        help="show the manifest and the arrays of a checkpoint",
        description="Show what a checkpoint says about itself, and its arrays. The bytes of the "
        "arrays are not read: that is what `verify` does.",
    )
    parser.add_argument("path", type=Path, metavar="FILE", help="or the prefix of TensorFlow's")
    add_common_options(parser)
    parser.set_defaults(run=run_show)


def run_show(options: argparse.Namespace) -> int:
    """Return 0."""
    from keras_safe_ckpt.storage.array_source import open_arrays
    from keras_safe_ckpt.storage.survey import checkpoint_at

    path = checkpoint_at(options.path)
    with open_arrays(path) as source:
        if options.json:
            print_json(_document(path, source))
            return 0
        total = sum(facts.nbytes for facts in source.arrays.values())
        print_table(("", ""), [("file", shown_path(path)), *_lines(source.manifest)])
        print_table(
            ("array", "shape", "dtype", "size>", "digest"),
            [
                (name, list(facts.shape), facts.dtype, shown_size(facts.nbytes), facts.digest)
                for name, facts in source.arrays.items()
            ],
        )
        console().print(f"{len(source.arrays):,} arrays, {shown_size(total)}.")
    return 0


def _lines(manifest: Manifest | None) -> list[tuple[str, str]]:
    if manifest is None:
        return [("kind", "a checkpoint of TensorFlow, which has no manifest")]
    written = datetime.datetime.fromtimestamp(manifest.wall_time).astimezone()
    lines = [
        ("step", str(manifest.step)),
        ("epoch", f"{shown_or_dash(manifest.epoch)} finished"),
        ("batch", f"{shown_or_dash(manifest.batch)} finished of the next epoch"),
        ("metrics", shown_or_dash(shown_metrics(manifest.metrics))),
        ("judged by", f"{manifest.monitor} ({manifest.mode})" if manifest.monitor else "-"),
        ("written", written.isoformat(sep=" ", timespec="seconds")),
        ("by", f"pid {manifest.pid} on {manifest.host}"),
        ("worker", shown_or_dash(manifest.worker)),
        ("optimizer", shown_or_dash(manifest.optimizer)),
        ("series", manifest.series),
        ("versions", ", ".join(f"{name} {v}" for name, v in manifest.versions.items())),
    ]
    if manifest.extra:
        lines.append(("more", ", ".join(sorted(manifest.extra))))
    return lines


def _document(path: Path, source: ArraySource) -> dict[str, Any]:
    manifest = source.manifest
    facts: dict[str, Any] = {}
    if manifest is not None:
        names = (
            "step", "epoch", "batch", "metrics", "monitor", "mode", "sequence", "series", "name",
            "optimizer", "host", "pid", "worker", "wall_time", "versions", "extra",
            "format_version",
        )  # fmt: skip
        facts = {name: getattr(manifest, name) for name in names}
    return {
        "path": str(path),
        "kind": source.kind,
        "manifest": facts or None,
        "arrays": {
            name: {
                "shape": list(one.shape),
                "dtype": one.dtype,
                "bytes": one.nbytes,
                "digest": one.digest,
            }
            for name, one in source.arrays.items()
        },
    }
