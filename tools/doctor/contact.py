"""The running cluster as the doctor reaches it: the router's gRPC port, the controller's, and metrics pages.

A contact is made once. What answered is kept; what did not is kept as the error that it was. Every call has a limit.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from cluster.address import address_here, parse_address
from cluster.config import ServingConfig
from cluster.errors import BatonError, NotReachable
from cluster.pb import admin_pb2
from cluster.tls import INTERNAL_NAME, ClientTls
from tools.admin_client import AdminClient
from tools.client import BatonClient, key_metadata
from tools.doctor.bounded import on_thread

_CALL_S = 5.0
_LARGEST_PAGE = 4 * 1024 * 1024


@dataclass(frozen=True)
class Asked:
    """By whoever called the doctor."""

    path: Path
    """Of the configuration."""
    is_file_named: bool = False
    """Rather than found."""
    address: str | None = None
    """None: where the configuration puts the router."""
    admin_address: str | None = None
    api_key: str | None = None
    tls: ClientTls | None = None
    limit_s: float = 30.0
    """Of one check."""

    @property
    def call_s(self) -> float:
        """Of one call to anybody: a check makes several."""
        return min(_CALL_S, self.limit_s / 2)


@dataclass
class Contact:
    """One cluster, or why there is none. Made by `of`."""

    address: str = ""
    """Of the router; empty: there is none to call."""
    is_asked_for: bool = False
    """Whether somebody named the address; else it is the configured one, at which nothing needs to run."""
    is_configured: bool = True
    """Whether it is the cluster of the configuration, as far as anybody knows."""
    why_not: str = ""
    """There is no contact."""
    timeout_s: float = _CALL_S
    health: str = ""
    """SERVING, NOT_SERVING, or empty where the router does not say."""
    status: admin_pb2.GetStatusResponse | None = None
    refusal: BatonError | None = None
    """Why there is no status though the router answers."""
    cluster: admin_pb2.GetClusterResponse | None = None
    """The controller's view, if it answers."""
    page_tls: ClientTls | None = None
    _client: BatonClient | None = field(default=None, repr=False)

    @classmethod
    def of(cls, asked: Asked, config: ServingConfig | None) -> Contact:
        """Raises InvalidRequest and ConfigError for a key and files that nobody can use."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        key_metadata(asked.api_key)  # one that cannot be sent is refused, whoever answers
        contact = cls(is_asked_for=asked.address is not None)
        contact.timeout_s = asked.call_s
        configured = _configured(config)
        contact.address = asked.address or configured
        contact.is_configured = config is not None and (asked.is_file_named or contact.address == configured)
        if config is not None and config.internal_tls.ca is not None:
            contact.page_tls = ClientTls(config.internal_tls.ca, name=INTERNAL_NAME)
        if not contact.address:
            contact.why_not = "no address of a router is known; name one with --address"
        elif asked.address is None and asked.tls is None and config is not None and config.tls.cert is not None:
            contact.why_not = f"the router at {contact.address} would have TLS; name its authority with --tls-ca"
        else:
            contact._call_router(asked)
        controller = asked.admin_address or (_controller_of(config) if contact.is_configured else "")
        if controller and not contact.why_not:
            contact._call_controller(controller, asked)
        return contact

    @property
    def client(self) -> BatonClient:
        """Of the router that answers."""
        assert self._client is not None, self.why_not
        return self._client

    def _call_router(self, asked: Asked) -> None:
        self._client = BatonClient(self.address, api_key=asked.api_key, tls=asked.tls, call_s=asked.call_s)
        try:
            self.health = self._client.health()
        except NotReachable as error:
            self.why_not = error.message
            return
        except BatonError as error:
            what = f"what answers at {self.address} does not do so as a router within {asked.call_s:g} s"
            self.why_not = f"{what}: {error.message}"
            return
        try:
            self.status = self._client.status()
        except BatonError as error:
            self.refusal = error

    def _call_controller(self, address: str, asked: Asked) -> None:
        with (
            contextlib.suppress(BatonError),
            AdminClient(address, api_key=asked.api_key, tls=asked.tls, call_s=asked.call_s) as admin,
        ):
            self.cluster = admin.cluster()

    def page(self, address: str) -> MetricsPage:
        """A metrics page of the cluster. Raises OSError and http.client.HTTPException."""
        sent_at = time.time()
        date, text = fetch(address, "/metrics", self.page_tls, self.timeout_s)
        return MetricsPage(sent_at, time.time(), date, text)

    def pages(self, addresses: Mapping[str, str]) -> dict[str, MetricsPage | str]:
        """Of each name its page, or why there is none: all at once, so that many that hang take no longer than one."""
        asked = {name: on_thread(partial(self.page, at), "metrics page") for name, at in addresses.items() if at}
        found: dict[str, MetricsPage | str] = {}
        for name in addresses:
            try:
                found[name] = asked[name].result() if name in asked else "it has no metrics page"
            except (OSError, ValueError, http.client.HTTPException) as error:
                found[name] = f"{addresses[name]}: {error}"
        return found

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


@dataclass(frozen=True)
class MetricsPage:
    """A metrics page, and when it was fetched."""

    sent_at: float
    received_at: float
    date: str
    """The header of that name: the server's clock, in whole seconds."""
    text: str

    @property
    def skew_s(self) -> tuple[float, float]:
        """By how much the server's clock is ahead: at least, and at most."""
        server = parsedate_to_datetime(self.date).timestamp()
        return server - self.received_at, server + 1 - self.sent_at

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def fetch(address: str, path: str, tls: ClientTls | None, timeout_s: float) -> tuple[str, str]:
    """The `Date` header and the body of a page. Raises OSError and http.client.HTTPException."""
    host, port = parse_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.connect()
        if tls is not None:
            connection.sock = tls.context().wrap_socket(connection.sock, server_hostname=tls.name or host)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(_LARGEST_PAGE)
        if answer.status != http.client.OK:
            raise http.client.HTTPException(f"{path} answers {answer.status}")
        return answer.headers["date"] or "", body.decode("utf-8", "replace")
    finally:
        connection.close()


def _configured(config: ServingConfig | None) -> str:
    """Where the configuration puts the router; empty: it does not say."""
    if config is None or not config.router.port:
        return ""
    return address_here(config.router.host, config.router.port)


def _controller_of(config: ServingConfig | None) -> str:
    """Where the controller of a configuration should be; empty: it does not say."""
    if config is None or not config.admin.port:
        return ""
    return address_here(config.admin.host, config.admin.port)
