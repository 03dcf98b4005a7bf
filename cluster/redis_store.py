"""The store in Redis: each log is a hash, each write one step of a Lua script, so that nothing happens by halves.

    owner, epoch, number    whose it is, and their last write
    size, 1, 2, ...         how many entries there are, and the entries

Redis may lose all of it at any time; a writer learns it by MISSING. Knows no time limit: the guard has that.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from cluster.state import Claim, Log, Outcome, StoreAway, Write

log = logging.getLogger(__name__)

_PREFIX = "baton:log:"
_PROBE_KEY = "baton:probe"
_PROBE_MS = 1000
_CONNECT_S = 1.0
_ANSWER_S = 5.0
_OUTCOMES = {b"done": Outcome.DONE, b"missing": Outcome.MISSING, b"fenced": Outcome.FENCED}

_WRITE = """
local owner, epoch, number, is_whole, ttl_ms, data = unpack(ARGV)
epoch, number = tonumber(epoch), tonumber(number)
local held = redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'number', 'size')
local size = 0
if held[1] then
  local held_epoch, held_number = tonumber(held[2]), tonumber(held[3])
  size = tonumber(held[4])
  if held_epoch > epoch or (held_epoch == epoch and held[1] ~= owner) then return 'fenced' end
  if is_whole == '1' then
    if held_epoch == epoch and number <= held_number then return 'missing' end
  elseif held_epoch < epoch or number ~= held_number + 1 then
    return 'missing'
  end
elseif is_whole ~= '1' then
  return 'missing'
end
if is_whole == '1' then
  redis.call('DEL', KEYS[1])
  size = 0
end
if data ~= '' then
  size = size + 1
  redis.call('HSET', KEYS[1], tostring(size), data)
end
redis.call('HSET', KEYS[1], 'owner', owner, 'epoch', epoch, 'number', number, 'size', size)
redis.call('PEXPIRE', KEYS[1], ttl_ms)
return 'done'
"""
_TAKE = """
local held = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if not held[1] or held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[3], 'epoch', ARGV[4], 'number', 0)
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
"""
_DELETE = """
local held = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if held[1] == ARGV[1] and held[2] == ARGV[2] then redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisStore:
    """Lives in one event loop. `url`: redis://[user:password@]host:port/db, or rediss:// for TLS."""

    outlives_process = True

    def __init__(self, url: str) -> None:
        """Connects at the first call."""
        self._url = url
        self._shas: dict[str, str] = {}
        self._client = connect(self._url)

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        calls = [
            (w.key, (w.claim.owner, w.claim.epoch, w.number, int(w.is_whole), _ms(w.ttl_s), w.data)) for w in writes
        ]
        return [_OUTCOMES[answer] for answer in await self._run(_WRITE, calls)]

    async def read(self, key: str) -> Log | None:
        fields: dict[bytes, bytes] = await ask(lambda: self._client.hgetall(_PREFIX + key))
        try:
            claim = Claim(fields[b"owner"].decode(), int(fields[b"epoch"]))
            entries = tuple(fields[str(i).encode()] for i in range(1, int(fields[b"size"]) + 1))
            return Log(claim, int(fields[b"number"]), entries)
        except (KeyError, ValueError):
            if fields:
                log.warning("a log in Redis is not one of Baton's and is not read")
            return None

    async def take(self, key: str, held: Claim, wanted: Claim, ttl_s: float) -> bool:
        arguments = (held.owner, held.epoch, wanted.owner, wanted.epoch, _ms(ttl_s))
        return (await self._run(_TAKE, [(key, arguments)])) == [1]

    async def delete(self, keys: Sequence[tuple[str, Claim]]) -> None:
        await self._run(_DELETE, [(key, (claim.owner, claim.epoch)) for key, claim in keys])

    async def probe(self) -> None:
        """Writes, since a Redis that is full or a replica answers pings all the same."""
        await ask(lambda: self._client.set(_PROBE_KEY, b"1", px=_PROBE_MS))

    async def reset(self) -> None:
        left, self._client = self._client, connect(self._url)
        try:
            await left.aclose(close_connection_pool=True)
        except (RedisError, OSError) as error:
            log.debug("a connection to Redis did not close: %s", error)

    async def close(self) -> None:
        await self.reset()

    async def _run(self, script: str, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """A script on many keys in one round trip; two when Redis has just started and does not know it."""
        if script not in self._shas:
            self._shas[script] = await ask(lambda: self._client.script_load(script))
        answers = await self._evaluate(script, calls)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            await ask(lambda: self._client.script_load(script))
            again = await self._evaluate(script, [calls[i] for i in unknown])
            for i, answer in zip(unknown, again, strict=True):
                answers[i] = answer
        for answer in answers:
            if isinstance(answer, Exception):
                raise StoreAway(f"Redis refused: {answer}") from answer
        return answers

    async def _evaluate(self, script: str, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for key, arguments in calls:
            pipeline.evalsha(self._shas[script], 1, _PREFIX + key, *arguments)
        answers: list[Any] = await ask(lambda: pipeline.execute(raise_on_error=False))
        return answers


def connect(url: str, connect_s: float = _CONNECT_S) -> Redis:
    """At the first call. What fails is not tried again."""
    return Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_connect_timeout=connect_s, socket_timeout=_ANSWER_S)


async def ask(call: Callable[[], Awaitable[Any] | Any]) -> Any:
    """redis-py types one set of methods for blocking and asyncio clients. Raises StoreAway."""
    try:
        return await call()
    except (RedisError, OSError) as error:
        raise StoreAway(f"{type(error).__name__}: {error}") from error


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
