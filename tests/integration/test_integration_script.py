"""Real workers that say what a script tells them, behind a real router: hand-offs, lost workers, grammars, and what
each dialect over HTTP tells of thinking and calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from agent_model import call, make_model
from cluster_fixture import DECODE, WAIT_S, PlainCluster, Stream
from scripted_router import baton

from cluster.errors import InvalidRequest
from cluster.pb import generation_pb2 as pb
from tools.client import make_spec

SPEECH = "\n".join(f"{number}. Good morrow to thee, gentle citizen of fair Verona." for number in range(1, 30))
STORY = "\n".join(f'{number}. "Two households, both alike in dignity."' for number in range(1, 8))
COUNT = '{"count": 3}'
TOOLS = '''
from typing import Literal

def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather."""
    return f"{city} has {len(city) * 5} degrees."

def wind(city: str, knots: int = 1) -> dict[str, int]:
    return {city: knots}
'''
RULES = [
    {"say": "Nay."},
    {"when": "Speak", "say": SPEECH},
    {"when": "Call at once", "say": call("tell", story=STORY)},
    {"when": "Think first", "say": f"<think>\n{STORY}\n</think>\n\nWell.\n{call('tell', story=STORY)}"},
    {"when": "Count", "say": COUNT},
    {"when": "Is Rome warm", "say": call("weather", city="Rome")},
    {"when": "Rome has 20", "say": f"Let me see.\n{call('wind', city='Rome')}"},
    {"when": '{"Rome": 1}', "say": "It is 20 degrees, and there is no wind."},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "script.yaml").write_text(json.dumps(RULES))
    timed = {"script": str(folder / "script.yaml"), "sequence_s": 0.002}
    more: dict[str, Any] = {"kv_cache_tokens": 65536, "dtype": "auto", "router": {"http_port": 0}}
    with PlainCluster(make_model(folder / "agent"), folder, **more, **timed) as cluster:
        yield cluster


def spec_of(message: str, **sampling: Any) -> pb.GenerationSpec:
    spec = make_spec([{"role": "user", "content": message}], max_output_tokens=1500)
    spec.sampling.MergeFrom(pb.SamplingParams(**sampling))
    return spec


def test_a_prompt_that_is_handed_over_is_answered_by_its_rule(cluster: PlainCluster) -> None:
    for n in (1, 2):
        answer = cluster.client.generate(spec_of("Speak, then.", n=n, temperature=2.0), timeout_s=WAIT_S)
        assert [output.text for output in answer.outputs] == [SPEECH] * n
        assert {end.finish_reason for end in answer.ends} == {pb.FINISH_REASON_STOP}
    assert cluster.stats(DECODE).num_decode_tokens > 0


def test_a_killed_decode_worker_changes_nothing_in_the_answer(cluster: PlainCluster) -> None:
    stream = Stream(cluster, spec_of("Speak again."))
    stream.wait_for_tokens(20)
    cluster.replace_worker(DECODE, "decode")
    assert "".join(event.delta.text for event in stream.result()) == SPEECH


PARAMETERS = {"type": "object", "properties": {"story": {"type": "string"}}, "required": ["story"]}
FUNCTION = {"name": "tell", "parameters": PARAMETERS}
DIALECTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"tools": [{"type": "function", "function": FUNCTION}]},
    "responses": {"tools": [{"type": "function", **FUNCTION}]},
    "messages": {"tools": [{"name": "tell", "input_schema": PARAMETERS}], "max_tokens": 2000},
}
KINDS = {
    "response.reasoning_text.delta": "thinking",
    "response.output_text.delta": "text",
    "response.function_call_arguments.delta": "call",
    "thinking": "thinking",
    "text": "text",
    "partial_json": "call",
}


def pieces(event: dict[str, Any]) -> list[tuple[str, str]]:
    """What an event of any dialect tells of thinking, of text or of a call's arguments."""
    if "choices" in event:
        delta = event["choices"][0]["delta"]
        calls = [("call", each["function"].get("arguments", "")) for each in delta.get("tool_calls") or ()]
        return [("thinking", delta.get("reasoning_content") or ""), ("text", delta.get("content") or ""), *calls]
    if event["type"] in KINDS:
        return [(KINDS[event["type"]], event["delta"])]
    if event["type"] == "content_block_delta":
        return [(KINDS[name], text) for name, text in event["delta"].items() if name in KINDS]
    return []


class Told:
    """A stream over HTTP, and what its events add up to."""

    def __init__(self, cluster: PlainCluster, dialect: str, message: str) -> None:
        said = [{"role": "user", "content": message}]
        self._url = f"http://{cluster.http_address}/v1/{dialect}"
        self._body = {"model": "agent", "stream": True, **DIALECTS[dialect]}
        self._body["input" if dialect == "responses" else "messages"] = said
        self._headers = {"Baton-Resume": "true"}
        self.texts = {"thinking": "", "text": "", "call": ""}
        self.is_under_way = threading.Event()

    def read(self, *, leaves: bool = False) -> dict[str, str]:
        """Up to its end, or, if it leaves, up to the middle of what is told first."""
        with httpx.stream("POST", self._url, json=self._body, headers=self._headers, timeout=WAIT_S) as answer:
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    self._headers["Last-Event-ID"] = value
                elif name == "data" and value != "[DONE]":
                    self._add(json.loads(value))
                elif not line and leaves and self.is_under_way.is_set():
                    break
        return self.texts

    def _add(self, event: dict[str, Any]) -> None:
        for kind, text in pieces(event):
            self.texts[kind] += text
        if sum(map(len, self.texts.values())) > len(STORY) // 4:
            self.is_under_way.set()


CALLED = {"thinking": "", "text": "", "call": json.dumps({"story": STORY})}
THOUGHT = CALLED | {"thinking": STORY, "text": "Well."}
WANTED = {"Call at once.": CALLED, "Think first.": THOUGHT}


def test_a_killed_decode_worker_changes_nothing_in_thinking_and_calls_of_any_dialect(cluster: PlainCluster) -> None:
    streams = {(dialect, message): Told(cluster, dialect, message) for dialect in DIALECTS for message in WANTED}
    with ThreadPoolExecutor(len(streams)) as threads:
        told = {which: threads.submit(stream.read) for which, stream in streams.items()}
        assert all(stream.is_under_way.wait(WAIT_S) for stream in streams.values())
        assert not any(each.done() for each in told.values())
        cluster.replace_worker(DECODE, "decode")
        for (dialect, message), each in told.items():
            assert stripped(each.result()) == WANTED[message], (dialect, message)


@pytest.mark.parametrize(("dialect", "message"), [("chat/completions", "Call at once."), ("messages", "Think first.")])
def test_a_stream_that_is_left_in_thinking_or_a_call_goes_on_from_its_last_event(
    cluster: PlainCluster, dialect: str, message: str
) -> None:
    stream = Told(cluster, dialect, message)
    left = dict(stream.read(leaves=True))
    assert stripped(left) != WANTED[message] == stripped(stream.read())


def stripped(texts: dict[str, str]) -> dict[str, str]:
    return {kind: text.strip() for kind, text in texts.items()}


def test_an_answer_is_held_to_the_grammar_of_its_request(cluster: PlainCluster) -> None:
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    answer = cluster.client.generate(spec_of("Count.", json_schema=json.dumps(schema)), timeout_s=WAIT_S)
    assert answer.outputs[0].text == COUNT and answer.ends[0].finish_reason == pb.FINISH_REASON_STOP
    with pytest.raises(InvalidRequest, match=r"the script goes on with '\.', which may not follow here: \.\.\.'Nay'"):
        cluster.client.generate(spec_of("Tell me.", regex="Nay|No"), timeout_s=WAIT_S)


def test_what_needs_logits_is_refused_by_name(cluster: PlainCluster) -> None:
    with pytest.raises(InvalidRequest, match="compute no logits, so leave out logit_bias"):
        cluster.client.generate(spec_of("Speak.", logit_bias={3: 1.0}), timeout_s=WAIT_S)


def test_baton_chat_runs_the_tools_that_are_called_until_there_is_an_answer(
    cluster: PlainCluster, tmp_path: Path
) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    lines = "Is Rome warm?\nCount.\n"
    done = baton("chat", "--address", cluster.address, "--tools", str(tmp_path / "tools.py"), stdin=lines)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"Let me see.\nIt is 20 degrees, and there is no wind.\n{COUNT}\n"
    assert done.stderr == (
        '(weather {"city": "Rome"} -> Rome has 20 degrees.)\n(wind {"city": "Rome"} -> {"Rome": 1})\n'
    )
