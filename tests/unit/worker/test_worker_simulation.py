"""Whole requests through two real cores and a model that tattles: every delay, tiny pools, cancels at any moment."""

from __future__ import annotations

import random

import pytest
from simulation import VOCAB, World, first_wrong_token

from cluster.pb import generation_pb2


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
    world = World(seed)
    prefill = world.add("prefill-0", 40, prefill_block)
    decode = world.add("decode-0", 200 // decode_block, decode_block)
    wanted = {}
    for i, prompt in enumerate(prompts(world, 8, 40)):
        n, size = world.random.choice([(1, 6), (1, 20), (3, 7), (2, 1)])
        wanted[world.admit(f"r{i}", prompt, prefill, decode, max_output_tokens=size, n=n)] = (prompt, size, n)
    world.run()
    assert not world.failures()
    for key, (prompt, size, n) in wanted.items():
        outputs = world.outputs(key)
        assert [len(outputs[index]) for index in range(n)] == [size] * n
        assert all(first_wrong_token(prompt, output) is None for output in outputs.values())
    world.check_idle()


@pytest.mark.parametrize("seed", range(12))
def test_a_pool_too_small_for_all_preempts_the_youngest_and_loses_nothing(seed: int) -> None:
    world = World(seed)
    prefill = world.add("prefill-0", 24, 4)
    decode = world.add("decode-0", 24, 4)
    wanted = {}
    for i, prompt in enumerate(prompts(world, 6, 20)):
        wanted[world.admit(f"r{i}", prompt, prefill, decode, max_output_tokens=40)] = prompt
    world.run()
    for key, prompt in wanted.items():
        (output,) = world.outputs(key).values()
        assert len(output) == 40 and first_wrong_token(prompt, output) is None
    assert decode.core.decode.num_preemptions > 0
    world.check_idle()


@pytest.mark.parametrize("seed", range(60))
def test_a_cancel_at_any_moment_frees_everything_and_harms_nobody(seed: int) -> None:
    world = World(seed)
    chance = random.Random(seed)
    prefill = world.add("prefill-0", 30, 4)
    decode = world.add("decode-0", 30, 4)
    wanted, cancelled = {}, []
    for i, prompt in enumerate(prompts(world, 6, 24)):
        key = world.admit(f"r{i}", prompt, prefill, decode, max_output_tokens=24, n=chance.choice([1, 1, 2]))
        wanted[key] = prompt
        if chance.random() < 0.5:
            cancelled.append((chance.randint(0, 120), key))
    for moment, key in sorted(cancelled):
        while moment > 0 and world.turn():
            moment -= 1
        world.cancel(key, *chance.sample([prefill, decode], 2))
    world.run()
    gone = {key for _, key in cancelled}
    for key, prompt in wanted.items():
        outputs = world.outputs(key)
        assert all(first_wrong_token(prompt, output) is None for output in outputs.values())
        assert key in gone or {len(output) for output in outputs.values()} == {24}
    world.check_idle()


@pytest.mark.parametrize("seed", range(8))
def test_two_prefill_and_two_decode_workers_share_the_load(seed: int) -> None:
    world = World(seed)
    prefills = [world.add(f"prefill-{i}", 30, 4) for i in range(2)]
    decodes = [world.add(f"decode-{i}", 40, 8) for i in range(2)]
    wanted = {}
    for i, prompt in enumerate(prompts(world, 10, 30)):
        wanted[world.admit(f"r{i}", prompt, prefills[i % 2], decodes[(i // 2) % 2], max_output_tokens=12)] = prompt
    world.run()
    for key, prompt in wanted.items():
        (output,) = world.outputs(key).values()
        assert len(output) == 12 and first_wrong_token(prompt, output) is None
    world.check_idle()


def test_the_last_tokens_carry_the_finish_reason() -> None:
    world = World(0)
    prefill, decode = world.add("prefill-0", 20, 4), world.add("decode-0", 20, 4)
    world.admit("r", [1, 2, 3], prefill, decode, max_output_tokens=3)
    world.run()
    tokens = [e.tokens for name in ("prefill-0", "decode-0") for e in world.events[name] if e.HasField("tokens")]
    reasons = [t.finish_reason for t in tokens]
    assert reasons == [0, 0, generation_pb2.FINISH_REASON_LENGTH]
    assert [t.first_token_index for t in tokens] == [0, 1, 2]
