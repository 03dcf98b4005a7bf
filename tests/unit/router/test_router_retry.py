"""A hand-off that fails costs its client nothing while another path is left: where requests go, what they are told."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from candidates import named, request_of
from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, FakeWorker, failed, phase, tokens
from hypothesis import given
from hypothesis import strategies as st
from router_harness import Router, begin, ids, kinds, refusal, rest, running_router, text_of, text_spec
from waiting import until_after

from cluster.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from cluster.lifecycle import RequestKey
from cluster.pb import admin_pb2, worker_pb2
from cluster.pb import generation_pb2 as pb
from router.routing.load_tracker import NOTHING, Placement
from router.routing.policies.interface import RoutingContext
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.retry import MAX_ATTEMPTS, RETRYABLE, AttemptFailure, RetryState, next_placement

Failed = worker_pb2.Failed
FAR_OFF = AttemptFailure("TRANSFER_FAILED", Unavailable("the way is broken"))


# Where to: the decision alone


def where_to(
    state: RetryState, last: Placement, failure: AttemptFailure, prefill_ids: list[str], decode_ids: list[str]
) -> Placement | None:
    prefill, decode = ({w.worker_id: w for w in named(*ids)} for ids in (prefill_ids, decode_ids))
    choose = partial(LeastLoaded(RoutingContext()).choose, request_of(10))
    return next_placement(state, last, failure, prefill, decode, choose)


def test_another_prefill_worker_sends_to_the_same_decode_worker() -> None:
    state, last = RetryState(), Placement("p0", "d1", "")
    state.add(last, FAR_OFF)
    placement = where_to(state, last, FAR_OFF, ["p0", "p1"], ["d0", "d1"])
    assert placement is not None and (placement.prefill_id, placement.decode_id) == ("p1", "d1")
    assert placement.reason == "retried after TRANSFER_FAILED on p0: p1 -> d1"


def test_without_another_prefill_worker_decode_computes_the_prompt() -> None:
    state, last = RetryState(), Placement("p0", "d0", "")
    state.add(last, FAR_OFF)
    placement = where_to(state, last, FAR_OFF, ["p0"], ["d0"])
    assert placement is not None and (placement.prefill_id, placement.decode_id) == (None, "d0")
    assert placement.reason == "local prefill on d0 after TRANSFER_FAILED on p0: no other prefill worker"


def test_a_lost_decode_worker_says_nothing_against_the_prefill_worker() -> None:
    lost = AttemptFailure("WORKER_LOST", Unavailable("gone"), lost_id="d0")
    state, last = RetryState(), Placement("p0", "d0", "")
    state.add(last, lost)
    placement = where_to(state, last, lost, ["p0"], ["d0", "d1"])
    assert placement is not None and (placement.prefill_id, placement.decode_id) == ("p0", "d1")
    assert where_to(state, last, lost, ["p0"], ["d0"]) is None


def test_a_decode_worker_that_is_not_heard_is_passed_over_while_there_is_another() -> None:
    """Its own session may take as long to be missed: three attempts at it would be spent by then."""
    unheard = AttemptFailure("PEER_LOST", Unavailable("silent"), unreachable_id="d0")
    state, last = RetryState(), Placement("p0", "d0", "")
    state.add(last, unheard)
    elsewhere = where_to(state, last, unheard, ["p0", "p1"], ["d0", "d1"])
    assert elsewhere is not None and (elsewhere.prefill_id, elsewhere.decode_id) == ("p0", "d1")
    alone = where_to(state, last, unheard, ["p0", "p1"], ["d0"])
    assert alone is not None and (alone.prefill_id, alone.decode_id) == ("p1", "d0")


@given(
    prefill_ids=st.sets(st.sampled_from(["p0", "p1", "p2", "p3"])),
    decode_ids=st.sets(st.sampled_from(["d0", "d1"])),
    lost=st.lists(st.sampled_from([None, "p0", "p1", "d0", "d1"]), max_size=MAX_ATTEMPTS - 1),
)
def test_no_path_is_tried_twice_and_the_last_attempt_needs_none(
    prefill_ids: set[str], decode_ids: set[str], lost: list[str | None]
) -> None:
    state, placement = RetryState(), Placement("p0", "d0", "")
    used = []
    for lost_id in lost:
        if lost_id != placement.decode_id:
            used.append((placement.prefill_id, placement.decode_id))
        failure = AttemptFailure("X", Unavailable("x"), lost_id)
        state.add(placement, failure)
        found = where_to(state, placement, failure, sorted(prefill_ids), sorted(decode_ids))
        if found is None:
            assert not decode_ids - {lost_id}
            return
        assert found.decode_id in decode_ids and found.decode_id != lost_id
        assert found.prefill_id is None or (
            found.prefill_id in prefill_ids - {lost_id} and (found.prefill_id, found.decode_id) not in used
        )
        if state.num_attempts == MAX_ATTEMPTS:
            assert found.prefill_id is None
        placement = found


# What clients see


def fleet_of(num_prefill: int = 2, num_decode: int = 1) -> list[FakeWorker]:
    workers = [FakeWorker(f"prefill-{i}", worker_pb2.ROLE_PREFILL) for i in range(num_prefill)]
    return workers + [FakeWorker(f"decode-{i}", worker_pb2.ROLE_DECODE) for i in range(num_decode)]


async def status(router: Router) -> admin_pb2.RouterStatus:
    return (await router.admin.GetStatus(admin_pb2.GetStatusRequest())).router


def known(admit: worker_pb2.Admit) -> dict[int, list[int]]:
    return {k.sequence_index: list(k.token_ids) for k in admit.known_tokens}


@pytest.mark.parametrize("reason", sorted(RETRYABLE))
@pytest.mark.parametrize("teller", ["prefill", "decode"])
async def test_a_failed_hand_off_goes_to_another_prefill_worker(tmp_path: Path, reason: Any, teller: str) -> None:
    workers = fleet_of()
    first, second, decode = workers
    async with running_router(tmp_path, workers) as router:
        stream, events, key = await begin(router, first)
        await decode.next_admit()
        told_by, other = (first, decode) if teller == "prefill" else (decode, first)
        told_by.emit(failed(key, reason))
        assert (await other.next_cancel()).key == key
        again, reserved = await second.next_admit(), await decode.next_admit()
        assert RequestKey.of(again.key) == RequestKey.of(reserved.key) == (key.request_id, 2)
        assert reserved.expect_handoff and again.decode_peer.worker_id == "decode-0"
        assert known(again) == known(reserved) == {0: ids("a")}
        decode.emit(tokens(key, 1, ids("x")))  # of the attempt that is over
        second.emit(phase(again.key, PREFILL), phase(again.key, TRANSFER))
        decode.emit(phase(again.key, DECODE), tokens(again.key, 1, ids("b"), finish_reason=LENGTH))
        events += await rest(stream)
        assert text_of(events) == "ab" and kinds(events)[-1] == "completed"
        firsts = [e.delta.first_token_index for e in events if e.HasField("delta")]
        assert firsts == sorted(set(firsts))
        timing = events[-1].completed.timing
        word = Failed.Reason.Name(reason).removeprefix("REASON_")
        assert timing.placement == f"retried after {word} on prefill-0: prefill-1 -> decode-0"
        assert router.server.dispatcher.counters.retried == {word: 1}
        assert (await status(router)).num_failed == 0
        for worker in workers:
            assert router.server.dispatcher.context.loads[worker.worker_id] == NOTHING


async def test_a_lost_prefill_worker_is_replaced_by_local_prefill_when_it_was_the_only_one(tmp_path: Path) -> None:
    workers = prefill, decode = fleet_of(1)
    async with running_router(tmp_path, workers) as router:
        stream, events, key = await begin(router, prefill)
        await decode.next_admit()
        await prefill.stop()
        assert (await decode.next_cancel()).key == key
        again = await decode.next_admit()
        assert not again.expect_handoff and known(again) == {0: ids("a")}
        decode.emit(phase(again.key, PREFILL), phase(again.key, DECODE))
        decode.emit(tokens(again.key, 1, ids("b"), finish_reason=LENGTH))
        events += await rest(stream)
        assert text_of(events) == "ab"
        assert events[-1].completed.timing.placement.startswith("local prefill on decode-0 after WORKER_LOST")
        assert router.server.dispatcher.counters.local_prefills == 1


async def test_without_prefill_workers_by_choice_decode_computes_every_prompt(tmp_path: Path) -> None:
    first, second = workers = fleet_of(0, 2)
    async with running_router(tmp_path, workers, needs_prefill=False) as router:
        spec = text_spec(output=pb.OutputOptions(token_ids=True, include_timing=True))
        calls = [asyncio.ensure_future(router.stream(spec)) for _ in workers]
        for decode in (first, second):
            admit = await decode.next_admit()
            assert not admit.expect_handoff
            decode.emit(phase(admit.key, PREFILL), tokens(admit.key, 0, ids("ab"), finish_reason=LENGTH))
        for events in await asyncio.gather(*calls):
            assert text_of(events) == "ab"
            placement = events[-1].completed.timing.placement
            assert placement.startswith("local prefill on decode-") and placement.endswith("there is no prefill worker")
        assert router.server.dispatcher.counters.local_prefills == 2


async def test_a_lost_decode_worker_is_replaced_by_another(tmp_path: Path) -> None:
    workers = prefill, decode, spare = fleet_of(1, 2)
    async with running_router(tmp_path, workers) as router:
        stream, events, key = await begin(router, prefill)
        await decode.stop()
        assert (await prefill.next_cancel()).key == key
        again = await prefill.next_admit()
        assert again.decode_peer.worker_id == "decode-1" and (await spare.next_admit()).key == again.key
        spare.emit(phase(again.key, DECODE), tokens(again.key, 1, ids("b"), finish_reason=LENGTH))
        assert text_of(events + await rest(stream)) == "ab"


async def test_without_any_worker_a_request_waits_for_them_to_return(tmp_path: Path) -> None:
    workers = prefill, decode = fleet_of(1)
    async with running_router(tmp_path, workers) as router:
        stream, events, key = await begin(router, prefill)
        port = int(decode.address.rpartition(":")[2])
        router.server.dispatcher.fleet["prefill-0"].is_draining = True
        await decode.stop()
        assert (await prefill.next_cancel()).key == key
        router.server.dispatcher.fleet["prefill-0"].is_draining = False
        await decode.start(port)
        again = await decode.next_admit()
        while RequestKey.of(again.key).attempt == 1:
            again = await decode.next_admit()
        assert again.expect_handoff and known(again) == {0: ids("a")}
        decode.emit(phase(again.key, DECODE), tokens(again.key, 1, ids("b"), finish_reason=LENGTH))
        assert text_of(events + await rest(stream)) == "ab"


async def test_a_request_that_waits_again_ends_with_its_deadline(tmp_path: Path) -> None:
    workers = prefill, decode = fleet_of(1)
    async with running_router(tmp_path, workers) as router:
        call = asyncio.ensure_future(router.stream(text_spec(), timeout=1.0))
        await prefill.next_admit()
        await decode.stop()
        assert isinstance(await refusal(call), DeadlineExceeded)
        assert (await status(router)).num_queued == 0


async def test_the_third_failure_is_told_to_the_client(tmp_path: Path) -> None:
    workers = first, second, decode = fleet_of()
    async with running_router(tmp_path, workers) as router:
        call = asyncio.ensure_future(router.stream(text_spec()))
        for prefill in (first, second):
            key = (await prefill.next_admit()).key
            prefill.emit(failed(key, Failed.REASON_TRANSFER_FAILED))
        last = await decode.next_admit()
        while last.expect_handoff:
            last = await decode.next_admit()
        decode.emit(failed(last.key, Failed.REASON_INCOMPATIBLE, "nothing helps"))
        told = await refusal(call)
        assert isinstance(told, FailedPrecondition) and "nothing helps" in told.message
        assert (await status(router)).num_failed == 1


async def test_a_sequence_that_has_ended_stays_ended(tmp_path: Path) -> None:
    workers = first, second, decode = fleet_of()
    async with running_router(tmp_path, workers) as router:
        sampling = pb.SamplingParams(temperature=1, n=2, seed=1)
        spec = text_spec(sampling=sampling, stopping=pb.StoppingCriteria(stop=["s"]))
        stream = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec))
        key = (await first.next_admit()).key
        first.emit(phase(key, PREFILL), tokens(key, 0, ids("s")), tokens(key, 0, ids("a"), sequence_index=1))
        stopped = await first.next_cancel()
        assert stopped.sequence_index == 0
        first.emit(failed(key, Failed.REASON_PEER_LOST))
        again = await second.next_admit()
        assert known(again) == {0: ids("s"), 1: ids("a")}
        dropped = await decode.next_cancel()
        while dropped.key != again.key:
            dropped = await decode.next_cancel()
        assert dropped.HasField("sequence_index") and dropped.sequence_index == 0
        decode.emit(phase(again.key, DECODE))
        decode.emit(tokens(again.key, 1, ids("b"), sequence_index=1, finish_reason=LENGTH))
        events = await rest(stream)
        ends = {e.sequence_end.index: e.sequence_end.finish_reason for e in events if e.HasField("sequence_end")}
        assert ends == {0: pb.FINISH_REASON_STOP, 1: pb.FINISH_REASON_LENGTH}


async def test_a_first_token_lost_with_its_worker_is_made_again(tmp_path: Path) -> None:
    """Decode began, and told token 1, but token 0 never came."""
    workers = first, second, decode = fleet_of()
    async with running_router(tmp_path, workers) as router:
        call = asyncio.ensure_future(router.stream(text_spec()))
        key = (await first.next_admit()).key
        first.emit(phase(key, PREFILL))
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("x")))
        await first.stop()
        again = await second.next_admit()
        assert not again.known_tokens
        second.emit(phase(again.key, PREFILL), tokens(again.key, 0, ids("a")), phase(again.key, TRANSFER))
        decode.emit(phase(again.key, DECODE), tokens(again.key, 1, ids("b"), finish_reason=LENGTH))
        assert text_of(await call) == "ab"


async def test_a_client_that_leaves_during_a_second_attempt_frees_its_workers(tmp_path: Path) -> None:
    workers = first, second, decode = fleet_of()
    async with running_router(tmp_path, workers) as router:
        stream, _, key = await begin(router, first)
        first.emit(failed(key, Failed.REASON_CORRUPT))
        again = await second.next_admit()
        stream.cancel()
        assert (await second.next_cancel()).key == again.key
        cancelled = await decode.next_cancel()
        while cancelled.key != again.key:
            cancelled = await decode.next_cancel()
        assert (await status(router)).num_running == 0


async def test_a_silent_worker_is_suspected_then_lost_and_found_again(tmp_path: Path) -> None:
    workers = prefill, decode = fleet_of(1)
    async with running_router(tmp_path, workers) as router:
        call = asyncio.ensure_future(router.stream(text_spec()))
        key = (await prefill.next_admit()).key
        client = router.server.dispatcher.fleet["prefill-0"]
        prefill.is_silent = True
        assert (await decode.next_cancel()).key == key
        assert client.is_ready and client.is_suspect
        assert router.server.dispatcher.counters.retried == {"STALLED": 1}
        again = await decode.next_admit()
        assert not again.expect_handoff
        decode.emit(phase(again.key, DECODE), tokens(again.key, 0, ids("a"), finish_reason=LENGTH))
        assert text_of(await call) == "a"
        await until_after(client, "_lose", lambda: not client.is_ready)
        prefill.is_silent = False
        await router.until_serving()


class FailsOnce(deque[worker_pb2.Command]):
    """A fault in what writes commands."""

    has_failed = False

    def popleft(self) -> worker_pb2.Command:
        if not self.has_failed:
            self.has_failed = True
            raise ValueError("a fault of the writer")
        return super().popleft()


async def test_a_worker_to_which_commands_cannot_be_sent_is_lost_and_found_again(tmp_path: Path) -> None:
    """Its signs of life go on meanwhile."""
    workers = prefill, decode = fleet_of(1)
    async with running_router(tmp_path, workers) as router:
        call = asyncio.ensure_future(router.stream(text_spec()))
        key = (await prefill.next_admit()).key
        client = router.server.dispatcher.fleet["prefill-0"]
        client._commands = FailsOnce()
        client.send(worker_pb2.Command(resync_cache=worker_pb2.ResyncCache()))
        again = await decode.next_admit()
        while RequestKey.of(again.key) == RequestKey.of(key):
            again = await decode.next_admit()
        decode.emit(phase(again.key, DECODE), tokens(again.key, 0, ids("a"), finish_reason=LENGTH))
        assert text_of(await call) == "a"
        await router.until_all_ready()
