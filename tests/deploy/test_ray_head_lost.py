"""The machine of Ray's head is lost, and another one takes its address. Ray keeps its state in a Redis elsewhere.

Streams at the routers of other machines go on without a head; the next one adopts what runs and replaces what was lost
meanwhile. Ray starts with the commands of docs/operate.md.

Long: `make test-deploy`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from machines import ROOT, RUN_S, Machine, machines, missing
from ray_up_site import CALL_S, RayUpSite
from waiting import until

from benchmarks.redis_server import find_redis_server

pytestmark = [pytest.mark.battery, pytest.mark.timeout(900), pytest.mark.skipif(bool(missing()), reason=missing())]

WORKERS = ("one", "two")
REDIS_PORT = 6380
NUM_STREAMS = 8
TOKENS = 128
AWAY_S = 75.0
"""Longer than the minute after which Ray's daemons end without a head, unless they are told to wait longer."""
MOVED_S = 60.0


class RemoteStreams:
    """`tests/support/steady_load.py` on a machine: streams at routers, until the block that it is entered with ends."""

    def __init__(self, machine: Machine, addresses: list[str]) -> None:
        program = ROOT / "tests" / "support" / "steady_load.py"
        command = f"exec python {program} {NUM_STREAMS} {TOKENS} {' '.join(addresses)}"
        self._process = subprocess.Popen(
            machine.command(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> RemoteStreams:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=CALL_S)
        finally:
            self._process.kill()

    def more(self, count: int) -> dict[str, Any]:
        """Waits for so many more outputs; returns what came of all until now."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(count, file=self._process.stdin, flush=True)
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told


def documented_commands(redis_address: str) -> dict[str, list[str]]:
    """The start commands of docs/operate.md for a head that may be lost."""
    section = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8").partition("## A head that may be lost\n")[2]
    file = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    told = yaml.safe_dump({key: value for key, value in file.items() if key.endswith("_commands")})
    commands: dict[str, list[str]] = yaml.safe_load(told.replace("redis.example:6379", redis_address))
    return commands


@pytest.fixture(scope="module")
def site() -> Iterator[RayUpSite]:
    """It serves."""
    with machines("head", *WORKERS) as there:
        site = RayUpSite(there, **documented_commands(f"{there.operator.host}:{REDIS_PORT}"))
        options = f"--port {REDIS_PORT} --bind 0.0.0.0 --protected-mode no --save '' --daemonize yes"
        site.operator.run(f"{find_redis_server()} {options}")
        told = site.ray("up -y cluster.yaml")
        assert "Baton is serving: 1 prefill + 2 decode workers" in told
        for machine in WORKERS:
            until(lambda machine=machine: site.answers(machine), f"the router of {machine}", CALL_S)  # type: ignore[misc]
        yield site


def test_streams_outlive_the_head_and_the_next_one_replaces_what_was_lost(site: RayUpSite) -> None:
    before, raylets = site.pids("one"), {name: site.raylet(name) for name in WORKERS}
    with RemoteStreams(site.operator, [site.address(name) for name in WORKERS]) as streams:
        streams.more(NUM_STREAMS)
        host, lost_at = site.head.host, time.monotonic()
        site.machines.lose("head")
        assert streams.more(2 * NUM_STREAMS)["problems"] == []

        victim = next(w for w in site.workers("one") if w["role"] == "decode")
        site.machines[victim["node"]].run(f"kill -9 {victim['ranks'][0]['pid']}")
        until(lambda: site.ratio("one") == (1, 1), "the lost worker is missed", RUN_S)
        while time.monotonic() < lost_at + AWAY_S:
            told = streams.more(NUM_STREAMS)
        print(f"{told['num_done']} outputs without a head")
        assert told["problems"] == []
        assert {name: site.raylet(name) for name in WORKERS} == raylets

        site.machines.start("head", host)
        site.operator.run("rm /tmp/ray/cluster-baton.state")
        back_at = time.monotonic()
        site.ray("up -y cluster.yaml")
        until(lambda: site.ratio("one") == (1, 2), "a worker in the place of the lost one", CALL_S)
        print(f"the lost worker was replaced {time.monotonic() - back_at:.0f} s after `ray up` began")
        assert streams.more(2 * NUM_STREAMS)["problems"] == []
        after = site.pids("one")
        kept = {worker: pids for worker, pids in before.items() if worker != victim["worker_id"]}
        assert after.items() >= kept.items(), "a worker was started again"
        assert after[victim["worker_id"]] != before[victim["worker_id"]]
        assert {name: site.raylet(name) for name in WORKERS} == raylets
        until(lambda: site.answers("head"), "the router of the head", CALL_S)


def test_processes_of_the_head_that_are_killed_come_back_on_the_same_machine(site: RayUpSite) -> None:
    before = site.pids("one")
    with RemoteStreams(site.operator, [site.address(name) for name in WORKERS]) as streams:
        streams.more(NUM_STREAMS)
        site.head.run("pkill -9 -f 'gcs_server|raylet|ray::'")
        assert streams.more(2 * NUM_STREAMS)["problems"] == []
        site.ray("up -y cluster.yaml")
        until(lambda: site.answers("head"), "the router of the head", CALL_S)
        assert site.pids("one") == before
        site.baton("rebalance 2:1")
        until(lambda: site.ratio() == (2, 1), "another ratio", MOVED_S)
        assert site.pids() == before, "a worker changes its role and stays"
        assert streams.more(2 * NUM_STREAMS)["problems"] == []


def test_stop_ends_what_a_head_before_has_started(site: RayUpSite) -> None:
    assert site.baton("stop --address auto").endswith("stopped\n")
    for name in WORKERS:
        left = site.machines[name].run("ps -eo args")
        assert "ray::Process" not in left, left
    assert site.num_raylets() == 3
