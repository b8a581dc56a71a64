"""Which declared optimizers of another package have the bits of plain training with offloaded states, and which not.

Run it by hand; the package is no dependency: ``pip install --no-deps --target DIR pytorch_optimizer``, then
``.venv/bin/python -m recipes.compat.third_party_optimizers --path DIR``.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.copies import same

SHAPES = ((40, 60),) * 10 + ((7,), (40, 60), (16, 8, 3, 3))
"""Seven or more subgroups, with a vector and a convolution."""
NUM_STEPS = 6


def _train(kind: type[Optimizer], offload: Any, *, has_closure: bool) -> tuple[list[nn.Parameter], Any, int]:
    """Train; return the parameters, the states, and how many subgroups there were."""
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape) * 0.1) for shape in SHAPES]
    made: Any = kind(parameters)  # type: ignore[call-arg]  # those that need more are not tried
    if callable(getattr(made, "train", None)):
        made.train()
    optimizer = offload(made)
    generator = torch.Generator().manual_seed(2)
    for _ in range(NUM_STEPS):
        gradients = [torch.randn(p.shape, generator=generator) * 0.1 for p in parameters]

        def closure(gradients: list[torch.Tensor] = gradients) -> torch.Tensor:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient + 0.01 * p.detach()
            return torch.stack([p.detach().square().sum() for p in parameters]).sum()

        closure()
        optimizer.step(*([closure] if has_closure else []))
    num = getattr(optimizer, "stats", None)
    return parameters, copy.deepcopy(optimizer.state_dict()), 0 if num is None else num.num_subgroups


def verdict(kind: type[Optimizer], directory: Path, *, has_closure: bool) -> str:
    """Return "exact", "refused: ...", "not tried: ..." or "WRONG: ..."."""
    try:
        plain, states, _ = _train(kind, lambda optimizer: optimizer, has_closure=has_closure)
    except Exception as error:  # it needs more than parameters and gradients
        return f"not tried: {type(error).__name__}: {error}"
    policy = OffloadPolicy(activations="keep", optimizer_states="offload", per_parameter_optimizers=(kind.__name__,))
    with Offloader(policy=policy, hardware=HardwareProfile(paths=[str(directory)])).open() as offloader:
        try:
            mine, own_states, num = _train(kind, offloader.offload_optimizer, has_closure=has_closure)
        except ConfigError as error:
            return f"refused: {error}"
    if not same(mine, plain):
        return "WRONG: parameters"
    if not same(own_states, states):
        return "WRONG: states"
    return "exact" if num >= 7 else f"WRONG: {num} subgroups"


def main() -> None:
    """Try all classes and print a table."""
    arguments = argparse.ArgumentParser(prog="python -m recipes.compat.third_party_optimizers", description=__doc__)
    arguments.add_argument("--path", type=Path, required=True, help="where the package is installed")
    arguments.add_argument("--package", default="pytorch_optimizer")
    arguments.add_argument("--closure", action="store_true", help="step with a closure, as Lightning does")
    arguments.add_argument("names", nargs="*", help="classes to try; none: all")
    args = arguments.parse_args()
    sys.path.append(str(args.path))
    package = importlib.import_module(args.package)
    found = {
        name: kind
        for name, kind in vars(package).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind.__module__.startswith(args.package)
    }
    counts: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory() as directory,
        warnings.catch_warnings(),
        patch("lightning_ssd.planning.update_memory._MIN_SUBGROUP_BYTES", 16 << 10),
        patch("lightning_ssd.optimizer.step.subgroups.GRANULE", 1024),
    ):
        warnings.simplefilter("ignore")
        for name in args.names or sorted(found):
            said = verdict(found[name], Path(directory), has_closure=args.closure)
            counts[said.split(":")[0]] += 1
            print(f"{name:24}{said}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
