"""FastFlow of anomalib, whose Engine makes the Trainer, on random pictures."""

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import recording
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Fastflow
from PIL import Image

pl.seed_everything(1)
draw = np.random.default_rng(1)
for kind, number in (("good", 16), ("bad", 4)):
    Path(kind).mkdir()
    for at in range(number):
        Image.fromarray(draw.integers(256, size=(64, 64, 3), dtype="uint8")).save(f"{kind}/{at:02}.png")
settings = {"train_batch_size": 4, "eval_batch_size": 4, "num_workers": 0}
data = Folder(name="random", root=Path.cwd(), normal_dir="good", abnormal_dir="bad", seed=1, **settings)
model = Fastflow(
    backbone="resnet18",
    pre_trained=False,
    flow_steps=2,
    pre_processor=Fastflow.configure_pre_processor(image_size=(64, 64)),
    evaluator=False,
    visualizer=False,
)
engine = Engine(max_epochs=1, accelerator="cpu", devices=1, logger=False, strategy=recording.strategy())
engine.fit(model, datamodule=data)
