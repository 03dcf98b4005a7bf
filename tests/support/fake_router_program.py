"""A program in place of `router.program`: serves ControlService and StatusService for real, and generates nothing. One
that may queue 13 requests does not start."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from cluster.errors import ConfigError
from cluster.pb import admin_pb2, admin_pb2_grpc
from cluster.program import Program, Report
from cluster.rpc import server_options
from cluster.settings import RouterSettings


class FakeRouter(admin_pb2_grpc.ControlServiceServicer, admin_pb2_grpc.StatusServiceServicer):
    """Every worker it was told of counts as connected."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._workers: list[Any] = []
        self._version = 0
        self._ended = threading.Event()
        options = server_options(sharing=settings.port_sharing)
        self._server = grpc.server(ThreadPoolExecutor(2), options=options)

    def prepare(self) -> str:
        return "{}"

    def start(self) -> str:
        if self._settings.router.max_queued_requests == 13:
            raise ConfigError("13 requests cannot be queued")
        admin_pb2_grpc.add_ControlServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_StatusServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"{self._settings.router.host}:{self._settings.router.port}")
        self._server.start()
        address = f"{self._settings.router.host}:{port}"
        return json.dumps({"address": address, "control_address": address, "pid": os.getpid()})

    def wait(self) -> None:
        self._ended.wait()
        self._server.stop(0).wait()

    def stop(self) -> None:
        self._ended.set()

    def SetWorkers(self, request: Any, context: Any) -> Any:
        self._workers, self._version = list(request.workers), request.config_version
        return admin_pb2.SetWorkersResponse()

    def GetStatus(self, request: Any, context: Any) -> Any:
        ready = admin_pb2.WorkerStatus.STATE_READY
        workers = [
            admin_pb2.WorkerStatus(
                worker_id=w.worker_id, address=w.address, state=ready, role=w.role, is_draining=w.is_draining
            )
            for w in self._workers
        ]
        return admin_pb2.GetStatusResponse(workers=workers, config_version=self._version)


def create(settings_json: str, report: Report) -> Program:
    return FakeRouter(RouterSettings.from_json(settings_json))
