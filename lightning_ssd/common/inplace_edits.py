"""In-place edits of saved tensors: seen, and reported in PyTorch's own words.

PyTorch compares the version of a saved tensor with the one at the time of saving, but only where no saved-tensor
hooks are installed. With our hooks we must do it, on behalf of everything that passes through them.
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch

from lightning_ssd.common.tensors import TensorSpec

__all__ = ["Origin", "VersionProbe", "inplace_error", "owner_of", "pytorch_wording", "resized_error"]

_OLD_TYPES = frozenset({"Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"})
_RETURN_SEVERAL_VIEWS = frozenset({"SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0"})


class VersionProbe:
    """Sees every in-place edit of a tensor and of its views, without holding their memory.

    ``detach()`` shares the version counter, and giving the detached tensor other (empty) data leaves its counter
    shared. An edit through ``tensor.data`` or through NumPy changes no counter; PyTorch does not see it either.
    """

    __slots__ = ("_alias", "_owner", "saved")

    def __init__(self, tensor: torch.Tensor) -> None:
        alias = tensor.detach()
        alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._alias = alias
        self._owner = weakref.ref(owner_of(tensor))
        self.saved = tensor._version

    def shares_counter(self, tensor: torch.Tensor) -> bool:
        """Whether edits of ``tensor`` are surely edits of ours. Equal storage and version do not say so.

        ``tensor.data`` and ``unsafe_chunk`` (inside of GRU and LSTM cells) give counters of their own. One that came
        by ``detach()`` shares ours, but only an edit would tell, which others would see.
        """
        return self._owner() is owner_of(tensor)

    def rebuild(self, spec: TensorSpec, storage: torch.UntypedStorage) -> torch.Tensor:
        """The saved tensor over its reloaded bytes, and with its own version counter.

        So PyTorch and we see the edit of what was handed out, and of the original when the copy is saved again
        (double backward).
        """
        if torch.is_inference_mode_enabled():  # somebody looks at a graph in it: the view would be of another kind
            with torch.inference_mode(False):
                return self.rebuild(spec, storage)
        tensor = self._alias.detach()
        tensor.data = spec.view(storage)
        return tensor

    @property
    def version(self) -> int:
        """The tensor's version now; ``saved`` is the one at the time of saving."""
        return self._alias._version


def owner_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose version counter this one has. It lives while any of its views does."""
    base = tensor._base
    return tensor if base is None else base


class Origin(NamedTuple):
    """Who made a tensor, for PyTorch's error text. Holds neither the tensor nor its graph."""

    node_name: str
    node_number: int
    output_nr: int
    is_view: bool
    tensor: weakref.ref[torch.Tensor] | None
    """``None``: it is gone, or nobody could afford to refer to it; who made its present value is unknown then."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Origin | None:
        """``None`` for a tensor that no operation made."""
        node = tensor.grad_fn
        if node is None:
            return None
        return cls(node.name(), node._sequence_nr(), tensor.output_nr, tensor._is_view(), weakref.ref(tensor))


def inplace_error(
    description: tuple[torch.dtype, torch.device, torch.Size], origin: Origin | None, *, version: int, expected: int
) -> RuntimeError:
    """The error that plain PyTorch raises for the same program.

    Args:
        description: dtype, device and size of the saved tensor.
        origin: who made it.
        version: its version now.
        expected: its version when it was saved.
    """
    dtype, device, size = description
    made_by = ""
    if origin is not None:
        name = _maker_name(origin)
        if name is None:
            return RuntimeError(_several_wording().format(origin.output_nr, _display_name(origin.node_name)))
        made_by = f", which is output {origin.output_nr} of {_display_name(name)},"
    if torch.is_anomaly_enabled():
        hint = (
            "the backtrace further above shows the operation that failed to compute its gradient. The variable in "
            "question was changed in there or anywhere later. Good luck!"
        )
    else:
        hint = _anomaly_hint()
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{_type_name(dtype, device)} {list(size)}]{made_by} is at version {version}; "
        f"expected version {expected} instead. Hint: {hint}"
    )


def resized_error(expected: int, nbytes: int) -> RuntimeError:
    """For a saved tensor whose storage had more bytes than it has now."""
    return RuntimeError(
        f"a saved tensor had {expected:,} bytes of memory and has {nbytes:,} now, because its storage was resized "
        "(untyped_storage().resize_()); keep it as it is until backward is over"
    )


def _maker_name(origin: Origin) -> str | None:
    """PyTorch names the node itself for a saved output, and for a saved input whoever made its present value.

    For a view of something edited it makes a new node; ``None`` where it refuses to, and raises another error.
    """
    # Typed as if there always were one; outside of backward there is none.
    current: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
    number = None if current is None else (current.name(), current._sequence_nr())
    if number == (origin.node_name, origin.node_number):
        return origin.node_name
    if origin.is_view and origin.node_name in _RETURN_SEVERAL_VIEWS:
        return None
    tensor = None if origin.tensor is None else origin.tensor()
    if tensor is not None and tensor.grad_fn is not None:
        return tensor.grad_fn.name()
    return "AsStridedBackward0" if origin.is_view else origin.node_name


def _type_name(dtype: torch.dtype, device: torch.device) -> str:
    """As PyTorch's errors write it: only the oldest types have Python's names."""
    python_name = torch.empty(0, dtype=dtype, device=device).type()
    name = python_name.rpartition(".")[2].removesuffix("Tensor")
    return python_name if name in _OLD_TYPES else f"{device.type.upper()}{name}Type"


def _display_name(node_name: str) -> str:
    """Newer versions of PyTorch leave the "Backward0" out of their message."""
    if "of ExpBackward0" in pytorch_wording():
        return node_name
    return node_name.rpartition("Backward")[0] or node_name


def _anomaly_hint() -> str:
    return pytorch_wording().partition("Hint: ")[2]


@functools.cache
def pytorch_wording() -> str:
    """PyTorch's own message for a tiny program, because its wording differs between versions.

    To be called once outside of any saved-tensor hooks: under hooks PyTorch would not complain.
    """
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        x = torch.zeros(1, requires_grad=True, device="cpu")
        y = x.exp()
        y.add_(1)
        try:
            torch.autograd.grad(y.sum(), x)
        except RuntimeError as error:
            return str(error)
    raise RuntimeError("PyTorch accepted an in-place edit of a saved tensor; this version is not supported")


@functools.cache
def _several_wording() -> str:
    """PyTorch's answer when one of several views was edited, with places for number and operation."""
    with torch.enable_grad():
        base = torch.zeros(2, requires_grad=True, device="cpu").clone()
        view = base.chunk(2)[1]
        name = "" if view.grad_fn is None else _display_name(view.grad_fn.name())
        base.detach().add_(1)
        try:
            _ = view.grad_fn
        except RuntimeError as error:
            return str(error).replace(f"Output 1 of {name}", "Output {} of {}")
    raise RuntimeError("PyTorch accepted an in-place edit of one of several views; this version is not supported")
