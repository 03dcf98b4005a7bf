"""Every way in which an attempt can fail, in every state, with every number of other workers: what is sent to whom.

The expected way is said here once more, from the design's failure contract, not from the code that chooses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, STOP, TRANSFER, failed, phase, tokens
from router_harness import EOS, ids
from wired_router import STATES, ManualClock, WiredRouter, admit_of, cancelled, go_on, known, logged, reach, run

from cluster.errors import BatonError, InternalError, InvalidRequest, Unavailable
from cluster.lifecycle import RequestKey, RequestState
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2

Failed = worker_pb2.Failed
S = RequestState

REASONS = {"PEER_LOST": 1, "TRANSFER_FAILED": 2, "CAPACITY": 3, "INCOMPATIBLE": 5, "CORRUPT": 7}
SETBACKS = [*product(REASONS, ("p0", "d0", "p0 d0", "d0 p0")), ("WORKER_LOST", "p0"), ("WORKER_LOST", "d0")]
"""Each with those who tell it, in their order, or with who is lost."""
FLEETS = [[*others, "p0", "d0"] for others in product(["p1", ""], ["p2", ""], ["d1", ""])]


def expected_placement(reason: str, where: str, worker_ids: Sequence[str]) -> tuple[str, str]:
    """(prefill or "", decode). p0 and d0 had it."""
    has_other_decode, other_prefill = "d1" in worker_ids, min({"p1", "p2"} & set(worker_ids), default="")
    if (reason, where) == ("WORKER_LOST", "d0"):
        if has_other_decode:
            return "p0", "d1"
        return "", min({"p0", "p1", "p2"} & set(worker_ids))  # a role is a label: one of them does both
    if reason == "PEER_LOST" and where.startswith("p0") and has_other_decode:
        return "p0", "d1"  # the prefill worker does not hear d0, which need not be the prefill worker's fault
    return other_prefill, "d0"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("reason", "where"), SETBACKS)
def test_a_failed_attempt_leads_another_way(reason: str, where: str, state: str) -> None:
    async def scenario(clock: ManualClock, worker_ids: list[str]) -> None:
        router = WiredRouter(clock, worker_ids)
        client, key = reach(router, state)
        p0, d0 = router.workers["p0"], router.workers["d0"]
        if reason == "WORKER_LOST":
            router.workers[where].lose()
            healthy = {"p0": d0, "d0": p0}[where]
        else:
            first, *second = where.split()
            router.workers[first].emit(failed(key, REASONS[reason]))
            for teller in second:
                router.workers[teller].emit(failed(key, REASONS[reason]))
            healthy = {"p0": d0, "d0": p0}[first]
        placement = expected_placement(reason, where, worker_ids)
        for worker in (p0, d0):
            worker.emit(logged(key, 1, "late"), phase(key, DECODE), failed(key, Failed.REASON_INTERNAL))
        admits = {w.worker_id: admits for w in router.workers.values() if (admits := w.take_admits())}
        assert cancelled(healthy, key) == [None]
        assert set(admits) == set(placement) - {""}
        for worker_id, (admit,) in admits.items():
            assert RequestKey.of(admit.key) == (key.request_id, 2)
            assert known(admit) == ({0: ids("a")} if state in STATES[2:] else {})
            is_prefill = worker_id == placement[0]
            assert admit.role == (worker_pb2.ROLE_PREFILL if is_prefill else worker_pb2.ROLE_DECODE)
            assert admit.expect_handoff == (not is_prefill and placement[0] != "")
            if is_prefill:
                decode_info = router.workers[placement[1]].info
                assert decode_info is not None and admit.decode_peer.incarnation == decode_info.incarnation
        counters = router.dispatcher.counters
        assert (counters.retried, counters.local_prefills) == ({reason: 1}, int(placement[0] == ""))
        go_on(router, client, placement)
        assert client.completed is not None
        told = client.completed.timing.placement
        assert all(worker_id in told for worker_id in placement)
        assert reason in told or "queue" in told or (reason, where) == ("WORKER_LOST", "d0")

    for worker_ids in FLEETS:
        run(lambda clock, ids=worker_ids: scenario(clock, [i for i in ids if i]))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("teller", ["p0", "d0"])
@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Failed.REASON_INTERNAL, InternalError),
        (Failed.REASON_INVALID, InvalidRequest),
        (Failed.REASON_UNSPECIFIED, InternalError),
    ],
)
def test_what_would_happen_anywhere_is_told_at_once(
    reason: Any, kind: type[BatonError], teller: str, state: str
) -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0", "d1"])
        client, key = reach(router, state)
        router.workers[teller].emit(failed(key, reason))
        assert type(client.live.error) is kind and client.live.lifecycle.state is S.FAILED
        other = router.workers["d0" if teller == "p0" else "p0"]
        assert not [w for w in router.workers.values() if w.take_admits()]
        assert cancelled(other, key) == [None]
        router.check_idle()

    run(scenario)


@pytest.mark.parametrize("reason", [*REASONS, "WORKER_LOST"])
def test_once_decode_has_begun_another_attempt_goes_on_from_the_tokens_that_were_told(reason: str) -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0", "d1"])
        client, key = reach(router, "transferring")
        d0 = router.workers["d0"]
        d0.emit(phase(key, DECODE), logged(key, 1, "b"))
        client.take()
        if reason == "WORKER_LOST":
            d0.lose()
        else:
            d0.emit(failed(key, REASONS[reason]))
        d0.emit(logged(key, 2, "late"))
        prefill, decode = ("p0", "d1") if reason == "WORKER_LOST" else ("p1", "d0")
        prompt, reserve = admit_of(router.workers[prefill]), admit_of(router.workers[decode])
        assert known(prompt) == known(reserve) == {0: ids("ab")} and reserve.expect_handoff
        again = prompt.key
        assert client.heartbeat() == pb.Heartbeat.PHASE_MIGRATING
        router.workers[prefill].emit(phase(again, PREFILL), phase(again, TRANSFER))
        router.workers[decode].emit(phase(again, DECODE), logged(again, 2, "c", finish_reason=LENGTH))
        client.take()
        assert client.texts == ["abc"] and client.completed is not None
        assert client.completed.timing.placement.startswith(f"retried after {reason}")
        assert client.completed.timing.migrations == 1
        router.check_idle()

    run(scenario)


def test_the_next_prefill_worker_still_owes_the_token_after_those_that_are_known() -> None:
    """Decode begins, and tells the one after it, before that token is here."""

    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        client, key = reach(router, "transferring")
        router.workers["d0"].emit(phase(key, DECODE), logged(key, 1, "b"))
        router.workers["d0"].lose()
        p0, d1 = router.workers["p0"], router.workers["d1"]
        again = admit_of(p0).key
        d1.emit(phase(again, DECODE), logged(again, 3, "d"))
        p0.emit(logged(again, 2, "c"))
        d1.emit(logged(again, 4, "e", finish_reason=LENGTH))
        client.take()
        assert client.texts == ["abcde"] and client.completed is not None
        router.check_idle()

    run(scenario)


def test_whoever_told_tokens_was_not_in_vain_so_a_long_output_outlives_many_workers() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        client, _ = reach(router, "transferring", max_output_tokens=16)
        text = "a"
        for token in "bcdefghi":
            decode = router.workers[client.live.placement.decode_id]  # type: ignore[union-attr]
            key = client.live.key.to_proto()
            decode.emit(phase(key, DECODE), logged(key, len(text), token))
            text += token
            decode.lose()
            decode.open()
        client.take()
        assert client.texts == [text] and client.live.key.attempt == 9
        for _ in range(2):
            assert client.live.error is None
            decode = router.workers[client.live.placement.decode_id]  # type: ignore[union-attr]
            decode.emit(phase(client.live.key.to_proto(), DECODE))
            decode.lose()
            decode.open()
        assert isinstance(client.live.error, Unavailable) and client.live.error.retry_after_s == 1.0
        assert client.live.error.message.endswith("9 output tokens had been delivered")
        client.take()
        assert client.texts == [text]
        for worker in router.workers.values():
            worker.take()
        router.check_idle()

    run(scenario)


@pytest.mark.parametrize("reason", [*REASONS, "WORKER_LOST"])
def test_once_decode_has_begun_nothing_that_happens_to_the_prefill_worker_counts(reason: str) -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0"])
        client, key = reach(router, "transferring")
        p0, d0 = router.workers["p0"], router.workers["d0"]
        d0.emit(phase(key, DECODE))
        if reason == "WORKER_LOST":
            p0.lose()
        else:
            p0.emit(failed(key, REASONS[reason]))
        d0.emit(logged(key, 1, "bc", finish_reason=LENGTH))
        client.take()
        assert client.texts == ["abc"] and client.live.key.attempt == 1
        assert router.dispatcher.counters.retried == {}
        router.check_idle()

    run(scenario)


def test_after_the_third_attempt_the_client_is_told() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "p2", "p3", "d0"])
        client, key = reach(router, "first token")
        router.workers["p0"].emit(failed(key, Failed.REASON_TRANSFER_FAILED))
        again = admit_of(router.workers["p1"])
        router.workers["p1"].emit(failed(again.key, Failed.REASON_CORRUPT))
        *_, last = router.workers["d0"].take_admits()
        assert RequestKey.of(last.key).attempt == 3 and not last.expect_handoff
        router.workers["d0"].lose()
        assert isinstance(client.live.error, Unavailable)
        assert router.dispatcher.counters.retried == {"TRANSFER_FAILED": 1, "CORRUPT": 1}
        router.check_idle()

    run(scenario)


def test_a_host_that_takes_both_workers_with_it_costs_two_attempts() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "p1", "d1"])
        client, _ = reach(router, "transferring")
        router.workers["d0"].lose()
        router.workers["p0"].lose()
        last = router.workers["d1"].take_admits()[-1]
        assert RequestKey.of(last.key).attempt == 3 and not last.expect_handoff
        go_on(router, client, ("", "d1"))

    run(scenario)


@pytest.mark.parametrize("by", ["stop string", "length", "stop token"])
def test_a_sequence_that_has_ended_is_known_and_dropped_and_told_no_more(by: str) -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0"])
        client = router.submit(n=2, stop=["s"])
        p0, p1, d0 = (router.workers[i] for i in ("p0", "p1", "d0"))
        key = admit_of(p0).key
        first = {"stop string": ids("s"), "length": ids("z"), "stop token": [EOS]}[by]
        end: dict[str, Any] = {
            "stop string": {},
            "length": {"finish_reason": LENGTH},
            "stop token": {"finish_reason": STOP, "stop_token_id": EOS},
        }[by]
        logprobs = [pb.TokenLogprob(token_id=first[0], logprob=-1)]
        p0.emit(phase(key, PREFILL), tokens(key, 0, first, logprobs=logprobs, **end))
        p0.emit(logged(key, 0, "a", sequence_index=1), failed(key, Failed.REASON_TRANSFER_FAILED))
        again = admit_of(p1)
        assert known(again) == {0: first, 1: ids("a")}
        d0.take()
        assert cancelled(p1, again.key) == cancelled(d0, again.key) == [0]
        d0.emit(logged(again.key, 1, "x"), phase(again.key, DECODE))  # it had not heard yet that 0 is over
        d0.emit(logged(again.key, 1, "b", sequence_index=1, finish_reason=LENGTH))
        client.take()
        assert client.tokens == [first, ids("ab")] and client.texts == ["z" if by == "length" else "", "ab"]
        assert client.ends[0].finish_reason == (LENGTH if by == "length" else STOP)
        assert client.ends[0].stop_string == ("s" if by == "stop string" else "")
        assert client.completed is not None and client.completed.usage.completion_tokens == 3
        router.check_idle()

    run(scenario)


@pytest.mark.parametrize("where", ["p0", "d0"])
def test_when_every_sequence_has_ended_a_lost_worker_costs_nothing(where: str) -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0", "d1"])
        client = router.submit(n=2, stop=["s"])
        p0 = router.workers["p0"]
        key = admit_of(p0).key
        p0.emit(phase(key, PREFILL), logged(key, 0, "s"), logged(key, 0, "a", sequence_index=1, finish_reason=LENGTH))
        router.workers[where].lose()
        client.take()
        assert client.completed is not None and client.live.key.attempt == 1
        router.check_idle()

    run(scenario)


def test_of_one_sequence_every_token_is_known_of_the_other_none() -> None:
    """Decode runs, but the other sequence's first token was lost with the prefill worker."""

    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client = router.submit(n=2)
        p0, d0 = router.workers["p0"], router.workers["d0"]
        key = admit_of(p0).key
        d0.take()
        p0.emit(phase(key, PREFILL), logged(key, 0, "a"))
        d0.emit(phase(key, DECODE), logged(key, 1, "bc"), logged(key, 1, "lost", sequence_index=1))
        p0.lose()
        again = admit_of(d0)
        assert known(again) == {0: ids("abc")} and not again.expect_handoff
        d0.emit(phase(again.key, DECODE), logged(again.key, 0, "x", sequence_index=1))
        d0.emit(logged(again.key, 1, "y", sequence_index=1, finish_reason=LENGTH))
        d0.emit(logged(again.key, 3, "d", finish_reason=LENGTH))
        client.take()
        assert client.texts == ["abcd", "xy"]
        router.check_idle()

    run(scenario)


def test_what_a_stop_string_cut_off_is_not_known() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client = router.submit(n=2, stop=["s"])
        p0, d0 = router.workers["p0"], router.workers["d0"]
        key = admit_of(p0).key
        d0.take()
        d0.emit(phase(key, DECODE), logged(key, 1, "bsz"))
        p0.emit(phase(key, PREFILL), logged(key, 0, "a"))
        p0.lose()
        again = admit_of(d0)
        assert known(again) == {0: ids("abs")}
        d0.emit(phase(again.key, DECODE), logged(again.key, 0, "x", sequence_index=1, finish_reason=LENGTH))
        client.take()
        assert client.texts == ["ab", "x"] and client.ends[0].stop_string == "s"
        router.check_idle()

    run(scenario)


def test_times_are_those_of_the_attempt_that_went_well_and_the_first_token_that_came() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0"], dead_after_s=1e6)
        client, key = reach(router, "dispatched")
        p0, p1, d0 = (router.workers[i] for i in ("p0", "p1", "d0"))
        await clock.advance(1)
        p0.emit(phase(key, PREFILL))
        await clock.advance(2)
        p0.emit(logged(key, 0, "a"), phase(key, TRANSFER))
        await clock.advance(4)
        p0.emit(failed(key, Failed.REASON_TRANSFER_FAILED))
        again = admit_of(p1)
        await clock.advance(8)
        p1.emit(phase(again.key, PREFILL))
        await clock.advance(16)
        p1.emit(phase(again.key, TRANSFER))
        await clock.advance(32)
        d0.emit(phase(again.key, DECODE))
        await clock.advance(64)
        d0.emit(logged(again.key, 1, "b", finish_reason=LENGTH))
        client.take()
        assert client.completed is not None
        timing = client.completed.timing
        names = ("queue", "prefill", "time_to_first_token", "kv_transfer", "decode")
        assert [getattr(timing, name).ToMilliseconds() / 1000 for name in names] == [1, 2, 3, 32, 64]

    run(scenario)


def test_local_prefill_transfers_nothing() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client, _ = reach(router, "transferring")
        await clock.advance(4)
        router.workers["p0"].lose()
        await clock.advance(8)
        go_on(router, client, ("", "d0"))
        assert client.completed is not None and client.completed.timing.kv_transfer.ToNanoseconds() == 0

    run(scenario)


def test_a_decode_worker_that_leaves_finishes_what_it_has_and_gets_no_second_attempt() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0", "d1"])
        client, key = reach(router, "first token")
        leaving = router.workers["d0"]
        router.name(["p0", "p1", "d1"])
        await clock.advance(0.0)
        assert leaving.is_ready
        leaving.emit(failed(key, Failed.REASON_TRANSFER_FAILED))
        await clock.advance(0.0)
        assert not leaving.is_ready
        again = admit_of(router.workers["d1"])
        assert known(again) == {0: ids("a")} and again.expect_handoff
        go_on(router, client, ("p0", "d1"))

    run(scenario)
