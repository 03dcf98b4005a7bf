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

    @property
    def options(self) -> dict[str, Any]:
        """How grammars take its schemas: JSON is written as templates write it, with one space behind colons and
        commas."""
        separators = {"item_separator": ", ", "key_separator": ": "}
        return {"whitespace_flexible": False, "lenient": not self.is_strict, **separators}

    def schema(self) -> dict[str, Any]:
        """The schema as grammars take it."""
        return {**self.parameters, "type": "object", "x-guidance": self.options}


class ToolFormat(ABC):
    """One way in which models write calls. Stateless."""

    name: str
    """What `model.tool_format` calls it."""
    marks: tuple[str, ...] = ()
    """Texts of calls that may be special tokens; they are kept in the text."""
    is_at_start: bool = False
    """An answer is calls from its first character on, or text alone."""
    key: str = ""
    """The name of the arguments, where a call is a JSON object with which an answer begins, as other JSON may."""

    @abstractmethod
    def is_of(self, template: str) -> bool:
        """Whether a chat template writes calls in this way, by its source."""

    @abstractmethod
    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        """Reads text and calls without an end. `tools` by their names; a call of another one is Garbled.

        Whoever calls it has EndOfOutput, and has Garbled where a call is open: that is text then, and reading begins
        again behind it."""

    @abstractmethod
    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        """The grammar of calls by the texts with which the first may begin, which no text has (`is_at_start`: begins
        with): for each, an expression of Lark for all that follows it up to the end of the last call.

        `is_single`: one call. Raises ValueError for a schema that this format cannot follow."""
