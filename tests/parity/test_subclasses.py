"""Tensors that are more, or less, than strided memory are kept as they are, counted, and never broken."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tests.parity.saved_programs import graph, held, leaf
from tests.support.helpers import (
    DRAINED,
    EAGER,
    Raised,
    Session,
    assert_identical,
    assert_released,
    assert_same,
    open_offloader,
    outcome,
)


class Tagged(torch.Tensor):
    """A subclass without memory of its own kind."""


class Wrapped(torch.Tensor):
    """A wrapper subclass: its storage is empty, its data is inside."""

    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapped, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapped, func(*args, **kwargs))


def _quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these dtypes are deprecated, and yet people have them
        return torch.quantize_per_tensor(torch.rand(40, 50), 0.01, 3, torch.quint8)


def _nested(*shapes, **settings):
    return torch.nested.nested_tensor([torch.rand(shape) for shape in shapes], layout=torch.jagged, **settings)


def _sparse():
    return (torch.rand(40, 64) > 0.8).float().to_sparse().requires_grad_()


FOREIGN = {
    "subclass": graph(
        lambda a: (a * 2).sin().exp(),
        lambda: torch.rand(40, 50).as_subclass(Tagged).requires_grad_(),
        look=lambda grad: grad.as_subclass(Tensor),
    ),
    "wrapper subclass": graph(
        lambda a: (a * 2).sin().exp(),
        lambda: Wrapped(torch.rand(40, 50)).requires_grad_(),
        look=lambda grad: grad.inner,
    ),
    "nested": graph(
        lambda a: (torch.sin(a * 2) * 3).values(),
        lambda: _nested(*((3 + 2 * n, 50) for n in range(4)), requires_grad=True),
        look=lambda grad: grad.values(),
    ),
    "sparse product": graph(
        lambda adjacency, weight: torch.sparse.mm(adjacency, weight).sin(),
        _sparse,
        lambda: leaf(64, 50),
        look=lambda grad: grad.coalesce().values() if grad.is_sparse else grad,
    ),
    "sparse COO": held(lambda: (torch.rand(40, 50).relu().to_sparse(),), lambda t: t.to_dense()),
    "sparse CSR": held(lambda: (torch.eye(40).to_sparse_csr(),), lambda t: t.to_dense()),
    "quantised": held(lambda: (_quantised(),), lambda t: (t.int_repr(), t.q_scale(), t.q_zero_point())),
    "meta": held(lambda: (torch.empty(40, 50, device="meta"),), lambda t: (t.device.type, tuple(t.shape))),
    "mkldnn": held(lambda: (torch.rand(40, 50).to_mkldnn(),), lambda t: t.to_dense()),
    "wrapper held": held(lambda: (Wrapped(torch.rand(40, 50)),), lambda t: t.inner),
    "nested held": held(lambda: (_nested((3, 5), (2, 5)),), lambda t: (t.values(), t.offsets())),
}
SPARSE_GRADIENT = graph(
    lambda weight: nn.functional.embedding(torch.arange(0, 100, 3), weight, sparse=True).sin(),
    lambda: leaf(100, 40),
    look=lambda grad: grad.to_dense(),
)


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_kept_counted_and_exact(name, tmp_path):
    expected = outcome(FOREIGN[name], Session())
    assert not isinstance(expected, Raised), expected
    for setup in (DRAINED, EAGER):
        with open_offloader(tmp_path, setup) as offloader:
            assert_identical(outcome(FOREIGN[name], Session(offloader, drained=setup.drained)), expected, name)
            assert offloader.stats.num_kept_foreign > 0
            assert_released(offloader)


def test_sparse_gradients(tmp_path):
    assert_same(SPARSE_GRADIENT, tmp_path, setups=[DRAINED])


def test_distributed_tensor(mesh, tmp_path):
    from torch.distributed.tensor import Shard, distribute_tensor

    def program(session):
        weight = nn.Parameter(distribute_tensor(torch.rand(40, 50), mesh, [Shard(0)]))
        x = distribute_tensor(torch.rand(30, 40), mesh, [Shard(0)])
        with session.saved():
            y = torch.sin(x @ weight).exp()
        session.backward(y.sum())
        return weight.grad.to_local()

    expected = outcome(program, Session())
    assert isinstance(expected, Tensor)
    with open_offloader(tmp_path) as offloader:
        assert_identical(outcome(program, Session(offloader, drained=True)), expected)
        assert offloader.stats.num_kept_foreign > 0


def test_parameters_are_known_by_their_storage(tmp_path):
    """Transposed, detached, sliced, tied, chunked: whatever view a weight comes in, it is not written."""
    with open_offloader(tmp_path) as offloader:
        weight, buffer = nn.Parameter(torch.rand(300, 400)), torch.rand(300, 400)
        holder = nn.Module()
        holder.weight = weight
        holder.register_buffer("constant", buffer)
        offloader.register_module(holder)
        x = torch.rand(2, 300).requires_grad_()
        with offloader.saved_tensors():
            views = [weight, weight.detach(), weight.data, buffer, buffer[:, :], weight.view(-1).view(300, 400)]
            loss = sum((x @ view).sum() for view in views)
            loss = loss + sum((x @ half).sum() for half in weight.chunk(2, dim=1))
        offloader.flush()
        stats = offloader.stats
        loss.backward()
        offloader.end_backward()
        assert stats.num_kept_parameters >= 8
        assert stats.bytes_written < weight.numel() * 4
