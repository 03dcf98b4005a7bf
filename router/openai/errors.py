"""A BatonError as OpenAI's clients know errors: a status that says whether to try again, and a body.

    {"error": {"message": "temperature: must be between 0 and 2 (got 3)", "type": "invalid_request_error",
               "param": "temperature", "code": "invalid_request"}}

Messages name a field as the HTTP client wrote it, not by its path in the .proto. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cluster.errors import BatonError
from cluster.pb import generation_pb2 as pb
from router.openai.answers import TimingAnswer

_STATUS = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "FAILED_PRECONDITION": 400,
    "UNIMPLEMENTED": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPE = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODE = {"OUT_OF_RANGE": "context_length_exceeded", "UNAUTHENTICATED": "invalid_api_key", "NOT_FOUND": "not_found"}
_FIELDS = {
    "max_output_tokens": "max_tokens",
    "min_output_tokens": "min_tokens",
    "token_ids.ids": "prompt",
    "token_ids": "prompt",
    "text": "prompt",
    "chat.template_kwargs": "chat_template_kwargs",
    "include_stop_in_output": "include_stop_str_in_output",
    "json_object": "response_format",
    "json_schema": "response_format",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "grammar_ebnf": "structured_outputs.grammar",
}
"""HTTP names of fields, by the last part of their path in the .proto."""
RESUME, LAST_EVENT = "Baton-Resume", "Last-Event-ID"
"""Headers of a stream that may be resumed, and of the call that does so."""
RESUME_NAMES = {"resume.generation_id": LAST_EVENT, "resume.next_token_indexes": LAST_EVENT, "resume": RESUME}
_PATH = re.compile(
    r"\b(?:spec\.(?:(?:sampling|stopping|output|cache|scheduling)\.)?|(?=chat\.(?:messages|tools|template_kwargs)\b|token_ids\b))"
    r"([a-z_]+(?:\.[a-z_]+)*)"
)
"""The path of a field in a GenerationSpec, or in a TokenizeRequest or DetokenizeRequest, which have no spec."""


class HttpFailure(Exception):
    """A call that is refused, or has failed."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.timing_headers: dict[str, str] = {}
        kind = _TYPE.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def headers(self) -> dict[str, str]:
        """The timing, and the delay before another try: in whole seconds as HTTP has it, and in milliseconds, which
        OpenAI's SDK prefers."""
        if self.retry_after_s is None:
            return self.timing_headers
        ms = math.ceil(1000 * self.retry_after_s)
        return {"retry-after": str(math.ceil(self.retry_after_s)), "retry-after-ms": str(ms), **self.timing_headers}


def failure_of(error: BatonError, names: Mapping[str, str] = MappingProxyType({})) -> HttpFailure:
    """`names`: this client's names for fields of the .proto (the last part of their path), where they are not the
    usual. The timing is told where the request asked for it."""
    status = _STATUS[error.grpc_code]
    is_named = error.violations and error.grpc_code != "RESOURCE_EXHAUSTED"
    param = rename(error.violations[0].field, names) if is_named else None
    code = "model_not_found" if (status, param) == (404, "model") else _CODE.get(error.grpc_code, error.reason.lower())
    failure = HttpFailure(status, code, rename(error.message, names), param, error.retry_after_s)
    if error.timing is not None:
        failure.body["timing"] = timing = timing_of(error.timing)
        failure.timing_headers = timing_headers(timing)
    return failure


def timing_of(timing: pb.Timing) -> TimingAnswer:
    durations = timing.queue, timing.prefill, timing.kv_transfer, timing.time_to_first_token, timing.decode
    queue, prefill, transfer, first, decode = (round(each.ToNanoseconds() / 1e6, 3) for each in durations)
    return {
        "placement": timing.placement,
        "migrations": timing.migrations,
        "fetched_tokens": timing.fetched_tokens,
        "queue_ms": queue,
        "prefill_ms": prefill,
        "kv_transfer_ms": transfer,
        "time_to_first_token_ms": first,
        "decode_ms": decode,
    }


def timing_headers(timing: Mapping[str, object]) -> dict[str, str]:
    return {f"x-baton-{name.replace('_', '-')}": str(value) for name, value in timing.items()}


def rename(text: str, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Gives fields of a GenerationSpec the names that they have in a body. Those of a name with an index are these."""
    text = _PATH.sub(lambda found: _name(found[1], {**_FIELDS, **names}), text)
    for known, name in names.items():
        text = text.replace(known, name) if "[" in known else text
    return text


def _name(path: str, names: Mapping[str, str]) -> str:
    for known, name in names.items():
        if path == known or path.startswith(f"{known}."):
            return name + path[len(known) :]
    return path.removeprefix("chat.")
