"""Continuous batching: who runs in which step, read from the step log, and that company changes nobody's tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_fixture import BUNDLED_MODEL, DECODE, PREFILL, PlainCluster, Step, Stream, single_process, token_spec

from engine.sampling.params import SamplingParams

NUM_STREAMS = 64
STARTED_OVER_S = 2.0
LONGEST = 150
KV_BYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4  # layers, k and v, heads, head_dim, float32
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with PlainCluster(BUNDLED_MODEL, folder, kv_cache_tokens=32768, max_num_batched_tokens=512) as cluster:
        yield cluster


def make_prompt(number: int, length: int) -> list[int]:
    return [(number * 131 + i * 37) % 1000 + 5 for i in range(length)]


def steps_of(steps: list[Step], stream: Stream, index: int = 0) -> list[Step]:
    name = f"{stream.generation_id}/{index}"
    return [step for step in steps if name in step.running]


def numbers(steps: list[Step]) -> list[int]:
    return [step.number for step in steps]


def in_one_piece(steps: list[Step], length: int) -> bool:
    """Every step between the first and the last, `length` in all."""
    return numbers(steps) == list(range(steps[0].number, steps[0].number + length))


@pytest.mark.timeout(180)
def test_64_streams_of_different_lengths_join_and_leave_step_by_step(cluster: PlainCluster) -> None:
    prompts = [make_prompt(i, 5 + i * 23) for i in range(8)]
    lengths = [20 + (i * 37) % (LONGEST - 20) for i in range(NUM_STREAMS)]
    greedy = SamplingParams(temperature=0.0, max_output_tokens=LONGEST)
    expected = [completions[0].token_ids for completions in single_process(prompts, [greedy] * len(prompts))]
    streams: dict[int, Stream] = {}

    def start(i: int) -> None:
        streams[i] = Stream(cluster, token_spec(prompts[i % len(prompts)], lengths[i]), name=str(i))

    timers = [threading.Timer(i * STARTED_OVER_S / NUM_STREAMS, start, (i,)) for i in range(NUM_STREAMS)]
    for timer in timers:
        timer.start()
    for timer in timers:
        timer.join()

    for i in range(NUM_STREAMS):
        streams[i].result()
        assert tuple(streams[i].token_ids()) == expected[i % len(prompts)][: lengths[i]]
    steps = cluster.steps(DECODE)
    for i in range(NUM_STREAMS):  # the first token comes from the prefill worker
        assert in_one_piece(steps_of(steps, streams[i]), lengths[i] - 1)
    assert not any(step.preempted for step in steps)
    assert max(len(step.running) for step in steps) >= 4
    assert sum(bool(step.joined and step.running - step.joined) for step in steps) > NUM_STREAMS / 8
    assert sum(bool(step.left and step.running) for step in steps) > NUM_STREAMS / 8


def test_a_short_request_that_arrives_while_long_ones_run_ends_before_them(cluster: PlainCluster) -> None:
    journal: list[tuple[str, str]] = []
    longs = [Stream(cluster, token_spec(make_prompt(i, 40), 500), journal=journal, name=f"long {i}") for i in range(6)]
    for stream in longs:
        stream.wait_for_tokens(3)
    short = Stream(cluster, token_spec(make_prompt(9, 40), 8), journal=journal, name="short")
    for stream in [short, *longs]:
        stream.result()

    ends = [name for name, kind in journal if kind == "completed"]
    assert ends[0] == "short" and len(ends) == 7
    steps = cluster.steps(DECODE)
    its = steps_of(steps, short)
    assert in_one_piece(its, 7)
    for stream in longs:
        theirs = numbers(steps_of(steps, stream))
        assert theirs[0] < its[0].number and its[-1].number < theirs[-1]
    (joined,) = [step for step in steps if f"{short.generation_id}/0" in step.joined]
    (left,) = [step for step in steps if f"{short.generation_id}/0" in step.left]
    before = next(step for step in steps if step.number == joined.number - 1)
    assert [len(step.running) for step in (before, joined, its[-1], left)] == [6, 7, 7, 6]
    assert joined.num_tokens == 7  # one token each: nobody waits for the newcomer


def test_sixteen_sequences_of_a_request_share_its_prompt(cluster: PlainCluster) -> None:
    prompt, num_tokens, n = make_prompt(3, 100), 24, 16
    cluster.wait_idle()
    before = cluster.stats(PREFILL)
    spec = token_spec(prompt, num_tokens, temperature=0.75, top_p=1.0, seed=7, n=n)
    spec.cache.bypass_prefix_cache = True
    stream = Stream(cluster, spec)
    stream.result()

    params = SamplingParams(temperature=0.75, seed=7, n=n, max_output_tokens=num_tokens)
    (expected,) = single_process([prompt], [params])
    assert [tuple(stream.token_ids(i)) for i in range(n)] == [completion.token_ids for completion in expected]
    assert len({completion.token_ids for completion in expected}) == n, "these sequences do not differ"
    steps = steps_of(cluster.steps(DECODE), stream)
    assert len(steps[0].joined) == n and in_one_piece(steps, num_tokens - 1)
    shared, own = divmod(len(prompt), BLOCK_SIZE)
    most_own = -(-(own + num_tokens) // BLOCK_SIZE)
    assert max(step.blocks["held"] for step in steps) <= shared + n * most_own
    cluster.wait_for(lambda _: cluster.stats(PREFILL).kv_bytes_sent > before.kv_bytes_sent)
    after = cluster.stats(PREFILL)
    sent, whole = after.kv_bytes_sent - before.kv_bytes_sent, len(prompt) * KV_BYTES_PER_TOKEN
    assert whole < sent < 1.01 * whole, "sent more than once"  # each chunk has a header
    assert after.num_prefill_tokens - before.num_prefill_tokens == len(prompt)


@pytest.fixture(scope="module")
def small_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    """The decode worker's pool holds three of the requests below when they are complete."""
    folder: Path = tmp_path_factory.mktemp("small-cluster")
    with PlainCluster(
        BUNDLED_MODEL,
        folder,
        max_model_len=256,
        max_num_batched_tokens=64,
        prefill={"kv_cache_tokens": 1024},
        decode={"kv_cache_tokens": 400},
        router={"max_model_len": 256, "max_running_tokens": 4096},
    ) as cluster:
        yield cluster


@pytest.mark.battery
def test_under_kv_pressure_the_youngest_are_preempted_and_every_output_is_right(small_cluster: PlainCluster) -> None:
    prompts = [make_prompt(20 + i, 20) for i in range(8)]
    greedy = SamplingParams(temperature=0.0, max_output_tokens=100)
    sampled = SamplingParams(temperature=0.75, seed=11, max_output_tokens=100)
    expected = single_process(prompts, [greedy] * 4 + [sampled] * 4)
    specs = [token_spec(prompt, 100) for prompt in prompts[:4]]
    specs += [token_spec(prompt, 100, temperature=0.75, top_p=1.0, seed=11) for prompt in prompts[4:]]
    streams = [Stream(small_cluster, spec, name=str(i)) for i, spec in enumerate(specs)]
    for stream in streams:
        stream.result()

    for stream, (completion,) in zip(streams, expected, strict=True):
        assert tuple(stream.token_ids()) == completion.token_ids, stream.name
    steps = small_cluster.steps(DECODE)
    preempted = {name for step in steps for name in step.preempted}
    assert preempted, "the pool was large enough for all: this proves nothing"
    assert len(preempted) < len(streams), "the oldest always runs on"
    for name in preempted:
        assert sum(name in step.joined for step in steps) > 1, f"{name} did not come back"
    small_cluster.wait_idle()
    assert small_cluster.stats(DECODE).num_preemptions == sum(len(step.preempted) for step in steps)
