"""A storage that is saved in parts, which kernels outside of PyTorch may fill one after another."""

import pytest
import torch

from lightning_ssd.activations.saved_storage import shows_all
from tests.support.helpers import KEEP, Setup, open_offloader

NUM = 1 << 14


@pytest.mark.parametrize("activations", ["offload", "keep"])
@pytest.mark.parametrize("flushed", [True, False])
def test_what_is_filled_after_another_part_was_saved(activations, flushed, tmp_path):
    """NumPy counts no version, as kernels of Triton and of extensions do not."""
    a, b = (torch.rand(NUM).requires_grad_() for _ in "ab")
    with open_offloader(tmp_path, Setup(min_tensor_bytes=0) if activations == "offload" else KEEP) as offloader:
        with offloader.saved_tensors():
            buffer = torch.zeros(2, NUM)
            memory = buffer.numpy()
            memory[0] = 3
            first = (a * buffer[0]).sum()
            if flushed:
                offloader.flush()
            memory[1] = 5
            second = (b * buffer[1]).sum()
        del buffer, memory
        offloader.flush()
        (first + second).backward()
    assert torch.equal(a.grad, torch.full((NUM,), 3.0))
    assert torch.equal(b.grad, torch.full((NUM,), 5.0))


def test_parts_of_one_result_are_written_once(tmp_path):
    """Queries, keys and values are saved one after another; the drive may be faster than Python."""
    x = torch.rand(64, 3 * 64, requires_grad=True)
    with open_offloader(tmp_path, Setup(min_tensor_bytes=0)) as offloader:
        with offloader.saved_tensors():
            q, k, v = (x * 1).split(64, dim=1)
            loss = q.sin().sum() + k.sin().sum() + v.sin().sum()
            del q, k, v
            loss = loss + x.exp().sum()
        offloader.flush()
        assert offloader.stats.num_saved == 2
        loss.backward()


def test_a_part_leaves_when_nobody_else_holds_it(tmp_path):
    x = torch.rand(512, 1024, requires_grad=True)
    with open_offloader(tmp_path, Setup(min_tensor_bytes=0)) as offloader, offloader.saved_tensors():
        whole = x * 1
        loss = whole[:, :512].sin().sum()
        cache = offloader._opened()
        assert not cache.accounting.writes, "who holds it may still fill and save the rest"
        del whole
        loss = loss + x.exp().sum()
        tier = cache._tiers.ssd
        tier.flush()
        assert offloader.stats.bytes_written > x.nbytes


@pytest.mark.parametrize(
    ("view", "whole"),
    [
        (lambda t: t, True),
        (lambda t: t.t(), True),
        (lambda t: t.view(4, 2, 1, 3).permute(3, 2, 0, 1), True),
        (lambda t: t[1:], False),
        (lambda t: t[:, :2], False),
        (lambda t: t[0].expand(4, 6), False),
        (lambda t: t.as_strided((4, 6), (1, 1)), False),
    ],
)
def test_what_shows_all_of_a_storage(view, whole):
    assert shows_all(view(torch.zeros(4, 6)), 4 * 6 * 4) is whole
