"""The prefill role between its scheduler and its sender, without a worker around it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.keys import RequestKey
from cluster.pb import handoff_pb2, worker_pb2
from engine.block_manager import BlockManager
from engine.sampling import SampledToken, SamplingParams
from engine.sequence import Job, Sequence
from kv_transfer.actions import Gather, Transmit
from prefill_worker.role import PrefillRole

KEY = RequestKey("r", 1)
PEER = "decode-0@1"


class Surroundings:
    """What the role tells and carries, kept for the test to read; gathers end when the test says so."""

    def __init__(self) -> None:
        self.gathers: list[Gather] = []

    def emit(self, key: RequestKey, event: worker_pb2.Event) -> None: ...

    def emit_tokens(self, sequence: Sequence, sampled: SampledToken, index: int) -> None: ...

    def close_request(self, key: RequestKey) -> None: ...

    def tell(self, peer: str, message: handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage) -> None: ...

    def gather(self, action: Gather, block_table: list[int]) -> None:
        self.gathers.append(action)

    def transmit(self, action: Transmit) -> None: ...


def aborted_by_peer(role: PrefillRole) -> None:
    role.hear(handoff_pb2.ReceiverMessage(abort=handoff_pb2.Abort(key=KEY.to_proto())))


@pytest.mark.parametrize(
    "give_up", [lambda role: role.cancel(KEY, "cancelled"), aborted_by_peer, lambda role: role.peer_lost(PEER)]
)
def test_a_prompt_given_up_is_computed_no_further_while_a_gather_still_reads_it(
    give_up: Callable[[PrefillRole], None],
) -> None:
    around, blocks = Surroundings(), BlockManager(16, 4)
    role = PrefillRole(around, around, blocks, num_slots=2, chunk_tokens=8)
    role.admit(Job(KEY, tuple(range(40)), SamplingParams()), PEER)
    role.peer_ready(PEER, 8)
    role.hear(handoff_pb2.ReceiverMessage(reserved=handoff_pb2.Reserved(key=KEY.to_proto())))
    (planned,) = role.plan(8)
    role.absorb(planned, [])
    (gather,) = around.gathers

    give_up(role)

    assert role.plan(8) == []
    assert blocks.num_held == 10, "the gather may still read them"
    role.gathered(gather)
    assert blocks.num_held == 0
