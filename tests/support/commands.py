"""Commands of ``lightning-ssd``, run in the process of the test, and what they say."""

from typer.testing import CliRunner

from lightning_ssd.cli.main import app

__all__ = ["command", "on_one_line", "said"]


def command(*arguments, columns=300):
    """Run a command: wide, so that no name is folded."""
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": str(columns)})


def on_one_line(text):
    return " ".join(text.split())


def said(done):
    """What it wrote to standard error, on one line."""
    return on_one_line(done.stderr)
