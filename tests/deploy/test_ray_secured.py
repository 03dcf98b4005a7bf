"""`ray up deploy/ray/on-premise.yaml` on two machines: Ray with its token and with TLS, Baton with TLS inside and
outside and with keys. The file is the shipped one, with these machines and a small model on CPUs in it.

Long: `make test-deploy`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from machines import ROOT, STORE, UP_S, Machines, machines, missing, put_on

pytestmark = [pytest.mark.battery, pytest.mark.timeout(900), pytest.mark.skipif(bool(missing()), reason=missing())]

DEPLOY = ROOT / "deploy" / "ray"


def adapted(config: dict[str, Any], there: Machines) -> dict[str, Any]:
    """These machines, CPUs instead of GPUs, and the bundled model."""
    put_on(config, there, head=STORE, worker=STORE)
    config["file_mounts"]["~/models/served"] = str(ROOT / "models" / "tiny-shakespeare")
    serving = config["metadata"]["serving"]
    serving["engine"] = {"device": "cpu", "threads": 1, "kernels": "torch", "kv_cache_tokens": 4096}
    serving["rebalance"]["mode"] = "fixed"
    serving["router"]["replicas"] = 2
    for role in serving["roles"].values():
        role |= {"devices": 1, "tensor_parallel": 1}
    return config


@pytest.fixture(scope="module")
def there() -> Iterator[Machines]:
    """Ray serves, and so does Baton."""
    with machines("head", "one") as there:
        hosts = " ".join(machine.host for machine in there.others.values())
        there.operator.run(f"bash {DEPLOY}/authority.sh {hosts}")
        scopes = "--scope generate --scope admin"
        made = json.loads(there.operator.run(f"baton keys create --tenant acme {scopes} --json"))
        there.operator.write("key", made["key"])
        config = adapted(yaml.safe_load((DEPLOY / "on-premise.yaml").read_text(encoding="utf-8")), there)
        there.operator.write("on-premise.yaml", yaml.safe_dump(config, sort_keys=False))
        told = there.operator.run("ray up -y on-premise.yaml", timeout_s=UP_S)
        assert "Baton is serving: 1 prefill + 1 decode worker" in told
        yield there
        there.operator.run("ray down -y on-premise.yaml", timeout_s=UP_S)


@pytest.mark.parametrize("machine", ["head", "one"])
def test_a_completion_needs_a_key_and_is_encrypted_at_each_machine(there: Machines, machine: str) -> None:
    body = json.dumps({"model": "served", "prompt": "ROMEO:", "max_tokens": 8})
    url = f"https://{there[machine].host}:8000/v1/completions"
    call = f"curl --silent --cacert tls/ca.pem -H 'content-type: application/json' --data '{body}' {url}"
    answer = json.loads(there.operator.run(f'{call} -H "authorization: Bearer $(cat key)"'))
    assert answer["usage"]["completion_tokens"] == 8
    assert json.loads(there.operator.run(call))["error"]["code"] == "invalid_api_key"
    assert there.operator.run(call.replace("https:", "http:"), check=False) == ""


def test_ray_answers_only_who_has_token_and_certificate(there: Machines) -> None:
    head, look = there["head"], "timeout 60 ray status && echo told"
    assert "told" in head.run(f". ./ray.env && {look}")
    assert "told" not in head.run(f". ./ray.env && export RAY_AUTH_TOKEN=wrong && {look}", check=False)
    assert "told" not in head.run(f". ./ray.env && unset RAY_USE_TLS && {look}", check=False)


def test_workers_are_where_the_labels_are(there: Machines) -> None:
    options = f"--address {there['head'].host}:50051 --tls-ca tls/ca.pem --api-key $(cat key)"
    workers = json.loads(there.operator.run(f"baton status --json {options}"))["workers"]
    assert [worker["node"] for worker in workers] == ["one", "one"]


def test_a_router_away_from_the_controller_is_told_of_and_reaches_it(there: Machines) -> None:
    """Its page of metrics is found, its page shows the cluster and changes it, and it says why it keeps no batches."""
    head, one = there["head"], there["one"]
    found = json.loads(head.run(f"baton targets --tls-ca tls/ca.pem --api-key {there.operator.run('cat key')}"))
    pages = {each["labels"]["process"]: each["targets"][0].rpartition(":")[0] for each in found}
    assert {pages["router"], pages["router-1"]} == {head.host, one.host}
    call = 'curl --silent --cacert tls/ca.pem -H "authorization: Bearer $(cat key)"'
    cluster = json.loads(there.operator.run(f"{call} https://{one.host}:8000/api/cluster"))
    assert {process["name"] for process in cluster["controller"]["processes"]} >= {"router", "router-1"}
    refused = json.loads(there.operator.run(f"{call} https://{one.host}:8000/v1/batches"))
    assert "name a Redis in `state`" in refused["error"]["message"]
