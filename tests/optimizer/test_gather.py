"""Whole tensors of a sharded model on one process' drives, while its optimizer trains on."""

import contextlib
import copy
import gc
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.optimizer.checkpoint.gather import TensorSpool
from tests.support.faults import FaultyBackend, always, enospc, on_calls
from tests.support.helpers import assert_identical
from tests.support.optimizer_pairs import files_of, store_of, used_bytes, wrapped

SHAPES = ((256, 300), (3,), (7, 1025), (0, 5))


@contextmanager
def opened(*directories, fail_write=None):
    backends = []

    def wrap(backend):
        backends.append(FaultyBackend(backend))
        return backends[-1]

    hardware = HardwareProfile(paths=list(directories), allow_unsuitable_paths=True)
    with Offloader(
        policy=OffloadPolicy(optimizer_states="offload"), hardware=hardware, _wrap_backend=wrap
    ).open() as offloader:
        optimizer = offloader.offload_optimizer(torch.optim.AdamW([nn.Parameter(torch.randn(300, 200))]))
        step(optimizer)
        optimizer.flush()
        for backend in backends:
            backend.fail_write = fail_write
        yield optimizer


def step(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def spool_of(optimizer, nbytes):
    return TensorSpool(files_of(optimizer), store_of(optimizer), nbytes)


def tensors():
    return [torch.randn(shape).to(dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]


def test_tensors_have_their_bits_while_training_goes_on(tmp_path):
    expected = [tensor.t() if tensor.ndim == 2 else tensor for tensor in tensors()]
    with opened(tmp_path / "a", tmp_path / "b") as optimizer:
        before = used_bytes(optimizer)
        spool = spool_of(optimizer, sum(tensor.nbytes for tensor in expected))
        found = [spool.put(tensor) for tensor in expected]
        assert used_bytes(optimizer) > before
        for _ in range(3):  # what is given back and lent again must not be theirs
            step(optimizer)
            optimizer.flush()
        assert_identical(found, expected)
        assert all(tensor.is_contiguous() for tensor in found)
        assert spool.take_warning() is None
        del spool
        gc.collect()
        assert_identical(found, expected)
        del found
        gc.collect()
        step(optimizer)
        optimizer.flush()
        assert used_bytes(optimizer) == before


def test_files_grow_by_what_is_held_and_not_with_each_collection(tmp_path):
    nbytes = 64 << 20
    with opened(tmp_path / "a", tmp_path / "b") as optimizer:
        tier, sizes, held = files_of(optimizer).tier, [], []
        for is_held in (False, False, True, False):
            spool = spool_of(optimizer, nbytes)
            found = [spool.put(torch.ones(nbytes // 4))]
            sizes.append(tier.disk_bytes)
            held += found if is_held else []
            del spool, found
            gc.collect()
        assert sizes[0] == sizes[1] == sizes[2]
        assert nbytes <= sizes[3] - sizes[2] <= 2 * nbytes
        assert torch.equal(held[0], torch.ones(nbytes // 4))


def test_tensors_outlive_the_files(tmp_path):
    expected = tensors()
    with opened(tmp_path) as optimizer:
        spool = spool_of(optimizer, 0)
        found = [spool.put(tensor) for tensor in expected]
    assert_identical(found, expected)
    assert_identical([spool.put(tensor) for tensor in expected], expected)  # in memory: the files are closed
    assert spool.take_warning() is None


@pytest.mark.parametrize("fail", [always(enospc), on_calls([1, 2, 3], enospc)], ids=["all", "some"])
def test_what_no_drive_takes_stays_in_memory(tmp_path, fail):
    expected = tensors()
    with opened(tmp_path, fail_write=fail) as optimizer:
        spool = spool_of(optimizer, 0)
        found = [spool.put(tensor) for tensor in expected]
        assert_identical(found, expected)
        warning = spool.take_warning()
        assert warning is not None
        assert "bytes of full optimizer states are in memory, because no drive takes them" in warning
        assert spool.take_warning() is None


# -- whole tensors ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shard():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.distributed.destroy_process_group)
        yield DTensor.from_local(torch.randn(64, 8), init_device_mesh("cpu", (1,)), [Shard(0)])


@pytest.mark.parametrize("is_held", [False, True])
def test_sharded_states_can_be_copied(shard, spill_dir, is_held):
    """Wherever they lie in the memory of their subgroup."""
    parameters = [nn.Parameter(shard.repeat(20, 1)) for _ in range(2)]
    with wrapped(torch.optim.AdamW(parameters), spill_dir) as optimizer:
        for _ in range(2):
            step(optimizer)
        held = [optimizer.state[p] for p in parameters] if is_held else None
        saved = optimizer.state_dict()
        copied = copy.deepcopy(saved)["state"]
        for number, state in saved["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(copied[number][key].to_local(), state[key].to_local())
                assert copied[number][key].to_local().data_ptr() != state[key].to_local().data_ptr()
        del held
