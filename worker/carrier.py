"""What the roles ask for beyond this process's memory: hand-off links, pairs between ranks, and KV operations.

Turns a role's wish into a message on a link or a command in the rank log, and a finished command back into the role's
event. A pair whose operation failed is closed alone; the next request opens another. Runs on the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from cluster.pb import handoff_pb2, rank_pb2, worker_pb2
from decode_worker.role import DecodeRole
from kv_transfer.actions import Gather, Land, Transmit
from prefill_worker.role import PrefillRole
from worker.ranks import Ranks

logger = logging.getLogger(__name__)


class Links(Protocol):
    """The speaking side of hand-offs; every method returns at once."""

    def tell_receiver(self, peer: str, message: handoff_pb2.SenderMessage) -> None: ...

    def tell_sender(self, epoch: str, message: handoff_pb2.ReceiverMessage) -> None: ...

    def open_link(self, peer: str, address: str, incarnation: str) -> None: ...

    def close_link(self, peer: str) -> None: ...


class Carrier:
    """Of one worker. `links`, `ranks` and the roles are set before the first event."""

    links: Links
    ranks: Ranks
    prefill: PrefillRole
    decode: DecodeRole

    def __init__(self, stats: worker_pb2.WorkerStats) -> None:
        self._stats = stats
        self._epoch_of: dict[str, str] = {}
        """Pair epoch of each peer; on the receiving side the peer's name is the epoch."""
        self._on_done: dict[int, Callable[[str, int], None]] = {}

    # Events

    def command_done(self, number: int, error: str, size_bytes: int) -> None:
        """Every rank has carried out a command of the log."""
        self._on_done.pop(number)(error, size_bytes)

    def link_up(self, peer: str, hello: handoff_pb2.ReceiverHello) -> None:
        """A decode worker has answered: this worker sends."""
        pair = rank_pb2.OpenPair(
            pair_epoch=hello.pair_epoch, store_address=hello.store_address, is_sender=True, remote=hello.layout
        )
        self._open_pair(peer, pair, lambda: self.prefill.peer_ready(peer, hello.chunk_tokens))

    def link_heard(self, message: handoff_pb2.ReceiverMessage) -> None:
        self.prefill.hear(message)

    def link_down(self, peer: str) -> None:
        self._close_pair(peer)
        self.prefill.peer_lost(peer)

    def peer_up(self, epoch: str, store_address: str, hello: handoff_pb2.SenderHello) -> None:
        """A prefill worker has called: this worker receives."""
        pair = rank_pb2.OpenPair(pair_epoch=epoch, store_address=store_address, is_sender=False, remote=hello.layout)
        self._open_pair(epoch, pair, lambda: self.decode.peer_ready(epoch))

    def peer_heard(self, epoch: str, message: handoff_pb2.SenderMessage) -> None:
        self.decode.hear(epoch, message)

    def peer_down(self, epoch: str) -> None:
        self._close_pair(epoch)
        self.decode.peer_lost(epoch)

    # Wishes of the roles

    def tell(self, peer: str, message: handoff_pb2.SenderMessage | handoff_pb2.ReceiverMessage) -> None:
        if isinstance(message, handoff_pb2.SenderMessage):
            self.links.tell_receiver(peer, message)
        else:
            self.links.tell_sender(peer, message)

    def gather(self, action: Gather, block_table: list[int]) -> None:
        def done(error: str, size_bytes: int) -> None:
            self._stats.kv_bytes_sent += size_bytes
            self.prefill.gathered(action)
            self._retire_on(error, action.peer)

        self._issue(rank_pb2.RankCommand(gather=self._pages_of(action, block_table)), done)

    def transmit(self, action: Transmit) -> None:
        command = rank_pb2.Send(
            pair_epoch=self._epoch_of.get(action.peer, ""), slot=action.slot, num_tokens=action.num_tokens
        )

        def done(error: str, _: int) -> None:
            self.prefill.sent(action)
            self._retire_on(error, action.peer)

        self._issue(rank_pb2.RankCommand(send=command), done)

    def land(self, action: Land, block_table: list[int]) -> None:
        def done(error: str, size_bytes: int) -> None:
            self._stats.kv_bytes_received += size_bytes
            self.decode.landed(action, error)
            self._retire_on(error, action.peer)

        self._issue(rank_pb2.RankCommand(receive=self._pages_of(action, block_table)), done)

    def _pages_of(self, action: Gather | Land, block_table: list[int]) -> rank_pb2.PageRange:
        return rank_pb2.PageRange(
            pair_epoch=self._epoch_of.get(action.peer, ""),
            slot=action.slot,
            token_start=action.token_start,
            token_end=action.token_end,
            block_table=block_table,
            after_step=self.ranks.last_step,
        )

    def _open_pair(self, peer: str, pair: rank_pb2.OpenPair, ready: Callable[[], None]) -> None:
        def opened(error: str, _: int) -> None:
            if error:
                logger.warning("pair %s with %s did not open: %s", pair.pair_epoch, peer, error)
                self.links.close_link(peer)
            elif self._epoch_of.get(peer) == pair.pair_epoch:
                ready()

        self._epoch_of[peer] = pair.pair_epoch
        self._issue(rank_pb2.RankCommand(open_pair=pair), opened)

    def _close_pair(self, peer: str) -> None:
        epoch = self._epoch_of.pop(peer, None)
        if epoch is not None:
            command = rank_pb2.RankCommand(close_pair=rank_pb2.ClosePair(pair_epoch=epoch))
            self._issue(command, lambda error, _: None)

    def _retire_on(self, error: str, peer: str) -> None:
        if error:
            self.links.close_link(peer)

    def _issue(self, command: rank_pb2.RankCommand, done: Callable[[str, int], None]) -> None:
        self._on_done[self.ranks.issue(command)] = done
