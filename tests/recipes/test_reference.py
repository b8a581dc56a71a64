"""Pages that follow from the code are what the code says, and links in documents lead somewhere."""

import re
from pathlib import Path

from recipes import reference

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_pages_are_what_the_code_says():
    assert reference.main(["--check"]) == 0


def test_a_page_that_is_not_is_told_and_written_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "_DOCS", tmp_path)
    (tmp_path / "metrics.md").write_text("old")
    assert reference.main(["--check"]) == 1
    assert "docs/metrics.md is not what the code says" in capsys.readouterr().err
    assert (tmp_path / "metrics.md").read_text() == "old"
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0


def test_links_and_named_files_of_the_package_exist():
    packages = "|".join(path.name for path in (ROOT / "lightning_ssd").iterdir() if path.is_dir())
    missing = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
        paths = [document.parent / link for link in links if link]
        if document.name != "CHANGELOG.md":  # tells of files as they were
            named = re.findall(rf"`(?:lightning_ssd/)?((?:{packages})/[\w/]+\.py)`", text)
            paths += [Path("lightning_ssd", name) for name in named]
        missing += [f"{document}: {path}" for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_the_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 120
