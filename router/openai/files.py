"""The routes of files: uploaded for batches, listed, read, deleted. Each tenant sees its own."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from cluster.errors import FieldViolation, InvalidRequest, NotFound, NotServed
from cluster.state import StoreAway
from router.api.call import Principal
from router.api.violations import invalid
from router.batches.store import (
    KEPT_S,
    ORPHAN_S,
    PIECE_BYTES,
    Batch,
    BatchStore,
    InputGone,
    Kind,
    StoredFile,
    StoredRecord,
    TenantLimits,
    new_file_id,
    pieces_of,
)
from router.openai.answers import Page
from router.openai.bodies import MOST_FILES, FilesQuery, UploadBody
from router.openai.errors import HttpFailure
from router.openai.file_answers import DeletedFile, FileAnswer
from router.openai.http import BYTES, CALLS, HAS_BODY, Handler, Operation, checked_texts, log, parts_of

LONGEST_FILENAME = 255
_BESIDE_BYTES = 64 * 1024
"""Bytes by which a body may be longer than its file: the fields, and what multipart puts between."""
_MOST_FIELDS = 8
MOST_KEPT_BATCHES, MOST_OPEN_BATCHES = 10_000, 200
"""Batches of one tenant: those that it finds, and those that are not over."""
_KEPT_AT_ONCE = 20
"""Together, a tenant's files may be so many times as large as the largest file."""
_RETRY_AFTER_S = 1.0
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a client's mistake is answered, not logged


class FileTooLarge(Exception):
    """The upload has more bytes than are taken."""


class FileRoutes:
    """`operations`: for the HTTP API. `most_bytes`: of one file."""

    def __init__(
        self,
        store: BatchStore,
        principal_of: Callable[[Request], Principal],
        *,
        most_bytes: int,
        stalled_client_s: float,
    ) -> None:
        self._store = store
        self._principal_of = principal_of
        self._most_bytes = most_bytes
        self._stalled_client_s = stalled_client_s
        all_files, one, content = "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"
        self.operations = [
            Operation(
                "POST",
                all_files,
                self._upload,
                "Upload the lines of a batch",
                (*HAS_BODY, 413),
                FileAnswer,
                body=UploadBody,
                body_media_type="multipart/form-data",
            ),
            Operation(
                "GET",
                all_files,
                self._list,
                "Files that were uploaded, and results",
                CALLS,
                Page[FileAnswer],
                query=FilesQuery,
            ),
            Operation("GET", one, self._get, "One file", (*CALLS, 404), FileAnswer),
            Operation("DELETE", one, self._delete, "Delete a file", (*CALLS, 404, 409), DeletedFile),
            Operation("GET", content, self._content, "The bytes of a file", (*CALLS, 404), media_type=BYTES),
        ]

    async def _upload(self, request: Request) -> Response:
        principal = self._principal_of(request)
        try:
            async with uploaded(request, self._most_bytes, self._stalled_client_s) as upload:
                file = await self._add(principal, upload)
        except FileTooLarge as error:
            message = f"the file is larger than {self._most_bytes} bytes (router.max_file_bytes); split it"
            raise HttpFailure(413, "file_too_large", message, "file") from error
        return JSONResponse(_file_answer(file))

    async def _add(self, principal: Principal, upload: Upload) -> StoredFile:
        """Its place is reserved before its bytes are written. Raises HttpFailure where the tenant would keep more than
        it may."""
        file_id, tenant, now, number = new_file_id(), principal.tenant, int(time.time()), 0
        ends_at = now + upload.kept_s
        name, size = upload.filename, upload.size_bytes
        file = StoredFile(file_id, tenant, name, "batch", size, 0, now, ends_at)
        limits = limits_of_tenant(self._most_bytes)
        if not await self._store.reserve(
            StoredRecord("upload", file_id, tenant, file.to_json(), now + ORPHAN_S), limits
        ):
            what = f"more than {limits.most_bytes} bytes or {limits.most_files} files"
            raise HttpFailure(413, "storage_full", f"with this file there would be {what}; delete some", "file")
        try:
            while piece := await upload.file.read(PIECE_BYTES):
                await self._store.put_piece(file_id, number, piece)
                number += 1
            file = replace(file, num_pieces=number)
            await self._store.add(StoredRecord("file", file_id, tenant, file.to_json(), ends_at))
        except BaseException:
            with contextlib.suppress(StoreAway):  # then the reservation ends by itself
                await self._store.remove("upload", tenant, file_id)
            raise
        return file

    async def _list(self, request: Request) -> Response:
        principal, query = self._principal_of(request), checked_texts(request.query_params, FilesQuery)
        found, after, is_ascending = list[StoredFile](), query.after, query.order == "asc"
        while len(found) <= query.limit:
            records = await page_of(
                self._store, "file", principal.tenant, after, query.limit, is_ascending=is_ascending
            )
            files = [StoredFile.from_json(record.data) for record in records]
            found += [file for file in files if query.purpose in (None, file.purpose) and not _is_over(file)]
            if len(records) <= query.limit:
                break
            after = records[-1].record_id
        return JSONResponse(page_answer([_file_answer(file) for file in found], query.limit))

    async def _get(self, request: Request) -> Response:
        return JSONResponse(_file_answer(await self._find(request)))

    async def _delete(self, request: Request) -> Response:
        file = await self._find(request)
        batch_id = await self._open_batch_of(file)
        if batch_id is not None:
            message = f"{file.file_id} is the input of {batch_id}, which is not over; wait for it, or cancel it first"
            raise HttpFailure(409, "file_in_use", message)
        is_gone = await self._store.remove("file", file.tenant, file.file_id)
        answer: DeletedFile = {"id": file.file_id, "object": "file", "deleted": is_gone}
        return JSONResponse(answer)

    async def _content(self, request: Request) -> Response:
        """Reads the first piece before it answers, so that a file which is gone is 404."""
        file = await self._find(request)
        pieces = pieces_of(self._store, file.tenant, file.file_id)
        try:
            first = await anext(pieces, b"")
        except InputGone as error:
            raise no_such_file(file.file_id) from error

        async def all_pieces() -> AsyncIterator[bytes]:
            yield first
            async for piece in pieces:
                yield piece

        return StreamingResponse(all_pieces(), media_type=BYTES, headers={"content-length": str(file.size_bytes)})

    async def _find(self, request: Request) -> StoredFile:
        """Raises NotFound."""
        return await find_file(self._store, self._principal_of(request), request.path_params["file_id"])

    async def _open_batch_of(self, file: StoredFile) -> str | None:
        """The id of a batch that is not over and reads this file."""
        records = await self._store.page("batch", file.tenant, after=None, limit=MOST_KEPT_BATCHES, is_ascending=False)
        for record in records or ():
            batch = Batch.from_json(record.data) if record.is_readable else None
            if batch is None and file.file_id.encode() in record.data:
                return record.record_id
            if batch is not None and not batch.is_over and batch.input_file_id == file.file_id:
                return batch.batch_id
        return None


def limits_of_tenant(most_file_bytes: int) -> TenantLimits:
    return TenantLimits(_KEPT_AT_ONCE * most_file_bytes, MOST_FILES, MOST_KEPT_BATCHES, MOST_OPEN_BATCHES)


@dataclass(frozen=True)
class Upload:
    """An uploaded file."""

    file: UploadFile
    filename: str
    size_bytes: int
    kept_s: int


@contextlib.asynccontextmanager
async def uploaded(request: Request, most_bytes: int, stalled_client_s: float) -> AsyncIterator[Upload]:
    """Raises InvalidRequest, FileTooLarge, StoreAway for a full disk, or TimeoutError when no more of it comes."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise InvalidRequest("the body must be multipart/form-data, with the parts file and purpose")
    most = most_bytes + _BESIDE_BYTES
    parts = _bounded(request, most, stalled_client_s)
    parser = MultiPartParser(request.headers, parts, max_files=1, max_fields=_MOST_FIELDS, max_part_size=_BESIDE_BYTES)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the body is no upload of one file: {error.message}") from error
    except UnicodeError as error:
        raise InvalidRequest("the body is no upload of one file: its names are not in its charset") from error
    except TimeoutError:
        raise
    except OSError as error:
        raise StoreAway(f"an upload cannot be kept in {tempfile.gettempdir()} meanwhile: {error.strerror}") from error
    try:
        yield _checked(form.multi_items(), most_bytes)
    finally:
        await form.close()


async def _bounded(request: Request, most: int, stalled_client_s: float) -> AsyncGenerator[bytes, None]:
    """The parts of a body. The rest of one that is too large is read and dropped, within bounds: a client that is cut
    off in the middle of its upload sees no answer, only that."""
    size, is_too_large = 0, int(request.headers.get("content-length") or 0) > most
    async for part in parts_of(request, stalled_client_s):
        size += len(part)
        is_too_large = is_too_large or size > most
        if size > 4 * most:
            raise FileTooLarge
        if not is_too_large:
            yield part
    if is_too_large:
        raise FileTooLarge


def _checked(items: list[tuple[str, UploadFile | str]], most_bytes: int) -> Upload:
    fields = dict(items)
    if len(fields) < len(items):
        raise invalid((FieldViolation("file", "each field must be there once"),))
    body = checked_texts(fields, UploadBody)
    if (body.anchor is None) != (body.seconds is None):
        raise invalid((FieldViolation("expires_after", "its anchor and its seconds must both be set"),))
    size = body.file.size or 0
    if size > most_bytes:
        raise FileTooLarge
    name = (body.file.filename or "")[:LONGEST_FILENAME].encode("utf-8", "replace").decode()  # UTF-7 writes half pairs
    if not size or not name:
        raise invalid((FieldViolation("file", "must hold at least one byte, and have a name"),))
    return Upload(body.file, name, size, KEPT_S if body.seconds is None else body.seconds)


def over_store(operations: Iterable[Operation], *, is_refused: bool) -> list[Operation]:
    """Operations whose store may be away, which is worth another try. `is_refused`: the routers share no store."""
    return [replace(each, handle=_refuse if is_refused else _retriable(each.handle)) for each in operations]


async def _refuse(request: Request) -> Response:
    raise NotServed(
        "files, batches and responses are not kept here: several machines hold routers, and they share none; ask "
        "whoever runs this cluster to name a Redis in `state`"
    )


def _retriable(handle: Handler) -> Handler:
    async def endpoint(request: Request) -> Any:
        try:
            return await handle(request)
        except StoreAway as error:
            log.warning("%s %s: %s", request.method, request.url.path, error)
            message = "what is kept here cannot be reached for the moment; the router's log says why"
            raise HttpFailure(503, "store_away", message, retry_after_s=_RETRY_AFTER_S) from error

    return endpoint


async def find_file(store: BatchStore, principal: Principal, file_id: str) -> StoredFile:
    """Raises NotFound."""
    record = await store.find("file", principal.tenant, file_id)
    file = StoredFile.from_json(record.data) if record is not None and record.is_readable else None
    if file is None or _is_over(file):
        raise no_such_file(file_id)
    return file


def no_such_file(file_id: str) -> NotFound:
    return NotFound(f"there is no file {file_id[:64]!r}; it was deleted, has expired, or is another tenant's")


def _is_over(file: StoredFile) -> bool:
    return file.expires_at <= time.time()


async def page_of(
    store: BatchStore, kind: Kind, tenant: str, after: str | None, limit: int, *, is_ascending: bool
) -> list[StoredRecord]:
    """One record more than the limit where there are more. Raises InvalidRequest."""
    found: list[StoredRecord] = []
    while len(found) <= limit:
        records = await store.page(kind, tenant, after=after, limit=limit + 1, is_ascending=is_ascending)
        if records is None:
            raise invalid((FieldViolation("after", "is no id of this list; begin without it"),))
        found += [record for record in records if record.is_readable]
        if len(records) <= limit:
            break
        after = records[-1].record_id
    return found[: limit + 1]


def page_answer(answers: list[Any], limit: int) -> Page[Any]:
    """`answers` has one more than the limit where there are more."""
    data = answers[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(answers) > limit}


def _file_answer(file: StoredFile) -> FileAnswer:
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
