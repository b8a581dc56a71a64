"""Saved tensors that a node, mostly a ``torch.autograd.Function``, was given, and may return as gradients."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from lightning_ssd.common.tensors import PLAIN_TYPES, TensorSpec, required_nbytes, storage_of, use_count
from lightning_ssd.memory.mmap import VECTOR_BYTES

__all__ = ["HandedOut"]

_Kind = tuple[torch.dtype, tuple[int, ...]]
_MAX_NODES = 64
_MAX_LOOKED = 16
_engine: Any = torch.autograd.Variable._execution_engine


class _Given(NamedTuple):
    """One saved tensor that a node was given."""

    lease: Callable[[], object | None]
    """Returns ``None`` once the memory can be handed out no more."""
    tensor: torch.Tensor
    again: torch.Tensor
    """The tensor once more: a single reference of Python's counts as the tensor's own."""

    @property
    def may_be_shared(self) -> bool:
        """Whether the program has its memory, or may be given it once more. ``True`` where that is unknown."""
        return self.lease() is not None or use_count(storage_of(self.tensor)._cdata) != 1


class _Held:
    """Tensors of one thread in one backward, which has it, and calls it at the end; if it fails, it drops it."""

    __slots__ = ("__weakref__", "given", "kinds", "node", "num_new")

    def __init__(self) -> None:
        self.node: tuple[int, int] | None = None
        """Whose saved tensors were asked for last: its address, which may be lent again, and its number."""
        self.kinds: frozenset[_Kind] | None = None
        """Kinds of these that may become a leaf's gradient; ``None``: any."""
        self.given: deque[_Given] = deque()
        self.num_new = 0
        """The last ones of these, which the node was given."""

    def __call__(self) -> None:
        self.given.clear()

    def add(self, one: _Given) -> None:
        """The node is given a tensor."""
        self.given.append(one)
        self.num_new += 1

    def let_go(self) -> None:
        """Let go as another node asks: what the program cannot have is a leaf's gradient by now, or may become one.

        Of what others had the last time, such as a table that all layers use, a few are looked at, in turn.
        """
        num_looked = min(self.num_new + _MAX_LOOKED, len(self.given))
        self.node, self.num_new = None, 0
        for _ in range(num_looked):
            one = self.given.pop()
            if one.may_be_shared:
                self.given.appendleft(one)


class HandedOut:
    """Refers to what Functions have been given, so that it does not become a gradient itself.

    Constants (what no operation of the graph has made) are held for any node that is given them: a Function in C++ may
    return one, and a checkpoint hands it on to what it runs again.

    Autograd makes the tensor that it gets for a leaf the leaf's ``grad``, without a copy, if nothing else refers to it
    (``AccumulateGrad``). A saved tensor it refers to itself, but with hooks, each time that it is asked for, it gets an
    object of its own over memory that others may have, too: two leaves would have one gradient, or a batch would be
    cleared by ``zero_grad``.

    Other nodes may run before a leaf has its gradient, also Functions, and those of a backward within the ``Function``.
    So a tensor is let go of when another node asks and the program has not its memory, nor can be given it: the leaf
    may have it then, and else it is free. As long as others have it, referring to it takes no memory. The rest goes at
    the end of the backward.

    What has another shape or dtype than any leaf that the returned gradients can get to as they are is let go at once:
    a compiled block is a ``Function``, which frees each saved tensor behind its last use, and would hold all of them
    until the next block begins.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], weakref.ref[_Held]] = {}
        """By thread and backward. While it is empty, a node that is no ``Function`` in Python need not be told of."""

    def give(self, tensor: torch.Tensor, lease: Callable[[], object | None] | None) -> torch.Tensor:
        """Return what the node that runs in this thread is to be given for a saved tensor.

        Of a tensor that an operation made, autograd makes a tensor of its own from what a hook returns, so that holding
        ours does not help: where it may become a leaf's gradient, the node is given a copy.

        Args:
            tensor: saved earlier.
            lease: returns ``None`` once no node can be given its memory any more; ``None``: an operation made it.
        """
        node: Any = torch._C._current_autograd_node()
        key = threading.get_ident(), torch._C._current_graph_task_id()
        known = self.held.get(key)
        held = None if known is None else known()
        if not isinstance(node, BackwardCFunction):
            if held is not None:
                held.let_go()
            if lease is not None and node is not None:  # one in C++ may return it, or a checkpoint hand it on
                held = held or self._begin(key)
                held.add(_Given(lease, tensor, tensor))
            return tensor
        if held is None:
            held = self._begin(key)
        name = id(node), node._sequence_nr()
        if held.node != name:
            held.let_go()
            held.node, held.kinds = name, _leaves_of(node)
        if held.kinds is None or (tensor.dtype, tuple(tensor.shape)) in held.kinds:
            if lease is None:
                copy = tensor.detach()  # it shares the version, by which edits are found
                copy.data = _with_own_memory(tensor)
                return copy
            held.add(_Given(lease, tensor, tensor))
        return tensor

    def _begin(self, key: tuple[int, int]) -> _Held:
        for other, reference in list(self.held.items()):
            if reference() is None:
                self.held.pop(other, None)
        held = _Held()
        _engine.queue_callback(held)
        self.held[key] = weakref.ref(held)
        return held


def _with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same view over a copy of what it spans: strides decide in which order a kernel adds up, as may the
    address modulo the length of a vector.
    """
    if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor._is_zerotensor():
        try:
            spec, size = TensorSpec.of(tensor), tensor.element_size()
            begin = spec.offset * size // VECTOR_BYTES * VECTOR_BYTES
            span = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            span.set_(tensor.untyped_storage(), begin, (max(required_nbytes(tensor) - begin, 0),), (1,))
            return spec._replace(offset=spec.offset - begin // size).view(span.clone().untyped_storage())
        except (NotImplementedError, RuntimeError):  # nested, quantized and functorch tensors are more than a view
            pass
    return tensor.clone()


def _leaves_of(node: Any) -> frozenset[_Kind] | None:
    """Return kinds of the leaves to which nodes such as that of a sum may pass on what this node returns.

    ``None``: unknown.

    What is passed on as it is has the dtype and the shape that each node on its way expects.
    """
    try:
        found: set[_Kind] = set()
        seen: dict[tuple[int, int], Any] = {}  # they live as long, so that no address names another one
        ways: list[tuple[Any, _Kind | None]] = [(node, None)]
        while ways:
            now, kind = ways.pop()
            for following, number in now.next_functions:
                if following is None or (id(following), number) in seen:
                    continue
                metadata = following._input_metadata[number]
                theirs = metadata.dtype, tuple(metadata.shape)
                if kind is not None and theirs != kind:
                    continue
                seen[id(following), number] = following
                if hasattr(following, "variable"):
                    found.add(theirs)
                elif len(seen) >= _MAX_NODES:
                    return None
                else:
                    ways.append((following, theirs))
    except (AttributeError, IndexError, RuntimeError, TypeError):  # PyTorch has no public word for it
        return None
    return frozenset(found)
