"""A drive that is as fast as can be: what may move has moved before any operation computes anything."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssd.offloader import Offloader


class MovesWithin(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered. Without an offloader it counts alone.

    Attributes:
        names: of the operations.
    """

    def __init__(self, offloader: Offloader | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._offloader = offloader

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        if self._offloader is not None:
            # Past the guard of flush(): the mode sees our own operations, too, none of which is under a lock.
            self._offloader._opened().flush()
        return func(*args, **(kwargs or {}))
