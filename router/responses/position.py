"""How far the events of a response went, and a client with them: what the id of an event says. Pure."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field
from hashlib import sha256

RESPONSE = "resp_"
"""What the id of a response begins with."""
_POSITION = re.compile(r"(gen-[0-9a-f]{24})\.([0-9a-f]{48})\.(\d{1,12})\.(\d{1,9})\.(\d{1,9})\.(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class ToldEvents:
    """How far the events of a response went."""

    num_events: int = 0
    position: int = 0
    """Characters that were read, each begin and each end of a call counted as one."""
    num_here: int = 0
    """Events that were told at that place, beside pieces of text."""


@dataclass(frozen=True)
class ResponsePosition:
    """How far a client has come with the stream of a response that it waits for: what the id of an event says."""

    secret: str
    """The response's id is its digest, so that who names a response as theirs has begun it."""
    created_at: int
    generation_id: str = ""
    """Empty: it has not begun."""
    told: ToldEvents = field(default_factory=ToldEvents)

    @property
    def response_id(self) -> str:
        return RESPONSE + sha256(self.secret.encode()).hexdigest()[:48]

    def __str__(self) -> str:
        told = self.told
        return f"{self.generation_id}.{self.secret}.{self.created_at}.{told.num_events}.{told.position}.{told.num_here}"

    @classmethod
    def new(cls) -> ResponsePosition:
        return cls(secrets.token_hex(24), int(time.time()))

    @classmethod
    def parse(cls, text: str) -> ResponsePosition | None:
        """None for what is no such id."""
        found = _POSITION.fullmatch(text)
        if found is None:
            return None
        return cls(found[2], int(found[3]), found[1], ToldEvents(*map(int, found.groups()[3:])))
