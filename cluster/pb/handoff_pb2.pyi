from cluster.pb import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvLayout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "dtype", "tp_size", "block_size", "model", "layer_windows", "num_planes", "state_layers", "num_state_heads", "state_part_sizes", "share_size")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYER_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANES_FIELD_NUMBER: _ClassVar[int]
    STATE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_HEADS_FIELD_NUMBER: _ClassVar[int]
    STATE_PART_SIZES_FIELD_NUMBER: _ClassVar[int]
    SHARE_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    tp_size: int
    block_size: int
    model: str
    layer_windows: _containers.RepeatedScalarFieldContainer[int]
    num_planes: int
    state_layers: _containers.RepeatedScalarFieldContainer[int]
    num_state_heads: int
    state_part_sizes: _containers.RepeatedScalarFieldContainer[int]
    share_size: int
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., tp_size: _Optional[int] = ..., block_size: _Optional[int] = ..., model: _Optional[str] = ..., layer_windows: _Optional[_Iterable[int]] = ..., num_planes: _Optional[int] = ..., state_layers: _Optional[_Iterable[int]] = ..., num_state_heads: _Optional[int] = ..., state_part_sizes: _Optional[_Iterable[int]] = ..., share_size: _Optional[int] = ...) -> None: ...

class SenderHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "layout", "pair_epoch", "transports", "host_id", "wire_format", "chunk_tokens", "num_slots", "protocol")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PAIR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    layout: KvLayout
    pair_epoch: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    wire_format: str
    chunk_tokens: int
    num_slots: int
    protocol: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., pair_epoch: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ..., wire_format: _Optional[str] = ..., chunk_tokens: _Optional[int] = ..., num_slots: _Optional[int] = ..., protocol: _Optional[str] = ...) -> None: ...

class ReceiverHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "layout", "store_address", "transport", "transport_reason", "chunk_tokens", "num_slots", "wire_format", "protocol")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_REASON_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    layout: KvLayout
    store_address: str
    transport: str
    transport_reason: str
    chunk_tokens: int
    num_slots: int
    wire_format: str
    protocol: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., store_address: _Optional[str] = ..., transport: _Optional[str] = ..., transport_reason: _Optional[str] = ..., chunk_tokens: _Optional[int] = ..., num_slots: _Optional[int] = ..., wire_format: _Optional[str] = ..., protocol: _Optional[str] = ...) -> None: ...

class SenderMessage(_message.Message):
    __slots__ = ("number", "hello", "open", "offer", "commit", "abort", "alive")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    number: int
    hello: SenderHello
    open: Open
    offer: Chunk
    commit: Commit
    abort: Abort
    alive: Alive
    def __init__(self, number: _Optional[int] = ..., hello: _Optional[_Union[SenderHello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., offer: _Optional[_Union[Chunk, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class ReceiverMessage(_message.Message):
    __slots__ = ("number", "hello", "reserved", "grant", "committed", "abort", "alive")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    number: int
    hello: ReceiverHello
    reserved: Reserved
    grant: Grant
    committed: Committed
    abort: Abort
    alive: Alive
    def __init__(self, number: _Optional[int] = ..., hello: _Optional[_Union[ReceiverHello, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Open(_message.Message):
    __slots__ = ("key", "num_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    num_tokens: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("key", "num_cached_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    num_cached_tokens: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("key", "index", "slot", "token_start", "token_end", "layer_start", "layer_end", "group")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    index: int
    slot: int
    token_start: int
    token_end: int
    layer_start: int
    layer_end: int
    group: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ..., index: _Optional[int] = ..., slot: _Optional[int] = ..., token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("key", "chunk_index")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    chunk_index: int
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ..., chunk_index: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("sequence_index", "token_id", "is_finished")
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    sequence_index: int
    token_id: int
    is_finished: bool
    def __init__(self, sequence_index: _Optional[int] = ..., token_id: _Optional[int] = ..., is_finished: bool = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("key", "num_chunks", "first_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    num_chunks: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ..., num_chunks: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: _worker_pb2.RequestKey
    reason: str
    def __init__(self, key: _Optional[_Union[_worker_pb2.RequestKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...
