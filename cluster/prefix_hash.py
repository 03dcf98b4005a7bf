"""The name of a block of prompt tokens in a prefix cache: a keyed hash of the block and of all that comes before it.

Equal hashes mean equal tokens from the first on, under one tenant's salt. Workers name what they keep by it, and the
router what a prompt would find there; nobody who lacks the salt can tell which prompt a hash stands for.
Blocks are named in groups: each by the hash of the last block of the group before, and the tokens of its own group up
to its end. So the end of a group is found by hashing it in one piece.
Pure: knows no pool, no worker and no request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from struct import Struct, calcsize

_TOKEN = "i"
"""The `struct` format in which a token's id is written."""
PRIVATE = b"\xff"
"""Begins the salts under which a request finds its own blocks alone. No client can set one: theirs are UTF-8."""
GROUP = 16
"""Blocks."""
HASH_BYTES = 16
"""128 bits: too many for two different prefixes to meet, by accident or by search."""

_hash = partial(blake2b, digest_size=HASH_BYTES)


@lru_cache(1024)
def key_of(salt: bytes) -> bytes:
    """A hash key of fixed length, whatever the salt's."""
    return blake2b(salt, digest_size=32).digest()


def root_of(block_size: int) -> bytes:
    """Returns what the first group has instead of a hash before it: blocks of another size are others."""
    return block_size.to_bytes(HASH_BYTES, "little")


def block_hashes(
    parent: bytes, token_ids: Sequence[int], block_size: int, key: bytes, num_known: int = 0
) -> Sequence[bytes]:
    """Returns the hashes of the full blocks of one group, but for the first `num_known`.

    `parent`: that of the last block of the group before, or `root_of` the size. `token_ids`: the group's own. Whole
    groups are asked for again soon: a prompt is looked up before it is computed, and published afterwards.
    """
    if num_known:
        return _block_hashes(parent, token_ids, block_size, key, num_known)
    return _new_hashes(parent, tuple(token_ids), block_size, key)


def _block_hashes(
    parent: bytes, token_ids: Sequence[int], block_size: int, key: bytes, num_known: int = 0
) -> tuple[bytes, ...]:
    block_bytes = block_size * calcsize(_TOKEN)
    tokens = _written(token_ids)
    known_bytes = num_known * block_bytes
    hasher, hashes = _hash(parent + tokens[:known_bytes], key=key), []
    for begin in range(known_bytes, len(tokens), block_bytes):
        hasher.update(tokens[begin : begin + block_bytes])
        hashes.append(hasher.digest())
    return tuple(hashes)


_new_hashes = lru_cache(1024)(_block_hashes)


def prefix_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> Iterator[bytes]:
    """Yields the hashes of the full blocks that a prompt may find in a prefix cache, first to last.

    The last token is never covered: computing it is what gives the logits of the next one.
    """
    key, parent, stride = key_of(salt), root_of(block_size), GROUP * block_size
    num_tokens = max(0, len(token_ids) - 1) // block_size * block_size
    for first in range(0, num_tokens, stride):
        group = token_ids[first : min(first + stride, num_tokens)]
        for block_hash in block_hashes(parent, group, block_size, key):
            yield block_hash
        parent = block_hash


class PrefixHashes:
    """The hashes of `prefix_hashes` by group: each is computed once, and when it is asked for."""

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: bytes) -> None:
        self._token_ids = token_ids
        self._block_size = block_size
        self._key = key_of(salt)
        self.num_blocks = max(0, len(token_ids) - 1) // block_size
        self.num_groups = -(-self.num_blocks // GROUP)
        """The last may be of fewer blocks than the others."""
        self._ends: list[bytes] = []
        self._known: dict[int, bytes] = {}
        """Hashes within groups, by the number of blocks up to them."""

    def end_of_group(self, group: int) -> bytes:
        """The hash of its last block. Groups before it are looked at first."""
        ends = self._ends
        while len(ends) <= group:
            parent = ends[-1] if ends else root_of(self._block_size)
            ends.append(_hash(parent + _written(self._tokens_of(len(ends))), key=self._key).digest())
        return ends[group]

    def of_first(self, num_blocks: int) -> bytes:
        """The hash of so many blocks from the first on, at least one."""
        known = self._known.get(num_blocks)
        if known is None:
            group = (num_blocks - 1) // GROUP
            parent = self.end_of_group(group - 1) if group else root_of(self._block_size)
            tokens = self._token_ids[group * GROUP * self._block_size : num_blocks * self._block_size]
            known = self._known[num_blocks] = _hash(parent + _written(tokens), key=self._key).digest()
        return known

    def _tokens_of(self, group: int) -> Sequence[int]:
        first = group * GROUP
        return self._token_ids[first * self._block_size : min(first + GROUP, self.num_blocks) * self._block_size]


def _written(token_ids: Sequence[int]) -> bytes:
    return _tokens(len(token_ids)).pack(*token_ids)


@lru_cache
def _tokens(count: int) -> Struct:
    """Writes so many; thrice as fast as an array."""
    return Struct(f"{count}{_TOKEN}")
