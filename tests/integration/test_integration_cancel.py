"""A request given up while it decodes, prefills or waits: its blocks return at once, and its neighbours notice nothing.

Given up in four ways: the client cancels its call, its connection closes, somebody calls CancelGeneration, or its
deadline passes.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest
from cluster_fixture import BUNDLED_MODEL, DECODE, PREFILL, PlainCluster, Step, Stream, single_process, token_spec

from cluster.errors import BatonError, Cancelled, DeadlineExceeded
from cluster.pb import generation_pb2
from engine.sampling.params import SamplingParams
from tools.client import BatonClient

WAYS = ("cancels its call", "disconnects", "CancelGeneration", "deadline")
DEADLINE_S = 1.0
DECODING_DEADLINES_S = (1.0, 2.0, 4.0)
"""How long a busy machine may take to get a request as far as its first tokens."""
BLOCK_SIZE = 16
CHUNK = 8
MAX_NUM_SEQS = 4
MAX_RUNNING = 6
HEALTHY_PROMPT = [7, 11, 13, 17, 19]
LONGEST = 2000
NUM_COMPARED = 600
PHASES = generation_pb2.Heartbeat


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    with PlainCluster(
        BUNDLED_MODEL,
        tmp_path_factory.mktemp("cluster"),
        kv_cache_tokens=32768,
        prefill={"max_num_batched_tokens": CHUNK},
        decode={"max_num_seqs": MAX_NUM_SEQS},
        router={"max_running_requests": MAX_RUNNING},
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """The first tokens of the healthy stream: more than it gets in most tests."""
    greedy = SamplingParams(temperature=0.0, max_output_tokens=NUM_COMPARED)
    return single_process([HEALTHY_PROMPT], [greedy])[0][0].token_ids


@pytest.fixture
def healthy(cluster: PlainCluster, expected: tuple[int, ...]) -> Iterator[Stream]:
    """A neighbour that decodes all the while; at the end all its tokens are right and none is missing."""
    stream = Stream(cluster, token_spec(HEALTHY_PROMPT, LONGEST), name="healthy")
    stream.wait_for_tokens(3)
    yield stream
    stream.wait_for_tokens(stream.num_tokens + 5)
    stream.cancel()
    stream.join()
    tokens = tuple(stream.token_ids())[:NUM_COMPARED]
    assert tokens == expected[: len(tokens)]
    cluster.wait_idle()


class Victim(Stream):
    """A stream that will be given up in one of the WAYS."""

    def __init__(
        self, cluster: PlainCluster, way: str, prompt: list[int], max_output_tokens: int, deadline_s: float = DEADLINE_S
    ) -> None:
        self._cluster = cluster
        self._way = way
        self._own_client = BatonClient(cluster.address)
        spec = token_spec(prompt, max_output_tokens)
        spec.cache.bypass_prefix_cache = True
        timeout_s = deadline_s if way == "deadline" else None
        super().__init__(cluster, spec, timeout_s=timeout_s, client=self._own_client, name="victim")

    def give_up(self) -> None:
        """Returns once the stream has ended, with the error that its way deserves."""
        match self._way:
            case "cancels its call":
                self.cancel()
            case "disconnects":
                self._own_client.close()
            case "CancelGeneration":
                answer = self._cluster.client.cancel(self.generation_id, "gen-unknown")
                assert list(answer.cancelled_ids) == [self.generation_id]
                assert list(answer.unknown_ids) == ["gen-unknown"]
        self.join()
        self._own_client.close()
        wanted: type[BatonError] = DeadlineExceeded if self._way == "deadline" else Cancelled
        assert isinstance(self.error, wanted), self.error
        if self._way == "CancelGeneration":
            assert self.events[-1].sequence_end.finish_reason == generation_pb2.FINISH_REASON_CANCELLED


def decoding_victim(cluster: PlainCluster, way: str, prompt: list[int]) -> Victim:
    """One that has its first tokens, before its deadline if it has one."""
    for deadline_s in DECODING_DEADLINES_S:
        victim = Victim(cluster, way, prompt, 1500, deadline_s)
        try:
            victim.wait_for_tokens(5)
        except AssertionError:  # which says that it ended first
            victim.give_up()
            if deadline_s == DECODING_DEADLINES_S[-1] or way != "deadline":
                raise
        else:
            break
    return victim


@contextlib.contextmanager
def paused(cluster: PlainCluster, worker_id: str) -> Iterator[None]:
    process = cluster.processes[worker_id].popen
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def prompt_of(length: int) -> list[int]:
    return [(i * 53) % 1000 + 9 for i in range(length)]


def first_step_after_cancel(cluster: PlainCluster, worker_id: str, victim: Stream) -> tuple[Step, Step]:
    """The first step after the worker knew of the cancel, and the one before; from then on the victim never runs.

    A prefill worker learns of it from the router, or first from the decode worker, which gave the hand-off up.
    """
    steps = cluster.steps(worker_id)
    at = next(i for i, step in enumerate(steps) if victim.generation_id in step.cancelled | step.failed)
    assert not any(f"{victim.generation_id}/0" in step.running for step in steps[at:])
    return steps[at - 1], steps[at]


@pytest.mark.parametrize("way", WAYS)
def test_a_request_given_up_while_decoding_leaves_within_one_step(
    way: str, cluster: PlainCluster, healthy: Stream
) -> None:
    num_prompt_blocks = 13
    victim = decoding_victim(cluster, way, prompt_of(num_prompt_blocks * BLOCK_SIZE))
    victim.give_up()
    healthy.wait_for_tokens(healthy.num_tokens + 20)

    last, next_one = first_step_after_cancel(cluster, DECODE, victim)
    assert victim.generation_id in next_one.cancelled
    name = f"{victim.generation_id}/0"
    assert name in last.running and name in next_one.left
    assert f"{healthy.generation_id}/0" in next_one.running
    freed = last.blocks["held"] - next_one.blocks["held"]
    assert freed >= num_prompt_blocks - 1, "its neighbour may have taken one meanwhile"


@pytest.mark.parametrize("way", WAYS)
def test_a_request_given_up_while_prefilling_is_computed_no_further(
    way: str, cluster: PlainCluster, healthy: Stream
) -> None:
    """The prefill worker is stopped in the middle of the prompt, so that the end comes then and not later."""
    num_prompt_tokens = 1900
    victim = Victim(cluster, way, prompt_of(num_prompt_tokens), 50)
    victim.wait_for_phase(PHASES.PHASE_PREFILL)
    with paused(cluster, PREFILL):
        num_before = healthy.num_tokens
        victim.give_up()
        healthy.wait_for_tokens(num_before + 20)
    assert victim.num_tokens == 0
    cluster.wait_for(lambda _: cluster.stats(PREFILL).blocks_held == 0)
    cluster.wait_for(lambda _: cluster.stats(DECODE).num_requests == 1)
    run_another(cluster)

    first_step_after_cancel(cluster, PREFILL, victim)
    name = f"{victim.generation_id}/0"
    assert sum(name in step.running for step in cluster.steps(PREFILL)) < num_prompt_tokens / CHUNK
    assert not any(name in step.running for step in cluster.steps(DECODE))
    assert cluster.steps(DECODE)[-1].blocks["held"] < num_prompt_tokens / BLOCK_SIZE


def run_another(cluster: PlainCluster) -> None:
    """The steps of a request that comes after."""
    Stream(cluster, token_spec(prompt_of(20), 2)).result()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "CancelGeneration"])
@pytest.mark.parametrize("queue", ["of the router", "of the decode worker"])
def test_a_request_given_up_in_a_queue_never_runs(queue: str, way: str, cluster: PlainCluster, healthy: Stream) -> None:
    """A client learns the generation's id when it starts, so CancelGeneration cannot be called before."""
    num_before = cluster.status().router
    fillers = [Stream(cluster, token_spec(prompt_of(3 + i), LONGEST)) for i in range(MAX_NUM_SEQS - 1)]
    for stream in fillers:
        stream.wait_for_tokens(3)
    num_waiting = 2 if queue == "of the router" else 0
    waiting = [Stream(cluster, token_spec(prompt_of(30 + i), 2)) for i in range(num_waiting)]
    cluster.wait_for(lambda status: status.router.num_running == MAX_NUM_SEQS + num_waiting)

    victim = Victim(cluster, way, prompt_of(160), 50)
    if queue == "of the router":
        victim.wait_for_phase(PHASES.PHASE_QUEUED)
        assert cluster.status().router.num_queued == 1
    else:
        cluster.wait_for(lambda _: cluster.stats(DECODE).num_waiting_requests == 1)
    victim.give_up()
    status = cluster.wait_for(
        lambda status: status.router.num_queued == 0 and status.router.num_running == MAX_NUM_SEQS + num_waiting
    )
    cluster.wait_for(lambda _: cluster.stats(DECODE).num_requests == MAX_NUM_SEQS + num_waiting)
    ended = status.router.num_cancelled + status.router.num_rejected
    assert ended == num_before.num_cancelled + num_before.num_rejected + 1
    assert not any(event.HasField("started") or event.HasField("delta") for event in victim.events)

    for stream in fillers:
        stream.wait_for_tokens(stream.num_tokens + 5)
        stream.cancel()
        stream.join()
    for stream in waiting:
        stream.result()
