"""Output that all commands share: tables of facts, errors, and the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_ssd.errors import OffloadError

__all__ = ["FAILED", "CommandError", "columns_table", "console", "facts_table", "reported_errors", "show_error"]

FAILED = 1
"""Exit code where what was asked for is impossible; a mistyped command line has 2."""


class CommandError(OffloadError):
    """A command cannot do what it was asked for."""

    def __init__(self, expected: str, got: str, advice: str) -> None:
        super().__init__(f"expected {expected}; got {got}; {advice}")


def console(*, errors: bool = False) -> Console:
    """For plain text. Made anew each time, because tests and notebooks exchange the standard streams."""
    return Console(stderr=errors, highlight=False, soft_wrap=False)


def facts_table(rows: Iterable[tuple[str, Sequence[str]]]) -> Table:
    """A label and its lines, which are folded where the terminal ends."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, lines in rows:
        table.add_row(Text(label, style="bold"), Text("\n".join(lines)))
    return table


def columns_table(columns: Mapping[str, Sequence[str]]) -> Table:
    """Names in the first column, by its head, and numbers in the others."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, header in enumerate(columns):
        table.add_column(header, justify="right" if number else "left", no_wrap=number > 0, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


def show_error(error: object) -> None:
    """Write to standard error, so that what a program reads from standard output stays clean."""
    console(errors=True).print(Text.assemble(("error: ", "bold red"), str(error)))


@contextmanager
def reported_errors() -> Iterator[None]:
    """Around a command: our own errors become text and an exit code, without a traceback."""
    try:
        yield
    except OffloadError as error:
        show_error(error)
        raise typer.Exit(FAILED) from None
