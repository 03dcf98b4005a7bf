"""Layers that keep recurrent states through the hand-off: decode gets those behind the last token, and no others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner
from reference_engine import Engine
from workers import Worker, hand_off, merged, running, sampling

from cluster.errors import ConfigError
from cluster.settings import WorkerSettings
from engine.kv.block_manager import BlockManager
from engine.models.folder import read_model
from engine.sampling.params import SamplingParams
from kv_transfer.codec import HEADER_BYTES
from worker.resolved import resolve

NUM_TOKENS = 14
LENGTHS = (1, 16, 17, 101, 300)
KINDS = {"greedy": {"temperature": 0.0}, "three at once": {"temperature": 1.0, "seed": 7, "n": 3}}
PAIRS = [((1, 16), (1, 32)), ((1, 32), (1, 16)), ((1, 16), (2, 16)), ((2, 32), (1, 16)), ((2, 32), (2, 16))]
"""Tensor-parallel and block size of the prefill worker, and of the decode worker."""


def prompt_of(length: int) -> list[int]:
    return [(i * 37 + length) % (VOCAB_SIZE - 1) + 1 for i in range(length)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One KV head, so that ranks outnumber KV heads, but not the heads of states."""
    return make_checkpoint("qwen3-next", tmp_path_factory.mktemp("next"), num_key_value_heads=1, head_dim=64)


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


def expected(folder: Path, prompt: list[int], kind: str, kv_cache_dtype: str = "auto") -> list[tuple[int, ...]]:
    block_size = 64 if kv_cache_dtype == "int8" else 16
    runner = make_runner(folder, num_blocks=128, block_size=block_size, attention="cpu", kv_cache_dtype=kv_cache_dtype)
    blocks = BlockManager(runner.kv.shape[2], block_size, groups=runner.config.kv_groups)
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


def test_of_a_state_the_newest_is_sent_and_nothing_else(
    folder: Path, fleet: dict[tuple[str, int, int], Worker]
) -> None:
    prefill, decode = fleet["prefill", 1, 16], fleet["decode", 1, 32]
    config, length = read_model(folder), 203
    assert config.delta_net is not None
    before = prefill.stats.kv_bytes_sent
    outputs_of("counted", prompt_of(length), prefill, decode)
    sent = prefill.stats.kv_bytes_sent - before

    kv_bytes = length * 2 * config.num_key_value_heads * config.head_dim * 4
    wanted = kv_bytes + len(config.state_layers) * config.delta_net.state.size_bytes(config.delta_net.num_key_heads)
    assert wanted < sent < 1.05 * wanted
    assert (sent - wanted) % HEADER_BYTES == 0


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
    assert config.delta_net is not None
    new = len(turns) - (len(first) + NUM_TOKENS - 1) // 16 * 16
    states = len(config.state_layers) * config.delta_net.state.size_bytes(config.delta_net.num_key_heads)
    assert received < 1.2 * (new * 2 * config.num_key_value_heads * config.head_dim * 4 + states)

    moved = [*turns, *second[0][:5]]
    assert outputs_of("moved", moved, decode, other)[0][:9] == second[0][5:]


MORE = [
    {"transport": "shm_pages"},
    {"transport": "gloo", "kv_cache_dtype": "int8", "block_size": 64},
    {"transport": "shm_pages", "tp_size": 2},
]


@pytest.mark.parametrize("more", MORE, ids=str)
def test_other_transports_and_rounded_kv_give_one_workers_tokens(folder: Path, more: dict[str, object]) -> None:
    values = {"tp_size": 1, "block_size": 16, **more}
    with running(worker(folder, "prefill", **values), worker(folder, "decode", **values)) as (prefill, decode):
        for length in LENGTHS:
            outputs = outputs_of(f"{length}", prompt_of(length), prefill, decode)
            kv_cache_dtype = str(more.get("kv_cache_dtype", "auto"))
            assert outputs == expected(folder, prompt_of(length), "greedy", kv_cache_dtype), length


def test_a_worker_refuses_blocks_without_room_and_deterministic_steps_before_it_starts(folder: Path) -> None:
    settings = WorkerSettings.from_values(worker_id="p", role="prefill", model_path=str(folder))
    with pytest.raises(ConfigError, match=r"block_size: 4 tokens .* no room for the recurrent state"):
        assert resolve(settings.with_values(block_size=4)).block_size
    with pytest.raises(ConfigError, match=r"engine\.deterministic: Qwen3NextForCausalLM"):
        resolve(settings.with_values(deterministic=True))
    assert resolve(settings).block_size >= 16
