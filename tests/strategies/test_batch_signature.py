"""Steps that save alike have equal signatures, others differ; and no batch makes it fail."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd.strategies.batch_signature import signature_of

NET = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    weight: float = 1.0
    late: torch.Tensor = field(init=False)


class BatchEncoding(UserDict):  # type: ignore[type-arg]  # as that of Hugging Face's tokenizers
    def __getattr__(self, name: str) -> Any:
        return self.data[name]


def signature(*arguments: Any, module: nn.Module = NET) -> Hashable:
    result = signature_of((arguments, {}), module)
    hash(result)
    return result


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


WRAPPED: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x,
    lambda x: [x, zeros(1)],
    lambda x: (zeros(1), x),
    lambda x: Pair(x, zeros(1)),
    lambda x: {"x": x},
    lambda x: OrderedDict(x=x),
    lambda x: BatchEncoding({"input_ids": x}),
    lambda x: Sample(x),
    lambda x: {"deep": [Sample(x), (x, {"x": [x]})]},
]


@pytest.mark.parametrize("wrap", WRAPPED)
def test_values_do_not_matter_shapes_and_types_do(wrap: Callable[[torch.Tensor], Any]) -> None:
    of = lambda x: signature(wrap(x), 0)  # noqa: E731
    assert of(zeros(3, 2)) == of(torch.randn(3, 2))
    assert len({of(zeros(3, 2)), of(zeros(2, 2)), of(zeros(6)), of(zeros(3, 2, dtype=torch.int64))}) == 4


def test_the_index_of_the_batch_and_other_numbers_do_not_matter() -> None:
    assert signature([zeros(2)], 0) == signature([zeros(2)], 17)
    assert signature({"x": zeros(2), "id": "a"}) == signature({"x": zeros(2), "id": "b"})
    assert signature_of(((zeros(2),), {"batch_idx": 1}), NET) == signature_of(((zeros(2),), {"batch_idx": 2}), NET)
    assert signature({17: zeros(2)}) == signature({18: zeros(2)}), "keys that are no names"
    circle: dict[str, Any] = {"x": zeros(2)}
    circle["self"] = circle
    assert signature(circle) == signature(circle)


def test_how_many_and_under_which_name_do_matter() -> None:
    assert signature([zeros(2)]) != signature([zeros(2), zeros(2)])
    assert signature({"image": zeros(2)}) != signature({"mask": zeros(2)})
    assert signature([zeros(2), None]) != signature([zeros(2), zeros(2)])


def test_a_field_that_is_not_set_is_no_error() -> None:
    sample = Sample(zeros(2))
    before = signature(sample)
    sample.late = zeros(3)
    assert signature(sample) != before


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_alike_whatever_lengths_they_have(layout: torch.layout) -> None:
    def nested(*lengths: int) -> torch.Tensor:
        return torch.nested.nested_tensor([zeros(n, 4) for n in lengths], layout=layout)

    assert signature(nested(1, 2)) == signature(nested(3, 2))
    assert signature(nested(1, 2)) != signature(zeros(2, 4))


def test_other_tensors_and_things_are_hashable() -> None:
    packed = nn.utils.rnn.pack_sequence([zeros(2), zeros(1)])
    signature(packed, zeros(2, 2).to_sparse(), {1, 2}, object(), Sample, iter([]), None, slice(3))


def test_modes_of_the_module_and_of_any_part_of_it_matter() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    batch = zeros(2)
    training = signature(batch, module=net)
    net.eval()
    evaluating = signature(batch, module=net)
    net.train()
    assert signature(batch, module=net) == training
    net[1].eval()
    assert len({training, evaluating, signature(batch, module=net)}) == 3


def test_each_side_of_a_gan_is_a_kind_of_its_own() -> None:
    net, batch = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), zeros(2)
    both = signature(batch, module=net)
    sides = []
    for frozen, trained in ((net[0], net[1]), (net[1], net[0])):
        frozen.requires_grad_(False)
        trained.requires_grad_(True)
        sides.append(signature(batch, module=net))
    assert len({both, *sides}) == 3
    net[0].requires_grad_(False)
    net[1].requires_grad_(True)
    assert signature(batch, module=net) == sides[0]


def test_parameters_of_the_module_itself_and_later_ones_matter() -> None:
    module = nn.Linear(2, 2, bias=False)  # bias is registered, and None
    before = signature(module=module)
    module.extra = nn.Parameter(zeros(2))
    after = signature(module=module)
    module.weight.requires_grad_(False)
    assert len({before, after, signature(module=module)}) == 3


def test_a_module_in_two_places_or_above_itself_is_no_error() -> None:
    shared = nn.Linear(2, 2)
    net = nn.ModuleList([shared, shared])
    shared.register_module("owner", net)
    assert signature(module=net) == signature(module=net)


def test_autocast_matters() -> None:
    plain = signature(zeros(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert signature(zeros(2)) != plain
    assert signature(zeros(2)) == plain
