"""Settings: sizes, bounds, messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd import HardwareProfile, OffloadPolicy
from lightning_ssd.config import parse_size
from lightning_ssd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(0, 0), (7, 7), ("7", 7), ("512KiB", 512 << 10), ("1.5 GiB", 3 << 29), ("20gb", 20 * 10**9), (" 1 MiB ", 1 << 20)],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@given(st.integers(0, 1 << 60))
def test_integers_are_bytes(nbytes: int) -> None:
    assert parse_size(nbytes) == parse_size(f"{nbytes}B" if nbytes < 1 << 50 else nbytes) == nbytes


@pytest.mark.parametrize("wrong", [-1, "-1MiB", "1 XiB", "", "MiB", "1e3MiB", True, 1.5, None, "1MiB 2"])
def test_other_sizes_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"here=.*allowed: bytes"):
        parse_size(wrong, name="here")


def test_defaults_are_valid_and_print_as_written() -> None:
    assert OffloadPolicy().min_tensor_nbytes == 1 << 20
    assert "min_tensor_bytes='4KiB'" in repr(OffloadPolicy(min_tensor_bytes="4KiB"))
    assert HardwareProfile().host_memory_nbytes is None
    assert HardwareProfile(host_memory=0).host_memory_nbytes == 0
    assert HardwareProfile(paths="/one").paths == ("/one",)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"activations": "ssd"}, r"OffloadPolicy.activations='ssd'; allowed: 'auto', 'offload', 'keep'"),
        ({"verify": "some"}, r"OffloadPolicy.verify='some'; allowed: 'off', 'sampled', 'full'"),
        ({"max_slowdown": 0.99}, r"OffloadPolicy.max_slowdown=0.99; allowed: a number of at least 1"),
        ({"max_slowdown": float("nan")}, r"max_slowdown=nan"),
        ({"max_slowdown": True}, r"max_slowdown=True"),
        ({"min_tensor_bytes": "big"}, r"OffloadPolicy.min_tensor_bytes='big' is not a size"),
        ({"memory_budget": 0}, r"memory_budget=0 leaves no memory"),
        ({"memory_budget": "20GiB"}, r"memory_budget='20GiB' needs the planner"),
        ({"activation_budget": "1GiB"}, r"activation_budget='1GiB' needs the planner"),
        ({"wear_budget": "1.0DWPD"}, r"wear_budget='1.0DWPD' needs the planner"),
        ({"wear_budget": "often"}, r"wear_budget='often' is not a size"),
        ({"optimizer_states": "offload"}, r"optimizer_states='offload' is not built yet"),
    ],
)
def test_policy_messages(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadPolicy(**setting)


def test_policy_bounds() -> None:
    OffloadPolicy(max_slowdown=1, min_tensor_bytes=0)
    OffloadPolicy(max_slowdown=1e9, min_tensor_bytes="1PiB")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"backend": "aio"}, r"HardwareProfile.backend='aio'; allowed: 'auto', 'kvikio', 'posix'"),
        ({"host_memory": "lots"}, r"HardwareProfile.host_memory='lots' is not a size"),
        ({"paths": [""]}, r"HardwareProfile.paths contains ''"),
        ({"paths": [3]}, r"HardwareProfile.paths contains 3"),
        ({"allow_unsuitable_paths": "yes"}, r"allow_unsuitable_paths='yes'; allowed: True, False"),
    ],
)
def test_hardware_messages(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HardwareProfile(**setting)
