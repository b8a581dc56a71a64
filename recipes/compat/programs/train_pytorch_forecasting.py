"""The Temporal Fusion Transformer of pytorch-forecasting, on sums of sines."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import recording
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

pl.seed_everything(1)
steps = np.tile(np.arange(60), 4)
series = np.repeat(np.arange(4), 60)
table = pd.DataFrame({"step": steps, "series": series.astype(str), "value": np.sin(steps / 3 + series) + series})
dataset = TimeSeriesDataSet(
    table,
    time_idx="step",
    target="value",
    group_ids=["series"],
    max_encoder_length=12,
    max_prediction_length=4,
    static_categoricals=["series"],
    time_varying_known_reals=["step"],
    time_varying_unknown_reals=["value"],
)
data = dataset.to_dataloader(train=True, batch_size=16, num_workers=0)
model = TemporalFusionTransformer.from_dataset(
    dataset, hidden_size=16, attention_head_size=2, dropout=0.1, loss=QuantileLoss(), optimizer="adam"
)
trainer = pl.Trainer(
    max_steps=4,
    accelerator="cpu",
    devices=1,
    gradient_clip_val=0.1,
    logger=False,
    strategy=recording.strategy(),
)
trainer.fit(model, data)
