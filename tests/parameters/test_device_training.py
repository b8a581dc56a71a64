"""Trained weights of a device that wait with their optimizer's states: the bits of plain training."""

import ctypes
import importlib
import warnings

import pytest
import torch
from torch import nn

from lightning_ssd import OffloadPolicy
from lightning_ssd.errors import ConfigError, OutOfSpaceError, StorageError
from lightning_ssd.parameters.guard.guard import GUARDED
from tests.parameters.test_device_weights import away, eventually
from tests.parameters.test_everything_away import (  # noqa: F401  # these are tests, here with our own offloaders
    test_after_closing_training_goes_on_in_memory,
    test_resuming_from_state_dicts,
)
from tests.support.faults import eio
from tests.support.opened import offloader_in
from tests.support.pairs import each_once
from tests.support.races import assert_no_race
from tests.support.switched_faults import Switch
from tests.support.weight_loops import (
    MIN_TENSOR,
    NUM_BLOCKS,
    VOCABULARY,
    WIDTH,
    Block,
    Loop,
    batches,
    equal_weights,
    passed,
    same,
)

IS_LATE = True
pytestmark = pytest.mark.usefixtures("many_parts")

TRAINED = {"parameters": "offload", "optimizer_states": "offload"}
NUM_WEIGHTS = 1 + 3 * NUM_BLOCKS
"""Three matrices a block, and the embedding, which the head shares."""
NUM_BYTES = 4 * (NUM_BLOCKS * 9 * WIDTH * WIDTH + VOCABULARY * WIDTH)


def policy(**options):
    chosen = TRAINED | {"activations": "keep", "min_tensor_bytes": MIN_TENSOR} | options
    if chosen["optimizer_states"] == "offload":
        chosen = {"per_parameter_optimizers": ("Uncounted", "Meddling")} | chosen
    return OffloadPolicy(**chosen)


def written(offloader):
    return offloader._parts.parameters.weights.stats.bytes_written


def have_left(offloader, model):
    """Whether all weights leave in time, but for those of one unit, which may be on its way again."""
    return eventually(offloader, lambda: len(away(model)) >= NUM_WEIGHTS - 3)


# -- an update makes what waits old ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_memory", [0, "1MiB", "1GiB"])
def test_each_update_is_written_before_a_weight_leaves(host_memory, opened):
    offloader = opened(host_memory=host_memory)
    loop, plain = Loop(offloader), Loop()
    assert eventually(offloader, lambda: len(away(loop.model)) == NUM_WEIGHTS)
    for _ in range(3):
        before = written(offloader)
        loop.run(1)
        plain.run(1)
        assert have_left(offloader, loop.model)
        if host_memory == 0:
            assert eventually(offloader, lambda before=before: written(offloader) - before == NUM_BYTES)
        elif host_memory == "1GiB":
            assert written(offloader) == 0
        assert equal_weights(loop.model, plain.model)
    assert same(loop.result(), plain.result())


class Uncounted(torch.optim.Optimizer):
    """As a kernel that gets an address: no version tells of what it does."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    new = (parameter.detach() - group["lr"] * parameter.grad).contiguous()
                    ctypes.memmove(parameter.data_ptr(), new.data_ptr(), new.nbytes)


def test_an_update_that_no_version_tells_of_is_not_lost(opened):
    loop, plain = Loop(opened(), make=Uncounted), Loop(make=Uncounted)
    versions = [parameter._version for parameter in plain.model.parameters()]
    assert same(loop.run().result(), plain.run().result())
    assert [parameter._version for parameter in plain.model.parameters()] == versions


def test_versions_are_those_of_plain_training(opened):
    loop, plain = Loop(opened()).run(2), Loop().run(2)
    cut = {id(p) for p in loop.model.parameters() if len(loop.optimizer._states.partition.places_of(p)) > 1}
    for one, other in zip(loop.model.parameters(), plain.model.parameters(), strict=True):
        assert one._version >= other._version if id(one) in cut else one._version == other._version


def test_master_weights(opened, spill_dir):
    options = {"dtype": torch.bfloat16}
    states_alone = {"optimizer_states": "offload", "activations": "keep", "master_weights": True}
    with offloader_in(spill_dir, **states_alone, min_tensor_bytes=MIN_TENSOR) as offloader:
        expected = Loop(offloader, **options).run().result()
    assert same(Loop(opened(master_weights=True), **options).run().result(), expected)


def test_an_update_reads_and_writes_each_weight_once(opened):
    offloader = opened()
    loop = Loop(offloader).run(1)
    assert have_left(offloader, loop.model)
    tier = offloader._parts.parameters.weights._tiers.ssd
    loop.backward()
    assert have_left(offloader, loop.model)
    before = tier.progress()
    loop.optimizer.step()
    assert eventually(offloader, lambda: tier.progress().written_bytes - before.written_bytes == NUM_BYTES)
    assert tier.progress().read_bytes - before.read_bytes <= NUM_BYTES


def test_no_more_than_some_blocks_are_in_memory(opened):
    """In the update one is written, a subgroup ends in one and begins in the next, and one is on its way. A copy that
    has ended may hold its memory for a moment.
    """
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(12)))
    block_bytes = 4 * 9 * WIDTH * WIDTH
    offloader = opened()
    offloader.register_module(blocks)
    optimizer = offloader.offload_optimizer(torch.optim.AdamW(blocks.parameters()))
    for _ in range(3):
        offloader.reset_peaks()
        passed(offloader, lambda: blocks(torch.randn(4, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert offloader.stats.weights_bytes == 12 * block_bytes
    assert offloader.stats.weights_resident_peak_bytes <= 4.5 * block_bytes


# -- who may update ----------------------------------------------------------------------------------------------------


def test_without_offloaded_states_trained_weights_stay(opened):
    offloader = opened(optimizer_states="keep")
    with pytest.warns(UserWarning, match="moves nothing: no weight .* is frozen"):
        loop = Loop(offloader)
    assert away(loop.model) == []
    assert same(loop.run().result(), Loop().run().result())


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, Uncounted])
def test_an_optimizer_that_is_not_offloaded_keeps_its_weights(make, opened):
    """It might write to them in a way that nobody sees."""
    offloader = opened()
    offloader.expect_no_optimizer()
    loop = Loop(make=make)
    offloader.register_module(loop.model)
    assert eventually(offloader, lambda: len(away(loop.model)) == NUM_WEIGHTS)
    loop.offloader = offloader
    with pytest.warns(UserWarning, match="is in no optimizer that offload_optimizer"):
        loop.run()
    assert away(loop.model) == []
    assert same(loop.result(), Loop(make=make).run().result())


def test_optimizers_choose_their_implementation_as_in_plain_pytorch(opened):
    types = importlib.import_module("torch.optim.optimizer")._foreach_supported_types
    offloader = opened()
    assert set(GUARDED) <= set(types)
    offloader.close()
    assert not set(GUARDED) & set(types)


def test_parameters_that_come_to_the_optimizer_later(opened):
    def trained(offloader):
        loop = Loop(offloader)
        first, later = [loop.model.blocks[0], loop.model.blocks[1]], [loop.model.blocks[2], loop.model.blocks[3]]
        for module in (*later, loop.model.embedding):
            module.requires_grad_(False)
        loop.optimizer = torch.optim.AdamW([p for module in first for p in module.parameters()], lr=1e-2)
        if offloader is not None:
            loop.optimizer = offloader.offload_optimizer(loop.optimizer)
        loop.run(2)
        for module in later:
            module.requires_grad_(True)
        loop.optimizer.add_param_group({"params": [p for module in later for p in module.parameters()]})
        loop.run(2)
        return loop.result()

    assert same(trained(opened()), trained(None))


def overlapping():
    module = nn.Module()
    both = torch.randn(96, 256)
    module.one, module.other = nn.Parameter(both[:64]), nn.Parameter(both[32:])
    module.large = nn.Linear(256, 512)
    return module


def test_parameters_that_share_elements_are_refused_while_they_are_away(opened):
    module = overlapping()
    offloader = opened()
    offloader.register_module(module)
    assert "one" in away(module)
    optimizer = offloader.offload_optimizer(torch.optim.AdamW(module.parameters()))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match="lie within the same memory"):
        optimizer.step()


class Meddling(torch.optim.SGD):
    """Looks at all parameters in each call."""

    def __init__(self, parameters, lr):
        self.all = None
        super().__init__(parameters, lr=lr)
        self.mine = lambda: [p for group in ALL.get(id(self), self.param_groups) for p in group["params"]]

    def step(self, closure=None):
        for parameter in self.mine():
            if parameter.grad is not None:
                parameter.detach().mul_(0.99)
        return super().step(closure)


ALL = {}


def test_an_optimizer_that_touches_others_is_found_out_while_they_are_away(opened):
    offloader = opened()
    loop = Loop(offloader, make=Meddling)
    ALL[id(loop.optimizer.inner)] = list(loop.optimizer.param_groups)
    with pytest.raises(ConfigError, match="changes parameters that its step was not given"):
        loop.run(1)
    ALL.clear()


# -- building, moving, saving ------------------------------------------------------------------------------------------


def test_a_model_that_moves_in_weight_by_weight(opened):
    plain, loop = Loop(), Loop()
    offloader = opened()
    offloader.move_in(loop.model)
    assert eventually(offloader, lambda: len(away(loop.model)) == NUM_WEIGHTS)
    loop.model.to("cpu")
    offloader.register_module(loop.model)
    loop.offloader = offloader
    loop.optimizer = offloader.offload_optimizer(torch.optim.AdamW(loop.model.parameters(), lr=1e-2))
    assert same(loop.run().result(), plain.run().result())


def test_a_checkpoint_in_the_middle_is_made_of_host_copies(opened):
    offloader = opened()
    loop, plain = Loop(offloader).run(2), Loop().run(2)
    offloader.reset_peaks()
    with offloader.host_copies():
        state = {name: value + 0 for name, value in loop.model.state_dict().items()}  # of small ones, which are here
    assert same(list(state.values()), list(plain.model.state_dict().values()))
    assert offloader.stats.weights_resident_peak_bytes < NUM_BYTES / 2
    assert same(loop.run(2).result(), plain.run(2).result())
    assert same(list(state.values()), list(Loop().run(2).model.state_dict().values()))


# -- when a drive fails or is full -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [eio, lambda: OutOfSpaceError(28, "No space left on device")], ids=["eio", "full"])
def test_updated_weights_that_cannot_be_written_stay(failure, opened):
    failing = Switch(fail_write=failure)
    offloader = opened(_wrap_backend=failing.wrap)
    loop, plain = Loop(offloader), Loop()
    failing.is_on = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop.run()
    texts = sorted(str(one.message) for one in told)
    assert [text.split()[0] for text in texts] == ["optimizer", "weight"]  # each once
    assert "was changed and cannot be written" in texts[1]
    assert away(loop.model) == []
    failing.is_on = False
    assert same(loop.result(), plain.run().result())


def test_a_read_that_fails_in_the_update_names_the_weight_and_leaves_the_step_incomplete(opened):
    failing = Switch(fail_read=eio)
    offloader = opened(_wrap_backend=failing.wrap)
    loop = Loop(offloader).backward()
    assert have_left(offloader, loop.model)
    failing.is_on = True
    with pytest.raises(StorageError) as refused:
        loop.optimizer.step()
    assert "This was weight" in "".join(getattr(refused.value, "__notes__", ()))
    with pytest.raises(RuntimeError, match="an earlier step of this optimizer is incomplete"):
        loop.optimizer.step()
    failing.is_on = False


# -- the order of copies -----------------------------------------------------------------------------------------------


@each_once("seed, host_memory, activations", range(3), [0, "1MiB", "1GiB"], ["keep", "offload", "recompute"])
def test_no_race(activations, host_memory, seed, spill_dir):
    def trained(offloader, device):
        def aside(model, *_):
            with torch.no_grad():
                model.blocks[2].down.weight.data.mul_(0.9)
                with device.stream("side"):
                    device.wait_stream("main")
                    seen.append(model(next(batches(1))))
                device.wait_stream("side")

        seen = []
        return Loop(offloader, after_step=aside, accumulate=2).run(3).result() + seen

    settings = {**TRAINED, "min_tensor_bytes": MIN_TENSOR, "activations": activations, "host_memory": host_memory}
    assert_no_race(trained, spill_dir, seed=seed, **settings)
