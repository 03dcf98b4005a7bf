"""The connection to one worker: a Session stream for every command and every event, opened again when it breaks.

    CONNECTING -> READY (WorkerInfo came) -> LOST (the stream broke) -> CONNECTING ...

A broken stream loses everything that was admitted on it: the worker cancels those requests, the listener is told once.
So does a silent one: a worker says something twice a second, if only that it lives.
Knows no request: it sends commands and hands events on. What the worker tells of itself it keeps: who it is, how much
it holds, what its prefix cache can serve; a lost worker's cache is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from typing import Any, Protocol

import grpc

from cluster import rpc
from cluster.errors import BatonError, FailedPrecondition
from cluster.failure_detector import FailureDetector, FailureTimeouts, Liveness
from cluster.pb import admin_pb2, worker_pb2, worker_pb2_grpc
from cluster.step_cost import StepCost
from cluster.tls import ClientTls
from router.routing.prefix_index import Holders, PrefixIndex, PromptHashes

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
DEAD_AFTER_S = 3.0
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0

State = admin_pb2.WorkerStatus.State
CONNECTING = admin_pb2.WorkerStatus.STATE_CONNECTING
READY = admin_pb2.WorkerStatus.STATE_READY
LOST = admin_pb2.WorkerStatus.STATE_LOST


class WorkerListener(Protocol):
    """Told about a worker on the event loop, in order."""

    def on_ready(self, worker: WorkerClient) -> None:
        """`worker.info` is there; commands may be sent."""
        ...

    def on_lost(self, worker: WorkerClient) -> None:
        """What was admitted on it is gone."""
        ...

    def on_events(self, worker: WorkerClient, events: worker_pb2.EventBatch) -> None:
        """Everything but info, stats and cache, which the client keeps, is the listener's."""
        ...


class WorkerClient:
    """`close` it in the loop in which it was started."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        role: worker_pb2.Role,
        listener: WorkerListener,
        dead_after_s: float = DEAD_AFTER_S,
        holders: Holders | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """`holders`: what all workers' prefix caches hold; None: this one's is looked at by itself."""
        self._tls = tls
        self.worker_id = worker_id
        self.address = address
        self.role = role
        self.is_draining = False
        self.changed_settings: worker_pb2.Command | None = None
        """Sent first on each session; None: what the worker was started with holds."""
        self.state: State = CONNECTING
        self.info: worker_pb2.WorkerInfo | None = None
        self.stats: worker_pb2.WorkerStats | None = None
        self.prefix_index: PrefixIndex | None = None
        """None while the worker is not ready."""
        self.step_cost: StepCost | None = None
        """What the worker has learned of its own steps; None: nothing yet."""
        self._holders = holders
        self.is_suspect = False
        """It seems to stall, and gets nothing new until it tells something again."""
        self._listener = listener
        self._commands: deque[worker_pb2.Command] = deque()
        self._has_commands = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timing = FailureTimeouts(heartbeat_s=HEARTBEAT_S, suspect_after_s=dead_after_s, dead_after_s=dead_after_s)
        self._pulse = FailureDetector(self._timing)
        self._is_silent = False

    @property
    def is_ready(self) -> bool:
        return self.state == READY

    @property
    def can_take_work(self) -> bool:
        """It is ready, and nothing speaks against giving it more."""
        return self.is_ready and not self.is_draining and not self.is_suspect

    @property
    def kv_tokens(self) -> int:
        """That its pool holds; 0 while it has not said who it is."""
        return 0 if self.info is None else self.info.num_blocks * self.info.block_size

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        """Of a prompt, in its prefix cache, as far as it has told."""
        index = self.prefix_index
        return 0 if index is None or not index.is_known else index.num_cached_tokens(prompt)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"session with {self.worker_id}")

    async def close(self) -> None:
        """Ends the stream; what was admitted on it is lost, and the listener is told."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def send(self, command: worker_pb2.Command) -> None:
        """Queues a command; dropped when no session is up, as then there is nothing on the worker to command."""
        if self.is_ready:
            self._commands.append(command)
            self._has_commands.set()

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        async with rpc.create_channel(self.address, tls=self._tls, is_alone=True) as channel:
            while True:
                try:
                    await self._session(channel)
                    log.info("worker %s ended its session", self.worker_id)
                except grpc.aio.AioRpcError as error:
                    log.info("session with worker %s broke: %s", self.worker_id, error.code().name)
                except BatonError as error:
                    log.warning("session refused: %s", error)
                except Exception:
                    log.exception("session with worker %s failed", self.worker_id)
                finally:
                    was_ready = self._lose()
                backoff_s = FIRST_BACKOFF_S if was_ready else min(LONGEST_BACKOFF_S, backoff_s * 2)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _session(self, channel: grpc.aio.Channel) -> None:
        """Until the stream ends, or raises AioRpcError when it breaks."""
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call: Any = stub.Session(wait_for_ready=True)
        helpers = [asyncio.create_task(self._write(call)), asyncio.create_task(self._watch(call))]
        try:
            async for batch in call:
                self._pulse.heard()
                self._read(batch)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_silent or task is None or task.cancelling():
                raise
            log.warning("worker %s has been silent for %.1f s: taken as lost", self.worker_id, self._pulse.silence_s)
        finally:
            for helper in helpers:
                helper.cancel()
            call.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _watch(self, call: Any) -> None:
        """Ends the call when the worker falls silent; one that has not said who it is may take its time."""
        self._pulse.heard()
        self._is_silent = False
        last = time.monotonic()
        while True:
            await asyncio.sleep(self._timing.tick_s)
            now = time.monotonic()
            if self._pulse.tick(now - last) is Liveness.DEAD and self.is_ready:
                self._is_silent = True
                call.cancel()
                return
            last = now

    async def _write(self, call: Any) -> None:
        """Ends by an error when the stream breaks; the reader sees the same break and tells it."""
        while True:
            await self._has_commands.wait()
            self._has_commands.clear()
            while self._commands:
                await call.write(self._commands.popleft())

    def _read(self, batch: worker_pb2.EventBatch) -> None:
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "info":
                self._meet(event.info)
            elif kind == "stats":
                self._hear_stats(event.stats)
            elif kind == "cache":
                self._hear_cache(event.cache)
        if self.is_ready:
            self._listener.on_events(self, batch)

    def _meet(self, info: worker_pb2.WorkerInfo) -> None:
        if info.worker_id != self.worker_id:
            raise FailedPrecondition(f"{self.address} is worker {info.worker_id!r}, not {self.worker_id!r}")
        self.info = info
        self._forget_cache()
        self.prefix_index = PrefixIndex(info.block_size, info.num_blocks, self._holders)
        self.state = READY
        self.is_suspect = False
        if self.changed_settings is not None:
            self.send(self.changed_settings)
        log.info("worker %s is ready at %s", self.worker_id, self.address)
        self._listener.on_ready(self)

    def _forget_cache(self) -> None:
        if self.prefix_index is not None:
            self.prefix_index.close()
            self.prefix_index = None

    def _hear_stats(self, stats: worker_pb2.WorkerStats) -> None:
        self.stats = stats
        self.step_cost = StepCost.from_proto(stats.step_cost) if stats.HasField("step_cost") else None

    def _hear_cache(self, events: worker_pb2.CacheEvents) -> None:
        if self.prefix_index is not None and not self.prefix_index.apply(events):
            log.warning("events of worker %s's prefix cache are missing: all are asked for anew", self.worker_id)
            self.send(worker_pb2.Command(resync_cache=worker_pb2.ResyncCache()))

    def _lose(self) -> bool:
        """True when it had been ready."""
        was_ready = self.is_ready
        self._forget_cache()
        self.stats = self.step_cost = None
        self._commands.clear()
        if was_ready:
            self.state = LOST
            self._listener.on_lost(self)
        return was_ready
