"""The answers of files and batches: the type of every object, as in `router.openai.answers`."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic does not take typing's before Python 3.12

from router.batches.store import BatchStatus, FilePurpose
from router.openai.answers import Count, closed


@closed
class FileAnswer(TypedDict):
    id: str
    object: Literal["file"]
    bytes: Count
    created_at: Count
    expires_at: Count
    filename: str
    purpose: FilePurpose
    status: Literal["processed"]


@closed
class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


class ProblemAnswer(TypedDict):
    code: str
    message: str
    line: Count | None
    param: str | None


class ProblemsAnswer(TypedDict):
    object: Literal["list"]
    data: list[ProblemAnswer]


class LineCounts(TypedDict):
    total: Count
    completed: Count
    failed: Count


@closed
class BatchAnswer(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: ProblemsAnswer | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: Count
    expires_at: Count
    in_progress_at: Count | None
    finalizing_at: Count | None
    cancelling_at: Count | None
    completed_at: Count | None
    failed_at: Count | None
    cancelled_at: Count | None
    expired_at: Count | None
    request_counts: LineCounts
    usage: dict[str, Any] | None
    metadata: dict[str, str] | None
