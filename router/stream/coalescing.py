"""How often the streams of a router speak: what comes more often is told together.

A message costs the router and its client a tenth of a millisecond of a core whether it carries one token or ten. A few
streams are told each token as it comes. Many share a budget of messages, so that telling takes no more than a part of
the machine, and each of them is told the more tokens at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGES_PER_CORE = 250
"""A second: some fortieth of a core here, and as much where the client is."""
MOST_SPACING_S = 0.1
LEAST_SPACING_S = 0.002
"""Below this, waiting would cost what it saves."""


class MessageRate:
    """Of all streams together."""

    def __init__(self, messages_per_s: float | None = None) -> None:
        """None: by the cores of this machine."""
        self._messages_per_s = messages_per_s or MESSAGES_PER_CORE * (os.cpu_count() or 1)
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        """While it lasts, there is one stream more."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    @property
    def spacing_s(self) -> float:
        """How long a stream is to wait after a message that told tokens; 0 for not at all."""
        spacing_s = min(self._num_streams / self._messages_per_s, MOST_SPACING_S)
        return spacing_s if spacing_s > LEAST_SPACING_S else 0.0
