"""Threads that keep asking for something until the block they are entered with is left.

As a program, on a machine from which the routers are reached, it keeps streams running at them: for each number read
from standard input it waits for so many more outputs, and prints what came of all so far as a line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from typing import Self

from cluster.errors import BatonError
from tools.client import BatonClient, make_spec

WAIT_S = 120.0


class SteadyLoad:
    """`ask` is called over and over on each of so many threads, which rest `rest` times as long as each call took."""

    def __init__(self, num_threads: int, rest: float = 0.0) -> None:
        self._rest = rest
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
        took_s = 0.0
        while not self._is_over.wait(self._rest * took_s):
            asked_at = time.monotonic()
            try:
                problem = self.ask(number)
            except BatonError as error:
                problem = repr(error)
            took_s = time.monotonic() - asked_at
            with self._changed:
                self.num_done += 1
                if problem:
                    self.problems.append(f"thread {number}: {problem}")
                self._changed.notify_all()


class SteadyOutputs(SteadyLoad):
    """The same requests over and over, one on each thread; each output is held against the one that the request had
    before the block was entered."""

    def __enter__(self) -> Self:
        self._reference = [self.output(number) for number in range(len(self._threads))]
        return super().__enter__()

    def ask(self, number: int) -> str:
        return "" if self.output(number) == self._reference[number] else "the output changed"

    def output(self, number: int) -> object:
        """The output of the request of that number."""
        raise NotImplementedError


class SteadyStreams(SteadyOutputs):
    """One stream for each prompt, at these routers in turn."""

    def __init__(self, clients: Sequence[BatonClient], prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        super().__init__(len(prompts))
        self._clients = clients
        self._prompts = prompts
        self._num_tokens = num_tokens
        self.longest_gap_s = 0.0
        """Between two events of a stream, or its call and its first one."""

    def output(self, number: int) -> list[int]:
        tokens: list[int] = []
        spec = make_spec(
            self._prompts[number],
            max_output_tokens=self._num_tokens,
            temperature=0.0,
            ignore_eos=True,
            token_ids=True,
        )
        client, last = self._clients[number % len(self._clients)], time.monotonic()
        with client.stream(spec, timeout_s=WAIT_S) as stream:
            for event in stream:
                last, before = time.monotonic(), last
                self.longest_gap_s = max(self.longest_gap_s, last - before)
                if event.HasField("delta"):
                    assert event.delta.first_token_index == len(tokens), "a gap or a repeat"
                    tokens.extend(event.delta.token_ids)
        return tokens


def draw_prompts(count: int) -> list[list[int]]:
    """The same each time."""
    draw = random.Random(8)
    return [draw.choices(range(4, 1000), k=draw.randint(8, 80)) for _ in range(count)]


def main(num_streams: str, num_tokens: str, *addresses: str) -> None:
    clients = [BatonClient(address) for address in addresses]
    with SteadyStreams(clients, draw_prompts(int(num_streams)), int(num_tokens)) as load:
        for line in sys.stdin:
            load.longest_gap_s = 0.0
            load.wait_for_more(int(line))
            told = {"num_done": load.num_done, "problems": load.problems, "longest_gap_s": load.longest_gap_s}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
