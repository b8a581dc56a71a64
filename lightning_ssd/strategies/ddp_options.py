"""Options of users for several processes: how they start, and what ``DistributedDataParallel`` gets."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_ssd.errors import ConfigError

__all__ = ["StartMethod", "check_start_method", "ddp_arguments"]

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def check_start_method(owner: object, start_method: str) -> None:
    """Refuse one that does not exist.

    Raises:
        ConfigError: with the name of the owner's class.
    """
    if start_method not in get_args(StartMethod):
        allowed = ", ".join(map(repr, get_args(StartMethod)))
        raise ConfigError(f"{type(owner).__name__}.start_method={start_method!r}; allowed: {allowed}")


def ddp_arguments(*, broadcast_buffers: bool | None, **others: Any) -> dict[str, Any]:
    """Return arguments of ``DistributedDataParallel``; ``None``: its own default."""
    if broadcast_buffers is None:  # PyTorch 2.13 warns where this one is passed at all
        return others
    return {**others, "broadcast_buffers": broadcast_buffers}
