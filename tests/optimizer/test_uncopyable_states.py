"""States that cannot be copied: given as they are, like a plain ``state_dict()`` gives them, and handed back by
``close()``.
"""

import threading

import pytest
import torch
from torch.optim import Optimizer

from lightning_ssd.errors import ConfigError, StorageError
from lightning_ssd.memory.file_mapping import FileView
from tests.support.optimizer_pairs import Pair, adamw, offloaded_pair, wrapped

pytestmark = pytest.mark.usefixtures("small_subgroups")


class Opaque(torch.Tensor):
    """Wraps a tensor, and has none of the operations that a copy needs."""

    q: torch.Tensor

    @staticmethod
    def __new__(cls, q):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)

    def __init__(self, q):
        self.q = q

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].q)
        raise NotImplementedError(f"{cls.__name__}: {func}")


class Quantized(torch.Tensor):
    """Has two tensors inside, as low-bit states have; can be taken apart, not cloned."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{cls.__name__}: {func}")

    def float(self):
        return self.codes.to(torch.float32) * self.scale

    def add_to(self, gradient):
        whole = self.float().mul_(0.9).add_(gradient)
        self.scale.copy_(whole.abs().amax().clamp(min=1e-8) / 127)
        self.codes.copy_((whole / self.scale).round())
        return self.float()


class Guarded:
    def __init__(self):
        self.count = 0

    def __deepcopy__(self, memo):
        raise RuntimeError("not to be copied")

    __copy__ = __reduce_ex__ = __deepcopy__


class Owner:
    def __init__(self, parameter):
        self.parameter = parameter


def _marked():
    tensor = torch.zeros(2000)
    tensor.lock = threading.Lock()
    return tensor


def _with_history():
    with torch.enable_grad():
        return torch.zeros(3000, requires_grad=True) * 2


VALUES = {
    "generator": lambda p: torch.Generator().manual_seed(p.numel()),
    "tensor without clone": lambda p: Opaque(torch.zeros(p.shape, dtype=torch.bfloat16)),
    "tensor of tensors": lambda p: Quantized(torch.zeros(p.shape, dtype=torch.int8), torch.ones(())),
    "marked tensor": lambda p: _marked(),
    "tensor with a history": lambda p: _with_history(),
    "object": lambda p: Guarded(),
    "owner": Owner,
    "parameter": lambda p: p,
    "container": lambda p: {"list": [Guarded(), (threading.Lock(), torch.ones(3))], p: "by parameter"},
}


class Keeps(Optimizer):
    """Momentum, and beside it a value that takes part in the update where it can."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), step=torch.zeros(()), value=type(self).value(p))
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                p.sub_(state["m"] / state["step"], alpha=group["lr"])
                self._use(p, state["value"])
        return loss

    def _use(self, p, value):
        if isinstance(value, torch.Generator):
            p.add_(torch.rand(p.shape, generator=value))
        elif isinstance(value, Opaque):
            p.sub_(value.q.lerp_(p.grad.bfloat16(), 0.1).float(), alpha=0.1)
        elif isinstance(value, Quantized):
            p.sub_(value.add_to(p.grad), alpha=0.1)
        elif isinstance(value, Guarded):
            value.count += 1
            p.mul_(1 - 0.1 / value.count)
        elif isinstance(value, Owner):
            assert value.parameter is p
        elif isinstance(value, torch.Tensor) and hasattr(value, "lock"):
            p.add_(value.add_(1)[0])


def keeps(kind):
    return type("Keeps", (Keeps,), {"value": staticmethod(VALUES[kind])})


ONE = ((128, 150),)
"""Fits into one call, which is a plain step."""
SEVERAL = ((128, 150),) * 10


def assert_as_plain(mine, plain, live, kind):
    assert mine["param_groups"] == plain["param_groups"]
    assert list(mine["state"]) == list(plain["state"])
    for number, state in plain["state"].items():
        own = mine["state"][number]
        assert list(own) == list(state)
        assert torch.equal(own["m"], state["m"])
        assert torch.equal(own["step"], state["step"])
        one, other, value = own["value"], state["value"], list(live.values())[number]["value"]
        assert type(one) is type(other)
        if isinstance(one, Quantized):
            assert torch.equal(one.float(), other.float())
        elif isinstance(one, torch.Tensor) and not isinstance(one, Opaque):
            assert torch.equal(one, other)
        elif kind == "container":
            assert one["list"][0] is value["list"][0]
            assert torch.equal(one["list"][1][1], other["list"][1][1])
        else:
            assert one is value


KEPT = [kind for kind in VALUES if kind != "parameter"]


def test_a_state_that_is_the_parameter_is_refused(spill_dir):
    pair = Pair(keeps("parameter"), SEVERAL)
    with pytest.raises(ConfigError, match=r"Keeps.* its states share memory"), wrapped(pair.inner, spill_dir):
        pass
    pair.check()


@pytest.mark.parametrize("shapes", [ONE, SEVERAL], ids=["one call", "several"])
@pytest.mark.parametrize("kind", KEPT)
def test_a_training_with_such_states(kind, shapes, spill_dir):
    with offloaded_pair(keeps(kind), spill_dir, shapes) as (pair, optimizer):
        for _ in range(3):
            pair.step(optimizer)
            pair.check()
        assert_as_plain(optimizer.state_dict(), pair.twin.state_dict(), optimizer.state, kind)
        held = [state["value"] for state in optimizer.state.values()]
        pair.step(optimizer)
        pair.check()
    for _ in range(3):  # closed: the plain optimizer goes on
        assert_as_plain(optimizer.state_dict(), pair.twin.state_dict(), pair.inner.state, kind)
        assert [id(state["value"]) for state in pair.inner.state.values()] == list(map(id, held))
        pair.step(pair.inner)
        pair.check()


@pytest.mark.parametrize("shapes", [SEVERAL, ((600, 200),) * 2], ids=["whole", "cut"])
def test_closing_hands_back_all_but_what_cannot_be_mapped(shapes, spill_dir, monkeypatch):
    pair = Pair(adamw, shapes)
    calls = []
    show = FileView.show

    def fail_once(view, *args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no more mappings")
        show(view, *args, **kwargs)

    lost = pytest.raises(StorageError, match=r"states of \d+ parameters were lost.*no more mappings")
    with lost, wrapped(pair.inner, spill_dir) as optimizer:
        pair.train(optimizer, 2)
        monkeypatch.setattr(FileView, "show", fail_once)
    state = pair.inner.state
    assert list(state) == pair.mine
    with pytest.raises(StorageError, match="load a checkpoint"):
        state[pair.mine[0]]
    with pytest.raises(StorageError, match="load a checkpoint"):
        optimizer.state_dict()
    for number in range(1, len(shapes)):
        for key, value in pair.twin.state[pair.plain[number]].items():
            assert torch.equal(state[pair.mine[number]][key], value)


def test_wrapped_tensors_that_two_parameters_share_are_refused(spill_dir):
    codes = {}

    class Shares(Keeps):
        value = staticmethod(
            lambda p: Quantized(codes.setdefault(p.shape, torch.zeros(p.shape, dtype=torch.int8)), torch.ones(()))
        )

    pair = Pair(Shares)
    with pytest.raises(ConfigError, match=r"Shares.* its states share memory"), wrapped(pair.inner, spill_dir):
        pass
