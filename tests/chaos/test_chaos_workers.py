"""Workers that are killed, and sessions that break: what is left goes on, and nothing stays held.

Every fault is shown to have taken effect: the killed process is dead, and the survivor has said so.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from workers import ROOT, Output, Worker, hand_off, merged, running, sampling

from cluster.pb import generation_pb2, worker_pb2

MODEL = str(ROOT / "models" / "tiny-shakespeare")
SHORT = [5, 6, 7, 8, 9] * 4
LONG = [(i * 13) % 1000 + 4 for i in range(1500)]
PREFILLING = generation_pb2.Heartbeat.PHASE_PREFILL
DECODING = generation_pb2.Heartbeat.PHASE_DECODE


def worker(role: str, number: int = 0, **settings: Any) -> Worker:
    defaults = {"kv_cache_tokens": 4096, "max_num_batched_tokens": 32, "chunk_tokens": 32, "transfer_timeout_s": 10.0}
    return Worker(worker_id=f"{role}-{number}", role=role, model_path=MODEL, **{**defaults, **settings})


def kill(victim: Worker, rank: int = 0) -> None:
    popen = victim.ranks[rank].popen
    os.kill(popen.pid, signal.SIGKILL)
    assert popen.wait(10) == -signal.SIGKILL


def is_done(output: Output) -> bool:
    return bool(output.finished) or output.failed is not None


def reference(prefill: Worker, decode: Worker, name: str) -> list[int]:
    key = hand_off(name, SHORT, prefill, decode, sampling(max_output_tokens=12), bypass_prefix_cache=True)
    decode.wait_for(lambda: is_done(decode.outputs[key]))
    return merged(key, prefill, decode).sequence()


@pytest.mark.parametrize("moment", [PREFILLING, DECODING], ids=["prefilling", "decoding"])
def test_a_killed_decode_worker_costs_the_prefill_worker_nothing(moment: int) -> None:
    with running(worker("prefill"), worker("decode"), worker("decode", 1)) as (prefill, decode, spare):
        expected = reference(prefill, spare, "before")
        watched = prefill if moment == PREFILLING else decode
        keys = [hand_off(f"lost-{i}", LONG[i:], prefill, decode, sampling(max_output_tokens=200)) for i in range(2)]
        watched.wait_for(lambda: any(moment in watched.outputs[key].phases for key in keys))
        kill(decode)
        decode.wait_for(lambda: decode.is_lost)
        prefill.wait_idle()
        if moment == PREFILLING:
            failures = [prefill.outputs[key].failed for key in keys]
            assert [f.reason for f in failures if f] == [worker_pb2.Failed.REASON_PEER_LOST] * 2
        assert reference(prefill, spare, "after") == expected
        spare.wait_idle()


def test_a_killed_prefill_worker_leaves_no_reservation_behind() -> None:
    with running(worker("prefill"), worker("prefill", 1), worker("decode")) as (prefill, spare, decode):
        expected = reference(spare, decode, "before")
        keys = [hand_off(f"lost-{i}", LONG[i:], prefill, decode, sampling(max_output_tokens=50)) for i in range(2)]
        prefill.wait_for(lambda: any(PREFILLING in prefill.outputs[key].phases for key in keys))
        kill(prefill)
        decode.wait_for(lambda: all(decode.outputs[key].failed for key in keys))
        assert {decode.outputs[key].failed.reason for key in keys} == {worker_pb2.Failed.REASON_PEER_LOST}  # type: ignore[union-attr]
        decode.wait_idle()
        assert reference(spare, decode, "after") == expected
        decode.wait_idle()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_its_whole_group(rank: int) -> None:
    with running(worker("decode", tp_size=2), worker("prefill")) as (decode, prefill):
        key = hand_off("lost", SHORT, prefill, decode, sampling(max_output_tokens=1000))
        decode.wait_for(lambda: DECODING in decode.outputs[key].phases)
        kill(decode, rank)
        decode.wait_for(lambda: decode.is_lost, timeout_s=10)
        assert decode.ranks[1 - rank].popen.wait(20) == 1
        prefill.wait_idle()


def test_a_router_that_hangs_up_frees_everything_it_brought() -> None:
    with running(worker("prefill"), worker("decode")) as (prefill, decode):
        keys = [hand_off(f"gone-{i}", LONG[:200], prefill, decode, sampling(max_output_tokens=500)) for i in range(3)]
        decode.wait_for(lambda: DECODING in decode.outputs[keys[0]].phases)
        for one in (prefill, decode):
            one.hang_up()
        for one in (prefill, decode):
            one.connect_again().wait_idle()
        assert len(reference(prefill, decode, "after")) == 12


def test_a_restarted_decode_worker_is_met_anew() -> None:
    with running(worker("prefill"), worker("decode")) as (prefill, decode):
        expected = reference(prefill, decode, "first life")
        port = int(decode.address.rpartition(":")[2])
        kill(decode)
        with running(worker("decode", port=port)) as (again,):
            assert again.address == decode.address
            assert reference(prefill, again, "second life") == expected
            again.wait_idle()
            prefill.wait_idle()


def test_a_request_for_a_life_that_is_over_fails_and_harms_nobody() -> None:
    with running(worker("prefill"), worker("decode")) as (prefill, decode):
        decode.info.incarnation = "an earlier life"
        key = hand_off("late", SHORT, prefill, decode, sampling(max_output_tokens=5))
        prefill.wait_for(lambda: prefill.outputs[key].failed)
        assert prefill.outputs[key].failed.reason == worker_pb2.Failed.REASON_PEER_LOST  # type: ignore[union-attr]
        prefill.wait_idle()
        decode.send(cancel=worker_pb2.Cancel(key=key.to_proto()))
        decode.wait_idle()
