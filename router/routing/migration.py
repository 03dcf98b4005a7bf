"""Moves of running requests off workers that should not decode any more. Pure: requests and free room in, moves out.

A few at a time: each costs its old worker a short step and a transfer, and its client a pause. A request moves only to
where there is room up to the end of its output; one that finds none, or is about to end, finishes where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.lifecycle import RequestState
from router.routing.fleet import DECODE
from router.routing.load_tracker import Load
from router.routing.worker_client import Speed, WorkerClient
from router.stream.request import LiveRequest

MOST_AT_ONCE = 4
"""Moves off one worker that are under way together."""
MOST_ROOMS = 64
"""Workers that are looked at for room: those that decode the fewest sequences."""
FEWEST_TOKENS_LEFT = 16
"""An output that can be no longer than this ends sooner than it has moved."""


@dataclass(frozen=True)
class Resident:
    """A request that decodes on the worker to be emptied, and that no other worker holds anything of."""

    request_id: str
    num_sequences: int
    num_promised_tokens: int
    """Largest KV that it will hold."""
    num_tokens_left: int
    """Most tokens that any of its sequences may still get."""

    @classmethod
    def of(cls, live: LiveRequest) -> Resident:
        work = live.work
        open_tokens = [s.num_tokens for s in live.sequences if s.end is None]
        num_left = live.request.sampling.stopping.max_output_tokens - min(open_tokens) if open_tokens else 0
        return cls(live.key.request_id, work.num_sequences, work.num_output_tokens, num_left)


@dataclass(frozen=True)
class DecodeRoom:
    """Free room of another decode worker. Negative where more is promised than there is."""

    worker_id: str
    num_tokens: int
    num_free_sequences: int
    num_sequences: int
    """Sequences that it decodes."""

    @classmethod
    def of(cls, worker: WorkerClient, load: Load) -> DecodeRoom:
        num_sequences = load.sequences.num_sequences
        num_free = worker.max_num_seqs - num_sequences
        return cls(worker.worker_id, worker.kv_tokens - load.num_tokens, num_free, num_sequences)

    def has_room_for(self, resident: Resident) -> bool:
        return self.num_tokens >= resident.num_promised_tokens and self.num_free_sequences >= resident.num_sequences

    def with_one_more(self, resident: Resident) -> DecodeRoom:
        return replace(
            self,
            num_tokens=self.num_tokens - resident.num_promised_tokens,
            num_free_sequences=self.num_free_sequences - resident.num_sequences,
            num_sequences=self.num_sequences + resident.num_sequences,
        )


@dataclass(frozen=True)
class Migration:
    """One request moves to a worker."""

    request_id: str
    to_id: str


def why_emptied(worker: WorkerClient) -> str:
    """Why requests that decode there should move; empty: they should not. A suspect cannot hand its requests over."""
    if not worker.is_ready or worker.is_suspect:
        return ""
    if worker.is_draining:
        return "the worker drains"
    if worker.speed is Speed.SLOW:
        return "the worker is far slower than predicted"
    return "" if worker.role == DECODE else "the worker is there to prefill"


def residents_of(worker: WorkerClient, running: Sequence[LiveRequest]) -> tuple[list[Resident], int]:
    """Returns the requests of a worker that may move off it, and the number of moves off it that are under way."""
    num_under_way = sum(live.attempt.is_move and live.attempt.prefill is worker for live in running)
    decoding = [r for r in running if r.attempt.workers == [worker] and r.lifecycle.state is RequestState.DECODING]
    return [Resident.of(live) for live in decoding if live.has_left_prefill], num_under_way


def choose_moves(residents: Iterable[Resident], rooms: Iterable[DecodeRoom], num_under_way: int) -> list[Migration]:
    """The moves that begin now, longest outputs first, each to the worker that then decodes the fewest sequences."""
    open_rooms = {room.worker_id: room for room in rooms}
    moves: list[Migration] = []
    for resident in sorted(residents, key=lambda r: (-r.num_tokens_left, r.request_id)):
        if num_under_way + len(moves) >= MOST_AT_ONCE or resident.num_tokens_left < FEWEST_TOKENS_LEFT:
            break
        fitting = [room for room in open_rooms.values() if room.has_room_for(resident)]
        if not fitting:
            continue
        room = min(fitting, key=lambda r: (r.num_sequences, -r.num_tokens, r.worker_id))
        open_rooms[room.worker_id] = room.with_one_more(resident)
        moves.append(Migration(resident.request_id, room.worker_id))
    return moves
