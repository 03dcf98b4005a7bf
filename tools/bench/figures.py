"""What clients saw of their requests, and its figures, under vLLM's `bench serve` names where those exist. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """One request as its client saw it, filled in while the answer comes. Instants are of one clock, in seconds."""

    num_prompt_tokens: int
    sent_at: float
    message_times: list[float] = field(default_factory=list)
    """When each message with output came."""
    num_output_tokens: int = 0
    message_tokens: list[int] = field(default_factory=list)
    """Tokens in each message. Only gRPC reports it."""
    token_ids: list[int] = field(default_factory=list)
    """The output, where the request asked for token ids."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that came from a cache, by the server's account."""
    num_moves: int = 0
    """How often the request moved to another worker, by the server's account."""
    num_gaps: int = 0
    """Messages that do not continue the one before: tokens were lost or repeated. Only gRPC numbers tokens."""
    placement: str = ""
    """Baton's `Timing.placement`."""
    ended_at: float = 0.0
    was_refused: bool = False
    """Refused because of load or a quota."""
    error: str = ""
    """Why the request did not complete."""

    @property
    def is_complete(self) -> bool:
        return not self.error and bool(self.message_times)

    @property
    def ttft_s(self) -> float:
        return self.message_times[0] - self.sent_at

    @property
    def e2el_s(self) -> float:
        return self.message_times[-1] - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first; 0 for one token."""
        num_later = self.num_output_tokens - 1
        return (self.message_times[-1] - self.message_times[0]) / num_later if num_later > 0 else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Seconds between messages; a server may send several tokens in one."""
        return [after - before for before, after in zip(self.message_times, self.message_times[1:], strict=False)]


PERCENTILES = (50, 90, 95, 99)
OBJECTIVES: Mapping[str, Callable[[Sample], float]] = {
    "ttft": lambda sample: sample.ttft_s,
    "tpot": lambda sample: sample.tpot_s,
    "e2el": lambda sample: sample.e2el_s,
}
"""What `--goodput` may limit."""


def figures_of(samples: Sequence[Sample], duration_s: float, objectives_ms: Mapping[str, float]) -> dict[str, Any]:
    """Times in milliseconds, rates a second. Percentiles interpolate, as numpy's do."""
    done = [sample for sample in samples if sample.is_complete]
    num_prompt, num_output = sum(s.num_prompt_tokens for s in done), sum(s.num_output_tokens for s in done)
    kept = sum(all(1000 * OBJECTIVES[name](s) <= most for name, most in objectives_ms.items()) for s in done)
    num_cached = sum(sample.num_cached_tokens for sample in done)
    times = {
        "ttft": [sample.ttft_s for sample in done],
        "tpot": [sample.tpot_s for sample in done if sample.num_output_tokens > 1],
        "itl": [itl for sample in done for itl in sample.itls_s],
        "e2el": [sample.e2el_s for sample in done],
    }
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(samples) - len(done),
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": kept / duration_s if objectives_ms else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_prompt + num_output) / duration_s,
        **{key: value for name, values in times.items() for key, value in _spread(name, values).items()},
        "cached_share": num_cached / num_prompt if num_prompt else 0.0,
        "num_gaps": sum(sample.num_gaps for sample in samples),
        "num_moves": sum(sample.num_moves for sample in done),
        "max_concurrent_requests": _most_at_once(samples),
        "errors": sorted({sample.error for sample in samples if sample.error})[:10],
    }


def details_of(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Each completed request in the order of sending, in seconds, under vLLM's names of `--save-detailed`."""
    first = min((sample.sent_at for sample in samples), default=0.0)
    done = sorted((sample for sample in samples if sample.is_complete), key=lambda sample: sample.sent_at)
    return {
        "input_lens": [sample.num_prompt_tokens for sample in done],
        "output_lens": [sample.num_output_tokens for sample in done],
        "start_times": [sample.sent_at - first for sample in done],
        "ttfts": [sample.ttft_s for sample in done],
        "itls": [sample.itls_s for sample in done],
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """A percentile of at least one value, in ascending order."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds, from texts like `ttft:500`. Raises ValueError."""
    found = {}
    for text in texts:
        name, _, most = text.partition(":")
        if name not in OBJECTIVES or not most.replace(".", "", 1).isdigit():
            raise ValueError(f"{text!r} is no objective; write NAME:MS, with {', '.join(OBJECTIVES)} as the name")
        found[name] = float(most)
    return found


def _spread(name: str, values_s: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1000 * value for value in values_s) or [0.0]
    spread = {f"mean_{name}_ms": statistics.fmean(ordered), f"median_{name}_ms": percentile(ordered, 0.5)}
    spread[f"std_{name}_ms"] = statistics.pstdev(ordered)
    return spread | {f"p{p}_{name}_ms": percentile(ordered, p / 100) for p in PERCENTILES}


def _most_at_once(samples: Sequence[Sample]) -> int:
    changes = sorted([(s.ended_at, -1) for s in samples] + [(s.sent_at, 1) for s in samples])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
