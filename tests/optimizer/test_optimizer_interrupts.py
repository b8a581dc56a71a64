"""Ctrl-C at each point of what happens to states between steps: nothing of it is lost, or the loss is told."""

import copy
import itertools
from functools import partial

import pytest
import torch

from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.support.interrupted_points import PointsIn
from tests.support.optimizer_pairs import Pair, adamw, assert_same_states, offloaded, opened

pytestmark = pytest.mark.usefixtures("small_subgroups")

_STATES = (
    "optimizer/offloaded_optimizer.py",
    "optimizer/checkpoint/loading.py",
    "optimizer/live_states.py",
    "optimizer/paged_states.py",
    "optimizer/step/partition.py",
    "optimizer/step/layout.py",
    "optimizer/store/store.py",
    "optimizer/store/buffers.py",
)


def interrupt(*args):
    raise KeyboardInterrupt


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _zero(optimizer, p):
    optimizer.state[p]["exp_avg"].zero_()


def _restart(optimizer, p):
    optimizer.state[p]["momentum_buffer"] = None


def _replace(optimizer, p):
    optimizer.state[p] = {"momentum_buffer": torch.ones_like(p)}


def _hold(optimizer, p):
    optimizer.state[p]["momentum_buffer"].fill_(3.0)


def _delete(optimizer, p):
    optimizer.state.pop(p, None)


def _load(optimizer, p):
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 1.0
    for state in saved["state"].values():
        state["exp_avg"].fill_(3.0)
    optimizer.load_state_dict(saved)


def _load_inner(optimizer, p):
    """As a caller does who has kept the optimizer that was offloaded."""
    _load(optimizer.inner if isinstance(optimizer, OffloadedOptimizer) else optimizer, p)


def _step(optimizer, p):
    optimizer.step()


def _nothing(optimizer, p):
    pass


PROGRAMS = {
    "zero": (adamw, _nothing, _zero),
    "restart": (_momentum, _nothing, _restart),
    "replace": (_momentum, _nothing, _replace),
    "replace what is lent": (_momentum, _hold, _replace),
    "delete": (_momentum, _nothing, _delete),
    "delete what is lent": (_momentum, _hold, _delete),
    "load": (adamw, _nothing, _load),
    "step after zero": (adamw, _zero, _step),
    "step after restart": (_momentum, _restart, _step),
    "step after replace": (_momentum, _replace, _step),
    "step after a load of the inner": (adamw, _load_inner, _step),
}
"""What is optimized by, what is done before, and what is interrupted."""
DEFAULT = ("zero", "replace what is lent", "delete what is lent", "load", "step after zero")


@pytest.mark.parametrize(
    "is_whole", [False, pytest.param(True, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3700)])]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.exhaustive) for name in PROGRAMS]
)
def test_at_each_point_it_is_done_or_not_or_known_to_be_incomplete(name, is_whole, spill_dir):
    """And training goes on with the same bits.

    Args:
        name: of the program.
        is_whole: whether interrupts come at each point of the whole package, or at a third of those of the states.
            States are looked at after every other one, which may put right what an interrupt has left: then after the
            others.
    """
    make, prepare, act = PROGRAMS[name]
    pair = Pair(make, ((128, 150), (64, 40), (64, 40), (300, 200), (64, 40)))
    points = PointsIn() if is_whole else PointsIn(*_STATES, one_in=3)
    counts = dict.fromkeys(("done", "not begun", "incomplete", "not looked"), 0)
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        saved, start = copy.deepcopy(pair.twin.state_dict()), [p.detach().clone() for p in pair.plain]
        for number in itertools.count():
            for parameters, each in ((pair.mine, optimizer), (pair.plain, pair.twin)):
                torch._foreach_copy_([p.data for p in parameters], start)
                each.load_state_dict(copy.deepcopy(saved))
            pair.set_gradients()
            chosen = number % len(pair.mine)
            mine, plain = pair.mine[chosen], pair.plain[chosen]
            prepare(optimizer, mine)
            prepare(pair.twin, plain)
            old = copy.deepcopy(pair.twin.state_dict())
            act(pair.twin, plain)
            where = points.interrupt(partial(act, optimizer, mine))
            if where is None:
                pair.check(optimizer)
                break
            if optimizer._broken is not None:
                counts["incomplete"] += 1
                with pytest.raises(RuntimeError, match="incomplete"):
                    optimizer.step()
                continue
            is_done = act is _step and not all(map(torch.equal, pair.mine, start))
            if is_whole is (number % 2 == 1):
                got, new = optimizer.state_dict(), pair.twin.state_dict()
                is_done = is_same(got, new)
                assert is_done or is_same(got, old), where
                counts["done" if is_done else "not begun"] += 1
            else:
                counts["not looked"] += 1
            if not is_done:
                act(optimizer, mine)
            try:
                pair.step(optimizer)
                pair.check(optimizer)
            except AssertionError as error:
                raise AssertionError(where) from error
    assert counts["not begun"] + counts["done"] > 2, counts
    assert counts["incomplete"] > 5 or act not in (_load, _step), counts


def is_same(one, other):
    """Whether two ``state_dict``s have the same bits. An empty state is none."""
    one, other = ({**each, "state": {n: state for n, state in each["state"].items() if state}} for each in (one, other))
    try:
        assert_same_states(one, other)
    except AssertionError:
        return False
    return True


def test_states_are_not_lost_when_taking_them_over_is_interrupted(spill_dir, monkeypatch):
    pair = Pair(adamw)
    pair.step(pair.inner)
    expected = copy.deepcopy(pair.inner.state_dict())

    monkeypatch.setattr("lightning_ssd.optimizer.live_states.LiveStates.clear", interrupt)
    with opened(spill_dir) as offloader, pytest.raises(KeyboardInterrupt):
        offloader.offload_optimizer(pair.inner)
    assert_same_states(pair.inner.state_dict(), expected)


def test_a_state_dict_that_is_interrupted_leaves_the_hooks(spill_dir):
    pair = Pair(adamw, ((64, 40),) * 3)
    points = PointsIn(
        "optimizer/checkpoint/state_dict.py", "optimizer/step/stepper.py", "optimizer/offloaded_optimizer.py"
    )
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        optimizer.register_state_dict_post_hook(lambda optimizer, saved: {**saved, "mark": 1})
        pair.step(optimizer)
        groups = optimizer.param_groups
        while (where := points.interrupt(optimizer.state_dict)) is not None:
            assert "mark" in optimizer.state_dict(), where
            assert pair.inner.state is optimizer._live
            assert pair.inner.param_groups is groups
