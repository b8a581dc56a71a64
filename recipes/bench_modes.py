"""The contenders of ``recipes.bench_step``: six ways to train the same GPT-2, and an account of what autograd saves."""

from __future__ import annotations

import functools
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import lightning_ssd
from lightning_ssd.memory import MallocThreshold


@dataclass(frozen=True)
class Shape:
    """A GPT-2 and its batch."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    sequence: int = 512
    batch: int = 8
    vocabulary: int = 16_384
    autocast: bool = False
    device: str = "cpu"

    def model(self) -> nn.Module:
        """The same weights in every process."""
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=self.layers,
            n_embd=self.width,
            n_head=self.heads,
            n_positions=self.sequence,
            vocab_size=self.vocabulary,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config).to(self.device).train()

    def tokens(self, step: int) -> Tensor:
        """The batch of one step, the same in every process."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, self.vocabulary, (self.batch, self.sequence), generator=generator).to(self.device)

    def precision(self) -> AbstractContextManager[Any]:
        """Around forward."""
        return torch.autocast(self.device, dtype=torch.bfloat16) if self.autocast else nullcontext()


class Mode:
    """One way to train. ``with mode.forward(): loss = ...``, ``loss.backward()``, ``mode.end_backward()``."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.forward = context

    def end_backward(self) -> None:
        """After each backward."""

    def begin_step(self) -> None:
        """Before each step, not timed."""

    def counters(self) -> dict[str, float]:
        """What the last step moved and held; empty where nothing is counted."""
        return {}


class SsdMode(Mode):
    """Ours."""

    def __init__(self, offloader: lightning_ssd.Offloader) -> None:
        super().__init__(offloader.saved_tensors)
        self._offloader = offloader
        self._before = offloader.stats

    def end_backward(self) -> None:
        self._offloader.end_backward()

    def begin_step(self) -> None:
        self._offloader.reset_peaks()
        self._before = self._offloader.stats

    def counters(self) -> dict[str, float]:
        now, before = self._offloader.stats, self._before
        moved = ("bytes_written", "bytes_read", "bytes_forwarded", "bytes_kept", "stall_s", "failures")
        counted: dict[str, float] = {name: getattr(now, name) - getattr(before, name) for name in moved}
        return counted | {"resident_peak_bytes": now.resident_peak_bytes, "disk_bytes": now.disk_bytes}


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


MODES = {
    "keep": "plain PyTorch",
    "ssd": "lightning_ssd",
    "recompute": "torch.utils.checkpoint per block",
    "naive": "the tutorial's saved-tensor hooks: torch.save to one file each",
    "save_on_cpu": "torch.autograd.graph.save_on_cpu",
}
MAPPED = "+mmap"
"""Suffix: with glibc's mmap threshold fixed as lightning_ssd does it, so that freed tensors leave the process."""


@contextmanager
def open_mode(name: str, model: nn.Module, directory: Path, *, verify: str = "off") -> Iterator[Mode]:
    """Set one mode up for ``model``; what it leaves on the drive goes at the end."""
    with ExitStack() as stack:
        if name.endswith(MAPPED):
            stack.enter_context(MallocThreshold())
        kind = name.removesuffix(MAPPED)
        if kind == "ssd":
            policy = lightning_ssd.OffloadPolicy(activations="offload", verify=verify)  # type: ignore[arg-type]
            hardware = lightning_ssd.HardwareProfile(paths=[directory], allow_unsuitable_paths=True)
            device = next(model.parameters()).device
            offloader = stack.enter_context(lightning_ssd.Offloader(policy=policy, hardware=hardware, device=device))
            offloader.register_module(model)
            yield SsdMode(offloader)
        elif kind == "naive":
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
            yield Mode(functools.partial(naive_hooks, Path(folder)))
        elif kind == "save_on_cpu":
            yield Mode(functools.partial(save_on_cpu, pin_memory=next(model.parameters()).is_cuda))
        else:
            if kind == "recompute":
                checkpoint_blocks(model)
            yield Mode()


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
