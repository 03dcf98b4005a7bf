"""What the controller listens on: the AdminService for operators, one for the routers, and a page of metrics.

The routers' pages pass on to the second what an operator asks for there; it is for those of this node alone where
strangers could reach it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from cluster.address import parse_address
from cluster.auth import Gate, KeyFile
from cluster.config.schema import AdminSection, ServingConfig
from cluster.errors import ConfigError
from cluster.metrics_page import MetricsPage, serve_beside
from cluster.tls import InternalTls, public_tls_of
from cluster.token import leave_token, token_file
from controller.admin_service import ADMIN, AdminBackend, start_admin

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_PORT_S = 10.0
"""How long a controller that begins again waits for its own port."""


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
    def metrics_address(self) -> str:
        return "" if self._metrics_page is None else self._metrics_page.address

    async def open(self, registry: CollectorRegistry, port: int = 0) -> None:
        """With the router's keys and certificate. `port`: the one that the controller before had; 0: there was none.
        Raises ConfigError."""
        config = self._config
        file = None if config.auth.keys_file is None else KeyFile(config.auth.keys_file)
        inside = None if self._tls is None else self._tls.server
        to_workers = None if self._tls is None else self._tls.client
        of_workers: dict[str, Any] = {"to_workers": to_workers, "worker_token": self._token}
        inner = AdminSection(port=0)
        if self._node_host and (inside is not None or config.admin.insecure):
            inner = AdminSection(self._node_host, port=0, insecure=config.admin.insecure)
        is_known = config.tls.client_ca is not None or config.admin.insecure
        asked = "" if is_known else self._token
        ring, outer = None if file is None else file.ring, replace(config.admin, port=port or config.admin.port)
        give_up_at = asyncio.get_running_loop().time() + (_PORT_S if port else 0.0)
        while True:
            try:
                server, self.address = await start_admin(
                    outer, self._backend, ring, public_tls_of(config.tls), token=asked, **of_workers
                )
                break
            except ConfigError:
                if asyncio.get_running_loop().time() >= give_up_at:
                    raise
                await asyncio.sleep(_RETRY_S)
        self._admins.append(server)
        if asked and ring is None:
            self._leave_token(asked)
        server, self.inner_address = await start_admin(
            inner, self._backend, ring, inside, token=self._token, **of_workers
        )
        self._admins.append(server)
        if file is not None:
            self._keys = asyncio.create_task(file.follow(), name="keys")
        if config.metrics.controller:
            # With the TLS of the cluster's inside, as workers serve theirs; without it on loopback, unless `insecure`.
            admin, page = config.admin, None if self._tls is None else self._tls.page
            gate = Gate(ring, {ADMIN: "admin"}, ())
            self._metrics_page = serve_beside(
                registry,
                admin.host,
                0,
                insecure=admin.insecure,
                tls=page,
                check_key=lambda metadata: gate.check(metadata, ADMIN),
                allowed_hosts=config.router.allowed_hosts,
            )

    def _leave_token(self, token: str) -> None:
        _, port = parse_address(self.address)
        try:
            leave_token(port, token)
            self._left = token_file(port)
        except OSError as error:
            logger.warning("commands do not find the token of this cluster: %s: %s", token_file(port), error.strerror)

    async def close(self) -> None:
        if self._left is not None:
            self._left.unlink(missing_ok=True)
        if self._keys is not None:
            self._keys.cancel()
        for admin in self._admins:
            await admin.stop(None)
        if self._metrics_page is not None:
            self._metrics_page.close()
