"""``memory_budget`` is one of weights, gradients and activations together: kept in each step, or refused before the
first one.
"""

import gc
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_ssd import OffloadPolicy
from lightning_ssd.common.formatting import as_setting
from lightning_ssd.errors import BudgetError
from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.readings import level_bytes
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from tests.support.named_budget import named_budget

MIB = 1 << 20
UNIT_BYTES = 40 * MIB
"""More than a difference that a plan takes for nothing."""
CPU = torch.device("cpu")
FROZEN = {"kind": "frozen", "parameters": "auto", "activations": "auto"}
SMALL = {"rows": 256, "steps": 4}
TRAINED = FROZEN | {"kind": "trained", "gradients": "auto", "optimizer_states": "offload"}


def trained(settings, directory):
    command = [sys.executable, "-m", "tests.support.budget_worker", json.dumps(settings), str(directory)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module", params=[pytest.param("frozen", marks=pytest.mark.exhaustive), "trained"])
def kept(request, tmp_path_factory):
    """How a kind is trained, and what is told of training it without us."""
    chosen = {"frozen": FROZEN, "trained": TRAINED}[request.param] | SMALL
    told = trained({"kind": request.param, "activations": "keep"} | SMALL, tmp_path_factory.mktemp("kept"))
    return {"settings": chosen, **told}


_BY_LITTLE = pytest.mark.xfail(reason="the first step may exceed a tight budget by 1 to 3 %: no pass was traced before")


@pytest.mark.slow
@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.6, marks=pytest.mark.exhaustive),
        pytest.param(0.25, marks=[pytest.mark.exhaustive, _BY_LITTLE]),
        0.4,
    ],
)
def test_each_step_stays_within_the_budget(share, kept, spill_dir):
    budget = int(share * max(kept["peaks_mib"]))
    told = trained(kept["settings"] | {"budget_mib": budget}, spill_dir)
    assert told["error"] is None
    assert told["digest"] == kept["digest"]
    assert max(told["peaks_mib"]) <= budget
    assert told["waiting_mib"][-1] > 0


@pytest.mark.slow
def test_memory_that_no_trace_has_shown_exceeds_a_budget_once(spill_dir):
    told = trained(FROZEN | {"budget_mib": 196, "rows": 128, "num_copies": 8, "steps": 4}, spill_dir)
    assert told["error"] is None
    assert told["peaks_mib"][1] > 196, "else there was nothing to learn"
    assert max(told["peaks_mib"][2:]) <= 196


class Stack(nn.Module):
    def __init__(self, number=4):
        super().__init__()
        width = int((UNIT_BYTES // 4) ** 0.5)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(number))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(number))
        self.blocks.requires_grad_(False)

    def forward(self, x):
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return x


def policy(**options):
    return OffloadPolicy(**{"parameters": "auto", "activations": "auto"} | options)


def waiting(model):
    return sum(p.nbytes for p in model.parameters() if is_mapped(p.untyped_storage()))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_budget_without_room_for_what_cannot_wait_is_refused_before_the_first_step(opened):
    model = Stack()
    gc.collect()
    trim()  # or memory that earlier tests have left would leave in between
    rest = level_bytes(CPU) - sum(parameter.nbytes for parameter in model.parameters())
    budget = rest + UNIT_BYTES // 2
    offloader = opened(memory_budget=budget)
    with pytest.raises(BudgetError) as raised:
        offloader.register_module(model)
    text = str(raised.value)
    assert text.startswith(f"OffloadPolicy.memory_budget={as_setting(budget)} is too small")
    assert "even if all weights leave that can: this model needs more than " in text
    assert text.endswith(
        " of weights in use), and saved activations on top. Raise the budget, "
        "or lower min_tensor_bytes so that smaller weights leave, "
        'or set optimizer_states="offload", with which trained weights leave'
    )
    assert waiting(model) == 0, "nothing was taken over"
    least = named_budget(text, "needs more than")
    assert rest + UNIT_BYTES * 3 // 4 < least < rest + 2 * UNIT_BYTES, "one unit has to be in memory"
    other = opened(memory_budget=least + 32 * MIB)
    other.register_module(model)
    assert waiting(model) == 4 * model.blocks[0].weight.nbytes


# -- weights that show a file ----------------------------------------------------------------------------------------


def test_weights_that_were_read_from_their_file_do_not_count_twice(opened, tmp_path):
    torch.save(Stack().state_dict(), tmp_path / "weights.pt")
    model = Stack()
    model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    model.blocks.requires_grad_(False)
    before = level_bytes(CPU)
    for block in model.blocks:
        block.weight.sum()
    assert level_bytes(CPU) - before > 3 * UNIT_BYTES
    offloader = opened(memory_budget=before + 6 * UNIT_BYTES, activation_budget=UNIT_BYTES)
    offloader.register_module(model)
    assert waiting(model) == 0
    assert offloader.stats.weights_kept_bytes == 4 * model.blocks[0].weight.nbytes
