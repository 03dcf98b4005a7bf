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
