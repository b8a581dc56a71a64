"""A session that recomputes chosen blocks, and the comparison with the same training kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import lightning_ssd.scheduling.plan_maker
from lightning_ssd.planning.planner import make_plan
from lightning_ssd.planning.recompute_trace import recomputable
from lightning_ssd.recompute.block_discovery import find_blocks
from lightning_ssd.recompute.blocks import Blocks
from tests.support.helpers import Raised, Session, assert_identical, outcome

Chooses = Callable[[int], bool]
EVERY: Chooses = lambda index: True  # noqa: E731
SECOND: Chooses = lambda index: index % 2 == 1  # noqa: E731
NONE: Chooses = lambda index: False  # noqa: E731


class Recomputing(Session):
    """Runs a program with some of the block calls of each pass recomputed; counts what is repeated in backward."""

    recomputes_all = False

    def __init__(self, chooses: Chooses, *, classes: tuple[str, ...] = (), wants_inputs: bool = False, **extra: Any):
        super().__init__(**extra)
        self.chooses = chooses
        self.classes = classes
        self.wants_inputs = wants_inputs
        self.blocks: list[Blocks] = []
        self.calls = self.asked = self.depth = 0
        self.repeated: list[str] = []
        self.tried: list[str] = []
        self.forward = False
        self.nbytes: list[int] = []

    def register(self, module: nn.Module) -> None:
        super().register(module)
        found = find_blocks(module, self.classes)
        assert found, "nothing to recompute"
        self.blocks.append(Blocks(found))
        for name, block in found.items():
            for part in block.modules():
                if not any(True for _ in part.children()):
                    part.register_forward_pre_hook(functools.partial(self._runs, name))

    def _runs(self, name: str, module: nn.Module, args: Any) -> None:
        if not self.forward:
            self.repeated.append(name)

    @contextmanager
    def saved(self) -> Iterator[None]:  # type: ignore[override]
        self.calls = 0
        self.forward = True
        with super().saved():
            contexts = [blocks.observe(self) for blocks in self.blocks]
            for context in contexts:
                context.__enter__()
            try:
                yield
            finally:
                for context in reversed(contexts):
                    context.__exit__(None, None, None)
        self.forward = False

    def block_enters(self, name: str) -> bool:
        assert self.forward, "an observer was told of a repetition"
        assert self.depth == 0
        self.depth += 1
        self.calls += 1
        chosen = self.chooses(self.calls - 1)
        self.asked += chosen
        return chosen

    def block_inputs(self, nbytes: int) -> None:
        self.nbytes.append(nbytes)

    def block_is_kept(self) -> None:
        """Somebody else has decided."""

    def block_recomputed(self, sizes: Iterable[int]) -> None:
        """Parity counts repetitions by itself."""

    def block_tried(self, begin_s: float, end_s: float) -> None:
        """A trial is no repetition that counts."""
        name = self.repeated[-1]
        while self.repeated and self.repeated[-1] == name:
            self.repeated.pop()
        self.tried.append(name)

    def block_leaves(self) -> None:
        self.depth -= 1


def assert_recompute_parity(
    program: Callable[[Session], Any],
    *,
    choices: tuple[Chooses, ...] = (EVERY, SECOND),
    repeats: bool = True,
    **extra: Any,
) -> Any:
    """The program gives the same with and without recomputing, and blocks really ran again."""
    expected = outcome(program, Session())
    assert not isinstance(expected, Raised), f"the plain run raised {expected}"
    for chooses in choices:
        session = Recomputing(chooses, **extra)
        assert_identical(outcome(program, session), expected)
        assert session.asked > 0
        assert bool(session.repeated) == repeats
    silent = Recomputing(NONE, wants_inputs=True, **extra)
    assert_identical(outcome(program, silent), expected)
    assert not silent.repeated
    assert bool(silent.tried) == repeats
    assert silent.nbytes
    return expected


def recompute_what_may_be(patch: pytest.MonkeyPatch) -> None:
    """Replace the planner by one that recomputes whatever it may."""

    def plan(trace: Any, machine: Any, goal: Any) -> Any:
        made = make_plan(trace, machine, replace(goal, recompute=False))
        return replace(made, recompute=frozenset(recomputable(trace))) if goal.recompute else made

    for name in ("make_plan", "make_plan_apart"):
        patch.setattr(lightning_ssd.scheduling.plan_maker, name, plan)
