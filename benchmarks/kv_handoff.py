"""What a client waits for a hand-off, measured on two real workers by the events that a router would hear.

    prefill    from the prefill worker's phase event to its first token
    exposed    from the first token (the prefill worker's) to the decode phase (the decode worker's): what the hand-off
               adds to the prefill, since nothing is decoded before it; its share is exposed / prefill
    commit     the same as exposed, for a prompt so short that little is left to be moved
    cancel     from sending a cancel to both workers until both have said that no request and no block is held

Each request is alone on both workers; its prompt is random and passes by every cache.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.worker_pair import Heard, WorkerPair

SHORT_PROMPT = 16
OUTPUT_TOKENS = 2
CANCEL_STATES = ("prefilling", "transferring", "decoding")


@dataclass(frozen=True)
class HandedOff:
    """One hand-off, in seconds."""

    prefill: float
    exposed: float

    @property
    def share(self) -> float:
        return self.exposed / max(self.prefill, 1e-6)  # both events of a prompt that takes no time can come as one


@dataclass
class Cancels:
    """Seconds that cancels took, by what the benchmark had heard of the request when it sent them."""

    by_state: dict[str, list[float]] = field(default_factory=dict)

    @property
    def all(self) -> list[float]:
        return [took for some in self.by_state.values() for took in some]

    def counts(self) -> dict[str, int]:
        return dict(Counter({state: len(some) for state, some in self.by_state.items()}))


class HandOffs:
    """Measures on one pair of workers. Raises ProgramFailed when one of them, or a request, fails."""

    def __init__(self, pair: WorkerPair, vocab_size: int) -> None:
        self._pair = pair
        self._vocab_size = vocab_size
        self._random = random.Random(1)

    def one(self, prompt_tokens: int) -> HandedOff:
        """A hand-off from its beginning until nothing of it is held."""
        _, heard = self._pair.hand_off(prompt_tokens, OUTPUT_TOKENS, self._vocab_size)
        self._pair.wait("the request has ended", lambda: heard.ended is not None)
        self._pair.wait_idle()
        assert heard.prefilling and heard.first_token and heard.decoding
        return HandedOff(heard.first_token - heard.prefilling, heard.decoding - heard.first_token)

    def exposed(self, prompt_sizes: Iterable[int]) -> dict[int, list[HandedOff]]:
        """Hand-offs of prompts of these sizes, in this order; the first of the smallest size warms up."""
        measured: dict[int, list[HandedOff]] = {}
        for prompt_tokens in prompt_sizes:
            measured.setdefault(prompt_tokens, []).append(self.one(prompt_tokens))
        return measured

    def commits(self, numbers: Iterable[int]) -> list[float]:
        return [self.one(SHORT_PROMPT).exposed for _ in numbers]

    def cancels(self, numbers: Iterable[int], prompt_tokens: int, output_tokens: int) -> Cancels:
        """Cancels at random moments, as many in each state; the request is long enough to be still in it."""
        usual = [self.one(prompt_tokens) for _ in range(5)]
        usual_s = (statistics.median(one.prefill for one in usual), statistics.median(one.exposed for one in usual))
        cancels = Cancels()
        for number in numbers:
            state, took = self._cancel(CANCEL_STATES[number % 3], *usual_s, prompt_tokens, output_tokens)
            if state != "ended":
                cancels.by_state.setdefault(state, []).append(took)
        return cancels

    def _cancel(
        self, aim: str, prefill_s: float, exposed_s: float, prompt_tokens: int, output_tokens: int
    ) -> tuple[str, float]:
        key, heard = self._pair.hand_off(prompt_tokens, output_tokens, self._vocab_size)
        self._pair.wait_busy()
        match aim:
            case "prefilling":
                self._pair.wait("it is prefilled", lambda: heard.prefilling is not None)
                lasts_s = prefill_s
            case "transferring":
                self._pair.wait("its first token came", lambda: heard.first_token is not None)
                lasts_s = exposed_s
            case _:
                self._pair.wait("it is decoded", lambda: heard.decoding is not None)
                lasts_s = prefill_s
        # Two workers tell of the hand-off's ends, and what one says may be heard after what the other says later.
        time.sleep(self._random.uniform(0.0, max(0.0, lasts_s)))
        state = _state(heard)
        sent = self._pair.cancel(key)
        return state, self._pair.wait_idle() - sent


def _state(heard: Heard) -> str:
    if heard.ended is not None:
        return "ended"
    if heard.decoding is not None:
        return "decoding"
    return "prefilling" if heard.first_token is None else "transferring"
