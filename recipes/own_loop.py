"""What the recipes with a training loop of their own have in common: batches without an end, and a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from hydra.errors import HydraException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd.errors import BackendUnavailableError, BudgetError, UnsuitablePathError
from recipes.schema import SCHEMA, ConfigMistake
from recipes.summary import RunSummary

__all__ = ["endless", "run_command"]


def endless(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    """One epoch after the other."""
    while True:
        yield from loader


def run_command(train: Callable[..., RunSummary], arguments: Sequence[str] | None, *, output_dir: str) -> RunSummary:
    """Compose the configuration, train and print one line about it. A mistake of the user's ends the process with it.

    Args:
        train: gets the configuration, and as ``model`` and ``offload`` the names of what was chosen.
        arguments: overrides; ``None``: those of ``sys.argv``.
        output_dir: where to, unless an override says otherwise.
    """
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    # There is no Hydra application here that could make an output directory; the user's own comes later and wins.
    overrides.insert(0, f"output_dir={output_dir}")
    try:
        config, choices = SCHEMA.compose(overrides)
        summary = train(config, model=choices["model"], offload=choices["offload"])
    except (ConfigMistake, HydraException, UnsuitablePathError, BackendUnavailableError, BudgetError) as mistake:
        sys.exit(str(mistake))
    print(summary.line(), flush=True)
    return summary
