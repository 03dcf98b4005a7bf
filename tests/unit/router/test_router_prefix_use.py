"""What a router keeps of its prompts' beginnings and of what was cached of them."""

from __future__ import annotations

import pytest
from fake_worker import LENGTH, PREFILL, phase, tokens
from router_harness import ids
from wired_router import ManualClock, WiredRouter, run

from cluster.lifecycle import RequestKey
from cluster.pb import admin_pb2, worker_pb2
from cluster.prefix_hash import GROUP
from router.api.call import Principal
from router.observe import prefix_use

SHARED = "abcdefghijklmnop"
assert len(SHARED) == GROUP


class Served:
    """A router of one worker, with blocks of a single token."""

    def __init__(self, clock: ManualClock) -> None:
        self.router = WiredRouter(clock, ["d0"], needs_prefill=False)
        self.worker = self.router.workers["d0"]
        self.worker.lose()
        self.worker.open(block_size=1, num_blocks=1000)

    def ask(self, text: str, num_cached: int = 0, tenant: str = "a") -> None:
        client = self.router.submit(text=text, max_output_tokens=1, principal=Principal("key", tenant))
        key = RequestKey(client.request_id, 1).to_proto()
        self.worker.emit(phase(key, PREFILL, num_cached), tokens(key, 0, ids("z"), finish_reason=LENGTH))

    def response(self, num_prefixes: int = 10) -> admin_pb2.GetCacheResponse:
        request = admin_pb2.GetCacheRequest(num_prefixes=num_prefixes)
        return self.router.activity.prefix_use.response(request, self.router.dispatcher.fleet.holders)


def test_prefixes_that_prompts_share_are_told_as_long_as_they_share_them() -> None:
    async def scenario(clock: ManualClock) -> None:
        served = Served(clock)
        served.ask(SHARED * 2 + "tail")
        assert not served.response().prefixes, "one prompt shares nothing"
        served.ask(SHARED * 2 + "other tail", num_cached=32)
        [both] = served.response().prefixes
        served.ask(SHARED + "another way on, ", num_cached=16)
        longest, shortest = served.response().prefixes
        assert longest == both and (both.num_tokens, both.num_requests, both.tenant) == (32, 2, "a")
        assert (shortest.num_tokens, shortest.num_requests) == (16, 3)
        assert len(served.response(1).prefixes) == 1
        [sums] = served.response().tenants
        assert (sums.tenant, sums.num_requests, sums.num_cached_tokens) == ("a", 3, 48)
        assert sums.num_prompt_tokens == 36 + 42 + 32

    run(scenario)


def test_who_holds_a_prefix_now_is_told_and_nobody_after_it_was_evicted() -> None:
    async def scenario(clock: ManualClock) -> None:
        served = Served(clock)
        for _ in range(2):
            served.ask(SHARED + "z")
        [prefix] = served.response().prefixes
        assert prefix.worker_ids == []
        stored = worker_pb2.CacheEvents(sequence_number=1, snapshot=True, stored=[prefix.hash])
        served.worker.emit(worker_pb2.Event(cache=stored))
        assert served.response().prefixes[0].worker_ids == ["d0"]
        evicted = worker_pb2.CacheEvents(sequence_number=2, evicted=[prefix.hash])
        served.worker.emit(worker_pb2.Event(cache=evicted))
        assert served.response().prefixes[0].worker_ids == []

    run(scenario)


def test_a_request_without_a_token_does_not_count() -> None:
    async def scenario(clock: ManualClock) -> None:
        served = Served(clock)
        for _ in range(2):
            served.router.dispatcher.cancel(served.router.submit(text=SHARED * 2).request_id, "by the test")
        assert served.response() == admin_pb2.GetCacheResponse()

    run(scenario)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_use, "MOST_PREFIXES", 3)
    monkeypatch.setattr(prefix_use, "MOST_TENANTS", 2)
    monkeypatch.setattr(prefix_use, "MOST_GROUPS", 2)

    async def scenario(clock: ManualClock) -> None:
        served = Served(clock)
        for first in "qrs":
            for _ in range(2):
                served.ask((first + SHARED[1:]) * 3 + "z", tenant=first)
        response = served.response()
        assert sorted(sums.tenant for sums in response.tenants) == ["r", "s"]
        assert {(prefix.tenant, prefix.num_tokens) for prefix in response.prefixes} <= {("r", 32), ("s", 32)}
        assert ("s", 32) in {(prefix.tenant, prefix.num_tokens) for prefix in response.prefixes}

    run(scenario)
