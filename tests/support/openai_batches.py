"""Batches as OpenAI's own client asks for them: lines of a few prompts, their end, and what calls would have said."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
from cluster_fixture import BUNDLED_MODEL
from openai.types import Batch

MODEL = BUNDLED_MODEL.name
WAIT_S = 90.0
NAMES = ("ROMEO:", "JULIET:", "NURSE:", "FRIAR LAURENCE:", "MERCUTIO:")
IS_OVER = ("completed", "failed", "expired", "cancelled")
GIVEN: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}


def client_of(http_address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{http_address}/v1", api_key="none", timeout=60)


def lines_of(count: int, max_tokens: int = 4) -> bytes:
    body = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens}
    given = {"method": "POST", "url": "/v1/completions"}
    prompts = [NAMES[number % len(NAMES)] for number in range(count)]
    told = [given | {"custom_id": f"line-{n}", "body": body | {"prompt": p}} for n, p in enumerate(prompts)]
    return b"\n".join(json.dumps(line).encode() for line in told)


def begin(client: openai.OpenAI, data: bytes) -> Batch:
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, **GIVEN)


def until(client: openai.OpenAI, batch_id: str, condition: Callable[[Batch], bool]) -> Batch:
    deadline, never = time.monotonic() + WAIT_S, threading.Event()
    while not condition(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        never.wait(0.02)
    return batch


def over(client: openai.OpenAI, batch_id: str) -> Batch:
    return until(client, batch_id, lambda batch: batch.status in IS_OVER)


def num_answered(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def expected(client: openai.OpenAI, max_tokens: int = 4) -> list[str]:
    """Of each name, what a call says."""
    given: Any = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens}
    return [client.completions.create(prompt=name, **given).choices[0].text for name in NAMES]


def check(client: openai.OpenAI, batch: Batch, count: int, max_tokens: int = 4) -> None:
    """Each line was answered once, in its order, as a call would have been."""
    assert batch.status == "completed" and batch.error_file_id is None, batch
    assert num_answered(batch) == count
    answers, said = results(client, batch.output_file_id), expected(client, max_tokens)
    assert [answer["custom_id"] for answer in answers] == [f"line-{number}" for number in range(count)]
    texts = [answer["response"]["body"]["choices"][0]["text"] for answer in answers]
    assert texts == [said[number % len(NAMES)] for number in range(count)]
