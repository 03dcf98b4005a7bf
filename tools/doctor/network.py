"""Checks of what listens and what keeps time on this machine: ports, the clock, Ray and its token."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from cluster.address import format_address, is_loopback
from cluster.units import count_of
from controller.plan import ROUTER_PORT_STEP
from tools.doctor.findings import Finding, ok, problem, warning
from tools.doctor.subject import Subject

_TIME_ERROR = 5
_TIMEX_BYTES = 256
"""Of the kernel's struct, which is a little smaller."""
_TOKEN_REMEDY = "make one with `ray get-auth-token --generate`, and copy ~/.ray/auth_token to every machine (mode 600)"


def ports(subject: Subject) -> Iterator[Finding]:
    """Those of the configuration; taken ones are fine where the cluster itself has them."""
    config, contact = subject.serving, subject.contact
    listeners = [("admin.port", config.admin.host, config.admin.port)]
    for number in range(1 if config.placement.routers == "spread" else config.router.replicas):
        step = number * ROUTER_PORT_STEP
        listeners.append(("router.port", config.router.host, config.router.port and config.router.port + step))
        if config.router.http_port is not None:
            port = config.router.http_port and config.router.http_port + step
            listeners.append(("router.http_port", config.router.host, port))
    is_own = not contact.why_not and contact.is_configured
    free: list[str] = []
    for key, host, port in sorted(entry for entry in listeners if entry[2]):
        code = _refusal(host, port)
        address = format_address(host, port)
        if code == errno.EADDRINUSE and is_own:
            yield ok(f"{key}: {address} is taken, and a cluster answers at {contact.address}")
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


def clock(subject: Subject) -> Iterator[Finding]:
    """Whether the kernel knows that something keeps this machine's clock right. One machine alone needs no right clock
    but for certificates."""
    state = _clock_state()
    if state is None:
        yield ok("the kernel does not say whether the clock is kept")
    elif state != _TIME_ERROR:
        yield ok("the clock is kept in step (adjtimex)")
    elif _other_machines(subject.asked.path) or not is_loopback(subject.serving.router.host):
        yield warning(
            "nothing keeps this machine's clock in step (adjtimex says unsynchronised): times of several machines "
            "cannot be compared, and certificates may seem expired",
            "run an NTP client, such as chrony (Debian: apt install chrony)",
        )
    else:
        yield ok("nothing keeps the clock in step, which one machine alone can do without")


def ray(subject: Subject) -> Iterator[Finding]:
    """The package, and the token that keeps strangers from running code: Baton makes one for a Ray of its own."""
    try:
        installed = version("ray")
    except PackageNotFoundError:
        yield problem("Ray is not installed: `baton serve` needs it", "pip install ray, or `make setup`")
        return
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    others = _other_machines(subject.asked.path)
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
    """Where Ray looks for it."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def _other_machines(path: Path) -> str:
    """Those that Ray's part of the file names beside the head, in words; empty: none."""
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


def _refusal(host: str, port: int) -> int:
    """The errno with which the kernel refuses to listen there; 0: it does not."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _clock_state() -> int | None:
    """As adjtimex(2) returns it: 5 says that nothing keeps the clock. Reads only. None: there is no such call."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    state = int(adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    return None if state < 0 else state
