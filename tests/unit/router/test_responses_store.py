"""Responses in the batch stores: bounded for each tenant, the oldest going first; conversations; pieces that last."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.redis_server import RedisServer
from cluster.errors import InvalidRequest, NotFound
from router.api.call import TurnTokens
from router.batches.redis_store import RedisBatchStore
from router.batches.sqlite_store import SqliteStore
from router.batches.store import BatchStore, StoredRecord, TenantLimits
from router.openai.errors import HttpFailure
from router.responses import store as responses
from router.responses.items import ItemReference
from router.responses.store import ResponseStore, StoredResponse

LATER = 4e9


@pytest.fixture(params=["file", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BatchStore]:
    """Called in the test's own event loop."""
    if request.param == "file":
        return lambda: SqliteStore(str(tmp_path / "batches.db"))
    server: RedisServer = request.getfixturevalue("redis_of_session")
    return lambda: RedisBatchStore(server.url, f"{{{uuid.uuid4().hex}}}:")


def record(
    record_id: str, size_bytes: int, tenant: str = "acme", kind: Any = "response", held_until: float = 0.0
) -> StoredRecord:
    data = json.dumps({"size_bytes": size_bytes, "held_until": held_until}).encode()
    return StoredRecord(kind, record_id, tenant, data, LATER)


async def test_responses_of_a_tenant_count_by_themselves(make_store: Callable[[], BatchStore]) -> None:
    store, limits = make_store(), TenantLimits(most_bytes=100, most_files=3, most_batches=0, most_open=0)
    await store.add(record("file-1", 1000, kind="file"))
    await store.put_piece("resp_1", 0, b"given")
    assert await store.reserve(record("resp_1", 60), limits)
    await store.put_piece("resp_1", 1, b"answer")
    assert not await store.reserve(record("resp_2", 50), limits), "too many bytes"
    assert await store.reserve(record("resp_2", 50, "other"), limits)
    assert await store.replace(record("resp_1", 10)), "it has become smaller"
    for number in (2, 3):
        assert await store.reserve(record(f"resp_{number}0", 40), limits)
    assert not await store.reserve(record("resp_4", 1), limits), "too many"
    assert await store.remove("response", "acme", "resp_20") and await store.reserve(record("resp_4", 50), limits)
    page = await store.page("response", "acme", after=None, limit=9, is_ascending=True)
    assert page is not None and [each.record_id for each in page] == ["resp_1", "resp_30", "resp_4"]
    assert [await store.piece("resp_1", number) for number in range(2)] == [b"given", b"answer"]
    assert await store.find("response", "other", "resp_1") is None
    await store.close()


async def test_responses_that_nobody_holds_any_more_are_told(make_store: Callable[[], BatchStore]) -> None:
    store, limits = make_store(), TenantLimits(most_bytes=100, most_files=9, most_batches=0, most_open=0)

    async def left(now: float) -> set[str]:
        return {each.record_id for each in await store.left(now, 10)}

    for number, until in enumerate((100.5, 150.0, 0.0)):
        assert await store.reserve(record(f"resp_{number}", 1, held_until=until), limits)
    assert await store.reserve(record("resp_9", 1, "other", held_until=200.0), limits)
    await store.add(record("file-1", 1, kind="file", held_until=1.0))
    assert await left(100.4) == set() and await left(100.5) == {"resp_0"}
    assert await left(1e9) == {"resp_0", "resp_1", "resp_9"} and len(await store.left(1e9, 2)) == 2
    assert await store.replace(record("resp_0", 1, held_until=300.0)) and await store.replace(
        record("resp_9", 1, "other")
    )
    assert await left(299.0) == {"resp_1"} and await left(300.0) == {"resp_0", "resp_1"}
    assert await store.remove("response", "acme", "resp_1") and await left(300.0) == {"resp_0"}
    await store.close()


async def test_pieces_of_a_record_that_is_there_do_not_end_by_themselves(redis_of_session: RedisServer) -> None:
    prefix = f"{{{uuid.uuid4().hex}}}:"
    store = RedisBatchStore(redis_of_session.url, prefix)
    await store.put_piece("resp_1", 0, b"a")
    assert await store._client.ttl(f"{prefix}pieces:resp_1") > 0
    await store.add(record("resp_1", 1))
    await store.put_piece("resp_1", 1, b"b")
    assert await store._client.ttl(f"{prefix}pieces:resp_1") == -1
    await store.close()


def response(number: int, previous: int | None = None, **fields: Any) -> StoredResponse:
    values: dict[str, Any] = {"status": "completed", "session": "s"} | fields
    before = None if previous is None else name(previous)
    return StoredResponse(name(number), "acme", "key", 1_764_000_000, 0, previous=before, **values)


def name(number: int) -> str:
    return f"resp_{number:048x}"


async def add(store: ResponseStore, response: StoredResponse, turn: TurnTokens | None = None) -> None:
    items = [{"id": response.response_id, "type": "message"}]
    answer: Any = {"output": [{"id": f"{response.response_id}-out", "type": "message"}], "status": response.status}
    await store.add(response, {"items": items, "answer": answer}, answer, turn)


@pytest.fixture
def kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "KEPT_S", LATER)


@pytest.mark.usefixtures("kept_for_ever")
async def test_a_conversation_is_the_items_of_all_its_turns() -> None:
    store = ResponseStore(SqliteStore(None))
    for number, previous in ((1, None), (2, 1), (3, 1), (4, 3)):
        await add(store, response(number, previous))
    items, session, _ = await store.conversation("acme", name(4))
    assert [item["id"] for item in items] == [f"{name(n)}{end}" for n in (1, 3, 4) for end in ("", "-out")]
    assert session == "s"
    found = await store.item("acme", ItemReference(name(3), 0x8000))
    assert found is not None and found["id"] == name(3)
    assert await store.item("other", ItemReference(name(3), 0)) is None
    assert await store.item("acme", ItemReference(name(3), 7)) is None
    with pytest.raises(NotFound):
        await store.conversation("other", name(4))
    await store.delete(await store.find("acme", name(1)))
    with pytest.raises(NotFound, match="is not kept any more"):
        await store.conversation("acme", name(4))
    await add(store, response(5, status="failed"))
    with pytest.raises(InvalidRequest, match="is failed"):
        await store.conversation("acme", name(5))


@pytest.mark.usefixtures("kept_for_ever")
async def test_the_tokens_of_a_conversation_are_those_of_its_turns_or_none() -> None:
    """Each turn's tokens are told apart from those of the turns before, so none may be missing."""
    store = ResponseStore(SqliteStore(None))
    first, second, fourth, anew = (TurnTokens("t", known, [7], 1) for known in (0, 5, 9, 0))
    for number, previous, turn in ((1, None, first), (2, 1, second), (3, 2, None), (4, 3, fourth), (5, 3, anew)):
        await add(store, response(number, previous), turn)
    for number, turns in ((1, [first]), (2, [first, second]), (3, []), (4, []), (5, [anew])):
        assert (await store.conversation("acme", name(number))).turns == turns
        kept = await store.find("acme", name(number))
        assert (await store.answer(kept.response)).keys() == {"output", "status"}


@pytest.mark.usefixtures("kept_for_ever")
async def test_the_oldest_that_are_over_go_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = TenantLimits(most_bytes=10**6, most_files=3, most_batches=0, most_open=0)
    monkeypatch.setattr(responses, "_LIMITS", limits)
    store = ResponseStore(SqliteStore(None))
    await add(store, response(1, status="queued"))
    for number in range(2, 6):
        await add(store, response(number, status="queued" if number == 5 else "completed"))
    with pytest.raises(NotFound):
        await store.find("acme", name(3))
    for number in (1, 4, 5):
        await store.find("acme", name(number))
    await add(store, response(6, status="queued"))
    with pytest.raises(HttpFailure, match="none of them is over"):
        await add(store, response(7))


async def test_a_response_ends_with_its_time() -> None:
    store = ResponseStore(SqliteStore(None))
    await add(store, response(1, session=""))
    with pytest.raises(NotFound):
        await store.find("acme", name(1))
