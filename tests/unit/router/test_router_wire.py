"""Reading requests from bytes: nothing raises, and what protobuf hides or leaves nameless is named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.pb import generation_pb2 as pb
from router.api.handlers import Malformed, decoder

MAX_BYTES = 1000
decode = decoder(pb.GenerateRequest, MAX_BYTES)


def request_with(spec: bytes) -> bytes:
    assert len(spec) < 128
    return b"\x0a" + bytes([len(spec)]) + spec


def named(data: bytes) -> list[str]:
    result = decode(data)
    assert isinstance(result, Malformed)
    return [violation.field for violation in result.violations]


@given(st.binary(max_size=200))
def test_no_bytes_raise(data: bytes) -> None:
    result = decode(data)
    assert isinstance(result, (Malformed, pb.GenerateRequest))
    assert not isinstance(result, Malformed) or result.violations


@given(st.binary(max_size=40), st.integers(0, 60))
def test_a_good_request_with_bytes_put_into_it_raises_nothing(noise: bytes, at: int) -> None:
    spec = pb.GenerationSpec(
        text="hello", sampling=pb.SamplingParams(temperature=1, n=2), stopping=pb.StoppingCriteria(stop=["a", "b"])
    )
    data = pb.GenerateRequest(spec=spec).SerializeToString()
    decode(data[:at] + noise + data[at:])


def test_a_whole_request_is_read() -> None:
    request = pb.GenerateRequest(spec=pb.GenerationSpec(text="héllo", sampling=pb.SamplingParams(logit_bias={1: 2})))
    assert decode(request.SerializeToString()) == request


def test_too_many_bytes_are_refused_with_both_numbers() -> None:
    result = decode(pb.GenerateRequest(spec=pb.GenerationSpec(text="x" * MAX_BYTES)).SerializeToString())
    assert isinstance(result, Malformed)
    assert result.violations[0].field == "request" and f"at most {MAX_BYTES}" in result.violations[0].description


def test_a_field_given_twice_is_not_two_exclusive_ones() -> None:
    once = pb.GenerationSpec(text="x").SerializeToString()
    assert isinstance(decode(request_with(once + once)), pb.GenerateRequest)
    optional = pb.GenerationSpec(text="x", sampling=pb.SamplingParams(temperature=1, top_p=1)).SerializeToString()
    assert isinstance(decode(request_with(optional)), pb.GenerateRequest)


def test_exclusive_fields_are_named_at_any_depth() -> None:
    sampling = (
        pb.SamplingParams(regex="a").SerializeToString() + pb.SamplingParams(json_object=True).SerializeToString()
    )
    spec = b"\x2a" + bytes([len(sampling)]) + sampling
    assert named(request_with(spec)) == ["spec.sampling.json_object"]


def test_invalid_utf8_is_named_with_its_index() -> None:
    stop = pb.GenerationSpec(stopping=pb.StoppingCriteria(stop=["good", "QQQQ"])).SerializeToString()
    assert named(request_with(stop.replace(b"QQQQ", b"\xc3\x28QQ"))) == ["spec.stopping.stop[1]"]


def test_invalid_utf8_inside_a_chat_message_is_named_by_the_message() -> None:
    spec = pb.GenerationSpec()
    spec.chat.messages.add().update({"role": "user"})
    spec.chat.messages.add().update({"role": "QQQQ"})
    data = request_with(spec.SerializeToString().replace(b"QQQQ", b"\xc3\x28QQ"))
    assert named(data) == ["spec.chat.messages[1]"]


PROMPTS = {
    "text": (b"\x12\x00", b"\x12\x02ab"),
    "token_ids": (b"\x1a\x03\x0a\x01\x07", b"\x1a\x02\x08\x07"),
    "chat": (b"\x22\x00",),
}
"""Fields of GenerationSpec.prompt as bytes. The second of the token ids is one byte shorter than protobuf writes it."""
OTHERS = (b"", b"\x0a\x00", b"\x52\x01r", b"\x32\x02\x20\x07", b"\x32\x02\x20\x07" * 3)
"""Other fields of it: none, an empty one, a request_id, and stop_token_ids, again one byte short each."""


@given(
    st.lists(st.sampled_from([(name, field) for name in PROMPTS for field in PROMPTS[name]]), max_size=3),
    st.sampled_from(OTHERS),
    st.sampled_from(OTHERS),
)
def test_exclusive_fields_are_found_whatever_else_makes_up_for_their_bytes(
    prompts: list[tuple[str, bytes]], before: bytes, after: bytes
) -> None:
    result = decode(request_with(before + b"".join(field for _, field in prompts) + after))
    is_clear = len({name for name, _ in prompts}) <= 1
    assert isinstance(result, pb.GenerateRequest if is_clear else Malformed)
