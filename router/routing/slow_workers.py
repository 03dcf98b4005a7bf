"""Finds workers that are far slower than predicted for a while, and keeps new requests from them until they recover.

    USUAL -> SLOW       in three windows in a row its work took three times what the cost of its own steps predicts, or
                        three times as much beyond that as its peers' work; requests that decode there move away
    SLOW -> PROBED      after a pause, twice as long each time: it gets one request at a time
    PROBED -> USUAL     the first window is as predicted
    PROBED -> SLOW      it is not

The prediction follows what a worker measures of its own steps, but slowly, and steps in which the process stood still
are left out of it: this bridges the time until the prediction knows, and covers what it never learns. A third of a
role's workers at most are slow at one time, or one of two; the last one never is. Where all are slow, none is.

Work is timed as this router sees it: a prompt from its placement to its first token, an output while it decodes.
`SlowDetector` decides and knows no clock; `SlowWatch` times the work on the dispatcher's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from cluster.pb import worker_pb2
from cluster.step_cost import PACE_SHARE, StepCost
from cluster.text import role_name
from router.observe.counters import Counters
from router.routing.fleet import Fleet
from router.routing.policies.interface import RoutingContext
from router.routing.running_requests import RunningRequests
from router.routing.worker_client import Speed, WorkerClient
from router.stream.request import LiveRequest

log = logging.getLogger(__name__)

WINDOW_S = 1.0
MOST_AT_ONCE = 200
"""Outputs that are timed in one piece."""
LEAST_SAMPLES = 3
"""A window is as long as it takes to time so many prompts or parts of outputs."""
FACTOR = 3.0
NUM_WINDOWS = 3
SLACK_SHARE = 0.1
"""Share of the objectives: less than that beyond the prediction is not worth an ejection."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
FORGIVEN_AFTER_S = 60.0
"""After so long without an ejection, the next pause is the first one again."""
RECENT_S = 10.0
"""A peer's window says something for so long."""
MOST_SHARE = 3
"""One in so many workers of a role may be slow, at least one."""


@dataclass
class _Record:
    """Keeps what is known of one worker. Times are in seconds."""

    observed_s: float = 0.0
    predicted_s: float = 0.0
    slack_s: float = 0.0
    num_samples: int = 0
    ratio: float = 1.0
    """Observed over predicted time in the last window."""
    age_s: float = RECENT_S
    """Time since that ended."""
    num_slow: int = 0
    """Windows in a row that were too slow."""
    speed: Speed = Speed.USUAL
    left_s: float = 0.0
    """Seconds that are left of the pause."""
    pause_s: float = 0.0
    """The last one."""
    usual_s: float = 0.0
    """Time since it was slow last."""

    def begin_window(self) -> None:
        self.observed_s = self.predicted_s = self.slack_s = 0.0
        self.num_samples = 0


class SlowDetector:
    """Knows workers by their ids."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def add(self, worker_id: str, observed_s: float, predicted_s: float, slack_s: float) -> None:
        """Some work took `observed_s`; up to `slack_s` beyond `predicted_s` do not count."""
        record = self._records.get(worker_id)
        if record is not None:
            record.observed_s += observed_s
            record.predicted_s += predicted_s
            record.slack_s += slack_s
            record.num_samples += 1

    def speed_of(self, worker_id: str) -> Speed:
        record = self._records.get(worker_id)
        return Speed.USUAL if record is None else record.speed

    def tick(self, elapsed_s: float, roles: Mapping[str, worker_pb2.Role]) -> dict[str, str]:
        """Returns the workers that are slow from now on, each with the reason.

        `roles`: of the workers that are ready and do not drain; others are forgotten.
        """
        self._records = {worker_id: self._records.get(worker_id, _Record()) for worker_id in roles}
        ejected: dict[str, str] = {}
        for record in self._records.values():
            _pass_time(record, elapsed_s)
        ended = [i for i, record in self._records.items() if record.num_samples >= LEAST_SAMPLES]
        for worker_id in ended:
            record = self._records[worker_id]
            record.ratio, record.age_s = record.observed_s / max(record.predicted_s, 1e-6), 0.0
        by_role: dict[worker_pb2.Role, list[_Record]] = {}
        for worker_id, role in roles.items():
            by_role.setdefault(role, []).append(self._records[worker_id])
        all_peers = {role: _Peers(records) for role, records in by_role.items()}
        for worker_id in ended:
            record, peers = self._records[worker_id], all_peers[roles[worker_id]]
            peers_ratio, speed = peers.usual_ratio(record), record.speed
            is_slow = record.ratio >= FACTOR * peers_ratio and record.observed_s >= record.predicted_s + record.slack_s
            record.begin_window()
            record.num_slow = record.num_slow + 1 if is_slow else 0
            if record.speed is Speed.PROBED and not is_slow:
                record.speed, record.usual_s = Speed.USUAL, 0.0
            elif record.speed is not Speed.SLOW and peers.may_eject(record):
                _eject(record)
                why = f"its work takes {record.ratio:.1f} times what is predicted"
                ejected[worker_id] = f"{why}, its peers' {peers_ratio:.1f} times"
            if record.speed is not speed:
                peers.on_speed(record, speed)
        return ejected


class _Peers:
    """The workers of one role during a tick, so that each is compared with the others without a look at all of them."""

    def __init__(self, records: Sequence[_Record]) -> None:
        self._num = len(records)
        self._num_out = sum(record.speed is not Speed.USUAL for record in records)
        self._ratios = sorted(record.ratio for record in records if _counts(record, record.speed))

    def usual_ratio(self, record: _Record) -> float:
        """Returns how slow the peers of a worker are, which may be the machine's fault; at least 1."""
        ratios, own = self._ratios, len(self._ratios)
        if _counts(record, record.speed):
            own = bisect_left(ratios, record.ratio)
        num = len(ratios) - (own < len(ratios))
        if not num:
            return 1.0
        low, high = (ratios[index + (index >= own)] for index in ((num - 1) // 2, num // 2))
        return max(1.0, (low + high) / 2)

    def may_eject(self, record: _Record) -> bool:
        num_peers, num_out = self._num - 1, self._num_out - (record.speed is not Speed.USUAL)
        most = min(num_peers, max(1, self._num // MOST_SHARE))
        return record.num_slow >= (1 if record.speed is Speed.PROBED else NUM_WINDOWS) and num_out < most

    def on_speed(self, record: _Record, last: Speed) -> None:
        """The speed of a worker was another until now."""
        self._num_out += (record.speed is not Speed.USUAL) - (last is not Speed.USUAL)
        if _counts(record, last):
            del self._ratios[bisect_left(self._ratios, record.ratio)]
        if _counts(record, record.speed):
            insort(self._ratios, record.ratio)


def _counts(record: _Record, speed: Speed) -> bool:
    """Whether its last window says something of its peers."""
    return speed is Speed.USUAL and record.age_s < RECENT_S


def _pass_time(record: _Record, elapsed_s: float) -> None:
    record.age_s += elapsed_s
    record.usual_s += elapsed_s
    if record.speed is Speed.SLOW:
        record.left_s -= elapsed_s
        if record.left_s <= 0:
            record.speed, record.num_slow = Speed.PROBED, 0
            record.begin_window()


def _eject(record: _Record) -> None:
    is_again = record.speed is Speed.PROBED or record.usual_s < FORGIVEN_AFTER_S
    record.pause_s = min(LONGEST_PAUSE_S, 2 * record.pause_s) if is_again and record.pause_s else FIRST_PAUSE_S
    record.speed, record.left_s, record.num_slow = Speed.SLOW, record.pause_s, 0


class SlowWatch:
    """Times the work of workers, and marks their `speed`, from `start` to `stop`. `on_change`: a speed has changed."""

    def __init__(
        self,
        fleet: Fleet,
        running: RunningRequests,
        context: RoutingContext,
        counters: Counters,
        on_change: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._running = running
        self._context = context
        self._counters = counters
        self._on_change = on_change
        self._detector = SlowDetector()
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0.0
        self._is_stopped = False

    def start(self) -> None:
        """No effect while it runs, or after `stop`."""
        if self._timer is None and not self._is_stopped:
            self._last_tick = asyncio.get_running_loop().time()
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._tick)

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def on_prompt(self, live: LiveRequest, now: float) -> None:
        """The prompt of the present attempt is computed. Where the decode worker did that, it gave way to outputs."""
        attempt, worker = live.attempt, live.attempt.prefill
        if worker is None:
            self.on_decoding(live, now)
        elif worker.step_cost is not None and not attempt.is_move:
            predicted_s = worker.step_cost.of(attempt.charge.queued)
            slack_s = SLACK_SHARE * self._context.objectives.ttft_s
            self._detector.add(worker.worker_id, now - attempt.placed_at - attempt.fetch_s, predicted_s, slack_s)

    def on_decoding(self, live: LiveRequest, now: float) -> None:
        """Its decode worker alone goes on with the present attempt."""
        live.attempt.timed = (now, live.num_tokens)

    def time_output(self, live: LiveRequest, now: float) -> None:
        """Times what has been decoded since the last call. Call it at the end of a request, too."""
        attempt = live.attempt
        if attempt.timed is None or len(attempt.workers) != 1:
            return
        begun_at, num_before = attempt.timed
        num_tokens, num_open = live.num_tokens, sum(sequence.end is None for sequence in live.sequences)
        attempt.timed = (now, num_tokens)
        worker = attempt.workers[0]
        step_s = self._step_s(worker)
        if step_s is not None and now > begun_at:
            num_new = num_tokens - num_before
            slack_s = SLACK_SHARE * self._context.objectives.tpot_s * num_new
            self._detector.add(worker.worker_id, (now - begun_at) * max(1, num_open), num_new * step_s, slack_s)

    def _step_s(self, worker: WorkerClient) -> float | None:
        """Predicted length of a step, which is filled up to the pace of its sequences while prompts wait there."""
        cost, load = worker.step_cost, self._context.loads[worker.worker_id]
        if cost is None or not cost.knows_sequences:
            return None
        step_s = _of_all(cost, load.decoding.num_sequences, load.decoding.num_kv_tokens, worker)
        return max(step_s, PACE_SHARE * self._context.objectives.tpot_s) if load.num_prompts else step_s

    def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        elapsed_s, self._last_tick = now - self._last_tick, now
        self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._tick)
        self._time_outputs(iter(self._running), elapsed_s)

    def _time_outputs(self, running: Iterator[LiveRequest], elapsed_s: float) -> None:
        """Times so many outputs at once as hold nobody up, the others after what is due meanwhile; then judges."""
        loop, some = asyncio.get_running_loop(), list(islice(running, MOST_AT_ONCE))
        now = loop.time()
        for live in some:
            if not live.is_over:
                self.time_output(live, now)
        if len(some) == MOST_AT_ONCE:
            loop.call_soon(self._time_outputs, running, elapsed_s)
        else:
            self._judge(elapsed_s)

    def _judge(self, elapsed_s: float) -> None:
        # One that drains takes no work over, so that its peers may not count on it.
        roles = {w.worker_id: w.role for w in self._fleet if w.is_ready and not w.is_draining}
        for worker_id, why in self._detector.tick(elapsed_s, roles).items():
            self._counters.ejected[role_name(roles[worker_id])] += 1
            log.warning("worker %s gets no new requests for a while: %s", worker_id, why)
        changed = [w for w in self._fleet if w.speed is not self._detector.speed_of(w.worker_id)]
        for worker in changed:
            worker.speed = self._detector.speed_of(worker.worker_id)
            log.info("worker %s %s", worker.worker_id, worker.speed.value)
        if changed:
            self._on_change()


def _of_all(cost: StepCost, num_sequences: int, num_kv_tokens: int, worker: WorkerClient) -> float:
    """Step of all sequences that run there: other routers' are taken to be like this router's."""
    num_running = max(num_sequences, worker.stats.num_running_seqs if worker.stats is not None else 0)
    return cost.of_sequences(num_running, num_kv_tokens * num_running // max(1, num_sequences))
