"""Lists as OpenAI's clients page through them: `limit`, and `after` the last id of the page before. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import FieldViolation
from router.api.violations import invalid


def limit_of(query: Mapping[str, str], *, usual: int, most: int) -> int:
    """Raises InvalidRequest."""
    text = query.get("limit", str(usual))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise invalid((FieldViolation("limit", f"must be a whole number from 1 to {most}"),))
    return int(text)


def is_ascending(query: Mapping[str, str]) -> bool:
    """Raises InvalidRequest."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid((FieldViolation("order", "must be asc or desc"),))
    return order == "asc"


def check_names(query: Mapping[str, str], *known: str) -> None:
    """Raises InvalidRequest for a parameter that is not known."""
    unknown = tuple(sorted(set(query) - set(known)))
    if unknown:
        why = f"is not a parameter that is known here; known: {', '.join(known)}"
        raise invalid(tuple(FieldViolation(name[:64], why) for name in unknown))


def unknown_after() -> Exception:
    return invalid((FieldViolation("after", "is no id of this list; begin without it"),))


def page(told: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """`told` has one more than the limit where there are more."""
    data = list(told[:limit])
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(told) > limit}
