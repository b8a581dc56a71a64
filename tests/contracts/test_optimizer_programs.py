"""Random optimizers and edits of their states: the bits of plain training, or a refusal; never another number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Optimizer

from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.live_states import LiveStates
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.contracts.optimizer_kinds import KINDS
from tests.contracts.optimizer_programs import ACTIONS, Program, play
from tests.support.optimizer_pairs import opened

pytestmark = pytest.mark.filterwarnings("ignore:this optimizer's states share memory")


@pytest.fixture(autouse=True)
def tiny_subgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that most of a program's states are on the drive between steps."""
    monkeypatch.setattr("lightning_ssd.planning.update_memory._MIN_SUBGROUP_BYTES", 16 << 10)
    monkeypatch.setattr("lightning_ssd.optimizer.step.subgroups.GRANULE", 1024)


@contextmanager
def player(directory: Path, **kwargs: Any) -> Iterator[Callable[[Program], str]]:
    """Plays programs with the files of one offloader."""
    with opened(directory, verify="off", declared=(*KINDS, "Lookahead"), **kwargs) as offloader:

        def verdict(program: Program) -> str:
            made: list[OffloadedOptimizer] = []

            def offload(optimizer: Optimizer) -> Optimizer:
                offloaded = offloader.offload_optimizer(optimizer)
                assert isinstance(offloaded, OffloadedOptimizer)
                made.append(offloaded)
                return offloaded

            try:
                return play(program, offload)
            finally:
                for optimizer in made:
                    optimizer.close()

        yield verdict


def assert_never_wrong(programs: list[Program], directory: Path, **kwargs: Any) -> dict[str, int]:
    counts = {"equal": 0, "refused": 0}
    with player(directory, **kwargs) as verdict:
        for program in programs:
            found = verdict(program)
            assert found in counts, f"{program}: {found}"
            counts[found] += 1
    return counts


EXACT = ("adamw", "sgd", "around", "Momentum", "ReturnsText", "ReturnsNothing", "OwnLoad", "LooksWhenLoaded")
EXACT += ("FlatBuffer",)
LACKS_A_KEY = Program("around", ((), ("add_group",), ()))
"""Its second step raises a KeyError."""
SHARE_MEMORY = ("Views", "TwoNames", "LateAlias", "KeepsParameter", "KeepsGradient", "HoldsStates")
REFUSED = ("owning", "OwnList", "DecaysAll", "OneForAll", "ReturnsNorm", "Clips", "ScheduleFree", "LooksLater")
REFUSED += SHARE_MEMORY


def test_each_optimizer_is_exact_or_refused(spill_dir: Path) -> None:
    """Declared, without edits. ``EvaluatesTwice`` is one or the other, depending on whether there is a closure."""
    assert {*EXACT, *REFUSED, "EvaluatesTwice"} == KINDS.keys()
    with player(spill_dir) as verdict:
        plain = {kind: verdict(Program(kind, ((),) * 5)) for kind in KINDS}
        closed = {kind: verdict(Program(kind, ((), ("use_closure",), ()))) for kind in KINDS}
    assert plain == {kind: "refused" if kind in REFUSED else "equal" for kind in KINDS}
    assert closed == {kind: "refused" if kind in (*REFUSED, "EvaluatesTwice") else "equal" for kind in KINDS}


@pytest.mark.parametrize("kind", ["adamw", "Momentum"])
def test_each_action_is_exact_or_refused(kind: str, spill_dir: Path) -> None:
    with player(spill_dir) as verdict:
        found = {name: verdict(Program(kind, ((), (), ("hold", name), ("zero_held",), ()))) for name in ACTIONS}
    assert found == {name: "refused" if name in ("share", "own_step") else "equal" for name in ACTIONS}


@pytest.mark.parametrize("host_memory", [0, 64 << 10])
def test_random_programs_are_exact_or_refused(host_memory: int, spill_dir: Path) -> None:
    counts = assert_never_wrong(
        [Program.random(seed) for seed in range(host_memory, host_memory + 40)], spill_dir, host_memory=host_memory
    )
    assert counts["equal"] >= 10


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a refusal."""


_step = OffloadedOptimizer.step


def _unknown(self: OffloadedOptimizer, closure: Any = None) -> Any:
    if any("lookahead_step" not in group for group in self.param_groups):
        raise IndexError("lookahead_step")
    return _step(self, closure)


def _refused_late(self: OffloadedOptimizer, closure: Any = None) -> Any:
    loss = _step(self, closure)
    if any("lookahead_step" not in group for group in self.param_groups):
        raise ConfigError("not so")
    return loss


def _read_only(self: LiveStates, key: Any) -> Any:
    """A look at a state that is a copy."""
    return copy.deepcopy(self._states.read(key)) if key in self else {}


_REHEARSE = "optimizer.offloaded_optimizer.rehearse"
_LATER: dict[str, Any] = {
    "optimizer.paged_states.PagedStates._check_others": lambda self, before, given: before,
    "optimizer.paged_states.are_own": lambda *_: True,
    "optimizer.step.stepper.WholeStep.note": _nothing,
}
"""What sees a broken promise in a step."""
MENDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    # What is taken out: by what, and the programs that must find it.
    "owned optimizers": (
        {"optimizer.offloaded_optimizer.refuse_by_kind": _nothing, _REHEARSE: _nothing, **_LATER},
        {"kind": "owning"},
    ),
    "own parameters": (
        {"optimizer.offloaded_optimizer.refuse_undeclared": _nothing, _REHEARSE: _nothing, **_LATER},
        {"kind": "OwnList"},
    ),
    "own parameters, later": (
        {"optimizer.offloaded_optimizer.refuse_undeclared": _nothing, _REHEARSE: _nothing, **_LATER},
        {"kind": "DecaysAll"},
    ),
    "own step": (
        {
            "optimizer.step.contract.refuse_own_step": _nothing,
            "optimizer.offloaded_optimizer.refuse_own_step": _nothing,
        },
        {"kind": "adamw", "action": "own_step"},
    ),
    "edits in place": (
        {"optimizer.live_states.LiveStates.__getitem__": _read_only},
        {"kind": "adamw", "action": "zero"},
    ),
    "edits in hooks": (
        {"optimizer.live_states.LiveStates.__getitem__": _read_only},
        {"kind": "adamw", "action": "edit_in_hooks"},
    ),
    "new values": (
        {"optimizer.live_states.LiveStates.__getitem__": _read_only},
        {"kind": "adamw", "action": "replace"},
    ),
    "deleted states": (
        {"optimizer.live_states.LiveStates.__delitem__": _nothing},
        {"kind": "adamw", "action": "delete_item"},
    ),
    "cleared states": ({"optimizer.live_states.LiveStates.clear": _nothing}, {"kind": "adamw", "action": "clear"}),
    "surgery": ({"optimizer.live_states.LiveStates.__setitem__": _nothing}, {"kind": "adamw", "action": "densify"}),
    "assigned states": (
        {"optimizer.offloaded_optimizer.OffloadedOptimizer._look_for_others": _nothing},
        {"kind": "adamw", "action": "assign"},
    ),
    "one state for two": ({"optimizer.live_states.LiveStates.check": _nothing}, {"kind": "adamw", "action": "share"}),
    "one state for all": ({_REHEARSE: _nothing, **_LATER}, {"kind": "OneForAll"}),
    **{name: ({_REHEARSE: _nothing, **_LATER}, {"kind": name}) for name in SHARE_MEMORY},
    "looked at later": (
        {
            _REHEARSE: _nothing,
            **_LATER,
            # Or a state might come back to where it was.
            "optimizer.store.buffers.BufferPool.trim": lambda pool, _: pool.clear(),
        },
        {"kind": "LooksLater"},
    ),
    "looked at when loaded": (
        {"optimizer.checkpoint.loading._own_setstate": _nothing},
        {"kind": "LooksWhenLoaded", "action": "checkpoint"},
    ),
    "held by the user": ({"optimizer.live_states.is_held": lambda *_: False}, {"kind": "adamw", "action": "zero_held"}),
    "returned values": (
        {_REHEARSE: _nothing, "optimizer.step.stepper.WholeStep.result": None},
        {"kind": "ReturnsText"},
    ),
    "hidden norms": ({_REHEARSE: _nothing}, {"kind": "Clips"}),
    "hooks of a base class": (
        {"optimizer.step.stepper._NestedHooks.values": lambda _: ()},
        {"kind": "ReturnsText", "action": "edit_in_hooks"},
    ),
    "a load of its own": (
        {"optimizer.offloaded_optimizer.OffloadedOptimizer._loads_by_itself": False},
        {"kind": "OwnLoad"},
    ),
    "another error": ({"optimizer.offloaded_optimizer.OffloadedOptimizer.step": _unknown}, {"kind": "around"}),
    "a late refusal": ({"optimizer.offloaded_optimizer.OffloadedOptimizer.step": _refused_late}, {"kind": "around"}),
}


@pytest.mark.parametrize("name", MENDS)
def test_what_is_not_mended_is_found(name: str, spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced, wanted = MENDS[name]
    program = DIRECTED.get(name) or Program(wanted["kind"], ((), (), (wanted.get("action", "read"),), (), ()))
    with player(spill_dir) as verdict:
        assert verdict(program) in ("equal", "refused")
        for place, other in replaced.items():
            monkeypatch.setattr(f"lightning_ssd.{place}", other)
        try:
            found = verdict(program)
        except Exception as error:  # as loud as it gets
            found = repr(error)
    assert found not in ("equal", "refused")


DIRECTED = {
    "another error": LACKS_A_KEY,
    "a late refusal": LACKS_A_KEY,
    "held by the user": Program("adamw", ((), ("hold",), (), ("zero_held",), ())),
    "looked at later": Program("LooksLater", ((),) * 9),
    "returned values": Program("ReturnsText", ((), ())),
    "a load of its own": Program("OwnLoad", ((), ("checkpoint",), ("checkpoint",), ())),
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("host_memory", [0, 64 << 10])
def test_many_random_programs_are_exact_or_refused(host_memory: int, spill_dir: Path) -> None:
    programs = [Program.random(seed) for seed in range(host_memory, host_memory + 1_000)]
    assert_never_wrong(programs, spill_dir, host_memory=host_memory)
