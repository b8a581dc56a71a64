"""``torch.compile``: each block by itself, as advised, and the whole model. The backend needs no C++ compiler."""

import warnings

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.parity.models import Perceptrons, floats, mean_square
from tests.support.helpers import DRAINED, EAGER, Session, Training, assert_parity

BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    with warnings.catch_warnings():
        # Advice about whole-model compilation, and PyTorch's own deprecations inside its compiler.
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


def by_block(model):
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return model


def whole(model):
    model.compile(backend=BACKEND)
    return model


def test_checkpointed_blocks_inside_a_compiled_model(tmp_path):
    training = Training(
        lambda: Perceptrons(mode="alternate"), lambda step: {"x": floats(step, 9, 17, 40)}, mean_square, prepare=whole
    )
    assert_parity(training, tmp_path, setups=[DRAINED])


def test_compiled_after_the_context_was_used(tmp_path):
    """The context entered by eager code first, then by compiled code whose graph breaks."""

    class Broken(Perceptrons):
        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
                torch._dynamo.graph_break()
            return x

    training = Training(Broken, lambda step: {"x": floats(step, 9, 17, 40)}, mean_square, prepare=whole)
    assert_parity(training, tmp_path, setups=[DRAINED, EAGER])


# -- weights that wait -----------------------------------------------------------------------------------------------


def wrapped_blocks(model):
    model.blocks = nn.ModuleList([torch.compile(block, backend=BACKEND) for block in model.blocks])
    return model


@pytest.mark.parametrize(
    ("prepare", "is_told", "is_early"),
    [
        (by_block, True, False),
        (by_block, False, True),
        (wrapped_blocks, False, True),
        (whole, True, False),
        (whole, True, True),
    ],
)
def test_code_that_weights_divide_is_told_of_once(prepare, is_told, is_early, tmp_path):
    policy = OffloadPolicy(
        activations="keep", parameters="offload", gradients="offload", optimizer_states="offload", min_tensor_bytes=1
    )
    model = Perceptrons()
    if is_early:
        prepare(model)
    hardware = HardwareProfile(paths=(str(tmp_path),))
    with warnings.catch_warnings(record=True) as caught, Offloader(policy=policy, hardware=hardware) as offloader:
        warnings.simplefilter("always")
        session = Session(offloader)
        session.register(model)
        if not is_early:
            prepare(model)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            with session.saved():
                loss = model(floats(step, 9, 17, 40)).square().mean()
            session.backward(loss)
            optimizer.step()
        assert offloader.stats.weights_bytes > 0
    told = [str(warning.message) for warning in caught if "divides compiled code" in str(warning.message)]
    assert len(told) == (is_told and not is_early)  # compiled before, a block or the whole is one unit
    assert all("Compile each block by itself (block.compile()) before the model is registered" in text for text in told)
