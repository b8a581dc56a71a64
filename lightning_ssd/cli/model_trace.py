"""A pass of a model that is not there: what it saves, in which order, for how long, without memory or computing.

The model is built and run under PyTorch's fake tensors, which have sizes and no bytes. So a model of any size is traced
in seconds on any machine. The time of a pass is its floating-point operations of matrix products, convolutions and
attention, divided by a rate. Rates of training count in what lies between them, so that this makes no pass longer; it
gets its part of the time by the bytes that it reads and writes, or else what it saves would come all at once.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_ssd.cli.output import CommandError
from lightning_ssd.common.compiler import uncompiled
from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.parameters.pager import Place
from lightning_ssd.parameters.units import SharedWeights, owners
from lightning_ssd.planning.trace import Trace
from lightning_ssd.planning.what_fits import NUM_STATES, ModelSize, UnitSize
from lightning_ssd.recompute.block_discovery import find_blocks
from lightning_ssd.scheduling.recorder import Recorder

__all__ = ["ModelTrace", "trace_model"]

_MOMENT_S = 1e-9


@dataclass(frozen=True, slots=True)
class ModelTrace:
    """Trace, work and sizes of one pass of a model."""

    trace: Trace
    flops: int
    """Floating-point operations of forward and backward."""
    num_trained: int
    size: ModelSize


def trace_model(
    build: Callable[[], nn.Module],
    *,
    batch: int,
    sequence: int,
    flops_per_s: float,
    precision: str,
    min_tensor_nbytes: int,
    fused_attention: bool,
    operations_per_byte: float = 0.0,
    make_batch: Callable[[int, int], Any] | None = None,
) -> ModelTrace:
    """Run forward and backward without bytes.

    Args:
        fused_attention: attention with dropout saves no more than without, as on CUDA; PyTorch's for CPUs is not fused.
        operations_per_byte: that a device does in the time in which it reads or writes a byte of its memory.
        make_batch: makes the only batch to try; ``None``: those of :func:`example_batches`.

    Raises:
        CommandError: the model cannot be run so.
    """
    try:
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        log = logging.getLogger("torch._subclasses.fake_tensor")  # logs the whole stack of an error that is told here
        with warnings.catch_warnings(), _swapped(log, "disabled", True), uncompiled(), fakes:
            warnings.simplefilter("ignore")
            model = build_here(build)
            if is_converted := precision.endswith("-true") and precision != "32-true":
                _in_dtype(model, _dtype(precision))
            errors: list[Exception] = []
            made = example_batches(model, batch, sequence) if make_batch is None else [make_batch(batch, sequence)]
            for inputs in made:
                if is_converted:
                    inputs = tree_map_only(torch.Tensor, lambda t: _cast(t, _dtype(precision)), inputs)
                run = _Pass(model, _FlopClock(flops_per_s, operations_per_byte), min_tensor_nbytes)
                without_dropout = _WithoutAttentionDropout() if fused_attention else nullcontext()
                try:
                    with _one_sequence_per_row(), without_dropout:
                        trace = run.play(inputs, precision)
                except Exception as error:  # whatever the model says of a batch of another form
                    errors.append(error)
                    continue
                return ModelTrace(
                    trace=_scaled(trace, run.clock.share),
                    flops=run.clock.flops,
                    num_trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
                    size=_model_size(model, min_tensor_nbytes),
                )
            raise max(errors, key=lambda error: len(list(traceback.walk_tb(error.__traceback__))))  # it got furthest
    except CommandError:
        raise
    except Exception as error:  # whatever the user's own code raises when it is run without data
        said = str(error).strip().partition("\n")[0]
        raise CommandError(
            "a model that runs with tensors without values, on a batch that it takes",
            f"{type(error).__name__}: {said}",
            'where a batch is none of {"input_ids", "labels"}, (tokens, tokens), (tokens,) and tokens, name a '
            "DataModule with --data, or give the model example_batch(batch, sequence); where forward or backward "
            "depends on values, measure instead: train some steps with OffloadPolicy(activations='keep') and read the "
            "verdict",
        ) from error


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """As ``model.to(dtype)``, which PyTorch refuses where parameters are fake.

    What modules share stays shared, and attributes that Python has set on a parameter stay.
    """
    made: dict[int, tuple[Any, Any]] = {}  # with the old one, or its id might come again
    held: list[dict[str, Any]] = [t for module in model.modules() for t in (module._parameters, module._buffers)]
    for tensors in held:
        for name, old in tensors.items():
            if old is None or not old.is_floating_point() or old.dtype == dtype:
                continue
            if id(old) not in made:
                new = old.detach().to(dtype)
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(new, old.requires_grad)
                    new.__dict__.update({key: value for key, value in vars(old).items() if not hasattr(new, key)})
                made[id(old)] = old, new
            tensors[name] = made[id(old)][1]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def build_here(build: Callable[[], nn.Module]) -> nn.Module:
    """The model in training mode, with the weights that Lightning would let it make."""
    model = build()
    configure = getattr(model, "configure_model", None)
    if configure is not None:
        configure()
    return model.train()


def example_batches(model: nn.Module, batch: int, sequence: int) -> list[Any]:
    """Return the model's own ``example_batch(batch, sequence)``, else token numbers in the forms that models take.

    The narrowest form comes first: a tensor unpacks into its rows, and would be taken for a tuple.
    """
    own = getattr(model, "example_batch", None)
    if own is not None:
        return [own(batch, sequence)]
    tokens, labels = (torch.ones(batch, sequence, dtype=torch.int64) for _ in range(2))
    return [{"input_ids": tokens, "labels": labels}, (tokens, labels), (tokens,), tokens]


def training_loss(model: nn.Module, inputs: Any) -> torch.Tensor:
    """By ``training_step`` where there is one, else by calling the model."""
    step = getattr(model, "training_step", None)
    if step is None:
        result: Any = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    else:
        result = step(inputs, 0)
    if isinstance(result, dict):
        result = result.get("loss")
    loss: Any = getattr(result, "loss", None)
    loss = result if loss is None else loss
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        got = f"{type(model).__name__} returned a {type(result).__name__} without one"
        raise CommandError("a loss with gradients from training_step or forward", got, "return the loss")
    return loss if loss.dim() == 0 else loss.float().mean()


@contextmanager
def forward_context(precision: str) -> Iterator[None]:
    """Around a forward, as Lightning's precision plugins have it, by the CPU's rules."""
    if precision.endswith("-mixed"):
        with torch.autocast("cpu", dtype=_dtype(precision)):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(_dtype(precision))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _dtype(precision: str) -> torch.dtype:
    known = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}
    dtype = known.get(precision.partition("-")[0])
    if dtype is None:
        raise CommandError("a precision of 32-true, bf16-mixed, bf16-true, 16-mixed or 16-true", precision, "set one")
    return dtype


class _FlopClock:
    """A clock of the recorder that goes by work."""

    lag = 0
    noise_s = 0.0

    def __init__(self, flops_per_s: float, operations_per_byte: float) -> None:
        self.flops = 0
        self.nbytes = 0
        """Read and written by what has no count of operations."""
        self._num_stamps = 0
        self._flops_per_s = flops_per_s
        self._operations_per_byte = operations_per_byte

    def stamp(self) -> float:
        self._num_stamps += 1  # no two moments are one, or what is freed after a pack would seem to make room for it
        return self._work / self._flops_per_s + self._num_stamps * _MOMENT_S

    @property
    def _work(self) -> float:
        return self.flops + self._operations_per_byte * self.nbytes

    @property
    def share(self) -> float:
        """Share of the counted operations in all work; 1 where nothing was counted."""
        return self.flops / self._work if self.flops else 1.0

    @staticmethod
    def has_passed(stamp: float) -> bool:
        return True

    @staticmethod
    def seconds(start: float, end: float) -> float:
        return end - start


class _WithoutAttentionDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _one_sequence_per_row() -> AbstractContextManager[None]:
    """Where transformers cannot read positions to see that it is so, it takes a mask that real passes do without."""
    module, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    return _swapped(module, name, lambda *_, **__: None) if hasattr(module, name) else nullcontext()


class _Lease:
    """Dies with the last saved tensor of a storage."""

    __slots__ = ("__weakref__", "index", "kept")

    def __init__(self, index: int, kept: torch.Tensor) -> None:
        self.index = index
        self.kept = kept
        """Holds the storage, once, as the record of a real pass does."""


@dataclass(frozen=True, slots=True)
class _Saved:
    lease: _Lease
    view: tuple[Any, ...]
    dtype: torch.dtype


class _Pass(TorchDispatchMode):
    """One forward and backward, watched as training watches it."""

    def __init__(self, model: nn.Module, clock: _FlopClock, min_tensor_nbytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock
        self._model = model
        self._min_nbytes = max(min_tensor_nbytes, 1)
        alone = torch.empty(1)
        sole = _num_holders(alone.untyped_storage()._cdata)  # a fake tensor holds its storage more than once
        self._recorder = Recorder(
            self.clock, lambda: 0, released=lambda key: _num_holders(key.cdata) <= sole, now=self.clock.stamp
        )
        self._parameters = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._leases: dict[tuple[int, int], weakref.ref[_Lease]] = {}
        self._num_storages = 0
        self._live: dict[int, weakref.ref[_Lease]] = {}
        self._depth = 0

    def play(self, inputs: Any, precision: str) -> Trace:
        with self, self._watched_blocks():
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), forward_context(precision):
                loss = training_loss(self._model, inputs)
            self._recorder.forward_ended()
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            self._look_for_freed()
        return self._recorder.trace(self.clock.stamp())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._look_for_freed()
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.clock.flops += count(*args, **kwargs, out_val=result)
        elif "scaled_dot_product" in str(func):  # the CPU's, which PyTorch's own table lacks
            is_backward = "backward" in str(func)
            flops: Any = sdpa_backward_flop_count if is_backward else sdpa_flop_count
            self.clock.flops += int(flops(*(tensor.shape for tensor in args[: 4 if is_backward else 3])))
        else:
            self.clock.nbytes += _touched_bytes(func, (args, kwargs), result)
        return result

    # -- saved tensors -------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        storage = tensor.untyped_storage()
        base = tensor if tensor._base is None else tensor._base
        is_weight = storage._cdata in self._parameters or (base.is_leaf and base.requires_grad)
        if is_weight or storage.nbytes() < self._min_nbytes or tensor.layout is not torch.strided:
            return tensor
        place = (storage._cdata, tensor._version)
        known = self._leases.get(place)
        lease = None if known is None else known()
        if lease is None:
            self._look_for_freed()
            lease = _Lease(self._num_storages, tensor.detach())
            self._num_storages += 1
            self._recorder.packed(storage.nbytes(), StorageKey(storage))
            self._leases[place] = self._live[lease.index] = weakref.ref(lease)
        view = (tensor.size(), tensor.stride(), tensor.storage_offset())
        return _Saved(lease, view, tensor.dtype)

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self._look_for_freed()
        self._recorder.wanted(saved.lease.index)
        size, stride, offset = saved.view
        if saved.dtype == saved.lease.kept.dtype:
            return saved.lease.kept.as_strided(size, stride, offset)
        return torch.empty_strided(size, stride, dtype=saved.dtype)

    def _look_for_freed(self) -> None:
        """Asked with each operation, since nothing of ours runs when a graph lets go."""
        for place, reference in list(self._live.items()):
            if reference() is None:
                self._recorder.freed(place)
                del self._live[place]

    # -- blocks --------------------------------------------------------------------------------------------------

    @contextmanager
    def _watched_blocks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, block in find_blocks(self._model).items():
                stack.callback(block.register_forward_pre_hook(partial(self._enters, name), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leaves).remove)
            yield

    def _enters(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:  # a block in a block belongs to the outer one
            self._recorder.block_enters(name, recompute=False)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
            self._recorder.block_inputs(sum(n for cdata, n in storages.items() if cdata not in self._parameters))

    def _leaves(self, module: nn.Module, args: Any, result: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._recorder.block_leaves()


def _num_holders(cdata: int) -> int:
    return int(torch._C._storage_Use_Count(cdata))


def _touched_bytes(func: Any, given: Any, result: Any) -> int:
    """Return the bytes that an operation reads and writes; a view does neither."""
    read, written = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in (given, result))
    shown = {tensor.untyped_storage()._cdata for tensor in read}
    if not func._schema.is_mutable and all(tensor.untyped_storage()._cdata in shown for tensor in written):
        return 0
    return sum(tensor.nbytes for tensor in (*read, *written))


def _scaled(trace: Trace, factor: float) -> Trace:
    """Return the pass with its times scaled."""

    def scaled(part: Any) -> Any:
        times = [field.name for field in fields(part) if field.name.endswith("_s")]
        known = {name: value for name in times if (value := getattr(part, name)) is not None}
        return replace(part, **{name: factor * value for name, value in known.items()})

    parts = {"storages": tuple(map(scaled, trace.storages)), "blocks": tuple(map(scaled, trace.blocks))}
    whole: Trace = replace(scaled(trace), **parts)
    return whole


def _model_size(model: nn.Module, min_tensor_nbytes: int) -> ModelSize:
    """Return sizes in the units of training; the tensors may be fake. Weights that share memory count once."""
    found: dict[int, SharedWeights] = {}
    for name, parameter in model.named_parameters():
        storage = parameter.untyped_storage()
        weights = found.setdefault(storage._cdata, SharedWeights(storage))
        weights.names.append(name)
        weights.parameters.append(parameter)
    large = {w.names[0]: w for w in found.values() if w.storage.nbytes() >= min_tensor_nbytes}
    units: dict[Place, list[SharedWeights]] = {}
    for name, place in owners(model, large.values()).items():
        units.setdefault(place, []).append(large[name])
    return ModelSize(
        units=tuple(map(_unit_size, units.values())),
        staying=_unit_size([w for w in found.values() if w.storage.nbytes() < min_tensor_nbytes]),
        state_bytes=NUM_STATES * sum(w.trained_bytes for w in found.values()),
    )


def _unit_size(members: Sequence[SharedWeights]) -> UnitSize:
    return UnitSize(
        weight_bytes=sum(w.storage.nbytes() for w in members),
        trained_bytes=sum(min(w.trained_bytes, w.storage.nbytes()) for w in members),
    )
