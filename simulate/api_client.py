"""Clients of simulated routers with an API: each calls one, reads its stream, leaves and comes back, and goes on with
its generation at another router when its own is lost, from the tokens that it holds.

A client that may resume is told so by its router; from then on no router may say that it does not know the generation.
"""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

from cluster.errors import Aborted, BatonError, NotFound, Unavailable
from cluster.lifecycle import RequestState
from cluster.pb import generation_pb2
from simulate.client import RequestOutcome, SimRequest
from simulate.model import END_TOKEN, seed_of
from simulate.router import RouterLost, SimulatedRouter
from simulate.virtual_loop import VirtualLoop

MOST_CALLS = 100
"""Calls for one generation, which last longer than any store is away; more are taken for a livelock."""
LEAST_PAUSE_S, MOST_PAUSE_S = 0.05, 0.5
"""Before a client calls again."""


class ApiWorld(Protocol):
    """The parts of a cluster that its clients use."""

    @property
    def loop(self) -> VirtualLoop: ...
    @property
    def random(self) -> random.Random: ...
    def any_router(self) -> SimulatedRouter | None:
        """One that runs; None: all are dead now."""
        ...


class ApiClient:
    """One request, from its first call to its end."""

    def __init__(self, world: ApiWorld, number: int, request: SimRequest, seed: int, begun_at: float) -> None:
        """`seed`: of the prompts. `begun_at`: the begin of the run."""
        self.outcome = RequestOutcome(number, request)
        self._world = world
        self._loop = world.loop
        self._seed = seed
        self._begun_at = begun_at
        self._generation_id = ""
        self._may_resume = False
        """Whether its router has told it last that it may resume."""

    async def run(self) -> RequestOutcome:
        """Never raises for what a router answers; AssertionError for what it must not."""
        request = self.outcome.request
        try:
            async with asyncio.timeout(request.leaves_after_s):
                await self._call_until_over()
        except TimeoutError:
            self.outcome.state, self.outcome.reason = RequestState.CANCELLED, "CANCELLED"
            if self.outcome.is_complete:
                self.outcome.state, self.outcome.reason = RequestState.FINISHED, ""
            elif request.returns_after_s is not None and self._generation_id:
                await asyncio.sleep(request.returns_after_s)
                self._may_resume = False  # it is not kept for ever
                await self._call_until_over()
        self.outcome.ended_s = self._now
        return self.outcome

    @property
    def _now(self) -> float:
        return self._loop.time() - self._begun_at

    async def _call_until_over(self) -> None:
        outcome = self.outcome
        for _ in range(MOST_CALLS):
            outcome.num_attempts += 1
            error = await self._call()
            if outcome.is_complete:  # whatever became of the router then
                outcome.state, outcome.reason = RequestState.FINISHED, ""
                return
            assert error is not None, f"request {outcome.number} ended well, and its client was not told"
            is_lost = isinstance(error, RouterLost)
            has_lost_it = isinstance(error, NotFound) and bool(self._generation_id)
            assert not (has_lost_it and self._may_resume), (
                f"request {outcome.number} may be resumed, and nobody knows it"
            )
            if not (self._generation_id and (is_lost or isinstance(error, (Unavailable, Aborted)))):
                outcome.state = RequestState.FAILED
                outcome.reason = error.reason if isinstance(error, BatonError) else "ROUTER_LOST"
                return
            await asyncio.sleep(self._world.random.uniform(LEAST_PAUSE_S, MOST_PAUSE_S))
        raise AssertionError(f"request {outcome.number} was resumed {MOST_CALLS} times, and has not ended")

    async def _call(self) -> Exception | None:
        """One call, up to its end; None: it went well."""
        router = self._world.any_router()
        if router is None:
            return RouterLost("every router")
        request = self.outcome.request
        spec = self._spec()
        for told in self.outcome.told:
            told.has_ended = False
        time_left_s = None if self._generation_id else request.time_left_s
        try:
            await router.generate(spec, request.principal, time_left_s, self._take)
        except (BatonError, RouterLost) as error:
            return error
        return None

    async def _take(self, message: generation_pb2.GenerateStreamResponse) -> None:
        if message.HasField("resumable"):
            self._may_resume = message.resumable
        if message.HasField("started") and self.outcome.request.may_resume:
            self._generation_id = message.started.generation_id
        self.outcome.note(message, self._now)
        if self.outcome.request.pause_s:
            await asyncio.sleep(self.outcome.request.pause_s)

    def _spec(self) -> generation_pb2.GenerationSpec:
        request, number = self.outcome.request, self.outcome.number
        spec = generation_pb2.GenerationSpec()
        if self._generation_id:
            spec.resume.generation_id = self._generation_id
            spec.resume.next_token_indexes.extend(len(told.token_ids) for told in self.outcome.told)
            return spec
        num_output = request.num_output_tokens
        spec.token_ids.ids.extend(request.prompt(self._seed, number))
        spec.sampling.temperature, spec.sampling.n = 1.0, request.n
        spec.sampling.seed = seed_of(number, num_output)
        spec.stopping.max_output_tokens = request.max_output_tokens or num_output
        if request.may_end_early:
            spec.stopping.stop_token_ids.append(END_TOKEN)
        if request.stop:
            spec.stopping.stop.append(request.stop)
        else:
            spec.stopping.include_stop_in_output = True
        spec.output.text, spec.output.token_ids = bool(request.stop), True
        spec.cache.bypass_prefix_cache = request.bypass_prefix_cache
        if request.may_resume:
            spec.resume.SetInParent()
        return spec
