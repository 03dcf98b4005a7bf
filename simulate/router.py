"""One life of one simulated router: the real dispatcher and the real API on it, and the store that routers share.

A call runs in the router's process: when that dies, it writes and stores nothing any more, and its caller learns that
the router is lost. What the router had told is in the store, from which another one goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from cluster.pb import generation_pb2
from cluster.settings import RouterSettings
from cluster.state import Claim, Log, MemoryStore, Outcome, Store, StoreAway, Write
from router.api.call import Call, Principal
from router.api.chat_template import ChatTemplate
from router.api.served_model import ServedModel
from router.api.service import GenerationService
from router.observe.tracing import Traces
from router.routing.dispatcher import Dispatcher
from router.routing.fleet import WorkerAddress
from router.stream.client_stream import MessageRate
from simulate.model import END_TOKEN
from simulate.network import Host, Network
from simulate.virtual_loop import VirtualLoop
from simulate.watched_router import DigitText

T = TypeVar("T")

MODEL = "simulated"
STORE_S = 500e-6
"""Seconds of a round trip to the store."""
MESSAGES_PER_S = 500.0


class RouterLost(Exception):
    """The router of a call has died."""


class RouterWorld(Protocol):
    """The parts of a cluster that a router uses."""

    @property
    def loop(self) -> VirtualLoop: ...
    @property
    def network(self) -> Network: ...
    @property
    def store(self) -> SimulatedStore: ...
    @property
    def random(self) -> random.Random: ...


class SimulatedStore:
    """The store of all routers, behind a network; `away` for a while, it answers nobody."""

    outlives_process = True

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._logs = MemoryStore(loop.time)
        self._away_until = 0.0
        self._loses_answers = False

    def go_away(self, seconds: float, *, loses_answers: bool) -> None:
        """`loses_answers`: what is asked for meanwhile is done, and only the answers are lost."""
        self._away_until, self._loses_answers = self._loop.time() + seconds, loses_answers

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        return await self._asked(lambda: self._write(writes))

    async def _write(self, writes: Sequence[Write]) -> list[Outcome]:
        """Raises AssertionError where a log goes back to a router from which another one has taken it."""
        before = [await self._logs.read(write.key) for write in writes]
        outcomes = await self._logs.write(writes)
        for write, log in zip(writes, before, strict=True):
            after = await self._logs.read(write.key)
            if log is not None and after is not None:
                assert after.claim.epoch >= log.claim.epoch, f"{write.key} went back to {after.claim} from {log.claim}"
        return outcomes

    async def read(self, key: str) -> Log | None:
        return await self._asked(lambda: self._logs.read(key))

    async def take(self, key: str, held: Claim, wanted: Claim, ttl_s: float) -> bool:
        return await self._asked(lambda: self._logs.take(key, held, wanted, ttl_s))

    async def delete(self, keys: Sequence[tuple[str, Claim]]) -> None:
        await self._asked(lambda: self._logs.delete(keys))

    async def probe(self) -> None:
        await self._asked(self._logs.probe)

    async def reset(self) -> None:
        return

    async def close(self) -> None:
        return

    async def _asked(self, call: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(STORE_S / 2)
        is_away = self._loop.time() < self._away_until
        if is_away and not self._loses_answers:
            raise StoreAway("it is away")
        answer = await call()
        await asyncio.sleep(STORE_S / 2)
        if is_away:
            raise StoreAway("its answer is lost")
        return answer


class SimulatedRouter:
    """Serves from when it is made; `die` ends it as a killed process ends."""

    def __init__(
        self,
        world: RouterWorld,
        name: str,
        settings: RouterSettings,
        workers: Iterable[WorkerAddress],
        max_model_len: int,
        dispatcher_class: type[Dispatcher] = Dispatcher,
    ) -> None:
        self.name = name
        self.is_dead = False
        self.died: asyncio.Future[None] = world.loop.create_future()
        self._loop = world.loop
        self._host = Host(world.network, f"{name}:1")
        rng = random.Random(world.random.random())
        self.dispatcher = dispatcher_class(
            settings, lambda: None, world.loop.time, open_channel=self._host.channel, rng=rng
        )
        self.dispatcher.set_workers(workers)
        tokenizer: Any = SimulatedTokenizer()
        executor: Any = None  # requests are short
        store: Store = world.store
        self.service = GenerationService(
            ServedModel(MODEL, END_TOKEN + 1, max_model_len, 16, ()),
            tokenizer,
            self.dispatcher,
            executor,
            MessageRate(MESSAGES_PER_S),
            store,
            Traces(),
            settings,
            fresh_id=lambda: f"gen-{rng.getrandbits(96):024x}",
            wall_clock=world.loop.time,
        )
        self.service.resumables.start()

    async def generate(
        self,
        spec: generation_pb2.GenerationSpec,
        principal: Principal,
        time_left_s: float | None,
        write: Callable[[generation_pb2.GenerateStreamResponse], Any],
    ) -> None:
        """The whole call of a client; `write` takes each message. Raises BatonError, or RouterLost."""
        ends_at = None if time_left_s is None else self._loop.time() + time_left_s

        async def deliver(message: generation_pb2.GenerateStreamResponse) -> None:
            if self.is_dead:
                await self._loop.create_future()  # never
            await write(message)

        call = Call(principal, (), lambda: None if ends_at is None else ends_at - self._loop.time(), deliver)
        request = generation_pb2.GenerateStreamRequest(spec=spec)
        serving = self._loop.create_task(self.service.GenerateStream(request, call))
        serving.add_done_callback(lambda task: task.cancelled() or task.exception())  # of a dead router nobody asks
        try:
            await asyncio.wait((serving, self.died), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not self.is_dead:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
            raise
        if self.is_dead:
            raise RouterLost(self.name)
        serving.result()

    def die(self) -> None:
        """Nothing of it is sent or stored any more."""
        self.is_dead = True
        self._host.close()
        self.died.set_result(None)
        self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        """Ends its tasks, which nobody hears of any more."""
        await self.service.resumables.stop()
        await self.dispatcher.drain(0.0)
        await self.dispatcher.fleet.close()


class SimulatedTokenizer:
    """The tokenizer, as far as requests of token ids need one (`router.api.tokenizer.Tokenizer`)."""

    definition = ""
    chat_template = ChatTemplate({}, {})
    infill = None
    added_ids: Mapping[str, int] = MappingProxyType({})

    def new_detokenizer(self, prompt_token_ids: object, kept: object) -> DigitText:
        return DigitText()
