from dataclasses import dataclass

import pytest
import torch

from lightning_ssd.telemetry.throughput import batch_size_of

IDS = torch.zeros(3, 7, dtype=torch.int64)


@dataclass
class Opaque:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(4, 5), (4, None)),
        (IDS, (3, 21)),
        ({"input_ids": IDS, "labels": torch.zeros(3)}, (3, 21)),
        ([torch.zeros(4, 5), torch.zeros(4)], (4, None)),
        ((torch.zeros(4, 5), torch.zeros(2)), (None, None)),
        ((torch.zeros(4, 5), torch.tensor(1.0)), (4, None)),
        ({"text": ["a", "b"]}, (None, None)),
        (torch.zeros(3, 7, dtype=torch.bool), (3, None)),
        (None, (None, None)),
        ("text", (None, None)),
        (Opaque(torch.zeros(4)), (None, None)),
    ],
)
def test_what_a_batch_tells(batch, expected):
    assert batch_size_of(batch) == expected
