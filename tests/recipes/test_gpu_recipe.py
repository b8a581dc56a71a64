"""The first minutes on a card: which tests, which sizes, how much time, what becomes of failures; and a rehearsal."""

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from recipes.gpu import run as gpu
from recipes.gpu.experiments import Experiment, make_experiments
from recipes.gpu.marks import files_with_gpu_tests
from recipes.gpu.run import ROOT
from recipes.gpu.sizes import GIB
from tests.support.forked import forks_of

CARD = {
    "torch": "2.13.0",
    "has_cuda": True,
    "device_free_bytes": 139 * GIB,
    "host_available_bytes": 120 * GIB,
    "disk_free_bytes": 60 * GIB,
    "write_per_s": 1.5e9,
    "read_per_s": 2e9,
    "packages": {"pytest": "9.2.0"},
}
FILES = [
    "tests/parity/test_cuda.py",
    "tests/storage/test_cufile.py",
    "tests/storage/test_kvikio.py",
    "tests/memory/test_staging.py",
    "tests/test_a.py",
    "tests/parameters/test_cuda_weights.py",
]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_scan_finds_what_pytest_collects(forks):
    """Of all files with the word, without which there is no marker."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "gpu" in path.read_text(encoding="utf-8")]
    options = ["-p", "no:cacheprovider", "-W", "ignore:Module already imported"]  # by the forks' server
    command = [*forks, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", *options, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert collected == {str(path.relative_to(ROOT)) for path in files_with_gpu_tests(ROOT / "tests")}


def made(facts, *, rehearse=False):
    found = make_experiments(facts, Path("/drive"), FILES, rehearse=rehearse)
    return {experiment.name: experiment for experiment in found}


@pytest.mark.parametrize(
    ("changed", "name", "reason"),
    [
        ({}, "cuFile", "cuda-bindings is not installed"),
        ({}, "kvikio", "kvikio-cu12 or kvikio-cu13 is not installed"),
        ({"has_cuda": False}, "steps", r"PyTorch 2.13.0 sees no CUDA device"),
        ({"missing": "no lightning"}, "tensors", "the package cannot be imported: no lightning"),
        ({"disk_free_bytes": 1}, "optimizer", "the drive has no room for the states of two layers"),
    ],
)
def test_what_cannot_run_says_why(changed, name, reason):
    assert reason in made(CARD | changed)[name].skip
    assert not any(experiment.skip for other, experiment in made(CARD).items() if other not in ("cuFile", "kvikio"))


def is_running(pid):
    """What has ended and was not waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def script():
    """An experiment that runs Python; "{result}" is the file to write to."""

    def make(source, *, name="one", kind="compiled", limit_s=30.0):
        command = ("-c", source, "{result}")
        return Experiment(name=name, question="?", kind=kind, command=command, limit_s=limit_s, least_s=0)

    return make


WRITES = "import sys, json; json.dump({found}, open(sys.argv[1], 'w'))"
FOUND = {
    "equal": True,
    "repeats": True,
    "step_s": 2.0,
    "plain_step_s": 1.0,
    "peak_bytes": None,
    "warnings": [],
    "bytes_written": 1 << 20,
    "bytes_saved": 2 << 20,
}


@pytest.mark.parametrize(
    ("source", "status", "answer"),
    [
        (
            WRITES.format(found=FOUND),
            "done",
            "bits equal, step 2.000 s, plain 1.000 s, wrote 1.0 of 2.0 MiB, 0 warnings",
        ),
        (WRITES.format(found=FOUND | {"equal": False}) + "; sys.exit(1)", "failed", "bits DIFFERENT"),
        ("print('before'); print('RuntimeError: it broke'); raise SystemExit(3)", "failed", "RuntimeError: it broke"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "it has said nothing"),
        (WRITES.format(found=FOUND | {"step_s": None}), "failed", "TypeError in its result"),
        ("open(__import__('sys').argv[1], 'w').write('{')", "failed", "JSONDecodeError in its result"),
    ],
)
def test_an_experiment_is_a_row_however_it_ends(source, status, answer, script, tmp_path):
    row, _ = gpu.run(script(source), 30.0, tmp_path, tmp_path)
    assert (row.status, row.limit_s) == (status, 30.0)
    assert answer in row.answer
    assert str(tmp_path) not in row.command + row.answer


def test_what_takes_too_long_ends_with_all_its_processes(script, tmp_path, monkeypatch):
    """The child and its own child ignore the first signal."""
    monkeypatch.setattr(gpu, "_GRACE_S", 0.2)
    source = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']);"
        "print('its child is', child.pid); time.sleep(100)"
    )
    row, content = gpu.run(script(source, limit_s=3.0), 3.0, tmp_path, tmp_path)
    assert (row.status, content) == ("timed out", None)
    pid = int(row.answer.partition("its child is ")[2].split()[0])
    deadline_s = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_running(pid)


def test_results_are_written_after_each_experiment(script, tmp_path, monkeypatch, capsys):
    """The second one sees the first one's row, the third fails, the fourth has no time; the table comes last."""
    results = tmp_path / "results.json"
    sees = f"import json; rows = json.load(open({str(results)!r}))['experiments']; assert rows[-1]['name'] == 'first'; "
    rows = [
        script(WRITES.format(found=FOUND), name="first"),
        script(sees + WRITES.format(found=FOUND), name="second"),
        script("raise SystemExit('on purpose')", name="third"),
        replace(script("", name="fourth"), least_s=1e6),
        replace(script("", name="fifth"), skip="nobody wants it"),
    ]
    facts = script(WRITES.format(found=CARD | {"cores": 1, "device": "a card", "drive": "a drive"}), kind="facts")
    monkeypatch.setattr(gpu, "of_facts", lambda *_, **__: facts)
    monkeypatch.setattr(gpu, "make_experiments", lambda *_, **__: rows)
    assert gpu.main(["--dir", str(tmp_path / "dir"), "--out", str(tmp_path)]) == 1
    content = json.loads(results.read_text())
    assert [row["status"] for row in content["experiments"]] == ["done", "done", "done", "failed", "not run", "not run"]
    assert content["experiments"][4]["answer"].endswith("and it takes 1000000 at least")
    assert content["machine"]["device"] == "a card"
    assert content["results"]["second"] == FOUND
    assert list((tmp_path / "dir").iterdir()) == []
    out = capsys.readouterr().out
    assert out.strip() == (tmp_path / "results.md").read_text().strip()
    assert "| 4 | ? | failed | " in out
    assert "- machine: a card, 1 cores" in out
    assert "- software: pytest 9.2.0\n" in out
    assert "\n2. `python3 -c " in out
    assert "on purpose" in out


BARE = """
import importlib.metadata as metadata
import sys
from importlib.machinery import PathFinder

ABSENT = {absent!r}
from_name = metadata.Distribution.from_name

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else PathFinder.find_spec(name, path, target)

def found(name):
    if name.replace("-", "_") in ABSENT:
        raise metadata.PackageNotFoundError(name)
    return from_name(name)

metadata.Distribution.from_name = found

sys.meta_path = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""
ABSENT = (
    *("pytest_timeout", "hypothesis", "xdist", "transformers", "tokenizers", "matplotlib", "wandb"),
    *("jsonargparse", "nbclient", "nbformat"),
)


IMPORTED = ("benchmarks.workers.step", "benchmarks.step", "gpu.compiled", "gpu.facts", "gpu.weights")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rehearsal_where_there_is_little(spill_dir):
    """Neither git nor what only the development of this project needs: the script's beginning, on the CPU.

    All of its processes are forks of one that has done the imports in that poor environment.
    """
    (spill_dir / "sitecustomize.py").write_text(BARE.format(absent=ABSENT))
    names = ("streams", "bits", "waiting", "weights", "steps", "compiled", "tensors")
    poor = {
        "PATH": str(spill_dir),
        "HOME": str(spill_dir),
        "PYTHONPATH": f"{spill_dir}:{ROOT}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
    }
    imported = ("pytest", *(f"recipes.{name}" for name in IMPORTED))
    with mock.patch.dict(os.environ, poor, clear=True), forks_of(spill_dir, *imported) as forks:
        done = subprocess.run(
            [*forks, "-m", "recipes.gpu", "--rehearse", "--dir", str(spill_dir / "dir"), "--out", str(spill_dir)]
            + [f"--only={name}" for name in names],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=390,
        )
    logs = "\n".join(log.read_text(errors="replace")[-6000:] for log in spill_dir.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    content = json.loads((spill_dir / "results.json").read_text())
    answers = {row["name"]: row["answer"] for row in content["experiments"]}
    assert list(answers) == ["machine", *names]
    assert content["machine"]["commit"] == "unknown"
    assert content["run"]["command"].count("--only=") == len(names)
    assert "0 failed" in answers["streams"]
    assert "6 passed, 0 failed" in answers["bits"]
    assert content["results"]["steps"]["environment"]["model"] == "GPT-2 of recipes/benchmarks/harness/gpt.py"
    assert "DIFFERENT" not in answers["steps"] + answers["compiled"] + answers["weights"]
    assert answers["weights"].count("bits equal") == 4
    assert "moved" in answers["tensors"]
    assert list((spill_dir / "dir").iterdir()) == []
    assert done.stdout.rstrip().endswith("|"), "the table comes last"
