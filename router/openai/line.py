"""One line of a batch, answered as the same body over HTTP would be: same checks, same path, same errors.

It runs at the lowest priority, whatever its body says. What is refused for load, or for a worker that was lost, is no
answer yet.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from cluster.errors import BatonError, FieldViolation, InternalError
from cluster.pb import generation_pb2 as pb
from router.api.call import INLINE_BYTES, Call, Principal
from router.api.validate import MOST_PRIORITY
from router.api.violations import invalid
from router.batches.input_lines import Line
from router.batches.records import Batch
from router.batches.runner import TriedClaim
from router.openai import specs
from router.openai.answers import TokenBytes
from router.openai.app import Generate, checked, form_of, too_large
from router.openai.bodies import ChatBody, CompletionBody
from router.openai.errors import failure_of
from router.openai.exchange import first_of, log

_REFUSED, _LOST = "RESOURCE_EXHAUSTED", "UNAVAILABLE"
_RETRY_AFTER_S = 1.0
_Asked = tuple[CompletionBody | ChatBody, list[pb.GenerationSpec]]


class LineAnswerer:
    """`principal_of_id`: the owner of an API key, by its id. `max_body_bytes`: the limit for the same body over
    HTTP."""

    def __init__(
        self,
        generate: Generate,
        principal_of_id: Callable[[str], Principal],
        token_bytes: TokenBytes,
        max_body_bytes: int,
    ) -> None:
        self._generate_one = generate
        self._principal_of_id = principal_of_id
        self._token_bytes = token_bytes
        self._max_body_bytes = max_body_bytes

    async def answer(self, batch: Batch, line: Line, request_id: str) -> TriedClaim:
        try:
            return TriedClaim(200, await self._generate(batch, line, request_id))
        except BatonError as error:
            failure = failure_of(error, specs.names_of(line.body))
            if error.grpc_code not in (_REFUSED, _LOST):
                return TriedClaim(failure.status, failure.body)
            is_refusal = error.grpc_code == _REFUSED
            return TriedClaim(failure.status, failure.body, error.retry_after_s or _RETRY_AFTER_S, is_refusal)
        except Exception:
            log.exception("a line of a batch failed")
            failure = failure_of(InternalError("the router failed on this request; its log says why"))
            return TriedClaim(failure.status, failure.body)

    async def _generate(self, batch: Batch, line: Line, request_id: str) -> dict[str, Any]:
        most = self._max_body_bytes
        if line.size_bytes > most and len(json.dumps(line.body, ensure_ascii=False).encode()) > most:
            raise too_large(most)
        is_short, read = line.size_bytes <= INLINE_BYTES, (batch.endpoint, line.body, request_id)
        body, wanted = _read(*read) if is_short else await asyncio.to_thread(_read, *read)
        form = form_of(body, wanted, self._token_bytes)
        call = Call(self._principal_of_id(batch.key_id))
        try:
            async with asyncio.TaskGroup() as group:
                asked = [pb.GenerateRequest(spec=spec) for spec in wanted]
                tasks = [group.create_task(self._generate_one(each, call)) for each in asked]
        except BaseExceptionGroup as failures:
            raise first_of(failures) from failures
        return form.whole([task.result() for task in tasks])


def _read(endpoint: str, found: dict[str, Any], request_id: str) -> _Asked:
    """Raises InvalidRequest or NotServed."""
    body: CompletionBody | ChatBody
    if endpoint == "/v1/chat/completions":
        body = checked(found, ChatBody)
        wanted = [specs.chat_spec(body, request_id)]
    else:
        body = checked(found, CompletionBody)
        wanted = specs.completion_specs(body, request_id)
    if body.stream:
        raise invalid((FieldViolation("stream", "must be false in a batch"),))
    for spec in wanted:
        if abs(spec.scheduling.priority) <= MOST_PRIORITY:
            spec.scheduling.priority = -MOST_PRIORITY
    return body, wanted
