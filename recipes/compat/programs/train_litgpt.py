"""A small GPT of litgpt in a Trainer, on random words."""

import lightning as L
import recording
import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy


class Model(L.LightningModule):
    """Predict the next word."""

    def __init__(self) -> None:
        super().__init__()
        config = Config.from_name("pythia-14m", n_layer=2, block_size=32, padded_vocab_size=256, n_embd=64, n_head=4)
        self.gpt = GPT(config)

    def training_step(self, batch, batch_idx):
        logits = self.gpt(batch[:, :-1])
        return chunked_cross_entropy(logits, batch[:, 1:])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)


L.seed_everything(1)
data = torch.utils.data.DataLoader(torch.randint(256, (32, 33)), batch_size=8)
trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, strategy=recording.strategy())
trainer.fit(Model(), data)
