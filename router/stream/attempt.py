"""One attempt at a request: where it runs, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.pb import worker_pb2
from cluster.request_key import RequestKey
from router.routing.load_tracker import Charge, Placement
from router.routing.worker_client import WorkerClient


@dataclass(eq=False)
class Attempt:
    """One attempt at a request: where it runs, what it holds there, and how it ended if another attempt followed.

    Instants are on the router's clock.
    """

    key: RequestKey
    placement: Placement
    placed_at: float
    charge: Charge
    prefill: WorkerClient | None
    """None: the decode worker computes the prompt. After a move: the worker that decoded before."""
    workers: list[WorkerClient]
    """The workers that hold something for it: at first both, then the decode worker."""
    is_move: bool = False
    """The request was moved here while it decoded."""
    num_prefilled_outputs: int = 0
    """Output tokens that are prefilled with the prompt: the prefill worker sends the next one."""
    ended_at: float | None = None
    """None: no other attempt followed."""
    why: str = ""
    """What ended it."""
    has_failed: bool = False
    """It ended, and not because the request was moved on purpose."""

    def cancel(self, sequence_index: int | None = None, *, by: WorkerClient | None = None) -> None:
        """Sends a cancel of the request, or of one of its sequences, to each of its workers except `by`."""
        command = worker_pb2.Command(cancel=worker_pb2.Cancel(key=self.key.to_proto(), sequence_index=sequence_index))
        for worker in self.workers:
            if worker is not by:
                worker.send(command)
