"""What is kept of a file and of a batch, and how a batch goes from one status to the next. Pure.

    validating -> in_progress -> finalizing -> completed, or expired with lines that were not answered in time
         |             \\-> cancelling -> cancelled
         \\-> failed, cancelling

Everything is JSON in the store: a router of another version reads it, so fields are added with defaults, and never
change their meaning.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

DAY_S = 24 * 3600
KEPT_S = 30 * DAY_S
"""A file is kept so long unless its owner says otherwise, and so is what is known of a batch that is over."""

VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, CANCELLED, EXPIRED = "completed", "failed", "cancelled", "expired"
_LEADS_TO = {
    VALIDATING: (IN_PROGRESS, FAILED, CANCELLING),
    IN_PROGRESS: (FINALIZING, FAILED, CANCELLING),
    FINALIZING: (COMPLETED, EXPIRED, FAILED),
    CANCELLING: (CANCELLED, FAILED),
    COMPLETED: (),
    FAILED: (),
    CANCELLED: (),
    EXPIRED: (),
}


class _Json:
    """Fields that are not known are dropped."""

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        values = json.loads(data)
        return cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})  # type: ignore[attr-defined]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode()  # type: ignore[call-overload]


@dataclass(frozen=True)
class StoredFile(_Json):
    """One file; its bytes are in pieces. Times are in seconds since 1970."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    """`batch`, or `batch_output`."""
    size_bytes: int
    num_pieces: int
    created_at: int
    expires_at: int


@dataclass(frozen=True)
class BatchProblem:
    """What is wrong with an input file."""

    code: str
    message: str
    line: int | None = None
    """From 1 on; None: it is not in one line."""
    param: str | None = None


@dataclass(frozen=True)
class Batch(_Json):
    """One batch. Times are in seconds since 1970."""

    batch_id: str
    tenant: str
    key_id: str
    """Of the API key on whose behalf it runs."""
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    """Lines that are not answered by then are not run any more."""
    metadata: dict[str, str] | None = None
    output_kept_s: int = KEPT_S
    status: str = VALIDATING
    reached: dict[str, int] = field(default_factory=dict)
    """When it came to each status."""
    total: int = 0
    completed: int = 0
    """Of a batch that is over, as `failed` and `usage` are; before, the store counts."""
    failed: int = 0
    usage: dict[str, Any] | None = None
    problems: list[dict[str, Any]] = field(default_factory=list)
    """Those of `BatchProblem`."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_over(self) -> bool:
        return not _LEADS_TO[self.status]

    @property
    def can_cancel(self) -> bool:
        return CANCELLING in _LEADS_TO[self.status]

    def to(self, status: str, now: float, **changes: Any) -> Batch:
        """The one door between statuses. Raises ValueError where none leads there."""
        if status not in _LEADS_TO[self.status]:
            allowed = ", ".join(_LEADS_TO[self.status]) or "nothing: it is over"
            raise ValueError(f"batch {self.batch_id} cannot go from {self.status} to {status}; allowed: {allowed}")
        return replace(self, status=status, reached={**self.reached, status: int(now)}, **changes)

    def request_id(self, number: int) -> str:
        """Of one line, however often it is tried."""
        return f"batch_req_{self.batch_id.removeprefix('batch_')}-{number}"

    def result_file_id(self, kind: str) -> str:
        """The same each time that a result is written, so that one who goes on after another writes no second one."""
        return f"file-{self.batch_id.removeprefix('batch_')}-{kind}"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


def told_file(file: StoredFile) -> dict[str, Any]:
    """As OpenAI's clients know a file."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def told_batch(batch: Batch, counts: tuple[int, int]) -> dict[str, Any]:
    """As OpenAI's clients know a batch. `counts`: answered well, and with an error."""
    completed, failed = (batch.completed, batch.failed) if batch.is_over else counts
    errors = {"object": "list", "data": batch.problems} if batch.problems else None
    reached = {f"{status}_at": batch.reached.get(status) for status in _LEADS_TO if status != VALIDATING}
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **reached,
        "request_counts": {"total": batch.total, "completed": completed, "failed": failed},
        "usage": batch.usage,
        "metadata": batch.metadata,
    }
