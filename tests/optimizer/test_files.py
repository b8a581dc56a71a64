"""Room for optimizer states is taken at setup: a drive that is too small is found before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import OutOfSpaceError
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.support.optimizer_pairs import files_of

MIB = 1 << 20
NUM_ELEMENTS = 3 * MIB  # AdamW: 24 MiB of states
POLICY = OffloadPolicy(activations="keep", optimizer_states="offload", verify="full")


def make_parameters(num_elements: int = NUM_ELEMENTS) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(num_elements // 12, generator=generator)) for _ in range(12)]


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def spilled(optimizer: torch.optim.Optimizer) -> list[int]:
    return [tier.disk_bytes for tier in files_of(optimizer).tiers]


@pytest.mark.parametrize("kind", ["adamw", "amsgrad", "sgd", "plain sgd", "rmsprop"])
def test_what_is_reserved_suffices_for_all_steps(kind: str, spill_dir: Path) -> None:
    kinds: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "adamw": lambda p: torch.optim.AdamW(p),
        "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, momentum=0.9),
        "plain sgd": lambda p: torch.optim.SGD(p),
        "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    }
    num_states = {"adamw": 2, "amsgrad": 3, "sgd": 1, "plain sgd": 0, "rmsprop": 3}[kind]
    parameters = make_parameters()
    with Offloader(policy=POLICY, hardware=HardwareProfile(paths=spill_dir)).open() as offloader:
        optimizer = offloader.offload_optimizer(kinds[kind](parameters))
        reserved = spilled(optimizer)[0]
        states = num_states * 4 * NUM_ELEMENTS
        assert states <= reserved <= states + 8 * 4 * MIB
        for seed in range(4):
            step(optimizer, parameters, seed)
        optimizer.flush()
        assert spilled(optimizer) == [reserved]


def test_a_full_drive_is_found_at_setup_and_nothing_is_lost(small_disk: Callable[[int], Path]) -> None:
    directory = small_disk(24)
    parameters, twins = make_parameters(), make_parameters()
    mine, plain = torch.optim.AdamW(parameters), torch.optim.AdamW(twins)
    step(mine, parameters, 0)
    step(plain, twins, 0)
    with Offloader(policy=POLICY, hardware=HardwareProfile(paths=directory)).open() as offloader:
        with pytest.raises(OutOfSpaceError, match=r"optimizer states need [\d,]+ bytes; [\d,]+ of them have no place"):
            offloader.offload_optimizer(mine)
        assert len(mine.state) == len(parameters)
    step(mine, parameters, 1)
    step(plain, twins, 1)
    assert all(torch.equal(one, other) for one, other in zip(parameters, twins, strict=True))


def test_the_error_names_path_need_and_what_to_do(small_disk: Callable[[int], Path]) -> None:
    directory = small_disk(24)
    hardware = HardwareProfile(paths=directory)
    with Offloader(policy=POLICY, hardware=hardware).open() as offloader, pytest.raises(OutOfSpaceError) as caught:
        offloader.offload_optimizer(torch.optim.AdamW(make_parameters()))
    message = str(caught.value)
    assert str(directory) in message
    assert "are free" in message
    assert "HardwareProfile(paths=" in message


def test_what_one_directory_has_no_room_for_goes_to_the_other(
    spill_dir: Path, small_disk: Callable[[int], Path]
) -> None:
    small = small_disk(26)
    parameters, twins = make_parameters(2 * NUM_ELEMENTS), make_parameters(2 * NUM_ELEMENTS)
    plain = torch.optim.AdamW(twins)
    with Offloader(policy=POLICY, hardware=HardwareProfile(paths=[small, spill_dir])).open() as offloader:
        optimizer = offloader.offload_optimizer(torch.optim.AdamW(parameters))
        reserved = spilled(optimizer)
        assert sum(reserved) >= 48 * MIB
        for seed in range(4):
            step(optimizer, parameters, seed)
            step(plain, twins, seed)
        assert isinstance(optimizer, OffloadedOptimizer)
        optimizer.flush()
        assert spilled(optimizer)[1] == reserved[1], "the drive with room had to grow during training"
    assert all(torch.equal(one, other) for one, other in zip(parameters, twins, strict=True))


def test_more_parameters_take_more_room(spill_dir: Path) -> None:
    first, second = make_parameters(), make_parameters()
    with Offloader(policy=POLICY, hardware=HardwareProfile(paths=spill_dir)).open() as offloader:
        optimizer = offloader.offload_optimizer(torch.optim.AdamW(first))
        before = spilled(optimizer)[0]
        optimizer.add_param_group({"params": second})
        assert spilled(optimizer)[0] - before >= 24 * MIB
