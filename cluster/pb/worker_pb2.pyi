from cluster.pb import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class RequestKey(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("admit", "cancel", "resync_cache", "update_settings")
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESYNC_CACHE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    admit: Admit
    cancel: Cancel
    resync_cache: ResyncCache
    update_settings: UpdateSettings
    def __init__(self, admit: _Optional[_Union[Admit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., resync_cache: _Optional[_Union[ResyncCache, _Mapping]] = ..., update_settings: _Optional[_Union[UpdateSettings, _Mapping]] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("key", "role", "prompt_token_ids", "sampling", "decode_peer", "expect_handoff", "cache_salt", "bypass_prefix_cache", "known_tokens", "prompt_logprobs", "tell_each_token", "prefix_only", "session")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DECODE_PEER_FIELD_NUMBER: _ClassVar[int]
    EXPECT_HANDOFF_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TELL_EACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ONLY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    role: Role
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    decode_peer: Peer
    expect_handoff: bool
    cache_salt: bytes
    bypass_prefix_cache: bool
    known_tokens: _containers.RepeatedCompositeFieldContainer[KnownTokens]
    prompt_logprobs: int
    tell_each_token: bool
    prefix_only: bool
    session: Session
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., decode_peer: _Optional[_Union[Peer, _Mapping]] = ..., expect_handoff: bool = ..., cache_salt: _Optional[bytes] = ..., bypass_prefix_cache: bool = ..., known_tokens: _Optional[_Iterable[_Union[KnownTokens, _Mapping]]] = ..., prompt_logprobs: _Optional[int] = ..., tell_each_token: bool = ..., prefix_only: bool = ..., session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("tenant", "session_id", "ttl_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    ttl_s: float
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class KnownTokens(_message.Message):
    __slots__ = ("sequence_index", "token_ids")
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("params", "stopping", "top_logprobs", "grammar")
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    params: _generation_pb2.SamplingParams
    stopping: _generation_pb2.StoppingCriteria
    top_logprobs: int
    grammar: str
    def __init__(self, params: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_generation_pb2.StoppingCriteria, _Mapping]] = ..., top_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key", "sequence_index")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    sequence_index: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., sequence_index: _Optional[int] = ...) -> None: ...

class ResyncCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateSettings(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("info", "stats", "phase", "tokens", "failed", "prompt_logprobs", "cache", "fetched")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    stats: WorkerStats
    phase: PhaseChanged
    tokens: Tokens
    failed: Failed
    prompt_logprobs: PromptLogprobs
    cache: CacheEvents
    fetched: Fetched
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., stats: _Optional[_Union[WorkerStats, _Mapping]] = ..., phase: _Optional[_Union[PhaseChanged, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ...) -> None: ...

class RankInfo(_message.Message):
    __slots__ = ("tp_rank", "pid", "host", "device")
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    tp_rank: int
    pid: int
    host: str
    device: str
    def __init__(self, tp_rank: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "node", "ranks", "model", "weights_revision", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "transport", "dtype", "metrics_address", "crash_record", "protocol", "prefix_format", "num_tier_blocks", "pool_bytes", "host_bytes", "disk_bytes", "store_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CRASH_RECORD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FORMAT_FIELD_NUMBER: _ClassVar[int]
    NUM_TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: Role
    node: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    model: str
    weights_revision: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    transport: str
    dtype: str
    metrics_address: str
    crash_record: str
    protocol: str
    prefix_format: str
    num_tier_blocks: int
    pool_bytes: int
    host_bytes: int
    disk_bytes: int
    store_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., node: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., model: _Optional[str] = ..., weights_revision: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., transport: _Optional[str] = ..., dtype: _Optional[str] = ..., metrics_address: _Optional[str] = ..., crash_record: _Optional[str] = ..., protocol: _Optional[str] = ..., prefix_format: _Optional[str] = ..., num_tier_blocks: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., store_bytes: _Optional[int] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("blocks_free", "blocks_held", "blocks_cached", "blocks_total", "num_running_seqs", "num_waiting_requests", "num_requests", "num_steps", "num_prefill_tokens", "num_decode_tokens", "num_preemptions", "kv_bytes_sent", "kv_bytes_received", "step_cost", "num_hit_tokens", "tiers")
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    blocks_total: int
    num_running_seqs: int
    num_waiting_requests: int
    num_requests: int
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    kv_bytes_sent: int
    kv_bytes_received: int
    step_cost: StepCost
    num_hit_tokens: int
    tiers: _containers.RepeatedCompositeFieldContainer[KvTierStats]
    def __init__(self, blocks_free: _Optional[int] = ..., blocks_held: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_total: _Optional[int] = ..., num_running_seqs: _Optional[int] = ..., num_waiting_requests: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., kv_bytes_sent: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ..., step_cost: _Optional[_Union[StepCost, _Mapping]] = ..., num_hit_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[KvTierStats, _Mapping]]] = ...) -> None: ...

class KvTierStats(_message.Message):
    __slots__ = ("tier", "blocks_kept", "blocks_total", "num_hit_tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_KEPT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    blocks_kept: int
    blocks_total: int
    num_hit_tokens: int
    def __init__(self, tier: _Optional[str] = ..., blocks_kept: _Optional[int] = ..., blocks_total: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("fixed_s", "prompt_token_s", "attended_s", "sequence_s", "kv_token_s")
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    fixed_s: float
    prompt_token_s: float
    attended_s: float
    sequence_s: float
    kv_token_s: float
    def __init__(self, fixed_s: _Optional[float] = ..., prompt_token_s: _Optional[float] = ..., attended_s: _Optional[float] = ..., sequence_s: _Optional[float] = ..., kv_token_s: _Optional[float] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("sequence_number", "snapshot", "stored", "evicted")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    snapshot: bool
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    evicted: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sequence_number: _Optional[int] = ..., snapshot: bool = ..., stored: _Optional[_Iterable[bytes]] = ..., evicted: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PhaseChanged(_message.Message):
    __slots__ = ("key", "phase", "num_cached_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    phase: _generation_pb2.Heartbeat.Phase
    num_cached_tokens: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., phase: _Optional[_Union[_generation_pb2.Heartbeat.Phase, str]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("key", "sequence_index", "first_token_index", "token_ids", "logprobs", "finish_reason", "stop_token_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    sequence_index: int
    first_token_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    finish_reason: _generation_pb2.FinishReason
    stop_token_id: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., sequence_index: _Optional[int] = ..., first_token_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("key", "first_token_index", "logprobs")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    first_token_index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., first_token_index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("key", "num_tokens", "num_cached_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    num_tokens: int
    num_cached_tokens: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., num_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("key", "reason", "message", "num_kept_tokens")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Failed.Reason]
        REASON_PEER_LOST: _ClassVar[Failed.Reason]
        REASON_TRANSFER_FAILED: _ClassVar[Failed.Reason]
        REASON_CAPACITY: _ClassVar[Failed.Reason]
        REASON_INTERNAL: _ClassVar[Failed.Reason]
        REASON_INCOMPATIBLE: _ClassVar[Failed.Reason]
        REASON_INVALID: _ClassVar[Failed.Reason]
        REASON_CORRUPT: _ClassVar[Failed.Reason]
    REASON_UNSPECIFIED: Failed.Reason
    REASON_PEER_LOST: Failed.Reason
    REASON_TRANSFER_FAILED: Failed.Reason
    REASON_CAPACITY: Failed.Reason
    REASON_INTERNAL: Failed.Reason
    REASON_INCOMPATIBLE: Failed.Reason
    REASON_INVALID: Failed.Reason
    REASON_CORRUPT: Failed.Reason
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    reason: Failed.Reason
    message: str
    num_kept_tokens: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., reason: _Optional[_Union[Failed.Reason, str]] = ..., message: _Optional[str] = ..., num_kept_tokens: _Optional[int] = ...) -> None: ...
