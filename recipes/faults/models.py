"""Small random trainings, and the plain twin that each is held against, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_ssd import Offloader
from lightning_ssd.planning import update_memory

__all__ = ["KINDS", "Runner", "Task", "Twins", "WrongBitsError", "many_subgroups", "random_task"]


class WrongBitsError(Exception):
    """A loss, a gradient or a weight is not that of the plain twin. This must never happen."""


@dataclass(frozen=True)
class Task:
    """A model and its batches; everything follows from these numbers."""

    seed: int
    kind: str
    width: int
    depth: int
    batch: int

    def model(self) -> nn.Module:
        """With the same weights each time."""
        torch.manual_seed(self.seed)
        return _KINDS[self.kind](self.width, self.depth).train()

    def inputs(self, step: int) -> Tensor:
        """The batch of a step; its size changes now and then, as the last one of an epoch does."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        batch = self.batch - (step % 5 == 4)
        return torch.randn(batch, 12, self.width, generator=generator)


class _Perceptron(nn.Module):
    """Views, edits in place after what is saved, and dropout."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y.relu_()
            x = x + functional.dropout(y.transpose(1, 2).contiguous().transpose(1, 2), 0.1, training=self.training)
            x[:, :1].mul_(0.5)
        return x


class _Convolution(nn.Module):
    """Batch norm's statistics, and indices from pooling."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv1d(12, 12, 3, padding=1), nn.BatchNorm1d(12), nn.GELU()) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.pool = nn.MaxPool1d(2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        pooled: Tensor = self.pool(x)
        return pooled


class _Attention(nn.Module):
    """Blocks that repeat, as planning and recomputing look for."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Recurrent(nn.Module):
    """Parts of one storage with version counters of their own."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.cells = nn.GRU(width, width, num_layers=min(depth, 2), batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.cells(x)[0]
        return output


_KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "perceptron": _Perceptron,
    "convolution": _Convolution,
    "attention": _Attention,
    "recurrent": _Recurrent,
}


KINDS: tuple[str, ...] = tuple(_KINDS)
"""Names of models."""


@contextmanager
def many_subgroups() -> Iterator[None]:
    """The states of models as small as ours would all stay in memory; with smaller subgroups they come and go."""
    with (
        mock.patch.object(update_memory, "_MIN_SUBGROUP_BYTES", 16 << 10),
        mock.patch.object(update_memory, "NUM_SLOTS", 2),
    ):
        yield


def random_task(dice: random.Random, *, kinds: tuple[str, ...] = KINDS) -> Task:
    """A model whose steps take milliseconds and save some hundred kibibytes."""
    return Task(
        seed=dice.randrange(1 << 20),
        kind=dice.choice(kinds),
        width=dice.choice((32, 64, 92)),  # 92: storages that are no multiple of a block
        depth=dice.randint(2, 5),
        batch=dice.randint(3, 9),
    )


class Runner:
    """One training, plain or offloaded.

    Args:
        task: what is trained.
        offloader: open; ``None``: plain PyTorch.
        is_drained: wait for all writes between forward and backward, so that bytes take the way over the drive.
    """

    def __init__(self, task: Task, offloader: Offloader | None = None, *, is_drained: bool = False) -> None:
        self.task = task
        self.model = task.model()
        self.offloader = offloader
        self.is_drained = is_drained
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        if offloader is not None:
            offloader.register_module(self.model)
            self.optimizer = offloader.offload_optimizer(self.optimizer)
        self.before_backward: Callable[[], None] = lambda: None
        """Called between forward and backward, for who wants to do harm there."""
        self.after_backward: Callable[[], None] = lambda: None
        """Called when backward is over, however; for who has done harm."""

    def gradients(self, step: int) -> list[Tensor]:
        """Forward and backward; the loss, then each gradient. The same step again gives the same bits."""
        buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        self.optimizer.zero_grad(set_to_none=True)
        try:
            return self._gradients(step)
        except BaseException:
            with torch.no_grad():  # running statistics must not count a step twice
                for name, value in self.model.named_buffers():
                    value.copy_(buffers[name])
            raise

    def _gradients(self, step: int) -> list[Tensor]:
        torch.manual_seed(self.task.seed + step)
        with nullcontext() if self.offloader is None else self.offloader.saved_tensors():
            loss = self.model(self.task.inputs(step)).square().mean()
        if self.offloader is not None and self.is_drained:
            self.offloader.flush()
        self.before_backward()
        try:
            torch.autograd.backward(loss)
        finally:
            self.after_backward()
        if self.offloader is not None:
            self.offloader.end_backward()
        return [loss.detach(), *(p.grad for p in self.model.parameters() if p.grad is not None)]

    def weights(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [value.detach() for value in self.model.state_dict().values()]


class Twins:
    """A training and its plain twin, step by step.

    Args:
        task: of both.
        offloader: for the one.
        is_drained: see :class:`Runner`.
    """

    def __init__(self, task: Task, offloader: Offloader, *, is_drained: bool = False) -> None:
        self.ours = Runner(task, offloader, is_drained=is_drained)
        self._plain = Runner(task)
        self._expected: tuple[int, list[Tensor]] | None = None
        self._buffers: list[Tensor] = []
        self.steps = 0
        self.is_torn = False
        """Whether our optimizer has stopped in the middle of its step: the next step needs :meth:`resume`."""

    def step(self) -> None:
        """One step of both. After an exception out of ours call it again: the step is made anew.

        Raises:
            WrongBitsError: they differ.
        """
        if self._expected is None or self._expected[0] != self.steps:
            self._buffers = [value.clone() for value in self._plain.model.buffers()]
            self._expected = self.steps, [value.clone() for value in self._plain.gradients(self.steps)]
        _compare(self.ours.gradients(self.steps), self._expected[1], "gradients", self.steps)
        try:
            self.ours.optimizer.step()
        except BaseException:
            self.is_torn = True
            raise
        self._plain.optimizer.step()
        _compare(self.ours.weights(), self._plain.weights(), "weights", self.steps)
        self.steps += 1

    def resume(self) -> None:
        """As from a checkpoint: ours gets the weights and the states that the twin has."""
        self.ours.model.load_state_dict(self._plain.model.state_dict())
        with torch.no_grad():  # the twin has made its forward of this step, which moves running statistics on
            for buffer, before in zip(self.ours.model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)
        self.ours.optimizer.load_state_dict(copy.deepcopy(self._plain.optimizer.state_dict()))
        self.is_torn = False


def _compare(got: list[Tensor], expected: list[Tensor], what: str, step: int) -> None:
    same = len(got) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip((t.reshape(-1) for t in got), (t.reshape(-1) for t in expected), strict=True)
    )
    if not same:
        raise WrongBitsError(f"the {what} of step {step} are not those of the plain twin")
