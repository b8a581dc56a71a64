"""A storage that is saved in parts, which kernels outside of PyTorch may fill one after another."""

import pytest
import torch

from lightning_ssd.activations.saved_parts import SavedParts
from tests.support.helpers import KEEP, Setup, open_offloader

NUM = 1 << 14


def parts_of(tensor):
    return SavedParts(tensor.untyped_storage().nbytes(), tensor)


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
    ("first", "second", "covered"),
    [
        (lambda t: t, lambda t: t[1, 2:3], True),
        (lambda t: t[0], lambda t: t[1], False),
        (lambda t: t[:2], lambda t: t[1], True),
        (lambda t: t[1:], lambda t: t[1:].reshape(-1)[3:9], True),
        (lambda t: t[:, :2], lambda t: t[:, :2].t(), True),
        (lambda t: t[:, :2], lambda t: t[:, 2:4], False),
        (lambda t: t[:, :2], lambda t: t[:, 1:2], False),
        (lambda t: t[0], lambda t: t[:0], True),
        (lambda t: t[0].expand(7, 6), lambda t: t[0], True),
    ],
)
def test_what_a_part_shows(first, second, covered):
    whole = torch.zeros(4, 6)
    assert parts_of(first(whole)).covers(second(whole)) is covered


def test_a_gap_between_two_parts_is_seen():
    whole = torch.zeros(4, 6)
    parts = parts_of(whole[0])
    parts.add(whole[2])
    assert not parts.covers(whole[1])
    parts.add(whole[1])
    assert parts.covers(whole[:3])
    assert not parts.is_whole
    parts.add(whole[3])
    assert parts.is_whole
