"""Float32 copies of half-precision parameters: exact, on the drive, saved, loaded, and never behind the parameter."""

import io
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from lightning_ssd.optimizer.step.master_weights import MASTER, from_master, to_master
from tests.support.opened import offloader_in
from tests.support.optimizer_pairs import assert_same_parameters, partition_of

KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
}
SHAPES = ((257, 129), (64, 1024), (65, 40), (3,))


pytestmark = pytest.mark.usefixtures("small_subgroups")


def make_parameters(dtype):
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    image = torch.randn(8, 16, 9, 9, generator=generator).to(dtype, memory_format=torch.channels_last)
    return [*made, nn.Parameter(image), nn.Parameter(torch.randn(70, 30, generator=generator).to(dtype).t())]


def gradients(step, like):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in like]


@contextmanager
def offloaded(optimizer, directory, *, master_weights=True):
    settings = {"optimizer_states": "offload", "master_weights": master_weights, "verify": "full"}
    with offloader_in(directory, activations="keep", **settings) as offloader:
        wrapped = offloader.offload_optimizer(optimizer)
        assert isinstance(wrapped, OffloadedOptimizer)
        yield wrapped


class Plain:
    """The reference: PyTorch's optimizer on float32 copies that somebody keeps by hand."""

    def __init__(self, parameters, make):
        self.parameters = parameters
        self.copies = [nn.Parameter(p.detach().float()) for p in parameters]
        self.optimizer = make(self.copies)

    def step(self, grads):
        for copy, grad in zip(self.copies, grads, strict=True):
            copy.grad = grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(self.parameters, self.copies, strict=True):
                parameter.copy_(copy)


def train(optimizer, parameters, steps):
    for step in steps:
        for parameter, grad in zip(parameters, gradients(step, parameters), strict=True):
            parameter.grad = grad
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_float32_copies_kept_by_hand(kind, dtype, spill_dir):
    mine = make_parameters(dtype)
    plain = Plain(make_parameters(dtype), KINDS[kind])
    if kind == "adagrad":  # its states begin as numbers of the parameter's type
        for state in plain.optimizer.state.values():
            state["sum"].copy_(state["sum"].to(dtype))
    with offloaded(KINDS[kind](mine), spill_dir) as optimizer:
        for step in range(5):
            train(optimizer, mine, range(step, step + 1))
            plain.step(gradients(step, mine))
            assert_same_parameters(mine, plain.parameters)
        states = optimizer.state_dict()["state"]
        for number, copy in enumerate(plain.copies):
            assert torch.equal(states[number][MASTER], copy)
            assert all(v.dtype == torch.float32 for v in states[number].values() if isinstance(v, torch.Tensor))
        assert optimizer.stats.written_bytes > optimizer.stats.state_bytes
        assert kind == "fused" or len(partition_of(optimizer).places[0]) > 1, "the copies may be cut"


def test_training_goes_on_from_a_checkpoint_with_the_same_bits(spill_dir):
    mine = make_parameters(torch.bfloat16)
    plain = Plain(make_parameters(torch.bfloat16), KINDS["adamw"])
    file = io.BytesIO()
    with offloaded(KINDS["adamw"](mine), spill_dir) as optimizer:
        train(optimizer, mine, range(3))
        torch.save({"weights": mine, "states": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = make_parameters(torch.bfloat16)
    with offloaded(KINDS["adamw"](again), spill_dir) as optimizer:
        optimizer.load_state_dict(saved["states"])
        with torch.no_grad():
            for parameter, weight in zip(again, saved["weights"], strict=True):
                parameter.copy_(weight)
        train(optimizer, again, range(3, 6))
    for step in range(6):
        plain.step(gradients(step, mine))
    assert_same_parameters(again, plain.parameters)


def test_the_plain_optimizer_reads_our_checkpoint_and_we_read_its(spill_dir):
    mine = make_parameters(torch.bfloat16)
    with offloaded(KINDS["adamw"](mine), spill_dir) as optimizer:
        train(optimizer, mine, range(2))
        ours = optimizer.state_dict()
    plain = KINDS["adamw"](mine)
    plain.load_state_dict(ours)
    train(plain, mine, range(2, 3))
    theirs = plain.state_dict()
    del theirs["state"][0][MASTER]  # as if it had never been with us
    before = [parameter.detach().clone() for parameter in mine]
    with offloaded(KINDS["adamw"](mine), spill_dir) as optimizer:
        optimizer.load_state_dict(theirs)
        train(optimizer, mine, range(3, 4))
        states = optimizer.state_dict()["state"]
    assert all(state["exp_avg"].dtype == torch.float32 for state in states.values())
    assert all(torch.equal(states[n][MASTER].bfloat16(), parameter) for n, parameter in enumerate(mine))
    assert not torch.equal(before[0], mine[0])  # of a smaller one no element may have moved by a bfloat16 step


def test_without_copies_those_of_a_checkpoint_are_left_out(spill_dir):
    mine = make_parameters(torch.bfloat16)
    with offloaded(KINDS["adamw"](mine), spill_dir) as optimizer:
        train(optimizer, mine, range(1))
        saved = optimizer.state_dict()
    with offloaded(KINDS["adamw"](mine), spill_dir, master_weights=False) as optimizer:
        optimizer.load_state_dict(saved)
        assert not any(MASTER in state for state in optimizer.state_dict()["state"].values())
    assert MASTER in saved["state"][0]


@pytest.mark.parametrize("number", [0, 3, len(SHAPES), len(SHAPES) + 1])
def test_a_parameter_changed_from_outside_carries_its_copy_along(number, spill_dir):
    mine = make_parameters(torch.bfloat16)
    plain = Plain(make_parameters(torch.bfloat16), KINDS["adamw"])
    with offloaded(KINDS["adamw"](mine), spill_dir) as optimizer:
        train(optimizer, mine, range(2))
        for step in range(2):
            plain.step(gradients(step, mine))
        with torch.no_grad():
            mine[number][::2] = 0.5
            fresh = mine[number] != plain.parameters[number]
            plain.copies[number].copy_(torch.where(fresh, mine[number].float(), plain.copies[number]))
        assert fresh.any()
        train(optimizer, mine, range(2, 4))
        for step in range(2, 4):
            plain.step(gradients(step, mine))
        assert_same_parameters(mine, plain.parameters)


def test_a_copy_follows_only_where_the_parameter_was_changed():
    piece = torch.tensor([1.0, 2.0, 3.0, float("nan")], dtype=torch.bfloat16)
    kept = torch.tensor([1.0009, 5.0, 3.0, 4.0])
    master, rest = to_master(piece, {MASTER: kept.clone(), "step": 7})
    assert torch.equal(master[:3], torch.tensor([1.0009, 2.0, 3.0]))
    assert master[3].isnan()
    assert rest == {"step": 7}
    master[:] = torch.tensor([1.5, 2.5, 3.5, 4.5])
    after = from_master(piece, master, rest)
    assert torch.equal(piece.float(), master)
    assert after[MASTER] is master
    assert after["step"] == 7


def test_float32_parameters_have_no_copy(spill_dir):
    parameters = [nn.Parameter(torch.ones(4096)), nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))]
    with offloaded(torch.optim.AdamW(parameters), spill_dir) as optimizer:
        train(optimizer, parameters, range(2))
        states = optimizer.state_dict()["state"]
    assert [MASTER in states[number] for number in (0, 1)] == [False, True]


def test_a_state_made_before_is_widened(spill_dir):
    parameter = nn.Parameter(torch.ones(8192, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.5)
    train(optimizer, [parameter], range(1))
    momentum = optimizer.state[parameter]["momentum_buffer"].float()
    with offloaded(optimizer, spill_dir) as wrapped:
        parameter.grad = torch.full_like(parameter, 1 / 3)
        wrapped.step()
        found = wrapped.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(found, momentum * 0.5 + parameter.grad.float())
