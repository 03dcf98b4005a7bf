"""Agents of many libraries each complete a loop of two tool calls and an answer, in the three dialects, with a model
that says what a script tells it (docs/timed.md), through real workers and a router.

They run in .venv-clients, and one in JavaScript beside its node_modules, which `make test-clients` makes. The two
coding agents are tried where they are on the path: `npm install -g @anthropic-ai/claude-code @openai/codex`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_model import call, make_model
from cluster_fixture import WAIT_S, PlainCluster
from test_clients import HERE, NEEDS_OTHERS, OTHERS, Client

AI_SDK = HERE / "ai-sdk"
NEEDS_AI_SDK = pytest.mark.skipif(
    not (AI_SDK / "node_modules").exists(), reason="the AI SDK is not installed; `make test-clients` installs it"
)
CLAUDE, CODEX = shutil.which("claude"), shutil.which("codex")

ANSWER = "Rome is warmer, by 17 degrees."
SPEECH = "\n".join(f"{number}. Good morrow to thee, gentle citizen of fair Verona." for number in range(1, 40))
THOUGHT = "They ask of two cities, and I know the weather of neither."
BEGUN = f"<think>\n{THOUGHT}\n</think>\n\nLet me see.\n{call('weather', city='Rome')}"
LAST = f"<think>\n21 is more than 4.\n</think>\n\n{ANSWER}"
SCRIPT = [
    {"say": "I know nothing of that."},
    {"when": "Which is warmer", "say": BEGUN},
    {"when": "Ask for both at once", "say": f"{call('weather', city='Rome')}\n{call('weather', city='Oslo')}"},
    {"when": "Rome has 21", "say": call("weather", city="Oslo")},
    {"when": "Oslo has 4", "say": LAST},
    {"when": "As an object: .*", "say": call("Warmest", city="rome")},
    {"when": "a name begins with a capital", "say": call("Warmest", city="Rome")},
    {"when": "As JSON: .*", "say": '{"city": "Rome"}'},
    {"when": "As a call: .*", "say": call("Warmest", city="Rome")},
    {"when": "Speak at length", "say": SPEECH},
]
MAX_MODEL_LEN = 262144
"""Coding agents begin with some 80,000 characters."""
TIMED: dict[str, Any] = {"dtype": "auto", "kv_cache_tokens": 524288, "sequence_s": 0.001}


SAY = "echo forty-$((1+1))"


def coding(notes: Path) -> list[dict[str, str]]:
    """What a coding agent is told to do: to read a file, to run a command, and to tell of both."""
    first, then = "<think>So</think>", "Now this:\n"
    return [
        {"when": "What is the code word, Claude", "say": first + call("Read", file_path=str(notes))},
        {"when": "The code word is HARE", "say": then + call("Bash", command=SAY, description="Say a number")},
        {"when": "What is the code word, Codex", "say": first + call("exec_command", cmd="cat notes.txt")},
        {"when": "The code word is LYNX", "say": then + call("exec_command", cmd=SAY)},
        {"when": "forty-2", "say": "Both are done."},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[PlainCluster]:
    (folder / "script.yaml").write_text(json.dumps(SCRIPT + coding(folder / "notes.txt")))
    timed = TIMED | {"script": str(folder / "script.yaml")}
    with PlainCluster(make_model(folder / "agent", MAX_MODEL_LEN), folder, router={"http_port": 0}, **timed) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A client by its name, which goes on from one test to the next."""
    clients: dict[str, Client] = {}

    def named(name: str) -> Client:
        if name not in clients:
            clients[name] = Client(name, str(OTHERS), model="agent")
        return clients[name]

    yield named
    for each in clients.values():
        each.close()


@NEEDS_OTHERS
@pytest.mark.parametrize(
    "library",
    [
        *("openai chat", "openai stream", "openai parallel", "openai parallel stream"),
        *("openai agents", "openai agents stream", "openai agents responses"),
        *("langchain", "langgraph", "langgraph stream", "langgraph responses"),
        *("litellm chat", "litellm stream", "pydantic ai", "pydantic ai stream", "pydantic ai responses"),
    ],
)
def test_an_agent_calls_a_tool_twice_and_answers(client: Any, cluster: PlainCluster, library: str) -> None:
    assert client("agent").ask(library, cluster.http_address) == {"text": ANSWER, "cities": ["Rome", "Oslo"]}


@NEEDS_OTHERS
def test_instructor_asks_again_for_an_object_that_its_validator_refused(client: Any, cluster: PlainCluster) -> None:
    assert client("agent").ask("instructor", cluster.http_address) == {"text": "Rome", "cities": ["rome", "Rome"]}


@NEEDS_OTHERS
@pytest.mark.parametrize("how", ["stateless", "stored", "streamed", "parallel", "background"])
def test_a_loop_over_responses_ends_with_an_answer(client: Any, cluster: PlainCluster, how: str) -> None:
    assert client("responses").ask(how, cluster.http_address) == {"text": ANSWER, "cities": ["Rome", "Oslo"]}


@NEEDS_OTHERS
def test_a_response_in_the_background_is_read_on_from_an_event(client: Any, cluster: PlainCluster) -> None:
    told = client("responses").ask("resumed", cluster.http_address)
    assert told["numbers"] == list(range(len(told["numbers"]))) and len(told["numbers"]) > 30
    assert told["text"] == told["kept"] == SPEECH


@NEEDS_OTHERS
def test_a_response_in_the_background_is_cancelled(client: Any, cluster: PlainCluster) -> None:
    assert client("responses").ask("cancelled", cluster.http_address) == {"statuses": ["cancelled"] * 3}


@NEEDS_OTHERS
def test_an_answer_is_parsed_into_an_object_of_pydantics(client: Any, cluster: PlainCluster) -> None:
    assert client("responses").ask("parsed", cluster.http_address) == {"cities": ["Rome"] * 3}


@NEEDS_OTHERS
def test_responses_are_what_open_responses_describes(client: Any, cluster: PlainCluster) -> None:
    told = client("responses").ask("open responses", cluster.http_address)
    assert told["items"] == ["message"] * 3 + ["reasoning", "message", "function_call"]


@NEEDS_OTHERS
@pytest.mark.parametrize("step", ["loop", "runner"])
def test_a_loop_over_messages_ends_with_an_answer(client: Any, cluster: PlainCluster, step: str) -> None:
    told = client("anthropic").ask(step, cluster.http_address)
    assert told == {"cities": ["Rome", "Oslo"], "text": ANSWER, "reason": "end_turn"}


@NEEDS_OTHERS
def test_the_served_model_is_listed_for_anthropics_client(client: Any, cluster: PlainCluster) -> None:
    told = client("anthropic").ask("models", cluster.http_address)
    assert told == {"id": "agent", "most": MAX_MODEL_LEN - 1}


@NEEDS_OTHERS
def test_a_stream_of_a_message_has_thinking_text_and_a_call(client: Any, cluster: PlainCluster) -> None:
    told = client("anthropic").ask("thinking", cluster.http_address)
    thought, said, called = told["content"]
    assert (thought["thinking"].strip(), said["text"], called["input"]) == (THOUGHT, "Let me see.", {"city": "Rome"})
    assert thought["signature"] and told["reason"] == "tool_use"
    begun = [kind for kind in told["kinds"] if kind in ("message_start", "content_block_start", "message_stop")]
    assert begun == ["message_start", *["content_block_start"] * 3, "message_stop"]
    assert {"thinking", "text", "input_json", "signature"} <= set(told["kinds"])


@pytest.fixture(scope="module")
def proxy(cluster: PlainCluster, folder: Path) -> Iterator[str]:
    """The address of LiteLLM's proxy, which stands before the router."""
    where = {"model": "openai/agent", "api_base": f"http://{cluster.http_address}/v1", "api_key": "none"}
    config = folder / "litellm.yaml"
    config.write_text(json.dumps({"model_list": [{"model_name": "agent", "litellm_params": where}]}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    given = ("--config", str(config), "--host", "127.0.0.1", "--port", address.rpartition(":")[2])
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    command = [str(OTHERS.parent / "litellm"), *given]
    log = folder / "litellm.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + WAIT_S
        while not answers(f"http://{address}/health/liveliness"):
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-2000:]
            time.sleep(0.1)  # it tells nobody that it listens
        yield address
    finally:
        process.terminate()
        process.wait(WAIT_S)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@NEEDS_OTHERS
@pytest.mark.parametrize(
    ("name", "step"),
    [("agent", "openai chat"), ("agent", "openai stream"), ("agent", "openai agents responses"), ("anthropic", "loop")],
)
def test_an_agent_behind_litellms_proxy_calls_a_tool_twice_and_answers(
    client: Any, proxy: str, name: str, step: str
) -> None:
    told = client(name).ask(step, proxy)
    assert (told["text"], told["cities"]) == (ANSWER, ["Rome", "Oslo"])


@NEEDS_AI_SDK
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("question", ["Which is warmer, Rome or Oslo?", "Ask for both at once: Rome or Oslo?"])
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_the_ai_sdk_calls_a_tool_twice_and_answers(
    cluster: PlainCluster, dialect: str, question: str, how: str
) -> None:
    command = ["node", "agent.mjs", f"http://{cluster.http_address}/v1", "agent", question, how, dialect]
    said = subprocess.run(command, cwd=AI_SDK, capture_output=True, text=True, timeout=WAIT_S)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout.splitlines()[-1]) == {"text": ANSWER, "cities": ["Rome", "Oslo"]}


def code(folder: Path, command: list[str], code_word: str, **own: str) -> str:
    """What a coding agent says in a folder with notes, at a home of its own."""
    (folder / "notes.txt").write_text(f"The code word is {code_word}.")
    home = folder / f"home-{code_word}"
    home.mkdir()
    environment = os.environ | {"HOME": str(home)} | own
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(CLAUDE is None, reason="claude is not on the path; npm installs @anthropic-ai/claude-code")
def test_claude_code_reads_a_file_runs_a_command_and_answers(cluster: PlainCluster, folder: Path) -> None:
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), "agent")
    own = models | {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_BASE_URL": f"http://{cluster.http_address}",
    }
    how = ("--allowedTools", "Read,Bash(echo:*)", "--output-format", "json")
    told = code(folder, [str(CLAUDE), "-p", "What is the code word, Claude?", *how], "HARE", **own)
    answer = json.loads(told)
    assert (answer["result"], answer["num_turns"], answer["stop_reason"]) == ("Both are done.", 3, "end_turn"), told


CODEX_CONFIG = """
model = "agent"
model_provider = "baton"
[model_providers.baton]
name = "Baton"
base_url = "http://{address}/v1"
wire_api = "responses"
"""


@pytest.mark.skipif(CODEX is None, reason="codex is not on the path; npm installs @openai/codex")
def test_codex_reads_a_file_runs_a_command_and_answers(cluster: PlainCluster, folder: Path) -> None:
    """Without its sandbox, which needs rights that a test may lack."""
    settings = folder / "codex"
    settings.mkdir()
    (settings / "config.toml").write_text(CODEX_CONFIG.format(address=cluster.http_address))
    how = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")
    told = code(folder, [str(CODEX), *how, "What is the code word, Codex?"], "LYNX", CODEX_HOME=str(settings))
    items = [event["item"] for event in map(json.loads, told.splitlines()) if event["type"] == "item.completed"]
    ran = [item for item in items if item["type"] == "command_execution"]
    assert [item["exit_code"] for item in ran] == [0, 0], told
    assert [item["aggregated_output"].strip() for item in ran] == ["The code word is LYNX.", "forty-2"], told
    assert items[-1]["text"] == "Both are done.", told
