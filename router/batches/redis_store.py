"""The batch store in Redis, for routers that share one: each change is one Lua script, all of it or nothing.

    record:ID               hash: kind, tenant, data, ends_at, version, size
    list:KIND:TENANT, open  sorted sets of ids, in the order in which they were added
    open:TENANT             set of ids of the tenant's open batches
    bytes, bytes:response   hashes: bytes of each tenant's files, and of its responses
    ends                    sorted set of ids, by when they may be swept away
    held                    sorted set of responses that a router works on, by when another one may go on with them
    pieces:ID               hash: the pieces of a file by number; it ends by itself until its file is added
    claim:ID                hash: owner, epoch, until_ms, and how many lines have a good and a bad answer
    answers:ID              hash: the answers by number, each behind 1 (good) or 0
    begun:ID                set of NUMBER:EPOCH: the lines that are being computed, and those whose router was lost

Time is the server's. What Redis loses is lost: a batch that it has lost is over for whoever works on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.redis_store import ask, connect
from router.batches.store import ORPHAN_S, BatchClaim, Kind, LineAnswer, StoredRecord, TenantLimits

PREFIX = "baton:{batches}:"
"""With a tag, so that Redis Cluster would keep all of it in one place."""
_FIELDS = ("kind", "tenant", "data", "ends_at", "version")
_AT_ONCE = 100
"""Open batches that are looked at in one round trip."""

_IF_HELD = """
local function is_held(p, batch_id, owner, epoch)
  if not batch_id then return true end
  local claim = redis.call('HMGET', p .. 'claim:' .. batch_id, 'owner', 'epoch')
  return claim[1] == owner and claim[2] == epoch
end
"""
_SIZES = """
local function sizes(p, kind) return p .. (kind == 'response' and 'bytes:response' or 'bytes') end
"""
_NOTE_HOLD = """
local function hold(p, id, until_s)
  redis.call('ZREM', p .. 'held', id)
  if tonumber(until_s) > 0 then redis.call('ZADD', p .. 'held', until_s, id) end
end
"""
_ADD = (
    _IF_HELD
    + _SIZES
    + _NOTE_HOLD
    + """
local p, id, kind, tenant, data, ends_at, version, size, held_until, most_bytes, most, most_open, batch_id, owner, epoch
  = KEYS[1], unpack(ARGV)
if not is_held(p, batch_id, owner, epoch) then return 0 end
local held = redis.call('HMGET', p .. 'record:' .. id, 'kind', 'size')
local more = tonumber(size) - tonumber(held[2] or 0)
if most ~= '' then
  local list, count = p .. 'list:' .. kind .. ':' .. tenant, 0
  if kind == 'upload' then count = redis.call('ZCARD', p .. 'list:file:' .. tenant) end
  if count + redis.call('ZCARD', list) >= tonumber(most) then return 0 end
  if kind == 'batch' and redis.call('SCARD', p .. 'open:' .. tenant) >= tonumber(most_open) then return 0 end
  local bytes = tonumber(redis.call('HGET', sizes(p, kind), tenant) or 0)
  if kind ~= 'batch' and bytes + more > tonumber(most_bytes) then return 0 end
end
if more ~= 0 then redis.call('HINCRBY', sizes(p, kind), tenant, more) end
if held[1] == 'upload' then redis.call('ZREM', p .. 'list:upload:' .. tenant, id) end
redis.call('HSET', p .. 'record:' .. id, 'kind', kind, 'tenant', tenant, 'data', data, 'ends_at', ends_at,
  'version', version, 'size', size)
local seq = redis.call('INCR', p .. 'seq')
redis.call('ZADD', p .. 'list:' .. kind .. ':' .. tenant, 'NX', seq, id)
redis.call('ZADD', p .. 'ends', ends_at, id)
hold(p, id, held_until)
redis.call('PERSIST', p .. 'pieces:' .. id)
if kind == 'batch' then
  redis.call('ZADD', p .. 'open', 'NX', seq, id)
  redis.call('SADD', p .. 'open:' .. tenant, id)
end
return 1
"""
)
_REPLACE = (
    _IF_HELD
    + _SIZES
    + _NOTE_HOLD
    + """
local p, id, tenant, data, ends_at, version, size, held_until, batch_id, owner, epoch = KEYS[1], unpack(ARGV)
if not is_held(p, batch_id, owner, epoch) then return 0 end
local held = redis.call('HMGET', p .. 'record:' .. id, 'version', 'tenant', 'kind', 'size')
if held[1] ~= version or held[2] ~= tenant then return 0 end
local more = tonumber(size) - tonumber(held[4] or 0)
if more ~= 0 then redis.call('HINCRBY', sizes(p, held[3]), tenant, more) end
redis.call('HSET', p .. 'record:' .. id, 'data', data, 'ends_at', ends_at, 'version', tonumber(version) + 1,
  'size', size)
redis.call('ZADD', p .. 'ends', ends_at, id)
hold(p, id, held_until)
return 1
"""
)
_REMOVE = (
    _SIZES
    + """
local p, kind, tenant, id = KEYS[1], unpack(ARGV)
local held = redis.call('HMGET', p .. 'record:' .. id, 'kind', 'tenant', 'size')
if held[1] ~= kind or held[2] ~= tenant then
  redis.call('ZREM', p .. 'ends', id)
  return 0
end
redis.call('UNLINK', p .. 'record:' .. id, p .. 'pieces:' .. id)
redis.call('ZREM', p .. 'list:' .. kind .. ':' .. tenant, id)
redis.call('SREM', p .. 'open:' .. tenant, id)
redis.call('ZREM', p .. 'held', id)
if tonumber(held[3] or 0) > 0 then redis.call('HINCRBY', sizes(p, kind), tenant, -held[3]) end
redis.call('ZREM', p .. 'ends', id)
return 1
"""
)
_CLAIM = """
local p, id, owner, ttl_ms = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local record = redis.call('HMGET', p .. 'record:' .. id, 'kind', 'tenant', 'data', 'ends_at', 'version')
if not record[1] then
  redis.call('ZREM', p .. 'open', id)
  redis.call('UNLINK', p .. 'claim:' .. id, p .. 'answers:' .. id, p .. 'begun:' .. id)
  return {}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local is_open = redis.call('ZSCORE', p .. 'open', id)
if not is_open or tonumber(redis.call('HGET', p .. 'claim:' .. id, 'until_ms') or 0) > now then return {} end
local epoch = redis.call('HINCRBY', p .. 'claim:' .. id, 'epoch', 1)
redis.call('HSET', p .. 'claim:' .. id, 'owner', owner, 'until_ms', string.format('%.0f', now + ttl_ms))
return {id, epoch, record}
"""
_HOLD = (
    _IF_HELD
    + """
local p, id, owner, epoch, ttl_ms = KEYS[1], unpack(ARGV)
if not is_held(p, id, owner, epoch) then return 0 end
local time = redis.call('TIME')
local till = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ttl_ms)
redis.call('HSET', p .. 'claim:' .. id, 'until_ms', string.format('%.0f', till))
return 1
"""
)
_CLOSE = (
    _IF_HELD
    + """
local p, id, owner, epoch = KEYS[1], unpack(ARGV)
if not is_held(p, id, owner, epoch) then return 0 end
redis.call('ZREM', p .. 'open', id)
local tenant = redis.call('HGET', p .. 'record:' .. id, 'tenant')
if tenant then redis.call('SREM', p .. 'open:' .. tenant, id) end
redis.call('UNLINK', p .. 'claim:' .. id, p .. 'answers:' .. id, p .. 'begun:' .. id)
return 1
"""
)
_ANSWER = (
    _IF_HELD
    + """
local p, id, owner, epoch, number, is_good, data = KEYS[1], unpack(ARGV)
if not is_held(p, id, owner, epoch) then return 0 end
if redis.call('HSETNX', p .. 'answers:' .. id, number, is_good .. data) == 1 then
  redis.call('HINCRBY', p .. 'claim:' .. id, is_good == '1' and 'good' or 'bad', 1)
end
redis.call('SREM', p .. 'begun:' .. id, number .. ':' .. epoch)
return 1
"""
)
_BEGIN = (
    _IF_HELD
    + """
local p, id, owner, epoch, number = KEYS[1], unpack(ARGV)
if not is_held(p, id, owner, epoch) then return 0 end
redis.call('SADD', p .. 'begun:' .. id, number .. ':' .. epoch)
return 1
"""
)
_PIECE = (
    _IF_HELD
    + """
local p, id, number, data, ttl_s, batch_id, owner, epoch = KEYS[1], unpack(ARGV)
if not is_held(p, batch_id, owner, epoch) then return 0 end
redis.call('HSET', p .. 'pieces:' .. id, number, data)
if redis.call('EXISTS', p .. 'record:' .. id) == 0 then redis.call('EXPIRE', p .. 'pieces:' .. id, ttl_s) end
return 1
"""
)


class RedisBatchStore:
    """Lives in one event loop. `url` as in `cluster.state`; `prefix` keeps several apart in one Redis."""

    def __init__(self, url: str, prefix: str = PREFIX) -> None:
        """Connects at the first call."""
        self._prefix = prefix
        self._client = connect(url)
        scripts = (_ADD, _REPLACE, _REMOVE, _CLAIM, _HOLD, _CLOSE, _ANSWER, _BEGIN, _PIECE)
        self._scripts = {text: self._client.register_script(text) for text in scripts}

    async def add(self, record: StoredRecord, claim: BatchClaim | None = None) -> bool:
        return bool(await self._run(_ADD, *_values(record), "", "", "", *_held(claim)))

    async def reserve(self, record: StoredRecord, limits: TenantLimits) -> bool:
        most = limits.most_batches if record.kind == "batch" else limits.most_files
        return bool(await self._run(_ADD, *_values(record), limits.most_bytes, most, limits.most_open))

    async def find(self, kind: Kind, tenant: str, record_id: str) -> StoredRecord | None:
        record = (await self._records([record_id]))[0]
        return record if record is not None and (record.kind, record.tenant) == (kind, tenant) else None

    async def page(
        self, kind: Kind, tenant: str, *, after: str | None, limit: int, is_ascending: bool
    ) -> list[StoredRecord] | None:
        key, is_descending = f"{self._prefix}list:{kind}:{tenant}", not is_ascending
        rank = -1
        if after is not None:
            find = self._client.zrank if is_ascending else self._client.zrevrank
            found = await ask(lambda: find(key, after))
            if found is None:
                return None
            rank = found
        ids = await ask(lambda: self._client.zrange(key, rank + 1, rank + limit, desc=is_descending))
        records = await self._records([record_id.decode() for record_id in ids])
        return [record for record in records if record is not None]

    async def replace(self, record: StoredRecord, claim: BatchClaim | None = None) -> bool:
        values = (record.record_id, record.tenant, record.data, record.ends_at, record.version)
        kept = (record.size_bytes, record.held_until)
        return bool(await self._run(_REPLACE, *values, *kept, *_held(claim)))

    async def remove(self, kind: Kind, tenant: str, record_id: str) -> bool:
        return bool(await self._run(_REMOVE, kind, tenant, record_id))

    async def ended(self, now: float, limit: int) -> Sequence[StoredRecord]:
        return await self._until("ends", now, limit)

    async def left(self, now: float, limit: int) -> Sequence[StoredRecord]:
        return await self._until("held", now, limit)

    async def _until(self, name: str, now: float, limit: int) -> list[StoredRecord]:
        """Some records of a sorted set of times, up to this one; ids whose record is lost leave it."""
        key = f"{self._prefix}{name}"
        ids = await ask(lambda: self._client.zrange(key, "-inf", now, byscore=True, offset=0, num=limit))
        records = await self._records([record_id.decode() for record_id in ids])
        lost = [record_id for record_id, record in zip(ids, records, strict=True) if record is None]
        if lost:
            await ask(lambda: self._client.zrem(key, *lost))
        return [record for record in records if record is not None]

    async def put_piece(self, file_id: str, number: int, data: bytes, claim: BatchClaim | None = None) -> bool:
        return bool(await self._run(_PIECE, file_id, number, data, int(ORPHAN_S), *_held(claim)))

    async def piece(self, file_id: str, number: int) -> bytes | None:
        key = f"{self._prefix}pieces:{file_id}"
        found: bytes | None = await ask(lambda: self._client.hget(key, str(number)))
        return found

    async def claim(
        self, owner: str, ttl_s: float, *, but_of: Sequence[str] = (), but: Sequence[str] = ()
    ) -> tuple[BatchClaim, StoredRecord] | None:
        """Looks at open batches some at a time and from outside: a script that looked at all would hold up Redis."""
        first = 0
        while ids := await self._open(first):
            first += len(ids)
            for batch_id, tenant in await self._free(ids):
                if tenant in but_of or batch_id in but:
                    continue
                found = await self._run(_CLAIM, batch_id, owner, round(1000 * ttl_s))
                if found:
                    record = _record(batch_id, found[2])
                    assert record is not None
                    return BatchClaim(batch_id, owner, found[1]), record
        return None

    async def _open(self, first: int) -> list[bytes]:
        """Ids of some open batches, by their place in the queue."""
        found: list[bytes] = await ask(lambda: self._client.zrange(f"{self._prefix}open", first, first + _AT_ONCE - 1))
        return found

    async def _free(self, ids: Sequence[bytes]) -> list[tuple[str, str]]:
        """Finds those of these batches that nobody seems to hold, each with its tenant; empty: its record is lost."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.time()
        for batch_id in map(bytes.decode, ids):
            pipeline.hget(f"{self._prefix}record:{batch_id}", "tenant")
            pipeline.hget(f"{self._prefix}claim:{batch_id}", "until_ms")
        (seconds, micros), *found = await ask(pipeline.execute)
        now_ms = 1000 * seconds + micros // 1000
        pairs = zip(map(bytes.decode, ids), found[::2], found[1::2], strict=True)
        return [(batch_id, (tenant or b"").decode()) for batch_id, tenant, until in pairs if int(until or 0) <= now_ms]

    async def renew(self, claim: BatchClaim, ttl_s: float) -> bool:
        return bool(await self._run(_HOLD, *_held(claim), round(1000 * ttl_s)))

    async def release(self, claim: BatchClaim) -> None:
        await self.end_lines(claim)
        await self._run(_HOLD, *_held(claim), 0)

    async def begin_line(self, claim: BatchClaim, number: int) -> bool:
        return bool(await self._run(_BEGIN, *_held(claim), number))

    async def end_lines(self, claim: BatchClaim, number: int | None = None) -> None:
        numbers = [number] if number is not None else await self._running(claim)
        if numbers:
            lines = [f"{line}:{claim.epoch}" for line in numbers]
            await ask(lambda: self._client.srem(f"{self._prefix}begun:{claim.batch_id}", *lines))

    async def lost_lines(self, claim: BatchClaim) -> Mapping[int, int]:
        return Counter(line for line, epoch in await self._begun(claim) if epoch < claim.epoch)

    async def _running(self, claim: BatchClaim) -> list[int]:
        return [line for line, epoch in await self._begun(claim) if epoch == claim.epoch]

    async def _begun(self, claim: BatchClaim) -> list[tuple[int, int]]:
        """Lines that were begun and have not ended, each with the epoch of the claim."""
        members = await ask(lambda: self._client.smembers(f"{self._prefix}begun:{claim.batch_id}"))
        pairs = (member.decode().split(":") for member in members)
        return [(int(line), int(epoch)) for line, epoch in pairs]

    async def close_batch(self, claim: BatchClaim) -> None:
        await self._run(_CLOSE, *_held(claim))

    async def answer(self, claim: BatchClaim, answer: LineAnswer) -> bool:
        values = (answer.number, int(answer.is_good), answer.data)
        return bool(await self._run(_ANSWER, *_held(claim), *values))

    async def counts(self, batch_id: str) -> tuple[int, int]:
        key = f"{self._prefix}claim:{batch_id}"
        good, bad = await ask(lambda: self._client.hmget(key, ["good", "bad"]))
        return int(good or 0), int(bad or 0)

    async def answered(self, batch_id: str) -> frozenset[int]:
        return frozenset(map(int, await ask(lambda: self._client.hkeys(f"{self._prefix}answers:{batch_id}"))))

    async def answers(self, batch_id: str, numbers: Sequence[int]) -> list[LineAnswer]:
        if not numbers:
            return []
        wanted = sorted(numbers)
        fields = [str(number) for number in wanted]
        found = await ask(lambda: self._client.hmget(f"{self._prefix}answers:{batch_id}", fields))
        pairs = zip(wanted, found, strict=True)
        return [LineAnswer(number, data[:1] == b"1", data[1:]) for number, data in pairs if data is not None]

    async def close(self) -> None:
        await ask(lambda: self._client.aclose(close_connection_pool=True))

    async def _records(self, ids: Sequence[str]) -> list[StoredRecord | None]:
        """None in the place of one that is not there."""
        if not ids:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for record_id in ids:
            pipeline.hmget(f"{self._prefix}record:{record_id}", list(_FIELDS))
        found = await ask(pipeline.execute)
        return [_record(record_id, values) for record_id, values in zip(ids, found, strict=True)]

    async def _run(self, script: str, *values: Any) -> Any:
        return await ask(lambda: self._scripts[script](keys=[self._prefix], args=values))


def _values(record: StoredRecord) -> tuple[Any, ...]:
    values = (record.record_id, record.kind, record.tenant, record.data, record.ends_at, record.version)
    return (*values, record.size_bytes, record.held_until)


def _held(claim: BatchClaim | None) -> tuple[Any, ...]:
    """Returns a claim as `is_held` of the scripts takes it."""
    return () if claim is None else (claim.batch_id, claim.owner, claim.epoch)


def _record(record_id: str, values: Sequence[bytes | None]) -> StoredRecord | None:
    kind, tenant, data, ends_at, version = values
    if kind is None or tenant is None or data is None or ends_at is None or version is None:
        return None
    known: dict[bytes, Kind] = {b"file": "file", b"upload": "upload", b"response": "response"}
    return StoredRecord(known.get(kind, "batch"), record_id, tenant.decode(), data, float(ends_at), int(version))
