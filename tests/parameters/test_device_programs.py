"""Programs that are not kind to weights of a device that wait, nor to their gradients: the bits of plain training."""

import gc

import pytest
import torch
from torch import nn

from lightning_ssd.parameters.device_pager import _guarding_lost_weights
from tests.parameters.test_device_gradients import pager_of
from tests.parameters.test_device_training import have_left, policy  # noqa: F401  # the policy is that of ``opened``
from tests.support.helpers import meaning_of
from tests.support.pairs import pairwise, some_of_each
from tests.support.residency import register
from tests.support.weight_loops import PLAIN, WIDTH, Block, Loop, Net, batches, gradients_of, same

IS_LATE = True
pytestmark = pytest.mark.usefixtures("many_parts")

GRADIENTS = {"parameters": "keep", "gradients": "offload"}


def _view_held(model, optimizer, step):
    model.__dict__.setdefault("held", []).append(model.blocks[1].up.weight.detach()[3:7])


def _rows_of_held_views(model, optimizer, step):
    _view_held(model, optimizer, step)
    with torch.no_grad():
        model.held[-1].mul_(0.5)


def _data(model, optimizer, step):
    model.blocks[0].down.weight.data.mul_(0.9)
    model.blocks[2].up.weight.data = model.blocks[2].up.weight.data * 0.5
    model.embedding.weight.detach().numpy()[3] += 0.5


def _averaged(model, optimizer, step):
    average = model.__dict__.setdefault("average", [torch.zeros_like(p) for p in model.parameters()])
    with torch.no_grad():
        for held, parameter in zip(average, model.parameters(), strict=True):
            held.lerp_(parameter, 0.1)
        if step == 2:
            for held, parameter in zip(average, model.parameters(), strict=True):
                parameter.copy_(held)


def _loaded(model, optimizer, step):
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def _toggled(model, optimizer, step):
    for number, block in enumerate(model.blocks):
        block.requires_grad_((number + step) % 2 == 0)
    model.embedding.weight.requires_grad = step != 1


def _given_another(model, optimizer, step):
    """A parameter that the optimizer does not know."""
    model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach() * 2)


def _norm_of_all(model, optimizer, step):
    norm = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()])
    model.__dict__.setdefault("norms", []).append(norm)
    for parameter in model.parameters():
        parameter.data.div_(norm).mul_(3.0)


def _decay(weight):
    weight.grad.add_(weight.detach(), alpha=1e-3)


def _hooked(model, optimizer, step):
    if step == 0:
        for block in model.blocks:
            block.up.weight.register_hook(lambda gradient, w=block.up.weight: gradient + 1e-3 * w.detach())
            block.down.weight.register_post_accumulate_grad_hook(_decay)


def _states_read(model, optimizer, step):
    for parameter in model.blocks[1].parameters():
        optimizer.state[parameter]["exp_avg"].mul_(0.5)


HOSTILE = [
    *(_view_held, _rows_of_held_views, _data, _averaged, _loaded, _toggled, _given_another, _norm_of_all),
    *(_hooked, _states_read),
]


@some_of_each("does, activations, gradients", HOSTILE, ["keep", "offload", "recompute"], ["keep", "offload"])
def test_what_is_done_between_steps(does, activations, gradients, opened):
    plain = Loop(after_step=does).run(4)
    loop = Loop(opened(activations=activations, gradients=gradients), after_step=does).run(4)
    assert same(loop.result(), plain.result())
    for name in ("held", "average", "norms"):
        assert same(loop.model.__dict__.get(name, []), plain.model.__dict__.get(name, []))


def losses_of_all_weights(offloader, use):
    loop = Loop(offloader)
    loss_of = loop._loss
    loop._loss = lambda ids: loss_of(ids) + use(loop.model)
    return loop.run().result()


def _penalty_of_gradients(model):
    """Gradients of gradients."""
    loss = model.blocks[1](torch.ones(2, WIDTH)).square().mean()
    weights = [model.blocks[1].up.weight, model.blocks[1].down.weight]
    return sum(g.square().sum() for g in torch.autograd.grad(loss, weights, create_graph=True))


USES = {
    "l2": lambda model: sum(p.square().sum() for p in model.parameters()) * 1e-3,
    "norms": lambda model: torch.stack([p.norm() for p in model.parameters()]).sum() * 1e-3,
    "product": lambda model: (model.blocks[0].up.weight @ model.blocks[1].down.weight).diagonal().sum() * 1e-3,
    "distance": lambda model: (model.blocks[0].up.weight - model.blocks[1].up.weight.detach()).abs().mean(),
    "penalty": _penalty_of_gradients,
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).abs().mean(),
    "functional": lambda model: torch.func.functional_call(
        model.blocks[0], {"up.weight": model.blocks[1].up.weight}, torch.ones(2, WIDTH)
    ).mean(),
}


@pytest.mark.parametrize("options", [{}, GRADIENTS], ids=["weights", "gradients"])
@pytest.mark.parametrize("name", USES)
def test_weights_that_are_in_the_loss_themselves(name, options, opened):
    expected = losses_of_all_weights(None, USES[name])
    assert same(losses_of_all_weights(opened(**options), USES[name]), expected)


@pytest.mark.parametrize("holds", ["loss", "graph", "accumulators"])
def test_graphs_that_outlive_their_step(holds, opened):
    """What holds the nodes that gather gradients holds no bytes; a graph without our hooks keeps the weights in it."""
    results = []
    for offloader in (None, opened()):
        loop, kept = Loop(offloader), []
        for _ in range(3):
            loop.run(1)
            if holds == "loss":
                kept.append(loop.model(next(batches(1))).sum())
            elif holds == "graph":
                kept.append(torch.stack([p.square().sum() for p in loop.model.parameters()]).sum())
            else:
                kept += [torch.autograd.graph.get_gradient_edge(p) for p in loop.model.parameters()]
        gc.collect()
        if offloader is not None and holds == "accumulators":
            assert have_left(offloader, loop.model)
        results.append(loop.result())
        if holds != "accumulators":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                kept[0].backward()
            kept[-1].backward()
            results[-1] += gradients_of(loop.model)
    assert same(*results)


def test_two_backwards_through_one_graph_and_a_step_in_between(opened):
    messages, results = [], []
    for offloader in (PLAIN, opened()):
        loop = Loop(offloader)
        with offloader.saved_tensors():
            loss = loop._loss(next(batches(1)))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        results.append(gradients_of(loop.model))
        offloader.end_backward()
        loop.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as refused:
            loss.backward()
        messages.append(meaning_of(str(refused.value)).partition(" is at ")[0])
        results[-1] += [value.clone() for value in loop.model.state_dict().values()]
    assert same(*results)
    assert messages[0] == messages[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own, which it means to hide
def test_compiled_blocks(opened):
    results = []
    for offloader in (None, opened()):
        loop = Loop(None)
        for block in loop.model.blocks:
            block.compile(backend="aot_eager")
        if offloader is not None:
            register(loop, offloader)
        results.append(loop.run().result())
    assert same(*results)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class Lending(Block):
    def forward(self, x, other):
        return super().forward(x) + Product.apply(torch.relu(x @ other.t()), other)


class LendingNet(Net):
    """Gives each block a weight of another one."""

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks = nn.ModuleList(Lending() for _ in range(4))

    def forward(self, ids):
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, self.blocks[-1 - number].up.weight)
        return self.head(x)


@pytest.mark.parametrize("activations", ["auto", "offload", "recompute", "recompute_offload"])
def test_a_weight_of_another_unit_that_is_saved_itself(activations, opened, monkeypatch):
    """As an input of a recomputed block, and by a custom function."""
    monkeypatch.setattr("tests.support.weight_loops.Net", LendingNet)
    consent = {"recompute_modules": ["Lending"]} if activations != "offload" else {}
    offloader = opened(activations=activations, **consent)

    def send_out(model, optimizer, step):
        assert have_left(offloader, model)

    assert same(Loop(offloader, after_step=send_out).run().result(), Loop().run().result())


def load_again(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def swap_with_each_other(model):
    torch.utils.swap_tensors(model.blocks[0].up.weight, model.blocks[1].up.weight)


def swap_with_a_tensor(model):
    torch.utils.swap_tensors(model.blocks[1].up.weight, nn.Parameter(torch.ones_like(model.blocks[1].up.weight)))


def convert(model):
    model.blocks[0].up._apply(torch.clone)  # what .to() does to all tensors


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pairwise(
    "options, does",
    [GRADIENTS, {"gradients": "offload"}, {}],
    [load_again, swap_with_each_other, swap_with_a_tensor, convert],
)
def test_swapping_tensors_is_refused_while_they_are_offloaded(does, options, opened):
    """By PyTorch, which finds a weak reference of ours."""
    offloader = opened(**options)

    def swap(model, optimizer, step):
        if step == 1:
            with pytest.raises(RuntimeError, match=r"weakref associated|Couldn't swap"):
                does(model)

    loop = Loop(offloader, after_step=swap).run(3)
    assert same(loop.result(), Loop(None).run(3).result())


def test_tensors_can_be_swapped_after_closing(opened):
    offloader = opened(gradients="offload")
    model = Loop(offloader).run(2).model
    offloader.close()
    swap_with_each_other(model)
    assert pager_of(offloader) not in _guarding_lost_weights  # gradients that nobody has are not lost
