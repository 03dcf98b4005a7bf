"""The public API over real sockets and two fake workers: what a client sees from the first message to the last."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, STOP, TRANSFER, pair, phase, tokens
from router_harness import EOS, MAX_MODEL_LEN, VOCAB_SIZE, ids, kinds, running_router, text_of, text_spec

from cluster.pb import admin_pb2, worker_pb2
from cluster.pb import generation_pb2 as pb

pytestmark = pytest.mark.asyncio


async def test_a_stream_brings_started_deltas_end_and_completed_in_order(tmp_path: Path) -> None:
    async with running_router(tmp_path, pair(lambda _: [ids("world!")])) as router:
        spec = text_spec("hello", output=pb.OutputOptions(token_ids=True, include_timing=True))
        events = await router.stream(spec)
    order = kinds(events)
    assert order[0] == "started" and order[-2:] == ["sequence_end", "completed"]
    assert set(order[1:-2]) == {"delta"}
    assert text_of(events) == "world!"
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == ids("world!")
    position = 0
    for delta in deltas:
        assert delta.first_token_index == position and delta.token_count == len(delta.token_ids)
        position += delta.token_count
    end, completed = events[-2].sequence_end, events[-1].completed
    assert (end.finish_reason, end.token_count) == (LENGTH, 6)
    assert (completed.usage.prompt_tokens, completed.usage.completion_tokens) == (5, 6)
    assert completed.timing.placement == "disaggregated: prefill-0 -> decode-0, least work"
    first = completed.timing.time_to_first_token.ToNanoseconds()
    assert 0 < completed.timing.queue.ToNanoseconds() <= first


async def test_unary_generate_merges_each_sequence_into_one_output(tmp_path: Path) -> None:
    async with running_router(tmp_path, pair(lambda _: [ids("one"), ids("second")])) as router:
        spec = text_spec(sampling=pb.SamplingParams(n=2, seed=7))
        response = await router.generation.Generate(pb.GenerateRequest(spec=spec))
    assert [(output.index, output.text, output.token_count) for output in response.outputs] == [
        (0, "one", 3),
        (1, "second", 6),
    ]
    assert sorted(end.index for end in response.ends) == [0, 1]
    assert response.usage.completion_tokens == 9
    assert response.generation_id.startswith("gen-") and response.model == tmp_path.name


async def test_both_workers_are_told_the_same_key_and_the_resolved_sampling(tmp_path: Path) -> None:
    prefill, decode = pair(lambda _: [ids("ab")])
    async with running_router(tmp_path, (prefill, decode)) as router:
        spec = text_spec(
            "hello",
            stopping=pb.StoppingCriteria(max_output_tokens=2, stop_token_ids=[9]),
            cache=pb.CacheOptions(cache_salt="tenant", bypass_prefix_cache=True),
        )
        events = await router.stream(spec)
    to_prefill, to_decode = prefill.admits[0], decode.admits[0]
    assert to_prefill.key == to_decode.key and to_prefill.key.attempt == 1
    assert to_prefill.key.request_id == events[0].started.generation_id
    assert (to_prefill.role, to_decode.role) == (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE)
    assert to_decode.expect_handoff and not to_prefill.expect_handoff
    peer = to_prefill.decode_peer
    assert (peer.worker_id, peer.incarnation, peer.address) == ("decode-0", decode.incarnation, decode.address)
    for admit in (to_prefill, to_decode):
        assert list(admit.prompt_token_ids) == ids("hello")
        assert admit.sampling.stopping.max_output_tokens == 2 and list(admit.sampling.stopping.stop_token_ids) == [
            EOS,
            9,
        ]
        assert admit.cache_salt == b"tenant" and admit.bypass_prefix_cache


async def test_a_first_token_that_ends_the_request_needs_nothing_of_the_decode_worker(tmp_path: Path) -> None:
    async with running_router(tmp_path, pair(lambda _: [ids("x")])) as router:
        spec = text_spec(output=pb.OutputOptions(include_timing=True))
        events = await router.stream(spec)
        status = await router.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert kinds(events) == ["started", "delta", "sequence_end", "completed"]
    assert events[-1].completed.timing.kv_transfer.ToNanoseconds() == 0
    assert (status.router.num_finished, status.router.num_running) == (1, 0)


async def test_a_decode_phase_before_the_transfer_phase_is_no_mistake(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        call = asyncio.ensure_future(router.stream(text_spec()))
        key = (await decode.next_admit()).key
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("b"), finish_reason=LENGTH))
        await prefill.next_admit()
        prefill.emit(phase(key, PREFILL, 3), tokens(key, 0, ids("a")), phase(key, TRANSFER))
        events = await call
    assert text_of(events) == "ab"
    assert events[-1].completed.usage.cached_tokens == 3


async def test_a_stop_string_across_tokens_ends_the_sequence_and_tells_the_workers(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        call = asyncio.ensure_future(router.stream(text_spec(stopping=pb.StoppingCriteria(stop=["END"]))))
        key = (await prefill.next_admit()).key
        prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("a")), phase(key, TRANSFER))
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("bE")), tokens(key, 3, ids("N")), tokens(key, 4, ids("D")))
        cancel = await decode.next_cancel()
        decode.emit(tokens(key, 5, ids("too late")))
        events = await call
    assert text_of(events) == "ab"
    end = events[-2].sequence_end
    assert (end.finish_reason, end.stop_string, end.token_count) == (STOP, "END", 5)
    assert cancel.key == key and not cancel.HasField("sequence_index")


async def test_one_stopped_sequence_of_two_is_cancelled_alone(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        spec = text_spec(sampling=pb.SamplingParams(n=2), stopping=pb.StoppingCriteria(stop=["!"]))
        call = asyncio.ensure_future(router.stream(spec))
        key = (await prefill.next_admit()).key
        prefill.emit(phase(key, PREFILL), *(tokens(key, 0, ids("a"), sequence_index=i) for i in (0, 1)))
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("!"), sequence_index=1))
        cancel = await decode.next_cancel()
        assert cancel.sequence_index == 1
        decode.emit(tokens(key, 1, ids("b"), finish_reason=LENGTH))
        events = await call
    assert (text_of(events, 0), text_of(events, 1)) == ("ab", "a")


async def test_half_a_character_is_never_sent(tmp_path: Path) -> None:
    async with running_router(tmp_path, pair(lambda _: [ids("é🎉!")])) as router:
        events = await router.stream(text_spec())
    assert text_of(events) == "é🎉!"
    assert all("\N{REPLACEMENT CHARACTER}" not in e.delta.text for e in events)


async def test_a_stream_interval_holds_tokens_back_but_for_the_first(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        spec = text_spec(output=pb.OutputOptions(stream_interval_tokens=3))
        stream = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec))
        key = (await prefill.next_admit()).key
        prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("a")))
        counts = []
        async for event in stream:
            if event.HasField("delta"):
                counts.append(event.delta.token_count)
                if len(counts) == 1:
                    decode.emit(phase(key, DECODE), *(tokens(key, i, ids("b")) for i in (1, 2)))
                    decode.emit(tokens(key, 3, ids("c")))
                if len(counts) == 2:
                    decode.emit(tokens(key, 4, ids("d"), finish_reason=LENGTH))
    assert counts == [1, 3, 1]


async def test_logprobs_come_with_their_tokens(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        spec = text_spec(output=pb.OutputOptions(top_logprobs=1, text=False))
        call = asyncio.ensure_future(router.generation.Generate(pb.GenerateRequest(spec=spec)))
        admit = await prefill.next_admit()
        assert admit.sampling.top_logprobs == 1
        told = pb.TokenLogprob(token_id=5, logprob=-1, rank=1, top=[pb.TokenAlternative(token_id=5, logprob=-1)])
        prefill.emit(phase(admit.key, PREFILL), tokens(admit.key, 0, [5], logprobs=[told], finish_reason=LENGTH))
        output = (await call).outputs[0]
    assert list(output.logprobs) == [told] and output.text == "" and list(output.token_ids) == []


async def test_heartbeats_tell_the_phase_while_there_are_no_tokens(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        stream = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec()))
        key = (await prefill.next_admit()).key
        prefill.emit(phase(key, PREFILL))
        assert (await stream.read()).HasField("started")
        assert (await stream.read()).heartbeat.phase == PREFILL
        prefill.emit(tokens(key, 0, ids("a")))
        assert (await stream.read()).delta.text == "a"
        prefill.emit(phase(key, TRANSFER))
        assert (await stream.read()).heartbeat.phase == TRANSFER
        stream.cancel()


async def test_tokenize_and_detokenize_are_inverse(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router:
        tokenized = await router.generation.Tokenize(pb.TokenizeRequest(text="héllo", return_offsets=True))
        back = await router.generation.Detokenize(pb.DetokenizeRequest(token_ids=tokenized.token_ids))
    assert list(tokenized.token_ids) == ids("héllo")
    assert (tokenized.offsets[0].start, tokenized.offsets[0].end) == (0, 1)
    assert tokenized.max_context_tokens == MAX_MODEL_LEN
    assert back.text == "héllo"


async def test_a_chat_is_rendered_by_the_models_own_template(tmp_path: Path) -> None:
    chat = pb.ChatInput()
    chat.messages.add().update({"role": "user", "content": [{"type": "text", "text": "hi"}]})
    async with running_router(tmp_path) as router:
        tokenized = await router.generation.Tokenize(pb.TokenizeRequest(chat=chat))
    assert list(tokenized.token_ids) == ids("<user>hi<assistant>")


async def test_models_are_listed_with_their_facts(tmp_path: Path) -> None:
    async with running_router(tmp_path, model_name="m") as router:
        listed = await router.generation.ListModels(pb.ListModelsRequest())
        got = await router.generation.GetModel(pb.GetModelRequest(model="m"))
    assert list(listed.models) == [got.model]
    model = got.model
    assert (model.name, model.vocab_size, list(model.eos_token_ids)) == ("m", VOCAB_SIZE, [EOS])
    assert model.max_context_tokens == MAX_MODEL_LEN and "chat" in model.capabilities


async def test_a_long_text_is_tokenized_too(tmp_path: Path) -> None:
    text = "a" * 20_000
    async with running_router(tmp_path) as router:
        tokenized = await router.generation.Tokenize(pb.TokenizeRequest(text=text))
    assert list(tokenized.token_ids) == ids(text)
