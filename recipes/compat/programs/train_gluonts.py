"""DeepAR of gluonts, which makes a Trainer for each training, on sums of sines."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import recording
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator

pl.seed_everything(1)
steps = np.arange(120)
series = [{"start": pd.Period("2024-01-01", "D"), "target": np.sin(steps / 3 + at) + 3 + at} for at in range(4)]
estimator = DeepAREstimator(
    freq="D",
    prediction_length=6,
    hidden_size=32,
    batch_size=8,
    num_batches_per_epoch=4,
    trainer_kwargs={
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "strategy": recording.strategy(),
    },
)
data = ListDataset(series, freq="D")
predictor = estimator.train(data)
recording.write_predictions("lightning", next(iter(predictor.predict(data))).samples)
