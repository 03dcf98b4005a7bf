"""One call that reads a request: it turns the request's state and output into the messages that its client is sent."""

from __future__ import annotations

from cluster.errors import Aborted
from cluster.lifecycle import RequestState
from cluster.pb import generation_pb2
from cluster.pb.generation_pb2 import GenerateStreamResponse
from router.stream.request import LiveRequest

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
        self._is_replaced = False

    def check(self) -> None:
        """Raises Aborted when another call reads the request instead."""
        if self._is_replaced:
            raise Aborted("another call has resumed this generation and is told the rest of it")

    def replace(self) -> None:
        self._is_replaced = True
        self.output.wake()

    def take(self) -> list[GenerateStreamResponse]:
        """Returns everything that the client has not been sent, in the contract's order."""
        live, out = self.live, list[GenerateStreamResponse]()
        is_prefilling = live.lifecycle.instant(RequestState.PREFILLING) is not None
        unsent = self.output.take(is_prefilling=is_prefilling)
        if unsent.has_begun:
            out.append(GenerateStreamResponse(started=self._started()))
        if unsent.is_heartbeat_due:
            out.append(GenerateStreamResponse(heartbeat=self._heartbeat()))
        out += [GenerateStreamResponse(delta=delta) for delta in unsent.deltas]
        out += [GenerateStreamResponse(sequence_end=end) for end in unsent.ends]
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
        timing = generation_pb2.Timing(placement=placement, migrations=live.num_moves)
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
