from cluster.pb import generation_pb2 as _generation_pb2
from cluster.pb import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalEntry(_message.Message):
    __slots__ = ("origin", "tokens", "prompt_logprobs", "num_cached_tokens", "first_token_after_s", "num_moves", "num_crashes", "weights_revision")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVES_FIELD_NUMBER: _ClassVar[int]
    NUM_CRASHES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    origin: JournalOrigin
    tokens: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Tokens]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    num_cached_tokens: int
    first_token_after_s: float
    num_moves: int
    num_crashes: int
    weights_revision: str
    def __init__(self, origin: _Optional[_Union[JournalOrigin, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[_worker_pb2.Tokens, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., first_token_after_s: _Optional[float] = ..., num_moves: _Optional[int] = ..., num_crashes: _Optional[int] = ..., weights_revision: _Optional[str] = ...) -> None: ...

class JournalOrigin(_message.Message):
    __slots__ = ("spec", "sampling", "tenant", "arrival_time_s", "spec_digest", "traceparent", "protocol", "prompt_token_ids")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    spec: _generation_pb2.GenerationSpec
    sampling: _worker_pb2.Sampling
    tenant: str
    arrival_time_s: float
    spec_digest: bytes
    traceparent: str
    protocol: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, spec: _Optional[_Union[_generation_pb2.GenerationSpec, _Mapping]] = ..., sampling: _Optional[_Union[_worker_pb2.Sampling, _Mapping]] = ..., tenant: _Optional[str] = ..., arrival_time_s: _Optional[float] = ..., spec_digest: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., protocol: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
