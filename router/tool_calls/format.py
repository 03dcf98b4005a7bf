"""What a format of tool calls declares: how a model writes calls, how they are read, and the grammar of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.tool_calls.lark import Lark
from router.tool_calls.reader import OutputReader, Reading


@dataclass(frozen=True)
class Tool:
    """A function that a client lets the model call."""

    name: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, an object."""
    is_strict: bool = False
    """Its schema is to be followed whole; else keywords that grammars do not have are passed over."""
    index: int = 0
    """Its place among the request's tools."""

    def schema(self) -> dict[str, Any]:
        """The schema as grammars take it: JSON is written as templates write it, with one space behind colons and
        commas."""
        options = {"whitespace_flexible": False, "lenient": not self.is_strict}
        return {"type": "object", **self.parameters, "x-guidance": options}


class ToolFormat(ABC):
    """One way in which models write calls. Stateless."""

    name: str
    """What `model.tool_format` calls it."""
    begins: tuple[str, ...]
    """Texts with which the first call begins; where one is a special token of the model, it is kept in the text."""
    marks: tuple[str, ...] = ()
    """Further texts of calls that may be special tokens."""
    is_at_start: bool = False
    """An answer is calls from its first character on, or text alone."""

    @abstractmethod
    def is_of(self, template: str) -> bool:
        """Whether a chat template writes calls in this way, by its source."""

    @abstractmethod
    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        """Reads text and calls without an end. `tools` by their names; a call of another one is Garbled.

        Whoever calls it has EndOfOutput, and has Garbled where a call is open: that is text then, and reading begins
        again behind it."""

    @abstractmethod
    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> str:
        """The grammar of all that follows the first of `begins`, up to the end of the last call: an expression of Lark.

        `is_single`: one call."""
