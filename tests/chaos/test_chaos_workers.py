"""Routers that hang up, and requests for a life of a worker that is over: nothing stays held, nobody else is harmed."""

from __future__ import annotations

from chaos_fleet import Fleet
from chaos_reference import Direct, Reference
from chaos_states import DECODE, LONG_TOKENS, OUTPUT_TOKENS, PREFILL, SHORT_TOKENS, prompt_of
from workers import hand_off, sampling

from cluster.pb import generation_pb2, worker_pb2

DECODING = generation_pb2.Heartbeat.PHASE_DECODE


def check_next(fleet: Fleet, reference: Reference, seed: int) -> None:
    prompt = prompt_of(seed, SHORT_TOKENS)
    Direct(f"check-{seed}", prompt, OUTPUT_TOKENS, fleet[PREFILL], fleet[DECODE]).check(reference)


def test_a_router_that_hangs_up_frees_everything_it_brought(fleet: Fleet, reference: Reference) -> None:
    prefill, decode = fleet[PREFILL], fleet[DECODE]
    how = sampling(max_output_tokens=500)
    keys = [hand_off(f"gone-{i}", prompt_of(50_000 + i, 200), prefill, decode, how) for i in range(3)]
    decode.wait_for(lambda: DECODING in decode.outputs[keys[0]].phases)
    for one in (prefill, decode):
        one.hang_up()
    fleet.settle()
    for one in (prefill, decode):
        one.connect_again()
    check_next(fleet, reference, 50_010)
    fleet.settle()


def test_a_restarted_decode_worker_is_met_anew(fleet: Fleet, reference: Reference) -> None:
    check_next(fleet, reference, 51_000)
    before = fleet[DECODE]
    before.kill()
    fleet.restart(DECODE)
    assert fleet[DECODE].address == before.address
    assert fleet[DECODE].info.incarnation != before.info.incarnation
    check_next(fleet, reference, 51_001)
    fleet.settle()


def test_a_request_for_a_life_that_is_over_fails_and_harms_nobody(fleet: Fleet, reference: Reference) -> None:
    prefill, decode = fleet[PREFILL], fleet[DECODE]
    present = decode.info.incarnation
    decode.info.incarnation = "an earlier life"
    key = hand_off("late", prompt_of(52_000, LONG_TOKENS), prefill, decode, sampling(max_output_tokens=5))
    decode.info.incarnation = present
    prefill.wait_for(lambda: prefill.outputs[key].failed)
    assert prefill.outputs[key].failed.reason == worker_pb2.Failed.REASON_PEER_LOST  # type: ignore[union-attr]
    decode.send(cancel=worker_pb2.Cancel(key=key.to_proto()))
    fleet.settle()
    check_next(fleet, reference, 52_001)
