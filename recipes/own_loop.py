"""What the recipes with a training loop of their own have in common: batches without an end, and a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from hydra.errors import HydraException, InstantiationException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd.errors import BackendUnavailableError, BudgetError, ConfigError, StorageError
from recipes.mistakes import ConfigMistake, refusal, say_as_keys
from recipes.schema import SCHEMA
from recipes.summary import RunSummary

__all__ = ["MISTAKES", "endless", "run_command"]

MISTAKES = (ConfigMistake, ConfigError, StorageError, BackendUnavailableError, BudgetError)
"""What settings and directories of the user's may end a run with: the message says all, the way to it nothing."""


def endless(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    """One epoch after the other."""
    while True:
        yield from loader


def run_command(
    train: Callable[..., RunSummary], arguments: Sequence[str] | None, *, output_dir: str, usage: str
) -> RunSummary:
    """Compose the configuration, train and print one line about it. A mistake of the user's ends the process with it.

    Args:
        train: gets the configuration, and as ``model`` and ``offload`` the names of what was chosen.
        arguments: overrides; ``None``: those of ``sys.argv``. ``--help`` among them ends the process.
        output_dir: where to, unless an override says otherwise.
        usage: what ``--help`` prints first.
    """
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    _refuse_flags(overrides, usage)
    # There is no Hydra application here that could make an output directory; the user's own comes later and wins.
    overrides.insert(0, f"output_dir={output_dir}")
    try:
        config, choices = SCHEMA.compose(overrides)
        SCHEMA.check_config(config)
        if not isinstance(config.trainer.max_steps, int) or config.trainer.max_steps < 1:
            raise ConfigMistake(
                f"trainer.max_steps={config.trainer.max_steps}: expected a whole number of at least 1, since this loop "
                "counts steps alone"
            )
        summary = train(config, model=choices["model"], offload=choices["offload"])
    except InstantiationException as error:
        sys.exit(refusal(error))
    except (HydraException, *MISTAKES) as mistake:
        sys.exit(say_as_keys(str(mistake)))
    print(summary.line(), flush=True)
    return summary


def _refuse_flags(words: Sequence[str], usage: str) -> None:
    """Answer ``--help``, and refuse what is no override before Hydra's grammar stumbles over it."""
    if any(word in ("-h", "--help") for word in words):
        print(f"{usage.strip()}\n\nGroups and their options (GROUP=OPTION); every value can be overridden (KEY=VALUE):")
        for group, options in SCHEMA.groups.items():
            print(f"  {group}: {', '.join(options)}")
        sys.exit(0)
    for word in words:
        if word.startswith("-") or ("=" not in word and not word.startswith("~")):
            sys.exit(
                f"{word} is no override; allowed: GROUP=OPTION, KEY=VALUE and ~KEY as of recipes.train, and --help"
            )
