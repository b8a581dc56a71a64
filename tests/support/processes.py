"""Starting a script that trains in several processes, as a user's script is started."""

import os
import subprocess
import sys
import textwrap
import warnings
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


def run(*command, **options):
    """Run a command that has to succeed, and give what it says; one that waits for ever fails the test."""
    done = subprocess.run([*command], capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done


def run_python(code, *arguments, begin=(sys.executable, "-W", "ignore"), **options):
    """Run code in an interpreter of its own, as it is written in a test; give its output."""
    return run(*begin, "-c", textwrap.dedent(code), *arguments, **options).stdout


def run_script(module, *arguments, begin=(sys.executable,)):
    """Run a module of several processes, which may wait for each other."""
    inside = {name: value for name, value in os.environ.items() if not name.startswith(_OUTSIDE)}
    env = inside | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return run(*begin, "-m", module, *arguments, cwd=ROOT, env=env)


def assert_scenarios(directory, begin, script, *names, num=2):
    """Run scenarios of a script, all in the same processes: starting these takes longer than all the training."""
    done = run_script(*(f"tests.support.{word}" for word in script.split()), str(directory), *names, begin=begin)
    wanted = [f"rank {rank}: {name} ok" for name in names for rank in range(num)]
    assert [line for line in wanted if line not in done.stdout] == []


def run_scenarios(scenarios, arguments):
    """Run scenarios in order, as the script of one process: the arguments are a directory and their names."""
    import pytest
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # States of such small models are in many subgroups then, and have to leave memory.
        patch.setattr("lightning_ssd.planning.update_memory._MIN_SUBGROUP_BYTES", 64 << 10)
        # Each training tries whether slices are exact, which with hundreds of DTensors takes longer than all else.
        patch.setattr("lightning_ssd.optimizer.step.elementwise._NUM_TINY", 20)
        for name in arguments[1:]:
            scenarios[name](Path(arguments[0]))
            print(f"rank {os.environ.get('LOCAL_RANK', '0')}: {name} ok", flush=True)
