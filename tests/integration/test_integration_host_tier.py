"""KV in host memory and on a disk: prompts that have left the pool are loaded again, and every output is what it is
without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos_fleet import await_true, metrics_of
from checkpoints import VOCAB_SIZE, make_checkpoint
from cluster_fixture import BUNDLED_MODEL, PREFILL, PlainCluster, Stream, single_process, token_spec
from engine_steps import make_runner
from reference_engine import Engine
from workers import Worker, hand_off, merged, running, sampling

from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from engine.kv.block_manager import BlockManager
from engine.sampling.params import SamplingParams

POOL = 1024
BLOCK_BYTES = 16 * 4 * 2 * 4 * 32 * 4  # tokens, layers, k and v, heads, head_dim, float32
NUM_PROMPTS = 6
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS)
HOW = sampling(max_output_tokens=NUM_TOKENS, temperature=0.0, seed=7, n=1)


def prompt_of(number: int, length: int = 400, vocab_size: int = 1000) -> list[int]:
    return [(number * 131 + i * 37) % (vocab_size - 5) + 5 for i in range(length)]


def tier_of(address: str) -> Mapping[str, float]:
    """What a worker's page says of the blocks below its pool, by event."""
    page = metrics_of(address)
    return {dict(has)["event"]: n for (name, has), n in page.items() if name == "baton_kv_tier_events_total"}


def tier_blocks(address: str) -> float:
    """Blocks that are kept on a worker's disk."""
    return metrics_of(address)["baton_kv_tier_blocks", frozenset({("tier", "disk"), ("state", "kept")})]


def ask_all(
    turn: str, prompts: Sequence[list[int]], expected: Sequence[object], prefill: Worker, decode: Worker
) -> list[RequestKey]:
    """One after the other; every output must be the one expected."""
    keys = []
    for number, prompt in enumerate(prompts):
        key = hand_off(f"{turn} {number}", prompt, prefill, decode, HOW)
        decode.wait_for(lambda key=key: decode.outputs[key].finished or decode.outputs[key].failed is not None)
        prefill.wait_for(lambda key=key: prefill.outputs[key].tokens)
        tokens = merged(key, prefill, decode).tokens[0]
        assert tuple(tokens[at] for at in range(len(tokens))) == expected[number], (turn, number)
        keys.append(key)
    prefill.wait_idle()
    return keys


def found_in(stats: worker_pb2.WorkerStats) -> dict[str, int]:
    """Tokens that a worker has found, by tier."""
    return {"device": stats.num_hit_tokens} | {tier.tier: tier.num_hit_tokens for tier in stats.tiers}


@pytest.mark.timeout(180)
def test_prompts_that_come_back_are_loaded_and_their_outputs_are_the_same(tmp_path: Path) -> None:
    prompts = [prompt_of(number) for number in range(NUM_PROMPTS)]
    expected = [completions[0].token_ids for completions in single_process(prompts, [GREEDY] * len(prompts))]
    more = {"kv_cache_tokens": POOL, "max_model_len": 512, "kv_host_bytes": 400 * BLOCK_BYTES, "metrics_port": 0}
    with PlainCluster(BUNDLED_MODEL, tmp_path, **more) as cluster:
        cached = []
        for _ in range(3):
            for number in range(NUM_PROMPTS):
                stream = Stream(cluster, token_spec(prompts[number], NUM_TOKENS), name=str(number))
                events = stream.result()
                assert tuple(stream.token_ids()) == expected[number]
                cached.append(next(e.completed.usage.cached_tokens for e in events if e.HasField("completed")))
        assert cached[:NUM_PROMPTS] == [0] * NUM_PROMPTS
        status = cluster.wait_for(lambda _: sum(found_in(cluster.stats(PREFILL)).values()) == sum(cached))
        found = found_in(cluster.stats(PREFILL))
        info = next(w.info for w in status.workers if w.worker_id == PREFILL)
        declined = 16 * tier_of(info.metrics_address)["declined"]  # a busy machine loads late, and computes instead
        missing = sum(384 - num for num in cached[NUM_PROMPTS:] if num < 384)
        assert missing <= declined, f"all but the last block of each prompt was found: {cached}"
        assert found["host"] + declined > found["device"], f"the pool holds two of six prompts: {found}"
        assert (info.host_bytes, info.disk_bytes) == (400 * BLOCK_BYTES, 0)
        assert info.pool_bytes == POOL // 16 * BLOCK_BYTES


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"kv_cache_dtype": "int8"}),
    "gemma3": ({"sliding_window": 24}, {}),
    "deepseek-v2": ({}, {"split_latents": True}),
    "deepseek-v3": ({}, {}),
    "qwen3-next": ({"num_key_value_heads": 1, "head_dim": 64}, {}),
}
OTHERS = ("llama", "deepseek-v2", "deepseek-v3")
"""By kind of KV, options of the model and of its workers: rounded, with windows, latents that ranks divide and whole
ones, recurrent states. `make families` runs the others."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.battery] * (kind in OTHERS)) for kind in KINDS])
def test_every_kind_of_kv_comes_back_on_two_ranks(kind: str, tmp_path: Path) -> None:
    options, settings = KINDS[kind]
    make_checkpoint(kind, tmp_path, **options)
    block_size = 32 if kind == "qwen3-next" else 16
    runner = make_runner(
        tmp_path,
        num_blocks=256,
        block_size=block_size,
        attention="cpu",
        kv_cache_dtype=settings.get("kv_cache_dtype", "auto"),
    )
    prompts = [prompt_of(number, 300, VOCAB_SIZE) for number in range(5)]
    params = SamplingParams(max_output_tokens=NUM_TOKENS, temperature=0.0)
    expected = []
    for prompt in prompts:
        blocks = BlockManager(256, block_size, groups=runner.config.kv_groups)
        ((completion,),) = Engine(runner, blocks, VOCAB_SIZE, 96).generate([prompt], [params])
        expected.append(completion.token_ids)
    common = {
        "model_path": str(tmp_path),
        "block_size": block_size,
        "kv_cache_tokens": 640,
        "max_model_len": 512,
        "max_num_batched_tokens": 96,
        "transport": "shm",
        **settings,
    }
    host = {"tp_size": 2, "kv_host_bytes": 64 << 20, "metrics_port": 0}
    prefill = Worker(worker_id=PREFILL, role="prefill", **host, **common)
    decode = Worker(worker_id="decode-0", role="decode", **common)
    how = sampling(max_output_tokens=NUM_TOKENS, temperature=0.0, seed=7, n=1)
    with running(prefill, decode):
        for turn in range(3):
            for number, prompt in enumerate(prompts):
                key = hand_off(f"{turn} {number}", prompt, prefill, decode, how)
                decode.wait_for(lambda key=key: decode.outputs[key].finished or decode.outputs[key].failed is not None)
                prefill.wait_for(lambda key=key: prefill.outputs[key].tokens)
                tokens = merged(key, prefill, decode).tokens[0]
                assert tuple(tokens[at] for at in range(len(tokens))) == expected[number], (turn, number)
            for worker in (prefill, decode):
                worker.wait_idle()
        tier = tier_of(prefill.info.metrics_address)
        assert tier["loaded"] >= 2 * len(prompts) and tier["failed"] == 0, tier


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.battery)])
def test_a_disk_is_found_again_by_the_worker_that_comes_after_a_killed_one(tp_size: int, tmp_path: Path) -> None:
    prompts = [prompt_of(number) for number in range(NUM_PROMPTS)]
    expected = [completions[0].token_ids for completions in single_process(prompts, [GREEDY] * len(prompts))]
    common = {"model_path": str(BUNDLED_MODEL), "kv_cache_tokens": POOL, "max_model_len": 512, "transport": "shm"}
    on_disk = {"kv_host_bytes": 60 * BLOCK_BYTES, "kv_disk_bytes": 64 << 20, "kv_disk_path": str(tmp_path / "kv")}
    decode = Worker(worker_id="decode-0", role="decode", **common)

    def start() -> Worker:
        return Worker(worker_id=PREFILL, role="prefill", tp_size=tp_size, metrics_port=0, **on_disk, **common)

    with running(decode):
        killed = start().connect()
        ask_all("first", prompts, expected, killed, decode)
        ask_all("second", prompts, expected, killed, decode)
        assert tier_of(killed.info.metrics_address)["read"] > 0
        for rank in killed.ranks:
            rank.popen.kill()
        for rank in killed.ranks:
            rank.stop()
        killed.hang_up()
        prefill = start()
        with running(prefill):
            ask_all("after", prompts, expected, prefill, decode)
            tier = tier_of(prefill.info.metrics_address)
            assert tier["read"] >= NUM_PROMPTS and tier["failed"] == 0, tier
        files = sorted((tmp_path / "kv").glob("*/*.rank*"))
        assert [file.name for file in files] == [f"1.rank{rank}" for rank in range(tp_size)]
        for file in files:
            with file.open("r+b") as damaged:
                for at in range(4096 + 100, file.stat().st_size, 4096):
                    damaged.seek(at)
                    damaged.write(b"damaged")
        prefill = start()
        with running(prefill):
            ask_all("damaged", prompts, expected, prefill, decode)
            assert tier_of(prefill.info.metrics_address)["read"] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.battery)])
def test_a_worker_that_began_beside_the_one_it_replaces_has_all_that_one_had(tp_size: int, tmp_path: Path) -> None:
    """Everything of it had room in its pool, so that nothing had been on the disk before its end."""
    prompts = [prompt_of(number) for number in range(NUM_PROMPTS)]
    expected = [completions[0].token_ids for completions in single_process(prompts, [GREEDY] * len(prompts))]
    common = {"model_path": str(BUNDLED_MODEL), "kv_cache_tokens": 4096, "max_model_len": 512, "transport": "shm"}
    on_disk = {"kv_host_bytes": 40 * BLOCK_BYTES, "kv_disk_bytes": 64 << 20, "kv_disk_path": str(tmp_path / "kv")}
    on_disk |= {"tp_size": tp_size, "metrics_port": 0, "role": "prefill"}
    decode = Worker(worker_id="decode-0", role="decode", **common)
    old = Worker(worker_id="prefill-0", **on_disk, **common).connect()
    new = Worker(worker_id="prefill-1", **on_disk, **common)
    with running(decode, new):
        ask_all("before", prompts, expected, old, decode)
        old.close()
        await_true(lambda: tier_blocks(new.info.metrics_address), lambda: new.ranks[0].stderr())
        keys = ask_all("after", prompts, expected, new, decode)
        assert [new.outputs[key].num_cached_tokens for key in keys] == [384] * len(prompts)
        tier = tier_of(new.info.metrics_address)
        assert tier["failed"] == 0 and tier["read"] == 24 * len(prompts), tier
        files = sorted(file.name for file in (tmp_path / "kv").glob("*/*.rank*"))
        assert files == [f"1.rank{rank}" for rank in range(tp_size)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("host_bytes", [0, 80 * BLOCK_BYTES])
def test_a_session_is_found_when_others_have_had_the_caches_and_outputs_stay_the_same(
    host_bytes: int, tmp_path: Path
) -> None:
    prompts = [prompt_of(number, 300) for number in range(8)]
    expected = [completions[0].token_ids for completions in single_process(prompts, [GREEDY] * len(prompts))]
    more = {"kv_cache_tokens": POOL, "max_model_len": 512, "kv_host_bytes": host_bytes}
    with PlainCluster(BUNDLED_MODEL, tmp_path, router={"session_ttl_s": 60.0}, **more) as cluster:

        def ask(number: int, session_id: str = "") -> int:
            """Cached tokens."""
            spec = token_spec(prompts[number], NUM_TOKENS)
            spec.scheduling.session_id = session_id
            stream = Stream(cluster, spec, name=str(number))
            events = stream.result()
            assert tuple(stream.token_ids()) == expected[number]
            return next(e.completed.usage.cached_tokens for e in events if e.HasField("completed"))

        assert ask(0, "chat") == ask(1) == 0
        for number in range(2, 8):
            ask(number)
        assert ask(0, "chat") >= 288, "all but the last block"
        assert ask(1) == 0, "it is as old, and belongs to no session"
