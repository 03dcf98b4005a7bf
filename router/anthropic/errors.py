"""A failure as Anthropic's clients know failures. Pure.

{"type": "error", "error": {"type": "invalid_request_error", "message": "temperature: must be between 0 and 2 (got 3)"},
 "request_id": "req-0a1b…"}
"""

from __future__ import annotations

from router.anthropic.answers import NO_THREADS, FailureAnswer, FailureDetail
from router.openai.errors import RESUME_NAMES, HttpFailure
from router.openai.http import Dialect

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
NAMES = {
    **RESUME_NAMES,
    "stop": "stop_sequences",
    "json_schema": "output_config.format.schema",
    "reasoning.effort": "output_config.effort",
    "reasoning.max_tokens": "thinking.budget_tokens",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat": "messages",
}
"""Names of fields of the .proto in a body, as `failure_of` takes them."""
_IN_A_TOOL = ((".function.parameters", ".input_schema"), (".function.name", ".name"))


def told(failure: HttpFailure, request_id: str) -> HttpFailure:
    """The failure with the status and the body that this API has for it."""
    error = failure.body["error"]
    code, message, status = error["code"], str(error["message"]), failure.status
    if code == "overloaded":
        status = 529
    elif code == "context_length_exceeded" and error["param"] is None:
        status = 413  # the body is too long, not the prompt
    elif code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # clients look for these words, and compact the conversation
    for path, name in _IN_A_TOOL:
        message = message.replace(path, name)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    said = HttpFailure(status, str(code), message, retry_after_s=failure.retry_after_s)
    detail: FailureDetail = {"type": kind, "message": message}
    if code == NO_THREADS:
        detail["details"] = {"error_code": NO_THREADS}
    body: FailureAnswer = {"type": "error", "error": detail, "request_id": request_id}
    if "timing" in failure.body:
        body["timing"], said.timing_headers = failure.body["timing"], failure.timing_headers
    said.body = dict(body)
    return said


ANTHROPIC = Dialect(told, FailureAnswer, has_named_events=True)
