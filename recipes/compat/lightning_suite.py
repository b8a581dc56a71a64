"""Lightning's own tests, once as they are and once with every Trainer and Fabric on our strategy, everything offloaded.

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning /tmp/lightning
    pip install lightning==2.6.5 cloudpickle scikit-learn psutil pandas tensorboard tensorboardX onnx onnxscript
    python -m recipes.compat.lightning_suite --checkout /tmp/lightning
    python -m recipes.compat.lightning_suite --checkout /tmp/lightning --only loops,core --states

The checkout's version has to be the one that is installed. Its tests are copied, so that it stays as it is, and both
runs go on at the same time. ``recipes/compat/lightning_plugin.py`` puts our strategy in. A test that passes as it is
and not with ours is in the table, with the reason where ``REASONS`` has one: it asks for what is no promise of ours.

Exit codes: 0: every difference has its reason; 1: one has none; 2: nothing was compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recipes.compat.lightning_plugin import SAVED, WRITTEN

__all__ = ["GROUPS", "REASONS", "Difference", "Outcome", "compare", "main", "markdown", "outcomes", "reason_for"]

ROOT = Path(__file__).resolve().parents[2]

GROUPS: dict[str, tuple[str, ...]] = {
    "loops": ("tests_pytorch/loops",),
    "core": ("tests_pytorch/core",),
    "hooks": ("tests_pytorch/models/test_hooks.py",),
    "optimization": ("tests_pytorch/trainer/optimization",),
    "logging": ("tests_pytorch/trainer/logging_",),
    "flags": ("tests_pytorch/trainer/flags",),
    "properties": ("tests_pytorch/trainer/properties",),
    "trainer": tuple(f"tests_pytorch/trainer/test_{name}.py" for name in ("trainer", "states", "dataloaders")),
    "connectors": ("tests_pytorch/trainer/connectors",),
    "callbacks": ("tests_pytorch/callbacks",),
    "checkpointing": ("tests_pytorch/checkpointing",),
    "tuner": ("tests_pytorch/tuner",),
    "profilers": ("tests_pytorch/profilers",),
    "precision": ("tests_pytorch/plugins/precision",),
    "models": ("tests_pytorch/models", "tests_pytorch/overrides"),
    "fabric": ("tests_fabric/test_fabric.py", "tests_fabric/test_wrappers.py", "tests_fabric/plugins/precision"),
}

# Checkpoints of old versions have to be downloaded; the hooks of models are a group of their own.
LEFT_OUT = ("--ignore", "tests_pytorch/checkpointing/test_legacy_checkpoints.py")

REASONS: tuple[tuple[str, str], ...] = (
    (
        r"test_skip_training_step_not_allowed",
        "assigns `strategy.world_size`, which is read-only in Lightning's parallel strategies, too",
    ),
    (
        r"connectors\.test_accelerator_connector\..*: (AssertionError: )?"
        r"(assert False|Regex pattern|\S*MisconfigurationException: `Trainer\(|ValueError: You set `strategy=<)",
        "asks which strategy, launcher or environment Lightning chooses by itself; here it is given ours",
    ),
    (
        r"profilers\.test_profiler\.test_pytorch_profiler_trainer_fit",
        "looks for a profiler's line with the name `SingleDeviceStrategy`; the line is there with the name of ours",
    ),
    (
        r"tests_fabric\.test_fabric\.test_setup_module\[",
        "expects the very arguments with which Lightning's `DDPStrategy` calls `DistributedDataParallel`",
    ),
    (
        r"ConfigError: OffloadPolicy\.optimizer_states='offload' got LBFGS",
        "trains with L-BFGS, whose states cannot wait: refused before the first step",
    ),
    (
        r"ConfigError: SSDOffload(Fabric)?Strategy with \d processes got OffloadPolicy\.gradients='offload'",
        "asks for DDP, whose gradients cannot wait: refused before training",
    ),
    (
        r"loops\.optimization\.test_closure\..*: .*updates some parameters at a time",
        "has an optimizer of its own class, which has to be declared",
    ),
    (
        r"OffloaderClosedError: this optimizer's files are closed",
        "runs a loop again after `fit`, when the files of the optimizer's states are closed",
    ),
    (
        r"(test_model_torch_save|_can_be_pickled|test_callbacks_state_fit_ckpt_path): .*cannot be pickled or copied",
        "pickles the Trainer with its optimizer, whose states are in files: refused",
    ),
    (
        r"test_lr_scheduler_strict\[True\]",
        "trains with the optimizer of a Trainer that pytest holds, which has its states in files: refused",
    ),
    (
        r"(test_step_with_optimizer_closure_with_different_frequencies|core\.test_lightning_optimizer\.)",
        "mocks `step` of PyTorch's optimizer, which ours calls for some parameters at a time, or expects its name",
    ),
    (
        r"logging_\..*: (AssertionError: assert \[call\(|AssertionError: Calls not found)",
        "expects all calls of a mocked logger, which gets our metrics, too",
    ),
    (
        r"test_device_stats_monitor\.test_device_stats_cpu\[",
        "expects each row of a logger to be the callback's; the logger gets our metrics, too",
    ),
    (
        r"(test_time_and_epoch_gated_val_check\[|test_throughput_monitor\.)",
        "counts calls of the clock, which ours calls, too",
    ),
    (
        r"tests_fabric\.test_fabric\.test_(setup_twice_fails|setup_tracks_num_models): .*nothing else to hold",
        "sets an optimizer up that was set up before, whose states are in files by then: refused",
    ),
    (
        r"(tests_fabric\.test_fabric\..*: (assert OffloadedOptimizer|AssertionError: expected call not found)"
        r"|test_fabric_call_lightning_module_hooks: .*a Mock is no module)",
        "expects the user's very optimizer or a mock where ours has its own, or mocks a module",
    ),
    (
        r"test_trainer_save_checkpoint_storage_options",
        "mocks what writes checkpoints; ours streams them itself",
    ),
    (
        r"test_lr_monitor\.test_multiple_optimizers_basefinetuning",
        "asks whether an optimizer in the Trainer is of the user's class; an offloaded one is not",
    ),
)
"""A regular expression over "test: message", and why that is no promise of ours; the first that fits counts."""


@dataclass(frozen=True)
class Outcome:
    """What became of one test."""

    result: str
    """"passed", "failed" or "skipped"."""
    message: str = ""
    """The first line of what failed."""
    bytes_saved: int = 0
    bytes_written: int = 0


@dataclass(frozen=True)
class Difference:
    """A test that passes as it is, and not with our strategy."""

    test: str
    message: str
    reason: str
    """Empty: there is none."""


def outcomes(report: Path) -> dict[str, Outcome]:
    """Read a JUnit report. A test that fails and whose teardown fails, too, has two entries there: the worse counts."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}.{case.get('name', '')}".removeprefix("tests.")
        faults = [*case.iter("failure"), *case.iter("error")]
        result = "failed" if faults else "skipped" if case.find("skipped") is not None else "passed"
        message = _first_line(faults[0].get("message") or faults[0].text or "") if faults else ""
        told = {entry.get("name"): int(float(entry.get("value") or 0)) for entry in case.iter("property")}
        if name not in found or found[name].result != "failed":
            found[name] = Outcome(result, message, told.get(SAVED, 0), told.get(WRITTEN, 0))
    return found


def _first_line(message: str) -> str:
    """Without what differs from run to run."""
    line = next((line for line in message.splitlines() if line.strip()), "")
    return re.sub(r"0x[0-9a-f]+", "0x...", re.sub(r"/\S*/", "", line))[:200]


def reason_for(test: str, message: str) -> str:
    """Return why a difference is none of ours to mend; empty: there is no reason."""
    return next((reason for pattern, reason in REASONS if re.search(pattern, f"{test}: {message}")), "")


def compare(plain: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> list[Difference]:
    """List what passes as it is, and not with ours; a test that is missing there, too."""
    found = []
    for test, outcome in plain.items():
        other = ours.get(test, Outcome("failed", "was not run"))
        if outcome.result == "passed" and other.result != "passed":
            found.append(Difference(test, other.message, reason_for(test, other.message)))
    return found


def _run(tests: Path, paths: Sequence[str], report: Path, more: Sequence[str]) -> dict[str, Outcome]:
    """Run pytest in a process of its own, where its report is not there yet."""
    if report.is_file():
        return outcomes(report)
    there = [path for path in paths if (tests / path).exists()]
    # Pytest's cache would be a directory that Lightning's own check of leftovers takes for a test's.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *more, *there]
    path = os.pathsep.join(filter(None, (str(ROOT), str(tests), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment["THP_MEM_ALLOC_ENABLE"] = "0"  # which recipes switch on for themselves
    with (report.with_suffix(".txt")).open("w") as output:
        subprocess.run(command, cwd=tests, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    return outcomes(report) if report.is_file() else {}


def _run_group(name: str, folder: Path, more: Sequence[str], offloaded: str) -> tuple[dict[str, Outcome], ...]:
    """As it is and with ours, at the same time."""
    sides = {"plain": (), "ours": ("-p", "recipes.compat.lightning_plugin", f"--ssd-offload={offloaded}")}
    extra = [*LEFT_OUT, *more, *(("--ignore", GROUPS["hooks"][0]) if name == "models" else ())]
    with ThreadPoolExecutor(len(sides)) as pool:
        runs = [
            pool.submit(_run, folder / side / "tests", GROUPS[name], folder / f"{side}-{name}.xml", [*extra, *plugin])
            for side, plugin in sides.items()
        ]
        return tuple(run.result() for run in runs)


def _row(plain: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> dict[str, int]:
    passed = [test for test, outcome in plain.items() if outcome.result == "passed"]
    both = [ours[test] for test in passed if test in ours and ours[test].result == "passed"]
    return {
        "passed_plain": len(passed),
        "passed_ours": len(both),
        "not_passed_plain": len(plain) - len(passed),
        "with_saved_tensors": sum(outcome.bytes_saved > 0 for outcome in both),
        "with_bytes_on_a_drive": sum(outcome.bytes_written > 0 for outcome in both),
    }


def markdown(groups: Mapping[str, Mapping[str, int]], differences: Sequence[Difference]) -> str:
    """Two tables: the groups, and the tests that differ."""
    lines = ["| group | pass as they are | of these with ours | of these that saved tensors | wrote to a drive |"]
    lines.append("|---|---|---|---|---|")
    columns = ("passed_plain", "passed_ours", "with_saved_tensors", "with_bytes_on_a_drive")
    for name, row in groups.items():
        lines.append(f"| {name} | " + " | ".join(f"{row[column]:,}" for column in columns) + " |")
    totals = [sum(row[column] for row in groups.values()) for column in columns]
    lines.append("| **all** | " + " | ".join(f"**{total:,}**" for total in totals) + " |")
    if differences:
        lines += ["", "| test that differs | reason |", "|---|---|"]
        for difference in differences:
            reason = difference.reason or f"**none**: {difference.message}"
            lines.append(f"| `{difference.test}` | {reason.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    prog = "python -m recipes.compat.lightning_suite"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, required=True, help="Lightning's repository, at the installed version")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups, of {', '.join(GROUPS)}")
    parser.add_argument("--states", action="store_true", help="offload optimizer states as well")
    parser.add_argument("--everything", action="store_true", help="offload states, weights and gradients as well")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument(
        "--keep", type=Path, help="keep pytest's reports here; a run whose report is there is not repeated"
    )
    parser.add_argument("--pytest-args", default="--timeout=300", help="more arguments for pytest")
    args = parser.parse_args(arguments)
    unknown = set(args.only.split(",")) - set(GROUPS)
    if unknown:
        parser.error(f"--only: there is no group {sorted(unknown)[0]!r}; allowed: {', '.join(GROUPS)}")
    if not (args.checkout / "tests" / "tests_pytorch").is_dir():
        parser.error(f"--checkout: {args.checkout} has no tests/tests_pytorch; give a clone of Lightning's repository")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both sides of each group and print the tables."""
    args = parse_arguments(arguments)
    groups: dict[str, dict[str, int]] = {}
    differences: list[Difference] = []
    with tempfile.TemporaryDirectory(prefix="lightning-tests-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for side in ("plain", "ours"):
            shutil.copytree(args.checkout / "tests", folder / side / "tests", symlinks=True, dirs_exist_ok=True)
        for name in args.only.split(","):
            plain, ours = _run_group(name, folder, args.pytest_args.split(), _offloaded(args))
            groups[name] = _row(plain, ours)
            differences += compare(plain, ours)
            print(f"{name}: {groups[name]}", flush=True)
    print(f"\n{markdown(groups, differences)}")
    if args.json:
        args.json.write_text(json.dumps(_document(args, groups, differences), indent=1) + "\n")
    if not any(row["passed_plain"] for row in groups.values()):
        print("no test passed as it is, so that nothing was compared; see pytest's output with --keep", file=sys.stderr)
        return 2
    return int(any(not difference.reason for difference in differences))


_TOLD = {
    "activations": "activations",
    "all": "activations and optimizer states",
    "everything": "activations, optimizer states, weights and gradients",
}


def _offloaded(args: argparse.Namespace) -> str:
    """For the plugin."""
    return "everything" if args.everything else "all" if args.states else "activations"


def _document(args: argparse.Namespace, groups: Mapping[str, Any], differences: Sequence[Difference]) -> dict[str, Any]:
    return {
        "offloaded": _TOLD[_offloaded(args)],
        "versions": {name: version(name) for name in ("lightning", "torch", "pytest")},
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "pytest_args": args.pytest_args,
        "groups": groups,
        "differences": [asdict(difference) for difference in differences],
    }


if __name__ == "__main__":
    sys.exit(main())
