"""Real workers that say what a script tells them, behind a real router: hand-offs, lost workers, grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_model import call, make_model
from cluster_fixture import DECODE, WAIT_S, PlainCluster, Stream
from scripted_router import baton

from cluster.errors import InvalidRequest
from cluster.pb import generation_pb2 as pb
from tools.client import make_spec

SPEECH = "\n".join(f"{number}. Good morrow to thee, gentle citizen of fair Verona." for number in range(1, 30))
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
    with PlainCluster(make_model(folder / "agent"), folder, kv_cache_tokens=65536, dtype="auto", **timed) as cluster:
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
