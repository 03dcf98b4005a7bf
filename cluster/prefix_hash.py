"""The name of a block of prompt tokens in a prefix cache: a keyed hash of the block and of all that comes before it.

Equal hashes mean equal tokens from the first on, under one tenant's salt. Workers name what they keep by it, and the
router what a prompt would find there; nobody who lacks the salt can tell which prompt a hash stands for.
Pure: knows no pool, no worker and no request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

_TOKEN = array("i")
"""How a token's id is written."""
_BLOCKS_AT_ONCE = 16
"""Written together: fewer would cost more each, more would be written for nothing where only the first is asked for."""
HASH_BYTES = 16
"""128 bits: too many for two different prefixes to meet, by accident or by search."""


def key_of(salt: bytes) -> bytes:
    """A hash key of fixed length, whatever the salt's."""
    return blake2b(salt, digest_size=32).digest()


def extend(parent: bytes, token_ids: Sequence[int], key: bytes) -> bytes:
    """The hash of the block of these tokens; `parent` is that of the block before, empty for the first."""
    return blake2b(parent + array(_TOKEN.typecode, token_ids).tobytes(), key=key, digest_size=HASH_BYTES).digest()


def prefix_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> Iterator[bytes]:
    """Hashes of the full blocks that a prompt may find in a prefix cache, first to last, computed as they are taken.

    The last token is never covered: computing it is what gives the logits of the next one.
    """
    block_bytes, stride = block_size * _TOKEN.itemsize, block_size * _BLOCKS_AT_ONCE
    num_tokens = max(0, len(token_ids) - 1) // block_size * block_size
    keyed, parent = blake2b(key=key_of(salt), digest_size=HASH_BYTES), b""
    for first in range(0, num_tokens, stride):
        tokens = array(_TOKEN.typecode, token_ids[first : min(first + stride, num_tokens)]).tobytes()
        for begin in range(0, len(tokens), block_bytes):
            hasher = keyed.copy()
            hasher.update(parent + tokens[begin : begin + block_bytes])
            parent = hasher.digest()
            yield parent
