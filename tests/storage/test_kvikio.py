"""Against the real kvikio: on a GPU where there is one; else on host memory with a stand-in CUDA driver."""

import ctypes
import importlib.util
import os

import pytest
import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import BackendUnavailableError, StorageError
from lightning_ssd.storage.drive_probe import read_back_s
from lightning_ssd.storage.factory import open_backend
from lightning_ssd.storage.kvikio import KvikioBackend
from lightning_ssd.storage.posix import PosixBackend
from tests.support.standins import COMPILER, run_over_standin
from tests.support.suite import BackendSuite, Memory

HAS_KVIKIO = importlib.util.find_spec("kvikio") is not None


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


needs_kvikio = pytest.mark.skipif(not HAS_KVIKIO, reason="kvikio is not installed (extras cu12, cu13)")
needs_driver = pytest.mark.skipif(not has_driver(), reason="kvikio needs a CUDA driver, or the stand-in")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class TestKvikioOnHostMemory(BackendSuite):
    __test__ = HAS_KVIKIO and has_driver()  # no crowd of skips: the stand-in test below says why it did not run

    def make_backend(self, directory):
        return KvikioBackend(device_type="cpu")

    def test_odd_sizes(self, backend, arena):
        for nbytes in (1, 511, 4097, 100_003):
            extent = arena.allocate(nbytes)
            written, read = Memory.random(nbytes, 3), Memory.make(nbytes, 70)
            backend.write(arena, written.region, extent.offset)
            backend.read(arena, read.region, extent.offset)
            assert read.content == written.content
            assert read.guards_intact()

    def test_settings_are_restored(self, backend):
        import kvikio.defaults

        assert kvikio.defaults.get("num_threads") > 1
        backend.close()
        assert kvikio.defaults.get("num_threads") == 1
        assert kvikio.defaults.get("compat_mode") == kvikio.CompatMode.AUTO

    def test_closes_what_it_opens(self, backend, tmp_path):
        for _ in range(3):
            backend.open_arena(tmp_path).close()
        before = os.listdir("/proc/self/fd")
        for _ in range(10):
            arena = backend.open_arena(tmp_path)
            arena.close()
        assert len(os.listdir("/proc/self/fd")) == len(before)

    def test_arenas_of_others_are_refused(self, backend, tmp_path):
        posix = PosixBackend([tmp_path])
        arena = posix.open_arena(tmp_path)
        with pytest.raises(StorageError, match="opened by another backend"):
            backend.write(arena, Memory.random(4096).region, 0)
        arena.close()
        posix.close()


class TestKvikioInItsDeviceForm(BackendSuite):
    """Host addresses in the form of device memory: what a staging buffer looks like to a backend for CUDA."""

    __test__ = HAS_KVIKIO and has_driver()

    def make_backend(self, directory):
        backend = KvikioBackend(device_type="cuda")
        assert backend.register is not None
        return backend


@needs_kvikio
@needs_driver
def test_by_name_it_proves_itself_and_says_why(tmp_path):
    backend, why = open_backend(
        "kvikio", directories=[tmp_path], device=torch.device("cpu"), allow_unsuitable_paths=True
    )
    assert why.startswith(f"{backend.name}, because ")
    backend.close()


@needs_kvikio
@pytest.mark.skipif(has_driver(), reason="a CUDA driver is here")
def test_without_a_driver_it_says_so():
    with pytest.raises(BackendUnavailableError, match="needs the CUDA driver"):
        KvikioBackend()


@pytest.mark.skipif(HAS_KVIKIO, reason="kvikio is installed")
def test_without_kvikio_it_names_the_extra():
    with pytest.raises(BackendUnavailableError, match=r"pip install '\.\[cu13\]'.* in the checkout"):
        KvikioBackend()


@needs_kvikio
@pytest.mark.skipif(has_driver(), reason="a CUDA driver is here: the tests above ran on it")
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_with_a_stand_in_driver(tmp_path):
    """Runs the tests above once more, in a process that finds a CUDA driver without devices."""
    run_over_standin(
        __file__,
        tmp_path,
        source="standin_cuda.c",
        library="libcuda.so.1",
        select="TestKvikio or proves",
        at_least=20,
    )


@pytest.mark.gpu
@needs_gpu
@needs_kvikio
class TestOnTheGpu:
    @pytest.fixture
    def backend(self):
        backend = KvikioBackend(device_type="cuda")
        yield backend
        backend.close()

    def test_reads_back(self, backend, tmp_path):
        assert read_back_s(backend, tmp_path, torch.device("cuda")) is not None

    @pytest.mark.parametrize("start", [0, 1, 64, 4096])
    @pytest.mark.parametrize("nbytes", [1, 4096, 100_003, 32 << 20])
    def test_device_memory_of_any_address_and_size(self, backend, tmp_path, start, nbytes):
        written = torch.randint(0, 256, (start + nbytes + 64,), dtype=torch.uint8, device="cuda")
        read = torch.zeros_like(written)
        torch.cuda.synchronize()
        arena = backend.open_arena(tmp_path)
        extent = arena.allocate(nbytes)
        backend.write(arena, Region(written.data_ptr() + start, nbytes), extent.offset)
        backend.read(arena, Region(read.data_ptr() + start, nbytes), extent.offset)
        arena.close()
        assert torch.equal(read[start : start + nbytes], written[start : start + nbytes])
        assert not read[:start].any()
        assert not read[start + nbytes :].any()
