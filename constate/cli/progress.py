"""A progress bar with the time left, on standard error; none where that is no terminal. Measures nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: float) -> Iterator[Callable[[float, str], None]]:
    """A bar of `total` units, whatever they are; it gives `advance(units, label)`, to be called as each part
    is done with what comes next as its label."""
    if not sys.stderr.isatty():
        yield lambda units, label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda units, label: bar.update(task, advance=units, description=f"{what} {label}".strip())
