"""Checks of the files of `tls` and `internal_tls`: whether two ends that use them would understand one another.

Only OpenSSL reads certificates here: a client and a server of this process shake hands in memory, with the files as
Baton uses them, and an error of either side is the finding. A second handshake, which trusts the certificate itself and
ignores the clock, reads its names and dates.
"""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.errors import ConfigError
from cluster.tls import INTERNAL_NAME, ClientTls, ServerTls, internal_tls_of, public_tls_of
from tools.doctor.check import Finding, check, ok, problem, warning
from tools.doctor.subject import Subject

_SOON_S = 14 * 86_400.0
_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python has no name for."""
_MAKE_NEW = "make a new one as docs/security.md has it, and restart what shows it"


@check()
def certificates(subject: Subject) -> Iterator[Finding]:
    """The files of `tls` and `internal_tls`: pairs, names, dates, and that both sides accept one another."""
    config = subject.serving
    public = public_tls_of(config.tls)
    internal = internal_tls_of(config.internal_tls)
    if public is None and internal is None:
        yield ok("tls and internal_tls are null: nothing is encrypted")
    if public is not None:
        client = subject.options.tls
        shown = public if client is not None and client.cert is not None else ServerTls(public.cert, public.key)
        yield from _examine("tls", shown, client, _names(config.router.host))
    if internal is not None:
        yield from _examine("internal_tls", internal.server, internal.client, (INTERNAL_NAME,))


def _examine(section: str, server: ServerTls, client: ClientTls | None, names: tuple[str, ...]) -> Iterator[Finding]:
    """Checks one pair of files. `client` None: the authority that clients trust is not known, so only names and dates
    are checked."""
    try:
        certificate = _read(server)
        wrong = "" if client is None else _handshake(server.context(), client.context())
    except ConfigError as error:
        yield problem(f"{section}: {error.message}", "name files in PEM that belong together; docs/security.md")
        return
    except ssl.SSLError as error:
        yield problem(f"{section}: {server.cert} cannot be used: {error.reason or error}", _MAKE_NEW)
        return
    found = f"{section}: {server.cert}"
    subjects = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    left_s = ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()
    values = {"names": subjects, "not_after": certificate["notAfter"]}
    if left_s < 0:
        yield problem(f"{found} has expired: it was good until {certificate['notAfter']}", _MAKE_NEW, **values)
    elif ssl.cert_time_to_seconds(certificate["notBefore"]) > time.time():
        remedy = f"set this machine's clock right, or {_MAKE_NEW}"
        yield problem(f"{found} is not good yet: it begins on {certificate['notBefore']}", remedy, **values)
    elif names and not any(_matches(name, subjects) for name in names):
        yield problem(
            f"{found} is for {', '.join(subjects) or 'nobody'}, not for {names[0]}",
            f"{_MAKE_NEW}, with subjectAltName {names[0]}",
            **values,
        )
    elif wrong:
        yield problem(f"{found} is refused by the other side: {wrong}", f"sign it by the named authority: {_MAKE_NEW}")
    elif left_s < _SOON_S:
        yield warning(f"{found} expires on {certificate['notAfter']}", f"{_MAKE_NEW} before", **values)
    else:
        yield ok(f"{found} is for {', '.join(subjects)}, good until {certificate['notAfter']}", **values)


def _names(host: str) -> tuple[str, ...]:
    """Names by which clients may call a listener; none are known if it listens on every address."""
    if host in ("0.0.0.0", "::"):
        return ()
    return ("127.0.0.1", "localhost") if host in ("127.0.0.1", "localhost") else (host,)


def _matches(name: str, subjects: list[str]) -> bool:
    """Whether a name is among a certificate's subjects; a wildcard stands for one label."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(name)
        return any(_is_address(subject, address) for subject in subjects)
    return name in subjects or any(
        subject.startswith("*.") and name.partition(".")[2] == subject.removeprefix("*.") for subject in subjects
    )


def _is_address(subject: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Compares addresses however they are written: OpenSSL writes IPv6 in full."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(subject) == address
    return False


def _read(server: ServerTls) -> Mapping[str, Any]:
    """The fields of the server's certificate. Raises ConfigError and ssl.SSLError."""
    shown = ServerTls(server.cert, server.key).context()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.load_verify_locations(server.cert)
    trusting.verify_flags = ssl.VerifyFlags(
        trusting.verify_flags | ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    )
    return _shake(shown, trusting) or {}


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """Why one of them refuses the other; empty: neither does. Names are not compared."""
    client.check_hostname = False
    try:
        _shake(server, client)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        return str(error.reason or error)
    return ""


def _shake(server: ssl.SSLContext, client: ssl.SSLContext) -> Mapping[str, Any] | None:
    """Connects both ends in memory; returns the fields of the server's certificate as the client has read them."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
    return ends[0].getpeercert()
