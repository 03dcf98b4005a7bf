"""Threads that keep asking for something until the block they are entered with is left."""

from __future__ import annotations

import threading
from typing import Self

from cluster.errors import BatonError

WAIT_S = 120.0


class SteadyLoad:
    """`ask` is called over and over on each of so many threads."""

    def __init__(self, num_threads: int) -> None:
        self.problems: list[str] = []
        self.num_done = 0
        self._changed = threading.Condition()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._loop, args=(n,), daemon=True) for n in range(num_threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def wait_for_more(self, count: int) -> None:
        """Until so many more have been answered, or something went wrong."""
        with self._changed:
            goal = self.num_done + count
            assert self._changed.wait_for(lambda: self.problems or self.num_done >= goal, WAIT_S)

    def ask(self, number: int) -> str:
        """Once, by the thread of that number; what is wrong with the answer, or nothing. May raise BatonError."""
        raise NotImplementedError

    def _loop(self, number: int) -> None:
        while not self._is_over.is_set():
            try:
                problem = self.ask(number)
            except BatonError as error:
                problem = repr(error)
            with self._changed:
                self.num_done += 1
                if problem:
                    self.problems.append(f"thread {number}: {problem}")
                self._changed.notify_all()
