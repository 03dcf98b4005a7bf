"""The services of a router that operators and the controller call: StatusService, and ControlService on a port of its
own.

They read the dispatcher and its fleet, and change nothing but the set of workers and the run-time settings.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

from cluster.pb import admin_pb2
from cluster.protocol import spoken
from cluster.settings import RouterSettings
from cluster.step_cost import usual_by_role
from router.api.call import Call
from router.api.violations import Violations
from router.observe.activity import Activity, WorkerRates
from router.routing.dispatcher import Dispatcher
from router.routing.fleet import DECODE, PREFILL, WorkerAddress
from router.routing.worker_client import Speed, WorkerClient

log = logging.getLogger(__name__)


class StatusService:
    """`router_address` is where clients reach this router, `metrics_address` where its page is, if it has one."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        control: ControlService,
        activity: Activity,
        *,
        model: str,
        router_address: str,
        metrics_address: str = "",
    ) -> None:
        self._dispatcher = dispatcher
        self._control = control
        self._activity = activity
        self._model = model
        self._router_address = router_address
        self._metrics_address = metrics_address
        self._started_at = time.monotonic()
        self._rates = WorkerRates()

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, call: Call) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(
            model=self._model,
            router_address=self._router_address,
            workers=[self._worker_status(worker) for worker in self._dispatcher.fleet],
            router=self._router_status(),
            config_version=self._control.config_version,
            protocol=spoken(),
        )

    async def GetActivity(self, request: admin_pb2.GetActivityRequest, call: Call) -> admin_pb2.GetActivityResponse:
        activity = self._activity.response(request, self._dispatcher.handing_over())
        activity.rates.extend(self._rates.rates())
        return activity

    async def GetCache(self, request: admin_pb2.GetCacheRequest, call: Call) -> admin_pb2.GetCacheResponse:
        return self._activity.prefix_use.response(request, self._dispatcher.fleet.holders)

    async def keep_time(self) -> None:
        """Runs for ever: once a second, closes the current second of the activity."""
        while True:
            try:
                self._tick()
            except Exception:
                # A mistake here must be logged, and must not end the activity.
                log.exception("a second of the activity could not be closed")
            await asyncio.sleep(1.0)

    def _tick(self) -> None:
        dispatcher, now = self._dispatcher, time.monotonic()
        self._activity.tick(
            now,
            time.time(),
            dispatcher.counters.by_outcome(),
            num_queued=dispatcher.num_queued,
            num_running=dispatcher.num_running,
        )
        self._rates.add(
            now, [(w.info, w.stats) for w in dispatcher.fleet if w.info is not None and w.stats is not None]
        )

    def _worker_status(self, worker: WorkerClient) -> admin_pb2.WorkerStatus:
        return admin_pb2.WorkerStatus(
            worker_id=worker.worker_id,
            address=worker.address,
            state=worker.state,
            info=worker.info,
            stats=worker.stats,
            role=worker.role,
            is_draining=worker.is_draining,
            num_requests=self._dispatcher.num_requests(worker),
            refusal=worker.refusal,
            is_slow=worker.is_ready and worker.speed is not Speed.USUAL,
        )

    def _router_status(self) -> admin_pb2.RouterStatus:
        dispatcher, counters = self._dispatcher, self._dispatcher.counters
        return admin_pb2.RouterStatus(
            num_queued=dispatcher.num_queued,
            max_queued=dispatcher.context.limits.max_queued_requests,
            num_running=dispatcher.num_running,
            num_finished=counters.finished,
            num_cancelled=counters.cancelled,
            num_failed=counters.failed,
            num_rejected=counters.rejected,
            num_orphaned=counters.orphaned,
            pid=os.getpid(),
            uptime_s=int(time.monotonic() - self._started_at),
            metrics_address=self._metrics_address,
            controller_silent_s=self._control.silent_s,
        )


class ControlService:
    def __init__(self, dispatcher: Dispatcher, settings: RouterSettings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self.config_version = 0
        """Version of the configuration that named the workers last."""
        self.admin_address = ""
        """Address of the controller's AdminService; empty: there is no controller."""
        self._named_at: float | None = None

    @property
    def silent_s(self) -> float | None:
        """Seconds since the controller last named the workers; None: it never has."""
        return None if self._named_at is None else self._dispatcher.clock() - self._named_at

    @property
    def drain_timeout_s(self) -> float:
        """Seconds that running requests get to end before the router does."""
        return self._settings.drain_timeout_s

    async def SetWorkers(self, request: admin_pb2.SetWorkersRequest, call: Call) -> admin_pb2.SetWorkersResponse:
        wrong = Violations()
        for index, worker in enumerate(request.workers):
            if not worker.worker_id or not worker.address or worker.role not in (PREFILL, DECODE):
                wrong.add(f"workers[{index}]", "must have a worker_id, an address and the role PREFILL or DECODE")
        if len({worker.worker_id for worker in request.workers}) < len(request.workers):
            wrong.add("workers", "name the same worker_id twice")
        wrong.raise_if_any()
        self._named_at = self._dispatcher.clock()
        self.config_version = request.config_version
        self.admin_address = request.admin_address or self.admin_address
        if request.HasField("needs_prefill"):
            self._dispatcher.fleet.needs_prefill = request.needs_prefill
        if request.run_time_settings:
            self._settings = self._settings.with_run_time(request.run_time_settings)
            self._dispatcher.apply_settings(self._settings)
            self._dispatcher.fleet.change_settings(request.run_time_settings)
        self._dispatcher.set_workers(
            WorkerAddress(w.worker_id, w.address, w.role, w.is_draining) for w in request.workers
        )
        return admin_pb2.SetWorkersResponse()

    async def GetDemand(self, request: admin_pb2.GetDemandRequest, call: Call) -> admin_pb2.GetDemandResponse:
        dispatcher = self._dispatcher
        costs = usual_by_role((w.role == PREFILL, w.step_cost) for w in dispatcher.fleet)
        pools = [worker.kv_tokens for worker in dispatcher.fleet if worker.is_ready]
        window_s, demand = dispatcher.demand()
        return admin_pb2.GetDemandResponse(
            window_s=window_s,
            demand=demand.to_proto(),
            prefill_cost=costs.prefill.to_proto() if costs else None,
            decode_cost=costs.decode.to_proto() if costs else None,
            kv_tokens=min(pools, default=0),
        )
