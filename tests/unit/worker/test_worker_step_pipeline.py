"""Steps that are launched before the one before them is read: when that is, what is in them, and the same tokens."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import plain_kernels
import pytest
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner
from torch.distributed import HashStore

from cluster.failure_detector import FailureTimeouts
from cluster.pb import generation_pb2, rank_pb2, worker_pb2
from cluster.settings import WorkerSettings
from engine.attention.flash import FlashAttention
from engine.cpu_runtime import compute_with
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.constraint import Constraint
from engine.sampling.params import SampledToken, SampleRow
from engine.sampling.sampler import Sampler
from engine.step_input import StepInput
from engine.tp import TPGroup, make_process_group
from worker.core import Core, Inbox
from worker.group import RankGroup
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

    def launch(self, step: StepInput) -> NotedStep:
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
    ) -> None:
        settings = WorkerSettings.from_values(worker_id="decode-0", role="decode", model_path="")
        self.noted, self.router, inbox = NotedRanks(), FakeRouter(), inbox or Inbox()
        nobody: Any = None  # nothing is handed over here
        self.core = Core(
            inbox,
            ranks or self.noted,
            BlockManager(num_blocks, block_size),
            HandoffContext(inbox.post, nobody, nobody, TIMING, HandoffMetrics()),
            nobody,
            settings,
            max_model_len=256,
            vocab_size=VOCAB_SIZE,
            num_layers=2,
            step_log=StepLog(None),
            constrainer=self,  # type: ignore[arg-type]
            overlaps=overlaps,
        )
        self.core.session_opened(self.router, worker_pb2.WorkerInfo())

    def begin(self, grammar: str, done: Callable[[Constraint], None]) -> None:
        """A constraint under which everything may follow."""
        done(Constraint(Mock()))

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


def test_the_next_step_is_launched_when_the_choice_of_tokens_is_set_off_and_before_they_are_read() -> None:
    bench = Bench()
    bench.admit("a", most=4)
    bench.run()
    assert bench.noted.calls == [
        *("launch 1", "sample 1", "launch 2", "read 1"),
        *("sample 2", "launch 3", "read 2"),
        *("sample 3", "launch 4", "read 3"),
        *("sample 4", "read 4"),  # its length is known: nothing is thrown away
    ]
    assert bench.noted.given[1:] == [[-1]] * 3 and bench.router.tokens("a") == [0, 1, 2, 3]


def test_steps_one_by_one_are_read_before_the_next_is_launched() -> None:
    bench = Bench(overlaps=False)
    bench.admit("a", most=2)
    bench.run()
    assert bench.noted.calls == ["launch 1", "sample 1", "read 1", "launch 2", "sample 2", "read 2"]
    assert bench.noted.given[1:] == [[0]] and bench.router.tokens("a") == [0, 1]


def test_a_stop_token_is_noticed_one_step_late_and_what_came_of_that_is_thrown_away() -> None:
    bench = Bench()
    bench.admit("stops", most=9, stopping={"stop_token_ids": [2]})
    bench.admit("goes on", most=6)
    for _ in range(3):
        bench.core.turn(wait=False)
    assert bench.router.tokens("stops") == [0, 1, 2] and len(bench.noted.given[3]) == 2, "it is in the step under way"
    held = bench.core.blocks.num_held
    bench.core.turn(wait=False)
    assert bench.core.blocks.num_held < held, "blocks come back when that step has ended"
    bench.run()
    assert bench.router.tokens("stops") == [0, 1, 2] and bench.router.tokens("goes on") == [0, 1, 2, 3, 4, 5]
    assert [len(tokens) for tokens in bench.noted.given[1:]] == [2, 2, 2, 1, 1]


def test_who_joins_brings_tokens_that_are_known_and_who_leaves_is_passed_over() -> None:
    bench = Bench()
    gone = bench.admit("gone", most=9)
    bench.admit("stays", most=9)
    bench.core.turn(wait=False)
    bench.admit("new one", num_prompt_tokens=1, most=5)
    bench.cancel(gone)
    bench.core.turn(wait=False)
    assert bench.noted.given[1:3] == [[-1, -2], [-2, 49]], "rows are those of the step before"
    bench.run()
    assert bench.router.tokens("stays") == list(range(9)) and bench.router.tokens("new one") == list(range(5))
    assert len(bench.router.tokens("gone")) == 1


@pytest.mark.parametrize(
    ("options", "num_first"),
    [
        ({"grammar": "any"}, None),
        ({"params": {"n": 2}}, 1),
        ({"prompt_logprobs": 0}, 1),
        ({"num_prompt_tokens": 3}, 0),
    ],
    ids=["a constraint", "several sequences", "a scored prompt", "nothing"],
)
def test_a_step_waits_where_the_host_has_a_say(options: dict[str, Any], num_first: int | None) -> None:
    """Each one, or the first ones."""
    bench = Bench()
    bench.admit("a", most=4, **options)
    bench.run()
    num_waited = 4 if num_first is None else num_first
    calls = bench.noted.calls
    for number in range(1, 4):
        is_ahead = calls.index(f"launch {number + 1}") < calls.index(f"read {number}")
        assert is_ahead == (number > num_waited), number
    assert bench.router.tokens("a") == [0, 1, 2, 3]


def test_a_step_waits_for_blocks_that_only_a_preemption_gives() -> None:
    """Nobody is preempted for what the step under way gives back."""
    bench = Bench(num_blocks=5)
    bench.admit("first", num_prompt_tokens=4, most=12, stopping={"stop_token_ids": [4]})
    bench.admit("other", num_prompt_tokens=4, most=12)
    bench.run()
    assert bench.router.tokens("first") == list(range(5)) and bench.router.tokens("other") == list(range(12))
    assert bench.core.decode.num_preemptions == 0
    crowded = Bench(num_blocks=5)
    for name in ("first", "other"):
        crowded.admit(name, num_prompt_tokens=4, most=12)
    crowded.run()
    assert crowded.core.decode.num_preemptions > 0
    assert crowded.router.tokens("first") == crowded.router.tokens("other") == list(range(12))


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


def _told(runners: list[ModelRunner], overlaps: bool, num_blocks: int) -> Told:
    """What a router is told of REQUESTS, which come one after another, by a worker of so many ranks. One more request
    is cancelled at some point, of which no more is told."""
    runner, *others = runners
    inbox, sockets = Inbox(), [socket.socketpair() for _ in others]
    following = [Thread(target=_follow, args=each) for each in zip((s for _, s in sockets), others, strict=True)]
    for thread in following:
        thread.start()
    ranks = RankGroup(
        lambda reply: RankExecutor(runner, Mock(), reply),
        [own for own, _ in sockets],
        Sampler(VOCAB_SIZE),
        post=inbox.post,
        lost=lambda why: None,
        timing=TIMING,
        prepare=lambda: compute_with(1),
    )
    bench = Bench(ranks, overlaps=overlaps, num_blocks=num_blocks, block_size=runner.block_size, inbox=inbox)
    cancelled = bench.admit("cancelled", num_prompt_tokens=2, most=100)
    for number, options in enumerate(REQUESTS):
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


def _assert_equal(told: Sequence[Told]) -> None:
    one, other = told
    assert len(one) == len(REQUESTS) + 2 and one.keys() == other.keys()
    for place, tokens in one.items():
        assert [token for token, _ in tokens] == [token for token, _ in other[place]], place
        assert [p for _, p in tokens] == pytest.approx([p for _, p in other[place]], abs=1e-4)


@pytest.mark.parametrize("num_blocks", [200, FEW_BLOCKS])
def test_a_model_gives_the_same_tokens_and_logprobs_with_steps_that_overlap(tmp_path: Path, num_blocks: int) -> None:
    folder = make_checkpoint("llama", tmp_path)
    runners = [make_runner(folder, num_blocks=num_blocks, block_size=BLOCK_SIZE) for _ in range(2)]
    _assert_equal([_told([runners[overlaps]], overlaps, num_blocks) for overlaps in (False, True)])


@pytest.mark.parametrize("num_blocks", [200, FEW_BLOCKS])
def test_ranks_over_gloo_give_the_tokens_of_steps_one_by_one(tmp_path: Path, num_blocks: int) -> None:
    """Whatever ends a sequence: its length, a stop token, its router, or a preemption."""
    folder, sizes = make_checkpoint("llama", tmp_path), {"num_blocks": num_blocks, "block_size": BLOCK_SIZE}
    _assert_equal(
        [
            _told(_over_gloo(lambda tp: make_runner(folder, tp=tp, **sizes)), overlaps, num_blocks)  # type: ignore[arg-type]
            for overlaps in (False, True)
        ]
    )


def _over_gloo(make: Callable[[TPGroup], ModelRunner]) -> list[ModelRunner]:
    """Two ranks, made at once."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: make(make_process_group(store, rank, 2, "cpu", timeout_s=SOON_S)), range(2)))


def test_replayed_steps_take_tokens_of_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the memory that graphs read; steps of prompts among them are computed as ever."""
    replayed: list[int] = []

    def counted(work: Callable[[], None]) -> Callable[[], None]:
        return lambda: (work(), replayed.append(1))[0]

    backend = FlashAttention(plain_kernels.flash_attn_varlen_func)
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (backend, "for this test"))
    folder = make_checkpoint("llama", tmp_path)
    one, other = (
        make_runner(folder, num_blocks=16, block_size=256, kernels="torch", graphs_up_to=12, capture=capture)
        for capture in (None, counted)
    )
    _assert_equal([_told([one], False, 16), _told([other], True, 16)])
    assert len(replayed) > 10
    replayed.clear()
    ranks = _over_gloo(
        lambda tp: make_runner(
            folder, tp=tp, num_blocks=16, block_size=256, kernels="torch", graphs_up_to=12, capture=counted
        )
    )
    _assert_equal([_told([one], False, 16), _told(ranks, True, 16)])
    assert len(replayed) > 20
