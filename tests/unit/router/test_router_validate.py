"""The validation layer: every mistake of the contract is named by field, and several are named together."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import duration_pb2, struct_pb2
from router_harness import EOS, MAX_MODEL_LEN, VOCAB_SIZE

from cluster.errors import InvalidRequest, NotFound, NotServed, OutOfRange
from cluster.pb import generation_pb2 as pb
from cluster.rpc import PUBLIC_MESSAGE_BYTES
from router.api.call import ValidatedRequest
from router.api.chat import Prompt
from router.api.sampling import default_sampling
from router.api.served_model import ServedModel
from router.api.validate import LARGEST_STARTED_BYTES, most_prompt_logprobs, validate

MODEL = ServedModel("m", VOCAB_SIZE, MAX_MODEL_LEN, 16, (EOS,))
NAN, INFINITY = float("nan"), float("inf")


def encode(prompt: Prompt) -> tuple[int, ...]:
    return tuple(range(1, len(prompt) + 1)) if isinstance(prompt, str) else (1, 2)


def check(spec: pb.GenerationSpec, model: ServedModel = MODEL) -> ValidatedRequest:
    return validate(spec, model, encode, try_grammar=lambda _, text: text, fresh_seed=42)


def sampling(**fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(text="hi", sampling=pb.SamplingParams(**fields))


def stopping(**fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(text="hi", stopping=pb.StoppingCriteria(**fields))


def token_prompt(*token_ids: int) -> pb.GenerationSpec:
    return pb.GenerationSpec(token_ids=pb.TokenIds(ids=token_ids))


def chat(*messages: dict[str, Any], **kwargs: Any) -> pb.GenerationSpec:
    spec = pb.GenerationSpec()
    spec.chat.SetInParent()
    for message in messages:
        spec.chat.messages.add().update(message)
    spec.chat.template_kwargs.update(kwargs)
    return spec


INVALID = [
    (pb.GenerationSpec(), "spec.prompt"),
    (pb.GenerationSpec(text=""), "spec.text"),
    (token_prompt(), "spec.token_ids"),
    (token_prompt(1, VOCAB_SIZE), "spec.token_ids.ids"),
    (chat(), "spec.chat.messages"),
    (chat({"content": "no role"}), "spec.chat.messages[0].role"),
    (chat({"role": "user", "content": 3}), "spec.chat.messages[0].content"),
    (chat({"role": "user", "content": [{"type": "image_url"}]}), "spec.chat.messages[0].content[0]"),
    (chat({"role": "user", "content": "x"}, messages=[]), "spec.chat.template_kwargs.messages"),
    (sampling(temperature=NAN), "spec.sampling.temperature"),
    (sampling(temperature=-0.1), "spec.sampling.temperature"),
    (sampling(temperature=2.5), "spec.sampling.temperature"),
    (sampling(temperature=INFINITY), "spec.sampling.temperature"),
    (sampling(top_p=0), "spec.sampling.top_p"),
    (sampling(top_p=1.01), "spec.sampling.top_p"),
    (sampling(top_p=NAN), "spec.sampling.top_p"),
    (sampling(top_k=-2), "spec.sampling.top_k"),
    (sampling(min_p=-0.5), "spec.sampling.min_p"),
    (sampling(min_p=1.5), "spec.sampling.min_p"),
    (sampling(frequency_penalty=2.1), "spec.sampling.frequency_penalty"),
    (sampling(presence_penalty=NAN), "spec.sampling.presence_penalty"),
    (sampling(repetition_penalty=0), "spec.sampling.repetition_penalty"),
    (sampling(repetition_penalty=11), "spec.sampling.repetition_penalty"),
    (sampling(n=0), "spec.sampling.n"),
    (sampling(n=17), "spec.sampling.n"),
    (sampling(n=2**32 - 1), "spec.sampling.n"),
    (sampling(logit_bias={1: 101}), "spec.sampling.logit_bias[1]"),
    (sampling(logit_bias={1: NAN}), "spec.sampling.logit_bias[1]"),
    (sampling(logit_bias={VOCAB_SIZE: 1}), "spec.sampling.logit_bias"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1)), "spec.sampling.logit_bias"),
    (sampling(allowed_token_ids=[VOCAB_SIZE]), "spec.sampling.allowed_token_ids"),
    (sampling(allowed_token_ids=[1] * (VOCAB_SIZE + 1)), "spec.sampling.allowed_token_ids"),
    (stopping(max_output_tokens=0), "spec.stopping.max_output_tokens"),
    (stopping(max_output_tokens=2, min_output_tokens=3), "spec.stopping.min_output_tokens"),
    (stopping(min_output_tokens=2**32 - 1), "spec.stopping.min_output_tokens"),
    (stopping(stop=["x"] * 17), "spec.stopping.stop"),
    (stopping(stop=["ok", "x" * 257]), "spec.stopping.stop[1]"),
    (stopping(stop=[""]), "spec.stopping.stop[0]"),
    (stopping(stop_token_ids=[VOCAB_SIZE]), "spec.stopping.stop_token_ids"),
    (stopping(stop_token_ids=[1] * 65), "spec.stopping.stop_token_ids"),
    (pb.GenerationSpec(text="hi", output=pb.OutputOptions(top_logprobs=21)), "spec.output.top_logprobs"),
    (pb.GenerationSpec(text="hi", output=pb.OutputOptions(prompt_logprobs=21)), "spec.output.prompt_logprobs"),
    (
        pb.GenerationSpec(text="hi", output=pb.OutputOptions(stream_interval_tokens=0)),
        "spec.output.stream_interval_tokens",
    ),
    (pb.GenerationSpec(text="hi", request_id="x" * 257), "spec.request_id"),
    (pb.GenerationSpec(text="hi", cache=pb.CacheOptions(cache_salt="x" * 257)), "spec.cache.cache_salt"),
    (
        pb.GenerationSpec(text="hi", scheduling=pb.SchedulingOptions(session_id="s" * 257)),
        "spec.scheduling.session_id",
    ),
    (
        pb.GenerationSpec(text="hi", scheduling=pb.SchedulingOptions(queue_timeout=duration_pb2.Duration(seconds=-1))),
        "spec.scheduling.queue_timeout",
    ),
    (pb.GenerationSpec(text="hi", scheduling=pb.SchedulingOptions(priority=11)), "spec.scheduling.priority"),
    (pb.GenerationSpec(text="hi", scheduling=pb.SchedulingOptions(priority=-11)), "spec.scheduling.priority"),
]


@pytest.mark.parametrize(("spec", "field"), INVALID, ids=[f"{i}-{field}" for i, (_, field) in enumerate(INVALID)])
def test_a_wrong_field_is_refused_by_its_name(spec: pb.GenerationSpec, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(spec)
    assert [violation.field for violation in refusal.value.violations] == [field]
    assert refusal.value.violations[0].description in refusal.value.message


def test_everything_wrong_is_told_at_once() -> None:
    spec = pb.GenerationSpec(
        sampling=pb.SamplingParams(temperature=NAN, n=99), stopping=pb.StoppingCriteria(stop=[""], max_output_tokens=0)
    )
    with pytest.raises(InvalidRequest) as refusal:
        check(spec)
    assert {violation.field for violation in refusal.value.violations} == {
        "spec.prompt",
        "spec.sampling.temperature",
        "spec.sampling.n",
        "spec.stopping.stop[0]",
        "spec.stopping.max_output_tokens",
    }


NOT_SERVED = [
    (sampling(bad_words=["x"]), "spec.sampling.bad_words"),
    (pb.GenerationSpec(text="hi", extensions=struct_pb2.Struct()), "spec.extensions"),
]


@pytest.mark.parametrize(("spec", "field"), NOT_SERVED, ids=[field for _, field in NOT_SERVED])
def test_a_field_that_is_not_served_is_refused_by_its_name(spec: pb.GenerationSpec, field: str) -> None:
    with pytest.raises(NotServed) as refusal:
        check(spec)
    assert [violation.field for violation in refusal.value.violations] == [field]


def test_prompt_plus_output_over_the_context_is_out_of_range_with_the_numbers() -> None:
    check(stopping(max_output_tokens=MAX_MODEL_LEN - 2))
    with pytest.raises(OutOfRange) as refusal:
        check(stopping(max_output_tokens=MAX_MODEL_LEN - 1))
    assert refusal.value.violations[0].field == "spec.stopping.max_output_tokens"
    for number in ("2 prompt tokens", str(MAX_MODEL_LEN - 1), f"at most {MAX_MODEL_LEN - 2}"):
        assert number in refusal.value.message


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, 100_000])
def test_a_prompt_that_fills_the_context_is_out_of_range(length: int) -> None:
    for spec, field in (
        (pb.GenerationSpec(text="x" * length), "spec.text"),
        (token_prompt(*[1] * length), "spec.token_ids"),
    ):
        with pytest.raises(OutOfRange, match=f"{length} tokens") as refusal:
            check(spec)
        assert refusal.value.violations[0].field == field


def test_an_unknown_model_is_not_found_before_anything_else() -> None:
    with pytest.raises(NotFound, match="'other'"):
        check(pb.GenerationSpec(model="other"))
    assert check(pb.GenerationSpec(model="m", text="hi"))


def test_what_is_unset_comes_from_the_model() -> None:
    defaults = default_sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    model = ServedModel("m", VOCAB_SIZE, MAX_MODEL_LEN, 16, (EOS, 7), defaults)
    sampling = check(pb.GenerationSpec(text="hi"), model).sampling
    filled = sampling.params
    assert filled.temperature == pytest.approx(0.7) and filled.top_p == pytest.approx(0.9)
    assert (filled.top_k, filled.n, filled.seed) == (20, 1, 42)
    assert filled.repetition_penalty == pytest.approx(1.1)
    assert sampling.stopping.max_output_tokens == MAX_MODEL_LEN - 2
    assert list(sampling.stopping.stop_token_ids) == [EOS, 7]
    assert not sampling.HasField("top_logprobs")


def test_what_is_set_wins_even_when_it_is_zero() -> None:
    model = ServedModel("m", VOCAB_SIZE, MAX_MODEL_LEN, 16, (EOS,), default_sampling(temperature=0.7, top_k=20))
    filled = check(sampling(temperature=0, top_k=-1, seed=0), model).sampling.params
    assert (filled.temperature, filled.top_k, filled.seed) == (0, 0, 0)


def test_ignore_eos_leaves_only_the_clients_stop_tokens() -> None:
    assert list(check(stopping(ignore_eos=True, stop_token_ids=[9])).sampling.stopping.stop_token_ids) == [9]


def test_the_models_own_max_new_tokens_bounds_only_the_default() -> None:
    model = ServedModel("m", VOCAB_SIZE, MAX_MODEL_LEN, 16, (EOS,), max_new_tokens=8)
    assert check(pb.GenerationSpec(text="hi"), model).sampling.stopping.max_output_tokens == 8
    assert check(stopping(max_output_tokens=20), model).sampling.stopping.max_output_tokens == 20


def test_a_queue_timeout_is_taken_in_seconds() -> None:
    timeout = duration_pb2.Duration(seconds=1, nanos=500_000_000)
    spec = pb.GenerationSpec(text="hi", scheduling=pb.SchedulingOptions(queue_timeout=timeout))
    assert check(spec).queue_timeout_s == 1.5
    assert check(pb.GenerationSpec(text="hi")).queue_timeout_s is None


def test_logprobs_of_a_prompt_are_wanted_only_when_they_are_asked_for() -> None:
    asked = pb.GenerationSpec(text="hi", output=pb.OutputOptions(prompt_logprobs=0))
    assert check(asked).prompt_logprobs == 0
    assert check(pb.GenerationSpec(text="hi")).prompt_logprobs is None


@pytest.mark.parametrize(("num_tokens", "most"), [(100, 20), (14_000, 20), (16_000, 17), (170_000, 0), (174_000, -1)])
def test_logprobs_of_a_prompt_must_fit_in_one_message(num_tokens: int, most: int) -> None:
    model = ServedModel("m", VOCAB_SIZE, 2**20, 16, (EOS,))
    spec = token_prompt(*[1] * num_tokens)
    for asked in {0, max(0, most), min(20, most + 1), 20}:
        spec.output.prompt_logprobs = asked
        if asked <= most:
            assert check(spec, model).prompt_logprobs == asked
            continue
        with pytest.raises(InvalidRequest, match=f"{asked} for each of {num_tokens} prompt tokens") as refusal:
            check(spec, model)
        assert f"at most {most}" in refusal.value.message or most < 0


@pytest.mark.parametrize("alternatives", [0, 1, 5, 20])
def test_the_largest_logprobs_that_are_let_in_fit_in_what_any_client_takes(alternatives: int) -> None:
    top = [pb.TokenAlternative(token_id=2**32 - 1, logprob=-1.5)] * alternatives
    entry = pb.TokenLogprob(token_id=2**32 - 1, logprob=-1.5, rank=2**32 - 1, top=top, undefined=True)
    num_tokens = next(n for n in range(200_000, 0, -100) if most_prompt_logprobs(n) >= alternatives)
    started = pb.Started(generation_id="gen-" + "f" * 24, model="m" * 256, prompt_logprobs=[entry] * num_tokens)
    size = pb.GenerateStreamResponse(started=started).ByteSize()
    assert 0.9 * LARGEST_STARTED_BYTES < size < PUBLIC_MESSAGE_BYTES
