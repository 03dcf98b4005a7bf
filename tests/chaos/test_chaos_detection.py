"""How soon a lost peer is noticed, with the timers that ship, and that its next life is met without any other restart.

A request waits for the decode worker's blocks, so that both workers need one another for as long as the test wants.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chaos_fleet import ChaosWorker, Measured, settle
from chaos_reference import Direct, Reference
from chaos_states import (
    LONG_TOKENS,
    OUTPUT_TOKENS,
    POOL_TOKENS,
    SHORT_TOKENS,
    WORKERS,
    block,
    prompt_of,
    unblock,
)

from cluster.config.schema import TransferSection
from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2

pytestmark = pytest.mark.battery

CLOSED_S = 0.1
SILENT_S = 3.5
TIMERS = TransferSection()
PEER_LOST = worker_pb2.Failed.REASON_PEER_LOST


class Couple:
    """A prefill worker and the decode worker it hands to."""

    def __init__(self, name: str) -> None:
        self.prefill, self.decode = (
            ChaosWorker(
                worker_id=f"{role}-{name}",
                role=role,
                **{**WORKERS, "kv_cache_tokens": POOL_TOKENS},
            )
            for role in ("prefill", "decode")
        )

    def await_blocks(self, seed: int) -> RequestKey:
        """A request that both workers hold, and that waits."""
        self.blocker = block(self.decode, seed)
        waiting = Direct(f"waiting-{seed}", prompt_of(seed, LONG_TOKENS), OUTPUT_TOKENS, self.prefill, self.decode)
        self.decode.wait_for(lambda: self.decode.stats.num_waiting_requests == 1)
        return waiting.key

    def check_next(self, reference: Reference, seed: int) -> None:
        prompt = prompt_of(seed, SHORT_TOKENS)
        Direct(f"next-{seed}", prompt, OUTPUT_TOKENS, self.prefill, self.decode).check(reference)


@pytest.fixture(scope="module")
def couples() -> Iterator[tuple[Couple, Couple]]:
    both = Couple("a"), Couple("b")
    workers = [worker for couple in both for worker in (couple.prefill, couple.decode)]
    for worker in workers:
        worker.connect()
    yield both
    for couple in both:
        couple.prefill.abandon()
        couple.decode.abandon()


def restarted(worker: ChaosWorker) -> ChaosWorker:
    address = worker.address
    worker.abandon()
    again = worker.again()
    again.connect()
    assert again.address == address
    assert again.info.incarnation != worker.info.incarnation
    return again


def test_a_socket_that_closes_is_noticed_within_100_ms(
    couples: tuple[Couple, Couple], reference: Reference, measured: Measured
) -> None:
    """Up to three times: what else runs on the machine may take the processor at the wrong moment, but not thrice."""
    for number in range(3):
        took_s = max(kill_and_measure(couples, seed=10 * number + 1))
        for couple in couples:
            couple.check_next(reference, 10 * number + 5)
            settle([couple.prefill, couple.decode])
        if took_s < CLOSED_S:
            break
    measured("a closed socket noticed after", took_s)
    assert took_s < CLOSED_S


def kill_and_measure(couples: tuple[Couple, Couple], seed: int) -> list[float]:
    """Kills one couple's decode worker and the other's prefill worker; returns the seconds from the closing of its
    sockets (the end of a large process takes time) until each peer noticed. Both live again."""
    of_decode, of_prefill = couples
    first, second = of_decode.await_blocks(seed), of_prefill.await_blocks(seed + 1)
    of_decode.decode.kill()
    of_prefill.prefill.kill()
    took_s = []
    for worker, key, killed in (
        (of_decode.prefill, first, of_decode.decode),
        (of_prefill.decode, second, of_prefill.prefill),
    ):
        worker.wait_for(lambda w=worker, k=key: w.outputs[k].failed)  # type: ignore[misc]
        assert worker.outputs[key].failed.reason == PEER_LOST  # type: ignore[union-attr]
        took_s.append(worker.failed_at[key] - killed.ranks[0].closed_at())
    unblock(*of_prefill.blocker)
    settle([of_decode.prefill, of_prefill.decode])
    of_decode.decode, of_prefill.prefill = restarted(of_decode.decode), restarted(of_prefill.prefill)
    return took_s


def test_silence_is_noticed_within_3_5_s(
    couples: tuple[Couple, Couple], reference: Reference, measured: Measured
) -> None:
    of_decode, of_prefill = couples
    first, second = of_decode.await_blocks(103), of_prefill.await_blocks(104)
    decode_stopped_at = of_decode.decode.stop()
    prefill_stopped_at = of_prefill.prefill.stop()
    for worker, key, stopped_at in (
        (of_decode.prefill, first, decode_stopped_at),
        (of_prefill.decode, second, prefill_stopped_at),
    ):
        worker.wait_for(lambda w=worker, k=key: w.outputs[k].failed)  # type: ignore[misc]
        assert worker.outputs[key].failed.reason == PEER_LOST  # type: ignore[union-attr]
        took_s = worker.failed_at[key] - stopped_at
        measured("silence noticed after", took_s)
        assert TIMERS.dead_after_s - TIMERS.heartbeat_s < took_s < SILENT_S
    of_decode.decode.cont()
    of_prefill.prefill.cont()
    of_decode.decode.send(cancel=worker_pb2.Cancel(key=first.to_proto()))
    unblock(*of_decode.blocker)
    unblock(*of_prefill.blocker)
    settle(worker for couple in couples for worker in (couple.prefill, couple.decode))
    for couple in couples:
        couple.check_next(reference, 111)
