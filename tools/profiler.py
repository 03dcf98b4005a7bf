"""Measures the steps of a running worker, for planning and simulation: prompts of several sizes alone, and decode steps
of several numbers of sequences and lengths.

Each measurement is one request: a prompt for one token, or one with `n` outputs, whose sequences run in the same steps.
How long those steps took is read off the metrics pages of the workers, before and after. So nothing else should run on
the cluster meanwhile: a measurement with other steps in it is taken again.

A request of one token takes longer than its step: messages are on their way, and programs handle them. That time, over
the messages, is what a simulation takes for each of them.
"""

from __future__ import annotations

import http.client
import math
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError, FailedPrecondition, InternalError
from cluster.pb import admin_pb2, generation_pb2, worker_pb2
from cluster.step_cost import StepCost, StepSize
from cluster.tls import ClientTls
from simulate.curves import CurveError, LinearCurve, StepSample, fit_cost
from simulate.worker_profile import HANDED_MESSAGES, MESSAGES, ProfiledStep, ProfiledWorker, profile_document
from tools.client import BatonClient, make_spec
from tools.doctor.subject import FetchedMetrics, fetch

_MARGIN = 8
_FIRST_ID = 10
"""Lower ids are often special tokens."""
STEADY = 0.02
"""A median is steady when its standard error is no more than this share of it."""
MOST_ROUNDS = 4
_TRIES = 3
_PAUSE_S = 0.1
"""Before each prompt, as between the requests of a load that leaves a cluster idle at times: a step and messages right
behind others of their kind find their way warm, and take a fifth to a half less."""
_SETTLE_S = 2.0
_POLL_S = 0.02
_CALL_S = 120.0


@dataclass(frozen=True)
class ProfileSizes:
    """The sizes that are measured; those that the worker does not allow are left out."""

    prompts: Sequence[int] = (64, 128, 256, 512, 1024, 2048)
    sequences: Sequence[int] = (1, 2, 4, 8, 16)
    """Outputs of one request, of which a router allows 16; a curve goes on beyond them with its last slope."""
    lengths: Sequence[int] = (32, 256, 1024)
    """Tokens of the prompt that sequences begin with."""
    num_steps: int = 32
    rounds: int = 5
    """Times that each size is measured; one whose median is not steady by then, up to `MOST_ROUNDS` times as often."""


@dataclass(frozen=True)
class _Counted:
    """Steps of one kind, on all workers, since their start."""

    steps: float
    tokens: float
    seconds: float
    handed: float
    """Steps on workers that prefill for others."""

    def __sub__(self, other: _Counted) -> _Counted:
        return _Counted(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


class Profiler:
    """Measures through one router."""

    def __init__(self, client: BatonClient, sizes: ProfileSizes, page_tls: ClientTls | None = None) -> None:
        """Raises BatonError where no worker is ready, or its steps cannot be read."""
        self._client, self._sizes, self._page_tls = client, sizes, page_tls
        self._workers = [w for w in client.status().workers if w.state == admin_pb2.WorkerStatus.STATE_READY]
        if not self._workers:
            raise FailedPrecondition("no worker is ready; see `baton status`")
        self._pages = [w.info.metrics_address for w in self._workers]
        if not all(self._pages):
            raise ConfigError("workers have no metrics pages to read their steps from; set metrics.workers: true")
        self._vocab = client.models()[0].vocab_size
        self._random = random.Random(0)
        self._busy: list[tuple[float, float]] = []
        """Seconds of each prompt's step, and those that the workers' processes had a core until it was answered."""
        self._messages_s: list[float] = []
        """Seconds of a message, by each prompt that was measured."""

    @property
    def worker(self) -> ProfiledWorker:
        """The worker's account of itself, with the smallest pool and batch where they differ."""
        infos = [worker.info for worker in self._workers]
        least = min(infos, key=lambda info: info.num_blocks * info.block_size)
        return ProfiledWorker(
            model=least.model,
            device=least.ranks[0].device if least.ranks else "",
            tensor_parallel=max(1, len(least.ranks)),
            dtype=least.dtype,
            block_size=least.block_size,
            kv_tokens=least.num_blocks * least.block_size,
            max_num_seqs=min(info.max_num_seqs for info in infos),
            max_model_len=min(info.max_model_len for info in infos),
        )

    def measure(self, on_step: Callable[[ProfiledStep], None] = lambda _: None) -> dict[str, Any]:
        """The document of a profile. Raises BatonError."""
        steps = []
        for step in self._measured():
            on_step(step)
            steps.append(step)
        if not steps:
            raise FailedPrecondition(
                "nothing could be measured: other requests run on this cluster, or its pool is too small"
            )
        samples = [StepSample(_size_of(step), step.seconds) for step in steps]
        fitted, reported = fit_cost(samples), self._reported()
        return profile_document(
            self.worker,
            steps,
            reported,
            None if reported is None else CurveError.of(LinearCurve(reported), samples),
            fitted,
            CurveError.of(LinearCurve(fitted), samples),
            self.message_s,
            self.cores,
            self.num_threads,
        )

    @property
    def message_s(self) -> float | None:
        """Seconds that a request takes beside its step for each message to its first token; None: no prompt was
        measured."""
        return statistics.median(self._messages_s) if self._messages_s else None

    @property
    def cores(self) -> int | None:
        """Cores of this machine, where every worker runs on it and none has a GPU."""
        ranks = [rank for worker in self._workers for rank in worker.info.ranks]
        is_shared = all(rank.host == socket.gethostname() and rank.device == "cpu" for rank in ranks)
        return len(os.sched_getaffinity(0)) if ranks and is_shared and sys.platform == "linux" else None

    @property
    def num_threads(self) -> int:
        """Cores that a longer step keeps busy for as much longer: what a request takes beside its step is left out."""
        steps_s, busy_s = zip(*self._busy, strict=True) if self._busy else ((), ())
        if self.cores is None or len(set(steps_s)) < 2:
            return 1
        return max(1, round(statistics.linear_regression(steps_s, busy_s).slope))

    def _cpu_s(self) -> float:
        """Seconds that the workers' processes have had a core so far, if they are on this machine."""
        if self.cores is None:
            return 0.0
        return sum(_cpu_seconds(rank.pid) for worker in self._workers for rank in worker.info.ranks)

    def _measured(self) -> Iterator[ProfiledStep]:
        worker, sizes = self.worker, self._sizes
        longest = min(worker.max_model_len, worker.kv_tokens // 2) - _MARGIN
        prompts = [n for n in sizes.prompts if n <= longest]
        lengths = [n for n in sizes.lengths if n + sizes.num_steps <= longest]
        counts = [n for n in sizes.sequences if n <= worker.max_num_seqs]
        cells = [(n, kv) for n in counts for kv in lengths if kv + n * sizes.num_steps <= worker.kv_tokens // 2]
        self._send(64 if longest >= 64 else 1, 1, 4)  # what happens once happens before
        measurements = [partial(self._prompt, n) for n in prompts] + [partial(self._decode, *cell) for cell in cells]
        times: list[list[float]] = [[] for _ in measurements]
        for number in range(MOST_ROUNDS * sizes.rounds):
            for measure, known in zip(measurements, times, strict=True):
                if number < sizes.rounds or not _is_steady(known):
                    for step in measure():
                        known.append(step.seconds)
                        yield step

    def _prompt(self, num_tokens: int) -> Iterator[ProfiledStep]:
        """Nothing for a prompt that is computed in several steps."""
        for _ in range(_TRIES):
            time.sleep(_PAUSE_S)
            busy_s: list[float] = []

            def send(busy_s: list[float] = busy_s) -> None:
                busy_s.append(self._cpu_s())
                self._send(num_tokens, 1, 1)
                busy_s.append(self._cpu_s())

            found, took_s = self._during("prefill", 1, send)
            if found.steps == 1 and found.tokens == num_tokens:
                num_messages = HANDED_MESSAGES if found.handed else MESSAGES
                self._busy.append((found.seconds, busy_s[1] - busy_s[0]))
                self._messages_s.append(max(0.0, took_s - found.seconds) / num_messages)
                yield ProfiledStep(num_tokens, 0, 0, found.seconds)
                return

    def _decode(self, count: int, length: int) -> Iterator[ProfiledStep]:
        """Steps in which `count` sequences get their tokens; the first one came with the prompt."""
        num = self._sizes.num_steps
        for _ in range(_TRIES):
            found, _ = self._during("decode", num - 1, lambda: self._send(length, count, num))
            if num - 1 <= found.steps <= num and found.tokens == found.steps * count:  # one may be launched too many
                yield ProfiledStep(0, count, length + num // 2, found.seconds / found.steps)
                return

    def _during(self, kind: str, least_steps: int, work: Callable[[], None]) -> tuple[_Counted, float]:
        """Returns what was counted of one kind of step while `work` was done, at the latest a moment after, and the
        seconds that the work took."""
        before, begun_at = self._count(kind), time.monotonic()
        work()
        took_s = time.monotonic() - begun_at
        until = time.monotonic() + _SETTLE_S
        while (found := self._count(kind) - before).steps < least_steps and time.monotonic() < until:
            time.sleep(_POLL_S)
        return found, took_s

    def _count(self, kind: str) -> _Counted:
        """Raises FailedPrecondition for a page that cannot be read."""
        pages = [self._page(address) for address in self._pages]
        prefill = [p for p, w in zip(pages, self._workers, strict=True) if w.info.role == worker_pb2.ROLE_PREFILL]

        def total(name: str, pages: list[FetchedMetrics]) -> float:
            return sum(page.total(f"baton_{name}_total", step=kind) for page in pages)

        return _Counted(
            total("steps", pages), total("step_tokens", pages), total("step_seconds", pages), total("steps", prefill)
        )

    def _page(self, address: str) -> FetchedMetrics:
        try:
            date, text = fetch(address, "/metrics", self._page_tls, _CALL_S)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise FailedPrecondition(f"the metrics page at {address} cannot be read: {error}") from error
        return FetchedMetrics(0.0, 0.0, date, text)

    def _send(self, num_tokens: int, count: int, num_output_tokens: int) -> None:
        """A prompt that no cache holds. Raises BatonError."""
        ids = [self._random.randrange(min(_FIRST_ID, self._vocab - 1), self._vocab) for _ in range(num_tokens)]
        spec = make_spec(ids, max_output_tokens=num_output_tokens, n=count, temperature=1.0, ignore_eos=True)
        spec.cache.bypass_prefix_cache = True
        self._check(self._client.generate(spec, timeout_s=_CALL_S), count)

    @staticmethod
    def _check(response: generation_pb2.GenerateResponse, count: int) -> None:
        if len(response.ends) != count:
            raise InternalError(f"{count} outputs were asked for, and {len(response.ends)} came")

    def _reported(self) -> StepCost | None:
        """The cost that a worker has learned; of several, that of the one with most steps."""
        known = [w.stats for w in self._client.status().workers if w.stats.HasField("step_cost")]
        most = max(known, key=lambda stats: stats.num_steps, default=None)
        return None if most is None else StepCost.from_proto(most.step_cost)


def _cpu_seconds(pid: int) -> float:
    """Returns the processor seconds of a process and all its threads. Raises FailedPrecondition where there is none."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise FailedPrecondition(f"process {pid} of a worker is not there any more: {error.strerror}") from error
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def _is_steady(seconds: Sequence[float]) -> bool:
    """Whether more measurements would hardly move the median; also where there are none, or one that was to do."""
    if len(seconds) < 2:
        return True
    error_s = 1.25 * statistics.stdev(seconds) / math.sqrt(len(seconds))  # of the median of a normal distribution
    return error_s <= STEADY * statistics.median(seconds)


def _size_of(step: ProfiledStep) -> StepSize:
    return StepSize.of_prompt(step.prompt_tokens) + StepSize(0, 0, step.sequences, step.sequences * step.kv_tokens)


def errors_of(document: Mapping[str, Any]) -> str:
    """A line for people."""
    fitted, reported = document["fitted_error"], document["reported_error"]
    line = f"a linear cost fits them within {fitted['median']:.0%} (median) and {fitted['p90']:.0%} (p90)"
    if reported is not None:
        line += f"; the worker's own within {reported['median']:.0%} and {reported['p90']:.0%}"
    if document["message_s"] is not None:
        line += f"; {1000 * document['message_s']:.2f} ms for each message to a first token"
    return line
