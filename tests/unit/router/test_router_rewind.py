"""One sequence, sent again from any of its tokens: the rest is what an undisturbed client would have got from there."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from router_harness import EOS, MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, ids

from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from router.api.call import ValidatedRequest
from router.api.chat_template import ChatTemplate
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer
from router.api.validate import validate
from router.stream.output import SequenceOutput

MODEL = ServedModel("m", VOCAB_SIZE, MAX_MODEL_LEN, 16, (EOS,))
BYTES = Tokenizer(TOKENIZER.to_str().encode(), ChatTemplate({}, {}))
LENGTH, STOP = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP

TEXTS = st.text(st.sampled_from("abéE🎉ND"), min_size=1, max_size=8)
STOPS = st.sampled_from([(), ("END",), ("é", "ND"), ("ab", "b🎉")])


def request_of(stop: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0) -> ValidatedRequest:
    spec = pb.GenerationSpec(
        text="hi",
        output=pb.OutputOptions(token_ids=True, top_logprobs=0),
        stopping=pb.StoppingCriteria(
            stop=stop, include_stop_in_output=include_stop, max_output_tokens=60, min_output_tokens=min_tokens
        ),
    )
    return validate(spec, MODEL, lambda text: tuple(ids(str(text))), try_grammar=lambda _, text: text, fresh_seed=1)


def sequence_of(request: ValidatedRequest) -> SequenceOutput:
    return SequenceOutput(0, request, BYTES.new_detokenizer(request.prompt_token_ids), is_kept=True)


def tokens_from(first: int, token_ids: Sequence[int], *, reason: pb.FinishReason = 0) -> worker_pb2.Tokens:
    logprobs = [pb.TokenLogprob(token_id=i, logprob=-1 - p) for p, i in enumerate(token_ids, start=first)]
    is_stop = bool(token_ids) and token_ids[-1] == EOS
    return worker_pb2.Tokens(
        first_token_index=first,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        stop_token_id=EOS if reason and is_stop else None,
    )


def prefixes(request: ValidatedRequest, token_ids: Sequence[int], reason: pb.FinishReason) -> list[str]:
    """What an undisturbed client holds after each token; the last is the whole text."""
    sequence, text = sequence_of(request), ""
    held = [""]
    for position, token_id in enumerate(token_ids):
        is_last = position == len(token_ids) - 1
        sequence.add(tokens_from(position, [token_id], reason=reason if is_last else 0))
        message = sequence.take()
        text += message.delta.text if message is not None else ""
        held.append(text)
        if sequence.end is not None:
            return held
    return held


@given(
    text=TEXTS,
    stop=STOPS,
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 4),
    ends_with=st.sampled_from([LENGTH, STOP]),
    chunks=st.lists(st.integers(1, 5), max_size=8),
    data=st.data(),
)
def test_what_is_sent_again_is_what_would_have_followed(
    text: str,
    stop: tuple[str, ...],
    include_stop: bool,
    min_tokens: int,
    ends_with: pb.FinishReason,
    chunks: list[int],
    data: st.DataObject,
) -> None:
    request = request_of(stop, include_stop=include_stop, min_tokens=min_tokens)
    token_ids = [*ids(text), *([EOS] if ends_with == STOP else [])]
    held = prefixes(request, token_ids, ends_with)
    length = len(held) - 1
    index = data.draw(st.integers(0, length), label="index")
    num_here = data.draw(st.integers(0, length), label="tokens that are here at the rewind")
    sequence = sequence_of(request)

    def send(first: int, upto: int) -> None:
        reason = ends_with if upto == len(token_ids) else 0
        sequence.add(tokens_from(first, token_ids[first:upto], reason=reason))

    send(0, num_here)
    if data.draw(st.booleans(), label="the client took it"):
        sequence.take()
    sequence = sequence.rewound(index, BYTES.new_detokenizer(request.prompt_token_ids))
    got, logprobs, rest = [], [], ""
    while True:
        message = sequence.take()
        if message is not None:
            delta = message.delta
            assert delta.first_token_index == index + len(got) and delta.token_count == len(delta.token_ids)
            got += delta.token_ids
            logprobs += [entry.logprob for entry in delta.logprobs]
            rest += delta.text
        if sequence.end is not None:
            break
        upto = min(len(token_ids), num_here + (chunks.pop() if chunks else 1))
        send(num_here, upto)
        num_here = upto
    assert held[index] + rest == held[-1]
    assert got == token_ids[index:length]
    assert logprobs == [-1.0 - position for position in range(index, length)]
    assert sequence.end.token_count == length
    assert sequence.known().token_ids == token_ids[:length]
