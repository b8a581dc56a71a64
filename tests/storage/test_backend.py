import pytest
import torch

from lightning_ssd.errors import BackendUnavailableError, ConfigError
from lightning_ssd.storage.factory import open_backend
from tests.storage.test_kvikio import HAS_KVIKIO, has_driver

without_kvikio = pytest.mark.skipif(HAS_KVIKIO and has_driver(), reason="kvikio works here")


@pytest.mark.parametrize("choice", ["auto", "posix"])
def test_posix_on_cpu(tmp_path, choice):
    backend, why = open_backend(
        choice, directories=[tmp_path / "new"], device=torch.device("cpu"), allow_unsuitable_paths=True
    )
    assert backend.name in {"posix O_DIRECT", "posix page cache"}
    assert why.startswith(f"{backend.name} (")
    expected = {
        "auto": "because kvikio serves CUDA devices, and this run uses cpu",
        "posix": "because backend='posix' was asked for",
    }
    assert why.endswith(expected[choice])
    assert (tmp_path / "new").is_dir()
    backend.close()


@without_kvikio
def test_posix_on_cuda_where_kvikio_does_not_work(tmp_path):
    backend, why = open_backend(
        "auto", directories=[tmp_path], device=torch.device("cuda"), allow_unsuitable_paths=True
    )
    assert backend.name.startswith("posix")
    assert "because kvikio does not work here: kvikio" in why
    backend.close()


class KvikioWithoutGds:
    name, why = "kvikio POSIX", "no nvidia-fs here"

    def __init__(self):
        self.is_closed = False

    def close(self):
        self.is_closed = True


def test_auto_takes_no_kvikio_that_copies_by_itself(tmp_path, monkeypatch):
    """Its stream and the device's default stream wait for each other."""
    found = KvikioWithoutGds()
    monkeypatch.setattr("lightning_ssd.storage.factory._open_kvikio", lambda *_: found)
    backend, why = open_backend(
        "auto", directories=[tmp_path], device=torch.device("cuda"), allow_unsuitable_paths=True
    )
    assert backend.name.startswith("posix")
    assert "no GPUDirect Storage here: no nvidia-fs here" in why
    assert found.is_closed
    backend.close()
    asked, _ = open_backend("kvikio", directories=[tmp_path], device=torch.device("cuda"), allow_unsuitable_paths=True)
    assert asked is found


class KvikioOfAnyDevice(KvikioWithoutGds):
    name, moves_device_memory = "kvikio GDS", True

    def __init__(self, *, device_type):
        super().__init__()
        assert device_type == "cuda"


def test_kvikio_proves_itself_on_the_device_that_is_used(tmp_path, monkeypatch):
    """Not on the current one: that would set up a context on a device that another process trains on."""
    proved = []
    monkeypatch.setattr("lightning_ssd.storage.kvikio.KvikioBackend", KvikioOfAnyDevice)
    monkeypatch.setattr(
        "lightning_ssd.storage.factory.read_back_ok", lambda *_, device: proved.append(device) or device.index == 3
    )
    device = torch.device("cuda", 3)
    backend, _ = open_backend("auto", directories=[tmp_path], device=device, allow_unsuitable_paths=True)
    assert backend.name == "kvikio GDS"
    assert proved == [device]


@without_kvikio
def test_kvikio_by_name_says_what_is_missing(tmp_path):
    with pytest.raises(BackendUnavailableError, match=r'or use HardwareProfile\(backend="posix"\)|on machines without'):
        open_backend("kvikio", directories=[tmp_path], device=torch.device("cpu"), allow_unsuitable_paths=True)


def test_no_directory():
    with pytest.raises(ConfigError, match="name at least one"):
        open_backend("auto", directories=[], device=torch.device("cpu"))
