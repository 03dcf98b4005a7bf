"""A headless Chromium for the tests of the page: Debian's, or whichever `CHROMIUM` names.

Whatever goes wrong in a page fails its test: an error, something that the policy refused, a request to anybody but the
router. Pictures go to build/page, which git ignores.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "build" / "page"
WAIT_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="make test-page installs playwright")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


class Tab:
    """A page, and what it did that it should not. `allowed`: parts of console lines that a test expects."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.problems: list[str] = []
        self.allowed: tuple[str, ...] = ()
        page.set_default_timeout(60_000)
        page.on("console", lambda m: self._note(m.type, m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self._note("pageerror", str(error)))
        page.on("request", lambda r: self._note("request", r.url) if self._is_elsewhere(r.url) else None)

    def open(self) -> None:
        self.page.goto(f"http://{self.address}/")

    def shown(self, selector: str) -> str:
        text: str = self.page.inner_text(selector)
        return text

    def until(self, expression: str, given: Any = None) -> None:
        """Until JavaScript says so, of `given` if it is a function. Asked from outside: the page's own policy refuses
        what playwright would have it evaluate."""
        give_up_at = time.monotonic() + WAIT_S
        while not self.page.evaluate(expression, given):
            assert time.monotonic() < give_up_at, f"not within {WAIT_S:g} s: {expression}\n{self.shown('body')}"
            self.page.wait_for_timeout(100)

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png", full_page=True)

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        pixels: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return pixels

    def _note(self, kind: str, text: str) -> None:
        if not any(part in text for part in self.allowed):
            self.problems.append(f"{kind}: {text}")

    def _is_elsewhere(self, url: str) -> bool:
        return urlsplit(url).scheme != "data" and urlsplit(url).netloc != self.address


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Makes tabs of a fresh browser profile each; at the end nothing may have gone wrong in any."""
    tabs: list[Tab] = []

    def make(address: str, *, width: int = 1280, scheme: str = "light", **options: Any) -> Tab:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        tab = Tab(context.new_page(), address)
        tabs.append(tab)
        tab.open()
        return tab

    yield make
    for tab in tabs:
        tab.page.context.close()
    assert [tab.problems for tab in tabs] == [[] for _ in tabs]
