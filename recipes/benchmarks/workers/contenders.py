"""Ways to train a model that is larger than memory: ours, and those that users would take instead.

Each is called with a function that builds the model, a directory on the drive, the batch size and a stack that closes
what it opens. Each sets its library up as its documentation does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import lightning_ssd

__all__ = ["CONTENDERS", "PACKAGES", "Contender"]

_LEARNING_RATE = 1e-4
_WEIGHT_DECAY = 0.01
_QUIET_S = 0.005
_NOTHING_MORE: Mapping[str, Any] = {}

PACKAGES = {"accelerate": "accelerate", "deepspeed": "deepspeed"}
"""What has to be installed for a contender."""


class Contender(Protocol):
    """One way to train."""

    update_s: float
    """Of the last step: the optimizer's part, up to its last write."""

    def step(self, tokens: Tensor) -> float:
        """Forward, backward, update; the loss."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """One after the other, by their names in the plain model."""


Build = Callable[[], nn.Module]


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(input_ids=tokens, labels=tokens).loss
    return found


class Plain:
    """All in memory."""

    update_s = 0.0

    def __init__(self, build: Build, directory: Path, batch: int, stack: ExitStack) -> None:
        self._model = build()
        self._optimizer = _adamw(self._model)

    def step(self, tokens: Tensor) -> float:
        loss = _loss(self._model, tokens)
        loss.backward()
        begin_s = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._settle()
        self.update_s = time.perf_counter() - begin_s
        return float(loss.detach())

    def _settle(self) -> None:
        """Wait for what the optimizer still writes."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()


class Ours:
    """Weights, gradients, states and activations on the drive."""

    update_s = 0.0

    def __init__(self, build: Build, directory: Path, batch: int, stack: ExitStack) -> None:
        self._offloader = lightning_ssd.Offloader(
            policy=lightning_ssd.OffloadPolicy(
                activations="offload", parameters="offload", gradients="offload", optimizer_states="offload"
            ),
            hardware=lightning_ssd.HardwareProfile(paths=[directory], allow_unsuitable_paths=True, host_memory=0),
        )
        stack.enter_context(self._offloader)
        with self._offloader.streamed_init():
            self._model = build()
        self._offloader.register_module(self._model)
        self._optimizer = self._offloader.offload_optimizer(_adamw(self._model))

    def step(self, tokens: Tensor) -> float:
        with self._offloader.saved_tensors():
            loss = _loss(self._model, tokens)
        loss.backward()
        self._offloader.end_backward()
        begin_s = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._offloader.flush()
        self.update_s = time.perf_counter() - begin_s
        return float(loss.detach())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()


class OurStates(Plain):
    """Optimizer states on the drive, all else in memory.

    Args:
        build: makes the model.
        directory: for the states.
        batch: sequences of a step.
        stack: closes what is opened.
        cached_share: of the states, so many may stay in memory.
    """

    def __init__(
        self, build: Build, directory: Path, batch: int, stack: ExitStack, *, cached_share: float = 0.0
    ) -> None:
        super().__init__(build, directory, batch, stack)
        nbytes = sum(2 * parameter.nbytes for parameter in _trained(self._model))  # AdamW's two moments
        offloader = lightning_ssd.Offloader(
            policy=lightning_ssd.OffloadPolicy(activations="keep", optimizer_states="offload"),
            hardware=lightning_ssd.HardwareProfile(
                paths=[directory], allow_unsuitable_paths=True, host_memory=int(cached_share * nbytes)
            ),
        )
        stack.enter_context(offloader.open(self._model))
        self._optimizer: Any = offloader.offload_optimizer(self._optimizer)

    def _settle(self) -> None:
        """Wait until nothing moves. A flush would also write what is to stay in memory."""
        busy_s = -1.0
        while (now_s := self._optimizer.stats.fetch_busy_s + self._optimizer.stats.flush_busy_s) != busy_s:
            busy_s = now_s
            time.sleep(_QUIET_S)


class Swap:
    """The naive loop: a block's weights are in ``.data`` while it runs, else in a file. Nothing else leaves."""

    update_s = 0.0

    def __init__(self, build: Build, directory: Path, batch: int, stack: ExitStack) -> None:
        self._model = build()
        self._directory = directory
        self._names = {parameter: name for name, parameter in self._model.named_parameters()}
        self._shapes = {parameter: parameter.shape for parameter in self._names}
        self._blocks = list(self._model.transformer.h)  # type: ignore[arg-type, union-attr]
        inside = {parameter for block in self._blocks for parameter in block.parameters()}
        rest = [p for p in self._names if p not in inside and p.requires_grad]
        self._optimizers = [(block, _adamw(block)) for block in self._blocks]
        self._rest = torch.optim.AdamW(rest, lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY) if rest else None
        for block in self._blocks:
            self._store(block)
            block.register_forward_pre_hook(lambda module, _: self._load(module))
            block.register_forward_hook(lambda module, *_: self._drop(module))
            block.register_full_backward_pre_hook(lambda module, _: self._load(module))
            block.register_full_backward_hook(lambda module, *_: self._drop(module))

    def _path(self, parameter: Tensor) -> Path:
        return self._directory / self._names[parameter]  # type: ignore[index]

    def _load(self, block: nn.Module) -> None:
        for parameter in block.parameters():
            values = torch.empty(self._shapes[parameter], dtype=parameter.dtype)
            with self._path(parameter).open("rb") as file:
                file.readinto(values.view(-1).view(torch.uint8).numpy())
            parameter.data = values

    def _drop(self, block: nn.Module) -> None:
        for parameter in block.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def _store(self, block: nn.Module) -> None:
        for parameter in block.parameters():
            values = parameter.detach().contiguous().view(-1).view(torch.uint8).numpy()
            with self._path(parameter).open("wb") as file:
                file.write(values)
        self._drop(block)

    def step(self, tokens: Tensor) -> float:
        loss = _loss(self._model, tokens)
        loss.backward()
        begin_s = time.perf_counter()
        for block, optimizer in self._optimizers:
            self._load(block)
            optimizer.step()
            optimizer.zero_grad()
            self._store(block)
        if self._rest is not None:
            self._rest.step()
            self._rest.zero_grad()
        self.update_s = time.perf_counter() - begin_s
        return float(loss.detach())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for block in self._blocks:
            self._load(block)
        yield from self._model.named_parameters()


class Fsdp2(Plain):
    """``fully_shard`` with ``CPUOffloadPolicy``, one gloo process: shards wait in host memory, all a CPU has."""

    def __init__(self, build: Build, directory: Path, batch: int, stack: ExitStack) -> None:
        from torch.distributed import destroy_process_group, init_process_group
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        _be_the_only_process()
        init_process_group("gloo")
        stack.callback(destroy_process_group)
        mesh = init_device_mesh("cpu", (1,))
        policy = CPUOffloadPolicy(pin_memory=False)
        self._model = build()
        for block in self._model.transformer.h:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(self._model, mesh=mesh, offload_policy=policy)
        self._optimizer = _adamw(self._model)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.full_tensor()  # type: ignore[operator]


class Accelerate(Plain):
    """``disk_offload`` of the whole model, as its documentation has it for inference; then trained all the same."""

    def __init__(self, build: Build, directory: Path, batch: int, stack: ExitStack) -> None:
        from accelerate import disk_offload  # type: ignore[import-not-found, unused-ignore]

        self._directory = directory
        self._model = disk_offload(build(), str(directory), execution_device=torch.device("cpu"))
        self._optimizer = _adamw(self._model)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        from accelerate.utils import OffloadedWeightsLoader  # type: ignore[import-not-found, unused-ignore]

        files = OffloadedWeightsLoader(save_folder=str(self._directory))
        for name, _ in self._model.named_parameters():
            yield name, files[name]


class DeepSpeed:
    """ZeRO stage 3 with the optimizer, and by default parameters, on NVMe.

    Args:
        build: makes the model.
        directory: for what is swapped.
        batch: sequences of a step.
        stack: nothing of it has to be closed.
        param: settings of ``offload_param`` besides the defaults here; ``None``: parameters stay in memory.
        optimizer: likewise of ``offload_optimizer``.
        zero: likewise of ``zero_optimization``.
        aio: likewise of ``aio``.
    """

    update_s = 0.0

    def __init__(
        self,
        build: Build,
        directory: Path,
        batch: int,
        stack: ExitStack,
        *,
        param: Mapping[str, Any] | None = _NOTHING_MORE,
        optimizer: Mapping[str, Any] | None = None,
        zero: Mapping[str, Any] | None = None,
        aio: Mapping[str, Any] | None = None,
    ) -> None:
        _be_the_only_process()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # type: ignore[import-not-found, unused-ignore]  # installed for this benchmark only

        deepspeed.init_distributed("gloo")
        model = build()
        largest = max(parameter.numel() for parameter in model.parameters())
        place = {"device": "nvme", "nvme_path": str(directory), "buffer_count": 5}
        waiting: dict[str, Any] = {}
        if param is not None:
            # With a prefetch it ends in "Not enough buffers" or "already assigned swap buffer".
            waiting["stage3_prefetch_bucket_size"] = 0
            waiting["offload_param"] = {**place, "buffer_size": largest, **param}
        config = {
            "train_micro_batch_size_per_gpu": batch,
            "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE, "weight_decay": _WEIGHT_DECAY}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {**place, **(optimizer or {})},
                **waiting,
                **(zero or {}),
            },
            **({"aio": aio} if aio else {}),
        }
        self._gather = deepspeed.zero.GatheredParameters
        self._engine = deepspeed.initialize(model=model, model_parameters=_trained(model), config=config)[0]

    def step(self, tokens: Tensor) -> float:
        loss = self._engine(input_ids=tokens, labels=tokens).loss
        self._engine.backward(loss)
        begin_s = time.perf_counter()
        self._engine.step()
        self.update_s = time.perf_counter() - begin_s
        return float(loss.detach())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._engine.module.named_parameters():
            with self._gather(parameter):
                yield name, parameter


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _be_the_only_process() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)


_LARGE_AIO = {"block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 2, "overlap_events": True}
CONTENDERS: dict[str, Callable[..., Contender]] = {
    "plain": Plain,
    "ours": Ours,
    "ours_states": OurStates,
    "ours_states_cached": partial(OurStates, cached_share=0.5),
    "swap": Swap,
    "fsdp2": Fsdp2,
    "accelerate": Accelerate,
    "deepspeed": DeepSpeed,
    "deepspeed_states": partial(DeepSpeed, param=None),
    "deepspeed_lean": partial(
        DeepSpeed,
        aio=_LARGE_AIO,
        param={"buffer_count": 3},
        optimizer={"buffer_count": 4},
        zero={"sub_group_size": 2 * 10**7, "reduce_bucket_size": 2 * 10**7},
    ),
    "deepspeed_pipeline": partial(
        DeepSpeed, aio=_LARGE_AIO, optimizer={"buffer_count": 10, "pipeline_read": True, "pipeline_write": True}
    ),
}
"""By the names of modes. Those of DeepSpeed differ in their buffers, buckets and requests to the drive."""
