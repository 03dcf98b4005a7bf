"""The interface of a batch store: records by tenant, pieces of files, claims on batches, answers to lines.

A batch that is open is worked on by who holds its claim. A claim ends when it is not renewed in time; the next one has
a higher epoch, and whoever writes with an older one is told so: that is how each line gets one answer, however many
routers there are and whenever they die. A claim that has ended holds as long as nobody else has taken the batch.

Records are replaced only by who knows their present version. Every call may raise StoreAway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["file", "batch"]

ORPHAN_S = 3600.0
"""Pieces whose file has not been added by then are dropped: their writer has died."""


@dataclass(frozen=True)
class StoredRecord:
    """What is known of one file or batch; `data` is its owner's."""

    kind: Kind
    record_id: str
    tenant: str
    data: bytes
    ends_at: float
    """When it may be swept away, in seconds since 1970."""
    version: int = 1


@dataclass(frozen=True)
class BatchClaim:
    """The right to work on a batch."""

    batch_id: str
    owner: str
    epoch: int


@dataclass(frozen=True)
class LineAnswer:
    """To one line."""

    number: int
    """Of the line."""
    is_good: bool
    data: bytes
    """A line of the output file, without its end."""


class BatchStore(Protocol):
    """Used from one event loop."""

    async def add(self, record: StoredRecord, claim: BatchClaim | None = None) -> bool:
        """Writes it over one of the same id. A batch is open from now on. False: the claim is over, and nothing was
        written."""
        ...

    async def find(self, kind: Kind, tenant: str, record_id: str) -> StoredRecord | None:
        """One of another tenant is as unknown as one that never was."""
        ...

    async def page(
        self, kind: Kind, tenant: str, *, after: str | None, limit: int, is_ascending: bool
    ) -> list[StoredRecord] | None:
        """By the order in which they were added. None: `after` is not known."""
        ...

    async def replace(self, record: StoredRecord, claim: BatchClaim | None = None) -> bool:
        """By one with the next version. False: there is another version by now, none at all, or the claim is over."""
        ...

    async def remove(self, kind: Kind, tenant: str, record_id: str) -> bool:
        """With the pieces of a file. False: there was none."""
        ...

    async def ended(self, now: float, limit: int) -> Sequence[StoredRecord]:
        """Some of those that may be swept away."""
        ...

    async def put_piece(self, file_id: str, number: int, data: bytes, claim: BatchClaim | None = None) -> bool:
        """Of a file that is added afterwards. Numbers count from 0. False: as with `add`."""
        ...

    async def piece(self, file_id: str, number: int) -> bytes | None: ...

    async def claim(
        self, owner: str, ttl_s: float, *, but_of: Sequence[str] = (), but: Sequence[str] = ()
    ) -> tuple[BatchClaim, StoredRecord] | None:
        """The oldest open batch that nobody holds, of none of these tenants and none of these; None: there is none."""
        ...

    async def renew(self, claim: BatchClaim, ttl_s: float) -> bool:
        """False: somebody else has it, or it is gone."""
        ...

    async def release(self, claim: BatchClaim) -> None:
        """Others may take it at once."""
        ...

    async def close_batch(self, claim: BatchClaim) -> None:
        """It is open no more, and its answers are dropped."""
        ...

    async def answer(self, claim: BatchClaim, answer: LineAnswer) -> bool:
        """Keeps it unless the line has one already. False: the claim is over, and nothing was written."""
        ...

    async def counts(self, batch_id: str) -> tuple[int, int]:
        """Lines that were answered well, and with an error."""
        ...

    async def answered(self, batch_id: str) -> frozenset[int]:
        """The numbers of lines that have an answer."""
        ...

    async def answers(self, batch_id: str, numbers: Sequence[int]) -> list[LineAnswer]:
        """Of these lines, in the order of their numbers; those without one are left out."""
        ...

    async def close(self) -> None: ...
