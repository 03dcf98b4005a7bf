"""Identity of one try at a request, on every wire and in every table; what an earlier try sends late matches none."""

from __future__ import annotations

from typing import NamedTuple

from cluster.pb import worker_pb2


class RequestKey(NamedTuple):
    """`request_id` is the router's generation id, `attempt` counts from 1."""

    request_id: str
    attempt: int

    @classmethod
    def of(cls, message: worker_pb2.RequestKey) -> RequestKey:
        return cls(message.request_id, message.attempt)

    def to_proto(self) -> worker_pb2.RequestKey:
        return worker_pb2.RequestKey(request_id=self.request_id, attempt=self.attempt)
