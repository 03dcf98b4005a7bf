"""The stream of one client: its messages, how often they are sent, and how long the client may take to read them.

    StreamReader.take -> messages -> StreamWriter.write -> a pause of MessageRate.spacing_s -> take ...

A message costs the router and its client a tenth of a millisecond of a core whether it carries one token or ten. A few
streams send each token as it comes. Many share a budget of messages, so that sending takes no more than a part of the
machine; each of them then sends several tokens at a time.

gRPC takes a message at once while the client's flow-control window is open, and keeps the one that is not taken; what
comes meanwhile merges into one delta in the output buffer. A client that has taken nothing for a while is cut off, and
so is one for which more waits than may be held for it. Knows no dispatcher: it raises.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from cluster.errors import Aborted
from cluster.lifecycle import RequestState
from cluster.pb import generation_pb2
from cluster.pb.generation_pb2 import GenerateStreamResponse
from router.api.call import Call, ClientStalled
from router.stream.request import LiveRequest

MESSAGES_PER_CORE = 250
"""Messages a second for each core: some fortieth of a core here, and as much on the client's side."""
MOST_SPACING_S = 0.1
LEAST_SPACING_S = 0.002
"""Below this, waiting would cost what it saves."""

MOST_PENDING_BYTES = 128 * 1024
"""Bytes behind the message that gRPC keeps, which was as large at most when it was written."""
LOOK_S = 0.5
"""Interval at which a stream is checked for a write that takes long."""
_TOKEN_BYTES = 64
_LOGPROB_BYTES, _ALTERNATIVE_BYTES = 64, 32

_PHASES = {
    RequestState.QUEUED: generation_pb2.Heartbeat.PHASE_QUEUED,
    RequestState.PREFILLING: generation_pb2.Heartbeat.PHASE_PREFILL,
    RequestState.TRANSFERRING: generation_pb2.Heartbeat.PHASE_TRANSFER,
    RequestState.DECODING: generation_pb2.Heartbeat.PHASE_DECODE,
}


class StreamReader:
    """Reads the output that the request has when it is made; a call that resumes the request replaces it."""

    def __init__(self, live: LiveRequest, *, is_kept: bool = False, traceparent: str = "") -> None:
        """`is_kept`: the client may resume. `traceparent`: the call that began it, where that was sampled elsewhere."""
        self.live = live
        self.output = live.output
        self.is_kept = is_kept
        self.traceparent = traceparent
        self.is_resumable: bool | None = None
        """The latest that the client has been told of whether it is resumable; None: nothing yet."""
        self._is_replaced = False

    def check(self) -> None:
        """Raises Aborted when another call reads the request instead."""
        if self._is_replaced:
            raise Aborted("another call has resumed this generation and reads the rest of it")

    def replace(self) -> None:
        self._is_replaced = True
        self.output.wake()

    def take(self) -> list[GenerateStreamResponse]:
        """Returns everything that the client has not been sent, in the contract's order."""
        live, output = self.live, self.output
        if output.has_deltas_alone:
            return output.take_deltas()
        is_prefilling = output.is_started or live.lifecycle.instant(RequestState.PREFILLING) is not None
        unsent = output.take(is_prefilling=is_prefilling)
        out: list[GenerateStreamResponse] = []
        if unsent.has_begun:
            out.append(GenerateStreamResponse(started=self._started()))
        if unsent.is_heartbeat_due:
            out.append(GenerateStreamResponse(heartbeat=self._heartbeat()))
        out += unsent.deltas
        for sequence in unsent.ended:
            out.append(GenerateStreamResponse(sequence_end=sequence.end))
        if live.lifecycle.state is RequestState.FINISHED:
            completed = generation_pb2.Completed(usage=live.usage, timing=self.timing())
            out.append(GenerateStreamResponse(completed=completed))
        return out

    def timing(self) -> generation_pb2.Timing | None:
        """Each duration is the difference of two instants that the request recorded. None unless the client asked."""
        live, lifecycle = self.live, self.live.lifecycle
        if not live.request.wants_timing:
            return None
        placement = live.placement.reason if live.placement else "not placed"
        timing = generation_pb2.Timing(
            placement=placement, migrations=live.num_moves, fetched_tokens=live.num_fetched_tokens
        )
        timing.arrival_time.FromNanoseconds(round(live.arrival_time_s * 1e9))
        arrived, prefill = lifecycle.instant(RequestState.QUEUED), lifecycle.instant(RequestState.PREFILLING)
        # The last ones: no time of a failed attempt counts as transfer.
        transfer, decode = (lifecycle.instant(s, last=True) for s in (RequestState.TRANSFERRING, RequestState.DECODING))
        for duration, begin, end in (
            (timing.queue, arrived, prefill),
            (timing.prefill, prefill, live.first_token_at),
            (timing.time_to_first_token, arrived, live.first_token_at),
            (timing.kv_transfer, transfer, decode),
            (timing.decode, decode, lifecycle.instant(RequestState.FINISHED)),
        ):
            if begin is not None and end is not None:
                duration.FromNanoseconds(max(0, round((end - begin) * 1e9)))
        return timing

    def _started(self) -> generation_pb2.Started:
        live = self.live
        return generation_pb2.Started(
            generation_id=live.key.request_id,
            model=live.model,
            prompt_tokens=len(live.request.prompt_token_ids),
            cached_tokens=live.num_cached_tokens,
            prompt_logprobs=self.output.prompt_logprobs.take(),
        )

    def _heartbeat(self) -> generation_pb2.Heartbeat:
        live, state = self.live, self.live.lifecycle.state
        position = live.queue_position if state is RequestState.QUEUED else 0
        is_migrating = live.has_run and live.num_tokens > 0 and state is not RequestState.DECODING
        phase = generation_pb2.Heartbeat.PHASE_MIGRATING if is_migrating else _PHASES[state]
        return generation_pb2.Heartbeat(phase=phase, queue_position=position)


class MessageRate:
    """The budget of messages that all streams share."""

    def __init__(self, messages_per_s: float | None = None) -> None:
        """None: by the cores of this machine."""
        self._messages_per_s = messages_per_s or MESSAGES_PER_CORE * (os.cpu_count() or 1)
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts one stream more while the context lasts."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    @property
    def spacing_s(self) -> float:
        """Seconds that a stream waits after a message with tokens; 0: not at all."""
        spacing_s = min(self._num_streams / self._messages_per_s, MOST_SPACING_S)
        return spacing_s if spacing_s > LEAST_SPACING_S else 0.0


class StreamWriter:
    """Writes the messages of one stream, within `async with`, which raises ClientStalled. `timeout_s`: how long one
    message may take. One timer serves all messages, as most take no time."""

    def __init__(self, call: Call, reader: StreamReader, timeout_s: float) -> None:
        self._write = call.write
        self._output = reader.output
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._limit = asyncio.timeout(None)
        self._begun_at: float | None = None
        """When the write under way began; None: there is none."""
        request, bytes_per_token = reader.live.request, _TOKEN_BYTES
        if request.wants_logprobs:
            bytes_per_token += _LOGPROB_BYTES + request.sampling.top_logprobs * _ALTERNATIVE_BYTES
        self._most_pending_tokens = MOST_PENDING_BYTES // bytes_per_token

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        # Never later than a write that begins now may last, so that its end is not missed.
        self._look_s = min(LOOK_S, self._timeout_s)
        self._timer = self._loop.call_later(self._look_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise ClientStalled(
                f"the client does not read: {self._output.num_pending} tokens wait for it, "
                "and its generation was cancelled; call again, and read the stream as it comes"
            ) from None

    def write(self, message: GenerateStreamResponse) -> Awaitable[None]:
        """Begins a write. The next one may follow when what this returns has been awaited, or `rest` be called."""
        self._begun_at = self._now()
        return self._write(message)

    def rest(self) -> None:
        """No write is under way."""
        self._begun_at = None

    def _look(self) -> None:
        """Ends the stream if its write takes too long, or too much waits behind it."""
        now, begun_at = self._loop.time(), self._begun_at
        left_s = self._timeout_s if begun_at is None else begun_at + self._timeout_s - now
        if begun_at is not None and (left_s <= 0 or self._output.num_pending > self._most_pending_tokens):
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(min(self._look_s, left_s), self._look)
