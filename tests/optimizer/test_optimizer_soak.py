"""Random training with an offloaded optimizer beside its plain twin."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd.errors import StorageError
from lightning_ssd.planning import update_memory
from tests.support.faults import eio
from tests.support.optimizer_pairs import Nested, Pair, assert_same_states, offloaded, used_bytes

pytestmark = pytest.mark.usefixtures("small_subgroups")


# -- a soak ------------------------------------------------------------------------------------------------------------

SOAKED: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nested": Nested,
}


@pytest.mark.parametrize(("kind", "cache"), [("adamw", "none"), ("sgd", "some"), ("asgd", "none"), ("nested", "some")])
def test_random_training_has_the_bits_of_the_plain_twin(
    kind: str, cache: str, spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing subsets of gradients, new groups, checkpoints, loads, failing writes, slow drives."""
    seed = 10 * list(SOAKED).index(kind) + len(cache)
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    monkeypatch.setattr(update_memory, "NUM_SLOTS", 2 + draw(4))
    shapes = ((128, 150), (7,), (300, 200), (0, 4), (), *[(60, 100)] * 8, (64, 64))
    pair = Pair(SOAKED[kind], shapes)
    directories = spill_dir / "one", spill_dir / "two"
    host_memory = 300_000 if cache == "some" else "auto"
    kept: list[tuple[dict[str, Any], dict[str, Any], list[torch.Tensor]]] = []
    with (
        warnings.catch_warnings(),
        offloaded(pair.inner, *directories, host_memory=host_memory) as (optimizer, drive),
    ):
        warnings.filterwarnings("ignore", "optimizer states could not be written")
        drive.fail_write = lambda index: eio() if index % 37 in (5, 6) else None
        drive.delay_s = 0.0005
        for _ in range(40):
            number = len(pair.mine)
            chosen = draw(3)
            active = None if chosen == 0 else [i for i in range(number) if draw(2) or (chosen == 1 and draw(2))]
            pair.step(optimizer, active)
            pair.check()
            match draw(12):
                case 0 if number < 20:
                    fresh = torch.randn(80 + draw(100), 100, generator=generator)
                    pair.mine.append(nn.Parameter(fresh.clone()))
                    pair.plain.append(nn.Parameter(fresh.clone()))
                    optimizer.add_param_group({"params": [pair.mine[-1]], "lr": 1e-3})
                    pair.twin.add_param_group({"params": [pair.plain[-1]], "lr": 1e-3})
                    kept.clear()  # of fewer groups
                case 1 | 2:
                    weights = [p.detach().clone() for p in pair.mine]
                    kept = [*kept[-2:], (optimizer.state_dict(), copy.deepcopy(pair.twin.state_dict()), weights)]
                case 3 if kept:
                    back = draw(len(kept))
                    optimizer.load_state_dict(kept[back][0])
                    pair.twin.load_state_dict(copy.deepcopy(kept[back][1]))
                    with torch.no_grad():
                        for a, b, weight in zip(pair.mine, pair.plain, kept[back][2], strict=True):
                            a.copy_(weight)
                            b.copy_(weight)
                case 4:
                    with contextlib.suppress(StorageError):
                        optimizer.flush()
        while kept:
            assert_same_states(*kept.pop()[:2])
        pair.check(optimizer)
        drive.fail_write = None
        gc.collect()
        optimizer.flush()
        assert used_bytes(optimizer) == optimizer.stats.state_bytes
    pair.check(optimizer)
