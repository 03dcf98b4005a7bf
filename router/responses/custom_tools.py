"""Custom tools, whose input is text: to the model they are functions with one argument, `input`, a string. Pure.

A format by a regular expression holds for that string, and is followed as any strict schema is. One by a Lark grammar
is refused: nothing follows a grammar within the escapes of a JSON string.
"""

from __future__ import annotations

import json
import re
from typing import Any

ARGUMENT = "input"
_HEAD = re.compile(rf'\s*\{{\s*"{ARGUMENT}"\s*:\s*"')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PIECES = re.compile(r'([^"\\]+)|\\([^u])|\\u([0-9a-fA-F]{4})|(")')


def parameters_of(pattern: str | None) -> dict[str, Any]:
    """The schema of the function's arguments; the whole of the input matches the pattern, if there is one."""
    text = {"type": "string"} | ({} if pattern is None else {"pattern": f"^(?:{pattern})$"})
    return {"type": "object", "properties": {ARGUMENT: text}, "required": [ARGUMENT], "additionalProperties": False}


def arguments_of(text: str) -> str:
    """The arguments of a call with this input."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


class InputReader:
    """Reads the input out of arguments that come in pieces."""

    def __init__(self) -> None:
        self._unread = ""
        self._is_inside = self._is_over = False
        self._half = ""
        """The first half of a character of which the second one is still to come."""

    def read(self, arguments: str) -> str:
        """Returns what the next piece adds to the input."""
        self._unread += arguments
        if not self._is_inside:
            head = _HEAD.match(self._unread)
            if head is None:
                return ""
            self._is_inside, self._unread = True, self._unread[head.end() :]
        found, at = "", 0
        while not self._is_over and (piece := _PIECES.match(self._unread, at)) is not None:
            text, escape, code, end = piece.groups()
            self._is_over, at = end is not None, piece.end()
            if code is not None:
                found += self._unit(code)
                continue
            found += self._lone_half() + (text or "" if escape is None else _ESCAPES.get(escape, escape))
        self._unread = self._unread[at:]
        return found

    def _unit(self, code: str) -> str:
        """A unit of UTF-16, of which some characters have two."""
        unit, half = chr(int(code, 16)), self._half
        if half and "\udc00" <= unit <= "\udfff":
            self._half = ""
            return (half + unit).encode("utf-16", "surrogatepass").decode("utf-16")
        before = self._lone_half()
        if "\ud800" <= unit <= "\udbff":
            self._half = unit
            return before
        return before + ("\ufffd" if "\udc00" <= unit <= "\udfff" else unit)

    def _lone_half(self) -> str:
        half, self._half = self._half, ""
        return "\ufffd" if half else ""
