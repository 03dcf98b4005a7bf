"""What `baton bench` offers, and what it makes of what clients saw: without a server."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from scripted_router import baton

from cluster.errors import ConfigError
from simulate.workload import LEAST_TOKEN, SharedPrefixes, at_rate, random_shapes, uniform
from tools.bench.figures import PERCENTILES, figures_of, parse_objectives
from tools.bench.targets import OpenAiTarget
from tools.bench.workload import BenchRequest, Sample, make_requests, read_tokenizer, send_all, text_of

MODEL = Path(__file__).resolve().parents[3] / "models" / "tiny-shakespeare"


def sample(sent_at: float, *told: float, num_output_tokens: int = 0, error: str = "") -> Sample:
    num = num_output_tokens or len(told)
    return Sample(10, sent_at, list(told), num, ended_at=told[-1] if told else sent_at, error=error)


def test_the_same_seed_offers_the_same_load_and_another_one_another() -> None:
    def load(seed: int) -> list[BenchRequest]:
        shapes = random_shapes(20, uniform(50, 10, 0.5), seed, SharedPrefixes(7))
        return make_requests(at_rate(shapes, 3.0, 1.0, seed), 500, seed)

    assert load(1) == load(1) != load(2)
    prompts = [request.prompt for request in load(1)]
    assert {tuple(prompt[:7]) for prompt in prompts} == {tuple(prompts[0][:7])}
    assert len({tuple(prompt[7:]) for prompt in prompts}) == 20
    assert all(32 <= len(prompt) <= 82 and min(prompt) >= LEAST_TOKEN and max(prompt) < 500 for prompt in prompts)


@pytest.mark.parametrize("text", ["x", "[]", '{"completed": "a"}', '{"mean_ttft_ms": [1]}', '{"errors": 5}'])
def test_what_is_no_document_of_a_run_is_named(tmp_path: Path, text: str) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"completed": 1, "mean_ttft_ms": 2.5, "request_rate": null}')
    bad.write_text(text)
    assert baton("bench", "compare", str(good), str(good)).exit_code == 0
    done = baton("bench", "compare", str(good), str(bad))
    assert done.exit_code == 3 and f"{bad}: is not what `baton bench --save` or --json writes" in done.stderr


def test_a_rate_without_bounds_is_all_at_once_and_a_body_that_is_no_json_is_named(nobody: str) -> None:
    done = baton("bench", "--address", nobody, "--request-rate", "inf")
    assert done.exit_code == 4, "it came as far as the server"
    done = baton("bench", "--address", nobody, "--extra-body", "{")
    assert done.exit_code == 2 and "--extra-body must be a JSON object (got {)" in done.stderr


def test_figures_are_those_that_numpy_computes() -> None:
    samples = [sample(n, n + 0.1 * (n + 1), n + 1, n + 1.5, num_output_tokens=5) for n in range(7)]
    figures = figures_of(samples, 10.0, {"ttft": 350.0, "tpot": 330.0})
    ttfts = [100.0 * (n + 1) for n in range(7)]
    assert [figures[f"p{p}_ttft_ms"] for p in PERCENTILES] == pytest.approx(np.percentile(ttfts, PERCENTILES).tolist())
    assert figures["mean_ttft_ms"] == pytest.approx(np.mean(ttfts)) and figures["std_ttft_ms"] == pytest.approx(
        np.std(ttfts)
    )
    tpots = [1000 * (1.5 - 0.1 * (n + 1)) / 4 for n in range(7)]
    assert figures["median_tpot_ms"] == pytest.approx(np.median(tpots))
    assert figures["request_goodput"] == pytest.approx(
        sum(a <= 350 and b <= 330 for a, b in zip(ttfts, tpots, strict=True)) / 10
    )
    assert (figures["total_output_tokens"], figures["output_throughput"]) == (35, 3.5)
    assert figures["mean_e2el_ms"] == pytest.approx(1500)


def test_what_failed_is_counted_and_measured_by_nothing_else() -> None:
    figures = figures_of([sample(0, 1.0), sample(0, error="lost"), sample(0, 0.5, error="late")], 2.0, {})
    assert (figures["completed"], figures["failed"], figures["errors"]) == (1, 2, ["late", "lost"])
    assert figures["mean_ttft_ms"] == 1000 and figures["request_goodput"] is None
    assert figures_of([sample(0, error="lost")], 1.0, {"ttft": 1.0})["p99_ttft_ms"] == 0


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "itl:5", ":5", "ttft:-1"])
def test_an_objective_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no objective"):
        parse_objectives([text])
    assert parse_objectives(["ttft:500", "tpot:12.5"]) == {"ttft": 500.0, "tpot": 12.5}


class Busy:
    """A server that answers when it is told to."""

    def __init__(self) -> None:
        self.num_under_way = self.most_under_way = 0
        self.may_answer = asyncio.Event()

    async def send(self, request: BenchRequest, sent_at: float) -> Sample:
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        await self.may_answer.wait()
        self.num_under_way -= 1
        return Sample(len(request.prompt), sent_at, [sent_at + 1])


@pytest.mark.parametrize(("bound", "expected"), [(3, 3), (None, 20)])
async def test_a_closed_loop_has_no_more_under_way_than_it_may(bound: int | None, expected: int) -> None:
    busy, ended = Busy(), list[Sample]()
    requests = make_requests(random_shapes(20, uniform(5, 5), 0), 100, 0)
    offered = asyncio.create_task(send_all(requests, busy.send, most_at_once=bound, on_end=ended.append))
    while busy.num_under_way < expected:
        await asyncio.sleep(0)
    for _ in range(100):  # nobody else comes
        await asyncio.sleep(0)
    busy.may_answer.set()
    samples = await offered
    assert busy.most_under_way == expected and len(samples) == len(ended) == 20


def test_a_prompt_may_be_sent_as_text_that_is_the_same_for_the_same_seed() -> None:
    tokenizer, asks = read_tokenizer(MODEL), random_shapes(5, uniform(300, 5), 0)
    drawn = make_requests(asks, 1000, 7)
    texts = make_requests(asks, 1000, 7, partial(text_of, tokenizer))
    for ids, text in zip(drawn, texts, strict=True):
        assert isinstance(ids.prompt, list) and isinstance(text.prompt, str)
        assert text.prompt == text_of(tokenizer, ids.prompt)
        assert len(tokenizer.encode(text.prompt).ids) == pytest.approx(300, rel=0.02)
        assert (ids.num_prompt_tokens, text.num_prompt_tokens) == (300, 300)


def test_a_tokenizer_is_a_file_or_a_folder_and_what_is_neither_is_named(tmp_path: Path) -> None:
    assert read_tokenizer(MODEL).get_vocab_size() == read_tokenizer(MODEL / "tokenizer.json").get_vocab_size()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read: No such file"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not a tokenizer\.json"):
        read_tokenizer(tmp_path)


async def test_a_server_that_counts_other_tokens_than_were_drawn_is_believed() -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(json.loads(request.content))
        chunks = [
            {"choices": [{"text": "a"}]},
            {
                "choices": [{"text": "", "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 12, "completion_tokens": 3},
            },
        ]
        return httpx2.Response(200, text="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks))

    async with httpx2.AsyncClient(base_url="http://server/v1", transport=httpx2.MockTransport(answer)) as http:
        seen = await OpenAiTarget(http, "m", {"ignore_eos": None}).send(BenchRequest(0.0, "some text", 10, 5), 0.0)
    assert (seen.num_prompt_tokens, seen.num_output_tokens, len(seen.message_times), seen.error) == (12, 3, 1, "")
    assert asked[0]["prompt"] == "some text" and "ignore_eos" not in asked[0]
