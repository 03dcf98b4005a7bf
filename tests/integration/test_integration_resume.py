"""Streams that outlive a router, and a Redis that does not answer: real processes, exact outputs."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_fixture import BUNDLED_MODEL, PlainCluster, Stream, token_spec
from serve_process import ROOT, Serve
from waiting import until

from benchmarks.redis_server import RedisServer, running_redis
from cluster.config.diff import set_values
from cluster.pb import admin_pb2
from cluster.pb import generation_pb2 as pb
from tools.client import AdminClient, BatonClient
from tools.generation_stream import Transcript

WAIT_S = 90.0
NUM_TOKENS = 120
LONG_TOKENS = 600
pytestmark = pytest.mark.timeout(240)


def specs() -> list[pb.GenerationSpec]:
    """Greedy and seeded, with stop strings, with logprobs, n = 2."""
    return [
        token_spec([5, 6, 7], NUM_TOKENS),
        token_spec(range(4, 80), NUM_TOKENS, temperature=0.9, seed=1, top_logprobs=1),
        token_spec([9, 8, 7], NUM_TOKENS, temperature=0.9, seed=2, n=2),
        token_spec([40, 50, 60], NUM_TOKENS, temperature=0.7, seed=3, stop=["KING", "thou art"]),
    ]


def read(client: BatonClient, spec: pb.GenerationSpec, on_token: Callable[[int], None] = lambda count: None) -> Any:
    """What a client that resumes ends up with; the transcript checks that each token comes once."""
    transcript = Transcript()
    with client.resuming_stream(spec, timeout_s=WAIT_S) as stream:
        for event in stream:
            transcript.add(event)
            on_token(event.delta.token_count)
    assert transcript.is_complete
    return [vars(sequence) for sequence in transcript.sequences]


class Served:
    """`baton serve` with two routers and no Redis: they share the journal that is there by default."""

    def __init__(self, folder: Path) -> None:
        (folder / "models").symlink_to(ROOT / "models")
        text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
        file = folder / "cluster.yaml"
        file.write_text(set_values(text, {"router.replicas": 2}), encoding="utf-8")
        self._serve = Serve("--config", str(file), "--port", "0")
        self.address = self._serve.address
        self._admin = AdminClient(self._serve.admin_address)

    def router(self, name: str = "router") -> admin_pb2.ProcessStatus:
        return next(p for p in self._admin.cluster().processes if p.name == name)

    def serving(self) -> admin_pb2.ProcessStatus:
        """The router that has connections of clients: both are at one port, and Linux chooses."""
        routers = [self.router("router"), self.router("router-1")]
        port = int(self.address.rpartition(":")[2])
        return next(
            router
            for router in routers
            for connection in psutil.Process(router.pids[0]).net_connections("tcp")
            if connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        )

    def journals(self) -> set[Path]:
        """Files that the routers have open."""
        names = (served.path for pid in self._pids() for served in psutil.Process(pid).open_files())
        return {Path(name) for name in names if Path(name).name.startswith("journal-")}

    def ray_folder(self) -> Path:
        return self._serve.ray_folder()

    def hang_up(self) -> None:
        """Nobody reads the output of `baton serve` any more, which has more to print then: a router that was lost is
        ready again."""
        before = self.router("router-1")
        self._serve.hang_up(lambda: os.kill(before.pids[0], signal.SIGKILL))
        self.until_back(before)

    def until_back(self, before: admin_pb2.ProcessStatus) -> admin_pb2.ProcessStatus:
        """The router that was killed, once it is ready again."""

        def is_back() -> bool:
            now = self.router(before.name)
            return now.num_starts > before.num_starts and now.state == "ready"

        until(is_back, "the router is ready again", WAIT_S)
        return self.router(before.name)

    def end(self) -> int:
        """Its exit code."""
        self._admin.close()
        return self._serve.press_ctrl_c()

    def close(self) -> None:
        self._admin.close()
        self._serve.close()

    def _pids(self) -> list[int]:
        return [pid for name in ("router", "router-1") for pid in self.router(name).pids]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    yield served
    served.close()


def test_all_streams_go_on_when_the_router_of_the_default_cluster_is_killed(served: Served) -> None:
    """It is killed once each has begun: a client that has had no answer has no id to come back with."""
    copies, before = 2, served.router()
    wanted = specs() * copies
    told, lock = [0] * len(wanted), threading.Lock()

    def kill_in_the_middle(number: int, count: int) -> None:
        with lock:
            was_before, told[number] = not is_middle(), told[number] + count
            if was_before and is_middle():
                os.kill(before.pids[0], signal.SIGKILL)

    def is_middle() -> bool:
        return all(told) and sum(told) >= 40 * len(told)

    with BatonClient(served.address) as client:
        undisturbed = [read(client, spec) for spec in specs()] * copies
        before = served.serving()
        with ThreadPoolExecutor(len(wanted)) as pool:
            hooks = [partial(kill_in_the_middle, number) for number in range(len(wanted))]
            reads = [pool.submit(read, client, spec, hook) for spec, hook in zip(wanted, hooks, strict=True)]
            outputs = [future.result() for future in reads]
    after = served.until_back(before)
    assert after.num_starts == before.num_starts + 1 and after.address == before.address, "the router was not killed"
    assert outputs == undisturbed


def check_resumed_elsewhere(address: str, other: str, undisturbed: Any) -> None:
    """A stream of the second of `specs` that is left where it may be resumed goes on at another router."""
    spec = specs()[1]
    with BatonClient(address) as client, BatonClient(other) as elsewhere:
        spec.resume.SetInParent()
        transcript, is_resumable = Transcript(), False
        with client.stream(spec, timeout_s=WAIT_S) as stream:
            for event in stream:
                transcript.add(event)
                is_resumable = event.resumable if event.HasField("resumable") else is_resumable
                if is_resumable and transcript.sequences and len(transcript.sequences[0].token_ids) > 50:
                    break
        assert transcript.started is not None
        resume = pb.ResumeFrom(
            generation_id=transcript.started.generation_id, next_token_index=len(transcript.sequences[0].token_ids)
        )
        rest = pb.GenerationSpec(resume=resume)
        with elsewhere._open(rest, WAIT_S, True) as stream:  # over a connection of its own
            for event in stream:
                if not event.HasField("started"):
                    transcript.add(event)
    assert transcript.is_complete
    assert [vars(sequence) for sequence in transcript.sequences] == undisturbed


def test_a_stream_is_resumed_at_another_router(served: Served) -> None:
    """Both are at one port: with eight connections more it is all but sure that some are the other router's."""
    assert served.router("router-1").address == served.address
    with BatonClient(served.address) as client:
        undisturbed = read(client, specs()[1])
    for _ in range(8):
        check_resumed_elsewhere(served.address, served.address, undisturbed)


def test_the_journal_is_one_private_file(served: Served) -> None:
    files = served.journals()
    assert len({file.name.partition(".db")[0] for file in files}) == 1, files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_a_cluster_whose_output_nobody_reads_serves_on_ends_its_streams_and_leaves_no_file(
    served: Served,
) -> None:
    """The last test of this cluster: it ends it."""
    files = {*served.journals(), served.ray_folder()}
    served.hang_up()
    transcript = Transcript()
    ends: list[Future[int]] = []
    with (
        BatonClient(served.address) as client,
        client.stream(token_spec([5, 6, 7], LONG_TOKENS), timeout_s=WAIT_S) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        for event in stream:
            transcript.add(event)
            if event.HasField("delta") and not ends:
                ends.append(pool.submit(served.end))
    assert transcript.is_complete and transcript.sequences[0].num_tokens == LONG_TOKENS
    assert ends[0].result() == 0
    assert not [file for file in files if file.exists()]


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def test_nothing_fails_while_redis_is_killed_flushed_stopped_and_started(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    def stand_still() -> None:
        own_redis.pause()
        threading.Timer(0.5, own_redis.go_on).start()

    faults = [own_redis.flush, stand_still, own_redis.kill, own_redis.start, own_redis.flush]
    with PlainCluster(
        BUNDLED_MODEL,
        tmp_path,
        router={"state": own_redis.url, "resume_window_s": 1.0},
        kv_cache_tokens=16384,
    ) as cluster:
        wanted = specs()
        wanted[0].stopping.max_output_tokens = 2 * NUM_TOKENS  # messages grow while they wait for Redis
        undisturbed = [read(cluster.client, spec) for spec in wanted]
        told, done = [0], [0]

        def disturb(count: int) -> None:
            """A fault every so many tokens of one stream."""
            told[0] += count
            if done[0] < len(faults) and told[0] > 40 * (done[0] + 1):
                faults[done[0]]()
                done[0] += 1

        with ThreadPoolExecutor(len(wanted)) as pool:
            others = [pool.submit(read, cluster.client, spec) for spec in wanted[1:]]
            first = read(cluster.client, wanted[0], disturb)
            outputs = [first, *(future.result() for future in others)]
        assert done[0] == len(faults)
        assert outputs == undisturbed
        status = cluster.status().router
        assert (status.num_failed, status.num_rejected) == (0, 0)
        check_resumed_elsewhere(cluster.address, str(cluster.add_router("other")["address"]), undisturbed[1])


def test_one_that_nobody_comes_back_to_is_freed_on_the_workers(tmp_path: Path) -> None:
    """The cluster's own end checks that no worker holds anything any more."""
    with PlainCluster(BUNDLED_MODEL, tmp_path, router={"resume_window_s": 0.2}, kv_cache_tokens=16384) as cluster:
        spec = token_spec([5, 6, 7], 2000)
        spec.resume.SetInParent()
        stream = Stream(cluster, spec)
        stream.wait_for_tokens(5)
        stream.cancel()
        status = cluster.wait_for(lambda status: status.router.num_orphaned == 1)
        assert status.router.num_finished == 0
