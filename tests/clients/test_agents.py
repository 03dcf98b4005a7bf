"""Agents of many libraries each complete a loop of two tool calls and an answer, with a model that says what a script
tells it (docs/timed.md), through real workers and a router.

They run in .venv-clients, and one in JavaScript beside its node_modules, which `make test-clients` makes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from agent_model import call, make_model
from cluster_fixture import WAIT_S, PlainCluster
from test_clients import HERE, NEEDS_OTHERS, OTHERS, Client

AI_SDK = HERE / "ai-sdk"
NEEDS_AI_SDK = pytest.mark.skipif(
    not (AI_SDK / "node_modules").exists(), reason="the AI SDK is not installed; `make test-clients` installs it"
)

ANSWER = "Rome is warmer, by 17 degrees."
SCRIPT = [
    {"say": "I know nothing of that."},
    {"when": "Which is warmer", "say": f"Let me see.\n{call('weather', city='Rome')}"},
    {"when": "Ask for both at once", "say": f"{call('weather', city='Rome')}\n{call('weather', city='Oslo')}"},
    {"when": "Rome has 21", "say": call("weather", city="Oslo")},
    {"when": "Oslo has 4", "say": ANSWER},
    {"when": "As an object: .*", "say": call("Warmest", city="rome")},
    {"when": "a name begins with a capital", "say": call("Warmest", city="Rome")},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "script.yaml").write_text(json.dumps(SCRIPT))
    timed: dict[str, Any] = {"script": str(folder / "script.yaml"), "dtype": "auto", "kv_cache_tokens": 131072}
    with PlainCluster(make_model(folder / "agent"), folder, router={"http_port": 0}, **timed) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=[pytest.param(str(OTHERS), marks=NEEDS_OTHERS, id="agents")])
def agents(request: pytest.FixtureRequest) -> Iterator[Client]:
    client = Client("agent", request.param, model="agent")
    yield client
    client.close()


@pytest.mark.parametrize(
    "library",
    [
        *("openai chat", "openai stream", "openai parallel", "openai parallel stream"),
        *("openai agents", "openai agents stream", "langchain", "langgraph", "langgraph stream"),
        *("litellm chat", "litellm stream", "pydantic ai", "pydantic ai stream"),
    ],
)
def test_an_agent_calls_a_tool_twice_and_answers(agents: Client, cluster: PlainCluster, library: str) -> None:
    assert agents.ask(library, cluster.http_address) == {"text": ANSWER, "cities": ["Rome", "Oslo"]}


def test_instructor_asks_again_for_an_object_that_its_validator_refused(agents: Client, cluster: PlainCluster) -> None:
    assert agents.ask("instructor", cluster.http_address) == {"text": "Rome", "cities": ["rome", "Rome"]}


@NEEDS_AI_SDK
@pytest.mark.parametrize("question", ["Which is warmer, Rome or Oslo?", "Ask for both at once: Rome or Oslo?"])
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_the_ai_sdk_calls_a_tool_twice_and_answers(cluster: PlainCluster, question: str, how: str) -> None:
    command = ["node", "agent.mjs", f"http://{cluster.http_address}/v1", "agent", question, how]
    said = subprocess.run(command, cwd=AI_SDK, capture_output=True, text=True, timeout=WAIT_S)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == {"text": ANSWER, "cities": ["Rome", "Oslo"]}
