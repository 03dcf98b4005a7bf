"""One request: the key of each try at it, its states, and `advance`, the only way to move from one to the next.

Owns the order of states and the instants at which they were entered; every latency that Baton reports is the difference
of two of those. Knows no clock (the caller passes `now`), no worker and no socket.

    QUEUED -> PREFILLING -> TRANSFERRING -> DECODING -> FINISHED
        a lost worker leads back to QUEUED, a local prefill skips TRANSFERRING, a move goes back to it;
        CANCELLED and FAILED end every live state, REJECTED only QUEUED.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from cluster.errors import InternalError
from cluster.pb import worker_pb2


class RequestKey(NamedTuple):
    """Identity of one try at a request, on every wire and in every table; what an earlier try sends late matches none.

    `request_id` is the router's generation id, `attempt` counts from 1.
    """

    request_id: str
    attempt: int

    @classmethod
    def of(cls, message: worker_pb2.RequestKey) -> RequestKey:
        return cls(message.request_id, message.attempt)

    def to_proto(self) -> worker_pb2.RequestKey:
        return worker_pb2.RequestKey(request_id=self.request_id, attempt=self.attempt)


class RequestState(enum.Enum):
    """KV blocks are held, in this order, by nobody; prefill (decode has reserved); both; decode; nobody at the end."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"


_S = RequestState
_ABORTED = frozenset({_S.CANCELLED, _S.FAILED})

TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = MappingProxyType(
    {
        _S.QUEUED: frozenset({_S.PREFILLING, _S.REJECTED}) | _ABORTED,
        _S.PREFILLING: frozenset({_S.TRANSFERRING, _S.DECODING, _S.QUEUED}) | _ABORTED,
        _S.TRANSFERRING: frozenset({_S.DECODING, _S.QUEUED}) | _ABORTED,
        _S.DECODING: frozenset({_S.FINISHED, _S.TRANSFERRING, _S.QUEUED}) | _ABORTED,
        _S.FINISHED: frozenset(),
        _S.CANCELLED: frozenset(),
        _S.FAILED: frozenset(),
        _S.REJECTED: frozenset(),
    }
)
"""Every legal move; a state without one is terminal."""


class StateEntry(NamedTuple):
    """One entry of the history: `state` was entered at `at` (seconds on the caller's clock) because of `why`."""

    state: RequestState
    at: float
    why: str


class IllegalTransition(InternalError):
    """A move that TRANSITIONS does not have; the message has the request's whole history."""

    reason = "ILLEGAL_TRANSITION"


class Lifecycle:
    """One request's state and history, beginning in QUEUED at `now`."""

    def __init__(self, now: float, why: str = "") -> None:
        self._history: list[StateEntry] = [StateEntry(RequestState.QUEUED, now, why)]
        self._is_terminal = False  # kept, as every token asks for it

    @property
    def state(self) -> RequestState:
        return self._history[-1].state

    @property
    def is_terminal(self) -> bool:
        return self._is_terminal

    @property
    def history(self) -> tuple[StateEntry, ...]:
        return tuple(self._history)

    def advance(self, to: RequestState, now: float, why: str = "") -> None:
        """Enters `to`; raises IllegalTransition and changes nothing when the table has no such move."""
        if to not in TRANSITIONS[self.state]:
            raise IllegalTransition(self._refusal(to, why))
        self._history.append(StateEntry(to, now, why))
        self._is_terminal = not TRANSITIONS[to]

    def instant(self, state: RequestState, *, last: bool = False) -> float | None:
        """When `state` was entered the first time (or the last time); None if it never was."""
        entries = reversed(self._history) if last else iter(self._history)
        return next((entry.at for entry in entries if entry.state is state), None)

    def story(self) -> str:
        """The states so far, with seconds since the beginning: `queued +0.000s, prefilling +0.012s (picked p0)`."""
        begin = self._history[0].at
        return ", ".join(
            f"{entry.state.value} +{entry.at - begin:.3f}s" + (f" ({entry.why})" if entry.why else "")
            for entry in self._history
        )

    def _refusal(self, to: RequestState, why: str) -> str:
        allowed = ", ".join(sorted(state.value for state in TRANSITIONS[self.state])) or "nothing: it is terminal"
        because = f" ({why})" if why else ""
        return f"cannot go from {self.state.value} to {to.value}{because}; allowed: {allowed}. Story: {self.story()}"
