"""Which step and layer a rank has come to, and on a GPU the event that stands for it."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from cluster.errors import Cancelled
from worker.rank import AHEAD_LAYERS, StepProgress

SOON_S = 10.0


def numbered() -> Any:
    """A progress whose events are the numbers 1, 2, 3.. in the order in which they were left."""
    counter = itertools.count(1)
    return StepProgress(lambda: next(counter))  # type: ignore[arg-type, return-value]


def run_long_step(progress: StepProgress, num_layers: int = 3) -> None:
    for layer in range(1, num_layers + 1):
        progress.layer_done(layer)
    progress.step_done()


def test_layers_count_for_the_step_under_way_only() -> None:
    progress = StepProgress()
    progress.step_done()
    progress.layer_done(1)
    progress.layer_done(2)
    assert progress.has_written(1, 99)
    assert progress.has_written(2, 2)
    assert not progress.has_written(2, 3)
    assert not progress.has_written(3, 1)
    progress.step_done()
    assert progress.has_written(2, 3)
    assert not progress.has_written(3, 1)


def test_a_layer_of_the_step_under_way_is_stood_for_by_its_own_event() -> None:
    progress = numbered()
    progress.step_done()  # 1
    progress.layer_done(1)  # 2
    progress.layer_done(2)  # 3
    assert [progress.event_of(2, layer) for layer in (1, 2)] == [2, 3]
    assert progress.event_of(1, 2) == 1


def test_a_layer_keeps_its_event_when_its_step_has_ended() -> None:
    """A GPU is far behind the thread that queues its work: waiting for the step's end would overlap nothing."""
    progress = numbered()
    run_long_step(progress)  # layers 1, 2, 3; step 4
    assert [progress.event_of(1, layer) for layer in (1, 2, 3)] == [1, 2, 3]
    progress.step_done()  # 5: a short step, which tells of no layers
    assert progress.event_of(2, 1) == 5
    run_long_step(progress)  # layers 6, 7, 8; step 9
    assert progress.event_of(3, 2) == 7
    assert progress.event_of(2, 2) == 5, "its own, though a later step is on its way"


def test_a_step_that_is_long_over_is_stood_for_by_a_later_one() -> None:
    progress = numbered()
    for _ in range(10):
        progress.step_done()
    assert progress.event_of_step(10) == 10
    assert progress.event_of_step(8) == 8
    assert 1 <= progress.event_of_step(1) <= 10  # type: ignore[operator]


def test_a_gather_is_launched_some_layers_before_the_one_that_it_waits_for() -> None:
    progress = numbered()
    run_long_step(progress, num_layers=8)  # layers 1 to 8; step 9
    assert progress.event_ahead(1, 8) == 8 - AHEAD_LAYERS
    assert progress.event_ahead(1, AHEAD_LAYERS) is None, "there is no layer so early"
    progress.step_done()
    assert progress.event_ahead(2, 8) is None, "nobody has told of its layers"


def test_where_all_is_done_when_it_is_told_there_is_nothing_to_wait_for() -> None:
    progress = StepProgress()
    run_long_step(progress)
    assert progress.event_of(1, 1) is None


@pytest.mark.parametrize("is_closed_first", [True, False])
def test_the_end_ends_every_wait(is_closed_first: bool) -> None:
    progress, raised = StepProgress(), threading.Event()

    def wait() -> None:
        with pytest.raises(Cancelled):
            progress.wait_for_steps(1)
        raised.set()

    thread = threading.Thread(target=wait)
    if is_closed_first:
        progress.close()
    thread.start()
    progress.close()
    assert raised.wait(SOON_S)
    thread.join(SOON_S)
