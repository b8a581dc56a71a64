"""A small GPT of litgpt in a loop of Fabric, as litgpt trains itself, on random words."""

import lightning as L
import recording
import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy

L.seed_everything(1)
fabric = L.Fabric(accelerator="cpu", devices=1, strategy=recording.strategy())
config = Config.from_name("pythia-14m", n_layer=2, block_size=32, padded_vocab_size=256, n_embd=64, n_head=4)
model = GPT(config)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
losses = []
for words in torch.randint(256, (4, 8, 33)):
    loss = chunked_cross_entropy(model(words[:, :-1]), words[:, 1:])
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append({"loss": loss})
fabric.save("trained.ckpt", {"state_dict": model, "optimizer_states": optimizer})
recording.write("lightning", losses, torch.load("trained.ckpt", weights_only=True), [fabric.strategy], [optimizer])
