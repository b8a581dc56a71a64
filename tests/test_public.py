"""The public face: what may be used is what ``__all__`` lists."""

import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path

import lightning_ssd

PROMISED = {"HardwareProfile", "OffloadMonitor", "OffloadPolicy", "Offloader", "SSDOffloadStrategy"} | {
    "SSDOffloadFSDPStrategy",
    "SSDOffloadFabricStrategy",
    "OffloadCallback",
    "register_strategy",
}
MODULES = sorted(
    found.name for found in pkgutil.walk_packages(lightning_ssd.__path__, prefix="lightning_ssd.") if not found.ispkg
)


def test_all_is_sorted_and_complete():
    names = {
        name for name, value in vars(lightning_ssd).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert lightning_ssd.__all__ == sorted(lightning_ssd.__all__)
    assert {name for name in lightning_ssd.__all__ if not name.startswith("_")} == names


def test_the_promised_names_are_there():
    assert set(lightning_ssd.__all__) >= PROMISED


def test_all_names_exist_and_are_documented():
    for name in lightning_ssd.__all__:
        value = getattr(lightning_ssd, name)
        assert inspect.getdoc(value) or not callable(value), f"{name} has no docstring"


def test_every_module_says_what_it_is_for_and_lists_what_it_offers():
    modules = [importlib.import_module(name) for name in MODULES]
    assert [module.__name__ for module in modules if not module.__doc__] == []
    missing = [
        f"{module.__name__}.{word}" for module in modules for word in module.__all__ if not hasattr(module, word)
    ]
    assert missing == [], "__all__ lists names that do not exist"


def test_the_package_is_typed():
    assert Path(lightning_ssd.__file__).with_name("py.typed").is_file()


ROOT = Path(lightning_ssd.__file__).parent.parent
TEXTS = sorted(
    path
    for pattern in (
        *("*.md", "docs/**/*.md", "conf/**/*.yaml", "notebooks/*.ipynb"),
        *("lightning_ssd/**/*.py", "recipes/**/*.py"),
    )
    for path in ROOT.glob(pattern)
)


def wrong_installs(text, extras):
    """Advice to install us from an index, where we are not, or with an extra that does not exist."""
    named = re.findall(r"'\.\[(\w+)\]'", text)
    return re.findall(r"pip install \S*lightning_ssd\S*", text) + [name for name in named if name not in extras]


def test_installing_is_told_of_as_it_works():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    found = {str(path): wrong_installs(path.read_text(encoding="utf-8"), extras) for path in TEXTS}
    assert len(found) > 100
    assert {path: words for path, words in found.items() if words} == {}
