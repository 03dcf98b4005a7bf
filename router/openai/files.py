"""The routes of files: uploaded for batches, listed, read, deleted. Each tenant sees its own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from cluster.auth import Gate
from cluster.errors import NotFound
from cluster.state import StoreAway
from router.api.call import Principal, principal_of
from router.batches.records import Batch, StoredFile, new_file_id, told_file
from router.batches.results import PIECE_BYTES, InputGone, pieces_of
from router.batches.store import BatchStore, StoredRecord
from router.openai import pages
from router.openai.app import GENERATION, Answer, Handler, guarded, headers_of
from router.openai.errors import HttpFailure, body_of
from router.openai.exchange import failed, log
from router.openai.uploads import FileTooLarge, Upload, uploaded

MOST_FILES = 10_000
"""Of one tenant, and on one page."""
_MOST_OPEN_BATCHES = 10_000
_KEPT_AT_ONCE = 20
"""So many times the largest file may a tenant keep together."""
_RETRY_AFTER_S = 1.0


class FileRoutes:
    """`routes`: for the HTTP door. `most_bytes`: of one file."""

    def __init__(self, store: BatchStore, gate: Gate, *, most_bytes: int, stalled_client_s: float) -> None:
        self._store = store
        self._gate = gate
        self._most_bytes = most_bytes
        self._stalled_client_s = stalled_client_s
        self.routes = [
            route("/v1/files", POST=self._upload, GET=self._list),
            route("/v1/files/{file_id}", GET=self._tell, DELETE=self._delete),
            route("/v1/files/{file_id}/content", GET=self._content),
        ]

    async def _upload(self, request: Request, request_id: str) -> Answer:
        caller = caller_for(self._gate, request)
        try:
            async with uploaded(request, self._most_bytes, self._stalled_client_s) as upload:
                refusal = await self._refusal(caller, upload)
                if refusal is not None:
                    return failed(refusal, request_id)
                file = await self._keep(caller, upload)
        except FileTooLarge:
            message = f"the file is larger than {self._most_bytes} bytes (router.max_file_bytes); split it"
            return failed(HttpFailure(413, body_of(message, 413, "file_too_large", "file")), request_id)
        return JSONResponse(told_file(file))

    async def _refusal(self, caller: Principal, upload: Upload) -> HttpFailure | None:
        """What a tenant keeps has bounds."""
        kept = await self._store.page("file", caller.tenant, after=None, limit=MOST_FILES, is_ascending=True) or []
        size = upload.size_bytes + sum(StoredFile.from_json(record.data).size_bytes for record in kept)
        most = _KEPT_AT_ONCE * self._most_bytes
        if size <= most and len(kept) < MOST_FILES:
            return None
        message = f"with this file there would be more than {most} bytes or {MOST_FILES} files; delete some"
        return HttpFailure(413, body_of(message, 413, "storage_full", "file"))

    async def _keep(self, caller: Principal, upload: Upload) -> StoredFile:
        file_id, now, number = new_file_id(), int(time.time()), 0
        while piece := await upload.file.read(PIECE_BYTES):
            await self._store.put_piece(file_id, number, piece)
            number += 1
        ends_at = now + upload.kept_s
        name, size = upload.filename, upload.size_bytes
        file = StoredFile(file_id, caller.tenant, name, "batch", size, number, now, ends_at)
        await self._store.add(StoredRecord("file", file_id, caller.tenant, file.to_json(), ends_at))
        return file

    async def _list(self, request: Request, request_id: str) -> Answer:
        caller, query = caller_for(self._gate, request), request.query_params
        pages.check_names(query, "after", "limit", "order", "purpose")
        limit = pages.limit_of(query, usual=MOST_FILES, most=MOST_FILES)
        purpose, found, after = query.get("purpose"), list[StoredFile](), query.get("after")
        while len(found) <= limit:
            records = await self._store.page(
                "file", caller.tenant, after=after, limit=limit + 1, is_ascending=pages.is_ascending(query)
            )
            if records is None:
                raise pages.unknown_after()
            files = [StoredFile.from_json(record.data) for record in records]
            found += [file for file in files if purpose in (None, file.purpose) and not _is_over(file)]
            if len(records) <= limit:
                break
            after = records[-1].record_id
        return JSONResponse(pages.page([told_file(file) for file in found], limit))

    async def _tell(self, request: Request, request_id: str) -> Answer:
        return JSONResponse(told_file(await self._find(request)))

    async def _delete(self, request: Request, request_id: str) -> Answer:
        file = await self._find(request)
        batch_id = await self._batch_of(file)
        if batch_id is not None:
            message = f"{file.file_id} is the input of {batch_id}, which is not over; wait for it, or cancel it first"
            return failed(HttpFailure(409, body_of(message, 409, "file_in_use")), request_id)
        is_gone = await self._store.remove("file", file.tenant, file.file_id)
        return JSONResponse({"id": file.file_id, "object": "file", "deleted": is_gone})

    async def _content(self, request: Request, request_id: str) -> Answer:
        file = await self._find(request)
        pieces = _Pieces(self._store, file)
        await pieces.begin()
        headers = {"content-length": str(file.size_bytes)}
        return StreamingResponse(pieces.rest(), media_type="application/octet-stream", headers=headers)

    async def _find(self, request: Request) -> StoredFile:
        """Raises NotFound."""
        file_id: str = request.path_params["file_id"]
        caller = caller_for(self._gate, request)
        file = await find_file(self._store, caller, file_id)
        if file is None:
            raise no_such_file(file_id)
        return file

    async def _batch_of(self, file: StoredFile) -> str | None:
        """One that is not over and reads it."""
        records = await self._store.page("batch", file.tenant, after=None, limit=_MOST_OPEN_BATCHES, is_ascending=False)
        batches = [Batch.from_json(record.data) for record in records or ()]
        using = (b.batch_id for b in batches if not b.is_over and b.input_file_id == file.file_id)
        return next(using, None)


class _Pieces:
    """What a download sends; the first piece is read before anything is told."""

    def __init__(self, store: BatchStore, file: StoredFile) -> None:
        self._file = file
        self._pieces = pieces_of(store, file.tenant, file.file_id)
        self._first = b""

    async def begin(self) -> None:
        """Raises NotFound, or StoreAway."""
        try:
            self._first = await anext(self._pieces, b"")
        except InputGone as error:
            raise no_such_file(self._file.file_id) from error

    async def rest(self) -> AsyncIterator[bytes]:
        yield self._first
        async for piece in self._pieces:
            yield piece


def route(path: str, **handlers: Handler) -> Route:
    """By method: one route for all of them, so that a refusal of another one names each."""
    endpoints = {method: _stored(handle) for method, handle in handlers.items()}

    async def endpoint(request: Request) -> Answer:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, endpoint, methods=list(handlers))


def _stored(handle: Handler) -> Callable[[Request], Awaitable[Answer]]:
    """`handle`, guarded; the store's absence is a failure that is worth another try."""

    async def endpoint(request: Request, request_id: str) -> Answer:
        try:
            return await handle(request, request_id)
        except StoreAway as error:
            log.warning("%s %s: %s", request.method, request.url.path, error)
            message = "files and batches cannot be reached for the moment; the router's log says why"
            return failed(HttpFailure(503, body_of(message, 503, "store_away"), _RETRY_AFTER_S), request_id)

    return guarded(endpoint)


def caller_for(gate: Gate, request: Request) -> Principal:
    """Raises Unauthenticated or PermissionDenied."""
    headers = headers_of(request)
    gate.check(headers, GENERATION)
    return principal_of(gate.key_of(headers))


async def find_file(store: BatchStore, caller: Principal, file_id: str) -> StoredFile | None:
    record = await store.find("file", caller.tenant, file_id)
    file = None if record is None else StoredFile.from_json(record.data)
    return None if file is None or _is_over(file) else file


def no_such_file(file_id: str) -> NotFound:
    return NotFound(f"there is no file {file_id[:64]!r}; it was deleted, has expired, or is another tenant's")


def _is_over(file: StoredFile) -> bool:
    return file.expires_at <= time.time()
