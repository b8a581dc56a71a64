"""Sharded models: two processes for what they do together, one for what each of them does alone."""

from itertools import product
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_ssd import OffloadPolicy, SSDOffloadFSDPStrategy
from lightning_ssd.activations.dtensor_hooks import shards_unwrapped, unwrapped_within
from lightning_ssd.common.dtensor import as_piece, even_numel, local_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.checkpoint.sharded import saved_in_full
from tests.support.helpers import KEEP, open_offloader

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")


# -- what the strategy refuses ---------------------------------------------------------------------------------------


def trainer_with(strategy, **settings):
    return L.Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False, **settings)


@pytest.mark.parametrize(
    ("data", "tensor", "expected"),
    [("auto", 1, (4, 1)), ("auto", 2, (2, 2)), (2, "auto", (2, 2)), ("auto", "auto", (1, 4)), (1, 4, (1, 4))],
)
def test_sizes_of_the_mesh(data, tensor, expected):
    strategy = SSDOffloadFSDPStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
    trainer_with(strategy, devices=4)
    assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == expected


@pytest.mark.parametrize(("data", "tensor"), [(3, 1), (3, "auto"), ("auto", 3), (2, 4), (8, "auto"), ("auto", 8)])
def test_sizes_that_make_no_mesh_are_refused_before_anything_starts(data, tensor):
    strategy = SSDOffloadFSDPStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
    with pytest.raises(ConfigError, match=r"1 x 4 processes .*, and the product of the sizes has to be 4\. Write"):
        trainer_with(strategy, devices=4)


def test_other_sizes_are_refused():
    for size, name in product([0, -1, 1.5, True, "all", None], ["data_parallel_size", "tensor_parallel_size"]):
        with pytest.raises(ConfigError, match=f"{name}=.*whole number above 0"):
            SSDOffloadFSDPStrategy(**{name: size})


def test_master_weights_are_refused():
    with pytest.raises(ConfigError, match="MixedPrecisionPolicy"):
        SSDOffloadFSDPStrategy(policy=OffloadPolicy(optimizer_states="offload", master_weights=True))


def test_the_name_is_registered():
    trainer = trainer_with("ssd_offload_fsdp", devices=2)
    assert type(trainer.strategy) is SSDOffloadFSDPStrategy
    assert trainer.strategy._data_parallel_size == 2


def test_a_precision_that_lightning_would_refuse_for_an_object_is_refused_for_the_name():
    with pytest.raises(ConfigError, match=r"precision='64-true', .*\. Pass one of '32-true'"):
        trainer_with("ssd_offload_fsdp", precision="64-true")


# -- one process -----------------------------------------------------------------------------------------------------


def test_the_users_hooks_get_dtensors_where_a_pass_has_none_of_ours(mesh, tmp_path):
    x, seen = DTensor.from_local(torch.rand(512, 512), mesh, [Shard(0)]).requires_grad_(), []

    def pack(tensor):
        seen[-1].add(type(tensor))
        return tensor

    with open_offloader(tmp_path, KEEP) as offloader:
        for _ in range(2):
            seen.append(set())
            saving = offloader.saved_tensors(signature="same")
            shards = unwrapped_within(saving)  # before it is entered: a pass learns only then that it needs no hooks
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), saving, shards:
                loss = (x * 2).sin().sum()
            loss.backward()
            offloader.end_backward()
    assert seen == [set(), {DTensor}]


@pytest.fixture
def offloader(tmp_path):
    with open_offloader(tmp_path) as opened:
        yield opened


def sharded(mesh, *, requires_grad=False):
    tensor = DTensor.from_local(torch.randn(64, 64), mesh, [Shard(0)])
    return tensor.requires_grad_(requires_grad)


def test_a_saved_dtensor_leaves_memory_and_comes_back(mesh, offloader):
    weight, x = sharded(mesh, requires_grad=True), sharded(mesh)

    def run():
        return ((x @ weight).sin() @ x).sin().sum()

    expected = torch.autograd.grad(run(), weight)[0].to_local()
    with offloader.saved_tensors(), shards_unwrapped():
        loss = run()
    offloader.flush()
    for left in (True, False):
        found = torch.autograd.grad(loss, weight, retain_graph=left)[0].to_local()
        assert torch.equal(found, expected)
    assert offloader.stats.bytes_saved == 3 * 64 * 64 * 4  # x, and what each sine is of
    assert offloader.stats.bytes_read > 0


@pytest.mark.parametrize("is_ours", [False, True], ids=["plain", "ours"])
def test_a_dtensor_that_is_edited_after_it_was_saved_raises_as_without_us(mesh, offloader, is_ours):
    x = sharded(mesh, requires_grad=True)
    y = x * 2
    if is_ours:
        with offloader.saved_tensors(), shards_unwrapped():
            loss = y.sin().sum()
    else:
        loss = y.sin().sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected version 0"):
        loss.backward()


def test_a_dtensor_that_was_edited_before_is_not_taken_for_its_earlier_value(mesh, offloader):
    x = sharded(mesh, requires_grad=True)

    def run():
        y = x * 2
        y.sin()  # saved, and never asked for
        with torch.no_grad():
            y.add_(1)
        return y.sin().sum()

    expected = torch.autograd.grad(run(), x)[0].to_local()
    with offloader.saved_tensors(), shards_unwrapped():
        loss = run()
    offloader.flush()
    assert torch.equal(torch.autograd.grad(loss, x)[0].to_local(), expected)


@pytest.mark.parametrize(
    "again",
    [
        lambda y: y.redistribute(placements=y.placements),
        lambda y: DTensor.from_local(y.to_local(), y.device_mesh, y.placements, run_check=False),
        lambda y: y.to_local(),
    ],
    ids=["redistribute", "from_local", "to_local"],
)
def test_another_tensor_over_edited_memory_is_not_taken_for_its_earlier_value(mesh, offloader, again):
    """The edit is counted by the DTensor that was edited, and by nobody who comes after it."""
    x, unused = sharded(mesh, requires_grad=True), []

    def run(settle):
        y = x * 2
        unused.append(y.sin())  # saved, and never asked for
        settle()
        with torch.no_grad():
            y.add_(1)
        z = again(y)
        loss = z.cos().sum()
        del y, z
        settle()
        return loss

    expected = torch.autograd.grad(run(lambda: None), x)[0].to_local()
    with offloader.saved_tensors(), shards_unwrapped():
        loss = run(offloader.flush)
    assert torch.equal(torch.autograd.grad(loss, x)[0].to_local(), expected)


def fresh_sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_a_full_checkpoint_numbers_the_optimizers_parameters():
    """Frozen layers and several groups: numbers count what the optimizer has, in the order of its groups."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    module[0].requires_grad_(False)
    wanted = list(module.parameters())[2:]
    groups = [{"params": [p for p in wanted if p.ndim == 2], "lr": 0.5}, {"params": [p for p in wanted if p.ndim == 1]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    optimizer.step()
    checkpoint = {"optimizer_states": [optimizer.state_dict()]}
    fresh = torch.optim.AdamW([{"params": list(group["params"])} for group in groups], lr=9.0)
    saved = saved_in_full(checkpoint, Path("checkpoint"), 0, module, fresh)
    assert [group["lr"] for group in saved["param_groups"]] == [0.5, 0.1]
    for own, group in zip(fresh.param_groups, saved["param_groups"], strict=True):
        for parameter, key in zip(own["params"], group["params"], strict=True):
            assert torch.equal(saved["state"][key]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    plain = torch.optim.SGD(module.parameters(), lr=0.001).state_dict()
    saved = saved_in_full({"optimizer_states": [plain]}, Path("checkpoint"), 0, module, fresh_sgd(module))
    assert saved["param_groups"][0]["lr"] == 0.001, "without states"
    other = torch.optim.AdamW(module.parameters())
    with pytest.raises(ConfigError, match=r"Only the same groups can be loaded\. Build the"):
        saved_in_full(checkpoint, Path("checkpoint"), 0, module, other)


def test_a_full_checkpoint_that_lacks_a_parameter_is_refused():
    module = nn.Linear(2, 2)
    groups = torch.optim.SGD(module.parameters(), lr=0.001).state_dict()["param_groups"]
    named = {"state": {}, "param_groups": [{**groups[0], "params": ["weight"]}]}
    with pytest.raises(ConfigError, match="does not know bias"):
        saved_in_full({"optimizer_states": [named]}, Path("checkpoint"), 0, module, fresh_sgd(module))


def test_pieces_of_shards(mesh):
    whole = sharded(mesh)
    piece = as_piece(local_of(whole).view(-1)[128:256], whole)
    assert type(piece) is DTensor
    assert piece.placements == (Replicate(),)
    assert local_of(piece).data_ptr() == local_of(whole).data_ptr() + 512
    assert as_piece(torch.ones(2), torch.ones(4)).shape == (2,)
    assert even_numel(whole) == 64 * 64
    assert even_numel(torch.ones(3, 5)) == 15
