"""What another attempt computes again, prompt and known tokens, is weighed and charged like a prompt."""

from __future__ import annotations

from fake_worker import DECODE, phase
from router_harness import ids
from wired_router import Client, ManualClock, WiredRouter, logged, reach, run

from cluster.step_cost import StepSize
from router.routing.prefix_index import PromptHashes

BLOCK = 16
LONG = "abcdefghijklmnopqrstuvwxyz"
MAX_OUTPUT = 60


def decoding(router: WiredRouter) -> Client:
    """On p0 and d0, so many tokens in."""
    client, key = reach(router, "transferring", max_output_tokens=MAX_OUTPUT)
    router.workers["d0"].emit(phase(key, DECODE), logged(key, 1, LONG[1:]))
    assert client.live.num_tokens == len(LONG)
    return client


def test_after_a_lost_worker_prompt_and_known_tokens_are_to_be_computed() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        client = decoding(router)
        num_prompt = len(client.live.request.prompt_token_ids)
        lost_id = client.live.placement.decode_id  # type: ignore[union-attr]
        router.workers[lost_id].lose()
        placement, loads = client.live.placement, router.dispatcher.context.loads
        assert placement is not None and placement.decode_id != lost_id
        num_known = num_prompt + len(LONG)
        assert loads[placement.computing_id].prompts == StepSize.of_prompt(num_known)
        decode = loads[placement.decode_id]
        assert decode.sequences == StepSize(num_sequences=1, num_kv_tokens=num_known)
        assert decode.num_tokens == num_prompt + MAX_OUTPUT, "no more than was promised"
        router.dispatcher.cancel(client.request_id, "by the test")
        router.check_idle()

    run(scenario)


def test_a_policy_looks_for_the_known_tokens_in_the_caches_too() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client = decoding(router)
        request, live = client.live.request, client.live
        assert hashes(live.to_place.prompt) == hashes(PromptHashes(request.prompt_token_ids, request.cache_salt))
        router.workers["d0"].lose()
        whole = (*request.prompt_token_ids, *ids(LONG))
        assert hashes(live.to_place.prompt) == hashes(PromptHashes(whole, request.cache_salt)) != []

    run(scenario)


def test_who_moves_brings_what_it_has_and_computes_nothing_again() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client = decoding(router)
        router.name(["p0", "d0", "d1"])
        router.workers["d1"].open()
        router.name(["p0", "d0", "d1"], draining=["d0"])
        assert router.dispatcher.counters.moved == 1
        num_known = len(client.live.request.prompt_token_ids) + len(LONG)
        loads = router.dispatcher.context.loads
        assert loads["d0"].prompts == StepSize.of_prompt(0, num_known)
        assert loads["d1"].sequences == StepSize(num_sequences=1, num_kv_tokens=num_known)

    run(scenario)


def hashes(prompt: PromptHashes) -> list[bytes]:
    known = prompt.of(BLOCK)
    return [known.of_first(count + 1) for count in range(known.num_blocks)]
