"""The command ``lightning-ssd``: one file of this package per subcommand."""

from __future__ import annotations

import typer

from lightning_ssd.cli.bench import bench
from lightning_ssd.cli.dashboard import dashboard
from lightning_ssd.cli.doctor import doctor
from lightning_ssd.cli.plan import plan
from lightning_ssd.cli.report import report
from lightning_ssd.cli.sweep_table import sweep_table

__all__ = ["app"]

app = typer.Typer(
    name="lightning-ssd",
    help="Tools around training with tensors on SSDs: what this machine can do, and what it would cost.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # reflows the docstrings
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _several_commands() -> None:
    """Without this, typer makes an application of a single command that command itself."""


app.command(epilog="Example: lightning-ssd doctor /mnt/nvme0 /mnt/nvme1 --json")(doctor)
app.command(epilog="Example: lightning-ssd bench /mnt/nvme0 /mnt/nvme1 --size 8GiB --write conf/hardware/mine.yaml")(
    bench
)
app.command(
    epilog="Example: lightning-ssd plan --model llama_8b --batch 1 --sequence 8192 --hardware dgx_h100 --budget 40%"
)(plan)
app.command(epilog="Example: lightning-ssd report outputs/report --out /tmp/page")(report)
app.command(epilog="Example: lightning-ssd dashboard --project gpt --json dashboard.json")(dashboard)
app.command(epilog="Example: lightning-ssd sweep-table outputs/sweep/2026-01-01_12-00-00")(sweep_table)
