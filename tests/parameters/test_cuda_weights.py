"""Weights of a CUDA card, frozen and trained: the bits of plain training on it, and memory that is really free.

Each block is late on purpose: a kernel sleeps in front of it, so that whoever does not wait for the right stream uses
memory that is not there yet, or gives back memory that is still used.
"""

import gc
import time
from contextlib import contextmanager, nullcontext
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn
from torch.multiprocessing import reductions

from lightning_ssd.common.sent_storages import is_in_other_processes
from lightning_ssd.parameters.guard.guard import is_guarded
from recipes.determinism import make_deterministic
from tests.support.cuda_memory import allocated_bytes
from tests.support.opened import offloader_in
from tests.support.weight_loops import PLAIN, gradients_of, passed, same, taken_over

WIDTH, NUM_BLOCKS, BATCH = 512, 6, 64
SLEEP_CYCLES = 1_000_000  # about half a millisecond
DEVICE = torch.device("cuda", 0)
pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        torch.cuda._sleep(SLEEP_CYCLES)
        return x + self.down(torch.relu(self.up(x))) + self.adapter(x)


def built():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    return model


def moved_in(model, offloader):
    """To the card, as far as there is room for it."""
    if offloader is not None:
        offloader.move_in(model)
    model.to(DEVICE)
    (offloader or PLAIN).register_module(model)
    return model


def train(model, offloader, *, steps=4, between=lambda step: None):
    update = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    found = []
    for step in range(steps):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = passed(offloader, lambda x=x: model(x).square().mean())
        found += [loss.detach(), *gradients_of(model)]
        update.step()
        update.zero_grad()
        with torch.no_grad():
            found.append(model(x))
        between(step)
    return found


@pytest.mark.parametrize("own_stream", [False, True], ids=["default", "own"])
@pytest.mark.parametrize("host_memory", [0, "1GiB"], ids=["drive", "host"])
@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
def test_bits_and_memory(activations, host_memory, own_stream, spill_dir):
    make_deterministic(DEVICE)
    expected = train(built().to(DEVICE), None)
    before = torch.cuda.memory_allocated(DEVICE)
    settings = {"parameters": "offload", "activations": activations, "host_memory": host_memory}
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)) if own_stream else nullcontext():
        with offloader_in(spill_dir, **settings, device=DEVICE) as offloader:
            model = moved_in(built(), offloader)
            weights = offloader.stats.weights_bytes
            assert weights == NUM_BLOCKS * 8 * WIDTH * WIDTH * 4
            assert torch.cuda.memory_allocated(DEVICE) - before < weights / 2
            torch.cuda.reset_peak_memory_stats(DEVICE)
            found = train(model, offloader)
            torch.cuda.synchronize(DEVICE)
            assert offloader.stats.weights_resident_peak_bytes <= weights / 2
        torch.cuda.synchronize(DEVICE)
    assert same(found, expected)
    plain = built()
    frozen = [name for name, p in plain.named_parameters() if not p.requires_grad]
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    assert all(torch.equal(state[name], plain.state_dict()[name]) for name in frozen)


TRAINED = {"parameters": "offload", "optimizer_states": "offload"}
OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3),
    "fused": lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True),
    "loop": lambda weights: torch.optim.AdamW(weights, lr=1e-3, foreach=False),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=1e-2),
}


def train_all(offloader, optimizer, *, steps=4, trained=lambda: None):
    """Two batches a step, gradients clipped. Losses, norms, gradients and weights, in memory of the host.

    Args:
        offloader: ``None`` for plain training.
        optimizer: its name.
        steps: how many.
        trained: called after the last one, while there is a model.
    """
    model = moved_in(built().requires_grad_(True), offloader)
    update = (offloader or PLAIN).offload_optimizer(OPTIMIZERS[optimizer](list(model.parameters())))
    found = []
    for step in range(steps):
        for part in range(2):
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + part)).to(DEVICE)
            found.append(passed(offloader, lambda x=x: model(x).square().mean()).detach().cpu())
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).cpu())
        found += [p.grad.cpu() for p in model.parameters()]
        update.step()
        update.zero_grad()
    trained()
    with nullcontext() if offloader is None else offloader.host_copies():
        return found + [value.cpu() for value in model.state_dict().values()]


COMBINED = [("adamw", activations) for activations in ("keep", "offload", "recompute")]
COMBINED += [(optimizer, "offload") for optimizer in OPTIMIZERS if optimizer != "adamw"]  # a card's time is dear


@pytest.mark.parametrize(("optimizer", "activations"), COMBINED)
@pytest.mark.parametrize("host_memory", [0, "1GiB"], ids=["drive", "host"])
@pytest.mark.parametrize("gradients", ["keep", "offload"])
def test_trained_weights(activations, gradients, host_memory, optimizer, spill_dir):
    make_deterministic(DEVICE)
    expected = train_all(None, optimizer)
    settings = {"gradients": gradients, "activations": activations, "host_memory": host_memory}
    with offloader_in(spill_dir, **TRAINED, **settings, device=DEVICE) as offloader:
        found = train_all(offloader, optimizer)
        weights = offloader.stats.weights_bytes
        assert weights == NUM_BLOCKS * 9 * WIDTH * WIDTH * 4
        # A block that was updated and is written, the one that is updated, and the next; half of all, with six.
        assert offloader.stats.weights_resident_peak_bytes < 0.7 * weights
    assert same(found, expected)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms_of_a_list_in_parts(norm_type):
    """Clipping brings gradients that wait in parts: kernels must treat each tensor of a list by itself."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    sizes = [(7,), (1000, 1000), (3, 65_536), (65_537,), (4096, 4096)]
    gradients = [torch.randn(size, generator=generator, device=DEVICE) for size in sizes]
    whole = torch._foreach_norm(gradients, norm_type)
    parts = [norm for gradient in gradients for norm in torch._foreach_norm([gradient], norm_type)]
    assert same(whole, parts)


def test_gradients_leave_the_card(spill_dir):
    """After backward the card holds none of them, but for those whose copies end."""
    model = built().requires_grad_(True).to(DEVICE)
    nbytes = sum(p.nbytes for p in model.parameters())
    settings = {"gradients": "offload", "optimizer_states": "offload", "activations": "keep"}
    with offloader_in(spill_dir, **settings, device=DEVICE) as offloader:
        taken_over(offloader, model)
        before = allocated_bytes(DEVICE)
        passed(offloader, lambda: model(torch.randn(BATCH, WIDTH, device=DEVICE)).square().mean())
        assert leaves(offloader, lambda: allocated_bytes(DEVICE) - before < nbytes / 4)
        assert all(p.grad is not None for p in model.parameters())


def test_weights_that_are_on_the_card_leave_it(spill_dir):
    """Not only those that came to it by ``move_in()``."""
    before = allocated_bytes(DEVICE)
    model = built().requires_grad_(True).to(DEVICE)
    nbytes = sum(p.nbytes for p in model.parameters())
    with offloader_in(spill_dir, **TRAINED, activations="keep", device=DEVICE) as offloader:
        taken_over(offloader, model)
        assert leaves(offloader, lambda: allocated_bytes(DEVICE) - before < nbytes / 4)


def test_what_was_sent_to_another_process_stays():
    """PyTorch's own answer is that all memory of a card is shared."""
    sent, own = torch.zeros(8, device=DEVICE), torch.zeros(8, device=DEVICE)
    assert own.untyped_storage().is_shared()
    ForkingPickler.dumps(sent)
    assert is_in_other_processes(sent.untyped_storage())
    assert not is_in_other_processes(own.untyped_storage())
    reductions.shared_cache.clear()  # else all weights of later tests stay


def leaves(offloader, has_left):
    for _ in range(100):
        offloader.send_out_weights()
        if has_left():
            return True
        time.sleep(0.05)
    return False


# -- only as much as the card lacks ------------------------------------------------------------------------------------


@contextmanager
def allowed(nbytes):
    """While it is entered, PyTorch's allocator may take so much more of the card than it holds, and no more."""
    gc.collect()  # plain training has left cycles that hold memory
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + nbytes) / total, DEVICE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


CAPS = pytest.mark.skipif(
    not hasattr(torch.cuda, "get_per_process_memory_fraction"), reason="this PyTorch does not tell what it may take"
)
WEIGHT_BYTES = NUM_BLOCKS * 8 * WIDTH * WIDTH * 4
AUTO = {"parameters": "auto", "activations": "keep", "device": DEVICE}


@pytest.mark.parametrize("is_capped", [False, pytest.param(True, marks=CAPS)], ids=["free", "capped"])
def test_with_auto_frozen_weights_wait_as_far_as_the_card_lacks_memory(is_capped, spill_dir):
    make_deterministic(DEVICE)
    expected = [value.cpu() for value in train(built().to(DEVICE), None, steps=2)]  # what is found lies on the card
    with (
        allowed(2 * WEIGHT_BYTES) if is_capped else nullcontext(),
        offloader_in(spill_dir, **AUTO, host_memory="1GiB") as offloader,
    ):
        model = moved_in(built(), offloader)
        waiting = offloader.stats.weights_bytes
        assert waiting + offloader.stats.weights_kept_bytes == WEIGHT_BYTES
        assert (waiting > 0) is is_capped
        guarded = [name for name, parameter in model.named_parameters() if is_guarded(parameter)]
        assert bool(guarded) is is_capped
        found = [value.cpu() for value in train(model, offloader, steps=2)]
    assert same(found, expected)


@CAPS
@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_with_auto_trained_weights_wait_with_their_gradients(optimizer, spill_dir):
    make_deterministic(DEVICE)
    expected = train_all(None, optimizer)
    settings = AUTO | {"gradients": "auto", "optimizer_states": "offload", "host_memory": "1GiB"}
    weights = NUM_BLOCKS * 9 * WIDTH * WIDTH * 4
    with allowed(4 * weights), offloader_in(spill_dir, **settings) as offloader:
        seen = []
        found = train_all(offloader, optimizer, trained=lambda: seen.append(offloader.stats))
        assert seen[0].weights_bytes > 0
        assert seen[0].weights_bytes + seen[0].weights_kept_bytes == weights
    assert same(found, expected)


@CAPS
def test_registered_again_with_auto_weights_leave_and_come_back(spill_dir):
    make_deterministic(DEVICE)
    expected = [value.cpu() for value in train(built().to(DEVICE), None, steps=4)]
    with offloader_in(spill_dir, **AUTO) as offloader:
        model = built().to(DEVICE)
        offloader.register_module(model)
        assert offloader.stats.weights_bytes == 0
        with allowed(WEIGHT_BYTES // 4):
            offloader.register_module(model)
        assert offloader.stats.weights_bytes > 0
        offloader.register_module(model)
        assert offloader.stats.weights_bytes == 0
        found = [value.cpu() for value in train(model, offloader, steps=4)]
    assert same(found, expected)


@CAPS
def test_registered_again_with_auto_nothing_begins_to_wait_where_a_graph_was_captured(spill_dir):
    """It reads the weights at their addresses whenever it is replayed."""
    make_deterministic(DEVICE)
    with offloader_in(spill_dir, **AUTO) as offloader:
        model = built().to(DEVICE)
        offloader.register_module(model)
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        side = torch.cuda.Stream(DEVICE)
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(side), torch.no_grad():
            model[0](x)
        torch.cuda.current_stream(DEVICE).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            out = model[0](x)
        graph.replay()
        expected = out.clone()
        with allowed(WEIGHT_BYTES // 4):
            offloader.register_module(model)
        assert offloader.stats.weights_bytes == 0
        graph.replay()
        assert torch.equal(out, expected)
        del graph, out
        torch._C._cuda_clearCublasWorkspaces()  # of the stream that it was captured on: they lie in its pool
        torch.cuda.empty_cache()
        with allowed(WEIGHT_BYTES // 4):
            offloader.register_module(model)
        assert offloader.stats.weights_bytes > 0
