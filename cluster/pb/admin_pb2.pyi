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
    __slots__ = ("model", "router_address", "workers", "router")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    model: str
    router_address: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    router: RouterStatus
    def __init__(self, model: _Optional[str] = ..., router_address: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., router: _Optional[_Union[RouterStatus, _Mapping]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("address", "state", "info", "stats", "worker_id")
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
    address: str
    state: WorkerStatus.State
    info: _worker_pb2.WorkerInfo
    stats: _worker_pb2.WorkerStats
    worker_id: str
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[WorkerStatus.State, str]] = ..., info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ..., stats: _Optional[_Union[_worker_pb2.WorkerStats, _Mapping]] = ..., worker_id: _Optional[str] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("num_queued", "max_queued", "num_running", "num_finished", "num_cancelled", "num_failed", "num_rejected", "pid", "uptime_s", "metrics_address")
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
    def __init__(self, num_queued: _Optional[int] = ..., max_queued: _Optional[int] = ..., num_running: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_cancelled: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_rejected: _Optional[int] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class SetWorkersRequest(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAddress]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerAddress, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("window_s", "demand", "step_cost", "kv_tokens")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    demand: Demand
    step_cost: _worker_pb2.StepCost
    kv_tokens: int
    def __init__(self, window_s: _Optional[float] = ..., demand: _Optional[_Union[Demand, _Mapping]] = ..., step_cost: _Optional[_Union[_worker_pb2.StepCost, _Mapping]] = ..., kv_tokens: _Optional[int] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("num_arrived", "num_placed", "num_prompt_tokens", "num_attended", "num_cached_tokens", "num_sequences", "num_outputs", "num_output_tokens", "num_kv_tokens")
    NUM_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_arrived: float
    num_placed: float
    num_prompt_tokens: float
    num_attended: float
    num_cached_tokens: float
    num_sequences: float
    num_outputs: float
    num_output_tokens: float
    num_kv_tokens: float
    def __init__(self, num_arrived: _Optional[float] = ..., num_placed: _Optional[float] = ..., num_prompt_tokens: _Optional[float] = ..., num_attended: _Optional[float] = ..., num_cached_tokens: _Optional[float] = ..., num_sequences: _Optional[float] = ..., num_outputs: _Optional[float] = ..., num_output_tokens: _Optional[float] = ..., num_kv_tokens: _Optional[float] = ...) -> None: ...
