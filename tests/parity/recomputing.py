"""A session that recomputes chosen blocks, and the comparison with the same training kept."""

import functools
from contextlib import contextmanager
from dataclasses import replace

import lightning_ssd.scheduling.plan_maker
from lightning_ssd.planning.planner import make_plan
from lightning_ssd.planning.recompute_trace import recomputable
from lightning_ssd.recompute.block_discovery import find_blocks
from lightning_ssd.recompute.blocks import Blocks
from tests.support.helpers import Raised, Session, assert_identical, outcome

EVERY = lambda index: True  # noqa: E731
SECOND = lambda index: index % 2 == 1  # noqa: E731
NONE = lambda index: False  # noqa: E731


class Recomputing(Session):
    """Runs a program with some of the block calls of each pass recomputed; counts what is repeated in backward."""

    recomputes_all = False

    def __init__(self, chooses, *, classes=(), wants_inputs=False, **extra):
        super().__init__(**extra)
        self.chooses = chooses
        self.classes = classes
        self.wants_inputs = wants_inputs
        self.blocks = []
        self.calls = self.asked = self.depth = 0
        self.repeated = []
        self.tried = []
        self.forward = False
        self.nbytes = []

    def register(self, module):
        super().register(module)
        found = find_blocks(module, self.classes)
        assert found, "nothing to recompute"
        self.blocks.append(Blocks(found))
        for name, block in found.items():
            for part in block.modules():
                if not any(True for _ in part.children()):
                    part.register_forward_pre_hook(functools.partial(self._runs, name))

    def _runs(self, name, module, args):
        if not self.forward:
            self.repeated.append(name)

    @contextmanager
    def saved(self):
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

    def block_enters(self, name):
        assert self.forward, "an observer was told of a repetition"
        assert self.depth == 0
        self.depth += 1
        self.calls += 1
        chosen = self.chooses(self.calls - 1)
        self.asked += chosen
        return chosen

    def block_inputs(self, nbytes):
        self.nbytes.append(nbytes)

    def block_is_kept(self):
        """Somebody else has decided."""

    def block_recomputed(self, sizes):
        """Parity counts repetitions by itself."""

    def block_tried(self, begin_s, end_s):
        """A trial is no repetition that counts."""
        name = self.repeated[-1]
        while self.repeated and self.repeated[-1] == name:
            self.repeated.pop()
        self.tried.append(name)

    def block_leaves(self):
        self.depth -= 1


def assert_recompute_parity(program, *, choices=(EVERY, SECOND), **extra):
    """The program gives the same with and without recomputing, and blocks really ran again."""
    expected = outcome(program, Session())
    assert not isinstance(expected, Raised), f"the plain run raised {expected}"
    for chooses in choices:
        session = Recomputing(chooses, **extra)
        assert_identical(outcome(program, session), expected)
        assert session.asked > 0
        assert session.repeated
    silent = Recomputing(NONE, wants_inputs=True, **extra)
    assert_identical(outcome(program, silent), expected)
    assert not silent.repeated
    assert silent.tried
    assert silent.nbytes
    return expected


def recompute_what_may_be(patch):
    """Replace the planner by one that recomputes whatever it may."""

    def plan(trace, machine, goal):
        made = make_plan(trace, machine, replace(goal, recompute=False))
        return replace(made, recompute=frozenset(recomputable(trace))) if goal.recompute else made

    for name in ("make_plan", "make_plan_apart"):
        patch.setattr(lightning_ssd.scheduling.plan_maker, name, plan)
