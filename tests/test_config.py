"""Settings: sizes, bounds, messages."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd import (
    HardwareProfile,
    Offloader,
    OffloadMonitor,
    OffloadPolicy,
    SSDOffloadFabricStrategy,
    SSDOffloadFSDPStrategy,
    SSDOffloadStrategy,
)
from lightning_ssd.common.validation import parse_size
from lightning_ssd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(0, 0), (7, 7), ("7", 7), ("512KiB", 512 << 10), ("1.5 GiB", 3 << 29), ("20gb", 20 * 10**9), (" 1 MiB ", 1 << 20)],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@given(st.integers(0, 1 << 60))
def test_integers_are_bytes(nbytes):
    assert parse_size(nbytes) == parse_size(f"{nbytes}B" if nbytes < 1 << 50 else nbytes) == nbytes


@pytest.mark.parametrize(
    "wrong",
    [
        *(-1, "-1MiB", "1 XiB", "", "MiB", "1e3MiB", True, 1.5, None, "1MiB 2", "2Gbit/s", "/s", "9" * 400),
        *("50%", "4G", "4Gi", "3.5GB/s", "500MBps", "10Gbps", "600TBW"),
    ],
)
def test_other_sizes_are_refused(wrong):
    with pytest.raises(ConfigError, match=r'here=.*\. Write bytes as an integer, or text such as "512KiB", "1.5GiB"'):
        parse_size(wrong, name="here")


def test_defaults_are_valid_and_print_as_written():
    assert OffloadPolicy().min_tensor_nbytes == 1 << 20
    assert "min_tensor_bytes='4KiB'" in repr(OffloadPolicy(min_tensor_bytes="4KiB"))
    assert HardwareProfile().host_memory_nbytes is None
    assert HardwareProfile(host_memory=0).host_memory_nbytes == 0
    assert HardwareProfile(paths="/one").paths == ("/one",)
    assert HardwareProfile(paths=Path("/one")).paths == (Path("/one"),)
    assert HardwareProfile(paths=["/one", Path("/two")]).paths == ("/one", Path("/two"))
    assert HardwareProfile().drive_endurance_nbytes is None
    assert HardwareProfile(drive_endurance="600TB").drive_endurance_nbytes == 600 * 10**12
    assert HardwareProfile(drive_endurance=7).drive_endurance_nbytes == 7
    assert HardwareProfile().rates == (None, None)
    assert HardwareProfile(write_rate="3.5GB").rates == (3_500_000_000, None)
    assert HardwareProfile(read_rate=1).rates == (None, 1)
    assert OffloadPolicy().recompute_modules == ()
    assert OffloadPolicy().budget_nbytes == (None, None)
    assert OffloadPolicy().wear_bytes_per_day(10**12) is None
    OffloadPolicy(max_slowdown=1, min_tensor_bytes=0)
    OffloadPolicy(max_slowdown=1e9, min_tensor_bytes="1PiB")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"activations": "ssd"},
            r"OffloadPolicy.activations='ssd' is not possible\. Write one of 'auto', 'offload', 'keep', 'recompute',",
        ),
        (
            {"activations": "Offlaod"},
            r"activations='Offlaod' is not possible\. Did you mean 'offload'\? Write one of 'auto', 'offload'",
        ),
        ({"verify": True}, r"OffloadPolicy.verify=True is not possible\. Write one of 'off', 'sampled', 'full'"),
        ({"master_weights": "yes"}, r"OffloadPolicy.master_weights='yes' is not possible\. Write one of False, True"),
        (
            {"master_weights": True},
            r"master_weights=True with optimizer_states='keep' would be ignored, .*\. Write optimizer_states='offload'",
        ),
        ({"verify": "some"}, r"OffloadPolicy.verify='some' is not possible\. Write one of 'off', 'sampled', 'full'"),
        ({"max_slowdown": 0.99}, r"OffloadPolicy.max_slowdown=0.99 is no ratio\. Write a finite number of at least 1"),
        ({"max_slowdown": float("nan")}, r"max_slowdown=nan"),
        ({"max_slowdown": True}, r"max_slowdown=True"),
        ({"min_tensor_bytes": "big"}, r"OffloadPolicy.min_tensor_bytes='big' is not a size"),
        ({"memory_budget": 0}, r"memory_budget=0 leaves no memory"),
        (
            {"memory_budget": "20"},
            r"memory_budget='20' is less than any process takes: .* counts bytes\. Write .* such as \"20GiB\"",
        ),
        ({"memory_budget": (1 << 20) - 1}, r"memory_budget=1048575 is less than any process takes"),
        ({"activation_budget": "0GiB"}, r"OffloadPolicy.activation_budget='0GiB' leaves no memory"),
        ({"activation_budget": "50%"}, r"'50%' is not a size\. Write bytes"),
        ({"activation_budget": "much"}, r"OffloadPolicy.activation_budget='much' is not a size"),
        ({"wear_budget": "often"}, r"wear_budget='often' is not a size\. Write .*, or .* such as \"1.0DWPD\"$"),
        ({"wear_budget": "1 DWP"}, r"wear_budget='1 DWP' is not a size\. Write .*, or .* such as \"1.0DWPD\"$"),
        ({"wear_budget": True}, r"wear_budget=True is a bool"),
        ({"wear_budget": 0}, r"OffloadPolicy.wear_budget=0 lets nothing be written\. Write None or a size above 0"),
        ({"wear_budget": "0.0DWPD"}, r"wear_budget='0.0DWPD' lets nothing be written\. Write .*1.0DWPD"),
        ({"wear_budget": "9" * 400 + "DWPD"}, r"DWPD' is not finite\. Write .*1.0DWPD"),
        ({"wear_budget": "-1DWPD"}, r"wear_budget='-1DWPD' is not a size"),
        (
            {"recompute_modules": "torch.nn.Linear"},
            r"recompute_modules contains 'torch.nn.Linear', which is no class name\. Write names of c",
        ),
        ({"recompute_modules": ["Block", ""]}, r"recompute_modules contains ''"),
        ({"recompute_modules": [3]}, r"recompute_modules contains 3"),
        ({"recompute_modules": ("blocks", "Block")}, r"names classes besides \"blocks\".*\. Write either"),
        ({"recompute_modules": 3}, r"OffloadPolicy.recompute_modules=3 is a int\. Write names of classes"),
        ({"recompute_modules": None}, r"recompute_modules=None is a NoneType\. Write names of classes"),
        ({"recompute_modules": b"Block"}, r"recompute_modules=b'Block' is a bytes"),
    ],
)
def test_policy_messages(setting, message):
    with pytest.raises(ConfigError, match=message):
        OffloadPolicy(**setting)


@pytest.mark.parametrize("activations", ["offload", "keep", "recompute", "recompute_offload"])
@pytest.mark.parametrize("budget", ["memory_budget", "activation_budget", "wear_budget"])
def test_a_budget_that_no_plan_would_keep_is_refused(activations, budget):
    message = rf"{budget}='1GiB' with activations='{activations}' would be ignored, .*\. Write activations='auto'"
    with pytest.raises(ConfigError, match=message):
        OffloadPolicy(activations=activations, **{budget: "1GiB"})
    OffloadPolicy(activations="auto", **{budget: "1GiB"})
    OffloadPolicy(activations=activations)


@pytest.mark.parametrize("activations", ["offload", "keep"])
def test_blocks_that_are_never_recomputed_are_refused(activations):
    message = (
        rf"recompute_modules=\('Block',\) with activations='{activations}' would be ignored, .*\. Write .*'recompute"
    )
    with pytest.raises(ConfigError, match=message):
        OffloadPolicy(activations=activations, recompute_modules="Block")


@pytest.mark.parametrize("activations", ["auto", "recompute", "recompute_offload"])
@pytest.mark.parametrize("names", ["Block", ["Block"], ("Block",)], ids=str)
def test_blocks_to_recompute_become_a_tuple(activations, names):
    assert OffloadPolicy(activations=activations, recompute_modules=names).recompute_modules == ("Block",)


def test_budgets_are_read_as_sizes():
    assert OffloadPolicy(memory_budget=1 << 20).memory_budget == 1 << 20
    both = OffloadPolicy(memory_budget="20GiB", activation_budget=7)
    assert both.budget_nbytes == (20 << 30, 7)
    assert "memory_budget='20GiB'" in repr(both)
    assert OffloadPolicy(activation_budget="1KiB").budget_nbytes == (None, 1024)


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [("1.0DWPD", 10**12), (" 0.3 dwpd ", 3 * 10**11), ("2GB", 2 * 10**9), (5, 5), (".5DWPD", 5 * 10**11)],
)
def test_a_wear_budget_is_bytes_or_drive_writes_per_day(budget, nbytes):
    assert OffloadPolicy(wear_budget=budget).wear_bytes_per_day(10**12) == nbytes


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"backend": "aio"},
            r"HardwareProfile.backend='aio' is not possible\. Write one of 'auto', 'cufile', 'kvikio', 'posix'",
        ),
        ({"host_memory": "lots"}, r"HardwareProfile.host_memory='lots' is not a size\. Write .*, or \"auto\"$"),
        ({"paths": [""]}, r"HardwareProfile.paths contains ''"),
        ({"paths": [3]}, r"HardwareProfile.paths contains 3"),
        ({"paths": 3}, r"HardwareProfile.paths=3 is a int\. Write directory names, one per drive"),
        ({"paths": "/mnt/a:/mnt/b"}, r"paths: '/mnt/a:/mnt/b' would be one directory of that name\. Write .*\["),
        ({"paths": ["/mnt/a, /mnt/b"]}, r"paths: '/mnt/a, /mnt/b' would be one directory"),
        ({"paths": ["/mnt/a", "~/b;~/c"]}, r"paths: '~/b;~/c' would be one directory"),
        ({"paths": "s3://bucket"}, r"paths: 's3://bucket' would be one directory"),
        ({"paths": ["$SCRATCH/a"]}, r"paths: '\$SCRATCH/a' would be one directory"),
        ({"paths": None}, r"HardwareProfile.paths=None is a NoneType\. Write directory names"),
        (
            {"drive_endurance": 0},
            r"HardwareProfile.drive_endurance=0 lets nothing be written\. Write None or a size above 0",
        ),
        ({"drive_endurance": "long"}, r"HardwareProfile.drive_endurance='long' is not a size"),
        ({"write_rate": 0}, r"HardwareProfile.write_rate=0 moves nothing\. Write None or a size above 0"),
        ({"read_rate": "fast"}, r"HardwareProfile.read_rate='fast' is not a size"),
        ({"allow_unsuitable_paths": "yes"}, r"allow_unsuitable_paths='yes' is not possible\. Write True or False"),
    ],
)
def test_hardware_messages(setting, message):
    with pytest.raises(ConfigError, match=message):
        HardwareProfile(**setting)


@pytest.mark.parametrize(
    "cls",
    [
        *(OffloadPolicy, HardwareProfile, Offloader, OffloadMonitor),
        *(SSDOffloadStrategy, SSDOffloadFSDPStrategy, SSDOffloadFabricStrategy),
    ],
)
def test_what_is_no_setting_is_refused_as_python_refuses_it(cls):
    with pytest.raises(TypeError, match="unexpected keyword argument 'polcy'"):
        cls(polcy=None)
    with pytest.raises((TypeError, ConfigError), match=r"positional argument|policy=5 is a int"):
        cls(5)


def test_directories_that_only_look_odd_are_taken():
    names = ("/mnt/a:b", "/mnt/run 12:30:00", "relative", "~/a", "/a/$b", "/a,b")
    assert HardwareProfile(paths=names).paths == names


@pytest.mark.parametrize(
    ("activations", "names", "expected"),
    [
        ("auto", (), None),
        ("auto", "blocks", ()),
        ("auto", "Block", ("Block",)),
        ("recompute", (), ()),
        ("recompute_offload", "blocks", ()),
        ("recompute", ["One", "Two"], ("One", "Two")),
        ("offload", (), None),
    ],
)
def test_what_may_be_recomputed(activations, names, expected):
    assert OffloadPolicy(activations=activations, recompute_modules=names).recomputable_classes == expected
