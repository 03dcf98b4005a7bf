"""Headers of KV that is kept outside of the process: a page each, with a checksum of its own. Loads no torch."""

from __future__ import annotations

from struct import Struct
from typing import Any

import xxhash

from cluster.kv_groups import DISK_PAGE as PAGE

Key = tuple[int, bytes]
"""The group of layers, and the digest of a block's tokens and all before them."""
_SUM = Struct("<Q")


def sealed(header: bytes) -> bytes:
    """A page with a header and its checksum."""
    return (header + _SUM.pack(xxhash.xxh3_64_intdigest(header))).ljust(PAGE, b"\0")


def unsealed(page: bytes, form: Struct) -> tuple[Any, ...] | None:
    """The fields of a sealed header; None where it is none."""
    header = page[: form.size]
    (checksum,) = _SUM.unpack_from(page, form.size)
    return form.unpack(header) if xxhash.xxh3_64_intdigest(header) == checksum else None
