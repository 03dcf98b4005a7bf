"""What a rank does beside its steps: in which order, waiting for what, and with which answers.

The transfer engine here moves nothing: an operation ends when the test says so. Its pairs are real.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rank_bench import NO_KIND, NUM_LAYERS, SOON_S, Bench, FakePair, a_step

from cluster.errors import Corrupted, TransferFailed
from cluster.pb import rank_pb2
from worker.rank import OVERLAP_TOKENS

TRANSFER = rank_pb2.RankReply.KIND_TRANSFER
CORRUPT = rank_pb2.RankReply.KIND_CORRUPT


@contextmanager
def stepping(bench: Bench, num_tokens: int) -> Iterator[threading.Thread]:
    """A step that writes a layer each time `may_write` is released; it has ended when the block ends."""
    bench.runner.is_free = False
    thread = threading.Thread(target=bench.executor.step, args=(a_step(num_tokens),))
    thread.start()
    try:
        yield thread
    finally:
        bench.runner.is_free = True
        bench.runner.may_write.release(NUM_LAYERS)
        thread.join(SOON_S)
        assert not thread.is_alive()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.executor.close()


def test_a_gather_waits_for_its_layers_of_the_step_under_way(bench: Bench) -> None:
    bench.executor.step(a_step(1))
    with stepping(bench, OVERLAP_TOKENS):
        numbers = [bench.gather(2, layer_end=layer, slot=layer) for layer in (1, 3)]
        bench.runner.may_write.release()
        assert bench.replies.of(numbers[0]) == ("", NO_KIND, 100)
        bench.runner.may_write.release(2)
        assert bench.replies.of(numbers[1]) == ("", NO_KIND, 100)
        assert bench.runner.num_written == NUM_LAYERS + 3, "the step ended before its layers were gathered"
    assert bench.engine.written_at["gather 1"] == NUM_LAYERS + 1
    assert bench.engine.written_at["gather 3"] == NUM_LAYERS + 3


def test_a_gather_of_a_step_that_was_not_run_yet_waits_for_it(bench: Bench) -> None:
    number = bench.gather(after_step=2, slot=2)
    bench.executor.step(a_step(OVERLAP_TOKENS))
    ready = bench.gather(after_step=1)
    assert bench.replies.of(ready) == ("", NO_KIND, 100)
    bench.executor.step(a_step(OVERLAP_TOKENS))
    assert bench.replies.of(number) == ("", NO_KIND, 100)
    assert bench.engine.written_at["gather 2"] == 2 * NUM_LAYERS


def test_a_gather_that_must_wait_does_not_hold_up_one_whose_pages_are_written(bench: Bench) -> None:
    bench.executor.step(a_step(1))
    with stepping(bench, OVERLAP_TOKENS):
        waiting = bench.gather(2, slot=2)
        assert bench.replies.of(bench.gather(1, slot=1)) == ("", NO_KIND, 100)
        assert not bench.replies.is_there(waiting)
    bench.replies.of(waiting)
    assert bench.gathered_slots() == [1, 2]


def test_a_short_step_is_gathered_from_once_it_has_ended(bench: Bench) -> None:
    with stepping(bench, OVERLAP_TOKENS - 1):
        number = bench.gather(1, layer_end=1)
        bench.runner.may_write.release(NUM_LAYERS - 1)
    assert bench.replies.of(number) == ("", NO_KIND, 100)
    assert bench.engine.written_at["gather 0"] == NUM_LAYERS


def test_what_landed_is_scattered_after_the_steps_launched_before_it(bench: Bench) -> None:
    bench.opened()
    bench.engine.pairs["e"].may_end.set()
    with stepping(bench, OVERLAP_TOKENS):
        number = bench.receive(after_step=1)
        bench.engine.await_call("receive", "e", 0)
        bench.runner.may_write.release(NUM_LAYERS - 1)
    assert bench.replies.of(number) == ("", NO_KIND, 7)
    assert bench.engine.written_at["scatter"] == NUM_LAYERS


def test_a_pair_whose_peer_stalls_holds_up_no_other(bench: Bench) -> None:
    bench.opened("stalled")
    bench.opened("well")
    stalled = [bench.send(epoch="stalled"), bench.receive(epoch="stalled")]
    bench.engine.pairs["well"].may_end.set()
    well = [bench.send(epoch="well"), bench.receive(epoch="well"), bench.gather(0, epoch="well")]
    assert [bench.replies.of(n) for n in well] == [("", NO_KIND, 0), ("", NO_KIND, 7), ("", NO_KIND, 100)]
    assert not any(bench.replies.is_there(n) for n in stalled)
    bench.engine.pairs["stalled"].may_end.set()
    assert [bench.replies.of(n) for n in stalled] == [("", NO_KIND, 0), ("", NO_KIND, 7)]


def test_operations_are_posted_in_the_order_of_the_log(bench: Bench) -> None:
    bench.opened()
    bench.engine.pairs["e"].may_end.set()
    expected = []
    for slot in range(20):
        number = bench.send(slot) if slot % 3 else bench.receive(slot=slot)
        expected.append(("send" if slot % 3 else "receive", "e", slot))
    bench.replies.of(number)
    assert [call for call in bench.engine.calls if call[0] in ("send", "receive")] == expected


def test_closing_a_pair_does_not_wait_for_its_operations_and_answers_them_all(bench: Bench) -> None:
    bench.opened()
    numbers = [bench.send(0), bench.receive(slot=1), bench.send(2)]
    bench.engine.await_call("send", "e", 2)
    assert bench.replies.of(bench.close()) == ("", NO_KIND, 0)
    assert [bench.replies.of(n)[1] for n in numbers] == [TRANSFER] * 3
    assert bench.replies.of(bench.send())[1] == TRANSFER


def test_a_pair_that_is_closed_while_it_opens_is_given_up(bench: Bench) -> None:
    bench.engine.peers_there.clear()
    opening = bench.open()
    bench.engine.await_call("opening", "e", -1)
    assert bench.replies.of(bench.close()) == ("", NO_KIND, 0)
    assert bench.replies.of(opening)[1] == TRANSFER
    assert not bench.engine.pairs


def test_a_pair_that_is_closed_before_it_began_to_open_does_not_stay_open(bench: Bench) -> None:
    closings: list[int] = []
    really_open = bench.engine.open_pair

    def open_late(pair: FakePair) -> None:
        closings.append(bench.close())
        bench.replies.of(closings[0])
        really_open(pair)

    bench.engine.open_pair = open_late  # type: ignore[method-assign]
    assert bench.replies.of(bench.open())[1] == TRANSFER
    assert closings
    assert not bench.engine.pairs


def test_an_epoch_that_is_open_is_not_opened_again(bench: Bench) -> None:
    bench.opened()
    error, kind, _ = bench.replies.of(bench.open())
    assert "open already" in error
    assert kind == NO_KIND
    assert [call[0] for call in bench.engine.calls] == ["opening"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TransferFailed("gone"), TRANSFER), (Corrupted("damaged"), CORRUPT), (ValueError("slot 9"), NO_KIND)],
)
def test_an_answer_says_what_kind_of_failure_it_was(bench: Bench, error: Exception, kind: int) -> None:
    bench.opened()
    bench.engine.pairs["e"].error = error
    bench.engine.pairs["e"].may_end.set()
    assert bench.replies.of(bench.receive()) == (str(error), kind, 0)
    assert bench.replies.of(bench.send()) == (str(error), kind, 0)


def test_no_thread_outlives_its_pair(bench: Bench) -> None:
    before = threading.active_count()
    threads: set[threading.Thread] = set()
    for cycle in range(1000):
        epoch = bench.opened(f"e{cycle}")
        numbers = [bench.send(0, epoch), bench.receive(slot=1, epoch=epoch)] if cycle % 2 else []
        threads.update(threading.enumerate())
        bench.replies.of(bench.close(epoch))
        for number in numbers:
            bench.replies.of(number)
    for thread in threads:
        if thread.name.startswith(("kv-wait", "kv-close")):
            thread.join(SOON_S)
            assert not thread.is_alive(), thread.name
    assert len([t for t in threads if t.name.startswith("kv-wait")]) == 1000
    assert threading.active_count() <= before + 1  # the last kv-close may be about to end
    assert bench.engine.num_closed == 1000


def test_at_the_end_everything_that_waits_is_answered() -> None:
    bench = Bench()
    bench.opened()
    numbers = [bench.gather(after_step=5), bench.send(), bench.receive(after_step=5, slot=1)]
    bench.engine.await_call("receive", "e", 1)
    bench.executor.close()
    assert all(bench.replies.of(number)[0] for number in numbers)
