"""An in-place edit of a saved tensor raises an error of plain PyTorch's type and meaning, wherever the tensor is."""

import re
import warnings

import pytest
import torch

from tests.parity.inplace_programs import DECIDED, RAISING, SEVERAL, finish
from tests.parity.saved_programs import leaf
from tests.support.helpers import (
    DRAINED,
    EAGER,
    IS_ONE_OF_SEVERAL,
    KEEP,
    MIDDLE,
    PLANNED,
    SMALL,
    Session,
    Setup,
    assert_same,
    needed_by,
    open_offloader,
    outcome,
)

# A first pass under a budget moves everything, under "auto" it keeps everything.
BUDGETED = Setup(activations="auto", recompute_modules="blocks", activation_budget=1 << 24)
SETUPS = (DRAINED, EAGER, MIDDLE, KEEP, SMALL, Setup(verify="full"), PLANNED, BUDGETED)


def failing_node(program):
    """Return the name of the node at which plain PyTorch's backward fails, as anomaly mode tells it."""
    with warnings.catch_warnings(record=True) as said, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        outcome(program, Session())
    (name,) = [m[1] for warning in said if (m := re.match(r"Error detected in (\w+)\.", str(warning.message)))]
    return name


@pytest.mark.parametrize("name", RAISING)
def test_raises_as_plain_pytorch(name, tmp_path):
    """And names the operation that needs the tensor, which is where plain PyTorch fails."""
    plain = assert_same(RAISING[name], tmp_path, setups=SETUPS, raises=True, moves=False)
    assert "modified by an inplace operation" in plain.text
    expected = failing_node(RAISING[name])
    for setup in (EAGER, SMALL, KEEP):
        with open_offloader(tmp_path, setup) as offloader:
            got = outcome(RAISING[name], Session.of(offloader, setup))
        assert got.text == plain.text or needed_by(got.text) == expected


@pytest.mark.parametrize("name", SEVERAL)
def test_an_edit_of_one_of_several_views_raises(name, tmp_path):
    """PyTorch has other words for it; where it looks by itself, they are its own."""
    plain, expected = outcome(SEVERAL[name], Session()), failing_node(SEVERAL[name])
    assert IS_ONE_OF_SEVERAL in plain.text
    for setup in SETUPS:
        with open_offloader(tmp_path, setup) as offloader:
            got = outcome(SEVERAL[name], Session.of(offloader, setup))
        assert got.type == plain.type
        assert got.text == plain.text or needed_by(got.text) == expected, got


@pytest.mark.parametrize("name", ["view of a saved input that is on disk", "saved output", "chunk of constants"])
def test_raises_in_anomaly_mode(name, tmp_path):
    def with_anomaly(session):
        with warnings.catch_warnings():
            # The mode warns that it is on, and prints where the failing operation was called; both are expected.
            warnings.simplefilter("ignore", UserWarning)
            with torch.autograd.set_detect_anomaly(True):
                return RAISING[name](session)

    assert_same(with_anomaly, tmp_path, setups=(DRAINED, KEEP), raises=True, moves=False)


@pytest.mark.parametrize("name", DECIDED)
def test_legal_beside_illegal(name, tmp_path):
    """Programs in which plain PyTorch decides what is legal; we agree."""
    assert_same(DECIDED[name], tmp_path, setups=SETUPS, raises=name == "checkpointed input", moves=False)


def test_edit_of_a_living_tensor_behind_autograd(tmp_path):
    """`.data` hides an edit from PyTorch too: while the tensor lives, backward sees the new values, as without us."""

    def program(session):
        a = leaf()
        base = torch.rand(40, 50)
        with session.saved():
            y = a * base
        session.drain()
        base.data.add_(1)
        return finish(session, y, a)

    assert_same(program, tmp_path, setups=SETUPS)


def test_no_version_is_moved_to_find_out_whose_it_is(tmp_path, monkeypatch):
    """Another thread may be comparing it: a constant that both save, say. Equal versions by chance are told apart."""

    def program(session):
        a, base = leaf(), torch.rand(40, 50)
        base.add_(1)
        hidden = base.data
        with session.saved():
            y = [a * base, a * base, a * base[:], a * base.detach()]
            hidden.add_(1)  # now at version 1 as well, over the same memory
            y.append(a * hidden)
        session.drain()
        return finish(session, y[-1], a)

    def is_seen(tensor):
        pytest.fail("a version was moved")

    monkeypatch.setattr(torch.autograd.graph, "increment_version", is_seen)
    assert_same(program, tmp_path, setups=SETUPS)


def test_legal_edits_stay_legal(tmp_path):
    """Edits of what is not saved, and of results before anything saves them."""

    def program(session):
        a, b = leaf(), leaf()
        with session.saved():
            x = (a * b).add_(1)
            x[3] = 0
            x.relu_()
            y = x.clone().mul_(b)
            z = (y * 2).clamp_(min=0.1).log()
        del x, y
        return finish(session, z, a, b)

    assert_same(program, tmp_path, setups=SETUPS)


def test_a_function_that_sets_an_attribute_called_name(tmp_path):
    """It is no method then that tells the node's name."""

    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.name = "mine"
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * x

    def program(session):
        a = leaf()
        x = a * 2
        with session.saved():
            y = Named.apply(x)
        with torch.no_grad():
            x.add_(1)
        return finish(session, y, a)

    assert_same(program, tmp_path, setups=SETUPS, raises=True, moves=False)
