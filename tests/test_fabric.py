"""``Fabric(strategy="ssd_offload")``: the same bits as Fabric's own strategies, and a life that ends."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ssd import HardwareProfile, OffloadPolicy, OffloadStats
from lightning_ssd.checkpoint import StreamedCheckpointIO
from lightning_ssd.errors import ConfigError, OffloaderClosedError
from lightning_ssd.fabric import SSDOffloadFabricStrategy, register
from tests.helpers import assert_identical
from tests.loops import WINDOW, Conv, Gpt, Loop, batches, drain, loss_of, make_fabric, ours
from tests.trainers import one_thread


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield
    gc.collect()  # a Fabric is a cycle


def assert_moved(stats: OffloadStats) -> None:
    assert stats.bytes_written > 0, "nothing was written"
    assert stats.bytes_read > 0, "nothing was read"
    assert stats.failures == 0


def assert_nothing_left(directory: Path) -> None:
    """Threads, descriptors, files."""
    deadline_s = time.monotonic() + 5
    while running := [t.name for t in threading.enumerate() if t.name.startswith("lightning_ssd")]:
        assert time.monotonic() < deadline_s, running
        time.sleep(0.01)
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if link.is_symlink()]
    assert [target for target in targets if target.startswith(str(directory))] == []
    assert list(directory.glob("lightning_ssd*")) == []


def hooks_are_installed() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# -- the same results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "settings"),
    [
        pytest.param(Loop(), {}, id="gpt-with-dropout"),
        pytest.param(Loop(Conv), {}, id="conv-with-buffers"),
        pytest.param(Loop(num_micro_batches=3), {}, id="accumulation"),
        pytest.param(Loop(clip={"max_norm": 0.1}), {}, id="clip-norm"),
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


@pytest.mark.parametrize("name", ["ssd_offload", "SSD_Offload_Activations"])
def test_by_name_with_all_defaults(spill_dir, monkeypatch, name):
    monkeypatch.chdir(spill_dir)
    expected = Loop()(make_fabric("auto"))
    fabric = make_fabric(name)
    assert_identical(Loop()(fabric), expected)
    assert fabric.strategy.policy == OffloadPolicy()
    assert str(spill_dir / f"lightning_ssd-{os.geteuid()}-rank-0") in fabric.strategy.offloader.description
    fabric.strategy.close()
    assert_nothing_left(spill_dir)


@pytest.mark.parametrize("own_backward", [False, True], ids=["fabric.backward", "loss.backward"])
def test_plans_are_made_and_a_budget_is_kept(tmp_path, own_backward):
    loop, budget = Loop(num_steps=8, own_backward=own_backward), 300_000
    expected = loop(make_fabric("auto"))
    strategy = SSDOffloadFabricStrategy(
        policy=OffloadPolicy(min_tensor_bytes=0, activation_budget=budget),
        hardware=HardwareProfile(paths=tmp_path, allow_unsuitable_paths=True),
    )
    assert_identical(loop(make_fabric(strategy)), expected)
    assert strategy.stats.saved_peak_bytes > budget >= strategy.stats.resident_peak_bytes
    assert strategy.offloader.trace is not None


def adversaries(fabric: Fabric) -> list[torch.Tensor]:
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


def scheduled(fabric: Fabric) -> list[torch.Tensor]:
    """A scheduler that was set up, one of the optimizer that came back, a closure, ``fabric.autocast``."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, scheduler = fabric.setup(
        net, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    )
    other = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2)
    seen = []

    def closure() -> torch.Tensor:
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


def saved(fabric: Fabric, path: Path) -> dict[str, object]:
    """Train two steps and save; the rest of the state is the user's own."""
    torch.manual_seed(3)
    model, optimizer = fabric.setup(net := Gpt(), torch.optim.AdamW(net.parameters(), lr=1e-2))
    more_steps(fabric, model, optimizer, seed=1)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
    return more_steps(fabric, model, optimizer, seed=2)


def resumed(fabric: Fabric, path: Path) -> dict[str, object]:
    torch.manual_seed(4)
    model, optimizer = fabric.setup(net := Gpt(), torch.optim.AdamW(net.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(path, state) == {}
    assert state["step"] == 2
    return more_steps(fabric, model, optimizer, seed=2)


def more_steps(fabric: Fabric, model, optimizer, *, seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    losses = []
    for tokens in batches(2, seed=seed):
        loss = loss_of(model(tokens), tokens)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, "weights": [p.detach().clone() for p in model.parameters()]}


def test_checkpoints_go_from_and_to_plain_fabric(tmp_path):
    plain, other = tmp_path / "plain.ckpt", tmp_path / "ours.ckpt"
    expected = saved(make_fabric("auto"), plain)
    fabric = make_fabric(ours(tmp_path))
    assert_identical(saved(fabric, other), expected)
    assert type(fabric.strategy.checkpoint_io) is StreamedCheckpointIO
    assert_identical(torch.load(other, weights_only=True), torch.load(plain, weights_only=True))
    for path in (plain, other):
        assert_identical(resumed(make_fabric("auto"), path), expected)
        assert_identical(resumed(make_fabric(ours(tmp_path / path.stem)), path), expected)


def test_a_checkpoint_stays_as_it_was_saved_while_training_goes_on(tmp_path):
    fabric = make_fabric(ours(tmp_path))
    model, optimizer = fabric.setup(net := Gpt(), torch.optim.AdamW(net.parameters(), lr=1e-2))
    more_steps(fabric, model, optimizer, seed=1)
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    more_steps(fabric, model, optimizer, seed=2)
    assert_identical(state, before)
    after = optimizer.state_dict()
    fabric.save(tmp_path / "raw.ckpt", after)
    optimizer.load_state_dict(state)
    assert_identical(optimizer.state_dict(), before)
    fabric.load_raw(tmp_path / "raw.ckpt", optimizer)
    assert_identical(optimizer.state_dict(), after)


def test_the_users_own_checkpoint_io_stays(tmp_path):
    own = TorchCheckpointIO()
    assert make_fabric(ours(tmp_path), plugins=[own]).strategy.checkpoint_io is own
    assert type(make_fabric(ours(tmp_path, states="keep")).strategy.checkpoint_io) is TorchCheckpointIO


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


def test_launch_gives_what_the_function_returns(tmp_path):
    fabric = make_fabric(ours(tmp_path))
    assert_identical(fabric.launch(Loop(num_steps=1)), Loop(num_steps=1)(make_fabric("auto")))
    assert make_fabric(ours(tmp_path)).launch() is None


def test_callbacks_are_called_as_without_us(tmp_path):
    class Listens:
        def __init__(self):
            self.heard = []

        def on_after_setup(self, fabric, module):
            self.heard.append(type(module).__name__)

        def on_after_optimizer_step(self, strategy, optimizer):
            self.heard.append(strategy)

        def on_step(self, number):
            self.heard.append(number)

    listener = Listens()
    fabric = make_fabric(ours(tmp_path), callbacks=[listener])
    Loop(num_steps=1)(fabric)
    fabric.call("on_step", number=3)
    assert listener.heard == ["_FabricModule", fabric.strategy, 3]


# -- what is covered --------------------------------------------------------------------------------------------------


def test_nothing_is_opened_without_gradients(tmp_path):
    fabric = make_fabric(ours(tmp_path / "spill"))
    model = fabric.setup_module(Gpt())
    with torch.no_grad():
        model(batches(1)[0])
    with torch.inference_mode():
        model(batches(1)[0])
    assert fabric.strategy.offloader is None
    assert fabric.strategy.stats == OffloadStats()
    assert not (tmp_path / "spill").exists()
    model.eval()
    fabric.backward(loss_of(model(batches(1)[0]), batches(1)[0]))  # evaluation mode has gradients all the same
    assert fabric.strategy.stats.bytes_saved > 0


def test_more_than_the_forward_can_be_covered(tmp_path):
    """One pass for two forwards and the loss between them; without it, what the loss saves is kept."""

    def bytes_saved(*, covered: bool) -> int:
        fabric = make_fabric(ours(tmp_path / f"covered-{covered}"))
        model = fabric.setup_module(nn.Linear(16, 16))
        strategy, x = fabric.strategy, torch.ones(512, 16)
        if covered:
            with strategy.saved_tensors():
                loss = model(model(x)).exp().sum()
            assert strategy._num_passes == 1
        else:
            loss = model(model(x)).exp().sum()
            assert strategy._num_passes == 2
        fabric.backward(loss)
        return strategy.stats.bytes_saved

    exp_output = 512 * 16 * 4
    assert bytes_saved(covered=True) == bytes_saved(covered=False) + exp_output


def test_who_goes_past_us_is_told_once(tmp_path, recwarn):
    fabric = make_fabric(ours(tmp_path))
    model, _ = fabric.setup(net := Gpt(), torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match=r"nothing was offloaded.*with fabric\.strategy\.saved_tensors"):
        fabric.backward(model.head(torch.ones(2, 32)).sum())
    fabric.backward(model.head(torch.ones(2, 32)).sum())
    assert not recwarn.list


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_who_checkpoints_the_model_by_himself_sees_what_it_saves(tmp_path, use_reentrant):
    def run(fabric):
        torch.manual_seed(3)
        model, optimizer = fabric.setup(net := Gpt(), torch.optim.AdamW(net.parameters(), lr=1e-2))
        tokens, any_input = batches(1)[0], torch.zeros((), requires_grad=True)
        logits = checkpoint(lambda number: model(tokens) + number, any_input, use_reentrant=use_reentrant)
        fabric.backward(loss_of(logits, tokens))
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    fabric = make_fabric(ours(tmp_path))
    assert_identical(run(fabric), run(make_fabric("auto")))
    assert fabric.strategy.stats.bytes_saved == 0, "the checkpoint was bypassed"


def test_one_module_in_two_fabrics_has_one_pass_and_its_own_forward_afterwards(tmp_path):
    fabrics, net = [make_fabric(ours(tmp_path / name)) for name in "ab"], nn.Linear(4, 4)
    models = [fabric.setup_module(net) for fabric in fabrics]
    models[0](torch.ones(2, 4))
    assert [fabric.strategy._num_passes for fabric in fabrics] == [0, 1]
    for fabric in fabrics:
        fabric.strategy.close()
    assert "forward" not in net.__dict__


def test_where_hooks_are_refused_forward_goes_on(tmp_path):
    fabric = make_fabric(ours(tmp_path))
    model = fabric.setup_module(nn.Linear(4, 1))
    weights, x = {name: w.detach() for name, w in model.module.named_parameters()}, torch.ones(3, 4)
    gradients = torch.func.grad(lambda w: torch.func.functional_call(model.module, w, (x,)).sum())(weights)
    assert_identical(gradients["weight"], x.sum(0)[None])
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        fabric.backward(model(x).sum())
    assert_identical(model.module.weight.grad, x.sum(0)[None])
    assert fabric.strategy.stats.bytes_saved == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_forward_leaves_no_hooks(tmp_path, error):
    class Fails(nn.Linear):
        def forward(self, x):
            super().forward(x)
            assert hooks_are_installed()
            raise error

    fabric = make_fabric(ours(tmp_path))
    model = fabric.setup_module(Fails(4, 4))
    with pytest.raises(error):
        model(torch.ones(2, 4))
    assert not hooks_are_installed()


# -- the life of the offloader ----------------------------------------------------------------------------------------


def test_a_with_block_closes_and_setup_opens_anew(tmp_path):
    fabric = make_fabric(ours(tmp_path))
    with fabric.strategy:
        model, optimizer = fabric.setup(net := Gpt(), torch.optim.AdamW(net.parameters(), lr=1e-2))
        more_steps(fabric, model, optimizer, seed=1)
        metrics = fabric.strategy.offloader.drain_metrics()
        assert metrics["memory/activations_saved_peak_gib"] > 0
    saved_bytes = fabric.strategy.stats.bytes_saved
    assert saved_bytes > 0
    assert_nothing_left(tmp_path)
    assert "forward" not in net.__dict__
    tokens = batches(1)[0]
    fabric.backward(loss_of(model(tokens), tokens))  # the module goes on without us
    assert fabric.strategy.stats.bytes_saved == saved_bytes
    with pytest.raises(OffloaderClosedError, match="files are closed"):
        optimizer.step()
    state = optimizer.state_dict()
    assert_identical(Loop()(fabric), Loop()(make_fabric("auto")))
    assert fabric.strategy.stats.bytes_saved > 0
    assert state["state"][0]["step"] == 2
    fabric.strategy.teardown()
    fabric.strategy.close()
    assert_nothing_left(tmp_path)


def test_an_error_in_a_with_block_reaches_the_user_and_leaves_nothing(tmp_path):
    fabric = make_fabric(ours(tmp_path))

    def fail():
        with fabric.strategy:
            model, _ = fabric.setup(net := Gpt(), torch.optim.AdamW(net.parameters()))
            loss = loss_of(model(batches(1)[0]), batches(1)[0])
            raise ZeroDivisionError(f"sabotage {loss.dim()}")

    with pytest.raises(ZeroDivisionError, match="sabotage 0"):
        fail()
    assert_nothing_left(tmp_path)


def test_who_drops_everything_leaves_nothing(tmp_path):
    fabric = make_fabric(ours(tmp_path))
    net = Gpt()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    more_steps(fabric, model, optimizer, seed=1)
    del fabric, model, optimizer
    gc.collect()
    assert_nothing_left(tmp_path)
    net(batches(1)[0])
    assert "forward" not in net.__dict__


def test_copies_are_copies_without_us(tmp_path):
    fabric = make_fabric(ours(tmp_path))
    net = Gpt()
    names = set(net.__dict__)
    model, _ = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    for average in (copy.deepcopy(model), copy.deepcopy(net)):
        assert not any({"forward", "__getstate__"} & set(vars(module)) for module in average.modules())
        assert average(batches(1)[0]).requires_grad
        assert fabric.strategy._num_passes == 0
    assert copy.deepcopy(fabric.strategy) is fabric.strategy
    with io.BytesIO() as stream:
        torch.save(net, stream)
        assert b"lightning_ssd" not in stream.getvalue()
    model(batches(1)[0])
    assert fabric.strategy._num_passes == 1
    assert pickle.loads(pickle.dumps(fabric.strategy)).offloader is None
    fabric.strategy.close()
    assert set(net.__dict__) == names


def test_several_devices_can_be_sent_to_other_processes(tmp_path):
    strategy = make_fabric(ours(tmp_path, start_method="spawn"), devices=2).strategy
    copied = pickle.loads(pickle.dumps(strategy))
    assert copied.policy == strategy.policy
    assert not isinstance(copied, SingleDeviceStrategy)
    assert copied.is_distributed


# -- names and refusals -----------------------------------------------------------------------------------------------


def test_names_are_registered_once_and_never_taken_from_others(monkeypatch):
    register()
    assert STRATEGY_REGISTRY["ssd_offload"]["strategy"] is SSDOffloadFabricStrategy
    registry = _StrategyRegistry()
    registry.register("ssd_offload", Gpt)
    with pytest.raises(ConfigError, match=r"'ssd_offload' belongs to tests\.loops\.Gpt already"):
        SSDOffloadFabricStrategy.register_strategies(registry)
    other = types.ModuleType("lightning_fabric.strategies")
    other.STRATEGY_REGISTRY = _StrategyRegistry()
    monkeypatch.setitem(sys.modules, other.__name__, other)
    register()
    with pytest.raises(ConfigError, match=r"comes from lightning_fabric.*from lightning\.fabric import Fabric"):
        other.STRATEGY_REGISTRY.get("ssd_offload")


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"start_method='thread'; allowed: 'popen'"):
        SSDOffloadFabricStrategy(start_method="thread")
    with pytest.raises(ConfigError, match=r"policy='offload' is a str; allowed: OffloadPolicy"):
        SSDOffloadFabricStrategy(policy="offload")
    with pytest.raises(TypeError, match="hardwear"):
        SSDOffloadFabricStrategy(hardwear=None)
    strategy = ours(tmp_path)
    strategy.parallel_devices = [torch.device("meta")]
    with pytest.raises(ConfigError, match=r"a device of type 'meta'; allowed: 'cpu', 'cuda'"):
        strategy._configure_launcher()
    fabric = make_fabric(ours(tmp_path))
    net = Gpt()
    with pytest.raises(ConfigError, match=r"optimizer_states='offload' got LBFGS"):
        fabric.setup(net, torch.optim.LBFGS(net.parameters()))
