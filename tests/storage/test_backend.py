import sys
from contextlib import closing

import pytest
import torch

from lightning_ssd.errors import BackendUnavailableError, ConfigError, OutOfSpaceError
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES
from lightning_ssd.storage.drive_probe import read_back_s
from lightning_ssd.storage.factory import open_backend
from lightning_ssd.storage.posix import PosixBackend
from tests.storage.test_kvikio import HAS_KVIKIO, has_driver

DEVICE = torch.device("cuda", 3)
OF_CUDA = (
    "moves memory of CUDA devices, and what moves here is host memory (no card, or checksums: OffloadPolicy.verify)"
)
without_kvikio = pytest.mark.skipif(HAS_KVIKIO and has_driver(), reason="kvikio works here")


@pytest.mark.parametrize("choice", ["auto", "posix"])
def test_posix_on_cpu(tmp_path, choice):
    backend, why = open_backend(
        choice, directories=[tmp_path / "new"], device=torch.device("cpu"), allow_unsuitable_paths=True
    )
    assert backend.name in {"posix O_DIRECT", "posix page cache"}
    assert why.startswith(f"{backend.name} (")
    expected = {
        "auto": f"because cuFile {OF_CUDA}",
        "posix": "because backend='posix' was asked for",
    }
    assert why.endswith(expected[choice])
    assert (tmp_path / "new").is_dir()
    backend.close()


def test_cufile_on_host_memory_is_refused_before_it_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_ssd.storage.cufile.CufileBackend", None)
    with pytest.raises(BackendUnavailableError) as caught:
        open_backend("cufile", directories=[tmp_path / "new"], device=torch.device("cpu"))
    assert str(caught.value) == (
        f'backend="cufile" {OF_CUDA}; set OffloadPolicy(verify="off") on a card, '
        'or use HardwareProfile(backend="posix")'
    )
    assert not (tmp_path / "new").exists()


def test_posix_on_cuda_where_cufile_does_not_load(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    backend, why = open_backend(
        "auto", directories=[tmp_path], device=torch.device("cuda"), allow_unsuitable_paths=True
    )
    assert backend.name.startswith("posix")
    assert "because cuFile does not work here: cuFile does not load" in why
    backend.close()


class Cufile:
    """Loads wherever it is asked to."""

    name, why, register = "cuFile GDS", "a test", None
    opened = None

    def __init__(self, device):
        self.device, self.is_closed = device, False
        Cufile.opened = self

    def close(self):
        self.is_closed = True


@pytest.fixture
def proved(monkeypatch):
    """What ways were tried, where, and what each is to take."""
    monkeypatch.setattr("lightning_ssd.storage.cufile.CufileBackend", Cufile)
    monkeypatch.setattr("lightning_ssd.storage.kvikio.KvikioBackend", None)  # it waits for the default stream
    tried, seconds = [], {"cuFile GDS": 1.0, "posix O_DIRECT": 1.0, "posix page cache": 1.0}

    def read_back_s(backend, directory, device):
        if isinstance(seconds[backend.name], Exception):
            raise seconds[backend.name]
        tried.append((backend.name.partition(" ")[0], directory.name, device))
        return seconds[backend.name]

    monkeypatch.setattr("lightning_ssd.storage.factory.read_back_s", read_back_s)
    return tried, seconds


def opened(tmp_path, choice="auto"):
    directories = [tmp_path / "one", tmp_path / "two"]
    return open_backend(choice, directories=directories, device=DEVICE, allow_unsuitable_paths=True)


def test_auto_takes_cufile_where_it_is_as_fast(tmp_path, proved):
    """It proves itself on the device that is used: the current one may be another process'."""
    backend, why = opened(tmp_path)
    assert why == (
        "cuFile GDS, because a test, and 64 MiB in each directory took cuFile 2.000 s there and back, and posix 2.000 s"
    )
    assert backend.device == DEVICE
    assert not backend.is_closed
    assert proved[0] == [(way, where, DEVICE) for way in ("cuFile", "posix") for where in ("one", "two")]


def test_auto_takes_posix_where_cufile_is_slower(tmp_path, proved):
    proved[1]["cuFile GDS"] = 1.5
    backend, why = opened(tmp_path)
    assert isinstance(backend, PosixBackend)
    assert why.endswith("because 64 MiB in each directory took cuFile 3.000 s there and back, and posix 2.000 s")
    backend.close()


def test_cufile_that_gives_back_other_bytes_is_not_taken(tmp_path, proved):
    proved[1]["cuFile GDS"] = None
    backend, why = opened(tmp_path)
    assert isinstance(backend, PosixBackend)
    assert f"cuFile GDS did not read back from {tmp_path / 'one'} what was written" in why
    backend.close()
    with pytest.raises(BackendUnavailableError, match="did not read back"):
        opened(tmp_path, "cufile")


def test_what_posix_cannot_do_is_told_of_and_leaves_nothing_open(tmp_path, proved):
    proved[1].update(dict.fromkeys(["posix O_DIRECT", "posix page cache"], OutOfSpaceError("full (test)")))
    with pytest.raises(OutOfSpaceError, match="full"):
        opened(tmp_path)
    assert Cufile.opened.is_closed


class Forgetful(PosixBackend):
    """Its reads bring one wrong byte, behind the first border between two chunks."""

    def read(self, arena, region, offset):
        super().read(arena, region, offset)
        if offset < DEFAULT_CHUNK_BYTES < offset + region.nbytes:
            region.view()[-1] ^= 1


def test_the_proof_crosses_borders_between_chunks(tmp_path):
    with closing(PosixBackend([tmp_path])) as backend:
        assert read_back_s(backend, tmp_path) > 0
    with closing(Forgetful([tmp_path])) as backend:
        assert read_back_s(backend, tmp_path) is None


@without_kvikio
def test_kvikio_by_name_says_what_is_missing(tmp_path):
    with pytest.raises(BackendUnavailableError, match=r'or use HardwareProfile\(backend="posix"\)|on machines without'):
        open_backend("kvikio", directories=[tmp_path], device=torch.device("cpu"), allow_unsuitable_paths=True)


def test_no_directory():
    with pytest.raises(ConfigError, match="name at least one"):
        open_backend("auto", directories=[], device=torch.device("cpu"))
