"""Responses that are kept: where a conversation goes on, what is read again, and what runs in the background.

They are records of the batch store (`router.batches.store`), so they are where files and batches are, are their
tenant's, and end after KEPT_S. A record is small; what is long is in pieces, compressed:

    INPUT         the body, its items and the response before it began, written first
    events        of each run in the background, some in each piece, the last one written again as it grows
    the answer    the response that is over, and the tokens of its turn: of its last run, where it ran in the background

A conversation is a chain: each response has its own items and the id of the one before. A tenant that has as much as
it may keep loses its oldest responses for new ones.

A response in the background is worked on by the router that its record names, until `held_until`; another one that
takes it over begins another run. Records are replaced only by a writer that knows their present version, and only the
events that a record counts are there, so what the first router still writes then is not seen.
"""

from __future__ import annotations

import json
import secrets
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

from cluster.errors import FieldViolation, NotFound
from router.api.call import TurnTokens
from router.api.violations import invalid, shortened
from router.batches.store import KEPT_S, BatchStore, JsonRecord, StoredRecord, TenantLimits
from router.openai.errors import HttpFailure
from router.responses.answers import Event, ResponseAnswer, ResponseStatus
from router.responses.items import Item, ItemReference
from router.responses.position import RESPONSE, ToldEvents

MOST_KEPT, MOST_KEPT_BYTES = 10_000, 2**30
"""Responses of one tenant, and their compressed bytes."""
MOST_TURNS = 1024
"""Responses of one conversation."""
KIND: Final = "response"
INPUT, ANSWER = 0, 1
"""The answer's piece, but of a response that runs in the background."""
_RUN = 2**20
"""Pieces of one run: its events, and, as the last one, its answer."""
_TURN = "turn_tokens"
"""In the piece of an answer, beside the fields that clients are sent."""
EVENTS_IN_PIECE = 256
_EVICTED_AT_ONCE = 32
_LIMITS = TenantLimits(most_bytes=MOST_KEPT_BYTES, most_files=MOST_KEPT, most_batches=0, most_open=0)
OPEN: tuple[ResponseStatus, ...] = ("queued", "in_progress")


@dataclass(frozen=True)
class StoredResponse(JsonRecord):
    """The record of one response. Times are in seconds since 1970."""

    response_id: str
    tenant: str
    key_id: str
    """Id of the API key on whose behalf it runs."""
    created_at: int
    size_bytes: int
    status: ResponseStatus
    previous: str | None = None
    """The response that it continues."""
    session: str = ""
    """The session that its conversation is to the router."""
    is_background: bool = False
    owner: str = ""
    """The router that works on it."""
    held_until: float = 0.0
    """When that router has been lost, if it has not said otherwise; 0 where nobody has to work on it."""
    generation_id: str = ""
    """Of the last run; empty before it has begun."""
    runs: list[int] = field(default_factory=list)
    """Events that are stored of each run in the background."""
    position: int = 0
    """How far they go, as `ToldEvents` has it."""

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def told(self) -> ToldEvents:
        return ToldEvents(sum(self.runs), self.position)

    @property
    def answer_piece(self) -> int:
        return _events_piece(len(self.runs) - 1, _RUN - 1) if self.runs else ANSWER


@dataclass(frozen=True)
class KeptResponse:
    """A response as it was found."""

    record: StoredRecord
    response: StoredResponse


def new_response_id() -> str:
    return f"{RESPONSE}{secrets.token_hex(24)}"


def _events_piece(run: int, number: int) -> int:
    """The piece of events of a run; both count from 0."""
    return (run + 1) * _RUN + number


class KeptConversation(NamedTuple):
    """A response and all that it continues."""

    items: list[Item]
    session: str
    turns: list[TurnTokens]
    """Their tokens, from the first turn on that those of the last one begin with; empty where they are not kept."""


NO_CONVERSATION = KeptConversation([], "", [])


class ResponseStore:
    """Its methods raise StoreAway."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store

    async def add(
        self,
        response: StoredResponse,
        given: dict[str, Any],
        answer: ResponseAnswer | None = None,
        turn: TurnTokens | None = None,
    ) -> KeptResponse:
        """Keeps a response; `given` as `ResponseCall.given`. Raises HttpFailure where its tenant has too many that are
        not over."""
        pieces = {INPUT: _packed(given)} | ({} if answer is None else {ANSWER: _packed_answer(answer, turn)})
        response = replace(response, size_bytes=sum(map(len, pieces.values())))
        for number, data in pieces.items():
            await self._store.put_piece(response.response_id, number, data)
        record = StoredRecord(
            KIND, response.response_id, response.tenant, response.to_json(), response.created_at + KEPT_S
        )
        while not await self._store.reserve(record, _LIMITS):
            if not await self._evict(response.tenant):
                what = f"{MOST_KEPT} responses or {MOST_KEPT_BYTES} bytes may be kept, and none of them is over"
                raise HttpFailure(429, "too_many_responses", f"{what}; wait, or delete some")
        return KeptResponse(record, response)

    async def is_kept(self, tenant: str, response_id: str) -> bool:
        return await self._store.find(KIND, tenant, response_id) is not None

    async def find(self, tenant: str, response_id: str) -> KeptResponse:
        """Raises NotFound, also for another tenant's."""
        record = await self._store.find(KIND, tenant, response_id)
        if record is None or not record.is_readable or record.ends_at <= time.time():
            raise no_such_response(response_id)
        return KeptResponse(record, StoredResponse.from_json(record.data))

    async def left(self, limit: int) -> list[KeptResponse]:
        """Some of the open responses that no router works on any more."""
        records = [each for each in await self._store.left(time.time(), limit) if each.is_readable]
        found = [KeptResponse(each, StoredResponse.from_json(each.data)) for each in records]
        return [kept for kept in found if kept.response.is_open]

    async def replace(self, kept: KeptResponse, response: StoredResponse) -> KeptResponse | None:
        """None where another one has changed or deleted it meanwhile."""
        record = replace(kept.record, data=response.to_json())
        if not await self._store.replace(record):
            return None
        return KeptResponse(replace(record, version=record.version + 1), response)

    async def delete(self, kept: KeptResponse) -> bool:
        return await self._store.remove(KIND, kept.response.tenant, kept.response.response_id)

    async def put_answer(self, response: StoredResponse, answer: ResponseAnswer, turn: TurnTokens | None = None) -> int:
        """Returns its compressed bytes."""
        data = _packed_answer(answer, turn)
        await self._store.put_piece(response.response_id, response.answer_piece, data)
        return len(data)

    async def put_events(self, response: StoredResponse, piece: int, events: Sequence[Event]) -> int:
        """One piece of the last run. Returns its compressed bytes."""
        data = _packed(list(events))
        await self._store.put_piece(response.response_id, _events_piece(len(response.runs) - 1, piece), data)
        return len(data)

    async def given(self, response_id: str) -> dict[str, Any]:
        """As `add` was given it. Raises NotFound."""
        found: dict[str, Any] = await self._piece(response_id, INPUT)
        return found

    async def answer(self, response: StoredResponse) -> ResponseAnswer:
        """The response, as far as it has come. Raises NotFound."""
        if not response.is_open:
            return (await self._over(response))[0]
        answer: ResponseAnswer = (await self.given(response.response_id))["answer"]
        answer["status"] = response.status
        answer["output"] = await self.done_items(response)
        return answer

    async def done_items(self, response: StoredResponse) -> list[Any]:
        """The items of an output of which events say that they are done."""
        events = await self.events(response)
        return [event["item"] for event in events if event["type"] == "response.output_item.done"]

    async def events(self, response: StoredResponse, first: int = 0) -> list[Event]:
        """The stored events of a background response, from this one on. Raises NotFound."""
        events: list[Event] = []
        num_before = 0
        for run, count in enumerate(response.runs):
            for begin in range(0, count, EVENTS_IN_PIECE):
                size = min(EVENTS_IN_PIECE, count - begin)
                at = num_before + begin
                if at + size > first:
                    found = await self._piece(response.response_id, _events_piece(run, begin // EVENTS_IN_PIECE))
                    events += found[max(0, first - at) : size]
            num_before += count
        return events

    async def conversation(self, tenant: str, response_id: str) -> KeptConversation:
        """A response and all that it continues. Raises NotFound or InvalidRequest."""
        turns: list[list[Item]] = []
        tokens: list[TurnTokens] = []
        session, wanted = "", response_id
        while wanted:
            try:
                kept = await self.find(tenant, wanted)
                if kept.response.status not in ("completed", "incomplete"):
                    what = f"is {kept.response.status}; only one that is over, and has not failed, can be continued"
                    raise invalid((FieldViolation("previous_response_id", what),))
                given, (answer, turn) = await self.given(wanted), await self._over(kept.response)
            except NotFound as error:
                raise _broken_chain(response_id, wanted) from error
            turns.append(given["items"] + answer["output"])
            if turn is not None and (not tokens or tokens[-1].num_known) and len(tokens) == len(turns) - 1:
                tokens.append(turn)
            session = session or kept.response.session
            if len(turns) > MOST_TURNS:
                what = f"has more than {MOST_TURNS} turns before it; begin another conversation"
                raise invalid((FieldViolation("previous_response_id", what),))
            wanted = kept.response.previous or ""
        if tokens and tokens[-1].num_known:
            tokens = []
        return KeptConversation([item for turn in reversed(turns) for item in turn], session, tokens[::-1])

    async def item(self, tenant: str, reference: ItemReference) -> Item | None:
        """The item that a reference stands for."""
        try:
            kept = await self.find(tenant, reference.response_id)
            if reference.is_input:
                items: Sequence[Any] = (await self.given(reference.response_id))["items"]
            else:
                items = (await self.answer(kept.response))["output"]
        except NotFound:
            return None
        return items[reference.place] if reference.place < len(items) else None

    async def _over(self, response: StoredResponse) -> tuple[ResponseAnswer, TurnTokens | None]:
        """A response that is over, and its tokens. Raises NotFound."""
        found = await self._piece(response.response_id, response.answer_piece)
        turn = found.pop(_TURN, None)
        return found, None if turn is None else TurnTokens(**turn)

    async def _piece(self, response_id: str, number: int) -> Any:
        data = await self._store.piece(response_id, number)
        if data is None:
            raise no_such_response(response_id)
        return json.loads(zlib.decompress(data))

    async def _evict(self, tenant: str) -> bool:
        """Removes the oldest response that is over."""
        oldest = await self._store.page(KIND, tenant, after=None, limit=_EVICTED_AT_ONCE, is_ascending=True)
        for record in oldest or ():
            if record.is_readable and not StoredResponse.from_json(record.data).is_open:
                await self._store.remove(KIND, tenant, record.record_id)
                return True
        return False


def _packed_answer(answer: ResponseAnswer, turn: TurnTokens | None) -> bytes:
    return _packed(answer if turn is None else {**answer, _TURN: asdict(turn)})


def _packed(value: object) -> bytes:
    return zlib.compress(json.dumps(value, ensure_ascii=False).encode())


def no_such_response(response_id: str) -> NotFound:
    name = shortened(response_id, 64)
    return NotFound(
        f"there is no response {name!r}; it was not stored, was deleted, is too old, or is another tenant's"
    )


def _broken_chain(response_id: str, missing: str) -> NotFound:
    field = "previous_response_id"
    what = "names no response that is kept; send the whole conversation as input"
    if missing != response_id:
        what = f"continues {missing}, which is not kept any more; send the whole conversation as input"
    return NotFound(f"{field} {shortened(response_id, 64)!r} {what}", violations=(FieldViolation(field, what),))
