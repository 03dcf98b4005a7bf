"""What a carrier tells the metrics: every message and operation of a hand-off at its place, every end exactly once."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.pb import handoff_pb2, rank_pb2, worker_pb2
from cluster.request_key import RequestKey
from kv_transfer.actions import Chunk, Range
from worker.handoff_connection import Carrier
from worker.metrics import HandoffMetrics

KEY = RequestKey("r", 1)
PEER = worker_pb2.Peer(worker_id="decode-0", incarnation="i", address="127.0.0.1:1")
AGREED = handoff_pb2.ReceiverHello(transport="shm", chunk_tokens=16, num_slots=4)
ANSWER_TIMEOUT_S = 10.0


class Deaf:
    """Takes every call and does nothing: the roles and the speaking side, which are not under test."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **more: 0


class Ranks:
    """Collects the commands that were issued."""

    def __init__(self) -> None:
        self.commands: list[rank_pb2.RankCommand] = []

    def issue(self, command: rank_pb2.RankCommand) -> int:
        self.commands.append(command)
        return len(self.commands)


class Rig:
    """One carrier whose time and ranks are the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.metrics, self.ranks = HandoffMetrics(), Ranks()
        self.carrier = Carrier(
            "prefill-0",
            worker_pb2.WorkerStats(),
            self.metrics,
            max_pairs=2,
            answer_timeout_s=ANSWER_TIMEOUT_S,
            clock=lambda: self.now,
        )
        deaf: Any = Deaf()
        self.carrier.links = self.carrier.prefill = self.carrier.decode = deaf
        self.carrier.ranks = self.ranks  # type: ignore[assignment]

    def done(self, error: str = "", kind: int = 0, size_bytes: int = 0) -> None:
        """The newest command is done."""
        self.carrier.command_done(len(self.ranks.commands), error, kind, size_bytes)  # type: ignore[arg-type]

    def sending(self) -> str:
        """The epoch of an open link on which the hand-off has been opened."""
        epoch = self.carrier.link_to(PEER)
        self.carrier.link_greeted(epoch, AGREED)
        self.done()
        self.carrier.tell(epoch, handoff_pb2.SenderMessage(open=handoff_pb2.Open(key=KEY.to_proto())))
        return epoch

    def receiving(self) -> str:
        self.carrier.link_called("epoch", handoff_pb2.SenderHello(), AGREED)
        self.done()
        self.carrier.link_heard("epoch", handoff_pb2.SenderMessage(open=handoff_pb2.Open(key=KEY.to_proto())))
        return "epoch"

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"baton_kv_{name}", labels)
        assert found is not None, name
        return found

    def failures(self) -> dict[str, float]:
        samples = [sample for family in self.metrics.registry.collect() for sample in family.samples]
        failures = [s for s in samples if s.name == "baton_kv_transfer_failures_total" and s.value]
        return {sample.labels["reason"]: sample.value for sample in failures}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def chunk(epoch: str, index: int = 0) -> Chunk:
    return Chunk(KEY, epoch, index, 0, Range(0, 16, 0, 2))


def heard(**message: Any) -> handoff_pb2.ReceiverMessage:
    return handoff_pb2.ReceiverMessage(**message)


def test_bytes_that_were_not_sent_do_not_count(rig: Rig) -> None:
    epoch = rig.sending()
    rig.carrier.gather(chunk(epoch), [0], after_step=1)
    rig.done(size_bytes=640)
    rig.carrier.transmit(chunk(epoch))
    rig.done("the peer is gone", rank_pb2.RankReply.KIND_TRANSFER)
    assert rig.value("transfer_bytes_total", direction="sent", transport="shm") == 0
    assert rig.failures() == {"transfer_failed": 1}


def test_the_times_of_a_hand_off_are_those_at_which_it_was_told_and_heard(rig: Rig) -> None:
    epoch = rig.sending()
    rig.carrier.gather(chunk(epoch), [0], after_step=1)
    rig.now += 1
    rig.done(size_bytes=640)
    offer = handoff_pb2.Chunk(key=KEY.to_proto(), index=0)
    rig.carrier.tell(epoch, handoff_pb2.SenderMessage(offer=offer))
    rig.now += 2
    rig.carrier.link_heard(epoch, heard(grant=handoff_pb2.Grant(key=KEY.to_proto(), chunk_index=0)))
    rig.carrier.transmit(chunk(epoch))
    assert rig.value("transfer_bytes_total", direction="sent", transport="shm") == 0  # gathered is not sent
    rig.done()
    rig.carrier.prompt_done(KEY)
    rig.now += 4
    rig.carrier.tell(epoch, handoff_pb2.SenderMessage(commit=handoff_pb2.Commit(key=KEY.to_proto())))
    rig.now += 8
    rig.carrier.link_heard(epoch, heard(committed=handoff_pb2.Committed(key=KEY.to_proto())))
    sums = {name: rig.value(f"{name}_seconds_sum") for name in ("transfer", "transfer_exposed", "grant", "commit")}
    assert sums == {"transfer": 15.0, "transfer_exposed": 12.0, "grant": 2.0, "commit": 8.0}
    assert rig.value("transfer_bytes_total", direction="sent", transport="shm") == 640
    assert (rig.metrics.num_outgoing, rig.failures()) == (0, {})


@pytest.mark.parametrize(("is_heard", "expected"), [(False, {}), (True, {"aborted": 1})])
def test_an_abort_is_a_failure_for_the_sender_that_hears_it_and_not_for_the_one_that_tells_it(
    rig: Rig, is_heard: bool, expected: dict[str, float]
) -> None:
    epoch, abort = rig.sending(), handoff_pb2.Abort(key=KEY.to_proto())
    assert rig.metrics.num_outgoing == 1
    if not is_heard:
        rig.carrier.tell(epoch, handoff_pb2.SenderMessage(abort=abort))
    rig.carrier.link_heard(epoch, heard(abort=abort))
    assert (rig.metrics.num_outgoing, rig.failures()) == (0, expected)


@pytest.mark.parametrize("is_heard", [False, True])
def test_an_abort_is_no_failure_for_the_receiver(rig: Rig, is_heard: bool) -> None:
    epoch, abort = rig.receiving(), handoff_pb2.Abort(key=KEY.to_proto())
    assert rig.metrics.num_incoming == 1
    if is_heard:
        rig.carrier.link_heard(epoch, handoff_pb2.SenderMessage(abort=abort))
    else:
        rig.carrier.tell(epoch, heard(abort=abort))
    assert (rig.metrics.num_incoming, rig.failures()) == (0, {})


def test_a_hand_off_that_was_received_whole_is_over_when_that_is_told(rig: Rig) -> None:
    epoch = rig.receiving()
    rig.carrier.land(chunk(epoch), [0])
    rig.done(size_bytes=640)
    assert rig.metrics.num_incoming == 1
    rig.carrier.tell(epoch, heard(committed=handoff_pb2.Committed(key=KEY.to_proto())))
    assert (rig.metrics.num_incoming, rig.failures()) == (0, {})
    assert rig.value("transfer_bytes_total", direction="received", transport="shm") == 640


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(rank_pb2.RankReply.KIND_CORRUPT, "corrupt"), (rank_pb2.RankReply.KIND_TRANSFER, "transfer_failed")],
)
def test_a_landing_that_failed_counts_once_by_its_reason(rig: Rig, kind: int, reason: str) -> None:
    rig.carrier.land(chunk(rig.receiving()), [0])
    rig.done("it did not arrive as it was sent", kind)
    assert (rig.metrics.num_incoming, rig.failures()) == (0, {reason: 1})
    assert rig.value("pairs_retired_total", reason=reason) == 1


def test_a_link_that_breaks_fails_the_hand_off_on_either_side(rig: Rig) -> None:
    rig.carrier.link_down(rig.sending(), "its stream broke")
    rig.carrier.link_down(rig.receiving(), "its stream broke")
    assert rig.failures() == {"peer_lost": 2}
    assert rig.value("pairs_retired_total", reason="peer_lost") == 2


def test_workers_that_can_never_meet_count_as_incompatible(rig: Rig) -> None:
    epoch = rig.carrier.link_to(PEER)
    rig.carrier.tell(epoch, handoff_pb2.SenderMessage(open=handoff_pb2.Open(key=KEY.to_proto())))
    rig.carrier.link_down(epoch, "the layouts differ", is_final=True)
    assert rig.failures() == {"incompatible": 1}


def test_an_answer_that_is_overdue_counts_as_a_timeout(rig: Rig) -> None:
    epoch = rig.sending()
    rig.carrier.tell(epoch, handoff_pb2.SenderMessage(offer=handoff_pb2.Chunk(key=KEY.to_proto())))
    rig.carrier.tick()
    assert rig.failures() == {}
    rig.now += ANSWER_TIMEOUT_S + 0.1
    rig.carrier.tick()
    assert rig.failures() == {"timeout": 1}


def test_slots_of_a_retired_link_are_quarantined_until_every_rank_has_closed_its_pair(rig: Rig) -> None:
    sending, receiving = rig.sending(), rig.receiving()
    assert (rig.carrier.count_links()["open"], rig.carrier.count_links()["closing"]) == (2, 0)
    rig.carrier.link_down(sending, "its stream broke")
    assert rig.carrier.count_quarantined(is_sender=True) == AGREED.num_slots
    assert rig.carrier.count_quarantined(is_sender=False) == 0
    assert (rig.carrier.count_links()["open"], rig.carrier.count_links()["closing"]) == (1, 1)
    rig.done()  # close_pair
    assert rig.carrier.count_quarantined(is_sender=True) == 0
    rig.carrier.link_down(receiving, "its stream broke")
    assert rig.carrier.count_quarantined(is_sender=False) == AGREED.num_slots
    rig.done()
    assert rig.carrier.count_links() == {"opening": 0, "open": 0, "suspect": 0, "closing": 0}
