"""The disaggregated path equals the single-process engine: every pair of tensor-parallel sizes and block sizes.

Workers of blocks of 16 compute the prompt in several steps, those of 32 in one, whose layers are sent one group after
another.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet
from reference_engine import Completion, Engine
from workers import ROOT, Worker, hand_off, merged, running, sampling

from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.tp import SingleGroup
from kv_transfer.codec import HEADER_BYTES

MODEL = ROOT / "models" / "tiny-shakespeare"
TP_SIZES = (1, 2, 4)
BLOCK_SIZES = (16, 32)
TRANSPORTS = ("shm", "gloo")
PROMPT = [(i * 37) % 1000 + 5 for i in range(101)]
NUM_TOKENS = 14
"""The prompt of 101 and these go over the end of a block of 16."""
IN_SHORT = {((1, 1), (16, 16)), ((1, 2), (16, 32)), ((2, 1), (32, 32)), ((4, 2), (32, 16))}
"""Tensor-parallel sizes and block sizes that `make test` has; `make families` has the whole product."""

KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 1234},
    "penalized": {"temperature": 0.7, "seed": 99, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "three at once": {"temperature": 1.0, "seed": 7, "n": 3},
}


def every_pair_of_sizes() -> list[ParameterSet]:
    """Tensor-parallel and block sizes of both workers."""
    return [
        pytest.param(*tp_sizes, *blocks, marks=[] if (tp_sizes, blocks) in IN_SHORT else [pytest.mark.battery])
        for tp_sizes in itertools.product(TP_SIZES, TP_SIZES)
        for blocks in itertools.product(BLOCK_SIZES, BLOCK_SIZES)
    ]


@pytest.fixture(scope="module")
def reference() -> dict[str, list[Completion]]:
    """What the single-process engine generates for each kind of request."""
    runner = ModelRunner(
        MODEL, tp=SingleGroup(), device="cpu", dtype="float32", num_blocks=64, block_size=16, attention="cpu"
    )
    params = [SamplingParams(**{"max_output_tokens": NUM_TOKENS, "top_logprobs": 0, **kind}) for kind in KINDS.values()]
    engine = Engine(runner, BlockManager(64, 16), runner.config.vocab_size)
    return dict(zip(KINDS, engine.generate([PROMPT] * len(params), params), strict=True))


class Fleet(dict[tuple[str, int, int], Worker]):
    """A worker of each role, tensor-parallel size and block size, started when a test first asks for it."""

    def __init__(self, transport: str, ends: contextlib.ExitStack) -> None:
        super().__init__()
        self._transport, self._ends = transport, ends

    def __missing__(self, wanted: tuple[str, int, int]) -> Worker:
        role, tp_size, block_size = wanted
        worker = Worker(
            worker_id=f"{role}-tp{tp_size}-b{block_size}",
            role=role,
            model_path=str(MODEL),
            tp_size=tp_size,
            block_size=block_size,
            kv_cache_tokens=2048,
            max_num_batched_tokens=3 * 16 if block_size == 16 else 128,
            max_num_seqs=16,
            chunk_tokens=32,
            transport=self._transport,
        )
        self._ends.enter_context(running(worker))
        self[wanted] = worker
        return worker


@pytest.fixture(scope="module", params=TRANSPORTS)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """On each transport in turn."""
    with contextlib.ExitStack() as ends:
        yield Fleet(request.param, ends)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "prefill_block", "decode_block"), every_pair_of_sizes())
def test_a_handed_off_request_equals_the_single_process_engine(
    prefill_tp: int,
    decode_tp: int,
    prefill_block: int,
    decode_block: int,
    fleet: Fleet,
    reference: dict[str, list[Completion]],
) -> None:
    prefill = fleet["prefill", prefill_tp, prefill_block]
    decode = fleet["decode", decode_tp, decode_block]
    name = f"{prefill.settings.worker_id}>{decode.settings.worker_id}"
    keys = {
        kind: hand_off(
            f"{name} {kind}",
            PROMPT,
            prefill,
            decode,
            sampling(max_output_tokens=NUM_TOKENS, top_logprobs=0, **values),
            bypass_prefix_cache=True,
        )
        for kind, values in KINDS.items()
    }
    for kind, key in keys.items():
        n = KINDS[kind].get("n", 1)
        decode.wait_for(lambda key=key, n=n: len(decode.outputs[key].finished) == n)
        prefill.wait_for(lambda key=key, n=n: len(prefill.outputs[key].tokens) == n)  # told on a session of its own
        output = merged(key, prefill, decode)
        for index, completion in enumerate(reference[kind]):
            assert tuple(output.sequence(index)) == completion.token_ids, kind
            logprobs = [output.logprobs[index][i] for i in range(NUM_TOKENS)]
            wanted = [sampled.logprob for sampled in completion.sampled]
            assert logprobs == pytest.approx(wanted, abs=1e-4), kind
    prefill.wait_idle()
    decode.wait_idle()


def test_kv_travels_and_is_counted(fleet: Fleet) -> None:
    prefill, decode = fleet["prefill", 4, 32], fleet["decode", 2, 16]
    before = prefill.stats.kv_bytes_sent, decode.stats.kv_bytes_received
    key = hand_off("counted", PROMPT, prefill, decode, sampling(max_output_tokens=2), bypass_prefix_cache=True)
    decode.wait_for(lambda: decode.outputs[key].finished)
    prefill.wait_idle()
    decode.wait_idle()
    kv_bytes = 4 * 2 * 4 * 32 * 4 * len(PROMPT)  # layers, k and v, heads, head_dim, float32
    sent, received = prefill.stats.kv_bytes_sent - before[0], decode.stats.kv_bytes_received - before[1]
    assert sent == received
    assert kv_bytes < sent < 1.01 * kv_bytes  # each chunk of each route has a header
    assert (sent - kv_bytes) % HEADER_BYTES == 0


def test_only_what_the_decode_worker_does_not_hold_is_sent(fleet: Fleet) -> None:
    prefill, decode = fleet["prefill", 1, 16], fleet["decode", 1, 16]
    prompt = [(i * 11) % 900 + 3 for i in range(100)]
    outputs = []
    sent = []
    for name in ("cold", "warm"):
        before = prefill.stats.kv_bytes_sent
        key = hand_off(name, prompt, prefill, decode, sampling(max_output_tokens=8))
        decode.wait_for(lambda key=key: decode.outputs[key].finished)
        prefill.wait_idle()
        outputs.append(merged(key, prefill, decode).sequence())
        sent.append(prefill.stats.kv_bytes_sent - before)
    assert outputs[0] == outputs[1]
    assert sent[1] / sent[0] == pytest.approx(4 / 100, abs=0.005)  # 96 of 100 tokens are cached in full blocks
