"""Layers with a window, and latents, through the hand-off: what decode needs of each group of layers is sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner
from reference_engine import Engine
from workers import Worker, hand_off, merged, running, sampling

from engine.kv.block_manager import BlockManager
from engine.models.folder import read_model
from engine.sampling.params import SamplingParams
from kv_transfer.codec import HEADER_BYTES

NUM_TOKENS = 14
WINDOW = 24
LENGTHS = (1, 16, 23, 24, 101, 300)
KINDS = {"greedy": {"temperature": 0.0}, "three at once": {"temperature": 1.0, "seed": 7, "n": 3}}
PAIRS = [((1, 16), (1, 32)), ((1, 32), (1, 16)), ((1, 16), (2, 16)), ((2, 32), (1, 16)), ((2, 32), (2, 16))]
"""Tensor-parallel and block size of the prefill worker, and of the decode worker."""
MODELS: dict[str, dict[str, object]] = {
    **{kind: {"sliding_window": WINDOW} for kind in ("gemma3", "gpt-oss", "mistral")},
    "deepseek-v3": {},
}


def prompt_of(length: int) -> list[int]:
    return [(i * 37 + length) % (VOCAB_SIZE - 1) + 1 for i in range(length)]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), **MODELS[request.param])


def worker(folder: Path, role: str, tp_size: int, block_size: int, **more: object) -> Worker:
    return Worker(
        worker_id=f"{role}-tp{tp_size}-b{block_size}-{more.get('transport', 'shm')}",
        role=role,
        model_path=str(folder),
        tp_size=tp_size,
        block_size=block_size,
        kv_cache_tokens=2048,
        max_model_len=1024,
        max_num_batched_tokens=3 * 16 if block_size == 16 else 128,
        max_num_seqs=16,
        chunk_tokens=32,
        **{"transport": "shm", **more},
    )


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[dict[tuple[str, int, int], Worker]]:
    sides = [("prefill", *prefill) for prefill, _ in PAIRS] + [("decode", *decode) for _, decode in PAIRS]
    wanted = list(dict.fromkeys(sides))
    workers = [worker(folder, *one) for one in wanted]
    with running(*workers):
        yield dict(zip(wanted, workers, strict=True))


def expected(folder: Path, prompt: list[int], kind: str) -> list[tuple[int, ...]]:
    runner = make_runner(folder, num_blocks=128, attention="cpu")
    blocks = BlockManager(runner.kv.shape[2], 16, groups=runner.config.kv_groups)
    params = SamplingParams(**{"max_output_tokens": NUM_TOKENS, **KINDS[kind]})
    (completions,) = Engine(runner, blocks, VOCAB_SIZE).generate([prompt], [params])
    return [completion.token_ids for completion in completions]


def outputs_of(
    name: str, prompt: list[int], prefill: Worker, decode: Worker, kind: str = "greedy"
) -> list[tuple[int, ...]]:
    values, n = KINDS[kind], int(KINDS[kind].get("n", 1))
    key = hand_off(name, prompt, prefill, decode, sampling(max_output_tokens=NUM_TOKENS, **values))
    decode.wait_for(lambda: len(decode.outputs[key].finished) == n)
    prefill.wait_for(lambda: len(prefill.outputs[key].tokens) == n)
    prefill.wait_idle()
    decode.wait_idle()
    output = merged(key, prefill, decode)
    return [tuple(output.sequence(index)) for index in range(n)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_handed_off_request_equals_the_single_process_engine(
    pair: tuple[tuple[int, int], tuple[int, int]], folder: Path, fleet: dict[tuple[str, int, int], Worker]
) -> None:
    prefill, decode = fleet["prefill", *pair[0]], fleet["decode", *pair[1]]
    for length, kind in itertools.product(LENGTHS, KINDS):
        prompt = prompt_of(length)
        outputs = outputs_of(f"{pair} {length} {kind}", prompt, prefill, decode, kind)
        assert outputs == expected(folder, prompt, kind), (length, kind)


def test_of_a_window_no_more_is_sent_than_decode_needs(folder: Path, fleet: dict[tuple[str, int, int], Worker]) -> None:
    prefill, decode = fleet["prefill", 1, 16], fleet["decode", 1, 32]
    config, length = read_model(folder), 203
    before = prefill.stats.kv_bytes_sent
    outputs_of("counted", prompt_of(length), prefill, decode)
    sent = prefill.stats.kv_bytes_sent - before

    cells = sum(length if window is None else WINDOW - 1 for window in config.layer_windows)
    kv_bytes = cells * config.num_kv_planes * config.num_key_value_heads * config.head_dim * 4
    assert kv_bytes < sent < 1.05 * kv_bytes
    assert (sent - kv_bytes) % HEADER_BYTES == 0


def test_a_conversation_goes_on_with_what_both_workers_have(
    folder: Path, fleet: dict[tuple[str, int, int], Worker]
) -> None:
    """The second turn, and then the move of its sequence to another decode worker, which takes what it lacks."""
    prefill, decode, other = fleet["prefill", 1, 16], fleet["decode", 1, 16], fleet["decode", 2, 16]
    first = prompt_of(150)
    turns = [*first, *outputs_of("first", first, prefill, decode)[0], *prompt_of(40)]
    before = decode.stats.kv_bytes_received
    second = outputs_of("second", turns, prefill, decode)
    received = decode.stats.kv_bytes_received - before
    assert second == expected(folder, turns, "greedy")
    config = read_model(folder)
    new = len(turns) - (len(first) + NUM_TOKENS - 1) // 16 * 16
    cells = sum(new if window is None else min(new, WINDOW - 1) for window in config.layer_windows)
    assert received < 1.2 * cells * config.num_kv_planes * config.num_key_value_heads * config.head_dim * 4

    moved = [*turns, *second[0][:5]]
    assert outputs_of("moved", moved, decode, other)[0][:9] == second[0][5:]


@pytest.mark.parametrize("more", [{"transport": "shm_pages"}, {"transport": "gloo", "kv_cache_dtype": "int8"}], ids=str)
def test_other_transports_and_rounded_kv_give_one_workers_tokens(folder: Path, more: dict[str, object]) -> None:
    with running(worker(folder, "prefill", 1, 16, **more), worker(folder, "decode", 1, 16, **more)) as (
        prefill,
        decode,
    ):
        for length in LENGTHS:
            outputs = outputs_of(f"{length}", prompt_of(length), prefill, decode)
            runner = make_runner(folder, num_blocks=128, kv_cache_dtype=str(more.get("kv_cache_dtype", "auto")))
            blocks = BlockManager(runner.kv.shape[2], 16, groups=runner.config.kv_groups)
            params = SamplingParams(max_output_tokens=NUM_TOKENS, temperature=0.0)
            ((completion,),) = Engine(runner, blocks, VOCAB_SIZE, 48).generate([prompt_of(length)], [params])
            assert outputs == [completion.token_ids], length


@pytest.mark.battery
@pytest.mark.timeout(1200)
def test_latents_are_handed_over_between_any_two_tensor_parallel_sizes(tmp_path: Path) -> None:
    """Every receiving rank gets each latent once. `pytest -m battery` runs it; it starts eleven ranks."""
    folder, sizes = make_checkpoint("deepseek-v2", tmp_path), (1, 2, 4)
    config, length = read_model(folder), 203
    sides = [(role, size) for role in ("prefill", "decode") for size in sizes]
    with running(*[worker(folder, role, size, 16 if role == "prefill" else 32) for role, size in sides]) as workers:
        fleet = dict(zip(sides, workers, strict=True))
        for (sender, receiver), kind in itertools.product(itertools.product(sizes, sizes), KINDS):
            prefill, decode = fleet["prefill", sender], fleet["decode", receiver]
            before = decode.stats.kv_bytes_received
            for number in (length, 17, 1):
                outputs = outputs_of(f"{sender} {receiver} {kind} {number}", prompt_of(number), prefill, decode, kind)
                assert outputs == expected(folder, prompt_of(number), kind), (sender, receiver, kind, number)
            received = decode.stats.kv_bytes_received - before
            if kind == "greedy" and sender == 1:
                latents = (length + 17 + 1) * config.num_hidden_layers * config.head_dim * 4
                assert latents < received / receiver < 1.1 * latents, (sender, receiver)
