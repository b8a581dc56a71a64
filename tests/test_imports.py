"""The layers of the package: imports point down only, and importing it loads nothing that it does not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_ssd
from tests.patience import PATIENCE_S

PACKAGE = Path(lightning_ssd.__file__).parent
# A module may import what stands above it here, and from its own line where that line is a directory.
# A new module is a new word here; a new edge upwards is a design change.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "accelerators"),
    (
        *("config", "events", "shards", "stats", "tensors", "memory", "malloc"),
        *("first_calls", "wording", "stand_in", "unclosed", "generators", "profiling", "waiting", "operation"),
        "put_back",
    ),
    ("undisturbed", "places"),
    (
        "storage",
        "around_forward",
        "planning",
        "metrics",
        "inplace",
        "parameters",
        "reach",
        "global_modes",
        "call_inputs",
        "fingerprint",
        "clock",
        "signature",
        "graph_memory",
        "stall_watch",
        "verdict",
    ),
    ("call_state",),
    ("recompute",),
    ("allocation", "blocks", "recorder", "tier_meter", "wear_meter", "ledger", "stalls", "run_ahead", "saved_parts"),
    ("pass_kind", "plan_cache"),
    ("scheduler", "saved_storage", "kept_tensor"),
    ("saved_pass", "shard_hooks"),
    ("live_passes",),
    ("prefetcher",),
    ("fetcher",),
    ("tensor_cache",),
    ("own_attributes", "slots", "holders"),
    ("couplings",),
    ("byproducts",),
    ("inner_step",),
    ("rehearsal", "state_saving"),
    ("master_weights",),
    ("state_layout", "slicing", "state_home"),
    ("refusals", "returned_copies", "state_destinations"),
    ("partition", "state_store", "state_files"),
    ("state_snapshot", "state_loading", "shard_checkpoint", "full_states", "shelf"),
    ("paged_states",),
    ("live_states",),
    ("optimizer",),
    ("site",),
    ("assembly",),
    ("offloader",),
    ("ddp_options",),
    ("parallel", "one_device"),
    ("checkpoint", "size_trial"),
    ("wiring",),
    ("fsdp",),
    ("strategy", "callback", "fabric"),
    ("__init__",),
)
DIRECTORIES = {"storage", "planning"}
# Package -> modules that may import it, wherever in the file. Others may not at all.
RESERVED: dict[str, set[str]] = {
    "lightning": {
        "strategy",
        "callback",
        "parallel",
        "checkpoint",
        "size_trial",
        "wiring",
        "fsdp",
        "fabric",
        "one_device",
    },
    "pytorch_lightning": set(),
    "kvikio": {"storage.kvikio"},
    "cryptography": {"storage.encryption"},
    "hydra": set(),
    "omegaconf": set(),
    "wandb": set(),
    "transformers": set(),
    "matplotlib": set(),
}


def module_names() -> dict[str, Path]:
    """``storage.arena`` -> its file; a package's ``__init__`` goes by the package's name."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return names


def imported(source: str) -> Iterator[str]:
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


def layer(module: str) -> int:
    for number, words in enumerate(LAYERS):
        if module.split(".")[0] in words:
            return number
    raise AssertionError(f"{module} is in no layer; add it to LAYERS")


def violations(module: str, source: str) -> list[str]:
    """What is wrong with the imports of one module."""
    found = []
    for name in imported(source):
        root, _, rest = name.partition(".")
        if root in RESERVED and module not in RESERVED[root]:
            found.append(f"{module} imports {name}; only {sorted(RESERVED[root]) or 'nobody'} may import {root}")
        if not root:
            found.append(f"{module} imports {name} relatively; imports are absolute")
        if root == "lightning_ssd":
            first = rest.split(".")[0]
            inside = first in DIRECTORIES and first == module.split(".")[0]
            if (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file():
                if not inside and layer(first) >= layer(module):
                    found.append(f"{module} imports {name}, which is not below it")
            else:
                found.append(f"{module} imports {name} from the package; name the module it is in")
    return found


@pytest.mark.parametrize("module", module_names())
def test_imports_point_down(module: str) -> None:
    assert not violations(module, module_names()[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("module", "source", "match"),
    [
        ("errors", "import lightning_ssd.config", "not below"),
        ("config", "from lightning_ssd.stats import OffloadStats", "not below"),
        ("storage.arena", "from lightning_ssd.tensor_cache import TensorCache", "not below"),
        ("storage.arena", "from lightning_ssd.planning import planner", "not below"),
        ("tensor_cache", "def f():\n    from lightning_ssd import offloader", "not below"),
        ("offloader", "from lightning_ssd import OffloadStats", "name the module"),
        ("offloader", "import lightning.pytorch as pl", "may import lightning"),
        ("storage.posix", "import kvikio.defaults", "may import kvikio"),
        ("callback", "def f():\n    import wandb", "may import wandb"),
        ("config", "from omegaconf import OmegaConf", "may import omegaconf"),
        ("storage.tiers", "from .arena import Arena", "relatively"),
    ],
)
def test_the_layer_test_can_fail(module: str, source: str, match: str) -> None:
    assert any(match in violation for violation in violations(module, source))


def test_allowed_imports_pass() -> None:
    assert not violations("errors", "if TYPE_CHECKING:\n    from lightning_ssd.config import OffloadPolicy")
    assert not violations("storage.tiers", "from lightning_ssd.storage.arena import Arena\nimport torch")
    assert not violations("storage.kvikio", "def f():\n    import kvikio")


def test_every_layer_word_is_a_module() -> None:
    known = {name.split(".")[0] for name in module_names()}
    assert {word for words in LAYERS for word in words} <= known


def run_python(source: str) -> str:
    """In a fresh interpreter; its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Lightning itself loads some of the unwanted packages where they are installed (torchmetrics imports transformers), so
# that what counts is what we add to it.
LIGHTNING_FIRST = """
import sys
unwanted = ("hydra", "omegaconf", "wandb", "kvikio", "transformers", "matplotlib", "xxhash", "cryptography")
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
OURS_FIRST = "import lightning_ssd\nimport lightning\nimport importlib\nimportlib.reload(lightning_ssd)\n"
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


def test_with_lightning_first_nothing_heavy_is_loaded_and_an_import_anew_registers_the_strategy() -> None:
    """And what would be heavy is seen. In one process, since Lightning takes seconds."""
    assert run_python(LIGHTNING_FIRST + ANEW + REGISTERED) == f"[]\n['omegaconf']\n{BOTH}"


def test_with_ours_first_a_reload_registers_the_strategy() -> None:
    assert run_python(OURS_FIRST + REGISTERED) == BOTH
