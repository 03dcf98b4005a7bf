"""The formats that are known, and which of them a model writes."""

from __future__ import annotations

from router.tool_calls.format import ToolFormat
from router.tool_calls.hermes import Hermes
from router.tool_calls.thinking import Thinking

TOOL_FORMATS: tuple[ToolFormat, ...] = (Hermes(),)
"""Asked in this order whether a template is theirs."""
THINKING = (Thinking("think", "<think>", "</think>"),)


def tool_format_of(template: str) -> ToolFormat | None:
    """The format that a chat template writes calls in, by its source; None: it knows no tools."""
    return next((each for each in TOOL_FORMATS if each.is_of(template)), None)


def thinking_of(template: str) -> Thinking | None:
    """How the model of this chat template thinks, by its source; None: it does not."""
    return next((each for each in THINKING if each.begin in template or each.end in template), None)
