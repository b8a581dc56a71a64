"""Shards and their gradients that wait in files: two processes for the bits, one for what each of them does alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy, SSDOffloadFSDPStrategy, SSDOffloadStrategy
from lightning_ssd.common.dtensor import local_of, sharded_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.memory import gauge
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from tests.support.helpers import assert_identical
from tests.support.trainers import make_trainer

WIDTH = 64
EVERYTHING: dict[str, Any] = {"parameters": "offload", "gradients": "offload", "optimizer_states": "offload"}
FROZEN: dict[str, Any] = {"gradients": "keep", "optimizer_states": "keep"}

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def opened(spill_dir: Path) -> Iterator[Callable[..., Offloader]]:
    """Open offloaders, and close them at the end."""
    offloaders = []

    def make(**policy: Any) -> Offloader:
        chosen = EVERYTHING | {"activations": "keep", "min_tensor_bytes": 4096} | policy
        hardware = HardwareProfile(paths=[spill_dir], allow_unsuitable_paths=True)
        offloaders.append(Offloader(policy=OffloadPolicy(**chosen), hardware=hardware).open())
        return offloaders[-1]

    yield make
    for offloader in offloaders:
        offloader.close()


def sharded(mesh: Any) -> nn.Sequential:
    """Three blocks that are groups of their own, and a layer that belongs to the whole."""
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    """The shards, whether they are gathered now or not."""
    return [local_of(shard.parameter) for shard in sharded_of(model)]


Between = Callable[[nn.Module, int], object]


def run(
    model: nn.Module,
    offloader: Offloader | None,
    *,
    steps: int = 3,
    between: Between = lambda model, step: None,
) -> dict[str, Any]:
    """Train; ``between`` backward and update."""
    optimizer: Any = torch.optim.AdamW([shard.parameter for shard in sharded_of(model)], lr=1e-2)
    if offloader is not None:
        offloader.register_module(model)
        optimizer = offloader.offload_optimizer(optimizer)
    found: dict[str, Any] = {"losses": [], "gradients": []}
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        if offloader is not None:
            offloader.end_backward()
        between(model, step)
        parameters = [shard.parameter for shard in sharded_of(model)]
        found["losses"].append(loss.detach())
        found["gradients"].append([None if p.grad is None else local_of(p.grad).clone() for p in parameters])
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = [local.clone() for local in locals_of(model)]
    return found


def test_tensors_stay_the_objects_that_they_were(mesh: Any, opened: Callable[..., Offloader]) -> None:
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


def test_what_is_gathered_when_the_model_is_registered_is_left_to_fsdp2(
    mesh: Any, opened: Callable[..., Offloader]
) -> None:
    found = []
    for offloader in (None, opened()):
        model = sharded(mesh)
        with torch.no_grad():
            model(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0)))  # the last layer stays gathered
        gathered = model[3].weight
        assert type(gathered) is nn.Parameter
        found.append(run(model, offloader))
        if offloader is not None:
            assert offloader.stats.weights_bytes == sum(p.nbytes for p in locals_of(model) if p.nbytes >= 4096)
            assert not is_mapped(gathered.untyped_storage())
    assert_identical(found[1], found[0])


def test_autocast_casts_what_is_gathered(mesh: Any, opened: Callable[..., Offloader]) -> None:
    found = []
    for offloader in (None, opened(**FROZEN)):
        model = sharded(mesh)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name)
        if offloader is not None:
            offloader.register_module(model)
        context = nullcontext() if offloader is None else offloader.saved_tensors()
        with context, torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(8, WIDTH)).float().square().mean()
        loss.backward()
        found.append([loss.detach(), *(local_of(p.grad).clone() for p in model.parameters() if p.grad is not None)])
    assert_identical(found[1], found[0])


@pytest.mark.parametrize("hold", ["view", "numpy", "dlpack", "storage"])
def test_a_shard_that_somebody_holds_stays(hold: str, mesh: Any, opened: Callable[..., Offloader]) -> None:
    model = sharded(mesh)
    local = local_of(model[1][0].weight)
    holders: dict[str, Callable[[], Any]] = {
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


def test_gradients_lie_as_fsdp2_has_laid_them(mesh: Any, opened: Callable[..., Offloader]) -> None:
    """Aligned to vectors or not: else MKL's products of a gradient with itself would have other bits."""

    def results(offloader: Offloader | None) -> tuple[list[int], list[torch.Tensor]]:
        torch.manual_seed(2)
        model = fully_shard(nn.Sequential(nn.Linear(WIDTH, 37), nn.Linear(37, 111), nn.Linear(111, 1)), mesh=mesh)
        places, products = [], []

        def between(model: nn.Module, step: int) -> None:
            found = [local_of(parameter.grad).flatten() for parameter in model.parameters()]  # type: ignore[arg-type]
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
def test_a_gradient_that_a_hook_keeps_is_not_parted_from_it(
    what: str, mesh: Any, opened: Callable[..., Offloader]
) -> None:
    """What the hook keeps is scaled before the update, and so is what the optimizer sees."""
    found = []
    for offloader in (None, opened()):
        model, kept = sharded(mesh), []
        take: dict[str, Callable[[Any], Any]] = {
            "gradient": lambda p: p.grad,
            "local": lambda p: p.grad._local_tensor,
            "view": lambda p: p.grad._local_tensor[:7],
        }
        model[1][2].weight.register_post_accumulate_grad_hook(lambda p, k=kept, t=take[what]: k.append(t(p)))

        def scale(model: nn.Module, step: int, kept: list[Any] = kept) -> None:
            local_of(kept[-1]).mul_(3)
            kept[0].zero_() if len(kept) > 1 else None

        found.append(run(model, offloader, between=scale))
        found[-1]["kept"] = [local_of(one).clone() for one in kept]
    assert_identical(found[1], found[0])


@pytest.mark.parametrize("what", ["tensor", "storage", "array"])
def test_memory_that_an_all_reduce_hook_keeps_is_not_parted_from_the_gradients(
    what: str, mesh: Any, opened: Callable[..., Offloader]
) -> None:
    """FSDP2 gives the hook the memory of all gradients of a group. Here it is scaled before the update."""
    take: dict[str, Callable[[torch.Tensor], Any]] = {
        "tensor": lambda reduced: reduced,
        "storage": lambda reduced: reduced.untyped_storage(),
        "array": lambda reduced: reduced.numpy(),
    }
    found = []
    for offloader in (None, opened()):
        model: Any = sharded(mesh)
        kept: list[Any] = []
        for block in model[:3]:
            block.set_all_reduce_hook(lambda reduced, k=kept: k.append(take[what](reduced)))

        def scale(model: nn.Module, step: int, kept: list[Any] = kept) -> None:
            assert len(kept) == 3
            for one in kept:
                torch.tensor([]).set_(one).mul_(0.25) if what == "storage" else one.__imul__(0.25)
            kept.clear()

        found.append(run(model, offloader, between=scale))
    assert_identical(found[1], found[0])


def test_an_update_in_backward(mesh: Any, opened: Callable[..., Offloader]) -> None:
    """A hook that updates its shard and drops the gradient, as many people save memory."""
    found = []
    for offloader in (None, opened(gradients="offload")):
        model = sharded(mesh)

        @torch.no_grad()
        def update(parameter: torch.Tensor) -> None:
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        found.append(run(model, offloader))
        assert found[-1]["gradients"] == [[None] * 14] * 3
    assert_identical(found[1], found[0])


def test_other_memory_is_taken_over_again_and_the_old_place_is_given_back(
    mesh: Any, opened: Callable[..., Offloader]
) -> None:
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


def test_after_closing_the_model_trains_on(mesh: Any, opened: Callable[..., Offloader]) -> None:
    model, other = sharded(mesh), sharded(mesh)
    offloader = opened()
    run(model, offloader)
    run(other, None)
    offloader.close()
    assert "unshard" not in vars(model._get_fsdp_state()._fsdp_param_group)
    assert_identical(run(model, None), run(other, None))


@pytest.mark.parametrize(("available", "num_waiting"), [(1 << 40, 0), (None, 7)])
def test_with_auto_as_many_wait_as_memory_lacks(
    available: int | None,
    num_waiting: int,
    mesh: Any,
    opened: Callable[..., Offloader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gauge, "host_available_bytes", lambda cached: available)
    monkeypatch.setattr(gauge, "anonymous_bytes", lambda: 1 << 20)
    offloader = opened(parameters="auto", gradients="auto")
    expected = run(sharded(mesh), None)
    assert_identical(run(sharded(mesh), offloader), expected)
    assert offloader.stats.weights_bytes == num_waiting * WIDTH * WIDTH * 4
    assert offloader.stats.weights_kept_bytes == (7 - num_waiting) * WIDTH * WIDTH * 4


def test_shards_leave_and_come_back_when_the_model_is_registered_again(
    mesh: Any, opened: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, waiting = {"available": 1 << 40}, []
    monkeypatch.setattr(gauge, "host_available_bytes", lambda cached: memory["available"])
    expected = run(sharded(mesh), None, steps=12)
    offloader = opened(parameters="auto", gradients="auto")

    def between(model: nn.Module, step: int) -> None:
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


def test_gradients_of_shards_that_were_exchanged_or_unfrozen_wait(mesh: Any, opened: Callable[..., Offloader]) -> None:
    """FSDP2 makes other parameters of what is assigned."""
    model, offloader = sharded(mesh), opened(parameters="keep")
    offloader.expect_no_optimizer()
    offloader.register_module(model)

    def num_waiting() -> int:
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


def test_shards_that_are_unfrozen_while_they_wait(mesh: Any, opened: Callable[..., Offloader]) -> None:
    found = []
    for offloader in (None, opened(**FROZEN)):
        model = sharded(mesh)
        model[:2].requires_grad_(False)

        def unfreeze(model: nn.Module, step: int) -> None:
            if step == 1:
                for shard in sharded_of(model[1]):
                    shard.parameter.requires_grad_(True)

        found.append(run(model, offloader, steps=5, between=unfreeze))
        # Of the layer outside of blocks, and of the first two blocks.
        assert [g is None for g in found[-1]["gradients"][4][:10]] == [False] * 2 + [True] * 4 + [False] * 4
    assert_identical(found[1], found[0])


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", ["offload", "auto"])
def test_a_gpu_is_refused_before_processes_start(parameters: Any) -> None:
    strategy = SSDOffloadFSDPStrategy(policy=OffloadPolicy(parameters=parameters))
    strategy.parallel_devices = [torch.device("cuda", number) for number in range(2)]
    strategy.cluster_environment = LightningEnvironment()
    message = r"FSDPStrategy got OffloadPolicy.parameters='.*' on 'cuda:0', and .*\. Write parameters='keep'"
    with pytest.raises(ConfigError, match=message):
        strategy._configure_launcher()


def test_a_full_checkpoint_of_offloaded_states_is_refused_on_a_gpu() -> None:
    policy = OffloadPolicy(optimizer_states="offload")
    strategy = SSDOffloadFSDPStrategy(policy=policy, save_distributed_checkpoint=False)
    strategy.parallel_devices = [torch.device("cuda", number) for number in range(2)]
    strategy.cluster_environment = LightningEnvironment()
    message = "got save_distributed_checkpoint=False .* on 'cuda:0': .*consolidate_checkpoint DIRECTORY makes one file"
    with pytest.raises(ConfigError, match=message):
        strategy._configure_launcher()


@pytest.mark.parametrize("gradients", ["offload", "auto"])
def test_gradients_under_ddp_are_refused_when_the_trainer_is_made(gradients: Any, tmp_path: Path) -> None:
    policy = OffloadPolicy(**EVERYTHING | {"gradients": gradients})
    with pytest.raises(ConfigError, match=r"SSDOffloadStrategy with 2 processes got OffloadPolicy.gradients=.*buckets"):
        make_trainer(SSDOffloadStrategy(policy=policy), tmp_path, devices=2)
    with pytest.raises(ConfigError, match=r"FabricStrategy with 2 processes got OffloadPolicy.gradients=.*buckets"):
        Fabric(accelerator="cpu", devices=2, strategy=SSDOffloadFabricStrategy(policy=policy))
