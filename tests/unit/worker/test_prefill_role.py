"""The prefill role between its scheduler and its sender, without a worker around it."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, worker_pb2
from engine.kv.block_manager import BlockManager
from engine.kv.kv_tier import MoveKind
from engine.kv.tiered_blocks import TieredBlocks
from engine.sampling.params import SampledToken, SamplingParams
from engine.sequence import Request, Sequence
from engine.step_budget import StepBudget
from kv_transfer.actions import Chunk
from worker.handoff_connection import HandoffMessage
from worker.prefill_role import PrefillRole
from worker.reporter import Reporter
from worker.steps import StepLog

KEY = RequestKey("r", 1)
EPOCH = "prefill-0-decode-0-1"
PROMPT = tuple(range(40))


class Connection:
    """One that is open: it notes what is sent and gathered on it."""

    epoch = EPOCH
    agreed = handoff_pb2.ReceiverHello(chunk_tokens=8, num_slots=2)

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    def prompt_done(self, key: RequestKey) -> None: ...

    def send(self, message: HandoffMessage) -> None:
        assert isinstance(message, handoff_pb2.SenderMessage)
        self._around.told.append(message)

    def gather(self, chunk: Chunk, table: list[int], after_step: int, done: Callable[[Chunk], None]) -> None:
        self._around.gathers.append((chunk, after_step))
        self._around.gather_done = done

    def transmit(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None: ...


class Surroundings(Reporter):
    """What the role tells and carries, kept for the test to read; gathers end when the test says so."""

    def __init__(self, step_log: StepLog | None = None) -> None:
        super().__init__(step_log)
        self.gathers: list[tuple[Chunk, int]] = []
        self.heard: list[worker_pb2.Event] = []
        self.told: list[handoff_pb2.SenderMessage] = []
        self.tokens: list[tuple[int, int, int]] = []
        """Sequence, id and position of each that was told."""
        self.blocks: BlockManager = BlockManager(16, 4)
        self.role = PrefillRole(self, self.blocks)
        self.connection: Any = Connection(self)
        self.gather_done: Callable[[Chunk], None] = lambda chunk: None

    def emit(self, key: RequestKey, event: worker_pb2.Event, *, can_wait: bool = False) -> None:
        self.heard.append(event)

    def emit_tokens(self, sequence: Sequence, sampled: SampledToken, index: int) -> None:
        self.tokens.append((sequence.index, sampled.token_id, index))

    def emit_prompt_logprobs(self, sequence: Sequence, scores: Seq[SampledToken]) -> None: ...

    def begin(self, request: Request) -> None:
        """The hand-off is reserved and its connection is open."""
        self.open_request(request.key, lambda events: None)
        self.role.connection_open(self.connection)
        self.role.admit(request, self.connection)
        reserved = handoff_pb2.Reserved(key=request.key.to_proto())
        self.role.on_message(self.connection, handoff_pb2.ReceiverMessage(reserved=reserved))

    def step(self, budget: int, sampled: list[SampledToken]) -> None:
        (scheduled,) = self.role.plan(StepBudget(budget), 0)
        self.role.step_launching(scheduled, 1)
        self.role.process_output(scheduled, sampled, 1)

    def gathered(self) -> None:
        while self.gathers:
            self.gather_done(self.gathers.pop(0)[0])


def aborted_by_peer(around: Surroundings) -> None:
    abort = handoff_pb2.Abort(key=KEY.to_proto())
    around.role.on_message(around.connection, handoff_pb2.ReceiverMessage(abort=abort))


def connection_lost(around: Surroundings) -> None:
    around.role.connection_retired(around.connection, worker_pb2.Failed.REASON_PEER_LOST, "gone")


@pytest.mark.parametrize(
    "give_up",
    [
        lambda around: around.role.cancel(KEY, "cancelled"),
        aborted_by_peer,
        connection_lost,
    ],
    ids=["cancel", "abort", "connection lost"],
)
def test_a_prompt_given_up_is_computed_no_further_while_a_gather_still_reads_it(
    give_up: Callable[[Surroundings], None],
) -> None:
    around = Surroundings()
    around.begin(Request(KEY, PROMPT, SamplingParams()))
    around.step(8, [])
    ((gather, after_step),) = around.gathers
    assert after_step == 1

    give_up(around)

    assert around.role.plan(StepBudget(8), 1) == []
    assert around.blocks.num_held == 10, "the gather may still read them"
    assert around.num_requests == 1
    around.gather_done(gather)
    assert around.blocks.num_held == 0
    assert around.num_requests == 0, "its router is told nothing more"


def test_a_prompt_without_blocks_is_given_up_where_they_may_never_come() -> None:
    """They are reserved for hand-offs of other workers, which may wait for this prompt."""
    around = Surroundings()
    landing = around.blocks.allocate(8)
    around.begin(Request(KEY, PROMPT, SamplingParams()))
    short = RequestKey("short", 1)
    around.begin(Request(short, PROMPT[:8], SamplingParams()))
    assert around.role.plan(StepBudget(8), 0) == [], "it may wait"
    assert around.role.num_waiting == 2 and not around.told[2:]

    (scheduled,) = around.role.plan(StepBudget(8), 0, may_wait=lambda: False)

    assert scheduled.sequence.request.key == short, "it has blocks, and is not held up any more"
    assert [event.failed.reason for event in around.heard if event.HasField("failed")] == [3]
    assert [told.abort.key.request_id for told in around.told if told.HasField("abort")] == ["r"]
    around.role.step_launching(scheduled, 1)
    around.role.process_output(scheduled, [SampledToken(1)], 1)
    another = RequestKey("another", 1)
    around.begin(Request(another, PROMPT, SamplingParams()))
    around.role.plan(StepBudget(8), 1, may_wait=lambda: False)
    assert another in around.role, "blocks come back with the hand-off of the short one"
    around.blocks.release(landing)


def test_the_step_log_names_a_request_that_the_decode_worker_gave_up_before_the_router_cancelled_it(
    tmp_path: Path,
) -> None:
    """The worker holds nothing of it when the router's cancel arrives, so nothing else would show when it ended."""
    path = tmp_path / "steps.jsonl"
    log = StepLog(str(path))
    around = Surroundings(log)
    around.begin(Request(KEY, PROMPT, SamplingParams()))
    aborted_by_peer(around)
    assert KEY not in around.role
    log.write(1, [], [], around.blocks)
    log.write(2, [], [], around.blocks)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["cancelled"], line["failed"]) for line in lines] == [([], ["r"]), ([], [])]


def test_a_step_log_that_is_full_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path, around = tmp_path / "steps.jsonl", Surroundings()
    log = StepLog(str(path), most_bytes=1000)
    for number in range(1, 51):
        log.write(number, [], [], around.blocks)
    log.close()
    again = StepLog(str(path), most_bytes=1000)
    again.write(51, [], [], around.blocks)
    again.close()
    older = path.with_name("steps.jsonl.1")
    assert older.stat().st_size < 1300 and path.stat().st_size < 1300
    steps = [json.loads(line)["step"] for file in (older, path) for line in file.read_text().splitlines()]
    assert steps == list(range(steps[0], 52)) and len(steps) < 20


def test_a_step_log_whose_folder_is_gone_ends_and_the_steps_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, around = tmp_path / "logs" / "steps.jsonl", Surroundings()
    log = StepLog(str(path), most_bytes=1000)
    path.unlink()
    path.parent.rmdir()
    for number in range(1, 51):
        log.write(number, [], [], around.blocks)
    log.close()
    assert len(caplog.messages) == 1 and str(path) in caplog.messages[0]


def test_a_step_log_on_a_full_disk_leaves_lines_out_and_goes_on_later(tmp_path: Path) -> None:
    """The lines around the missing ones fit together: the next one names all that has changed meanwhile."""
    path = tmp_path / "steps.jsonl"
    log, blocks = StepLog(str(path)), Surroundings().blocks
    log.write(1, [], [], blocks)
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # as a disk that has 10 bytes left
    try:
        log.cancelled(KEY)
        log.write(2, [], [], blocks)
        log.write(3, [], [], blocks)
        assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write(4, [], [], blocks)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["cancelled"]) for line in lines] == [(1, []), (4, ["r"])]


def test_a_step_that_ends_after_its_prompt_was_given_up_tells_nothing() -> None:
    around = Surroundings()
    around.begin(Request(KEY, PROMPT, SamplingParams()))
    (scheduled,) = around.role.plan(StepBudget(40), 0)
    around.role.cancel(KEY, "cancelled")
    around.role.process_output(scheduled, [SampledToken(3)], 1)
    assert not around.tokens and not around.gathers
    assert around.blocks.num_held == 0


def test_prompts_wait_for_their_reservation_and_for_blocks_and_then_run() -> None:
    around, long = Surroundings(), RequestKey("long", 1)
    counts = []

    def count() -> None:
        counts.append((around.role.num_waiting, around.role.num_running))

    around.role.admit(Request(KEY, PROMPT, SamplingParams()), around.connection)
    count()
    around.begin(Request(long, PROMPT, SamplingParams()))
    count()
    around.role.plan(StepBudget(8), 0)
    count()
    around.begin(Request(RequestKey("third", 1), PROMPT, SamplingParams()))
    around.role.plan(StepBudget(8), 0)
    count()
    assert counts == [(1, 0), (2, 0), (1, 1), (2, 1)]


def test_a_prompt_that_is_computed_runs_no_more_while_it_is_handed_over() -> None:
    around = Surroundings()
    around.begin(Request(KEY, PROMPT[:8], SamplingParams(max_output_tokens=4)))
    around.step(8, [SampledToken(3)])
    assert (around.role.num_running, around.blocks.num_held) == (0, 2)


def test_what_the_prefix_cache_has_is_offered_before_anything_is_computed() -> None:
    around = Surroundings()
    around.begin(Request(RequestKey("earlier", 1), PROMPT[:8], SamplingParams()))
    around.step(8, [SampledToken(3)])
    around.gathered()
    around.gathers.clear()
    around.begin(Request(KEY, PROMPT, SamplingParams()))
    around.role.plan(StepBudget(8), 1)
    ((chunk, after_step),) = around.gathers
    assert (chunk.range.token_start, chunk.range.token_end, after_step) == (0, 8, 1)


def test_tokens_that_the_client_has_are_handed_over_and_not_told_again() -> None:
    around = Surroundings()
    request = Request(RequestKey("r", 2), PROMPT[:8], SamplingParams(n=2), known_tokens={1: (77,)})
    around.begin(request)
    around.step(8, [SampledToken(3), SampledToken(4)])
    around.gathered()
    commit = around.told[-1].commit
    assert [(t.sequence_index, t.token_id) for t in commit.first_tokens] == [(0, 3), (1, 77)]
    assert around.tokens == [(0, 3, 0)]


def test_the_known_output_of_one_sequence_is_part_of_what_is_handed_over() -> None:
    around = Surroundings()
    request = Request(RequestKey("r", 2), PROMPT[:8], SamplingParams(max_output_tokens=4), known_tokens={0: (77, 78)})
    around.begin(request)
    assert around.told[-1].open.num_tokens == 10
    around.step(10, [SampledToken(3)])
    assert [(c.range.token_start, c.range.token_end) for c, _ in around.gathers] == [(0, 8), (8, 10)]
    around.gathered()
    commit = around.told[-1].commit
    assert [(t.sequence_index, t.token_id, t.is_finished) for t in commit.first_tokens] == [(0, 3, False)]
    assert around.tokens == [(0, 3, 2)]


def test_the_token_after_the_known_ones_may_be_the_last() -> None:
    around = Surroundings()
    params = SamplingParams(max_output_tokens=3)
    around.begin(Request(RequestKey("r", 2), PROMPT[:8], params, known_tokens={0: (77, 78)}))
    around.step(10, [SampledToken(3)])
    assert around.tokens == [(0, 3, 2)] and around.told[-1].HasField("abort")


def test_a_lost_link_says_how_much_of_the_prompt_another_attempt_finds_here() -> None:
    for use_prefix_cache, kept in ((True, 8), (False, 0)):
        around = Surroundings()
        around.begin(Request(KEY, PROMPT, SamplingParams(), use_prefix_cache=use_prefix_cache))
        around.step(8, [])
        connection_lost(around)
        failed = around.heard[-1].failed
        assert (failed.reason, failed.num_kept_tokens) == (worker_pb2.Failed.REASON_PEER_LOST, kept)


# Fetches


def cached(around: Surroundings, num_tokens: int, salt: bytes = b"") -> None:
    """The prefix cache has the beginning of the prompt."""
    table = around.blocks.allocate(num_tokens // 4)
    around.blocks.publish(PROMPT[:num_tokens], table, salt, num_tokens)
    around.blocks.release(table)


def fetch(around: Surroundings, num_tokens: int = 16, **more: Any) -> None:
    around.open_request(KEY, lambda events: None)
    around.role.connection_open(around.connection)
    around.role.admit_fetch(Request(KEY, PROMPT[:num_tokens], SamplingParams(), **more), around.connection, 7)


def reserved(around: Surroundings, num_cached_tokens: int = 0) -> None:
    told = handoff_pb2.Reserved(key=KEY.to_proto(), num_cached_tokens=num_cached_tokens)
    around.role.on_message(around.connection, handoff_pb2.ReceiverMessage(reserved=told))


def test_a_fetch_hands_over_what_the_prefix_cache_has_and_computes_nothing() -> None:
    around = Surroundings()
    cached(around, 12)
    fetch(around)
    assert [m.open.num_tokens for m in around.told if m.HasField("open")] == [12], "the last 4 tokens are not here"
    assert around.blocks.num_held == 3, "it cannot be evicted while it is handed over"
    reserved(around, num_cached_tokens=4)
    assert not around.role.has_work and around.role.num_waiting == 0
    ((gather, after_step),) = around.gathers
    assert (gather.range.token_start, gather.range.token_end, after_step) == (4, 12, 7)
    around.gathered()
    (commit,) = [m.commit for m in around.told if m.HasField("commit")]
    assert (commit.num_chunks, len(commit.first_tokens)) == (1, 0)
    assert around.blocks.num_held == 0 and around.blocks.num_cached == 3
    assert not around.heard and around.num_requests == 0


@pytest.mark.parametrize("salt", [b"", b"of another tenant"])
def test_a_fetch_of_what_was_evicted_or_is_another_tenants_fails_at_once(salt: bytes) -> None:
    around = Surroundings()
    if salt:
        cached(around, 12, salt)
    fetch(around)
    (failed,) = [event.failed for event in around.heard]
    assert failed.reason == worker_pb2.Failed.REASON_CAPACITY
    assert not around.told and around.num_requests == 0 and around.blocks.num_held == 0


@pytest.mark.parametrize("give_up", [lambda around: around.role.cancel(KEY, "late"), aborted_by_peer, connection_lost])
def test_a_fetch_that_is_given_up_lets_go_of_what_it_claimed(give_up: Callable[[Surroundings], None]) -> None:
    around = Surroundings()
    cached(around, 12)
    fetch(around)
    give_up(around)
    assert around.blocks.num_held == 0 and around.blocks.num_cached == 3 and around.num_requests == 0


def test_a_fetch_of_what_is_in_host_memory_waits_for_it_and_fails_if_that_is_lost() -> None:
    for error in ("", "torn"):
        around = Surroundings()
        blocks = around.blocks = TieredBlocks(8, 4, num_slots=8, num_ahead=8)
        around.role = PrefillRole(around, blocks)
        cached(around, 12)
        for move in blocks.take_moves():
            blocks.moved(move)
        blocks.release(blocks.allocate(8))
        fetch(around)
        reserved(around)
        assert around.role.has_work and not around.gathers and around.role.plan(StepBudget(8), 7) == []
        (move,) = (move for move in blocks.take_moves() if move.kind is MoveKind.LOAD)
        blocks.moved(move, error)
        around.role.plan(StepBudget(8), 7)
        assert not around.role.has_work and bool(around.gathers) == (not error)
        assert [event.failed.reason for event in around.heard] == ([worker_pb2.Failed.REASON_CAPACITY] if error else [])
        around.gathered()
        if error:
            aborted_by_peer(around)
        assert blocks.num_held == 0 and around.num_requests == 0
