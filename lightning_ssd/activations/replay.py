"""The hooks of one pass: what is known to stay, or to move, goes through few Python calls, and through no lock.

A plan, or what an earlier pass has taught, names the storages of a pass by size, in pack order. As long as the pass
saves the same sizes, the hooks keep what is to stay, and have the rest leave in groups. What is no whole storage of an
operation's result goes the way of ``hooks.py``; from the first other size on, everything does. A wrong guess costs a
place in the order, never a value: a tensor that is kept is held as it is, with its version, whatever storage it was
taken for.

What has stayed, what leaves and what backward was given is noted, and counted by the next operation that takes the
lock: one for each group, and one for each look ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from lightning_ssd.activations.kept_storage import (
    KeptStorage,
    Share,
    check_not_resized,
    open_kept,
)
from lightning_ssd.activations.kept_tensor import edited_error, keep
from lightning_ssd.activations.saved_storage import SavedStorage, SavedTensor
from lightning_ssd.activations.storage_state import KEPT, RELOADED, TAKEN_BACK
from lightning_ssd.common.forks import FORKS
from lightning_ssd.common.tensors import PLAIN_TYPES
from lightning_ssd.planning.placement import Placement
from lightning_ssd.scheduling.plan_cursor import PassProgram
from lightning_ssd.tiers.streams import PASSED

if TYPE_CHECKING:
    from lightning_ssd.activations.hooks import SavedTensorHooks
    from lightning_ssd.activations.saved_pass import SavedPass

__all__ = ["DATA_PARTS", "MIN_DATA_BYTES", "hooks_of"]

DATA_PARTS = 4
MIN_DATA_BYTES = 16 << 20
"""Data (what no gradient goes to) that is less than one of so many parts of a storage of at least so many bytes leaves
the storage alone."""


MAX_GIVEN = 16
MIN_LOOKS = 4
"""Backward looks ahead behind so many moved tensors, or so many times while it goes through the bytes brought up ahead:
each look takes the lock."""
_LEN_OF_LEAF = 3
"""Entries of what is held of a tensor that no operation made; of a large one there is a share besides."""


def hooks_of(
    hooks: SavedTensorHooks, current: SavedPass, program: PassProgram, *, limit_bytes: int | None
) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return what packs and what unpacks the saved tensors of a pass.

    Args:
        hooks: get what the program does not keep.
        current: the pass.
        program: what stays.
        limit_bytes: of saved activations in memory, above which those hooks decide; ``None``: no limit.
    """
    # Names of this function: an attribute of an object takes as long to find as a storage takes to be kept.
    pack_slowly, unpack_slowly, check_process = hooks.pack, hooks.unpack, hooks.process.check
    accounting, fetcher, handed_out, parameters = hooks.accounting, hooks.fetcher, hooks.handed_out, hooks.parameters
    counters, parameter_keys, has_pager, held = accounting.counters, parameters.keys, hooks.has_pager, handed_out.held
    least, device, is_cpu = hooks.min_nbytes, hooks.device, hooks.device.type == "cpu"
    sizes, order, wanted, by_storage = current.sizes, current.order, current.wanted_s, accounting.by_storage
    expected, stays, drives, keeps_all = program
    pack_moved, pack_again, is_capturing, holds = (
        hooks.pack_moved,
        hooks.pack_again,
        hooks.is_capturing,
        hooks.graph_memory.holds,
    )
    num_expected, left_bytes = len(expected), 0
    clock, current_node, strided, plain = time.perf_counter, torch._C._current_autograd_node, torch.strided, PLAIN_TYPES
    forks, num_forks = FORKS, len(FORKS)
    given, given_bytes, budget, protect = fetcher.given, 0, hooks.budget, hooks.copies.protect
    is_host = not hooks.copies.is_asynchronous
    is_inference, is_functorch = torch.is_inference_mode_enabled, torch._C._functorch.is_functorch_wrapped_tensor
    HOST, SSD = Placement.HOST, Placement.SSD

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal num_expected, left_bytes
        if type(tensor) not in plain:
            return pack_slowly(current, tensor)
        try:
            # A small tensor that is no view can be told without asking for its storage, which takes as long as all
            # the rest.
            nbytes, is_view = tensor.nbytes, tensor._is_view()
            if nbytes < least and not is_view:
                counters.num_kept_small += 1
                if tensor.is_leaf:
                    return keep(tensor)
                # As keep() does, but of most there is nothing to note: they are in their first version.
                return (tensor.detach(), tensor._version) if tensor._version else tensor.detach()
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # it has none
            return pack_slowly(current, tensor)
        cdata = storage._cdata
        if cdata in parameter_keys:
            if has_pager:  # it may wait on a drive
                return pack_slowly(current, tensor)
            counters.num_kept_parameters += 1
            return keep(tensor)
        begin_s, index, share = clock(), len(sizes), None
        record, whole = by_storage.get(cdata), storage.nbytes()
        if record is None and current.follows and whole >= least and (limit_bytes is None or whole <= left_bytes):
            owner, is_expected = tensor._base if is_view else tensor, index < num_expected and expected[index] == whole
            is_kept = keeps_all or (is_expected and stays[index])
            if (
                (is_kept or is_expected)
                and type(owner) is torch.Tensor
                and not (owner.is_leaf and owner.requires_grad)
                and tensor.layout is strided
                and tensor.device == device
                and not parameters.ungathered
                # Else those hooks would not count it among the storages of the pass.
                and (nbytes == whole or is_view)
                and (tensor.requires_grad or not (tensor.__dict__ or whole >= max(MIN_DATA_BYTES, DATA_PARTS * nbytes)))
            ):
                if not is_kept:
                    # What is more than this, or of a fork, which may take no lock, those hooks have to look at.
                    if (
                        len(forks) == num_forks
                        and (is_host or not (is_capturing() or holds(storage.data_ptr())))
                        and not (tensor.is_quantized or tensor.is_nested or is_functorch(tensor))
                        and not tensor._is_zerotensor()
                        and not fetcher.is_closed
                    ):
                        left_bytes -= whole
                        return pack_moved(current, tensor, storage, SSD if drives and drives[index] else HOST)
                else:
                    share = open_kept(accounting, current, owner, cdata, whole, begin_s)
                    left_bytes -= whole
        elif type(record) is KeptStorage and record.nbytes == whole and record.is_same_value(tensor):
            share = record()
        elif type(record) is SavedStorage and record.nbytes == whole and current.follows and tensor.requires_grad:
            # Over the same bytes there may be a nested tensor, which tells no size.
            may_be_again = (nbytes == whole or is_view) and not tensor.is_nested and len(forks) == num_forks
            may_be_again = may_be_again and (is_host or not is_capturing())
            again = pack_again(record, tensor) if may_be_again else None
            if again is not None:
                if is_cpu:
                    counters.hook_s += clock() - begin_s
                return again
        if share is None:
            moves = record is None and index < num_expected and expected[index] == whole and not stays[index]
            packed = pack_slowly(current, tensor, moves)
            if limit_bytes is not None:
                left_bytes = limit_bytes - counters.resident_bytes
            if len(sizes) > index and not (index < num_expected and expected[index] == sizes[index]):
                num_expected = 0
            return packed
        if is_cpu:  # the work that a device has queued hides so short a time
            counters.hook_s += clock() - begin_s
        return (*keep(tensor), share) if tensor.grad_fn is None else (tensor.detach(), tensor._version, share)

    def unpack(packed: Any) -> torch.Tensor:
        nonlocal given_bytes
        kind = type(packed)
        if kind is not tuple:
            if kind is not SavedTensor:
                if not isinstance(packed, torch.Tensor):
                    return unpack_slowly(packed)
                if packed._version:
                    raise edited_error(packed, 0)
                if held or isinstance(current_node(), BackwardCFunction):
                    return handed_out.give(packed, None)
                return packed
            lease, probe, _, size, stride, offset, is_conj, is_neg, is_leaf = packed
            begin_s, alias, moved, memory, cursor = clock(), probe.alias, lease.record, lease.storage, current.cursor
            state, mark = moved.state, moved.mark
            if (
                memory is None
                or len(forks) != num_forks  # a fork may take no lock
                or not (state is RELOADED or state is TAKEN_BACK or state is KEPT)
                or alias._version != probe.saved
                or memory.nbytes() < moved.nbytes
                # Nothing else is noted later: the first one of a backward, those of a budget, of traces and of records.
                or not (order and moved.home is current)
                or not (cursor is None or cursor.limit_bytes is None)
                or not (current.recorder is None and accounting.recorder is None)
                or is_conj
                or is_neg
                or is_inference()
                or not (mark is None or mark is PASSED or mark.query())
            ):
                return unpack_slowly(packed)
            index = moved.index
            if index not in wanted:
                wanted[index] = begin_s
                order.append(index)
            rebuilt: torch.Tensor = alias.detach()
            rebuilt.data = alias.data.set_(memory, offset, size, stride)
            if not is_host:
                protect(rebuilt)
            if is_leaf or held or isinstance(current_node(), BackwardCFunction):
                rebuilt = handed_out.give(rebuilt, moved if is_leaf else None)
            given.append(moved)
            given_bytes += moved.nbytes
            if len(given) >= MAX_GIVEN or MIN_LOOKS * given_bytes >= budget.nbytes:
                given_bytes = 0
                fetcher.look_ahead(moved)
            counters.hook_s += clock() - begin_s
            return rebuilt
        share = packed[-1]
        if type(share) is not Share:
            small: torch.Tensor = packed[0]
            if small._version != packed[1]:
                raise edited_error(small, packed[1])
            if len(packed) < _LEN_OF_LEAF and (held or isinstance(current_node(), BackwardCFunction)):
                return handed_out.give(small, None)
            return small
        tensor: torch.Tensor = packed[0]
        record = share.record
        if tensor._version != packed[1]:
            raise edited_error(tensor, packed[1])
        if tensor.untyped_storage().nbytes() < record.nbytes:
            check_not_resized(tensor, record.nbytes)
        if not order or record.home is not current:
            check_process()
            fetcher.note_kept(record)
        elif record.index not in wanted:
            wanted[record.index] = clock()
            order.append(record.index)
        if held or isinstance(current_node(), BackwardCFunction):
            return handed_out.give(tensor, record if len(packed) > _LEN_OF_LEAF else None)
        return tensor

    return pack, unpack
