"""A small blocking Python client of the AdminService: the CLI, the tests and the benchmarks use it.

Errors come back as the exceptions of `cluster.errors`. Knows no retry: a call happens once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.errors import DeadlineExceeded
from cluster.pb import admin_pb2, admin_pb2_grpc
from cluster.tls import ClientTls
from tools.client import ClientConnection, as_baton_errors

DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"
_ENDS = (admin_pb2.ClusterEvent.KIND_CHANGED, admin_pb2.ClusterEvent.KIND_FAILED)


class AdminClient(ClientConnection):
    """Of a controller; `expected_version` 0: whatever is current."""

    def __init__(
        self,
        address: str = DEFAULT_ADMIN_ADDRESS,
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        call_s: float = 30.0,
    ) -> None:
        super().__init__(address, api_key=api_key, tls=tls, call_s=call_s)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(self._channel)

    def cluster(self) -> admin_pb2.GetClusterResponse:
        response: admin_pb2.GetClusterResponse = self._call(self._admin.GetCluster, admin_pb2.GetClusterRequest())
        return response

    def set_roles(
        self, prefill: int, decode: int, *, expected_version: int = 0, dry_run: bool = False
    ) -> admin_pb2.ChangeResponse:
        """So many workers of each role."""
        request = admin_pb2.SetRolesRequest(
            num_prefill=prefill, num_decode=decode, expected_version=expected_version, dry_run=dry_run
        )
        return self._change(self._admin.SetRoles, request)

    def apply(
        self, text: str, *, filename: str = "", expected_version: int = 0, dry_run: bool = False
    ) -> admin_pb2.ChangeResponse:
        """What a cluster.yaml says."""
        request = admin_pb2.ApplyRequest(
            yaml=text, filename=filename, expected_version=expected_version, dry_run=dry_run
        )
        return self._change(self._admin.Apply, request)

    def drain(self, worker_id: str, *, expected_version: int = 0, dry_run: bool = False) -> admin_pb2.ChangeResponse:
        """Takes a worker out."""
        request = admin_pb2.DrainWorkerRequest(worker_id=worker_id, expected_version=expected_version, dry_run=dry_run)
        return self._change(self._admin.DrainWorker, request)

    def events(
        self, after_sequence: int | None = None, *, timeout_s: float | None = None
    ) -> Iterator[admin_pb2.ClusterEvent]:
        """From the one after that (None: from now) on; for ever, or ends quietly after `timeout_s`."""
        request = admin_pb2.WatchEventsRequest(after_sequence=after_sequence)
        try:
            with as_baton_errors(self.address):
                yield from self._admin.WatchEvents(request, timeout=timeout_s, metadata=self._metadata)
        except DeadlineExceeded:
            return

    def follow(self, answer: admin_pb2.ChangeResponse) -> Iterator[admin_pb2.ClusterEvent]:
        """The events of an accepted change, to the one that it is done or has failed; none where nothing differs."""
        if not answer.is_change:
            return
        for event in self.events(answer.after_sequence):
            yield event
            if event.kind in _ENDS:
                return

    def _change(self, method: Any, request: Any) -> admin_pb2.ChangeResponse:
        response: admin_pb2.ChangeResponse = self._call(method, request)
        return response
