"""Small trainings whose weights, gradients and states may wait elsewhere: with an offloader and without."""

import os
import resource
import traceback
import warnings
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, NUM_BLOCKS, VOCABULARY = 128, 4, 600
MIN_TENSOR = "16KiB"


class Block(nn.Module):
    """A small adapter is trained beside two large weights."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) + self.adapter(x)


class Net(nn.Module):
    """Tied embedding and head; blocks in between."""

    def __init__(self, *, repeats=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self._repeats = repeats

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x) if self._repeats is None else self._repeats(block, x)
        return self.head(x)


def frozen(model):
    """All but the adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    return model


def built(kind=None, **options):
    torch.manual_seed(0)
    return frozen((kind or Net)(**options))


def batches(num):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        yield torch.randint(0, VOCABULARY, (3, 20), generator=generator)


class Plain:
    """Stand in for an offloader in plain training."""

    def __bool__(self):
        return False

    def saved_tensors(self, **_):
        return nullcontext()

    def offload_optimizer(self, optimizer):
        return optimizer

    def register_module(self, module): ...

    def expect_no_optimizer(self): ...

    def end_backward(self): ...

    def send_out_weights(self): ...


PLAIN = Plain()


def passed(offloader, forward, **options):
    """Run forward and backward of a step; return the loss."""
    offloader = offloader or PLAIN
    with offloader.saved_tensors():
        loss = forward()
    loss.backward(**options)
    offloader.end_backward()
    return loss


def taken_over(offloader, module):
    """Register a module that no optimizer of ours updates; return it."""
    offloader = offloader or PLAIN
    offloader.expect_no_optimizer()
    offloader.register_module(module)
    return module


def gradients_of(model):
    """Copy the gradients that there are."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train(model, offloader=None, *, steps=4, between=lambda model, step: None, optimizer=torch.optim.AdamW):
    """Losses, and the gradients of each step."""
    update = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for step, ids in enumerate(batches(steps)):
        loss = passed(offloader, lambda ids=ids: model(ids).logsumexp(-1).mean())
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        update.step()
        update.zero_grad()
        between(model, step)
    return found


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def equal_weights(one, other):
    return same(list(one.state_dict().values()), list(other.state_dict().values()))


def in_a_fork(work):
    """Return the status of a fork that did it: 0, or what it died of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and forks
        child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def nothing(*_):
    """No more than training."""


class Loop:
    """A training loop, with an offloader or without."""

    accumulate = 1
    set_to_none = True
    autocast = False

    def __init__(
        self,
        offloader=None,
        *,
        make=torch.optim.AdamW,
        before_step=nothing,
        after_step=nothing,
        dtype=torch.float32,
        repeats=None,
        **options,
    ):
        torch.manual_seed(0)
        self.model = Net(repeats=repeats).to(dtype)
        self.offloader = offloader
        self._before, self._after = before_step, after_step
        self.__dict__.update(options)
        (offloader or PLAIN).register_module(self.model)
        self.optimizer = (offloader or PLAIN).offload_optimizer(make(self.model.parameters(), lr=1e-2))
        self.found = []

    def _loss(self, ids):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            return self.model(ids).float().logsumexp(-1).mean()

    def backward(self, *, step=0):
        """Run forward and backward of one step, and no update."""
        passed(self.offloader, lambda: self._loss(list(batches(step + 1))[step]))
        return self

    def run(self, steps=4):
        for step in range(steps):
            for ids in list(batches(steps * self.accumulate))[step * self.accumulate :][: self.accumulate]:
                # No loss lives on: PyTorch lets weights of its graph be swapped, and spoils what the next one shares.
                self.found.append(passed(self.offloader, partial(self._loss, ids)).detach())
            self._before(self.model, self.optimizer, step)
            self.found += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
            self._after(self.model, self.optimizer, step)
        return self

    def result(self):
        """Losses, gradients, weights, states."""
        states = self.optimizer.state_dict()["state"]
        held = [value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)]
        return [*self.found, *self.model.state_dict().values(), *(value.clone() for value in held)]


def clip_norm(model, optimizer, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_value(model, optimizer, step):
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def edit_gradients(model, optimizer, step):
    model.blocks[0].up.weight.grad.mul_(0.5)
    model.blocks[1].up.weight.grad = model.blocks[1].up.weight.grad * 2
    model.blocks[2].up.weight.grad = None


def clamp(model, optimizer, step):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def repeated(block, x):
    return checkpoint(block, x, use_reentrant=False)


PROGRAMS = {
    "adamw": {},
    "sgd": {"make": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True)},
    "adafactor": {"make": torch.optim.Adafactor},
    "fused": {"make": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)},
    "accumulate": {"accumulate": 3},
    "zeros": {"set_to_none": False},
    "accumulated zeros": {"accumulate": 2, "set_to_none": False},
    "clip norm": {"before_step": clip_norm},
    "clip value": {"before_step": clip_value},
    "edited gradients": {"before_step": edit_gradients},
    "clamped weights": {"after_step": clamp},
    "autocast": {"autocast": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "checkpointed": {"repeats": repeated},
}
