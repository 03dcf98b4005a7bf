"""Who the page shows its cluster to, and that what others wrote is shown as text, in Chromium over a router with fake
workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from fake_worker import pair
from router_harness import Router, ids, running_router, text_spec

from cluster.api_keys import ApiKey, digest_of, render_keys
from tools.client import BatonClient

pytestmark = [pytest.mark.battery, pytest.mark.timeout(200)]
EVIL = "<img src=x onerror=alert(1)>"


class Served:
    """A router on a loop of its own, since the browser's calls block."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._ready: Future[Router] = Future()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(folder, settings)))
        self._thread.start()
        self.router = self._ready.result(60)

    async def _serve(self, folder: Path, settings: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            workers = pair(lambda _: [ids("yes")])
            async with running_router(folder / "model", workers, http_port=0, **settings) as router:
                self._ready.set_result(router)
                await self._end.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise

    @property
    def http(self) -> str:
        return self.router.server.http_address

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def serve(**settings: Any) -> Served:
        made.append(Served(tmp_path, **settings))
        return made[-1]

    yield serve
    for each in made:
        each.close()


def test_a_key_with_the_scope_admin_opens_it_and_stays_in_the_tab(
    served: Callable[..., Served], open_tab: Callable[..., Any], tmp_path: Path
) -> None:
    keys = (
        ApiKey("alice", digest_of("baton-a"), "acme", ("generate",)),
        ApiKey("op", digest_of("baton-o"), "ops", ("admin",)),
    )
    (tmp_path / "keys.yaml").write_text(render_keys(keys))
    router = served(keys_file=str(tmp_path / "keys.yaml"))
    tab = open_tab(router.http)
    tab.allowed = ("status of 401", "status of 403")
    tab.until("!document.getElementById('login').hidden")
    assert tab.shown("#model") == "" and not tab.page.is_visible("#all")
    tab.picture("login-1280-light")
    for key, why in (("baton-x", "not known here"), ("baton-a", "does not have the scope admin")):
        tab.page.fill("#key", key)
        tab.page.keyboard.press("Enter")
        tab.until("(why) => document.getElementById('login-why').innerText.includes(why)", why)
        assert not tab.page.is_visible("#all") and tab.page.input_value("#key") == ""
    tab.page.fill("#key", "baton-o")
    tab.page.keyboard.press("Enter")
    tab.until("document.querySelectorAll('.worker').length === 2")
    tab.page.reload()
    tab.until("document.querySelectorAll('.worker').length === 2")
    kept = tab.page.evaluate("() => [Object.values(sessionStorage), localStorage.length, document.cookie]")
    assert kept == [["baton-o"], 0, ""]
    tab.page.click("#forget")
    assert tab.page.is_visible("#login") and tab.page.evaluate("sessionStorage.length") == 0
    other = open_tab(router.http)
    other.allowed = ("status of 401",)
    other.until("!document.getElementById('login').hidden")


def test_what_others_wrote_is_text_and_no_script_but_the_pages_own_runs(
    served: Callable[..., Served], open_tab: Callable[..., Any]
) -> None:
    router = served()
    with BatonClient(router.router.address) as client:
        client.generate(text_spec(request_id=EVIL), timeout_s=20)
    tab = open_tab(router.http)
    tab.until("document.querySelectorAll('.life').length === 1")
    assert f"({EVIL})" in tab.shown("#detail") and tab.page.locator("img").count() == 0
    assert "without a controller" in tab.shown("#split-why") and not tab.page.is_visible("#split")
    assert tab.page.locator("#split-why code").inner_text() == "baton serve"
    tab.allowed = ("Content Security Policy", "TrustedHTML", "TrustedScript")
    refused = tab.page.evaluate(
        """() => {
          const tried = window.tried = {};
          const attempt = (name, act) => { try { act(); } catch (error) { tried[name] = error.name; } };
          document.addEventListener('securitypolicyviolation', (e) => { tried[e.effectiveDirective] = e.disposition; });
          attempt('html', () => { document.getElementById('detail').innerHTML = '<b>x</b>'; });
          const script = document.createElement('script');
          attempt('script', () => { script.textContent = 'window.ran = true'; document.head.append(script); });
          tried.ran = window.ran === true;
          return fetch('http://127.0.0.1:9/').catch(() => {}).then(() => tried);
        }"""
    )
    assert (refused["html"], refused["script"], refused["ran"]) == ("TypeError", "TypeError", False)
    tab.until("tried['connect-src'] === 'enforce' && tried['require-trusted-types-for'] === 'enforce'")
