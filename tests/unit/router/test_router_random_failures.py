"""The router among workers that die, come back, fail and are renamed at random, with everything under way delayed.

Whatever happens: each request ends once, its client has each token once and of one story, nobody holds anything for it
afterwards, and none fails that had an attempt left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_harness import EOS, TOKENIZER
from wired_router import QUEUE_TIMEOUT_S, Client, ManualClock, WiredRouter, run
from wired_workers import ModelWorker, Story

from cluster.errors import FailedPrecondition, Overloaded, Unavailable
from cluster.lifecycle import TRANSITIONS, RequestKey, RequestState
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from router.routing import migration
from router.routing.retry import MAX_ATTEMPTS, RETRYABLE

S = RequestState
FINAL = [worker_pb2.Failed.REASON_INTERNAL, worker_pb2.Failed.REASON_INVALID]
DRAIN_S = 20.0
ACTIONS = (
    *["submit"] * 3,
    *["hear"] * 8,
    *["speak"] * 8,
    *["work"] * 10,
    *["take"] * 2,
    *["fail"] * 3,
    *["die", "open"] * 2,
    "fail for good",
    "cancel",
    "rename",
    *["relabel"] * 2,
    "wait",
    "drain",
)
WORKER_IDS = ("p0", "p1", "p2", "d0", "d1")

Step = tuple[str, int]


class World:
    """One router, its workers and its clients. Every choice is a number from the test."""

    def __init__(self, clock: ManualClock, seen: Counter[str], revisions: Sequence[str] = ()) -> None:
        """`revisions`: weights of which each life of a worker has one; none: they are not known."""
        self.clock = clock
        self.seen = seen
        self.number = 0
        self.revisions = revisions
        self.router = WiredRouter(clock, WORKER_IDS, max_running_requests=3)
        self.stories: dict[RequestKey, Story] = {}
        self.workers: dict[str, ModelWorker] = {}
        self.clients: list[Client] = []
        self.has_final: set[str] = set()
        self.draining: asyncio.Task[None] | None = None
        self._meet()
        for worker in self.workers.values():
            assert worker.wire.info is not None
            worker.incarnation = worker.wire.info.incarnation
            if revisions:
                worker.die()
        self._open_all()

    def pick(self, below: int) -> int:
        """Spreads one drawn number over as many choices as are asked for."""
        self.number = (self.number * 1103515245 + 12345) % 2**31
        return (self.number >> 8) % below

    async def act(self, action: str, number: int) -> None:
        self.number = number
        worker = list(self.workers.values())[self.pick(len(self.workers))]
        match action:
            case "submit":
                stop = ["s"] if self.pick(2) else []
                n, most, wanted = 1 + self.pick(2), 1 + self.pick(5), (None, 0, 2)[self.pick(3)]
                self.clients.append(self.router.submit(n=n, max_output_tokens=most, stop=stop, prompt_logprobs=wanted))
            case "hear":
                worker.hear()
            case "speak":
                worker.speak(1 + self.pick(3))
            case "work":
                worker.work()
            case "take":
                for client in self.clients:
                    client.take()
            case "fail" | "fail for good":
                self._fail(worker, is_final=action != "fail")
            case "die":
                if worker.wire.is_ready:
                    worker.die()
            case "open":
                self._open_all()
            case "cancel":
                if self.clients:
                    client = self.clients[self.pick(len(self.clients))]
                    self.router.dispatcher.cancel(client.request_id, "by the test")
            case "rename":
                kept = [worker_id for worker_id in WORKER_IDS if self.pick(4)]
                self.router.name(kept)
                await self.clock.advance(0.0)
                self._meet()
            case "relabel":
                relabelled = [worker_id for worker_id in WORKER_IDS if self.pick(3) == 0]
                draining = [worker_id for worker_id in WORKER_IDS if self.pick(5) == 0]
                self.router.name(list(self.router.workers), relabelled=relabelled, draining=draining)
            case "wait":
                await self.clock.advance(QUEUE_TIMEOUT_S / 3)
            case "drain":
                if self.draining is None and self.pick(4) == 0:
                    self.draining = asyncio.create_task(self.router.dispatcher.drain(DRAIN_S))
                    await self.clock.advance(0.0)
        self.seen[action] += 1

    async def settle(self) -> None:
        """No more faults: everybody is there, and everything that can be done is done."""
        self.router.name(WORKER_IDS)
        await self.clock.advance(0.0)
        self._meet()
        self._open_all()
        for _ in range(10_000):
            if not sum(worker.hear() | worker.speak() | worker.work() for worker in list(self.workers.values())):
                break
        if self.draining is not None:
            await self.clock.advance(DRAIN_S)
            assert self.draining.done()
            for worker in list(self.workers.values()):
                while worker.hear() | worker.work() | worker.speak():
                    pass

    def check(self) -> None:
        for client in self.clients:
            client.take()
            self._check_client(client)
        self.router.check_idle()
        self.seen["moved"] += self.router.dispatcher.counters.moved
        for worker in self.workers.values():
            assert not worker.tasks, f"{worker.wire.worker_id} still holds {list(worker.tasks)}"

    def _check_client(self, client: Client) -> None:
        live = client.live
        states = [entry.state for entry in live.lifecycle.history]
        assert [state for state in states if not TRANSITIONS[state]] == [states[-1]], live.lifecycle.story()
        self.seen[states[-1].value] += 1
        self.seen[f"after attempt {live.key.attempt}"] += 1
        attempts = range(1, live.key.attempt + 1)
        stories = [self.stories[key] for a in attempts if (key := RequestKey(client.request_id, a)) in self.stories]
        if states[-1] is S.FINISHED:
            assert client.completed is not None
            assert client.completed.usage.completion_tokens == sum(map(len, client.tokens))
            stories = stories[-1:]
            assert len(client.ends) == len(client.tokens)
        elif states[-1] is S.FAILED:
            self._check_failure(client, states)
        for index, told in enumerate(client.tokens):
            assert not told or any(story.has(index, told) for story in stories), (told, stories)
            self._check_sequence(client, index)

    def _check_sequence(self, client: Client, index: int) -> None:
        told, end = client.tokens[index], client.ends.get(index)
        if end is None:
            return
        shown = told[:-1] if end.HasField("stop_token_id") else told
        text = TOKENIZER.decode(shown)
        if end.stop_string:
            assert client.texts[index] + end.stop_string == text
        elif end.finish_reason != pb.FINISH_REASON_CANCELLED:
            assert client.texts[index] == text
            assert (told[-1] == EOS) == end.HasField("stop_token_id")

    def _check_failure(self, client: Client, states: list[RequestState]) -> None:
        """Only when nothing was left to try."""
        live = client.live
        if client.request_id in self.has_final:
            return
        assert isinstance(live.error, Unavailable | Overloaded | FailedPrecondition)
        has_waited = states[-2] is S.QUEUED and live.key.attempt > 1
        assert has_waited or live.key.attempt >= MAX_ATTEMPTS or self.draining is not None, live.lifecycle.story()

    def _fail(self, worker: ModelWorker, *, is_final: bool) -> None:
        """A hand-off that is under way, or for good any request."""
        able = [k for k, t in worker.tasks.items() if is_final or t.is_waiting or worker.wire.worker_id[0] == "p"]
        if not able:
            return
        key = able[self.pick(len(able))]
        if is_final:
            self.has_final.add(key.request_id)
        reasons = FINAL if is_final else sorted(RETRYABLE)
        worker.fail(key, reasons[self.pick(len(reasons))])
        self.seen["failed"] += 1

    def _meet(self) -> None:
        """Follows the router's set: a worker that is named anew begins anew, one that was let go is gone."""
        for worker_id, wire in self.router.workers.items():
            known = self.workers.get(worker_id)
            if known is None or known.wire is not wire:
                if known is not None and known.wire.is_ready:  # it is named again while it still runs something
                    known.die()
                self.workers[worker_id] = ModelWorker(wire, self.workers, self.stories, self.pick)
        for worker in self.workers.values():
            if not worker.wire.is_ready:
                worker.die()

    def _open_all(self) -> None:
        for worker_id, wire in self.router.workers.items():
            if not wire.is_ready:
                self.workers[worker_id].open(self.revisions[self.pick(len(self.revisions))] if self.revisions else "")


def play(steps: Sequence[Step], seen: Counter[str], revisions: Sequence[str] = ()) -> None:
    async def scenario(clock: ManualClock) -> None:
        world = World(clock, seen, revisions)
        for action, number in steps:
            await world.act(action, number)
        await world.settle()
        world.check()

    run(scenario)


@pytest.fixture(autouse=True, scope="module")
def short_outputs_move() -> Iterator[None]:
    """Outputs are short here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migration, "FEWEST_TOKENS_LEFT", 1)
        yield


STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**16)), min_size=20, max_size=200)


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(STEPS)
def test_whatever_fails_each_request_ends_once_and_nothing_is_left(steps: list[Step]) -> None:
    play(steps, Counter())


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(STEPS)
def test_whatever_fails_no_output_comes_from_two_weights(steps: list[Step]) -> None:
    play(steps, Counter(), ("a", "b"))
