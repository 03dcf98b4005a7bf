"""Generations that other routers began: one that is taken over goes on once, whoever asks for it, and however often."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from fake_worker import LENGTH
from router_harness import EOS, MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, ids
from wired_router import ManualClock, WiredRouter, logged, run

from cluster.api_keys import KeyQuota
from cluster.errors import Aborted, NotFound
from cluster.lifecycle import RequestKey, RequestState
from cluster.pb import generation_pb2 as pb
from cluster.pb.journal_pb2 import JournalEntry
from cluster.protocol import spoken
from cluster.state import Claim, MemoryStore, Outcome, StoreAway, Write
from router.api.call import ANYONE, Principal
from router.api.chat_template import ChatTemplate
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer
from router.api.validate import read_prompt, validate
from router.routing.dispatcher import Dispatcher
from router.routing.load_tracker import NOTHING
from router.stream.detokenizer import Detokenizer
from router.stream.journal import Journal, Source
from router.stream.record import entry_of, origin_of
from router.stream.request import LiveRequest
from router.stream.resume import Resumables, ResumeHooks

MODEL = ServedModel("m", VOCAB_SIZE, MAX_MODEL_LEN, 16, (EOS,))
BYTES = Tokenizer(TOKENIZER.to_str().encode(), ChatTemplate({}, {}))
SPEC = pb.GenerationSpec(
    text="hello", sampling=pb.SamplingParams(seed=1), stopping=pb.StoppingCriteria(max_output_tokens=16)
)
GENERATION_ID = "gen-" + 24 * "0"
ASK = pb.GenerationSpec(resume=pb.ResumeFrom(generation_id=GENERATION_ID))


def live_request(
    now: float, first_attempt: int = 1, *, principal: Principal = ANYONE, first_wanted: Sequence[int] = ()
) -> LiveRequest:
    request = validate(SPEC, MODEL, lambda text: tuple(ids(str(text))), try_grammar=lambda _, text: text, fresh_seed=1)
    return LiveRequest(
        GENERATION_ID,
        request,
        [BYTES.new_detokenizer(request.prompt_token_ids)],
        model="m",
        now=now,
        arrival_time_s=1e9,
        is_streaming=True,
        principal=principal,
        may_resume=True,
        first_attempt=first_attempt,
        first_wanted=first_wanted,
    )


class SlowStore(MemoryStore):
    """What it did is known to its caller only when others have run for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.was_taken = asyncio.Event()

    async def take(self, key: str, held: Claim, wanted: Claim, ttl_s: float) -> bool:
        is_taken = await super().take(key, held, wanted, ttl_s)
        self.was_taken.set()
        for _ in range(20):
            await asyncio.sleep(0)
        return is_taken


def resumables(dispatcher: Dispatcher, store: MemoryStore) -> Resumables:
    def revive(
        key: RequestKey, record: JournalEntry, principal: Principal, first_wanted: Sequence[int], is_streaming: bool
    ) -> LiveRequest:
        assert key.request_id == GENERATION_ID and is_streaming
        return live_request(dispatcher.clock(), key.attempt, principal=principal, first_wanted=first_wanted)

    hooks = ResumeHooks(
        dispatcher.clock,
        dispatcher.adopt,
        dispatcher.cancel,
        revive,
        lambda live: [BYTES.new_detokenizer(live.request.prompt_token_ids)],
        dispatcher.fleet.has_lost,
        dispatcher.counters,
    )
    return Resumables(store, hooks, window_s=30.0)


async def leave_behind(store: MemoryStore, text: str = "", protocol: str = "1-1") -> None:
    """A record of a router that is gone, with what it has sent. `protocol`: the versions that it spoke."""
    live = live_request(0.0)
    live.on_tokens(logged(live.key.to_proto(), 0, text).tokens, 0.0)
    data = entry_of(live, origin_of(live, pb.GenerationSpec.FromString(SPEC.SerializeToString())))
    data.origin.protocol = protocol
    await store.write([Write(GENERATION_ID, Claim("gone", 1), 1, data.SerializeToString(), True, 60.0)])


def test_the_record_of_a_text_that_is_filled_in_has_the_tokens_alone() -> None:
    live = live_request(0.0)
    spec = origin_of(live, pb.GenerationSpec(text="hel", suffix="o")).spec
    read = read_prompt(spec, MODEL, lambda prompt: ())
    assert not read.wrong.found and read.token_ids == live.request.prompt_token_ids


def sequences_of(router: WiredRouter, worker_id: str) -> Sequence[str]:
    return [admit.key.request_id for admit in router.workers[worker_id].take_admits()]


def test_two_calls_that_resume_at_once_start_it_once_and_one_reads_it() -> None:
    async def scenario(clock: ManualClock) -> None:
        router, store = WiredRouter(clock, ["d0"], needs_prefill=False), SlowStore()
        await leave_behind(store)
        here = resumables(router.dispatcher, store)
        here.start()
        ask = pb.GenerationSpec(resume=pb.ResumeFrom(generation_id=GENERATION_ID))
        first = asyncio.create_task(here.resume(ask, ANYONE, is_streaming=True))
        await store.was_taken.wait()
        second = asyncio.create_task(here.resume(ask, ANYONE, is_streaming=True))
        readers = [await first, await second]
        with pytest.raises(Aborted):
            readers[0].check()
        readers[1].check()
        assert readers[0].live is readers[1].live
        assert sequences_of(router, "d0") == [GENERATION_ID]
        router.dispatcher.cancel(GENERATION_ID, "by the test")
        assert router.dispatcher.context.loads["d0"] == NOTHING
        await here.stop()

    run(scenario)


def test_what_ends_after_its_client_has_left_is_kept_for_a_window_from_its_end() -> None:
    async def scenario(clock: ManualClock) -> None:
        router, store = WiredRouter(clock, ["d0"], needs_prefill=False), MemoryStore()
        await leave_behind(store)
        here = resumables(router.dispatcher, store)
        here.start()
        reader = await here.resume(ASK, ANYONE, is_streaming=True)
        here.remove(reader)
        await clock.advance(20.0)
        (admit,) = router.workers["d0"].take_admits()
        router.workers["d0"].emit(logged(admit.key, 0, "a", finish_reason=LENGTH))
        assert reader.live.lifecycle.state is RequestState.FINISHED
        await clock.advance(15.0)
        again = await here.resume(ASK, ANYONE, is_streaming=True)
        assert again.live is reader.live
        here.remove(again)
        await clock.advance(31.0)
        with pytest.raises(NotFound):
            await here.resume(ASK, ANYONE, is_streaming=True)
        await here.stop()

    run(scenario)


@pytest.mark.parametrize("protocol", ["", "1-1", "1-2"])
def test_a_record_of_a_router_that_speaks_a_version_of_ours_is_taken_over_and_becomes_ours(protocol: str) -> None:
    async def scenario(clock: ManualClock) -> None:
        router, store = WiredRouter(clock, ["d0"], needs_prefill=False), MemoryStore()
        await leave_behind(store, "ab", protocol)
        here = resumables(router.dispatcher, store)
        here.start()
        reader = await here.resume(ASK, ANYONE, is_streaming=True)
        await here.before_send(reader, reader.take())
        found = await store.read(GENERATION_ID)
        assert found is not None and found.claim.epoch == 2
        assert JournalEntry.FromString(found.entries[0]).origin.protocol == spoken()
        router.dispatcher.cancel(GENERATION_ID, "by the test")
        await here.stop()

    run(scenario)


def test_a_record_of_another_protocol_is_not_found_left_as_it_is_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(clock: ManualClock) -> None:
        router, store = WiredRouter(clock, ["d0"], needs_prefill=False), MemoryStore()
        await leave_behind(store, "ab", "2-3")
        before = await store.read(GENERATION_ID)
        here = resumables(router.dispatcher, store)
        here.start()
        for _ in range(2):
            with pytest.raises(NotFound):
                await here.resume(ASK, ANYONE, is_streaming=True)
        assert not await here.cancel(GENERATION_ID, ANYONE, "by the test")
        await here.stop()
        assert await store.read(GENERATION_ID) == before
        assert router.dispatcher.num_running == 0

    run(scenario)
    why = "the router that wrote it speaks protocol 2 to 3; this router speaks 1: upgrade this router first"
    warned = [record.getMessage() for record in caplog.records if record.name == "router.stream.resume"]
    assert warned == [f"a record in the journal is not read, and left as it is: {why}"]


class Counted:
    """A detokenizer whose tokens are noted."""

    def __init__(self, detokenizer: Detokenizer, read: list[int]) -> None:
        self._detokenizer = detokenizer
        self._read = read
        self.flush = detokenizer.flush

    def push(self, token_ids: Sequence[int]) -> str:
        self._read.extend(token_ids)
        return self._detokenizer.push(token_ids)


def test_what_is_known_is_turned_into_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(clock: ManualClock) -> None:
        router, store = WiredRouter(clock, ["d0"], needs_prefill=False), MemoryStore()
        await leave_behind(store, "aéb")
        read: list[int] = []
        new_detokenizer = BYTES.new_detokenizer
        monkeypatch.setattr(BYTES, "new_detokenizer", lambda prompt: Counted(new_detokenizer(prompt), read))
        here = resumables(router.dispatcher, store)
        here.start()
        ask = pb.GenerationSpec(resume=pb.ResumeFrom(generation_id=GENERATION_ID, next_token_index=2))
        reader = await here.resume(ask, ANYONE, is_streaming=True)
        events = reader.take()
        assert read == ids("aéb"), "each token once"
        (delta,) = [event.delta for event in events if event.HasField("delta")]
        assert (delta.first_token_index, delta.token_count, delta.text) == (2, 2, "éb")
        assert events[0].started.generation_id == GENERATION_ID
        router.dispatcher.cancel(GENERATION_ID, "by the test")
        await here.stop()

    run(scenario)


def test_one_that_is_under_way_here_is_not_taken_up_again() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["d0"], needs_prefill=False)
        router.dispatcher.adopt(live_request(clock(), 65537))
        with pytest.raises(Aborted):
            router.dispatcher.adopt(live_request(clock(), 131073))
        assert sequences_of(router, "d0") == [GENERATION_ID]
        router.dispatcher.cancel(GENERATION_ID, "by the test")
        assert router.dispatcher.context.loads["d0"] == NOTHING

    run(scenario)


def test_a_fault_with_one_request_of_a_lost_worker_does_not_keep_the_others_from_going_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["d0"], needs_prefill=False)
        clients = [router.submit() for _ in range(3)]
        router.name(["d0", "d1"])
        router.workers["d1"].open()
        policy = router.dispatcher._policy
        choose, faults = policy.choose, [RuntimeError("a fault")]

        def choose_badly_once(*args):  # type: ignore[no-untyped-def]
            if faults:
                raise faults.pop()
            return choose(*args)

        monkeypatch.setattr(policy, "choose", choose_badly_once)
        router.workers["d0"].lose()
        states = sorted(client.live.lifecycle.state.name for client in clients)
        assert states.count(RequestState.FAILED.name) == 1
        assert len(router.workers["d1"].take_admits()) == 2
        assert router.dispatcher.num_running == 2

    run(scenario)


def test_one_that_is_taken_up_is_live_for_its_key_until_it_is_over() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["d0"], needs_prefill=False)
        principal = Principal("k", "t", quota=KeyQuota(max_concurrent=1, requests_per_min=1))
        router.dispatcher.adopt(live_request(clock(), 65537, principal=principal))
        assert router.submit(principal=principal).live.lifecycle.state is RequestState.REJECTED
        router.dispatcher.cancel(GENERATION_ID, "by the test")
        later = router.submit(principal=principal)
        assert not later.live.is_over, "it was charged for no request here"

    run(scenario)


def test_one_that_is_taken_up_is_charged_for_what_follows_its_known_tokens() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["d0"], needs_prefill=False)
        principal = Principal("k", "t", quota=KeyQuota(output_tokens_per_min=3))
        live = live_request(clock(), 65537, principal=principal)
        live.on_tokens(logged(live.key.to_proto(), 0, "abc").tokens, clock())
        router.dispatcher.adopt(live)
        d0, key = router.workers["d0"], live.key.to_proto()
        assert not router.submit(principal=principal).live.is_over, "what is known was charged where it was sent"
        d0.emit(logged(key, 3, "def"))
        assert router.submit(principal=principal).live.lifecycle.state is RequestState.REJECTED

    run(scenario)


class FencingStore(MemoryStore):
    """Another router takes every record while it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.is_writing, self.may_answer = asyncio.Event(), asyncio.Event()

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        self.is_writing.set()
        await self.may_answer.wait()
        return [Outcome.FENCED] * len(writes)


async def test_who_waits_for_a_record_goes_on_when_another_router_takes_it() -> None:
    """Also who comes during the write that finds it taken: nothing is written for it any more."""
    store, lost = FencingStore(), list[tuple[str, bool]]()
    journal: Journal[int] = Journal(store, ttl_s=30.0, on_fenced=lambda *one: lost.append(one))
    journal.start()
    journal.open("gen", Source(lambda: 1, lambda stored: b"entry"))
    early = asyncio.create_task(journal.catch_up("gen"))
    await store.is_writing.wait()
    late = asyncio.create_task(journal.catch_up("gen"))
    await asyncio.sleep(0)
    store.may_answer.set()
    async with asyncio.timeout(10):
        assert await asyncio.gather(early, late) == [False, False]
    assert lost == [("gen", False)]
    await journal.stop()


class RefusingStore(MemoryStore):
    """Is away, or full."""

    def __init__(self, *, is_away: bool) -> None:
        super().__init__()
        self._is_away = is_away

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        if self._is_away:
            raise StoreAway("away")
        return [Outcome.FULL] * len(writes)


@pytest.mark.parametrize("is_away", [True, False])
async def test_no_message_waits_for_a_store_that_is_known_to_be_away_or_full(is_away: bool) -> None:
    journal: Journal[int] = Journal(RefusingStore(is_away=is_away), ttl_s=30.0, on_fenced=lambda *lost: None)
    journal.start()
    journal.open("gen", Source(lambda: 1, lambda stored: b"entry"))
    async with asyncio.timeout(10):
        assert not await journal.catch_up("gen"), "the write that finds it out"
    with pytest.raises(StopIteration) as done:
        journal.catch_up("gen").send(None)
    assert done.value.value is False
    await journal.stop()
