"""The device path's ordering, tested without a device: copies that end late, on streams of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.support.late import LateCopies, late_copies


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(320, 320), torch.nn.GELU()) for _ in range(6)))


def train(offloader: Offloader | None, *, steps: int = 3, drained: bool = True) -> list[torch.Tensor]:
    module, results = model(), []
    batch = torch.randn(64, 320, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        if offloader is None:
            loss = module(batch).square().mean()
        else:
            with offloader.saved_tensors():
                loss = module(batch).square().mean()
            if drained:
                offloader.flush()
        loss.backward()
        if offloader is not None:
            offloader.end_backward()
        results += [parameter.grad.clone() for parameter in module.parameters()]
    return results


def offloader(directory: Path, copies: LateCopies, *, verify: str = "off") -> Offloader:
    return Offloader(
        policy=OffloadPolicy(activations="offload", min_tensor_bytes=0, verify=verify),
        hardware=HardwareProfile(paths=directory),
        _copies=copies,
    )


@pytest.mark.parametrize("drained", [True, False], ids=["all on disk", "forwarding"])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_exact_with_late_copies(spill_dir: Path, verify: str, drained: bool) -> None:
    expected = train(None)
    with late_copies() as copies, offloader(spill_dir, copies, verify=verify) as late:
        got = train(late, drained=drained)
        if drained:
            assert late.stats.bytes_written > 0
            assert copies.num_copies > 0
            assert late.stats.bytes_read > 0
            assert copies.waited_on, "the consuming stream never waited for a reload"
        else:  # where the copies are late enough, every write is taken back before it begins
            assert late.stats.bytes_written + late.stats.bytes_forwarded > 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_missing_wait_would_be_seen(spill_dir: Path, forks: list[str]) -> None:
    """The test above can fail: with marks that lie, buffers are written before they are filled, or used when freed."""
    child = subprocess.run(
        [*forks, "-m", "tests.tiers.test_streams", str(spill_dir)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode < 0 or child.stdout.strip() == "different", child.stderr


def run_with_lies(directory: Path) -> None:
    expected = train(None)
    equal = True
    # Copies that are too late keep their tensors alive, which are then handed out again: no read, nothing to see.
    for max_delay_s in (0.004, 0.002, 0.001):
        with late_copies(honest=False, max_delay_s=max_delay_s) as copies, offloader(directory, copies) as late:
            got = train(late)
            equal = equal and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            time.sleep(0.5)  # so that late copies end before their buffers are freed
    print("equal" if equal else "different", flush=True)


def test_close_while_copies_are_late(spill_dir: Path) -> None:
    """Nothing hangs and no memory is used after it was freed."""
    with late_copies(max_delay_s=0.02) as copies, offloader(spill_dir, copies) as late, late.saved_tensors():
        loss = model()(torch.randn(64, 320)).sum()
    del loss
    assert not late.is_open


if __name__ == "__main__":
    run_with_lies(Path(sys.argv[1]))
