"""Shards and their gradients that wait in files: two processes for the bits, one for what each of them does alone."""

import gc
import weakref

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_ssd import OffloadPolicy, SSDOffloadFSDPStrategy, SSDOffloadStrategy
from lightning_ssd.common.dtensor import local_of, sharded_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.memory import gauge
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from tests.support.helpers import Session, assert_identical
from tests.support.offloaders import offloaders
from tests.support.trainers import make_trainer

WIDTH = 64
EVERYTHING = {"parameters": "offload", "gradients": "offload", "optimizer_states": "offload"}
FROZEN = {"gradients": "keep", "optimizer_states": "keep"}

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(spill_dir):
    """Open offloaders, and close them at the end."""
    chosen = EVERYTHING | {"activations": "keep", "min_tensor_bytes": 4096}
    with offloaders(spill_dir, lambda **policy: OffloadPolicy(**(chosen | policy))) as make:
        yield make


def sharded(mesh):
    """Three blocks that are groups of their own, and a layer that belongs to the whole."""
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def locals_of(model):
    """The shards, whether they are gathered now or not."""
    return [local_of(shard.parameter) for shard in sharded_of(model)]


def run(model, offloader, *, steps=3, between=lambda model, step: None):
    """Train; ``between`` backward and update."""
    session = Session(offloader)
    optimizer = torch.optim.AdamW([shard.parameter for shard in sharded_of(model)], lr=1e-2)
    session.register(model)
    optimizer = session.optimizer(optimizer)
    found = {"losses": [], "gradients": []}
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        session.backward(loss)
        between(model, step)
        parameters = [shard.parameter for shard in sharded_of(model)]
        found["losses"].append(loss.detach())
        found["gradients"].append([None if p.grad is None else local_of(p.grad).clone() for p in parameters])
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = [local.clone() for local in locals_of(model)]
    return found


def assert_same(train, offloader):
    """With the offloader it gives what it gives without one."""
    assert_identical(train(offloader), train(None))


def test_tensors_stay_the_objects_that_they_were(mesh, opened):
    model = sharded(mesh)
    weight, local = model[0][0].weight, local_of(model[0][0].weight)
    flat = next(sharded_of(model[0])).fsdp_param._sharded_param_data
    version, before = local._version, local.clone()
    opened().register_module(model)
    assert model[0][0].weight is weight
    assert local_of(weight) is local
    assert is_mapped(local.untyped_storage())
    assert flat.untyped_storage()._cdata == local.untyped_storage()._cdata
    assert local._version == version
    assert torch.equal(local, before)
    model(torch.randn(2, WIDTH))  # FSDP2 looks again for the memory of shards in the first forward
    assert is_mapped(local_of(weight).untyped_storage())
    assert flat.untyped_storage()._cdata == local.untyped_storage()._cdata


def test_a_model_that_has_never_run_goes_when_the_program_lets_it_go(mesh, opened):
    model = sharded(mesh)
    known = weakref.ref(next(sharded_of(model[0])).fsdp_param)
    offloader = opened(**dict.fromkeys(EVERYTHING, "keep"), activations="offload")
    offloader.register_module(model)
    with offloader.saved_tensors():
        pass
    del model
    gc.collect()
    assert known() is None


def test_what_is_gathered_when_the_model_is_registered_is_left_to_fsdp2(mesh, opened):
    def train(offloader):
        model = sharded(mesh)
        with torch.no_grad():
            model(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0)))  # the last layer stays gathered
        gathered = model[3].weight
        assert type(gathered) is nn.Parameter
        found = run(model, offloader)
        if offloader is not None:
            assert offloader.stats.weights_bytes == sum(p.nbytes for p in locals_of(model) if p.nbytes >= 4096)
            assert not is_mapped(gathered.untyped_storage())
        return found

    assert_same(train, opened())


def test_autocast_casts_what_is_gathered(mesh, opened):
    def train(offloader):
        model, session = sharded(mesh), Session(offloader)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name)
        session.register(model)
        with session.saved(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(8, WIDTH)).float().square().mean()
        loss.backward()
        return [loss.detach(), *(local_of(p.grad).clone() for p in model.parameters() if p.grad is not None)]

    assert_same(train, opened(**FROZEN))


@pytest.mark.parametrize("hold", ["view", "numpy", "dlpack", "storage"])
def test_a_shard_that_somebody_holds_stays(hold, mesh, opened):
    model = sharded(mesh)
    local = local_of(model[1][0].weight)
    holders = {
        "view": lambda: local[3:5],
        "numpy": local.numpy,
        "dlpack": local.__dlpack__,
        "storage": local.untyped_storage,
    }
    held = holders[hold]()
    offloader = opened()
    with pytest.warns(UserWarning, match=r"1 weights stay in memory.*the first is 1\.0\.weight"):
        offloader.register_module(model)
    assert not is_mapped(local.untyped_storage())
    assert offloader.stats.weights_bytes == 6 * WIDTH * WIDTH * 4
    del held
    if hold != "numpy":  # PyTorch never resizes again what NumPy has seen
        offloader.register_module(model)
        assert is_mapped(local.untyped_storage())


def test_gradients_lie_as_fsdp2_has_laid_them(mesh, opened):
    """Aligned to vectors or not: else MKL's products of a gradient with itself would have other bits."""

    def results(offloader):
        torch.manual_seed(2)
        model = fully_shard(nn.Sequential(nn.Linear(WIDTH, 37), nn.Linear(37, 111), nn.Linear(111, 1)), mesh=mesh)
        places, products = [], []

        def between(model, step):
            found = [local_of(parameter.grad).flatten() for parameter in model.parameters()]
            places.extend(gradient.data_ptr() % 64 for gradient in found)
            products.extend(gradient.dot(gradient) for gradient in found)
            if offloader is not None:
                assert sum(is_mapped(gradient.untyped_storage()) for gradient in found) == 2

        run(model, offloader, between=between)
        return places, products

    (places, expected), (ours, found) = results(None), results(opened())
    assert ours == places
    assert any(places)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("what", ["gradient", "local", "view"])
def test_a_gradient_that_a_hook_keeps_is_not_parted_from_it(what, mesh, opened):
    """What the hook keeps is scaled before the update, and so is what the optimizer sees."""
    take = {
        "gradient": lambda p: p.grad,
        "local": lambda p: p.grad._local_tensor,
        "view": lambda p: p.grad._local_tensor[:7],
    }

    def train(offloader):
        model, kept = sharded(mesh), []
        model[1][2].weight.register_post_accumulate_grad_hook(lambda p: kept.append(take[what](p)))

        def scale(model, step):
            local_of(kept[-1]).mul_(3)
            kept[0].zero_() if len(kept) > 1 else None

        return run(model, offloader, between=scale) | {"kept": [local_of(one).clone() for one in kept]}

    assert_same(train, opened())


@pytest.mark.parametrize("what", ["tensor", "storage", "array"])
def test_memory_that_an_all_reduce_hook_keeps_is_not_parted_from_the_gradients(what, mesh, opened):
    """FSDP2 gives the hook the memory of all gradients of a group. Here it is scaled before the update."""
    take = {
        "tensor": lambda reduced: reduced,
        "storage": lambda reduced: reduced.untyped_storage(),
        "array": lambda reduced: reduced.numpy(),
    }

    def train(offloader):
        model, kept = sharded(mesh), []
        for block in model[:3]:
            block.set_all_reduce_hook(lambda reduced: kept.append(take[what](reduced)))

        def scale(model, step):
            assert len(kept) == 3
            for one in kept:
                torch.tensor([]).set_(one).mul_(0.25) if what == "storage" else one.__imul__(0.25)
            kept.clear()

        return run(model, offloader, between=scale)

    assert_same(train, opened())


def test_an_update_in_backward(mesh, opened):
    """A hook that updates its shard and drops the gradient, as many people save memory."""

    def train(offloader):
        model = sharded(mesh)

        @torch.no_grad()
        def update(parameter):
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        found = run(model, offloader)
        assert found["gradients"] == [[None] * 14] * 3
        return found

    assert_same(train, opened(gradients="offload"))


def test_other_memory_is_taken_over_again_and_the_old_place_is_given_back(mesh, opened):
    offloader = opened(**FROZEN)
    model = sharded(mesh).requires_grad_(False)
    offloader.register_module(model)
    nbytes = offloader.stats.weights_bytes
    model.bfloat16()
    assert not any(is_mapped(local.untyped_storage()) for local in locals_of(model))
    offloader.register_module(model)
    assert offloader.stats.weights_bytes == nbytes // 2
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(torch.randn(2, WIDTH, dtype=torch.bfloat16))
    offloader.end_backward()
    assert offloader.stats.weights_bytes == 0
    offloader.register_module(model)
    assert offloader.stats.weights_bytes == nbytes // 2
    del model
    gc.collect()
    offloader.end_backward()
    assert offloader.stats.weights_bytes == 0, "a model that is gone gives its place back"


def test_after_closing_the_model_trains_on(mesh, opened):
    model, other = sharded(mesh), sharded(mesh)
    offloader = opened()
    run(model, offloader)
    run(other, None)
    offloader.close()
    assert "unshard" not in vars(model._get_fsdp_state()._fsdp_param_group)
    assert_identical(run(model, None), run(other, None))


@pytest.mark.parametrize(("available", "num_waiting"), [(1 << 40, 0), (None, 7)])
def test_with_auto_as_many_wait_as_memory_lacks(available, num_waiting, mesh, opened, monkeypatch):
    monkeypatch.setattr(gauge, "host_available_bytes", lambda cached: available)
    monkeypatch.setattr(gauge, "anonymous_bytes", lambda: 1 << 20)
    offloader = opened(parameters="auto", gradients="auto")
    expected = run(sharded(mesh), None)
    assert_identical(run(sharded(mesh), offloader), expected)
    assert offloader.stats.weights_bytes == num_waiting * WIDTH * WIDTH * 4
    assert offloader.stats.weights_kept_bytes == (7 - num_waiting) * WIDTH * WIDTH * 4


def test_shards_leave_and_come_back_when_the_model_is_registered_again(mesh, opened, monkeypatch):
    memory, waiting = {"available": 1 << 40}, []
    monkeypatch.setattr(gauge, "host_available_bytes", lambda cached: memory["available"])
    expected = run(sharded(mesh), None, steps=12)
    offloader = opened(parameters="auto", gradients="auto")

    def between(model, step):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        in_files = sum(is_mapped(local_of(gradient).untyped_storage()) for gradient in gradients)
        waiting.append((sum(is_mapped(local.untyped_storage()) for local in locals_of(model)), in_files))
        if step in (2, 6):
            memory["available"] = 0 if step == 2 else 1 << 40
            offloader.register_module(model)

    assert_identical(run(sharded(mesh), offloader, steps=12, between=between), expected)
    assert waiting[2] == (0, 0)
    assert waiting[6] == (7, 7)
    assert waiting[-1] == (0, 0)


def test_gradients_of_shards_that_were_exchanged_or_unfrozen_wait(mesh, opened):
    """FSDP2 makes other parameters of what is assigned."""
    model, offloader = sharded(mesh), opened(parameters="keep")
    offloader.expect_no_optimizer()
    offloader.register_module(model)

    def num_waiting():
        model(torch.ones(8, WIDTH)).square().mean().backward()
        offloader.end_backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return sum(is_mapped(local_of(gradient).untyped_storage()) for gradient in gradients)

    assert num_waiting() == 7
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert num_waiting() == 7
    model[0].requires_grad_(False)
    offloader.register_module(model)
    assert num_waiting() == 5
    model[0].requires_grad_(True)
    assert num_waiting() == 7


def test_shards_that_are_unfrozen_while_they_wait(mesh, opened):
    def train(offloader):
        model = sharded(mesh)
        model[:2].requires_grad_(False)

        def unfreeze(model, step):
            if step == 1:
                for shard in sharded_of(model[1]):
                    shard.parameter.requires_grad_(True)

        found = run(model, offloader, steps=5, between=unfreeze)
        # Of the layer outside of blocks, and of the first two blocks.
        assert [g is None for g in found["gradients"][4][:10]] == [False] * 2 + [True] * 4 + [False] * 4
        return found

    assert_same(train, opened(**FROZEN))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", ["offload", "auto"])
def test_a_gpu_is_refused_before_processes_start(parameters):
    strategy = SSDOffloadFSDPStrategy(policy=OffloadPolicy(parameters=parameters))
    strategy.parallel_devices = [torch.device("cuda", number) for number in range(2)]
    strategy.cluster_environment = LightningEnvironment()
    message = r"FSDPStrategy got OffloadPolicy.parameters='.*' on 'cuda:0', and .*\. Write parameters='keep'"
    with pytest.raises(ConfigError, match=message):
        strategy._configure_launcher()


def test_a_full_checkpoint_of_offloaded_states_is_refused_on_a_gpu():
    policy = OffloadPolicy(optimizer_states="offload")
    strategy = SSDOffloadFSDPStrategy(policy=policy, save_distributed_checkpoint=False)
    strategy.parallel_devices = [torch.device("cuda", number) for number in range(2)]
    strategy.cluster_environment = LightningEnvironment()
    message = "got save_distributed_checkpoint=False .* on 'cuda:0': .*consolidate_checkpoint DIRECTORY makes one file"
    with pytest.raises(ConfigError, match=message):
        strategy._configure_launcher()


@pytest.mark.parametrize("gradients", ["offload", "auto"])
def test_gradients_under_ddp_are_refused_when_the_trainer_is_made(gradients, tmp_path):
    policy = OffloadPolicy(**EVERYTHING | {"gradients": gradients})
    with pytest.raises(ConfigError, match=r"SSDOffloadStrategy with 2 processes got OffloadPolicy.gradients=.*buckets"):
        make_trainer(SSDOffloadStrategy(policy=policy), tmp_path, devices=2)
    with pytest.raises(ConfigError, match=r"FabricStrategy with 2 processes got OffloadPolicy.gradients=.*buckets"):
        Fabric(accelerator="cpu", devices=2, strategy=SSDOffloadFabricStrategy(policy=policy))
