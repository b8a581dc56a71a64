"""Check the user's options for several processes: how they start, and arguments of ``DistributedDataParallel``."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_ssd.errors import ConfigError

__all__ = ["StartMethod", "check_start_method", "ddp_arguments"]

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def check_start_method(owner: object, start_method: str) -> None:
    """Refuse a start method that does not exist.

    Raises:
        ConfigError: there is no such method; the error names the owner's class.
    """
    if start_method not in get_args(StartMethod):
        methods = ", ".join(map(repr, get_args(StartMethod)))
        raise ConfigError(f"{type(owner).__name__}.start_method={start_method!r} is unknown. Write one of {methods}")


def ddp_arguments(*, broadcast_buffers: bool | None, **others: Any) -> dict[str, Any]:
    """Return arguments of ``DistributedDataParallel``, without ``broadcast_buffers`` if that is ``None``."""
    if broadcast_buffers is None:  # PyTorch 2.13 warns whenever it is passed
        return others
    return {**others, "broadcast_buffers": broadcast_buffers}
