"""What a block depends on changes between forward and backward: equal bits, or an error of ours, in every mode."""

import random

import pytest
import torch

from lightning_ssd.errors import RecomputeError
from lightning_ssd.recompute.call_state import CallState
from lightning_ssd.recompute.fingerprint import Fingerprint
from tests.contracts.module_programs import CHANGES, ModuleProgram
from tests.parity.recomputing import recompute_what_may_be
from tests.support.helpers import Raised, Session, Setup, assert_identical, open_offloader, outcome

MODES = {
    "keep": Setup(activations="keep", drained=False),
    "offload": Setup(drained=False),
    "recompute": Setup(activations="recompute", drained=False),
    "recompute, every byte": Setup(activations="recompute", drained=False, verify="full"),
    "recompute_offload": Setup(activations="recompute_offload", drained=False),
    "auto": Setup(activations="auto", activation_budget=1 << 26, drained=False, settled=True),
    "auto by consent": Setup(
        activations="auto", activation_budget=1 << 26, drained=False, settled=True, recompute_modules="blocks"
    ),
}


@pytest.fixture(autouse=True)
def _recomputes_what_it_may(monkeypatch):
    recompute_what_may_be(monkeypatch)


def run(program, mode, directory):
    """Compare with plain PyTorch. Returns how often each step was refused."""
    expected = outcome(program, Session())
    assert not isinstance(expected, Raised), expected
    setup = MODES[mode]
    with open_offloader(directory, setup) as offloader:
        assert_identical(outcome(program, Session.of(offloader, setup)), expected, f"{program.changes}, {mode}")
    return program.errors


@pytest.mark.parametrize("name", CHANGES)
def test_each_change(name, tmp_path):
    is_refused = CHANGES[name].refused
    errors = run(ModuleProgram([name], steps=2), "recompute", tmp_path)
    assert bool(errors[0]) == is_refused, "refused instead of put back, or the other way round"
    assert not errors[1], "a block that was refused is kept from then on"


CHEAP = ("attribute for each forward", "buffer edited", "data of a parameter swapped", "out of reach")


def cheap(names):
    """Names, of which those that are not cheap are exhaustive."""
    return [pytest.param(name, marks=() if name in CHEAP else pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", cheap(CHANGES))
def test_each_change_under_plans(name, tmp_path):
    errors = run(ModuleProgram([name], steps=4), "auto by consent", tmp_path)
    num_untried = name == "parametrize.cached"  # which changes the second call of a step, and the first is on trial
    assert sum(map(bool, errors)) == num_untried, "a plan keeps what a trial has shown"
    if CHANGES[name].refused:
        assert run(ModuleProgram([name], steps=4), "auto", tmp_path) == [0] * 4, "without consent"


MANY = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(3700)]


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(1000, 1100), marks=MANY)], ids=str)
def test_random_programs_in_random_modes(seeds, tmp_path):
    for seed in seeds:
        run(ModuleProgram.of_seed(seed), random.Random(seed).choice(sorted(MODES)), tmp_path)


# -- it finds what it is there to find -------------------------------------------------------------------------------


def _without_state(patch):
    patch.setattr(CallState, "as_before", lambda state, run, *args, **kwargs: run(*args, **kwargs))


def _without_looking(patch):
    for name in ("change", "edited_container"):
        patch.setattr(CallState, name, lambda state: None)


# PyTorch's checkpoint looks after some by itself, or they change nothing here; some have no guard but the fingerprint.
MENDS = {
    name: _without_looking if change.refused else _without_state
    for name, change in CHANGES.items()
    if name.split(" in ")[0] not in ("nothing", "autocast", "default device", "deterministic algorithms")
}


@pytest.mark.parametrize("name", cheap(MENDS))
def test_a_mend_taken_out_is_found(name, tmp_path, monkeypatch):
    """Without the guard the fingerprint still refuses; without both, wrong numbers are found by the comparison."""
    program = ModuleProgram([name], steps=1)
    MENDS[name](monkeypatch)
    assert sum(run(program, "recompute", tmp_path)) > 0, "the fingerprint did not notice"
    monkeypatch.setattr(Fingerprint, "difference", lambda one, other: None)
    with pytest.raises(AssertionError, match=r"the bits differ|Raised|refused is recomputed"):
        run(program, "recompute", tmp_path)


# -- the fingerprint -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "place", "full", "is_seen"),
    [(0, 251, False, True), (0, 7, False, False), (1, 7, False, True), (0, 7, True, True), (2, 0, False, True)],
)
def test_one_element_of_a_saved_tensor(index, place, full, is_seen):
    """Every 251st of a large one; any one of the last large one and of small ones; any at all where that is asked."""
    saved = [torch.randn(8, 512, 96), torch.randn(8, 512, 96).transpose(1, 2), torch.tensor([float("nan"), 0.0])]
    first = Fingerprint(full=full)
    for tensor in saved:
        first.add(tensor)
    first.close()
    for is_changed in (False, True):
        again = Fingerprint(full=full, frontier=first.frontier)
        for number, tensor in enumerate(saved):
            copy = tensor.clone()
            if is_changed and number == index:
                values = copy.flatten()
                values[place] = 3.0
                copy = values.view(tensor.shape)
            again.add(copy)
        again.close()
        assert (first.difference(again) is not None) == (is_changed and is_seen)


def test_where_a_tensor_lies_in_its_storage_is_no_difference():
    """One that comes back may lie at another place, where its bytes are at no multiple of eight."""
    storage = torch.randn(40_001)
    first = Fingerprint(full=True)
    first.add(storage[1:])
    first.close()
    for bytes_again in (storage[1:].clone(), storage[:-1]):
        again = Fingerprint(full=True, frontier=first.frontier)
        again.add(bytes_again)
        again.close()
        assert (first.difference(again) is None) == torch.equal(bytes_again, storage[1:])


class SavesIntegers(torch.autograd.Function):
    """Saves what a kernel has reserved and not written, as far as anybody can tell."""

    seeds = iter(range(10**6))

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(torch.tensor(next(SavesIntegers.seeds), dtype=torch.uint64), index)
        return x[index]

    @staticmethod
    def backward(ctx, *grads):
        return grads[0][ctx.saved_tensors[1].argsort()], None


class Shuffles(torch.nn.Module):
    """In an order that lies out of reach."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        COUNTS.append(1)
        return SavesIntegers.apply(self.linear(x), torch.tensor(ORDERS[-1]))


COUNTS = []
ORDERS = [[0, 1, 2]]


def test_integers_that_nobody_has_written_are_no_difference(tmp_path):
    """The block runs once more to find out, the first time; where the output differs, too, it is an error."""
    torch.manual_seed(1)
    net = torch.nn.ModuleList([Shuffles(), Shuffles()])
    with open_offloader(tmp_path, MODES["recompute"]) as offloader:
        offloader.register_module(net)
        for num_calls in (6, 4):
            COUNTS.clear()
            with offloader.saved_tensors():
                y = net[1](net[0](torch.ones(3, 4)))
            y.sum().backward()
            offloader.end_backward()
            assert len(COUNTS) == num_calls
        with offloader.saved_tensors():
            y = net[1](net[0](torch.randn(3, 4)))
        ORDERS.append([2, 0, 1])
        try:
            with pytest.raises(RecomputeError, match=r"block '1' \(Shuffles\).* integers, differ"):
                y.sum().backward()
        finally:
            ORDERS.pop()
