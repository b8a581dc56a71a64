"""Frozen weights of a device under programs that are not kind to them: the bits of plain PyTorch, or an error."""

import copy
import ctypes
import faulthandler
import gc
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from lightning_ssd.common import sent_storages
from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.parameters import device_memory
from tests.parameters.test_device_gradients import Gives
from tests.parameters.test_device_weights import NUM_WEIGHTS, Scale, away, eventually
from tests.parameters.test_paged_weights import policy  # noqa: F401  # that of ``opened``
from tests.support.host_traffic import wait_until
from tests.support.pairs import each_once
from tests.support.races import assert_no_race
from tests.support.weight_loops import MIN_TENSOR, PLAIN, WIDTH, batches, built, in_a_fork, passed, same, train

IS_LATE = True
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]


def sent_out(offloader):
    """Send weights out as soon as they may."""
    for _ in range(20 if offloader else 0):
        offloader.send_out_weights()
        time.sleep(0.005)


# -- programs: what is made, and what is done with it and an offloader ------------------------------------------------


class Drifting(Scale):
    def forward(self, x):
        self.weight.data.mul_(1.5)
        return x * self.weight


class Inside(Scale):
    def forward(self, x):
        with hooks_of_somebody_else():
            return x * self.weight


def hooks_of_somebody_else():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def transformer(kind):
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    attention = nn.MultiheadAttention(128, 4, batch_first=True)
    model = {"encoder": nn.TransformerEncoder(layer, 3), "layer": layer, "attention": attention}[kind]
    return model.requires_grad_(False).eval()


def chosen(model, offloader):
    """Modules choose the implementation that they choose in plain PyTorch."""
    x, padding = torch.randn(3, 8, 128), torch.zeros(3, 8, dtype=torch.bool)
    padding[0, 2:] = padding[1, 5:] = padding[2, 7:] = True
    with torch.no_grad():
        if isinstance(model, nn.MultiheadAttention):
            return model(x, x, x, need_weights=False)[0]
        return model(x, src_key_padding_mask=padding)


def edited(part):
    def run(model, offloader):
        part(model.embedding.weight).data.mul_(2.0)
        sent_out(offloader)
        return model(torch.tensor([[3, 4]]))

    return run


def given_other_data(model, offloader):
    """A graph wants the old ones."""
    x = torch.ones(64, 256, requires_grad=True)
    with offloader.saved_tensors():
        loss = model(x).sum()
    model.weight.data = torch.zeros(64, 256)
    gc.collect()
    loss.backward()
    return x.grad


def pointers(model, offloader):
    """They stay what they are until backward is over."""
    found = [(p.data_ptr(), p.numel()) for p in model.parameters()]
    assert len({address for address, _ in found}) == len(found)
    read = [ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[size - 1] for address, size in found]
    return torch.tensor(read)


def hooks_outside_of_the_unit(model, offloader):
    x = torch.randn(7, 4 * WIDTH, requires_grad=True)
    with hooks_of_somebody_else():
        y = x @ model.blocks[1].up.weight
    sent_out(offloader)
    y.sum().backward()
    return x.grad


def hooks_around(model, offloader):
    x = torch.ones(64, 256, requires_grad=True)
    with offloader.saved_tensors(), hooks_of_somebody_else() if type(model) is Scale else nullcontext():
        loss = model(x).sum()
    loss.backward()
    offloader.end_backward()
    assert not offloader or eventually(offloader, lambda: away(model) == ["weight"])
    return x.grad


def three_passes(model, offloader):
    x = torch.ones(64, 256, requires_grad=True)
    for _ in range(3):
        passed(offloader, lambda: model(x).sum())
    return [x.grad, model.weight.detach().clone()]


def not_watched(*shape):
    """Saved without our hooks, a weight itself is in the graph, not a view of it."""

    def run(model, offloader):
        x = torch.randn(shape, requires_grad=True)
        model.requires_grad_(False)
        out = model(x) if not isinstance(model, nn.Bilinear) else model(x, torch.ones(4, 16))
        loss = (out[0] if isinstance(model, nn.LSTM) else out).square().sum()
        gc.collect()
        loss.backward()
        return x.grad

    return run


def gone_before_backward(model, offloader):
    adapters = [p for p in model.parameters() if p.requires_grad]
    with offloader.saved_tensors():
        loss = model(next(batches(1))).logsumexp(-1).mean()
    while model.blocks:
        del model.blocks[0]
    gc.collect()
    loss.backward()
    offloader.end_backward()
    return [p.grad for p in adapters]


def unfrozen(unfreeze):
    """It stays from then on."""

    def run(model, offloader):
        found = train(model, offloader, steps=2)
        unfreeze(model.blocks[1])
        found += train(model, offloader, steps=3)
        assert type(model.blocks[1].up.weight) is nn.Parameter
        return [*found, *model.state_dict().values()]

    return run


PROGRAMS = {
    "the data of a view is edited": (built, edited(lambda weight: weight.view(-1))),
    "the data of a row is edited": (built, edited(lambda weight: weight[3])),
    "the data of an alias is edited": (built, edited(lambda weight: weight.detach())),
    "a forward edits data": (Drifting, three_passes),
    "other data": (Scale, given_other_data),
    "an encoder": (partial(transformer, "encoder"), chosen),
    "an encoder's layer": (partial(transformer, "layer"), chosen),
    "attention": (partial(transformer, "attention"), chosen),
    "pointers": (built, pointers),
    "hooks of somebody else outside of the unit": (built, hooks_outside_of_the_unit),
    "hooks of somebody else": (Scale, hooks_around),
    "hooks of somebody else inside": (Inside, hooks_around),
    "a convolution that is not watched": (partial(nn.Conv2d, 64, 64, 3), not_watched(1, 64, 8, 8)),
    "a layer that is not watched": (partial(nn.Linear, 256, 64), not_watched(4, 256)),
    "a product that is not watched": (Scale, not_watched(64, 256)),
    "a bilinear layer that is not watched": (partial(nn.Bilinear, 64, 16, 32), not_watched(4, 64)),
    "an LSTM that is not watched": (partial(nn.LSTM, 64, 64), not_watched(5, 2, 64)),
    "the model is gone before backward": (built, gone_before_backward),
    "requires_grad_": (built, unfrozen(lambda block: block.up.weight.requires_grad_())),
    "requires_grad": (built, unfrozen(lambda block: setattr(block.up.weight, "requires_grad", True))),
    "requires_grad_ of a block": (built, unfrozen(lambda block: block.requires_grad_(True))),
}


def frozen(make):
    torch.manual_seed(0)
    made = make()
    return made if any("adapter" in name for name, _ in made.named_parameters()) else made.requires_grad_(False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_what_it_computes_in_plain_pytorch(name, opened):
    make, run = PROGRAMS[name]
    results = []
    for offloads in (False, True):
        model = frozen(make)
        offloader = opened(model) if offloads else PLAIN
        assert bool(away(model)) is offloads
        torch.manual_seed(1)
        found = run(model, offloader)
        results.append([found] if isinstance(found, torch.Tensor) else found)
    assert same(*results)


def test_a_graph_that_has_saved_a_view_of_a_weight_that_was_given_other_data_is_an_error(opened):
    """Plain PyTorch computes with the old ones, which the view holds."""
    model = frozen(partial(nn.Linear, 256, 64))
    offloader = opened(model)
    x = torch.ones(4, 256, requires_grad=True)
    with offloader.saved_tensors():
        loss = model(x).sum()
    former = StorageKey(model.weight.untyped_storage())
    model.weight.data = torch.zeros(64, 256)
    gc.collect()
    wait_until(lambda: not former.alive())  # the thread that sends it out may hold it a while: then it is no error
    with pytest.raises(RuntimeError, match=r"weight weight was given other memory .* between forward and backward"):
        loss.backward()
    assert x.grad is None


# -- memory that is not there ------------------------------------------------------------------------------------------


def test_a_weight_that_an_array_may_show_stays(opened):
    """One of CuPy's, say, holds the tensor, and reads its memory whenever it likes."""
    plain, model = built(), built()
    offloader = opened(model)
    weight = model.blocks[0].up.weight
    with pytest.raises(AttributeError, match="CUDA"):  # there is no such array of a CPU's memory
        _ = weight.__cuda_array_interface__
    place = weight.data_ptr()
    assert same(train(model, offloader), train(plain))
    assert eventually(offloader, lambda: len(away(model)) >= NUM_WEIGHTS - 2)  # the next unit may be there
    assert type(weight) is nn.Parameter, "it waits still"
    assert weight.data_ptr() == place


def _with_data(tensor, value):
    tensor.data = value
    return tensor


ONES = torch.ones(2, 256)
USES = {
    "sum": lambda weight: weight.sum(),
    "foreach": lambda weight: torch._foreach_norm([weight, weight])[1],
    "view": lambda weight: weight.view(-1)[3:70].clone(),
    "linear": lambda weight: nn.functional.linear(ONES, weight),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy().copy()),
    "data": lambda weight: weight.data[0].clone(),
    "item": lambda weight: torch.tensor(weight[0, 0].item()),
    "iteration": lambda weight: torch.stack([row.clone() for row in weight]),
    "deepcopy": lambda weight: copy.deepcopy(weight),
    "comparison": lambda weight: weight == 0,
    "storage": lambda weight: torch.tensor(weight.untyped_storage().tolist()[:8]),
    "tolist": lambda weight: torch.tensor(weight.tolist()),
    "to": lambda weight: weight.to(torch.float64),
    "in a dict": lambda weight: torch.func.functional_call(
        nn.Linear(1, 1), {"weight": weight, "bias": weight[:, 0]}, ONES
    ),
    "repr": lambda weight: torch.tensor([ord(letter) for letter in repr(weight)]),
    "vmap": lambda weight: torch.vmap(lambda row: row.sum())(weight),
    "out": lambda weight: torch.add(weight, 1, out=torch.empty_like(weight)),
    "einsum": lambda weight: torch.einsum("ij->j", weight),
    "norm": lambda weight: torch.nn.utils.get_total_norm([weight]),
    "Parameter": lambda weight: nn.Parameter(weight).detach() + 0,
    "its class": lambda weight: type(weight)(weight.data, requires_grad=False).sum(),
    "make_subclass": lambda weight: torch.Tensor._make_subclass(torch.Tensor, weight) + 0,
    "set_": lambda weight: torch.empty(0).set_(weight) + 0,
    "source of set_": lambda weight: torch.empty(0).set_(source=weight).mul_(2) + weight,
    "data of a tensor": lambda weight: _with_data(torch.zeros(64, 256), weight) + 0,
    "data of a parameter": lambda weight: _with_data(nn.Parameter(torch.zeros(64, 256)), weight).detach() + 0,
    "grad": lambda weight: torch.func.grad(lambda w: w.square().sum())(weight),
    "jacrev": lambda weight: torch.func.jacrev(lambda w: w.sum(1))(weight),
    "vjp": lambda weight: torch.func.vjp(torch.sin, weight)[1](torch.ones(64, 256))[0],
    "functionalize": lambda weight: torch.func.functionalize(lambda w: w * 2)(weight),
    "linearize": lambda weight: torch.func.linearize(torch.sin, weight)[1](torch.ones(64, 256)),
    "compiled": lambda weight: torch.compile(lambda w: w.sin(), backend="aot_eager")(weight),
    "gradient": lambda weight: _prehook(weight, "argument"),
}


@pytest.mark.parametrize("name", USES)
def test_any_use_brings_a_weight_back(name, opened):
    results = []
    for offloads in (False, True):
        model = frozen(Scale)
        if offloads:
            opened(model)
            assert away(model)
        results.append(USES[name](model.weight))
    assert torch.equal(*results)
    assert type(results[0]) is type(results[1])


def _prehook(weight, where):
    x = torch.ones(64, 256, requires_grad=True)
    if where == "hook":
        x.register_hook(lambda gradient: weight)
    y = Gives.apply(x, lambda: weight) if where == "backward" else x * 2
    y.backward(weight if where == "argument" else torch.ones(64, 256))
    return x.grad


def test_a_function_that_returns_a_weight_that_is_away_is_refused(opened):
    model = frozen(Scale)
    opened(model)
    assert away(model)
    with pytest.raises(RuntimeError, match=r"Function returned an offloaded weight or gradient .* Return a copy"):
        _prehook(model.weight, "backward")


def test_hooks_that_were_entered_before_the_offloader_was_opened_may_give_a_weight_itself(opened):
    results = []
    for offloads in (False, True):
        model, x = frozen(Scale), torch.ones(64, 256, requires_grad=True)
        value = model.weight.detach().clone()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved, value=value: None if torch.equal(saved, value) else saved,
            lambda packed, model=model: model.weight if packed is None else packed,
        ):
            with hooks_of_somebody_else():
                offloader = opened(model) if offloads else PLAIN
            loss = model(x).sum()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert not offloads or eventually(offloader, lambda model=model: away(model) == ["weight"])
        loss.backward()
        results.append(x.grad)
    assert torch.equal(*results)


def _of_a_class(weight):
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return (torch.ones(64, 256).as_subclass(Own) * weight).as_subclass(torch.Tensor)


IN_C = {
    "torch.tensor": torch.tensor,
    "as_tensor": lambda weight: torch.as_tensor(weight, dtype=torch.float64),
    "asarray": lambda weight: torch.asarray(weight, copy=True),
    "new_tensor": lambda weight: torch.ones(1).new_tensor(weight),
    "Tensor": lambda weight: torch.Tensor(weight) + 0,
    "nested": lambda weight: torch.nested.nested_tensor([weight, weight]).to_padded_tensor(0.0),
    "sparse": lambda weight: torch.sparse_coo_tensor(torch.arange(64)[None], weight, (64, 256)).to_dense(),
    "to_dlpack": lambda weight: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight)) + 0,
    "gradient of a hook": lambda weight: _prehook(weight, "hook"),
    "another class": _of_a_class,
    "script": lambda weight: torch.jit.script(_scripted)(weight),
}


def _scripted(weight):
    return weight * 2


_CRASHES = pytest.mark.xfail(strict=True, reason="this entry in C asks no class: it reads memory that is not there")


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=_CRASHES) for name in IN_C), "control"])
def test_entries_in_c(name, opened):
    """In a process of its own, which may not survive it. The fork has no offloader: away must be an error, no crash."""
    weight = Scale().weight
    holder = nn.Module()
    holder.weight = weight
    opened(holder)
    assert away(holder)

    def use():
        faulthandler.disable()  # crashes are expected
        with pytest.raises(OffloaderClosedError):
            IN_C.get(name, torch.sin)(weight)

    assert in_a_fork(use) == 0


# -- what is left ------------------------------------------------------------------------------------------------------


def test_a_weight_that_was_sent_to_another_process_stays(
    opened,
    monkeypatch,
):
    """The other process would see no update of memory that this one has given back."""
    model = built()
    offloader = opened(model)
    *_, sent = offloader._parts.parameters.weights.pager.by_storage  # no first one, which is fetched ahead
    assert eventually(offloader, lambda: len(away(model)) == NUM_WEIGHTS)
    monkeypatch.setattr(device_memory, "is_in_other_processes", lambda storage: storage._cdata == sent)
    train(model, offloader)
    for _ in range(20):
        offloader.send_out_weights()
        time.sleep(0.005)
    with torch._C.DisableTorchFunctionSubclass():
        stays = [p for p in model.parameters() if p.untyped_storage()._cdata == sent]
        assert stays
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in stays)


def test_sending_a_weight_is_noted_while_others_wait(
    opened,
    monkeypatch,
):
    """By what all memory of a card is sent with."""
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: None, raising=False)
    model = built()
    offloader = opened(model)
    assert eventually(offloader, lambda: len(away(model)) == NUM_WEIGHTS)
    monkeypatch.setattr(sent_storages._Noted, "has_sent", False)
    model.blocks[1].up.weight.untyped_storage()._share_cuda_()
    assert sent_storages._Noted.has_sent


@pytest.mark.parametrize("alias", [False, True])
def test_what_a_graph_has_saved_is_not_swapped(alias, opened):
    """As in plain PyTorch, but for an alias, of which that keeps the memory."""
    x = torch.ones(2, 4 * WIDTH, requires_grad=True)
    for offloads in (False, True):
        model = built()
        with opened(model).saved_tensors() if offloads else nullcontext():
            saved = model.blocks[3].down.weight
            loss = nn.functional.linear(x, saved.detach() if alias else saved).sum()
        plain_swaps = alias and not offloads
        with nullcontext() if plain_swaps else pytest.raises(RuntimeError, match="swap" if offloads else "edge"):
            torch.utils.swap_tensors(saved, nn.Parameter(torch.zeros_like(saved), requires_grad=False))
        loss.backward()


def test_the_copy_of_a_weight_that_was_given_other_data_is_given_back(opened):
    model = Scale()
    offloader = opened(model, host_memory="64MiB")
    weights = offloader._parts.parameters.weights
    host = weights._tiers.host
    for _ in range(4):
        model.weight.data = torch.randn(64, 256)
        weights.register_module(model)
        host.flush()
        wait_until(lambda: host.used_bytes == 64 * 256 * 4)


def test_parts_of_a_storage_of_which_one_is_gone(opened):
    model = nn.Module()
    both = torch.randn(128, 256)
    model.one = nn.Parameter(both[:64], requires_grad=False)
    model.other = nn.Parameter(both[64:], requires_grad=False)
    del both
    offloader = opened(model)
    assert away(model) == ["one", "other"]
    del model.other
    model.one.sum()
    gc.collect()
    assert eventually(offloader, lambda: away(model) == ["one"])


# -- races -------------------------------------------------------------------------------------------------------------

FROZEN_AWAY = {"parameters": "offload", "min_tensor_bytes": MIN_TENSOR}


def _trained(offloader, device):
    model, found = built(), []
    (offloader or PLAIN).register_module(model)

    def between(model, step):
        with torch.no_grad():
            model.blocks[step % 4].up.weight.mul_(1.1)
            model.blocks[2].down.weight.data.mul_(0.9)
            with device.stream("side"):
                device.wait_stream("main")
                found.append(model(next(batches(1))))
            device.wait_stream("side")

    return train(model, offloader, between=between) + found


@each_once("activations, host_memory, seed", ["keep", "offload", "recompute"], [0, "1MiB", "1GiB"], range(2))
def test_no_race(seed, host_memory, activations, spill_dir):
    assert_no_race(_trained, spill_dir, seed=seed, host_memory=host_memory, activations=activations, **FROZEN_AWAY)


class Aside(nn.Module):
    """Uses one of its weights on a stream of its own, which the model joins at its end."""

    def __init__(self):
        super().__init__()
        self.here, self.there = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, constant, device):
        with device.stream("side"):
            self.found = nn.functional.linear(constant, self.there.weight)
        return x + self.here(x)[:, :WIDTH]


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_of_the_model_s_own_that_is_joined_later(seed, spill_dir):
    def program(offloader, device):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Aside() for _ in range(4)).requires_grad_(False)
        x, constant = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        with device.stream("side"):
            device.wait_stream("main")
        (offloader or PLAIN).register_module(blocks)
        found = []
        for _ in range(3):
            with torch.no_grad():
                y = x
                for block in blocks:
                    y = block(y, constant, device)
                device.wait_stream("side")
                found += [y, *(block.found + 0 for block in blocks)]
        return found

    assert_no_race(program, spill_dir, seed=seed, activations="keep", host_memory=0, **FROZEN_AWAY)
