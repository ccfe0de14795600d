"""How results are printed: JSON lines for programs, tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..bench.results import plain
from ..bench.units import seconds, size

WIDEST = 2000  # columns of a table that nobody watches


def say(text: str) -> None:
    """A remark beside the results, on standard error."""
    print(text, file=sys.stderr, flush=True)


def emit(row: Mapping[str, Any]) -> None:
    """One JSON object on a line of its own, at once. In ASCII: a terminal of any encoding can print it, and
    no reader takes a character such as U+2028 for the end of the line; NaN, which JSON lacks, is null."""
    print(json.dumps(plain(row)), flush=True)


def show(rows: Iterable[Mapping[str, Any]], as_json: bool, columns: Sequence[str], title: str = "") -> list:
    """Print rows as they come (JSON) or as one table of these columns; returns them."""
    shown = []
    for row in rows:
        shown.append(row)
        if as_json:
            emit(row)
    if not as_json and shown:
        table(shown, columns, title)
    return shown


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], title: str = "") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        numeric = all(isinstance(row.get(column), (int, float, type(None))) for row in rows)
        label = column.removesuffix("_bytes").removesuffix("_s").replace("_", " ")
        shown.add_column(label, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(cell(column, row.get(column)) for column in columns))
    console = Console()
    if not console.is_terminal:  # a file or a pipe is as wide as it needs to be, and a number on one line
        console.width = max(200, console.measure(shown, options=console.options.update(width=WIDEST)).maximum)
    console.print(shown)


def cell(column: str, value: Any) -> str:
    """A value in the unit that its key's ending names, as a person reads it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, str):
        return value
    if column.endswith("_bytes") or column == "bytes_per_token":
        return size(value)
    if column.endswith("tokens_per_s"):
        return f"{value:,.0f}"
    if column.endswith("_s"):
        return seconds(value)
    if column.endswith("_fraction"):
        return f"{value:.0%}"
    if column.endswith("_ratio"):
        return f"{value:.2f}x"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
