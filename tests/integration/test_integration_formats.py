"""Wire formats and prefix caches: what either side holds already is not sent, and what is sent may be smaller.

Prompts share a beginning that one side, the other or both have in their prefix cache, in blocks of different sizes.
With `native` the tokens are those of the single-process engine. With `int8` and `fp8` the KV of the prompt is rounded:
the first decoded token's logprob stays within a stated distance of the exact one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reference_engine import Completion, Engine
from workers import ROOT, Output, Worker, hand_off, merged, running, sampling

from cluster.lifecycle import RequestKey
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.tp import SingleGroup

MODEL = ROOT / "models" / "tiny-shakespeare"
BEGINNING = [(i * 37) % 1000 + 5 for i in range(77)]
NUM_TOKENS = 12
LONG = pytest.mark.battery
TOLERANCE = {"int8": 0.02, "fp8": 0.08}
"""Most that the logprob of the first decoded token may differ."""
TOKEN_BYTES = {"native": 4096, "int8": 1024 + 128, "fp8": 1024 + 128}
"""4 layers, key and value, 4 heads of 32: float32, or one byte each and a float32 scale for each head."""


def prompt_of(number: int) -> list[int]:
    """The common beginning, then an end of its own."""
    return BEGINNING + [(i * 13 + number * 101) % 1000 + 5 for i in range(20 + 3 * number)]


PROMPTS = [prompt_of(number) for number in range(4)]


@pytest.fixture(scope="module")
def reference() -> list[Completion]:
    runner = ModelRunner(
        MODEL, tp=SingleGroup(), device="cpu", dtype="float32", num_blocks=64, block_size=16, attention="cpu"
    )
    engine = Engine(runner, BlockManager(64, 16), runner.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS, top_logprobs=0)
    return [completions[0] for completions in engine.generate(PROMPTS, [params] * len(PROMPTS))]


def workers_of(wire_format: str, transport: str) -> list[Worker]:
    common = {
        "model_path": str(MODEL),
        "kv_cache_tokens": 2048,
        "chunk_tokens": 24,
        "wire_format": wire_format,
        "transport": transport,
    }
    return [
        Worker(worker_id="prefill-0", role="prefill", block_size=16, **common),
        Worker(worker_id="prefill-1", role="prefill", block_size=16, tp_size=2, **common),
        Worker(worker_id="decode-0", role="decode", block_size=8, tp_size=2, async_steps="on", **common),
        Worker(worker_id="decode-1", role="decode", block_size=8, **common),
    ]


@pytest.fixture(
    scope="module",
    params=["native-gloo", "int8-shm", pytest.param("native-shm", marks=LONG), pytest.param("fp8-gloo", marks=LONG)],
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[Output], list[float]]]:
    """The wire format, the four prompts' outputs, and the bytes sent for each as a share of its whole prompt's.

    Prompt 0 finds nothing cached, 1 its beginning on the prefill side, 2 on the decode side, 3 on both.
    """
    wire_format, transport = request.param.split("-")
    with running(*workers_of(wire_format, transport)) as (prefill, other_prefill, decode, other_decode):
        pairs = [(prefill, decode), (prefill, other_decode), (other_prefill, decode), (prefill, decode)]
        outputs, shares = [], []
        for number, (sender, receiver) in enumerate(pairs):
            before = sender.stats.kv_bytes_sent
            key = run(f"prompt {number}", PROMPTS[number], sender, receiver)
            outputs.append(merged(key, sender, receiver))
            whole = TOKEN_BYTES[wire_format] * len(PROMPTS[number])
            shares.append((sender.stats.kv_bytes_sent - before) / whole)
        yield wire_format, outputs, shares


def run(name: str, prompt: list[int], prefill: Worker, decode: Worker) -> RequestKey:
    how = sampling(max_output_tokens=NUM_TOKENS, top_logprobs=0)
    key = hand_off(name, prompt, prefill, decode, how)
    decode.wait_for(lambda: decode.outputs[key].finished)
    prefill.wait_idle()
    decode.wait_idle()
    return key


def test_only_what_the_decode_worker_lacks_is_sent(served: tuple[str, list[Output], list[float]]) -> None:
    _, _, shares = served
    assert shares[0] == pytest.approx(1, rel=0.05)
    assert shares[1] == pytest.approx(1, rel=0.05), "a prefix hit on the prefill side spares computing, not sending"
    for number in (2, 3):
        num_tokens = len(PROMPTS[number])
        cached = len(BEGINNING) // 8 * 8  # in whole blocks of the decode worker
        assert shares[number] == pytest.approx((num_tokens - cached) / num_tokens, rel=0.05)


def test_the_first_token_never_depends_on_the_wire(
    served: tuple[str, list[Output], list[float]], reference: list[Completion]
) -> None:
    _, outputs, _ = served
    for output, completion in zip(outputs, reference, strict=True):
        assert output.sequence()[0] == completion.token_ids[0]


def test_decoded_tokens_are_those_of_one_process_as_far_as_the_format_is_exact(
    served: tuple[str, list[Output], list[float]], reference: list[Completion]
) -> None:
    wire_format, outputs, _ = served
    for output, completion in zip(outputs, reference, strict=True):
        if wire_format == "native":
            assert tuple(output.sequence()) == completion.token_ids
        if output.sequence()[1] == completion.token_ids[1]:
            off_by = abs(output.logprobs[0][1] - completion.sampled[1].logprob)
            assert off_by <= TOLERANCE.get(wire_format, 1e-4)
    same = sum(o.sequence()[1] == c.token_ids[1] for o, c in zip(outputs, reference, strict=True))
    assert same >= len(PROMPTS) - 1, "rounding may tip a close choice, but not several"


@pytest.mark.parametrize(
    "rounded",
    [{"kv_cache_dtype": "int8"}, {"quantization": "int4"}, pytest.param({"quantization": "int8"}, marks=LONG)],
)
def test_rounded_weights_and_pools_give_the_tokens_of_one_process_that_rounds(rounded: dict[str, str]) -> None:
    """KV of int8 is moved as it lies, whatever the blocks; weights are rounded alike on both sides."""
    sizes = {"num_blocks": 64, "block_size": 16, "dtype": "bfloat16", **rounded}
    runner = ModelRunner(MODEL, tp=SingleGroup(), device="cpu", **sizes)  # type: ignore[arg-type]
    engine = Engine(runner, BlockManager(64, 16), runner.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS, top_logprobs=0)
    (expected,) = (completions[0] for completions in engine.generate(PROMPTS[:1], [params]))
    common = {"model_path": str(MODEL), "dtype": "bfloat16", "kv_cache_tokens": 2048, "chunk_tokens": 24, **rounded}
    prefill = Worker(worker_id="prefill-0", role="prefill", block_size=16, **common)
    decode = Worker(worker_id="decode-0", role="decode", block_size=8, **common)
    with running(prefill, decode) as (sender, receiver):
        key = run(str(rounded), PROMPTS[0], sender, receiver)
        output = merged(key, sender, receiver)
    assert tuple(output.sequence()) == expected.token_ids
    logprobs = dict(enumerate(token.logprob for token in expected.sampled))
    assert output.logprobs[0] == pytest.approx(logprobs, abs=1e-3)
