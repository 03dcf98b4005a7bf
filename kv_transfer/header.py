"""The 64 bytes at the head of a slot: which chunk the payload is, how it is written, and a digest of both.

`seal` writes them, `check` compares them with what is expected. Nothing that arrives in a header is used for anything
but to be compared, except which kind of digest the sender chose. The header itself is always under the digest, the
payload when the kind says so. It knows nothing of pages and of how values become bytes.

Digests find every accident on the way; they are no defence against a forger. XXH3-64 reads host memory in place, at
memory speed. WORDS runs where the payload lies, on any device that torch knows: every 8-byte word is mixed with its
position and the results are summed. Both start from a seed that stands for the header, so that a payload under another
header has another digest.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
import xxhash
from torch import Tensor

from cluster.errors import Corrupted
from kv_transfer.actions import Range
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
    "wire dtype": "B",
    "group": "H5x",
    "digest": "Q",
}
_STRUCT = struct.Struct("<" + "".join(_FIELDS.values()))

DIGEST_MODES = ("on", "sampled", "off")
SAMPLE_EVERY = 16

_WORDS_AT_ONCE = 1 << 20
# Odd, with bits all over: multiplying by them loses nothing and spreads each bit upwards. As signed 64 bit.
_POSITION = 0x9E3779B97F4A7C15 - (1 << 64)
_SPREAD = 0xD6E8FEB86659FD93 - (1 << 64)
_LOW_HALF = (1 << 32) - 1


class DigestKind(IntEnum):
    """The digest of the payload; the header itself is always covered."""

    NONE = 0
    XXH3 = 1
    WORDS = 2


class DigestPolicy:
    """Decides for one sender, slot by slot, whether a payload gets a digest."""

    def __init__(self, mode: str) -> None:
        """`on`: every slot; `sampled`: the first and every 16th after it; `off`. Raises ValueError."""
        if mode not in DIGEST_MODES:
            raise ValueError(f"digest: {mode!r} is none of {', '.join(DIGEST_MODES)}")
        self._mode = mode
        self._count = itertools.count()

    def next_kind(self, device: torch.device) -> DigestKind:
        """The kind for the next slot, which lies on `device`."""
        if self._mode == "off" or (self._mode == "sampled" and next(self._count) % SAMPLE_EVERY):
            return DigestKind.NONE
        return DigestKind.XXH3 if device.type == "cpu" else DigestKind.WORDS


@dataclass(frozen=True)
class Header:
    """The facts that both sides know of a slot before it is sent."""

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
        shape = (self.payload_bytes, self.num_heads, self.head_dim, _WIRE_DTYPES.index(self.wire_dtype), what.group)
        return (MAGIC, VERSION, WIRE_FORMATS.index(self.wire_format), kind, self.tag, *place, *shape, digest)


def seal(slot: Tensor, header: Header, kind: DigestKind) -> None:
    """Writes header and digest over the payload that lies in `slot`, uint8 of the exact size."""
    payload = slot[HEADER_BYTES:]
    written = bytearray(_STRUCT.pack(*header.fields(kind, 0)))
    seed = hash_bytes(bytes(written[:-_DIGEST_BYTES]))
    digest = host_digest(payload, seed) if kind is DigestKind.XXH3 else seed
    struct.pack_into("<Q", written, HEADER_BYTES - _DIGEST_BYTES, digest)
    head = torch.frombuffer(written, dtype=torch.uint8)
    # From page-locked memory, of which torch knows when it has been read: nobody waits for the GPU.
    slot[:HEADER_BYTES].copy_(head.pin_memory() if slot.is_cuda else head, non_blocking=True)
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


def hash_bytes(data: bytes) -> int:
    """XXH3-64 of a few bytes: the seed that stands for a header."""
    return xxhash.xxh3_64_intdigest(data)


def host_digest(payload: Tensor, seed: int) -> int:
    """XXH3-64 of a contiguous uint8 tensor in host memory, in place. Releases the GIL while it reads."""
    return xxhash.xxh3_64_intdigest(payload.numpy().data, seed)


def words_digest(payload: Tensor, seed: int) -> Tensor:
    """The WORDS digest of a contiguous uint8 tensor, as an int64 scalar on its device; launched, not waited for.

    The payload's size and its address must be multiples of 8. Temporary memory: 24 MiB at most.
    """
    words = payload.view(torch.int64)
    total = torch.full((), _signed(seed), dtype=torch.int64, device=payload.device)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        piece = words[start : start + _WORDS_AT_ONCE]
        # Each step maps 64-bit words one to one, so a changed word always changes its term; the position is inside,
        # so a word at another place is another term.
        mixed = torch.arange(start + 1, start + 1 + len(piece), dtype=torch.int64, device=payload.device)
        mixed.mul_(_POSITION).bitwise_xor_(piece).mul_(_SPREAD)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW_HALF)).mul_(_SPREAD)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW_HALF))
        total.add_(mixed.sum())
    return total


def _signed(digest: int) -> int:
    """A 64-bit digest as torch's int64 holds it."""
    return digest - (1 << 64) if digest >> 63 else digest


def to_unsigned(digest: int) -> int:
    return digest & ((1 << 64) - 1)
