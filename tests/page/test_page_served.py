"""The page of a cluster as `baton serve` starts it, in Chromium: at rest, under load, and while its slider moves GPUs
(workers, on a CPU) from one role to the other under streams."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import token_spec
from serve_process import ROOT, Serve
from steady_load import SteadyLoad

from tools.client import AdminClient, BatonClient

pytestmark = [pytest.mark.battery, pytest.mark.timeout(400)]
WAIT_S = 120.0
NUM_THREADS = 5


class Cluster:
    """One prefill and three decode workers at first."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "cluster.yaml"
        (folder / "models").symlink_to(ROOT / "models")
        text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
        before, _, after = text.partition("decode:\n        devices: 1")
        assert after
        text = f"{before}decode:\n        devices: 3{after}"
        # Every prompt is handed over, however short.
        text = text.replace("policy: predicted", "policy: least_loaded").replace(
            "kv_cache_tokens: 16384", "kv_cache_tokens: 8192"
        )
        self.file.write_text(text, encoding="utf-8")
        self.serve = Serve("--config", str(self.file), "--port", "0")
        self.client = BatonClient(self.serve.address)
        self.http = self.serve.until(r"OpenAI +http://(\S+)/v1").group(1)

    def roles(self) -> tuple[int, int]:
        roles = [worker.role for worker in self.client.status().workers]
        return roles.count(1), roles.count(2)

    def close(self) -> None:
        self.client.close()
        self.serve.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("page"))
    try:
        yield made
    finally:
        made.close()


class Load(SteadyLoad):
    """Prompts of many lengths, each with as many tokens as were asked for."""

    def __init__(self, client: BatonClient) -> None:
        super().__init__(NUM_THREADS)
        self._client = client
        self._draw = random.Random(7)

    def ask(self, number: int) -> str:
        tokens = self._draw.randrange(24, 160)
        prompt = self._draw.choices(range(4, 1000), k=self._draw.randrange(20, 320))
        done = self._client.generate(token_spec(prompt, tokens), timeout_s=WAIT_S).usage.completion_tokens
        return "" if done == tokens else f"{done} tokens instead of {tokens}"


def test_a_cluster_at_rest_is_shown_in_light_and_dark_wide_and_narrow(
    cluster: Cluster, open_tab: Callable[..., Any]
) -> None:
    for width, scheme in ((1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")):
        tab = open_tab(cluster.http, width=width, scheme=scheme)
        tab.until("document.querySelectorAll('.worker').length === 4 && !document.getElementById('split').disabled")
        assert tab.shown("#state") == "serving" and tab.shown("#ratio") == "1 prefill : 3 decode"
        assert tab.shown("#split-now") == "1 prefill : 3 decode, configuration 1"
        assert tab.overflow() <= 0
        tab.picture(f"idle-{width}-{scheme}")


def test_figures_lines_and_requests_are_those_of_the_load(cluster: Cluster, open_tab: Callable[..., Any]) -> None:
    tab = open_tab(cluster.http)
    tab.page.evaluate(
        "() => { window.shift = 0; new PerformanceObserver((list) => { for (const e of list.getEntries()) "
        "if (!e.hadRecentInput) window.shift += e.value; }).observe({type: 'layout-shift', buffered: true}); }"
    )
    with Load(cluster.client) as load:
        load.wait_for_more(6 * NUM_THREADS)
        tab.until(
            "document.querySelectorAll('.life').length === 12 && document.querySelectorAll('#pairs tr').length === 3"
        )
        tab.picture("load-1280-light")
        seen = tab.page.evaluate(
            "() => ({finished: known.cluster.status.router.num_finished, requests: known.requests.length})"
        )
        narrow = open_tab(cluster.http, width=400, scheme="dark")
        narrow.until("document.querySelectorAll('.life').length === 12")
        assert narrow.overflow() <= 0
        narrow.picture("load-400-dark")
        load.wait_for_more(NUM_THREADS)
    assert load.problems == [] and seen["finished"] > 0 and seen["requests"] > 12
    tab.until("known.cluster.status.router.num_running === 0")
    status = cluster.client.status()
    tab.until("(n) => known.cluster.status.router.num_finished === n", status.router.num_finished)
    for chart in ("Time to first token", "Time between tokens"):
        label = tab.page.get_attribute(f"section[aria-label='{chart}'] svg", "aria-label")
        assert re.fullmatch(rf"{chart}: p95 [\d.]+ m?s, p50 [\d.]+ m?s", label), label
    assert tab.page.evaluate("window.shift") < 0.02
    # A request in full, by the keyboard: its phases add up to its whole.
    tab.page.focus(".life")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Enter")
    assert tab.page.get_attribute(".life:nth-child(2)", "aria-pressed") == "true"
    phases = tab.page.eval_on_selector_all("#detail tbody tr", "(rows) => rows.map((row) => row.children[0].innerText)")
    assert phases == ["queue", "prefill", "hand-off", "decode"]
    life = tab.page.evaluate("() => known.requests.find((life) => life.number === picked)")
    filled = tab.page.evaluate(
        "() => { const bar = document.querySelector('.timeline .bar'); const last = bar.lastElementChild;"
        " return last.getBoundingClientRect().right / bar.getBoundingClientRect().right; }"
    )
    assert 0.995 < filled <= 1.001 and life["num_output_tokens"] > 0 and life["prefill_id"] == "prefill-0"


def test_the_slider_plans_and_then_moves_workers_under_streams(cluster: Cluster, open_tab: Callable[..., Any]) -> None:
    tab = open_tab(cluster.http)
    tab.until("!document.getElementById('all').hidden && !document.getElementById('split').disabled")
    with Load(cluster.client) as load:
        load.wait_for_more(NUM_THREADS)
        tab.page.focus("#split")
        tab.page.keyboard.press("ArrowRight")
        tab.until("!document.getElementById('apply').disabled")
        assert tab.page.get_attribute("#split", "aria-valuetext") == "2 prefill : 2 decode"
        plan = tab.shown("#plan")
        flip = re.search(r"The plan for 2 prefill : 2 decode:\s+flip (decode-\d) to prefill", plan)
        assert flip, plan
        assert "roles.prefill.devices: 2" in plan and cluster.roles() == (1, 3), "a plan moves nothing"
        tab.picture("slider-plan-1280-light")
        tab.page.keyboard.press("Tab")
        tab.page.keyboard.press("Enter")
        tab.until("document.getElementById('plan').innerText.includes('done: 1:3 to 2:2')")
        assert cluster.roles() == (2, 2) and "devices: 2" in cluster.file.read_text(encoding="utf-8")
        load.wait_for_more(4 * NUM_THREADS)
        tab.until("document.getElementById('ratio').innerText === '2 prefill : 2 decode'")
        handed = "(id) => [...document.querySelectorAll('#pairs tr')].some((row) => row.innerText.startsWith(id))"
        tab.until(handed, flip[1])
        tab.picture("slider-moved-1280-light")
        # What the cluster cannot be is refused by the controller, with its words.
        tab.allowed = ("status of 400",)
        tab.page.focus("#split")
        tab.page.keyboard.press("End")
        tab.until("document.querySelector('#plan .bad')")
        assert "decode" in tab.shown("#plan .bad") and tab.page.is_disabled("#apply")
        tab.picture("slider-refused-1280-light")
        tab.page.click("#undo")
        assert tab.page.input_value("#split") == "2"
    assert load.problems == [] and cluster.roles() == (2, 2)


def test_a_plan_that_another_change_came_before_is_refused(cluster: Cluster, open_tab: Callable[..., Any]) -> None:
    tab = open_tab(cluster.http)
    tab.until("!document.getElementById('all').hidden && !document.getElementById('split').disabled")
    now = cluster.roles()[0]
    tab.page.focus("#split")
    tab.page.keyboard.press("ArrowRight" if now < 3 else "ArrowLeft")
    tab.until("!document.getElementById('apply').disabled")
    version = tab.page.evaluate("split.answer.version")
    with AdminClient(cluster.serve.admin_address) as admin:
        list(admin.follow(admin.set_roles(1, 3) if now != 1 else admin.set_roles(2, 2)))
    tab.allowed = ("status of 400",)
    tab.page.evaluate(
        "() => { document.getElementById('apply').disabled = false; document.getElementById('apply').click(); }"
    )
    tab.until("document.querySelector('#plan .bad')")
    assert str(version) in tab.shown("#plan .bad")


def test_a_controller_that_hangs_is_told_and_a_router_that_is_killed_is_followed_by_another(
    cluster: Cluster, open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(cluster.http)
    tab.until("!document.getElementById('all').hidden && !document.getElementById('split').disabled")
    controller = next(p for p in cluster.serve.descendants() if "ray::HostedController" in " ".join(p.cmdline()))
    controller.suspend()
    try:
        tab.until("document.getElementById('split-why').innerText.includes('does not answer')")
        assert tab.shown("#state") == "serving" and not tab.page.is_visible("#split")
        cluster.client.generate(token_spec([1, 2, 3], 4), timeout_s=WAIT_S)
    finally:
        controller.resume()
    tab.until("document.getElementById('split').checkVisibility()")
    tab.allowed = ("Failed to load resource",)
    life = tab.page.evaluate("known.life")
    os.kill(cluster.client.status().router.pid, signal.SIGKILL)
    # The next router may be there before the page asks again.
    tab.until(f"known.life !== {life!r} && document.getElementById('state').innerText === 'serving'")
    assert tab.page.evaluate("known.requests.length") == 0
    assert tab.page.evaluate("document.querySelectorAll('.life').length") == 0


def test_a_page_outlives_its_cluster_and_says_so(tmp_path: Path, open_tab: Callable[..., Any]) -> None:
    made = Cluster(tmp_path)
    try:
        tab = open_tab(made.http)
        tab.until("!document.getElementById('all').hidden")
        tab.allowed = ("Failed to load resource",)
        made.serve.process.terminate()
        assert made.serve.wait() == 0
        tab.until("document.getElementById('state').innerText.includes('this is how it was')")
        assert tab.page.eval_on_selector_all(".worker", "(all) => all.length") == 4
    finally:
        made.close()
