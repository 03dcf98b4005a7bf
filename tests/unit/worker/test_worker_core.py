"""What the engine thread hears while a long step runs changes what that step leads to, not how it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from device_spans import FakeDevice, FakeSpan

from cluster.failure_detector import FailureTimeouts
from cluster.kv_groups import all_layers
from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2, worker_pb2
from cluster.settings import WorkerSettings
from cluster.step_cost import StepSize
from engine.kv.block_manager import BlockManager
from engine.sampling.constraint import Constraint
from engine.sampling.params import SampledToken, SampleRow
from engine.sampling.sampler import Sampler
from engine.step_budget import StepBudget
from engine.step_input import StepInput
from worker.core import Core, Inbox
from worker.handoff_connection import HandoffContext
from worker.handoff_metrics import HandoffMetrics
from worker.steps import StepLog

VOCABULARY = 16


class PendingStep:
    """A step that ends when it is told to."""

    def __init__(self, num_rows: int) -> None:
        self.is_done = False
        self.span: FakeSpan | None = None
        self._num_rows = num_rows

    def sample(self, rows: Sequence[Sequence[SampleRow]]) -> None:
        assert len(rows) == self._num_rows
        self._rows = [row for of_one in rows for row in of_one]

    def tokens(self) -> list[SampledToken]:
        return Sampler(VOCABULARY).sample(torch.zeros(len(self._rows), VOCABULARY), self._rows)

    def scores(self) -> list[SampledToken]:
        return []


class PendingRanks:
    """Ranks whose steps stay under way, but for those that `end_at_once`."""

    def __init__(self) -> None:
        self.steps: list[PendingStep] = []
        self.num_tokens: list[int] = []
        """Of each step."""
        self.end_at_once = False

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def launch(self, step: StepInput, rows: object = None) -> PendingStep:
        self.steps.append(PendingStep(len(step.logits_indices)))
        self.num_tokens.append(len(step.token_ids))
        self.steps[-1].is_done = self.end_at_once
        return self.steps[-1]


class FakeRouter:
    """The session of a router: keeps what is sent to it."""

    def __init__(self) -> None:
        self.events: list[worker_pb2.Event] = []

    def __call__(self, events: list[worker_pb2.Event]) -> None:
        self.events += events

    def of(self, request_id: str) -> list[int]:
        tokens = [e.tokens for e in self.events if e.HasField("tokens") and e.tokens.key.request_id == request_id]
        return [token for each in tokens for token in each.token_ids]


class SlowConstrainer:
    """Compiles a grammar when the test says so."""

    def __init__(self) -> None:
        self.done: dict[str, Callable[[Any], None]] = {}

    def begin(self, grammar: str, done: Callable[[Any], None]) -> None:
        self.done[grammar] = done


def make_core(constrainer: Any = None) -> tuple[Core, PendingRanks, FakeRouter]:
    settings = WorkerSettings.from_values(worker_id="decode-0", role="decode", model_path="")
    ranks, router, inbox = PendingRanks(), FakeRouter(), Inbox()
    nobody: Any = None  # nothing is handed over here
    context = HandoffContext(inbox.post, nobody, nobody, FailureTimeouts(1.0, 2.0, 3.0), HandoffMetrics())
    core = Core(
        inbox,
        ranks,
        BlockManager(16, 16, groups=all_layers(2)),
        context,
        nobody,
        settings,
        max_model_len=256,
        vocab_size=VOCABULARY,
        step_log=StepLog(None),
        constrainer=constrainer,
    )
    core.session_opened(router, worker_pb2.WorkerInfo())
    return core, ranks, router


def admit(
    core: Core, router: FakeRouter, name: str, max_output_tokens: int = 2, grammar: str = "", **options: Any
) -> worker_pb2.RequestKey:
    key = worker_pb2.RequestKey(request_id=name, attempt=1)
    sampling = worker_pb2.Sampling(
        params=generation_pb2.SamplingParams(temperature=0),
        stopping=generation_pb2.StoppingCriteria(max_output_tokens=max_output_tokens),
        top_logprobs=1,
        grammar=grammar,
    )
    admit = worker_pb2.Admit(
        key=key, role=worker_pb2.ROLE_DECODE, prompt_token_ids=[1] * 40, sampling=sampling, **options
    )
    core.command(router, worker_pb2.Command(admit=admit))
    return key


def test_settings_that_change_hold_from_the_next_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker kept the `rebalance.slo.tpot_ms` of its start when that changed."""
    core, ranks, router = make_core()
    changed = json.dumps({"slo": {"tpot_ms": 7.0}, "engine": {"max_num_batched_tokens": 16}, "router": {"port": 1}})
    core.command(router, worker_pb2.Command(update_settings=worker_pb2.UpdateSettings(json=changed)))
    admit(core, router, "long")
    core.turn(wait=False)
    assert ranks.num_tokens == [16]
    ranks.steps[0].is_done = True
    with monkeypatch.context() as patch:
        budgets: list[tuple[int, float]] = []
        patch.setattr("worker.step_pipeline.StepBudget", lambda *given: budgets.append(given[:2]) or StepBudget(*given))
        core.turn(wait=False)
        core.turn(wait=False)
    assert budgets == [(16, 0.007)]


def test_a_worker_takes_no_larger_steps_than_it_has_reserved_memory_for() -> None:
    """Those that run keep theirs while workers for larger steps come up one by one."""
    core, _, router = make_core()
    reserved = core._settings.engine.max_num_batched_tokens
    for asked, taken in ((reserved * 2, reserved), (16, 16), (reserved * 2, reserved)):
        changed = json.dumps({"engine": {"max_num_batched_tokens": asked}})
        core.command(router, worker_pb2.Command(update_settings=worker_pb2.UpdateSettings(json=changed)))
        assert core._settings.engine.max_num_batched_tokens == taken


def test_what_steps_cost_is_learned_from_the_device_that_computes_them() -> None:
    core, ranks, router = make_core()
    device = FakeDevice([0.5] * 20)
    admit(core, router, "long", max_output_tokens=12)
    for _ in range(12):
        core.turn(wait=False)
        ranks.steps[-1].span = device.begin()
        device.now += 0.5
        ranks.steps[-1].is_done = True
        core.turn(wait=False)
    cost = core._steps.cost
    assert cost is not None and cost.of(StepSize(num_sequences=1, num_kv_tokens=50)) == pytest.approx(0.5, rel=0.05)


def test_a_request_cancelled_while_its_step_runs_leaves_the_others_of_the_step_their_tokens() -> None:
    core, ranks, router = make_core()
    gone = admit(core, router, "gone")
    admit(core, router, "stays")
    assert not core.turn(wait=False)
    ranks.steps[0].is_done = True
    assert core.turn(wait=False)
    assert not core.turn(wait=False)
    core.command(router, worker_pb2.Command(cancel=worker_pb2.Cancel(key=gone)))
    ranks.steps[1].is_done = True
    assert core.turn(wait=False)
    assert len(router.of("gone")) == 1 and len(router.of("stays")) == 2
    assert core.blocks.num_held == 0


def test_a_step_tells_of_the_blocks_it_filled_with_its_tokens_and_of_none_when_it_filled_none() -> None:
    core, ranks, router = make_core()
    admit(core, router, "first")
    admit(core, router, "same prompt")
    core.turn(wait=False)
    assert [(e.cache.snapshot, len(e.cache.stored)) for e in router.events if e.HasField("cache")] == [(True, 0)]
    for is_prefill in (True, False):
        router.events.clear()
        ranks.steps[-1].is_done = True
        assert core.turn(wait=False)
        assert sum(e.HasField("tokens") for e in router.events) == 2
        told = [e.cache for e in router.events if e.HasField("cache")]
        assert [set(events.stored) for events in told] == ([set(core.blocks.cached_hashes)] if is_prefill else [])
        core.turn(wait=False)
    assert len(core.blocks.cached_hashes) == 40 // 16


def test_a_router_that_asks_is_told_everything_again_and_one_that_is_gone_nothing() -> None:
    core, ranks, router = make_core()
    admit(core, router, "first")
    core.turn(wait=False)
    ranks.steps[-1].is_done = True
    core.turn(wait=False)
    router.events.clear()
    core.command(router, worker_pb2.Command(resync_cache=worker_pb2.ResyncCache()))
    core.turn(wait=False)
    (events,) = [e.cache for e in router.events if e.HasField("cache")]
    assert events.snapshot and set(events.stored) == core.blocks.cached_hashes != set()
    core.session_closed(router)
    core.command(router, worker_pb2.Command(resync_cache=worker_pb2.ResyncCache()))
    router.events.clear()
    core.turn(wait=False)
    assert not router.events and core.blocks.take_cache_events() is None


@pytest.mark.parametrize(("interval_s", "tell_each_token"), [(0.0, False), (float("inf"), True), (float("inf"), False)])
def test_tokens_in_the_middle_of_an_output_are_told_together_its_first_and_its_last_at_once(
    interval_s: float, tell_each_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.core.REPORT_INTERVAL_S", interval_s)
    is_told_each = tell_each_token or interval_s == 0
    core, ranks, router = make_core()
    ranks.end_at_once = True
    admit(core, router, "first", max_output_tokens=4, tell_each_token=tell_each_token)
    num_told = []
    for _ in range(4):
        core.turn(wait=False)
        num_told.append(len(router.of("first")))
    assert num_told == ([1, 2, 3, 4] if is_told_each else [1, 1, 1, 4])
    told = [e.tokens for e in router.events if e.HasField("tokens")]
    assert [(t.first_token_index, len(t.token_ids), bool(t.finish_reason)) for t in told] == (
        [(0, 1, False), (1, 1, False), (2, 1, False), (3, 1, True)] if is_told_each else [(0, 1, False), (1, 3, True)]
    )
    assert all(len(t.logprobs) == len(t.token_ids) for t in told)


@pytest.mark.parametrize("what", ["a prompt", "nothing to do"])
def test_no_token_waits_for_a_prompt_or_for_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.core.REPORT_INTERVAL_S", float("inf"))
    core, ranks, router = make_core()
    ranks.end_at_once = True
    key = admit(core, router, "first", max_output_tokens=9)
    core.turn(wait=False)
    core.turn(wait=False)
    assert len(router.of("first")) == 1
    if what == "a prompt":
        admit(core, router, "second")
        ranks.end_at_once = False
        core.turn(wait=False)
    else:
        core.command(router, worker_pb2.Command(cancel=worker_pb2.Cancel(key=key)))
        core.turn(wait=False)
    assert len(router.of("first")) == 2


def test_a_request_waits_for_its_grammar_and_holds_up_no_other() -> None:
    constrainer = SlowConstrainer()
    core, ranks, router = make_core(constrainer)
    waits = admit(core, router, "waits", grammar="slow")
    other = admit(core, router, "other", grammar="wrong")
    admit(core, router, "free")
    core.turn(wait=False)
    assert len(ranks.steps) == 1 and core._measure().num_waiting_requests == 2
    constrainer.done["slow"](Constraint(Mock()))
    constrainer.done["wrong"](ValueError("no grammar"))
    core.turn(wait=False)
    assert RequestKey.of(waits) in core.decode and RequestKey.of(other) not in core.decode
    core.reporter.flush()
    failed = [event.failed for event in router.events if event.HasField("failed")]
    reasons = [(each.key.request_id, each.reason, each.message) for each in failed]
    assert reasons == [("other", worker_pb2.Failed.REASON_INVALID, "no grammar")]


@pytest.mark.parametrize("how", ["cancelled", "its router is gone"])
def test_a_request_that_ends_while_its_grammar_is_compiled_never_begins(how: str) -> None:
    constrainer = SlowConstrainer()
    core, _, router = make_core(constrainer)
    key = admit(core, router, "waits", grammar="slow")
    if how == "cancelled":
        core.command(router, worker_pb2.Command(cancel=worker_pb2.Cancel(key=key)))
    else:
        core.session_closed(router)
    constrainer.done["slow"](Constraint(Mock()))
    core.inbox.run(wait=True)
    assert RequestKey.of(key) not in core.decode and core._measure().num_waiting_requests == 0


def test_a_sequence_that_ends_while_its_grammar_is_compiled_is_not_born() -> None:
    constrainer = SlowConstrainer()
    core, _, router = make_core(constrainer)
    key = admit(core, router, "waits", grammar="slow")
    core.command(router, worker_pb2.Command(cancel=worker_pb2.Cancel(key=key, sequence_index=1)))
    constrainer.done["slow"](Constraint(Mock()))
    core.inbox.run(wait=True)
    assert core.decode._tasks[RequestKey.of(key)].aborted == {1}
