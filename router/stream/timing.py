"""The Timing that a client asked for: each duration is the difference of two instants that the request recorded."""

from __future__ import annotations

from cluster.lifecycle import Lifecycle, RequestState
from cluster.pb import generation_pb2
from router.routing.load_tracker import Placement


def timing_of(
    lifecycle: Lifecycle,
    arrival_time_s: float,
    first_token_at: float | None,
    placement: Placement | None,
    num_moves: int,
) -> generation_pb2.Timing:
    """`arrival_time_s` is on the wall clock, `first_token_at` on the lifecycle's."""
    timing = generation_pb2.Timing(placement=placement.reason if placement else "not placed", migrations=num_moves)
    timing.arrival_time.FromNanoseconds(round(arrival_time_s * 1e9))
    arrived, prefill = lifecycle.instant(RequestState.QUEUED), lifecycle.instant(RequestState.PREFILLING)
    # The last ones: no time of a failed attempt counts as transfer.
    transfer, decode = (lifecycle.instant(s, last=True) for s in (RequestState.TRANSFERRING, RequestState.DECODING))
    for duration, begin, end in (
        (timing.queue, arrived, prefill),
        (timing.prefill, prefill, first_token_at),
        (timing.time_to_first_token, arrived, first_token_at),
        (timing.kv_transfer, transfer, decode),
        (timing.decode, decode, lifecycle.instant(RequestState.FINISHED)),
    ):
        if begin is not None and end is not None:
            duration.FromNanoseconds(max(0, round((end - begin) * 1e9)))
    return timing
