"""The controller's servers: the AdminService for operators, one for the routers, and a page of metrics.

The routers' pages pass on to the second what an operator asks for there; it is for those of this node alone where
strangers could reach it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from cluster.address import parse_address
from cluster.auth import Gate, KeyFile, KeyRing
from cluster.config.schema import AdminSection, ServingConfig
from cluster.errors import ConfigError
from cluster.metrics_page import MetricsPage, serve_beside
from cluster.tls import InternalTls, ServerTls, public_tls_of
from cluster.token import leave_token, token_file
from controller.admin_service import ADMIN, AdminBackend, start_admin

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_PORT_S = 10.0
"""Seconds that a controller which begins again waits for its own port."""


class Listeners:
    """`open` once, `close` at the end. `node_host`: this machine for other nodes; empty: routers are all on this one.
    `tls`, `token`: of the cluster's inside, if any. Operators show the token where nothing else says who calls."""

    def __init__(
        self, backend: AdminBackend, config: ServingConfig, tls: InternalTls | None, node_host: str, token: str = ""
    ) -> None:
        self._token = token
        self._backend = backend
        self._config = config
        self._tls = tls
        self._node_host = node_host
        self._admins: list[grpc.aio.Server] = []
        self._left: Path | None = None
        """File with the token, for commands."""
        self._keys: asyncio.Task[None] | None = None
        self._metrics_page: MetricsPage | None = None
        self.address = ""
        """The AdminService's, for operators; empty before `open`."""
        self.inner_address = ""
        """The AdminService's, for routers."""

    @property
    def port(self) -> int:
        """The AdminService's, for operators; only after `open`."""
        return parse_address(self.address)[1]

    @property
    def metrics_address(self) -> str:
        return "" if self._metrics_page is None else self._metrics_page.address

    async def open(self, registry: CollectorRegistry, port: int = 0) -> None:
        """Listens with the router's keys and certificate. `port`: the one that the controller before had; 0: there was
        none. Raises ConfigError."""
        config = self._config
        file = None if config.auth.keys_file is None else KeyFile(config.auth.keys_file)
        ring = None if file is None else file.ring
        is_known = config.tls.client_ca is not None or config.admin.insecure
        asked = "" if is_known else self._token
        outer = replace(config.admin, port=port or config.admin.port)
        give_up_at = asyncio.get_running_loop().time() + (_PORT_S if port else 0.0)
        while True:
            try:
                self.address = await self._listen(outer, ring, public_tls_of(config.tls), asked)
                break
            except ConfigError:
                if asyncio.get_running_loop().time() >= give_up_at:
                    raise
                await asyncio.sleep(_RETRY_S)
        if asked and ring is None:
            self._leave_token(asked)
        inside = None if self._tls is None else self._tls.server
        inner = AdminSection(port=0)
        if self._node_host and (inside is not None or config.admin.insecure):
            inner = AdminSection(self._node_host, port=0, insecure=config.admin.insecure)
        self.inner_address = await self._listen(inner, ring, inside, self._token)
        if file is not None:
            self._keys = asyncio.create_task(file.follow(), name="keys")
        if config.metrics.controller:
            self._metrics_page = self._serve_metrics(registry, ring)

    async def _listen(self, section: AdminSection, ring: KeyRing | None, tls: ServerTls | None, token: str) -> str:
        """Starts an AdminService; returns its address. Raises ConfigError."""
        to_workers = None if self._tls is None else self._tls.client
        server, address = await start_admin(
            section, self._backend, ring, tls, token=token, to_workers=to_workers, worker_token=self._token
        )
        self._admins.append(server)
        return address

    def _serve_metrics(self, registry: CollectorRegistry, ring: KeyRing | None) -> MetricsPage:
        """Uses the TLS of the cluster's inside, as workers do for theirs; without it on loopback, unless `insecure`."""
        gate = Gate(ring, {ADMIN: "admin"}, ())
        return serve_beside(
            registry,
            self._config.admin.host,
            0,
            insecure=self._config.admin.insecure,
            tls=None if self._tls is None else self._tls.page,
            check_key=lambda metadata: gate.check(metadata, ADMIN),
            allowed_hosts=self._config.router.allowed_hosts,
        )

    def _leave_token(self, token: str) -> None:
        file = token_file(self.port)
        try:
            leave_token(self.port, token)
            self._left = file
        except OSError as error:
            logger.warning("commands do not find the token of this cluster: %s: %s", file, error.strerror)

    async def close(self) -> None:
        if self._left is not None:
            self._left.unlink(missing_ok=True)
        if self._keys is not None:
            self._keys.cancel()
        for admin in self._admins:
            await admin.stop(None)
        if self._metrics_page is not None:
            self._metrics_page.close()
