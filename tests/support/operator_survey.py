"""PyTorch's own samples of its operators, plainly and with all that they save on a drive: prints what differs, as JSON.

A program of its own, because importing PyTorch's test suite changes the process. What may move has moved before any
operation computes anything.
"""

from __future__ import annotations

import json
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ssd import Offloader
from tests.support.helpers import DRAINED, Session, open_offloader, raw_bytes

NUM_SAMPLES = 2


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


def operators() -> list[Any]:
    """PyTorch's list. It wants a package for its own expectations, of which nothing is used here."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd and torch.float32 in op.dtypes]


def gradients(function: Callable[..., Any], sample: Any, session: Session) -> list[torch.Tensor | None]:
    def leaf(value: Any) -> Any:
        is_input = isinstance(value, torch.Tensor) and value.layout == torch.strided
        return value.detach().clone().requires_grad_(value.requires_grad) if is_input else value

    inputs = tree_map(leaf, (sample.input, sample.args, sample.kwargs))
    leaves = [value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor) and value.requires_grad]
    torch.manual_seed(0)
    with session.saved(), MovesWithin(session.offloader):
        # What is given is no leaf, so that it may be edited in place.
        first, args, kwargs = tree_map(
            lambda v: v * 1 if isinstance(v, torch.Tensor) and v.requires_grad else v, inputs
        )
        outputs = [y for y in tree_leaves(function(first, *args, **kwargs)) if isinstance(y, torch.Tensor)]
        trained = [y for y in outputs if y.requires_grad]
    session.drain()
    return list(torch.autograd.grad(trained, leaves, list(map(torch.ones_like, trained)), allow_unused=True))


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.layout != torch.strided:
        return one is other or (one is not None and other is not None)
    return torch.equal(raw_bytes(one), raw_bytes(other))


def main(directory: Path) -> None:
    warnings.simplefilter("ignore")
    found: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    with open_offloader(directory) as offloader:
        for op in operators():
            samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))[:NUM_SAMPLES]
            for kind, function in (("", op.op), ("_", op.inplace_variant)):
                for sample in samples if function is not None else ():
                    try:
                        plain = [gradients(function, sample, Session()) for _ in range(2)]
                    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
                        counts["not differentiable so"] += 1
                        continue
                    if not all(map(same, *plain)):
                        counts["not repeatable"] += 1
                        continue
                    counts["compared"] += 1
                    mine = gradients(function, sample, Session.of(offloader, DRAINED))
                    found[op.name + kind] += not all(map(same, mine, plain[0]))
        counts["written bytes"] = offloader.stats.bytes_written
    print(json.dumps({"different": +found, "operators": len(found), **counts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
