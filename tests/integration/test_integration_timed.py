"""Real workers whose steps are timed: hand-offs move real bytes, tokens are the hash of what came before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from workers import ROOT, Worker, hand_off, merged, running, sampling

from cluster.pb import generation_pb2, worker_pb2
from cluster.step_cost import StepCost
from engine.token_hash import TokenHash

MODEL = ROOT / "models" / "tiny-shakespeare"
PROMPT = [(i * 37) % 1000 + 5 for i in range(300)]
NUM_TOKENS = 20
DECODE_S, PROMPT_TOKEN_S = 0.02, 0.0002
VOCAB_SIZE = 1024


def expected(prompt: list[int], num_tokens: int, index: int = 0) -> list[int]:
    state, output = TokenHash(prompt), []
    for _ in range(num_tokens):
        output.append(state.next_token(VOCAB_SIZE, index))
        state.extend(output[-1:])
    return output


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Worker]]:
    """A prefill and a decode worker of other block sizes; what the prompt computes takes 60 ms, a token 20 ms."""
    workers = [
        Worker(
            worker_id=role,
            role=role,
            model_path=str(MODEL),
            block_size=block_size,
            kv_cache_tokens=4096,
            max_num_batched_tokens=256,
            fixed_s=DECODE_S,
            prompt_token_s=PROMPT_TOKEN_S,
            transfer_latency_s=0.001,
            transfer_gb_per_s=1.0,
        )
        for role, block_size in (("prefill", 16), ("decode", 32))
    ]
    with running(*workers) as both:
        yield both


def run(pair: list[Worker], name: str, prompt: list[int], **how: Any) -> list[list[int]]:
    prefill, decode = pair
    how = {"max_output_tokens": NUM_TOKENS, **how}
    key = hand_off(name, prompt, prefill, decode, sampling(**how))
    num = how.get("n", 1)
    decode.wait_for(lambda: len(decode.outputs[key].finished) == num)
    prefill.wait_idle()
    decode.wait_idle()
    output = merged(key, prefill, decode)
    assert set(output.finished.values()) == {generation_pb2.FINISH_REASON_LENGTH}
    return [output.sequence(index) for index in range(num)]


def test_a_handed_off_request_gets_the_hashes_of_its_prefixes(pair: list[Worker]) -> None:
    assert run(pair, "cold", PROMPT) == [expected(PROMPT, NUM_TOKENS)]


def test_a_prefix_from_the_cache_leads_to_the_same_tokens(pair: list[Worker]) -> None:
    longer = [*PROMPT[:200], *PROMPT[:50]]
    assert run(pair, "first", PROMPT) == [expected(PROMPT, NUM_TOKENS)]
    assert run(pair, "second", longer) == [expected(longer, NUM_TOKENS)]


def test_several_sequences_of_a_request_go_their_own_ways(pair: list[Worker]) -> None:
    assert run(pair, "three", PROMPT, n=3) == [expected(PROMPT, NUM_TOKENS, index) for index in range(3)]


def test_a_request_takes_the_time_of_its_steps(pair: list[Worker]) -> None:
    prompt, before = [token + 1 for token in PROMPT], time.monotonic()
    run(pair, "timed", prompt)
    steps_s = 2 * DECODE_S + len(prompt) * PROMPT_TOKEN_S + (NUM_TOKENS - 1) * DECODE_S
    assert steps_s < time.monotonic() - before
    learned_s = StepCost.from_proto(pair[1].stats.step_cost).of_sequences(1, len(prompt))
    assert DECODE_S / 4 < learned_s < 4 * DECODE_S, "beside other tests, steps take longer than their timer"


def test_what_needs_logits_is_refused_by_name(pair: list[Worker]) -> None:
    key = hand_off("scored", PROMPT, *pair, sampling(top_logprobs=0, logit_bias={3: 1.0}))
    pair[1].wait_for(lambda: pair[1].outputs[key].failed)
    failed = pair[1].outputs[key].failed
    assert failed is not None and failed.reason == worker_pb2.Failed.REASON_INVALID
    assert "leave out logprobs, logit_bias" in failed.message
