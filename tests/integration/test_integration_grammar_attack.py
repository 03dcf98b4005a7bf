"""Grammars made to take the cluster down fail alone: every process lives on, and good requests beside are exact."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from cluster_fixture import BUNDLED_MODEL, WAIT_S, PlainCluster, Stream, token_spec

from cluster.errors import BatonError, InvalidRequest, QuotaExceeded
from cluster.pb import generation_pb2 as pb

MODEL = BUNDLED_MODEL.name
PROMPT = list(range(20, 60))
NUM_RULES = 3000


def chained_rules(number: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(number)) + f'r{number}: "x"\n'


def chained_references(number: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(number)}
    return {"$ref": "#/$defs/a0", "$defs": definitions | {f"a{number}": {"type": "null"}}}


BOMBS = [
    {"grammar_ebnf": chained_rules(NUM_RULES)},
    {"grammar_ebnf": chained_rules(900)},
    {"json_schema": json.dumps(chained_references(NUM_RULES))},
    {"json_schema": json.dumps(chained_references(490))},
    {"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000},
    {"regex": "a?" * 30_000},
    {"regex": "a?" * 16_000},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"grammar_ebnf": "start: " + "(" * 5000 + '"x"' + ")" * 5000},
    {"grammar_ebnf": "root ::= " + "a? " * 8000 + '\na ::= "x"'},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    given = {"http_port": 0, "grammar_s_per_min": 6}
    with PlainCluster(BUNDLED_MODEL, tmp_path_factory.mktemp("cluster"), router=given) as cluster:
        yield cluster


def constrained(seed: int, number: int = 400) -> pb.GenerationSpec:
    spec = token_spec(PROMPT, number, ignore_eos=False)
    spec.sampling.MergeFrom(pb.SamplingParams(temperature=0.8, seed=seed, regex="([A-Z][a-z]{2,9} ){60}end"))
    return spec


def pids(cluster: PlainCluster) -> set[int]:
    status = cluster.status()
    return {status.router.pid, *(rank.pid for worker in status.workers for rank in worker.info.ranks)}


def followers_of(pid: int) -> list[int]:
    """The processes that follow grammars for a worker."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    forkers = [int(child) for file in children for child in file.read_text().split()]
    return [int(child) for each in forkers for child in Path(f"/proc/{each}/task/{each}/children").read_text().split()]


def ask(cluster: PlainCluster, fields: dict[str, str]) -> BatonError | None:
    spec = token_spec(PROMPT, 8, ignore_eos=False)
    spec.sampling.MergeFrom(pb.SamplingParams(**fields))
    try:
        cluster.client.generate(spec, timeout_s=WAIT_S)
    except BatonError as error:
        return error
    return None


def test_bombs_fail_by_name_and_good_streams_beside_them_are_exact(cluster: PlainCluster) -> None:
    before, specs = pids(cluster), [token_spec(PROMPT, 300), constrained(5)]
    alone = [Stream(cluster, spec) for spec in specs]
    expected = [(stream.result(), stream.token_ids())[1] for stream in alone]
    answers: list[BatonError | None] = []
    threads = [threading.Thread(target=lambda fields=bomb: answers.append(ask(cluster, fields))) for bomb in BOMBS]
    for thread in threads:
        thread.start()
    num_exact = 0
    while any(thread.is_alive() for thread in threads):
        for spec, tokens in zip(specs, expected, strict=True):
            beside = Stream(cluster, spec)
            beside.result()
            assert beside.token_ids() == tokens
            num_exact += 1
    assert num_exact and len(answers) == len(BOMBS)
    refused = [answer for answer in answers if answer is not None]
    assert all(isinstance(answer, InvalidRequest | QuotaExceeded) for answer in refused), refused
    said = " ".join(answer.message for answer in refused)
    for part in (f"has {NUM_RULES + 2} rules", "refers to 3001 definitions", "levels deep", "simplify it"):
        assert part in said, answers
    assert pids(cluster) == before


def test_a_line_of_a_batch_that_is_a_bomb_is_answered_and_the_router_lives_on(cluster: PlainCluster) -> None:
    before = pids(cluster)
    schemas = [chained_references(NUM_RULES), {"type": "object"}, chained_references(490)]
    body = {"model": MODEL, "prompt": "ROMEO:", "max_tokens": 4, "temperature": 0}
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/completions",
            "body": body | {"structured_outputs": {"json": s}},
        }
        for n, s in enumerate(schemas)
    ]
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", timeout=60) as client:
        data = b"\n".join(json.dumps(line).encode() for line in lines)
        file = client.files.create(file=("lines.jsonl", data), purpose="batch")
        given: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.batches.create(input_file_id=file.id, **given)
        until, never = time.monotonic() + WAIT_S, threading.Event()
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert time.monotonic() < until, batch
            never.wait(0.05)
        assert batch.error_file_id is not None
        errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert "0" in {error["custom_id"] for error in errors}
    assert "refers to 3001 definitions" in json.dumps(errors)
    assert pids(cluster) == before


def test_a_stream_goes_on_exactly_when_the_processes_of_its_grammar_are_killed(cluster: PlainCluster) -> None:
    spec = constrained(7)
    alone = Stream(cluster, spec)
    alone.result()
    decode = next(w for w in cluster.status().workers if w.worker_id.startswith("decode")).info.ranks[0].pid
    stream, num_killed = Stream(cluster, spec), 0
    while not stream.is_over and num_killed < 5:
        stream.wait_for_tokens(stream.num_tokens + 20)
        for pid in followers_of(decode):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                num_killed += 1
    stream.result()
    assert num_killed and stream.token_ids() == alone.token_ids()


def test_a_tenant_that_has_used_its_time_is_told_when_to_come_back(cluster: PlainCluster) -> None:
    before = pids(cluster)
    threads = [threading.Thread(target=ask, args=(cluster, {"regex": f"{chr(97 + n)}?" * 16_000})) for n in range(14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    refusal = ask(cluster, {"regex": "new[0-9]"})
    assert isinstance(refusal, QuotaExceeded), refusal
    assert refusal.retry_after_s is not None and refusal.retry_after_s > 0
    plain = Stream(cluster, token_spec(PROMPT, 8))
    plain.result()
    assert pids(cluster) == before
