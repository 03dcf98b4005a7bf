"""Which residents of a worker that is not to decode any more move, and how a request moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from candidates import FakeCandidate
from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, failed, phase
from hypothesis import given
from hypothesis import strategies as st
from router_harness import ids
from wired_router import Client, ManualClock, WiredRouter, admit_of, cancelled, known, logged, reach, run

from cluster.lifecycle import RequestKey, RequestState
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from cluster.step_cost import StepSize
from router.routing.load_tracker import Load
from router.routing.migration import (
    FEWEST_TOKENS_LEFT,
    MOST_AT_ONCE,
    DecodeRoom,
    Migration,
    Resident,
    choose_moves,
)

S = RequestState
LONG = 100


def resident(request_id: str, num_tokens_left: int = LONG, *, num_promised_tokens: int = 10, n: int = 1) -> Resident:
    return Resident(request_id, n, num_promised_tokens, num_tokens_left)


def test_the_longest_outputs_move_first_and_only_a_few_at_a_time() -> None:
    residents = [resident(f"r{left}", left) for left in (20, 90, 30, 80, 70, 60)]
    roomy = DecodeRoom("d1", 1000, 100, 0)
    assert [m.request_id for m in choose_moves(residents, [roomy], 0)] == ["r90", "r80", "r70", "r60"]
    assert choose_moves(residents, [roomy], MOST_AT_ONCE - 1) == [Migration("r90", "d1")]
    assert choose_moves(residents, [roomy], MOST_AT_ONCE) == []


def test_room_is_what_nobody_was_promised() -> None:
    load = Load(num_tokens=30, sequences=StepSize(num_sequences=3))
    assert DecodeRoom.of(FakeCandidate("d1", kv_tokens=100, max_num_seqs=8), load) == DecodeRoom("d1", 70, 5, 3)  # type: ignore[arg-type]


def test_what_may_end_in_a_moment_stays() -> None:
    residents = [resident("a", FEWEST_TOKENS_LEFT - 1), resident("b", FEWEST_TOKENS_LEFT)]
    assert choose_moves(residents, [DecodeRoom("d1", 1000, 100, 0)], 0) == [Migration("b", "d1")]


def test_each_goes_to_the_worker_that_then_decodes_the_fewest() -> None:
    rooms = [DecodeRoom("d1", 1000, 100, 1), DecodeRoom("d2", 1000, 100, 0)]
    moves = choose_moves([resident("a", 50), resident("b", 40), resident("c", 30)], rooms, 0)
    assert [m.to_id for m in moves] == ["d2", "d1", "d2"]


rooms = st.builds(
    DecodeRoom,
    worker_id=st.sampled_from(["d1", "d2", "d3"]),
    num_tokens=st.integers(-50, 300),
    num_free_sequences=st.integers(-2, 8),
    num_sequences=st.integers(0, 9),
)


@given(
    st.lists(st.builds(Resident, st.uuids().map(str), st.integers(1, 4), st.integers(1, 200), st.integers(0, 50))),
    st.lists(rooms, unique_by=lambda room: room.worker_id),
    st.integers(0, 6),
)
def test_nobody_moves_to_where_there_is_no_room(
    residents: Sequence[Resident], rooms: Sequence[DecodeRoom], num_under_way: int
) -> None:
    moves = choose_moves(residents, rooms, num_under_way)
    by_id = {r.request_id: r for r in residents}
    assert len({m.request_id for m in moves}) == len(moves) <= max(0, MOST_AT_ONCE - num_under_way)
    for room in rooms:
        arriving = [by_id[m.request_id] for m in moves if m.to_id == room.worker_id]
        assert not arriving or sum(r.num_promised_tokens for r in arriving) <= room.num_tokens
        assert not arriving or sum(r.num_sequences for r in arriving) <= room.num_free_sequences
    assert {m.to_id for m in moves} <= {room.worker_id for room in rooms}


# A request that moves


def decoding(router: WiredRouter, text: str = "b", **request: object) -> tuple[Client, worker_pb2.RequestKey]:
    """It has told "a" and `text`, and decodes on d0."""
    client, key = reach(router, "transferring", **({"max_output_tokens": LONG} | request))
    router.workers["d0"].emit(phase(key, DECODE), logged(key, 1, text))
    return client, key


def test_a_resident_of_a_worker_that_is_to_prefill_goes_on_elsewhere_with_the_same_tokens() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        client, key = decoding(router)
        router.name(["p0", "d0", "d1"], relabelled=["d0"])
        d0, d1 = router.workers["d0"], router.workers["d1"]
        prompt, reserve = admit_of(d0), admit_of(d1)
        assert cancelled(d0, key) == [None] and router.workers["p0"].take_admits() == []
        assert prompt.role == worker_pb2.ROLE_PREFILL and prompt.decode_peer.worker_id == "d1"
        assert reserve.expect_handoff and known(prompt) == known(reserve) == {0: ids("ab")}
        assert RequestKey.of(prompt.key) == RequestKey.of(reserve.key) == (client.request_id, 2)
        assert client.live.lifecycle.state is S.TRANSFERRING
        again = prompt.key
        d0.emit(logged(key, 2, "late"), phase(again, PREFILL), logged(again, 2, "c"), phase(again, TRANSFER))
        d1.emit(phase(again, DECODE), logged(again, 3, "d", finish_reason=LENGTH))
        client.take()
        assert client.texts == ["abcd"] and client.completed is not None
        timing = client.completed.timing
        assert timing.placement == "moved from d0 to d1: the worker is there to prefill" and timing.migrations == 1
        counters = router.dispatcher.counters
        assert (counters.moved, counters.retried) == (1, {})
        states = [entry.state for entry in client.live.lifecycle.history]
        assert states[-4:] == [S.DECODING, S.TRANSFERRING, S.DECODING, S.FINISHED]
        router.check_idle()

    run(scenario)


def test_a_resident_has_left_what_its_shortest_open_sequence_may_still_get() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client, key = decoding(router, "bc", n=2)
        router.workers["d0"].emit(logged(key, 0, "x", sequence_index=1))
        left = [Resident.of(client.live).num_tokens_left]
        for index in (1, 0):
            router.workers["d0"].emit(logged(key, 3 - 2 * index, "z", sequence_index=index, finish_reason=LENGTH))
            left.append(Resident.of(client.live).num_tokens_left)
        assert left == [LONG - 1, LONG - 3, 0]

    run(scenario)


def test_of_several_sequences_those_that_have_ended_stay_ended() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        client = router.submit(n=2, max_output_tokens=LONG)
        p0, d0 = router.workers["p0"], router.workers["d0"]
        key = admit_of(p0).key
        d0.take()
        p0.emit(phase(key, PREFILL), logged(key, 0, "a"), logged(key, 0, "x", sequence_index=1))
        d0.emit(phase(key, DECODE), logged(key, 1, "b", finish_reason=LENGTH))
        router.name(["p0", "d0", "d1"], draining=["d0"])
        d1 = router.workers["d1"]
        again = admit_of(d1).key
        assert cancelled(d1, again) == [0]
        d0.take()
        d1.emit(phase(again, DECODE), logged(again, 1, "y", sequence_index=1, finish_reason=LENGTH))
        client.take()
        assert client.texts == ["ab", "xy"] and client.completed is not None
        assert client.completed.timing.placement == "moved from d0 to d1: the worker drains"
        router.check_idle()

    run(scenario)


def test_without_room_elsewhere_residents_finish_where_they_are() -> None:
    async def scenario(clock: ManualClock) -> None:
        for others in ([], ["d1"]):
            router = WiredRouter(clock, ["p0", "d0", *others])
            client, key = decoding(router)
            for other in ("p0", *others):
                info = router.workers[other].info
                assert info is not None
                info.num_blocks = 1
            router.name(["p0", "d0", *others], draining=["d0"])
            assert router.workers["d0"].take() == [] and client.live.key.attempt == 1
            router.workers["d0"].emit(logged(key, 2, "c", finish_reason=LENGTH))
            client.take()
            assert client.texts == ["abc"] and router.dispatcher.counters.moved == 0
            router.check_idle()

    run(scenario)


def test_residents_of_the_only_decode_worker_go_on_at_a_prefill_worker_while_it_drains() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client, _ = decoding(router)
        router.name(["p0", "d0"], draining=["d0"])
        d0, p0 = router.workers["d0"], router.workers["p0"]
        prompt, reserve = admit_of(d0), admit_of(p0)
        assert (prompt.role, reserve.role) == (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE)
        again = prompt.key
        d0.emit(phase(again, PREFILL), phase(again, TRANSFER))
        p0.emit(phase(again, DECODE), logged(again, 2, "c", finish_reason=LENGTH))
        client.take()
        assert client.texts == ["abc"] and client.completed is not None
        assert client.completed.timing.placement == "moved from d0 to p0: the worker drains"
        assert router.workers["p0"].take_admits() == [], "it was moved off the worker that stands in"
        router.check_idle()

    run(scenario)


def test_a_few_move_at_a_time_and_each_that_has_arrived_makes_way_for_another() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        clients = [router.submit(max_output_tokens=LONG) for _ in range(MOST_AT_ONCE + 2)]
        p0, d0 = router.workers["p0"], router.workers["d0"]
        for admit in p0.take_admits():
            p0.emit(phase(admit.key, PREFILL), logged(admit.key, 0, "a"), phase(admit.key, TRANSFER))
            d0.emit(phase(admit.key, DECODE))
        d0.take()
        router.name(["p0", "d0", "d1"], relabelled=["d0"])
        d1 = router.workers["d1"]
        d1.open()
        first = [admit.key for admit in d0.take_admits()]
        assert len(first) == MOST_AT_ONCE
        d0.emit(logged(first[0], 1, "b"))
        assert d0.take_admits() == [], "it has not arrived"
        d1.emit(phase(first[0], DECODE))
        (more,) = d0.take_admits()
        assert more.key not in first
        d1.take()
        d1.emit(logged(first[1], 2, "c", finish_reason=LENGTH), phase(first[1], DECODE))
        d0.emit(logged(first[1], 1, "b"))
        assert len(d0.take_admits()) == 1
        for client in clients:
            router.dispatcher.cancel(client.request_id, "over")
        router.check_idle()

    run(scenario)


def test_a_move_that_fails_is_an_attempt_that_failed() -> None:
    async def scenario(clock: ManualClock) -> None:
        for what in ("d0 lost", "d1 lost", "link cut"):
            router = WiredRouter(clock, ["p0", "d0", "d1", "d2"])
            client, _ = decoding(router)
            router.name(["p0", "d0", "d1", "d2"], relabelled=["d0"])
            d0, d1 = router.workers["d0"], router.workers["d1"]
            again = admit_of(d1).key
            d0.take()
            if what == "link cut":
                d0.emit(failed(again, worker_pb2.Failed.REASON_PEER_LOST))
            else:
                (d0 if what == "d0 lost" else d1).lose()
            admits = {w.worker_id: a for w in router.workers.values() for a in w.take_admits()}
            decode_id = "d1" if what == "d0 lost" else "d2"
            assert decode_id in admits and len(admits) == 2
            (prefill_id,) = set(admits) - {decode_id}
            assert all(known(admit) == {0: ids("ab")} for admit in admits.values())
            key = admits[decode_id].key
            assert RequestKey.of(key).attempt == 3 and sum(router.dispatcher.counters.retried.values()) == 1
            router.workers[prefill_id].emit(logged(key, 2, "c"))
            router.workers[decode_id].emit(phase(key, DECODE), logged(key, 3, "d", finish_reason=LENGTH))
            client.take()
            assert client.texts == ["abcd"]
            for worker in router.workers.values():
                worker.take()
            router.check_idle()

    run(scenario)


def test_moves_use_up_no_attempts() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        client, _ = decoding(router)
        for number in range(6):
            source, target = ("d0", "d1") if number % 2 == 0 else ("d1", "d0")
            router.name(["p0", "d0", "d1"], draining=[source])
            key = client.live.key.to_proto()
            router.workers[target].emit(phase(key, DECODE))
            router.workers[source].emit(logged(key, 2 + number, "x"))
        client.take()
        assert client.texts == ["abxxxxxx"] and client.live.key.attempt == 7
        assert client.live.error is None and router.dispatcher.counters.moved == 6
        router.dispatcher.cancel(client.request_id, "over")
        router.check_idle()

    run(scenario)


def test_who_decodes_on_a_prefill_worker_that_stood_in_moves_when_a_decode_worker_is_back() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client, _ = decoding(router)
        p0, d0 = router.workers["p0"], router.workers["d0"]
        d0.lose()
        alone = p0.take_admits()[-1]
        assert alone.role == worker_pb2.ROLE_DECODE and not alone.expect_handoff
        p0.emit(phase(alone.key, PREFILL), phase(alone.key, DECODE), logged(alone.key, 2, "c"))
        assert client.live.placement is not None
        assert client.live.placement.reason == "local prefill on p0 after WORKER_LOST on d0: no decode worker is ready"
        d0.open()
        prompt, reserve = admit_of(p0), admit_of(d0)
        assert prompt.decode_peer.worker_id == "d0" and reserve.expect_handoff
        assert known(reserve) == {0: ids("abc")}
        p0.emit(logged(prompt.key, 3, "d"))
        d0.emit(phase(prompt.key, DECODE), logged(prompt.key, 4, "e", finish_reason=LENGTH))
        client.take()
        assert client.texts == ["abcde"] and client.heartbeat() == pb.Heartbeat.PHASE_UNSPECIFIED
        router.check_idle()

    run(scenario)


def test_who_moves_or_is_placed_again_has_not_ended() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        admission = router.dispatcher.admission
        ended: list[str] = []
        on_end = admission.on_end

        def note(generation_id: str, *arguments: Any, **named: Any) -> None:
            ended.append(generation_id)
            on_end(generation_id, *arguments, **named)

        admission.on_end = note  # type: ignore[method-assign]
        client, key = reach(router, "transferring", max_output_tokens=LONG)
        router.name(["p0", "d0", "d1", "d2"], draining=["d0"])
        router.workers["d0"].emit(phase(key, DECODE), logged(key, 1, "b"))
        for worker_id in ("d1", "d2"):
            router.workers[worker_id].open()
        assert router.dispatcher.counters.moved == 1
        placement = client.live.placement
        assert placement is not None
        router.workers[placement.decode_id].lose()
        assert router.dispatcher.counters.retried["WORKER_LOST"] == 1 and not ended
        router.dispatcher.cancel(client.request_id, "by the test")
        assert ended == [client.request_id]
        router.check_idle()

    run(scenario)
