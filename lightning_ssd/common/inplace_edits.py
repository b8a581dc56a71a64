"""Detect in-place edits of saved tensors, and report them as PyTorch does.

PyTorch compares the version of a saved tensor with the one at the time of saving, but only where no saved-tensor
hooks are installed. This package installs hooks, so that it has to compare the versions itself.
"""

from __future__ import annotations

import weakref

import torch

from lightning_ssd.common.tensors import TensorSpec

__all__ = ["Probe", "VersionProbe", "inplace_error", "owner_of", "probed", "resized_error"]


class Probe:
    """Detects every in-place edit of a tensor and of its views, without holding their memory.

    ``detach()`` shares the version counter, and giving the detached tensor other (empty) data leaves its counter
    shared. An edit through ``tensor.data`` or through NumPy changes no counter; PyTorch does not see it either.

    A subclass has the attributes, from :func:`probed`.
    """

    __slots__ = ()

    alias: torch.Tensor
    """Has the tensor's version and gradients' form, and no memory."""
    owner: weakref.ref[torch.Tensor]
    """The tensor whose version counter it has."""
    saved: int
    """The version when it was saved."""

    def shares_counter(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` surely has the version counter of the probed tensor.

        Equal storage and version do not prove it: ``tensor.data`` and ``unsafe_chunk`` (inside of GRU and LSTM cells)
        give counters of their own. A tensor from ``detach()`` shares the counter, but only an edit could show it, and
        the program would see that edit. So the answer for it is ``False``.
        """
        return self.owner() is owner_of(tensor)

    def rebuild(self, spec: TensorSpec, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the saved tensor over its reloaded bytes, with its own version counter.

        Because of the counter, edits of the returned tensor are detected, and so are edits of the original after the
        returned tensor was saved again (double backward).
        """
        if torch.is_inference_mode_enabled():  # user code inspects a graph: tensors made here would be of another kind
            with torch.inference_mode(False):
                return self.rebuild(spec, storage)
        tensor = self.alias.detach()
        tensor.data = spec.view(storage)
        return tensor

    @property
    def version(self) -> int:
        """The tensor's version now; ``saved`` is the one at the time of saving."""
        return self.alias._version


class VersionProbe(Probe):
    """A probe of its own.

    Args:
        tensor: to be watched, as it is now.
    """

    __slots__ = ("alias", "owner", "saved")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias, self.owner, self.saved = probed(tensor)


def probed(tensor: torch.Tensor) -> tuple[torch.Tensor, weakref.ref[torch.Tensor], int]:
    """Return alias, owner and version of a tensor as it is now: see :class:`Probe`.

    Args:
        tensor: to be watched.
    """
    base, kind = tensor._base, (tensor.dtype, tensor.device)
    empty, alias = _empty.get(kind), tensor.detach()
    alias.data = _empty_of(*kind) if empty is None else empty
    return alias, weakref.ref(tensor if base is None else base), tensor._version


_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _empty_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without elements, made once: that takes longer than all else that a probe needs.

    Args:
        dtype: of the tensor.
        device: of the tensor.
    """
    empty = _empty.get((dtype, device))
    if empty is None:
        empty = torch.empty(0, dtype=dtype, device=device)
        if type(empty) is torch.Tensor and not empty.is_inference():  # else a mode of the program has made it
            _empty[dtype, device] = empty
    return empty


def owner_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose version counter ``tensor`` has: its base if it is a view. Views keep their base alive."""
    base = tensor._base
    return tensor if base is None else base


def inplace_error(
    description: tuple[torch.dtype, torch.device, torch.Size], *, version: int, expected: int
) -> RuntimeError:
    """Return an error of the type and the meaning that plain PyTorch raises for the same program.

    It names the operation that runs in backward just now, and asks for the tensor. PyTorch names the one that made the
    tensor's present value, which would have to be noted with each tensor.

    Args:
        description: dtype, device and size of the saved tensor.
        version: its version now.
        expected: its version when it was saved.
    """
    dtype, device, size = description
    node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
    # By its type: a Function may have set an attribute of this name.
    needed_by = "" if node is None else f", which {type(node).name(node)} needs,"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)} on {device}]{needed_by} is at version {version}; expected version {expected} instead. "
        "Edit a clone() of it, or edit it after backward(); torch.autograd.set_detect_anomaly(True) shows which "
        "operation has failed to compute its gradient"
    )


def resized_error(expected: int, nbytes: int) -> RuntimeError:
    """Return an error for a saved tensor whose storage has been resized to fewer bytes."""
    return RuntimeError(
        f"a saved tensor had {expected:,} bytes of memory and has {nbytes:,} now, because its storage was resized "
        "(untyped_storage().resize_()); keep it as it is until backward is over"
    )
