"""A real network file system: SSHFS over a server of its own, without a network. Where it cannot be had, these skip.

The server talks through a pair of sockets, so that no port, no key and no daemon is needed; it can be ended at any
moment, as real ones end.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import StorageError, UnsuitablePathError
from tests.support.patience import PATIENCE_S

_SERVERS = (
    Path("/usr/lib/openssh/sftp-server"),
    Path("/usr/libexec/openssh/sftp-server"),
    Path("/usr/lib/ssh/sftp-server"),
)


@dataclass
class Remote:
    """A directory behind a server."""

    mount: Path
    """Where it is seen."""
    behind: Path
    """Where it really is."""
    server: subprocess.Popen[bytes]


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    server_file = next((path for path in _SERVERS if path.exists()), None)
    if shutil.which("sshfs") is None or server_file is None:
        pytest.skip("needs sshfs and OpenSSH's sftp-server")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse, which this user cannot open")
    mount, behind = tmp_path / "mount", tmp_path / "behind"
    mount.mkdir()
    behind.mkdir()
    near, far = socket.socketpair()
    with near, far:
        server = subprocess.Popen([server_file], stdin=far, stdout=far)
        client = subprocess.Popen(["sshfs", "-f", "-o", "passive", f":{behind}", mount], stdin=near, stdout=near)
    try:
        _wait_for(mount, client)
        yield Remote(mount, behind, server)
    finally:
        subprocess.run(["umount", "-l", mount], capture_output=True, check=False)
        for process in (client, server):
            process.kill()
            process.wait()


def _wait_for(mount: Path, client: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not os.path.ismount(mount):
        if client.poll() is not None or time.monotonic() > deadline_s:
            pytest.skip(f"sshfs cannot mount here (exit code {client.poll()})")
        time.sleep(0.05)


class _Training:
    """Real steps of a small network; all that is saved moves, and so do the optimizer's states."""

    def __init__(self, directory: Path | None) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)]
        self.network = torch.nn.Sequential(*layers)
        self.batch = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.network.parameters())
        self.offloader: Offloader | None = None
        if directory is not None:
            policy = OffloadPolicy(activations="offload", min_tensor_bytes="64KiB", optimizer_states="offload")
            hardware = HardwareProfile(paths=directory, allow_unsuitable_paths=True)
            self.offloader = Offloader(policy=policy, hardware=hardware)

    def forward(self) -> torch.Tensor:
        if self.offloader is None:
            return self.network(self.batch).square().mean()
        with self.offloader.saved_tensors():
            return self.network(self.batch).square().mean()

    def backward(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        if self.offloader is not None:
            self.offloader.end_backward()
        self.optimizer.step()

    def open(self) -> Offloader:
        assert self.offloader is not None
        self.offloader.open(self.network)
        self.optimizer = self.offloader.offload_optimizer(self.optimizer)
        return self.offloader


def test_it_is_refused_by_name(remote: Remote) -> None:
    with (
        pytest.raises(UnsuitablePathError, match=r"lies on fuse\.sshfs, a network file system"),
        Offloader(hardware=HardwareProfile(paths=remote.mount), device="cpu"),
    ):
        pass
    assert list(remote.behind.iterdir()) == []


def test_allowed_it_trains_to_the_same_bits_and_keeps_its_files_private(remote: Remote) -> None:
    plain, ours = _Training(None), _Training(remote.mount)
    with ours.open() as offloader:
        for _ in range(3):
            plain.backward(plain.forward())
            ours.backward(ours.forward())
        assert offloader.stats.bytes_read > 0
        files = [path for path in remote.behind.rglob("*") if path.is_file()]
        assert files, "nothing lies behind the server: the test does not test what it says"
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    for expected, got in zip(plain.network.parameters(), ours.network.parameters(), strict=True):
        assert torch.equal(expected, got)
    del ours, got  # the optimizer's states live on in its file, mapped, as long as somebody can ask for them
    _wait_until_empty(remote.behind)


def _wait_until_empty(directory: Path) -> None:
    """SSHFS removes a file that had no name any more only after its close has returned."""
    deadline_s = time.monotonic() + PATIENCE_S
    while left := [path for path in directory.rglob("*") if path.is_file()]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def test_a_server_that_dies_ends_the_step_with_the_read_that_failed(remote: Remote) -> None:
    training = _Training(remote.mount)
    with pytest.raises(StorageError, match=r"cannot (read|write)") as caught:
        _train_until_the_server_dies(training, remote.server)
    assert isinstance(caught.value.__cause__, OSError)
    assert training.offloader is not None
    assert not training.offloader.is_open


def _train_until_the_server_dies(training: _Training, server: subprocess.Popen[bytes]) -> None:
    with training.open() as offloader:
        training.backward(training.forward())
        loss = training.forward()
        offloader.flush()
        server.kill()
        training.backward(loss)
