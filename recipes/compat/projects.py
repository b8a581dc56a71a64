"""Train public projects plainly and with the line of ``docs/projects.md``, and compare all that training made.

    python -m recipes.compat.projects                         # all of them, an environment for each (slow)
    python -m recipes.compat.projects chemprop lightly
    python -m recipes.compat.projects --keep DIR scvi-tools   # environments stay in DIR, and serve again

An environment has what this Python has (PyTorch and Lightning are not installed again) and the project with what else
it needs. Each training is a few steps on a CPU, with everything offloaded that is at least one byte large. A recorder,
which an entry point brings into the Trainer, writes losses, metrics, weights, buffers, optimizer states and schedulers
down. A plain training goes first, and once more, to show that the program repeats its own bits.

Exit codes: 0: all equal; 1: something differs or failed; 2: nothing was run.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from recipes.compat.matrix import PINNED_BY_US
from recipes.compat.programs.recording import FOLDER, STRATEGY

__all__ = ["PROJECTS", "NotInstalled", "Outcome", "Project", "difference", "environment", "main", "train_and_compare"]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
MINUTES = 60
POLICIES: dict[str, dict[str, Any]] = {
    "activations": {"activations": "offload", "min_tensor_bytes": 1},
    "states": {"activations": "offload", "min_tensor_bytes": 1, "optimizer_states": "offload"},
    "everything": {
        "activations": "offload",
        "min_tensor_bytes": 1,
        "optimizer_states": "offload",
        "parameters": "offload",
        "gradients": "offload",
    },
}
AS_WRITTEN = "as written"
"""The line of the page without more settings: small tensors then stay where they are."""
_WANTED: dict[str | None, tuple[str, ...]] = {
    None: (),
    AS_WRITTEN: ("offloaders",),
    "activations": ("offloaders", "saved", "written"),
}
"""Policy -> what a record must count for the training to have had it; by default all."""


class NotInstalled(Exception):
    """pip could not make the environment; the text has its last line."""


@dataclass(frozen=True)
class Project:
    """One project and the line that offloads what it trains."""

    version: str
    package: str
    """Of Lightning, that its Trainer is of."""
    line: str
    """As ``docs/projects.md`` has it."""
    command: Sequence[str]
    """Words; ``{python}`` and ``{bin}`` are the environment's."""
    ways: Mapping[str, Sequence[str]]
    """How the program gets a policy -> names of policies: "strategy" (it asks ``recording.strategy()``), "variable"
    (``LIGHTNING_SSD``), "hydra" and "cli" (options of its command line)."""
    requirements: Sequence[str] = ()
    """What pip is to install besides the project."""
    alone: bool = False
    """Install it and ``requirements`` without what they need: its pins exclude versions that work."""
    files: Callable[[], Mapping[str, bytes]] = field(default=dict)
    """Data for the folder in which the program runs."""


@dataclass(frozen=True)
class Outcome:
    """The verdict on one training."""

    project: str
    version: str
    way: str
    result: str
    """"equal", or what is not."""
    num_tensors: int = 0
    moved: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether all was compared and equal."""
        return self.result == "equal"


def _molecules() -> dict[str, bytes]:
    rows = [f"{'C' * n}{tail},{n + len(tail)}" for n in range(1, 11) for tail in ("O", "N", "c1ccccc1", "C(=O)O")]
    return {"molecules.csv": "\n".join(["smiles,target", *rows, ""]).encode()}


def _frames() -> dict[str, bytes]:
    draw, rows = random.Random(1), []
    for _ in range(24):
        rows += ["4", f'Properties=species:S:1:pos:R:3:forces:R:3 energy={draw.gauss(-10, 1)} pbc="F F F"']
        for symbol, place in zip("CHOH", ((0, 0, 0), (1.1, 0, 0), (0, 1.2, 0), (0, 0, 1.3)), strict=True):
            numbers = [at + draw.gauss(0, 0.1) for at in place] + [draw.gauss(0, 1) for _ in range(3)]
            rows.append(" ".join([symbol, *map(str, numbers)]))
    return {"frames.xyz": "\n".join([*rows, ""]).encode(), "nequip.yaml": (PROGRAMS / "nequip.yaml").read_bytes()}


def _conformations() -> dict[str, bytes]:
    draw = np.random.default_rng(1)
    arrays = {
        "coordinates": draw.normal(size=(24, 5, 3)),
        "elements": np.array([6, 1, 1, 8, 1]),
        "energies": draw.normal(size=(24, 1)),
        "forces": draw.normal(size=(24, 5, 3)),
    }
    files = {}
    for name, array in arrays.items():
        np.save(file := io.BytesIO(), array.astype("float32" if array.dtype.kind == "f" else "int64"))
        files[f"{name}.npy"] = file.getvalue()
    return files


_CHEMPROP = (
    "{bin}/chemprop train --data-path molecules.csv --task-type regression --output-dir trained --epochs 3 "
    "--batch-size 8 --num-workers 0 --pytorch-seed 1 --accelerator cpu --devices 1"
)
_TORCHGEO = (
    "{bin}/torchgeo fit --seed_everything=1 --model=ClassificationTask --model.model=resnet18 --model.in_channels=3 "
    "--model.num_classes=4 --data=torchgeo_pictures.Pictures --trainer.accelerator=cpu --trainer.max_epochs=1 "
    "--trainer.logger=false"
)
_TORCHMD = (
    "{bin}/torchmd-train --dataset Custom --coord-files coordinates.npy --embed-files elements.npy --energy-files "
    "energies.npy --force-files forces.npy --derivative true --model equivariant-transformer --embedding-dimension 32 "
    "--num-layers 1 --num-rbf 8 --num-heads 2 --max-z 10 --num-epochs 1 --save-interval 1 --batch-size 4 "
    "--train-size 16 --val-size 4 --test-size 4 --num-workers 0 --ngpus 1 --log-dir trained"
)
_BOTH = {"strategy": ("activations", "states", "everything"), "variable": ("states",)}
_TRAINER = 'Trainer(..., strategy="ssd_offload")'

PROJECTS: dict[str, Project] = {
    "chemprop": Project(
        "2.3.1",
        "lightning",
        "LIGHTNING_SSD=offload chemprop train ...",
        _CHEMPROP.split(),
        {"variable": ("activations", "states")},
        files=_molecules,
    ),
    "lightly": Project("1.6.0", "pytorch_lightning", _TRAINER, ("{python}", "{programs}/train_lightly.py"), _BOTH),
    "pytorch-forecasting": Project(
        "1.8.0", "lightning", _TRAINER, ("{python}", "{programs}/train_pytorch_forecasting.py"), _BOTH
    ),
    "scvi-tools": Project(
        "1.4.2", "lightning", 'model.train(strategy="ssd_offload")', ("{python}", "{programs}/train_scvi.py"), _BOTH
    ),
    "neuralforecast": Project(
        "3.3.0",
        "pytorch_lightning",
        'NHITS(..., strategy="ssd_offload")',
        ("{python}", "{programs}/train_neuralforecast.py"),
        _BOTH,
    ),
    "darts": Project(
        "0.48.1",
        "pytorch_lightning",
        'pl_trainer_kwargs={"strategy": "ssd_offload"}',
        ("{python}", "{programs}/train_darts.py"),
        _BOTH,
    ),
    "gluonts": Project(
        "0.17.0",
        "lightning",
        'trainer_kwargs={"strategy": "ssd_offload"}',
        ("{python}", "{programs}/train_gluonts.py"),
        _BOTH,
        requirements=("scipy",),  # its PyTorch part imports it
    ),
    "nequip": Project(
        "0.19.1",
        "lightning",
        "nequip-train ... +lightning_ssd/offload=ssd",
        ["{bin}/nequip-train", "-cn", "nequip.yaml"],
        {"hydra": ("activations", "states", "everything"), "variable": ("states",)},
        files=_frames,
    ),
    "torchgeo": Project(
        "0.8.1",
        "lightning",
        "torchgeo fit ... --trainer.strategy.class_path=lightning_ssd.SSDOffloadStrategy",
        _TORCHGEO.split(),
        {"cli": ("activations", "states", "everything"), "variable": ("states",)},
    ),
    "torchmd-net": Project(
        "3.1.0",
        "lightning",
        "LIGHTNING_SSD=offload torchmd-train ...",
        _TORCHMD.split(),
        {"variable": ("activations", "states")},
        files=_conformations,
    ),
    "anomalib": Project(
        "2.7.0",
        "lightning",
        'Engine(..., strategy="ssd_offload")',
        ("{python}", "{programs}/train_anomalib.py"),
        _BOTH,
    ),
    "litgpt": Project("0.5.13", "lightning", _TRAINER, ("{python}", "{programs}/train_litgpt.py"), _BOTH, alone=True),
    "litgpt (Fabric)": Project(
        "0.5.13",
        "lightning",
        'Fabric(..., strategy="ssd_offload")',
        ("{python}", "{programs}/train_litgpt_fabric.py"),
        {"strategy": ("activations", "states", "everything")},
        alone=True,
    ),
}


_WITHOUT_CUDA = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import torch
            for operator in ("nms", "qnms"):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", schema)

sys.meta_path.insert(0, Finder())
"""


# -- environments -----------------------------------------------------------------------------------------------------


def environment(name: str, folder: Path, pip_args: Sequence[str] = ()) -> Path:
    """Make an environment with a project in it, or take the one that is there; return its Python.

    Raises:
        NotInstalled: pip cannot install the project.
    """
    project, inside = PROJECTS[name], folder / "bin" / "python"
    done = folder / ".installed"
    wanted = [f"{name.partition(' ')[0]}=={project.version}", *project.requirements]
    if done.is_file() and done.read_text() == repr(wanted):
        return inside
    _run([sys.executable, "-m", "venv", "--clear", folder])
    # What this Python has comes behind what the environment has. pip sees it, and leaves it alone: it is outside.
    [packages] = folder.glob("lib/python*/site-packages")
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (packages / "beneath.pth").write_text("\n".join(paths) + "\n")
    # All else may be of other versions here: projects have pins of their own.
    pins = folder / "constraints.txt"
    pins.write_text("".join(f"{name}=={version(name)}\n" for name in PINNED_BY_US))
    options = ["-c", pins, *(["--no-deps"] if project.alone else [])]
    _run([inside, "-m", "pip", "install", "--quiet", *pip_args, *options, *wanted])
    if "+cpu" in torch.__version__ and any(not one.match("*+cpu*") for one in packages.glob("torchvision-*.dist-info")):
        # An index may have torchvision for CUDA alone. Its operators are then not loaded, and its import asks for two.
        (packages / "torchvision_without_cuda.py").write_text(_WITHOUT_CUDA)
        (packages / "torchvision_without_cuda.pth").write_text("import torchvision_without_cuda\n")
    versions = "import torch, lightning, pytorch_lightning as p; print(torch.__file__, lightning.__file__, p.__file__)"
    found = _run([inside, "-c", versions])
    if str(folder) in found:
        raise NotInstalled(f"pip has replaced PyTorch or Lightning: {found}")
    done.write_text(repr(wanted))
    return inside


def _run(command: Sequence[str | Path]) -> str:
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20 * MINUTES)
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(str(error)) from None
    if made.returncode:
        said = (made.stderr or made.stdout).strip().splitlines()
        raise NotInstalled(said[-1] if said else f"{command[0]} ended with {made.returncode}")
    return made.stdout.strip()


# -- trainings --------------------------------------------------------------------------------------------------------


def train_and_compare(name: str, inside: Path, folder: Path) -> Iterator[Outcome]:
    """Train plainly, plainly again, and each way; yield one verdict for each but the first."""
    project = PROJECTS[name]
    plain = _records(name, inside, folder / "plain", {})
    ways: list[tuple[str, str | None]] = [("plain, again", None)]
    ways += [(f"{way}: {policy}", policy) for way, policies in project.ways.items() for policy in policies]
    ways.append((f"{next(iter(project.ways))}: {AS_WRITTEN}", AS_WRITTEN))
    for number, (way, policy) in enumerate(ways):
        yield _verdict(name, way, policy, plain, inside, folder / str(number))


def _verdict(name: str, way: str, policy: str | None, plain: Any, inside: Path, folder: Path) -> Outcome:
    tried = PROJECTS[name].version
    if isinstance(plain, str):
        return Outcome(name, tried, way, f"plain training {plain}")
    (folder / "spill").mkdir(parents=True)
    variables, words = ({}, []) if policy is None else _settings(way.partition(":")[0], policy, folder)
    records = _records(name, inside, folder, variables, words)
    if isinstance(records, str):
        return Outcome(name, tried, way, records)
    moved = {key: sum(record["moved"][key] for record in records) for key in records[0]["moved"]}
    idle = [key for key in _WANTED.get(policy, tuple(moved)) if not moved[key]]
    tensors = [key for record in records for key, value in _leaves(record).items() if isinstance(value, torch.Tensor)]
    result = difference(plain, records)
    if {record["package"] for record in records} != {PROJECTS[name].package}:
        result = f"its Trainers are of {records[0]['package']}"
    elif idle:
        result = result or f"nothing was offloaded: {', '.join(idle)}"
    elif not any(key.startswith("losses") for key in tensors):
        result = "no loss was recorded"
    return Outcome(name, tried, way, result or "equal", len(tensors), json.dumps(moved))


def _settings(way: str, policy: str, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return variables and more words of the command that ask for a policy."""
    hardware = {"paths": [str(folder / "spill")], "host_memory": 0, "allow_unsuitable_paths": True}
    settings = {} if policy == AS_WRITTEN else {"policy": POLICIES[policy], "hardware": hardware}
    if way == "strategy":
        return {STRATEGY: json.dumps(settings or AS_WRITTEN)}, []
    if way == "hydra":
        words = ["+lightning_ssd/offload=ssd"] + ["+lightning_ssd/hardware=auto"] * bool(settings)
        return {}, words + _words("offload.", "policy", settings) + _words("hardware.", "hardware", settings)
    if way == "cli":
        start = "--trainer.strategy."
        words = [f"{start}class_path=lightning_ssd.SSDOffloadStrategy"]
        words += _words(f"{start}policy.", "policy", settings) + _words(f"{start}hardware.", "hardware", settings)
        return {}, words
    if not settings:
        return {"LIGHTNING_SSD": "offload"}, []
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    return {"LIGHTNING_SSD": str(file)}, []


def _words(prefix: str, group: str, settings: Mapping[str, Any]) -> list[str]:
    values = settings.get(group, {})
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return [f"{prefix}{name}={text}" for name, text in texts.items()]


def _records(
    name: str, inside: Path, folder: Path, variables: Mapping[str, str], more: Sequence[str] = ()
) -> list[dict[str, Any]] | str:
    """Run the program in a new folder; return what its Trainers recorded, or what went wrong."""
    project = PROJECTS[name]
    for part in ("record", "run"):
        (folder / part).mkdir(parents=True)
    for file, content in project.files().items():
        (folder / "run" / file).write_bytes(content)
    _write_entry_point(folder / "entry")
    words = [word.format(python=inside, bin=inside.parent, programs=PROGRAMS) for word in project.command]
    ours = ("LIGHTNING_SSD", "PROJECT_", "THP_MEM_ALLOC_ENABLE")  # the last one is what recipes switch on
    cleared = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, (folder / "entry", PROGRAMS, ROOT))),
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        FOLDER: str(folder / "record"),
    }
    made = subprocess.run(
        [*words, *more],
        cwd=folder / "run",
        env=cleared | settings | dict(variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=10 * MINUTES,
    )
    (folder / "output.txt").write_text(made.stdout + made.stderr)
    if made.returncode:
        said = made.stderr.strip().splitlines() or [f"exit code {made.returncode}"]
        return f"failed: {said[-1]}"
    files = sorted((folder / "record").glob("*.pt"))
    return [torch.load(file, weights_only=True) for file in files] or "no Trainer was recorded"


def _write_entry_point(folder: Path) -> None:
    made = folder / "recording-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: recording\nVersion: 0\n")
    text = """
        [lightning.pytorch.callbacks_factory]
        recording = recording:for_lightning
        [pytorch_lightning.callbacks_factory]
        recording = recording:for_pytorch_lightning
        """
    (made / "entry_points.txt").write_text(textwrap.dedent(text))


# -- comparison -------------------------------------------------------------------------------------------------------


def _leaves(record: Mapping[str, Any]) -> dict[str, Any]:
    found = {f"checkpoint{key}": value for key, value in record["checkpoint"].items()}
    return found | {f"losses{key}": value for key, value in record["losses"].items()}


def difference(plain: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> str:
    """Name the first leaf that differs in type, shape or a bit; empty: there is none."""
    if len(plain) != len(other):
        return f"{len(plain)} trainings, and {len(other)}"
    for number, pair in enumerate(zip(plain, other, strict=True)):
        first, second = map(_leaves, pair)
        if first.keys() != second.keys():
            return f"training {number}: only in one: {sorted(first.keys() ^ second.keys())[:3]}"
        for key, value in first.items():
            if not _is_same(value, second[key]):
                return f"training {number}: {key} differs"
    return ""


def _is_same(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return bool(type(first) is type(second) and first == second)
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(one.contiguous().flatten().view(torch.uint8) for one in (first, second)))


# -- the command ------------------------------------------------------------------------------------------------------


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="projects-") as made:
            yield Path(made)
    else:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the projects named, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m recipes.compat.projects", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROJECTS)}; none: all")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the environments here, and leave them")
    parser.add_argument("--pip-args", default=os.environ.get("PIP_ARGS", ""), help="more arguments for pip")
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - PROJECTS.keys():
        parser.error(f"no such project: {', '.join(sorted(unknown))}; there are {', '.join(PROJECTS)}")
    outcomes = []
    for name in args.names or PROJECTS:
        with _folder(args.keep) as folder, _folder(args.keep and args.keep / f"{time.time_ns()}") as runs:
            try:
                inside = environment(name, folder / name.partition(" ")[0], args.pip_args.split())
            except NotInstalled as error:
                print(f"{name}: not installed: {error}", flush=True)
                continue
            for outcome in train_and_compare(name, inside, runs):
                print(
                    f"| {outcome.project} {outcome.version} | {outcome.way} | {outcome.result} "
                    f"| {outcome.num_tensors} tensors | {outcome.moved} |",
                    flush=True,
                )
                outcomes.append(outcome)
    if not outcomes:
        return 2
    return int(not all(outcome.is_equal for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
