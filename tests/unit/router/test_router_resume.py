"""A client that left and comes back: it gets the rest, once, from the same router."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from author import ALONE, Author, Reading, again, resumable
from fake_worker import failed
from router_harness import ids, refusal, running_router, text_spec

from cluster import rpc
from cluster.api_keys import ApiKey, digest_of, render_keys
from cluster.errors import Aborted, Cancelled, InvalidRequest, NotFound, OutOfRange, Unavailable
from cluster.pb import admin_pb2, worker_pb2
from cluster.pb import generation_pb2 as pb
from cluster.state import MemoryStore, Outcome, Write
from router.api.call import Principal
from router.routing.dispatcher import Dispatcher
from router.stream import resume

pytestmark = pytest.mark.asyncio
CANCELLED, NO_LIMIT = pb.FINISH_REASON_CANCELLED, 1000


@pytest.mark.parametrize("stop", [(), ("END",)], ids=["", "stop strings"])
@pytest.mark.parametrize("here", [3, NO_LIMIT], ids=["while it runs", "when it has ended"])
async def test_the_rest_follows_from_every_token(tmp_path: Path, stop: tuple[str, ...], here: int) -> None:
    author = Author("aéb🎉c ENDx")
    async with running_router(tmp_path, [author.worker], **ALONE) as router:
        undisturbed = await Reading.start(router, resumable(stop=stop)).to_the_end()
        length = len(undisturbed.tokens[0])
        texts = {}
        for index in range(length + 1):
            author.limit = here
            first = Reading.start(router, resumable(stop=stop))
            await first.until_tokens(min(here, length))
            await first.leave()
            rest = Reading.start(router, again(first.generation_id, index))
            author.finish()
            await rest.to_the_end()
            texts[index] = rest.texts.get(0, "")
            assert rest.generation_id == first.generation_id
            assert rest.tokens.get(0, []) == undisturbed.tokens[0][index:]
            assert rest.logprobs.get(0, []) == undisturbed.logprobs[0][index:]
            assert rest.first.get(0, index) == index
            assert rest.ends == undisturbed.ends
            assert rest.completed is not None and rest.completed.usage == undisturbed.completed.usage  # type: ignore[union-attr]
    assert texts[0] == undisturbed.texts[0]
    assert all(undisturbed.texts[0].endswith(text) for text in texts.values())


async def test_each_of_several_sequences_is_told_from_the_index_on(tmp_path: Path) -> None:
    author = Author("abcdef", "xy", limit=2)
    async with running_router(tmp_path, [author.worker], **ALONE) as router:
        first = Reading.start(router, resumable(2))
        await first.until_tokens(4)
        await first.leave()
        rest = Reading.start(router, again(first.generation_id, 1))
        author.finish()
        await rest.to_the_end()
        late = await Reading.start(router, again(first.generation_id, 4)).to_the_end()
    assert rest.texts == {0: "bcdef", 1: "y"} and rest.first == {0: 1, 1: 1}
    assert late.texts == {0: "ef"} and late.ends == rest.ends, "one that ended before the index tells its end alone"


async def test_unary_generate_brings_the_rest_whole(tmp_path: Path) -> None:
    author = Author("hello world", limit=4)
    async with running_router(tmp_path, [author.worker], **ALONE) as router:
        first = Reading.start(router, resumable())
        await first.until_tokens(4)
        await first.leave()
        call = router.generation.Generate(pb.GenerateRequest(spec=again(first.generation_id, 0)))
        author.finish()
        answer = await call
        with pytest.raises(grpc.RpcError) as refused:
            await router.generation.Generate(pb.GenerateRequest(spec=resumable()))
    assert (answer.outputs[0].text, answer.outputs[0].token_count) == ("hello world", 11)
    assert answer.generation_id == first.generation_id and answer.usage.completion_tokens == 11
    assert isinstance(rpc.from_rpc_error(refused.value), InvalidRequest), "nobody could come back to it"


async def test_one_that_may_not_be_resumed_ends_with_its_client(tmp_path: Path) -> None:
    author = Author("hello", limit=2)
    async with running_router(tmp_path, [author.worker], **ALONE) as router:
        spec = resumable()
        spec.ClearField("resume")
        first = Reading.start(router, spec)
        await first.until_tokens(2)
        await first.leave()
        await author.worker.next_cancel()
        assert isinstance(await refusal(Reading.start(router, again(first.generation_id, 2)).to_the_end()), NotFound)


async def test_nobody_came_back_in_time_so_it_is_freed(tmp_path: Path) -> None:
    author = Author("hello", limit=2)
    async with running_router(tmp_path, [author.worker], resume_window_s=0.05, **ALONE) as router:
        first = Reading.start(router, resumable())
        await first.until_tokens(2)
        await first.leave()
        await author.worker.next_cancel()
        assert isinstance(await refusal(Reading.start(router, again(first.generation_id, 2)).to_the_end()), NotFound)
        status = await router.admin.GetStatus(admin_pb2.GetStatusRequest())
        dispatcher: Dispatcher = router.server.dispatcher
    assert dispatcher.counters.orphaned == status.router.num_orphaned == 1
    assert not author.worker.cancels[0].HasField("sequence_index")


async def test_a_tenant_that_leaves_many_behind_loses_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MOST_UNREAD", 2)
    file = tmp_path / "keys.yaml"
    file.write_text(render_keys([ApiKey(name, digest_of(name), name, ("generate",)) for name in ("alice", "bob")]))
    author = Author("hello", limit=2)
    async with running_router(tmp_path / "model", [author.worker], keys_file=str(file), **ALONE) as router:

        async def begin_and_leave(name: str) -> str:
            request = pb.GenerateStreamRequest(spec=resumable())
            call = router.generation.GenerateStream(request, metadata=(("authorization", f"Bearer {name}"),))
            started = await call.read()
            call.cancel()
            return str(started.started.generation_id)

        first, of_bob, _ = [await begin_and_leave(name) for name in ("alice", "bob", "bob")]
        assert (await author.worker.next_cancel()).key.request_id == of_bob
        request = pb.CancelGenerationRequest(generation_ids=[first, of_bob])
        answer = await router.generation.CancelGeneration(request, metadata=(("authorization", "Bearer alice"),))
        assert (list(answer.cancelled_ids), list(answer.unknown_ids)) == ([first], [of_bob])


async def test_a_second_client_takes_the_stream_over(tmp_path: Path) -> None:
    author = Author("hello world", limit=3)
    async with running_router(tmp_path, [author.worker], **ALONE) as router:
        first = Reading.start(router, resumable())
        await first.until_tokens(3)
        second = Reading.start(router, again(first.generation_id, 1))
        await second.until_tokens(2)
        error = await refusal(first.to_the_end())
        author.finish()
        await second.to_the_end()
        assert router.server.dispatcher.counters.cancelled == 0
    assert isinstance(error, Aborted) and error.reason == "TAKEN_OVER"
    assert second.texts == {0: "ello world"}


async def test_cancel_ends_it_at_once_with_or_without_its_client(tmp_path: Path) -> None:
    author = Author("hello", limit=2)
    async with running_router(tmp_path, [author.worker], **ALONE) as router:
        for is_there in (True, False):
            first = Reading.start(router, resumable())
            await first.until_tokens(2)
            if not is_there:
                await first.leave()
            request = pb.CancelGenerationRequest(generation_ids=[first.generation_id])
            answer = await router.generation.CancelGeneration(request)
            assert list(answer.cancelled_ids) == [first.generation_id]
            assert (await author.worker.next_cancel()).key.request_id == first.generation_id
            if is_there:
                assert isinstance(await refusal(first.to_the_end()), Cancelled)
            resumed = Reading.start(router, again(first.generation_id, 0))
            assert isinstance(await refusal(resumed.to_the_end()), NotFound)
        assert router.server.dispatcher.counters.orphaned == 0


async def test_what_cannot_be_resumed_is_refused_by_its_reason(tmp_path: Path) -> None:
    author = Author("hello")
    async with running_router(tmp_path, [author.worker], **ALONE) as router:
        done = await Reading.start(router, resumable()).to_the_end()
        known = done.generation_id
        for unknown in ("gen-" + "0" * 24, "x" * 5000, "../../etc"):
            error = await refusal(Reading.start(router, again(unknown, 0)).to_the_end())
            assert isinstance(error, NotFound) and len(error.message) < 600
        too_far = await refusal(Reading.start(router, again(known, 6)).to_the_end())
        assert isinstance(too_far, OutOfRange) and "at most 5" in too_far.message
        other = resumable(stop=("x",))
        other.resume.generation_id = known
        assert isinstance(await refusal(Reading.start(router, other).to_the_end()), InvalidRequest)
        same = resumable(request_id="another name for it")
        same.resume.generation_id, same.resume.next_token_index = known, 4
        assert (await Reading.start(router, same).to_the_end()).texts == {0: "o"}
        with pytest.raises(NotFound):
            stranger = Principal(key_id="k", tenant="another")
            await router.server.generation.resumables.resume(again(known, 0), stranger, is_streaming=True)


async def test_one_that_failed_for_want_of_workers_may_be_resumed(tmp_path: Path) -> None:
    author = Author("hello", limit=2)
    async with running_router(tmp_path, [author.worker], **ALONE) as router:
        first = Reading.start(router, resumable())
        await first.until_tokens(2)
        author.limit = 0
        for _ in range(3):
            key = author.worker.admits[-1].key
            author.worker.emit(failed(key, worker_pb2.Failed.REASON_PEER_LOST))
            if key.attempt < 3:
                while author.worker.admits[-1].key == key:
                    await author.worker.next_admit()
        assert isinstance(await refusal(first.to_the_end()), Unavailable)
        author.limit = 5
        rest = await Reading.start(router, again(first.generation_id, 1)).to_the_end()
    assert rest.texts == {0: "ello"}
    assert [list(known.token_ids) for known in author.worker.admits[-1].known_tokens] == [ids("he")]


async def test_a_prompts_logprobs_are_told_again(tmp_path: Path) -> None:
    from fake_worker import DECODE, LENGTH, PREFILL, FakeWorker, phase, prompt_logprobs, tokens

    worker = FakeWorker("decode-0", worker_pb2.ROLE_DECODE)
    async with running_router(tmp_path, [worker], **ALONE) as router:
        spec = text_spec("hi", output=pb.OutputOptions(prompt_logprobs=0), resume=pb.ResumeFrom())
        call = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec))
        key = (await worker.next_admit()).key
        told = prompt_logprobs(key, 0, ids("hi"), -2.0)
        worker.emit(phase(key, PREFILL), told, phase(key, DECODE), tokens(key, 0, ids("a"), finish_reason=LENGTH))
        events = [event async for event in call]
        generation_id = next(e.started.generation_id for e in events if e.HasField("started"))
        events += await router.stream(again(generation_id, 1))
    started = [event.started for event in events if event.HasField("started")]
    assert len(started) == 2 and started[0] == started[1] and len(started[0].prompt_logprobs) == 2


class CountingStore(MemoryStore):
    num_writes = 0

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        self.num_writes += len(writes)
        return await super().write(writes)


async def test_one_that_is_refused_at_once_is_told_so_and_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    author, store = Author("hello"), CountingStore()
    async with running_router(tmp_path, [author.worker], store=store, **ALONE) as router:
        dispatcher = router.server.dispatcher
        monkeypatch.setattr(dispatcher, "refuse_early", lambda ask: None)
        monkeypatch.setattr(dispatcher.waiting, "is_closed", True)
        assert isinstance(await refusal(Reading.start(router, resumable()).to_the_end()), Unavailable)
        assert store.num_writes == 0
        monkeypatch.setattr(dispatcher.waiting, "is_closed", False)
        await Reading.start(router, resumable()).to_the_end()
        assert store.num_writes > 0
