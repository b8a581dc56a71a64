"""Against the real ``cuda.bindings.cufile``: on a GPU where there is one; else over a stand-in libcufile."""

import ctypes
import errno
import importlib.util
import os
import sys
from contextlib import closing

import pytest
import torch

from lightning_ssd.errors import BackendUnavailableError, OutOfSpaceError, ShortTransferError, StorageError
from lightning_ssd.storage.backend import open_staging
from lightning_ssd.storage.cufile import CufileBackend
from lightning_ssd.storage.drive_probe import read_back_s
from lightning_ssd.storage.factory import open_backend
from lightning_ssd.storage.posix import PosixBackend
from tests.support.late import LateCopies
from tests.support.opened import offloader_in
from tests.support.standins import COMPILER, run_over_standin
from tests.support.suite import BackendSuite, Memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def has_bindings():
    try:
        return importlib.util.find_spec("cuda.bindings.cufile") is not None
    except ModuleNotFoundError:
        return False


HAS_BINDINGS = has_bindings()


def library():
    """The stand-in, if it is what the loader finds; ``None``: another library, or none."""
    try:
        found = ctypes.CDLL("libcufile.so.0")
    except OSError:
        return None
    return found if hasattr(found, "standin_opened") else None


HAS_STANDIN = library() is not None
needs_bindings = pytest.mark.skipif(not HAS_BINDINGS, reason="cuda.bindings is not installed (extra gds)")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Standin:
    """What the stand-in was told, and what it still holds."""

    def __init__(self, loaded, monkeypatch):
        self._loaded, self._patch = loaded, monkeypatch

    def opened(self):
        return ctypes.c_int.in_dll(self._loaded, "standin_opened").value

    def mode(self, key):
        return ctypes.c_bool.in_dll(self._loaded, f"standin_{key}_compat_mode")

    def open_before(self, *, modes=()):
        """As other code of the process."""
        for key in ("allow", "force"):
            self.mode(key).value = key in modes
        ctypes.c_int.in_dll(self._loaded, "standin_opened").value = 1

    def close_driver(self):
        ctypes.c_int.in_dll(self._loaded, "standin_opened").value = 0
        self.mode("allow").value = self.mode("force").value = True

    def num_files(self):
        return sum(fd > 0 for fd in (ctypes.c_int * 64).in_dll(self._loaded, "standin_files"))

    def num_buffers(self):
        return sum(address is not None for address in (ctypes.c_void_p * 64).in_dll(self._loaded, "standin_buffers"))

    def be_told(self, name, value=1):
        self._patch.setenv(f"STANDIN_{name}", str(value))

    def be_told_no_more(self, name):
        self._patch.delenv(f"STANDIN_{name}")


@pytest.fixture
def standin(monkeypatch):
    """It has no driver open yet, and holds nothing in the end."""
    told = Standin(library(), monkeypatch)
    told.close_driver()
    yield told
    assert told.num_files() == told.num_buffers() == 0, "it leaks"


@pytest.mark.usefixtures("standin")
class TestCufile(BackendSuite):
    """Takes host memory for a card's, as the stand-in does."""

    __test__ = HAS_BINDINGS and HAS_STANDIN

    def make_backend(self, directory):
        return CufileBackend(CPU)


class TestOverTheStandin:
    __test__ = HAS_BINDINGS and HAS_STANDIN

    @pytest.fixture
    def backend(self, standin):
        with closing(CufileBackend(CPU)) as backend:
            yield backend

    @pytest.fixture
    def arena(self, backend, tmp_path):
        with closing(backend.open_arena(tmp_path)) as arena:
            yield arena

    def test_the_driver_is_opened_once_without_compatibility_mode(self, standin):
        for _ in range(3):
            CufileBackend(CPU).close()
        assert standin.opened() == 1
        assert not standin.mode("allow")
        assert not standin.mode("force")

    @pytest.mark.parametrize("mode", ["allow", "force"])
    def test_what_others_have_opened_in_compatibility_mode_is_no_gds(self, standin, mode):
        standin.open_before(modes=[mode])
        keys = '"allow_compat_mode": false and "force_compat_mode": false in cufile.json'
        with pytest.raises(BackendUnavailableError, match=f'{keys}.*backend="posix"'):
            CufileBackend(CPU)

    def test_what_others_have_opened_without_it_is_taken(self, standin):
        standin.open_before()
        CufileBackend(CPU).close()
        assert standin.opened() == 1

    def test_a_driver_that_does_not_open_is_told_of_and_tried_again(self, standin):
        standin.be_told("DRIVER", 5010)
        with pytest.raises(BackendUnavailableError, match=r"does not start .NVFS_DRIVER_ERROR.*load the nvidia-fs"):
            CufileBackend(CPU)
        standin.be_told_no_more("DRIVER")
        CufileBackend(CPU).close()

    def test_a_library_that_does_not_answer_is_told_of(self, standin):
        standin.be_told("VERSION", 5010)
        with pytest.raises(BackendUnavailableError, match=r"does not load .NVFS_DRIVER_ERROR.*install libcufile"):
            CufileBackend(CPU)

    def test_a_file_without_gds_is_refused_and_not_leaked(self, standin, tmp_path):
        standin.be_told("NO_GDS")
        backend, before = CufileBackend(CPU), os.listdir("/proc/self/fd")
        with pytest.raises(BackendUnavailableError, match=r"takes no file in .*IO_NOT_SUPPORTED.*another directory"):
            backend.open_arena(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == len(before)

    def test_memory_that_cannot_be_pinned_is_refused(self, standin, backend):
        standin.be_told("NO_PINNING")
        with pytest.raises(StorageError, match=r"cannot register 16,777,216 bytes.*GPU_MEMORY_PINNING_FAILED"):
            open_staging(backend, CPU)

    def test_memory_that_cannot_be_let_go_of_is_told_of(self, backend):
        undo = backend.register(Memory.random(8192).region)
        undo()
        with pytest.raises(StorageError, match=r"cannot deregister 8,192 bytes.*MEMORY_NOT_REGISTERED"):
            undo()

    @pytest.mark.parametrize("verb", ["write", "read"])
    def test_a_short_move_is_an_error(self, standin, backend, arena, verb):
        extent = arena.allocate(8192)
        standin.be_told("SHORT", 512)
        with pytest.raises(ShortTransferError, match=f"cannot {verb} 8,192 bytes.*7,680 bytes moved"):
            getattr(backend, verb)(arena, Memory.random(8192).region, extent.offset)
        assert arena.written_bytes == 0

    @pytest.mark.parametrize(
        ("told", "code", "text"),
        [
            (errno.ENODEV, errno.ENODEV, os.strerror(errno.ENODEV)),
            (-5011, errno.EIO, "CUDA_DRIVER_ERROR .5011"),
            (-5999, 5999, "Unknown error 5999"),
        ],
    )
    @pytest.mark.parametrize("verb", ["write", "read"])
    def test_a_failed_move_has_the_name_of_its_error(self, standin, backend, arena, verb, told, code, text):
        extent = arena.allocate(8192)
        standin.be_told("ERROR", told)
        with pytest.raises(StorageError, match=f"cannot {verb} 8,192 bytes.*{text}") as caught:
            getattr(backend, verb)(arena, Memory.random(8192).region, extent.offset)
        assert caught.value.errno == code
        assert arena.written_bytes == 0

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_drive_has_an_error_of_its_own(self, standin, backend, arena, code):
        extent = arena.allocate(8192)
        standin.be_told("ERROR", code)
        with pytest.raises(OutOfSpaceError, match=f"cannot write 8,192 bytes.*{os.strerror(code)}"):
            backend.write(arena, Memory.random(8192).region, extent.offset)

    def test_a_file_that_is_not_let_go_of_is_closed_all_the_same(self, backend, tmp_path, monkeypatch):
        before, arena = os.listdir("/proc/self/fd"), backend.open_arena(tmp_path)
        close_file = backend.close_file

        def failing(file):
            close_file(file)
            raise RuntimeError("of the library")

        monkeypatch.setattr(backend, "close_file", failing)
        with pytest.raises(RuntimeError, match="of the library"):
            arena.close()
        assert len(os.listdir("/proc/self/fd")) == len(before)

    def test_arenas_of_others_are_refused(self, backend, tmp_path):
        refused = pytest.raises(StorageError, match="opened by another backend")
        with closing(PosixBackend([tmp_path])) as posix, closing(posix.open_arena(tmp_path)) as other, refused:
            backend.write(other, Memory.random(4096).region, 0)

    def test_a_file_stays_registered_until_its_last_move_has_ended(self, standin, arena):
        with arena.use():
            arena.close()
            assert standin.num_files() == 1
        assert standin.num_files() == 0

    def test_by_name_it_proves_itself_and_says_why(self, standin, tmp_path, monkeypatch):
        monkeypatch.setattr("lightning_ssd.storage.cufile.CufileBackend", lambda device: CufileBackend(CPU))
        monkeypatch.setattr("lightning_ssd.storage.factory.read_back_s", lambda *to: read_back_s(*to[:2], CPU))
        backend, why = open_backend("cufile", directories=[tmp_path], device=CUDA, allow_unsuitable_paths=True)
        assert why == "cuFile GDS, because every directory takes it with cuFile's compatibility mode off"
        backend.close()

    def test_a_training_moves_through_slabs_that_are_registered_once(self, standin, tmp_path, monkeypatch):
        """And gives the bits of one without an offloader."""
        monkeypatch.setattr("lightning_ssd._assembly.open_backend", lambda *_, **__: (CufileBackend(CPU), "a test"))
        x = torch.linspace(-1, 1, 300_001).requires_grad_()
        x.sin().exp().square().sum().backward()
        expected, x.grad = x.grad, None
        policy = {"activations": "offload", "min_tensor_bytes": 0, "host_memory": 0}
        with offloader_in(tmp_path, **policy, _copies=LateCopies(seed=0, max_delay_s=0.002)) as offloader:
            for _ in range(2):
                with offloader.saved_tensors():
                    loss = x.sin().exp().square().sum()
                offloader.flush()
                assert standin.num_buffers() == 4, "one for each worker of either direction"
                loss.backward()
                offloader.end_backward()
        assert torch.equal(x.grad, 2 * expected)


def test_without_bindings_it_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install '\.\[gds\]'.* in the checkout"):
        CufileBackend(CUDA)


@needs_bindings
def test_without_libcufile_it_asks_for_that_alone(monkeypatch):
    def missing():
        raise RuntimeError("no libcufile.so.0 (test)")

    monkeypatch.setattr("cuda.bindings.cufile.get_version", missing)
    with pytest.raises(BackendUnavailableError, match=r"\(no libcufile.so.0 .test.\); install libcufile") as caught:
        CufileBackend(CUDA)
    assert "pip" not in str(caught.value)


@needs_bindings
@pytest.mark.skipif(HAS_STANDIN, reason="the tests above run over the stand-in")
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_over_a_stand_in_library(tmp_path):
    """Runs the tests above in a process that finds a libcufile without a card."""
    run_over_standin(
        __file__,
        tmp_path,
        source="standin_cufile.c",
        library="libcufile.so.0",
        select="TestCufile or Standin",
        at_least=30,
    )


@pytest.mark.gpu
@needs_gpu
@needs_bindings
class TestOnTheGpu:
    @pytest.fixture
    def backend(self):
        try:
            backend = CufileBackend(CUDA)
        except BackendUnavailableError as error:
            pytest.skip(f"no GPUDirect Storage here: {error}")
        with closing(backend):
            yield backend

    def test_reads_back(self, backend, tmp_path):
        try:
            assert read_back_s(backend, tmp_path, CUDA) is not None
        except BackendUnavailableError as error:
            pytest.skip(f"no GPUDirect Storage here: {error}")
