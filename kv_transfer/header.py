"""The 64 bytes at the head of a slot: which chunk the payload is, how it is written, and a digest of both.

`seal` writes them, `check` compares them with what is expected. Nothing that arrives in a header is used for anything
but to be compared, except which kind of digest the sender chose. The header itself is always under the digest, the
payload when the kind says so. It knows nothing of pages and of how values become bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.actions import Range
from kv_transfer.digest import DigestKind, hash_bytes, host_digest, to_unsigned, words_digest
from kv_transfer.failures import Corrupted
from kv_transfer.layout import WIRE_FORMATS

HEADER_BYTES = 64
MAGIC = b"BtKV"
VERSION = 1

_WIRE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "uint8")
_DIGEST_BYTES = 8
# Little-endian, in this order.
_FIELDS = {
    "magic": "4s",
    "version": "H",
    "wire format": "B",
    "digest kind": "B",
    "tag": "Q",
    "token start": "I",
    "token end": "I",
    "layer start": "I",
    "layer end": "I",
    "payload bytes": "Q",
    "heads": "I",
    "head size": "I",
    "wire dtype": "B7x",
    "digest": "Q",
}
_STRUCT = struct.Struct("<" + "".join(_FIELDS.values()))


@dataclass(frozen=True)
class Header:
    """What both sides know of a slot before it is sent."""

    tag: int
    """Below 2^64; names the chunk."""
    range: Range
    wire_format: str
    wire_dtype: str
    num_heads: int
    head_dim: int
    payload_bytes: int
    """All that follows the header."""

    def __post_init__(self) -> None:
        if not 0 <= self.tag < 1 << 64:
            raise ValueError(f"tag {self.tag} does not fit 64 bits")

    def fields(self, kind: int, digest: int) -> tuple[bytes | int, ...]:
        what = self.range
        place = (what.token_start, what.token_end, what.layer_start, what.layer_end)
        shape = (self.payload_bytes, self.num_heads, self.head_dim, _WIRE_DTYPES.index(self.wire_dtype))
        return (MAGIC, VERSION, WIRE_FORMATS.index(self.wire_format), kind, self.tag, *place, *shape, digest)


def seal(slot: Tensor, header: Header, kind: DigestKind) -> None:
    """Writes header and digest over the payload that lies in `slot`, uint8 of the exact size."""
    payload = slot[HEADER_BYTES:]
    written = bytearray(_STRUCT.pack(*header.fields(kind, 0)))
    seed = hash_bytes(bytes(written[:-_DIGEST_BYTES]))
    digest = host_digest(payload, seed) if kind is DigestKind.XXH3 else seed
    struct.pack_into("<Q", written, HEADER_BYTES - _DIGEST_BYTES, digest)
    slot[:HEADER_BYTES].copy_(torch.frombuffer(written, dtype=torch.uint8))
    if kind is DigestKind.WORDS:
        # Stays on the device: nobody waits for it here.
        slot[HEADER_BYTES - _DIGEST_BYTES : HEADER_BYTES].view(torch.int64).copy_(words_digest(payload, seed))


def check(slot: Tensor, header: Header) -> None:
    """Raises Corrupted, saying what differs, unless `slot` holds the chunk that `header` names as it was sent."""
    arrived = slot[:HEADER_BYTES].cpu().numpy().tobytes()
    found = dict(zip(_FIELDS, _STRUCT.unpack(arrived), strict=True))
    kind, digest = found["digest kind"], found["digest"]
    expected = dict(zip(_FIELDS, header.fields(kind, digest), strict=True))
    differing = [
        f"{name} is {_shown(found[name])}, not {_shown(expected[name])}"
        for name in _FIELDS
        if found[name] != expected[name]
    ]
    if differing:
        raise Corrupted(f"a slot does not hold the chunk that was expected: {'; '.join(differing)}")
    if kind not in tuple(DigestKind):
        raise Corrupted(f"a slot does not hold the chunk that was expected: digest kind is {kind}, which is none")
    computed = _computed(slot[HEADER_BYTES:], DigestKind(kind), hash_bytes(arrived[:-_DIGEST_BYTES]))
    if computed != digest:
        raise Corrupted(
            f"the slot with tag {_shown(header.tag)} is not as it was sent: its digest "
            f"({DigestKind(kind).name}) is {computed:#018x}, but was {digest:#018x}"
        )


def _computed(payload: Tensor, kind: DigestKind, seed: int) -> int:
    match kind:
        case DigestKind.NONE:
            return seed
        case DigestKind.XXH3:
            return host_digest(payload.cpu(), seed)
        case DigestKind.WORDS:
            return to_unsigned(int(words_digest(payload, seed)))


def _shown(value: bytes | int) -> str:
    return repr(value) if isinstance(value, bytes) else f"{value:#x}" if value >> 32 else str(value)
