"""Programs beside ``torch.compile`` with real code generation.

The graphs are few and small, so that inductor's cache has nearly all of them.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.support.helpers import Session

__all__ = ["COMPILED", "MODES", "CompiledProgram", "Counted", "compiler_blocker"]

MODES = {
    "offload": {"activations": "offload"},
    "recompute": {"activations": "recompute"},
    "recompute_offload": {"activations": "recompute_offload"},
    "auto": {"activations": "auto", "activation_budget": 1 << 16},
    "states": {"activations": "keep", "optimizer_states": "offload", "per_parameter_optimizers": ["Compiling"]},
    "everything": {
        "activations": "recompute_offload",
        "parameters": "offload",
        "gradients": "offload",
        "optimizer_states": "offload",
        "per_parameter_optimizers": ["Compiling"],
    },
}
WIDTH = 32


def compiler_blocker():
    """Return why inductor generates no code on this machine; ``None``: it does."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return "inductor needs a C++ compiler, and there is none"
    return None


class Counted:
    """Inductor, and how many graphs it has been given."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, module, inputs):
        from torch._inductor.compile_fx import compile_fx

        self.num_graphs += 1
        return compile_fx(module, inputs)

    def compile(self, what, *, full=True):
        return torch.compile(what, backend=self, dynamic=False, fullgraph=full)


class Tanh(torch.autograd.Function):
    """Saves an input and an output."""

    @staticmethod
    def forward(ctx, x):
        result = x.tanh()
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, grad):
        x, result = ctx.saved_tensors
        return grad * (1 - result * result + 0 * x)


def smooth(x):
    """Several operations that inductor fuses: other bits than one by one."""
    return torch.sin(nn.functional.gelu(x) * torch.sigmoid(x))


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return self.linear(x).sigmoid() * 2


class Block(nn.Module):
    def __init__(self, *, has_function=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Up()
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.act = smooth
        self.has_function = has_function

    def forward(self, x):
        y = self.down(self.act(self.up(self.norm(x))))
        return x + (Tanh.apply(y) if self.has_function else y)


def whole_loss(y):
    return y.square().log_softmax(-1).mean()


class Compiling(torch.optim.Optimizer):
    """Updates each parameter by a compiled function, as Muon's Newton-Schulz iteration."""

    def __init__(self, params, update):
        super().__init__(params, {"lr": 0.1})
        self.update = update

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                    self.update(p, p.grad, self.state[p]["momentum"])


def update(p, grad, momentum):
    momentum.lerp_(grad, 0.1)
    direction = momentum / (momentum.norm() + 1e-7)
    p.add_(direction.sigmoid().mul(momentum).tanh(), alpha=-0.1)


def _compile_blocks(model, how, full):
    for block in model.children():
        block.compile(backend=how, dynamic=False, fullgraph=full)


def _wrap_blocks(model, how, full):
    for name, block in list(model.named_children()):
        setattr(model, name, how.compile(block, full=full))


def _compile_forwards(model, how, full):
    for block in model.children():
        block.forward = how.compile(block.forward, full=full)


def _compile_model(model, how, full):
    model.compile(backend=how, dynamic=False, fullgraph=full)


def _compile_parts(model, how, full):
    for block in model.children():
        getattr(block, "_orig_mod", block).up.compile(backend=how, dynamic=False, fullgraph=full)


def _compile_functions(model, how, full):
    act = how.compile(smooth, full=full)
    for block in model.children():
        block.act = act


COMPILED = {
    "nothing": lambda model, how, full: None,
    "block.compile()": _compile_blocks,
    "torch.compile(block)": _wrap_blocks,
    "block.forward": _compile_forwards,
    "model.compile()": _compile_model,
    "torch.compile(model)": lambda model, how, full: None,  # of what is called, see below
    "a part of a block": _compile_parts,
    "a function in a block": _compile_functions,
    "the loss": lambda model, how, full: None,
}


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A training of three steps."""

    compiled: str = "nothing"
    when: str = "after registering"
    full: bool = True
    has_function: bool = False
    is_chunked: bool = False
    optimizer: str = "AdamW"
    seed: int = 0

    def run(self, policy, directory):
        """Train. Returns losses, gradients and weights of all steps, and how many graphs were compiled.

        Args:
            policy: of the offloader; ``None``: plain PyTorch, with none.
        """
        torch.compiler.reset()
        torch.manual_seed(self.seed)
        how, found = Counted(), []
        model = nn.Sequential(*[Block(has_function=self.has_function) for _ in range(3)])
        with _offloader(policy, directory) as offloader:
            session = Session(offloader)
            self._at("before registering", model, how)
            session.register(model)
            self._at("after registering", model, how)
            optimizer = session.optimizer(self._optimizer(model, how))
            for step in range(3):
                if step == 1:
                    self._at("after a step", model, how)
                is_compiled = step > 0 or self.when != "after a step"
                if step == 0 or (step == 1 and self.when != "before registering"):
                    run = (
                        how.compile(model, full=self.full)
                        if is_compiled and self._is("torch.compile(model)")
                        else model
                    )
                    loss_of = how.compile(whole_loss) if is_compiled and self._is("the loss") else whole_loss
                x = torch.randn(16, WIDTH)
                with session.saved():
                    loss = self._loss(run(x), loss_of)
                session.backward(loss)
                found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
                optimizer.step()
                optimizer.zero_grad()
                found += [p.detach().clone() for p in model.parameters()]
            if offloader is not None:
                offloader.drain_metrics()
        return found, how.num_graphs

    def _is(self, compiled):
        return self.compiled == compiled

    def _at(self, when, model, how):
        if when == self.when:
            COMPILED[self.compiled](model, how, self.full)

    def _loss(self, y, loss_of):
        if not self.is_chunked:
            return loss_of(y)
        return torch.stack([loss_of(part) for part in y.chunk(2)]).sum()

    def _optimizer(self, model, how):
        if self.optimizer == "Compiling":
            return Compiling(model.parameters(), how.compile(update))
        kind = getattr(torch.optim, self.optimizer)
        return kind(model.parameters(), lr=0.01)


def _offloader(policy, directory):
    if policy is None:
        return nullcontext()
    hardware = HardwareProfile(paths=(str(directory),))
    return Offloader(policy=OffloadPolicy(**policy, min_tensor_bytes=1), hardware=hardware)
