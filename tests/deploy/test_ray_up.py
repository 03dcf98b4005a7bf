"""`ray up cluster.yaml` as an operator says it, on three machines: serving, another ratio, a machine that is cut off,
and the end. The file is the shipped one, with these machines in it.

Long: `make test-deploy`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from machines import ROOT, STORE, UP_S, Machines, machines, missing, put_on
from waiting import until

pytestmark = [pytest.mark.battery, pytest.mark.timeout(900), pytest.mark.skipif(bool(missing()), reason=missing())]

MOVED_S = 20.0
REPLACED_S = 180.0
GONE_S = 150.0
WORKERS = ("one", "two")
HTTP_PORT, PORT = 8000, 50051


class Site:
    """The machines, the operator's cluster.yaml, and what he does with it."""

    def __init__(self, site: Machines) -> None:
        self.machines = site
        self.head = site["head"]
        self.operator = site.operator
        self.config: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
        self._adapt()
        self.write()

    @property
    def serving(self) -> dict[str, Any]:
        serving: dict[str, Any] = self.config["metadata"]["serving"]
        return serving

    def _adapt(self) -> None:
        """These machines and their addresses, workers on other machines than the head, and a router on each."""
        put_on(self.config, self.machines, head=STORE, worker=f"{STORE} --labels=baton.example/serves=yes")
        serving = self.serving
        serving["placement"] |= {"labels": ["baton.example/serves=yes"], "routers": "spread"}
        serving["router"] |= {"host": "0.0.0.0", "replicas": 3, "insecure": True, "queue_timeout_s": REPLACED_S}
        serving["engine"] |= {"threads": 1, "kernels": "torch"}
        serving["roles"]["decode"]["devices"] = 2

    def write(self) -> None:
        self.operator.write("cluster.yaml", yaml.safe_dump(self.config, sort_keys=False))

    def set_ratio(self, prefill: int, decode: int) -> None:
        self.serving["roles"]["prefill"]["devices"] = prefill
        self.serving["roles"]["decode"]["devices"] = decode
        self.write()

    def ray(self, command: str) -> str:
        """As the operator says it in his own shell."""
        return self.operator.run(f"ray {command}", timeout_s=UP_S)

    def baton(self, command: str) -> str:
        """On the head."""
        return self.head.run(f"baton {command}", timeout_s=UP_S)

    def complete(self, prompt: str = "ROMEO:", *, at: str = "head") -> dict[str, Any]:
        """Over HTTP, from the operator's machine to the router of that one."""
        body = {"model": "tiny-shakespeare", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        options = f"--silent --show-error --max-time {REPLACED_S:g} -H 'content-type: application/json'"
        url = f"http://{self.machines[at].host}:{HTTP_PORT}/v1/completions"
        told = self.operator.run(f"curl {options} --data '{json.dumps(body)}' {url}", timeout_s=REPLACED_S + 10)
        answer: dict[str, Any] = json.loads(told)
        return answer

    def answers(self, machine: str) -> bool:
        """Whether a router is ready there."""
        url = f"http://{self.machines[machine].host}:{HTTP_PORT}/readyz"
        return "ready" in self.operator.run(f"curl --silent --max-time 5 {url}", check=False)

    def workers(self) -> list[dict[str, Any]]:
        """As the router sees them."""
        address = f"{self.head.host}:{PORT}"
        workers: list[dict[str, Any]] = json.loads(self.operator.run(f"baton status --json --address {address}"))[
            "workers"
        ]
        return workers

    def ratio(self) -> tuple[int, int]:
        roles = Counter(worker["role"] for worker in self.workers() if worker["state"] == "ready")
        return roles["prefill"], roles["decode"]

    def nodes(self) -> set[str]:
        """On which there are workers that are ready."""
        return {worker["node"] for worker in self.workers() if worker["state"] == "ready"}

    def pids(self) -> dict[str, list[int]]:
        return {w["worker_id"]: [rank["pid"] for rank in w["ranks"]] for w in self.workers()}

    def raylet(self, name: str) -> str:
        """Its pid there; empty: there is none."""
        return self.machines[name].run("ps -eo pid,args | awk '/[r]aylet\\/raylet /{print $1}'", check=False)

    def num_raylets(self) -> int:
        """On all machines."""
        every = [self.head, *(self.machines[name] for name in WORKERS)]
        return sum(int(m.run("ps -eo args | grep -c '[r]aylet/raylet '", check=False)) for m in every)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """`ray stop` ends every Ray that it sees: so first of all it is made sure that it sees none of another."""
    with machines("head", *WORKERS) as there:
        for machine in (there.operator, *there.others.values()):
            seen = machine.run("ps -eo args")
            assert "raylet" not in seen and len(seen.splitlines()) < 12, f"{machine.name} sees others:\n{seen}"
            assert (
                machine.run("find /tmp /dev/shm -mindepth 1 -maxdepth 1 '(' -name 'ray*' -o -path '/dev/*' ')'") == ""
            )
        yield Site(there)


def test_ray_up_serves_from_the_machines_of_the_file(site: Site) -> None:
    told = site.ray("up -y cluster.yaml")
    assert "Baton is serving: 1 prefill + 2 decode workers" in told
    answer = site.complete()
    assert answer["usage"]["completion_tokens"] == 16
    assert site.complete() | {"id": "", "created": 0} == answer | {
        "id": "",
        "created": 0,
        "usage": site.complete()["usage"],
    }
    assert site.nodes() <= set(WORKERS), "workers have labels to go by"
    assert [site.complete(at=name)["choices"] for name in WORKERS] == [answer["choices"]] * 2
    assert "baton stop" in told
    generated = site.operator.run(f"baton generate --address {site.head.host}:{PORT} --max-tokens 8 'JULIET:'")
    assert generated.strip()


def test_ray_up_without_a_restart_applies_the_ratio_of_the_edited_file(site: Site) -> None:
    before = site.pids()
    site.set_ratio(2, 1)
    site.ray("up --no-restart -y cluster.yaml")
    until(lambda: site.ratio() == (2, 1), "two prefill workers and one for decode", MOVED_S)
    assert site.pids() == before, "a worker changes its role and stays"
    assert "choices" in site.complete()


def test_a_mistake_in_the_file_changes_nothing(site: Site) -> None:
    before = site.pids()
    site.set_ratio(3, 0)
    site.ray("up --no-restart -y cluster.yaml")
    refused = site.head.run("baton serve --address auto --detach --config ~/ray_bootstrap_config.yaml", check=False)
    assert "must be at least 1, since only decode workers generate tokens" in refused
    assert (site.ratio(), site.pids()) == ((2, 1), before)
    assert "choices" in site.complete()
    site.set_ratio(2, 1)
    site.ray("up --no-restart -y cluster.yaml")


def test_a_second_serve_has_the_cluster_do_what_a_file_says(site: Site) -> None:
    command = "serve --address auto --detach --config ~/ray_bootstrap_config.yaml"
    assert "nothing differs from what runs" in site.baton(command)
    site.head.run('sed \'s/"devices": 2/"devices": 1/\' ray_bootstrap_config.yaml > other.yaml')
    assert "done: 2:1 to 1:1" in site.baton("serve --address auto --detach --config ~/other.yaml")
    assert site.ratio() == (1, 1)
    site.set_ratio(1, 2)
    site.ray("up --no-restart -y cluster.yaml")
    until(lambda: site.ratio() == (1, 2), "a second decode worker", MOVED_S + UP_S)


def test_the_workers_of_a_machine_that_is_cut_off_come_up_on_another(site: Site) -> None:
    lost = sorted(site.nodes())[0]
    others = set(WORKERS) - {lost}
    expected = site.complete("KING HENRY:")["choices"]
    given_up = site.raylet(lost)
    site.machines.cut(lost)
    try:
        assert site.complete("KING HENRY:")["choices"] == expected, "it waits for the workers that come"
        until(lambda: (site.nodes(), site.ratio()) == (others, (1, 2)), f"every worker on {others}", REPLACED_S)
        assert site.complete("KING HENRY:")["choices"] == expected
    finally:
        site.machines.heal(lost)
    until(lambda: site.raylet(lost) not in ("", given_up), "a new Ray on the machine that is back", REPLACED_S)
    until(lambda: site.answers(lost), "the router of the machine that is back", REPLACED_S)
    assert site.complete("KING HENRY:", at=lost)["choices"] == expected


def test_stop_ends_what_serves_and_leaves_ray(site: Site) -> None:
    assert site.baton("stop --address auto").endswith("stopped\n")
    again = site.head.run("baton stop --address auto", check=False)
    assert "nothing serves detached in the Ray cluster at auto" in again
    assert site.num_raylets() == 3
    told = site.baton("serve --address auto --detach --config ~/ray_bootstrap_config.yaml")
    assert "Baton is serving: 1 prefill + 2 decode workers" in told
    assert "choices" in site.complete()


def test_ray_down_ends_everything(site: Site) -> None:
    site.ray("down -y cluster.yaml")
    until(lambda: site.num_raylets() == 0, "no Ray on any machine", GONE_S)
    left = site.head.run("ps -eo args")
    assert "ray::" not in left and "router" not in left, left
