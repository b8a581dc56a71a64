"""An offline run of W&B, read back."""

import json
import sys

from tests.support.processes import run

__all__ = ["inspected"]


def inspected(directory):
    """All records that the only offline run in a directory holds, as W&B's own reader gives them."""
    (found,) = (directory / "wandb").glob("offline-run-*")
    told = run(sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(found)).stdout
    return [json.loads(line) for line in told.splitlines()]
