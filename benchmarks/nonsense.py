"""Requests that nobody means: messages with nonsense in every field, and bytes that are hardly messages any more.

Led by the descriptors of the API, so that a field that is added is covered at once. All chance comes from the `Random`
that is passed in: a seed repeats a request, and so does whoever records the draws. Knows no router.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from cluster.pb import generation_pb2

METHODS: tuple[MethodDescriptor, ...] = tuple(generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods)
"""Every public method."""
GENERATING = tuple(method for method in METHODS if "spec" in method.input_type.fields_by_name)

_TEXTS = (
    *("", "x", "\0", " ", "\n\r\t", "a\u0301", "\u202eltr", "\ufeff", "\U0001f525", "\uffff", "<|end|>", "{{ 7*7 }}"),
    *("../../etc/passwd", "%s%n", "gen-0", "é" * 300, "x" * 5000, '{"type": "object"}', "(a+)+$", "[", "\\"),
)
_NUMBERS: dict[int, tuple[float, ...]] = {
    FieldDescriptor.TYPE_INT32: (0, 1, -1, 2, 100, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_INT64: (0, 1, -1, 10**9, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_UINT32: (0, 1, 2, 16, 17, 299, 300, 2**16, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (0, 1, 2, 99, -1, 2**31 - 1),
    FieldDescriptor.TYPE_DOUBLE: (0.0, -0.0, 1.0, -1.5, 1e308, 5e-324, float("inf"), float("-inf"), float("nan")),
    FieldDescriptor.TYPE_FLOAT: (0.0, -0.0, 0.5, 1.0, -1.0, 3e38, 1e-45, float("inf"), float("-inf"), float("nan")),
}
_LENGTHS = (0, 1, 1, 2, 3, 17, 65, 1100)
_DEEPEST = 6
_RANDOM_BYTES = 400


@dataclass(frozen=True)
class Call:
    """A request to one method, as it goes over the wire."""

    method: MethodDescriptor
    data: bytes
    how: str
    """What was done to it, for whoever reads of a failure."""

    @property
    def path(self) -> str:
        return f"/{self.method.containing_service.full_name}/{self.method.name}"


def make_call(random: Random) -> Call:
    """Half of them are good messages but for one to four fields; most go to the methods that generate."""
    method = random.choice(METHODS + GENERATING * 6)
    how = random.choice(("message", "some fields", "some fields", "some fields", "damaged", "bytes", "tags"))
    match how:
        case "message":
            data = make_message(random, method.input_type).SerializeToString()
        case "some fields":
            message = _good(method)
            for _ in range(random.choice((1, 1, 2, 4))):
                spoil(random, message)
            data = message.SerializeToString()
        case "damaged":
            data = damage(random, spoil(random, _good(method)).SerializeToString())
        case "bytes":
            data = _noise(random, random.randrange(_RANDOM_BYTES))
        case _:
            data = b"".join(_raw_field(random) for _ in range(random.randrange(40)))
    return Call(method, data, how)


def make_bomb(random: Random) -> Call:
    """A good request but for a constraint that is made to take a compiler's stack, memory or time."""
    method = random.choice(GENERATING)
    message: Any = _good(method)
    size = random.choice((2, 30, 120, 400, 900, 1100, 4000))
    match random.choice(("rules", "references", "brackets", "regex", "repeats", "wide")):
        case "rules":
            rules = "".join(f"r{i}: {random.choice(('', 'r0? ', '(', '/a*/ '))}r{i + 1}\n" for i in range(size))
            message.spec.sampling.grammar_ebnf = f'start: r0\n{rules}r{size}: "x"\n'
        case "references":
            definitions: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(size)}
            schema = {"$ref": "#/$defs/a0", "$defs": definitions | {f"a{size}": {"type": "null"}}}
            message.spec.sampling.json_schema = json.dumps(schema)
        case "brackets":
            opening, closing = random.choice((('{"items":', "}"), ('{"anyOf":[', "]}"), ('{"properties":{"a":', "}}")))
            message.spec.sampling.json_schema = opening * size + "{}" + closing * size
        case "regex":
            unit = random.choice(("a?", "(", "(a|b)*", "[a-z]{1,9}", "(.*a)", "\\w+", ".{0,500}", "a{1,500}"))
            message.spec.sampling.regex = unit * size + random.choice(("", ")" * size, "b"))
        case "repeats":
            message.spec.sampling.grammar_ebnf = "root ::= " + "a? " * size + '\na ::= ("x" | a){1,99}'
        case _:
            properties = {f"p{i}": {"type": "string", "pattern": f"a{{{i}}}.*"} for i in range(size)}
            message.spec.sampling.json_schema = json.dumps({"properties": properties, "minProperties": size})
    return Call(method, message.SerializeToString(), "bomb")


def spoil(random: Random, message: Message) -> Message:
    """Puts nonsense into one field, however deep, of a message that is good otherwise."""
    inner: Message = message
    for depth in range(_DEEPEST):
        field = random.choice(inner.DESCRIPTOR.fields)
        if field.message_type is None or field.is_repeated or not field.message_type.fields or random.random() < 0.1:
            _fill(random, inner, field, depth)
            break
        inner = getattr(inner, field.name)
    return message


def make_message(random: Random, kind: Descriptor, depth: int = 0) -> Message:
    """A message of this kind; each field is absent, or holds what nobody means."""
    message = message_factory.GetMessageClass(kind)()
    share = random.choice((0.1, 0.3, 0.7)) if depth else 1.0
    for field in kind.fields:
        if depth < _DEEPEST and random.random() < share:
            _fill(random, message, field, depth)
    return message


def damage(random: Random, data: bytes) -> bytes:
    """Bytes changed, taken out, put in, doubled or cut off, one to four times."""
    out = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(out) + 1)
        match random.choice(("change", "take", "put", "double", "cut")):
            case "change" if at < len(out):
                out[at] = random.randrange(256)
            case "take":
                del out[at : at + random.randint(1, 8)]
            case "put":
                out[at:at] = _noise(random, random.randint(1, 8))
            case "double":
                out[at:at] = out[at : at + 200]
            case _:
                del out[at:]
    return bytes(out)


def _good(method: MethodDescriptor) -> Message:
    """A request that is served, where the method takes a spec."""
    message = message_factory.GetMessageClass(method.input_type)()
    if "spec" in method.input_type.fields_by_name:
        spec: Any = getattr(message, "spec")  # noqa: B009 - the class is known by its descriptor only
        spec.text = "hello"
        spec.stopping.max_output_tokens = 2
    return message


def _raw_field(random: Random) -> bytes:
    """A tag of any number and wire type, groups included, and what may follow it."""
    tag = random.choice((1, 2, 3, 4, 5, 15, 99, 2**28)) << 3 | random.randrange(8)
    out = bytearray()
    while tag > 0x7F:
        out.append(tag & 0x7F | 0x80)
        tag >>= 7
    return bytes(out) + bytes([tag]) + _noise(random, random.choice((0, 1, 2, 8, 12)))


def _fill(random: Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _fill_map(random, message, field, depth)
        return
    if field.is_repeated:
        values = getattr(message, field.name)
        most = 3 if field.message_type is not None else len(_LENGTHS)
        for _ in range(_LENGTHS[random.randrange(most)]):
            if field.message_type is not None:
                values.append(make_message(random, field.message_type, depth + 1))
            else:
                values.append(_scalar(random, field))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(make_message(random, field.message_type, depth + 1))
    else:
        setattr(message, field.name, _scalar(random, field))


def _fill_map(random: Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    entries: Any = getattr(message, field.name)
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(_LENGTHS[random.randrange(len(_LENGTHS))]):
        if value.message_type is not None:
            entries[_scalar(random, key)].CopyFrom(make_message(random, value.message_type, depth + 1))
        else:
            entries[_scalar(random, key)] = _scalar(random, value)


def _scalar(random: Random, field: FieldDescriptor) -> Any:
    kind = field.type
    if kind == FieldDescriptor.TYPE_BOOL:
        return random.random() < 0.5
    if kind == FieldDescriptor.TYPE_STRING:
        return random.choice(_TEXTS)
    if kind == FieldDescriptor.TYPE_BYTES:
        return _noise(random, random.randrange(20))
    known = _NUMBERS[kind]
    if random.random() < 0.8:
        return random.choice(known)
    if kind == FieldDescriptor.TYPE_DOUBLE:
        return struct.unpack("<d", _noise(random, 8))[0]
    if kind == FieldDescriptor.TYPE_FLOAT:
        return struct.unpack("<f", _noise(random, 4))[0]
    return random.randint(int(min(known)), int(max(known)))


def _noise(random: Random, size: int) -> bytes:
    return bytes(random.randrange(256) for _ in range(size))
