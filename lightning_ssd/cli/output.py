"""Output that all commands share: tables of facts, problems in three clauses, and the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_ssd.errors import OffloadError

__all__ = ["CommandError", "Problem", "console", "facts_table", "reported_errors", "show_problems"]

FAILED = 1
"""Exit code where what was asked for is impossible; a mistyped command line has 2."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something that was asked for is impossible."""

    expected: str
    got: str
    advice: str
    """The line to write, or the thing to do."""


class CommandError(Exception):
    """A command cannot do what it was asked for."""

    def __init__(self, expected: str, got: str, advice: str) -> None:
        super().__init__(f"expected {expected}; got {got}; {advice}")
        self.problem = Problem(expected, got, advice)


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


def show_problems(problems: Iterable[Problem]) -> None:
    """To standard error, so that what a program reads from standard output stays clean."""
    out = console(errors=True)
    for problem in problems:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row(Text("expected", style="bold red"), Text(problem.expected))
        table.add_row(Text("got", style="bold red"), Text(problem.got))
        table.add_row(Text("what to do", style="bold red"), Text(problem.advice))
        out.print()
        out.print(table)


@contextmanager
def reported_errors() -> Iterator[None]:
    """Around a command: our own errors become text and an exit code, without a traceback.

    Raises:
        typer.Exit: in the place of the error.
    """
    try:
        yield
    except CommandError as error:
        show_problems([error.problem])
        raise typer.Exit(FAILED) from None
    except OffloadError as error:
        console(errors=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        raise typer.Exit(FAILED) from None
