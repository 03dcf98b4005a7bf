"""The multipart body of an upload: the file, kept on disk while it comes, and the fields beside it."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from cluster.errors import FieldViolation, InvalidRequest
from cluster.state import StoreAway
from router.api.violations import Violations, invalid
from router.batches.records import KEPT_S
from router.openai.app import parts_of

LEAST_KEPT_S = 3600
LONGEST_FILENAME = 255
_BESIDE_BYTES = 64 * 1024
"""What a body may be longer than its file: the fields, and what multipart puts between."""
_MOST_FIELDS = 8
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a client that sends it wrong is told, and is no event
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class FileTooLarge(Exception):
    """The upload has more bytes than are taken."""


@dataclass(frozen=True)
class Upload:
    """What was sent."""

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
    except TimeoutError:
        raise
    except OSError as error:
        raise StoreAway(f"an upload cannot be kept in {tempfile.gettempdir()} meanwhile: {error.strerror}") from error
    try:
        yield _checked(form.multi_items(), most_bytes)
    finally:
        await form.close()


async def _bounded(request: Request, most: int, stalled_client_s: float) -> AsyncGenerator[bytes, None]:
    """The parts of a body. The rest of one that is too large is heard, within bounds: a client that is cut off in the
    middle of its upload sees no answer, only that."""
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
    wrong = Violations()
    fields = dict(items)
    known = ("file", "purpose", _ANCHOR, _SECONDS)
    for name in [name for name, _ in items if name not in known]:
        wrong.add(name[:64], "is not a field that is known here; leave it out")
    if len(fields) < len(items):
        wrong.add("file", "each field must be there once")
    file, purpose = fields.get("file"), fields.get("purpose")
    if not isinstance(file, UploadFile):
        wrong.add("file", "must be set, with a file name")
    if purpose != "batch":
        wrong.add("purpose", "must be batch: files are taken for batches only")
    kept_s = _kept_s(fields, wrong)
    wrong.raise_if_any()
    assert isinstance(file, UploadFile)
    size = file.size or 0
    if size > most_bytes:
        raise FileTooLarge
    name = (file.filename or "")[:LONGEST_FILENAME]
    if not size or not name:
        raise invalid((FieldViolation("file", "must hold at least one byte, and have a name"),))
    return Upload(file, name, size, kept_s)


def _kept_s(fields: dict[str, UploadFile | str], wrong: Violations) -> int:
    seconds = fields.get(_SECONDS)
    if seconds is None and _ANCHOR not in fields:
        return KEPT_S
    if fields.get(_ANCHOR) != "created_at":
        wrong.add("expires_after", "its anchor must be created_at")
    is_number = isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    if not is_number or not LEAST_KEPT_S <= int(str(seconds)) <= KEPT_S:
        wrong.add("expires_after", f"its seconds must be from {LEAST_KEPT_S} to {KEPT_S}")
        return KEPT_S
    return int(str(seconds))
