"""Threads that keep asking for something until the block they are entered with is left."""

from __future__ import annotations

import threading
from typing import Self

JOIN_S = 60.0


class SteadyLoad:
    """`ask` is called over and over on each of so many threads; what goes wrong is for `problems`."""

    def __init__(self, num_threads: int) -> None:
        self.problems: list[str] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._loop, args=(n,), daemon=True) for n in range(num_threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive()

    def ask(self, number: int) -> None:
        """Once, by the thread of that number."""
        raise NotImplementedError

    def _loop(self, number: int) -> None:
        while not self._is_over.is_set():
            self.ask(number)
