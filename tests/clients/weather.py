"""The question that agents here are asked, the tool that answers it, and what they then tell. Knows no client."""

from __future__ import annotations

from typing import Any

from asked import Told

QUESTION = "Which is warmer, Rome or Oslo?"
AT_ONCE = "Ask for both at once: Rome or Oslo?"
DEGREES = {"Rome": 21, "Oslo": 4}
NAME, DESCRIPTION = "weather", "Tells the weather of a city."
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
MOST_TURNS = 5


class Weather:
    """The tool, which keeps what it was asked for."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def of(self, city: str) -> str:
        self.cities.append(city)
        return f"{city} has {DEGREES[city]} degrees."

    def told(self, text: object) -> Told:
        return {"text": text, "cities": self.cities}
