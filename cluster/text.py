"""Writes values for programs and people: messages as JSON documents, names of roles and states, counts, sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from cluster.pb import admin_pb2, worker_pb2

_UNITS = ("kB", "MB", "GB", "TB")
ROLE_NUMBERS: Mapping[str, worker_pb2.Role] = {
    "prefill": worker_pb2.ROLE_PREFILL,
    "decode": worker_pb2.ROLE_DECODE,
}
"""Roles by their names in the configuration."""


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


def count_of(number: int, what: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def format_bytes(count: int) -> str:
    """`17.2 MB`: three or four digits, in powers of 1000; below 1000 `512 B`."""
    if abs(count) < 1000:
        return f"{count} B"
    size = float(count)
    for unit in _UNITS:
        size /= 1000
        if abs(size) < 999.95 or unit == _UNITS[-1]:
            break
    return f"{size:.1f} {unit}"


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_document(value)
    return value if field.enum_type is None else _short_name(field.enum_type, value)


def _short_name(enum: EnumDescriptor, number: int) -> str:
    """`ready` of STATE_READY; empty for the value 0, which is always ..._UNSPECIFIED."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return enum.values_by_number[number].name.removeprefix(prefix).lower() if number else ""
