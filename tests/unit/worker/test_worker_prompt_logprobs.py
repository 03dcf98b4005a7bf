"""What a worker tells of a prompt's tokens: each once and in order, before any token of the output, in small events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cluster.failure_detector import FailureTimeouts
from cluster.kv_groups import all_layers
from cluster.pb import generation_pb2, worker_pb2
from cluster.settings import WorkerSettings
from engine.kv.block_manager import BlockManager
from engine.sampling.params import SampledToken, SampleRow
from engine.sampling.prompt_logprobs import score_rows
from engine.sampling.sampler import Sampler
from engine.step_input import StepInput
from worker.core import Core, Inbox
from worker.handoff_connection import HandoffContext
from worker.handoff_metrics import HandoffMetrics
from worker.reporter import PROMPT_TOKENS_EACH
from worker.service import MOST_EVENTS, _Session
from worker.steps import StepLog

VOCABULARY = 400


def logprob_of(position: int, token_id: int) -> float:
    """What the model thinks of a token after those up to `position`: told apart by both."""
    return -(1 + position + token_id / VOCABULARY)


class ScoringStep:
    """A step that has run; the token of the greatest logit is 0."""

    is_done = True
    span = None

    def __init__(self, step: StepInput) -> None:
        self._step = step

    def sample(self, rows: Sequence[Sequence[SampleRow]]) -> None:
        self._rows = [row for of_one in rows for row in of_one]

    def tokens(self) -> list[SampledToken]:
        return Sampler(VOCABULARY).sample(torch.zeros(len(self._rows), VOCABULARY), self._rows)

    def scores(self) -> list[SampledToken]:
        rows = self._step.positions[self._step.scored[:, 0]]
        logits = torch.from_numpy(
            np.array([[logprob_of(p, t) for t in range(VOCABULARY)] for p in rows], dtype=np.float32)
        )
        numbered = self._step.scored.copy()
        numbered[:, 0] = np.arange(len(rows))
        scores = score_rows(numbered, lambda wanted: logits[wanted], VOCABULARY, torch.device("cpu"))
        normalizers = logits.logsumexp(-1)
        return type(scores)(
            scores.scored,
            scores.logprobs + normalizers,
            scores.ranks,
            scores.top_ids,
            scores.top_logprobs + normalizers.unsqueeze(1),
        ).tokens()


class ScoringRanks:
    """Ranks that note how many rows each step scored."""

    def __init__(self) -> None:
        self.num_scored: list[int] = []

    @property
    def num_steps(self) -> int:
        return len(self.num_scored)

    def launch(self, step: StepInput, rows: object = None) -> ScoringStep:
        self.num_scored.append(len(step.scored))
        return ScoringStep(step)


class FakeRouter:
    """The session of a router: keeps what is sent to it."""

    def __init__(self) -> None:
        self.events: list[worker_pb2.Event] = []

    def __call__(self, events: list[worker_pb2.Event]) -> None:
        self.events += events

    def prompt(self, name: str) -> list[worker_pb2.PromptLogprobs]:
        told = [e.prompt_logprobs for e in self.events if e.HasField("prompt_logprobs")]
        return [event for event in told if event.key.request_id == name]

    def kinds(self, name: str) -> list[str]:
        kinds = [str(event.WhichOneof("event")) for event in self.events]
        named = zip(self.events, kinds, strict=True)
        return [k for e, k in named if k not in ("info", "stats", "cache") and getattr(e, k).key.request_id == name]


class Bench:
    def __init__(self, *, num_blocks: int = 64, budget: int = 2048) -> None:
        settings = WorkerSettings.from_values(
            worker_id="decode-0", role="decode", model_path="", max_num_batched_tokens=budget
        )
        self.ranks, self.router, inbox = ScoringRanks(), FakeRouter(), Inbox()
        nobody: Any = None  # nothing is handed over here
        context = HandoffContext(inbox.post, nobody, nobody, FailureTimeouts(1.0, 2.0, 3.0), HandoffMetrics())
        self.core = Core(
            inbox,
            self.ranks,
            BlockManager(num_blocks, 16, groups=all_layers(2)),
            context,
            nobody,
            settings,
            max_model_len=4096,
            vocab_size=VOCABULARY,
            step_log=StepLog(None),
        )
        self.core.session_opened(self.router, worker_pb2.WorkerInfo())

    def admit(self, name: str, prompt: Sequence[int], wanted: int | None, *, n: int = 1, most: int = 2) -> None:
        sampling = worker_pb2.Sampling(
            params=generation_pb2.SamplingParams(temperature=0, n=n),
            stopping=generation_pb2.StoppingCriteria(max_output_tokens=most),
        )
        admit = worker_pb2.Admit(
            key=worker_pb2.RequestKey(request_id=name, attempt=1),
            role=worker_pb2.ROLE_DECODE,
            prompt_token_ids=prompt,
            sampling=sampling,
            prompt_logprobs=wanted,
        )
        self.core.command(self.router, worker_pb2.Command(admit=admit))

    def run(self, *, most_turns: int = 1000) -> None:
        """Until nothing is left to do."""
        for _ in range(most_turns):
            if not self.core.turn(wait=False):
                assert self.core.blocks.num_held == 0
                return
        raise AssertionError("the worker does not come to an end")


def check(router: FakeRouter, name: str, prompt: Sequence[int], wanted: int) -> None:
    """Every token of the prompt was told, once, in order, before the output."""
    position = 0
    for event in router.prompt(name):
        assert event.first_token_index == position and 1 <= len(event.logprobs) <= PROMPT_TOKENS_EACH
        for told in event.logprobs:
            assert told.token_id == prompt[position]
            assert told.undefined == (position == 0)
            if position:
                assert told.logprob == pytest.approx(logprob_of(position - 1, told.token_id), abs=1e-2)
                assert told.rank == told.token_id + 1
                assert [t.token_id for t in told.top] == list(range(wanted))
            position += 1
    assert position == len(prompt)
    kinds = router.kinds(name)
    assert "tokens" in kinds and "prompt_logprobs" not in kinds[kinds.index("tokens") :]


PROMPT = [(7 * i) % 300 for i in range(100)]


@pytest.mark.parametrize("budget", [7, 30, 2048])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("most", [1, 3])
def test_each_token_of_a_prompt_is_told_once(budget: int, n: int, most: int) -> None:
    bench = Bench(budget=budget)
    bench.admit("r", PROMPT, 2, n=n, most=most)
    bench.run()
    check(bench.router, "r", PROMPT, 2)
    assert sum(bench.ranks.num_scored) == len(PROMPT) - 1


def test_those_who_ask_and_those_who_do_not_share_steps() -> None:
    bench = Bench(budget=90)
    wanted = {"a": 0, "b": None, "c": 3, "d": 1}
    prompts = {name: [(i * k) % 300 for i in range(40 + k)] for k, name in enumerate(wanted, start=3)}
    prompts["d"] = [5]
    for name, most in wanted.items():
        bench.admit(name, prompts[name], most)
    bench.run()
    for name, most in wanted.items():
        if most is None:
            assert not bench.router.prompt(name)
        else:
            check(bench.router, name, prompts[name], most)


def test_a_prompt_that_is_preempted_while_it_is_computed_is_told_once() -> None:
    bench = Bench(num_blocks=8, budget=8)
    bench.admit("older", [1] * 15, None, most=60)
    bench.admit("scored", PROMPT, 1)
    bench.run()
    assert bench.core.decode.num_preemptions > 0
    events = bench.router.prompt("scored")
    resumed = bench.core.decode.resumed_tokens
    assert resumed.total() > 0, "it started twice, and some of it had been told before"
    assert len(events) > 2
    check(bench.router, "scored", PROMPT, 1)
    assert sum(bench.ranks.num_scored) == len(PROMPT) - 1


def test_a_cached_prompt_is_computed_again_for_who_asks_and_found_by_who_does_not() -> None:
    bench = Bench()
    cached = {}
    for name, wanted in (("first", None), ("scored", 0), ("last", None)):
        bench.admit(name, PROMPT, wanted)
        bench.run()
        phases = [e.phase for e in bench.router.events if e.HasField("phase") and e.phase.key.request_id == name]
        cached[name] = phases[0].num_cached_tokens
    assert cached == {"first": 0, "scored": 0, "last": 96}
    check(bench.router, "scored", PROMPT, 0)


def test_a_long_prompt_is_told_in_events_of_bounded_size() -> None:
    bench = Bench()
    prompt = [i % 300 for i in range(2 * PROMPT_TOKENS_EACH + 1)]
    bench.admit("r", prompt, 20)
    bench.run()
    assert [len(event.logprobs) for event in bench.router.prompt("r")] == [PROMPT_TOKENS_EACH, PROMPT_TOKENS_EACH, 1]
    check(bench.router, "r", prompt, 20)
    assert all(event.ByteSize() < 70_000 for event in bench.router.events)


def test_a_request_cancelled_while_its_prompt_is_scored_leaves_the_others_theirs() -> None:
    bench = Bench(budget=60)
    bench.admit("gone", PROMPT[:50], 1)
    bench.admit("stays", PROMPT, 1)
    bench.core._steps._flight = bench.core._steps._launch(bench.core._settings)
    key = worker_pb2.RequestKey(request_id="gone", attempt=1)
    bench.core.command(bench.router, worker_pb2.Command(cancel=worker_pb2.Cancel(key=key)))
    bench.run()
    assert not bench.router.prompt("gone")
    check(bench.router, "stays", PROMPT, 1)


def test_a_message_to_a_router_carries_only_so_many_events() -> None:
    async def scenario() -> list[list[int]]:
        nobody: Any = None  # every call is made on this loop
        session = _Session(nobody)
        numbered = [worker_pb2.Event(stats=worker_pb2.WorkerStats(num_steps=i)) for i in range(2 * MOST_EVENTS + 5)]
        session.put(numbered[:3])
        session.put(numbered[3:])
        session.put(None)
        batches = []
        while (batch := await session.next()) is not None:
            batches.append([event.stats.num_steps for event in batch.events])
        return batches

    batches = asyncio.run(scenario())
    assert [len(batch) for batch in batches] == [MOST_EVENTS, MOST_EVENTS, 5]
    assert [number for batch in batches for number in batch] == list(range(2 * MOST_EVENTS + 5))
