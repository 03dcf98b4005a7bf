from cluster.pb import handoff_pb2 as _handoff_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankCommand(_message.Message):
    __slots__ = ("number", "step", "open_pair", "close_pair", "gather", "send", "receive", "stop", "start", "move_blocks")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPEN_PAIR_FIELD_NUMBER: _ClassVar[int]
    CLOSE_PAIR_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    MOVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    step: bytes
    open_pair: OpenPair
    close_pair: ClosePair
    gather: ChunkPages
    send: Send
    receive: ChunkPages
    stop: Stop
    start: Start
    move_blocks: BlockMove
    def __init__(self, number: _Optional[int] = ..., step: _Optional[bytes] = ..., open_pair: _Optional[_Union[OpenPair, _Mapping]] = ..., close_pair: _Optional[_Union[ClosePair, _Mapping]] = ..., gather: _Optional[_Union[ChunkPages, _Mapping]] = ..., send: _Optional[_Union[Send, _Mapping]] = ..., receive: _Optional[_Union[ChunkPages, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., move_blocks: _Optional[_Union[BlockMove, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("incarnation", "store_address", "protocol", "block_size", "disk_number", "shares_memory")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DISK_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SHARES_MEMORY_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    store_address: str
    protocol: str
    block_size: int
    disk_number: int
    shares_memory: bool
    def __init__(self, incarnation: _Optional[str] = ..., store_address: _Optional[str] = ..., protocol: _Optional[str] = ..., block_size: _Optional[int] = ..., disk_number: _Optional[int] = ..., shares_memory: bool = ...) -> None: ...

class OpenPair(_message.Message):
    __slots__ = ("pair_epoch", "is_sender", "remote", "agreed")
    PAIR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_SENDER_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    pair_epoch: str
    is_sender: bool
    remote: _handoff_pb2.KvLayout
    agreed: _handoff_pb2.ReceiverHello
    def __init__(self, pair_epoch: _Optional[str] = ..., is_sender: bool = ..., remote: _Optional[_Union[_handoff_pb2.KvLayout, _Mapping]] = ..., agreed: _Optional[_Union[_handoff_pb2.ReceiverHello, _Mapping]] = ...) -> None: ...

class ClosePair(_message.Message):
    __slots__ = ("pair_epoch",)
    PAIR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    pair_epoch: str
    def __init__(self, pair_epoch: _Optional[str] = ...) -> None: ...

class ChunkPages(_message.Message):
    __slots__ = ("pair_epoch", "chunk", "block_table", "after_step")
    PAIR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    pair_epoch: str
    chunk: _handoff_pb2.Chunk
    block_table: _containers.RepeatedScalarFieldContainer[int]
    after_step: int
    def __init__(self, pair_epoch: _Optional[str] = ..., chunk: _Optional[_Union[_handoff_pb2.Chunk, _Mapping]] = ..., block_table: _Optional[_Iterable[int]] = ..., after_step: _Optional[int] = ...) -> None: ...

class Send(_message.Message):
    __slots__ = ("pair_epoch", "slot")
    PAIR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    pair_epoch: str
    slot: int
    def __init__(self, pair_epoch: _Optional[str] = ..., slot: _Optional[int] = ...) -> None: ...

class BlockMove(_message.Message):
    __slots__ = ("kind", "sources", "targets", "after_step", "groups", "digests", "disk_number")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[BlockMove.Kind]
        KIND_SAVE: _ClassVar[BlockMove.Kind]
        KIND_LOAD: _ClassVar[BlockMove.Kind]
        KIND_SPILL: _ClassVar[BlockMove.Kind]
        KIND_READ: _ClassVar[BlockMove.Kind]
        KIND_FLUSH: _ClassVar[BlockMove.Kind]
        KIND_TAKE_OVER: _ClassVar[BlockMove.Kind]
        KIND_PUSH: _ClassVar[BlockMove.Kind]
        KIND_FETCH: _ClassVar[BlockMove.Kind]
        KIND_FLUSH_STORE: _ClassVar[BlockMove.Kind]
    KIND_UNSPECIFIED: BlockMove.Kind
    KIND_SAVE: BlockMove.Kind
    KIND_LOAD: BlockMove.Kind
    KIND_SPILL: BlockMove.Kind
    KIND_READ: BlockMove.Kind
    KIND_FLUSH: BlockMove.Kind
    KIND_TAKE_OVER: BlockMove.Kind
    KIND_PUSH: BlockMove.Kind
    KIND_FETCH: BlockMove.Kind
    KIND_FLUSH_STORE: BlockMove.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    DISK_NUMBER_FIELD_NUMBER: _ClassVar[int]
    kind: BlockMove.Kind
    sources: _containers.RepeatedScalarFieldContainer[int]
    targets: _containers.RepeatedScalarFieldContainer[int]
    after_step: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    disk_number: int
    def __init__(self, kind: _Optional[_Union[BlockMove.Kind, str]] = ..., sources: _Optional[_Iterable[int]] = ..., targets: _Optional[_Iterable[int]] = ..., after_step: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[bytes]] = ..., disk_number: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankReply(_message.Message):
    __slots__ = ("number", "error", "size_bytes", "hello", "error_kind")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[RankReply.Kind]
        KIND_TRANSFER: _ClassVar[RankReply.Kind]
        KIND_CORRUPT: _ClassVar[RankReply.Kind]
    KIND_UNSPECIFIED: RankReply.Kind
    KIND_TRANSFER: RankReply.Kind
    KIND_CORRUPT: RankReply.Kind
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ERROR_KIND_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: str
    size_bytes: int
    hello: RankHello
    error_kind: RankReply.Kind
    def __init__(self, number: _Optional[int] = ..., error: _Optional[str] = ..., size_bytes: _Optional[int] = ..., hello: _Optional[_Union[RankHello, _Mapping]] = ..., error_kind: _Optional[_Union[RankReply.Kind, str]] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("tp_rank", "pid", "host", "device", "token", "protocol", "takes_unread_tokens", "splits_latents", "shares_memory")
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TAKES_UNREAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPLITS_LATENTS_FIELD_NUMBER: _ClassVar[int]
    SHARES_MEMORY_FIELD_NUMBER: _ClassVar[int]
    tp_rank: int
    pid: int
    host: str
    device: str
    token: str
    protocol: str
    takes_unread_tokens: bool
    splits_latents: bool
    shares_memory: bool
    def __init__(self, tp_rank: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., token: _Optional[str] = ..., protocol: _Optional[str] = ..., takes_unread_tokens: bool = ..., splits_latents: bool = ..., shares_memory: bool = ...) -> None: ...
