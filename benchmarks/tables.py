"""How the benchmarks show durations and tables."""

from __future__ import annotations

from collections.abc import Sequence


def shown(seconds: float) -> str:
    """A duration with its unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> list[str]:
    """The lines of a table: of Markdown, or with columns that stand below each other."""
    if markdown:
        lines = [head, ["---"] * len(head), *rows]
        return ["| " + " | ".join(line) + " |" for line in lines]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *rows]
    ]
