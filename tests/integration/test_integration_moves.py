"""Requests that move from one decode worker to another while they decode, over real workers, keep their tokens."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cluster_fixture import BUNDLED_MODEL, HAND_OVER, PATIENT, single_process, token_spec
from router_harness import Router
from waiting import Changes, until_after
from workers import Worker, running

from cluster import rpc
from cluster.pb import generation_pb2 as pb
from cluster.settings import RouterSettings
from engine.sampling.params import SamplingParams
from router.program import RouterServer
from router.routing.dispatcher import Dispatcher
from router.routing.fleet import WorkerAddress

Disturb = Callable[[Dispatcher, Sequence[Worker]], Awaitable[None]]

NUM_TOKENS = 480
LIMIT_S = 120.0
LOGPROBS_AGREE_TO = 1e-3
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 11},
    "penalties": {"temperature": 0.7, "seed": 12, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logprobs": {"top_logprobs": 1},
    "two sequences": {"temperature": 0.8, "seed": 13, "n": 2},
    "bypassing the prefix cache": {"temperature": 0.9, "seed": 14},
}


def spec_of(kind: str, prompt: list[int]) -> pb.GenerationSpec:
    given = dict(KINDS[kind])
    penalties = {name: given.pop(name) for name in ("frequency_penalty", "repetition_penalty") if name in given}
    spec = token_spec(prompt, NUM_TOKENS, include_timing=True, **given)
    for name, value in penalties.items():
        setattr(spec.sampling, name, value)
    spec.cache.bypass_prefix_cache = kind.startswith("bypassing")
    return spec


def params_of(kind: str) -> SamplingParams:
    """As the router fills them in: `top_p` is the model's own default."""
    return SamplingParams(**{"temperature": 0.0, "top_p": 0.95, "max_output_tokens": NUM_TOKENS, **KINDS[kind]})


class Told:
    """What one client has been told, each token once and in order."""

    def __init__(self, n: int, changes: Changes) -> None:
        self.changes = changes
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.logprobs: list[list[float]] = [[] for _ in range(n)]
        self.timing = pb.Timing()

    async def read(self, router: Router, spec: pb.GenerationSpec) -> None:
        async for event in router.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec)):
            if event.HasField("delta"):
                tokens = self.tokens[event.delta.index]
                assert event.delta.first_token_index == len(tokens)
                tokens.extend(event.delta.token_ids)
                self.logprobs[event.delta.index].extend(entry.logprob for entry in event.delta.logprobs)
                self.changes.tell()
            elif event.HasField("completed"):
                self.timing = event.completed.timing


def name(dispatcher: Dispatcher, workers: Iterable[Worker], draining: str) -> None:
    roles = {worker.worker_id: worker.role for worker in dispatcher.fleet}
    dispatcher.set_workers(
        WorkerAddress(w.settings.worker_id, w.address, roles[w.settings.worker_id], w.settings.worker_id == draining)
        for w in workers
    )


@asynccontextmanager
async def serving(workers: Sequence[Worker]) -> AsyncIterator[Router]:
    names = tuple(f"{w.settings.role}:{w.settings.worker_id}={w.address}" for w in workers)
    given: dict[str, Any] = HAND_OVER | PATIENT
    settings = RouterSettings.from_values(model_path=str(BUNDLED_MODEL), port=0, workers=names, **given)
    server = RouterServer(settings, lambda line: None)
    addresses = await server.start()
    try:
        async with rpc.create_channel(addresses[0]) as channel:
            router = Router(server, *addresses, channel)
            await router.until_serving()
            await router.until_all_ready()
            yield router
    finally:
        await server.stop()


def run_all(disturb: Disturb, **of_second: Any) -> list[Told]:
    """All kinds of requests together, first on decode-0, while `disturb` moves them; what their clients were told.

    That must be what one engine alone makes of them. `of_second`: settings of decode-1.
    """
    prompts = [random.Random(seed).choices(range(4, 1000), k=30 + 17 * seed) for seed in range(len(KINDS))]
    specs = [spec_of(kind, prompt) for kind, prompt in zip(KINDS, prompts, strict=True)]
    expected = single_process(prompts, [params_of(kind) for kind in KINDS])
    changes = Changes()
    told = [Told(params_of(kind).n, changes) for kind in KINDS]

    async def scenario(workers: Sequence[Worker]) -> None:
        async with serving(workers) as router:
            name(router.server.dispatcher, workers, draining="decode-1")
            calls = [asyncio.create_task(t.read(router, s)) for t, s in zip(told, specs, strict=True)]
            await changes.until(lambda: all(len(tokens) > 8 for t in told for tokens in t.tokens), LIMIT_S)
            await disturb(router.server.dispatcher, workers)
            await asyncio.gather(*calls)

    common: dict[str, Any] = {"model_path": str(BUNDLED_MODEL), "dtype": "float32", "threads": 1}
    with running(
        Worker(worker_id="prefill-0", role="prefill", **common),
        Worker(worker_id="decode-0", role="decode", async_steps="on", **common),
        Worker(worker_id="decode-1", role="decode", **of_second, **common),
    ) as workers:
        asyncio.run(scenario(workers))
    for kind, completions, got in zip(KINDS, expected, told, strict=True):
        assert got.tokens == [list(c.token_ids) for c in completions], kind
    logged = list(KINDS).index("logprobs")
    reference = [token.logprob for token in expected[logged][0].sampled]
    assert told[logged].logprobs[0] == pytest.approx(reference, abs=LOGPROBS_AGREE_TO)
    return told


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tp_size", "block_size"),
    [pytest.param(1, 16, id="alike", marks=pytest.mark.battery), pytest.param(2, 32, id="of another size")],
)
def test_requests_that_move_to_and_fro_while_they_decode_get_the_undisturbed_tokens(
    tp_size: int, block_size: int
) -> None:
    async def to_and_fro(dispatcher: Dispatcher, workers: Sequence[Worker]) -> None:
        for count, draining in ((1, "decode-0"), (2, "decode-1")):
            name(dispatcher, workers, draining)
            wanted = count * len(KINDS)
            await until_after(
                dispatcher.running,
                "move",
                lambda wanted=wanted: dispatcher.counters.moved >= wanted,
                LIMIT_S,
            )
        assert not dispatcher.counters.retried

    for told in run_all(to_and_fro, tp_size=tp_size, block_size=block_size):
        assert told.timing.migrations == 2
        assert told.timing.placement == "moved from decode-1 to decode-0: the worker drains"


@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_while_its_requests_leave_it_costs_no_token() -> None:
    async def kill(dispatcher: Dispatcher, workers: Sequence[Worker]) -> None:
        name(dispatcher, workers, draining="decode-0")
        assert dispatcher.counters.moved > 0
        process = workers[1].ranks[0].popen
        process.kill()
        assert process.wait(20) == -signal.SIGKILL

    for told in run_all(kill):
        assert told.timing.migrations >= 1
