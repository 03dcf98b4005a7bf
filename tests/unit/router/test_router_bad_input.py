"""A client's mistake over the wire: a typed status that names the field, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, pair, phase, tokens
from router_harness import VOCAB_SIZE, Router, ids, refusal, running_router, text_of, text_spec

from cluster.errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    NotServed,
    OutOfRange,
)
from cluster.pb import admin_pb2
from cluster.pb import generation_pb2 as pb
from router.queue.admission import AdmissionRequest

pytestmark = pytest.mark.asyncio


async def raw_refusal(router: Router, data: bytes, method: str = "Generate") -> BatonError:
    return await refusal(router.channel.unary_unary(f"/baton.v1.GenerationService/{method}")(data))


def fields(error: BatonError) -> list[str]:
    return [violation.field for violation in error.violations]


async def test_each_mistake_gets_its_status_and_its_field_while_another_stream_goes_on(tmp_path: Path) -> None:
    prefill, decode = pair()
    mistakes: list[tuple[pb.GenerationSpec, type[BatonError], str]] = [
        (pb.GenerationSpec(text=""), InvalidRequest, "spec.text"),
        (pb.GenerationSpec(), InvalidRequest, "spec.prompt"),
        (pb.GenerationSpec(token_ids=pb.TokenIds(ids=[VOCAB_SIZE])), InvalidRequest, "spec.token_ids.ids"),
        (text_spec(sampling=pb.SamplingParams(temperature=float("nan"))), InvalidRequest, "spec.sampling.temperature"),
        (text_spec(sampling=pb.SamplingParams(n=17)), InvalidRequest, "spec.sampling.n"),
        (text_spec(stopping=pb.StoppingCriteria(stop=["x"] * 17)), InvalidRequest, "spec.stopping.stop"),
        (text_spec(stopping=pb.StoppingCriteria(stop=["x" * 300])), InvalidRequest, "spec.stopping.stop[0]"),
        (
            text_spec(stopping=pb.StoppingCriteria(max_output_tokens=1000)),
            OutOfRange,
            "spec.stopping.max_output_tokens",
        ),
        (text_spec("x" * 5000), OutOfRange, "spec.text"),
        (text_spec(model="other"), NotFound, "spec.model"),
        (text_spec(sampling=pb.SamplingParams(bad_words=["a"])), NotServed, "spec.sampling.bad_words"),
        (text_spec(sampling=pb.SamplingParams(regex="(")), InvalidRequest, "spec.sampling.regex"),
    ]
    async with running_router(tmp_path, (prefill, decode)) as router:
        good = asyncio.ensure_future(router.stream(text_spec()))
        key = (await prefill.next_admit()).key
        prefill.emit(phase(key, PREFILL), tokens(key, 0, ids("a")), phase(key, TRANSFER))
        for spec, kind, field in mistakes:
            unary = await refusal(router.generation.Generate(pb.GenerateRequest(spec=spec)))
            streamed = await refusal(router.stream(spec))
            assert type(unary) is type(streamed) is kind, (field, unary)
            assert fields(unary) == fields(streamed) == [field]
        decode.emit(phase(key, DECODE), tokens(key, 1, ids("b"), finish_reason=LENGTH))
        assert text_of(await good) == "ab"
    assert len(prefill.admits) == 1


async def test_a_request_without_a_spec_is_refused(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router:
        assert fields(await raw_refusal(router, b"")) == ["spec"]


async def test_text_that_is_not_utf8_is_refused_by_its_field(tmp_path: Path) -> None:
    good = pb.GenerateRequest(spec=pb.GenerationSpec(text="ABCD")).SerializeToString()
    async with running_router(tmp_path) as router:
        error = await raw_refusal(router, good.replace(b"ABCD", b"A\xff\xfeD"))
    assert isinstance(error, InvalidRequest)
    assert [(v.field, v.description) for v in error.violations] == [("spec.text", "is not valid UTF-8")]


async def test_two_exclusive_prompts_are_refused_by_name(tmp_path: Path) -> None:
    both = pb.GenerationSpec(text="x").SerializeToString() + token_ids_field()
    async with running_router(tmp_path) as router:
        error = await raw_refusal(router, b"\x0a" + bytes([len(both)]) + both)
    assert isinstance(error, InvalidRequest) and fields(error) == ["spec.token_ids"]
    assert "spec.text" in error.message


def token_ids_field() -> bytes:
    return pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1])).SerializeToString()


async def test_bytes_that_are_no_message_get_a_status(tmp_path: Path) -> None:
    async with running_router(tmp_path, pair(lambda _: [ids("fine")])) as router:
        for data in (b"\xff" * 50, b"\x0a\x80\x80\x80\x80\x80", b"\x0a\x05\x12\x40abc", bytes(range(256))):
            assert isinstance(await raw_refusal(router, data), InvalidRequest)
        assert text_of(await router.stream(text_spec())) == "fine"


async def test_a_message_of_ten_megabytes_is_refused_and_the_next_one_served(tmp_path: Path) -> None:
    async with running_router(tmp_path, pair(lambda _: [ids("fine")])) as router:
        error = await refusal(router.generation.Generate(pb.GenerateRequest(spec=text_spec("x" * 10_000_000))))
        assert isinstance(error, InvalidRequest) and fields(error) == ["request"]
        assert text_of(await router.stream(text_spec())) == "fine"


async def test_a_wall_clock_that_is_set_while_a_request_is_read_ends_no_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        dispatcher, now = router.server.dispatcher, time.time
        refuse_early = dispatcher.refuse_early

        def set_clock(least: AdmissionRequest) -> None:
            monkeypatch.setattr("time.time", lambda: now() + 5 * 3600)
            refuse_early(least)

        monkeypatch.setattr(dispatcher, "refuse_early", set_clock)
        call = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec()), timeout=600)
        admitted, over = asyncio.create_task(prefill.next_admit()), asyncio.create_task(call.code())
        await asyncio.wait((admitted, over), return_when=asyncio.FIRST_COMPLETED)
        assert admitted.done(), over.result()
        call.cancel()
        await over


async def test_a_deadline_already_past_is_told_and_leaves_nothing_running(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with running_router(tmp_path, (prefill, decode)) as router:
        for timeout_s in (0, -1):
            assert isinstance(await refusal(router.stream(text_spec(), timeout=timeout_s)), DeadlineExceeded)
        for admit in prefill.admits:  # a request that the network brought in time after all
            assert (await prefill.next_cancel()).key == admit.key
        status = await router.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert (status.router.num_running, status.router.num_queued) == (0, 0)


async def test_a_chat_without_a_template_is_a_failed_precondition(tmp_path: Path) -> None:
    spec = pb.GenerationSpec()
    spec.chat.messages.add().update({"role": "user", "content": "hi"})
    async with running_router(tmp_path, chat_template=None) as router:
        error = await refusal(router.generation.Generate(pb.GenerateRequest(spec=spec)))
    assert isinstance(error, FailedPrecondition)


async def test_the_small_methods_check_their_input_too(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router:
        api = router.generation
        cases = [
            (api.Tokenize(pb.TokenizeRequest()), InvalidRequest, "input"),
            (api.Tokenize(pb.TokenizeRequest(chat=pb.ChatInput())), InvalidRequest, "chat.messages"),
            (api.Tokenize(pb.TokenizeRequest(model="other", text="x")), NotFound, "model"),
            (api.Detokenize(pb.DetokenizeRequest(token_ids=[VOCAB_SIZE])), InvalidRequest, "token_ids"),
            (api.GetModel(pb.GetModelRequest(model="other")), NotFound, "model"),
            (api.ListModels(pb.ListModelsRequest(page_size=-1)), InvalidRequest, "page_size"),
            (api.ListModels(pb.ListModelsRequest(page_token="2")), InvalidRequest, "page_token"),
        ]
        for call, kind, field in cases:
            error = await refusal(call)
            assert type(error) is kind and fields(error) == [field]
        assert (await api.Tokenize(pb.TokenizeRequest(text=""))).token_ids == []


async def test_an_error_carries_no_text_of_the_prompt(tmp_path: Path) -> None:
    secret = "the-secret-prompt"
    async with running_router(tmp_path) as router:
        error = await refusal(router.stream(text_spec(secret * 100, sampling=pb.SamplingParams(n=99))))
    assert secret not in str(error) + str(error.violations)
