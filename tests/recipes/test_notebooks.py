"""Every notebook runs from top to bottom, and shows what it promises."""

import base64
import os
import re
import resource
from itertools import product
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.patience import PATIENCE_S
from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ABSOLUTE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|Users|work|mnt)/\w+")


GPU_SECTION = "## What a GPU would change"
"""The last one of each notebook but the first."""
MAX_PICTURE_BYTES = 100_000


SMALLER = {"n_layer=6": "n_layer=3", "vocab_size=4096": "vocab_size=1024", "STEPS = 3": "STEPS = 2"}
"""What a new run has in place of the quickstart's sizes."""


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(notebook):
    return "".join(output.get("text", "") for output in outputs(notebook))


def pictures_of(notebook):
    found = [output["data"]["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    return [base64.b64decode(picture) for picture in found]


def told(pattern, text):
    """The numbers that a line of the notebook tells."""
    found = re.search(pattern, text)
    assert found is not None, f"no line is like {pattern!r} in:\n{text}"
    return tuple(float(number.replace(",", "")) for number in found.groups())


# -- what each notebook promises, of a new run and of what is stored --------------------------------------------------


def check_quickstart(text):
    assert "bitwise equal: True" in text
    kept, moved = told(r"above rest: keep ([\d,]+) MiB, offload ([\d,]+) MiB", text)
    assert moved < 0.7 * kept
    (written,) = told(r"written to the SSD per step +([\d,]+) MiB", text)
    assert written > 0, "the training kept everything, and compared that with keeping"
    (resident,) = told(r"saved activations in memory, at most +([\d,]+) MiB", text)
    (saved,) = told(r"saved activations without offloading +([\d,]+) MiB", text)
    assert resident < saved


def check_where_memory_goes(text):
    assert "losses bitwise equal: True" in text
    sizes = {
        name: told(rf"{name} +([\d.]+) MiB", text)[0]
        for name in ("weights", "gradients", "optimizer states", "saved activations")
    }
    assert sizes["weights"] == sizes["gradients"]
    assert sizes["optimizer states"] == pytest.approx(2 * sizes["weights"], abs=0.2)
    kept, moved = told(r"saved activations, at most: +keep +(\d+) MiB, offload +(\d+) MiB", text)
    assert kept == round(sizes["saved activations"])
    assert moved < kept
    kept, moved = told(r"process above rest, at most: +keep +(\d+) MiB, offload +(\d+) MiB", text)
    assert moved < kept


def check_recompute_offload_keep(text):
    assert "losses of 5 modes bitwise equal: True" in text
    (budget,) = told(r"budget of auto: (\d+)MiB", text)
    found = re.findall(r"^(\w+) +[\d.]+ +(\d+) +([\d.]+) +(\d+)$", text, re.MULTILINE)
    process, counted, written = ({row[0]: float(row[column]) for row in found} for column in (1, 2, 3))
    assert list(counted) == ["keep", "recompute", "offload", "recompute_offload", "auto"]
    assert all(counted[mode] < counted["keep"] for mode in counted if mode != "keep")
    assert counted["auto"] <= budget + 0.05, "it is told to one digit"
    assert process["offload"] < process["keep"]
    assert written["keep"] == written["recompute"] == 0
    assert written["offload"] > 0


def check_optimizer_states(text):
    assert text.count("bitwise equal: True") == 4
    (plain,) = told(r"optimizer states +([\d.]+) MiB", text)
    states, num_subgroups = told(r"states that move +([\d.]+) MiB in (\d+) subgroups", text)
    assert 0.9 * plain < states <= plain
    assert num_subgroups > 4
    for name in ("between two steps", ", at most"):
        (resident,) = told(rf"in memory ?{name} +([\d.]+) MiB", text)
        assert 0 < resident < 0.5 * plain


def check_wandb_dashboard(text):
    assert "last loss in the file equal to the Trainer's: True" in text
    assert "activations_resident_peak_gib" in text
    assert "recorded steps: 2 4 8\n" in text
    assert re.search(r"^verdict: saved activations [\d.]+ -> [\d.]+ [MG]iB", text, re.MULTILINE)


def check_larger_than_memory(text):
    assert text.count("bitwise equal: True") == 2
    (held,) = told(r"weights, gradients, states +([\d,]+) MiB", text)
    (limit,) = told(r"limit of the process +([\d,]+) MiB", text)
    assert held > 2 * limit
    assert re.search(r"^ours, limited: +finished 2 steps$", text, re.MULTILINE)
    if "no memory control group" not in text:
        assert re.search(r"^plain, limited: +killed by the kernel", text, re.MULTILINE)


NUM_PICTURES_AND_CHECKS = {
    "01_quickstart": (1, check_quickstart),
    "02_where_memory_goes": (3, check_where_memory_goes),
    "03_recompute_offload_keep": (1, check_recompute_offload_keep),
    "04_optimizer_states": (2, check_optimizer_states),
    "05_wandb_dashboard": (2, check_wandb_dashboard),
    "06_larger_than_memory": (1, check_larger_than_memory),
}


def check(name, notebook):
    num_pictures, check_text = NUM_PICTURES_AND_CHECKS[name]
    text = text_of(notebook)
    assert "equal: False" not in text
    check_text(text)
    pictures = pictures_of(notebook)
    assert len(pictures) == num_pictures
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert max(map(len, pictures)) < MAX_PICTURE_BYTES


def test_every_notebook_is_checked():
    assert [path.stem for path in NOTEBOOKS] == list(NUM_PICTURES_AND_CHECKS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize(
    "path",
    [NOTEBOOKS[0], *(pytest.param(path, marks=pytest.mark.exhaustive) for path in NOTEBOOKS[1:])],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(path, spill_dir, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    ipython_dir = spill_dir / "ipython"
    monkeypatch.setenv("IPYTHONDIR", str(ipython_dir))
    place = spill_dir / "run"
    place.mkdir()
    notebook = nbformat.read(path, as_version=4)
    for cell, (large, small) in product(notebook.cells, SMALLER.items()):
        cell.source = cell.source.replace(large, small)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    NotebookClient(notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(place)}}).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert 1 < cpu_s < 180, "a notebook is a matter of minutes, on a busy machine of minutes of its own"
    check(path.stem, notebook)
    assert not list(place.iterdir()), "it leaves something behind"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_shows_what_is_promised_and_nothing_about_a_machine(path):
    """Readers see these outputs, and not those of a new run."""
    assert path.stat().st_size < 200_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    check(path.stem, notebook)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in codes] == list(range(1, len(codes) + 1)), "run it from top to bottom"
    shown = [data for output in outputs(notebook) for kind, data in output.get("data", {}).items() if "text" in kind]
    written = "\n".join([*(cell.source for cell in notebook.cells), text_of(notebook), *shown])
    assert not ABSOLUTE_PATH.search(written)
    kinds = {output.output_type if "name" not in output else output.name for output in outputs(notebook)}
    assert kinds <= {"stdout", "display_data", "execute_result"}, "errors and warnings are no part of a lesson"
    headings = re.findall(r"^#+ .*$", notebook.cells[-1].source, re.MULTILINE)
    assert path == NOTEBOOKS[0] or headings[-1] == GPU_SECTION


def test_a_notebook_finds_the_recipes_from_its_own_folder():
    """As Jupyter starts it, after an install that has the package alone."""
    begins = set()
    for path in NOTEBOOKS:
        first = next(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
        lines = first[: first.index("recipes.")].splitlines()
        begins.add("\n".join(line for line in lines if line.startswith(("sys.", "import sys"))))
    (begin,) = begins
    installed = "import sys; sys.path[:] = [p for p in sys.path if 'python' in p]"
    code = f"{installed}\n{begin}\nimport recipes; print(recipes.__path__[0])"
    unset = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told = run_python(code, cwd=NOTEBOOKS[0].parent, env=unset)
    assert os.path.samefile(ROOT / "notebooks" / told.strip(), ROOT / "recipes")
