"""Room for optimizer states is taken at setup: a drive that is too small is found before the first step."""

import pytest
import torch
from torch import nn

from lightning_ssd.errors import OutOfSpaceError
from tests.support.optimizer_pairs import Pair, adamw, files_of, offloaded_pair, opened, wrapped

MIB = 1 << 20
NUM_ELEMENTS = 3 * MIB  # AdamW: 24 MiB of states
SHAPES = ((NUM_ELEMENTS // 12,),) * 12
KINDS = {
    "adamw": (2, torch.optim.AdamW),
    "amsgrad": (3, lambda p: torch.optim.Adam(p, amsgrad=True)),
    "sgd": (1, lambda p: torch.optim.SGD(p, momentum=0.9)),
    "plain sgd": (0, torch.optim.SGD),
    "rmsprop": (3, lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5)),
}
"""How many states each has."""


def spilled(optimizer):
    return [arena.size_bytes for arena in files_of(optimizer).tier._arenas]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_reserved_suffices_for_all_steps(kind, spill_dir):
    num_states, make = KINDS[kind]
    with offloaded_pair(make, spill_dir, SHAPES) as (pair, optimizer):
        reserved = spilled(optimizer)[0]
        states = num_states * 4 * NUM_ELEMENTS
        assert states <= reserved <= states + 8 * 4 * MIB
        pair.train(optimizer, 4)
        optimizer.flush()
        assert spilled(optimizer) == [reserved]


def test_a_full_drive_is_found_at_setup_and_nothing_is_lost(small_disk):
    directory, pair = small_disk(24), Pair(adamw, SHAPES)
    pair.step(pair.inner)
    with opened(directory) as offloader:
        with pytest.raises(OutOfSpaceError, match=r"states need [\d,]+ bytes; [\d,]+ of them have no place") as caught:
            offloader.offload_optimizer(pair.inner)
        assert all(told in str(caught.value) for told in (str(directory), "are free", "HardwareProfile(paths="))
    pair.step(pair.inner)
    pair.check()


def test_what_one_directory_has_no_room_for_goes_to_the_other(spill_dir, small_disk):
    pair = Pair(adamw, SHAPES * 2)
    with wrapped(pair.inner, small_disk(26), spill_dir) as optimizer:
        reserved = spilled(optimizer)
        assert sum(reserved) >= 48 * MIB
        pair.train(optimizer, 4)
        optimizer.flush()
        assert spilled(optimizer)[1] == reserved[1], "the drive with room had to grow during training"
        pair.check()


def test_more_parameters_take_more_room(spill_dir):
    with offloaded_pair(adamw, spill_dir, SHAPES) as (_, optimizer):
        before = spilled(optimizer)[0]
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]})
        assert spilled(optimizer)[0] - before >= 24 * MIB
