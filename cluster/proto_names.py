"""Messages as documents: the one conversion to what JSON holds, and the names of roles and states for people."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from cluster.pb import admin_pb2, worker_pb2


def to_document(message: Message) -> dict[str, Any]:
    """Converts a message to a dictionary by the names of its fields: enums by their short names, and None for what is
    unset. protobuf's MessageToDict would turn 64-bit numbers into strings, on which JavaScript cannot compute."""
    document: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            document[field.name] = [_plain(field, each) for each in value]
        elif field.has_presence and not message.HasField(field.name):
            document[field.name] = None
        else:
            document[field.name] = _plain(field, value)
    return document


def role_name(role: worker_pb2.Role) -> str:
    """`prefill` or `decode`; empty: it is not known."""
    return _short_name(worker_pb2.Role.DESCRIPTOR, role)


def state_name(worker: admin_pb2.WorkerStatus) -> str:
    """Such as `ready`."""
    return _short_name(admin_pb2.WorkerStatus.State.DESCRIPTOR, worker.state)


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_document(value)
    return value if field.enum_type is None else _short_name(field.enum_type, value)


def _short_name(enum: EnumDescriptor, number: int) -> str:
    """`ready` of STATE_READY; empty for the value 0, which is always ..._UNSPECIFIED."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return enum.values_by_number[number].name.removeprefix(prefix).lower() if number else ""
