"""Which modules are blocks, and what observers are told."""

import threading
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from lightning_ssd.errors import ConfigError
from lightning_ssd.recompute.block_discovery import find_blocks
from lightning_ssd.recompute.blocks import Blocks
from tests.parity import models
from tests.support.helpers import Raised, Session, Setup, assert_identical, open_offloader, outcome
from tests.support.watched_blocks import LAYER, Half, Watch, chain

# -- finding ---------------------------------------------------------------------------------------------------------


class AttributeSnapshot(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.one, self.two, self.head = make(), make(), nn.Linear(3, 3)


def stages():
    """As torchvision's ResNet: stages of blocks, with one block in the last, and a head."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
            self.layer1 = nn.Sequential(models.Residual(8), models.Residual(8))
            self.layer2 = nn.Sequential(models.Residual(8))
            self.fc = nn.Linear(8, 2)

    return Net()


class Swin(nn.Module):
    """Stages that are more than a list: blocks and a little besides."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks([Half(), Half()])
        self.downsample = nn.Linear(3, 3)


class Experts(nn.Module):
    """A block with a list of its own, as in mixtures of experts."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(6, 6)
        self.mixture = nn.ModuleDict({"router": nn.Linear(6, 2), "all": nn.ModuleList([Half(), Half(), Half()])})

    def forward(self, x):
        return x


class Inverted(nn.Module):
    """As in MobileNet: a sequence of unlike parts, of which two are alike."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(*[nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()) for _ in range(2)], nn.Conv2d(4, 4, 1))

    def forward(self, x):
        return x


def t5(layers):
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=layers, num_heads=2)
    )


FOUND = {
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
    "attributes": (lambda: AttributeSnapshot(Half), ["one", "two"]),
    "towers": (lambda: AttributeSnapshot(chain), ["one.0", "one.1", "two.0", "two.1"]),
    "one block called often": (lambda: nn.Sequential(*[Half()] * 3), ["0"]),
    "one block": (lambda: nn.Sequential(Half(), nn.Linear(6, 6)), []),
    "lists in lists": (lambda: nn.ModuleList([nn.ModuleList([Half(), Half()])] * 2), ["0.0", "0.1"]),
    "without parameters": (lambda: nn.Sequential(*[nn.Sequential(nn.ReLU()) for _ in range(3)]), []),
    "no children": (nn.ReLU, []),
}


@pytest.mark.parametrize("name", FOUND)
def test_repeated_blocks(name):
    make, expected = FOUND[name]
    model = make()
    found = find_blocks(model)
    assert list(found) == expected
    assert all(model.get_submodule(name) is block for name, block in found.items())


def test_blocks_by_class_name():
    model = t5(2)
    assert list(find_blocks(model, ["T5LayerFF"])) == [
        f"{side}.block.{i}.layer.{j}" for side, j in (("encoder", 1), ("decoder", 2)) for i in (0, 1)
    ]
    # Outermost, and by a base class: a stack contains blocks, and is a T5PreTrainedModel like the model itself.
    assert list(find_blocks(model, ["T5Block", "T5Stack"])) == ["encoder", "decoder"]
    assert list(find_blocks(model, ["T5PreTrainedModel"])) == [""]
    assert list(find_blocks(model, ["T5Stack", "LlamaDecoderLayer"])) == ["encoder", "decoder"]
    with pytest.raises(ConfigError, match=r"\['T5Blok'\].*no module of such a class.*T5Block, "):
        find_blocks(model, ["T5Blok"])


class LazyBlock(nn.Module):
    """Makes its parameters in the first forward."""

    def __init__(self):
        super().__init__()
        self.lazy, self.norm = nn.LazyLinear(8), nn.LazyBatchNorm1d()
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.norm(self.lazy(x)).tanh()).sin()


class LazyStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(LazyBlock() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("make", "activations", "consent"),
    [
        (LazyStage, "offload", ""),
        (LazyStage, "recompute", "LazyBlock"),
        (LazyStage, "auto", ""),
        (lambda: nn.Sequential(LazyBlock(), LazyBlock()), "recompute", ""),
        (lambda: nn.Sequential(LazyBlock(), LazyBlock()), "recompute_offload", "LazyBlock"),
        (lambda: nn.Sequential(LazyBlock(), LazyBlock()), "auto", "LazyBlock"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules(make, activations, consent, tmp_path):
    """Their first call is kept, since it cannot be made again; from the second on they are blocks like others."""

    def program(session):
        torch.manual_seed(1)
        net, seen = make(), []
        session.register(net)
        for step in range(6):
            with session.saved():
                loss = net(torch.linspace(-1, 1, 32).view(4, 8) * (step + 1)).square().mean()
            loss.backward()
            session.end()
            seen.append([loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        return seen, [buffer.clone() for buffer in net.buffers()]

    setup = Setup(activations=activations, drained=False, recompute_modules=consent)
    if activations == "auto":
        setup = replace(setup, activation_budget=1 << 26, settled=True)
    expected = outcome(program, Session())
    assert not isinstance(expected, Raised), expected
    with open_offloader(tmp_path, setup) as offloader:
        assert_identical(outcome(program, Session.of(offloader, setup)), expected)


def test_compiled_blocks_are_left_out():
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
    unwrapped_by_lightning._compiler_ctx = {"compiler": "dynamo"}
    assert find_blocks(unwrapped_by_lightning) == {}


# -- what observers are told -----------------------------------------------------------------------------------------


def test_told_in_order():
    """Of what runs with gradients, by the innermost observer."""
    model, outer, inner = chain(), Watch(), Watch()
    x = torch.zeros(2, 6)
    with Blocks(find_blocks(model)) as blocks:
        model(x)
        with blocks.observe(outer):
            with blocks.observe(inner):
                model(x)
            model(x)
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    model(x)
        model(x)
    assert inner.told == outer.told == ["0", "left", "1", "left"]


@pytest.mark.parametrize("recompute", [False, True])
def test_told_of_the_end_after_an_error(recompute):
    model, watch = chain(), Watch(recompute=recompute)
    with Blocks(find_blocks(model)) as blocks, blocks.observe(watch):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.zeros(2, 5))
        model(torch.zeros(2, 6)).sum().backward()
    assert watch.told == ["0", "left", "0", "left", "1", "left"]


def test_threads_do_not_meet():
    model, mine, theirs = chain(1), Watch(), Watch()
    x = torch.zeros(2, 6)
    with Blocks({"only": model[0]}) as blocks:

        def run(observer):
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

    def __init__(self, other):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6))
        self.call = other.__call__  # no child of ours

    def forward(self, x):
        return self.call(self.inner(x))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_called_by_a_block_is_its_own_business(recompute):
    other = Half()
    caller = Caller(other)
    watch = Watch(recompute=recompute)
    with Blocks({"other": other, "caller": caller}) as blocks:
        with blocks.observe(watch):
            y = caller(torch.ones(2, 6))
            other(torch.ones(2, 6))
        y.sum().backward()
    assert watch.told == ["caller", "left", "other", "left"]


def test_bytes_of_inputs():
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
