"""Files and batches as they are stored, how a batch goes from one status to the next, and the interface of a store.

    validating -> in_progress -> finalizing -> completed, or expired with lines that were not answered in time
         |             \\-> cancelling -> cancelled
         \\-> failed, cancelling

Everything is JSON in the store: a router of another version reads it, so fields are added with defaults, and never
change their meaning. A record whose writer speaks no version of this router's protocol is not found here, and left as
it is. Records are replaced only by a writer that knows their present version.

A batch that is open is worked on by the router that holds its claim. A claim ends when it is not renewed in time; the
next one has a higher epoch, and a write with an older one is refused: that is how each line gets one answer, however
many routers there are and whenever they die. An expired claim still holds while nobody else has taken the batch.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, Protocol, Self

from cluster.errors import IncompatibleProtocol
from cluster.protocol import check_protocol, spoken

DAY_S = 24 * 3600
KEPT_S = 30 * DAY_S
"""Seconds that a file is kept unless its owner says otherwise, and the record of a batch after its end."""

log = logging.getLogger(__name__)

PIECE_BYTES = 2**20
FilePurpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "cancelled", "expired"
]
VALIDATING: Final = "validating"
IN_PROGRESS: Final = "in_progress"
FINALIZING: Final = "finalizing"
CANCELLING: Final = "cancelling"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
EXPIRED: Final = "expired"
_LEADS_TO: dict[BatchStatus, tuple[BatchStatus, ...]] = {
    VALIDATING: (IN_PROGRESS, FAILED, CANCELLING),
    IN_PROGRESS: (FINALIZING, FAILED, CANCELLING),
    FINALIZING: (COMPLETED, EXPIRED, FAILED),
    CANCELLING: (CANCELLED, FAILED),
    COMPLETED: (),
    FAILED: (),
    CANCELLED: (),
    EXPIRED: (),
}


class JsonRecord:
    """A dataclass as the JSON of a record. Reading drops unknown fields."""

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        values = json.loads(data)
        return cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})  # type: ignore[attr-defined]

    def to_json(self) -> bytes:
        values = {**asdict(self), "protocol": spoken()}  # type: ignore[call-overload]
        return json.dumps(values, ensure_ascii=False).encode()


@dataclass(frozen=True)
class StoredFile(JsonRecord):
    """One file; its bytes are in pieces. Times are in seconds since 1970."""

    file_id: str
    tenant: str
    filename: str
    purpose: FilePurpose
    size_bytes: int
    num_pieces: int
    created_at: int
    expires_at: int


@dataclass(frozen=True)
class BatchProblem:
    """A mistake in an input file."""

    code: str
    message: str
    line: int | None = None
    """Counted from 1; None: it is not in one line."""
    param: str | None = None


@dataclass(frozen=True)
class Batch(JsonRecord):
    """One batch. Times are in seconds since 1970."""

    batch_id: str
    tenant: str
    key_id: str
    """Id of the API key on whose behalf it runs."""
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    """Lines that have no answer by then are not run any more."""
    metadata: dict[str, str] | None = None
    output_kept_s: int = KEPT_S
    status: BatchStatus = VALIDATING
    reached: dict[str, int] = field(default_factory=dict)
    """Time at which it came to each status."""
    total: int = 0
    completed: int = 0
    """Like `failed` and `usage`, set once the batch is over; before, the store counts."""
    failed: int = 0
    usage: dict[str, Any] | None = None
    problems: list[dict[str, Any]] = field(default_factory=list)
    """Each has the fields of a `BatchProblem`."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_over(self) -> bool:
        return not _LEADS_TO[self.status]

    @property
    def can_cancel(self) -> bool:
        return CANCELLING in _LEADS_TO[self.status]

    def to(self, status: BatchStatus, now: float, **changes: Any) -> Batch:
        """The only way to change the status. Raises ValueError for one that cannot follow."""
        if status not in _LEADS_TO[self.status]:
            allowed = ", ".join(_LEADS_TO[self.status]) or "nothing: it is over"
            raise ValueError(f"batch {self.batch_id} cannot go from {self.status} to {status}; allowed: {allowed}")
        return replace(self, status=status, reached={**self.reached, status: int(now)}, **changes)

    def request_id(self, number: int) -> str:
        """The request id of one line, in each of its attempts."""
        return f"batch_req_{self.batch_id.removeprefix('batch_')}-{number}"

    def result_file_id(self, kind: str) -> str:
        """Fixed, so that a router which takes over from another one writes no second result."""
        return f"file-{self.batch_id.removeprefix('batch_')}-{kind}"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


Kind = Literal["file", "upload", "batch", "response"]
"""An upload is a file whose bytes are still being written: it counts, and is not found. Responses, which
`router.responses` keeps here, count by themselves."""

ORPHAN_S = 3600.0
"""Pieces whose file was not added within this time are removed: their writer has died."""


@dataclass(frozen=True)
class TenantLimits:
    """Bounds on what one tenant keeps in a store. Results of batches count, and are never refused."""

    most_bytes: int
    """Most bytes of its files; or of its responses, where one of those is reserved."""
    most_files: int
    """Or responses."""
    most_batches: int
    """Records of batches, also of those that are over."""
    most_open: int
    """Batches that are not over."""


@dataclass(frozen=True)
class StoredRecord:
    """The record of one file, batch or response; `data` is its JSON."""

    kind: Kind
    record_id: str
    tenant: str
    data: bytes
    ends_at: float
    """When it may be removed, in seconds since 1970."""
    version: int = 1

    @property
    def size_bytes(self) -> int:
        """Size of a file, or of a response as it is kept; 0 for a batch."""
        return 0 if self.kind == "batch" else int(json.loads(self.data, strict=False).get("size_bytes", 0))

    @property
    def held_until(self) -> float:
        """When a response that a router works on may be taken over, in seconds since 1970; 0 where none has to."""
        return float(json.loads(self.data, strict=False).get("held_until", 0)) if self.kind == "response" else 0.0

    @property
    def is_readable(self) -> bool:
        """False, with a warning for the first such record, where another version of the protocol is needed."""
        try:
            speaks = str(json.loads(self.data, strict=False).get("protocol", ""))
            check_protocol("the router that wrote it", speaks, "this router")
        except IncompatibleProtocol as error:
            _report_unreadable(error.message)
            return False
        return True


@functools.cache
def _report_unreadable(why: str) -> None:
    log.warning("records of files and batches are not read, and left as they are: %s", why)


@dataclass(frozen=True)
class BatchClaim:
    """The right to work on a batch."""

    batch_id: str
    owner: str
    epoch: int


@dataclass(frozen=True)
class LineAnswer:
    """The stored answer to one line."""

    number: int
    is_good: bool
    data: bytes
    """A line of the output file, without its end."""


class BatchStore(Protocol):
    """Used from one event loop."""

    async def add(self, record: StoredRecord, claim: BatchClaim | None = None) -> bool:
        """Writes a record, over one of the same id. A batch is open from now on. Returns False where the claim is lost
        and nothing was written."""
        ...

    async def reserve(self, record: StoredRecord, limits: TenantLimits) -> bool:
        """Adds the record of an upload, a batch or a response. Returns False where its tenant would then have more than
        the limits, and nothing was written; of several that come at once, as many are added as fit."""
        ...

    async def find(self, kind: Kind, tenant: str, record_id: str) -> StoredRecord | None:
        """Finds nothing where the record is another tenant's."""
        ...

    async def page(
        self, kind: Kind, tenant: str, *, after: str | None, limit: int, is_ascending: bool
    ) -> list[StoredRecord] | None:
        """Records in the order in which they were added. None: `after` is not known."""
        ...

    async def replace(self, record: StoredRecord, claim: BatchClaim | None = None) -> bool:
        """Replaces a record, with the next version. Returns False where there is another version by now, no record, or
        where the claim is lost."""
        ...

    async def remove(self, kind: Kind, tenant: str, record_id: str) -> bool:
        """Removes a record, and the pieces of a file. Returns False where there was none."""
        ...

    async def ended(self, now: float, limit: int) -> Sequence[StoredRecord]:
        """Some of the records that may be removed."""
        ...

    async def left(self, now: float, limit: int) -> Sequence[StoredRecord]:
        """Some of the responses that nobody works on any more: those held until then, or an earlier time."""
        ...

    async def put_piece(self, file_id: str, number: int, data: bytes, claim: BatchClaim | None = None) -> bool:
        """Writes a piece of a file that is added afterwards. Numbers count from 0. Returns False as `add` does."""
        ...

    async def piece(self, file_id: str, number: int) -> bytes | None: ...

    async def claim(
        self, owner: str, ttl_s: float, *, but_of: Sequence[str] = (), but: Sequence[str] = ()
    ) -> tuple[BatchClaim, StoredRecord] | None:
        """Claims the oldest open batch without a holder, except for these tenants' and these batches. None: there is
        none."""
        ...

    async def renew(self, claim: BatchClaim, ttl_s: float) -> bool:
        """Returns False where another router has the batch, or it is gone."""
        ...

    async def release(self, claim: BatchClaim) -> None:
        """Lets other routers take the batch at once, and ends every line that was begun under this claim."""
        ...

    async def begin_line(self, claim: BatchClaim, number: int) -> bool:
        """Records that the line is being computed. Returns False where the claim is lost and nothing was written."""
        ...

    async def end_lines(self, claim: BatchClaim, number: int | None = None) -> None:
        """Records that the line is no longer computed under this claim, which may be lost by now. None: no line is."""
        ...

    async def lost_lines(self, claim: BatchClaim) -> Mapping[int, int]:
        """Lines that were begun under earlier claims and never ended, and under how many: their routers were lost."""
        ...

    async def close_batch(self, claim: BatchClaim) -> None:
        """Makes the batch no longer open, and removes its answers."""
        ...

    async def answer(self, claim: BatchClaim, answer: LineAnswer) -> bool:
        """Stores an answer unless the line has one already. Returns False where the claim is lost and nothing was
        written."""
        ...

    async def counts(self, batch_id: str) -> tuple[int, int]:
        """Returns how many lines were answered well, and how many with an error."""
        ...

    async def answered(self, batch_id: str) -> frozenset[int]:
        """The numbers of lines that have an answer."""
        ...

    async def answers(self, batch_id: str, numbers: Sequence[int]) -> list[LineAnswer]:
        """The answers of these lines, in the order of their numbers."""
        ...

    async def close(self) -> None: ...


class InputGone(Exception):
    """A file is not there any more."""


async def pieces_of(store: BatchStore, tenant: str, file_id: str) -> AsyncIterator[bytes]:
    """The bytes of a file. Raises InputGone."""
    record = await store.find("file", tenant, file_id)
    if record is None or not record.is_readable:
        raise InputGone
    for number in range(StoredFile.from_json(record.data).num_pieces):
        piece = await store.piece(file_id, number)
        if piece is None:
            raise InputGone
        yield piece
