"""Gradients of a device that wait between backward and update: the bits of plain training."""

import copy
import ctypes
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_ssd import OffloadPolicy
from lightning_ssd.parameters.guard.guard import is_guarded
from tests.parameters.test_device_training import NUM_BYTES, NUM_WEIGHTS, Uncounted
from tests.parameters.test_device_weights import away, eventually
from tests.parameters.test_everything_away import (  # noqa: F401  # a test, here with our own offloaders
    test_a_gradient_that_somebody_has_is_not_exchanged,
)
from tests.support.weight_loops import (
    MIN_TENSOR,
    PLAIN,
    Loop,
    batches,
    clip_norm,
    clip_value,
    gradients_of,
    passed,
    same,
    taken_over,
)

IS_LATE = True
pytestmark = pytest.mark.usefixtures("many_parts")

GRADIENTS = {"gradients": "offload", "optimizer_states": "offload"}
NUM_GRADIENTS = NUM_WEIGHTS


def policy(**options):
    declared = {"per_parameter_optimizers": ("Uncounted", "Scribbler")}
    return OffloadPolicy(**GRADIENTS | {"activations": "keep", "min_tensor_bytes": MIN_TENSOR} | declared | options)


def gone(model):
    with torch._C.DisableTorchFunctionSubclass():
        return [n for n, p in model.named_parameters() if p.grad is not None and p.grad.untyped_storage().nbytes() == 0]


def have_left(offloader, model):
    """Whether all leave in time, but for one that may be on its way again."""
    return eventually(offloader, lambda: len(gone(model)) >= NUM_GRADIENTS - 1)


def pager_of(offloader):
    return offloader._parts.parameters.gradients.pager


# -- the bits of plain training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_memory", [0, "1GiB"])
def test_gradients_leave_and_host_memory_is_first(host_memory, opened):
    offloader = opened(host_memory=host_memory)
    tier = offloader._parts.parameters.gradients._tiers.ssd
    left = []

    def look(model, *_):
        left.append(have_left(offloader, model))

    loop, plain = Loop(offloader, before_step=look), Loop()
    assert same(loop.run(3).result(), plain.run(3).result())
    assert left == [True] * 3
    written = tier.progress().written_bytes
    if host_memory == 0:
        assert written == 3 * NUM_BYTES  # once per backward: an update and a clone change nothing
    else:
        assert written == 0


def test_few_are_in_memory_in_backward_and_update(opened):
    """One is accumulated, one written, one on its way, and with these the two largest."""
    offloader = opened()
    loop = Loop(offloader, accumulate=2, before_step=lambda *_: None)
    loop.backward()
    assert have_left(offloader, loop.model)
    pager = pager_of(offloader)
    pager.resident_peak_bytes = pager.resident_bytes
    loop.backward(step=1)
    largest = max(p.nbytes for p in loop.model.parameters())
    assert pager.resident_peak_bytes <= 4 * largest < NUM_BYTES / 2
    assert have_left(offloader, loop.model)
    pager.resident_peak_bytes = pager.resident_bytes
    loop.optimizer.step()
    assert pager.resident_peak_bytes <= 5 * largest


@pytest.mark.parametrize("clip", [clip_norm, clip_value])
def test_clipping_brings_them_in_pieces(clip, opened, monkeypatch):
    monkeypatch.setattr("lightning_ssd.parameters.guard.guard._PIECE_BYTES", 1 << 18)
    found = []
    for offloader in (PLAIN, opened()):
        loop = Loop(offloader).backward()
        if offloader:
            assert have_left(offloader, loop.model)
            pager_of(offloader).resident_peak_bytes = pager_of(offloader).resident_bytes
        clip(loop.model, loop.optimizer, 0)
        assert not offloader or pager_of(offloader).resident_peak_bytes < NUM_BYTES / 2
        found.append(gradients_of(loop.model))
    assert same(*found)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_takes_the_implementation_that_it_takes_in_plain_training(foreach, opened, monkeypatch):
    """On a CUDA card, that for lists gives a norm of a matrix other last bits than that for one tensor."""
    called = []
    for owner, name in [
        (torch, "_foreach_norm"),
        (torch, "_foreach_mul_"),
        (torch, "_foreach_clamp_max_"),
        (torch.linalg, "vector_norm"),
    ]:
        plain = getattr(owner, name)

        def told(*args, _plain=plain, _name=name, **kwargs):
            called.append(_name)
            return _plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, told)
    found = []
    for offloader in (PLAIN, opened()):
        loop = Loop(offloader).backward()
        assert not offloader or have_left(offloader, loop.model)
        called.clear()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01, foreach=foreach)
        nn.utils.clip_grad_value_(loop.model.parameters(), 1e-4, foreach=foreach)
        found.append(list(called))
    assert found[0] == found[1]


def scaled(offloader):
    """Train with a GradScaler whose scale is too large at first."""
    loop, scaler = Loop(offloader), torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    found = []
    for ids in batches(6):
        passed(offloader, lambda ids=ids: scaler.scale(loop._loss(ids)))
        scaler.unscale_(loop.optimizer)
        found.append(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5))
        scaler.step(loop.optimizer)
        scaler.update()
        found.append(torch.tensor(scaler.get_scale()))
        loop.optimizer.zero_grad()
    return [torch.nan_to_num(one.float()) for one in (*found, *loop.result())]


@pytest.mark.parametrize(
    "options", [{}, {"parameters": "offload"}, {"parameters": "offload", "gradients": "keep"}], ids=str
)
def test_a_scaler(options, opened):
    plain = scaled(None)
    assert len({float(scale) for scale in plain[1:12:2]}) > 1
    assert same(scaled(opened(**options)), plain)


def test_identity_and_versions_are_those_of_plain_training(opened):
    found = []
    for offloader in (PLAIN, opened()):
        loop = Loop(offloader).backward()
        held = {name: p.grad for name, p in loop.model.named_parameters()}
        versions = [[gradient._version for gradient in held.values()]]
        loop.backward(step=1)
        assert all(p.grad is held[name] for name, p in loop.model.named_parameters())
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
        versions.append([gradient._version for gradient in held.values()])
        loop.optimizer.zero_grad(set_to_none=False)
        versions.append([gradient._version for gradient in held.values()])
        assert all(p.grad is held[name] for name, p in loop.model.named_parameters())
        found.append(versions)
    assert found[0] == found[1]


class Scribbler(torch.optim.SGD):
    """Writes to gradients as a kernel does that gets an address: no version tells."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    halved = (parameter.grad * 0.5).contiguous()
                    ctypes.memmove(parameter.grad.data_ptr(), halved.data_ptr(), halved.nbytes)
        return super().step(closure)


@pytest.mark.parametrize("make", [Scribbler, Uncounted])
def test_what_an_update_does_to_gradients_unseen_is_not_lost(make, opened):
    """They are used after the update, and added to."""
    found = []
    for offloader in (PLAIN, opened()):
        loop = Loop(offloader, make=make)
        for step in range(3):
            loop.backward(step=step).optimizer.step()
        assert not offloader or have_left(offloader, loop.model)
        found.append([*gradients_of(loop.model), *loop.result()])
    assert same(*found)


# -- programs that are not kind to gradients ---------------------------------------------------------------------------


def _array(model, optimizer, step):
    model.blocks[0].up.weight.grad.numpy()[2] *= 0.5
    model.blocks[1].up.weight.grad.data.mul_(0.5)


def _views(model, optimizer, step):
    model.__dict__.setdefault("held", []).append(model.blocks[1].up.weight.grad[3:7])
    model.held[-1].mul_(0.5)


def _kept(model, optimizer, step):
    model.__dict__.setdefault("held", []).append(model.blocks[1].up.weight.grad)


def _exchanged(model, optimizer, step):
    one, other = model.blocks[0].up.weight, model.blocks[1].up.weight
    one.grad, other.grad = other.grad, one.grad


def _one_for_two(model, optimizer, step):
    model.blocks[0].up.weight.grad = model.blocks[1].up.weight.grad.clone()


def _copied(model, optimizer, step):
    copies = copy.deepcopy([p.grad for p in model.parameters()])
    model.__dict__.setdefault("held", []).extend(copies)
    for parameter, gradient in zip(model.parameters(), copies, strict=True):
        parameter.grad = gradient if step % 2 else parameter.grad


def _noise(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)


def _foreach(model, optimizer, step):
    gradients = [p.grad for p in model.parameters()]
    torch._foreach_add_(gradients, [p.detach() for p in model.parameters()], alpha=1e-3)
    model.__dict__.setdefault("held", []).extend(torch._foreach_norm(gradients, 1))
    model.held.append(nn.utils.parameters_to_vector(gradients).sum())
    model.held.append(torch.stack([g.norm() for g in gradients]).max())


def _counted(model, optimizer, step):
    """What lists are written to in a mode leaves no sign in versions."""
    with FlopCounterMode(display=False):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _halve(gradient):
    halved = (gradient.detach() * 0.5).contiguous()
    ctypes.memmove(gradient.data_ptr(), halved.data_ptr(), halved.nbytes)


_OPERATORS = torch.library.Library("lightning_ssd_tests", "DEF")
_OPERATORS.define("halve_(Tensor(a!) gradient) -> ()")
_OPERATORS.impl("halve_", _halve, "CPU")


def _operator(model, optimizer, step):
    """An extension's, which leaves no sign."""
    for parameter in model.parameters():
        torch.ops.lightning_ssd_tests.halve_(parameter.grad)


def _shared(model, optimizer, step):
    torch.empty(0).set_(model.blocks[0].up.weight.grad).mul_(0.5)
    model.blocks[1].up.weight.grad.set_(model.blocks[2].up.weight.grad.clone())


UNKIND = [_array, _views, _kept, _exchanged, _one_for_two, _copied, _noise, _foreach, _counted, _operator, _shared]


@pytest.mark.parametrize(
    ("does", "set_to_none"),
    [
        pytest.param(does, is_none, marks=() if (number + is_none) % 2 else pytest.mark.exhaustive)
        for number, does in enumerate(UNKIND)
        for is_none in (True, False)
    ],
)
def test_what_is_done_to_gradients(does, set_to_none, opened):
    options = {"before_step": does, "accumulate": 2, "set_to_none": set_to_none}
    plain, loop = Loop(**options).run(4), Loop(opened(), **options).run(4)
    assert same(loop.result(), plain.result())
    assert same(loop.model.__dict__.get("held", []), plain.model.__dict__.get("held", []))


def test_a_sparse_gradient_stays(opened):
    found = []
    for offloader in (PLAIN, opened()):
        torch.manual_seed(4)
        table = taken_over(offloader, nn.Embedding(500, 64, sparse=True))
        for row in range(2):
            table(torch.tensor([1, 2, row])).pow(2).sum().backward()
        assert table.weight.grad.is_sparse
        found.append([table.weight.grad.to_dense()])
    assert same(*found)


def test_a_gradient_that_a_graph_has_saved_stays(opened):
    found = []
    for offloader in (PLAIN, opened()):
        loop = Loop(offloader).backward()
        weight = loop.model.blocks[0].up.weight
        x = torch.ones_like(weight, requires_grad=True)
        graph = (x * weight.grad).sum()
        offloader.send_out_weights()
        assert "blocks.0.up.weight" not in gone(loop.model)
        graph.backward()
        found.append([x.grad, weight.grad.clone()])
        del graph
    assert same(*found)


def test_asking_for_gradients_adds_nothing_and_holds_nothing(opened):
    offloader = opened()
    loop = Loop(offloader)
    loop.backward()
    weights = [p for p in loop.model.parameters() if p.dim() > 1]
    torch.autograd.grad(loop._loss(next(batches(1))), weights)
    offloader.send_out_weights()
    assert have_left(offloader, loop.model)


def test_an_optimizer_in_backward(opened):
    found = []
    for offloader in (PLAIN, opened()):
        loop = Loop(offloader)
        optimizers = {id(p): torch.optim.SGD([p], lr=1e-2) for p in loop.model.parameters()}

        def step(parameter, optimizers=optimizers):
            optimizers[id(parameter)].step()
            parameter.grad = None

        for parameter in loop.model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(3):
            loop.backward(step=number)
        found.append([*loop.model.state_dict().values()])
    assert same(*found)


@pytest.mark.parametrize("does", ["forward", "end_backward"])
def test_a_hook_that_uses_the_offloader_while_autograd_adds(does, opened):
    """What autograd is about to add to has come, and is there until it has: it adds in C, and asks no class."""
    torch.manual_seed(0)
    model, other = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), nn.Linear(16, 16)
    plain, x = copy.deepcopy(model), torch.rand(8, 256)
    offloader, found = opened(), list[list[str]]()
    taken_over(offloader, model)

    def hook(name, _):
        if does == "forward":
            with offloader.saved_tensors():
                other(torch.rand(4, 16))
        else:
            offloader.end_backward()
        found.append(gone(model))
        assert name not in found[-1]

    for name, parameter in model.named_parameters():
        parameter.register_hook(partial(hook, name))
    for _ in range(3):
        passed(offloader, lambda: model(x).square().sum())
        plain(x).square().sum().backward()
        assert eventually(offloader, lambda: len(gone(model)) >= 2)  # one may be on its way again
    assert any(found)
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # of a cycle, which the test ends
def test_gradients_of_gradients_stay(opened):
    found = []
    for offloader in (PLAIN, opened()):
        torch.manual_seed(4)
        layer = taken_over(offloader, nn.Linear(128, 128, bias=False))
        for _ in range(2):
            layer(torch.ones(2, 128)).square().sum().backward(create_graph=True)
        gradient = layer.weight.grad
        assert not is_guarded(gradient)
        found.append([gradient.detach().clone(), *torch.autograd.grad(gradient.square().sum(), layer.weight)])
        layer.weight.grad = None
    assert same(*found)


# -- set ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grad", "_grad"])
@pytest.mark.parametrize("both_wait", [True, False])
@pytest.mark.parametrize("is_away", [True, False])
def test_one_gradient_of_two_parameters(is_away, both_wait, name, opened):
    found = []
    for offloader in (PLAIN, opened()):
        torch.manual_seed(4)
        layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))
        taken_over(offloader, layers if both_wait else layers[1])
        if is_away:
            layers(torch.ones(2, 128)).sum().backward()
            assert not offloader or eventually(offloader, lambda layers=layers: len(gone(layers)) == 1 + both_wait)
            setattr(layers[0].weight, name, layers[1].weight.grad)
        else:
            layers[0].weight.grad = layers[1].weight.grad = torch.zeros(128, 128)
        layers[0](torch.ones(2, 128)).sum().backward()  # asks nobody about the other one's gradient
        for _ in range(2):
            layers(torch.ones(2, 128)).sum().backward()
        found.append([layer.weight.grad.clone() for layer in layers])
        assert not offloader or layers[0].weight.grad is layers[1].weight.grad
    assert same(*found)


def test_setting_a_gradient_asks_for_no_bytes_of_its_own(opened):
    """``p.grad = p.grad``, as a helper that has changed nothing does, and a tensor that has none."""
    offloader = opened()
    layer = taken_over(offloader, nn.Linear(128, 128, bias=False))
    layer(torch.ones(2, 128)).sum().backward()
    assert eventually(offloader, lambda: len(gone(layer)) == 1)
    layer.weight.grad = layer.weight.grad
    assert len(gone(layer)) == 1
    del layer.weight.grad
    assert layer.weight.grad is None
    with pytest.raises(TypeError, match="assigned grad"):
        layer.weight.grad = 1
    offloader.close()
    assert not {"grad", "_grad"} & set(vars(torch.Tensor))


def test_grad_is_pytorchs_own_but_for_what_is_set(opened):
    class Subclass(torch.Tensor):
        pass

    plain = {name: getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")}
    taken_over(opened(), nn.Linear(128, 128, bias=False))
    assert isinstance(vars(torch.Tensor)["grad"], property), "it stands"
    assert {name: getattr(torch.Tensor.grad, name) for name in plain} == plain, "as __torch_function__ is told"
    tensor = torch.ones(3).as_subclass(Subclass).requires_grad_()
    tensor.grad = torch.ones(3)
    assert type(tensor.grad) is torch.Tensor
    assert tensor.grad is tensor.grad
    inner = torch.ones(3, requires_grad=True) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inner.grad = torch.ones(3)
    with pytest.warns(UserWarning, match="not a leaf") as told:
        (torch.ones(3, requires_grad=True) * 2).grad  # noqa: B018
    assert told[0].filename == __file__


ASKED = {
    "read": lambda loop: [p.grad is None or p.grad.shape for p in loop.model.parameters()],
    "write": lambda loop: [setattr(p, "grad", None) for p in loop.model.parameters()],
    "delete": lambda loop: [delattr(p, "grad") for p in loop.model.parameters()],
    "zero": lambda loop: loop.optimizer.zero_grad(),
    "clip": lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0),
}


@pytest.mark.parametrize("does", ASKED)
def test_weights_that_are_away_stay_there_when_gradients_are_asked_for(does, opened):
    offloader = opened(parameters="offload")
    loop = Loop(offloader).run()
    assert eventually(offloader, lambda: len(away(loop.model)) >= NUM_WEIGHTS - 1)  # one may be on its way again
    ASKED[does](loop)
    assert len(away(loop.model)) >= NUM_WEIGHTS - 1


# -- handed to autograd ------------------------------------------------------------------------------------------------


class Gives(torch.autograd.Function):
    """Its gradient is a tensor of somebody else's."""

    @staticmethod
    def forward(ctx, x, give):
        ctx.give = give
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return ctx.give(), None


class GivesFromABox(Gives):
    boxed_grads_call = True  # it gets its gradients in a list

    @staticmethod
    def backward(ctx, gradients):
        return ctx.give(), None


class Subclass(torch.Tensor):
    """In its backward no class is asked."""


def _ones(*shape):
    return nn.Parameter(torch.ones(shape or (128, 128)))


def _product(layer, x):
    loss = layer(x).pow(2).sum()
    (first,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
    return torch.autograd.grad(first, layer.weight, grad_outputs=layer.weight.grad)[0]


def _into_itself(layer, x):
    (layer.weight * 3).backward(layer.weight.grad)
    return layer.weight.grad


def _into_another(layer, x):
    other = _ones()
    other.backward(layer.weight.grad)
    layer.weight.grad.mul_(2)
    return other.grad


def _of(function, kind=None):
    def gives(layer, x):
        other = _ones()
        loss = function.apply(other, lambda: layer.weight.grad).sum()
        (loss if kind is None else loss.as_subclass(kind)).backward()
        layer.weight.grad.mul_(2)
        return other.grad

    return gives


def _to_a_subclass(layer, x):
    other = _ones()
    (other * 2).as_subclass(Subclass).backward(layer.weight.grad)
    return other.grad


def _unpacked_in_the_backward_of_a_subclass(layer, x):
    other = _ones()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: 0, lambda packed: layer.weight.grad):
        loss = (other * layer.weight.detach()).sum().as_subclass(Subclass)
    loss.backward()
    return other.grad


def _of_a_tangent(layer, x):
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            return given * 2

        @staticmethod
        def jvp(ctx, tangent):
            return layer.weight.grad

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(128, 128), torch.ones(128, 128))
        return torch.autograd.forward_ad.unpack_dual(Forward.apply(dual)).tangent + 0


def _with_a_graph(layer, x):
    other = _ones()
    (first,) = torch.autograd.grad(other.pow(3), other, layer.weight.grad, create_graph=True)
    first.sum().backward()
    return other.grad


def _two(layer, x):
    others = [_ones(), _ones()]
    torch.autograd.backward([other.pow(2) for other in others], [layer.weight.grad, torch.ones(128, 128)])
    return others[0].grad + others[1].grad


def _in_a_batch(layer, x):
    return torch.autograd.grad((other := _ones(128)).pow(2), other, layer.weight.grad, is_grads_batched=True)[0]


GIVEN = {
    "Hessian times gradient": _product,
    "into itself": _into_itself,
    "into another": _into_another,
    "to a subclass": _to_a_subclass,
    "unpacked in the backward of a subclass": _unpacked_in_the_backward_of_a_subclass,
    "with a graph": _with_a_graph,
    "two": _two,
    "in a batch": _in_a_batch,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own use of it, with a tangent
@pytest.mark.parametrize("gives", GIVEN)
def test_a_gradient_that_autograd_is_given(gives, opened):
    """All of these end the process where autograd reads memory that is not there."""
    found = []
    for make in (lambda: PLAIN, opened):  # while nothing stands in for autograd, and while it does
        offloader = make()
        torch.manual_seed(3)
        layer = taken_over(offloader, nn.Linear(128, 128, bias=False))
        x = torch.randn(5, 128)
        layer(x).pow(2).sum().backward()
        offloader.send_out_weights()
        assert not offloader or eventually(offloader, lambda layer=layer: len(gone(layer)) == 1)
        given = GIVEN[gives](layer, x).clone()
        offloader.send_out_weights()  # autograd.grad() has announced a gradient that did not come
        if offloader:
            assert all(weight.memory.num_users == 0 for weight in pager_of(offloader).weights), "it may leave again"
        layer(x).pow(2).sum().backward()
        found.append([given, layer.weight.grad.clone()])
    assert same(*found)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own use of it, with a tangent
@pytest.mark.parametrize("gives", [_of(Gives), _of(GivesFromABox), _of(Gives, Subclass), _of_a_tangent])
def test_a_function_that_returns_a_gradient_that_is_away_is_refused(gives, opened):
    offloader = opened()
    layer = taken_over(offloader, nn.Linear(128, 128, bias=False))
    x = torch.randn(5, 128)
    layer(x).pow(2).sum().backward()
    offloader.send_out_weights()
    assert eventually(offloader, lambda: len(gone(layer)) == 1)
    with pytest.raises(RuntimeError, match=r"Function returned an offloaded weight or gradient .* Return a copy"):
        gives(layer, x)
    assert all(weight.memory.num_users == 0 for weight in pager_of(offloader).weights), "it may leave again"


def test_autograd_is_plain_again_afterwards(opened):
    """Also where the compiler has stood in for it meanwhile."""
    modules = (torch.autograd, torch.autograd.graph)
    plain = [module._engine_run_backward for module in modules]
    for _ in range(2):
        offloader = opened()
        stood_in = [module._engine_run_backward for module in modules]
        assert not set(stood_in) & set(plain)
        with torch.compiler._patch_engine_backward():
            pass
        assert [module._engine_run_backward for module in modules] == stood_in
        offloader.close()
        assert [module._engine_run_backward for module in modules] == plain
    with torch.compiler._patch_engine_backward():
        offloader = opened()
    offloader.close()
    assert [module._engine_run_backward for module in modules] == plain
