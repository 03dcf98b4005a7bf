"""From the bytes of a request to a message, or to what is wrong with the bytes.

protobuf by itself keeps the last of two exclusive fields without a word, and refuses text that is not UTF-8 without a
name. Here both become field violations. Knows the descriptors of a message; knows no service and no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from cluster.errors import FieldViolation

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_FIELDS = 20_000
"""A scan that met this many fields ends; nobody's request waits for the rest of a hostile one."""


@dataclass(frozen=True)
class Malformed:
    """Bytes that are not a request."""

    violations: tuple[FieldViolation, ...]


def decoder(kind: type[Message], max_bytes: int) -> Callable[[bytes], Message | Malformed]:
    """A request deserializer that never raises. More than `max_bytes` are refused unread."""

    descriptor: Any = kind.DESCRIPTOR

    def decode(data: bytes) -> Message | Malformed:
        if len(data) > max_bytes:
            too_large = f"a message of {len(data)} bytes is too large: at most {max_bytes} are accepted"
            return Malformed((FieldViolation("request", too_large),))
        doubled = tuple(_Scan(data, for_text=False).violations(descriptor))
        if doubled:
            return Malformed(doubled)
        try:
            return kind.FromString(data)
        except DecodeError:
            found = tuple(_Scan(data, for_text=True).violations(descriptor))
            unreadable = FieldViolation("request", f"its bytes are not a {descriptor.full_name}")
            return Malformed(found or (unreadable,))

    return decode


class _Scan:
    """One walk over the wire format, led by descriptors. Bytes it cannot follow end it: the parser judges those."""

    def __init__(self, data: bytes, *, for_text: bool) -> None:
        self._data = data
        self._for_text = for_text
        self._fields_left = _MOST_FIELDS

    def violations(self, descriptor: Descriptor) -> Iterator[FieldViolation]:
        try:
            yield from self._message(descriptor, 0, len(self._data), "")
        except IndexError:
            return

    def _message(self, descriptor: Descriptor, at: int, end: int, path: str) -> Iterator[FieldViolation]:
        """Raises IndexError where the bytes cannot be followed."""
        chosen: dict[str, str] = {}
        counts: dict[str, int] = {}
        while at < end and self._fields_left:
            self._fields_left -= 1
            tag, at = self._varint(at)
            start, at = self._value(tag & 7, at, end)
            field = descriptor.fields_by_number.get(tag >> 3)
            if field is None:
                continue
            name = f"{path}.{field.name}" if path else field.name
            if field.is_repeated:
                counts[name] = index = counts.get(name, -1) + 1
                name = f"{name}[{index}]"
            if field.containing_oneof is not None:
                other = chosen.setdefault(field.containing_oneof.name, name)
                if other != name:
                    yield FieldViolation(name, f"excludes {other}: set exactly one of them")
            yield from self._inside(field, start, at, name)

    def _inside(self, field: FieldDescriptor, start: int, end: int, name: str) -> Iterator[FieldViolation]:
        if field.type == FieldDescriptor.TYPE_STRING:
            if self._for_text and not _is_utf8(self._data[start:end]):
                yield FieldViolation(name, "is not valid UTF-8")
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            is_ours = field.message_type.file.package.startswith("baton.") and not _is_map_entry(field)
            if is_ours:
                yield from self._message(field.message_type, start, end, name)
            elif self._for_text:  # a Struct, say: the client knows it as one value
                for found in self._message(field.message_type, start, end, name):
                    yield FieldViolation(name, found.description)

    def _varint(self, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
            if shift > 63:
                raise IndexError("a varint has at most ten bytes")

    def _value(self, wire_type: int, at: int, end: int) -> tuple[int, int]:
        """(where the value's content starts, where it ends)."""
        if wire_type == _VARINT:
            start, stop = at, self._varint(at)[1]
        elif wire_type == _BYTES:
            length, start = self._varint(at)
            stop = start + length
        elif wire_type in (_FIXED64, _FIXED32):
            start, stop = at, at + (8 if wire_type == _FIXED64 else 4)
        else:
            raise IndexError(f"wire type {wire_type} is not used here")
        if stop > end:
            raise IndexError("a field ends behind its message")
        return start, stop


def _is_map_entry(field: FieldDescriptor) -> bool:
    return bool(field.message_type.GetOptions().map_entry)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
