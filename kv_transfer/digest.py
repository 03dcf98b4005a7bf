"""Digests of a slot's payload: they find every accident on the way, they are no defence against a forger.

Two kinds. XXH3-64 reads host memory in place, at memory speed. WORDS runs where the payload lies, on any device that
torch knows: every 8-byte word is mixed with its position and the results are summed. Both start from a seed that stands
for the header, so that a payload under another header has another digest.

Which slots get one is the sender's choice (`DigestPolicy`) and is said in the header.
"""

from __future__ import annotations

import itertools
from enum import IntEnum

import torch
import xxhash
from torch import Tensor

POLICIES = ("on", "sampled", "off")
SAMPLE_EVERY = 16

_WORDS_AT_ONCE = 1 << 20
# Odd, with bits all over: multiplying by them loses nothing and spreads each bit upwards. As signed 64 bit.
_POSITION = 0x9E3779B97F4A7C15 - (1 << 64)
_SPREAD = 0xD6E8FEB86659FD93 - (1 << 64)
_LOW_HALF = (1 << 32) - 1


class DigestKind(IntEnum):
    """What a header's digest covers beside the header itself."""

    NONE = 0
    XXH3 = 1
    WORDS = 2


class DigestPolicy:
    """Decides for one sender, slot by slot, whether a payload gets a digest."""

    def __init__(self, policy: str) -> None:
        """`on`: every slot; `sampled`: the first and every 16th after it; `off`. Raises ValueError."""
        if policy not in POLICIES:
            raise ValueError(f"digest: {policy!r} is none of {', '.join(POLICIES)}")
        self._policy = policy
        self._count = itertools.count()

    def next_kind(self, device: torch.device) -> DigestKind:
        """The kind for the next slot, which lies on `device`."""
        if self._policy == "off" or (self._policy == "sampled" and next(self._count) % SAMPLE_EVERY):
            return DigestKind.NONE
        return DigestKind.XXH3 if device.type == "cpu" else DigestKind.WORDS


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
