"""What a client that asks for Timing is told: each duration is the difference of two recorded instants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.lifecycle import RequestState
from cluster.pb import generation_pb2

if TYPE_CHECKING:
    from router.stream.request import LiveRequest


def timing_of(live: LiveRequest) -> generation_pb2.Timing:
    story = live.lifecycle
    timing = generation_pb2.Timing(
        placement=live.placement.reason if live.placement else "not placed", migrations=live.num_moves
    )
    timing.arrival_time.FromNanoseconds(round(live.arrival_time_s * 1e9))
    arrived, prefill = story.instant(RequestState.QUEUED), story.instant(RequestState.PREFILLING)
    # Of an attempt that failed, no time counts as transfer.
    transfer, decode = (story.instant(s, last=True) for s in (RequestState.TRANSFERRING, RequestState.DECODING))
    for duration, begin, end in (
        (timing.queue, arrived, prefill),
        (timing.prefill, prefill, live.first_token_at),
        (timing.time_to_first_token, arrived, live.first_token_at),
        (timing.kv_transfer, transfer, decode),
        (timing.decode, decode, story.instant(RequestState.FINISHED)),
    ):
        if begin is not None and end is not None:
            duration.FromNanoseconds(max(0, round((end - begin) * 1e9)))
    return timing
