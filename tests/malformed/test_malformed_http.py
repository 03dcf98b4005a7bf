"""Odd bodies at the HTTP door: each is answered or refused by name, and none fails inside the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fake_worker import pair
from hypothesis import given, settings
from hypothesis import strategies as st
from router_harness import ids, running_router

from router.anthropic.bodies import MessagesBody
from router.openai.bodies import ChatBody, CompletionBody

pytestmark = pytest.mark.asyncio

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.just("\ud800"),
    st.lists(st.integers(-2, 400), max_size=4),
    st.lists(st.text(max_size=4), max_size=3),
    st.dictionaries(st.text(max_size=6), st.one_of(st.none(), st.floats(), st.text(max_size=4)), max_size=3),
)
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
KINDS = (CompletionBody, ChatBody, MessagesBody)
FIELDS = sorted({*(name for kind in KINDS for name in kind.model_fields), "tools", "unknown"})
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), ODD, max_size=3)
BODIES = st.fixed_dictionaries(
    {"model": st.sampled_from(["model", "", "other"]), "prompt": ODD, "messages": st.lists(MESSAGE, max_size=2)},
    optional={name: ODD for name in FIELDS if name not in ("model", "prompt", "messages")},
)


@pytest.mark.parametrize("num", [100, pytest.param(10_000, marks=[pytest.mark.battery, pytest.mark.timeout(1800)])])
async def test_nothing_that_is_sent_over_http_fails_inside(tmp_path: Path, num: int) -> None:
    workers = pair(lambda admit: [ids("ab")] * admit.sampling.params.n)
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path / "model", workers, http_port=0))
        address = f"http://{router.server.http_address}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=20))
        loop = asyncio.get_running_loop()
        statuses = Counter[int]()

        @settings(max_examples=num, derandomize=True, database=None)
        @given(st.sampled_from(PATHS), BODIES)
        def send(path: str, body: dict[str, Any]) -> None:
            other = "messages" if path == "/v1/completions" else "prompt"
            sent = json.dumps({name: value for name, value in body.items() if name != other})
            answer = asyncio.run_coroutine_threadsafe(http.post(path, content=sent), loop).result(20)
            statuses[answer.status_code] += 1
            if answer.headers["content-type"].startswith("application/json") and answer.status_code != 200:
                is_anthropic = path.startswith("/v1/messages")
                parts = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
                assert set(answer.json()["error"]) == parts

        await asyncio.to_thread(send)
        assert set(statuses) <= {200, 400, 404}, statuses
        assert (await http.post("/v1/completions", json={"model": "model", "prompt": "a"})).status_code == 200
