"""Recent activity of one router, for status displays: the last seconds, the last requests, hand-offs, rates of workers.

    on_first_token / on_tokens / on_end -> the current second -> `tick`, once a second -> the ring -> GetActivity

Bounded: KEPT_SECONDS seconds and KEPT_REQUESTS requests. Holds no prompt and no output. Pure: the time is an argument.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from cluster.lifecycle import RequestState
from cluster.pb import admin_pb2, worker_pb2
from router.observe.counters import OUTCOMES
from router.observe.prefix_use import PrefixUse
from router.stream.request import LiveRequest, RequestObserver

KEPT_SECONDS = 300
KEPT_REQUESTS = 100
WINDOW_SECONDS = 60
_KEPT_PHASES = 32
"""The newest phases kept of each request. Only one that moved again and again has more."""
_SUMMED = (*(f"num_{outcome}" for outcome in OUTCOMES), "num_prompt_tokens", "num_output_tokens", "duration_s")
_LEAST_S = 1e-6
"""Shorter durations count as this."""
_SCALE = 1 / math.log(1.08)
_LOG = math.log
_RATE_SPAN = 5
"""Rates of workers are over this many samples."""
_Sample = tuple[float, str, tuple[int, int, int, int]]
"""The time, the worker's incarnation, and its counters."""

Pair = tuple[str, str]
"""Worker ids: prefill, decode."""


class Sketch:
    """Durations, counted in some 300 buckets that grow by 8 % from a microsecond to hours: percentiles within 4 %.

    Sketches add up, so that a minute is the sum of its seconds.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        """The number of durations added."""
        return self._counts.total()

    def add(self, seconds: float) -> None:
        self._counts[int(_LOG(seconds / _LEAST_S) * _SCALE) if seconds > _LEAST_S else 0] += 1

    def merge(self, other: Sketch) -> None:
        self._counts.update(other._counts)

    def quantile(self, share: float) -> float:
        """Returns seconds, the middle of the bucket; 0.0 when the sketch is empty."""
        wanted, seen = share * len(self), 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                return _LEAST_S * math.exp((bucket + 0.5) / _SCALE)
        return 0.0

    def to_proto(self) -> admin_pb2.Quantiles:
        p50, p95, p99 = (self.quantile(share) for share in (0.5, 0.95, 0.99))
        return admin_pb2.Quantiles(count=len(self), p50=p50, p95=p95, p99=p99)


@dataclass
class _HandOffs:
    """Hand-offs of one pair of workers."""

    count: int = 0
    num_prompt_tokens: int = 0
    seconds: Sketch = field(default_factory=Sketch)

    def add(self, other: _HandOffs) -> None:
        self.count += other.count
        self.num_prompt_tokens += other.num_prompt_tokens
        self.seconds.merge(other.seconds)


@dataclass
class _Second:
    """`message` is complete once the second is over."""

    message: admin_pb2.ActivitySecond = field(default_factory=admin_pb2.ActivitySecond)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft: Sketch = field(default_factory=Sketch)
    itl: Sketch = field(default_factory=Sketch)
    pairs: dict[Pair, _HandOffs] = field(default_factory=dict)


class Activity(RequestObserver):
    """Activity of one router; call `tick` once a second."""

    def __init__(self) -> None:
        self.life = secrets.token_hex(8)
        self._second = _Second()
        self._seconds: deque[_Second] = deque(maxlen=KEPT_SECONDS)
        self._requests: deque[admin_pb2.RequestLife] = deque(maxlen=KEPT_REQUESTS)
        self._num_requests = 0
        self._last: tuple[float, Mapping[str, int]] | None = None
        """When the last second ended, and the numbers of requests that had ended by then."""
        self._minute: tuple[admin_pb2.ActivitySecond, dict[Pair, _HandOffs]] | None = None
        """The sum of the last minute, kept until the next tick."""

        self.prefix_use = PrefixUse()

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        self._second.ttft.add(seconds)
        self._second.num_prompt_tokens += num_prompt_tokens

    def on_tokens(self, count: int, interval_s: float | None) -> None:
        """Tokens that come together count once in the ITL, each with an equal share of the time, as in the metrics."""
        self._second.num_output_tokens += count
        if interval_s is not None:
            self._second.itl.add(interval_s / count)

    def on_end(self, live: LiveRequest) -> None:
        self.prefix_use.count(live)
        self._num_requests += 1
        self._requests.append(_life_of(live, self._num_requests))
        placement, lifecycle = live.placement, live.lifecycle
        begin, end = (lifecycle.instant(s, last=True) for s in (RequestState.TRANSFERRING, RequestState.DECODING))
        if placement is None or placement.prefill_id is None or begin is None or end is None or end < begin:
            return
        pair = placement.prefill_id, placement.decode_id
        hand_offs = self._second.pairs.setdefault(pair, _HandOffs())
        hand_offs.count += 1
        hand_offs.num_prompt_tokens += len(live.request.prompt_token_ids)
        hand_offs.seconds.add(end - begin)

    def tick(self, now: float, wall_s: float, ended: Mapping[str, int], *, num_queued: int, num_running: int) -> None:
        """Closes the current second. `ended`: requests since the start, by outcome. The first call only begins."""
        last, self._last = self._last, (now, dict(ended))
        if last is None:
            self._second = _Second()
            return
        done, self._second = self._second, _Second()
        number = self._seconds[-1].message.number + 1 if self._seconds else 1
        done.message = admin_pb2.ActivitySecond(
            number=number,
            time=wall_s,
            duration_s=now - last[0],
            num_prompt_tokens=done.num_prompt_tokens,
            num_output_tokens=done.num_output_tokens,
            num_queued=num_queued,
            num_running=num_running,
            ttft=done.ttft.to_proto(),
            itl=done.itl.to_proto(),
            **{f"num_{outcome}": ended[outcome] - last[1][outcome] for outcome in OUTCOMES},
        )
        self._seconds.append(done)
        self._minute = None

    def response(
        self, request: admin_pb2.GetActivityRequest, now_by_pair: Counter[Pair]
    ) -> admin_pb2.GetActivityResponse:
        """Everything but the workers' rates. `now_by_pair`: requests that are being handed over."""
        is_same = request.life == self.life
        after_second, after_request = (request.after_second, request.after_request) if is_same else (0, 0)
        if self._minute is None:
            last = list(islice(self._seconds, max(0, len(self._seconds) - WINDOW_SECONDS), None))
            self._minute = _window(last), _by_pair(last)
        window, by_pair = self._minute
        return admin_pb2.GetActivityResponse(
            life=self.life,
            seconds=[second.message for second in self._seconds if second.message.number > after_second],
            requests=[life for life in self._requests if life.number > after_request],
            pairs=_pairs(by_pair, now_by_pair),
            window=window,
        )


class WorkerRates:
    """Tokens and KV bytes per second of each worker, from the counters that it reports; sampled once a second."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}

    def add(self, now: float, workers: Iterable[tuple[worker_pb2.WorkerInfo, worker_pb2.WorkerStats]]) -> None:
        """Samples every worker; others are forgotten. The counters of a restarted worker begin again."""
        seen: dict[str, deque[_Sample]] = {}
        for info, stats in workers:
            samples = self._samples.get(info.worker_id, deque(maxlen=_RATE_SPAN + 1))
            if samples and samples[-1][1] != info.incarnation:
                samples = deque(maxlen=_RATE_SPAN + 1)
            tokens = (stats.num_prefill_tokens, stats.num_decode_tokens)
            samples.append((now, info.incarnation, (*tokens, stats.kv_bytes_sent, stats.kv_bytes_received)))
            seen[info.worker_id] = samples
        self._samples = seen

    def rates(self) -> list[admin_pb2.WorkerRates]:
        """Rates over the last few seconds; all 0 for a worker that was sampled once."""
        return [self._rates_of(worker_id, samples) for worker_id, samples in self._samples.items()]

    @staticmethod
    def _rates_of(worker_id: str, samples: deque[_Sample]) -> admin_pb2.WorkerRates:
        (begin, _, first), (end, _, last) = samples[0], samples[-1]
        seconds = max(end - begin, 1e-9)
        prefill, decode, sent, received = (max(0, b - a) / seconds for a, b in zip(first, last, strict=True))
        return admin_pb2.WorkerRates(
            worker_id=worker_id,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=decode,
            kv_sent_bytes_per_s=sent,
            kv_received_bytes_per_s=received,
        )


def _life_of(live: LiveRequest, number: int) -> admin_pb2.RequestLife:
    entries, begin = live.lifecycle.history, live.arrived_at
    placement = live.placement
    first_s = None if live.first_token_at is None else live.first_token_at - begin
    return admin_pb2.RequestLife(
        number=number,
        generation_id=live.key.request_id,
        request_id=live.request.client_request_id,
        tenant=live.principal.tenant,
        outcome=entries[-1].state.value,
        arrival_time=live.arrival_time_s,
        phases=[
            admin_pb2.LifePhase(state=entry.state.value, at_s=entry.at - begin, why=entry.why)
            for entry in entries[-_KEPT_PHASES:]
        ],
        first_token_s=first_s,
        num_prompt_tokens=len(live.request.prompt_token_ids),
        num_cached_tokens=live.num_cached_tokens,
        num_output_tokens=live.num_tokens,
        prefill_id="" if placement is None or placement.prefill_id is None else placement.prefill_id,
        decode_id="" if placement is None else placement.decode_id,
        placement="not placed" if placement is None else placement.reason,
        num_moves=live.num_moves,
    )


def _window(seconds: Iterable[_Second]) -> admin_pb2.ActivitySecond:
    """The sum of `seconds`; what describes the end of a second is that of the last one."""
    whole, ttft, itl = admin_pb2.ActivitySecond(), Sketch(), Sketch()
    for second in seconds:
        sums = {name: getattr(whole, name) + getattr(second.message, name) for name in _SUMMED}
        ttft.merge(second.ttft)
        itl.merge(second.itl)
        whole.CopyFrom(second.message)
        for name, value in sums.items():
            setattr(whole, name, value)
    whole.ttft.CopyFrom(ttft.to_proto())
    whole.itl.CopyFrom(itl.to_proto())
    return whole


def _by_pair(seconds: Iterable[_Second]) -> dict[Pair, _HandOffs]:
    sums: dict[Pair, _HandOffs] = {}
    for second in seconds:
        for pair, hand_offs in second.pairs.items():
            sums.setdefault(pair, _HandOffs()).add(hand_offs)
    return sums


def _pairs(by_pair: Mapping[Pair, _HandOffs], now_by_pair: Counter[Pair]) -> list[admin_pb2.PairActivity]:
    """The pairs that hand over requests now or did in the last minute."""
    idle = _HandOffs()
    sums = {pair: by_pair.get(pair, idle) for pair in {*by_pair, *now_by_pair}}
    return [
        admin_pb2.PairActivity(
            prefill_id=pair[0],
            decode_id=pair[1],
            num_now=now_by_pair[pair],
            num_handed_over=total.count,
            num_prompt_tokens=total.num_prompt_tokens,
            kv_transfer=total.seconds.to_proto(),
        )
        for pair, total in sorted(sums.items())
    ]
