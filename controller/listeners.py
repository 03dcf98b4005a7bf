"""What the controller listens on: the AdminService for operators, one for the routers, and a page of metrics.

The routers' pages pass on to the second what an operator asks for there; it is for those of this node alone where
strangers could reach it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
from prometheus_client import CollectorRegistry

from cluster.auth import Gate, KeyFile
from cluster.config.schema import AdminSection, ServingConfig
from cluster.errors import ConfigError
from cluster.metrics_page import MetricsPage, serve_beside
from cluster.tls import InternalTls, public_tls_of
from controller.admin_service import ADMIN, AdminBackend, start_admin

_RETRY_S = 0.2
_PORT_S = 10.0
"""How long a controller that begins again waits for its own port."""


class Listeners:
    """`open` once, `close` at the end. `node_host`: this machine for other nodes; empty: routers are all on this one.
    `tls`: of the cluster's inside, if any."""

    def __init__(self, backend: AdminBackend, config: ServingConfig, tls: InternalTls | None, node_host: str) -> None:
        self._backend = backend
        self._config = config
        self._tls = tls
        self._node_host = node_host
        self._admins: list[grpc.aio.Server] = []
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
        inner = AdminSection(port=0)
        if self._node_host and (inside is not None or config.admin.insecure):
            inner = AdminSection(self._node_host, port=0, insecure=config.admin.insecure)
        ring, outer = None if file is None else file.ring, replace(config.admin, port=port or config.admin.port)
        give_up_at = asyncio.get_running_loop().time() + (_PORT_S if port else 0.0)
        while True:
            try:
                server, self.address = await start_admin(
                    outer, self._backend, ring, public_tls_of(config.tls), to_workers=to_workers
                )
                break
            except ConfigError:
                if asyncio.get_running_loop().time() >= give_up_at:
                    raise
                await asyncio.sleep(_RETRY_S)
        self._admins.append(server)
        server, self.inner_address = await start_admin(inner, self._backend, ring, inside, to_workers=to_workers)
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

    async def close(self) -> None:
        if self._keys is not None:
            self._keys.cancel()
        for admin in self._admins:
            await admin.stop(None)
        if self._metrics_page is not None:
            self._metrics_page.close()
