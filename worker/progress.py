"""How far a rank's steps have come, down to the layer, and who waits for it.

Compute says what it has written; the KV threads wait for what they read. Steps are counted from 1 in the order in which
they run. Layers are told of long steps only: a short one ends about as soon as its first layers do.

On a GPU "written" means queued on the compute stream: each layer and each step then leaves an event there, and who
waited here makes its own stream wait for that event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from cluster.errors import Cancelled

T = TypeVar("T")


class StepProgress:
    """Of one rank. `leave_event` leaves an event on the stream of the thread that calls it; None where all is done
    when it is told."""

    def __init__(self, leave_event: Callable[[], torch.cuda.Event] | None = None) -> None:
        self._leave_event = leave_event
        self._changed = threading.Condition()
        self._num_steps_done = 0
        self._num_layers_done = 0
        self._layer_events: list[torch.cuda.Event] = []
        self._layered_step = 0  # the step that the layer events are of
        self._step_event: torch.cuda.Event | None = None
        self._is_closed = False

    def layer_done(self, num_layers: int) -> None:
        """The step under way has written the KV of its first `num_layers` layers."""
        event = self._leave_event() if self._leave_event is not None else None
        with self._changed:
            if num_layers == 1:
                self._layer_events.clear()
                self._layered_step = self._num_steps_done + 1
            if event is not None:
                self._layer_events.append(event)
            self._num_layers_done = num_layers
            self._changed.notify_all()

    def step_done(self) -> None:
        event = self._leave_event() if self._leave_event is not None else None
        with self._changed:
            self._step_event = event
            self._num_steps_done += 1
            self._num_layers_done = 0
            self._changed.notify_all()

    def has_written(self, num_steps: int, num_layers: int) -> bool:
        """Whether `num_steps` steps are done, or all but the last, which has written `num_layers` layers."""
        ahead = num_steps - self._num_steps_done
        return ahead <= 0 or (ahead == 1 and num_layers <= self._num_layers_done)

    def event_of(self, num_steps: int, num_layers: int) -> torch.cuda.Event | None:
        """What a GPU stream must wait for before it reads what `has_written`; None on the CPU."""
        with self._changed:
            if num_steps == self._layered_step and self._layer_events:
                return self._layer_events[num_layers - 1]
            return self._step_event

    def wait_for_steps(self, num_steps: int) -> None:
        """Until so many steps are done. Raises Cancelled when the rank ends."""
        self.wait_for(lambda: num_steps <= self._num_steps_done or None)

    def wait_for(self, condition: Callable[[], T | None]) -> T:
        """Until `condition` gives something; it is asked again at every change. Raises Cancelled when the rank ends."""
        with self._changed:
            while (found := condition()) is None:
                if self._is_closed:
                    raise Cancelled("this rank is stopping")
                self._changed.wait()
            return found

    def notify(self, change: Callable[[], None]) -> None:
        """Makes a change that a waiting condition looks at."""
        with self._changed:
            change()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends every wait, also those to come."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def leave_cuda_event() -> torch.cuda.Event:
    """On the current stream of the current device."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
