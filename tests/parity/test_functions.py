"""Custom ``autograd.Function``s: inputs, outputs and intermediates saved, read twice, marked dirty, nested."""

import pytest
import torch
from torch.autograd.function import once_differentiable

from lightning_ssd.errors import HooksRefusedError
from tests.parity.saved_programs import graph, leaf
from tests.support.helpers import SETUPS, Session, assert_identical, assert_same, open_offloader

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own use of it


class SaveAll(torch.autograd.Function):
    """Saves input, output, an intermediate, a constant and ``None``."""

    @staticmethod
    def forward(ctx, x, weight):
        inner = x.sin()
        y = inner * weight
        ctx.save_for_backward(x, weight, inner, y, None, torch.full((300,), 0.5))
        return y, inner

    @staticmethod
    def backward(ctx, grad_y, grad_inner):
        x, weight, inner, y, nothing, constant = ctx.saved_tensors
        again = ctx.saved_tensors  # every access unpacks anew
        assert nothing is None
        assert torch.equal(again[2], inner)
        grad = grad_y * weight + grad_inner
        return grad * x.cos() + 0 * y + constant.sum(), grad_y * inner


class Doubled(torch.autograd.Function):
    """Edits its input in place and saves it as output."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


class Once(torch.autograd.Function):
    """Backward cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


class Rounded(torch.autograd.Function):
    """Non-differentiable second output; `setup_context` style."""

    @staticmethod
    def forward(x):
        return x.exp(), x > 0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx, grad, _):
        y, positive = ctx.saved_tensors
        return grad * y * positive


class WithForward(torch.autograd.Function):
    """Runs a small graph of its own, as re-entrant checkpointing does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin().exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            copy = x.detach().requires_grad_()
            y = copy.sin().exp()
        (slope,) = torch.autograd.grad(y, copy, grad)
        return slope


class Plain(torch.autograd.Function):
    """Keeps a tensor as an attribute, which no hook sees."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x + ctx.x)


def save_all(a):
    y, inner = SaveAll.apply(a * 2, a.t().contiguous().t() + 1)
    return y * inner


def chained(a):
    y = Doubled.apply(a * 3)
    z, _ = Rounded.apply(Once.apply(y))
    return Plain.apply(WithForward.apply(z.log()))


PROGRAMS = {
    "everything saved": graph(save_all),
    "everything saved, three backwards": graph(save_all, backwards=3),
    "marked dirty": graph(lambda a: Doubled.apply(a.sin()) * a),
    "non-differentiable output": graph(lambda a: Rounded.apply(a - 0.5)[0]),
    "graph inside backward": graph(lambda a: WithForward.apply(a * 2)),
    "attribute beside saved": graph(lambda a: Plain.apply(a * 2)),
    "chained": graph(chained),
    "same input twice": graph(lambda a: SaveAll.apply(a, a)[0]),
    "output saved by the next node too": graph(lambda a: Once.apply(Once.apply(a)).exp()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_exact(name, tmp_path):
    assert_same(PROGRAMS[name], tmp_path, setups=SETUPS)


def second_derivative(a):
    (slope,) = torch.autograd.grad(Once.apply(a * 2).sum(), a, create_graph=True)
    return slope


def freed(a):
    loss = Once.apply(a * 2).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("build", [second_derivative, freed])
def test_errors_are_pytorchs_own(build, tmp_path):
    assert_same(graph(build), tmp_path, raises=True, moves=False)


def test_what_a_node_shows_of_its_saved_tensors(tmp_path):
    """``grad_fn._saved_*`` unpacks outside of backward; the bytes are right, and backward still is."""

    def program(session):
        a = leaf()
        with session.saved():
            y = (a * 2).sin()
        session.drain()
        seen = y.grad_fn._saved_self.detach().clone()
        y.sum().backward()
        session.end()
        return seen, a.grad

    assert_same(program, tmp_path)


def test_what_a_node_shows_in_inference_mode(tmp_path):
    """A tensor like any other, with the saved bytes, and backward goes on with it."""
    x = torch.rand(64, 64, requires_grad=True)
    with open_offloader(tmp_path) as offloader:
        with offloader.saved_tensors():
            y = x.exp()
            expected, node = y.detach().clone(), y.grad_fn
            loss = (y * torch.rand(64, 64)).sin().sum()
            del y
        offloader.flush()
        assert offloader.stats.resident_bytes < offloader.stats.bytes_saved
        with torch.inference_mode():
            shown = node._saved_result
            assert not shown.is_inference()
        assert torch.equal(shown, expected)
        assert shown._version == 0
        assert offloader.stats.bytes_read > 0
        loss.backward()
        assert x.grad is not None


class Scaled(torch.autograd.Function):
    """By what somebody has noted on a constant."""

    @staticmethod
    def forward(ctx, x, constant):
        ctx.save_for_backward(constant)
        return x * constant * getattr(constant, "scale", 1.0)

    @staticmethod
    def backward(ctx, gradient):
        (constant,) = ctx.saved_tensors
        return gradient * constant * getattr(constant, "scale", 1.0), None


@pytest.mark.parametrize("is_held", [True, False])
def test_what_is_noted_on_a_constant(is_held, tmp_path):
    """Plain autograd holds the very object."""

    def gradient(session):
        torch.manual_seed(1)
        x, constant = torch.rand(64, 64, requires_grad=True), torch.rand(64, 64)
        constant.scale = 0.25
        with session.saved():
            loss = Scaled.apply(x, constant).sin().sum()
        held = constant if is_held else None
        del constant
        session.backward(loss)
        del held
        return x.grad

    expected = gradient(Session())
    for setup in SETUPS:
        with open_offloader(tmp_path, setup) as offloader:
            assert torch.equal(gradient(Session.of(offloader, setup)), expected)
            assert offloader.stats.num_saved > 0


def waves(t):
    return (t.sin() * t.exp()).sum()


REFUSING = {
    "grad": lambda x: torch.func.grad(waves)(x),
    "vjp": lambda x: torch.func.vjp(waves, x)[1](torch.tensor(1.0))[0],
    "jacrev": lambda x: torch.func.jacrev(waves)(x),
    "hessian": lambda x: torch.func.hessian(waves)(x),
    "per-sample": lambda x: torch.func.vmap(torch.func.grad(waves))(x),
}
# What the message says to write in their place. Only of a hessian the order of sums, and so the last bit, differs.
INSTEAD = {
    "grad": lambda x: torch.autograd.grad(waves(y := x.clone().requires_grad_()), y, create_graph=True)[0].detach(),
    "vjp": lambda x: torch.autograd.functional.vjp(waves, x)[1],
    "jacrev": lambda x: torch.autograd.functional.jacobian(waves, x),
    "hessian": lambda x: torch.autograd.functional.hessian(waves, x),
}


@pytest.mark.parametrize("name", REFUSING)
def test_transforms_that_refuse_hooks_are_refused_with_a_way_out(name, tmp_path):
    """They work beside our context; within it, an error of ours names what works."""
    x = torch.rand(5, 6)
    expected = REFUSING[name](x)
    with open_offloader(tmp_path) as offloader:
        with (
            pytest.raises(HooksRefusedError, match=r"Write torch\.autograd\.grad") as caught,
            offloader.saved_tensors(),
            offloader.saved_tensors(),
        ):  # the outer one adds nothing
            REFUSING[name](x)
        assert isinstance(caught.value, RuntimeError)  # as PyTorch's own is
        assert not isinstance(caught.value.__cause__, HooksRefusedError)
        assert torch.equal(REFUSING[name](x), expected)
        if name in INSTEAD:
            plain = INSTEAD[name](x)
            torch.testing.assert_close(plain, expected)
            with offloader.saved_tensors():
                assert torch.equal(INSTEAD[name](x), plain)
            offloader.end_backward()


def test_other_errors_of_a_forward_stay_what_they_are(tmp_path):
    with open_offloader(tmp_path) as offloader, pytest.raises(RuntimeError) as caught, offloader.saved_tensors():
        torch.ones(2) @ torch.ones(3)
    assert type(caught.value) is RuntimeError


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: torch.func.vmap(lambda v: v.sin().exp())(x),
        lambda x: torch.func.jvp(waves, (x,), (x,)),
        lambda x: torch.func.jacfwd(waves)(x),
    ],
    ids=["vmap", "jvp", "jacfwd"],
)
def test_transforms_that_take_hooks_have_their_bits(transform, tmp_path):
    x = torch.rand(5, 6)
    expected = transform(x)
    with open_offloader(tmp_path) as offloader:
        with offloader.saved_tensors():
            assert_identical(transform(x), expected)
            assert_identical(transform(x.clone().requires_grad_()), expected)
        offloader.end_backward()


def dual_numbers(a):
    y = torch.autograd.forward_ad.make_dual(a, torch.ones(40, 50))
    primal, tangent = torch.autograd.forward_ad.unpack_dual((y.sin() * y).exp())
    return primal + tangent.square()


def tangents_of_zeros(a):
    """Where a factor has no tangent, autograd saves a tensor of zeros that has a size and no memory."""
    y = torch.autograd.forward_ad.make_dual(torch.ones(40, 50), torch.full((40, 50), 0.5))
    primal, tangent = torch.autograd.forward_ad.unpack_dual(torch.sin(y * a) * a)
    return tangent.square() + primal


@pytest.mark.parametrize("build", [dual_numbers, tangents_of_zeros])
def test_forward_mode(build, tmp_path):
    """Dual numbers inside the context."""

    def within(a):
        with torch.autograd.forward_ad.dual_level():
            return build(a)

    assert_same(graph(within), tmp_path)
