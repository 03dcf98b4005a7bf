"""The connection to one worker: one Session stream for all commands and events, opened again when it breaks.

    CONNECTING -> READY (WorkerInfo has come) -> LOST (the stream broke) -> CONNECTING ...

A broken stream loses everything that was admitted on it: the worker cancels those requests, and `on_lost` is called
once. A silent stream counts as broken: a worker sends a batch twice a second, if only an empty one. Its silence is
counted by whoever calls `tick`.
Knows no request: it sends commands and passes events on. It keeps what the worker reports of itself: its identity, its
load and what its prefix cache holds; a lost worker's cache is forgotten.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import grpc

from cluster import rpc
from cluster.crash_record import Crash, CrashReader
from cluster.errors import BatonError, FailedPrecondition
from cluster.failure_detector import TICKS_PER_HEARTBEAT, FailureDetector, FailureTimeouts, Liveness
from cluster.pb import admin_pb2, worker_pb2, worker_pb2_grpc
from cluster.protocol import check_protocol, inside_metadata
from cluster.step_cost import StepCost
from cluster.tls import ClientTls
from router.routing.prefix_index import Holders, PrefixIndex, PromptHashes

log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_S = 0.5
TICK_S = HEARTBEAT_S / TICKS_PER_HEARTBEAT
DEAD_AFTER_S = 3.0
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0

State = admin_pb2.WorkerStatus.State
CONNECTING = admin_pb2.WorkerStatus.STATE_CONNECTING
READY = admin_pb2.WorkerStatus.STATE_READY
LOST = admin_pb2.WorkerStatus.STATE_LOST


class Speed(enum.Enum):
    """Whether a worker is far slower than predicted (`router.routing.slow_workers`)."""

    USUAL = "is as fast as predicted"
    SLOW = "is far slower than predicted, and gets nothing new"
    PROBED = "was far slower than predicted, and gets one request at a time"


Event = tuple[str, Any]
"""The kind of an event, as worker_pb2.Event names it, and its message."""


@dataclass(frozen=True)
class WorkerCallbacks:
    """Called on the event loop, in order."""

    on_ready: Callable[[WorkerClient], None]
    """`worker.info` is set; commands may be sent."""
    on_lost: Callable[[WorkerClient], None]
    """Everything that was admitted on the worker is gone."""
    on_events: Callable[[WorkerClient, Sequence[Event]], None]
    """Every batch of a ready worker. The client has handled info, stats and cache events itself."""


class _Standing(Generic[T]):
    """An attribute of a worker on which it depends whether, and for what, it gets work: `on_change` follows it."""

    def __set_name__(self, owner: type[WorkerClient], name: str) -> None:
        self._key = f"_{name}"

    def __get__(self, worker: WorkerClient, owner: type[WorkerClient]) -> T:
        value: T = worker.__dict__[self._key]
        return value

    def __set__(self, worker: WorkerClient, value: T) -> None:
        if worker.__dict__.get(self._key, _Standing) != value:
            worker.__dict__[self._key] = value
            worker.on_change(worker)


class PromptTokens:
    """A prompt as workers are sent it."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self.token_ids = token_ids

    @cached_property
    def message(self) -> worker_pb2.Admit:
        """Has nothing else. To copy the tokens takes a quarter of the time in which they are put into a message."""
        return worker_pb2.Admit(prompt_token_ids=self.token_ids)


class WorkerClient:
    """`close` it in the loop in which it was started."""

    role = _Standing[worker_pb2.Role]()
    is_draining = _Standing[bool]()
    is_suspect = _Standing[bool]()
    """It seems to stall, and gets nothing new until it reports progress again."""
    is_reserved = _Standing[bool]()
    """It runs requests one of which may end it, and gets no others."""
    speed = _Standing[Speed]()
    state = _Standing[State]()

    def __init__(
        self,
        worker_id: str,
        address: str,
        role: worker_pb2.Role,
        callbacks: WorkerCallbacks,
        dead_after_s: float = DEAD_AFTER_S,
        holders: Holders | None = None,
        tls: ClientTls | None = None,
        token: str = "",
        *,
        open_channel: rpc.OpenChannel = rpc.create_channel,
        rng: random.Random | None = None,
    ) -> None:
        """`holders`: the table shared by all workers' prefix caches; None: this one's is kept apart. `rng` spreads
        attempts to connect."""
        self._open_channel = open_channel
        self._rng = rng or random.Random()
        self.on_change: Callable[[WorkerClient], None] = lambda worker: None
        """Called when it may get other work than before."""
        self.on_cost: Callable[[WorkerClient], None] = lambda worker: None
        """Called when its steps have another cost than before."""
        self._tls = tls
        self._token = token
        self.worker_id = worker_id
        self.address = address
        self.role = role
        self.is_draining = False
        self.changed_settings: worker_pb2.Command | None = None
        """Sent first on each session; None: the worker keeps the settings that it was started with."""
        self.state = CONNECTING
        self.info: worker_pb2.WorkerInfo | None = None
        self.weights_revision = ""
        """Names the weights that it serves, or did when it was ready last; empty: not known."""
        self.stats: worker_pb2.WorkerStats | None = None
        self.prefix_index: PrefixIndex | None = None
        """None while the worker is not ready."""
        self.step_cost: StepCost | None = None
        """Cost of its steps as it has measured them; None: not yet."""
        self._holders = holders
        self.is_suspect = False
        self.speed = Speed.USUAL
        self.is_reserved = False
        self.crash: Crash | None = None
        """The record of how the last process ended by itself; None: it runs, did not, or nothing is known of that."""
        self._crash_reader: CrashReader | None = None
        self.refusal = ""
        """Why no session can be had with it that another attempt would change; empty: nothing is known of that."""
        self._callbacks = callbacks
        self._own: dict[str, Callable[[Any], None]] = {
            "info": self._on_info,
            "stats": self._on_stats,
            "cache": self._on_cache,
        }
        self._commands: deque[worker_pb2.Command] = deque()
        self._has_commands = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._detector = FailureDetector(
            FailureTimeouts(heartbeat_s=HEARTBEAT_S, suspect_after_s=dead_after_s, dead_after_s=dead_after_s)
        )
        self._stream: Any = None
        """The call of the session; None while there is none."""
        self._why_ended = ""
        """Why this side ended the stream; empty: it did not."""

    @property
    def is_ready(self) -> bool:
        return self.state == READY

    @property
    def can_take_work(self) -> bool:
        """It is ready, not draining, not reserved and not suspected to stall."""
        return self.is_ready and not (self.is_draining or self.is_suspect or self.is_reserved)

    @property
    def kv_tokens(self) -> int:
        """Size of its KV pool; 0 while its info has not come."""
        return 0 if self.info is None else self.info.num_blocks * self.info.block_size

    @property
    def max_num_seqs(self) -> int:
        """Sequences that it decodes in one step; 0 while its info has not come."""
        return 0 if self.info is None else self.info.max_num_seqs

    @property
    def prefix_format(self) -> str:
        """Names how it keeps KV that others may fetch; empty: it fetches nothing, or its info has not come."""
        return "" if self.info is None else self.info.prefix_format

    @property
    def peer(self) -> worker_pb2.Peer:
        """The worker as others address it; the incarnation names its present process."""
        assert self.info is not None, f"worker {self.worker_id} is not ready: its info has not come"
        return worker_pb2.Peer(worker_id=self.worker_id, incarnation=self.info.incarnation, address=self.address)

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        """Tokens of a prompt that its prefix cache holds, as far as its events describe it."""
        index = self.prefix_index
        return 0 if index is None or not index.is_known else index.num_cached_tokens(prompt)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"session with {self.worker_id}")

    async def close(self) -> None:
        """Ends the stream; everything admitted on it is lost, and `on_lost` is called."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def tick(self, elapsed_s: float) -> None:
        """Call it every `TICK_S`: the session of a ready worker that is silent for too long ends. Before its info has
        come, a worker may take its time."""
        if self._stream is not None and self._detector.tick(elapsed_s) is Liveness.DEAD and self.is_ready:
            self._end(f"it has been silent for {self._detector.silence_s:.1f} s")

    def admit(self, command: worker_pb2.Command, prompt: PromptTokens) -> None:
        """Sends an Admit, into which the prompt is put here."""
        command.admit.MergeFrom(prompt.message)
        self.send(command)

    def send(self, command: worker_pb2.Command) -> None:
        """Queues a command; dropped while no session is up, as the worker then runs nothing of this router."""
        if self.is_ready:
            self._commands.append(command)
            self._has_commands.set()

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        async with self._open_channel(self.address, tls=self._tls, is_alone=True) as channel:
            while True:
                try:
                    await self._session(channel)
                    log.info("worker %s ended its session", self.worker_id)
                except grpc.aio.AioRpcError as error:
                    log.info("session with worker %s broke: %s", self.worker_id, error.code().name)
                    self._note_refusal(rpc.from_rpc_error(error))
                except FailedPrecondition as error:
                    self._note_refusal(error)
                except BatonError as error:
                    log.warning("session refused: %s", error)
                except Exception:
                    log.exception("session with worker %s failed", self.worker_id)
                finally:
                    was_ready = self._lose()
                backoff_s = FIRST_BACKOFF_S if was_ready else min(LONGEST_BACKOFF_S, backoff_s * 2)
                if self.refusal:
                    backoff_s = LONGEST_BACKOFF_S
                await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))

    def _note_refusal(self, error: BatonError) -> None:
        """Keeps, and reports once, why it and this router cannot work together. Other errors may pass."""
        if isinstance(error, FailedPrecondition) and error.message != self.refusal:
            self.refusal = error.message
            log.warning("no session with worker %s at %s: %s", self.worker_id, self.address, self.refusal)

    async def _session(self, channel: grpc.aio.Channel) -> None:
        """Returns when the stream ends; raises AioRpcError when it breaks. It ends with whatever serves it here."""
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call: Any = stub.Session(wait_for_ready=True, metadata=inside_metadata(self._token))
        self._stream, self._why_ended = call, ""
        self._detector.heard()
        writing = asyncio.create_task(self._write(call))
        writing.add_done_callback(self._on_writing_ended)
        try:
            async for batch in call:
                self._detector.heard()
                self._read(batch)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._why_ended or task is None or task.cancelling():
                raise
            log.warning("worker %s is taken as lost: %s", self.worker_id, self._why_ended)
        finally:
            self._stream = None
            writing.cancel()
            call.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _on_writing_ended(self, writing: asyncio.Task[None]) -> None:
        """A stream that broke is over, and says why itself."""
        error = None if writing.cancelled() else writing.exception()
        if error is not None:
            self._end(f"its session failed: {type(error).__name__}: {error}")

    def _end(self, why: str) -> None:
        if self._stream is not None:
            self._why_ended = why
            self._stream.cancel()

    async def _write(self, call: Any) -> None:
        """Raises when the stream breaks, or a command cannot be sent."""
        while True:
            await self._has_commands.wait()
            self._has_commands.clear()
            while self._commands:
                await call.write(self._commands.popleft())

    def _read(self, batch: worker_pb2.EventBatch) -> None:
        kinds = ((event.WhichOneof("event"), event) for event in batch.events)
        self._take_in([(kind, getattr(event, kind)) for kind, event in kinds if kind])  # others are of later versions

    def _take_in(self, events: Sequence[Event]) -> None:
        for kind, message in events:
            if kind in self._own:
                self._own[kind](message)
        if self.state == READY:
            self._callbacks.on_events(self, events)

    def _on_info(self, info: worker_pb2.WorkerInfo) -> None:
        if info.worker_id != self.worker_id:
            raise FailedPrecondition(f"{self.address} is worker {info.worker_id!r}, not {self.worker_id!r}")
        check_protocol(f"worker {self.worker_id}", info.protocol, "this router")
        self.info, self.refusal, self.weights_revision = info, "", info.weights_revision
        self._forget_cache()
        num_blocks = info.num_blocks + info.num_tier_blocks
        self.prefix_index = PrefixIndex(info.block_size, num_blocks, self._holders, self.worker_id)
        self.state = READY
        self.is_suspect = False
        self.on_change(self)
        self.crash, self._crash_reader = None, CrashReader.open(info.crash_record, info.incarnation)
        if self.changed_settings is not None:
            self.send(self.changed_settings)
        log.info("worker %s is ready at %s", self.worker_id, self.address)
        self._callbacks.on_ready(self)

    def _forget_cache(self) -> None:
        if self.prefix_index is not None:
            self.prefix_index.close()
            self.prefix_index = None

    def _on_stats(self, stats: worker_pb2.WorkerStats) -> None:
        last, self.stats = self.stats, stats
        if self._crash_reader is not None:
            self._crash_reader.lives()
        if last is not None and last.step_cost == stats.step_cost:
            return
        step_cost = StepCost.from_proto(stats.step_cost) if stats.HasField("step_cost") else None
        if step_cost != self.step_cost:
            self.step_cost = step_cost
            self.on_cost(self)

    def _on_cache(self, events: worker_pb2.CacheEvents) -> None:
        if self.prefix_index is not None and not self.prefix_index.apply(events):
            log.warning("events of worker %s's prefix cache are missing: requesting a snapshot", self.worker_id)
            self.send(worker_pb2.Command(resync_cache=worker_pb2.ResyncCache()))

    def _lose(self) -> bool:
        """Returns whether the worker had been ready."""
        was_ready = self.is_ready
        self._forget_cache()
        self.stats = self.step_cost = None
        self._commands.clear()
        if self._crash_reader is not None:
            self.crash = self._crash_reader.read()
            self._crash_reader.close()
            self._crash_reader = None
        if was_ready:
            self.state = LOST
            self._callbacks.on_lost(self)
        return was_ready
