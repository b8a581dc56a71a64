"""Ctrl-C at each point of what happens to states between steps: nothing of it is lost, or the loss is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.support.interrupted_points import PointsIn
from tests.support.optimizer_pairs import (
    Nested,
    Pair,
    adamw,
    assert_same_parameters,
    assert_same_states,
    offloaded,
    opened,
    partition_of,
)

pytestmark = pytest.mark.usefixtures("small_subgroups")

_STATES = (
    "optimizer/live_states.py",
    "optimizer/paged_states.py",
    "optimizer/step/partition.py",
    "optimizer/step/layout.py",
    "optimizer/store/store.py",
    "optimizer/store/buffers.py",
)


def interrupt(*args: Any) -> Any:
    raise KeyboardInterrupt


def _momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _zero(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state[p]["exp_avg"].zero_()


def _restart(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state[p]["momentum_buffer"] = None


def _replace(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state[p] = {"momentum_buffer": torch.ones_like(p)}


@pytest.mark.parametrize(("make", "edit"), [(adamw, _zero), (_momentum, _restart), (_momentum, _replace)])
@pytest.mark.parametrize("is_cut_short", [False, True], ids=["its way down", "the edit"])
def test_an_edited_state_outlives_an_interrupt_before_the_step(
    is_cut_short: bool,
    make: Callable[[Any], Optimizer],
    edit: Callable[[Optimizer, torch.Tensor], None],
    spill_dir: Path,
) -> None:
    """It goes back to its drive then, with other parameters' states in the same memory."""
    pair = Pair(make, ((128, 150), (64, 40), (64, 40), (64, 40), (300, 200), (128, 150), (128, 150), (128, 150)))
    points, num = PointsIn(*_STATES), 0
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        while True:
            pair.set_gradients()
            mine, plain = pair.mine[num % 8], pair.plain[num % 8]
            if is_cut_short:
                where = points.interrupt(partial(edit, optimizer, mine))
            edit(optimizer, mine)
            if not is_cut_short:
                where = points.interrupt(optimizer.step)
            if where is None or optimizer._broken is not None:  # the step has begun
                break
            num += 1
            optimizer.step()
            edit(pair.twin, plain)
            pair.twin.step()
            try:
                pair.check(optimizer)
            except AssertionError as error:
                raise AssertionError(where) from error
    assert num > (3 if is_cut_short else 50)


def test_states_that_the_inner_optimizer_has_loaded_outlive_an_interrupt_before_the_step(spill_dir: Path) -> None:
    pair = Pair(adamw, ((64, 40),) * 6)
    points, num = PointsIn("optimizer/offloaded_optimizer.py", "optimizer/live_states.py"), 0
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        saved = copy.deepcopy(pair.twin.state_dict())
        while True:
            for state in saved["state"].values():
                state["exp_avg"].fill_(num)
            pair.inner.load_state_dict(copy.deepcopy(saved))
            pair.twin.load_state_dict(copy.deepcopy(saved))
            pair.set_gradients()
            where = points.interrupt(optimizer.step)
            if where is None or optimizer._broken is not None:
                break
            num += 1
            optimizer.step()
            pair.twin.step()
            pair.check(optimizer)
    assert num > 50


def test_states_are_not_lost_when_taking_them_over_is_interrupted(
    spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(adamw)
    pair.step(pair.inner)
    expected = copy.deepcopy(pair.inner.state_dict())

    monkeypatch.setattr("lightning_ssd.optimizer.live_states.LiveStates.clear", interrupt)
    with opened(spill_dir) as offloader, pytest.raises(KeyboardInterrupt):
        offloader.offload_optimizer(pair.inner)
    assert_same_states(pair.inner.state_dict(), expected)


def test_a_step_is_incomplete_until_its_groups_have_changed(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(Nested)

    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr("lightning_ssd.optimizer.step.stepper.WholeStep.apply", interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        with pytest.raises(RuntimeError, match="incomplete"):
            optimizer.step()


def test_a_load_is_complete_or_incomplete_or_has_not_begun(spill_dir: Path) -> None:
    """At each point."""
    pair = Pair(adamw, ((128, 150), (64, 40), (300, 200)))
    points = PointsIn(
        "optimizer/offloaded_optimizer.py",
        "optimizer/checkpoint/loading.py",
        "optimizer/paged_states.py",
        "optimizer/live_states.py",
        "optimizer/step/partition.py",
    )
    counts = {"incomplete": 0, "not begun": 0}
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        old = copy.deepcopy(optimizer.state_dict())
        new = copy.deepcopy(old)
        new["param_groups"][0]["lr"] = 1.0
        for state in new["state"].values():
            state["exp_avg"].fill_(3.0)
        while points.interrupt(partial(optimizer.load_state_dict, new)) is not None:
            if optimizer._broken is None:
                is_new = optimizer.param_groups[0]["lr"] == 1.0
                assert_same_states(optimizer.state_dict(), new if is_new else old)
                counts["not begun"] += 1
            else:
                with pytest.raises(RuntimeError, match="incomplete"):
                    optimizer.step()
                counts["incomplete"] += 1
            optimizer.load_state_dict(old)
            assert_same_states(optimizer.state_dict(), old)
        wrong = {**new, "param_groups": []}
        optimizer.load_state_dict(old)
        with pytest.raises(ValueError, match="group"):
            optimizer.load_state_dict(wrong)
        assert_same_states(optimizer.state_dict(), old)
    assert min(counts.values()) > 5


def test_a_state_dict_that_is_interrupted_leaves_the_hooks(spill_dir: Path) -> None:
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


class Own(torch.optim.Adam):
    """Not one that is known to be elementwise."""


@pytest.mark.parametrize("kind", [torch.optim.Adam, Own])
def test_a_step_that_is_interrupted_leaves_the_optimizer_as_it_was(
    kind: type[torch.optim.Adam], spill_dir: Path
) -> None:
    pair = Pair(lambda p: kind(p, fused=True), ((64, 40),) * 3)
    points = PointsIn("optimizer/offloaded_optimizer.py", "optimizer/step/stepper.py")
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        optimizer.register_step_pre_hook(lambda *_: None)
        pair.step(optimizer)
        before = {name: value for name, value in vars(pair.inner).items() if name != "_opt_called"}
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)  # type: ignore[attr-defined]
        while (where := points.interrupt(optimizer.step)) is not None:
            optimizer._broken = None
            after = {name: value for name, value in vars(pair.inner).items() if name != "_opt_called"}
            assert before.keys() == after.keys(), where
            assert all(after[name] is before[name] for name in before), where


def _delete(optimizer: Optimizer, p: torch.Tensor) -> None:
    del optimizer.state[p]


@pytest.mark.parametrize("edit", [_replace, _delete])
@pytest.mark.parametrize("is_lent", [False, True])
def test_an_edit_that_is_interrupted_is_made_or_not(
    edit: Callable[[Optimizer, torch.Tensor], None], is_lent: bool, spill_dir: Path
) -> None:
    """Of a parameter in several subgroups."""
    pair = Pair(_momentum, ((64, 40), (300, 200), (64, 40)))
    points, p = PointsIn(*_STATES), pair.mine[1]
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        assert len(partition_of(optimizer).places[1]) > 1
        while True:
            optimizer.state[p] = {"momentum_buffer": torch.full_like(p, 2.0)}
            optimizer._live.settle()
            if is_lent:
                optimizer.state[p]["momentum_buffer"].fill_(3.0)
            old = {3.0} if is_lent else {2.0}
            if (where := points.interrupt(partial(edit, optimizer, p))) is None:
                break
            state = optimizer.state.get(p) or {}
            values = set(state["momentum_buffer"].flatten().tolist()) if state else None
            assert values in (old, {1.0} if edit is _replace else None), where


def test_a_late_parameter_is_updated_whatever_was_interrupted(spill_dir: Path) -> None:
    pair = Pair(adamw, ((128, 150), (64, 40)))
    points = PointsIn(
        "optimizer/paged_states.py",
        "optimizer/step/partition.py",
        "optimizer/store/store.py",
        "optimizer/offloaded_optimizer.py",
        "optimizer/step/path_assignment.py",
    )
    num = 0
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        while True:
            late = torch.nn.Parameter(torch.ones(100, 200))
            where = points.interrupt(partial(optimizer.add_param_group, {"params": [late]}))
            if where is None:
                break
            num += 1
            pair.mine.append(late)
            plain = [torch.nn.Parameter(late.detach().clone())]
            pair.plain += plain
            if all(late is not p for group in optimizer.param_groups for p in group["params"]):
                optimizer.add_param_group({"params": [late]})
            pair.twin.add_param_group({"params": plain})
            pair.step(optimizer)
            pair.check()
            for parameters, each in ((pair.mine, optimizer), (pair.plain, pair.twin)):
                del parameters[2:-1], each.param_groups[1:-1]  # or it would take longer each time
        assert_same_parameters(pair.mine, pair.plain)
    assert num > 50


def test_closing_after_a_late_parameter_that_was_interrupted(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(adamw)

    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr("lightning_ssd.optimizer.paged_states.assign_paths", interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(300, 200))]})
    assert_same_parameters(pair.mine, pair.plain)
