"""Machines that `ray up` starts from the shipped cluster.yaml, as their operator sees them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import yaml
from machines import ROOT, STORE, UP_S, Machine, Machines, put_on

HTTP_PORT, PORT = 8000, 50051
LABELS = "baton.example/serves=yes,baton.example/machine=$(hostname)"
CALL_S = 180.0
"""How long a completion may take, workers that have to come up included."""


class RayUpSite:
    """The machines, the operator's cluster.yaml, and what an operator does with it."""

    def __init__(self, site: Machines, **changes: Any) -> None:
        """`changes`: top-level keys of the file that are other than shipped."""
        self.machines = site
        self.operator = site.operator
        shipped = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
        self.config: dict[str, Any] = shipped | changes
        self._adapt()
        self.write()

    @property
    def head(self) -> Machine:
        return self.machines["head"]

    @property
    def serving(self) -> dict[str, Any]:
        serving: dict[str, Any] = self.config["metadata"]["serving"]
        return serving

    def _adapt(self) -> None:
        """These machines and their addresses, workers on other machines than the head, and a router on each."""
        put_on(self.config, self.machines, head=STORE, worker=f"{STORE} --labels={LABELS}")
        serving = self.serving
        serving["placement"] |= {"labels": ["baton.example/serves=yes"], "routers": "spread"}
        serving["router"] |= {"host": "0.0.0.0", "replicas": 3, "insecure": True, "queue_timeout_s": CALL_S}
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
        options = f"--silent --show-error --max-time {CALL_S:g} -H 'content-type: application/json'"
        url = f"http://{self.machines[at].host}:{HTTP_PORT}/v1/completions"
        told = self.operator.run(f"curl {options} --data '{json.dumps(body)}' {url}", timeout_s=CALL_S + 10)
        answer: dict[str, Any] = json.loads(told)
        return answer

    def answers(self, machine: str) -> bool:
        """Whether a router is ready there."""
        url = f"http://{self.machines[machine].host}:{HTTP_PORT}/readyz"
        return "ready" in self.operator.run(f"curl --silent --max-time 5 {url}", check=False)

    def address(self, machine: str) -> str:
        """Of the router there, for gRPC."""
        return f"{self.machines[machine].host}:{PORT}"

    def workers(self, at: str = "head") -> list[dict[str, Any]]:
        """As the router there sees them."""
        status = json.loads(self.operator.run(f"baton status --json --address {self.address(at)}"))
        workers: list[dict[str, Any]] = status["workers"]
        return workers

    def ratio(self, at: str = "head") -> tuple[int, int]:
        roles = Counter(worker["role"] for worker in self.workers(at) if worker["state"] == "ready")
        return roles["prefill"], roles["decode"]

    def nodes(self) -> set[str]:
        """On which there are workers that are ready."""
        return {worker["node"] for worker in self.workers() if worker["state"] == "ready"}

    def pids(self, at: str = "head") -> dict[str, list[int]]:
        return {w["worker_id"]: [rank["pid"] for rank in w["ranks"]] for w in self.workers(at)}

    def raylet(self, name: str) -> str:
        """Its pid there; empty: there is none."""
        return self.machines[name].run("ps -eo pid,args | awk '/[r]aylet\\/raylet /{print $1}'", check=False)

    def num_raylets(self) -> int:
        """On all machines."""
        every = self.machines.others.values()
        return sum(int(m.run("ps -eo args | grep -c '[r]aylet/raylet '", check=False)) for m in every)
