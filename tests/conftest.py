"""What every test gets: a clean environment, no leaked threads, few torch threads, and a directory on a real disk."""

import gc
import os
import signal
import threading
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# A shell lets its background jobs ignore Ctrl-C, and so would every process that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The recipes switch it on for their own processes: which of the tests' children had it would depend on their order.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "0")

# Lightning and W&B set these for the rest of the process; they are taken back after each test without complaint.
_SET_BY_OTHERS = {
    "CUBLAS_WORKSPACE_CONFIG",  # Trainer(deterministic=True)
    "CUDA_DEVICE_ORDER",  # Lightning, where there is a card
    "MASTER_ADDR",  # launchers of several processes
    "MASTER_PORT",
    "LOCAL_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "PL_GLOBAL_SEED",  # seed_everything
    "PL_SEED_WORKERS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning, while it looks for devices
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile
    "TRITON_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "WANDB_MODE",  # WandbLogger(offline=True)
    "WANDB_SERVICE",
}
pytest_plugins = ["tests.support.tier_fixtures", "tests.support.pretended_driver"]

_THREAD_PREFIX = "lightning_ssd"
_THREADS_GONE_WITHIN_S = 60.0
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_IMPORTED_FOR_FORKS = (
    *("recipes.benchmarks.workers.step", "recipes.benchmarks.workers.optimizer", "recipes.train"),
    *(
        "tests.support.ddp_script",
        "tests.support.fsdp_away_script",
        "tests.support.fsdp_script",
        "tests.support.interrupt_script",
        "tests.support.pretended_backend_script",
    ),
)
_IMPORTED_WITH_TRANSFORMERS = (
    *(
        "recipes.benchmarks.workers.rivals",
        "recipes.own_loop",
        "recipes.runner",
        "transformers.models.gpt2.modeling_gpt2",
    ),
)


def pytest_configure(config):
    # PyTorch looks once, at the first call of cuBLAS, whether this allows deterministic operations, which tests on
    # CUDA may ask for later on. On a CPU it means nothing.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # One thread, however many processes share the tests: sums depend on the number of threads, and threads that wait
    # for a core of their own spin, which takes several times longer than the work. No counting of workers: the process
    # that starts them hands its environment down, so that they would take what it has chosen for itself alone. Tests
    # of several threads set their number.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    # Not above: the recipes would switch on what is switched off there.
    from recipes.determinism import settle_first_calls

    settle_first_calls()  # for tests of several threads


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Tests collect garbage often; what is there before those of a file begin need not be looked at each time.

    The imports of all files are several times what a test makes, and tests themselves import more.
    """
    gc.collect()  # what is frozen stays, garbage as well
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaked_environment():
    """A test that changes the environment for good fails, and the next one does not see it."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = (before.keys() | after.keys()) - {"PYTEST_CURRENT_TEST"}  # pytest itself changes it for each phase
    changed = {name for name in names if before.get(name) != after.get(name)}
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    leaked = {name: after.get(name) for name in sorted(changed - _SET_BY_OTHERS)}
    assert not leaked, f"the test left these environment variables changed: {leaked}"


@pytest.fixture(autouse=True)
def determinism_put_back():
    """Trainer(deterministic=True), and recipes on CUDA, set it for the rest of the process."""
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def small_subgroups(monkeypatch):
    """So that there are many more than fit into memory, and a step is many calls."""
    monkeypatch.setattr("lightning_ssd.planning.update_memory._MIN_SUBGROUP_BYTES", 64 << 10)
    monkeypatch.setattr("lightning_ssd.optimizer.step.subgroups.GRANULE", 1024)


@pytest.fixture(autouse=True)
def no_leaked_threads():
    """A test that leaves one of our threads behind fails."""
    before = set(threading.enumerate())
    yield
    deadline_s = time.monotonic() + _THREADS_GONE_WITHIN_S
    while leaked := [t for t in threading.enumerate() if t not in before and t.name.startswith(_THREAD_PREFIX)]:
        if time.monotonic() > deadline_s:
            pytest.fail(f"threads still run: {', '.join(thread.name for thread in leaked)}")
        leaked[0].join(timeout=0.05)


def _file_system(path):
    """Type of the file system that holds ``path``."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split(" ")[4]
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, right.split(" ")[0]
    return kind


@pytest.fixture
def spill_dir(tmp_path):
    """A directory where spill files may lie; skips where temporary files are kept in memory."""
    kind = _file_system(tmp_path.resolve())
    if kind in _MEMORY_FILE_SYSTEMS:
        pytest.skip(f"{tmp_path} is on {kind}, which is memory; point TMPDIR (or --basetemp) to a disk")
    return tmp_path


def pytest_collection_modifyitems(items):
    """Tests marked ``gpu`` need a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none")
    for item in items:
        # Not by ``item.keywords``: these hold the names of directories as well, such as that of a checkout.
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture
def small_disk(tmp_path):
    """Mounts an ext4 of so many MiB, in a file, and gives its directory."""
    from recipes.faults.run import own_disk

    with ExitStack() as stack:

        def make(mebibytes):
            directory, why_not = stack.enter_context(own_disk(tmp_path, mebibytes))
            if why_not:
                pytest.skip(f"no file system of its own here: {why_not}")
            return directory

        yield make


@pytest.fixture
def mesh():
    """Of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def drive(tmp_path):
    """For a store of optimizer states, in the test's directory."""
    # Not above: the helpers behind it freeze what the imports of a test file have made, and few have been made by then.
    from tests.support.state_stores import Drive

    return Drive(tmp_path)


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """The command before ``-m WORKER`` or ``-c CODE`` of processes that need no seconds of imports each."""
    from tests.support.forked import forks_of

    modules = _IMPORTED_FOR_FORKS + (_IMPORTED_WITH_TRANSFORMERS if find_spec("transformers") else ())
    with forks_of(tmp_path_factory.mktemp("forks"), *modules) as command:
        yield command


@pytest.fixture
def forked_workers(forks, monkeypatch):
    """Workers of benchmarks are forks, but for those that have to begin in a control group."""
    from recipes.benchmarks.harness import process as bench_child

    begin = bench_child._command

    def command(module, procs):
        return begin(module, procs) if procs is not None else [*forks, "-m", module]

    monkeypatch.setattr(bench_child, "_command", command)
