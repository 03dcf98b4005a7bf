"""Which requests leave a worker that is not to decode any more, and where to. Pure: residents and room in, moves out.

A few at a time: each costs its old worker a short step and a transfer, and its client a pause. Only where there is room
to the end of the output; whoever finds none, or is about to end, finishes where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

MOST_AT_ONCE = 4
"""Moves off one worker that are under way together."""
FEWEST_TOKENS_LEFT = 16
"""An output that can be no longer than this ends sooner than it has moved."""


@dataclass(frozen=True)
class Resident:
    """A request that decodes on the worker that is to be emptied, and that no other worker holds anything of."""

    request_id: str
    num_sequences: int
    num_promised_tokens: int
    """Most KV that it will hold."""
    num_tokens_left: int
    """Most that its sequences may still tell, each."""


@dataclass(frozen=True)
class DecodeRoom:
    """What another decode worker has left. Negative where more is promised than there is."""

    worker_id: str
    num_tokens: int
    num_free_sequences: int
    num_sequences: int
    """That it has."""

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
    """Of a request, to a worker."""

    request_id: str
    to_id: str


def choose_moves(residents: Iterable[Resident], rooms: Iterable[DecodeRoom], num_under_way: int) -> list[Migration]:
    """Those that move now, the longest outputs first, each to the worker that then decodes the fewest sequences."""
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
