"""The keys of `metadata.serving`: their types, defaults, limits and meaning.

One frozen dataclass a section, one docstring a field: `cluster.config.reference` turns them into
docs/configuration.md, `cluster.config.read` holds files against them. `cluster.config.choices` has the names
among which a value is chosen; what concerns workers is in `cluster.config.workers` and `cluster.config.roles`. Nothing
here reads YAML.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.config import choices
from cluster.config.access import AuthSection, InternalTlsSection, TlsSection
from cluster.config.read import DAY_S, FIXED, ROLLING, RUN_TIME, bounded
from cluster.config.roles import ROLES, RoleName, RoleSection, RolesSection
from cluster.config.workers import EngineSection, ModelSection, PlacementSection
from cluster.transports import TransportName

__all__ = [
    "ROLES",
    "AdminSection",
    "AutoSection",
    "EngineSection",
    "MetricsSection",
    "ModelSection",
    "PlacementSection",
    "RebalanceSection",
    "RoleName",
    "RoleSection",
    "RolesSection",
    "RouterSection",
    "ServingConfig",
    "SloSection",
    "TransferSection",
]


@dataclass(frozen=True)
class TransferSection:
    """How KV travels from a prefill worker to a decode worker."""

    transport: TransportName = "auto"
    """What carries it: shm (CPU workers of one host), gloo (any workers, through host memory), cuda_ipc (GPU workers of
    one host) or nccl (GPU workers); shm_pages and cuda_pages: the same between equal layouts, without slots; auto: the
    best that both workers of a pair can use, but for shm_pages."""
    wire_format: choices.WireFormatName = "native"
    """What KV is turned into on its way; int8 and fp8 move half of bfloat16's bytes, a quarter of float32's, and
    round."""
    digest: choices.DigestName = "auto"
    """Whether chunks carry a digest that is checked where they land; sampled: every 16th chunk; auto: on between CPUs,
    sampled between GPUs."""
    chunk_tokens: int = bounded(256, at_least=1, at_most=65_536)
    """Most tokens of one chunk; a slot holds one chunk."""
    num_slots: int = bounded(4, at_least=1, at_most=16)
    """Chunks in flight between two workers; 1: a chunk is read only when the one before it has arrived."""
    max_pairs: int = bounded(16, at_least=1, at_most=1024)
    """Pairs with other workers that one worker keeps open; one more closes the idle one that was used longest ago."""
    timeout_s: float = bounded(5.0, above=0, at_most=DAY_S)
    """A chunk that makes no progress for this long fails its request and closes the pair."""
    heartbeat_s: float = bounded(0.5, above=0, at_most=DAY_S, is_fixed=True)
    """Two workers of a pair, and the router and a worker, send one another a sign of life at least this often."""
    suspect_after_s: float = bounded(1.5, above=0, at_most=DAY_S, is_fixed=True)
    """A peer that is silent for this long gets nothing new; must be longer than `heartbeat_s`."""
    dead_after_s: float = bounded(3.0, above=0, at_most=DAY_S, is_fixed=True)
    """A peer that is silent for this long is given up: its pair is closed, its requests go elsewhere."""


@dataclass(frozen=True)
class RouterSection:
    """The public APIs, and how requests are queued and routed."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs TLS or `insecure`."""
    port: int = bounded(50051, at_least=0, at_most=65_535)
    """Port of the gRPC API; 0: any free one."""
    http_port: int | None = bounded(8000, at_least=0, at_most=65_535)
    """Port of the OpenAI API over HTTP; 0: any free one; null: not served."""
    replicas: int = bounded(1, at_least=1, at_most=64)
    """Router processes, each with all workers. On one machine they share `port` and `http_port`, and each takes some of
    the connections; with `placement.routers: spread` they are at the same ports of several nodes. A stream that was
    begun at one of them can be resumed at another; spread ones need `state` in Redis for that."""
    policy: choices.PolicyName = "predicted"
    """How the workers of a request are chosen; predicted: those on which it should end first, by what workers have
    measured of their own steps, what is handed out already and what prefix caches hold; a decode worker computes a
    short or mostly cached prompt itself where that is sooner; the others look at less: at the work handed out, at whose
    turn it is, at nothing."""
    prefix_fetch: choices.PrefixFetchName = "auto"
    """Whether a worker fetches the beginning of a prompt from another one that has it in its prefix cache. auto: where
    that is predicted to be quicker than to compute it; always: whenever it spares a block; off: never."""
    session_ttl_s: float = bounded(0.0, at_least=0, at_most=DAY_S)
    """Seconds after a request with a `session_id` for which workers evict its KV after that of others, up to
    `engine.kv_session_share` of their caches; 0: its KV is as that of any other."""
    max_running_requests: int | None = bounded(None, at_least=1, at_most=2**20)
    """Requests handed to workers at one time. null: 256, or as many as the decode workers step at a time if that is
    more."""
    max_queued_requests: int = bounded(1024, at_least=0, at_most=2**20)
    """Requests that wait beside those; one more is refused with a retry delay."""
    max_running_tokens: int | None = bounded(None, at_least=1, at_most=2**40)
    """Prompts and most outputs of the requests that run; one that is larger by itself is refused. null: as many as the
    decode workers' KV pools should hold, by the outputs of what has ended lately."""
    max_queued_tokens: int = bounded(2**20, at_least=1, at_most=2**40)
    """Prompts and most outputs of the requests that wait."""
    queue_timeout_s: float = bounded(60.0, above=0, at_most=DAY_S)
    """A request that waited this long is refused, and so is at once one that would, unless the client set its own
    limit."""
    max_queue_wait_s: float | None = bounded(None, above=0, at_most=DAY_S)
    """While more comes than can be served, a request that would wait longer is refused at once, unless the client set
    its own limit; a burst that drains waits. null: `rebalance.slo.ttft_ms`."""
    stalled_client_timeout_s: float = bounded(20.0, above=0, at_most=DAY_S)
    """A client that takes no message of its stream for so long is dropped, and its generation cancelled."""
    max_message_bytes: int = bounded(4 * 1024 * 1024, at_least=4096, at_most=2**31 - 1)
    """Largest request message accepted."""
    max_connections: int = bounded(8192, at_least=1, at_most=2**20)
    """Connections that are open at one time, of each of the two APIs; one more is closed, over HTTP after a 503. Fewer
    where the process may not open so many files."""
    max_connections_per_address: int | None = bounded(2048, at_least=1, at_most=2**20)
    """How many of those are one address's, or one /64's over IPv6, and over gRPC how many calls. null: any number, for
    clients that all come through one load balancer."""
    allowed_hosts: tuple[str, ...] = field(default=(), metadata=FIXED)
    """Names by which browsers may call the HTTP API, the page and the metrics pages, beside numeric addresses,
    localhost and the machine's own name: a site can point its own name at any address. Pages of these hosts may send
    requests, too. []: where `auth.keys_file` or `tls.cert` is set every name, as a site's own then gets it nowhere."""
    stream_messages_per_s: float | None = bounded(None, above=0, at_most=1e9)
    """How many messages all streams together should send: with more tokens than that, each message carries several.
    null: 250 for each core. A client that sets `stream_interval_tokens` gets what it set."""
    batch_store: str | None = None
    """SQLite file in which uploaded files, batches and responses are kept, relative to the folder of this file; routers
    of one cluster share it. null: in Redis where `state` names one, else in `~/.local/state/baton/batches-PORT.db` of
    the machine on which the routers run, PORT being `http_port`; with `http_port: 0` in memory, until the router
    ends."""
    max_file_bytes: int = bounded(100 * 1024 * 1024, at_least=1024, at_most=2**31 - 1)
    """Largest file that may be uploaded for a batch. A tenant may keep 20 times as much."""
    resume_window_s: float = bounded(30.0, above=0, at_most=DAY_S)
    """A generation that may be resumed is kept so long after its client has left, or after its end if that is later."""
    trace_endpoint: str | None = None
    """URL of an OpenTelemetry collector that takes OTLP over HTTP, http://HOST:4318; each request then becomes a trace
    (docs/traces.md). Needs the extra `otel`. null: no traces."""
    trace_sample: float = bounded(1.0, at_least=0, at_most=1)
    """Share of the calls that are traced; of a call that brings a `traceparent`, its sampled flag decides."""
    grammar_s_per_min: int | None = bounded(20, at_least=1, at_most=2**20)
    """Seconds that each router compiles constraints of one tenant in a minute; null: no limit."""
    insecure: bool = field(default=False, metadata=FIXED)
    """Allow an address other than loopback although there is no TLS."""


@dataclass(frozen=True)
class SloSection:
    """Latencies that requests should keep. `router.policy: predicted` prefers workers on which they do, and
    `mode: auto` the split in which most do."""

    ttft_ms: float = bounded(500.0, above=0, at_most=1000 * DAY_S)
    """Time to the first token."""
    tpot_ms: float = bounded(50.0, above=0, at_most=1000 * DAY_S)
    """Time per output token after the first. Beside sequences that decode, a step computes no more of prompts than
    ends within it."""

    @property
    def ttft_s(self) -> float:
        return self.ttft_ms / 1000

    @property
    def tpot_s(self) -> float:
        return self.tpot_ms / 1000


@dataclass(frozen=True)
class AutoSection:
    """When `mode: auto` believes in a gain, and acts upon it."""

    margin: float = bounded(0.02, at_least=0, at_most=10)
    """Share by which more requests must be predicted to keep the objectives."""
    headroom: float = bounded(0.25, at_least=0, at_most=10)
    """Share of load, on top of that of now, for which the split is to be enough: while it is, nothing moves."""
    confirm_s: float = bounded(5.0, at_least=0, at_most=DAY_S)
    """For so long the gain must have been there."""
    cooldown_s: float = bounded(10.0, at_least=0, at_most=DAY_S)
    """After a move, the next one waits for so long."""
    dwell_s: float = bounded(30.0, at_least=0, at_most=DAY_S)
    """A worker that was moved stays in its role for so long."""
    max_devices: int | None = bounded(None, at_least=1, at_most=131_072)
    """What both roles together may grow to: where no split of the workers there are serves what is asked for, one more
    is started as soon as Ray has room for it, which Ray's autoscaler is asked for. null: as many as the roles name."""
    release_after_s: float = bounded(300.0, at_least=0, at_most=DAY_S)
    """An added worker stops when the others have been enough for so long; Ray's autoscaler takes idle nodes away."""


@dataclass(frozen=True)
class RebalanceSection:
    """Whether Baton moves devices between the roles by itself."""

    mode: choices.RebalanceMode = "fixed"
    """fixed: the ratio is what this file says; auto: the file says how it begins, and Baton moves workers to where most
    requests keep the objectives, by what it measures of the load and of its workers. It leaves each role its
    `min_workers`; with 0 for prefill it may have every worker do both."""
    slo: SloSection = field(default_factory=SloSection)
    """What requests should keep."""
    drain_timeout_s: float = bounded(60.0, above=0, at_most=DAY_S)
    """How long a worker that is to be stopped keeps its requests; what is left then goes on elsewhere."""
    auto: AutoSection = field(default_factory=AutoSection)
    """When `mode: auto` moves."""


@dataclass(frozen=True)
class AdminSection:
    """Where operators change the running cluster: `baton apply`, `baton rebalance`, `baton drain`."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs TLS and who calls to be known (`tls.cert`, and `auth.keys_file`
    or `tls.client_ca`), or `insecure`."""
    port: int = bounded(50052, at_least=0, at_most=65_535)
    """Port of the AdminService; 0: any free one. `baton serve --port N` takes N + 1."""
    insecure: bool = False
    """Allow an address other than loopback although there is no TLS, or callers need not identify themselves."""


@dataclass(frozen=True)
class MetricsSection:
    """The pages for Prometheus; docs/metrics.md, docs/router-metrics.md and docs/controller-metrics.md name
    every metric."""

    workers: bool = True
    """Each worker serves a page of its metrics at a free port of the address it listens on; `baton status --json` says
    where."""
    router: bool = field(default=True, metadata=ROLLING)
    """The router serves a page of its metrics in the same way."""
    controller: bool = True
    """So does the controller: workers, roles, changes, and why `mode: auto` moves."""
    peak_tflops: float | None = bounded(None, above=0, at_most=1e9)
    """What one device of a worker computes at most, in TFLOP/s without sparsity, by which MFU is measured; null: from
    Baton's table of GPUs, or measured once on a CPU."""
    peak_gb_per_s: float | None = bounded(None, above=0, at_most=1e9)
    """What the memory of one device moves at most, in GB/s, by which MBU is measured; null: in the same way."""


@dataclass(frozen=True)
class ServingConfig:
    """Everything under `metadata.serving`."""

    model: ModelSection = field(metadata=ROLLING)
    """The checkpoint that is served."""
    roles: RolesSection = field(default_factory=RolesSection)
    """How the devices are split."""
    placement: PlacementSection = field(default_factory=PlacementSection)
    """On which nodes."""
    engine: EngineSection = field(default_factory=EngineSection, metadata=ROLLING)
    """How each worker runs the model."""
    transfer: TransferSection = field(default_factory=TransferSection, metadata=ROLLING)
    """How KV travels between workers."""
    router: RouterSection = field(default_factory=RouterSection, metadata=ROLLING)
    """The public APIs."""
    auth: AuthSection = field(default_factory=AuthSection)
    """Who may use it."""
    tls: TlsSection = field(default_factory=TlsSection)
    """How it is encrypted."""
    internal_tls: InternalTlsSection = field(default_factory=InternalTlsSection)
    """How the processes behind it talk."""
    rebalance: RebalanceSection = field(default_factory=RebalanceSection, metadata=RUN_TIME)
    """Whether the ratio moves by itself."""
    admin: AdminSection = field(default_factory=AdminSection)
    """Where the running cluster is changed."""
    metrics: MetricsSection = field(default_factory=MetricsSection)
    """What can be watched."""
    state: str | None = None
    """Where generations that may be resumed outlive their router. null: in a file of the machine on which the routers
    run, which survives the death of every process but no loss of power, holds prompts and outputs readable by their
    owner only, and is removed at the cluster's end; with `placement.routers: spread` in memory. memory: nowhere, they
    end with their router. redis://[USER:PASSWORD@]HOST:PORT[/DB], or rediss:// with TLS: in a Redis, which routers of
    several machines need. A store may be away or lose everything at any time: no request fails by that, but what it
    has lost cannot be resumed when its router is lost too."""
    log_dir: str | None = None
    """Folder for the logs of every process, and for those of the steps of every worker, relative to the folder of this
    file; null: only the console. A file of 64 MiB becomes NAME.1, in the place of the one before."""

    @property
    def redis(self) -> str | None:
        """URL of the Redis that `state` names; None: it names none."""
        return self.state if self.state != "memory" else None

    def role(self, name: RoleName) -> RoleSection:
        return self.roles.prefill if name == "prefill" else self.roles.decode

    def model_of(self, name: RoleName) -> ModelSection:
        """The model as the workers of a role serve it."""
        return self.role(name).model.over(self.model)

    def engine_of(self, name: RoleName) -> EngineSection:
        """How the workers of a role run it."""
        return self.role(name).engine_over(self.engine)

    def labels_of(self, name: RoleName) -> tuple[str, ...]:
        """Labels of the nodes for the workers of a role."""
        return self.role(name).placement.over(self.placement).labels
