"""What `baton bench` offers, and what it makes of what clients saw: without a server."""

from __future__ import annotations

import asyncio
import json
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from scripted_router import baton

from cluster.errors import ConfigError
from tools.bench.figures import PERCENTILES, figures_of, parse_objectives
from tools.bench.targets import OpenAiTarget
from tools.bench.workload import (
    LEAST_TOKEN,
    BenchRequest,
    RequestShape,
    Sample,
    at_rate,
    make_requests,
    random_shapes,
    read_tokenizer,
    read_trace,
    send_all,
    text_of,
)

MODEL = Path(__file__).resolve().parents[3] / "models" / "tiny-shakespeare"


def sample(sent_at: float, *told: float, num_output_tokens: int = 0, error: str = "") -> Sample:
    num = num_output_tokens or len(told)
    return Sample(10, sent_at, list(told), num, ended_at=told[-1] if told else sent_at, error=error)


def test_the_same_seed_offers_the_same_load_and_another_one_another() -> None:
    def load(seed: int) -> list[BenchRequest]:
        return make_requests(at_rate(random_shapes(20, 50, 10, 0.5, 7, seed), 3.0, 1.0, seed), 500, seed)

    assert load(1) == load(1) != load(2)
    prompts = [request.prompt for request in load(1)]
    assert {tuple(prompt[:7]) for prompt in prompts} == {tuple(prompts[0][:7])}
    assert len({tuple(prompt[7:]) for prompt in prompts}) == 20
    assert all(32 <= len(prompt) <= 82 and min(prompt) >= LEAST_TOKEN and max(prompt) < 500 for prompt in prompts)


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (25.0, 0.2)])
def test_arrivals_have_their_rate_and_their_bursts(burstiness: float, spread: float) -> None:
    asks = at_rate([RequestShape(0, 1, 1)] * 20_000, 5.0, burstiness, 0)
    gaps = [after.at - before.at for before, after in pairwise(asks)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(spread, rel=0.1)


def test_a_mooncake_trace_keeps_its_times_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000, "input_length": 1200, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 3]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(file, num=9, speed=4.0, length_share=0.5, most_tokens=800)
    assert (first.at, second.at) == (0.0, 0.5)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (600, 25)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (550, 250), "longer than what is allowed: cut"
    one, other = (request.prompt for request in make_requests([first, second], 900, 0))
    assert len(one) == 600 and len(other) == 550
    assert one[:512] == other[:512] and one[512:550] != other[512:550]


def test_an_azure_trace_is_read_and_a_mistake_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.6805900,1,9\n"
    )
    first, second = read_trace(file, num=9, speed=1.0, length_share=1.0, most_tokens=2048)
    assert (first.num_prompt_tokens, first.num_output_tokens, second.at) == (374, 44, pytest.approx(1.0))
    assert len(read_trace(file, num=1, speed=1.0, length_share=1.0, most_tokens=2048)) == 1
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,many,44\n")
    with pytest.raises(ConfigError, match=r"trace.csv:2: needs the columns"):
        read_trace(file, num=9, speed=1.0, length_share=1.0, most_tokens=2048)
    ask = '{"timestamp": %s, "input_length": %s, "output_length": 1}'
    bad = (("a.jsonl", "{}"), ("b.jsonl", ""), ("c.jsonl", "no"), ("d.jsonl", ask % ("NaN", 1)))
    for name, text in (*bad, ("e.jsonl", ask % ("Infinity", 1)), ("f.jsonl", ask % (1, "Infinity"))):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            read_trace(tmp_path / name, num=9, speed=1.0, length_share=1.0, most_tokens=2048)


def test_a_trace_out_of_order_is_offered_in_order(tmp_path: Path) -> None:
    """One that came before the first line would be timed from before the run."""
    file = tmp_path / "trace.jsonl"
    file.write_text(
        "".join(f'{{"timestamp": {at}, "input_length": 1, "output_length": 1}}\n' for at in (3e3, 1e3, 2e3))
    )
    asks = read_trace(file, num=9, speed=1.0, length_share=1.0, most_tokens=9)
    assert [ask.at for ask in asks] == [0.0, 1.0, 2.0]


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
    requests = make_requests(random_shapes(20, 5, 5, 0.0, 0, 0), 100, 0)
    offered = asyncio.create_task(send_all(requests, busy.send, most_at_once=bound, on_end=ended.append))
    while busy.num_under_way < expected:
        await asyncio.sleep(0)
    for _ in range(100):  # nobody else comes
        await asyncio.sleep(0)
    busy.may_answer.set()
    samples = await offered
    assert busy.most_under_way == expected and len(samples) == len(ended) == 20


def test_a_prompt_may_be_sent_as_text_that_is_the_same_for_the_same_seed() -> None:
    tokenizer, asks = read_tokenizer(MODEL), random_shapes(5, 300, 5, 0.0, 0, 0)
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
