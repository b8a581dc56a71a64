"""Weights that were mapped from a file of the user's wait in ours: theirs is not written, and bits stay the same."""

import mmap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_ssd.parameters.files.mapped_storage import is_mapped
from tests.parameters.test_paged_weights import (  # noqa: F401  # the policy is that of ``opened``
    _averaged,
    _exchanged,
    _loaded,
    _past_autograd,
    _unfrozen,
    policy,
)
from tests.support.pairs import pairwise
from tests.support.weight_loops import PLAIN, Net, built, equal_weights, frozen, same, train


def saved(folder, *, num_shards=1, dtype=torch.float32):
    state = {name: value for name, value in built().to(dtype).state_dict().items() if name != "head.weight"}
    names = list(state)
    paths = []
    for number in range(num_shards):
        paths.append(folder / f"model-{number + 1:05}-of-{num_shards:05}.safetensors")
        save_file({name: state[name] for name in names[number::num_shards]}, paths[-1])
    return paths


def loaded(paths, load=load_file):
    with torch.device("meta"):
        model = Net()
    state = {name: value for path in paths for name, value in load(path).items()}
    model.load_state_dict(state, strict=False, assign=True)
    model.head.weight = model.embedding.weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    return frozen(model)


def large_bytes(model):
    return sum(p.nbytes for p in model.parameters() if not p.requires_grad and p.nbytes >= 16 << 10)


def offloaded(offloader):
    return lambda parameters, lr: offloader.offload_optimizer(torch.optim.AdamW(parameters, lr=lr))


@pytest.fixture
def unwritten(folder):
    """A file of weights in which nothing has changed at the end."""
    (path,) = saved(folder)
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before


# -- the same bits, and their file as it was -------------------------------------------------------------------------


@pairwise("num_shards, dtype, activations", [1, 3], [torch.float32, torch.bfloat16], ["keep", "recompute_offload"])
def test_training_has_the_bits_of_plain_pytorch_and_needs_no_file(num_shards, dtype, activations, opened, folder):
    paths = saved(folder, num_shards=num_shards, dtype=dtype)
    plain, model = loaded(paths), loaded(paths)
    places = [parameter.data_ptr() % 64 for parameter in model.parameters()]
    expected = train(plain)
    offloader = opened(model, activations=activations)
    for path in paths:
        path.unlink()  # it is needed no more
    assert same(train(model, offloader), expected)
    assert equal_weights(model, plain)
    stats = offloader.stats
    assert 0 < stats.weights_resident_peak_bytes < stats.weights_bytes == large_bytes(model)
    assert sum(offloader._parts.parameters.files.written_bytes()) >= large_bytes(model)
    assert [parameter.data_ptr() % 64 for parameter in model.parameters()] == places, "aligned as before"


def test_weights_of_a_mapped_checkpoint(opened, spill_dir):
    path = spill_dir / "checkpoint.pt"
    torch.save(built().state_dict(), path)
    load = lambda path: torch.load(path, mmap=True)  # noqa: E731
    plain, model = loaded([path], load), loaded([path], load)
    offloader = opened(model)
    assert same(train(model, offloader), train(plain))
    assert offloader.stats.weights_bytes == large_bytes(model)


@pytest.mark.parametrize("edit", [_averaged, _past_autograd, _exchanged, _loaded, _unfrozen])
def test_edits_between_steps_are_not_lost_and_not_in_the_file(edit, opened, unwritten):
    plain, model = loaded([unwritten]), loaded([unwritten])
    expected = train(plain, between=edit, steps=5)
    offloader = opened(model)
    assert same(train(model, offloader, between=edit, steps=5), expected)
    assert equal_weights(model, plain)
    offloader.close()
    assert equal_weights(model, plain)


def test_what_is_unfrozen_is_trained_when_it_is_registered_again(opened, unwritten):
    plain, model = loaded([unwritten]), loaded([unwritten])
    offloader = opened(model, optimizer_states="offload")
    for one in (plain, model):
        one.blocks[0].requires_grad_(True)
    offloader.register_module(model)
    assert sum(offloader._parts.parameters.files.written_bytes()) >= 8 * 128 * 128 * 4
    assert same(train(model, offloader, optimizer=offloaded(offloader)), train(plain))
    assert equal_weights(model, plain)


def test_a_whole_model_that_is_trained_is_copied(opened, unwritten):
    plain, model = (loaded([unwritten]).requires_grad_(True) for _ in range(2))
    offloader = opened(model, optimizer_states="offload", gradients="offload")
    assert offloader.stats.weights_bytes > 0
    assert same(train(model, offloader, optimizer=offloaded(offloader)), train(plain))
    assert equal_weights(model, plain)


def unaligned(path):
    """A model over a file in which no weight begins where vector units like it to."""
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    for padding in range(8):
        save_file(made.state_dict(), path, metadata={"padding": " " * 8 * padding})
        model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
        model.load_state_dict(load_file(path), assign=True)
        if all(weight.data_ptr() % 16 for weight in model.parameters()):
            return model
    raise AssertionError("all are aligned")


def _trained(model, offloader):
    offloader.register_module(model)


def _edited(model, offloader):
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter[:1] *= 0.5
    _trained(model, offloader)


def _come_back(model, offloader):
    """To memory, since they are trained after they have waited in the file."""
    model.requires_grad_(False)
    _trained(model, offloader)
    model.requires_grad_(True)
    _trained(model, offloader)


@pytest.mark.filterwarnings("ignore:OffloadPolicy.parameters='offload' moves nothing")
@pytest.mark.parametrize("optimizer_states", ["keep", "offload"])
@pytest.mark.parametrize("prepare", [_trained, _edited, _come_back])
def test_what_has_to_leave_the_file_is_aligned_as_it_was_there(prepare, optimizer_states, opened, folder):
    """Kernels of MKL compute other bits with memory that is aligned otherwise."""

    def result(offloader):
        model = unaligned(folder / "model.safetensors")
        places = [parameter.data_ptr() % 64 for parameter in model.parameters()]
        prepare(model, offloader)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        update = torch.optim.AdamW(weights or [torch.zeros(1, requires_grad=True)], lr=1e-2)
        update = offloader.offload_optimizer(update)
        found = []
        for batch in torch.randn(4, 1, 512, generator=torch.Generator().manual_seed(2)):
            with offloader.saved_tensors():
                output = model(batch.requires_grad_())
            output.square().mean().backward()
            offloader.end_backward()
            update.step()
            found += [output.detach(), batch.grad, *(weight.detach().clone() for weight in model.parameters())]
        assert [parameter.data_ptr() % 64 for parameter in model.parameters()] == places
        return found

    expected = result(PLAIN)
    found = result(opened(optimizer_states=optimizer_states, min_tensor_bytes="1KiB"))
    assert all(map(torch.equal, found, expected))


# -- who else holds the memory ---------------------------------------------------------------------------------------


def tensors_of(handle):
    return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  # it is no dict


def stays(opened, model, reason):
    with pytest.warns(UserWarning, match=rf"weights stay in memory.*{reason}"):
        return opened(model)


def test_what_else_shows_the_file_keeps_its_bytes(opened, folder):
    """As they were when the weights began to wait, and with what was written to them before."""
    (path,) = saved(folder)
    handle = safe_open(path, "pt")
    model = loaded([path], lambda path, handle=handle: tensors_of(handle))
    with torch.no_grad():
        model.blocks[0].up.weight[:64] = 3.0
    alias = handle.get_tensor("blocks.0.up.weight")
    expected = alias.clone()
    offloader = opened(model)
    assert offloader.stats.weights_bytes == large_bytes(model)
    assert torch.equal(model.blocks[0].up.weight, expected)
    assert torch.equal(alias, expected)


def test_memory_that_processes_may_share_is_no_file_of_weights(opened):
    """An anonymous mapping is a file to the system, and may be memory of several processes."""
    model = frozen(built())
    weight = model.blocks[0].up.weight
    shared = torch.frombuffer(mmap.mmap(-1, weight.nbytes), dtype=weight.dtype).view(weight.shape).copy_(weight)
    num_bytes = weight.nbytes
    model.blocks[0].up.weight = nn.Parameter(shared, requires_grad=False)
    del shared, weight
    offloader = stays(opened, model, "its memory was not made by PyTorch")
    assert offloader.stats.weights_bytes == large_bytes(model) - num_bytes


def test_two_weights_over_the_same_bytes_stay(opened, folder):
    (path,) = saved(folder)
    with safe_open(path, "pt") as handle:
        state = tensors_of(handle)
        again = handle.get_tensor("blocks.0.up.weight")
    del handle
    model = loaded([path], lambda path, state=state: state)
    del state
    model.blocks[1].up.weight = nn.Parameter(again, requires_grad=False)
    del again
    offloader = stays(opened, model, "another weight lies in the same bytes")
    assert offloader.stats.weights_bytes == large_bytes(model) - 2 * 4 * 128 * 128 * 4
    with torch.no_grad():
        model.blocks[0].up.weight.fill_(3.0)
    assert model.blocks[1].up.weight.eq(3.0).all()


def test_a_state_dict_that_somebody_has_keeps_weights_in_memory(opened, folder):
    (path,) = saved(folder)
    held = {}

    def load(path):
        held.update(load_file(path))
        return held

    model = loaded([path], load)
    offloader = stays(opened, model, "something else holds its memory")
    assert offloader.stats.weights_bytes == 0
    with torch.no_grad():
        model.blocks[0].up.weight.zero_()
    assert not held["blocks.0.up.weight"].any()


def test_memory_that_stays_is_left_as_it_is_where_there_is_room(opened, folder):
    paths = saved(folder)
    plain, model = loaded(paths), loaded(paths)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    offloader = opened(model, parameters="auto")
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert not any(is_mapped(parameter.untyped_storage()) for parameter in model.parameters())
    assert same(train(model, offloader), train(plain))
