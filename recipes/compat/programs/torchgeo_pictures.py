"""Random pictures with classes, for the command line of torchgeo."""

import torch
from torchgeo.datamodules import NonGeoDataModule
from torchgeo.datasets import NonGeoDataset


class Random(NonGeoDataset):
    """Noise with a class."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"image": torch.randn(3, 32, 32, generator=generator), "label": torch.tensor(index % 4)}


class Pictures(NonGeoDataModule):
    """Serves them."""

    def __init__(self, batch_size: int = 4, num_workers: int = 0) -> None:
        super().__init__(Random, batch_size, num_workers)

    def setup(self, stage: str) -> None:
        self.train_dataset = self.val_dataset = Random()
