"""Workers with different weights: one request's workers have the same, and its whole output comes from these."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest
from candidates import FakeCandidate, request_of
from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, FakeWorker, phase, prompt_logprobs, tokens
from router_harness import ids, refusal, rest, running_router, text_spec
from waiting import until_after
from wired_router import QUEUE_TIMEOUT_S, Client, ManualClock, WiredRouter, admit_of, known, logged, run

from cluster.config.choices import PolicyName
from cluster.crash_record import Crash
from cluster.errors import FailedPrecondition, Unavailable
from cluster.lifecycle import RequestState
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from cluster.step_cost import StepCost, StepSize
from router.routing.fleet import WorkerAddress
from router.routing.load_tracker import Load, PlacementKind
from router.routing.policies import policy_class
from router.routing.policies.interface import RoutingContext

S = RequestState
LONG = 64
COST = StepCost(0.002, 0.0001, 0.0, 0.0001, 0.0)
SEQUENCE = StepSize(num_sequences=1, num_kv_tokens=2000)


def candidates(**revisions: str) -> list[FakeCandidate]:
    return [FakeCandidate(worker_id, COST, weights_revision=revision) for worker_id, revision in revisions.items()]


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_no_policy_pairs_workers_of_different_weights(name: PolicyName) -> None:
    policy = policy_class(name)(RoutingContext())
    prefill, decode = candidates(p0="a", p1="b", p2="b"), candidates(d0="b", d1="a", d2="c")
    revisions = {worker.worker_id: worker.weights_revision for worker in (*prefill, *decode)}
    kinds = set()
    for _ in range(50):
        placement = policy.choose(request_of(2000), prefill, decode)
        kinds.add(placement.kind)
        if placement.prefill_id is not None:
            assert revisions[placement.prefill_id] == revisions[placement.decode_id], placement
        policy.context.loads.add(placement.decode_id, Load(sequences=SEQUENCE, decoding=SEQUENCE, num_tokens=2100))
    assert kinds & {PlacementKind.DISAGGREGATED}, kinds
    only = policy.choose(request_of(2000), candidates(p0="a"), candidates(d0="b"))
    assert (only.prefill_id, only.decode_id, only.kind) == (None, "d0", PlacementKind.LOCAL_NO_PREFILL)


def test_the_best_pair_of_all_weights_wins() -> None:
    policy = policy_class("predicted")(RoutingContext())
    slow = StepCost(0.02, 0.001, 0.0, 0.001, 0.0)
    prefill = [*candidates(p0="a"), FakeCandidate("p1", slow, weights_revision="b")]
    decode = [FakeCandidate("d0", slow, weights_revision="a"), *candidates(d1="b")]
    placement = policy.choose(request_of(2000), prefill, [*decode, *candidates(d2="a")])
    assert (placement.prefill_id, placement.decode_id) == ("p0", "d2")


def router_of(clock: ManualClock, **revisions: str) -> WiredRouter:
    """Workers by id, each with its weights."""
    router = WiredRouter(clock, [], needs_prefill=False)
    add(router, **revisions)
    return router


def add(router: WiredRouter, *, draining: tuple[str, ...] = (), **revisions: str) -> None:
    """Names more workers, which are ready then."""
    router.name([*router.workers, *revisions], draining=draining)
    for worker_id, revision in revisions.items():
        router.workers[worker_id].open(weights_revision=revision)


def decoding(router: WiredRouter, prefill_id: str = "p0", decode_id: str = "d0", text: str = "ab") -> Client:
    """A request that one worker has handed to another, which has sent `text` of its tokens."""
    client = router.submit(max_output_tokens=LONG)
    key, prefill, decode = client.live.key.to_proto(), router.workers[prefill_id], router.workers[decode_id]
    assert admit_of(prefill).key == admit_of(decode).key == key
    prefill.emit(phase(key, PREFILL), logged(key, 0, text[0]), phase(key, TRANSFER))
    decode.emit(phase(key, DECODE), *[logged(key, i, letter) for i, letter in enumerate(text[1:], 1)])
    client.take()
    return client


def ends_on(router: WiredRouter, client: Client, worker_id: str, *, first: int) -> None:
    """The attempt that this worker runs alone ends the request."""
    key = client.live.key.to_proto()
    router.workers[worker_id].emit(phase(key, DECODE), logged(key, first, "z", finish_reason=LENGTH))
    client.take()
    assert client.live.lifecycle.state is S.FINISHED


def test_a_decode_worker_computes_the_prompt_while_no_prefill_worker_has_its_weights() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="a", d0="b")
        client = router.submit()
        assert not router.workers["p0"].take_admits()
        admit = admit_of(router.workers["d0"])
        assert not admit.expect_handoff
        router.workers["d0"].emit(logged(admit.key, 0, "a", finish_reason=LENGTH))
        client.take()
        router.check_idle()

    run(scenario)


def test_an_output_goes_on_with_the_weights_that_it_began_with() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="a", d0="a")
        decoding(router)
        add(router, p1="b", d1="b", d2="a")
        router.workers["d0"].lose()
        assert not router.workers["p1"].take_admits() and not router.workers["d1"].take_admits()
        assert known(admit_of(router.workers["d2"])) == {0: ids("ab")}
        assert [a.decode_peer.worker_id for a in router.workers["p0"].take_admits()] in ([], ["d2"])

    run(scenario)


def test_a_prefill_worker_stands_in_for_the_decode_workers_of_its_own_weights() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="a", d0="a")
        client = decoding(router)
        add(router, d1="b")
        router.workers["d0"].lose()
        assert not router.workers["d1"].take_admits()
        assert known(admit_of(router.workers["p0"])) == {0: ids("ab")}
        ends_on(router, client, "p0", first=2)
        assert not router.workers["d1"].take_admits(), "it was moved to a worker of other weights"
        router.check_idle()

    run(scenario)


def test_without_a_token_a_request_begins_again_with_other_weights() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="a", d0="a")
        client = router.submit()
        add(router, d1="b")
        router.workers["d0"].lose()
        admit = admit_of(router.workers["d1"])
        assert known(admit) == {} and not admit.expect_handoff
        router.workers["d1"].emit(logged(admit.key, 0, "a"), logged(admit.key, 1, "z", finish_reason=LENGTH))
        client.take()
        assert client.live.weights_revision == "b" and client.live.lifecycle.state is S.FINISHED
        router.check_idle()

    run(scenario)


def test_prompt_logprobs_that_a_client_was_sent_bind_a_request_too() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, d0="a", d1="b")
        client = router.submit(prompt_logprobs=0)
        (first,) = [worker for worker in router.workers.values() if worker.take_admits()]
        prompt = client.live.request.prompt_token_ids
        first.emit(prompt_logprobs(client.live.key.to_proto(), 0, prompt, -1.0))
        assert client.live.weights_revision == first.weights_revision and not client.live.num_tokens

    run(scenario)


def test_an_output_whose_weights_are_gone_fails_and_names_them() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="a", d0="a")
        client = decoding(router)
        fresh = router.submit(max_output_tokens=LONG)
        add(router, d1="b")
        router.name(["d0", "d1"])
        router.workers["d0"].lose()
        assert not client.live.is_over, "its worker may come back with the same weights"
        assert fresh.live.key.attempt == 2, "a request without tokens waits for no weights"
        router.name(["d1"])
        assert isinstance(client.live.error, FailedPrecondition) and client.live.error.reason == "WEIGHTS_LOST"
        assert client.live.error.message == (
            "its output began with weights of revision a, and no worker serves these any more: other weights would go "
            "on differently; ask anew; 2 output tokens had been delivered"
        )
        (admit,) = router.workers["d1"].take_admits()
        assert admit.key.request_id == fresh.request_id

    run(scenario)


@pytest.mark.parametrize("revision", ["a", "b"])
def test_who_waits_for_its_weights_goes_on_if_the_worker_comes_back_with_them(revision: str) -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="a", d0="a")
        client = decoding(router)
        add(router, d1="b")
        router.name(["d0", "d1"])
        router.workers["d0"].lose()
        behind = router.submit(max_output_tokens=LONG)
        assert admit_of(router.workers["d1"]).key.request_id == behind.request_id, "who waits is in nobody's way"
        router.workers["d0"].open(weights_revision=revision)
        if revision == "a":
            assert known(admit_of(router.workers["d0"])) == {0: ids("ab")}
            ends_on(router, client, "d0", first=2)
        else:
            assert client.live.error is not None and client.live.error.reason == "WEIGHTS_LOST"

    run(scenario)


def test_who_waits_for_its_weights_does_not_wait_for_ever() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="a", d0="a")
        client = decoding(router)
        add(router, d1="b")
        router.name(["d0", "d1"])
        router.workers["d0"].lose()
        await clock.advance(QUEUE_TIMEOUT_S + 1)
        assert client.live.error is not None and client.live.error.reason == "WEIGHTS_LOST"
        assert router.dispatcher.num_queued == 0

    run(scenario)


def test_while_no_worker_can_serve_nobody_is_told_that_its_weights_are_gone() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="a", d0="a")
        client, d0 = decoding(router), router.workers["d0"]
        router.name([])
        d0.lose()
        assert not client.live.is_over
        await clock.advance(QUEUE_TIMEOUT_S + 1)
        assert isinstance(client.live.error, Unavailable)

    run(scenario)


def test_requests_leave_a_draining_worker_only_for_one_with_its_weights() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="b", d0="b")
        router.dispatcher.fleet.has_served = True
        add(router, p1="a", d1="a")
        router.workers["d0"].is_draining = True
        client = decoding(router, "p1", "d1")
        router.workers["d0"].is_draining = False
        router.name(["p0", "d0", "d1"], draining=["d1"])
        for worker_id in ("p0", "d0"):
            assert not router.workers[worker_id].take_admits()
        add(router, draining=("d1",), d2="a")
        assert known(admit_of(router.workers["d2"])) == {0: ids("ab")}
        (handed,) = [a for a in router.workers["d1"].take_admits() if a.decode_peer.worker_id == "d2"]
        assert known(handed) == {0: ids("ab")} and client.live.weights_revision == "a"

    run(scenario)


def test_a_suspect_runs_apart_on_a_worker_with_its_weights() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="a", d0="a")
        client = decoding(router)
        add(router, d1="b", d2="a")
        d0 = router.workers["d0"]
        d0.crash = Crash(frozenset([client.request_id]), "Fatal Python error: Segmentation fault")
        d0.lose()
        assert not router.workers["d1"].take_admits()
        assert known(admit_of(router.workers["d2"])) == {0: ids("ab")}

    run(scenario)


def test_a_suspect_whose_weights_are_gone_fails_and_holds_up_no_other() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = router_of(clock, p0="a", d0="a")
        client = decoding(router)
        fresh = router.submit(max_output_tokens=LONG)
        router.workers["d0"].take(), router.workers["p0"].take()
        add(router, d1="b")
        router.name(["d0", "d1"])
        d0 = router.workers["d0"]
        d0.crash = Crash(frozenset([client.request_id, fresh.request_id]), "Fatal Python error: Segmentation fault")
        d0.lose()
        assert admit_of(router.workers["d1"]).key.request_id == fresh.request_id
        router.name(["d1"])
        assert client.live.error is not None and client.live.error.reason == "WEIGHTS_LOST"

    run(scenario)


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_who_has_been_sent_nothing_yet_gets_an_answer_of_other_weights(
    tmp_path: Path, is_streaming: bool
) -> None:
    """A call that returns no token before its end begins again."""
    old, new = workers = [FakeWorker(f"decode-{i}", worker_pb2.ROLE_DECODE) for i in range(2)]
    old.weights_revision, new.weights_revision = "a", "b"
    async with running_router(tmp_path, workers, needs_prefill=False) as router:
        dispatcher, begin = router.server.dispatcher, router.generation.GenerateStream
        spec = text_spec()
        if is_streaming:
            call = begin(pb.GenerateStreamRequest(spec=spec))
            whole = asyncio.ensure_future(rest(call))
        else:
            whole = asyncio.ensure_future(router.generation.Generate(pb.GenerateRequest(spec=spec)))
        admit = await old.next_admit()
        (live,) = dispatcher.running
        old.emit(tokens(admit.key, 0, ids("x")))
        await until_after(live, "on_tokens", lambda: live.num_tokens == 1)
        dispatcher.set_workers([WorkerAddress.parse(new.flag)])
        await old.stop()
        if is_streaming:
            error = await refusal(whole)
            assert isinstance(error, FailedPrecondition) and "weights of revision a" in error.message
            return
        again = asyncio.ensure_future(new.next_admit())
        await asyncio.wait([whole, again], return_when=asyncio.FIRST_COMPLETED)
        assert not whole.done(), "it failed although it could begin again"
        admit = await again
        assert not admit.known_tokens
        new.emit(phase(admit.key, DECODE), tokens(admit.key, 0, ids("z"), finish_reason=LENGTH))
        assert [output.text for output in (await whole).outputs] == ["z"]
