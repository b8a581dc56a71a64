"""Write the pages of `docs` that follow from the code: settings with their defaults, and metrics.

python -m recipes.reference           # writes docs/configuration.md and docs/metrics.md
python -m recipes.reference --check   # exit code 1 if they are not what the code says
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ssd import config
from lightning_ssd.telemetry.metrics import METRICS

__all__ = ["main", "pages"]

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_GENERATED = "<!-- Written by `python -m recipes.reference` from the docstrings. -->"
_CLASSES = {
    config.OffloadPolicy: "What moves, and how far.",
    config.HardwareProfile: "Where bytes go, and with what.",
}
_MERGE = {
    "mean": "mean per step",
    "max": "largest",
    "last": "latest",
    "bytes_weighted": "mean, weighted with the bytes moved",
    "rate": "all bytes over all busy time",
}
_RANKS = {"max": "largest", "min": "smallest", "mean": "mean", "sum": "sum"}
_CONFIGURATION = """\
Sizes are bytes as an integer, or text such as `"512KiB"`, `"1.5GiB"`, `"20GB"`. Every setting has a default that works;
a mistyped name or value is refused with what was meant. In Hydra the same settings are keys of `conf/offload/*.yaml`
and `conf/hardware/*.yaml`: `python -m recipes.train offload=ssd offload.verify=full`. What the latter say under
`machine:` is for `lightning-ssd plan`; training needs no guess of it. Plans begin with the rates of drives that you
give (`hardware.write_rate`), and without them with those of a short trial.
"""
_METRICS = """\
`OffloadMonitor` logs these to the Trainer's loggers; `offloader.drain_metrics()` gives them to loops of your own. A row
over several steps, or of several processes, is merged as the last columns say. A key without a value is absent.

`plan/overhead_ratio` is what moving took from a pass, relative to the pass without it: `io/stall_s`, `io/hook_s` and
`io/cpu_s`. Contention for memory bandwidth is not in it. `plan/num_plans` counts the plans that were put in force.

Keys with `drive0` are of the first of several directories; `drive1` to `drive7` are alike, and have no rows here.
"""
_OTHER_DRIVE = re.compile(r"/drive[1-9]")


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    settings = "\n\n".join(f"## `{cls.__name__}`\n\n{about}\n\n{_settings(cls)}" for cls, about in _CLASSES.items())
    rows = "\n".join(
        f"| `{metric.key}` | {_cell(metric.meaning)} | {_MERGE[metric.merge]} | {_RANKS[metric.ranks]} |"
        for metric in METRICS
        if not _OTHER_DRIVE.search(metric.key)
    )
    metrics = f"| key | meaning | over several steps | over several processes |\n|---|---|---|---|\n{rows}"
    return {
        "configuration.md": f"# Configuration\n\n{_GENERATED}\n\n{_CONFIGURATION}\n{settings}\n",
        "metrics.md": f"# Metrics\n\n{_GENERATED}\n\n{_METRICS}\n{metrics}\n",
    }


def _settings(cls: type) -> str:
    """Return a table of the fields of a dataclass, each with the docstring that follows it in the source."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert field.value is not None
            name, default = ast.unparse(field.target), ast.unparse(field.value)
            rows.append(f"| `{name}` | `{default}` | {_cell(str(text.value.value))} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: command line; default: that of ``sys.argv``.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is not what the code says")
    check = parser.parse_args(arguments).check
    stale = {name: text for name, text in pages().items() if not _is_same(_DOCS / name, text)}
    if check:
        for name in stale:
            print(f"docs/{name} is not what the code says; run python -m recipes.reference", file=sys.stderr)
        return 1 if stale else 0
    for name, text in stale.items():
        (_DOCS / name).write_text(text, encoding="utf-8")
    return 0


def _is_same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
