"""What all commands print with: tables for people, JSON for programs, and plain words."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_safe_ckpt.storage.plain_values import plain_values

if TYPE_CHECKING:
    from rich.console import Console

#: Where nobody looks at a screen no line is folded: `grep` and `awk` want whole ones.
_PIPE_WIDTH = 10_000


def new_command(
    commands: Any, name: str, *, help: str, description: str | None = None, epilog: str = ""
) -> argparse.ArgumentParser:
    """A command of the program; without a ``description`` it is its line in the list."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        # Examples keep their lines; the rest is folded as argparse would do it.
        description=textwrap.fill(description or f"{help[0].upper()}{help[1:]}.", 78),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_common_options(
    parser: argparse.ArgumentParser, *, json_help: str = "print JSON instead of tables"
) -> None:
    """What each command has."""
    parser.add_argument("--json", action="store_true", help=json_help)
    # After the command as well as before it; not to be set back by this one.
    parser.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show the traceback of an error",
    )


def print_json(document: Any) -> None:
    """One document; what JSON has no word for (NaN, an infinite number, a path) becomes text."""
    print(json.dumps(plain_values(document), indent=2, ensure_ascii=False))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """Columns whose name ends in ``>`` are aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    look = {"box": box.SIMPLE_HEAD} if sys.stdout.isatty() else {"box": None, "padding": (0, 1)}
    has_names = any(columns)
    table = Table(title=title, title_justify="left", pad_edge=False, show_header=has_names, **look)
    for column in columns:
        name, right = column.removesuffix(">"), column.endswith(">")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(
            *(cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in row)
        )
    console().print(table)


def coloured(text: str, style: str) -> Any:
    """A cell of a table with a colour, where there are colours."""
    from rich.text import Text

    return Text(printable(text), style=style)


def console() -> Console:
    """Markup is off: a file may be called ``[red]``."""
    from rich.console import Console

    class ErrorsRaised(Console):
        """Rich would end the program by itself, with a code of its own."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return ErrorsRaised(markup=False, highlight=False, emoji=False, width=width)


def printable(text: str) -> str:
    """Without what would move the cursor: names of files and hosts may come from anybody."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown_path(path: Path) -> str:
    """As short as it can be from here."""
    try:
        return printable(str(path.relative_to(Path.cwd())))
    except (ValueError, OSError):
        return printable(str(path))


def shown_size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def shown_age(since: float) -> str:
    """How long ago; a clock of another machine may be ahead of ours."""
    seconds = max(0.0, time.time() - since)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def shown_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def shown_metrics(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in metrics.items())


def shown_or_dash(value: object) -> str:
    return "-" if value is None or value == "" else str(value)
