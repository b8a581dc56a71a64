"""Sizes of one sentence have one unit, and one of something is one."""

import pytest

from lightning_ssd.common.formatting import as_setting, format_sizes, pluralize
from lightning_ssd.common.validation import parse_size

MIB, GIB, GB = 1 << 20, 1 << 30, 10**9


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((GIB, 0), ["1.00 GiB", "0.00 GiB"]),
        ((GIB, MIB, GIB // 2), ["1.00 GiB", "<0.01 GiB", "0.50 GiB"]),
        ((GIB, 6 * MIB, 5 * MIB), ["1.00 GiB", "0.01 GiB", "<0.01 GiB"]),
        ((102 * MIB, MIB // 50), ["102.0 MiB", "<0.1 MiB"]),
        ((103 * MIB,), ["0.10 GiB"]),
        ((0, 0), ["0.0 MiB", "0.0 MiB"]),
        ((5000 * GIB,), ["5,000.00 GiB"]),
        ((50 * GB, 400 * GB), ["0.05 TB", "0.40 TB"]),  # drives are sold in powers of ten
        ((50 * GB, 2 * GB), ["50.00 GB", "2.00 GB"]),
        ((50_000_000, 2_000_000), ["50.0 MB", "2.0 MB"]),
    ],
)
def test_the_largest_one_chooses_the_unit(sizes, texts):
    assert format_sizes(*sizes, decimal="iB" not in texts[0]) == texts


def test_one_is_one():
    assert [pluralize(n, "pass", "passes") for n in (0, 1, 2)] == ["0 passes", "1 pass", "2 passes"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0"),
        (100_000, "100000"),
        (1 << 20, '"1MiB"'),
        (3 << 19, '"1536KiB"'),
        ((100 << 20) + 1, '"102401KiB"'),
        (1 << 30, '"1GiB"'),
        ((4082 << 20) + 1, '"4083MiB"'),
        (2000 << 30, '"2000GiB"'),
    ],
)
def test_a_size_can_be_given_back_as_a_setting(nbytes, text):
    assert as_setting(nbytes) == text
    assert nbytes <= parse_size(text.strip('"')) <= 1.001 * nbytes
