"""What connections report to the metrics: each message and operation of a hand-off, and every end exactly once."""

from __future__ import annotations

from typing import Any

import pytest
from connection_harness import handshake

from cluster.failure_detector import FailureTimeouts
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, rank_pb2, worker_pb2
from kv_transfer.actions import Chunk, Range
from worker.handoff_connection import Done, HandoffConnection, HandoffContext
from worker.handoff_metrics import HandoffMetrics
from worker.handoffs import OFFERED_LAST_S, Handoffs

KEY = RequestKey("r", 1)
PEER = worker_pb2.Peer(worker_id="decode-0", incarnation="i", address="127.0.0.1:1")
AGREED = handoff_pb2.ReceiverHello(transport="shm", chunk_tokens=16, num_slots=4)
ANSWER_TIMEOUT_S = 10.0


class Ignoring:
    """Notes every call and does nothing: the roles, which are not under test."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **more: Any) -> int:
            self.called.append(name)
            return 0

        return call


class Ranks:
    """Collects the commands that were issued, and who is called when they are done."""

    def __init__(self) -> None:
        self.done: list[Done] = []

    def issue(self, command: rank_pb2.RankCommand, done: Done) -> None:
        self.done.append(done)


class Rig:
    """The connections of one worker whose time and ranks are the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.metrics, self.ranks = HandoffMetrics(), Ranks()
        ignoring: Any = Ignoring()
        self.called: list[str] = ignoring.called
        """What the roles were told."""
        context = HandoffContext(
            post=lambda function, *arguments: function(*arguments),
            on_loop=lambda function, *arguments: function(*arguments),
            issue=self.ranks.issue,
            timing=FailureTimeouts(1.0, 2.0, 3.0),
            metrics=self.metrics,
            clock=lambda: self.now,
        )
        limits = {"max_pairs": 2, "answer_timeout_s": ANSWER_TIMEOUT_S}
        self.handoffs = Handoffs(context, ignoring, ignoring, ignoring.dial, worker_id="prefill-0", **limits)  # type: ignore[arg-type]

    def done(self, error: str = "", kind: int = 0, size_bytes: int = 0) -> None:
        """The newest command is done."""
        self.ranks.done[-1](error, kind, size_bytes)  # type: ignore[arg-type]

    def sending(self) -> HandoffConnection:
        """An open connection on which the hand-off has been opened."""
        connection = self.handoffs.connect_to(PEER)
        connection.greeted(AGREED)
        self.done()
        connection.send(handoff_pb2.SenderMessage(open=handoff_pb2.Open(key=KEY.to_proto())))
        return connection

    def receiving(self) -> HandoffConnection:
        connection = self.handoffs.accept(handoff_pb2.SenderHello(pair_epoch="epoch"), AGREED)
        self.done()
        connection.on_message(handoff_pb2.SenderMessage(open=handoff_pb2.Open(key=KEY.to_proto())))
        return connection

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


def chunk(connection: HandoffConnection, index: int = 0) -> Chunk:
    return Chunk(KEY, connection.epoch, index, 0, Range(0, 16, 0, 2))


def gather(connection: HandoffConnection) -> None:
    connection.gather(chunk(connection), [0], 1, lambda chunk: None)


def transmit(connection: HandoffConnection) -> None:
    connection.transmit(chunk(connection), lambda chunk: None)


def land(connection: HandoffConnection) -> None:
    connection.land(chunk(connection), [0], lambda chunk, error, reason: None)


def heard(**message: Any) -> handoff_pb2.ReceiverMessage:
    return handoff_pb2.ReceiverMessage(**message)


def test_bytes_that_were_not_sent_do_not_count(rig: Rig) -> None:
    connection = rig.sending()
    gather(connection)
    rig.done(size_bytes=640)
    transmit(connection)
    rig.done("the peer is gone", rank_pb2.RankReply.KIND_TRANSFER)
    assert rig.value("transfer_bytes_total", direction="sent", transport="shm") == 0
    assert rig.failures() == {"transfer_failed": 1}


def test_the_times_of_a_hand_off_are_those_at_which_it_was_told_and_heard(rig: Rig) -> None:
    connection = rig.sending()
    gather(connection)
    rig.now += 1
    rig.done(size_bytes=640)
    offer = handoff_pb2.Chunk(key=KEY.to_proto(), index=0)
    connection.send(handoff_pb2.SenderMessage(offer=offer))
    rig.now += 2
    connection.on_message(heard(grant=handoff_pb2.Grant(key=KEY.to_proto(), chunk_index=0)))
    transmit(connection)
    assert rig.value("transfer_bytes_total", direction="sent", transport="shm") == 0  # gathered is not sent
    rig.done()
    connection.prompt_done(KEY)
    rig.now += 4
    connection.send(handoff_pb2.SenderMessage(commit=handoff_pb2.Commit(key=KEY.to_proto())))
    rig.now += 8
    connection.on_message(heard(committed=handoff_pb2.Committed(key=KEY.to_proto())))
    sums = {name: rig.value(f"{name}_seconds_sum") for name in ("transfer", "transfer_exposed", "grant", "commit")}
    assert sums == {"transfer": 15.0, "transfer_exposed": 12.0, "grant": 2.0, "commit": 8.0}
    assert rig.value("transfer_bytes_total", direction="sent", transport="shm") == 640
    assert (rig.metrics.num_outgoing, rig.failures()) == (0, {})


@pytest.mark.parametrize(("is_heard", "expected"), [(False, {}), (True, {"aborted": 1})])
def test_an_abort_is_a_failure_for_the_sender_that_hears_it_and_not_for_the_one_that_tells_it(
    rig: Rig, is_heard: bool, expected: dict[str, float]
) -> None:
    connection, abort = rig.sending(), handoff_pb2.Abort(key=KEY.to_proto())
    assert rig.metrics.num_outgoing == 1
    if not is_heard:
        connection.send(handoff_pb2.SenderMessage(abort=abort))
    connection.on_message(heard(abort=abort))
    assert (rig.metrics.num_outgoing, rig.failures()) == (0, expected)


@pytest.mark.parametrize("is_heard", [False, True])
def test_an_abort_is_no_failure_for_the_receiver(rig: Rig, is_heard: bool) -> None:
    connection, abort = rig.receiving(), handoff_pb2.Abort(key=KEY.to_proto())
    assert rig.metrics.num_incoming == 1
    if is_heard:
        connection.on_message(handoff_pb2.SenderMessage(abort=abort))
    else:
        connection.send(heard(abort=abort))
    assert (rig.metrics.num_incoming, rig.failures()) == (0, {})


def test_a_hand_off_that_was_received_whole_is_over_when_that_is_told(rig: Rig) -> None:
    connection = rig.receiving()
    land(connection)
    rig.done(size_bytes=640)
    assert rig.metrics.num_incoming == 1
    connection.send(heard(committed=handoff_pb2.Committed(key=KEY.to_proto())))
    assert (rig.metrics.num_incoming, rig.failures()) == (0, {})
    assert rig.value("transfer_bytes_total", direction="received", transport="shm") == 640


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(rank_pb2.RankReply.KIND_CORRUPT, "corrupt"), (rank_pb2.RankReply.KIND_TRANSFER, "transfer_failed")],
)
def test_a_landing_that_failed_counts_once_by_its_reason(rig: Rig, kind: int, reason: str) -> None:
    land(rig.receiving())
    rig.done("it did not arrive as it was sent", kind)
    assert (rig.metrics.num_incoming, rig.failures()) == (0, {reason: 1})
    assert rig.value("pairs_retired_total", reason=reason) == 1


def test_a_link_that_breaks_fails_the_hand_off_on_either_side(rig: Rig) -> None:
    rig.sending().end("its stream broke")
    rig.receiving().end("its stream broke")
    assert rig.failures() == {"peer_lost": 2}
    assert rig.value("pairs_retired_total", reason="peer_lost") == 2


def test_workers_that_can_never_meet_count_as_incompatible(rig: Rig) -> None:
    connection = rig.handoffs.connect_to(PEER)
    connection.send(handoff_pb2.SenderMessage(open=handoff_pb2.Open(key=KEY.to_proto())))
    connection.end("the layouts differ", is_final=True)
    assert rig.failures() == {"incompatible": 1}


def test_an_answer_that_is_overdue_counts_as_a_timeout(rig: Rig) -> None:
    connection = rig.sending()
    connection.send(handoff_pb2.SenderMessage(offer=handoff_pb2.Chunk(key=KEY.to_proto())))
    rig.handoffs.tick()
    assert rig.failures() == {}
    rig.now += ANSWER_TIMEOUT_S
    rig.handoffs.tick()
    assert rig.failures() == {}
    rig.now += 0.1
    rig.handoffs.tick()
    assert rig.failures() == {"timeout": 1}


def test_a_sender_waits_for_the_answer_to_its_abort_and_a_receiver_for_none(rig: Rig) -> None:
    sending, receiving, key = rig.sending(), rig.receiving(), KEY.to_proto()
    sending.send(handoff_pb2.SenderMessage(abort=handoff_pb2.Abort(key=key)))
    receiving.send(heard(committed=handoff_pb2.Committed(key=key)))
    rig.now += ANSWER_TIMEOUT_S + 0.1
    rig.handoffs.tick()
    assert (sending.is_retired, receiving.is_retired) == (True, False)


def test_slots_of_a_retired_link_are_quarantined_until_every_rank_has_closed_its_pair(rig: Rig) -> None:
    sending, receiving = rig.sending(), rig.receiving()
    assert (rig.handoffs.count_by_state()["open"], rig.handoffs.count_by_state()["closing"]) == (2, 0)
    sending.end("its stream broke")
    assert rig.handoffs.count_quarantined(is_sender=True) == AGREED.num_slots
    assert rig.handoffs.count_quarantined(is_sender=False) == 0
    assert (rig.handoffs.count_by_state()["open"], rig.handoffs.count_by_state()["closing"]) == (1, 1)
    rig.done()  # close_pair
    assert rig.handoffs.count_quarantined(is_sender=True) == 0
    receiving.end("its stream broke")
    assert rig.handoffs.count_quarantined(is_sender=False) == AGREED.num_slots
    rig.done()
    assert rig.handoffs.count_by_state() == {"opening": 0, "open": 0, "suspect": 0, "closing": 0}


@pytest.mark.parametrize(("error", "num_told"), [("", 1), ("a rank does not answer", 0)])
def test_the_role_hears_that_a_pair_is_closed_if_every_rank_has_closed_it(rig: Rig, error: str, num_told: int) -> None:
    rig.sending().end("its stream broke")
    assert rig.called.count("connection_retired") == 1 and "connection_closed" not in rig.called
    rig.done(error)
    assert rig.called.count("connection_closed") == num_told


def test_one_connection_too_many_closes_the_one_that_was_used_least_recently(rig: Rig) -> None:
    peers = [worker_pb2.Peer(worker_id=f"decode-{i}", incarnation="i") for i in range(3)]
    connections = []
    for peer in (*peers[:2], peers[0], peers[2]):
        rig.now += 1
        connections.append(rig.handoffs.connect_to(peer))
    first, second, again, third = connections
    assert again is first and [c.is_retired for c in (first, second, third)] == [False, True, False]


def test_a_transport_that_does_not_open_is_offered_last_to_that_life_of_that_worker_for_a_while(rig: Rig) -> None:
    connection = rig.handoffs.connect_to(PEER)
    assert connection.last == frozenset()
    connection.greeted(AGREED)
    rig.done("cuMemImportFromShareableHandle failed")
    assert rig.value("pairs_unopened_total", transport="shm") == 1
    assert rig.handoffs.connect_to(PEER).last == {"shm"}
    hello = handshake("prefill-0").hello("e", rig.handoffs.connect_to(PEER).last)
    assert list(hello.transports) == ["gloo", "shm"] and handshake("decode-0").answer(hello).transport == "gloo"
    for other in (worker_pb2.Peer(worker_id="decode-1"), worker_pb2.Peer(worker_id="decode-0", incarnation="next")):
        assert rig.handoffs.connect_to(other).last == frozenset()
    rig.now += OFFERED_LAST_S
    rig.handoffs.connect_to(PEER).retire(worker_pb2.Failed.REASON_PEER_LOST, "gone")
    assert rig.handoffs.connect_to(PEER).last == frozenset()


def test_a_pair_whose_other_side_ends_while_it_opens_did_not_open(rig: Rig) -> None:
    connection = rig.handoffs.connect_to(PEER)
    connection.greeted(AGREED)
    connection.end("the decode worker ended the connection: the pair did not open")
    assert rig.handoffs.connect_to(PEER).last == {"shm"}


def test_connections_that_end_before_or_after_their_pair_opens_blame_no_transport(rig: Rig) -> None:
    rig.handoffs.connect_to(PEER).end("nobody answers")
    rig.sending().end("the network is gone")
    rig.receiving().end("the network is gone")
    rig.handoffs.accept(handoff_pb2.SenderHello(pair_epoch="other"), AGREED)
    rig.done("it did not open")
    assert rig.handoffs.connect_to(PEER).last == frozenset()
    assert rig.value("pairs_unopened_total", transport="shm") == 0
