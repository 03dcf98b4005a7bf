"""Malformed requests thrown at a running router, what may come back, and a good stream that runs beside them."""

from __future__ import annotations

import re
import threading
from collections import Counter
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.descriptor import Descriptor

from benchmarks.nonsense import Call
from cluster import rpc
from cluster.errors import BatonError, InvalidRequest, OutOfRange, QuotaExceeded
from cluster.pb import generation_pb2 as pb
from tools.client import BatonClient

CALL_S = 20.0
ALLOWED = {
    *("OK", "INVALID_ARGUMENT", "OUT_OF_RANGE", "UNIMPLEMENTED", "NOT_FOUND", "FAILED_PRECONDITION"),
    *("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"),
}
"""Neither a fault of ours nor a word about it. RESOURCE_EXHAUSTED: what gRPC says of an answer that is too large, and
the router of a tenant whose grammars have had their time."""


class Flood:
    """Sends calls one after the other and judges each answer."""

    def __init__(self, address: str, tls: Any = None) -> None:
        self._channel = rpc.create_blocking_channel(address, tls=tls)
        self.codes: Counter[str] = Counter()

    def send(self, call: Call) -> None:
        """Fails where the answer is not one that a client's mistake may have."""
        try:
            if call.method.server_streaming:
                for _ in self._channel.unary_stream(call.path)(call.data, timeout=CALL_S):
                    pass
            else:
                self._channel.unary_unary(call.path)(call.data, timeout=CALL_S)
        except grpc.RpcError as error:
            self._judge(call, error)
        else:
            self.codes["OK"] += 1

    def close(self) -> None:
        self._channel.close()

    def _judge(self, call: Call, error: Any) -> None:
        code = error.code().name
        self.codes[code] += 1
        told = rpc.from_rpc_error(error)
        shown = f"{call.path} ({call.how}): {code}: {error.details()}\n{call.data!r}"
        assert code in ALLOWED, shown
        if code == "DEADLINE_EXCEEDED":
            return
        assert type(told) is not BatonError and type(told).reason != "INTERNAL", shown
        if isinstance(told, (InvalidRequest, OutOfRange)):
            assert told.violations or "constrained any further" in told.message, f"no field is named: {shown}"
        for violation in () if isinstance(told, QuotaExceeded) else told.violations:
            assert is_field(call.method.input_type, violation.field), f"{violation.field}: {shown}"
            assert violation.description, shown


def is_field(kind: Descriptor, path: str) -> bool:
    """Whether a path such as `spec.stopping.stop[3]` leads to a field, or to a oneof, of a message."""
    if path == "request":
        return True
    at: Descriptor | None = kind
    for part in re.sub(r"\[[^\]]*\]", "", path).split("."):
        if at is None:
            return False
        if at.full_name.startswith("google.protobuf."):
            return True  # a Struct's keys are the client's own
        if part in at.oneofs_by_name:
            at = None
            continue
        field = at.fields_by_name.get(part)
        if field is None:
            return False
        at = field.message_type
    return True


class GoodStream:
    """The same request again and again, on a connection of its own; each answer must be the first one's."""

    def __init__(self, address: str, spec: pb.GenerationSpec, tls: Any = None) -> None:
        self._client = BatonClient(address, tls=tls)
        self._spec = spec
        self.expected = self._ask()
        self.num_exact = 0
        self.wrong: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="good stream")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(60)
        self._client.close()
        assert not self._thread.is_alive(), "the good stream has not ended"

    def _run(self) -> None:
        while not self._is_over.is_set() and not self.wrong:
            try:
                told = self._ask()
            except BatonError as failed:
                self.wrong.append(repr(failed))
                return
            if told == self.expected:
                self.num_exact += 1
            else:
                self.wrong.append(f"{told} instead of {self.expected}")

    def _ask(self) -> tuple[str, list[int]]:
        """The text and the tokens, each of which came once and in order."""
        text, tokens = "", list[int]()
        with self._client.stream(self._spec, timeout_s=60) as stream:
            for event in stream:
                if event.HasField("delta"):
                    assert event.delta.first_token_index == len(tokens)
                    tokens.extend(event.delta.token_ids)
                    text += event.delta.text
        return text, tokens
