"""States that cannot be copied: given as they are, like a plain ``state_dict()`` gives them, and handed back by
``close()``.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

from lightning_ssd import HardwareProfile, OffloadPolicy, SSDOffloadStrategy
from lightning_ssd.errors import ConfigError, StorageError
from lightning_ssd.memory.file_mapping import FileView
from tests.support.optimizer_pairs import Pair, adamw, offloaded_pair, wrapped
from tests.support.trainers import Net, fit

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

    value: Callable[[torch.Tensor], Any]

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


@pytest.mark.parametrize("kind", VALUES)
def test_users_add_such_states_to_an_optimizer_whose_parameters_are_cut(kind, spill_dir):
    pair = Pair(adamw, ((128, 150), (600, 200)))
    pair.step(pair.inner)
    both = (pair.mine, pair.plain)
    for p in (pair.mine[1], pair.plain[1]):
        (pair.inner if p is pair.mine[1] else pair.twin).state[p]["before"] = VALUES[kind](p)
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)
        for p, q in zip(*both, strict=True):
            optimizer.state[p]["later"], pair.twin.state[q]["later"] = VALUES[kind](p), VALUES[kind](q)
        for _ in range(2):
            pair.step(optimizer)
            pair.check()
            mine, plain = optimizer.state_dict()["state"], pair.twin.state_dict()["state"]
            for number, state in plain.items():
                assert list(mine[number]) == list(state)
                assert all(torch.equal(mine[number][key], state[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    for _ in range(2):
        pair.step(pair.inner)
        pair.check()


@pytest.mark.parametrize("kind", ["generator", "tensor of tensors", "object", "owner", "marked tensor"])
def test_a_load_gives_objects_and_copies_tensors(kind, spill_dir):
    with offloaded_pair(keeps(kind), spill_dir, steps=2) as (pair, optimizer):
        saved, plain = optimizer.state_dict(), pair.twin.state_dict()
        optimizer.load_state_dict(saved)
        pair.twin.load_state_dict(plain)
        for _ in range(2):
            pair.step(optimizer)
            pair.check()
        assert_as_plain(optimizer.state_dict(), pair.twin.state_dict(), optimizer.state, kind)


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


class Fits(Net):
    def configure_optimizers(self):
        return keeps("tensor of tensors")(self.parameters())


def test_checkpoints_of_the_trainer(spill_dir, tmp_path):
    policy = OffloadPolicy(activations="keep", optimizer_states="offload", per_parameter_optimizers="Keeps")
    hardware = HardwareProfile(paths=[spill_dir], allow_unsuitable_paths=True)
    saved = []
    for strategy in ("auto", SSDOffloadStrategy(policy=policy, hardware=hardware)):
        directory = tmp_path / str(len(saved))
        checkpoint = ModelCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=-1)
        fit(Fits, strategy, tmp_path, enable_checkpointing=True, callbacks=[checkpoint])
        saved.append([torch.load(path, weights_only=False) for path in sorted(directory.iterdir())])
    assert len(saved[0]) == len(saved[1]) == 3
    for plain, mine in zip(*saved, strict=True):
        assert all(map(torch.equal, plain["state_dict"].values(), mine["state_dict"].values()))
        for number, state in plain["optimizer_states"][0]["state"].items():
            for key, value in state.items():
                assert torch.equal(mine["optimizer_states"][0]["state"][number][key].float(), value.float())


@pytest.mark.parametrize("kind", KEPT)
def test_an_optimizer_that_has_such_states_when_it_is_wrapped(kind, spill_dir):
    """Those that cannot be copied cannot be tried on copies, either."""
    pair = Pair(keeps(kind), SEVERAL)
    pair.step(pair.inner)
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)
        pair.step(optimizer, [0])
        pair.step(optimizer)
        pair.check()


@pytest.mark.parametrize("make", [threading.Lock, lambda: Opaque(torch.zeros(4, dtype=torch.bfloat16))])
def test_an_option_that_cannot_be_copied_is_given_as_it_is(make, spill_dir):
    pair = Pair(adamw, SEVERAL)
    option = make()
    pair.inner.param_groups[0]["extra"] = option
    with wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(2):
            pair.step(optimizer)
            pair.check()
        assert optimizer.param_groups[0]["extra"] is option


@pytest.mark.parametrize("kind", ["tensor of tensors", "marked tensor"])
def test_tensors_of_a_state_dict_stay_what_they_are(kind, spill_dir):
    with offloaded_pair(keeps(kind), spill_dir, steps=1) as (pair, optimizer):
        saved = optimizer.state_dict()["state"]
        expected = {number: [value.float().clone() for value in state.values()] for number, state in saved.items()}
        pair.train(optimizer, 2)
        for number, state in saved.items():
            assert all(map(torch.equal, [value.float() for value in state.values()], expected[number]))


def test_wrapped_tensors_that_two_parameters_share_are_refused(spill_dir):
    codes = {}

    class Shares(Keeps):
        value = staticmethod(
            lambda p: Quantized(codes.setdefault(p.shape, torch.zeros(p.shape, dtype=torch.int8)), torch.ones(()))
        )

    pair = Pair(Shares)
    with pytest.raises(ConfigError, match=r"Shares.* its states share memory"), wrapped(pair.inner, spill_dir):
        pass
