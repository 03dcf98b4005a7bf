"""How numbers are written for people."""

from __future__ import annotations

_UNITS = ("kB", "MB", "GB", "TB")


def count_of(number: int, what: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def format_bytes(count: int) -> str:
    """`17.2 MB`: three or four digits, in powers of 1000; below 1000 `512 B`."""
    if abs(count) < 1000:
        return f"{count} B"
    size = float(count)
    for unit in _UNITS:
        size /= 1000
        if abs(size) < 999.95 or unit == _UNITS[-1]:
            break
    return f"{size:.1f} {unit}"
