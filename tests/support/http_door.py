"""A router's HTTP API over fake workers, and clients of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
from fake_worker import FakeWorker
from router_harness import Router, running_router


@contextlib.asynccontextmanager
async def serving(folder: Path, workers: tuple[FakeWorker, ...], **settings: Any) -> AsyncIterator[tuple[Router, Any]]:
    """A router, and an HTTP client of it."""
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(folder / "model", workers, http_port=0, **settings))
        address = f"http://{router.server.http_address}"
        yield router, await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=20))


def sdk(router: Router, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
    base_url = f"http://{router.server.http_address}/v1"
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, **({"max_retries": 0} | options))


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "model", "messages": [{"role": "user", "content": text}], **fields}
