"""The name of a block of prompt tokens in a prefix cache: a keyed hash of the block and of all that comes before it.

Equal hashes mean equal tokens from the first on, under one tenant's salt. Workers name what they keep by it, and the
router what a prompt would find there; nobody who lacks the salt can tell which prompt a hash stands for.
Pure: knows no pool, no worker and no request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

HASH_BYTES = 16
"""128 bits: too many for two different prefixes to meet, by accident or by search."""


def key_of(salt: bytes) -> bytes:
    """A hash key of fixed length, whatever the salt's."""
    return blake2b(salt, digest_size=32).digest()


def extend(parent: bytes, token_ids: Sequence[int], key: bytes) -> bytes:
    """The hash of the block of these tokens; `parent` is that of the block before, empty for the first."""
    return blake2b(parent + array("i", token_ids).tobytes(), key=key, digest_size=HASH_BYTES).digest()


def prefix_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> Iterator[bytes]:
    """Hashes of the full blocks that a prompt may find in a prefix cache, first to last, computed as they are taken.

    The last token is never covered: computing it is what gives the logits of the next one.
    """
    key, parent = key_of(salt), b""
    for end in range(block_size, len(token_ids), block_size):
        parent = extend(parent, token_ids[end - block_size : end], key)
        yield parent
