"""Trains a small GPT with frozen blocks, in the memory that there is: ``python -m tests.support.auto_worker MODE DIR``.

``MODE`` is a value of ``OffloadPolicy.parameters``. With a third argument something else takes so many MiB after the
second of six steps, which save more. It prints one line of JSON.
"""

import hashlib
import json
import sys

import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy

WIDTH, NUM_BLOCKS, VOCABULARY = 768, 16, 512


class GPT(nn.Module):
    """Blocks of 27 MiB."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def main(mode, directory, ballast_mib="0"):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_plain, ballast_bytes, waiting = ballast_mib == "0", int(ballast_mib) << 20, []
    budget = {} if mode == "keep" or not is_plain else {"activation_budget": "64MiB"}
    policy = OffloadPolicy(parameters=mode, activations="auto" if is_plain else "keep", **budget)
    digest, ballast = hashlib.sha256(), None
    with Offloader(policy=policy, hardware=HardwareProfile(paths=[directory])) as offloader:
        with offloader.streamed_init():
            model = GPT()
        model.blocks.requires_grad_(False)
        offloader.register_module(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for step in range(3 if is_plain else 6):
            with offloader.saved_tensors():
                loss = model(torch.randint(0, VOCABULARY, (2, 16 if is_plain else 96))).logsumexp(-1).mean()
            loss.backward()
            offloader.end_backward()
            optimizer.step()
            optimizer.zero_grad()
            digest.update(loss.detach().numpy().tobytes())
            waiting.append(offloader.stats.weights_bytes)
            if step == 1 and ballast_bytes:
                ballast = torch.ones(ballast_bytes, dtype=torch.uint8)
        for value in model.state_dict().values():
            digest.update(value.numpy())
        told = {
            "digest": digest.hexdigest(),
            "waiting_bytes": waiting[-1],
            "waited_bytes": waiting[0],
            "ballast_bytes": 0 if ballast is None else ballast.nbytes,
            "kept_bytes": offloader.stats.weights_kept_bytes,
            "blocks_bytes": sum(parameter.nbytes for parameter in model.blocks.parameters()),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
