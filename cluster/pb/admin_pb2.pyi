from cluster.pb import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "router_address", "workers", "router", "config_version", "protocol")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    model: str
    router_address: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    router: RouterStatus
    config_version: int
    protocol: str
    def __init__(self, model: _Optional[str] = ..., router_address: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., router: _Optional[_Union[RouterStatus, _Mapping]] = ..., config_version: _Optional[int] = ..., protocol: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("address", "state", "info", "stats", "worker_id", "role", "is_draining", "num_requests", "refusal", "is_slow")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[WorkerStatus.State]
        STATE_CONNECTING: _ClassVar[WorkerStatus.State]
        STATE_READY: _ClassVar[WorkerStatus.State]
        STATE_LOST: _ClassVar[WorkerStatus.State]
    STATE_UNSPECIFIED: WorkerStatus.State
    STATE_CONNECTING: WorkerStatus.State
    STATE_READY: WorkerStatus.State
    STATE_LOST: WorkerStatus.State
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    IS_SLOW_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: WorkerStatus.State
    info: _worker_pb2.WorkerInfo
    stats: _worker_pb2.WorkerStats
    worker_id: str
    role: _worker_pb2.Role
    is_draining: bool
    num_requests: int
    refusal: str
    is_slow: bool
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[WorkerStatus.State, str]] = ..., info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ..., stats: _Optional[_Union[_worker_pb2.WorkerStats, _Mapping]] = ..., worker_id: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., is_draining: bool = ..., num_requests: _Optional[int] = ..., refusal: _Optional[str] = ..., is_slow: bool = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("num_queued", "max_queued", "num_running", "num_finished", "num_cancelled", "num_failed", "num_rejected", "pid", "uptime_s", "metrics_address", "num_orphaned", "controller_silent_s")
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_ORPHANED_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_SILENT_S_FIELD_NUMBER: _ClassVar[int]
    num_queued: int
    max_queued: int
    num_running: int
    num_finished: int
    num_cancelled: int
    num_failed: int
    num_rejected: int
    pid: int
    uptime_s: int
    metrics_address: str
    num_orphaned: int
    controller_silent_s: float
    def __init__(self, num_queued: _Optional[int] = ..., max_queued: _Optional[int] = ..., num_running: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_cancelled: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_rejected: _Optional[int] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[int] = ..., metrics_address: _Optional[str] = ..., num_orphaned: _Optional[int] = ..., controller_silent_s: _Optional[float] = ...) -> None: ...

class GetActivityRequest(_message.Message):
    __slots__ = ("life", "after_second", "after_request")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    AFTER_SECOND_FIELD_NUMBER: _ClassVar[int]
    AFTER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    life: str
    after_second: int
    after_request: int
    def __init__(self, life: _Optional[str] = ..., after_second: _Optional[int] = ..., after_request: _Optional[int] = ...) -> None: ...

class GetActivityResponse(_message.Message):
    __slots__ = ("life", "seconds", "requests", "pairs", "rates", "window")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    life: str
    seconds: _containers.RepeatedCompositeFieldContainer[ActivitySecond]
    requests: _containers.RepeatedCompositeFieldContainer[RequestLife]
    pairs: _containers.RepeatedCompositeFieldContainer[PairActivity]
    rates: _containers.RepeatedCompositeFieldContainer[WorkerRates]
    window: ActivitySecond
    def __init__(self, life: _Optional[str] = ..., seconds: _Optional[_Iterable[_Union[ActivitySecond, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[RequestLife, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[PairActivity, _Mapping]]] = ..., rates: _Optional[_Iterable[_Union[WorkerRates, _Mapping]]] = ..., window: _Optional[_Union[ActivitySecond, _Mapping]] = ...) -> None: ...

class ActivitySecond(_message.Message):
    __slots__ = ("number", "time", "duration_s", "num_finished", "num_cancelled", "num_failed", "num_rejected", "num_prompt_tokens", "num_output_tokens", "num_queued", "num_running", "ttft", "itl")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    ITL_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: float
    duration_s: float
    num_finished: int
    num_cancelled: int
    num_failed: int
    num_rejected: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_queued: int
    num_running: int
    ttft: Quantiles
    itl: Quantiles
    def __init__(self, number: _Optional[int] = ..., time: _Optional[float] = ..., duration_s: _Optional[float] = ..., num_finished: _Optional[int] = ..., num_cancelled: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_rejected: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_running: _Optional[int] = ..., ttft: _Optional[_Union[Quantiles, _Mapping]] = ..., itl: _Optional[_Union[Quantiles, _Mapping]] = ...) -> None: ...

class Quantiles(_message.Message):
    __slots__ = ("count", "p50", "p95", "p99")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P95_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50: float
    p95: float
    p99: float
    def __init__(self, count: _Optional[int] = ..., p50: _Optional[float] = ..., p95: _Optional[float] = ..., p99: _Optional[float] = ...) -> None: ...

class RequestLife(_message.Message):
    __slots__ = ("number", "generation_id", "request_id", "tenant", "outcome", "arrival_time", "phases", "first_token_s", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "prefill_id", "decode_id", "placement", "num_moves")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_TIME_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVES_FIELD_NUMBER: _ClassVar[int]
    number: int
    generation_id: str
    request_id: str
    tenant: str
    outcome: str
    arrival_time: float
    phases: _containers.RepeatedCompositeFieldContainer[LifePhase]
    first_token_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    prefill_id: str
    decode_id: str
    placement: str
    num_moves: int
    def __init__(self, number: _Optional[int] = ..., generation_id: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., outcome: _Optional[str] = ..., arrival_time: _Optional[float] = ..., phases: _Optional[_Iterable[_Union[LifePhase, _Mapping]]] = ..., first_token_s: _Optional[float] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., prefill_id: _Optional[str] = ..., decode_id: _Optional[str] = ..., placement: _Optional[str] = ..., num_moves: _Optional[int] = ...) -> None: ...

class LifePhase(_message.Message):
    __slots__ = ("state", "at_s", "why")
    STATE_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    state: str
    at_s: float
    why: str
    def __init__(self, state: _Optional[str] = ..., at_s: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class PairActivity(_message.Message):
    __slots__ = ("prefill_id", "decode_id", "num_now", "num_handed_over", "num_prompt_tokens", "kv_transfer")
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_NOW_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    prefill_id: str
    decode_id: str
    num_now: int
    num_handed_over: int
    num_prompt_tokens: int
    kv_transfer: Quantiles
    def __init__(self, prefill_id: _Optional[str] = ..., decode_id: _Optional[str] = ..., num_now: _Optional[int] = ..., num_handed_over: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., kv_transfer: _Optional[_Union[Quantiles, _Mapping]] = ...) -> None: ...

class WorkerRates(_message.Message):
    __slots__ = ("worker_id", "prefill_tokens_per_s", "decode_tokens_per_s", "kv_sent_bytes_per_s", "kv_received_bytes_per_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_SENT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_RECEIVED_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    kv_sent_bytes_per_s: float
    kv_received_bytes_per_s: float
    def __init__(self, worker_id: _Optional[str] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., kv_sent_bytes_per_s: _Optional[float] = ..., kv_received_bytes_per_s: _Optional[float] = ...) -> None: ...

class GetCacheRequest(_message.Message):
    __slots__ = ("num_prefixes",)
    NUM_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    num_prefixes: int
    def __init__(self, num_prefixes: _Optional[int] = ...) -> None: ...

class GetCacheResponse(_message.Message):
    __slots__ = ("tenants", "prefixes")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantCache]
    prefixes: _containers.RepeatedCompositeFieldContainer[SharedPrefix]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantCache, _Mapping]]] = ..., prefixes: _Optional[_Iterable[_Union[SharedPrefix, _Mapping]]] = ...) -> None: ...

class TenantCache(_message.Message):
    __slots__ = ("tenant", "num_requests", "num_prompt_tokens", "num_cached_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., num_requests: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class SharedPrefix(_message.Message):
    __slots__ = ("hash", "tenant", "num_tokens", "num_requests", "worker_ids")
    HASH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    tenant: str
    num_tokens: int
    num_requests: int
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hash: _Optional[bytes] = ..., tenant: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_requests: _Optional[int] = ..., worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SetWorkersRequest(_message.Message):
    __slots__ = ("workers", "config_version", "needs_prefill", "run_time_settings", "admin_address")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEEDS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    RUN_TIME_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAddress]
    config_version: int
    needs_prefill: bool
    run_time_settings: str
    admin_address: str
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerAddress, _Mapping]]] = ..., config_version: _Optional[int] = ..., needs_prefill: bool = ..., run_time_settings: _Optional[str] = ..., admin_address: _Optional[str] = ...) -> None: ...

class WorkerAddress(_message.Message):
    __slots__ = ("worker_id", "address", "role", "is_draining")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    role: _worker_pb2.Role
    is_draining: bool
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., is_draining: bool = ...) -> None: ...

class SetWorkersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDemandRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDemandResponse(_message.Message):
    __slots__ = ("window_s", "demand", "prefill_cost", "decode_cost", "kv_tokens")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COST_FIELD_NUMBER: _ClassVar[int]
    DECODE_COST_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    demand: Demand
    prefill_cost: _worker_pb2.StepCost
    decode_cost: _worker_pb2.StepCost
    kv_tokens: int
    def __init__(self, window_s: _Optional[float] = ..., demand: _Optional[_Union[Demand, _Mapping]] = ..., prefill_cost: _Optional[_Union[_worker_pb2.StepCost, _Mapping]] = ..., decode_cost: _Optional[_Union[_worker_pb2.StepCost, _Mapping]] = ..., kv_tokens: _Optional[int] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("num_arrived", "num_placed", "num_prompt_tokens", "num_attended", "num_cached_tokens", "num_sequences", "num_output_tokens", "num_kv_tokens", "num_ended", "num_kept")
    NUM_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    num_arrived: float
    num_placed: float
    num_prompt_tokens: float
    num_attended: float
    num_cached_tokens: float
    num_sequences: float
    num_output_tokens: float
    num_kv_tokens: float
    num_ended: float
    num_kept: float
    def __init__(self, num_arrived: _Optional[float] = ..., num_placed: _Optional[float] = ..., num_prompt_tokens: _Optional[float] = ..., num_attended: _Optional[float] = ..., num_cached_tokens: _Optional[float] = ..., num_sequences: _Optional[float] = ..., num_output_tokens: _Optional[float] = ..., num_kv_tokens: _Optional[float] = ..., num_ended: _Optional[float] = ..., num_kept: _Optional[float] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks", "num_stored_blocks")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_stored_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_stored_blocks: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("worker_id", "tenant", "num_sessions")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    tenant: str
    num_sessions: int
    def __init__(self, worker_id: _Optional[str] = ..., tenant: _Optional[str] = ..., num_sessions: _Optional[int] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "num_total", "has_share")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HAS_SHARE_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[KeptSession]
    num_total: int
    has_share: bool
    def __init__(self, sessions: _Optional[_Iterable[_Union[KeptSession, _Mapping]]] = ..., num_total: _Optional[int] = ..., has_share: bool = ...) -> None: ...

class KeptSession(_message.Message):
    __slots__ = ("tenant", "session_id", "tiers", "remaining_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    tiers: _containers.RepeatedCompositeFieldContainer[SessionBlocks]
    remaining_s: float
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[SessionBlocks, _Mapping]]] = ..., remaining_s: _Optional[float] = ...) -> None: ...

class SessionBlocks(_message.Message):
    __slots__ = ("tier", "num_blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    num_blocks: int
    def __init__(self, tier: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("worker_id", "session_id", "tenant")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    session_id: str
    tenant: str
    def __init__(self, worker_id: _Optional[str] = ..., session_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ("num_ended",)
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    num_ended: int
    def __init__(self, num_ended: _Optional[int] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("version", "num_prefill", "num_decode", "processes", "router", "changing", "last_sequence", "config_file", "auto", "metrics_address", "events", "protocol")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    CHANGING_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FILE_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    version: int
    num_prefill: int
    num_decode: int
    processes: _containers.RepeatedCompositeFieldContainer[ProcessStatus]
    router: GetStatusResponse
    changing: Plan
    last_sequence: int
    config_file: str
    auto: Auto
    metrics_address: str
    events: _containers.RepeatedCompositeFieldContainer[ClusterEvent]
    protocol: str
    def __init__(self, version: _Optional[int] = ..., num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ..., processes: _Optional[_Iterable[_Union[ProcessStatus, _Mapping]]] = ..., router: _Optional[_Union[GetStatusResponse, _Mapping]] = ..., changing: _Optional[_Union[Plan, _Mapping]] = ..., last_sequence: _Optional[int] = ..., config_file: _Optional[str] = ..., auto: _Optional[_Union[Auto, _Mapping]] = ..., metrics_address: _Optional[str] = ..., events: _Optional[_Iterable[_Union[ClusterEvent, _Mapping]]] = ..., protocol: _Optional[str] = ...) -> None: ...

class Auto(_message.Message):
    __slots__ = ("why", "gain", "num_moves")
    WHY_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVES_FIELD_NUMBER: _ClassVar[int]
    why: str
    gain: float
    num_moves: int
    def __init__(self, why: _Optional[str] = ..., gain: _Optional[float] = ..., num_moves: _Optional[int] = ...) -> None: ...

class ProcessStatus(_message.Message):
    __slots__ = ("name", "state", "num_starts", "why", "address", "pids", "role", "is_draining", "tp_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_STARTS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    num_starts: int
    why: str
    address: str
    pids: _containers.RepeatedScalarFieldContainer[int]
    role: _worker_pb2.Role
    is_draining: bool
    tp_size: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., num_starts: _Optional[int] = ..., why: _Optional[str] = ..., address: _Optional[str] = ..., pids: _Optional[_Iterable[int]] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., is_draining: bool = ..., tp_size: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("origin", "changes", "steps", "num_done")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DONE_FIELD_NUMBER: _ClassVar[int]
    origin: str
    changes: _containers.RepeatedScalarFieldContainer[str]
    steps: _containers.RepeatedScalarFieldContainer[str]
    num_done: int
    def __init__(self, origin: _Optional[str] = ..., changes: _Optional[_Iterable[str]] = ..., steps: _Optional[_Iterable[str]] = ..., num_done: _Optional[int] = ...) -> None: ...

class SetRolesRequest(_message.Message):
    __slots__ = ("num_prefill", "num_decode", "expected_version", "dry_run")
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    num_prefill: int
    num_decode: int
    expected_version: int
    dry_run: bool
    def __init__(self, num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ..., expected_version: _Optional[int] = ..., dry_run: bool = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("yaml", "expected_version", "dry_run", "filename")
    YAML_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    yaml: str
    expected_version: int
    dry_run: bool
    filename: str
    def __init__(self, yaml: _Optional[str] = ..., expected_version: _Optional[int] = ..., dry_run: bool = ..., filename: _Optional[str] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "expected_version", "dry_run")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    expected_version: int
    dry_run: bool
    def __init__(self, worker_id: _Optional[str] = ..., expected_version: _Optional[int] = ..., dry_run: bool = ...) -> None: ...

class ChangeResponse(_message.Message):
    __slots__ = ("version", "plan", "after_sequence", "is_change")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IS_CHANGE_FIELD_NUMBER: _ClassVar[int]
    version: int
    plan: Plan
    after_sequence: int
    is_change: bool
    def __init__(self, version: _Optional[int] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., after_sequence: _Optional[int] = ..., is_change: bool = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after_sequence",)
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    def __init__(self, after_sequence: _Optional[int] = ...) -> None: ...

class ClusterEvent(_message.Message):
    __slots__ = ("sequence", "kind", "text", "version", "worker_id", "time")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ClusterEvent.Kind]
        KIND_PLANNED: _ClassVar[ClusterEvent.Kind]
        KIND_STEP: _ClassVar[ClusterEvent.Kind]
        KIND_STEP_DONE: _ClassVar[ClusterEvent.Kind]
        KIND_CHANGED: _ClassVar[ClusterEvent.Kind]
        KIND_FAILED: _ClassVar[ClusterEvent.Kind]
        KIND_REFUSED: _ClassVar[ClusterEvent.Kind]
        KIND_WORKER_READY: _ClassVar[ClusterEvent.Kind]
        KIND_WORKER_LOST: _ClassVar[ClusterEvent.Kind]
        KIND_AUTO: _ClassVar[ClusterEvent.Kind]
    KIND_UNSPECIFIED: ClusterEvent.Kind
    KIND_PLANNED: ClusterEvent.Kind
    KIND_STEP: ClusterEvent.Kind
    KIND_STEP_DONE: ClusterEvent.Kind
    KIND_CHANGED: ClusterEvent.Kind
    KIND_FAILED: ClusterEvent.Kind
    KIND_REFUSED: ClusterEvent.Kind
    KIND_WORKER_READY: ClusterEvent.Kind
    KIND_WORKER_LOST: ClusterEvent.Kind
    KIND_AUTO: ClusterEvent.Kind
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: ClusterEvent.Kind
    text: str
    version: int
    worker_id: str
    time: float
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[_Union[ClusterEvent.Kind, str]] = ..., text: _Optional[str] = ..., version: _Optional[int] = ..., worker_id: _Optional[str] = ..., time: _Optional[float] = ...) -> None: ...
