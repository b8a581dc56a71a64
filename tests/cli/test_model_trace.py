from contextlib import suppress

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.cli import model_trace
from lightning_ssd.cli.conf_files import model_builder
from lightning_ssd.cli.model_trace import trace_model
from lightning_ssd.cli.output import CommandError
from tests.support.planned_models import NUM_BLOCKS, WIDTH

with suppress(ImportError):  # here, because it sets an environment variable, which tests may not
    import recipes.models  # noqa: F401

SMALL_NBYTES = 4096
BATCH, SEQUENCE = 2, 64
ROWS = BATCH * SEQUENCE
NET = "tests.support.planned_models:Net"


def traced(model, precision="32-true", *, fused=False, flops_per_s=1e9, **changes):
    """Trace a class, or what a name means."""
    sizes = {"batch": BATCH, "sequence": SEQUENCE, "min_tensor_nbytes": SMALL_NBYTES} | changes
    return trace_model(
        model_builder(model, SEQUENCE) if isinstance(model, str) else model,
        flops_per_s=flops_per_s,
        precision=precision,
        fused_attention=fused,
        **sizes,
    )


def really_traced(name, precision, directory):
    """By training, as the library traces."""
    model = model_trace.build_here(model_builder(name, SEQUENCE))
    inputs = model_trace.example_batches(model, BATCH, SEQUENCE)[-1]
    if precision.endswith("-true"):
        model = model.to(model_trace._dtype(precision))
        inputs = model_trace._cast(inputs, model_trace._dtype(precision))
    policy = OffloadPolicy(recompute_modules="blocks", min_tensor_bytes=SMALL_NBYTES)
    with Offloader(policy=policy, hardware=HardwareProfile(paths=[directory])) as offloader:
        offloader.register_module(model)
        while offloader.trace is None:
            with offloader.saved_tensors(), model_trace.forward_context(precision):
                loss = model_trace.training_loss(model, inputs)
            loss.backward()
            offloader.end_backward()
        return offloader.trace


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning, because there is no Trainer to log to
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (NET, "32-true"),
        ("gpt", "32-true"),
        ("llama", "bf16-mixed"),
        pytest.param("bert", "bf16-mixed", marks=pytest.mark.exhaustive),
        ("t5", "32-true"),
        pytest.param(NET, "bf16-true", marks=pytest.mark.exhaustive),
        ("gpt", "bf16-true"),
    ],
)
def test_a_trace_without_bytes_is_that_of_real_training(name, precision, spill_dir):
    """All but the times: which storages, in which order, of which blocks, and what they hold together at most."""
    if ":" not in name:
        pytest.importorskip("transformers")
    pretended, real = traced(name, precision).trace, really_traced(name, precision, spill_dir)
    assert [s.nbytes for s in pretended.storages] == [s.nbytes for s in real.storages]
    assert [s.block for s in pretended.storages] == [s.block for s in real.storages]
    assert [s.movable for s in pretended.storages] == [s.movable for s in real.storages]
    assert pretended.order == real.order
    assert pretended.saved_peak_bytes == real.saved_peak_bytes
    assert [(b.name, b.input_nbytes) for b in pretended.blocks] == [(b.name, b.input_nbytes) for b in real.blocks]
    assert len(pretended.storages) > NUM_BLOCKS


def test_time_is_work_by_the_rate():
    """Each product is done once in forward and twice in backward, but the first, whose input wants no gradient."""
    found = traced(NET, flops_per_s=1e9)
    product = 2 * ROWS * WIDTH * WIDTH
    assert found.flops == 3 * 2 * NUM_BLOCKS * product - product
    assert found.trace.end_s == pytest.approx(found.flops / 1e9, rel=1e-3)
    assert found.trace.forward_end_s == pytest.approx(2 * NUM_BLOCKS * product / 1e9, rel=1e-3)
    slower = traced(NET, flops_per_s=1e8).trace
    assert slower.end_s == pytest.approx(10 * found.trace.end_s, rel=1e-3)
    assert found.num_trained == 2 * NUM_BLOCKS * (WIDTH + 1) * WIDTH
    assert found.size.weight_bytes == found.size.trained_bytes == 4 * found.num_trained


class Shared(torch.nn.Module):
    """Two modules with one weight, two weights in one memory, and what no type but its own fits."""

    def __init__(self):
        super().__init__()
        self.first, self.tied, self.other = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.tied.weight = self.first.weight
        self.other.weight.data = self.first.weight.data
        self.frozen = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.first.weight.factor = 2.0
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("index", torch.arange(WIDTH))

    def example_batch(self, batch, sequence):
        return torch.randn(batch, sequence, WIDTH)

    def forward(self, x):
        assert x.dtype == self.scale.dtype == self.frozen.dtype == torch.empty(0).dtype
        assert self.index.dtype == torch.int64
        assert self.tied.weight is self.first.weight
        x = x * self.first.weight.factor
        return self.other(self.tied(self.first(x))).mul(self.scale).mul(self.frozen).sum()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_weights_have_the_type_that_training_gives_them_and_count_once(precision):
    size = traced(Shared, precision).size
    element_bytes = {"32-true": 4, "bf16-true": 2, "16-true": 2, "64-true": 8}[precision]
    weight = element_bytes * WIDTH * WIDTH
    num_apart = 1 if precision == "32-true" else 2  # ``.to`` gives each parameter memory of its own
    assert size.weight_bytes == num_apart * weight + element_bytes * WIDTH
    assert size.state_bytes == 2 * 2 * weight, "two parameters are trained, each with two states in its own type"
    assert torch.get_default_dtype() == torch.float32


class Attention(torch.nn.Module):
    """With dropout, for which PyTorch's attention on CPUs is not fused."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def example_batch(self, batch, sequence):
        return torch.randn(batch, 4, sequence, 32)

    def forward(self, x):
        q = x * self.scale
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum()


@pytest.mark.parametrize("fused", [True, False])
def test_fused_attention_saves_no_matrix(fused):
    found = traced(Attention, fused=fused, batch=1, sequence=256, min_tensor_nbytes=1)
    matrix_nbytes = 4 * 256 * 256 * 4
    assert any(s.nbytes == matrix_nbytes for s in found.trace.storages) is not fused
    forward, backward = 2 * (2 * 4 * 256 * 256 * 32), (5 if fused else 4) * (2 * 4 * 256 * 256 * 32)
    assert found.flops == forward + backward  # a fused backward computes the matrix again


@torch.compile(backend=lambda graph, inputs: _graphs.append(graph) or graph.forward)
def smooth(x):
    return x.sin() * x.sigmoid()


_graphs = []


class Smooth(torch.nn.Linear):
    def __init__(self):
        super().__init__(SEQUENCE, 32)

    def forward(self, x):
        return smooth(super().forward(x.float()))


def test_a_function_can_be_compiled_after_it_was_traced():
    """Dynamo marks what it meets under fake tensors as never to be compiled."""
    torch.compiler.reset()
    traced(f"{__name__}:Smooth")
    assert not _graphs
    smooth(torch.ones(2))
    assert len(_graphs) == 1


@pytest.mark.parametrize(
    ("name", "match"),
    [("NeedsValues", "where forward or backward depends on values"), ("NoLoss", "a loss with gradients")],
)
def test_what_cannot_be_traced_is_refused(name, match):
    with pytest.raises(CommandError, match=match):
        traced(f"tests.support.planned_models:{name}")


class Wide(torch.nn.Linear):
    """A model that wants no token numbers, and does not say so."""

    def __init__(self):
        super().__init__(512, 512)

    def forward(self, x):
        return super().forward(x.float())


def test_a_batch_that_does_not_suit_is_told_in_one_error(capfd):
    """In a line of ours, and with what helps; PyTorch's own log of it is a page."""
    with pytest.raises(CommandError, match=r"give the model example_batch\(batch, sequence\)"):
        traced(f"{__name__}:Wide")
    assert "Traceback" not in "".join(capfd.readouterr())


def test_an_unknown_precision_is_refused():
    with pytest.raises(CommandError, match="got transformer-engine"):
        traced(NET, "transformer-engine-mixed")
