"""The Transformer of darts, which makes a Trainer for each fit, on a sine."""

import numpy as np
import recording
from darts import TimeSeries
from darts.models import TransformerModel

series = TimeSeries.from_values(np.sin(np.arange(200, dtype="float32") / 5))
settings = {"accelerator": "cpu", "devices": 1, "logger": False, "strategy": recording.strategy()}
model = TransformerModel(
    input_chunk_length=24,
    output_chunk_length=6,
    d_model=16,
    nhead=2,
    batch_size=32,
    n_epochs=1,
    random_state=1,
    pl_trainer_kwargs=settings,
)
model.fit(series)
recording.write_predictions("pytorch_lightning", model.predict(12).values())
