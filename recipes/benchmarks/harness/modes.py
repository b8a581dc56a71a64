"""The contenders of the benchmarks: ways to train the same GPT-2, and an account of what autograd saves."""

from __future__ import annotations

import functools
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import lightning_ssd
from recipes.benchmarks.harness.mode_names import ModeSpec, parse_mode
from recipes.benchmarks.harness.throttle import BucketBackend, parse_rate


class Mode:
    """One way to train. ``with mode.forward(): loss = ...``, ``loss.backward()``, ``mode.end_backward()``."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.forward = context

    def end_backward(self) -> None:
        """After each backward."""

    def begin_step(self) -> None:
        """Before each step, not timed."""

    def counters(self) -> dict[str, Any]:
        """What the last step moved and held; empty where nothing is counted."""
        return {}

    def description(self) -> dict[str, Any]:
        """What really happens, for reports; empty where there is nothing to say."""
        return {}


class OurMode(Mode):
    """Ours."""

    def __init__(self, offloader: lightning_ssd.Offloader, *, budget_bytes: int | None = None) -> None:
        super().__init__(offloader.saved_tensors)
        self._offloader = offloader
        self._budget_bytes = budget_bytes
        self._before = offloader.stats

    def end_backward(self) -> None:
        self._offloader.end_backward()

    def begin_step(self) -> None:
        self._offloader.reset_peaks()
        self._before = self._offloader.stats

    def counters(self) -> dict[str, Any]:
        now, before = self._offloader.stats, self._before
        moved = ("bytes_written", "bytes_read", "bytes_forwarded", "bytes_kept", "stall_s", "failures")
        counted: dict[str, Any] = {name: getattr(now, name) - getattr(before, name) for name in moved}
        counted |= {"resident_peak_bytes": now.resident_peak_bytes, "disk_bytes": now.disk_bytes}
        if self._budget_bytes is not None:
            counted["budget_bytes"] = self._budget_bytes
        report = self._offloader.plan_report
        return counted if report is None else counted | {"plan": asdict(report)}

    def description(self) -> dict[str, Any]:
        return {"backend": self._offloader.description}


class _File:
    """A file that goes when nobody needs it any more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


def naive_hooks(directory: Path) -> AbstractContextManager[Any]:
    """As PyTorch's tutorial on saved-tensor hooks does it: one file each, parameters known by their type."""

    def pack(tensor: Tensor) -> Tensor | _File:
        if isinstance(tensor, nn.Parameter):
            return tensor
        file = _File(directory / str(uuid.uuid4()))
        torch.save(tensor, file.path)
        return file

    def unpack(packed: Tensor | _File) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        loaded: Tensor = torch.load(packed.path)
        return loaded

    return saved_tensors_hooks(pack, unpack)


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute each block in backward."""
    for block in model.get_submodule("transformer.h").children():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the modes that are ours are told beyond their name."""

    verify: str = "off"
    budget_bytes: int | None = None
    """Of saved activations, for ``budget=...``."""
    deterministic: bool = True
    """On a CUDA device: only operations that repeat their bits, as far as there are any."""


@contextmanager
def open_mode(name: str, model: nn.Module, directory: Path, settings: Settings) -> Iterator[Mode]:
    """Set one mode up for ``model``; what it leaves on the drive goes at the end."""
    spec = parse_mode(name)
    with ExitStack() as stack:
        if spec.activations is not None:
            yield _open_ours(stack, spec, model, directory, settings)
        elif spec.kind == "naive":
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
            yield Mode(functools.partial(naive_hooks, Path(folder)))
        elif spec.kind == "save_on_cpu":
            yield Mode(functools.partial(save_on_cpu, pin_memory=next(model.parameters()).is_cuda))
        else:
            if spec.kind == "recompute":
                checkpoint_blocks(model)
            yield Mode()


def _open_ours(stack: ExitStack, spec: ModeSpec, model: nn.Module, directory: Path, settings: Settings) -> OurMode:
    rate = None if spec.throttle is None else parse_rate(spec.throttle)
    policy = lightning_ssd.OffloadPolicy(
        activations=spec.activations,  # type: ignore[arg-type]
        verify=settings.verify,  # type: ignore[arg-type]
        activation_budget=settings.budget_bytes,
        recompute_modules="blocks" if spec.is_planned else (),
    )
    offloader = lightning_ssd.Offloader(
        policy=policy,
        hardware=lightning_ssd.HardwareProfile(paths=[directory], allow_unsuitable_paths=True),
        device=next(model.parameters()).device,
        _wrap_backend=None if rate is None else functools.partial(BucketBackend, bytes_per_s=rate),
    )
    stack.enter_context(offloader)
    offloader.register_module(model)
    return OurMode(offloader, budget_bytes=settings.budget_bytes)


class Account:
    """Counts what autograd saves, independently of the library: unique storages that are no parameters or buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._skipped = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._users: dict[int, int] = {}
        self.held_bytes = self.peak_bytes = 0

    def hooks(self) -> AbstractContextManager[Any]:
        """Around forward; the tensors themselves are kept."""
        return saved_tensors_hooks(lambda tensor: _Held(self, tensor), lambda held: held.tensor)

    def add(self, storage: torch.UntypedStorage, change: int) -> None:
        """One more, or one less, saved tensor over ``storage``, which is alive and so keeps its address."""
        address = storage.data_ptr()
        if address in self._skipped:
            return
        before = self._users.get(address, 0)
        self._users[address] = before + change
        if before == 0 or before + change == 0:
            self.held_bytes += storage.nbytes() * change
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class _Held:
    def __init__(self, account: Account, tensor: Tensor) -> None:
        # Detached, since the result of an operation would hold the graph that holds us.
        self.tensor = tensor.detach()
        self._account = account
        account.add(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._account.add(self.tensor.untyped_storage(), -1)
