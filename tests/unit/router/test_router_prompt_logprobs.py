"""The logprobs of a prompt at the router: whole, once, in `Started`, whatever becomes of the attempts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, FakeWorker, failed, pair, phase, prompt_logprobs, tokens
from http_door import chat, serving
from router_harness import ids, kinds, text_spec
from wired_router import Client, ManualClock, WiredRouter, admit_of, go_on, logged, run

from cluster.errors import InternalError
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from router.stream.prompt_logprobs import PromptLogprobs

PROMPT = ids("hello")
Script = Callable[[WiredRouter, Client, worker_pb2.RequestKey], None]


def part(key: worker_pb2.RequestKey, start: int, end: int, logprob: float = -1.0) -> worker_pb2.Event:
    return prompt_logprobs(key, start, PROMPT[start:end], logprob)


def play(script: Script, worker_ids: tuple[str, ...] = ("p0", "p1", "d0"), *, max_output_tokens: int = 16) -> None:
    """A request that asks for them, on p0 and d0."""

    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, worker_ids)
        client = router.submit(prompt_logprobs=0, max_output_tokens=max_output_tokens)
        admit = admit_of(router.workers["p0"])
        assert admit.HasField("prompt_logprobs") and admit.prompt_logprobs == 0
        assert not admit_of(router.workers["d0"]).HasField("prompt_logprobs"), "it does not compute the prompt"
        script(router, client, admit.key)

    run(scenario)


def test_started_waits_until_all_are_there_and_the_client_sees_that_it_goes_on() -> None:
    def script(router: WiredRouter, client: Client, key: worker_pb2.RequestKey) -> None:
        p0 = router.workers["p0"]
        for event in (phase(key, PREFILL), part(key, 0, 2), part(key, 2, 4)):
            p0.emit(event)
            assert [event.WhichOneof("event") for event in client.reader.take()] in ([], ["heartbeat"])
        p0.emit(part(key, 4, 5))
        client.take()
        assert client.num_started == 1
        go_on(router, client, ("p0", "d0"))

    play(script)


def test_an_attempt_that_fails_before_sends_the_client_nothing_and_the_next_begins_again() -> None:
    def script(router: WiredRouter, client: Client, key: worker_pb2.RequestKey) -> None:
        p0, p1 = router.workers["p0"], router.workers["p1"]
        p0.emit(phase(key, PREFILL), part(key, 0, 4, -1.0), failed(key, worker_pb2.Failed.REASON_TRANSFER_FAILED))
        client.take()
        admit = admit_of(p1)
        assert admit.HasField("prompt_logprobs")
        p0.emit(part(key, 4, 5, -1.0))
        client.take()
        assert client.num_started == 0
        p1.emit(phase(admit.key, PREFILL), part(admit.key, 0, 5, -2.0))
        go_on(router, client, ("p1", "d0"))

    play(script)


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.parametrize("worker_ids", [("p0", "p1", "d0"), ("p0", "d0")])
def test_once_they_are_all_there_no_attempt_is_asked_again(is_taken: bool, worker_ids: tuple[str, ...]) -> None:
    def script(router: WiredRouter, client: Client, key: worker_pb2.RequestKey) -> None:
        p0 = router.workers["p0"]
        p0.emit(phase(key, PREFILL), part(key, 0, 5))
        if is_taken:
            client.take()
        p0.emit(failed(key, worker_pb2.Failed.REASON_TRANSFER_FAILED))
        last = "p1" if "p1" in worker_ids else "d0"
        assert not admit_of(router.workers[last]).HasField("prompt_logprobs")
        go_on(router, client, (last.replace("d0", ""), "d0"))
        assert client.num_started == 1

    play(script, worker_ids)


def test_a_decode_worker_that_computes_the_prompt_is_asked() -> None:
    def script(router: WiredRouter, client: Client, key: worker_pb2.RequestKey) -> None:
        p0, d0 = router.workers["p0"], router.workers["d0"]
        p0.emit(phase(key, PREFILL), part(key, 0, 3), failed(key, worker_pb2.Failed.REASON_TRANSFER_FAILED))
        admit = admit_of(d0)
        assert admit.HasField("prompt_logprobs") and not admit.expect_handoff
        d0.emit(phase(admit.key, PREFILL), part(admit.key, 0, 5, -2.0))
        go_on(router, client, ("", "d0"))

    play(script, ("p0", "d0"))


def test_a_first_token_that_ends_it_all_comes_after_them() -> None:
    def script(router: WiredRouter, client: Client, key: worker_pb2.RequestKey) -> None:
        p0 = router.workers["p0"]
        p0.emit(phase(key, PREFILL), part(key, 0, 5), logged(key, 0, "a", finish_reason=LENGTH))
        client.take()
        assert client.completed is not None and client.num_started == 1
        router.check_idle()

    play(script, max_output_tokens=1)


def test_a_cancelled_request_starts_without_a_part_of_them() -> None:
    def script(router: WiredRouter, client: Client, key: worker_pb2.RequestKey) -> None:
        router.workers["p0"].emit(phase(key, PREFILL), part(key, 0, 3))
        router.dispatcher.cancel(client.request_id, "by the test")
        events = client.reader.take()
        assert list(map(_kind, events)) == ["started", "sequence_end"]
        assert not events[0].started.prompt_logprobs

    play(script)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_what_does_not_come_next_fails_that_request(start: int) -> None:
    def script(router: WiredRouter, client: Client, key: worker_pb2.RequestKey) -> None:
        router.workers["p0"].emit(phase(key, PREFILL), part(key, 0, 2), part(key, start, 5))
        assert isinstance(client.live.error, InternalError)
        router.check_idle()

    play(script)


def test_a_first_token_before_them_fails_that_request() -> None:
    def script(router: WiredRouter, client: Client, key: worker_pb2.RequestKey) -> None:
        router.workers["p0"].emit(phase(key, PREFILL), part(key, 0, 4), logged(key, 0, "a"))
        assert isinstance(client.live.error, InternalError)

    play(script)


def test_more_than_the_prompt_has_is_refused_and_what_nobody_asked_for_too() -> None:
    key = worker_pb2.RequestKey(request_id="r", attempt=1)
    for gathered in (PromptLogprobs(4, 0), PromptLogprobs(5, None)):
        with pytest.raises(InternalError, match="5 prompt tokens"):
            gathered.add(part(key, 0, 5).prompt_logprobs)


def _kind(event: pb.GenerateStreamResponse) -> str:
    return str(event.WhichOneof("event"))


def _answer(worker: FakeWorker, admit: worker_pb2.Admit) -> None:
    key = admit.key
    events = [phase(key, PREFILL), part(key, 0, 3), part(key, 3, 5)]
    logprobs = [pb.TokenLogprob(token_id=token_id, logprob=-0.5) for token_id in ids("a")]
    worker.emit(*events, tokens(key, 0, ids("a"), logprobs=logprobs), phase(key, TRANSFER))


def _decode(worker: FakeWorker, admit: worker_pb2.Admit) -> None:
    logprobs = [pb.TokenLogprob(token_id=token_id, logprob=-0.5) for token_id in ids("b")]
    worker.emit(phase(admit.key, DECODE), tokens(admit.key, 1, ids("b"), finish_reason=LENGTH, logprobs=logprobs))


@pytest.mark.asyncio
async def test_they_are_in_started_and_in_whole_answers_over_grpc_and_http(tmp_path: Path) -> None:
    prefill, decode = pair()
    prefill.script, decode.script = _answer, _decode
    spec = text_spec("hello", output=pb.OutputOptions(prompt_logprobs=3))
    body: dict[str, Any] = {"model": "model", "prompt": "hello", "max_tokens": 2, "temperature": 0}
    echo = body | {"echo": True, "logprobs": 1}
    async with serving(tmp_path, (prefill, decode)) as (router, http):
        events = await router.stream(spec)
        whole = await router.generation.Generate(pb.GenerateRequest(spec=spec))
        (choice,) = (await http.post("/v1/completions", json=body | {"prompt_logprobs": 2})).json()["choices"]
        (echoed,) = (await http.post("/v1/completions", json=echo)).json()["choices"]
        lines = (await http.post("/v1/completions", json=echo | {"stream": True})).text.split("\n\n")
        wrong = [(await http.post("/v1/completions", json=body | more)).json()["error"] for more in REFUSED]
    assert kinds(events)[0] == "started"
    (started,) = [event.started for event in events if event.HasField("started")]
    assert [entry.token_id for entry in started.prompt_logprobs] == PROMPT
    assert list(whole.prompt_logprobs) == list(started.prompt_logprobs)
    assert [admit.prompt_logprobs for admit in prefill.admits] == [3, 3, 2, 1, 1]
    own = {"logprob": -1.0, "rank": 1}
    others = [{str(token): own | {"decoded_token": text}} for token, text in zip(PROMPT[1:], "ello", strict=True)]
    assert choice["prompt_logprobs"] == [None, *others] and "prompt_logprobs" not in echoed
    told = echoed["logprobs"]
    assert echoed["text"] == "helloab" and told["tokens"] == [*"helloab"] and told["text_offset"] == [*range(7)]
    assert told["token_logprobs"][:6] == [None, *[-1.0] * 4, -0.5] and told["top_logprobs"][:2] == [None, {"e": -1.0}]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for chunk in chunks if chunk["logprobs"] for each in chunk["logprobs"][name]] == told[name]
    assert [error["param"] for error in wrong] == ["prompt_logprobs", "prompt_logprobs", "logprobs"]


REFUSED: list[dict[str, Any]] = [
    {"prompt_logprobs": 21},
    {"prompt_logprobs": 0, "stream": True},
    {"echo": True, "logprobs": 21},
]


@pytest.mark.asyncio
async def test_a_chat_tells_them_beside_its_choices(tmp_path: Path) -> None:
    prefill, decode = pair(lambda _: [ids("x")])

    def answer(worker: FakeWorker, admit: worker_pb2.Admit) -> None:
        told = prompt_logprobs(admit.key, 0, admit.prompt_token_ids, -1.0)
        worker.emit(phase(admit.key, PREFILL), told, tokens(admit.key, 0, ids("a"), finish_reason=LENGTH))

    prefill.script = answer
    async with serving(tmp_path, (prefill, decode)) as (_, http):
        found = (await http.post("/v1/chat/completions", json=chat("hi", prompt_logprobs=0, max_tokens=1))).json()
    prompt = "<user>hi<assistant>"
    decoded = ["".join(each["decoded_token"] for each in entry.values()) for entry in found["prompt_logprobs"][1:]]
    assert found["prompt_logprobs"][0] is None and "".join(decoded) == prompt[1:]
