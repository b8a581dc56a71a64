"""The command ``lightning-ssd``: one file of this package per subcommand, imported when it is called."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

__all__ = ["COMMANDS", "app"]

COMMANDS = {
    "doctor": ("Show what this machine has, what training would use of it, and why.", "/mnt/nvme0 /mnt/nvme1 --json"),
    "bench": (
        "Measure how fast directories are written and read, each alone and all together.",
        "/mnt/nvme0 /mnt/nvme1 --size 8GiB",
    ),
    "plan": (
        "Predict memory, step time and drive life of a model before it is trained.",
        "--model llama_8b --batch 1 --sequence 8192 --hardware dgx_h100 --budget 40%",
    ),
    "report": (
        "Write the page and the pictures of a run, and say what to change.",
        "outputs/report --out /tmp/page",
    ),
    "dashboard": (
        "Write the dashboard for runs with OffloadMonitor, and save it to W&B where a key is found.",
        "--project gpt --json dashboard.json",
    ),
    "sweep-table": ("Compare the jobs of a sweep: memory, time, bytes.", "outputs/sweep/2026-01-01_12-00-00"),
}
"""Subcommand -> its line in the list, and the arguments of an example."""
_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": "markdown",  # reflows the docstrings
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(
    name="lightning-ssd",
    help="Tools around training with tensors on SSDs: what this machine can do, and what it would cost.",
    no_args_is_help=True,
    **_SETTINGS,
)


def _add(name: str, help_line: str, example: str) -> None:
    """Register a command that loads its libraries when it is called, so that help and typos answer at once."""
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=help_line, context_settings=anything, add_help_option=False)
    def call(context: typer.Context) -> None:
        module = name.replace("-", "_")
        single = typer.Typer(**_SETTINGS)
        single.command(epilog=f"Example: lightning-ssd {name} {example}")(
            getattr(import_module(f"lightning_ssd.cli.{module}"), module)
        )
        single(context.args, prog_name=f"lightning-ssd {name}")


for _name, _texts in COMMANDS.items():
    _add(_name, *_texts)
