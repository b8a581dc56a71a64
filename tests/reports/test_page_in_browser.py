"""The page in a real browser: it draws, complains of nothing, tells values under the pointer, and fits a telephone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_ssd.reports.files import write_report
from tests.support.step_records import made_record, made_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright (the extra `see`)")
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt install chromium)")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_draws_and_tells_values(browser: Any, width: int, scheme: str, tmp_path: Path) -> None:
    page_file = write_report(made_report(records=(made_record(),)), tmp_path)[0]
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:")) else complaints.append(request.url),
    )
    page.goto(page_file.as_uri())
    assert page.locator("svg").count() == 4
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#chart-memory_over_step svg").scroll_into_view_if_needed()
    box = page.locator("#chart-memory_over_step svg").bounding_box()
    under = "([x, y]) => document.elementFromPoint(x, y).closest('g').querySelector('title').textContent"
    told = page.evaluate(under, [min(box["x"] + box["width"] / 3, width - 5), box["y"] + box["height"] / 2])
    assert "saved activations: 200 MiB" in told
    text = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert _brightness(text) > 150 if scheme == "dark" else _brightness(text) < 100
    assert _brightness(ground) < 100 if scheme == "dark" else _brightness(ground) > 150
    context.close()


def _brightness(color: str) -> float:
    numbers = [float(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(numbers) / len(numbers)
