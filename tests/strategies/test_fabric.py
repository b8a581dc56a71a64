"""``Fabric(strategy="ssd_offload")``: the same bits as Fabric's own strategies, checkpoints, one device."""

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_ssd import OffloadPolicy
from lightning_ssd.strategies.checkpoint_io import StreamedCheckpointIO
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from tests.support.helpers import assert_identical
from tests.support.leftovers import assert_nothing_left
from tests.support.loops import WINDOW, Conv, Gpt, Loop, batches, drain, make_fabric, more_steps, ours
from tests.support.trainers import offload_strategy

pytestmark = pytest.mark.usefixtures("collected")


def assert_moved(stats):
    assert stats.bytes_written > 0, "nothing was written"
    assert stats.bytes_read > 0, "nothing was read"
    assert stats.failures == 0


# -- the same results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "settings"),
    [
        pytest.param(Loop(), {}, id="gpt-with-dropout"),
        pytest.param(Loop(Conv), {}, id="conv-with-buffers"),
        pytest.param(Loop(num_micro_batches=3), {}, id="accumulation"),
        pytest.param(Loop(clip={"clip_val": 0.01}), {}, id="clip-value"),
        pytest.param(Loop(clip={"max_norm": 0.1}), {"precision": "bf16-mixed"}, id="bf16-mixed"),
        pytest.param(Loop(), {"precision": "bf16-true"}, id="bf16-true"),
        pytest.param(Loop(Conv), {"precision": "64-true"}, id="64-true"),
        pytest.param(Loop(own_backward=True), {}, id="loss.backward"),
    ],
)
def test_bitwise_equal_to_plain_fabric(tmp_path, loop, settings):
    expected = loop(make_fabric("auto", **settings))
    fabric = make_fabric(ours(tmp_path), **settings)
    assert_identical(loop(fabric), expected)
    assert_moved(fabric.strategy.stats)
    [states] = fabric.strategy.offloader.optimizer_stats
    assert states.num_steps == loop.num_steps
    assert fabric.strategy.stats.resident_bytes == 0


def test_by_name_with_all_defaults(spill_dir, monkeypatch):
    monkeypatch.chdir(spill_dir)
    expected = Loop()(make_fabric("auto"))
    fabric = make_fabric("SSD_Offload")
    assert_identical(Loop()(fabric), expected)
    assert fabric.strategy.policy == OffloadPolicy()
    assert fabric.strategy.offloader.description.endswith(str(spill_dir))
    fabric.strategy.close()
    assert_nothing_left(spill_dir)


@pytest.mark.parametrize("own_backward", [False, True], ids=["fabric.backward", "loss.backward"])
def test_plans_are_made_and_a_budget_is_kept(tmp_path, own_backward):
    loop, budget = Loop(num_steps=8, own_backward=own_backward), 300_000
    expected = loop(make_fabric("auto"))
    strategy = offload_strategy(tmp_path, SSDOffloadFabricStrategy, min_tensor_bytes=0, activation_budget=budget)
    assert_identical(loop(make_fabric(strategy)), expected)
    assert strategy.stats.saved_peak_bytes > budget >= strategy.stats.resident_peak_bytes
    assert strategy.offloader.trace is not None


def adversaries(fabric):
    """Two models, two optimizers; several forwards before one backward, and one that belongs to both."""
    torch.manual_seed(5)
    maker, judge = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 16)), nn.Linear(16, 1)
    maker, first = fabric.setup(maker, torch.optim.AdamW(maker.parameters(), lr=1e-2))
    judge = fabric.setup_module(judge)
    second = fabric.setup_optimizers(torch.optim.SGD(judge.parameters(), lr=1e-2, momentum=0.9))
    seen = []
    for _ in range(3):
        made = maker(torch.randn(32, 8))
        loss = judge(made.detach()).square().mean() - judge(torch.randn(32, 16)).square().mean()
        drain(fabric)
        fabric.backward(loss)
        second.step()
        second.zero_grad()
        fooled = judge(made).square().mean()
        fabric.backward(fooled, retain_graph=True)
        fabric.backward(0.1 * made.square().mean())
        first.step()
        first.zero_grad()
        second.zero_grad()
        seen += [loss.detach(), fooled.detach()]
    return [*seen, *(p.detach().clone() for p in (*maker.parameters(), *judge.parameters()))]


def test_two_models_with_an_optimizer_each(tmp_path):
    expected = adversaries(make_fabric("auto"))
    fabric = make_fabric(ours(tmp_path))
    assert_identical(adversaries(fabric), expected)
    assert_moved(fabric.strategy.stats)
    assert len(fabric.strategy.offloader.optimizer_stats) == 2


def scheduled(fabric):
    """A scheduler that was set up, one of the optimizer that came back, a closure, ``fabric.autocast``."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, scheduler = fabric.setup(
        net, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    )
    other = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2)
    seen = []

    def closure():
        optimizer.zero_grad()
        with fabric.autocast():
            loss = (model(torch.randn(32, 16)) @ torch.ones(16, 1)).square().mean()
        fabric.backward(loss)
        return loss

    for _ in range(3):
        seen.append(optimizer.step(closure).detach())
        scheduler.step()
        other.step()
        seen.append(torch.tensor(optimizer.param_groups[0]["lr"]))
    return [*seen, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_schedulers_closures_and_autocast(tmp_path):
    expected = scheduled(make_fabric("auto", precision="bf16-mixed"))
    fabric = make_fabric(ours(tmp_path), precision="bf16-mixed")
    assert_identical(scheduled(fabric), expected)
    assert fabric.strategy.stats.bytes_saved > 0


@pytest.mark.parametrize("how", ["outside", "in place"])
def test_a_compiled_module_is_compiled_as_without_us(tmp_path, how):
    def run(fabric):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs):
            graphs.append(len(graph.graph.nodes))
            return graph.forward

        def prepare(module):
            if how == "outside":
                return torch.compile(module, backend=backend, fullgraph=True)
            module.compile(backend=backend, fullgraph=True)
            return module

        return Loop(prepare=prepare)(fabric), graphs

    fabric = make_fabric(ours(tmp_path))  # ours first: nothing has told the compiler of us
    got, got_graphs = run(fabric)
    expected, graphs = run(make_fabric("auto"))
    assert_identical(got, expected)
    assert len(graphs) == 1
    assert got_graphs == graphs
    assert_moved(fabric.strategy.stats)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def saved(fabric, path):
    """Train two steps and save; the rest of the state is the user's own."""
    torch.manual_seed(3)
    model, optimizer = fabric.setup(net := Gpt(), torch.optim.AdamW(net.parameters(), lr=1e-2))
    more_steps(fabric, model, optimizer, seed=1)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
    return more_steps(fabric, model, optimizer, seed=2)


def resumed(fabric, path):
    torch.manual_seed(4)
    model, optimizer = fabric.setup(net := Gpt(), torch.optim.AdamW(net.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(path, state) == {}
    assert state["step"] == 2
    return more_steps(fabric, model, optimizer, seed=2)


def test_checkpoints_go_from_and_to_plain_fabric(tmp_path):
    plain, other = tmp_path / "plain.ckpt", tmp_path / "ours.ckpt"
    expected = saved(make_fabric("auto"), plain)
    fabric = make_fabric(ours(tmp_path))
    assert_identical(saved(fabric, other), expected)
    assert type(fabric.strategy.checkpoint_io) is StreamedCheckpointIO
    own = TorchCheckpointIO()
    assert make_fabric(ours(tmp_path), plugins=[own]).strategy.checkpoint_io is own, "the user's stays"
    assert type(make_fabric(ours(tmp_path, states="keep")).strategy.checkpoint_io) is TorchCheckpointIO
    assert_identical(torch.load(other, weights_only=True), torch.load(plain, weights_only=True))
    for path in (plain, other):
        assert_identical(resumed(make_fabric("auto"), path), expected)
        assert_identical(resumed(make_fabric(ours(tmp_path / path.stem)), path), expected)


# -- one device -------------------------------------------------------------------------------------------------------


def test_one_device_is_what_it_is_without_us(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    fabric = make_fabric(ours(tmp_path))  # and without launch()
    assert isinstance(fabric.strategy, SSDOffloadFabricStrategy)
    assert isinstance(fabric.strategy, SingleDeviceStrategy)
    assert type(fabric.strategy).__name__ == "SSDOffloadFabricStrategy"
    model = fabric.setup_module(net := Gpt())
    assert model._forward_module is net
    assert model.greedy(batches(1)[0]).shape == (8, WINDOW)  # with a wrapper Fabric would refuse this
    loader = fabric.setup_dataloaders(DataLoader(batches(1)[0], shuffle=True))
    assert type(loader.sampler).__name__ == "RandomSampler"
    assert (fabric.world_size, fabric.global_rank, fabric.device) == (1, 0, torch.device("cpu"))
    assert fabric.broadcast("ours", src=0) == "ours"
    assert fabric.all_reduce(torch.tensor(3.0)) == 3.0
    assert fabric.all_gather(torch.tensor(3.0)).shape == ()
    fabric.barrier()
    assert not torch.distributed.is_initialized()
    assert make_fabric(ours(tmp_path)).launch(lambda fabric: 7) == 7
    assert make_fabric(ours(tmp_path)).launch() is None
