"""A router's knowledge of real workers' prefix caches: it says beforehand what each prompt is then found to have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checkpoints import VOCAB_SIZE, make_checkpoint
from cluster_fixture import token_spec
from router_harness import Router
from workers import Worker, running

from cluster import rpc
from cluster.pb import generation_pb2 as pb
from cluster.settings import RouterSettings
from router.program import RouterServer
from router.routing.prefix_index import PromptHashes

MAX_MODEL_LEN = 256
BLOCK_SIZE = 16


@dataclass
class Served:
    """A router in this process; `wrong` gathers what it promised and did not come true."""

    router: Router
    wrong: list[tuple[int, int]] = field(default_factory=list)

    def promised(self, worker_id: str, prompt: list[int], salt: str) -> int:
        worker = self.router.server.dispatcher.fleet[worker_id]
        return worker.num_cached_tokens(PromptHashes(prompt, salt.encode()))

    async def generate(self, worker_id: str, prompt: list[int], salt: str) -> int:
        """Tokens of the prompt that were found by who prefilled it, which is to be this worker."""
        promised = self.promised(worker_id, prompt, salt)
        spec = token_spec(prompt, 4)
        spec.cache.cache_salt = salt
        response = await self.router.generation.Generate(pb.GenerateRequest(spec=spec))
        found = int(response.usage.cached_tokens)
        if found != promised:
            self.wrong.append((promised, found))
        return found


@asynccontextmanager
async def serving(folder: Path, *workers: Worker) -> AsyncIterator[Served]:
    names = tuple(f"{w.settings.role}:{w.settings.worker_id}={w.address}" for w in workers)
    settings = RouterSettings.from_values(
        model_path=str(folder),
        port=0,
        workers=names,
        max_model_len=MAX_MODEL_LEN,
        needs_prefill=len(workers) > 1,
        policy="least_loaded",  # which hands every prompt over
    )
    server = RouterServer(settings, lambda line: None)
    addresses = await server.start()
    try:
        async with rpc.create_channel(addresses[0]) as channel:
            router = Router(server, *addresses, channel)
            await router.until_serving()
            await router.until_all_ready()
            yield Served(router)
    finally:
        await server.stop()


def make_worker(folder: Path, worker_id: str) -> Worker:
    """A pool of two of the longest requests: cached prefixes are evicted soon."""
    return Worker(
        worker_id=worker_id,
        role=worker_id.split("-")[0],
        model_path=str(folder),
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        kv_cache_tokens=2 * MAX_MODEL_LEN,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("worker_ids", [["prefill-0", "decode-0"], ["decode-0"]], ids=["disaggregated", "local"])
def test_what_the_router_promises_of_a_prompt_is_what_its_worker_finds(worker_ids: list[str], tmp_path: Path) -> None:
    folder, chance = make_checkpoint("llama", tmp_path / "llama"), random.Random(7)
    stem = [chance.randrange(1, VOCAB_SIZE) for _ in range(120)]
    first = worker_ids[0]

    async def scenario(*workers: Worker) -> None:
        async with serving(folder, *workers) as router:
            assert [router.promised(worker_id, stem, "a") for worker_id in worker_ids] == [0] * len(worker_ids)
            assert await router.generate(first, stem, "a") == 0
            assert [router.promised(worker_id, stem, "a") for worker_id in worker_ids] == [112] * len(worker_ids)
            assert router.promised(first, stem, "b") == 0
            assert await router.generate(first, stem, "b") == 0
            assert await router.generate(first, stem, "a") == 112
            assert await router.generate(first, [*stem[:70], *stem[:70]], "a") == 64
            num_forgotten = 0
            for _ in range(30):  # the pool holds a few of these
                own = [chance.randrange(1, VOCAB_SIZE) for _ in range(chance.randint(1, 100))]
                await router.generate(first, stem[: chance.choice((0, 40, 100))] + own, chance.choice("ab"))
                num_forgotten += router.promised(first, stem, "a") < 112
            assert num_forgotten > 0
            assert not router.wrong, f"(promised, found): {router.wrong}"

    with running(*(make_worker(folder, worker_id) for worker_id in worker_ids)) as workers:
        asyncio.run(scenario(*workers))
