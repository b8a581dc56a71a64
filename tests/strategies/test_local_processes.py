"""Processes of a run on one machine share its memory, its drives and their wear: who says how many, and what follows.

Lightning starts its processes without ``LOCAL_WORLD_SIZE``, so that each strategy has to tell the offloader.
"""

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_ssd import (
    HardwareProfile,
    Offloader,
    OffloadPolicy,
    SSDOffloadFabricStrategy,
    SSDOffloadStrategy,
    _environment,
)
from lightning_ssd.strategies import _lightning_compat, fabric, single_or_ddp
from tests.support.optimizer_pairs import files_of

NUM = 3
MIB, TB = 1 << 20, 10**12


@pytest.fixture(autouse=True)
def without_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


# -- who says it -----------------------------------------------------------------------------------------------------


class Told(Exception):
    """Instead of an offloader."""


@pytest.fixture
def told(monkeypatch):
    """What the next offloader that a strategy builds for itself was given."""
    seen = {}

    class Listens:
        def __init__(self, *, policy=None, hardware=None, **more):
            self.policy, self.hardware = policy or OffloadPolicy(), hardware or HardwareProfile()
            if more:  # not the one that only checks
                seen.update(more)
                raise Told

    monkeypatch.setattr("lightning_ssd.strategies.session.Offloader", Listens)
    return seen


def begin_trainer(name, directory):
    trainer = L.Trainer(
        strategy=name, accelerator="cpu", devices=NUM, num_nodes=2, logger=False, default_root_dir=directory
    )
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.setup(trainer)


def begin_fabric(name, directory):
    made = Fabric(strategy=name, accelerator="cpu", devices=NUM, num_nodes=2)
    made.strategy._opened()


@pytest.mark.parametrize(
    ("begin", "name"),
    [(begin_trainer, "ssd_offload"), (begin_trainer, "ssd_offload_fsdp"), (begin_fabric, "ssd_offload")],
    ids=["strategy", "fsdp", "fabric"],
)
def test_a_strategy_tells_how_many_are_on_this_machine(begin, name, told, tmp_path):
    with pytest.raises(Told):
        begin(name, tmp_path)
    assert told["num_local_processes"] == NUM
    assert told["local_rank"] == 0
    assert told["agree"] is not None


@pytest.mark.parametrize(("variable", "argument", "expected"), [(None, None, 1), ("4", None, 4), ("4", NUM, NUM)])
def test_a_strategys_word_is_above_torchruns(variable, argument, expected, monkeypatch):
    if variable is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    assert Offloader(num_local_processes=argument)._num_local == expected


# -- what follows ----------------------------------------------------------------------------------------------------


@pytest.fixture
def offloader(spill_dir, monkeypatch):
    """Of one of three processes, on a device that has memory of its own: the CPU plays it."""
    monkeypatch.setattr(_environment, "_is_discrete", lambda device: True)
    monkeypatch.setattr(_environment, "host_available_bytes", lambda: NUM * 4 * 6 * MIB)
    policy = OffloadPolicy(optimizer_states="offload", wear_budget="3TB")
    hardware = HardwareProfile(paths=spill_dir, drive_endurance="600TB")
    return Offloader(policy=policy, hardware=hardware, num_local_processes=NUM, agree=lambda values: list(values))


def test_each_takes_its_part_of_memory_and_wear(offloader):
    with offloader:
        parts = offloader._parts
        assert parts.tiers.host.capacity_bytes == 6 * MIB
        assert parts.scheduler._constraints.wear_bytes_per_day == TB
        assert (parts.wear._num_processes, parts.wear.bytes_per_day) == (NUM, TB)


def test_states_of_each_may_wait_in_host_memory(offloader):
    with offloader:
        optimizer = offloader.offload_optimizer(torch.optim.AdamW([nn.Parameter(torch.zeros(10))]))
        assert files_of(optimizer).host is not None


@pytest.mark.parametrize(("argument", "variable", "expected"), [(None, None, 0), (None, "2", 2), (1, "2", 1)])
def test_each_begins_with_another_directory(argument, variable, expected, spill_dir, monkeypatch):
    """Processes that train together save the same sizes at the same moments."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_RANK", variable)
    paths = [spill_dir / name for name in "abc"]
    policy = OffloadPolicy(activations="offload", min_tensor_bytes=0)
    hardware = HardwareProfile(paths=paths, allow_unsuitable_paths=True)
    with Offloader(policy=policy, hardware=hardware, local_rank=argument) as offloader:
        x = torch.rand(128, 128, requires_grad=True)
        with offloader.saved_tensors():
            loss = (x * 1).sin().sum()
        offloader.flush()
        ssd = offloader._parts.tiers.ssd
        assert [arena.size_bytes > 0 for arena in ssd._arenas].index(True) == expected
        loss.backward()


@pytest.mark.parametrize("module", [single_or_ddp, fabric], ids=["trainer", "fabric"])
def test_ddp_is_wrapped_on_the_current_stream(module, monkeypatch):
    """The nodes that accumulate gradients remember it, and PyTorch warns where backward runs on another one."""
    wrapped = []

    def wrap(model, device_ids=None, **_):
        wrapped.append(device_ids)
        return model

    def refuse(*_, **__):
        raise AssertionError("a stream of its own was made")

    monkeypatch.setattr(module, "DistributedDataParallel", wrap)
    monkeypatch.setattr(_lightning_compat, "register_comm_hook", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    strategy = SSDOffloadStrategy() if module is single_or_ddp else SSDOffloadFabricStrategy()
    strategy.parallel_devices = [torch.device("cuda", i) for i in range(2)]
    monkeypatch.setattr(type(strategy), "local_rank", 1)
    strategy._fitting = True
    model = nn.Linear(2, 2)
    assert (strategy._setup_model(model) if module is single_or_ddp else strategy._wrapped(model)) is model
    assert wrapped == [[1]]
