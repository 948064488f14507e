"""The output of commands: results on stdout, all other lines on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import durationpy
import typer
from pydantic import ByteSize
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 300
"""Width in columns of a table in a file or a pipe, where no cell may be cut off."""


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def make_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table. A column whose name ends in a bar, ``|``, is aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column.rstrip("|"), justify="right" if column.endswith("|") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print the table of :func:`make_table` on stdout."""
    table = make_table(columns, rows)
    if sys.stdout.isatty():
        Console().print(table)
        return
    console = Console(width=_PIPE_WIDTH)
    with console.capture() as printed:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def note(message: str) -> None:
    """Print a line on stderr."""
    typer.echo(message, err=True)


def progress(*, quiet: bool) -> Progress:
    """Return a progress bar on stderr. It is invisible if ``quiet`` is set or stderr is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=quiet or not sys.stderr.isatty(),
        transient=True,
    )


def human_bytes(nbytes: float) -> str:
    """Return ``nbytes`` in the largest suitable binary unit, for example ``2.0 MiB``."""
    return ByteSize(nbytes).human_readable(separator=" ")


def human_age(seconds: float) -> str:
    """Return a duration in whole seconds, in the form that ``--older-than`` accepts."""
    days, rest = divmod(max(0, round(seconds)), 24 * 3600)
    text = durationpy.to_str(timedelta(seconds=rest)) if rest else ""
    return f"{days}d{text}" if days else text or "0s"


def human_milliseconds(seconds: float | None) -> str:
    """Return a latency in milliseconds, or a dash for ``None``."""
    return "-" if seconds is None else f"{seconds * 1000:.2f}"
