"""What Fabric's strategy covers, the life of its offloader, and the names that it refuses."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ssd import OffloadStats
from lightning_ssd.errors import ConfigError, OffloaderClosedError
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from tests.support.helpers import assert_identical
from tests.support.leftovers import assert_nothing_left
from tests.support.loops import Gpt, Loop, batches, loss_of, make_fabric, more_steps, ours

pytestmark = pytest.mark.usefixtures("collected")


def hooks_are_installed():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


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

    def bytes_saved(*, covered):
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
    with pytest.raises(error), fabric.strategy:
        model(torch.ones(2, 4))
    assert not hooks_are_installed()
    assert_nothing_left(tmp_path)


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
    several = make_fabric(ours(tmp_path, start_method="spawn"), devices=2).strategy
    sent = pickle.loads(pickle.dumps(several))
    assert sent.policy == several.policy
    assert sent.is_distributed
    fabric.strategy.close()
    assert set(net.__dict__) == names


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"start_method='thread' is unknown\. Write one of 'popen'"):
        SSDOffloadFabricStrategy(start_method="thread")
    with pytest.raises(ConfigError, match=r"policy='offload' is a str\. Pass .* type OffloadPolicy"):
        SSDOffloadFabricStrategy(policy="offload")
    with pytest.raises(TypeError, match="unexpected keyword argument 'hardwear'"):
        SSDOffloadFabricStrategy(hardwear=None)
    strategy = ours(tmp_path)
    strategy.parallel_devices = [torch.device("meta")]
    with pytest.raises(ConfigError, match=r"a device of type 'meta', and can only offload from 'cpu', 'cuda'"):
        strategy._configure_launcher()
    fabric = make_fabric(ours(tmp_path))
    net = Gpt()
    with pytest.raises(ConfigError, match=r"optimizer_states='offload' got LBFGS"):
        fabric.setup(net, torch.optim.LBFGS(net.parameters()))
