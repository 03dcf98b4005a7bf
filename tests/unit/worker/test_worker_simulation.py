"""Whole requests through real cores and a model that tattles: every delay, every size, every fault, at any moment."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_load import EVERY_FAULT, Load
from simulation import VOCAB, World, first_wrong_token

import prefill_worker.sender
from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2

CELL_BYTES = 3 * 8
"""Token, owner and context of one token in one layer."""


@pytest.fixture(autouse=True, scope="module")
def layered_prompts() -> object:
    """Prompts here are short, and yet their last step is sent layer by layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_worker.sender, "MIN_LAYERED_TOKENS", 6)
        yield


def world_of(seed: int) -> World:
    """Steps overlap in every other one."""
    return World(seed, overlaps=seed % 2 == 1)


def prompts(world: World, count: int, longest: int) -> list[list[int]]:
    """Some share prefixes, so that the prefix caches of both sides hit."""
    stem = [world.random.randrange(VOCAB) for _ in range(longest)]
    made = []
    for _ in range(count):
        shared = world.random.choice([0, 0, longest // 2, longest - 1])
        own = [world.random.randrange(VOCAB) for _ in range(world.random.randint(1, longest - shared))]
        made.append(stem[:shared] + own)
    return made


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("prefill_block", "decode_block"), [(4, 4), (4, 8), (8, 2)])
def test_every_request_gets_the_tokens_its_context_demands(seed: int, prefill_block: int, decode_block: int) -> None:
    world = world_of(seed)
    world.add("prefill-0", 40, prefill_block)
    world.add("decode-0", 200 // decode_block, decode_block)
    for prompt in prompts(world, 8, 40):
        n, size = world.random.choice([(1, 6), (1, 20), (3, 7), (2, 1)])
        world.router.submit(prompt, "prefill-0", "decode-0", max_output_tokens=size, n=n)
    world.run()
    for request in world.router.requests.values():
        assert request.outcome == "done" and request.attempt == 1
        assert [len(output) for output in request.tokens.values()] == [request.max_output_tokens] * request.n
        assert all(first_wrong_token(request.prompt, output) is None for output in request.tokens.values())
    world.check_idle()


@pytest.mark.parametrize("seed", range(12))
def test_a_pool_too_small_for_all_preempts_the_youngest_and_loses_nothing(seed: int) -> None:
    world = world_of(seed)
    world.add("prefill-0", 24, 4)
    decode = world.add("decode-0", 24, 4)
    for prompt in prompts(world, 6, 20):
        world.router.submit(prompt, "prefill-0", "decode-0", max_output_tokens=40)
    world.run()
    for request in world.router.requests.values():
        (output,) = request.tokens.values()
        assert len(output) == 40 and first_wrong_token(request.prompt, output) is None
    assert decode.core.decode.num_preemptions > 0
    assert bool(world.counts["steps launched ahead"]) == world.overlaps
    world.check_idle()


@dataclass(frozen=True)
class Wish:
    """A request, and how many tokens its client has when it goes away."""

    num_prompt_tokens: int
    max_output_tokens: int
    n: int
    stop_token_ids: tuple[int, ...]
    is_handed_over: bool
    cancelled_after: int | None


wishes = st.lists(
    st.builds(
        Wish,
        num_prompt_tokens=st.integers(1, 20),
        max_output_tokens=st.integers(1, 25),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=12, unique=True).map(tuple),
        is_handed_over=st.booleans(),
        cancelled_after=st.none() | st.integers(0, 10),
    ),
    min_size=1,
    max_size=8,
)


def outputs_of(
    given: list[Wish], seed: int, overlaps: bool, num_blocks: int, budget: int, long_tokens: int
) -> list[list[list[int]]]:
    """What the client of each request got, by sequence."""
    world = World(seed, overlaps=overlaps)
    for name, count in (("prefill-0", 12), ("decode-0", num_blocks)):
        world.add(name, count, 4, max_num_batched_tokens=budget, long_tokens=long_tokens)
    prompt = list(range(30))
    requests = [
        world.router.submit(
            prompt[: wish.num_prompt_tokens],
            "prefill-0" if wish.is_handed_over else "",
            "decode-0",
            max_output_tokens=wish.max_output_tokens,
            n=wish.n,
            stop_token_ids=wish.stop_token_ids,
        )
        for wish in given
    ]
    while world.router.num_open:
        for wish, request in zip(given, requests, strict=True):
            if wish.cancelled_after is not None and len(request.tokens[0]) >= wish.cancelled_after:
                world.router.cancel(request)
        assert world.turn() or not world.router.num_open, "requests wait for ever"
        for node in world.nodes.values():
            node.core.blocks.check()
    world.settle()
    world.check_idle()
    return [list(request.tokens.values()) for request in requests]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(
    given=wishes,
    seed=st.integers(0, 2**32),
    num_extra_blocks=st.integers(0, 20),
    budget=st.integers(4, 40),
    long_tokens=st.integers(1, 12),
)
def test_steps_that_overlap_lead_to_the_tokens_of_steps_one_by_one(
    given: list[Wish], seed: int, num_extra_blocks: int, budget: int, long_tokens: int
) -> None:
    """Whatever ends sequences, and when; pages tell of a block that is written after it was given back."""
    largest = max(wish.n * (-(-(wish.num_prompt_tokens + wish.max_output_tokens) // 4) + 1) for wish in given)
    sizes = {"num_blocks": largest + num_extra_blocks, "budget": budget, "long_tokens": long_tokens}
    both = [outputs_of(given, seed, overlaps, **sizes) for overlaps in (False, True)]
    for wish, *outputs in zip(given, *both, strict=True):
        for one, other in zip(*outputs, strict=True):
            shorter, longer = sorted((one, other), key=len)
            assert shorter == longer[: len(shorter)]
            assert one == other or wish.cancelled_after is not None


@pytest.mark.parametrize("seed", range(40))
def test_a_cancel_at_any_moment_frees_everything_and_harms_nobody(seed: int) -> None:
    world = world_of(seed)
    for name in ("prefill-0", "decode-0"):
        world.add(name, 30, 4)
    Load(12, longest_output=24, cancels=0.1, num_stop_tokens=seed % 3).carry(world)
    assert world.counts["cancelled"] and not world.counts["request failed"]


@pytest.mark.parametrize("seed", range(8))
def test_workers_share_the_load_and_keep_no_more_pairs_than_they_may(seed: int) -> None:
    world = world_of(seed)
    prefills = [world.add(f"prefill-{i}", 30, 4, max_pairs=1) for i in range(2)]
    for i in range(3):
        world.add(f"decode-{i}", 40, 8)
    Load(30).carry(world)
    assert world.counts["request done"] == 30
    for node in prefills:
        node.core.inbox.post(node.core.handoffs.tick)
    world.run()
    assert all(sum(node.core.handoffs.count_by_state().values()) == 1 for node in prefills)
    assert world.counts["link retired: unspecified"] > 0, "links that were idle"


@pytest.mark.parametrize("bypass_prefix_cache", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_second_attempt_is_sent_only_what_the_first_has_not_left(seed: int, bypass_prefix_cache: bool) -> None:
    world = world_of(seed)
    for name in ("prefill-0", "prefill-1"):
        world.add(name, 20, 4, max_num_batched_tokens=8)
    decode = world.add("decode-0", 40, 4)
    prompt, cell_bytes = list(range(40)), CELL_BYTES * decode.sizes["num_layers"]
    heard = decode.overheard

    def received() -> int:
        return int(decode.core._stats.kv_bytes_received)

    request = world.router.submit(
        prompt, "prefill-0", "decode-0", max_output_tokens=5, bypass_prefix_cache=bypass_prefix_cache
    )
    world.run(until=lambda: received() >= 16 * cell_bytes)
    world.rates["damaged"] = 1.0
    world.run(until=lambda: world.counts["damaged"] > 0)
    world.rates.clear()
    world.run(until=lambda: request.attempt == 2)
    before = received()
    world.run()
    (kept,) = (event.failed.num_kept_tokens for event in heard if event.HasField("failed"))

    assert request.outcome == "done" and request.prefill == "prefill-1"
    assert first_wrong_token(prompt, request.tokens[0]) is None
    assert kept >= 16
    num_tokens = len(prompt) + request.num_handed_over
    assert received() - before == (num_tokens - kept // 4 * 4) * cell_bytes
    world.check_idle()


@pytest.mark.parametrize("blocks", [(4, 4), (4, 8), (8, 3)])
@pytest.mark.parametrize("seed", range(10))
def test_what_moves_from_one_decode_worker_to_another_goes_on_with_its_tokens(
    seed: int, blocks: tuple[int, int]
) -> None:
    world = world_of(seed)
    world.add("prefill-0", 30, 4)
    for i, block_size in enumerate(blocks):
        world.add(f"decode-{i}", 700 // block_size, block_size)
    Load(16, longest_output=120, cancels=0.005, moves=0.5).carry(world)
    assert world.counts["moved"] >= 10 and not world.counts["request failed"] and not world.counts["retried"]


def test_of_what_moves_only_the_end_is_computed_again() -> None:
    world = World(1)
    world.add("prefill-0", 30, 4)
    first, second = (world.add(f"decode-{i}", 60, 4) for i in range(2))
    prompt = list(range(30))
    request = world.router.submit(prompt, "prefill-0", "decode-0", max_output_tokens=60)
    world.run(until=lambda: len(request.tokens[0]) >= 25)
    world.router.move(request, "decode-1")
    num_held = len(prompt) + request.num_handed_over
    before = first.core._stats.num_prefill_tokens
    world.run()
    assert request.outcome == "done" and first_wrong_token(prompt, request.tokens[0]) is None
    assert first.core._stats.num_prefill_tokens - before < 4, "no more than a block that was not full"
    assert second.core._stats.kv_bytes_received == num_held * CELL_BYTES * second.sizes["num_layers"]
    assert second.core._stats.num_prefill_tokens == 0
    world.check_idle()


@pytest.mark.parametrize("fault", EVERY_FAULT)
def test_each_fault_by_itself_strikes_and_leaves_nothing_behind(fault: str) -> None:
    counts = 0
    for seed in range(8):
        rates = {fault: 20 * EVERY_FAULT[fault] if fault != "worker died" else 0.01}
        world = World(seed, rates, overlaps=seed % 2 == 1)
        for i in range(2):
            world.add(f"prefill-{i}", 16, 4, transfer_timeout_s=0.02)
            world.add(f"decode-{i}", 24, 4, transfer_timeout_s=0.02)
        Load(30, cancels=0.02, moves=0.05).carry(world)
        counts += world.counts[fault]
    assert counts >= 10


@dataclass(frozen=True)
class Scene:
    """A cluster and what befalls it."""

    seed: int
    num_prefill: int
    num_decode: int
    prefill_block: int
    decode_block: int
    prefill_extra: int
    """Tokens that the pool holds beyond the largest request."""
    decode_extra: int
    num_layers: int
    num_slots: int
    chunk_tokens: int
    long_tokens: int
    budget: int
    max_pairs: int
    faults: tuple[str, ...]
    overlaps: bool
    load: Load

    def world(self) -> World:
        world = World(self.seed, {name: 3 * EVERY_FAULT[name] for name in self.faults}, self.overlaps)
        load = self.load
        whole = load.longest_prompt + load.longest_output
        sizes = {
            "num_layers": self.num_layers,
            "long_tokens": self.long_tokens,
            "max_num_batched_tokens": self.budget,
            "max_pairs": self.max_pairs,
            "transfer_timeout_s": 0.02,
        }
        for i in range(self.num_prefill):
            num_blocks = -(-(whole + self.prefill_extra) // self.prefill_block) + 1
            slots = {"num_slots": self.num_slots, "chunk_tokens": self.chunk_tokens}
            world.add(f"prefill-{i}", num_blocks, self.prefill_block, **slots, **sizes)
        for i in range(self.num_decode):
            num_blocks = load.most_sequences * (-(-whole // self.decode_block) + 1) + (
                self.decode_extra // self.decode_block
            )
            world.add(f"decode-{i}", num_blocks, self.decode_block, **sizes)
        return world


scenes = st.builds(
    Scene,
    seed=st.integers(0, 2**32),
    num_prefill=st.integers(1, 3),
    num_decode=st.integers(1, 3),
    prefill_block=st.sampled_from([1, 2, 4, 7]),
    decode_block=st.sampled_from([1, 3, 4, 8]),
    prefill_extra=st.integers(0, 60),
    decode_extra=st.integers(0, 60),
    num_layers=st.integers(1, 5),
    num_slots=st.integers(1, 4),
    chunk_tokens=st.integers(1, 12),
    long_tokens=st.integers(1, 30),
    budget=st.integers(4, 40),
    max_pairs=st.integers(1, 3),
    faults=st.lists(st.sampled_from(sorted(EVERY_FAULT)), unique=True).map(tuple),
    overlaps=st.booleans(),
    load=st.builds(
        Load,
        num_requests=st.integers(1, 15),
        num_open=st.integers(1, 10),
        longest_prompt=st.integers(2, 30),
        longest_output=st.integers(1, 12),
        most_sequences=st.integers(1, 4),
        cancels=st.sampled_from([0.0, 0.02, 0.1]),
        num_stop_tokens=st.sampled_from([0, 5, 30]),
        moves=st.sampled_from([0.0, 0.05, 0.3]),
    ),
)


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(scene=scenes)
def test_any_cluster_under_any_faults_tells_the_right_tokens_once_and_gives_everything_back(scene: Scene) -> None:
    scene.load.carry(scene.world())


def test_the_last_tokens_carry_the_finish_reason() -> None:
    world = World(0)
    nodes = [world.add(name, 20, 4) for name in ("prefill-0", "decode-0")]
    world.router.submit([1, 2, 3], "prefill-0", "decode-0", max_output_tokens=3)
    world.run()
    tokens = [event.tokens for node in nodes for event in node.overheard if event.HasField("tokens")]
    *earlier, last = tokens
    assert last.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert earlier and not any(t.finish_reason for t in earlier)
    assert [t.first_token_index + i for t in tokens for i in range(len(t.token_ids))] == [0, 1, 2]
    assert RequestKey.of(tokens[0].key) == RequestKey("r0", 1)
