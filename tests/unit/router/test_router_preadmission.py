"""What is refused before a prompt is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_worker import pair
from google.protobuf import duration_pb2
from router_harness import MAX_MODEL_LEN, refusal, running_router, text_spec

from cluster.errors import Overloaded
from cluster.pb import generation_pb2 as pb
from router.api.call import ANYONE
from router.queue.admission import AdmissionRequest

MODEL = {"max_model_len": MAX_MODEL_LEN, "max_sequences": 16}


def least(**fields: Any) -> tuple[int, int, int]:
    work = AdmissionRequest.smallest(pb.GenerationSpec(**fields), ANYONE, None, **MODEL).work
    return work.num_prompt_tokens, work.num_sequences, work.num_output_tokens


def test_a_text_is_a_token_and_token_ids_are_what_they_are() -> None:
    assert least(text="x" * 1000) == least(text="") == least() == (1, 1, 2)
    given = pb.TokenIds(ids=[1] * 30)
    stopping, sampling = pb.StoppingCriteria(max_output_tokens=20), pb.SamplingParams(n=3)
    assert least(token_ids=given, stopping=stopping, sampling=sampling) == (30, 3, 30 + 3 * 20)


def test_nonsense_is_cut_to_what_the_model_allows() -> None:
    absurd = {
        "token_ids": pb.TokenIds(ids=[1] * 10_000),
        "stopping": pb.StoppingCriteria(max_output_tokens=2**32 - 1),
        "sampling": pb.SamplingParams(n=2**32 - 1),
        "scheduling": pb.SchedulingOptions(priority=-(2**31), queue_timeout=duration_pb2.Duration(seconds=-5)),
    }
    assert least(**absurd) == (MAX_MODEL_LEN, 16, MAX_MODEL_LEN)
    assert AdmissionRequest.smallest(pb.GenerationSpec(**absurd), ANYONE, 1.5, **MODEL).priority == -10


async def test_a_full_queue_refuses_a_prompt_that_nobody_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair()
    limits = {"max_running_requests": 1, "max_queued_requests": 0}
    async with running_router(tmp_path, (prefill, decode), **limits) as router:
        call = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec()))
        await prefill.next_admit()

        def read(*_: Any, **__: Any) -> Any:
            raise AssertionError("the prompt was read")

        monkeypatch.setattr(router.server._tokenizer, "encode", read)
        error = await refusal(router.stream(text_spec("x" * 100)))
        assert isinstance(error, Overloaded) and error.retry_after_s is not None
        counters = router.server.dispatcher.counters
        assert (counters.rejected, dict(counters.refused)) == (1, {"queue_requests": 1})
        call.cancel()
