"""Trains a model within a memory budget, or in the memory that there is: ``python -m tests.support.budget_worker ...``.

The arguments are ``SETTINGS DIR``. ``SETTINGS`` are JSON: those of the policy, and ``kind`` ("frozen" or "trained": a
stack of equal blocks; "gpt": with frozen blocks, which leave as they are made), ``budget_mib`` above what the process
holds without a model, ``steps``, ``rows`` of a batch, ``num_copies`` of each row in the middle of a block, and
``ballast_mib`` that something else takes after the second step. It prints one line of JSON.
"""

import hashlib
import json
import sys

import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import BudgetError
from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.readings import read_memory, reset_host_peak

WIDTH, NUM_BLOCKS, ROWS = 1024, 16, 512
GPT_WIDTH, VOCABULARY = 768, 512
MIB = 1 << 20


class Block(nn.Module):
    """16 MiB of weights, 10 MiB of activations with the rows of a batch, and a small adapter.

    Between copies and their mean backward has several temporaries as large as they, and saves or reads nothing.
    """

    def __init__(self, num_copies):
        super().__init__()
        self.num_copies = num_copies
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        inner = torch.relu(self.up(x))
        if self.num_copies > 1:
            inner = inner.repeat(self.num_copies, 1).square().view(self.num_copies, *inner.shape).mean(0)
        return x + self.down(inner) * self.scale


class GPT(nn.Module):
    """Blocks of 27 MiB."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, GPT_WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(GPT_WIDTH, 8, 4 * GPT_WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(GPT_WIDTH, VOCABULARY)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def built(kind, num_copies):
    torch.manual_seed(0)
    if kind == "gpt":
        model = GPT()
        model.blocks.requires_grad_(False)
        return model
    model = nn.Sequential(*(Block(num_copies) for _ in range(NUM_BLOCKS)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(kind == "trained" or "scale" in name)
    return model


def loss_of(model, rows):
    if isinstance(model, GPT):
        return model(torch.randint(0, VOCABULARY, (2, rows))).logsumexp(-1).mean()
    return model(torch.randn(rows, WIDTH)).square().mean()


def main(settings, directory):
    options = json.loads(settings)
    kind, budget, steps = options.pop("kind"), options.pop("budget_mib", None), options.pop("steps", 6)
    rows, num_copies = options.pop("rows", ROWS), options.pop("num_copies", 1)
    ballast_mib, held = options.pop("ballast_mib", 0), []
    torch.set_num_threads(1)
    model = None if kind == "gpt" else built(kind, num_copies)
    trim()
    rest_bytes = (read_memory().host_bytes or 0) - sum(p.nbytes for p in model.parameters()) if model else 0
    if budget is not None:
        options["memory_budget"] = rest_bytes + budget * MIB
    digest, told = hashlib.sha256(), {"peaks_mib": [], "waiting_mib": [], "error": None}
    with Offloader(policy=OffloadPolicy(**options), hardware=HardwareProfile(paths=[directory])) as offloader:
        try:
            if model is None:
                with offloader.streamed_init():
                    model = built(kind, num_copies)
            offloader.register_module(model)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            optimizer = offloader.offload_optimizer(optimizer)
            for step in range(steps):
                reset_host_peak()
                with offloader.saved_tensors(signature="one kind"):
                    loss = loss_of(model, rows)
                loss.backward()
                offloader.end_backward()
                optimizer.step()
                optimizer.zero_grad()
                offloader.wait_for_plan()
                digest.update(loss.detach().numpy().tobytes())
                told["peaks_mib"].append(((read_memory().host_peak_bytes or 0) - rest_bytes) // MIB)
                told["waiting_mib"].append(offloader.stats.weights_bytes // MIB)
                if step == 1:
                    held.append(torch.ones(ballast_mib * MIB, dtype=torch.uint8))
        except BudgetError as error:
            told["error"] = str(error)
        else:
            for value in model.state_dict().values():
                digest.update(value.numpy())
        told["kept_mib"] = offloader.stats.weights_kept_bytes // MIB
    print(json.dumps(told | {"digest": digest.hexdigest(), "rest_mib": rest_bytes // MIB}))


if __name__ == "__main__":
    main(*sys.argv[1:])
