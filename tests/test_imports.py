"""The layers of the package: imports point down only, and importing it loads nothing that it does not need."""

import ast
from pathlib import Path

import pytest

import lightning_ssd
from tests.support.processes import run_python

PACKAGE = Path(lightning_ssd.__file__).parent
# A package, or a module at the root -> what it imports of ours, by name of the package, from the bottom up.
# A new name in a row is a design change.
IMPORTS = {
    "errors": set(),
    "planning": {"errors"},
    "common": {"errors"},
    "config": {"errors", "common"},
    "memory": {"errors", "common"},
    "recompute": {"errors", "common"},
    "telemetry": {"common", "memory"},
    "storage": {"errors", "common", "memory"},
    "wear": {"errors", "common"},
    "tiers": {"errors", "common", "planning", "memory", "telemetry", "storage"},
    "scheduling": {"errors", "common", "planning", "telemetry"},
    "parameters.files": {"errors", "common", "memory", "storage"},
    "parameters.guard": {"common"},
    "parameters": {
        *("errors", "common", "planning", "memory", "telemetry", "tiers", "recompute"),
        *("parameters.files", "parameters.guard"),
    },
    "activations": {
        *("errors", "common", "planning", "memory", "telemetry", "tiers", "recompute", "scheduling", "parameters"),
        "parameters.guard",
    },
    "optimizer.store": {"errors", "common", "memory", "tiers"},
    "optimizer.step": {"errors", "common", "memory", "tiers"},
    "optimizer.checkpoint": {"errors", "common", "memory", "optimizer.store", "optimizer.step"},
    "optimizer": {
        *("errors", "common", "planning", "telemetry", "optimizer.store", "optimizer.step", "optimizer.checkpoint"),
    },
    "_environment": {"errors", "common", "config", "memory", "telemetry", "storage", "tiers"},
    "_assembly": {
        *("errors", "common", "config", "memory", "wear", "storage", "tiers", "scheduling", "activations"),
        *("parameters", "parameters.files", "optimizer.store", "_environment"),
    },
    "offloader": {
        *("errors", "common", "planning", "config", "memory", "telemetry", "storage", "wear", "tiers", "scheduling"),
        *("recompute", "activations", "optimizer", "_environment", "_assembly"),
    },
    "_both_packages": {"common"},
    "reports": {"errors", "common", "config", "telemetry"},
    "monitor": {"memory", "telemetry", "offloader", "_both_packages", "reports"},
    "strategies": {
        *("errors", "common", "config", "telemetry", "activations", "optimizer", "optimizer.checkpoint"),
        *("offloader", "_both_packages", "monitor"),
    },
    "pytorch_lightning": {"_both_packages"},
    "callback": {"errors", "common", "config", "telemetry", "activations", "offloader", "_both_packages", "strategies"},
    "huggingface": {"errors", "config", "telemetry", "optimizer", "offloader", "strategies"},
    "__init__": {"config", "telemetry", "offloader", "monitor", "strategies", "callback", "huggingface"},
    "cli": {
        *("errors", "planning", "common", "config", "memory", "recompute", "storage", "wear", "tiers", "scheduling"),
        *("parameters", "reports", "_environment"),
    },
    "__main__": {"cli"},
}
# Library -> packages or modules that may import it, wherever in the file. Others may not at all.
RESERVED = {
    "lightning": {"monitor", "callback", "strategies"},
    "pytorch_lightning": set(),
    "lightning_fabric": set(),
    "cuda": {"storage.cufile"},
    "kvikio": {"storage.kvikio"},
    "hydra": {"cli.conf_files"},
    "omegaconf": {"cli.conf_files"},
    "wandb": {"reports.publish", "reports.dashboard"},
    "wandb_workspaces": {"reports.dashboard"},
    "typer": {"cli"},
    "rich": {"cli"},
    "transformers": {"cli.conf_files"},
    "matplotlib": {"reports.drawing"},
}


def module_names():
    """``storage.arena`` -> its file; a package's ``__init__`` goes by the package's name."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return names


def imported(source):
    """Absolute names that a source imports, also inside functions; relative ones start with a dot.

    What stands under ``if TYPE_CHECKING`` is never loaded, so that it makes no edge.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from lightning_ssd import metrics` imports a module, so that the names count too.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def package_of(name):
    """The package that a module of ours is in; a module at the root, or a package, is its own."""
    path = PACKAGE.joinpath(*name.split("."))
    if name in IMPORTS or not (path.with_suffix(".py").is_file() or path.is_dir()):
        return name if name in IMPORTS else package_of(name.rpartition(".")[0]) if "." in name else ""
    return name.rpartition(".")[0] or name


def violations(module, source):
    """What is wrong with the imports of one module."""
    found = []
    package = package_of(module)
    for name in imported(source):
        root, _, rest = name.partition(".")
        if root in RESERVED and not {module, package} & RESERVED[root]:
            found.append(f"{module} imports {name}; only {sorted(RESERVED[root]) or 'nobody'} may import {root}")
        if not root:
            found.append(f"{module} imports {name} relatively; imports are absolute")
        if root == "lightning_ssd":
            other = package_of(rest)
            if not other:
                found.append(f"{module} imports {name} from the package; name the module it is in")
            elif other != package and other not in IMPORTS[package]:
                found.append(f"{module} imports {name}, which is not below it")
    return found


def test_imports_point_down():
    sources = {module: path.read_text(encoding="utf-8") for module, path in module_names().items()}
    assert len(sources) > 100
    assert [found for module, source in sources.items() for found in violations(module, source)] == []


@pytest.mark.parametrize(
    ("module", "source", "match"),
    [
        ("config", "from lightning_ssd.telemetry.stats import OffloadStats", "not below"),
        ("storage.spill_file", "from lightning_ssd.activations.tensor_cache import TensorCache", "not below"),
        ("activations.tensor_cache", "def f():\n    from lightning_ssd import offloader", "not below"),
        ("offloader", "from lightning_ssd import OffloadStats", "name the module"),
        ("offloader", "import lightning.pytorch as pl", "may import lightning"),
        ("offloader", "from lightning_ssd.cli import doctor", "not below"),
        ("tiers.ssd", "from .base import Tier", "relatively"),
    ],
)
def test_the_test_can_fail(module, source, match):
    assert any(match in violation for violation in violations(module, source))


def test_allowed_imports_pass():
    assert not violations("errors", "if TYPE_CHECKING:\n    from lightning_ssd.config import OffloadPolicy")
    assert not violations("tiers.ssd", "from lightning_ssd.storage.spill_file import Arena\nimport torch")
    assert not violations("optimizer.live_states", "from lightning_ssd.optimizer.store import entry")
    assert not violations("storage.kvikio", "def f():\n    import kvikio")


def test_rows_name_what_is_below_and_used():
    """From the bottom up, so that no import goes round; and no row allows what nobody does."""
    used = {package: set() for package in IMPORTS}
    for module, path in module_names().items():
        names = {name for name in imported(path.read_text(encoding="utf-8")) if name.startswith("lightning_ssd.")}
        used[package_of(module)] |= {package_of(name.partition(".")[2]) for name in names} - {package_of(module)}
    assert used == IMPORTS
    rows = list(IMPORTS)
    assert all(rows.index(below) < number for number, row in enumerate(rows) for below in IMPORTS[row])


# Lightning itself loads some of the unwanted packages where they are installed (torchmetrics imports transformers), so
# that what counts is what we add to it.
LIGHTNING_FIRST = """
import sys
unwanted = ("hydra", "omegaconf", "wandb", "kvikio", "cuda", "transformers", "matplotlib", "xxhash")
unwanted += ("typer", "rich")
def loaded(): return {name for name in unwanted if name in sys.modules}
import lightning.pytorch
before = loaded()
import lightning_ssd
print(sorted(loaded() - before))
import omegaconf
print(sorted(loaded() - before))
"""
# Notebooks reload; a process that threw its modules away imports anew, and makes other classes of the same names.
ANEW = """
for name in [n for n in sys.modules if n.startswith("lightning_ssd")]: del sys.modules[name]
import lightning_ssd
"""
RELOADED = "import importlib; importlib.reload(lightning_ssd)\n"
NAME = "ssd_offload"
REGISTERED = f"""
from lightning.pytorch.strategies import StrategyRegistry
assert {NAME!r} in StrategyRegistry.available_strategies()
import lightning.pytorch as pl
trainer = pl.Trainer(strategy={NAME!r}, accelerator="cpu", logger=False, enable_progress_bar=False)
from lightning.fabric import Fabric
fabric = Fabric(strategy={NAME!r}, accelerator="cpu", devices=1)
print(type(trainer.strategy).__name__, type(fabric.strategy).__name__)
"""
BOTH = "SSDOffloadStrategy SSDOffloadFabricStrategy"


def test_with_lightning_first_nothing_heavy_is_loaded_and_an_import_anew_registers_the_strategy():
    """And what would be heavy is seen. In one process, since Lightning takes seconds."""
    program = LIGHTNING_FIRST + ANEW + REGISTERED + RELOADED + REGISTERED
    assert run_python(program, cwd=PACKAGE.parent) == f"[]\n['omegaconf']\n{BOTH}\n{BOTH}\n"
