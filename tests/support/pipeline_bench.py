"""A worker's core without processes: ranks that note their calls, a router that keeps what it is told, and requests
that end in every way, for workers of one rank or of several."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest
from checkpoints import VOCAB_SIZE
from torch.distributed import HashStore

from cluster.crash_record import CrashRecord
from cluster.failure_detector import FailureTimeouts
from cluster.kv_groups import all_layers
from cluster.pb import generation_pb2, rank_pb2, worker_pb2
from cluster.settings import WorkerSettings
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.constraint import Constraint
from engine.sampling.params import SampledToken, SampleRow
from engine.sampling.sampler import Sampler
from engine.step_input import StepInput
from engine.tp import TPGroup, make_process_group
from worker.core import Core, Inbox
from worker.group import RankGroup, StandIn
from worker.handoff_connection import HandoffContext
from worker.handoff_metrics import HandoffMetrics
from worker.rank import RankExecutor
from worker.rank_socket import read_frame
from worker.step_pipeline import Ranks
from worker.steps import StepLog

TIMING = FailureTimeouts(1.0, 2.0, 3.0)
BLOCK_SIZE = 4
SOON_S = 60.0
Told = dict[tuple[str, int], list[tuple[int, float]]]
"""Tokens of each sequence, by request and number, each with its logprob, or 1."""


class NotedStep:
    """A step whose rows lead to the number of tokens before them, and that notes what is asked of it."""

    span = None
    is_done = True

    def __init__(self, calls: list[str], number: int) -> None:
        self._calls, self._number = calls, number

    def sample(self, rows: Sequence[Sequence[SampleRow]]) -> None:
        self._calls.append(f"sample {self._number}")
        self._tokens = [SampledToken(row.position) for of_one in rows for row in of_one]

    def tokens(self) -> list[SampledToken]:
        self._calls.append(f"read {self._number}")
        return self._tokens

    def scores(self) -> list[SampledToken]:
        return [SampledToken(1, -1.0, 1)] * 2


class NotedRanks:
    """Ranks that note their calls, and which tokens each step was given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.given: list[list[int]] = []

    @property
    def num_steps(self) -> int:
        return len(self.given)

    def launch(self, step: StepInput, rows: object = None) -> NotedStep:
        self.given.append(step.token_ids.tolist())
        self.calls.append(f"launch {self.num_steps}")
        return NotedStep(self.calls, self.num_steps)


class FakeRouter:
    """The session of a router: keeps what is sent to it."""

    def __init__(self) -> None:
        self.events: list[worker_pb2.Event] = []

    def __call__(self, events: list[worker_pb2.Event]) -> None:
        self.events += events

    def told(self) -> Told:
        told: Told = {}
        for tokens in (event.tokens for event in self.events if event.HasField("tokens")):
            place = told.setdefault((tokens.key.request_id, tokens.sequence_index), [])
            assert tokens.first_token_index == len(place), "a token is told twice, or left out"
            logprobs = [each.logprob for each in tokens.logprobs] or [1.0] * len(tokens.token_ids)
            place += zip(tokens.token_ids, logprobs, strict=True)
        return told

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [token for token, _ in self.told().get((name, index), [])]


class Bench:
    """A worker's core, the steps of which overlap."""

    def __init__(
        self,
        ranks: Ranks | None = None,
        *,
        overlaps: bool = True,
        num_blocks: int = 64,
        block_size: int = BLOCK_SIZE,
        inbox: Inbox | None = None,
        crash_record: CrashRecord | None = None,
        step_log: StepLog | None = None,
    ) -> None:
        settings = WorkerSettings.from_values(worker_id="decode-0", role="decode", model_path="")
        self.noted, self.router, inbox = NotedRanks(), FakeRouter(), inbox or Inbox()
        nobody: Any = None  # nothing is handed over here
        self.core = Core(
            inbox,
            ranks or self.noted,
            BlockManager(num_blocks, block_size, groups=all_layers(2)),
            HandoffContext(inbox.post, nobody, nobody, TIMING, HandoffMetrics()),
            nobody,
            settings,
            max_model_len=256,
            vocab_size=VOCAB_SIZE,
            step_log=step_log or StepLog(None),
            crash_record=crash_record,
            constrainer=self,  # type: ignore[arg-type]
            overlaps=overlaps,
        )
        self.core.session_opened(self.router, worker_pb2.WorkerInfo())

    def begin(self, grammar: str, done: Callable[[Constraint], None]) -> None:
        """A constraint under which everything may follow."""
        followed = Mock()
        followed.process.mask.return_value = memoryview(bytes(4))
        followed.process.flush.side_effect = partial(self.noted.calls.append, "ask")
        done(Constraint(followed))

    def admit(self, name: str, num_prompt_tokens: int = 3, most: int = 4, **options: Any) -> worker_pb2.RequestKey:
        key = worker_pb2.RequestKey(request_id=name, attempt=1)
        params = {"temperature": 0.0, "n": 1, **options.pop("params", {})}
        sampling = worker_pb2.Sampling(
            params=generation_pb2.SamplingParams(**params),
            stopping=generation_pb2.StoppingCriteria(max_output_tokens=most, **options.pop("stopping", {})),
            top_logprobs=options.pop("top_logprobs", None),
            grammar=options.pop("grammar", ""),
        )
        prompt = [(len(name) * 7 + i) % VOCAB_SIZE for i in range(num_prompt_tokens)]
        role = worker_pb2.ROLE_DECODE
        admit = worker_pb2.Admit(key=key, role=role, prompt_token_ids=prompt, sampling=sampling, **options)
        self.core.command(self.router, worker_pb2.Command(admit=admit))
        return key

    def cancel(self, key: worker_pb2.RequestKey) -> None:
        self.core.command(self.router, worker_pb2.Command(cancel=worker_pb2.Cancel(key=key)))

    def run(self) -> None:
        """Until nothing is left to do, and nothing is held."""
        while self.core.reporter.num_requests or not self.core.inbox.is_empty:
            self.core.turn(wait=False)
        while not self.core._steps.is_idle:  # a step of nothing but what was ended meanwhile
            self.core.turn(wait=False)
        self.core.turn(wait=False)
        self.core.blocks.check()
        self.core.decode.check_idle()
        assert self.core.blocks.num_held == 0


FEW_BLOCKS = 26
"""As few as make some of REQUESTS be preempted."""
REQUESTS: list[dict[str, Any]] = [
    {"num_prompt_tokens": 9, "most": 20},
    {"num_prompt_tokens": 30, "most": 25, "params": {"temperature": 1.0, "seed": 3}, "top_logprobs": 2},
    {
        "most": 24,
        "params": {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    },
    {"num_prompt_tokens": 5, "most": 15, "params": {"temperature": 1.2, "n": 3, "top_k": 30, "top_p": 0.8}},
    {"most": 30, "params": {"temperature": 1.0, "seed": 9}, "stopping": {"stop_token_ids": list(range(0, 320, 9))}},
    {
        "most": 30,
        "params": {"temperature": 1.0, "presence_penalty": 1.0},
        "stopping": {"stop_token_ids": list(range(0, 320, 5)), "min_output_tokens": 8},
    },
    {"num_prompt_tokens": 40, "most": 6, "prompt_logprobs": 1, "top_logprobs": 0},
    {"num_prompt_tokens": 70, "most": 3, "params": {"temperature": 0.5}},
]


def _follow(sock: socket.socket, runner: ModelRunner) -> None:
    """The steps of another rank than 0, until rank 0 says stop."""
    executor = RankExecutor(runner, Mock(), Mock())
    while (command := read_frame(sock, rank_pb2.RankCommand)).HasField("step"):
        executor.step(StepInput.from_bytes(command.step))
    executor.close()


def told_by(
    runners: list[ModelRunner],
    overlaps: bool,
    num_blocks: int,
    sampler: Sampler | None = None,
    requests: Sequence[dict[str, Any]] = REQUESTS,
) -> Told:
    """What a router is told of requests, which come one after another, by a worker of so many ranks. One more request
    is cancelled at some point, of which no more is told."""
    runner, *others = runners
    inbox, sockets = Inbox(), [socket.socketpair() for _ in others]
    following = [Thread(target=_follow, args=each) for each in zip((s for _, s in sockets), others, strict=True)]
    for thread in following:
        thread.start()
    ranks = RankGroup(
        lambda reply: RankExecutor(runner, Mock(), reply),
        [own for own, _ in sockets],
        sampler or Sampler(VOCAB_SIZE),
        post=inbox.post,
        lost=lambda why: None,
        timing=TIMING,
        stand_in=StandIn(lambda: bench.core.turn(wait=True), inbox.post),
    )
    bench = Bench(ranks, overlaps=overlaps, num_blocks=num_blocks, block_size=runner.block_size, inbox=inbox)
    cancelled = bench.admit("cancelled", num_prompt_tokens=2, most=100)
    for number, options in enumerate(requests):
        bench.admit("r" * (number + 1), **options)
        bench.core.turn(wait=False)
        bench.core.turn(wait=False)
        if number == 4:
            bench.cancel(cancelled)
    bench.run()
    ranks.close()
    for thread, (own, theirs) in zip(following, sockets, strict=True):
        thread.join(SOON_S)
        own.close()
        theirs.close()
    assert bool(bench.core.decode.num_preemptions) == (num_blocks == FEW_BLOCKS)
    told = bench.router.told()
    assert 0 < len(told.pop(("cancelled", 0))) < 100
    return told


def assert_equal(told: Sequence[Told]) -> None:
    one, other = told
    assert one and one.keys() == other.keys()
    for place, tokens in one.items():
        assert [token for token, _ in tokens] == [token for token, _ in other[place]], place
        assert [p for _, p in tokens] == pytest.approx([p for _, p in other[place]], abs=1e-4)


def joined_ranks(make: Callable[[TPGroup], ModelRunner]) -> list[ModelRunner]:
    """Two ranks, made at once."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: make(make_process_group(store, rank, 2, "cpu", timeout_s=SOON_S)), range(2)))
