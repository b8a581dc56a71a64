"""``torch.compile`` with real code generation: as many graphs and the very bits of plain training, in every mode.

The backends "eager" and "aot_eager" give the bits of uncompiled code, so that they cannot show code that was not
compiled.
"""

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import ConfigError
from tests.contracts.compiled_programs import MODES, CompiledProgram, compiler_blocker

pytestmark = [
    pytest.mark.skipif(compiler_blocker() is not None, reason=str(compiler_blocker())),
    # The compiler instantiates custom Functions, asks tensors for gradients, and uses what PyTorch has deprecated.
    pytest.mark.filterwarnings("ignore"),
]


def compare(program, mode, directory):
    """Compare with plain PyTorch.

    Raises:
        OffloadError: the program is refused.
    """
    expected, num_graphs = program.run(None, directory)
    assert all(bool(tensor.isfinite().all()) for tensor in expected), "equal by chance"
    found, num_found = program.run(MODES[mode], directory)
    assert len(found) == len(expected), program
    assert all(map(torch.equal, found, expected)), f"other bits: {program}, {mode}"
    assert num_found == num_graphs, f"other graphs: {program}, {mode}"


COMPILED = [
    ("block.compile()", "after registering", "recompute"),
    ("torch.compile(block)", "after a step", "recompute_offload"),
    ("a function in a block", "after a step", "everything"),
    ("block.forward", "after registering", "auto"),
    ("model.compile()", "after registering", "recompute_offload"),
    ("torch.compile(model)", "before registering", "recompute"),
    ("a part of a block", "after registering", "recompute"),
    ("the loss", "after registering", "offload"),
]
NUM_DEFAULT = 3
"""Each of them generates and compiles C++."""


@pytest.mark.parametrize(
    ("compiled", "when", "mode"),
    COMPILED[:NUM_DEFAULT] + [pytest.param(*row, marks=pytest.mark.exhaustive) for row in COMPILED[NUM_DEFAULT:]],
)
def test_what_is_compiled_stays_compiled(compiled, when, mode, tmp_path):
    compare(CompiledProgram(compiled, when, has_function=when == "after registering", is_chunked=True), mode, tmp_path)


@pytest.mark.parametrize("compiled", ["nothing", pytest.param("block.compile()", marks=pytest.mark.exhaustive)])
def test_a_function_that_the_optimizer_compiles(compiled, tmp_path):
    """Dynamo marks what it meets under a mode, as in a rehearsal of a step, as never to be compiled."""
    compare(CompiledProgram(compiled, optimizer="Compiling"), "states", tmp_path)


def test_blocks_that_are_compiled_before_are_refused_where_all_is_recomputed(tmp_path):
    program = CompiledProgram("block.compile()", "before registering")
    with pytest.raises(ConfigError, match=r"but compiled or scripted ones.*activations='offload'"):
        program.run(MODES["recompute"], tmp_path)


@pytest.mark.parametrize("has_activations", [False, True])
def test_a_compiled_step_is_refused_where_states_are_offloaded(has_activations, tmp_path):
    """As PyTorch's tutorial compiles an optimizer. Compiled for some of the parameters at a time, it has other bits."""
    policy = OffloadPolicy(activations="offload" if has_activations else "keep", optimizer_states="offload")
    weight = torch.nn.Parameter(torch.ones(64, 97))
    with Offloader(policy=policy, hardware=HardwareProfile(paths=(str(tmp_path),))) as offloader:
        optimizer = offloader.offload_optimizer(torch.optim.AdamW([weight]))
        with offloader.saved_tensors():
            weight.sin().sum().backward()
        offloader.end_backward()
        before, evaluations = weight.detach().clone(), []
        step = torch.compile(lambda: optimizer.step(lambda: evaluations.append(1)))
        with pytest.raises(ConfigError, match=r"AdamW runs under torch\.compile.*optimizer_states='keep'"):
            step()
        assert torch.equal(weight, before)
        assert not evaluations
        optimizer.step()
        assert not torch.equal(weight, before), "as it is, it goes on"
