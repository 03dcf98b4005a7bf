"""A live request without sockets: order, exactly once, coalescing for a slow client, its life and its instants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, STOP, TRANSFER, phase, tokens
from hypothesis import given
from hypothesis import strategies as st
from router_harness import EOS, MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, ids, kinds, text_of

from cluster.errors import Unavailable
from cluster.lifecycle import RequestState
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from router.api.chat_template import ChatTemplate
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer
from router.api.validate import validate
from router.routing.load_tracker import Charge, LoadTracker, Placement
from router.stream.client_stream import StreamReader
from router.stream.request import Attempt, Effect, LiveRequest

MODEL = ServedModel("m", VOCAB_SIZE, MAX_MODEL_LEN, 16, (EOS,))
ROUTER_TOKENIZER = Tokenizer(TOKENIZER.to_str().encode(), ChatTemplate({}, {}))
KEY = worker_pb2.RequestKey(request_id="gen-1", attempt=1)


def live_request(*, n: int = 1, include_timing: bool = False, interval: int = 1, **stopping: Any) -> LiveRequest:
    spec = pb.GenerationSpec(
        text="hi",
        sampling=pb.SamplingParams(n=n),
        output=pb.OutputOptions(token_ids=True, include_timing=include_timing, stream_interval_tokens=interval),
        stopping=pb.StoppingCriteria(**stopping),
    )
    request = validate(spec, MODEL, lambda text: tuple(ids(str(text))), try_grammar=lambda _, text: text, fresh_seed=1)
    detokenizers = [ROUTER_TOKENIZER.new_detokenizer(()) for _ in range(n)]
    return LiveRequest("gen-1", request, detokenizers, model="m", now=10.0, arrival_time_s=1e9, is_streaming=True)


def give(live: LiveRequest, first: int, token_ids: Sequence[int], now: float = 11.0, **fields: Any) -> Effect:
    return live.on_tokens(tokens(KEY, first, token_ids, **fields).tokens, now)


def enter(live: LiveRequest, entered: Any, now: float, cached: int = 0) -> None:
    live.on_phase(phase(KEY, entered, cached).phase, now)


def place(live: LiveRequest) -> None:
    """On workers `p` and `d`, which need no connection here."""
    placement = Placement("p", "d", "disaggregated: p -> d, least work")
    live.attempts.append(Attempt(live.key, placement, 10.0, Charge(LoadTracker(), placement, live.work), None, []))


def take(live: LiveRequest) -> list[pb.GenerateStreamResponse]:
    return StreamReader(live).take()


def deltas(events: list[pb.GenerateStreamResponse]) -> list[pb.SequenceDelta]:
    return [event.delta for event in events if event.HasField("delta")]


def test_a_character_that_the_last_token_leaves_unfinished_is_told_as_a_replacement() -> None:
    live, (half, _) = live_request(), ids("é")
    give(live, 0, [*ids("a"), half], finish_reason=LENGTH)
    live.finish(12.0)
    assert text_of(take(live)) == "a\N{REPLACEMENT CHARACTER}"


@given(st.permutations(range(12)), st.lists(st.booleans(), min_size=12, max_size=12))
def test_tokens_in_any_order_and_twice_come_out_once_and_in_order(order: list[int], takes: list[bool]) -> None:
    live = live_request()
    events = []
    text = "twelve chars"
    for at, is_taken in zip(order, takes, strict=True):
        for _ in range(2):
            give(live, at, ids(text[at]), finish_reason=LENGTH if at == 11 else 0)
        if is_taken:
            events += take(live)
    live.finish(12.0)
    events += take(live)
    assert text_of(events) == text
    position = 0
    for delta in deltas(events):
        assert delta.first_token_index == position
        position += delta.token_count
    assert position == 12 and kinds(events)[-2:] == ["sequence_end", "completed"]


def test_a_slow_client_gets_everything_since_its_last_take_as_one_delta() -> None:
    live = live_request()
    for position in range(200):
        give(live, position, ids("x"))
    events = take(live)
    assert kinds(events) == ["started", "delta"]
    assert deltas(events)[0].token_count == 200 and deltas(events)[0].text == "x" * 200
    assert take(live) == []


def test_an_error_comes_after_the_tokens_that_were_there() -> None:
    live = live_request(interval=50)
    give(live, 0, ids("a"))
    take(live)
    give(live, 1, ids("b"))
    assert take(live) == []
    live.fail(Unavailable("lost"), 12.0)
    assert text_of(take(live)) == "b"
    assert isinstance(live.error, Unavailable) and live.is_over


def test_a_stop_token_has_no_text_but_counts() -> None:
    live = live_request(stop_token_ids=ids("!"))
    give(live, 0, ids("ab!"), finish_reason=STOP, stop_token_id=ids("!")[0])
    live.finish(12.0)
    events = take(live)
    assert text_of(events) == "ab" and list(deltas(events)[0].token_ids) == ids("ab!")
    end = events[-2].sequence_end
    assert (end.stop_token_id, end.token_count) == (ids("!")[0], 3)


def test_a_stop_token_is_kept_in_the_text_on_demand() -> None:
    live = live_request(stop_token_ids=ids("!"), include_stop_in_output=True)
    give(live, 0, ids("ab!"), finish_reason=STOP, stop_token_id=ids("!")[0])
    assert text_of(take(live)) == "ab!"


def test_a_stop_string_does_not_end_a_sequence_before_its_minimum() -> None:
    live = live_request(stop=["b"], min_output_tokens=4)
    assert give(live, 0, ids("abab-b!")) is Effect.STOPPED
    assert text_of(take(live)) == "aba"


def test_text_held_back_for_a_stop_string_comes_when_the_sequence_ends_otherwise() -> None:
    live = live_request(stop=["xyz"])
    give(live, 0, ids("axy"))
    first = take(live)
    assert text_of(first) == "a" and deltas(first)[0].token_count == 3
    assert give(live, 3, [], finish_reason=LENGTH) is Effect.ENDED
    rest = take(live)
    assert text_of(rest) == "xy" and deltas(rest)[0].token_count == 0


def test_tokens_of_a_sequence_that_was_not_asked_for_change_nothing() -> None:
    live = live_request()
    assert give(live, 0, ids("a"), sequence_index=1, finish_reason=LENGTH) is Effect.OPEN
    assert live.num_tokens == 0 and not live.is_complete


def test_an_end_by_length_names_no_stop() -> None:
    live = live_request()
    give(live, 0, ids("ab"), finish_reason=LENGTH)
    assert take(live)[-1].sequence_end.WhichOneof("matched_stop") is None


@pytest.mark.parametrize("stop", [(), ("xyz",)])
def test_a_character_that_the_end_cuts_off_is_told_as_such(stop: tuple[str, ...]) -> None:
    live = live_request(stop=stop)
    give(live, 0, ids("aé")[:2], finish_reason=LENGTH)
    assert text_of(take(live)) == "a\N{REPLACEMENT CHARACTER}"


def test_an_end_in_the_same_event_as_a_stop_string_needs_no_cancel() -> None:
    live = live_request(stop=["b"])
    assert give(live, 0, ids("ab"), finish_reason=LENGTH) is Effect.ENDED
    assert take(live)[-1].sequence_end.stop_string == "b"


def test_timing_is_the_difference_of_recorded_instants() -> None:
    live = live_request(include_timing=True)
    place(live)
    enter(live, PREFILL, 11.0, cached=1)
    give(live, 0, ids("a"), now=13.0)
    enter(live, TRANSFER, 13.5)
    enter(live, DECODE, 14.0)
    give(live, 1, ids("b"), now=18.0, finish_reason=LENGTH)
    live.finish(18.0)
    completed = take(live)[-1].completed
    timing = completed.timing
    seconds = {
        name: getattr(timing, name).ToNanoseconds() / 1e9
        for name in ("queue", "prefill", "kv_transfer", "time_to_first_token", "decode")
    }
    assert seconds == {"queue": 1, "prefill": 2, "kv_transfer": 0.5, "time_to_first_token": 3, "decode": 4}
    assert timing.arrival_time.seconds == 10**9 and timing.placement.startswith("disaggregated")
    assert completed.usage.cached_tokens == 1


def test_another_attempt_is_placed_with_the_tokens_that_came() -> None:
    live = live_request()
    num_prompt = live.to_place.work.num_prompt_tokens
    place(live)
    give(live, 0, ids("abc"))
    live.restart(12.0, "lost")
    assert live.to_place.work.num_prompt_tokens == num_prompt + 3
    assert live.to_place.prompt.of(1).num_blocks == num_prompt + 3 - 1
    assert [attempt.has_failed for attempt in live.attempts] == [True]


def test_what_an_attempt_sent_too_early_is_dropped_with_it() -> None:
    live = live_request()
    give(live, 2, ids("x"))
    live.restart(12.0, "lost")
    give(live, 0, ids("ab"))
    give(live, 2, ids("c"))
    assert text_of(take(live)) == "abc"


def test_a_first_token_that_ends_it_all_needs_no_hand_off() -> None:
    live = live_request()
    enter(live, PREFILL, 11.0)
    give(live, 0, ids("a"), finish_reason=LENGTH)
    live.finish(12.0)
    states = [entry.state for entry in live.lifecycle.history]
    assert states == [RequestState.QUEUED, RequestState.PREFILLING, RequestState.DECODING, RequestState.FINISHED]


def test_a_stream_begins_when_a_worker_has_begun_with_the_request() -> None:
    live = live_request()
    live.output.heartbeat()
    assert "started" not in kinds(take(live))
    enter(live, PREFILL, 11.0)
    assert "started" in kinds(take(live))


def test_interleaved_phases_never_lead_backwards() -> None:
    live = live_request()
    enter(live, DECODE, 11.0)
    enter(live, PREFILL, 11.5, cached=2)
    enter(live, TRANSFER, 12.0)
    states = [entry.state for entry in live.lifecycle.history]
    assert states == [
        RequestState.QUEUED,
        RequestState.PREFILLING,
        RequestState.TRANSFERRING,
        RequestState.DECODING,
    ]
    assert live.num_cached_tokens == 2


def test_prefill_is_left_when_decode_runs_and_every_first_token_is_here() -> None:
    live = live_request(n=2)
    place(live)
    enter(live, DECODE, 11.0)
    give(live, 0, ids("a"))
    assert not live.has_left_prefill
    give(live, 0, ids("b"), sequence_index=1)
    assert live.has_left_prefill


def test_an_event_wakes_the_client_only_when_there_is_something_due() -> None:
    live = live_request(interval=3)
    give(live, 0, ids("a"))
    take(live)
    give(live, 1, ids("b"))
    assert take(live) == []
    give(live, 2, ids("cd"))
    assert text_of(take(live)) == "bcd"


@pytest.mark.parametrize("num_ended", [0, 1])
def test_a_cancel_ends_open_sequences_as_cancelled(num_ended: int) -> None:
    live = live_request(n=2)
    for index in range(num_ended):
        give(live, 0, ids("a"), sequence_index=index, finish_reason=LENGTH)
    live.cancel(12.0, "test")
    ends = [event.sequence_end for event in take(live) if event.HasField("sequence_end")]
    reasons = [end.finish_reason for end in sorted(ends, key=lambda end: end.index)]
    assert reasons == [LENGTH] * num_ended + [pb.FINISH_REASON_CANCELLED] * (2 - num_ended)
