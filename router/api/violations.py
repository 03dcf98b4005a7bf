"""Checks of single fields, collecting violations instead of stopping at the first, up to a bound.

Owns the wording: each message names the value that came and what is allowed. Knows no field of the contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

from cluster.errors import FieldViolation, InvalidRequest

MOST_FOUND = 20
"""Violations of one message that are collected: a wrong list of a million entries costs no more than a right one."""
_LONGEST_NUMBER = 24


class Violations:
    """Collects the mistakes in one message, at most MOST_FOUND; field paths begin with `prefix`."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._found: list[FieldViolation] = []

    @property
    def found(self) -> tuple[FieldViolation, ...]:
        return tuple(self._found)

    def add(self, field: str, description: str) -> None:
        if len(self._found) < MOST_FOUND:
            self._found.append(FieldViolation(f"{self._prefix}{field}", description))

    def number(self, field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
        """low <= value <= high, or low < value when `above`; NaN is never inside."""
        is_inside = (low < value if above else low <= value) and value <= high
        if not is_inside:
            bounds = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
            self.add(field, f"must be {bounds} (got {shown(value)})")

    def at_most(self, field: str, items: Sized, most: int, what: str) -> bool:
        """True when there are few enough of them to look at each."""
        if len(items) > most:
            self.add(field, f"at most {most} {what} are allowed (got {len(items)})")
        return len(items) <= most

    def token_ids(self, field: str, ids: Iterable[int], vocab_size: int) -> None:
        """Reports the first id outside the vocabulary only."""
        wrong = next((token_id for token_id in ids if token_id >= vocab_size), None)
        if wrong is not None:
            self.add(field, f"token id {wrong} is outside the vocabulary: ids are 0 to {vocab_size - 1}")

    def raise_if_any(self) -> None:
        if self._found:
            raise invalid(self.found)


def shown(number: float) -> str:
    """The number as an error names it: one of thousands of digits is cut."""
    return shortened(str(number) if isinstance(number, int) else f"{number:g}", _LONGEST_NUMBER)


def shortened(text: str, most: int = 100) -> str:
    """A client's text as an error repeats it: cut after `most` characters."""
    return text if len(text) <= most else text[:most] + "…"


def invalid(violations: tuple[FieldViolation, ...]) -> InvalidRequest:
    """The error of all these violations; its message names the first."""
    first = violations[0]
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    return InvalidRequest(f"{first.field}: {first.description}{more}", violations=violations)
