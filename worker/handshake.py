"""What two workers must agree on before they hand KV over: one says what it has, the other what both will use.

Pure: hellos in, hellos out. Which transport fits is known in `kv_transfer.transports.registry`, which layouts do in
`kv_transfer.layout`. A refusal is a FAILED_PRECONDITION: asking again would not help.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import FailedPrecondition
from cluster.pb import handoff_pb2
from kv_transfer.layout import KvLayout, check_compatible, check_wire_format
from kv_transfer.transports.registry import pick


@dataclass(frozen=True)
class Handshake:
    """Of one worker, the same towards every peer."""

    worker_id: str
    incarnation: str
    layout: KvLayout
    store_address: str
    """host:port of the store at which those that send to this worker meet its ranks."""
    transports: tuple[str, ...]
    """Best first."""
    host_id: str
    wire_format: str
    chunk_tokens: int
    num_slots: int

    def hello(self, epoch: str) -> handoff_pb2.SenderHello:
        """What this worker says as the sender of a link."""
        return handoff_pb2.SenderHello(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            layout=self.layout.to_proto(),
            pair_epoch=epoch,
            transports=self.transports,
            host_id=self.host_id,
            wire_format=self.wire_format,
            chunk_tokens=self.chunk_tokens,
            num_slots=self.num_slots,
        )

    def answer(self, hello: handoff_pb2.SenderHello) -> handoff_pb2.ReceiverHello:
        """What this worker answers as the receiver. Raises LayoutMismatch and FailedPrecondition, naming both sides."""
        check_compatible(KvLayout.from_proto(hello.layout), self.layout)
        check_wire_format(hello.wire_format, self.wire_format)
        transport, reason = pick(tuple(hello.transports), self.transports, is_same_host=hello.host_id == self.host_id)
        chunk_tokens, num_slots = min(hello.chunk_tokens, self.chunk_tokens), min(hello.num_slots, self.num_slots)
        if not chunk_tokens or not num_slots:
            told = f"{hello.num_slots} slots of {hello.chunk_tokens} tokens"
            raise FailedPrecondition(f"{hello.worker_id} offers {told}; both must be at least 1")
        return handoff_pb2.ReceiverHello(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            layout=self.layout.to_proto(),
            store_address=self.store_address,
            transport=transport,
            transport_reason=reason,
            chunk_tokens=chunk_tokens,
            num_slots=num_slots,
            wire_format=self.wire_format,
        )

    def check(self, answer: handoff_pb2.ReceiverHello) -> None:
        """A sender's look at what it was answered. Raises LayoutMismatch and FailedPrecondition."""
        check_compatible(self.layout, KvLayout.from_proto(answer.layout))
        check_wire_format(self.wire_format, answer.wire_format)
        sizes_fit = 0 < answer.chunk_tokens <= self.chunk_tokens and 0 < answer.num_slots <= self.num_slots
        if answer.transport not in self.transports or not sizes_fit:
            told = f"{answer.transport!r} with {answer.num_slots} slots of {answer.chunk_tokens} tokens"
            asked = f"{', '.join(self.transports)} with {self.num_slots} slots of {self.chunk_tokens} tokens"
            raise FailedPrecondition(f"{answer.worker_id} answered {told}, where {self.worker_id} offered {asked}")
