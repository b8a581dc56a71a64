"""Steps that save alike have equal signatures, others differ; and no batch makes it fail."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from lightning_ssd.strategies.batch_signature import signature_of

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    weight: float = 1.0
    late: torch.Tensor = field(init=False)


class BatchEncoding(UserDict):  # as that of Hugging Face's tokenizers
    def __getattr__(self, name):
        return self.data[name]


def network():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout()))


NET = network()


def signature(*arguments, module=NET):
    result = signature_of((arguments, {}), module)
    hash(result)
    return result


def nested(layout, *lengths):
    return torch.nested.nested_tensor([torch.zeros(n, 4) for n in lengths], layout=layout)


one, two, three = (torch.zeros(n) for n in (1, 2, 3))
WRAPPED = [
    lambda x: x,
    lambda x: [x, one],
    lambda x: (one, x),
    lambda x: Pair(x, one),
    lambda x: {"x": x},
    lambda x: OrderedDict(x=x),
    lambda x: BatchEncoding({"input_ids": x}),
    lambda x: Sample(x),
    lambda x: {"deep": [Sample(x), (x, {"x": [x]})]},
]


@pytest.mark.parametrize("wrap", WRAPPED)
def test_values_do_not_matter_shapes_and_types_do(wrap):
    of = lambda x: signature(wrap(x), 0)  # noqa: E731
    assert of(torch.zeros(3, 2)) == of(torch.randn(3, 2))
    assert len({of(torch.zeros(3, 2)), of(torch.zeros(2, 2)), of(torch.zeros(6)), of(torch.zeros(3, 2).long())}) == 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_numbers_do_not_matter_counts_and_names_do():
    assert signature([two], 0) == signature([two], 17)
    assert signature({"x": two, "id": "a"}) == signature({"x": two, "id": "b"})
    assert signature_of(((two,), {"batch_idx": 1}), NET) == signature_of(((two,), {"batch_idx": 2}), NET)
    assert signature({17: two}) == signature({18: two}), "keys that are no names"
    circle = {"x": two}
    circle["self"] = circle
    assert signature(circle) == signature(circle)
    assert len({signature([two]), signature([two, two]), signature([two, None])}) == 3
    assert signature({"image": two}) != signature({"mask": two})
    sample = Sample(two)
    before = signature(sample)
    sample.late = three
    assert signature(sample) != before
    for layout in (torch.strided, torch.jagged):
        assert signature(nested(layout, 1, 2)) == signature(nested(layout, 3, 2)) != signature(torch.zeros(2, 4))
    packed = nn.utils.rnn.pack_sequence([two, one])
    signature(packed, torch.zeros(2, 2).to_sparse(), {1, 2}, object(), Sample, iter([]), None, slice(3))


def _freeze(which):
    """One side of a GAN is trained."""
    return lambda net: [part.requires_grad_(number != which) for number, part in enumerate(net)]


CHANGES = {
    "nothing": lambda net: None,
    "evaluation": nn.Module.eval,
    "evaluation of a part": lambda net: net[1].eval(),
    "frozen": lambda net: net[0].weight.requires_grad_(False),
    "one side": _freeze(0),
    "the other side": _freeze(1),
    "a later parameter": lambda net: setattr(net, "extra", nn.Parameter(torch.zeros(2))),
}


def test_modes_and_what_is_trained_of_any_part_matter():
    found = []
    for change in CHANGES.values():
        net = network()
        plain = signature(two, module=net)
        change(net)
        found.append(signature(two, module=net))
    assert len(set(found)) == len(found)
    assert found[0] == plain
    assert signature(two, module=network().eval().train()) == plain


def test_a_module_in_two_places_or_above_itself_is_no_error():
    shared = nn.Linear(2, 2)
    net = nn.ModuleList([shared, shared])
    shared.register_module("owner", net)
    assert signature(module=net) == signature(module=net)


def test_autocast_matters():
    plain = signature(two)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert signature(two) != plain
    assert signature(two) == plain
