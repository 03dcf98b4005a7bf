"""The decode role between its scheduler and its receiver: attempts of one request follow one another."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from cluster.kv_groups import KvGroup
from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2, handoff_pb2, worker_pb2
from engine.kv.block_manager import BlockManager
from engine.sampling.params import SampledToken, SamplingParams
from engine.sequence import Request, Sequence
from engine.step_budget import StepBudget
from kv_transfer.actions import Chunk
from worker.decode_role import DecodeRole
from worker.handoff_connection import HandoffMessage
from worker.reporter import Reporter

FIRST, SECOND = RequestKey("r", 1), RequestKey("r", 2)
PROMPT = tuple(range(16))
Reason = worker_pb2.Failed.Reason
PEER_LOST = worker_pb2.Failed.REASON_PEER_LOST


class Connection:
    """One that is open: it notes what is sent and landed on it."""

    def __init__(self, around: Surroundings, epoch: str) -> None:
        self.epoch = epoch
        self._around = around

    def send(self, message: HandoffMessage) -> None:
        assert isinstance(message, handoff_pb2.ReceiverMessage)
        self._around.told.append((self.epoch, message))

    def land(self, chunk: Chunk, table: list[int], done: Callable[[Chunk, str, Reason], None]) -> None:
        self._around.landings.append(chunk)
        self._around.landed = done


class Surroundings(Reporter):
    """What the role tells and lands, kept for the test to read."""

    def __init__(self, groups: Seq[KvGroup] = (KvGroup((0,)),)) -> None:
        super().__init__()
        self.heard: list[worker_pb2.Event] = []
        self.tokens: list[tuple[int, int, int]] = []
        """Sequence, position and id of each that was told."""
        self.told: list[tuple[str, handoff_pb2.ReceiverMessage]] = []
        self.landings: list[Chunk] = []
        self.landed: Callable[[Chunk, str, Reason], None] = lambda *landing: None
        """Called when a landing has ended."""
        self.blocks = BlockManager(16, 4, groups=groups)
        self.connections: dict[str, Any] = {}
        self.role = DecodeRole(self, self.blocks, max_num_seqs=4)

    def emit(self, key: RequestKey, event: worker_pb2.Event, *, can_wait: bool = False) -> None:
        self.heard.append(event)

    def emit_tokens(self, sequence: Sequence, sampled: SampledToken, index: int) -> None:
        self.tokens.append((sequence.index, index, sampled.token_id))

    def emit_prompt_logprobs(self, sequence: Sequence, scores: Seq[SampledToken]) -> None: ...

    def close_request(self, key: RequestKey) -> None: ...

    def retire(self, epoch: str) -> None:
        self.role.connection_retired(self.connections[epoch], PEER_LOST, "gone")

    def open(self, key: RequestKey, epoch: str) -> None:
        connection: Any = Connection(self, epoch)
        self.connections[epoch] = connection
        self.role.connection_called(connection, handoff_pb2.ReceiverHello(chunk_tokens=8, num_slots=2))
        self.role.connection_open(connection)
        message = handoff_pb2.Open(key=key.to_proto(), num_tokens=len(PROMPT))
        self.role.on_message(connection, handoff_pb2.SenderMessage(open=message))

    def offer(self, key: RequestKey, epoch: str, index: int, token_start: int, token_end: int) -> None:
        where = {"token_start": token_start, "token_end": token_end, "layer_start": 0, "layer_end": 1}
        offer = handoff_pb2.Chunk(key=key.to_proto(), index=index, slot=index % 2, **where)
        self.role.on_message(self.connections[epoch], handoff_pb2.SenderMessage(offer=offer))

    def reserved(self, key: RequestKey) -> list[int]:
        """Cached tokens of each reservation that was told for a key."""
        told = [m.reserved for _, m in self.told if m.HasField("reserved")]
        return [r.num_cached_tokens for r in told if RequestKey.of(r.key) == key]


def request(key: RequestKey, *, use_prefix_cache: bool = True) -> Request:
    return Request(key, PROMPT, SamplingParams(max_output_tokens=4), use_prefix_cache=use_prefix_cache)


def test_a_second_attempt_waits_for_the_first_to_drain_and_goes_on_from_what_it_left() -> None:
    for use_prefix_cache in (True, False):
        around = Surroundings()
        role = around.role
        role.admit(request(FIRST, use_prefix_cache=use_prefix_cache), expect_handoff=True)
        around.open(FIRST, "one")
        role.plan(StepBudget(100))
        for index in range(2):
            around.offer(FIRST, "one", index, 8 * index, 8 * index + 8)
        landed, under_way = around.landings
        around.landed(landed, "", PEER_LOST)
        around.retire("one")
        role.admit(request(SECOND, use_prefix_cache=use_prefix_cache), expect_handoff=True)
        around.open(SECOND, "two")
        role.plan(StepBudget(100))
        assert around.reserved(SECOND) == [], "a transfer of the first attempt may still write its pages"
        assert not around.heard and role.num_waiting == 1
        around.landed(under_way, "the pair was closed", PEER_LOST)
        (failed,) = [event.failed for event in around.heard]
        assert (failed.reason, failed.num_kept_tokens) == (PEER_LOST, 8)
        role.plan(StepBudget(100))
        assert around.reserved(SECOND) == [8]


def test_a_prompt_is_reserved_for_at_once_and_not_when_the_step_under_way_has_ended() -> None:
    around = Surroundings()
    around.role.admit(request(FIRST), expect_handoff=True)
    around.open(FIRST, "one")
    assert around.reserved(FIRST) == [0] and around.role.num_waiting == 0


def test_each_sequence_of_a_hand_off_has_a_block_of_each_group_for_its_next_tokens() -> None:
    around = Surroundings((KvGroup((0,)), KvGroup((1,), window=6)))
    around.role.admit(Request(FIRST, PROMPT, SamplingParams(max_output_tokens=4, n=2)), expect_handoff=True)
    around.open(FIRST, "one")
    num_prompt = 4 + 2  # the window's last two blocks
    assert around.reserved(FIRST) == [0] and around.blocks.num_held == num_prompt + 2 * 2


def test_what_runs_keeps_the_blocks_that_it_is_about_to_need() -> None:
    around = Surroundings()
    role = around.role
    for number in range(3):
        key, params = RequestKey(f"running {number}", 1), SamplingParams(max_output_tokens=4)
        role.admit(Request(key, PROMPT[:12], params, use_prefix_cache=False), expect_handoff=False)
    run_step(role, 1, 2, 3)
    role.admit(request(FIRST, use_prefix_cache=False), expect_handoff=True)
    around.open(FIRST, "one")
    assert around.blocks.num_free > len(PROMPT) // 4 + 1 and around.reserved(FIRST) == []
    run_step(role, 1, 2, 3)
    assert role.num_preemptions == 0


def test_an_attempt_that_is_held_back_can_be_cancelled() -> None:
    around = Surroundings()
    role = around.role
    role.admit(request(FIRST), expect_handoff=True)
    around.open(FIRST, "one")
    role.plan(StepBudget(100))
    around.offer(FIRST, "one", 0, 0, 8)
    role.admit(request(SECOND), expect_handoff=False)
    assert SECOND in role
    role.cancel(SECOND, "cancelled")
    assert SECOND not in role
    role.cancel(FIRST, "cancelled")
    around.landed(around.landings[0], "", PEER_LOST)
    assert role.num_waiting == role.num_running == 0
    assert around.blocks.num_held == 0


def test_what_bypasses_the_prefix_cache_is_found_by_nobody_else() -> None:
    around = Surroundings()
    role = around.role
    role.admit(request(FIRST, use_prefix_cache=False), expect_handoff=True)
    around.open(FIRST, "one")
    role.plan(StepBudget(100))
    around.offer(FIRST, "one", 0, 0, 8)
    around.landed(around.landings[0], "", PEER_LOST)
    around.retire("one")
    other = RequestKey("other", 2)
    for key, use_prefix_cache in ((other, True), (RequestKey("third", 2), False)):
        role.admit(request(key, use_prefix_cache=use_prefix_cache), expect_handoff=True)
        around.open(key, f"link of {key.request_id}")
        role.plan(StepBudget(100))
        assert around.reserved(key) == [0]


def test_what_a_preempted_prompt_finds_of_its_own_is_not_told_as_cached() -> None:
    around = Surroundings()
    role = around.role
    role.admit(Request(FIRST, PROMPT, SamplingParams(max_output_tokens=12)), expect_handoff=False)
    run_step(role, 1)
    other = RequestKey("other", 1)
    role.admit(Request(other, tuple(range(100, 140)), SamplingParams(), use_prefix_cache=False), expect_handoff=False)
    while role.num_preemptions == 0:
        run_step(role, 1, most_tokens=4)
    while not role.resumed_tokens:
        run_step(role, 1, most_tokens=4)
    assert role.resumed_tokens["device"] > 0
    told = [e.phase for e in around.heard if e.HasField("phase") and RequestKey.of(e.phase.key) == other]
    assert [(p.phase, p.num_cached_tokens) for p in told] == [(generation_pb2.Heartbeat.PHASE_PREFILL, 0)]


def run_step(role: DecodeRole, *sampled: int, most_tokens: int = 100) -> list[tuple[int, int]]:
    """One step, whose shares that reach their end lead to these tokens in turn; (sequence, tokens) of each share."""
    scheduled, _, copies = role.plan(StepBudget(most_tokens))
    role.copied(copies)
    tokens = iter(sampled)
    for p in scheduled:
        is_end = p.num_tokens == p.sequence.num_remaining
        born = p.sequence.fan_out if is_end else 0
        role.process_output(p, [SampledToken(next(tokens)) for _ in range(born)])
    return [(p.sequence.index, p.num_tokens) for p in scheduled]


def test_tokens_that_are_known_are_computed_in_one_step_and_told_no_more() -> None:
    around = Surroundings()
    role = around.role
    params = SamplingParams(max_output_tokens=6, n=2)
    role.admit(Request(SECOND, PROMPT, params, known_tokens={0: (5, 6, 7), 1: (8,)}), expect_handoff=False)
    assert run_step(role, 90, 91) == [(0, len(PROMPT))]
    assert around.tokens == []
    assert sorted(run_step(role, 61, 70)) == [(0, 3), (1, 1)]
    told = {(sequence, position) for sequence, position, _ in around.tokens}
    assert told == {(0, 3), (1, 1)}, "what the model made of the prompt again does not count"
    around.tokens.clear()
    assert run_step(role, 71, 62) == [(0, 1), (1, 1)]
    assert around.tokens == [(0, 4, 71), (1, 2, 62)]
    role.cancel(SECOND, "over")
    role.check_idle()
    assert around.blocks.num_held == 0


def hand_over(around: Surroundings, key: RequestKey, epoch: str, num_tokens: int, token_ids: dict[int, int]) -> None:
    """All of it, in chunks of up to 8 tokens, and the token of each sequence that the prefill worker was led to."""
    around.open(key, epoch)
    around.role.plan(StepBudget(100))
    starts = range(0, num_tokens, 8)
    for index, start in enumerate(starts):
        around.offer(key, epoch, index, start, min(start + 8, num_tokens))
        around.landed(around.landings.pop(), "", PEER_LOST)
    first = [handoff_pb2.FirstToken(sequence_index=i, token_id=token_id) for i, token_id in token_ids.items()]
    commit = handoff_pb2.Commit(key=key.to_proto(), num_chunks=len(starts), first_tokens=first)
    around.role.on_message(around.connections[epoch], handoff_pb2.SenderMessage(commit=commit))


def test_what_is_known_of_each_of_several_sequences_is_computed_after_a_hand_off_of_their_prompt() -> None:
    around = Surroundings()
    role = around.role
    params = SamplingParams(max_output_tokens=6, n=2)
    role.admit(Request(SECOND, PROMPT, params, known_tokens={0: (5, 6, 7)}), expect_handoff=True)
    hand_over(around, SECOND, "two", len(PROMPT), {0: 5, 1: 9})
    assert sorted(run_step(role, 70, 60)) == [(0, 3), (1, 1)]
    assert sorted(around.tokens) == [(0, 3, 60), (1, 1, 70)]
    role.cancel(SECOND, "over")
    role.check_idle()


def test_a_sequence_that_is_ended_before_it_is_born_is_never_born() -> None:
    around = Surroundings()
    around.role.admit(Request(FIRST, PROMPT, SamplingParams(max_output_tokens=4, n=2)), expect_handoff=True)
    around.role.cancel(FIRST, "a stop string", sequence_index=0)
    hand_over(around, FIRST, "one", len(PROMPT), {0: 60, 1: 70})
    assert run_step(around.role, 71) == [(1, 1)]
    around.role.cancel(FIRST, "over")
    around.role.check_idle()


def test_blocks_that_no_sequence_needs_after_a_hand_off_are_free_again() -> None:
    around = Surroundings()
    request = Request(FIRST, PROMPT[:14], SamplingParams(max_output_tokens=4, n=3))
    around.role.admit(request, expect_handoff=True, aborted=[1, 2])
    hand_over(around, FIRST, "one", 14, {0: 60, 1: 70, 2: 80})
    assert around.blocks.num_held == 4, "the last of them has room for the next tokens"
    assert run_step(around.role, 61) == [(0, 1)]
    around.role.cancel(FIRST, "over")
    around.role.check_idle()
    assert around.blocks.num_held == 0


@pytest.mark.parametrize("num_known", [3, 4])
def test_the_known_output_of_one_sequence_is_handed_over_with_its_prompt(num_known: int) -> None:
    around = Surroundings()
    role = around.role
    known = {0: tuple(range(5, 5 + num_known))}
    role.admit(Request(SECOND, PROMPT, SamplingParams(max_output_tokens=8), known_tokens=known), expect_handoff=True)
    hand_over(around, SECOND, "two", len(PROMPT) + num_known, {0: 50})
    assert around.tokens == [], "the prefill worker tells the token after those that are known"
    assert around.blocks.num_held == (len(PROMPT) + num_known) // 4 + 1
    assert run_step(role, 70) == [(0, 1)]
    assert around.tokens == [(0, num_known + 1, 70)]
    while role.num_running:
        assert run_step(role, 71) == [(0, 1)]
    assert around.tokens[-1] == (0, 7, 71)
    role.check_idle()
    assert around.blocks.num_held == 0


def test_a_hand_off_without_what_is_known_is_refused() -> None:
    around = Surroundings()
    request = Request(SECOND, PROMPT, SamplingParams(max_output_tokens=8), known_tokens={0: (5,)})
    around.role.admit(request, expect_handoff=True)
    hand_over(around, SECOND, "two", len(PROMPT), {0: 5})
    (failed,) = [event.failed for event in around.heard if event.HasField("failed")]
    assert failed.reason == worker_pb2.Failed.REASON_TRANSFER_FAILED and failed.num_kept_tokens == len(PROMPT)
    around.role.check_idle()


def test_the_known_output_of_one_sequence_is_computed_here_with_its_prompt() -> None:
    around = Surroundings()
    role = around.role
    request = Request(SECOND, PROMPT, SamplingParams(max_output_tokens=6), known_tokens={0: (5, 6, 7)})
    role.admit(request, expect_handoff=False)
    assert run_step(role, 70) == [(0, len(PROMPT) + 3)]
    assert around.tokens == [(0, 3, 70)]
    phases = [event.phase.phase for event in around.heard]
    assert phases == [generation_pb2.Heartbeat.PHASE_PREFILL, generation_pb2.Heartbeat.PHASE_DECODE]
    assert [run_step(role, token) for token in (71, 72)] == [[(0, 1)], [(0, 1)]]
    role.check_idle()


# Fetches


def fetching(around: Surroundings, num_tokens: int) -> None:
    """The router has announced a fetch of the whole prompt, and the holder has so many tokens of it."""
    around.role.admit(request(FIRST), expect_handoff=True, is_fetch=True)
    connection: Any = Connection(around, "one")
    around.connections["one"] = connection
    around.role.connection_called(connection, handoff_pb2.ReceiverHello(chunk_tokens=8, num_slots=2))
    around.role.connection_open(connection)
    message = handoff_pb2.Open(key=FIRST.to_proto(), num_tokens=num_tokens)
    around.role.on_message(connection, handoff_pb2.SenderMessage(open=message))


def commit(around: Surroundings, num_chunks: int) -> None:
    message = handoff_pb2.Commit(key=FIRST.to_proto(), num_chunks=num_chunks)
    around.role.on_message(around.connections["one"], handoff_pb2.SenderMessage(commit=message))


def test_what_a_fetch_brings_is_found_in_the_prefix_cache_and_nothing_decodes() -> None:
    around = Surroundings()
    fetching(around, 12)
    assert around.reserved(FIRST) == [0] and around.blocks.num_held == 3, "for what comes, without head-room"
    around.offer(FIRST, "one", 0, 0, 8)
    around.offer(FIRST, "one", 1, 8, 12)
    for chunk in around.landings:
        around.landed(chunk, "", PEER_LOST)
    assert around.blocks.num_cached == 0 and not around.heard
    commit(around, 2)
    (fetched,) = [event.fetched for event in around.heard]
    assert (fetched.num_tokens, fetched.num_cached_tokens) == (12, 0)
    assert around.blocks.num_held == 0 and len(around.blocks.match_prefix(PROMPT)) == 3
    assert not around.role.has_work
    around.role.check_idle()


def test_of_a_fetch_only_that_comes_which_is_not_here_and_whole_blocks_of_it_are_kept() -> None:
    around = Surroundings()
    table = around.blocks.allocate(1)
    around.blocks.publish(PROMPT[:4], table, b"", 4)
    around.blocks.release(table)
    fetching(around, 10)
    assert around.reserved(FIRST) == [4]
    around.offer(FIRST, "one", 0, 4, 10)
    around.landed(around.landings[0], "", PEER_LOST)
    commit(around, 1)
    (fetched,) = [event.fetched for event in around.heard]
    assert (fetched.num_tokens, fetched.num_cached_tokens) == (8, 4)


def test_a_fetch_waits_for_no_block_and_takes_none_from_those_that_do() -> None:
    around = Surroundings()
    around.blocks.allocate(14)
    fetching(around, 12)
    (failed,) = [event.failed for event in around.heard]
    assert failed.reason == worker_pb2.Failed.REASON_CAPACITY
    assert around.blocks.num_held == 14 and FIRST not in around.role
    assert [m.WhichOneof("message") for _, m in around.told] == ["abort"]

    around = Surroundings()
    held = around.blocks.allocate(13)
    around.role.admit(request(SECOND), expect_handoff=True)
    around.open(SECOND, "two")
    assert around.reserved(SECOND) == []
    fetching(around, 12)
    assert [event.failed.reason for event in around.heard] == [worker_pb2.Failed.REASON_CAPACITY]
    around.blocks.release(held)
    around.role.plan(StepBudget(100))
    assert around.reserved(SECOND) == [0]


def test_a_fetch_that_fails_leaves_what_has_landed() -> None:
    around = Surroundings()
    fetching(around, 12)
    around.offer(FIRST, "one", 0, 0, 8)
    around.landed(around.landings[0], "", PEER_LOST)
    around.retire("one")
    (failed,) = [event.failed for event in around.heard]
    assert (failed.reason, failed.num_kept_tokens) == (PEER_LOST, 8)
    assert around.blocks.num_held == 0 and len(around.blocks.match_prefix(PROMPT)) == 2
    around.role.check_idle()
