"""A worker process as a `cluster.program.Program`: rank 0 leads and serves, the other ranks follow.

Start of a group: rank 0 binds its rank server (`prepare`), the others connect to it and say hello; rank 0 sends Start
with what all must agree on, every rank loads its slices, and rank 0 opens its gRPC server. Any rank's end is the end
of the worker: `wait` raises, and whoever hosts the group starts it anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from functools import partial
from pathlib import Path

from cluster.crash_record import CrashRecord
from cluster.errors import Cancelled, IncompatibleProtocol, InternalError, Unavailable
from cluster.failure_detector import FailureTimeouts
from cluster.grammar import GrammarLimits
from cluster.metrics_page import MetricsPage
from cluster.pb import rank_pb2, worker_pb2
from cluster.program import Program, Report
from cluster.protocol import spoken
from cluster.settings import WorkerSettings
from cluster.text import ROLE_NUMBERS
from cluster.tls import internal_tls_of
from engine.memory import MemoryPlan
from engine.sampling.constraint import Constrainer
from kv_transfer.transports.interface import serve_store
from kv_transfer.transports.selection import host_id
from worker.core import Core, Inbox
from worker.disk_files import PUT_BY_S, DiskFiles
from worker.follower import Follower, RankProgram
from worker.group import CudaSpan, RankGroup, StandIn
from worker.handoff_connection import HandoffContext
from worker.handoff_metrics import HandoffMetrics
from worker.handoff_streams import HandoffStreams, Handshake
from worker.handoffs import Dial
from worker.loading import (
    RENDEZVOUS_TIMEOUT_S,
    LoadedRank,
    check_memory,
    check_rank,
    disk_folder,
    group_start,
    load_rank,
    make_blocks,
    overlaps_steps,
    rank_hello,
    ready_for_steps,
)
from worker.metrics import serve_metrics
from worker.rank import RankExecutor
from worker.rank_socket import RankConnection, accept, hello, write_frame
from worker.resolved import Resolved, resolve
from worker.service import SpeakingLoop, WorkerService
from worker.step_meter import StepMeter
from worker.step_pipeline import Ranks
from worker.steps import StepLog
from worker.timed import load_timed_rank

logger = logging.getLogger(__name__)


def create(settings_json: str, report: Report) -> Program:
    """The program of one rank. Raises ConfigError and CheckpointError for what can be found before loading."""
    settings = WorkerSettings.from_json(settings_json)
    resolved = resolve(settings)
    return Leader(resolved, report) if settings.tp_rank == 0 else Follower(resolved, report)


class Leader(RankProgram):
    """Rank 0: the engine thread, the gRPC server and the command log."""

    def __init__(self, resolved: Resolved, report: Report) -> None:
        super().__init__()
        self._resolved = resolved
        self._settings = resolved.settings
        self._report = report
        self._incarnation = uuid.uuid4().hex[:12]
        self._crash_record = CrashRecord(self._incarnation)
        self._tls = internal_tls_of(self._settings.internal_tls)
        self._listener: socket.socket | None = None
        self._core: Core | None = None
        engine = self._settings.engine
        limits = GrammarLimits(engine.grammar_timeout_s, memory_bytes=engine.grammar_memory_bytes)
        self._constrainer = Constrainer.from_folder(Path(self._settings.model.path), resolved.config.vocab_size, limits)
        self._group: RankGroup | None = None
        self._disk: DiskFiles | None = None
        self._service: WorkerService | None = None
        self._metrics_page: MetricsPage | None = None
        self._engine_thread: threading.Thread | None = None

    def prepare(self) -> str:
        self._listener = socket.create_server((self._settings.host, self._settings.rank_port))
        self._listener.settimeout(RENDEZVOUS_TIMEOUT_S)
        host, port = self._listener.getsockname()[:2]
        return json.dumps({"rank_address": f"{host}:{port}"})

    def start(self) -> str:
        settings, resolved = self._settings, self._resolved
        self._crash_record.follow_signals()
        check_memory(resolved.demand)
        self._store, store_address = serve_store(settings.host)
        folder = disk_folder(resolved)
        start = group_start(resolved, self._incarnation, store_address, 0 if folder is None else folder.number)
        followers, hellos = self._gather_ranks(start)
        loaded = load_timed_rank(resolved) if resolved.is_timed else load_rank(resolved, start, self._report)
        plan, self._resolved = loaded.plan, loaded.resolved
        transports = f"transports, best first: {', '.join(self._resolved.transports)}"
        for line in (*loaded.choices, f"{transports}; each pair takes the first that both have"):
            self._report(line)
        transfer, inbox, loop = settings.transfer, Inbox(), SpeakingLoop()
        timing = FailureTimeouts(transfer.heartbeat_s, transfer.suspect_after_s, transfer.dead_after_s)
        has_meter = settings.metrics_port is not None and not resolved.is_timed
        meter = StepMeter(resolved.work) if has_meter else None
        is_cpu = loaded.runner.device.type == "cpu"
        stand_in = StandIn(lambda: core.turn(wait=True), inbox.post) if is_cpu else None
        group = self._group = RankGroup(
            lambda reply: RankExecutor(loaded.runner, loaded.transfer_engine, reply),
            followers,
            loaded.chooser,
            post=inbox.post,
            lost=self._rank_lost,
            timing=timing,
            prepare=lambda: ready_for_steps(resolved),
            stand_in=stand_in,
            meter=meter,
            begin_span=partial(CudaSpan, loaded.runner.device) if loaded.runner.device.type == "cuda" else None,
            long_tokens=loaded.long_tokens,
        )
        streams = HandoffStreams(
            self._handshake(store_address),
            timing,
            None if self._tls is None else self._tls.client,
            settings.cluster_token,
        )
        context = HandoffContext(inbox.post, loop.post, group.issue, timing, HandoffMetrics())
        overlaps, why_not = overlaps_steps(settings.engine.async_steps, resolved.device, hellos)
        self._report(f"a step is launched before the one before it is read: {'yes' if overlaps else f'no, {why_not}'}")
        core: Core = self._make_core(loaded, inbox, group, context, partial(loop.post, streams.dial), overlaps)
        self._core = core
        page = self._metrics_page = serve_metrics(
            resolved,
            core,
            context.metrics,
            loaded.transfer_engine,
            meter,
            self._tls,
            loaded.runner.expert_load,
        )
        info = self._info(plan, hellos, "" if page is None else page.address)
        service = self._service = WorkerService(
            loop, core, streams, info, timing, group.tick, self._tls, settings.cluster_token
        )
        self._engine_thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._engine_thread.start()
        if folder is not None and core.tier is not None and loaded.transfer_engine.tier is not None:
            self._disk = DiskFiles(folder, core, core.tier, loaded.transfer_engine.tier)
        port = service.start(settings.host, settings.port, settings.insecure)
        address = f"{settings.host}:{port}"
        return json.dumps({"worker_id": settings.worker_id, "address": address, "tp_rank": 0, "pid": os.getpid()})

    def stop(self) -> None:
        if self._core is not None:
            self._core.inbox.post(self._core.stop)
        else:
            self._end()
            if self._listener is not None:
                with contextlib.suppress(OSError):  # it is closed: every rank has come
                    self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a rank there

    def wait(self) -> None:
        """Also closes what serves, so that every peer learns of the end at once."""
        try:
            super().wait()
        finally:
            if self._service is not None:
                self._service.stop()
            if self._metrics_page is not None:
                self._metrics_page.close()
            if self._disk is not None:
                self._disk.close(self._engine_thread if self._error is None else None)
            elif self._engine_thread is not None and self._error is None:
                self._engine_thread.join(PUT_BY_S + 1.0)
            if self._group is not None:
                self._group.close()
            if self._constrainer is not None:
                self._constrainer.close()

    def _gather_ranks(self, start: rank_pb2.Start) -> tuple[list[RankConnection], list[rank_pb2.RankHello]]:
        """Sockets of ranks 1.. in their order, and every rank's hello, rank 0's first."""
        settings, sockets = self._settings, dict[int, RankConnection]()
        hellos = {0: rank_hello(settings, self._resolved.device)}
        assert self._listener is not None, "prepare comes before start"
        give_up_at = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        while len(sockets) < settings.tp_size - 1:
            self._report(f"waiting for ranks: {len(sockets) + 1} of {settings.tp_size}")
            try:
                self._listener.settimeout(max(0.001, give_up_at - time.monotonic()))
                sock = accept(self._listener, self._tls)
                said = hello(sock, settings.cluster_token)
            except Unavailable as error:
                logger.warning("%s", error)
                continue
            except TimeoutError as error:
                missing = sorted(set(range(1, settings.tp_size)) - set(sockets))
                raise Unavailable(f"tensor-parallel ranks {missing} did not connect in time") from error
            except OSError as error:
                raise Cancelled("stopped while waiting for its ranks") from error
            if said.tp_rank in hellos or not 0 < said.tp_rank < settings.tp_size:
                raise InternalError(f"a process connected as tensor-parallel rank {said.tp_rank} twice or out of range")
            try:
                check_rank(said, settings)
            except IncompatibleProtocol:
                write_frame(sock, rank_pb2.RankCommand(start=start))  # from which that rank learns why
                raise
            hellos[said.tp_rank], sockets[said.tp_rank] = said, sock
        self._listener.close()
        ordered = [sockets[rank] for rank in sorted(sockets)]
        start.shares_memory = all(said.shares_memory for said in hellos.values())
        for sock in ordered:
            write_frame(sock, rank_pb2.RankCommand(start=start))
        return ordered, [hellos[rank] for rank in sorted(hellos)]

    def _make_core(
        self, loaded: LoadedRank, inbox: Inbox, ranks: Ranks, context: HandoffContext, dial: Dial, overlaps: bool
    ) -> Core:
        settings, config, plan = self._settings, self._resolved.config, loaded.plan
        return Core(
            inbox,
            ranks,
            make_blocks(plan, settings.engine, loaded.transfer_engine.tier),
            context,
            dial,
            settings,
            max_model_len=plan.max_model_len,
            vocab_size=config.vocab_size,
            step_log=StepLog(settings.step_log),
            constrainer=self._constrainer,
            crash_record=self._crash_record,
            overlaps=overlaps,
            store=None if loaded.transfer_engine.tier is None else loaded.transfer_engine.tier.store,
        )

    def _handshake(self, store_address: str) -> Handshake:
        settings = self._settings
        return Handshake(
            worker_id=settings.worker_id,
            incarnation=self._incarnation,
            layout=self._resolved.layout,
            store_address=store_address,
            transports=self._resolved.transports,
            host_id=host_id(),
            transfer=settings.transfer,
        )

    def _info(self, plan: MemoryPlan, hellos: list[rank_pb2.RankHello], metrics_address: str) -> worker_pb2.WorkerInfo:
        settings = self._settings
        ranks = [worker_pb2.RankInfo(tp_rank=h.tp_rank, pid=h.pid, host=h.host, device=h.device) for h in hellos]
        return worker_pb2.WorkerInfo(
            worker_id=settings.worker_id,
            incarnation=self._incarnation,
            role=ROLE_NUMBERS[settings.role],
            node=settings.node or socket.gethostname(),
            ranks=ranks,
            model=self._resolved.model,
            weights_revision=self._resolved.weights_revision,
            block_size=plan.block_size,
            num_blocks=plan.num_tokens // plan.block_size,
            max_model_len=plan.max_model_len,
            max_num_seqs=settings.engine.num_seqs,
            transport=",".join(self._resolved.transports),
            dtype=self._resolved.dtype,
            metrics_address=metrics_address,
            crash_record=self._crash_record.path,
            protocol=spoken(),
            prefix_format=self._resolved.prefix_format,
            num_tier_blocks=(plan.num_host_blocks + plan.num_disk_blocks) // len(plan.groups),
            pool_bytes=plan.pool_bytes * settings.tp_size,
            host_bytes=plan.host_bytes * settings.tp_size,
            disk_bytes=plan.disk_bytes * settings.tp_size,
            store_bytes=settings.engine.kv_store_bytes if settings.engine.enable_prefix_cache else 0,
        )

    def _run_engine(self) -> None:
        assert self._core is not None
        ready_for_steps(self._resolved)
        try:
            self._core.run()
        except Exception as error:
            logger.exception("the engine thread ended")
            if self._settings.tp_size == 1:  # with several, a rank that was killed looks the same from here
                self._crash_record.failed(f"a step failed: {type(error).__name__}: {error}")
            self._end(InternalError(f"the engine of {self._settings.worker_id} failed: {type(error).__name__}"))
        else:
            self._end()
            self._core.put_by(PUT_BY_S)

    def _rank_lost(self, message: str) -> None:
        logger.error("%s", message)
        self._end(Unavailable(message))
