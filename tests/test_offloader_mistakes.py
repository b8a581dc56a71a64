"""What users forget or mix up in a plain loop, and what they are told."""

import tempfile

import pytest
import torch
from torch import nn

from lightning_ssd import (
    HardwareProfile,
    OffloadCallback,
    Offloader,
    OffloadPolicy,
    SSDOffloadFabricStrategy,
    SSDOffloadFSDPStrategy,
    SSDOffloadStrategy,
)
from lightning_ssd._assembly import _warn_of_page_faults
from lightning_ssd.errors import ConfigError, UnsuitablePathError
from tests.support.offloader_steps import OFFLOAD_ALL, step


def forgetful(offloader, num_passes, *, end_each=1 << 30):
    x = torch.randn(300, 300, requires_grad=True)
    for index in range(num_passes):
        with offloader.saved_tensors():
            loss = x.exp().sin().cos().tanh().sum()
        loss.backward()
        if (index + 1) % end_each == 0:
            offloader.end_backward()
    with torch.no_grad(), offloader.saved_tensors():
        x.exp().sin()


def test_backwards_that_nobody_ends_are_told_of_once(spill_dir):
    hardware = HardwareProfile(paths=spill_dir)
    with Offloader(policy=OffloadPolicy(min_tensor_bytes=0), hardware=hardware) as offloader:
        with pytest.warns(
            UserWarning, match=r"^8 passes have run, and end_backward\(\) was never called, so"
        ) as caught:
            forgetful(offloader, 30)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert "Call offloader.end_backward() after each loss.backward()" in str(caught[0].message)
        forgetful(offloader, 300)
        assert len(offloader._cache._passes._finished) <= 256


def test_whoever_ends_backwards_is_told_nothing(spill_dir):
    hardware = HardwareProfile(paths=spill_dir)
    with Offloader(policy=OffloadPolicy(min_tensor_bytes=0), hardware=hardware) as offloader:
        forgetful(offloader, 30, end_each=4)
    with Offloader(policy=OFFLOAD_ALL, hardware=hardware) as offloader:  # plans nothing
        forgetful(offloader, 30)
    with Offloader(policy=OffloadPolicy(min_tensor_bytes=0), hardware=hardware) as offloader:
        x = torch.randn(300, 300, requires_grad=True)
        for _ in range(30):  # forwards alone
            with offloader.saved_tensors():
                x.exp().sin()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_slowdown": 1.5, "activation_budget": "1MiB"}, "beside a budget"),
        ({"max_slowdown": 1.5, "memory_budget": "8GiB"}, "beside a budget"),
        ({"max_slowdown": 1.5, "activations": "offload"}, "with activations='offload'"),
        ({"activation_budget": "1MiB"}, None),
        ({"activations": "offload"}, None),
        ({"max_slowdown": 1.5}, None),
    ],
)
def test_a_slowdown_without_effect_is_told_of(settings, told, spill_dir, caplog):
    with Offloader(policy=OffloadPolicy(**settings), hardware=HardwareProfile(paths=spill_dir)):
        pass
    assert caplog.text.count("has no effect") == (told is not None)
    if told is not None:
        assert f"max_slowdown=1.5 has no effect {told}" in caplog.text


STATES = OffloadPolicy(activations="keep", optimizer_states="offload")


def test_an_optimizer_that_was_never_offloaded_is_told_of(spill_dir):
    offloader = Offloader(policy=STATES, hardware=HardwareProfile(paths=spill_dir)).open()
    step(offloader)
    with pytest.warns(UserWarning, match=r"moved nothing.*offloader\.offload_optimizer\(optimizer\) before") as caught:
        offloader.close()
    assert len(caught) == 1
    offloader.close()
    with offloader:
        step(offloader)


def test_an_optimizer_that_is_stepped_past_the_wrapper_is_told_of(spill_dir):
    parameter = torch.nn.Parameter(torch.ones(9))
    optimizer = torch.optim.Adam([parameter])
    offloader = Offloader(policy=STATES, hardware=HardwareProfile(paths=spill_dir)).open()
    offloader.offload_optimizer(optimizer)  # and what it returns is dropped
    step(offloader)
    parameter.grad = torch.ones(9)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"moved nothing.* and use what it returns"):
        offloader.close()


def test_nothing_is_told_where_no_optimizer_was_missed(spill_dir):
    hardware = HardwareProfile(paths=spill_dir)
    with Offloader(policy=STATES, hardware=hardware):
        pass
    parameter = torch.nn.Parameter(torch.ones(9))
    with Offloader(policy=STATES, hardware=hardware) as offloader:
        optimizer = offloader.offload_optimizer(torch.optim.Adam([parameter]))
        step(offloader)
        parameter.grad = torch.ones(9)
        optimizer.step()
    with offloader:  # once more, for its gradients alone
        step(offloader)
    with Offloader(policy=STATES, hardware=hardware) as offloader:
        offloader.offload_optimizer(torch.optim.Adam([parameter]))
        step(offloader)  # fewer batches than are accumulated
    with Offloader(policy=STATES, hardware=hardware) as offloader:
        offloader.expect_no_optimizer()
        step(offloader)
    with Offloader(policy=STATES, hardware=hardware) as offloader:
        no_parameters = torch.optim.Adam([{"params": []}])
        assert offloader.offload_optimizer(no_parameters) is no_parameters
        step(offloader)
    with Offloader(policy=OFFLOAD_ALL, hardware=hardware) as offloader:
        step(offloader)
    offloader = Offloader(policy=STATES, hardware=hardware).open()
    step(offloader)
    offloader.abort()  # something else has failed
    offloader.close()


@pytest.mark.parametrize("wrong", [{"policy": "offload"}, {"hardware": "/tmp"}])
def test_wrong_types_say_what_to_write(wrong):
    with pytest.raises(ConfigError, match=r"for example (OffloadPolicy|HardwareProfile)"):
        Offloader(**wrong)


def test_what_is_no_module_or_no_optimizer_is_refused(spill_dir):
    model = torch.nn.Linear(2, 2)
    with Offloader(policy=STATES, hardware=HardwareProfile(paths=spill_dir)) as offloader:
        with pytest.raises(ConfigError, match=r"a generator is no module; give a torch\.nn\.Module, for example"):
            offloader.register_module(model.parameters())
        with pytest.raises(ConfigError, match=r"a OffloadPolicy is no module"):
            offloader.open(STATES)
        for wrong in (model, model.parameters()):
            with pytest.raises(
                ConfigError, match=r"^optimizer=.*\. Pass .* type Optimizer, for example torch\.optim\.AdamW"
            ):
                offloader.offload_optimizer(wrong)


def test_a_variable_with_several_directories_in_one_name_is_refused(spill_dir, monkeypatch):
    monkeypatch.setenv("LIGHTNING_SSD_PATHS", f"{spill_dir}/a,{spill_dir}/b")
    with pytest.raises(
        ConfigError, match=r"^\$LIGHTNING_SSD_PATHS: .* would be one directory of that name\. Write .*:"
    ):
        Offloader().open()
    assert not list(spill_dir.iterdir())
    with Offloader(hardware=HardwareProfile(paths=spill_dir)):
        pass  # the profile comes before the variable


def test_a_policy_needs_no_name(spill_dir):
    """The most natural line to write."""
    strategies = (SSDOffloadStrategy, SSDOffloadFSDPStrategy, SSDOffloadFabricStrategy, Offloader, OffloadCallback)
    for make in strategies:
        assert make(OFFLOAD_ALL).policy == OFFLOAD_ALL
    with pytest.raises(ConfigError, match=r"In Hydra write lightning_ssd/offload=ssd"):
        SSDOffloadStrategy("ssd")


def test_a_directory_whose_parent_is_missing_is_refused(monkeypatch, spill_dir):
    """Where a drive is to be mounted, the name alone would be made on the system's drive."""
    for variable in ("HOME", "TMPDIR"):
        monkeypatch.setenv(variable, str(spill_dir / "home"))
    (spill_dir / "home").mkdir()
    monkeypatch.chdir(spill_dir / "home")
    monkeypatch.setattr(tempfile, "tempdir", None)
    far = spill_dir / "mnt" / "nvme0" / "spill"
    with pytest.raises(
        UnsuitablePathError, match=rf"{far} is missing, and so is {spill_dir / 'mnt'}: is the drive mou"
    ):
        Offloader(OFFLOAD_ALL, hardware=HardwareProfile(paths=far)).open()
    assert not (spill_dir / "mnt").exists()
    for near in (spill_dir / "mnt", spill_dir / "home" / "a" / "b"):
        with Offloader(OFFLOAD_ALL, hardware=HardwareProfile(paths=near)):
            assert near.is_dir()


def test_the_switch_that_makes_moving_cheap_is_named_once(monkeypatch, spill_dir, caplog):
    told = "on this CPU run, start Python with THP_MEM_ALLOC_ENABLE=1"
    hardware = HardwareProfile(paths=spill_dir)
    for value, count in (("0", 0), (None, 1), (None, 1)):
        if count != 1 or not caplog.records:
            _warn_of_page_faults.cache_clear()
        if value is None:
            monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
        with Offloader(OFFLOAD_ALL, hardware=hardware):
            pass
        warned = [r for r in caplog.records if told in r.getMessage() and r.levelname == "WARNING"]
        assert len(warned) == count


# -- blocks that belong to the compiler --------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)


def compiled_in_place():
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.compile(backend="eager")
    return model


def compiled_as_a_whole():
    model = nn.Sequential(Block(), Block())
    model.compile(backend="eager")
    return model


def compiled_in_wrappers():
    return nn.Sequential(*(torch.compile(Block(), backend="eager") for _ in range(3)))


def compiled_within():
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.inner.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("build", "compiled", "classes", "activations"),
    [
        (compiled_in_place, "2 Block", ("Block",), "recompute"),
        (compiled_as_a_whole, "1 Sequential", (), "recompute_offload"),
        (compiled_in_wrappers, "3 Block", "blocks", "recompute"),
    ],
)
def test_compiled_blocks_are_named_as_the_cause(build, compiled, classes, activations, spill_dir):
    policy = OffloadPolicy(activations=activations, recompute_modules=classes)
    with Offloader(policy=policy, hardware=HardwareProfile(paths=spill_dir)) as offloader:
        told = rf"but compiled or scripted ones \({compiled}\), .*\. Compile modules within .*activations='offload'"
        with pytest.raises(ConfigError, match=told):
            offloader.register_module(build())
        offloader.register_module(compiled_within())  # what the message advises


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_model_elsewhere_than_the_offloader_is_refused(kind, spill_dir, monkeypatch):
    refusal = f"Linear is on a device of type '{kind}', and .* opened for the CPU"
    with Offloader(policy=OFFLOAD_ALL, hardware=HardwareProfile(paths=spill_dir)) as offloader:
        monkeypatch.setattr("lightning_ssd.offloader.device_of", lambda modules: torch.device(kind))
        with pytest.raises(ConfigError, match=refusal):
            offloader.register_module(nn.Linear(2, 2))
