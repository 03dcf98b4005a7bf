"""Responses that run in the background: without a client, and beyond the life of their router.

    start -> queued -> in_progress -> completed, incomplete, failed
                 \\-> cancelled <-/
    its router is lost, or leaves -> the first router that looks, or is asked for it, goes on with it

The generation can be resumed (`router.stream.resume`), so another router reads from the journal what there was of it,
and goes on; its events go on after those that were told. Where the journal has it no more, a response of which nothing
was told begins anew, and another one has failed. Events are told once they are stored, so what a client has seen is
what every router knows. Owns the tasks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.errors import BatonError, FailedPrecondition, NotFound, Unavailable
from cluster.pb import generation_pb2 as pb
from cluster.state import StoreAway
from router.api.call import Call, Principal
from router.openai.errors import HttpFailure, failure_of
from router.openai.generating import GenerateStream
from router.responses.answers import Event, ResponseAnswer
from router.responses.background_run import BackgroundRun, Lost, within
from router.responses.call import ResponseCall, ResponseReader, names_in, names_of
from router.responses.events import ResponseEvents
from router.responses.store import KeptResponse, ResponseStore, StoredResponse
from router.stream.failures import router_failed

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""A response whose router has not renewed its hold for so long may be taken over."""
POLL_S = 0.25
"""Interval at which a router looks for events of a response that another one works on."""
REFUSED_WITHIN_S = 10.0
"""A response that is refused within this time has not begun; later, it has failed."""
MOST_OF_A_TENANT = 200
"""Responses of one tenant that one router works on."""
MOST_LOST_ROUTERS = 5
"""A response with which so many routers were lost, one after another and without an event, has failed."""
_TAKEN_AT_ONCE = 100

Cancel = Callable[[pb.CancelGenerationRequest, Call], Coroutine[Any, Any, pb.CancelGenerationResponse]]
Work = Callable[[], Coroutine[Any, Any, None]]


class _Left(Exception):
    """The router ends, and another one is to go on with the response."""


class BackgroundRuns:
    """Lives in one event loop, up to `stop`, `close`."""

    def __init__(
        self,
        store: ResponseStore,
        reader: ResponseReader,
        generate_stream: GenerateStream,
        cancel: Cancel,
        principal_of_id: Callable[[str], Principal],
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        """`principal_of_id`: the owner of an API key, by its id."""
        self._store = store
        self._reader = reader
        self._generate_stream = generate_stream
        self._cancel_generation = cancel
        self._principal_of_id = principal_of_id
        self._lease_s = lease_s
        self._owner = secrets.token_hex(12)
        self._runs: dict[str, BackgroundRun] = {}
        self._stopping = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def watch(self, can_serve: Callable[[], bool]) -> None:
        """Goes on with what lost routers have left, from now on and while it can be served, though nobody asks."""
        self._watching = asyncio.create_task(self._watch(can_serve), name="responses of lost routers")

    def stop(self) -> None:
        """What ends for that from now on is left to another router."""
        self._stopping.set()

    async def close(self) -> None:
        """Leaves all that still runs to another router."""
        self.stop()
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        tasks += [] if self._watching is None else [self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def start(self, wanted: ResponseCall, call: Call) -> ResponseAnswer:
        """Returns the response at its begin. Raises HttpFailure, StoreAway, and what refuses the generation."""
        tenant = call.principal.tenant
        if Counter(run.response.tenant for run in self._runs.values())[tenant] >= MOST_OF_A_TENANT:
            message = f"{MOST_OF_A_TENANT} responses run in the background already; wait until some are over"
            raise HttpFailure(429, "too_many_responses", message, retry_after_s=1.0)
        held = {"owner": self._owner, "held_until": time.time() + self._lease_s, "runs": [0]}
        kept = await self._store.add(wanted.stored(call.principal, **held), wanted.given)
        run = BackgroundRun(self._store, self._lease_s, kept, wanted.events(), names_of(wanted.body))
        run.turns = wanted.kept_turns
        run.tell(*run.events.begin())
        answer: ResponseAnswer = run.log[0]["response"]
        self._begin(run, partial(self._work, run, wanted.spec, wanted.generating(call)))
        await within(REFUSED_WITHIN_S, run.begun)
        if run.refusal is not None:
            await self._store.delete(run.kept)
            raise run.refusal
        return answer

    async def settled(self, kept: KeptResponse) -> KeptResponse:
        """The response as it is, once a router works on it if it is not over. Raises NotFound."""
        response = kept.response
        while response.is_open and response.response_id not in self._runs and response.held_until <= time.time():
            if self._stopping.is_set():
                break
            held = {"owner": self._owner, "held_until": time.time() + self._lease_s, "runs": [*response.runs, 0]}
            taken = await self._store.replace(kept, replace(response, **held))  # type: ignore[arg-type]
            if taken is not None:
                log.warning("response %s is gone on with: its router was lost", response.response_id)
                await self._take_over(taken)
                return taken
            kept = await self._store.find(response.tenant, response.response_id)
            response = kept.response
        return kept

    async def follow(self, tenant: str, response_id: str, first: int) -> AsyncGenerator[Event, None]:
        """The events of a response from this one on, up to its end. Raises NotFound."""
        while True:
            run = self._runs.get(response_id)
            stored = None if run is None else run.stored
            kept = await self.settled(await self._store.find(tenant, response_id))
            events = await self._store.events(kept.response, first)
            for event in events:
                yield event
            first += len(events)
            if not kept.response.is_open:
                return
            await (asyncio.sleep(POLL_S) if stored is None else within(self._lease_s, stored))

    async def cancel(self, kept: KeptResponse) -> ResponseAnswer:
        """Returns the response, which is over then. Raises NotFound."""
        while kept.response.is_open:
            response = kept.response
            answer = await self._store.answer(response)
            answer["status"] = "cancelled"
            over = replace(response, status="cancelled", runs=[*response.runs, 0], held_until=0.0)
            await self._store.put_answer(over, answer)
            if await self._store.replace(kept, over) is not None:
                await self.end(response)
                return answer
            kept = await self._store.find(response.tenant, response.response_id)
        return await self._store.answer(kept.response)

    async def end(self, response: StoredResponse) -> None:
        """Stops what works on it, here or elsewhere."""
        run = self._runs.get(response.response_id)
        generation_id = response.generation_id if run is None else run.generation_id
        if run is not None and run.task is not None:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
        if generation_id:
            call = Call(Principal(response.key_id, response.tenant))
            await self._cancel_generation(pb.CancelGenerationRequest(generation_ids=[generation_id]), call)

    async def _watch(self, can_serve: Callable[[], bool]) -> None:
        while not self._stopping.is_set():
            await within(self._lease_s * random.uniform(0.3, 0.6), self._stopping)
            try:
                for kept in await self._store.left(_TAKEN_AT_ONCE) if can_serve() else []:
                    await self._settle(kept)
            except StoreAway:
                continue
            except Exception:
                log.exception("responses that lost routers have left could not be read; they are looked for again")

    async def _settle(self, kept: KeptResponse) -> None:
        """Goes on with one that a lost router has left; an error of it ends no other. Raises StoreAway."""
        try:
            await self.settled(kept)
        except NotFound:  # deleted meanwhile
            return
        except StoreAway:
            raise
        except Exception:
            log.exception("response %s could not be taken over", kept.response.response_id)

    async def _take_over(self, kept: KeptResponse) -> None:
        response = kept.response
        try:
            given = await self._store.given(response.response_id)
        except NotFound:  # what it was asked is lost, so nobody can go on with it
            await self._store.delete(kept)
            raise
        events = ResponseEvents(given["answer"], told=response.told)
        run = BackgroundRun(self._store, self._lease_s, kept, events, names_in(given["body"]))
        run.begun.set()
        try:
            if response.runs[-MOST_LOST_ROUTERS - 1 : -1] == [0] * MOST_LOST_ROUTERS:
                raise Unavailable(f"{MOST_LOST_ROUTERS} routers were lost that had begun to compute it")
            call = Call(self._principal_of_id(response.key_id))  # which may be revoked
            wanted = await self._reader.read_again(response.response_id, given, call)
        except BatonError as error:
            given["answer"]["output"] = await self._store.done_items(response)
            failure = failure_of(error, run.names)
            self._begin(run, partial(self._end, run, failure))
            return
        run.events = wanted.events(response.told)
        run.events.answer["created_at"] = response.created_at
        run.turns = wanted.kept_turns
        self._begin(run, partial(self._go_on, run, wanted.spec, wanted.generating(call)))

    def _begin(self, run: BackgroundRun, work: Work) -> None:
        response_id = run.response.response_id
        self._runs[response_id] = run
        run.task = asyncio.create_task(self._guard(run, work), name=f"response {response_id}")

    async def _guard(self, run: BackgroundRun, work: Work) -> None:
        """Stores what the work tells as it comes, and its end."""
        response_id = run.response.response_id
        working = asyncio.create_task(work(), name="a response in the background")
        storing = asyncio.create_task(run.store_all(), name="events of a response")
        try:
            await asyncio.wait((working, storing), return_when=asyncio.FIRST_COMPLETED)
            run.is_over.set()
            run.grew.set()
            await storing  # to its end, as what is cut off in the middle of a write may be written all the same
            await working
            if run.refusal is None:
                await run.store_end()
        except Lost:
            log.info("response %s was cancelled, deleted or taken over", response_id)
        except _Left:
            await run.release()
        except StoreAway as error:
            log.warning("response %s is left as it is, the store is away: %s", response_id, error)
        except asyncio.CancelledError:
            if self._stopping.is_set():
                await run.release()
        except Exception:
            log.exception("response %s could not be worked on", response_id)
        finally:
            for task in (working, storing):
                task.cancel()
            await asyncio.gather(working, storing, return_exceptions=True)
            if self._runs.get(response_id) is run:
                del self._runs[response_id]
            run.begun.set()
            run.tell_stored()

    async def _go_on(self, run: BackgroundRun, spec: pb.GenerationSpec, call: Call) -> None:
        """Resumes the generation, or begins another one where nothing was told of it."""
        response = run.response
        if response.generation_id:
            resume = pb.ResumeFrom(generation_id=response.generation_id)
            try:
                await self._generate(run, pb.GenerationSpec(resume=resume), call)
                return
            except (NotFound, FailedPrecondition) as error:
                if response.position or run.events.told.position:
                    log.warning("response %s cannot go on: %s", response.response_id, error)
                    run.events.answer["output"] = await self._store.done_items(response)
                    what = "its router was lost, and what it had computed is not known any more; ask anew"
                    await self._end(run, HttpFailure(503, "router_lost", what))
                    return
        await self._work(run, spec, call)

    async def _work(self, run: BackgroundRun, spec: pb.GenerationSpec, call: Call) -> None:
        wanted = pb.GenerationSpec()
        wanted.CopyFrom(spec)
        wanted.resume.SetInParent()
        try:
            await self._generate(run, wanted, call)
        except (NotFound, FailedPrecondition) as error:
            await self._end(run, failure_of(error, run.names), error)

    async def _generate(self, run: BackgroundRun, spec: pb.GenerationSpec, call: Call) -> None:
        """Raises NotFound or FailedPrecondition where it cannot begin."""

        def opened(generation_id: str) -> None:
            run.generation_id = generation_id
            run.renew_at = 0.0  # to be stored now
            run.begun.set()
            run.grew.set()

        async def write(event: pb.GenerateStreamResponse) -> None:
            run.tell(*run.events.of(event))

        try:
            await self._generate_stream(pb.GenerateStreamRequest(spec=spec), replace(call, write=write, opened=opened))
        except (NotFound, FailedPrecondition):
            raise
        except Unavailable as error:
            if self._stopping.is_set():
                raise _Left from error
            await self._end(run, failure_of(error, run.names), error)
        except BatonError as error:
            await self._end(run, failure_of(error, run.names), error)
        except Exception:
            log.exception("a response in the background failed")
            await self._end(run, failure_of(router_failed()))

    async def _end(self, run: BackgroundRun, failure: HttpFailure, refusal: BatonError | None = None) -> None:
        if not run.begun.is_set() and refusal is not None:
            run.refusal = refusal
        run.tell(run.events.fail(failure))
