"""Prefixes that travel between real workers: what is fetched is found, and every output is what it is without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_fixture import BUNDLED_MODEL, PlainCluster, Stream, single_process, token_spec
from workers import Worker, fetch, running, sampling

from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from engine.sampling.params import SamplingParams

NUM_TOKENS = 12


def prompt_of(number: int, length: int = 200) -> list[int]:
    return [(number * 131 + i * 37) % 995 + 5 for i in range(length)]


def worker(worker_id: str, role: str, **settings: object) -> Worker:
    return Worker(worker_id=worker_id, role=role, model_path=str(BUNDLED_MODEL), kv_cache_tokens=2048, **settings)


def reference(*prompts: list[int]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS)
    return [list(each[0].token_ids) for each in single_process(prompts, [params] * len(prompts))]


def compute(name: str, prompt: list[int], at: Worker) -> RequestKey:
    """Has one worker compute a prompt and its output."""
    key = RequestKey(name, 1)
    common = {"key": key.to_proto(), "prompt_token_ids": prompt, "sampling": sampling(max_output_tokens=NUM_TOKENS)}
    at.send(admit=worker_pb2.Admit(role=worker_pb2.ROLE_DECODE, **common))
    at.wait_for(lambda: at.outputs[key].finished or at.outputs[key].failed)
    return key


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("tp_sizes", "block_sizes", "transport"),
    [
        ((1, 1), (16, 16), "shm"),
        ((1, 1), (16, 16), "shm_pages"),
        ((1, 2), (16, 32), "gloo"),
        pytest.param((2, 1), (32, 16), "shm", marks=pytest.mark.battery),
        pytest.param((2, 4), (16, 16), "shm", marks=pytest.mark.battery),
    ],
)
def test_both_of_two_workers_fetch_from_each_other_at_once_and_compute_the_rest(
    tp_sizes: tuple[int, int], block_sizes: tuple[int, int], transport: str
) -> None:
    prompts = [prompt_of(0), prompt_of(1)]
    expected = reference(*prompts)
    more = [{"tp_size": tp, "block_size": size} for tp, size in zip(tp_sizes, block_sizes, strict=True)]
    common = {"transport": transport, "chunk_tokens": 32}
    with running(worker("one", "prefill", **more[0], **common), worker("other", "decode", **more[1], **common)) as both:
        for at, prompt, tokens in zip(both, prompts, expected, strict=True):
            key = compute("first", prompt, at)
            assert at.outputs[key].sequence() == tokens
        kept = [
            prompt[: 199 // at.info.block_size * at.info.block_size] for prompt, at in zip(prompts, both, strict=True)
        ]
        keys = [fetch("there", kept[0], both[0], both[1]), fetch("back", kept[1], both[1], both[0])]
        for at, key, prompt, tokens, prefix in zip(both[::-1], keys, prompts, expected, kept, strict=True):
            at.wait_for(lambda at=at, key=key: at.outputs[key].fetched or at.outputs[key].failed)
            num_useful = len(prefix) // at.info.block_size * at.info.block_size
            assert at.outputs[key].fetched.num_tokens == num_useful, at.outputs[key]
            again = compute("again", prompt, at)
            assert at.outputs[again].num_cached_tokens == num_useful
            assert at.outputs[again].sequence() == tokens
        for at in both:
            at.wait_idle()


@pytest.mark.timeout(240)
def test_what_was_evicted_or_has_no_room_fails_at_once_and_what_dies_leaves_what_has_landed() -> None:
    prompt = prompt_of(0, 1500)
    (expected,) = reference(prompt)
    common = {"chunk_tokens": 1, "num_slots": 1}  # slow enough to be cut off
    with running(worker("holder", "decode", **common), worker("target", "decode", **common)) as (holder, target):
        nothing = fetch("evicted", prompt_of(1), holder, target)
        holder.wait_for(lambda: holder.outputs[nothing].failed)
        assert holder.outputs[nothing].failed.reason == worker_pb2.Failed.REASON_CAPACITY
        target.send(cancel=worker_pb2.Cancel(key=nothing.to_proto()))
        target.wait_idle()

        compute("first", prompt, holder)
        busy = RequestKey("busy", 1)
        common = {"key": busy.to_proto(), "prompt_token_ids": prompt_of(2, 1500)}
        target.send(
            admit=worker_pb2.Admit(role=worker_pb2.ROLE_DECODE, sampling=sampling(max_output_tokens=500), **common)
        )
        target.wait_for(lambda: target.outputs[busy].tokens)
        refused = fetch("no room", prompt[:1488], holder, target)
        target.wait_for(lambda: target.outputs[refused].failed)
        assert target.outputs[refused].failed.reason == worker_pb2.Failed.REASON_CAPACITY
        target.send(cancel=worker_pb2.Cancel(key=busy.to_proto()))
        target.wait_idle()
        holder.wait_idle()

        key = fetch("cut off", prompt[:1488], holder, target)
        before = target.stats.kv_bytes_received
        target.wait_for(lambda: target.stats.kv_bytes_received > before)
        holder.ranks[0].popen.kill()
        target.wait_for(lambda: target.outputs[key].failed or target.outputs[key].fetched)
        failed = target.outputs[key].failed
        assert failed is not None, "it was to be killed before all had come"
        again = compute("again", prompt, target)
        assert target.outputs[again].num_cached_tokens == failed.num_kept_tokens // 16 * 16
        assert target.outputs[again].sequence() == expected
        target.wait_idle()


@pytest.mark.timeout(240)
def test_turns_of_a_conversation_find_the_last_answer_on_the_prefill_worker(tmp_path: Path) -> None:
    """Outputs are those without fetches; each turn's prompt is cached up to the last block of the turn before."""
    outputs, cached, fetched = {}, {}, {}
    for how in ("off", "always"):
        folder = tmp_path / how
        folder.mkdir()
        with PlainCluster(BUNDLED_MODEL, folder, kv_cache_tokens=4096, router={"prefix_fetch": how}) as cluster:
            prompt, outputs[how], cached[how], fetched[how] = prompt_of(0, 60), [], [], []
            for turn in range(4):
                spec = token_spec(prompt, 40, include_timing=True)
                stream = Stream(cluster, spec, name=str(turn))
                completed = next(e.completed for e in stream.result() if e.HasField("completed"))
                outputs[how].append(stream.token_ids())
                cached[how].append(completed.usage.cached_tokens / len(prompt))
                fetched[how].append(completed.timing.fetched_tokens)
                prompt = [*prompt, *stream.token_ids(), *prompt_of(turn + 1, 10)]
    assert outputs["always"] == outputs["off"]
    assert fetched["off"] == [0, 0, 0, 0] and min(fetched["always"][1:]) >= 32
    assert all(after > before for before, after in zip(cached["off"][1:], cached["always"][1:], strict=True))
