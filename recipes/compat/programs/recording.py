"""Records what a program of another project trains, and gives it its strategy.

``recipes/compat/projects.py`` brings :func:`for_lightning` and :func:`for_pytorch_lightning` into each Trainer of the
program by an entry point, so that a program which hides its Trainer is recorded unchanged. Nothing here imports
``lightning_ssd`` in a plain run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "FOLDER",
    "STRATEGY",
    "flat",
    "for_lightning",
    "for_pytorch_lightning",
    "strategy",
    "write",
    "write_predictions",
]

FOLDER, STRATEGY = "PROJECT_RECORD", "PROJECT_STRATEGY"
"""Variables: where records go; settings of the strategy as JSON ("as written": none), absent in a plain run."""
_KEPT = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
"""What is compared of a checkpoint. The rest tells of loops and callbacks, of which a strategy may have more."""


def strategy() -> str:
    """Return the name for ``Trainer(strategy=...)``: "auto", ours, or one that is registered for the asked policy."""
    asked = json.loads(os.environ.get(STRATEGY, "null"))
    if asked is None:
        return "auto"
    import lightning_ssd

    if asked == "as written":
        return "ssd_offload"
    policy = lightning_ssd.OffloadPolicy(**asked["policy"])
    lightning_ssd.register_strategy(
        "my_ssd", policy=policy, hardware=lightning_ssd.HardwareProfile(**asked["hardware"])
    )
    return "my_ssd"


def for_lightning() -> list[Any]:
    """Answer the entry point of ``lightning``."""
    from lightning.pytorch import Callback

    return _recorders(Callback)


def for_pytorch_lightning() -> list[Any]:
    """Answer the entry point of ``pytorch_lightning``."""
    from pytorch_lightning import Callback

    return _recorders(Callback)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return a tree's leaves by their paths: tensors as copies, all else as text."""
    if isinstance(value, torch.Tensor):
        return {path: value.detach().cpu().clone()}
    if isinstance(value, dict):
        return {k: v for name in value for k, v in flat(value[name], f"{path}/{name}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for at, one in enumerate(value) for k, v in flat(one, f"{path}/{at}").items()}
    return {path: repr(value)}


def _recorders(base: type) -> list[Any]:
    if FOLDER not in os.environ:
        return []

    class Recorder(base):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.losses: list[Any] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            told = {"outputs": outputs, "metrics": dict(trainer.callback_metrics)}
            self.losses.append(flat(told))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            file, hook = Path(os.environ[FOLDER]) / "trained.ckpt", pl_module.on_save_checkpoint

            def keep_what_is_compared(checkpoint: dict[str, Any]) -> None:
                hook(checkpoint)
                for name in checkpoint.keys() - set(_KEPT):
                    del checkpoint[name]  # of any type: such a file could not be loaded with weights_only=True
                checkpoint["lr_schedulers"] = flat(checkpoint["lr_schedulers"])

            pl_module.on_save_checkpoint = keep_what_is_compared
            trainer.save_checkpoint(file)
            del pl_module.on_save_checkpoint
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            file.unlink()
            package = base.__module__.partition(".")[0]
            write(package, self.losses, checkpoint, [trainer.strategy, *trainer.callbacks], trainer.optimizers)

    return [Recorder()]


def write(
    package: str, losses: list[Any], checkpoint: dict[str, Any], movers: list[Any], optimizers: list[Any]
) -> None:
    """Write one training down.

    Args:
        package: of Lightning, that the Trainer is of.
        losses: of each step, and what else is told there.
        checkpoint: as a file of it is loaded.
        movers: strategies and callbacks, of which some may be ours.
        optimizers: in the Trainer or Fabric, offloaded or not.
    """
    stats = [one.stats for one in movers if hasattr(one, "offloader")]
    updates = [one.stats for one in optimizers if hasattr(one, "stats")]
    moved = {
        "offloaders": len(stats),
        "saved": sum(one.bytes_saved for one in stats),
        "written": sum(one.bytes_written for one in stats),
        "states": sum(one.written_bytes for one in updates),
    }
    kept = {name: checkpoint[name] for name in _KEPT if name in checkpoint}
    folder = Path(os.environ[FOLDER])
    number = len(list(folder.glob("*.pt")))
    record = {"package": package, "losses": flat(losses), "checkpoint": flat(kept), "moved": moved}
    torch.save(record, folder / f"{number}.pt")


def write_predictions(package: str, values: Any) -> None:
    """Write down, as one more record, what the trained model gives."""
    write(package, [], {"state_dict": {"predictions": torch.as_tensor(values)}}, [], [])
