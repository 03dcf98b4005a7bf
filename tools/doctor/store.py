"""The check of the state store: whether Redis answers in a router's time, takes writes, and keeps them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, RedisError

from cluster.address import format_address, is_loopback
from cluster.state.guard import TIMEOUT_S
from cluster.state.redis_store import connect
from tools.doctor.findings import Finding, ok, problem, skipped, warning
from tools.doctor.subject import Subject

_DEFAULT_PORT = 6379
_PROBE_MS = 5000
_NUM_WRITES = 3
"""The fastest of them counts: what slows one is not the way to Redis."""


def redis(subject: Subject) -> Iterator[Finding]:
    """As seen from this machine; `journal` looks at it from the router's side."""
    url = subject.serving.state
    if url is None:
        yield skipped("state is null: generations end with their router, and no Redis is used")
        return
    parts = urlsplit(url)
    host = parts.hostname or ""
    where = format_address(host, parts.port or _DEFAULT_PORT)  # the URL itself may hold a password
    try:
        told = asyncio.run(_examine(url, subject.asked.call_s))
    except TimeoutError:
        yield problem(
            f"Redis at {where} accepts connections and does not answer within {subject.asked.call_s:g} s",
            "look at its log and at what blocks it (a slow script, a full disk, SIGSTOP), or restart it",
        )
    except AuthenticationError as error:
        yield problem(f"Redis at {where} refuses the password: {error}", "correct the user and password in `state`")
    except (RedisError, OSError) as error:
        yield problem(
            f"Redis at {where} cannot be used: {error}",
            f"start redis-server there, let this machine reach its port, or correct `state` ({where})",
        )
    else:
        yield from _judge(where, told, has_password=bool(parts.password), is_near=is_loopback(host))


async def _examine(url: str, timeout_s: float) -> Mapping[str, Any]:
    """Raises TimeoutError, RedisError and OSError."""
    client: Any = connect(url, timeout_s)
    key = f"baton:doctor:{secrets.token_hex(8)}"
    try:
        async with asyncio.timeout(timeout_s):
            await client.ping()
            round_trips_s = []
            for _ in range(_NUM_WRITES):
                began = time.perf_counter()
                await client.set(key, b"1", px=_PROBE_MS)
                round_trips_s.append(time.perf_counter() - began)
            await client.delete(key)
            told: dict[str, Any] = dict(await client.info())
            return {**told, "round_trip_s": min(round_trips_s)}
    finally:
        await client.aclose(close_connection_pool=True)


def _judge(where: str, told: Mapping[str, Any], *, has_password: bool, is_near: bool) -> Iterator[Finding]:
    found = f"Redis {told.get('redis_version', 'of unknown version')} at {where}"
    round_trip_s = float(told["round_trip_s"])
    if round_trip_s > TIMEOUT_S:
        yield problem(
            f"{found} takes {1000 * round_trip_s:.0f} ms for a write: the router gives it {1000 * TIMEOUT_S:.0f} ms",
            "use a Redis nearer to the router, or find what slows it (`redis-cli --latency`)",
            round_trip_s=round_trip_s,
        )
    if told.get("rdb_last_bgsave_status") == "err" or told.get("aof_last_write_status") == "err":
        yield problem(f"{found} could not write to its disk", "free space on its disk, and look at its log")
    policy = str(told.get("maxmemory_policy", "noeviction"))
    if int(told.get("maxmemory", 0)) and policy != "noeviction":
        yield warning(
            f"{found} forgets keys when it is full ({policy}), records of running generations among them",
            "set `maxmemory-policy noeviction`, or give Baton a Redis of its own",
        )
    if not is_near and not has_password:
        yield warning(
            f"{found} is used without a password: records hold prompts and outputs as they are",
            "set `requirepass`, and write the password into `state`",
        )
    if not int(told.get("aof_enabled", 0)):
        # Whether it makes snapshots is in CONFIG, which a user may not be allowed to read; records live for a minute.
        yield warning(
            f"{found} keeps no append-only file: when it ends, all is lost that came since its last snapshot",
            "set `appendonly yes` in redis.conf",
        )
    yield ok(f"{found} takes writes, {1000 * round_trip_s:.1f} ms each", round_trip_s=round_trip_s)
