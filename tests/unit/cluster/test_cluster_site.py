"""Which names and which pages an HTTP server takes for its own."""

from __future__ import annotations

import socket

import pytest

from cluster.errors import PermissionDenied
from cluster.site import OwnSite

OPEN = OwnSite.of((), is_protected=False)
NAMED = OwnSite.of(("Baton.example",), is_protected=False)
HERE = "127.0.0.1:8000"


def is_taken(site: OwnSite, host: str | None, origin: str | None = None) -> bool:
    try:
        site.check(host, origin)
    except PermissionDenied as error:
        assert "router.allowed_hosts" in error.message
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        None,
        HERE,
        "10.1.2.3",
        "[::1]:8000",
        "[2001:db8::1]",
        "localhost",
        "LocalHost.:80",
        "app.localhost:1",
        socket.gethostname(),
    ],
)
def test_an_address_and_the_machines_own_names_are_taken(host: str | None) -> None:
    """So that probes and scrapes work, and clients that send no header."""
    assert is_taken(OPEN, host) and is_taken(NAMED, host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "a:b:c", "[x]"],
)
def test_a_name_that_anybody_may_point_here_is_refused_unless_it_is_named(host: str) -> None:
    assert not is_taken(OPEN, host) and not is_taken(NAMED, host)
    assert is_taken(NAMED, "baton.EXAMPLE:8000")


def test_where_keys_or_tls_protect_every_name_is_taken_unless_some_are_named() -> None:
    assert is_taken(OwnSite.of((), is_protected=True), "baton.svc")
    assert not is_taken(OwnSite.of(("baton.example",), is_protected=True), "baton.svc")


@pytest.mark.parametrize("site", [OPEN, OwnSite.of((), is_protected=True)], ids=["open", "protected"])
def test_only_the_servers_own_pages_ask(site: OwnSite) -> None:
    assert is_taken(site, HERE, f"http://{HERE}") and is_taken(site, "localhost:8000", "http://LOCALHOST:8000")
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9000", "", f"http://{HERE}.evil.example"):
        assert not is_taken(site, HERE, origin), origin
    assert not is_taken(site, None, f"http://{HERE}")
    assert is_taken(NAMED, HERE, "https://baton.example"), "a proxy before it has the name"
