"""The subject of the checks: the configuration, what Baton's programs find on this machine, and the running cluster.

    opened (programs start, the router and the controller are called) -> checks run -> closed

What could not be had is kept as the reason why, which skipped checks repeat. Every call has a time limit.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from cluster.address import address_here, parse_address
from cluster.config.load import load_config
from cluster.config.schema import ROLES, ServingConfig
from cluster.errors import BatonError, ConfigError, NotReachable
from cluster.pb import admin_pb2
from cluster.tls import INTERNAL_NAME, ClientTls
from controller.plan import plan_worker
from tools.client import AdminClient, BatonClient, key_metadata
from tools.doctor.bounded import Part, ProgramRun, on_thread

_CALL_S = 5.0
_PROGRAM_SHARE = 0.8
"""Share of a check's time in which a program must answer."""
_MAX_PAGE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class DoctorOptions:
    """Options of one `baton doctor`."""

    path: Path
    """The configuration file."""
    is_file_named: bool = False
    """The caller named the file; otherwise it was found."""
    address: str | None = None
    """The router's; None: as configured."""
    admin_address: str | None = None
    """The controller's; None: as configured."""
    api_key: str | None = None
    tls: ClientTls | None = None
    limit_s: float = 30.0
    """Seconds that one check may take."""

    @property
    def call_s(self) -> float:
        """Seconds that one call may take: a check makes several."""
        return min(_CALL_S, self.limit_s / 2)


class Subject:
    """Everything that a check may ask. A context manager."""

    def __init__(self, options: DoctorOptions) -> None:
        """Raises InvalidRequest and ConfigError for an API key and TLS files that cannot be used."""
        self.options = options
        self.config: ServingConfig | None = None
        self.config_error = ""
        """Why there is no configuration."""
        try:
            self.config = on_thread(lambda: load_config(options.path), "configuration").result(options.call_s)
        except ConfigError as error:
            self.config_error = error.message
        except TimeoutError:
            self.config_error = (
                f"{options.path}, or the model folder that it names, cannot be read within {options.call_s:g} s"
            )
        self._worker, self._router = self._start_programs()
        try:
            self.cluster = ClusterContact(options, self.config)
        except BaseException:
            self._close_programs()
            raise

    @property
    def serving(self) -> ServingConfig:
        """The configuration, for checks that run only where there is one."""
        assert self.config is not None
        return self.config

    @property
    def status(self) -> admin_pb2.GetStatusResponse:
        """The router's status, for checks that run only where there is one."""
        assert self.cluster.status is not None
        return self.cluster.status

    def machine(self, name: str) -> Part:
        """One part of the answer of `worker.examine`. Raises NoAnswer."""
        part: Part = self._worker.answer()[name]
        return part

    def workers(self, name: str) -> list[tuple[str, Part]]:
        """One part of its answer for each role that has workers. Raises NoAnswer."""
        return [(worker["role"], worker[name]) for worker in self._worker.answer()["workers"]]

    def tokenizer(self) -> Part:
        """The answer of `router.examine`; empty without a configuration. Raises NoAnswer."""
        part: Part = {} if self._router is None else self._router.answer()
        return part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()
        self._close_programs()

    def _start_programs(self) -> tuple[ProgramRun, ProgramRun | None]:
        """Their time is up before that of a check that waits for them."""
        config, limit_s = self.config, _PROGRAM_SHARE * self.options.limit_s
        if config is None:
            return ProgramRun("worker.examine", request={"workers": []}, limit_s=limit_s), None
        present = [role for role in ROLES if config.role(role).num_workers]
        workers = [plan_worker(config, role).ranks[0].as_dict() for role in present]
        files = [config.model.path, *filter(None, [config.model.chat_template])]
        return (
            ProgramRun("worker.examine", request={"workers": workers}, limit_s=limit_s),
            ProgramRun("router.examine", files, limit_s=limit_s),
        )

    def _close_programs(self) -> None:
        for program in (self._worker, self._router):
            if program is not None:
                program.close()


class ClusterContact:
    """One attempt to reach the running cluster: its answers, or the errors in their place."""

    def __init__(self, options: DoctorOptions, config: ServingConfig | None) -> None:
        """Raises InvalidRequest and ConfigError for an API key and TLS files that cannot be used."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        key_metadata(options.api_key)  # a key that cannot be sent is refused even if nobody answers
        configured = _router_address(config)
        self.address = options.address or configured
        """The router's; empty: none is known."""
        self.is_asked_for = options.address is not None
        """The caller named the address; at a configured one nothing needs to run."""
        self.is_configured = config is not None and (options.is_file_named or self.address == configured)
        """It is the cluster of the configuration, as far as anybody knows."""
        self.why_not = ""
        """Why no router answers; empty: one does."""
        self.health = ""
        """SERVING, NOT_SERVING, or empty where the router does not say."""
        self.status: admin_pb2.GetStatusResponse | None = None
        self.status_error: BatonError | None = None
        """Why there is no status though the router answers."""
        self.state: admin_pb2.GetClusterResponse | None = None
        """The controller's view, if it answers."""
        self.timeout_s = options.call_s
        internal_ca = None if config is None else config.internal_tls.ca
        self._page_tls = None if internal_ca is None else ClientTls(internal_ca, name=INTERNAL_NAME)
        self._client: BatonClient | None = None
        if not self.address:
            self.why_not = "no address of a router is known; name one with --address"
        elif options.address is None and options.tls is None and config is not None and config.tls.cert is not None:
            self.why_not = f"the router at {self.address} would have TLS; name its authority with --tls-ca"
        else:
            self._call_router(options)
        admin_address = options.admin_address or (_admin_address(config) if self.is_configured else "")
        if admin_address and not self.why_not:
            self._call_controller(admin_address, options)

    @property
    def client(self) -> BatonClient:
        """Client of the router, for checks that run only where one answers."""
        assert self._client is not None, self.why_not
        return self._client

    def page(self, address: str) -> FetchedMetrics:
        """A metrics page of the cluster. Raises OSError and http.client.HTTPException."""
        sent_at = time.time()
        date, text = fetch(address, "/metrics", self._page_tls, self.timeout_s)
        return FetchedMetrics(sent_at, time.time(), date, text)

    def pages(self, addresses: Mapping[str, str]) -> dict[str, FetchedMetrics | str]:
        """The page of each name, or why there is none. Fetched at once, so that many dead ones take no longer than
        one."""
        pending = {name: on_thread(partial(self.page, at), "metrics page") for name, at in addresses.items() if at}
        found: dict[str, FetchedMetrics | str] = {}
        for name in addresses:
            try:
                found[name] = pending[name].result() if name in pending else "it has no metrics page"
            except (OSError, ValueError, http.client.HTTPException) as error:
                found[name] = f"{addresses[name]}: {error}"
        return found

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _call_router(self, options: DoctorOptions) -> None:
        self._client = BatonClient(self.address, api_key=options.api_key, tls=options.tls, call_s=options.call_s)
        try:
            self.health = self._client.health()
        except NotReachable as error:
            self.why_not = error.message
            return
        except BatonError as error:
            what = f"what answers at {self.address} does not do so as a router within {options.call_s:g} s"
            self.why_not = f"{what}: {error.message}"
            return
        try:
            self.status = self._client.status()
        except BatonError as error:
            self.status_error = error

    def _call_controller(self, address: str, options: DoctorOptions) -> None:
        with (
            contextlib.suppress(BatonError),
            AdminClient(address, api_key=options.api_key, tls=options.tls, call_s=options.call_s) as admin,
        ):
            self.state = admin.cluster()


@dataclass(frozen=True)
class FetchedMetrics:
    """A metrics page, and when it was fetched."""

    sent_at: float
    received_at: float
    date: str
    """The `Date` header: the server's clock, in whole seconds."""
    text: str

    @property
    def skew_s(self) -> tuple[float, float]:
        """Least and most seconds by which the server's clock is ahead of this one."""
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
        body = answer.read(_MAX_PAGE_BYTES)
        if answer.status != http.client.OK:
            raise http.client.HTTPException(f"{path} answers {answer.status}")
        return answer.headers["date"] or "", body.decode("utf-8", "replace")
    finally:
        connection.close()


def _router_address(config: ServingConfig | None) -> str:
    """Returns where the configuration puts the router; empty: it does not say."""
    return address_here(config.router.host, config.router.port) if config and config.router.port else ""


def _admin_address(config: ServingConfig | None) -> str:
    """Returns where the configuration puts the AdminService; empty: it does not say."""
    return address_here(config.admin.host, config.admin.port) if config and config.admin.port else ""
