"""What ``recipes.gpu`` runs, in which order and for how long at most. Nothing runs here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipes.gpu.sizes import GIB, MIB, Room, io_bytes, optimizer_layers, step_arguments

__all__ = ["FACTS", "Experiment", "allot", "command_line", "make_experiments", "of_facts"]

FACTS = "machine"
_CUFILE, _KVIKIO = "tests/storage/test_cufile.py", "tests/storage/test_kvikio.py"
_NUM_TESTED_FIRST = 3
"""Of the experiments that are tests: the others come last, when there is time left."""
_NUM_SWEPT = 17
"""Contenders of ``recipes.benchmarks.io --sweep``: sixteen shapes of ours, and fio or what stands in for it."""
_DRIVES_S, _OPTIMIZER_S = 15.0, 30.0
_WAITING_DEVICE_BYTES, _WAITING_HOST_BYTES = 18 * GIB, 34 * GIB
"""Of ``recipes.gpu.weights``: plain training's peak, and what is given to the host tier with a copy of the model."""
_TOY = ("--layers=2", "--width=128", "--heads=4", "--sequence=128", "--batch=8", "--vocabulary=211", "--threads=1")
_PYTEST = (
    *("-m", "pytest", "--import-mode=importlib", "--continue-on-collection-errors", "-v", "--durations=5"),
    # The settings of the checkout name options of plugins that may not be installed, and make warnings errors.
    *("-o", "addopts=", "-W", "default", "-p", "no:cacheprovider"),
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One row of the results."""

    name: str
    question: str
    kind: str
    """How its output is read: see ``recipes.gpu.table``."""
    command: tuple[str, ...]
    """Of Python. "{result}" stands for the file that it writes, "{within}" for the seconds that it should take."""
    limit_s: float
    """It is ended after so long."""
    least_s: float
    """With less left it is not begun."""
    needs: tuple[str, ...] = ()
    """Packages of which one must be there."""
    environment: Mapping[str, str] = field(default_factory=dict)
    skip: str = ""
    """Why it is not run."""


def allot(experiment: Experiment, left_s: float) -> float | None:
    """How long it may take; ``None``: too little is left."""
    return min(experiment.limit_s, left_s) if left_s >= experiment.least_s else None


def of_facts(directory: Path, *, rehearse: bool) -> Experiment:
    """The first one, by whose answers the others are made."""
    metered = (32 if rehearse else 256) * MIB
    return Experiment(
        name=FACTS,
        question="is anything there?",
        kind="facts",
        command=(
            *("-m", "recipes.gpu.facts", "--dir", str(directory)),
            "--json={result}",
            f"--metered-bytes={metered}",
        ),
        limit_s=90 if rehearse else 45,
        least_s=0,
    )


def make_experiments(
    facts: Mapping[str, Any], directory: Path, files: Sequence[str], *, rehearse: bool
) -> list[Experiment]:
    """All but the first.

    Args:
        facts: of ``recipes.gpu.facts``.
        directory: on the drive.
        files: with tests for a card.
        rehearse: small, on the CPU.
    """
    missing = facts.get("missing")
    reason = f"the package cannot be imported: {missing}" if missing else ""
    if not reason and not rehearse and not facts["has_cuda"]:
        reason = f"PyTorch {facts['torch']} sees no CUDA device"
    room = None if reason else _room(facts, rehearse=rehearse)
    tests = _tests(files, rehearse=rehearse)
    made = [
        *tests[:_NUM_TESTED_FIRST],
        _weights(room, directory, rehearse=rehearse),
        *_steps(room, directory, rehearse=rehearse),
        *_compiled(directory, rehearse=rehearse),
        *_drives(room, directory, rehearse=rehearse),
        *tests[_NUM_TESTED_FIRST:],
    ]
    return [_checked(experiment, facts, reason) for experiment in made]


def _room(facts: Mapping[str, Any], *, rehearse: bool) -> Room:
    """Of a CPU, its memory is the device's."""
    on_cpu = {"device_free_bytes": facts["host_available_bytes"]} if rehearse else {}
    return Room.of({**facts, **on_cpu})


def _checked(experiment: Experiment, facts: Mapping[str, Any], reason: str) -> Experiment:
    packages = facts.get("packages", {})
    if not reason and experiment.needs and not any(packages.get(name) for name in experiment.needs):
        reason = f"{' or '.join(experiment.needs)} is not installed"
    return replace(experiment, skip=reason or experiment.skip)


def _tests(files: Sequence[str], *, rehearse: bool) -> list[Experiment]:
    parity = [file for file in files if file.startswith("tests/parity/")]
    weights = [file for file in files if file.startswith("tests/parameters/")]
    storage = [file for file in files if file not in (*parity, *weights, _CUFILE, _KVIKIO)]
    # On a CPU the tests for a card are skipped, which still tries their collection; some of the parity tests run there.
    choice = (
        ("-m", "not gpu and not slow", "-k", "cpu and test_activations and not full") if rehearse else ("-m", "gpu")
    )
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    cuda = [file for file in parity if file.endswith("test_cuda.py")]
    rows = [
        ("streams", "streams, events, locking", storage, ("-m", "gpu"), 70.0, 20.0, {}),
        ("bits", "bits of trainings, native segments", parity, choice, 170.0, 30.0, {}),
        ("waiting", "bits and memory of weights and gradients that wait", weights, ("-m", "gpu"), 100.0, 30.0, {}),
        (
            *("bits, expandable segments", "bits of trainings, expandable segments"),
            *(cuda, (*choice[:2], "-k", "test_activations and not full"), 60.0, 30.0, expandable),
        ),
    ]
    if rehearse:
        rows.pop()  # segments are the card's
    return [
        Experiment(
            name=name,
            question=question,
            kind="tests",
            command=(*_PYTEST, *chosen, "--junitxml={result}", *named),
            limit_s=180 if rehearse else limit_s,
            least_s=least_s,
            needs=("pytest",),
            environment=environment,
            skip="" if named else "no test file is marked so",
        )
        for name, question, named, chosen, limit_s, least_s, environment in rows
    ]


def _steps(room: Room | None, directory: Path, *, rehearse: bool) -> list[Experiment]:
    where = ("--dir", str(directory), "--json={result}", "--within={within}")
    # Three processes at most side by side, two of which write.
    sizes = None if room is None else step_arguments(room, num_modes=3, num_writing=2)
    chosen = _TOY if rehearse else ("--profile", "gpu", *(sizes or ()), "--turn-steps", "3")
    skip = "" if rehearse or sizes or room is None else f"no size fits the room that there is: {room}"
    brief = ("--rounds", "1", "--warmup", "1", "--steps", "2")
    rows = [
        # Three processes begin at once: PyTorch alone takes some 15 s the first time, from a disk that is cold.
        ("steps", "step time, peak and stall of keep, keep again, offload", "keep,keep_again,ssd", 90.0),
        ("plans", "the same of auto and a 40 % budget", "keep,auto,budget=40%", 100.0),
    ]
    return [
        Experiment(
            name=name,
            question=question,
            kind="steps",
            command=("-m", "recipes.benchmarks.step", *chosen, *brief, "--modes", modes, *where),
            limit_s=150 if rehearse else limit_s,
            least_s=30,
            skip=skip,
        )
        for name, question, modes, limit_s in rows
    ]


def _drives(room: Room | None, directory: Path, *, rehearse: bool) -> list[Experiment]:
    where = ("--dir", str(directory), "--json={result}")
    moved = 32 * MIB if rehearse or room is None else io_bytes(room, _DRIVES_S, _NUM_SWEPT)
    layers = 2 if room is None else optimizer_layers(room, _OPTIMIZER_S)
    brief = ("--part", "main", "--steps", "2", "--warmup", "1", "--modes", "torch,ssd,cache=50%")
    size = ("--tiny", "--threads=1") if rehearse else ("--profile", "gpu", "--size", "350m", "--layers", str(layers))
    most = f"--max-written={2 * GIB + 2 * (_NUM_SWEPT + 1) * moved}"
    metered = f"--limit-bytes={(16 if rehearse else 256) * MIB}"
    return [
        Experiment(
            name="tensors",
            question="microseconds of Python per kept and per moved tensor",
            kind="hooks",
            command=(
                *("-m", "recipes.benchmarks.hooks"),
                *(("--rounds=2",) if rehearse else ("--rounds=11", "--device=cuda")),
                *where,
            ),
            limit_s=180 if rehearse else 60,
            least_s=20,
        ),
        Experiment(
            name="drive",
            question="drive rates by workers and chunk",
            kind="drive",
            command=("-m", "recipes.benchmarks.io", "--sweep", "--rounds", "1", f"--size={moved}", most, *where),
            limit_s=180 if rehearse else 50,
            least_s=20,
        ),
        Experiment(
            name="optimizer",
            question="optimizer states, with and without a cache in host memory",
            kind="optimizer",
            command=("-m", "recipes.benchmarks.optimizer", *size, *brief, metered, *where),
            limit_s=180 if rehearse else 75,
            least_s=30,
            skip="" if rehearse or layers else "the drive has no room for the states of two layers",
        ),
        *(
            Experiment(
                name=name,
                question=f"does {name} load, with GPUDirect Storage?",
                kind="tests",
                command=(*_PYTEST, "--junitxml={result}", file),
                limit_s=120 if rehearse else 40,
                least_s=15,
                needs=needs,
            )
            for name, file, needs in (
                ("cuFile", _CUFILE, ("cuda-bindings",)),
                ("kvikio", _KVIKIO, ("kvikio-cu12", "kvikio-cu13")),
            )
        ),
    ]


def _weights(room: Room | None, directory: Path, *, rehearse: bool) -> Experiment:
    toy = ("--layers=3", "--width=256", "--batch=2", "--sequence=64", "--vocabulary=512", "--host-memory=64MiB")
    fits = room is None or (room.device_bytes > _WAITING_DEVICE_BYTES and room.host_bytes > _WAITING_HOST_BYTES)
    return Experiment(
        name="weights",
        question="weights, gradients and states that wait: peak, phases, and a card too small for plain training",
        kind="weights",
        command=(
            *("-m", "recipes.gpu.weights", *(toy if rehearse else ("--device=cuda",))),
            *("--dir", str(directory), "--json={result}"),
        ),
        limit_s=180 if rehearse else 100,
        least_s=45,
        skip="" if rehearse or fits else f"its one size does not fit the room that there is: {room}",
    )


def _compiled(directory: Path, *, rehearse: bool) -> list[Experiment]:
    where = ("--dir", str(directory), "--json={result}")
    toy = ("--backend=aot_eager", "--layers=2", "--width=64", "--batch=2", "--sequence=64", "--min-tensor-bytes=16KiB")
    return [
        Experiment(
            name=name,
            question=question,
            kind="compiled",
            command=("-m", "recipes.gpu.compiled", *(toy if rehearse else ("--device=cuda", f"--mode={mode}")), *where),
            limit_s=180 if rehearse else 60,
            least_s=25,
            skip="CUDA graphs need CUDA" if rehearse and mode != "default" else "",
        )
        for name, question, mode in (
            ("compiled", "blocks that torch.compile has compiled", "default"),
            ("compiled, reduce-overhead", 'the same with mode="reduce-overhead" (CUDA graphs)', "reduce-overhead"),
        )
    ]


def command_line(experiment: Experiment, result: Path, limit_s: float) -> list[str]:
    """What is started. A benchmark that can end early is told to, with some time left for its table."""
    filled = {"{result}": str(result), "{within}": f"{0.75 * limit_s:.0f}"}
    parts = list(experiment.command)
    for name, value in filled.items():
        parts = [part.replace(name, value) for part in parts]
    return [sys.executable, *parts]
