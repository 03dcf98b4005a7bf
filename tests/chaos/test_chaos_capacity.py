"""Pools that run out: a full decode worker, and a prefill worker whose pages a stalled decode worker holds up."""

from __future__ import annotations

import pytest
from chaos_fleet import ChaosWorker, Fleet, await_true
from chaos_reference import Direct, Reference
from chaos_states import DECODE, LONG_TOKENS, NUM_SLOTS, OUTPUT_TOKENS, PREFILL, prompt_of

from cluster.pb import worker_pb2

BLOCK_TOKENS = 16

pytestmark = pytest.mark.battery


def give(fleet: Fleet, seed: int, decode: str) -> Direct:
    """A long request for PREFILL and that decode worker."""
    return Direct(f"capacity-{seed}", prompt_of(seed, LONG_TOKENS), OUTPUT_TOKENS, fleet[PREFILL], fleet[decode])


def has_reserved(decode: ChaosWorker, num_requests: int) -> bool:
    return decode.ask().blocks_held * BLOCK_TOKENS >= num_requests * LONG_TOKENS


def drop(direct: Direct) -> None:
    direct.decode.send(cancel=worker_pb2.Cancel(key=direct.key.to_proto()))


def test_requests_wait_for_a_full_decode_worker_and_all_finish(fleet: Fleet, reference: Reference) -> None:
    decode = fleet[DECODE]
    given = [give(fleet, seed, DECODE) for seed in range(20_000, 20_008)]
    decode.wait_for(lambda: decode.stats.num_waiting_requests >= 5)  # it has room for two
    for direct in given:
        direct.check(reference)
    fleet.settle()


def test_a_stalled_decode_worker_holds_up_its_own_requests_only(fleet: Fleet, reference: Reference) -> None:
    prefill, stalled = fleet[PREFILL], fleet[DECODE]
    prefill.stop(1)
    stuck = give(fleet, 21_000, DECODE)
    await_true(lambda: has_reserved(stalled, 1), stalled.ask)
    stalled.stop()
    prefill.cont(1)
    await_true(lambda: prefill.slots("send", "offered") == NUM_SLOTS, prefill.metrics)
    give(fleet, 21_001, "decode-1").check(reference)
    assert stalled.is_stopped()
    prefill.wait_for(lambda: prefill.outputs[stuck.key].failed)
    assert prefill.outputs[stuck.key].failed.reason == worker_pb2.Failed.REASON_PEER_LOST  # type: ignore[union-attr]
    stalled.cont()
    drop(stuck)
    fleet.settle()


def test_a_prefill_pool_that_a_stalled_decode_worker_has_exhausted_is_given_back(
    fleet: Fleet, reference: Reference
) -> None:
    prefill, stalled, going = fleet[PREFILL], fleet[DECODE], fleet["decode-1"]
    prefill.stop(1)
    stuck = [give(fleet, seed, DECODE) for seed in (22_000, 22_001)]
    await_true(lambda: has_reserved(stalled, 2), stalled.ask)
    stalled.stop()
    prefill.cont(1)
    await_true(lambda: has_reserved(prefill, 2), prefill.ask)
    other = give(fleet, 22_002, "decode-1")
    await_true(lambda: has_reserved(going, 1), going.ask)
    assert prefill.ask().num_waiting_requests == 1, "there were blocks left"
    assert not any(prefill.outputs[direct.key].failed for direct in stuck), "it was given up too soon to matter"
    other.check(reference)
    assert stalled.is_stopped()
    assert all(prefill.outputs[direct.key].failed for direct in stuck)
    stalled.cont()
    for direct in stuck:
        drop(direct)
    fleet.settle()
    give(fleet, 22_003, DECODE).check(reference)
    fleet.settle()
