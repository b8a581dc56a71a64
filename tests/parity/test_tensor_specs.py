"""Every kind of strided tensor comes back as it was: bytes, dtype, shape, strides, offset, conjugate bit ..."""

import pytest
import torch

from tests.parity.saved_programs import held
from tests.support.helpers import (
    DRAINED,
    EAGER,
    Session,
    Setup,
    assert_identical,
    assert_same,
    moved,
    open_offloader,
    raw_bytes,
)


def noise(*shape, dtype=torch.float32):
    """A tensor of random bytes, so that NaN payloads, denormals and negative zeros occur. Booleans are 0 or 1."""
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    count = int(torch.tensor(shape).prod()) * dtype.itemsize
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-count // 8),))  # eight bytes at once
    return drawn.view(torch.uint8)[:count].clone().view(dtype).view(shape)


def strided(base, size, stride, offset=0):
    return base.as_strided(size, stride, offset)


TENSORS = {
    "contiguous": lambda: noise(65, 129),
    "one element": lambda: noise(1),
    "0-dim": lambda: noise(1)[0],
    "0-dim inside a large storage": lambda: noise(4099)[4001],
    "zero size": lambda: torch.empty(0, 5),
    "zero size view of a large storage": lambda: noise(64, 64)[:0],
    "transposed": lambda: noise(65, 129).t(),
    "permuted": lambda: noise(5, 6, 17, 18).permute(2, 0, 3, 1),
    "channels-last": lambda: noise(2, 15, 9, 31).contiguous(memory_format=torch.channels_last),
    "channels-last-3d": lambda: noise(2, 3, 14, 15, 6).contiguous(memory_format=torch.channels_last_3d),
    "chunk 0": lambda: noise(47, 3 * 40).chunk(3, dim=-1)[0],
    "chunk 2": lambda: noise(47, 3 * 40).chunk(3, dim=-1)[2],
    "every other element": lambda: noise(9, 128)[:, 1::2],
    "expanded": lambda: noise(1, 130).expand(70, 130),
    "expanded scalar": lambda: noise(1).expand(1000, 3),
    "broadcast in the middle": lambda: noise(4, 1, 6).expand(4, 50, 6),
    "overlapping as_strided": lambda: strided(noise(10_000), (9000, 10), (1, 1), 1),
    "as_strided with holes": lambda: strided(noise(5000), (10, 10), (403, 7), 11),
    "diagonal": lambda: noise(64, 64).diagonal(),
    "unfold": lambda: noise(256).unfold(0, 16, 3),
    "small view of a large storage": lambda: noise(100_003)[77:81],
    "ends one byte past a block": lambda: noise(4097, dtype=torch.uint8),
    "ends one byte before a block": lambda: noise(4095, dtype=torch.uint8),
    "just a block": lambda: noise(4096, dtype=torch.uint8),
    "misaligned start": lambda: noise(20_001, dtype=torch.uint8)[3:],
    "from numpy memory": lambda: torch.from_numpy(noise(999, 3).numpy().copy())[1:],
    "from a Python buffer": lambda: torch.frombuffer(bytearray(range(256)) * 40, dtype=torch.int16, offset=6),
    "complex": lambda: noise(65, 33, dtype=torch.complex64),
    "complex128": lambda: noise(65, 33, dtype=torch.complex128),
    "conjugate": lambda: noise(65, 33, dtype=torch.complex64).conj(),
    "conjugate transposed": lambda: noise(65, 33, dtype=torch.complex64).mH,
    "negative bit": lambda: noise(65, 33, dtype=torch.complex64).conj().imag,
    "real part": lambda: noise(65, 33, dtype=torch.complex64).real,
    "view as another dtype": lambda: noise(64, 64).view(torch.int16)[:, 3:],
    "resized storage": lambda: noise(10, 10).resize_(3, 3),
} | {
    str(dtype): lambda dtype=dtype: noise(137, 153, dtype=dtype)
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint64,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex32,
    )
}


def description(tensor):
    """All that a kernel may depend on besides the bytes."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.layout,
        tensor.device,
        tensor.untyped_storage().nbytes(),
    )


def bits(tensor):
    """Bytes in logical order, also for dtypes that few kernels know."""
    if tensor.is_conj() or tensor.is_neg():
        return raw_bytes(tensor)
    itemsize = tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    count = whole.numel() // itemsize
    if tensor.is_contiguous():
        return whole[tensor.storage_offset() * itemsize :][: tensor.numel() * itemsize].view(-1, itemsize)
    positions = torch.arange(count).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return whole[: count * itemsize].view(count, itemsize)[positions.reshape(-1)]


def holding(make):
    return held(make, lambda tensor: (description(tensor), bits(tensor).clone()))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_comes_back_as_it_was(name, tmp_path):
    # A block at each end stays in memory; only what is larger has bytes to move.
    moves = TENSORS[name]().untyped_storage().nbytes() >= 3 * 4096
    assert_same(holding(lambda: (TENSORS[name](),)), tmp_path, setups=[DRAINED, EAGER], moves=moves)


def test_comparison_sees_one_wrong_bit():
    tensor = TENSORS["as_strided with holes"]()
    changed = tensor.clone()
    changed[3, 4] = -tensor[3, 4]
    with pytest.raises(AssertionError, match="the bits differ"):
        assert_identical(bits(changed), bits(tensor))


def test_all_together_share_what_they_share(tmp_path):
    """Many views of one storage in one node, beside views of others."""

    def make():
        one, other = noise(64, 3 * 64), noise(64, 64, dtype=torch.complex64)
        return (
            *one.chunk(3, dim=-1),
            one.t(),
            one[5],
            one.view(torch.int32),
            other,
            other.conj(),
            other.real,
            other.conj().imag,
        )

    assert_same(holding(make), tmp_path)


def test_random_sizes_and_offsets(tmp_path):
    """Some hundred storages around block borders; each checked with a full checksum as well."""

    def make():
        generator = torch.Generator().manual_seed(5)
        made = []
        for _ in range(150):
            size, start = (int(torch.randint(1, high, (1,), generator=generator)) for high in (20_000, 600))
            made.append(noise(size + start, dtype=torch.uint8)[start:])
        return tuple(made)

    assert_same(holding(make), tmp_path, setups=[DRAINED, Setup(verify="full"), Setup(verify="sampled")])


def test_large_storages(tmp_path):
    """More than one request of the tier each."""
    sizes = (33 << 20, (16 << 20) + 64, (16 << 20) - 4, 5_000_001)
    assert_same(holding(lambda: tuple(noise(n, dtype=torch.uint8) for n in sizes)), tmp_path)


def test_a_view_moves_its_storage_once(tmp_path):
    """Three chunks and a transposed view: one write, one read."""
    with open_offloader(tmp_path) as offloader:

        def make():
            qkv = noise(64, 3 * 64)
            return (*qkv.chunk(3, dim=-1), qkv.t())

        holding(make)(Session(offloader, drained=True))
        stats = offloader.stats
        nbytes = 64 * 3 * 64 * 4
        assert stats.num_saved == 1
        assert stats.bytes_saved == nbytes
        assert nbytes - 8192 <= stats.bytes_written <= nbytes
        assert nbytes - 8192 <= moved(stats) <= nbytes
