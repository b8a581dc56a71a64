"""A real network file system: SSHFS over a server of its own, without a network. Where it cannot be had, these skip.

The server talks through a pair of sockets, so that no port, no key and no daemon is needed; it can be ended at any
moment, as real ones end.
"""

import gc
import os
import shutil
import socket
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader
from lightning_ssd.errors import StorageError, UnsuitablePathError
from tests.support.host_traffic import wait_until
from tests.support.opened import offloader_in
from tests.support.owners import Owner, random_storage
from tests.support.patience import PATIENCE_S
from tests.support.weight_loops import Loop, batches, same

MIB = 1 << 20
_SERVERS = (
    Path("/usr/lib/openssh/sftp-server"),
    Path("/usr/libexec/openssh/sftp-server"),
    Path("/usr/lib/ssh/sftp-server"),
)


@dataclass
class Remote:
    mount: Path
    """Where it is seen."""
    behind: Path
    """Where it really is."""
    server: subprocess.Popen[bytes]


@pytest.fixture
def remote(tmp_path):
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


def _wait_for(mount, client):
    deadline_s = time.monotonic() + PATIENCE_S
    while not os.path.ismount(mount):
        if client.poll() is not None or time.monotonic() > deadline_s:
            pytest.skip(f"sshfs cannot mount here (exit code {client.poll()})")
        time.sleep(0.05)


def opened_in(*directories):
    return offloader_in(directories, activations="offload", min_tensor_bytes="64KiB", optimizer_states="offload")


@pytest.mark.usefixtures("small_subgroups")
def test_it_is_refused_by_name_and_allowed_it_trains_to_the_same_bits_in_private_files(remote):
    with (
        pytest.raises(UnsuitablePathError, match=r"lies on fuse\.sshfs, a network file system"),
        Offloader(hardware=HardwareProfile(paths=remote.mount), device="cpu"),
    ):
        pass
    assert list(remote.behind.iterdir()) == []
    plain = Loop().run(3)
    with opened_in(remote.mount) as offloader:
        loop = Loop(offloader).run(3)
        assert same(loop.result(), plain.result())
        assert offloader.optimizer_stats[0].read_bytes > 0
        files = [path for path in remote.behind.rglob("*") if path.is_file()]
        assert files, "nothing lies behind the server: the test does not test what it says"
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    del loop  # the optimizer's states live on in its file, mapped, as long as somebody can ask for them
    gc.collect()
    wait_until(lambda: not any(path.is_file() for path in remote.behind.rglob("*")))  # removed after their close


@pytest.mark.usefixtures("small_subgroups")
def test_beside_a_local_drive_it_takes_a_part(remote, spill_dir):
    """It is named as any other directory, and its workers take as many chunks as it has time for."""
    plain = Loop().run(3)
    with opened_in(spill_dir, remote.mount) as offloader:
        loop = Loop(offloader).run(3)
        assert same(loop.result(), plain.result())
        tier = offloader._parts.tiers.ssd
        owners = [Owner(random_storage(MIB, seed)) for seed in range(64)]
        for owner in owners:
            tier.write(owner, MIB, None, label="a chunk")
        tier.flush()
        assert min(tier.written_bytes()) > 0
        for owner in owners:
            tier.read(owner, owner.place, torch.device("cpu"), urgent=True).wait()
            assert owner.is_right()
            tier.free(owner.place)


def test_a_server_that_dies_ends_the_step_with_the_read_that_failed(remote):
    offloader = opened_in(remote.mount)

    def until_it_dies():
        with offloader:
            loop = Loop(offloader).run(1)
            with offloader.saved_tensors():
                loss = loop._loss(next(batches(1)))
            offloader.flush()
            remote.server.kill()
            loss.backward()
            loop.optimizer.step()

    with pytest.raises(StorageError, match=r"cannot (read|write)") as caught:
        until_it_dies()
    assert isinstance(caught.value.__cause__, OSError)
    assert not offloader.is_open
