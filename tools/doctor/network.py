"""Checks of the services that a cluster on this machine uses: its ports, the clock, Ray and its token, Redis."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from redis.exceptions import AuthenticationError, RedisError

from cluster.address import format_address, is_loopback, listen_error
from cluster.redis_store import connect
from cluster.text import count_of
from tools.doctor.check import Finding, check, ok, problem, skipped, warning
from tools.doctor.subject import Subject

_TIME_ERROR = 5
"""The value that adjtimex(2) returns where nothing keeps the clock in step."""
_TIMEX_BYTES = 256
"""A little more than the kernel's struct timex."""
_REDIS_PORT = 6379
_SLOW_S = 0.25
"""A write that takes longer is felt: each message of a stream that may be resumed waits for one."""
_PROBE_KEY_MS = 5000
_NUM_WRITES = 3
"""The fastest counts: what delays only one of them is not the way to Redis."""
_TOKEN_REMEDY = "make one with `ray get-auth-token --generate`, and copy ~/.ray/auth_token to every machine (mode 600)"


@check()
def ports(subject: Subject) -> Iterator[Finding]:
    """Whether the configured ports are free, or taken by the cluster itself."""
    config, cluster = subject.serving, subject.cluster
    listeners = [
        ("admin.port", config.admin.host, config.admin.port),
        ("router.port", config.router.host, config.router.port),
    ]
    if config.router.http_port is not None:
        listeners.append(("router.http_port", config.router.host, config.router.http_port))
    is_own = not cluster.why_not and cluster.is_configured
    free: list[str] = []
    for key, host, port in sorted(entry for entry in listeners if entry[2]):
        code = _listen_errno(host, port)
        address = format_address(host, port)
        if code == errno.EADDRINUSE and is_own:
            yield ok(f"{key}: {address} is taken, and a cluster answers at {cluster.address}")
        elif code == errno.EADDRINUSE:
            yield problem(
                f"{key}: {address} is taken by another program",
                f"stop it (`ss -ltnp 'sport = :{port}'` names it), or set {key} to another port",
            )
        elif code == errno.EACCES:
            yield problem(f"{key}: {address} is only for root", f"set {key} to a port above 1023")
        elif code:
            remedy = f"set {key.partition('.')[0]}.host to an address of this machine (`ip address` lists them)"
            yield problem(f"{key}: cannot listen on {address}: {os.strerror(code)}", remedy)
        else:
            free.append(f"{key} {address}")
    if free:
        yield ok(f"free: {', '.join(free)}")
    if not any(port for _, _, port in listeners):
        yield ok("every port is 0: any free one")


@check()
def clock(subject: Subject) -> Iterator[Finding]:
    """Whether anything keeps this machine's clock in step, where that matters.

    One machine alone needs a right clock only for certificates.
    """
    state = _clock_state()
    if state is None:
        yield ok("the kernel does not say whether the clock is kept")
    elif state != _TIME_ERROR:
        yield ok("the clock is kept in step (adjtimex)")
    elif _other_machines(subject.options.path) or not is_loopback(subject.serving.router.host):
        yield warning(
            "nothing keeps this machine's clock in step (adjtimex says unsynchronised): times of several machines "
            "cannot be compared, and certificates may seem expired",
            "run an NTP client, such as chrony (Debian: apt install chrony)",
        )
    else:
        yield ok("nothing keeps the clock in step, which one machine alone can do without")


@check()
def ray(subject: Subject) -> Iterator[Finding]:
    """Ray, its token where `RAY_AUTH_MODE` asks for one, and who can read it.

    The token keeps strangers from running code. Baton makes one for a Ray of its own.
    """
    try:
        installed = version("ray")
    except PackageNotFoundError:
        yield problem("Ray is not installed: `baton serve` needs it", "pip install ray, or `make setup`")
        return
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    others = _other_machines(subject.options.path)
    token = _token_file()
    if mode == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
        yield from _token(token)
    elif others and mode != "token" and not token.is_file() and not os.environ.get("RAY_AUTH_TOKEN"):
        yield warning(
            f"the file names {others}, and Ray has no token: whoever reaches its ports may run any code",
            f"set RAY_AUTH_MODE=token on every machine; {_TOKEN_REMEDY}",
        )
    elif mode == "disabled":
        yield warning("RAY_AUTH_MODE is disabled: whoever reaches Ray's ports may run any code", "unset it")
    how = "with its token" if mode == "token" else "`baton serve` makes a token for a Ray of its own"
    yield ok(f"Ray {installed}; {how}")


@check()
def redis(subject: Subject) -> Iterator[Finding]:
    """Whether the Redis of `state` answers in the time that a router gives it, takes writes, and keeps them.

    As seen from this machine; `journal` sees it from the router.
    """
    url = subject.serving.redis
    if url is None:
        yield skipped("state names no Redis, and none is used")
        return
    parts = urlsplit(url)
    host = parts.hostname or ""
    where = format_address(host, parts.port or _REDIS_PORT)  # the URL itself may hold a password
    try:
        info = asyncio.run(_redis_info(url, subject.options.call_s))
    except TimeoutError:
        yield problem(
            f"Redis at {where} accepts connections and does not answer within {subject.options.call_s:g} s",
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
        yield from _judge_redis(where, info, has_password=bool(parts.password), is_near=is_loopback(host))


def _token(path: Path) -> Iterator[Finding]:
    try:
        text = path.read_text(encoding="utf-8").strip()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        yield problem(f"RAY_AUTH_MODE is token, and {path} cannot be read: {error.strerror}", _TOKEN_REMEDY)
        return
    if not text:
        yield problem(f"RAY_AUTH_MODE is token, and {path} is empty", _TOKEN_REMEDY)
    elif mode & 0o077:
        yield problem(f"{path} has mode {mode:04o}: others may read Ray's token", f"chmod 600 {path}")


def _token_file() -> Path:
    """Returns where Ray looks for its token."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def _other_machines(path: Path) -> str:
    """Machines that Ray's part of the file names beside the head, in words; empty: none."""
    try:
        whole = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    provider = whole.get("provider") if isinstance(whole, dict) else None
    if not isinstance(provider, dict):
        return ""
    if provider.get("type") != "local":
        return f"machines of {provider.get('type')}"
    workers = provider.get("worker_ips") or []
    return count_of(len(workers), "other machine") if workers else ""


def _listen_errno(host: str, port: int) -> int:
    """The errno with which the kernel refuses to listen there; 0: it does not."""
    error = listen_error(host, port)
    if isinstance(error, socket.gaierror):
        return errno.EADDRNOTAVAIL
    return 0 if error is None else error.errno or errno.EIO


def _clock_state() -> int | None:
    """The value of adjtimex(2), called to read only; None: there is no such call."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    state = int(adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    return None if state < 0 else state


async def _redis_info(url: str, timeout_s: float) -> Mapping[str, Any]:
    """Redis' INFO, and how long a write takes. Raises TimeoutError, RedisError and OSError."""
    client: Any = connect(url, timeout_s)
    key = f"baton:doctor:{secrets.token_hex(8)}"
    try:
        async with asyncio.timeout(timeout_s):
            await client.ping()
            round_trips_s = []
            for _ in range(_NUM_WRITES):
                began = time.perf_counter()
                await client.set(key, b"1", px=_PROBE_KEY_MS)
                round_trips_s.append(time.perf_counter() - began)
            await client.delete(key)
            return {**await client.info(), "round_trip_s": min(round_trips_s)}
    finally:
        await client.aclose(close_connection_pool=True)


def _judge_redis(where: str, info: Mapping[str, Any], *, has_password: bool, is_near: bool) -> Iterator[Finding]:
    found = f"Redis {info.get('redis_version', 'of unknown version')} at {where}"
    round_trip_s = float(info["round_trip_s"])
    if round_trip_s > _SLOW_S:
        yield problem(
            f"{found} takes {1000 * round_trip_s:.0f} ms for a write, for which each message of a stream that may be "
            f"resumed waits: more than {1000 * _SLOW_S:.0f} ms are felt",
            "use a Redis nearer to the router, or find what slows it (`redis-cli --latency`)",
            round_trip_s=round_trip_s,
        )
    if info.get("rdb_last_bgsave_status") == "err" or info.get("aof_last_write_status") == "err":
        yield problem(f"{found} could not write to its disk", "free space on its disk, and look at its log")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if int(info.get("maxmemory", 0)) and policy != "noeviction":
        yield warning(
            f"{found} forgets keys when it is full ({policy}), records of running generations among them",
            "set `maxmemory-policy noeviction`, or give Baton a Redis of its own",
        )
    if not is_near and not has_password:
        yield warning(
            f"{found} is used without a password: records hold prompts and outputs as they are",
            "set `requirepass`, and write the password into `state`",
        )
    if not int(info.get("aof_enabled", 0)):
        # Whether it makes snapshots is in CONFIG, which a user may not be allowed to read; records live for a minute.
        yield warning(
            f"{found} keeps no append-only file: when it ends, all is lost that came since its last snapshot",
            "set `appendonly yes` in redis.conf",
        )
    yield ok(f"{found} takes writes, {1000 * round_trip_s:.1f} ms each", round_trip_s=round_trip_s)
