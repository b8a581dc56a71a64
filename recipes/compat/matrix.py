"""Which Python, PyTorch and Lightning this works with: an environment for each combination, and the fast tests in it.

    make compat                                             # the same as the next line
    python -m recipes.compat.matrix
    python -m recipes.compat.matrix --list                         # what would be run, and why the rest would not
    python -m recipes.compat.matrix --torch 2.13 --full            # every Lightning with every PyTorch named
    make compat PIP_ARGS='--index-url ...'                  # an index that has CPU builds of PyTorch

Pythons 3.11 to 3.13 where the machine has them; of each minor version of PyTorch from 2.9 on the newest patch, with the
newest Lightning; and every Lightning from 2.4 on with the newest PyTorch that can be installed. Builds of PyTorch for
GPUs bring gigabytes of libraries with them, so that only CPU builds (``+cpu``) are installed unless ``--any-build``
asks for others. It prints a table of Markdown; what was not run has the reason there: supported is what was run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
FIRST_TORCH, FIRST_LIGHTNING = (2, 9), (2, 4)
MALICIOUS = {(2, 6, 2), (2, 6, 3)}
"""Uploads of Lightning that steal credentials (GHSA-w37p-236h-pfx3)."""
ROOT = Path(__file__).resolve().parents[2]
PINNED_BY_US = ("torch", "lightning", "pytorch-lightning")
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")

FAST_TESTS = (
    "tests/test_public.py",
    "tests/test_config.py",
    "tests/strategies/test_ssd_offload.py",
    "tests/strategies/test_strategy_life.py",
    "tests/strategies/test_strategy_arguments.py",
    "tests/activations/test_saved_storage.py",
    "tests/parity/test_functions.py",
    "tests/parity/test_inplace.py",
    "tests/storage/test_posix.py",
    "tests/storage/test_security.py",
)
"""What touches PyTorch's and Lightning's insides most, in less than two minutes on two cores."""
# One needs the tools of notebooks, which are no dependency.
LEFT_OUT = ("-m", "not slow", "--deselect", "tests/strategies/test_ssd_offload.py::test_interactive_sessions")

_LAST_LINE = re.compile(r"^=*\s*((?:\d+ \w+,? ?)+) in [\d.]+s", re.MULTILINE)


@dataclass(frozen=True)
class Combination:
    """One environment; ``reason``: why it is not made."""

    python: str
    torch: str
    lightning: str
    reason: str = ""


def find_python(version: str) -> Path | None:
    """Find an interpreter of this version that starts: on the path, or among those of pyenv."""
    own = sys.executable if platform.python_version().startswith(version) else None
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    for candidate in filter(None, [shutil.which(f"python{version}"), own, *installed]):
        code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return Path(candidate)
    return None


def versions_found(package: str, python: str, pip_args: Sequence[str]) -> list[str]:
    """List what pip would install for this Python, newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", package, "--python-version", python, *pip_args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return match[1].split(", ") if match else []


def numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0].split("rc")[0]))


def torches_to_try(found: Iterable[str], *, any_build: bool) -> list[tuple[str, str]]:
    """List the newest patch of each minor version, newest first, with the reason where it is not to be installed."""
    chosen: dict[tuple[int, ...], str] = {}
    for version in sorted(found, key=lambda v: (v.endswith("+cpu"), numbers(v)), reverse=True):
        if numbers(version) >= FIRST_TORCH:
            chosen.setdefault(numbers(version)[:2], version)
    reason = "pip finds no CPU build"
    return [(v, "" if any_build or "+cpu" in v else reason) for _, v in sorted(chosen.items(), reverse=True)]


def combinations(
    torches: Mapping[str, Sequence[tuple[str, str]]],
    lightnings: Sequence[str],
    missing: Iterable[str],
    *,
    full: bool = False,
) -> list[Combination]:
    """List what to run, and what not.

    Args:
        torches: of each Python: versions with the reason why not, newest first.
        lightnings: newest first.
        missing: Pythons that the machine has not.
        full: every Lightning with every PyTorch.
    """
    made = [Combination(python, "any", "any", f"no Python {python} on this machine") for python in missing]
    for python, versions in torches.items():
        newest = next((version for version, reason in versions if not reason), None)
        for version, reason in versions:
            several = (full or version == newest) and not reason
            made += [Combination(python, version, name, reason) for name in lightnings[: None if several else 1]]
    return sorted(made, key=lambda c: (c.python, [-n for n in numbers(c.torch)], [-n for n in numbers(c.lightning)]))


def run(combination: Combination, python: Path, folder: Path, pip_args: Sequence[str]) -> tuple[str, str]:
    """Build the environment, run the tests, remove it. Return the result, and pytest's last line or the reason."""
    environment, pins = folder / "environment", folder / "constraints.txt"
    # Versions that this commit was tested with, less those that are varied.
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins.write_text("\n".join(line for line in lines if line.split("==")[0].strip() not in PINNED_BY_US))
    wanted = [f"torch=={combination.torch}", *(f"{name}=={combination.lightning}" for name in PINNED_BY_US[1:])]
    inside = environment / "bin" / "python"
    install = [inside, "-m", "pip", "install", "--quiet", *pip_args, "-c", pins, "-e", ROOT, *wanted, *TEST_TOOLS]
    try:
        for command in ([python, "-m", "venv", environment], install):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines()
                return "not run", f"cannot be installed: {said[-1] if said else command[2]}"
        tests = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", *LEFT_OUT, *FAST_TESTS]
        plainly = os.environ | {"THP_MEM_ALLOC_ENABLE": "0"}  # which recipes switch on for themselves
        done = subprocess.run(tests, cwd=ROOT, env=plainly, capture_output=True, text=True, check=False)
        last = _LAST_LINE.findall(done.stdout)
        if done.returncode:
            print(done.stdout[-6000:], file=sys.stderr)
        detail = last[-1].strip() if last else f"pytest ended with {done.returncode} and no summary"
        return "failed" if done.returncode else "passed", detail
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.compat.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only show what would be run")
    parser.add_argument("--full", action="store_true", help="every Lightning with every PyTorch")
    parser.add_argument("--any-build", action="store_true", help="also builds of PyTorch for GPUs (gigabytes each)")
    parser.add_argument("--python", action="append", help="only this version, such as 3.12; may be repeated")
    parser.add_argument("--torch", action="append", help="only versions that begin so, such as 2.13; may be repeated")
    parser.add_argument("--lightning", action="append", help="the same for Lightning, such as 2.6.6")
    parser.add_argument("--pip-args", default=os.environ.get("PIP_ARGS", ""), help="more arguments for pip")
    return parser.parse_args(arguments)


def plan(args: argparse.Namespace) -> tuple[list[Combination], dict[str, Path]]:
    """Look for interpreters and versions."""
    pip_args = args.pip_args.split()
    pythons = {version: find_python(version) for version in args.python or PYTHONS}
    found = {version: path for version, path in pythons.items() if path is not None}
    torches = {}
    for version in found:
        tried = torches_to_try(versions_found("torch", version, pip_args), any_build=args.any_build)
        torches[version] = [(t, why) for t, why in tried if not args.torch or t.startswith(tuple(args.torch))]
    names = versions_found("lightning", PYTHONS[0], pip_args)
    lightnings = [name for name in names if numbers(name) >= FIRST_LIGHTNING and numbers(name) not in MALICIOUS]
    if args.lightning:
        lightnings = [name for name in lightnings if name.startswith(tuple(args.lightning))]
    return combinations(torches, lightnings, [v for v in pythons if v not in found], full=args.full), found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix, and print a table."""
    args = parse_arguments(arguments)
    wanted, pythons = plan(args)
    results = []
    print("| Python | PyTorch | Lightning | result | |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        for one in wanted:
            if one.reason or args.list:
                result, detail = "not run", one.reason or "listed only"
            else:
                result, detail = run(one, pythons[one.python], Path(folder), args.pip_args.split())
            results.append(result)
            print(f"| {one.python} | {one.torch} | {one.lightning} | {result} | {detail} |", flush=True)
    if {"not run"}.issuperset(results) and not args.list:
        sys.exit("nothing was run, so that nothing is known; see the reasons above")
    return int("failed" in results)


if __name__ == "__main__":
    sys.exit(main())
