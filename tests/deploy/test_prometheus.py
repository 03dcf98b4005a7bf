"""Prometheus itself over a running cluster: it finds every page, evaluates every alert, and answers every panel of the
dashboard.

`make test-prometheus`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from serve_process import ROOT, Serve
from waiting import until

from tools.client import BatonClient, make_spec

pytestmark = [
    pytest.mark.battery,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian: apt install prometheus)"),
]

DEPLOY = ROOT / "deploy"
WAIT_S = 150.0
RATE = "20s"


class Prometheus:
    """With the shipped rules and the shipped jobs; only pages are plain, and scraped each second."""

    def __init__(self, folder: Path) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        baton = config["scrape_configs"][0]
        baton.pop("tls_config")
        baton["scheme"] = "http"
        baton["file_sd_configs"][0]["refresh_interval"] = "1s"
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._client = httpx2.Client(base_url=f"http://{address}/api/v1/", timeout=10.0)

    def get(self, path: str, **parameters: str) -> Any:
        """None: it is not up yet."""
        try:
            answer = self._client.get(path, params=parameters)
        except httpx2.TransportError:
            assert self._process.poll() is None, "Prometheus has ended"
            return None
        assert answer.status_code in (200, 503), answer.text
        return answer.json()["data"] if answer.status_code == 200 else None

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = (self.get("query", query=expression) or {"result": []})["result"]
        return found

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._log.close()


class Site:
    """A cluster under a little load, and who watches it."""

    def __init__(self, folder: Path) -> None:
        text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
        (folder / "models").symlink_to(ROOT / "models")
        (folder / "cluster.yaml").write_text(text.replace("policy: predicted", "policy: least_loaded"))
        self.targets = folder / "targets.json"
        self.serve = Serve("--config", str(folder / "cluster.yaml"), "--port", "0")
        try:
            self.list_pages()
            self.prometheus = Prometheus(folder)
        except BaseException:
            self.serve.close()
            raise

    def list_pages(self) -> list[str]:
        """As an operator does; the processes that have one."""
        command = [sys.executable, "-m", "cli.main", "targets", "--file", str(self.targets)]
        asked = [*command, "--admin-address", self.serve.admin_address]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        return [each["labels"]["process"] for each in json.loads(self.targets.read_text())]

    def ask(self) -> None:
        with BatonClient(self.serve.address) as client:
            client.generate(make_spec("ROMEO: " * 20, max_output_tokens=16))

    def close(self) -> None:
        self.prometheus.close()
        self.serve.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("watched"))
    yield site
    site.close()


def test_prometheus_finds_every_page(site: Site) -> None:
    assert sorted(site.list_pages()) == ["controller", "decode-0", "prefill-0", "router"]

    def found() -> list[Any] | None:
        targets = (site.prometheus.get("targets") or {"activeTargets": []})["activeTargets"]
        baton = [each for each in targets if each["labels"]["job"] == "baton"]
        return baton if len(baton) == 4 and all(each["health"] == "up" for each in baton) else None

    up = until(found, "four pages that are up", WAIT_S)
    assert {each["labels"]["process"] for each in up} == set(site.list_pages())


def panels() -> list[tuple[str, str]]:
    dashboard = json.loads((DEPLOY / "grafana" / "baton.json").read_text(encoding="utf-8"))
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_every_panel_of_the_dashboard_has_data(site: Site) -> None:
    missing = dict.fromkeys(panels())

    def look() -> bool:
        site.ask()
        for panel in list(missing):
            found = site.prometheus.query(panel[1].replace("$__rate_interval", RATE))
            if found and all(math.isfinite(float(each["value"][1])) for each in found):
                del missing[panel]
        return not missing

    until(look, f"data for {missing}", WAIT_S)

    def moves() -> bool:
        site.ask()
        names = ("baton_time_to_first_token_seconds_count", "baton_kv_transfer_bytes_total")
        rates = [f"sum(rate({name}[{RATE}]))" for name in names]
        return all(float(site.prometheus.query(rate)[0]["value"][1]) > 0 for rate in rates)

    until(moves, "requests and hand-offs that are seen", WAIT_S)


def test_every_alert_is_evaluated_and_one_sees_a_worker_that_was_killed(site: Site) -> None:
    def rules() -> dict[str, Any]:
        groups = site.prometheus.get("rules")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    shipped = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    names = {rule["alert"] for group in shipped["groups"] for rule in group["rules"]}

    def evaluated() -> dict[str, Any] | None:
        known = rules()
        return known if all(rule["health"] == "ok" for rule in known.values()) else None

    known = until(evaluated, "every rule evaluated without an error", WAIT_S)
    assert set(known) == names
    assert known["BatonPageGone"]["state"] == "inactive"
    with BatonClient(site.serve.address) as client:
        (decode,) = [worker for worker in client.status().workers if worker.worker_id == "decode-0"]
    os.kill(decode.info.ranks[0].pid, signal.SIGKILL)
    until(lambda: rules()["BatonPageGone"]["state"] != "inactive", "an alert about the page that is gone", WAIT_S)
    (alert,) = rules()["BatonPageGone"]["alerts"]
    assert alert["labels"]["process"] == "decode-0"
    site.serve.until("decode-0 is ready", site.serve.output.index("was lost"))
    until(lambda: "decode-0" in site.list_pages(), "the new page", WAIT_S)
    until(lambda: rules()["BatonPageGone"]["state"] == "inactive", "the alert gone", WAIT_S)
