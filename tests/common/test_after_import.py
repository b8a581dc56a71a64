"""What waits for the program to import a module."""

import importlib
import sys

from lightning_ssd.common.after_import import after_import


def test_several_wait_for_one_module_and_are_told_in_order_and_once(tmp_path, monkeypatch):
    (tmp_path / "met_by_two.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, met = list(sys.meta_path), []
    after_import("met_by_two", lambda module: met.append(("first", module.VALUE)))
    after_import("met_by_two", lambda module: met.append(("second", module.VALUE)))
    assert met == []
    module = importlib.import_module("met_by_two")
    assert met == [("first", 3), ("second", 3)]
    assert sys.meta_path == before
    after_import("met_by_two", lambda found: met.append(found is module))
    assert met[2:] == [True], "it is there already"
    monkeypatch.delitem(sys.modules, module.__name__)


def test_what_is_not_there_is_still_waited_for(tmp_path, monkeypatch):
    met = []
    after_import("comes_later", lambda module: met.append(module.__name__))
    assert importlib.util.find_spec("comes_later") is None
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "comes_later.py").touch()
    importlib.invalidate_caches()
    module = importlib.import_module("comes_later")
    assert met == ["comes_later"]
    monkeypatch.delitem(sys.modules, module.__name__)
