"""Operations of PyTorch that fill a tensor after they have saved it, and count no version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssd import Offloader
from tests.support.helpers import DRAINED, Session, assert_same


class MovesWithin(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A drive that is as fast as can be, while it is entered. Without an offloader it counts alone.

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


ROWS = 256


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nn.RReLU": nn.RReLU(),
    "nn.RReLU(inplace)": nn.RReLU(inplace=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: torch.rrelu_(x, training=True),
    "rrelu twice": lambda x: F.rrelu(F.rrelu(x, training=True).neg(), training=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_an_operation_fills_after_saving_it(name: str, tmp_path: Path) -> None:
    def program(session: Session) -> Any:
        weight = torch.randn(ROWS, ROWS, requires_grad=True)
        with session.saved(), MovesWithin(session.offloader) as mode:
            loss = FUNCTIONS[name](weight * 2).square().sum()
        session.backward(loss)
        assert any("rrelu_with_noise" in name for name in mode.names)
        return weight.grad

    assert_same(program, tmp_path, setups=[DRAINED])
