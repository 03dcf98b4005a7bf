"""One life of one simulated worker: the real core, block manager, hand-off streams and service, on simulated ranks.

The engine thread is a call on the virtual loop: it has a turn whenever something was posted to its inbox, and another
one right after a step has ended. Its turns take no time; a step's curve has what the host adds to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from cluster.config.schema import SloSection, TransferSection
from cluster.failure_detector import FailureTimeouts
from cluster.kv_groups import all_layers
from cluster.pb import worker_pb2
from cluster.protocol import spoken
from cluster.settings import WorkerSettings
from cluster.step_cost import StepCost
from cluster.text import ROLE_NUMBERS
from engine.kv.block_manager import BlockManager
from engine.kv.tiered_blocks import TieredBlocks
from kv_transfer.layout import KvLayout
from prefill_worker.sender import Sender
from simulate import links
from simulate.curves import LinearCurve, StepCurve
from simulate.engine_thread import DirectInbox, SimulatedCore, SimulatedInbox, SimulatedSpeakingLoop
from simulate.model import END_TOKEN, KvPages
from simulate.network import Host, Network
from simulate.ranks import Clockwork, SimulatedRanks
from simulate.runs import NoPages, RunPipeline, RunRanks
from simulate.watched_pages import WatchedPages
from simulate.wire import Lane, Nic, WireSpec
from worker.core import Core
from worker.handoff_connection import HandoffConnection, HandoffContext
from worker.handoff_metrics import HandoffMetrics
from worker.handoff_streams import HandoffStreams, Handshake
from worker.reporter import CacheReporter, Reporter
from worker.service import WorkerService
from worker.step_pipeline import StepPipeline
from worker.steps import StepLog

WHOLE_PROMPT = 65_536
"""Tokens of a chunk in the fast fidelity, in which a prompt's last step is handed over in one piece."""
REVISION = "simulated"
"""Names the weights of every simulated worker."""
PROBE_S = 0.0371
"""Virtual seconds between two looks at whether a watched engine sleeps over its work."""

SOME_CURVE = LinearCurve(StepCost(4e-3, 5e-5, 1e-9, 1e-5, 1e-8))
"""A cost of the order of an 8B model on a GPU of 2024, for runs in which it does not matter."""


@dataclass(frozen=True)
class WorkerSpec:
    """One worker, and what its model costs."""

    worker_id: str
    role: str
    """`prefill` or `decode`."""
    curve: StepCurve = SOME_CURVE
    """Seconds of its steps."""
    kv_tokens: int = 131_072
    """Size of its KV pool."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 32_768
    enable_prefix_cache: bool = True
    tier_blocks: int = 0
    """Blocks that it keeps in host memory when its pool evicts them."""
    disk_blocks: int = 0
    """Blocks that it keeps on a disk when its host memory gives them up."""
    tier_bytes_per_s: float = 20e9
    """Between the pool and each of these."""
    num_layers: int = 4
    """Parts in which a prompt's last step may be handed over while it runs."""
    kv_bytes_per_token: float = 131_072.0
    """In all layers and on all ranks."""
    wire: WireSpec = field(default_factory=WireSpec)
    transports: tuple[str, ...] = ("gloo",)
    """Best first; with shm_pages, a peer of the same block size reads this worker's own pages."""
    command_s: float = 50e-6
    """Seconds that a gather, a landing, or opening or closing a pair takes beside the transfer."""
    num_threads: int = 1
    """Cores that a step keeps busy, where the cluster shares those of a machine (`ClusterSpec.cores`); 0: none, it is
    computed elsewhere, or a timer."""
    core_share: float | None = None
    """Cores that its process may use there; None: all."""
    overlaps: bool = True
    """A step is launched before the one before it is read, as on a GPU."""
    long_tokens: int = 0
    """The engine thread itself computes a step of fewer tokens, as on a CPU, and takes nothing in meanwhile."""


class SimulatedCluster(Clockwork, Protocol):
    """The parts of a cluster that a worker uses."""

    @property
    def network(self) -> Network: ...
    @property
    def is_watched(self) -> bool: ...
    @property
    def is_fast(self) -> bool:
        """Whether it is of the fast fidelity."""
        ...

    def fresh_name(self) -> str: ...


class SimulatedWorker:
    """Begins to serve when it is made; `die` ends it as a killed process ends."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        spec: WorkerSpec,
        transfer: TransferSection,
        slo: SloSection,
        incarnation: str,
    ) -> None:
        if cluster.is_fast:
            transfer = replace(transfer, chunk_tokens=WHOLE_PROMPT)
        self.spec = spec
        self.incarnation = incarnation
        self._cluster = cluster
        self._is_due = self._is_settled = False
        self.died: asyncio.Future[None] = cluster.loop.create_future()
        self._hangs_until = 0.0
        self._heartbeat: asyncio.Task[None] | None = None
        """None in the fast fidelity, in which nobody falls silent."""
        loop = cluster.loop
        speaking = SimulatedSpeakingLoop(loop)
        timing = FailureTimeouts(transfer.heartbeat_s, transfer.suspect_after_s, transfer.dead_after_s)
        self.host = Host(cluster.network, f"{spec.worker_id}:1")
        self._inbox = inbox = self._make_inbox()
        num_blocks = spec.kv_tokens // spec.block_size
        pages, blocks = self._make_pool(num_blocks)
        self.nic = Nic(spec.wire)
        self.ranks = self._make_ranks(pages, inbox)
        streams = self._make_streams(self._handshake(transfer), timing)
        context = HandoffContext(
            inbox.post,
            _at_once if cluster.is_fast else speaking.post,
            self.ranks.issue,
            timing,
            links.UncountedHandoffs() if cluster.is_fast else HandoffMetrics(),
            clock=loop.time,
            fresh_name=cluster.fresh_name,
            make_connection=links.DirectConnection if cluster.is_fast else HandoffConnection,
        )
        self.stats = context.stats
        make_core = partial(SimulatedCore, self._computes) if spec.long_tokens else Core
        self.core = make_core(
            inbox,
            self.ranks,
            blocks,
            context,
            lambda connection, address, life: self._dial(streams, connection, address, life),
            _settings_of(spec, transfer, slo),
            max_model_len=spec.max_model_len,
            vocab_size=END_TOKEN + 1,
            step_log=StepLog(None),
            overlaps=spec.overlaps,
            clock=loop.time,
            pipeline=RunPipeline if cluster.is_fast else StepPipeline,
            reporters=links.REPORTERS if cluster.is_fast else (Reporter, CacheReporter),
        )
        info = self._info(num_blocks)
        if isinstance(streams, links.DirectStreams):
            self.host.serve(links.DirectService(self.core, streams, info))
        else:
            self._service = WorkerService(speaking, self.core, streams, info, timing)
            self.host.serve(self._service)
            self._begin_heartbeat()
        if cluster.is_watched:
            loop.call_later(PROBE_S, self._probe)

    def _make_inbox(self) -> SimulatedInbox:
        if self._cluster.is_fast and not self.spec.long_tokens:
            return DirectInbox(self._wake, lambda: self.core.is_turn_due)
        return SimulatedInbox(self._wake)  # what is posted waits for the end of a step that the engine thread computes

    def _make_streams(self, handshake: Handshake, timing: FailureTimeouts) -> HandoffStreams:
        if self._cluster.is_fast:
            return links.DirectStreams(self._cluster.network, handshake, timing)
        return HandoffStreams(handshake, timing, open_channel=self.host.channel)

    def _make_ranks(self, pages: KvPages, inbox: SimulatedInbox) -> SimulatedRanks:
        spec, cluster = self.spec, self._cluster
        of_wire = spec.curve, self.nic, spec.kv_bytes_per_token, spec.command_s, inbox.post
        if cluster.is_fast:
            offer_s = spec.command_s + 2 * cluster.network.latency_s + spec.wire.latency_s
            return RunRanks(cluster, spec.worker_id, pages, *of_wire, num_parts=spec.num_layers, offer_s=offer_s)
        share = None if spec.core_share is None else Lane(spec.core_share, most=1.0)
        if share is not None:
            cluster.network.shares[self.host.address] = share
        make_ranks = partial(SimulatedRanks, cluster, spec.worker_id, pages, *of_wire)
        return make_ranks(num_threads=spec.num_threads, share=share, tier_bytes_per_s=spec.tier_bytes_per_s)

    @property
    def address(self) -> str:
        return self.host.address

    @property
    def is_dead(self) -> bool:
        return self.died.done()

    def die(self) -> None:
        """Nothing of it runs any more."""
        self.died.set_result(None)
        self._end_heartbeat()
        self.ranks.die()
        self.host.close()

    def hang(self, seconds: float) -> None:
        """The engine thread has no turn for so long; the process answers and sends signs of life meanwhile."""
        loop = self._cluster.loop
        self._hangs_until = max(self._hangs_until, loop.time() + seconds)
        loop.call_later(seconds, self._wake)

    def stop(self, seconds: float) -> None:
        """The whole process stands still for so long; what its device has begun goes on."""
        self.hang(seconds)
        self._cluster.network.stop(self.address, seconds)
        self._end_heartbeat()
        self._cluster.loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self.is_dead:
            self._end_heartbeat()
            self._begin_heartbeat()

    def _begin_heartbeat(self) -> None:
        self._heartbeat = self._cluster.loop.create_task(self._service.heartbeat())

    def _end_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    def check_idle(self) -> None:
        """Raises AssertionError unless nothing is held and no operation is under way."""
        name, core = self.spec.worker_id, self.core
        core.blocks.check()
        assert core.blocks.num_held == 0, f"{name} holds {core.blocks.num_held} blocks"
        core.prefill.check_idle()
        core.decode.check_idle()
        assert self.ranks.is_idle, f"commands of {name} are under way"
        assert not core.handoffs.count_by_state()["closing"], f"pairs of {name} are not closed"
        assert core.reporter.num_requests == 0, f"{name} has {core.reporter.num_requests} requests"

    # The engine thread

    def _wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._cluster.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = self._is_settled = False
        if self.is_dead or self._cluster.loop.time() < self._hangs_until or self._computes():
            return
        self._inbox.is_called = True
        has_ended = self.core.turn(wait=False)
        self._inbox.is_called = False
        if has_ended:
            self._wake()

    def _computes(self) -> bool:
        """Whether the engine thread itself computes a step."""
        return self.spec.long_tokens > 0 and self.ranks.is_at(self.spec.long_tokens)

    def _probe(self) -> None:
        """Raises AssertionError when the engine sleeps although a step could be launched (nobody would wake it), or
        computes for a router that is gone, or where a send slot is lost. Once nothing has come of a look at an engine
        without requests, not even stats that were due, it is let sleep until something is posted."""
        if self.is_dead:
            return
        loop, core, num_steps = self._cluster.loop, self.core, self.ranks.num_steps
        loop.call_later(PROBE_S, self._probe)
        _check_slots(core.prefill._sender)
        for sequence in core.decode.running:
            key = sequence.request.key
            assert core.reporter.is_heard(key), f"{self.spec.worker_id} decodes {key}, and nobody waits for it"
        if self._is_due or self._is_settled or loop.time() < self._hangs_until:
            return
        stats_due = core.stats_due
        has_ended = core.turn(wait=False)
        assert not has_ended and self.ranks.num_steps == num_steps, f"{self.spec.worker_id} slept, and had work to do"
        self._is_settled = not core.reporter.num_requests and stats_due == core.stats_due <= loop.time()

    def _dial(self, streams: HandoffStreams, connection: HandoffConnection, address: str, incarnation: str) -> None:
        if isinstance(streams, links.DirectStreams):
            streams.dial(connection, address, incarnation)
        else:
            self._cluster.loop.call_soon(streams.dial, connection, address, incarnation)

    def _make_pool(self, num_blocks: int) -> tuple[KvPages, BlockManager]:
        spec = self.spec
        size, num_layers, slots = spec.block_size, spec.num_layers, (spec.tier_blocks, spec.disk_blocks)
        if self._cluster.is_watched:
            watched = WatchedPages(num_blocks, size, num_layers, *slots)
            return watched, watched.blocks
        pages = NoPages(size) if self._cluster.is_fast else KvPages(num_blocks, size, num_layers, *slots)
        pool = num_blocks, size, spec.enable_prefix_cache, all_layers(pages.num_layers)
        if not spec.tier_blocks:
            return pages, BlockManager(*pool)
        return pages, TieredBlocks(*pool, num_slots=slots[0], num_disk_slots=slots[1])

    # What others learn of it

    def _handshake(self, transfer: TransferSection) -> Handshake:
        spec = self.spec
        layout = KvLayout(self.ranks.pages.num_layers, 1, 1, "bfloat16", 1, spec.block_size, REVISION)
        name = spec.worker_id
        return Handshake(name, self.incarnation, layout, "", spec.transports, "one host", transfer)

    def _info(self, num_blocks: int) -> worker_pb2.WorkerInfo:
        spec = self.spec
        return worker_pb2.WorkerInfo(
            worker_id=spec.worker_id,
            incarnation=self.incarnation,
            role=ROLE_NUMBERS[spec.role],
            node=spec.worker_id,
            model=REVISION,
            weights_revision=REVISION,
            block_size=spec.block_size,
            num_blocks=num_blocks,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            transport=spec.transports[0],
            dtype="bfloat16",
            protocol=spoken(),
            prefix_format="bfloat16" if spec.enable_prefix_cache else "",
            num_tier_blocks=spec.tier_blocks + spec.disk_blocks,
        )


def _settings_of(spec: WorkerSpec, transfer: TransferSection, slo: SloSection) -> WorkerSettings:
    engine = {
        "block_size": spec.block_size,
        "kv_cache_tokens": spec.kv_tokens,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "max_num_seqs": spec.max_num_seqs,
        "enable_prefix_cache": spec.enable_prefix_cache,
    }
    settings = WorkerSettings.from_values(worker_id=spec.worker_id, role=spec.role, model_path="", **engine)
    return replace(settings, transfer=transfer, slo=slo)


def _check_slots(sender: Sender) -> None:
    """Raises AssertionError unless every send slot of an open connection is free, or has one chunk."""
    for epoch, slots in sender._slots.items():
        outgoing = [out for out in sender._outgoing.values() if out.epoch == epoch]
        used = [chunk.slot for out in outgoing for chunk, _ in out.chunks.values()]
        assert sorted(slots.free_slots + used) == list(range(slots.num_slots)), f"a slot is lost: {slots}, used {used}"


def _at_once(function: Callable[..., object], *arguments: Any) -> None:
    """Nothing of the speaking loop takes time."""
    function(*arguments)
