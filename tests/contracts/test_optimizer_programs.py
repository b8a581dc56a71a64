"""Random optimizers and edits of their states: the bits of plain training, or a refusal; never another number."""

import copy
from contextlib import contextmanager

import pytest

from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.contracts.optimizer_kinds import KINDS
from tests.contracts.optimizer_programs import ACTIONS, Program, play
from tests.support.faults import eio
from tests.support.optimizer_pairs import opened

pytestmark = pytest.mark.filterwarnings("ignore:this optimizer's states share memory")


@pytest.fixture(autouse=True)
def tiny_subgroups(monkeypatch):
    """So that most of a program's states are on the drive between steps."""
    monkeypatch.setattr("lightning_ssd.planning.update_memory._MIN_SUBGROUP_BYTES", 16 << 10)
    monkeypatch.setattr("lightning_ssd.optimizer.step.subgroups.GRANULE", 1024)


@contextmanager
def player(directory, *, fail_write=None, **kwargs):
    """Plays programs with the files of one offloader, on a drive that fails as it is told."""
    drives = []
    with opened(directory, verify="off", declared=(*KINDS, "Lookahead"), faults=drives, **kwargs) as offloader:

        def verdict(program):
            made = []

            def offload(optimizer):
                offloaded = offloader.offload_optimizer(optimizer)
                drives[-1].fail_write = fail_write
                made.append(offloaded)
                return offloaded

            try:
                return play(program, offload)
            finally:
                for optimizer in made:
                    optimizer.close()

        yield verdict


def assert_never_wrong(programs, directory, **kwargs):
    counts = {"equal": 0, "refused": 0}
    with player(directory, **kwargs) as verdict:
        for program in programs:
            found = verdict(program)
            assert found in counts, f"{program}: {found}"
            counts[found] += 1
    return counts


EXACT = ("adamw", "sgd", "around", "Momentum", "ReturnsText", "OwnLoad")
LACKS_A_KEY = Program("around", ((), ("add_group",), ()))
"""Its second step raises a KeyError."""
SHARE_MEMORY = ("Views", "TwoNames", "KeepsGradient")
REFUSED = ("owning", "OwnList", "OneForAll", *SHARE_MEMORY)


def test_each_optimizer_is_exact_or_refused(spill_dir):
    """Declared, without edits."""
    assert {*EXACT, *REFUSED} == KINDS.keys()
    with player(spill_dir) as verdict:
        plain = {kind: verdict(Program(kind, ((),) * 5)) for kind in KINDS}
        closed = {kind: verdict(Program(kind, ((), ("use_closure",), ()))) for kind in KINDS}
    assert plain == closed == {kind: "refused" if kind in REFUSED else "equal" for kind in KINDS}


@pytest.mark.parametrize("kind", ["adamw", "Momentum"])
def test_each_action_is_exact_or_refused(kind, spill_dir):
    with player(spill_dir) as verdict:
        found = {name: verdict(Program(kind, ((), (), ("hold", name), ("zero_held",), ()))) for name in ACTIONS}
    assert found == {name: "refused" if name in ("share", "own_step") else "equal" for name in ACTIONS}


def now_and_then(index):
    """Fail a write, and the next one."""
    return eio() if index % 37 in (5, 6) else None


MANY = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(3700)]


@pytest.mark.filterwarnings("ignore:optimizer states could not be written")
@pytest.mark.parametrize(("host_memory", "fail_write"), [(0, now_and_then), (64 << 10, None)])
@pytest.mark.parametrize("num", [30, pytest.param(1_000, marks=MANY)])
def test_random_programs_are_exact_or_refused(num, host_memory, fail_write, spill_dir):
    programs = [Program.random(seed) for seed in range(host_memory, host_memory + num)]
    found = assert_never_wrong(programs, spill_dir, host_memory=host_memory, fail_write=fail_write)
    assert found["equal"] >= num / 3


def _nothing(*args, **kwargs):
    """In the place of a refusal."""


_step = OffloadedOptimizer.step


def _unknown(self, closure=None):
    if any("lookahead_step" not in group for group in self.param_groups):
        raise IndexError("lookahead_step")
    return _step(self, closure)


def _refused_late(self, closure=None):
    loss = _step(self, closure)
    if any("lookahead_step" not in group for group in self.param_groups):
        raise ConfigError("not so")
    return loss


def _unheard(self, step):
    """A call whose result is not noted."""
    step() if self._closure is None else step(self._closure)
    self.returned = [None]


def _read_only(self, key):
    """A look at a state that is a copy."""
    return copy.deepcopy(self._states.read(key)) if key in self else {}


_OPTIMIZER, _STATES, _STEP = "optimizer.offloaded_optimizer", "optimizer.live_states", "optimizer.step"
_LATER = {
    f"{_OPTIMIZER}.rehearse": _nothing,
    "optimizer.paged_states._check_others": _nothing,
    "optimizer.paged_states.are_own": lambda *_: True,
    f"{_STEP}.stepper.WholeStep.note": _nothing,
}
"""What sees a broken promise when an optimizer is wrapped, and in a step."""
_UNDECLARED = {f"{_OPTIMIZER}.refuse_undeclared": _nothing, **_LATER}
_COPIES = {f"{_STATES}.LiveStates.__getitem__": _read_only}


def _with(kind, action="read"):
    return Program(kind, ((), (), (action,), (), ()))


MENDS = {
    # What is taken out: by what, and the program that must find it.
    "owned optimizers": ({f"{_OPTIMIZER}.refuse_by_kind": _nothing, **_LATER}, _with("owning")),
    "own parameters": (_UNDECLARED, _with("OwnList")),
    "own step": (
        dict.fromkeys((f"{_STEP}.contract.refuse_own_step", f"{_OPTIMIZER}.refuse_own_step"), _nothing),
        _with("adamw", "own_step"),
    ),
    "edits in place": (_COPIES, _with("adamw", "zero")),
    "edits in hooks": (_COPIES, _with("adamw", "edit_in_hooks")),
    "new values": (_COPIES, _with("adamw", "replace")),
    "deleted states": ({f"{_STATES}.LiveStates.__delitem__": _nothing}, _with("adamw", "delete_item")),
    "cleared states": ({f"{_STATES}.LiveStates.clear": _nothing}, _with("adamw", "clear")),
    "surgery": ({f"{_STATES}.LiveStates.__setitem__": _nothing}, _with("adamw", "densify")),
    "assigned states": ({f"{_OPTIMIZER}.OffloadedOptimizer._look_for_others": _nothing}, _with("adamw", "assign")),
    "one state for two": ({f"{_STATES}.LiveStates.check": _nothing}, _with("adamw", "share")),
    **{kind: (_LATER, _with(kind)) for kind in ("OneForAll", *SHARE_MEMORY)},
    "held by the user": (
        {f"{_STATES}.is_held": lambda *_: False},
        Program("adamw", ((), ("hold",), (), ("zero_held",), ())),
    ),
    "returned values": (
        {f"{_OPTIMIZER}.rehearse": _nothing, f"{_STEP}.stepper.WholeStep.call": _unheard},
        Program("ReturnsText", ((), ())),
    ),
    "hooks of a base class": (
        {f"{_STEP}.stepper._NestedHooks.values": lambda _: ()},
        _with("ReturnsText", "edit_in_hooks"),
    ),
    "a load of its own": (
        {f"{_OPTIMIZER}.OffloadedOptimizer._loads_by_itself": False},
        Program("OwnLoad", ((), ("checkpoint",), ("checkpoint",), ())),
    ),
    "another error": ({f"{_OPTIMIZER}.OffloadedOptimizer.step": _unknown}, LACKS_A_KEY),
    "a late refusal": ({f"{_OPTIMIZER}.OffloadedOptimizer.step": _refused_late}, LACKS_A_KEY),
}
CHEAP = ("own parameters", "edits in place", "OneForAll", "held by the user", "a late refusal")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.exhaustive) for name in MENDS]
)
def test_what_is_not_mended_is_found(name, spill_dir, monkeypatch):
    replaced, program = MENDS[name]
    with player(spill_dir) as verdict:
        assert verdict(program) in ("equal", "refused")
        for place, other in replaced.items():
            monkeypatch.setattr(f"lightning_ssd.{place}", other)
        try:
            found = verdict(program)
        except Exception as error:  # as loud as it gets
            found = repr(error)
    assert found not in ("equal", "refused")
