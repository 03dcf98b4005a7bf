"""`baton doctor` at clusters that run: one that is well, with TLS and Redis, and some that are broken on purpose."""

from __future__ import annotations

import asyncio
import email.utils
import http.server
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from certificates import Authority
from cluster_fixture import BUNDLED_MODEL, PREFILL, PlainCluster
from doctored import ask_here as ask
from doctored import the_problem, the_warning, write_config
from fake_worker import FakeWorker
from router_harness import Router, running_router
from scripted_router import baton
from waiting import until_after

from benchmarks.redis_server import RedisServer, running_redis
from cluster.api_keys import ApiKey, digest_of, render_keys
from cluster.pb import worker_pb2
from cluster.tls import ClientTls
from router.routing.load_tracker import PlacementKind
from router.routing.policies.interface import disaggregated, local
from tools.doctor.check import CheckResult, Result
from tools.doctor.probes import Probe

LOOKING = ("router", "versions", "workers", "transports", "kv-pools", "clock-skew")
PROBING = ("disaggregation", "bandwidth", "journal")


@dataclass(frozen=True)
class Served:
    """A cluster under TLS whose generations are in a Redis, and the file that says so."""

    cluster: PlainCluster
    config: Path
    client: ClientTls

    def ask(self, *names: str, config: Path | None = None) -> dict[str, CheckResult]:
        return ask(config or self.config, *names, address=self.cluster.address, tls=self.client)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, redis_of_session: RedisServer) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("doctor")
    ours = Authority(folder)
    public, client, inside = ours.server(), ours.client(), ours.internal()
    internal = {"cert": inside.cert, "key": inside.key, "ca": inside.ca}
    settings = {f"internal_tls_{name}": path for name, path in internal.items()}
    router = {"tls_cert": public.cert, "tls_key": public.key, "state": redis_of_session.url, "metrics_port": 0}
    with PlainCluster(
        BUNDLED_MODEL, folder, router={**router, **settings}, tls=client, metrics_port=0, **settings
    ) as cluster:
        config = write_config(
            folder,
            tls={"cert": public.cert, "key": public.key},
            internal_tls=internal,
            state=redis_of_session.url,
            rebalance={"slo": {"tpot_ms": 60_000.0}},  # how long a hand-off shows is this machine's business
        )
        yield Served(cluster, config, client)


def test_a_cluster_that_is_well_has_no_problem(served: Served) -> None:
    outcomes = served.ask(*LOOKING, *PROBING)
    assert {name: outcome.result for name, outcome in outcomes.items()} == dict.fromkeys(outcomes, Result.OK), outcomes
    assert outcomes["workers"].findings[0].found == "2 of 2 workers ready"
    assert outcomes["transports"].findings[0].found == "pairs by transport: 1 shm"
    assert outcomes["clock-skew"].findings[0].found == "3 clocks within 1 s of this one"
    placed = outcomes["disaggregation"].findings[0]
    assert (placed.values["prefill"], placed.values["decode"]) == ("prefill-0", "decode-0")
    assert placed.found.startswith("a prompt of 2,032 tokens: disaggregated: prefill-0 -> decode-0")


def test_the_bandwidth_of_a_pair_is_what_its_sender_has_counted(served: Served) -> None:
    before = served.cluster.stats(PREFILL).kv_bytes_sent
    (found,) = served.ask("bandwidth")["bandwidth"].findings
    served.cluster.wait_for(lambda s: all(w.stats.num_requests == 0 for w in s.workers))
    sent = served.cluster.stats(PREFILL).kv_bytes_sent - before
    # 2,032 tokens of 4 layers, keys and values, 4 heads of 32 numbers of 4 bytes, and a tag beside each chunk.
    # What a worker has told its router may lack the end of a small probe before: within 2 %.
    size = 2032 * 4 * 2 * 4 * 32 * 4
    assert sent == pytest.approx(size, rel=0.02)
    values = found.values
    assert (values["sender"], values["receiver"], values["transport"]) == ("prefill-0", "decode-0", "shm")
    measured, seconds, rate = (values[name] for name in ("size_bytes", "seconds", "bytes_per_s"))
    assert isinstance(measured, float) and isinstance(seconds, float)
    assert size <= measured <= 1.01 * size
    assert rate == pytest.approx(measured / seconds)
    assert "while the prompt was computed" in found.found


def test_probes_leave_nothing_running_and_nothing_that_others_find(served: Served) -> None:
    served.ask(*PROBING)
    status = served.cluster.wait_for(lambda s: not (s.router.num_running or s.router.num_queued))
    assert status.router.num_orphaned == 0
    assert status.router.num_failed == 0


def test_a_router_that_writes_to_another_redis_is_named(served: Served, tmp_path: Path) -> None:
    with running_redis() as another:
        config = write_config(tmp_path, state=another.url)
        outcomes = served.ask("journal", "redis", config=config)
        assert another.num_keys() == 0
    found = the_problem(outcomes["journal"])
    assert found.found.startswith("the router does not write to the configured Redis")
    assert "restart the cluster after a change of `state`" in found.remedy


def test_a_cluster_with_tls_is_not_called_before_its_authority_is_named(served: Served, tmp_path: Path) -> None:
    outcome = ask(served.config, "router", address=served.cluster.address)["router"]
    assert "--tls-ca" in the_problem(outcome).remedy
    port = int(served.cluster.address.rpartition(":")[2])
    path = write_config(tmp_path, router={"port": port}, tls={"cert": served.client.ca, "key": served.client.ca})
    (found,) = ask(path, "router")["router"].findings
    assert found.found == f"the router at 127.0.0.1:{port} would have TLS; name its authority with --tls-ca"


def test_workers_without_a_common_transport_then_a_killed_one_are_named(tmp_path: Path) -> None:
    """The same cluster, ever more broken. Its end is not that of a healthy one, so it is ended by hand."""
    config = write_config(tmp_path)
    cluster = PlainCluster(
        BUNDLED_MODEL,
        tmp_path,
        prefill={"transport": "shm"},
        decode={"transport": "gloo"},
        router={"needs_prefill": False, "dead_after_s": 3.0},
    ).__enter__()
    try:
        # It serves with a decode worker alone.
        cluster.wait_for(lambda s: len(s.workers) == 2 and all(w.state == 2 for w in s.workers))
        outcomes = ask(config, "transports", "disaggregation", "bandwidth", address=cluster.address)
        found = the_problem(outcomes["transports"])
        assert found.found.startswith("no transport connects prefill-0 (shm) and decode-0 (gloo) on one host")
        assert found.remedy == "set transfer.transport: auto for all workers, and restart them"
        found = the_problem(outcomes["disaggregation"])
        assert "a hand-off failed; a prompt of 2,032 tokens: local prefill on decode-0 after" in found.found
        assert outcomes["bandwidth"].result is Result.SKIPPED  # there are no metrics pages

        process = cluster.processes[PREFILL].popen
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
        cluster.wait_for(lambda s: any(w.worker_id == PREFILL and w.state != 2 for w in s.workers))
        done = baton("doctor", str(config), "--address", cluster.address, "--json", "--limit", "100")
        checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        assert done.exit_code == 1
        told = [f for f in checks["workers"]["findings"] if f["result"] == "problem"]
        assert len(told) == 1 and told[0]["found"].startswith("prefill-0 at ") and "not ready" in told[0]["found"]
        (told,) = [checks["disaggregation"]["findings"]]
        assert told[0]["result"] == "warning"
        assert told[0]["found"].startswith("the cluster does not disaggregate, it has no prefill worker")
        assert "roles.prefill.devices" in told[0]["remedy"]
    finally:
        cluster.client.close()
        cluster.channel.close()
        cluster._end_processes()


# routers over fake workers


PAIR = (("prefill-0", worker_pb2.ROLE_PREFILL), ("decode-0", worker_pb2.ROLE_DECODE))


class LatePage(http.server.BaseHTTPRequestHandler):
    """A metrics page of a machine whose clock is an hour ahead."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"baton_kv_quarantined_bytes 4096\n")

    def date_time_string(self, timestamp: float | None = None) -> str:
        return email.utils.formatdate(time.time() + 3600, usegmt=True)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def late_page() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), LatePage) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def tell(router: Router, worker: FakeWorker, **info: object) -> None:
    """The worker introduces itself once more; returns when the router has heard it."""
    told = worker_pb2.WorkerInfo(worker_id=worker.worker_id, incarnation=worker.incarnation, role=worker.role, **info)  # type: ignore[arg-type]
    worker.emit(worker_pb2.Event(info=told))
    client = next(w for w in router.server.dispatcher.fleet if w.worker_id == worker.worker_id)
    await until_after(client, "_read", lambda: client.info == told)


async def test_a_clock_that_is_ahead_and_weights_that_differ_are_named(tmp_path: Path, late_page: str) -> None:
    workers = [FakeWorker(name, role) for name, role in PAIR]
    async with running_router(tmp_path / "model", workers) as router:
        await tell(router, workers[0], metrics_address=late_page, weights_revision="aa", model="m")
        await tell(router, workers[1], weights_revision="bb", model="m")
        outcomes = await asyncio.to_thread(
            ask, write_config(tmp_path), "clock-skew", "versions", address=router.address
        )
    found = the_problem(outcomes["clock-skew"])
    # What was measured is an interval of more than a second.
    assert found.found in {f"the clock of prefill-0 is {3600 - late} s or more ahead of this one" for late in range(6)}
    assert "NTP" in found.remedy
    found = the_problem(outcomes["versions"])
    assert found.found == "workers serve different weights: decode-0: m@bb; prefill-0: m@aa"


async def test_a_key_that_is_missing_or_lacks_the_scope_is_named(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(render_keys([ApiKey("k", digest_of("baton-x"), "acme", ("generate",))]))
    async with running_router(tmp_path / "model", [FakeWorker(*each) for each in PAIR], keys_file=str(keys)) as router:
        for key, why in ((None, "API key"), ("baton-x", "admin")):
            config = write_config(tmp_path)
            told = await asyncio.to_thread(ask, config, "router", "workers", address=router.address, api_key=key)
            found = the_problem(told["router"])
            assert found.found.startswith(f"the router at {router.address} wants an API key") and why in found.found
            assert "--api-key" in found.remedy
            assert told["workers"].findings[0].found == "the router does not report its status; see `router`"


async def test_a_key_that_may_look_and_send_nothing_gets_no_probe(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(render_keys([ApiKey("k", digest_of("baton-x"), "acme", ("admin",))]))
    async with running_router(tmp_path / "model", [FakeWorker(*each) for each in PAIR], keys_file=str(keys)) as router:
        config = write_config(tmp_path)
        names = ("router", "disaggregation", "bandwidth")
        told = await asyncio.to_thread(ask, config, *names, address=router.address, api_key="baton-x")
    assert told["router"].result is Result.OK
    for name in names[1:]:
        assert (
            told[name].result is Result.SKIPPED and "name one of the scope `generate`" in told[name].findings[0].found
        )


async def test_a_router_that_serves_nobody_is_named_and_gets_no_probe(tmp_path: Path) -> None:
    async with running_router(tmp_path / "model") as router:
        told = await asyncio.to_thread(
            ask, write_config(tmp_path), "router", "workers", "disaggregation", address=router.address
        )
    assert "its health is NOT_SERVING" in the_problem(told["router"]).found
    assert the_problem(told["workers"]).found == "the router knows no worker"
    assert told["disaggregation"].result is Result.SKIPPED


LOCAL = local("decode-0", "first token predicted after 15 ms", kind=PlacementKind.LOCAL_IDLE).reason
HANDED = disaggregated("prefill-0", "decode-0", "first token predicted after 15 ms").reason


@pytest.mark.parametrize(
    ("placements", "result", "found"),
    [
        ([LOCAL, LOCAL, HANDED], Result.OK, "a prompt of 3 tokens: disaggregated"),
        (
            [LOCAL] * 3,
            Result.WARNING,
            "the cluster did not disaggregate, 3 times: the router predicted that to be faster",
        ),
        (["local prefill on decode-0 after LOST on prefill-0: no other"], Result.PROBLEM, "a hand-off failed"),
        (["retried after LOST on prefill-0: prefill-1 -> decode-0"], Result.PROBLEM, "a hand-off failed"),
    ],
    ids=["busy for a moment", "always busy", "failed", "retried"],
)
async def test_a_busy_router_that_hands_nothing_over_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placements: list[str], result: Result, found: str
) -> None:
    left = iter(placements)
    monkeypatch.setattr("tools.doctor.probes._send", lambda *_: Probe(3, next(left)))
    async with running_router(tmp_path / "model", [FakeWorker(*each) for each in PAIR]) as router:
        told = await asyncio.to_thread(ask, write_config(tmp_path), "disaggregation", address=router.address)
    (finding,) = told["disaggregation"].findings
    assert (finding.result, finding.found.startswith(found)) == (result, True), finding
    assert not list(left)


async def test_fewer_workers_than_the_file_names_are_a_warning(tmp_path: Path) -> None:
    roles = {"prefill": {"devices": 1}, "decode": {"devices": 2}}
    async with running_router(tmp_path / "model", [FakeWorker(*each) for each in PAIR]) as router:
        config = write_config(tmp_path, roles=roles)
        told = await asyncio.to_thread(ask, config, "workers", address=router.address)
    assert the_warning(told["workers"]).found == "the file names 2 decode workers, and the cluster has 1"
