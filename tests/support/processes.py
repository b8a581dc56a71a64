"""Starting a script that trains in several processes, as a user's script is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
# A program that needs a few modules begins with this: what the package's own __init__ imports takes seconds.
BARE_PACKAGE = f"""
import sys, types
sys.modules["lightning_ssd"] = types.ModuleType("lightning_ssd")
sys.modules["lightning_ssd"].__path__ = [{str(ROOT / "lightning_ssd")!r}]
"""
# What a cluster, Lightning or Fabric around the tests would tell the script.
_OUTSIDE = ("MASTER_", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "PL_", "LT_")


def run_script(
    module: str, *arguments: str, begin: Sequence[str] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    """Run a module that has to succeed; a process that waits for another for ever fails the test."""
    done = subprocess.run(
        [*begin, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(_OUTSIDE)}
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done
