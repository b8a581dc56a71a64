"""Gradients of a device that are set, and gradients that are handed to autograd: where C asks no class of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import Offloader
from tests.parameters.test_device_gradients import Opened, gone, opened, pager_of, small_subgroups  # noqa: F401
from tests.parameters.test_device_training import NUM_WEIGHTS
from tests.parameters.test_device_weights import away, eventually
from tests.support.weight_loops import Loop, same

# -- set ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grad", "_grad"])
@pytest.mark.parametrize("both_wait", [True, False])
@pytest.mark.parametrize("is_away", [True, False])
def test_one_gradient_of_two_parameters(is_away: bool, both_wait: bool, name: str, opened: Opened) -> None:  # noqa: F811
    found = []
    for offloader in (None, opened()):
        torch.manual_seed(4)
        layers = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
        if offloader is not None:
            offloader.expect_no_optimizer()
            offloader.register_module(layers if both_wait else layers[1])
        if is_away:
            layers(torch.ones(2, 128)).sum().backward()
            if offloader is not None:
                assert eventually(offloader, lambda layers=layers: len(gone(layers)) == 1 + both_wait)
            setattr(layers[0].weight, name, layers[1].weight.grad)
        else:
            layers[0].weight.grad = layers[1].weight.grad = torch.zeros(128, 128)
        layers[0](torch.ones(2, 128)).sum().backward()  # asks nobody about the other one's gradient
        for _ in range(2):
            layers(torch.ones(2, 128)).sum().backward()
        found.append([layer.weight.grad.clone() for layer in layers])
        if offloader is not None:
            assert layers[0].weight.grad is layers[1].weight.grad
    assert same(*found)


def test_setting_a_gradient_asks_for_no_bytes_of_its_own(opened: Opened) -> None:  # noqa: F811
    """``p.grad = p.grad``, as a helper that has changed nothing does, and a tensor that has none."""
    offloader = opened()
    offloader.expect_no_optimizer()
    layer = nn.Linear(128, 128, bias=False)
    offloader.register_module(layer)
    layer(torch.ones(2, 128)).sum().backward()
    assert eventually(offloader, lambda: len(gone(layer)) == 1)
    layer.weight.grad = layer.weight.grad
    assert len(gone(layer)) == 1
    del layer.weight.grad
    assert layer.weight.grad is None
    with pytest.raises(TypeError, match="assigned grad"):
        layer.weight.grad = 1  # type: ignore[assignment]
    offloader.close()
    assert not {"grad", "_grad"} & set(vars(torch.Tensor))


def test_grad_is_pytorchs_own_but_for_what_is_set(opened: Opened) -> None:  # noqa: F811
    class Subclass(torch.Tensor):
        pass

    plain = {name: getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")}
    offloader = opened()
    offloader.expect_no_optimizer()
    layer = nn.Linear(128, 128, bias=False)
    offloader.register_module(layer)
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


@pytest.mark.parametrize("does", ["read", "write", "delete", "zero", "clip"])
def test_weights_that_are_away_stay_there_when_gradients_are_asked_for(does: str, opened: Opened) -> None:  # noqa: F811
    offloader = opened(parameters="offload")
    loop = Loop(offloader)
    loop.run()
    assert eventually(offloader, lambda: len(away(loop.model)) >= NUM_WEIGHTS - 1)  # one may be on its way again
    parameters = list(loop.model.parameters())
    if does == "read":
        assert all(p.grad is None or p.grad.shape == p.shape for p in parameters)
    elif does == "write":
        for p in parameters:
            p.grad = None
    elif does == "delete":
        for p in parameters:
            del p.grad
    elif does == "zero":
        loop.optimizer.zero_grad()
    else:
        nn.utils.clip_grad_norm_(parameters, 1.0)
    assert len(away(loop.model)) >= NUM_WEIGHTS - 1


# -- handed to autograd ------------------------------------------------------------------------------------------------


class Gives(torch.autograd.Function):
    """Its gradient is a tensor of somebody else's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, give: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.give = give
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.give(), None


def _product(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Hessian times gradient."""
    loss = layer(x).pow(2).sum()
    (first,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
    return torch.autograd.grad(first, layer.weight, grad_outputs=layer.weight.grad)[0]


def _into_itself(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    (layer.weight * 3).backward(layer.weight.grad)
    return layer.weight.grad


def _into_another(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    other = nn.Parameter(torch.zeros(128, 128))
    other.backward(layer.weight.grad)
    layer.weight.grad.mul_(2)
    return other.grad


def _of_a_function(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    other = nn.Parameter(torch.zeros(128, 128))
    Gives.apply(other, lambda: layer.weight.grad).sum().backward()
    layer.weight.grad.mul_(2)
    return other.grad


class GivesFromABox(Gives):
    """It gets its gradients in a list."""

    boxed_grads_call = True

    @staticmethod
    def backward(ctx: Any, gradients: Any) -> Any:
        return ctx.give(), None


def _of_a_boxed_function(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    other = nn.Parameter(torch.zeros(128, 128))
    GivesFromABox.apply(other, lambda: layer.weight.grad).sum().backward()
    layer.weight.grad.mul_(2)
    return other.grad


class Subclass(torch.Tensor):
    """In its backward no class is asked."""


def _of_a_function_in_the_backward_of_a_subclass(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    other = nn.Parameter(torch.zeros(128, 128))
    Gives.apply(other, lambda: layer.weight.grad).sum().as_subclass(Subclass).backward()
    return other.grad


def _to_a_subclass(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    other = nn.Parameter(torch.zeros(128, 128))
    (other * 2).as_subclass(Subclass).backward(layer.weight.grad)
    return other.grad


def _unpacked_in_the_backward_of_a_subclass(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    other = nn.Parameter(torch.ones(128, 128))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: 0, lambda packed: layer.weight.grad):
        loss = (other * layer.weight.detach()).sum().as_subclass(Subclass)
    loss.backward()
    return other.grad


def _of_a_tangent(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given * 2

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> Any:
            return layer.weight.grad

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(128, 128), torch.ones(128, 128))
        return torch.autograd.forward_ad.unpack_dual(Forward.apply(dual)).tangent + 0


def _with_a_graph(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    other = nn.Parameter(torch.ones(128, 128))
    (first,) = torch.autograd.grad(other.pow(3), other, layer.weight.grad, create_graph=True)
    first.sum().backward()
    return other.grad


def _two(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    others = [nn.Parameter(torch.ones(128, 128)) for _ in range(2)]
    torch.autograd.backward([other.pow(2) for other in others], [layer.weight.grad, torch.ones(128, 128)])
    return others[0].grad + others[1].grad


def _in_a_batch(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    other = nn.Parameter(torch.ones(128))
    return torch.autograd.grad(other.pow(2), other, layer.weight.grad, is_grads_batched=True)[0]


GIVEN = (
    _product,
    _into_itself,
    _into_another,
    _to_a_subclass,
    _of_a_function,
    _of_a_boxed_function,
    _of_a_function_in_the_backward_of_a_subclass,
    _of_a_tangent,
    _unpacked_in_the_backward_of_a_subclass,
    _with_a_graph,
    _two,
    _in_a_batch,
)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own use of it, with a tangent
@pytest.mark.parametrize("gives", GIVEN)
def test_a_gradient_that_autograd_is_given(gives: Callable[..., Any], opened: Opened) -> None:  # noqa: F811
    """All of these end the process where autograd reads memory that is not there."""
    found = []
    for make in (None, opened):
        offloader = None if make is None else make()
        torch.manual_seed(3)
        layer = nn.Linear(128, 128, bias=False)
        if offloader is not None:
            offloader.expect_no_optimizer()
            offloader.register_module(layer)
        x = torch.randn(5, 128)
        layer(x).pow(2).sum().backward()
        if offloader is not None:
            _wait(offloader, layer)
        given = gives(layer, x).clone()
        if offloader is not None:
            offloader.send_out_weights()  # autograd.grad() has announced a gradient that did not come
            assert all(weight.memory.num_users == 0 for weight in pager_of(offloader).weights), "it may leave again"
        layer(x).pow(2).sum().backward()
        found.append([given, layer.weight.grad.clone()])
    assert same(*found)


def _wait(offloader: Offloader, layer: nn.Linear) -> None:
    offloader.send_out_weights()
    assert eventually(offloader, lambda: len(gone(layer)) == 1)


def test_autograd_is_plain_again_afterwards(opened: Opened) -> None:  # noqa: F811
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
