"""What profilers show: real traces of PyTorch's profiler."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_ssd
from lightning_ssd.common import profiling
from lightning_ssd.common.profiling import span, spanned
from tests.support.opened import offloader_in

PREFIX = "lightning_ssd::"


def traced(work):
    """Names of our ranges of all threads, by their begin, and of what each lies in."""
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, experimental_config=everywhere) as profile:
        work()
    events = [e for e in profile.events() if e.name.startswith(PREFIX)]
    assert all(e.time_range.end >= e.time_range.start for e in events)
    ours = [(e, ours_above(e)) for e in sorted(events, key=lambda e: e.time_range.start)]
    return [(e.name.removeprefix(PREFIX), above) for e, above in ours]


def ours_above(event):
    above = event.cpu_parent
    while above is not None and not above.name.startswith(PREFIX):
        above = above.cpu_parent
    return None if above is None else above.name.removeprefix(PREFIX)


def test_a_saved_tensor_on_its_way_down_and_up(spill_dir):
    x = torch.rand(64, 1024, requires_grad=True)
    with offloader_in(spill_dir, activations="offload", min_tensor_bytes=1024) as offloader:

        def train():
            with offloader.saved_tensors():
                y = (x * 2).sin()
            offloader.flush()
            y.sum().backward()
            offloader.end_backward()

        ranges = traced(train)
        assert offloader.stats.bytes_written
    names = [name for name, _ in ranges]
    assert names.index("begin") < names.index("write") < names.index("stall"), names
    assert {"begin", "write", "read", "stall"} == set(names)
    assert {above for _, above in ranges} == {None}, "one after the other in each thread"


@pytest.mark.usefixtures("small_subgroups")
def test_states_of_an_optimizer(spill_dir):
    model = nn.Linear(512, 512)
    with offloader_in(spill_dir, activations="keep", optimizer_states="offload") as offloader:
        optimizer = offloader.offload_optimizer(torch.optim.AdamW(model.parameters()))
        model(torch.rand(4, 512)).sum().backward()
        optimizer.step()
        ranges = traced(lambda: optimizer.step() and None)
    names = [name for name, _ in ranges]
    visits = [name for name in names if name in ("fetch", "update", "flush")]
    assert len(visits) > 3, visits
    assert visits == ["fetch", "update", "flush"] * (len(visits) // 3)
    assert {above for name, above in ranges if name in ("fetch", "update", "flush")} == {None}
    assert {"begin", "read", "write"} <= set(names)


def test_ranges_end_with_an_error():
    @spanned("lightning_ssd::outer")
    def fails():
        with span("lightning_ssd::inner"):
            raise ValueError("on purpose")

    def work():
        with pytest.raises(ValueError, match="on purpose"):
            fails()
        with span("lightning_ssd::after"):
            pass

    assert traced(work) == [("outer", None), ("inner", "outer"), ("after", None)]


def test_every_name_is_in_the_table():
    package = Path(lightning_ssd.__file__).parent
    used = {
        name
        for path in package.rglob("*.py")
        if path.name != "profiling.py"
        for name in re.findall(r'"lightning_ssd::(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert used == set(re.findall(r"``(?:lightning_ssd)?::(\w+)``", profiling.__doc__ or ""))
