"""Recomputed blocks, bit for bit: losses, gradients and weights are those of the same training kept."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ssd.blocks import Blocks, find_blocks
from tests.helpers import (
    DRAINED,
    EAGER,
    Batch,
    Raised,
    Session,
    Setup,
    Training,
    assert_identical,
    assert_released,
    open_offloader,
    outcome,
)
from tests.parity import models
from tests.parity.models import Perceptrons, floats, mean_square

Chooses = Callable[[int], bool]
EVERY: Chooses = lambda index: True  # noqa: E731
SECOND: Chooses = lambda index: index % 2 == 1  # noqa: E731
NONE: Chooses = lambda index: False  # noqa: E731


class Recomputing(Session):
    """Runs a program with some of the block calls of each pass recomputed; counts what is repeated in backward."""

    def __init__(self, chooses: Chooses, *, classes: tuple[str, ...] = (), wants_inputs: bool = False, **extra: Any):
        super().__init__(**extra)
        self.chooses = chooses
        self.classes = classes
        self.wants_inputs = wants_inputs
        self.blocks: list[Blocks] = []
        self.calls = self.asked = self.depth = 0
        self.repeated: list[str] = []
        self.forward = False
        self.nbytes: list[int] = []

    def register(self, module: nn.Module) -> None:
        super().register(module)
        found = find_blocks(module, self.classes)
        assert found, "nothing to recompute"
        self.blocks.append(Blocks(found))
        for name, block in found.items():
            for part in block.modules():
                if not any(True for _ in part.children()):
                    part.register_forward_pre_hook(functools.partial(self._runs, name))

    def _runs(self, name: str, module: nn.Module, args: Any) -> None:
        if not self.forward:
            self.repeated.append(name)

    @contextmanager
    def saved(self) -> Iterator[None]:  # type: ignore[override]
        self.calls = 0
        self.forward = True
        with super().saved():
            contexts = [blocks.observe(self) for blocks in self.blocks]
            for context in contexts:
                context.__enter__()
            try:
                yield
            finally:
                for context in reversed(contexts):
                    context.__exit__(None, None, None)
        self.forward = False

    def block_enters(self, name: str) -> bool:
        assert self.forward, "an observer was told of a repetition"
        assert self.depth == 0
        self.depth += 1
        self.calls += 1
        chosen = self.chooses(self.calls - 1)
        self.asked += chosen
        return chosen

    def block_inputs(self, nbytes: int) -> None:
        self.nbytes.append(nbytes)

    def block_leaves(self) -> None:
        self.depth -= 1


def assert_recompute_parity(
    program: Callable[[Session], Any],
    *,
    choices: tuple[Chooses, ...] = (EVERY, SECOND),
    repeats: bool = True,
    **extra: Any,
) -> Any:
    """The program gives the same with and without recomputing, and blocks really ran again."""
    expected = outcome(program, Session())
    assert not isinstance(expected, Raised), f"the plain run raised {expected}"
    for chooses in choices:
        session = Recomputing(chooses, **extra)
        assert_identical(outcome(program, session), expected)
        assert session.asked > 0
        assert bool(session.repeated) == repeats
    silent = Recomputing(NONE, wants_inputs=True, **extra)
    assert_identical(outcome(program, silent), expected)
    assert not silent.repeated
    assert silent.nbytes
    return expected


def inputs(step: int) -> Batch:
    return {"x": floats(step, 6, 17, 40)}


def perceptrons(**settings: Any) -> Training:
    return Training(lambda: Perceptrons(**settings), inputs, mean_square)


TRAININGS: dict[str, Callable[[], Training]] = {
    "perceptrons-dropout": lambda: perceptrons(dropout=0.3),
    "gpt2-dropout": lambda: models.gpt2_training(hidden=40, dropout=0.1),
    "gpt2-eager-attention": lambda: models.gpt2_training(hidden=40, dropout=0.1, attn_implementation="eager"),
    "bert-mask-by-keyword": models.bert_training,
    "t5": models.t5_training,
    "llama": models.llama_training,
    "batch-norm-in-place": models.convolution_training,
    "accumulation": lambda: models.gpt2_training(hidden=40, dropout=0.1, num_micro_batches=3),
    "bfloat16": lambda: models.gpt2_training(hidden=40, dropout=0.1, autocast=torch.bfloat16),
    "low-rank": lambda: Training(models.adapted_perceptrons, inputs, mean_square),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_training(name: str) -> None:
    assert_recompute_parity(TRAININGS[name]())


def forgets_random_numbers(function: Any, *args: Any, **settings: Any) -> Any:
    return checkpoint(function, *args, **{**settings, "preserve_rng_state": False})


@pytest.mark.parametrize(
    ("name", "what", "mutant"),
    [
        ("perceptrons-dropout", "checkpoint", forgets_random_numbers),
        ("batch-norm-in-place", "_State.put_back", lambda state: []),
    ],
)
def test_the_parity_check_can_fail(name: str, what: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"lightning_ssd.recompute.{what}", mutant)
    with pytest.raises(AssertionError, match="the bits differ"):
        assert_recompute_parity(TRAININGS[name]())


@pytest.mark.parametrize("setup", [DRAINED, EAGER])
@pytest.mark.parametrize("name", TRAININGS)
def test_inputs_go_to_the_drive(name: str, setup: Setup, tmp_path: Path) -> None:
    training = TRAININGS[name]()
    expected = outcome(training, Session())
    saved = {}
    for chooses in (NONE, EVERY):
        with open_offloader(tmp_path, setup) as offloader:
            session = Recomputing(chooses, offloader=offloader, drained=setup.drained)
            assert_identical(outcome(training, session), expected)
            assert_released(offloader)
            assert bool(session.repeated) == (chooses is EVERY)
            saved[chooses] = offloader.stats.bytes_saved
            if setup.drained:
                assert offloader.stats.bytes_read > 0
    assert 0 < saved[EVERY] < saved[NONE]


def test_only_the_inputs_are_saved() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, scale: Any, *, mask: torch.Tensor, more: Any) -> torch.Tensor:
            return (self.linear(x).exp() * mask * scale[0]).sin() + more["bias"]

    block = Block()
    x, scale, mask, bias = (torch.rand(5, 8) for _ in range(4))
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():  # older versions save an empty one of their own
            packed.append(tensor)
        return tensor

    session = Recomputing(EVERY)
    session.blocks.append(Blocks({"block": block}))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), session.saved():
        y = block(x, (scale, None), mask=mask, more={"bias": [bias, bias][0], "again": x})
    assert {tensor.data_ptr() for tensor in packed} == {tensor.data_ptr() for tensor in (x, scale, mask, bias)}
    assert len(packed) == 4
    y.sum().backward()
    assert len(packed) == 4
    assert block.linear.weight.grad is not None


def test_the_graph_holds_what_was_packed_and_nothing_else() -> None:
    block = models.Residual(4)
    hidden = floats(0, 2, 4, 9, 9).requires_grad_() * 1
    expected = torch.autograd.grad(block(hidden).square().sum(), block.parameters())
    copy = hidden.detach().clone()
    session = Recomputing(EVERY)
    session.blocks.append(Blocks({"block": block}))
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t.shape, lambda shape: copy if len(shape) else copy[:0]),
        session.saved(),
    ):
        y = block(hidden)
    gone = weakref.ref(hidden)
    del hidden
    assert gone() is None
    assert_identical(torch.autograd.grad(y.square().sum(), block.parameters()), expected)


# -- arguments and results -------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """A block with arguments and results of many kinds, one of which it fills."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(40, 4, batch_first=True, dropout=0.2)
        self.norm = nn.LayerNorm(40)

    def forward(self, query: Any, key: Any, value: Any, *, states: Any, seen: list[Any], flags: Any) -> Any:
        query = query[0] if isinstance(query, tuple) else query
        seen.append(query.detach().sum())
        y, weights = self.attention(query, key, value, need_weights=flags["weights"], attn_mask=states[0])
        return (self.norm(y),), {"weights": weights, "none": None, "query": query}


@pytest.mark.parametrize("weights", [True, False])
def test_arguments_and_results_of_many_kinds(weights: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Mixing(), Mixing(), Mixing()])
            self.seen: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = []
            mask = torch.zeros(17, 17)
            mask[:, 12:] = -1
            for block in self.blocks:
                (y,), rest = block(
                    (x,) if x.sum() > 0 else x, x, x, states=[mask, None], seen=self.seen, flags={"weights": weights}
                )
                assert rest["none"] is None
                x = x + y + 0.1 * rest["query"]
                if rest["weights"] is not None:
                    x = x + rest["weights"].mean()
            assert len(self.seen) == 3
            return x

    made: list[Net] = []

    def program(session: Session) -> Any:
        training = Training(lambda: made.append(Net()) or made[-1], inputs, mean_square)  # type: ignore[func-returns-value]
        result = training(session)
        return result, made[-1].seen

    # Attention of one tensor with itself takes another path than of three: they must not become three.
    assert_recompute_parity(program)


def test_no_input_needs_a_gradient_and_no_tensor_at_all() -> None:
    class Source(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.2))

        def forward(self, length: int) -> torch.Tensor:
            return self.inner(torch.rand(length, 40)).tanh()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sources = nn.ModuleList([Source(), Source()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((source(x.shape[1]) for source in self.sources), x)

    assert_recompute_parity(Training(Net, inputs, mean_square))


def test_frozen_blocks() -> None:
    def freeze(model: nn.Module) -> nn.Module:
        model.get_submodule("blocks")[:2].requires_grad_(False)  # type: ignore[index]
        return model

    assert_recompute_parity(replace(perceptrons(dropout=0.1), prepare=freeze))


class Loop(nn.Module):
    """One block, called several times and standing in two places."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first = nn.ModuleList([block, nn.Sequential(nn.Linear(40, 40), nn.GELU())])
        self.second = nn.ModuleList([block, block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.first, *self.second, self.first[0]):
            x = x + block(x)
        return x


@pytest.mark.parametrize("norm", [nn.LayerNorm, functools.partial(nn.BatchNorm1d, momentum=0.3)])
def test_a_block_called_several_times(norm: Callable[[int], nn.Module]) -> None:
    def make() -> nn.Module:
        return Loop(nn.Sequential(norm(40), nn.Linear(40, 40), nn.Dropout(0.2), nn.Tanh()))

    assert_recompute_parity(Training(make, lambda step: {"x": floats(step, 30, 40)}, mean_square))


# -- state -----------------------------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """State of all sorts that a forward changes and depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(40, 40))
        self.register_buffer("mean", torch.zeros(40))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.last: torch.Tensor | None = None
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))  # a new tensor
        self.count += 1  # the same tensor
        self.number += 1
        if not hasattr(self, "made_once"):
            self.made_once = x.detach().mean() + 1
        y = self.linear(x - self.mean) * (1 + 1 / self.number) * self.made_once
        if self.last is not None:
            y = y + self.last
        self.last = y.detach().mean()
        return y.tanh()


@pytest.mark.parametrize("times", [1, 2])
def test_state_is_changed_once(times: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Remembering(), Remembering())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                x = x + self.blocks(x)
            return x

    made: list[Net] = []

    def program(session: Session) -> Any:
        result = Training(lambda: made.append(Net()) or made[-1], inputs, mean_square)(session)  # type: ignore[func-returns-value]
        return result, [(block.number, block.last, block.made_once) for block in made[-1].blocks]

    assert_recompute_parity(program)


def test_a_training_mode_that_changes_before_backward() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3)
        session.register(model)
        with session.saved():
            loss = mean_square(model, inputs(0))
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        return [parameter.grad for parameter in model.parameters()]

    assert_recompute_parity(program)


def test_random_numbers_after_backward() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3)
        session.register(model)
        with session.saved():
            loss = mean_square(model, inputs(0))
        between = torch.rand(3)
        loss.backward()
        return between, torch.rand(3), [parameter.grad for parameter in model.parameters()]

    assert_recompute_parity(program)


# -- ways of going backward ------------------------------------------------------------------------------------------


def test_backward_twice() -> None:
    def program(session: Session) -> Any:
        model = nn.Sequential(Remembering(), Remembering(), *[nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.2))] * 2)
        session.register(model)
        with session.saved():
            loss = mean_square(model, inputs(0))
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()], list(model.buffers())

    assert_recompute_parity(program)


def test_passes_in_flight_and_backward_in_another_order() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3)
        session.register(model)
        losses = []
        for step in range(3):
            with session.saved():
                losses.append(mean_square(model, inputs(step)))
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_recompute_parity(program)


def test_backward_inside_of_the_pass() -> None:
    """As with manual optimization, and gradient penalties."""

    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3, mode="reentrant")  # whose backward calls the blocks themselves
        session.register(model)
        x = floats(0, 6, 17, 40).requires_grad_()
        with session.saved():
            mean_square(model, {"x": x}).backward()
        return x.grad, [parameter.grad for parameter in model.parameters()]

    expected = outcome(program, Session())
    session = Recomputing(EVERY)
    assert_identical(outcome(program, session), expected)
    assert session.asked == 0  # forward ran without gradients, and the rest is a repetition


def test_gradient_of_a_gradient() -> None:
    def program(session: Session) -> Any:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)])
        session.register(model)
        x = floats(0, 6, 40).requires_grad_()
        with session.saved():
            (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
        return x.grad, [parameter.grad for parameter in model.parameters()]

    expected = outcome(program, Session())
    session = Recomputing(EVERY)
    assert_identical(outcome(program, session), expected)
    assert session.asked == 3


def test_errors_in_a_block_are_the_models_own() -> None:
    class Failing(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                raise KeyError("one")
            return super().forward(x)

    def program(session: Session) -> Any:
        model = nn.Sequential(*[Failing(nn.Linear(40, 40), nn.Dropout(0.2)) for _ in range(2)])
        session.register(model)
        with pytest.raises(KeyError, match="one"), session.saved():
            model(floats(0, 1, 40))
        with session.saved():
            loss = mean_square(model, {"x": floats(1, 3, 40)})
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = outcome(program, Session())
    session = Recomputing(EVERY)
    assert_identical(outcome(program, session), expected)
    assert session.depth == 0


def test_evaluation_between() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3)
        session.register(model)
        results = []
        with session.saved():
            loss = mean_square(model, inputs(0))
            with torch.no_grad():
                results.append(model(floats(1, 2, 3, 40)))
            with torch.inference_mode():
                results.append(model(floats(1, 2, 3, 40)).clone())
        loss.backward()
        return results, [parameter.grad for parameter in model.parameters()]

    assert_recompute_parity(program)


# -- together with what others do to blocks --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant", "alternate"])
def test_checkpoints_of_the_model(mode: str) -> None:
    def with_gradient(step: int) -> Batch:
        return {"x": floats(step, 6, 17, 40).requires_grad_()}

    training = replace(perceptrons(mode=mode, dropout=0.2), make_batch=with_gradient)
    expected = outcome(training, Session())
    for wants_inputs in (False, True):
        session = Recomputing(EVERY, wants_inputs=wants_inputs)
        assert_identical(outcome(training, session), expected)
        refused = session.blocks[0].refused
        assert len(refused) == {"reentrant": 0, "non-reentrant": 4, "alternate": 2}[mode]
        assert all("checkpoints it by itself" in reason for reason in refused.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_face_checkpointing(reentrant: bool) -> None:
    def prepare(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
        return model

    training = models.gpt2_training(hidden=40, dropout=0.1, prepare=prepare)
    expected = outcome(training, Session())
    assert_identical(outcome(training, Recomputing(EVERY)), expected)


def test_a_checkpoint_inside_of_a_block() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.2), nn.GELU())
            self.last = nn.Linear(40, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.inner, x, use_reentrant=False)
            assert isinstance(y, torch.Tensor)
            return self.last(y).tanh()

    training = Training(lambda: nn.Sequential(Inner(), Inner(), Inner()), inputs, mean_square)
    expected = outcome(training, Session())
    repeated = []
    for chooses in (EVERY, SECOND, NONE):
        session = Recomputing(chooses)
        assert_identical(outcome(training, session), expected)
        repeated.append(len(session.repeated))
    assert repeated[0] > repeated[1] > repeated[2] > 0


def test_hooks_of_a_block_run_once() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.2)
        session.register(model)
        seen: list[Any] = []
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda m, a, n=number: seen.append(("pre", n)))
            block.register_forward_hook(lambda m, a, y, n=number: seen.append(("post", n, y.detach().sum())))
            block.register_full_backward_pre_hook(lambda m, g, n=number: seen.append(("back-pre", n)))
            block.register_full_backward_hook(
                lambda m, i, o, n=number: seen.append(("back", n, i[0].sum(), o[0].sum()))
            )
        x = floats(0, 6, 17, 40).requires_grad_()
        with session.saved():
            loss = mean_square(model, {"x": x})
        loss.backward()
        assert len(seen) == 16
        return seen, x.grad

    assert_recompute_parity(program)


def test_stateful_arguments_run_plainly() -> None:
    """Hugging Face models give every block one cache, unless they are told not to."""
    training = models.gpt2_training(hidden=40, dropout=0.1)

    def caching(model: nn.Module) -> nn.Module:
        model.config.use_cache = True  # type: ignore[union-attr]
        return model

    training = replace(training, prepare=caching)
    expected = outcome(training, Session())
    session = Recomputing(EVERY)
    with pytest.warns(UserWarning, match="is not recomputed: it is given a DynamicCache"):
        assert_identical(outcome(training, session), expected)
    assert list(session.blocks[0].refused) == ["transformer.h.0", "transformer.h.1"]


@pytest.mark.parametrize("whole", [True, False])
def test_models_compiled_after_we_came(whole: bool, tmp_path: Path) -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.0)
        session.register(model)
        if whole:
            model.compile(backend="aot_eager")
        else:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        with session.saved():
            loss = mean_square(model, inputs(0))
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters()]

    torch.compiler.reset()
    try:
        expected = outcome(program, Session())
        for chooses, wants_inputs in ((EVERY, False), (SECOND, True)):
            torch.compiler.reset()
            with open_offloader(tmp_path) as offloader, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice about whole-model compilation
                session = Recomputing(chooses, wants_inputs=wants_inputs, offloader=offloader, drained=True)
                assert_identical(outcome(program, session), expected)
    finally:
        torch.compiler.reset()


def test_transforms_run_plainly() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(num_blocks=2)
        session.register(model)
        parameters = dict(model.named_parameters())
        x = floats(0, 6, 40)

        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().mean()

        with nullcontext() if session.offloader is None else session.saved():
            return torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})

    expected = outcome(program, Session())
    session = Recomputing(EVERY)
    with session.saved():
        assert_identical(outcome(program, session), expected)


@pytest.mark.gpu
def test_random_numbers_of_the_device() -> None:
    """Also of a block that is given nothing on its device."""

    class Source(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.2), nn.Linear(40, 40))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x.to("cuda")).tanh()
            assert isinstance(y, torch.Tensor)
            return y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sources = nn.ModuleList([Source(), Source()])
            self.blocks = Perceptrons(dropout=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.blocks(sum((source(x) for source in self.sources), x.to("cuda")))
            assert isinstance(y, torch.Tensor)
            return y

    assert_recompute_parity(Training(lambda: Net().to("cuda"), inputs, mean_square))
