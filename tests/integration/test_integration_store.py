"""KV in a store that all workers share: prompts are loaded again after everything was restarted, and every output is
what it is without the store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chaos_fleet import await_true
from cluster_fixture import BUNDLED_MODEL, PREFILL, single_process
from test_integration_host_tier import BLOCK_BYTES, GREEDY, NUM_PROMPTS, POOL, ask_all, prompt_of, tier_of
from workers import Worker, running

COMMON = {"model_path": str(BUNDLED_MODEL), "kv_cache_tokens": POOL, "max_model_len": 512, "transport": "shm"}


def settings_of(folder: Path, **more: object) -> dict[str, object]:
    store = {"kv_store_path": str(folder), "kv_store_bytes": 64 << 20, "kv_host_bytes": 60 * BLOCK_BYTES}
    return {**COMMON, **store, "metrics_port": 0, **more}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_prompts_are_found_in_the_store_after_everything_was_restarted(tp_size: int, tmp_path: Path) -> None:
    prompts = [prompt_of(number) for number in range(NUM_PROMPTS)]
    expected = [completions[0].token_ids for completions in single_process(prompts, [GREEDY] * len(prompts))]
    settings = settings_of(tmp_path / "kv", role="prefill", tp_size=tp_size, kv_host_bytes=200 * BLOCK_BYTES)
    if tp_size == 2:
        settings["kv_key_file"] = str(tmp_path / "kv.key")
        (tmp_path / "kv.key").touch(0o600)
        (tmp_path / "kv.key").write_bytes(os.urandom(32))
    first, decode = Worker(worker_id=PREFILL, **settings), Worker(worker_id="decode-0", role="decode", **COMMON)
    with running(first, decode):
        ask_all("first", prompts, expected, first, decode)
    files = sorted((tmp_path / "kv").glob("*/*/*"))
    assert len(files) >= NUM_PROMPTS * 20 * tp_size, "a worker that is stopped writes what it has"
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    again, decode = Worker(worker_id=PREFILL, **settings), Worker(worker_id="decode-0", role="decode", **COMMON)
    with running(again, decode):
        keys = ask_all("after", prompts, expected, again, decode)
        tier = tier_of(again.info.metrics_address)
        assert tier["fetched"] >= NUM_PROMPTS * 20 and tier["failed"] == 0, tier
        assert min(again.outputs[key].num_cached_tokens for key in keys) >= 320


@pytest.mark.timeout(300)
def test_what_a_second_prompt_begins_with_is_there_when_its_worker_was_killed(tmp_path: Path) -> None:
    prompts = [prompt_of(number) for number in range(2)]
    expected = [completions[0].token_ids for completions in single_process(prompts, [GREEDY] * len(prompts))]
    settings = settings_of(tmp_path / "kv", role="prefill")
    decode = Worker(worker_id="decode-0", role="decode", **COMMON)
    with running(decode):
        killed = Worker(worker_id=PREFILL, **settings).connect()
        ask_all("first", prompts, expected, killed, decode)
        assert tier_of(killed.info.metrics_address)["pushed"] == 0, "nothing was reused"
        ask_all("second", prompts, expected, killed, decode)
        await_true(lambda: tier_of(killed.info.metrics_address)["pushed"] == 48, killed.ranks[0].stderr)
        killed.ranks[0].popen.kill()
        killed.ranks[0].stop()
        killed.hang_up()
        another = Worker(worker_id="prefill-1", **settings)
        with running(another):
            keys = ask_all("after", prompts, expected, another, decode)
            assert [another.outputs[key].num_cached_tokens for key in keys] == [384, 384]
            tier = tier_of(another.info.metrics_address)
            assert tier["fetched"] == 48 and tier["failed"] == 0, tier


@pytest.mark.timeout(300)
def test_a_store_that_was_away_is_written_and_read_again_once_it_is_back(tmp_path: Path) -> None:
    prompts = [prompt_of(number) for number in range(3)]
    expected = [completions[0].token_ids for completions in single_process(prompts, [GREEDY] * len(prompts))]
    folder = tmp_path / "kv"
    settings = settings_of(folder, role="prefill")
    prefill, decode = Worker(worker_id=PREFILL, **settings), Worker(worker_id="decode-0", role="decode", **COMMON)
    with running(prefill, decode):

        def ask(name: str, number: int) -> None:
            ask_all(name, prompts[number : number + 1], expected[number : number + 1], prefill, decode)

        def pushed() -> float:
            return tier_of(prefill.info.metrics_address)["pushed"]

        ask("first", 0)
        folder.rename(tmp_path / "away")
        ask("second", 0)
        ask("third", 1)
        await_true(lambda: tier_of(prefill.info.metrics_address)["failed"] > 0, prefill.ranks[0].stderr)
        assert pushed() == 0 and not folder.exists()
        (tmp_path / "away").rename(folder)
        ask("fourth", 2)
        await_true(lambda: pushed() == 24, prefill.ranks[0].stderr)
        another = Worker(worker_id="prefill-1", **settings)
        with running(another):
            [key] = ask_all("after", prompts[:1], expected[:1], another, decode)
            assert another.outputs[key].num_cached_tokens == 384
