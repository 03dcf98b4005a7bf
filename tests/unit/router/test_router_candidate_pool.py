"""The workers that may get new work are kept as they change, and are those that a look at all of them would find."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from candidates import FakeCandidate
from wired_router import ManualClock, WiredRouter, run

from cluster.pb import worker_pb2
from cluster.step_cost import StepCost
from router.routing.candidate_pool import MOST_CHANGED, CandidatePool
from router.routing.fleet import DECODE, PREFILL
from router.routing.migration import why_emptied
from router.routing.worker_client import Speed, WorkerClient

WORKERS = [FakeCandidate(f"w{i:02}", kv_tokens=10 * i, max_num_seqs=i, weights_revision="ab"[i % 2]) for i in range(9)]


def test_a_pool_is_in_the_order_of_ids_and_knows_sums_and_revisions() -> None:
    pool = CandidatePool(reversed(WORKERS))
    assert list(pool) == WORKERS and len(pool) == 9 and pool[0] is WORKERS[0] and pool[-2:] == WORKERS[-2:]
    assert (pool.kv_tokens, pool.max_num_seqs, pool.num_sized) == (360, 36, 8)
    assert pool.revisions == ["a", "b"] and list(pool.of_revision("b")) == WORKERS[1::2]
    assert not pool.of_revision("c") and pool.of_revision("b").of_revision("b") is pool.of_revision("b")
    larger = replace(WORKERS[3], kv_tokens=1030, weights_revision="a")
    pool.add(larger)
    assert pool.kv_tokens == 1360 and larger in pool.of_revision("a") and larger not in pool.of_revision("b")
    assert WORKERS[3] not in pool and WORKERS[4] in pool and pool.get("w04") is WORKERS[4] and pool.get("w99") is None
    for worker in (*WORKERS, *WORKERS):
        pool.discard(worker)
    assert (len(pool), pool.kv_tokens, pool.max_num_seqs, pool.num_sized, pool.revisions) == (0, 0, 0, 0, [])


def test_after_an_id_comes_the_next_worker_and_after_the_last_one_the_first() -> None:
    pool = CandidatePool(WORKERS[::3])
    assert [pool.after(i).worker_id for i in ("", "w00", "w02", "w05", "w06", "w07")] == [
        "w00", "w03", "w03", "w06", "w00", "w00",
    ]  # fmt: skip


@pytest.mark.parametrize("num_workers", [3, MOST_CHANGED + 5])
def test_a_ranking_follows_what_is_touched_and_who_comes_and_goes(num_workers: int) -> None:
    draw, keys, looked = random.Random(0), dict[str, int](), list[str]()

    def key(worker: FakeCandidate) -> int:
        looked.append(worker.worker_id)
        return keys.get(worker.worker_id, 0)

    everyone = [FakeCandidate(f"w{i:02}", weights_revision="ab"[i % 2]) for i in range(num_workers)]
    pool, here = CandidatePool(everyone), set(everyone)
    for _ in range(300):
        worker = draw.choice(everyone)
        if draw.random() < 0.2:
            (pool.discard if worker in here else pool.add)(worker)
            here ^= {worker}
        else:
            keys[worker.worker_id] = draw.randrange(5)
            pool.touch(worker.worker_id)
        if draw.random() < 0.3:
            looked.clear()
            for some in (pool, pool.of_revision("a")):
                wanted = sorted(
                    (w for w in here if some is pool or w.weights_revision == "a"), key=lambda w: w.worker_id
                )
                assert list(some.ranked(key)) == sorted(wanted, key=lambda w: keys.get(w.worker_id, 0))
    pool.add(everyone[0])
    list(pool.ranked(key))
    looked.clear()
    list(pool.ranked(key))
    assert not looked, "nobody has changed"
    pool.touch("w00")
    list(pool.ranked(key))
    assert looked == ["w00"]


def test_whatever_happens_to_workers_the_fleet_lists_those_that_may_get_work() -> None:
    async def scenario(clock: ManualClock) -> None:
        router, draw = WiredRouter(clock, ["p0", "p1", "p2", "d0", "d1", "d2"]), random.Random(1)
        fleet = router.dispatcher.fleet
        for _ in range(400):
            worker = draw.choice(list(router.workers.values()))
            what = draw.randrange(8)
            if what == 0:
                worker.lose()
            elif what == 1:
                worker.open(weights_revision=draw.choice("ab"), num_blocks=draw.randrange(9, 99))
            elif what == 2:
                worker.speed = draw.choice(list(Speed))
            elif what == 3:
                worker.is_draining = not worker.is_draining
            elif what == 4:
                worker.is_suspect = not worker.is_suspect
            elif what == 5:
                worker.is_reserved = not worker.is_reserved
            elif what == 6:
                worker.role = DECODE if worker.role == PREFILL else PREFILL
            else:
                router.name([i for i in ("p0", "p1", "p2", "d0", "d1", "d2") if draw.random() < 0.8] or ["p0"])
            for role in (PREFILL, DECODE):
                able = [w for w in fleet if w.role == role and w.can_take_work]
                usual = [w for w in able if w.speed is not Speed.SLOW] or able
                assert list(fleet.ready(role)) == usual
                assert fleet.ready(role).kv_tokens == sum(w.kv_tokens for w in usual)
                for revision in "ab":
                    wanted = [w for w in usual if w.weights_revision == revision]
                    assert list(fleet.ready(role).of_revision(revision)) == wanted

    run(scenario)


def test_a_worker_on_probation_gets_one_request_at_a_time() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["d0", "d1"], needs_prefill=False)
        router.workers["d0"].speed = Speed.PROBED
        clients = [router.submit() for _ in range(4)]
        placed = [len(router.workers[i].take_admits()) for i in ("d0", "d1")]
        assert placed == [1, 3]
        for client in clients:
            router.dispatcher.cancel(client.request_id, "enough")
        assert [w.worker_id for w in router.dispatcher.fleet.ready(DECODE)] == ["d0", "d1"]

    run(scenario)


def test_only_workers_that_have_changed_are_looked_at_for_requests_that_should_move() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        dispatcher = router.dispatcher
        router.submit()
        assert not dispatcher.fleet.take_changed(), "all were looked at"
        router.workers["d1"].is_draining = True
        assert list(dispatcher.fleet.take_changed()) == ["d1"] and why_emptied(router.workers["d1"])
        router.workers["d1"].emit(worker_pb2.Event(stats=worker_pb2.WorkerStats()))
        assert not dispatcher.fleet.take_changed()

    run(scenario)


def test_what_workers_report_of_their_steps_is_in_the_pools_at_once() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["d0", "d1"])
        decode = router.dispatcher.fleet.candidates()[1]
        assert next(decode.ranked(fixed_s)).worker_id == "d0"
        for worker_id, step_s in (("d0", 0.5), ("d1", 0.25)):
            cost = worker_pb2.StepCost(fixed_s=step_s, sequence_s=0.5)
            router.workers[worker_id].emit(worker_pb2.Event(stats=worker_pb2.WorkerStats(step_cost=cost)))
        assert next(decode.ranked(fixed_s)).worker_id == "d1"
        usual = [pool.usual_cost.value for pool in (decode, decode.of_revision(""))]
        assert usual == [StepCost(0.375, 0.0, 0.0, 0.5, 0.0)] * 2
        router.workers["d1"].emit(worker_pb2.Event(stats=worker_pb2.WorkerStats()))
        assert decode.usual_cost.value == router.workers["d0"].step_cost

    def fixed_s(worker: WorkerClient) -> float:
        return 0.0 if worker.step_cost is None else worker.step_cost.fixed_s

    run(scenario)
