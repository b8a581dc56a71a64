"""Which modules are blocks, what observers are told, and that nothing of ours stays or travels along."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import pickle
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_ssd.blocks import Blocks, find_blocks
from lightning_ssd.errors import ConfigError
from lightning_ssd.stand_in import StandIn
from tests.parity import models


class Watch:
    """An observer that writes down what it is told."""

    def __init__(self, *, recompute: bool = False, wants_inputs: bool = False) -> None:
        self.recompute = recompute
        self.wants_inputs = wants_inputs
        self.told: list[Any] = []

    def block_enters(self, name: str) -> bool:
        self.told.append(name)
        return self.recompute

    def block_inputs(self, nbytes: int) -> None:
        self.told.append(nbytes)

    def block_leaves(self) -> None:
        self.told.append("left")


class Half(nn.Module):
    """A small block."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, *, scale: float = 0.5, extra: Any = None) -> torch.Tensor:
        """Halves."""
        return self.linear(x).tanh() * scale


def chain(num_blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[Half() for _ in range(num_blocks)])


# -- finding ---------------------------------------------------------------------------------------------------------


class Attributes(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.one, self.two, self.head = make(), make(), nn.Linear(3, 3)


def stages() -> nn.Module:
    """As torchvision's ResNet: stages of blocks, with one block in the last, and a head."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
            self.layer1 = nn.Sequential(models.Residual(8), models.Residual(8))
            self.layer2 = nn.Sequential(models.Residual(8))
            self.fc = nn.Linear(8, 2)

    return Net()


class Swin(nn.Module):
    """Stages that are more than a list: blocks and a little besides."""

    def __init__(self, blocks: Callable[[list[nn.Module]], nn.Module]) -> None:
        super().__init__()
        self.blocks = blocks([Half(), Half()])
        self.downsample = nn.Linear(3, 3)


class Experts(nn.Module):
    """A block with a list of its own, as in mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(6, 6)
        self.mixture = nn.ModuleDict({"router": nn.Linear(6, 2), "all": nn.ModuleList([Half(), Half(), Half()])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Inverted(nn.Module):
    """As in MobileNet: a sequence of unlike parts, of which two are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(*[nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()) for _ in range(2)], nn.Conv2d(4, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def t5(layers: int) -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=layers, num_heads=2)
    )


LAYER = functools.partial(nn.TransformerEncoderLayer, 8, 2, 8, batch_first=True)
FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "gpt2": (lambda: models.gpt2(hidden=10), ["transformer.h.0", "transformer.h.1"]),
    "bert": (lambda: models.bert_training().make_model(), ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
    "llama": (lambda: models.llama_training().make_model(), ["model.layers.0", "model.layers.1"]),
    "t5": (lambda: t5(2), [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in (0, 1)]),
    "t5 of one layer": (lambda: t5(1), ["encoder.block.0", "decoder.block.0"]),
    "resnet": (stages, ["layer1.0", "layer1.1", "layer2.0"]),
    "small resnet": (lambda: models.convolution_training().make_model(), ["2", "3"]),
    "torch encoder": (
        lambda: nn.TransformerEncoder(LAYER(), 3, enable_nested_tensor=False),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "torch transformer": (
        lambda: nn.Transformer(8, 2, 2, 2, 8, batch_first=True),
        [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in (0, 1)],
    ),
    "sequences as blocks": (models.Perceptrons, [f"blocks.{i}" for i in range(4)]),
    "plain layers": (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), []),
    "swin": (
        lambda: nn.ModuleList([Swin(nn.ModuleList), Swin(nn.ModuleList)]),
        ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"],
    ),
    "timm": (
        lambda: nn.Sequential(Swin(lambda blocks: nn.Sequential(*blocks)), Swin(lambda blocks: nn.Sequential(*blocks))),
        ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"],
    ),
    "experts": (lambda: nn.ModuleList([Experts(), Experts()]), ["0", "1"]),
    "mobilenet": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Inverted(), Inverted()), ["1", "2"]),
    "attributes": (lambda: Attributes(Half), ["one", "two"]),
    "towers": (lambda: Attributes(chain), ["one.0", "one.1", "two.0", "two.1"]),
    "one block called often": (lambda: nn.Sequential(*[Half()] * 3), ["0"]),
    "one block": (lambda: nn.Sequential(Half(), nn.Linear(6, 6)), []),
    "lists in lists": (lambda: nn.ModuleList([nn.ModuleList([Half(), Half()])] * 2), ["0.0", "0.1"]),
    "without parameters": (lambda: nn.Sequential(*[nn.Sequential(nn.ReLU()) for _ in range(3)]), []),
    "no children": (nn.ReLU, []),
}


@pytest.mark.parametrize("name", FOUND)
def test_repeated_blocks(name: str) -> None:
    make, expected = FOUND[name]
    model = make()
    found = find_blocks(model)
    assert list(found) == expected
    assert all(model.get_submodule(name) is block for name, block in found.items())


def test_blocks_by_class_name() -> None:
    model = t5(2)
    assert list(find_blocks(model, ["T5LayerFF"])) == [
        f"{side}.block.{i}.layer.{j}" for side, j in (("encoder", 1), ("decoder", 2)) for i in (0, 1)
    ]
    # Outermost, and by a base class: a stack contains blocks, and is a T5PreTrainedModel like the model itself.
    assert list(find_blocks(model, ["T5Block", "T5Stack"])) == ["encoder", "decoder"]
    assert list(find_blocks(model, ["T5PreTrainedModel"])) == [""]
    assert list(find_blocks(model, "T5Stack")) == ["encoder", "decoder"]
    assert list(find_blocks(model, ["T5Stack", "LlamaDecoderLayer"])) == ["encoder", "decoder"]
    with pytest.raises(ConfigError, match=r"\['T5Blok'\].*no module of such a class.*T5Block, "):
        find_blocks(model, ["T5Blok"])


def test_compiled_blocks_are_left_out() -> None:
    model = nn.Sequential(Half(), Half(), nn.Sequential(Half(), Half()))
    model[0].compile(backend="eager")
    model[2].compile(backend="eager")
    assert list(find_blocks(model)) == ["1"]
    assert list(find_blocks(model, ["Half"])) == ["1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = nn.Sequential(torch.compile(Half(), backend="eager"), Half(), Half())
        scripted = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), Half(), Half())
    assert list(find_blocks(wrapped)) == ["1", "2"]
    assert list(find_blocks(scripted)) == ["1", "2"]
    whole = chain()
    whole.compile(backend="eager")
    assert find_blocks(whole) == {}
    unwrapped_by_lightning = chain()
    unwrapped_by_lightning._compiler_ctx = {"compiler": "dynamo"}  # type: ignore[assignment]
    assert find_blocks(unwrapped_by_lightning) == {}


# -- what observers are told -----------------------------------------------------------------------------------------


def test_told_in_order() -> None:
    model, watch = chain(), Watch()
    x = torch.zeros(2, 6)
    with Blocks(find_blocks(model)) as blocks:
        assert blocks.names == ("0", "1")
        model(x)
        assert watch.told == []
        with blocks.observe(watch):
            model(x)
            with torch.no_grad():
                model(x)
            with torch.inference_mode():
                model(x)
        model(x)
        assert watch.told == ["0", "left", "1", "left"]


@pytest.mark.parametrize("recompute", [False, True])
def test_told_of_the_end_after_an_error(recompute: bool) -> None:
    model, watch = chain(), Watch(recompute=recompute)
    with Blocks(find_blocks(model)) as blocks, blocks.observe(watch):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.zeros(2, 5))
        model(torch.zeros(2, 6)).sum().backward()
    assert watch.told == ["0", "left", "0", "left", "1", "left"]


def test_an_observer_that_fails_leaves_no_trace() -> None:
    class Refusing(Watch):
        def block_enters(self, name: str) -> bool:
            super().block_enters(name)
            raise KeyError(name)

    model, watch = chain(), Refusing()
    with Blocks(find_blocks(model)) as blocks, blocks.observe(watch):
        for _ in range(2):
            with pytest.raises(KeyError):
                model(torch.zeros(2, 6))
    assert watch.told == ["0", "0"]


def test_passes_nest() -> None:
    model, outer, inner = chain(1), Watch(), Watch()
    x = torch.zeros(2, 6)
    with Blocks({"only": model[0]}) as blocks:
        with blocks.observe(outer):
            with blocks.observe(inner):
                model(x)
            model(x)
        model(x)
    assert inner.told == outer.told == ["only", "left"]


def test_threads_do_not_meet() -> None:
    model, mine, theirs = chain(1), Watch(), Watch()
    x = torch.zeros(2, 6)
    with Blocks({"only": model[0]}) as blocks:

        def run(observer: Watch | None) -> None:
            if observer is None:
                model(x)
                return
            with blocks.observe(observer):
                model(x)

        with blocks.observe(mine):
            for observer in (None, theirs):
                thread = threading.Thread(target=run, args=(observer,))
                thread.start()
                thread.join()
            assert (mine.told, theirs.told) == ([], ["only", "left"])


class Caller(nn.Module):
    """A block that calls another one."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6))
        self.call: Callable[..., Any] = other.__call__  # no child of ours

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.inner(x))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_called_by_a_block_is_its_own_business(recompute: bool) -> None:
    other = Half()
    caller = Caller(other)
    watch = Watch(recompute=recompute)
    with Blocks({"other": other, "caller": caller}) as blocks:
        with blocks.observe(watch):
            y = caller(torch.ones(2, 6))
            other(torch.ones(2, 6))
        y.sum().backward()
    assert watch.told == ["caller", "left", "other", "left"]


def test_bytes_of_inputs() -> None:
    block = Half()
    x = torch.zeros(10, 6)
    watch = Watch(wants_inputs=True)
    with Blocks({"block": block}) as blocks, blocks.observe(watch):
        block(x)
        block(x[:1])  # what would be held is the whole storage
        block(x, extra=[x, {"a": x.T, "b": torch.zeros(5, dtype=torch.float64)}, (None, 3)])
        block(x, extra=[nn.Parameter(torch.zeros(100)), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()])
        block(x, extra=[torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag])
        block(x, extra=torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions do not want them any more
            quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        block(x, extra=quantized)
        with torch.inference_mode():
            inference = torch.ones(3)
        block(x, extra=inference)
        assert "inference mode" in blocks.refused["block"]
    assert watch.told[1::3] == [240, 240, 280, 240, 272, 240, 240, 240]


# -- where recomputing is refused ------------------------------------------------------------------------------------


class Edits(Half):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.linear(x.mul_(2)).tanh()


class Stateful:
    """An argument that a call may change."""


class StatefulCache(Stateful):
    pass


def test_what_cannot_be_recomputed_is_known_after_a_measured_pass() -> None:
    edits, edited, opaque, fine = Edits(), Half(), Half(), Half()
    x = torch.ones(2, 6)
    with Blocks({"edits": edits, "edited": edited, "opaque": opaque, "fine": fine}) as blocks:
        for wants_inputs, expected in ((False, []), (True, ["edits", "edited", "opaque"])):
            with blocks.observe(Watch(wants_inputs=wants_inputs)):
                edits(x.clone())
                y = x.clone()
                edited(y)
                y.add_(1)
                opaque(x, extra=Stateful())
                fine(x, extra=[None, 1, 2.0, "a", torch.float32, torch.Size([2]), {"x": (x,)}, len, fine])
            assert list(blocks.refused) == expected
        assert "edited in place" in blocks.refused["edits"]
        assert "a Stateful, which it may change" in blocks.refused["opaque"]
        # A buffer for inputs is filled anew for each step; that is no edit.
        z = torch.ones(2, 6)
        for _ in range(2):
            with blocks.observe(Watch(wants_inputs=True)):
                fine(z)
            z.copy_(x)
        with blocks.observe(Watch(wants_inputs=True)):
            pass
        assert "fine" not in blocks.refused


def test_a_stateful_argument_runs_plainly_and_says_so_once() -> None:
    block = Half()
    with Blocks({"block": block}) as blocks, blocks.observe(Watch(recompute=True)):
        with pytest.warns(UserWarning, match=r"'block' \(Half\) is not recomputed: .* StatefulCache.*use_cache=False"):
            block(torch.ones(2, 6), extra=StatefulCache())
        block(torch.ones(2, 6), extra=Stateful())  # warnings are errors here
        plain = block(torch.ones(2, 6))
        assert "Stateful" in blocks.refused["block"]  # one call of the pass is enough
    with Blocks({"block": block}) as blocks:
        with blocks.observe(Watch(wants_inputs=True)):
            block(torch.ones(2, 6), extra=Stateful())
        with blocks.observe(Watch(recompute=True, wants_inputs=True)):
            assert torch.equal(block(torch.ones(2, 6)), plain)
        assert blocks.refused == {}


def test_an_edit_of_an_input_raises_where_it_was_not_known() -> None:
    block = Edits()
    with (
        Blocks({"block": block}) as blocks,
        blocks.observe(Watch(recompute=True)),
        pytest.raises(ConfigError, match="Edits edits an input in place"),
    ):
        block(torch.ones(2, 6))


def test_a_caller_that_edits_the_input_raises_in_backward() -> None:
    block = Half()
    x = torch.ones(2, 6)
    with Blocks({"block": block}) as blocks, blocks.observe(Watch(recompute=True)):
        y = block(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weights_that_change_before_backward_raise() -> None:
    block = Half()
    with Blocks({"block": block}) as blocks:
        with blocks.observe(Watch(recompute=True)):
            y = block(torch.ones(2, 6))
        with torch.no_grad():
            block.linear.bias.add_(1)  # not saved by plain PyTorch, but needed to recompute
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: linear.bias of a recomputed Half"):
            y.sum().backward()


# -- installing and removing -----------------------------------------------------------------------------------------


def test_nothing_of_the_model_looks_different() -> None:
    model = chain()
    before = [(name, type(module)) for name, module in model.named_modules()]
    state, signature = list(model.state_dict()), inspect.signature(model[0].forward)
    attributes = [dict(block.__dict__) for block in model]
    blocks = Blocks(find_blocks(model))
    assert isinstance(model[0].forward, StandIn)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert list(model.state_dict()) == state
    assert inspect.signature(model[0].forward) == signature
    assert model[0].forward.__name__ == "forward"
    assert model[0].forward.__func__ is Half.forward
    assert model[0].forward.__self__ is model[0]
    assert inspect.getdoc(model[0].forward.__wrapped__) == "Halves."
    assert not hasattr(model[0].forward, "nonsense")
    blocks.remove()
    blocks.remove()
    assert [dict(block.__dict__) for block in model] == attributes
    assert blocks.names == ()


def test_a_forward_that_was_set_before_us_is_called_and_comes_back() -> None:
    block = Half()
    old = block.forward

    def replaced(x: torch.Tensor) -> torch.Tensor:
        return old(x) + 1

    block.forward = replaced  # type: ignore[method-assign]
    x = torch.ones(2, 6)
    expected = block(x)
    with Blocks({"block": block}) as blocks, blocks.observe(Watch(recompute=True)):
        y = block(x)
        assert torch.equal(y, expected)
        y.sum().backward()
    assert block.forward is replaced


def test_a_forward_that_was_set_after_us_stays() -> None:
    block, watch = Half(), Watch()
    blocks = Blocks({"block": block})
    ours = block.forward
    x = torch.ones(2, 6)
    expected = ours(x) + 1
    theirs = lambda x: ours(x) + 1  # noqa: E731
    block.forward = theirs  # type: ignore[method-assign, assignment]
    with blocks.observe(watch):
        block(x)
        assert watch.told == ["block", "left"]
        blocks.remove()
        assert block.forward is theirs
        assert torch.equal(block(x), expected)
    assert watch.told == ["block", "left"]


@pytest.mark.parametrize("first", [0, 1])
def test_two_at_once_in_any_order(first: int) -> None:
    block = Half()
    x = torch.ones(2, 6)
    both = [Blocks({"block": block}), Blocks({"block": block})]
    watches = [Watch(recompute=True), Watch(recompute=True)]
    with both[0].observe(watches[0]), both[1].observe(watches[1]):
        block(x).sum().backward()
    # The outer one recomputes, and with it the inner one.
    assert [watch.told for watch in watches] == [["block", "left"]] * 2
    both[first].remove()
    watch = Watch()
    with both[1 - first].observe(watch):
        block(x)
    assert watch.told == ["block", "left"]
    assert "forward" not in vars(copy.deepcopy(block))
    both[1 - first].remove()
    nothing_of_ours(block)


def test_a_module_in_two_places_has_one_wrapper() -> None:
    block = Half()
    with Blocks({"a": block, "b": block}) as blocks:
        assert blocks.names == ("a",)
    assert "forward" not in block.__dict__


def test_no_reference_cycle_keeps_a_model() -> None:
    model = chain()
    blocks = Blocks(find_blocks(model))
    with blocks.observe(Watch(recompute=True, wants_inputs=True)):
        model(torch.ones(2, 6)).sum().backward()
    gone = weakref.ref(model[0])
    forward = model[0].forward
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="block '0' is gone"):
        forward(torch.ones(2, 6))
    blocks.remove()


def test_the_class_may_change_later() -> None:
    """As with ``fully_shard``."""
    block = Half()
    x = torch.ones(2, 6)
    expected = block(x)
    with Blocks({"block": block}):
        block.__class__ = type("Sharded", (Half,), {"forward": lambda self, x: Half.forward(self, x) + 1})
        assert torch.equal(block(x), expected + 1)


# -- copies ----------------------------------------------------------------------------------------------------------


def by_pickle(model: nn.Module) -> nn.Module:
    copied = pickle.loads(pickle.dumps(model))
    assert isinstance(copied, nn.Module)
    return copied


def by_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copied = torch.load(buffer, weights_only=False)
    assert isinstance(copied, nn.Module)
    return copied


# Classes that a pickle finds again are those of an imported module.
def transformer() -> nn.Module:
    torch.manual_seed(2)
    return nn.TransformerEncoder(LAYER(dropout=0.0), 2, enable_nested_tensor=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch])
@pytest.mark.parametrize("observed", [False, True])
def test_a_copy_runs_with_its_own_weights(duplicate: Callable[[nn.Module], nn.Module], observed: bool) -> None:
    model = transformer()
    x = torch.ones(2, 3, 8)
    with Blocks(find_blocks(model)) as blocks:
        assert blocks.names == ("layers.0", "layers.1")
        before = model(x)
        watch = Watch(recompute=True)
        with blocks.observe(watch):
            copied = duplicate(model)
            assert torch.equal(copied(x), before)
            with torch.no_grad():
                for parameter in copied.get_submodule("layers").parameters():
                    parameter.mul_(2)
            changed = copied(x)
            assert watch.told == []  # the copy is nobody's block
        assert not torch.equal(changed, before)
        assert torch.equal(model(x), before)
        nothing_of_ours(copied)
    assert torch.equal(copied(x), changed)
    assert list(copied.state_dict()) == list(model.state_dict())
    again = Watch()
    with Blocks(find_blocks(copied)) as blocks, blocks.observe(again):
        assert torch.equal(copied(x), changed)
    assert len(again.told) == 4
    nothing_of_ours(model)
    nothing_of_ours(copied)
    third = duplicate(copied)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(third(x), changed)


def nothing_of_ours(model: nn.Module) -> None:
    """Each module has the forward of its class, and knows no other way to be copied than that of its class."""
    for module in model.modules():
        assert not {"forward", "__getstate__", "_compiled_call_impl"} & set(vars(module))
        assert not any(isinstance(value, StandIn) for value in vars(module).values())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch])
def test_a_copy_is_freed_without_the_garbage_collector(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = transformer()
    with Blocks(find_blocks(model)) as blocks, blocks.observe(Watch(recompute=True)):
        gc.collect()
        gc.disable()
        try:
            copied = duplicate(model)
            copied(torch.ones(2, 3, 8)).sum().backward()
            living = [weakref.ref(thing) for thing in (*copied.modules(), *copied.parameters())]
            assert len(living) > 10
            del copied
            assert [thing() for thing in living if thing() is not None] == []
        finally:
            gc.enable()


def test_a_shallow_copy_calls_itself() -> None:
    block = Half()
    with Blocks({"block": block}):
        copied = copy.copy(block)
        assert "forward" not in vars(copied)
        assert copied.forward.__self__ is copied
        assert copied.linear is block.linear


def test_averages_in_the_middle_of_training_are_those_without_us() -> None:
    """Weight averaging copies the model when training has begun, and again each time it is evaluated."""

    def trained(blocks: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
        model = transformer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averaged = None
        with blocks(model):
            for step in range(4):
                model(torch.ones(2, 3, 8) * step).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                averaged = averaged or torch.optim.swa_utils.AveragedModel(model)
                averaged.update_parameters(model)
            assert averaged is not None
            nothing_of_ours(averaged)
            return [averaged(torch.ones(2, 3, 8)), copy.deepcopy(averaged)(torch.zeros(2, 3, 8))]

    ours = trained(lambda model: Blocks(find_blocks(model)))
    theirs = trained(lambda _: contextlib.nullcontext())
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


class Absent(Half):
    """What is not for copies is left out by a class itself, as DistributedDataParallel does and LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}


def test_a_class_that_says_what_its_copies_are_is_asked() -> None:
    block = Absent()
    before = set(vars(block))
    x = torch.ones(2, 6)
    both = Blocks({"block": block}), Blocks({"block": block})
    for blocks in both:
        copied = copy.deepcopy(block)
        assert copied.handle is None
        assert set(vars(copied)) == before
        assert torch.equal(copied(x), block(x))
        blocks.remove()
    assert set(vars(block)) == before


def test_an_instance_that_says_what_its_copies_are_is_asked_and_keeps_it() -> None:
    block = Half()

    def without_bias() -> dict[str, Any]:
        return {**vars(block), "linear": None, "__getstate__": None}

    vars(block)["__getstate__"] = without_bias
    with Blocks({"block": block}):
        assert copy.deepcopy(block).linear is None
    assert block.__getstate__ is without_bias


class ByItself(Half):
    """A class that copies its ``__dict__`` by itself, as parametrized modules do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ByItself:
        memo[id(self)] = copied = self.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


def test_a_class_that_copies_by_itself_gets_copies_that_run_without_us() -> None:
    block = ByItself()
    x = torch.ones(2, 6)
    with Blocks({"block": block}) as blocks:
        copied = copy.deepcopy(block)
        with torch.no_grad():
            copied.linear.weight.zero_()
        third = copy.deepcopy(copied)
        watch = Watch()
        with blocks.observe(watch):
            assert torch.equal(copied(x), third(x))
        assert watch.told == []
        assert not any(isinstance(value, StandIn) for value in vars(copied).values())
        assert {id(copied.forward.__self__), id(third.forward.__self__)} == {id(copied), id(third)}


def test_a_copy_of_one_block_or_of_its_forward() -> None:
    model = transformer()
    x = torch.ones(2, 3, 8)
    block = model.get_submodule("layers.0")
    with Blocks(find_blocks(model)):
        nothing_of_ours(copy.deepcopy(block))
        for forward in (copy.deepcopy(block.forward), by_pickle_any(block.forward)):
            assert isinstance(forward, types.MethodType)
            assert forward.__self__ is not block
            assert torch.equal(forward(x), block(x))


def by_pickle_any(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_a_copy_keeps_a_forward_that_was_set_before_us() -> None:
    block = transformer().get_submodule("layers.0")
    block.forward = torch.sin  # type: ignore[method-assign, assignment]
    with Blocks({"block": block}), Blocks({"block": block}):
        for copied in (copy.copy(block), copy.deepcopy(block), by_pickle(block), by_torch(block)):
            assert vars(copied)["forward"] is torch.sin
            assert "__getstate__" not in vars(copied)
    assert vars(block)["forward"] is torch.sin
    assert "__getstate__" not in vars(block)


def test_a_saved_model_loads_where_we_are_not_installed(tmp_path: Path) -> None:
    model = transformer()
    path = tmp_path / "model.pt"
    with Blocks(find_blocks(model)):
        torch.save(model, path)
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "import sys\nsys.modules['lightning_ssd'] = None\nimport torch\n"
            f"model = torch.load({str(path)!r}, weights_only=False)\n"
            "print(repr(model(torch.ones(2, 3, 8)).sum().item()))",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == model(torch.ones(2, 3, 8)).sum().item()
