"""Only as much of a model waits as memory lacks: the bits of plain training, and nothing at all where all fits."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.memory import gauge
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from lightning_ssd.parameters.residents import Needs
from lightning_ssd.planning.update_memory import subgroup_bytes, update_bytes
from recipes.benchmarks.harness.cgroups import GroupUnavailableError
from recipes.benchmarks.memory_limit import memory_group
from tests.parameters.test_everything_away import Loop
from tests.parameters.test_paged_weights import MIN_TENSOR, NUM_BLOCKS, WIDTH, Net, built, equal_weights, same, train
from tests.support.offloaders import offloaders

KIB, GIB = 1 << 10, 1 << 30
BLOCK_BYTES = 4 * 8 * WIDTH * WIDTH
"""What is frozen of a block; biases are too small."""
COMING_BYTES = NUM_BLOCKS * 3 * 4 * WIDTH * WIDTH
"""Gradients and states of the adapters."""
TRAINED = {"optimizer_states": "offload", "gradients": "auto"}


def in_update(model: nn.Module) -> int:
    """Of states that wait, what an update has in memory."""
    return update_bytes(2 * sum(p.nbytes for p in model.parameters() if p.requires_grad), 1)


def available(usable: int) -> int:
    """Of which so much is usable."""
    return math.ceil(usable / 0.9)


class Memory:
    """What the machine is said to have."""

    def __init__(self) -> None:
        self.available_bytes: int | None = 1000 * GIB
        self.held_bytes = 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    said = Memory()
    monkeypatch.setattr(gauge, "host_available_bytes", lambda cached: said.available_bytes)
    monkeypatch.setattr(gauge, "anonymous_bytes", lambda: said.held_bytes)
    monkeypatch.setattr(gauge, "level_bytes", lambda device: said.held_bytes)
    monkeypatch.setattr(gauge, "free_heap_bytes", lambda: 0)
    return said


def policy(**options: Any) -> OffloadPolicy:
    return OffloadPolicy(**{"parameters": "auto", "activations": "keep", "min_tensor_bytes": MIN_TENSOR} | options)


@pytest.fixture
def opened(spill_dir: Path, memory: Memory) -> Iterator[Callable[..., Offloader]]:
    with offloaders(spill_dir, policy) as make:

        def with_room(
            *modules: nn.Module, room: int | None = None, coming: int = COMING_BYTES, **options: Any
        ) -> Offloader:
            """``room``: bytes for weights that may wait; as many are left for activations."""
            if room is not None:
                memory.available_bytes = available(2 * room + coming)
            return make(*modules, **options)

        yield with_room


def waiting(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if is_mapped(parameter.untyped_storage())]


def blocks_of(names: list[str]) -> list[int]:
    return sorted({int(name.split(".")[1]) for name in names if name.startswith("blocks.")})


# -- where all fits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, TRAINED], ids=["frozen", "trained"])
def test_with_plenty_of_room_nothing_is_mapped_written_or_stood_in_for(
    options: dict[str, Any], opened: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    monkeypatch.setattr("lightning_ssd.parameters.files.write_back._sync_file_range", lambda *_: looks.append(_) or 0)
    model = built()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    offloader = opened(model, **options)
    offloader.expect_no_optimizer()
    expected = train(built())
    assert same(train(model, offloader), expected)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert waiting(model) == []
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    stats = offloader.stats
    assert (stats.weights_bytes, stats.bytes_written, stats.stall_s, looks) == (0, 0, 0.0, [])
    all_bytes = sum(p.nbytes for p in model.parameters() if p.nbytes >= 16 * KIB and (options or not p.requires_grad))
    assert stats.weights_kept_bytes == all_bytes


@pytest.mark.parametrize("room", [1000 * GIB, 3 * BLOCK_BYTES])
def test_passes_need_no_hooks_only_where_nothing_waits(room: int, opened: Callable[..., Offloader]) -> None:
    model = built()
    offloader = opened(model, room=room)
    for _ in range(3):
        with offloader.saved_tensors(signature="one kind"):
            loss = model(torch.zeros(1, 3, dtype=torch.long)).sum()
        loss.backward()
        offloader.end_backward()
    assert (offloader.stats.num_plain_passes > 0) is (waiting(model) == [])


def test_malloc_is_left_alone_where_no_gradient_waits(
    opened: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr("lightning_ssd.memory.freed_memory.FreedMemory.expect", lambda _, waits: told.append(waits))
    opened(Net(), room=1000 * GIB, coming=in_update(Net()), **TRAINED).expect_no_optimizer()
    assert not any(told)
    told.clear()
    net = Net()
    opened(net, room=4 * BLOCK_BYTES, coming=in_update(net), **TRAINED).expect_no_optimizer()
    weights = sum(parameter.nbytes for parameter in net.parameters() if is_mapped(parameter.untyped_storage()))
    (waiting_bytes,) = told
    assert 2 * weights <= waiting_bytes <= 2 * weights * 1.1, "weights, and as many gradients"


# -- where it does not -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["keep", "offload", "auto", "recompute"])
@pytest.mark.parametrize("num_staying", [0, 1, 2])
def test_frozen_blocks_wait_as_far_as_memory_lacks(
    num_staying: int, activations: str, opened: Callable[..., Offloader]
) -> None:
    plain, model = built(), built()
    embedding = model.embedding.weight.nbytes  # the first unit
    expected = train(plain)
    in_flight = 2 * BLOCK_BYTES
    offloader = opened(model, room=in_flight + num_staying * BLOCK_BYTES, activations=activations)
    assert same(train(model, offloader), expected)
    assert equal_weights(model, plain)
    stats = offloader.stats
    assert stats.weights_bytes + stats.weights_kept_bytes == NUM_BLOCKS * BLOCK_BYTES + embedding
    assert 0 < stats.weights_bytes == sum(p.nbytes for p in model.parameters() if is_mapped(p.untyped_storage()))
    assert stats.weights_kept_bytes == num_staying * BLOCK_BYTES
    assert stats.weights_resident_peak_bytes <= in_flight


def test_half_of_the_blocks_wait_every_second_one(opened: Callable[..., Offloader]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(8))).requires_grad_(False)
    unit = model[0][0].weight.nbytes
    opened(model, room=6 * unit, coming=0)
    assert [int(name.split(".")[0]) for name in waiting(model)] == [1, 3, 5, 7]


@pytest.mark.parametrize("num_staying", [0, 2])
def test_trained_blocks_wait_with_their_gradients(num_staying: int, opened: Callable[..., Offloader]) -> None:
    seen = []

    def look(model: nn.Module, *_: object) -> None:
        gradients = [
            n for n, p in model.named_parameters() if p.grad is not None and is_mapped(p.grad.untyped_storage())
        ]
        seen.append((waiting(model), gradients))

    expected = Loop().run().result()
    trained = 4 * 9 * WIDTH * WIDTH  # the adapter, too
    biases = sum(parameter.nbytes for parameter in Net().parameters() if parameter.nbytes < 16 * KIB)
    room = 2 * trained + num_staying * 2 * trained  # what stays has its gradient beside it
    offloader = opened(room=room, coming=in_update(Net()) + biases, **TRAINED)
    loop = Loop(offloader, before_step=look).run()
    assert same(loop.result(), expected)
    for weights, gradients in seen:
        assert weights == gradients != []
    assert NUM_BLOCKS - len(blocks_of(seen[0][0])) == num_staying


@pytest.mark.parametrize(("room", "trained_wait"), [(4 * BLOCK_BYTES, False), (2 * BLOCK_BYTES + 8 * WIDTH, True)])
def test_of_a_unit_that_is_partly_frozen_the_frozen_part_waits_first(
    room: int, trained_wait: bool, opened: Callable[..., Offloader]
) -> None:
    plain, model = built(), built()
    expected = train(plain)
    offloader = opened(model, room=room, coming=in_update(model), **TRAINED)
    offloader.expect_no_optimizer()
    assert any("adapter" in name for name in waiting(model)) is trained_wait
    assert any("up" in name for name in waiting(model))
    assert same(train(model, offloader), expected)
    assert equal_weights(model, plain)


def test_with_an_unknown_amount_of_memory_all_wait(opened: Callable[..., Offloader], memory: Memory) -> None:
    memory.available_bytes = None
    model = built()
    offloader = opened(model)
    assert offloader.stats.weights_kept_bytes == 0
    assert len(waiting(model)) == 2 * NUM_BLOCKS + 1


def test_memory_budget_and_activation_budget_count(opened: Callable[..., Offloader]) -> None:
    total = NUM_BLOCKS * BLOCK_BYTES + built().embedding.weight.nbytes
    activations = 64 << 20
    kept = []
    for budgets in (
        {},
        {"memory_budget": COMING_BYTES + 2 * total},
        {"memory_budget": COMING_BYTES + 2 * total - 2},
        {"memory_budget": COMING_BYTES + total + activations, "activation_budget": activations},
        {"memory_budget": COMING_BYTES + total + activations - 1, "activation_budget": activations},
    ):
        model = built()
        kept.append(opened(model, activations="auto", **budgets).stats.weights_kept_bytes == total)
    assert kept == [True, True, False, True, False]


def test_processes_share_the_memory_of_a_machine(memory: Memory, spill_dir: Path) -> None:
    found = []
    total = NUM_BLOCKS * BLOCK_BYTES + built().embedding.weight.nbytes
    memory.available_bytes = 3 * available(COMING_BYTES + 2 * total)
    for number in (3, 4):
        policy = OffloadPolicy(parameters="auto", activations="keep", min_tensor_bytes=MIN_TENSOR)
        hardware = HardwareProfile(paths=[spill_dir])
        model = built()
        with Offloader(policy=policy, hardware=hardware, num_local_processes=number) as offloader:
            offloader.register_module(model)
            found.append(bool(waiting(model)))
    assert found == [False, True]


def test_the_decision_is_told(opened: Callable[..., Offloader], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning_ssd")
    opened(built())
    assert "no weights wait on drives: memory has room for " in caplog.text
    caplog.clear()
    opened(built(), room=4 * BLOCK_BYTES)
    assert "3 of 5 units (1.3 MiB of 2.3 MiB) wait on drives: memory has room for 2.0 MiB" in caplog.text
    assert len(caplog.records) == 1


# -- while a model is built, and again -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_short", [False, True])
def test_what_is_built_leaves_only_while_memory_is_short(
    is_short: bool, opened: Callable[..., Offloader], memory: Memory
) -> None:
    memory.held_bytes = GIB
    memory.available_bytes = GIB // 2 if is_short else 9 * GIB
    offloader = opened()
    with offloader.streamed_init():
        model = built()
        assert (waiting(model) != []) is is_short
    memory.available_bytes = 1000 * GIB
    offloader.register_module(model)  # now there is room
    assert waiting(model) == []
    assert same(train(model, offloader), train(built()))


def test_registered_again_it_is_decided_again(opened: Callable[..., Offloader], memory: Memory) -> None:
    plain, model = built(), built()
    expected = train(plain, steps=2) + train(plain, steps=2) + train(plain, steps=2)
    offloader = opened(model)
    found = train(model, offloader, steps=2)
    memory.available_bytes = 0
    offloader.register_module(model)
    assert len(waiting(model)) == 2 * NUM_BLOCKS + 1
    found += train(model, offloader, steps=2)
    memory.available_bytes = 1000 * GIB
    offloader.register_module(model)
    assert waiting(model) == []
    assert same(found + train(model, offloader, steps=2), expected)


def test_another_model_s_gradients_and_states_are_counted_until_it_is_gone(
    opened: Callable[..., Offloader],
) -> None:
    first = nn.Linear(512, 512, bias=False)  # 1 MiB: with its gradient and AdamW's states 3 more to come
    offloader = opened(first, room=4 << 20, coming=0)
    for num_mib, name in ((2, []), (3, ["weight"])):
        other = nn.Linear(512, 512 * num_mib, bias=False).requires_grad_(False)
        offloader.register_module(other)
        assert waiting(other) == name
    del first
    offloader.register_module(other)
    assert waiting(other) == []


# -- what else needs memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "coming"),
    [
        (Needs(), 100 + 200),
        (Needs(num_gradients=2), 200 + 200),
        (Needs(gradients="auto"), 60 + 200),
        (Needs(gradients="offload"), 200),
        (Needs(keeps_states=False), 100 + 200),
        (Needs(keeps_states=False, state_bytes=7), 100 + 200 + 7),
    ],
)
def test_gradients_and_states_to_come(needs: Needs, coming: int) -> None:
    assert needs.coming_bytes(100, 40, 0) == coming
    assert needs.coming_bytes(0, 0, 0) == 0


def test_gradients_that_there_are_do_not_come() -> None:
    assert Needs().coming_bytes(100, 0, 30) == 70 + 200
    assert Needs(gradients="offload").coming_bytes(100, 0, 30) == 200


@pytest.mark.parametrize("num_directories", [1, 2, 3])
@pytest.mark.parametrize("num_gib", [0.01, 1, 3, 16, 100, 1000])
def test_states_in_an_update_are_counted_as_the_optimizer_has_them(num_gib: float, num_directories: int) -> None:
    trained = int(num_gib * GIB) // 2
    slots = 4 * num_directories * subgroup_bytes(2 * trained, num_directories)
    needs = Needs(keeps_states=False, gradients="offload", num_directories=num_directories)
    assert needs.coming_bytes(trained, 0, 0) == min(slots, 2 * trained)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"parameters": "some"},
            r"OffloadPolicy.parameters='some' is not possible\. Write one of 'keep', 'offload', 'auto'$",
        ),
        (
            {"gradients": "some"},
            r"OffloadPolicy.gradients='some' is not possible\. Write one of 'keep', 'offload', 'auto'$",
        ),
        (
            {"gradients": "auto", "optimizer_states": "offload"},
            r"gradients='auto' with parameters='keep' would be ignored, .*\. Write parameters='auto' or 'offload'",
        ),
        (
            {"gradients": "auto", "parameters": "auto"},
            r"gradients='auto' needs optimizer_states='offload'; without it the update brings all gradients back",
        ),
    ],
)
def test_settings_that_would_be_ignored(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadPolicy(**settings)


def test_where_it_cannot_work_yet(spill_dir: Path) -> None:
    both = OffloadPolicy(activations="keep", parameters="auto", gradients="auto", optimizer_states="offload")
    for options, message in (
        ({"device": "meta"}, r"device='meta': nothing would be moved from there"),
        ({"agree": list}, r"OffloadPolicy.gradients='auto' got several processes"),
    ):
        hardware = HardwareProfile(paths=[spill_dir])
        with pytest.raises(ConfigError, match=message):
            Offloader(policy=both, hardware=hardware, **options).open()


# -- a real limit ----------------------------------------------------------------------------------------------------

_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


def trained_in_a_group(mode: str, directory: Path, limit: int | None, *more: str) -> tuple[int, dict[str, Any], int]:
    """Exit code, what the worker told, and the peak of its control group."""
    with memory_group(limit) as group:
        enter = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.procs)]
        worker = [sys.executable, "-m", "tests.support.auto_worker", mode, str(directory), *more]
        child = subprocess.run([*enter, *worker], capture_output=True, text=True, check=False)
        peak = next(int((group.directory / name).read_text()) for name in _PEAKS if (group.directory / name).exists())
    if child.returncode not in (0, -9):
        raise AssertionError(child.stderr)
    return child.returncode, json.loads(child.stdout) if child.stdout else {}, peak


def _skip_without_groups() -> None:
    try:
        with memory_group(None):
            pass
    except GroupUnavailableError as error:
        pytest.skip(f"no memory control group here: {error}")


@pytest.mark.slow
def test_a_gpt_that_does_not_fit_is_trained_with_a_part_of_its_blocks_in_memory(spill_dir: Path) -> None:
    _skip_without_groups()
    _, expected, peak = trained_in_a_group("keep", spill_dir, None)
    limit = peak - expected["blocks_bytes"] // 4
    assert trained_in_a_group("keep", spill_dir, limit)[0] == -9
    code, ours, our_peak = trained_in_a_group("auto", spill_dir, limit)
    assert code == 0
    assert ours["digest"] == expected["digest"]
    assert our_peak <= limit
    two_blocks = expected["blocks_bytes"] // 8
    assert ours["waiting_bytes"] > two_blocks
    assert ours["kept_bytes"] > two_blocks


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_gpt_that_fits_makes_room_when_something_else_takes_memory(spill_dir: Path) -> None:
    """For which plain training is killed."""
    _skip_without_groups()
    ballast = 256
    _, expected, peak = trained_in_a_group("keep", spill_dir, None, str(ballast))
    limit = peak - (ballast << 20) // 4
    assert trained_in_a_group("keep", spill_dir, limit, str(ballast))[0] == -9
    code, ours, our_peak = trained_in_a_group("auto", spill_dir, limit, str(ballast))
    assert code == 0
    assert ours["digest"] == expected["digest"]
    assert our_peak <= limit
    assert ours["waited_bytes"] < ours["waiting_bytes"]
