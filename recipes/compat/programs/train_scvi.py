"""scVI of scvi-tools, which makes its Trainer itself, on random counts."""

import anndata
import numpy as np
import recording
import scvi

scvi.settings.seed = 1
counts = np.random.default_rng(1).poisson(2.0, size=(256, 50)).astype("float32")
data = anndata.AnnData(counts)
scvi.model.SCVI.setup_anndata(data)
model = scvi.model.SCVI(data)
model.train(max_epochs=2, accelerator="cpu", devices=1, batch_size=64, strategy=recording.strategy())
recording.write_predictions("lightning", model.get_latent_representation())
