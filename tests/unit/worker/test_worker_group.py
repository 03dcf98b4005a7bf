"""Steps long and short on rank 0, and the replies of several ranks taken as one. The ranks here are socket ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import plain_kernels
import pytest
import torch
from checkpoints import make_checkpoint
from device_spans import FakeDevice
from engine_steps import make_runner
from workers import ROOT

from cluster.failure_detector import FailureTimeouts
from cluster.pb import rank_pb2
from engine.attention.flash import FlashAttention
from engine.cpu_runtime import compute_with
from engine.model_runner import StepOutput
from engine.sampling.params import SampledToken, SampleRow, SamplingParams
from engine.sampling.sampler import Sampler
from engine.step_input import SequenceSlice, StepInput, build_step
from worker.core import Inbox
from worker.group import LaunchedStep, RankGroup, StandIn
from worker.rank import OVERLAP_TOKENS, RankExecutor
from worker.rank_socket import read_frame, write_frame

NO_KIND = rank_pb2.RankReply.KIND_UNSPECIFIED
TRANSFER = rank_pb2.RankReply.KIND_TRANSFER
CORRUPT = rank_pb2.RankReply.KIND_CORRUPT
SOON_S = 10.0
VOCABULARY = 8
TIMING = FailureTimeouts(heartbeat_s=0.1, suspect_after_s=0.3, dead_after_s=0.6)


def alone() -> None:
    compute_with(1)


class FakeExecutor:
    """Rank 0's own share: it notes where steps run, and answers nothing by itself."""

    def __init__(self) -> None:
        self.ran_on: list[str] = []
        self.sampled: list[torch.Tensor | None] = []
        self.num_threads: list[int] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.error: Exception | None = None

    def step(self, step: StepInput, sampled: torch.Tensor | None = None) -> StepOutput:
        self.sampled.append(sampled)
        self.ran_on.append(threading.current_thread().name)
        self.num_threads.append(torch.get_num_threads())
        assert self.may_end.wait(SOON_S)
        if self.error is not None:
            raise self.error
        return StepOutput(torch.zeros(len(step.logits_indices), VOCABULARY))

    def execute(self, command: rank_pb2.RankCommand) -> None:
        pass

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, num_followers: int = 0) -> None:
        pairs = [socket.socketpair() for _ in range(num_followers)]
        self.followers = [theirs for _, theirs in pairs]
        self.sockets = [end for pair in pairs for end in pair]
        self.done: list[tuple[str, int, int]] = []
        self.lost: list[str] = []
        self.changed = threading.Condition()
        self.woken = threading.Semaphore(0)
        self.executor = FakeExecutor()
        self.group = RankGroup(
            lambda reply: self.executor,  # type: ignore[arg-type,return-value]
            [ours for ours, _ in pairs],
            Sampler(VOCABULARY),
            post=self.post,
            lost=self.note_lost,
            timing=TIMING,
            prepare=alone,
        )

    def issue(self, command: rank_pb2.RankCommand) -> int:
        """Returns the number that the command got in the log."""
        self.group.issue(command, self.note_done)
        return command.number

    def post(self, function: Any, *arguments: Any) -> None:
        """What the group has called on the engine thread."""
        function(*arguments)
        if function != self.note_done:
            self.woken.release()

    def note_done(self, *reply: Any) -> None:
        with self.changed:
            self.done.append(reply)
            self.changed.notify_all()

    def note_lost(self, why: str) -> None:
        with self.changed:
            self.lost.append(why)
            self.changed.notify_all()

    def wait_for(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, SOON_S)

    def answer(self, follower: int, number: int, error: str = "", kind: int = NO_KIND, size_bytes: int = 0) -> None:
        reply = rank_pb2.RankReply(number=number, error=error, error_kind=kind, size_bytes=size_bytes)  # type: ignore[arg-type]
        write_frame(self.followers[follower], reply)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(getattr(request, "param", 0))
    yield bench
    bench.group.close()
    for end in bench.sockets:
        end.close()


def a_step(num_tokens: int) -> StepInput:
    table = tuple(range(-(-num_tokens // 16)))
    return build_step([SequenceSlice(tuple(range(4, 4 + num_tokens)), 0, table, wants_logits=True)], 16)


def greedy() -> SampleRow:
    return SampleRow(SamplingParams(temperature=0.0), 0, [], [])


def tokens_of(launched: LaunchedStep) -> list[SampledToken]:
    launched.sample([[greedy()]])
    return launched.tokens()


def test_a_short_step_runs_where_it_is_launched_and_wakes_nobody(bench: Bench) -> None:
    launched = bench.group.launch(a_step(OVERLAP_TOKENS - 1))
    assert launched.is_done
    assert bench.executor.ran_on == [threading.current_thread().name]
    assert len(tokens_of(launched)) == 1
    assert not bench.woken.acquire(blocking=False)


def test_a_long_step_runs_beside_its_launcher_and_wakes_it(bench: Bench) -> None:
    bench.executor.may_end.clear()
    launched = bench.group.launch(a_step(OVERLAP_TOKENS))
    assert not launched.is_done
    assert bench.group.num_steps == 1
    bench.executor.may_end.set()
    assert bench.woken.acquire(timeout=SOON_S)
    assert launched.is_done, "woken before there was a result"
    assert len(tokens_of(launched)) == 1
    assert bench.executor.ran_on == ["compute"]
    assert bench.executor.num_threads == [torch.get_num_threads()]


def test_the_engine_thread_computes_a_long_step_while_another_takes_its_turns() -> None:
    inbox, executor, seen = Inbox(), FakeExecutor(), list[str]()
    executor.may_end.clear()
    stand_in = StandIn(lambda: inbox.run(wait=True), inbox.post)
    group = RankGroup(
        lambda reply: executor,  # type: ignore[arg-type,return-value]
        [],
        Sampler(VOCABULARY),
        post=inbox.post,
        lost=lambda why: None,
        timing=TIMING,
        stand_in=stand_in,
    )
    for number in range(3):
        launched = group.launch(a_step(OVERLAP_TOKENS))
        assert not launched.is_done and len(executor.ran_on) == number

        def event(launched: LaunchedStep = launched) -> None:
            assert not launched.is_done
            seen.append(threading.current_thread().name)
            executor.may_end.set()

        inbox.post(event)  # behind the step
        inbox.run(wait=True)
        assert launched.is_done
        executor.may_end.clear()
        inbox.post(lambda: seen.append("later"))
        inbox.run(wait=False)
    assert executor.ran_on == [threading.current_thread().name] * 3
    assert seen == ["engine's stand-in", "later"] * 3
    group.close()


def test_what_a_turn_during_a_long_step_raises_ends_the_step() -> None:
    inbox, executor = Inbox(), FakeExecutor()
    executor.may_end.clear()
    stand_in = StandIn(lambda: inbox.run(wait=True), inbox.post)

    def broken() -> None:
        executor.may_end.set()
        raise ValueError("no such block")

    inbox.post(broken)
    with pytest.raises(ValueError, match="no such block"):
        stand_in.during(executor.step, a_step(OVERLAP_TOKENS), None)  # type: ignore[arg-type]
    stand_in.close()


@pytest.mark.parametrize("num_tokens", [2, OVERLAP_TOKENS])
def test_a_step_gets_the_tokens_of_the_one_before_it_that_nobody_has_read(bench: Bench, num_tokens: int) -> None:
    first = bench.group.launch(a_step(2))
    ahead = SequenceSlice((-1, *range(1, num_tokens)), 0, tuple(range(4)), wants_logits=True)
    with pytest.raises(AssertionError, match="which was not sampled"):
        bench.group.launch(build_step([ahead], 16))
    first.sample([[greedy()]])
    second = bench.group.launch(build_step([ahead], 16))
    assert second.is_done or bench.woken.acquire(timeout=SOON_S)
    assert [None if given is None else given.tolist() for given in bench.executor.sampled] == [None, [0]]
    assert [token.token_id for token in first.tokens()] == [0] and len(tokens_of(second)) == 1


def test_two_steps_never_run_at_one_time(bench: Bench) -> None:
    bench.executor.may_end.clear()
    bench.group.launch(a_step(OVERLAP_TOKENS))
    with pytest.raises(AssertionError, match="before the one before it was done"):
        bench.group.launch(a_step(1))
    bench.executor.may_end.set()
    assert bench.woken.acquire(timeout=SOON_S)
    assert bench.group.launch(a_step(1)).is_done


def test_a_step_on_a_device_ends_with_its_tokens_and_one_more_may_wait_behind_it(bench: Bench) -> None:
    device = FakeDevice([0.1] * 4)
    bench.group._begin_span = device.begin
    for _ in range(3):
        launched = bench.group.launch(a_step(OVERLAP_TOKENS))
        assert bench.woken.acquire(timeout=SOON_S)
        launched.sample([])
    tokens_of(launched)
    assert device.calls == [
        "step 1 begins",
        "step 1 ends",
        "step 2 begins",
        "step 1 is awaited",
        "step 2 ends",
        "step 3 begins",
        "step 2 is awaited",
        "step 3 ends",
        "step 3 ends",  # with its token
    ]


@pytest.mark.parametrize("num_tokens", [1, OVERLAP_TOKENS])
def test_what_makes_a_step_fail_comes_out_of_its_result(bench: Bench, num_tokens: int) -> None:
    bench.executor.error = ValueError("no such block")
    launched = bench.group.launch(a_step(num_tokens))
    with pytest.raises(ValueError, match="no such block"):
        launched.sample([])


@pytest.mark.parametrize("bench", [2], indirect=True)
def test_every_rank_gets_the_log_in_its_order(bench: Bench) -> None:
    command = rank_pb2.RankCommand(send=rank_pb2.Send(pair_epoch="e", slot=3))
    bench.group.launch(a_step(2))
    number = bench.issue(command)
    bench.group.launch(a_step(OVERLAP_TOKENS)).sample([])
    assert bench.group.num_steps == 2
    for follower in bench.followers:
        log = [read_frame(follower, rank_pb2.RankCommand) for _ in range(3)]
        assert [c.number for c in log] == [1, 2, 3]
        assert [c.WhichOneof("command") for c in log] == ["step", "send", "step"]
        assert log[1].number == number
        assert len(StepInput.from_bytes(log[2].step).token_ids) == OVERLAP_TOKENS


@pytest.mark.parametrize("bench", [2], indirect=True)
@pytest.mark.parametrize(
    ("errors", "told"),
    [
        (["", "", ""], ("", NO_KIND)),
        (["", "gone", "gone"], ("gone", TRANSFER)),
        (["", "gone", "damaged"], ("damaged", CORRUPT)),
        (["damaged", "gone", ""], ("damaged", CORRUPT)),
    ],
)
def test_a_command_is_done_when_every_rank_is(bench: Bench, errors: list[str], told: tuple[str, int]) -> None:
    number = bench.issue(rank_pb2.RankCommand(send=rank_pb2.Send()))
    kinds = [{"": NO_KIND, "damaged": CORRUPT}.get(error, TRANSFER) for error in errors]
    bench.group.reply(number, errors[0], kinds[0], 10)
    bench.answer(0, number, errors[1], kinds[1], 20)
    assert bench.done == []
    bench.answer(1, number, errors[2], kinds[2], 30)
    bench.wait_for(lambda: bench.done)
    assert bench.done == [(*told, 60)]
    assert not bench.group._pending


@pytest.mark.parametrize("bench", [1], indirect=True)
def test_a_rank_whose_socket_closes_is_named(bench: Bench) -> None:
    bench.followers[0].close()
    bench.wait_for(lambda: bench.lost)
    assert "rank 1 is gone" in bench.lost[0]


def test_a_real_model_computes_the_same_on_either_thread_and_tells_of_every_layer() -> None:
    runner = make_runner(ROOT / "models" / "tiny-shakespeare", num_blocks=8)
    layers: list[int] = []
    pages: list[torch.Tensor] = []

    def on_layer(num_layers: int) -> None:
        layers.append(num_layers)
        pages.append(runner.kv[num_layers - 1].clone())

    step = a_step(OVERLAP_TOKENS)
    expected = runner.forward(step, on_layer=on_layer)
    assert layers == list(range(1, runner.config.num_hidden_layers + 1))
    for layer, when_told in enumerate(pages):
        assert when_told[:, :4].abs().sum() > 0
        assert torch.equal(when_told, runner.kv[layer]), f"layer {layer} was written after it was told of"

    executor = FakeExecutor()
    executor.step = lambda step, sampled=None: runner.run(step, sampled=sampled)  # type: ignore[method-assign]
    woken = threading.Event()
    sampler = Sampler(runner.config.vocab_size)
    group = RankGroup(
        lambda reply: executor,  # type: ignore[arg-type,return-value]
        [],
        sampler,
        post=lambda function: woken.set(),
        lost=lambda why: None,
        timing=TIMING,
        prepare=alone,
    )
    launched = group.launch(step)
    assert woken.wait(SOON_S)
    assert torch.equal(launched._future.result().logits, expected)
    assert tokens_of(launched) == sampler.sample(expected, [greedy()])
    group.close()


@pytest.mark.parametrize("bench", [2], indirect=True)
def test_a_rank_that_says_nothing_makes_the_worker_unfit_until_it_is_heard(bench: Bench) -> None:
    assert bench.group.tick(TIMING.tick_s) == ""
    for _ in range(20):
        why = bench.group.tick(2 * TIMING.tick_s)
    assert why == "tensor-parallel rank 1, 2 of this worker is silent"
    for follower, left in ((0, "tensor-parallel rank 2 of this worker is silent"), (1, "")):
        bench.answer(follower, 0)  # a sign of life
        deadline = time.monotonic() + SOON_S
        while bench.group.tick(0.0) != left:
            assert time.monotonic() < deadline
    assert not bench.lost and not bench.done


def test_a_decode_step_of_any_size_is_replayed_and_a_prompt_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of 64 and more sequences told of their layers, so that none of them was replayed as a graph."""
    replayed: list[int] = []

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        return lambda: (work(), replayed.append(1))[0]

    backend = FlashAttention(plain_kernels.flash_attn_varlen_func)
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (backend, "for this test"))
    most, block_size = OVERLAP_TOKENS + 8, 256
    runner = make_runner(
        make_checkpoint("llama", tmp_path),
        num_blocks=most,
        block_size=block_size,
        kernels="torch",
        graphs_up_to=most,
        capture=capture,
    )
    executor = RankExecutor(runner, Mock(), lambda *reply: None)
    woken = threading.Semaphore(0)
    group = RankGroup(
        lambda reply: executor,
        [],
        Sampler(runner.config.vocab_size),
        post=lambda function: woken.release(),
        lost=lambda why: None,
        timing=TIMING,
        prepare=alone,
    )
    decoding = [SequenceSlice((7,), 3, (block,), wants_logits=True) for block in range(most)]
    prompt = SequenceSlice(tuple(range(OVERLAP_TOKENS)), 0, (0,), wants_logits=True)
    for slices, num_replayed in ((decoding[:1], 1), (decoding, 2), ([prompt], 2)):
        launched = group.launch(build_step(slices, block_size))
        assert launched.is_done or woken.acquire(timeout=SOON_S)
        launched.sample([[greedy()]] * len(slices))
        assert len(launched.tokens()) == len(slices)
        assert len(replayed) == num_replayed
    group.close()
