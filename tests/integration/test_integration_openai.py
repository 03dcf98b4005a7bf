"""OpenAI's own client against a real cluster: a chat, streams, stops, errors and retries, with the tokens of gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from cluster_fixture import BUNDLED_MODEL, DECODE, PlainCluster

from cluster.pb import generation_pb2 as pb

MODEL = BUNDLED_MODEL.name
MESSAGES: Any = [{"role": "user", "content": "Good morrow, fair Juliet."}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    with PlainCluster(BUNDLED_MODEL, tmp_path_factory.mktemp("cluster"), router={"http_port": 0}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: PlainCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", timeout=60) as client:
        yield client


def over_grpc(cluster: PlainCluster, text: str, **stopping: Any) -> pb.GenerateResponse:
    spec = pb.GenerationSpec(
        text=text, sampling=pb.SamplingParams(temperature=0), stopping=pb.StoppingCriteria(**stopping)
    )
    return cluster.client.generate(spec, timeout_s=60)


def test_a_completion_has_the_text_that_grpc_tells(cluster: PlainCluster, client: openai.OpenAI) -> None:
    expected = over_grpc(cluster, "ROMEO:", max_output_tokens=40)
    answer = client.completions.create(model=MODEL, prompt="ROMEO:", temperature=0, max_tokens=40)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.usage is not None and answer.usage.completion_tokens == expected.usage.completion_tokens
    stopped = client.completions.create(model=MODEL, prompt="ROMEO:", temperature=0, max_tokens=40, stop=["\n"])
    assert stopped.choices[0].text == expected.outputs[0].text.partition("\n")[0]


def test_a_chat_is_the_same_whole_streamed_and_as_raw_bytes(client: openai.OpenAI) -> None:
    given: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 30, "temperature": 0.8, "seed": 3}
    whole = client.chat.completions.create(**given)
    text = whole.choices[0].message.content
    assert text and whole.usage is not None and whole.usage.total_tokens == whole.usage.prompt_tokens + 30
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 30
    raw = client.chat.completions.with_raw_response.create(**given)
    assert raw.parse().choices[0].message.content == text and raw.headers["x-request-id"].startswith("req-")
    again = client.chat.completions.create(**given)
    details = again.usage.prompt_tokens_details if again.usage is not None else None
    assert details is not None and details.cached_tokens is not None


def test_many_at_once_get_each_their_own(cluster: PlainCluster) -> None:
    expected = {n: over_grpc(cluster, "JULIET:", max_output_tokens=n).outputs[0].text for n in range(1, 25)}

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none") as client:

            async def ask(n: int) -> str:
                stream = await client.completions.create(
                    model=MODEL, prompt="JULIET:", temperature=0, max_tokens=n, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

            return list(await asyncio.gather(*map(ask, expected)))

    assert asyncio.run(ask_all()) == list(expected.values())


def test_errors_name_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature: must be between 0 and 2"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=2.5)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.regex: cannot be followed"):
        wrong = {"structured_outputs": {"regex": "("}}
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=wrong)


def test_a_client_that_gives_up_costs_the_next_one_nothing(cluster: PlainCluster, client: openai.OpenAI) -> None:
    pid = cluster.processes[DECODE].popen.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(max_retries=0, timeout=1.0).completions.create(model=MODEL, prompt="a", max_tokens=4)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=4).usage is not None


@pytest.mark.parametrize("api", ["grpc", "openai"])
def test_baton_bench_measures_what_was_served(cluster: PlainCluster, tmp_path: Path, api: str) -> None:
    where = {"grpc": ["--address", cluster.address], "openai": ["--base-url", f"http://{cluster.http_address}/v1"]}[api]
    load = [
        "--num-prompts",
        "12",
        "--request-rate",
        "40",
        "--input-len",
        "30",
        "--output-len",
        "7",
        "--prefix-len",
        "32",
        "--goodput",
        "ttft:60000",
    ]
    bench = [sys.executable, "-m", "cli.main", "bench"]
    saved = tmp_path / "run.json"
    drawn = ["--detailed", "--plots", str(tmp_path / "plots")]
    flags = [*where, *load, *drawn, "--json", "--save", str(saved)]
    done = subprocess.run([*bench, *flags], capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == ["goodput.png", "itl.png", "ttft.png"]
    told = json.loads(done.stdout)
    assert told == json.loads(saved.read_text())
    assert (told["completed"], told["failed"], told["num_gaps"], told["model_id"]) == (12, 0, 0, MODEL)
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (12 * 62, 12 * 7)
    assert told["details"]["input_lens"] == [62] * 12 and len(told["details"]["ttfts"]) == 12
    assert told["request_goodput"] == told["request_throughput"] > 0 and told["cached_share"] > 0
    assert 0 < told["median_ttft_ms"] <= told["median_e2el_ms"] <= told["p99_e2el_ms"]
    compared = subprocess.run([*bench, "compare", str(saved), str(saved)], capture_output=True, text=True, timeout=100)
    assert compared.returncode == 0 and "1.000" in compared.stdout


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (["--address", "127.0.0.1:1"], 4, "127.0.0.1:1"),
        (["--base-url", "http://127.0.0.1:1/v1"], 4, "does not list its models"),
        (["--goodput", "speed:5"], 2, "is no objective"),
        (["--extra-body", "[]"], 2, "must be a JSON object"),
        (["--trace", "nowhere.jsonl"], 3, "nowhere.jsonl: cannot be read"),
        (["compare", "nowhere.json", "nowhere.json"], 3, "nowhere.json: cannot be read"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_baton_bench_says_what_is_wrong(flags: list[str], code: int, why: str) -> None:
    command = [sys.executable, "-m", "cli.main", "bench", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == code and why in " ".join(done.stderr.split()), done.stderr
