"""The router tries grammars aside, charges tenants for the time, and asks about each grammar once."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from cluster_fixture import BUNDLED_MODEL, WAIT_S

from cluster.errors import QuotaExceeded
from cluster.grammar import GrammarLimits
from router.api.call import ANYONE, Principal
from router.api.grammar import Grammars

TOKENIZER_JSON = (BUNDLED_MODEL / "tokenizer.json").read_text("utf-8")
SLOW = "a?" * 16_000
GREEDY, OTHER = Principal("k1", "greedy"), Principal("k2", "other")


def new_grammars(compile_s_per_min: int = 20, compile_s: float = 0.6) -> contextlib.closing[Grammars]:
    limits = GrammarLimits(compile_s=compile_s)
    return contextlib.closing(Grammars(lambda: TOKENIZER_JSON, 1024, limits, compile_s_per_min=compile_s_per_min))


async def test_a_tenant_whose_grammar_takes_long_pays_and_others_go_on() -> None:
    with new_grammars(compile_s_per_min=1) as grammars:
        slow = [asyncio.create_task(grammars.compile("regex", f"{SLOW}{n}", GREEDY)) for n in range(4)]
        async with asyncio.timeout(WAIT_S):
            assert "regex" in await grammars.compile("regex", "[a-c]+", OTHER)
        outcomes = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(outcome, ValueError | QuotaExceeded) for outcome in outcomes), outcomes
        assert any("takes more than" in str(outcome) for outcome in outcomes)
        with pytest.raises(QuotaExceeded, match="used the 1 s of compiling that they have in a minute") as refusal:
            await grammars.compile("regex", "[a-z]+", GREEDY)
        assert refusal.value.retry_after_s is not None and 0 < refusal.value.retry_after_s <= 180
        assert await grammars.compile("regex", "[a-z]+", OTHER)


async def test_a_client_that_leaves_has_its_tenant_pay() -> None:
    with new_grammars(compile_s_per_min=1) as grammars:
        left = [asyncio.create_task(grammars.compile("regex", f"{SLOW}{n}", GREEDY)) for n in range(5)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        with pytest.raises(QuotaExceeded):
            await grammars.compile("regex", "[a-z]+", GREEDY)  # waits for its turn


async def test_a_grammar_that_was_tried_costs_nothing() -> None:
    with new_grammars() as grammars:
        first, same = await asyncio.gather(*(grammars.compile("regex", "[a-c]+", GREEDY) for _ in range(2)))
        grammars.close()
        assert first == same == await grammars.compile("regex", "[a-c]+", OTHER)
        with pytest.raises(ValueError, match="unclosed group"):
            await new_and_again()


async def new_and_again() -> None:
    """What cannot be followed is refused again without being tried again."""
    with new_grammars() as grammars:
        with pytest.raises(ValueError, match="unclosed group"):
            await grammars.compile("regex", "(", ANYONE)
        grammars.close()
        await grammars.compile("regex", "(", ANYONE)
