"""``tfrecord verify|split|repair``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from keras_safe_ckpt.cli.screen import (
    add_common_options,
    coloured,
    console,
    print_json,
    print_table,
    shown_path,
    shown_size,
)
from keras_safe_ckpt.errors import CorruptCheckpointError

#: Ranges that were left out; of a file that was made so there may be a million.
_MOST_SHOWN = 20


def add_parser(commands: Any) -> None:
    """Add the commands to the parser of the program."""
    parser = commands.add_parser(
        "tfrecord",
        help="verify, split or repair TFRecord files",
        description="Verify, split or repair TFRecord files, compressed or not, without "
        "TensorFlow.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser(
        "verify",
        help="every checksum, and how many records there are",
        description="Check every checksum, and the count that is kept beside a file. Ends with 1 "
        "if a file is damaged.",
    )
    verify.add_argument("paths", nargs="+", type=Path, metavar="FILE")
    verify.set_defaults(run=_verify)
    split = actions.add_parser(
        "split",
        help="cut a file into shards",
        description="Cut a file into shards: record i goes to shard i %% N. Nothing is published "
        "unless all of the file is sound.",
    )
    split.add_argument("path", type=Path, metavar="FILE")
    split.add_argument("prefix", help="of the shards: PREFIX-00000-of-00004.tfrecord")
    split.add_argument("--shards", type=int, required=True, metavar="N")
    split.set_defaults(run=_split)
    repair = actions.add_parser(
        "repair",
        help="write the good records of a damaged file to a new one",
        description="Write the good records of a damaged file to a new one; the old one stays. "
        "Ends with 1 if something had to be left out.",
    )
    repair.add_argument("path", type=Path, metavar="FILE")
    repair.add_argument("-o", "--out", type=Path, required=True, metavar="FILE")
    repair.set_defaults(run=_repair)
    for action in (verify, split, repair):
        add_common_options(action)


def _verify(options: argparse.Namespace) -> int:
    from keras_safe_ckpt.datasets.verification import verify_tfrecord

    found: list[dict[str, Any]] = []
    for path in options.paths:
        facts: dict[str, Any] = {"path": str(path), "damage": None}
        try:
            report = verify_tfrecord(path)
        except CorruptCheckpointError as error:
            facts.update(damage=error.reason, **_place_of(error))
        else:
            facts.update(
                records=report.records,
                bytes=report.size,
                compression_type=report.compression_type,
                counted=report.is_counted,
            )
        found.append(facts)
    damaged = sum(facts["damage"] is not None for facts in found)
    if options.json:
        print_json({"files": found, "damaged": damaged})
    else:
        print_table(("file", "records>", "size>", "compression", "", "count"), map(_row, found))
    return 1 if damaged else 0


def _place_of(error: CorruptCheckpointError) -> dict[str, Any]:
    return {name: error.facts[name] for name in ("record", "offset") if name in error.facts}


def _row(facts: dict[str, Any]) -> tuple[object, ...]:
    path = shown_path(Path(facts["path"]))
    if facts["damage"] is not None:
        where = f"record {facts['record']:,} at byte {facts['offset']:,}: " * ("record" in facts)
        return path, "", "", "", coloured(f"DAMAGED, {where}{facts['damage']}", "bold red"), ""
    counted = "as it was written" if facts["counted"] else "unknown: none is kept beside it"
    return (
        path,
        f"{facts['records']:,}",
        shown_size(facts["bytes"]),
        facts["compression_type"] or "none",
        coloured("whole", "green"),
        counted,
    )


def _split(options: argparse.Namespace) -> int:
    from keras_safe_ckpt.datasets.verification import split_tfrecord

    shards = split_tfrecord(options.path, options.prefix, options.shards)
    if options.json:
        print_json({"shards": [str(shard) for shard in shards]})
    else:
        for shard in shards:
            console().print(shown_path(shard))
    return 0


def _repair(options: argparse.Namespace) -> int:
    from keras_safe_ckpt.datasets.verification import repair_tfrecord

    report = repair_tfrecord(options.path, options.out)
    if options.json:
        print_json(
            {"path": str(report.path), "records": report.records, "left_out": report.left_out}
        )
    else:
        console().print(f"Wrote {report.records:,} records to {shown_path(report.path)}.")
        for begin, end in report.left_out[:_MOST_SHOWN]:
            until = "the end" if end < 0 else f"{end:,}"
            console().print(f"Left out: bytes {begin:,} to {until}.")
        if len(report.left_out) > _MOST_SHOWN:
            console().print(
                f"Left out: {len(report.left_out) - _MOST_SHOWN:,} more ranges (--json has all)."
            )
    return 1 if report.left_out else 0
