"""NHITS of neuralforecast, which copies the settings of its Trainer, on sums of sines."""

import numpy as np
import pandas as pd
import recording
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

steps = np.tile(np.arange(120), 4)
series = np.repeat(np.arange(4), 120)
table = pd.DataFrame(
    {
        "unique_id": series.astype(str),
        "ds": pd.Timestamp("2024-01-01") + pd.to_timedelta(steps, unit="D"),
        "y": np.sin(steps / 3 + series) + series,
    }
)
model = NHITS(
    h=6,
    input_size=24,
    max_steps=4,
    random_seed=1,
    accelerator="cpu",
    devices=1,
    logger=False,
    strategy=recording.strategy(),
)
forecast = NeuralForecast(models=[model], freq="D")
forecast.fit(table)
recording.write_predictions("pytorch_lightning", forecast.predict()["NHITS"].to_numpy())
