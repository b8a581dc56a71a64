"""Train a language model as the configuration in ``conf`` says.

    python -m recipes.train model=bert offload=ssd
    python -m recipes.train -m offload=keep,ssd model=gpt,bert,t5

Prints one line per run about loss, step time, memory and bytes moved, and writes the same as ``summary.json`` into the
output directory. On CUDA only operations that repeat their bits are used, so that runs can be compared;
``+trainer.deterministic=false`` allows the others, which may be faster.
"""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig

from recipes.mistakes import ConfigMistake, refusal, say_as_keys
from recipes.schema import SCHEMA
from recipes.summary import RunSummary

__all__ = ["main"]

# With these Hydra prints something, or takes other files than ours, of which we do not know what may be in them.
_UNCHECKED_FLAGS = ("-h", "--help", "--hydra-help", "-sc", "--shell-completion", "-i", "--info")
_FLAGS_WITH_A_WORD = ("-c", "--cfg", "-p", "--package", "--experimental-rerun")
_OTHER_FILES_FLAGS = ("-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir")


def _job(config: DictConfig) -> None:
    # Imported here, because it takes seconds: a mistake on the command line has stopped us before.
    from lightning.pytorch.utilities import rank_zero_only

    from recipes.own_loop import MISTAKES
    from recipes.runner import run

    _tidy_logging()
    choices = HydraConfig.get().runtime.choices
    try:
        summary = run(config, model=str(choices["model"]), offload=str(choices["offload"]))
    except MISTAKES as mistake:
        sys.exit(say_as_keys(str(mistake)))
    except InstantiationException as error:
        sys.exit(refusal(error))
    rank_zero_only(_report)(summary, Path(config.output_dir))
    # The next job of a sweep runs in this process; its resting level must not hold this one's model.
    gc.collect()


def _tidy_logging() -> None:
    """Hydra prints and stores what Lightning logs; Lightning's own handler would print it a second time."""
    logging.getLogger("lightning").handlers.clear()
    messages = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    messages.addFilter(lambda record: "litlogger" not in str(record.msg))  # an advertisement, once per Trainer


def _report(summary: RunSummary, output_dir: Path) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    summary.write(output_dir / "summary.json")
    print(summary.line(), flush=True)


def _refuse_mistakes(arguments: list[str]) -> None:
    """Before Hydra sees them: it accepts some, advises to add others, and starts a sweep that fails in the middle."""
    if any(argument in _UNCHECKED_FLAGS + _OTHER_FILES_FLAGS for argument in arguments):
        return
    before = ["", *arguments]
    words = [word for word, flag in zip(arguments, before, strict=False) if flag not in _FLAGS_WITH_A_WORD]
    overrides = [word for word in words if not word.startswith("-")]
    try:
        SCHEMA.check_overrides(overrides, sweeps=any(flag in arguments for flag in ("-m", "--multirun")))
    except (ConfigMistake, HydraException) as mistake:
        sys.exit(str(mistake))


def main() -> None:
    """Entry point: the command line is ``sys.argv``."""
    _refuse_mistakes(sys.argv[1:])
    hydra.main(config_path=str(SCHEMA.config_dir), config_name=SCHEMA.config_name, version_base="1.3")(_job)()


if __name__ == "__main__":
    main()
