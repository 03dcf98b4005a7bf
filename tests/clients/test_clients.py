"""The clients that people have: OpenAI's own, LiteLLM, LangChain and Anthropic's own each complete a chat, a stream
with its usage, a stop, an error, a retry and an object of a schema, and tell the tokens of gRPC.

Each client is a program of its own beside this file. All but the first run in .venv-clients, which `make test-clients`
makes: LiteLLM wants an older huggingface-hub than Baton.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from asked import MESSAGES, NUM_TOKENS, SCHEMA
from cluster_fixture import BUNDLED_MODEL, DECODE, WAIT_S, PlainCluster, Stream, token_spec
from workers import ROOT

from cluster.pb import generation_pb2 as pb
from tools.client import BatonClient

MODEL = BUNDLED_MODEL.name
OTHERS = ROOT / ".venv-clients" / "bin" / "python"
HERE = Path(__file__).parent
NARROW = {"max_running_requests": 1, "max_queued_requests": 1}
NEEDS_OTHERS = pytest.mark.skipif(
    not OTHERS.exists(),
    reason="clients other than OpenAI's are not installed; `make test-clients` installs and runs them",
)
MOST_REFUSALS = 2
"""Of a client that tries again, before there is room."""
LOOK_EVERY_S = 0.02


class Client:
    """A program of this folder, asked in lines of JSON."""

    def __init__(self, name: str, python: str, model: str = MODEL) -> None:
        self._model = model
        command = [python, str(HERE / f"{name}_client.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._told() == {}, "the client says first that it is ready"

    def ask(self, step: str, http_address: str) -> dict[str, Any]:
        stdin = self._process.stdin
        assert stdin is not None
        asked = {"step": step, "base_url": f"http://{http_address}/v1", "model": self._model}
        stdin.write(json.dumps(asked) + "\n")
        stdin.flush()
        told = self._told()
        assert "failed" not in told, told["failed"]
        return told

    def _told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the client ended: {self._process.wait(WAIT_S)}"
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        try:
            self._process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        assert self._process.returncode == 0, "the client did not end when nothing more was asked"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    """With a second router, which takes on one request and lets one wait."""
    patient = {"grammar_timeout_s": 30.0}  # a busy machine compiles slowly
    router = {"http_port": 0, **patient}
    with PlainCluster(BUNDLED_MODEL, tmp_path_factory.mktemp("cluster"), router=router, **patient) as cluster:
        cluster.narrow = cluster.add_router("narrow", **NARROW)  # type: ignore[attr-defined]
        yield cluster


@pytest.fixture(
    scope="module",
    params=["openai", *(pytest.param(name, marks=NEEDS_OTHERS) for name in ("litellm", "langchain", "anthropic"))],
)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    name: str = request.param
    client = Client(name, sys.executable if name == "openai" else str(OTHERS))
    yield client
    client.close()


@pytest.fixture(scope="module")
def anthropic_client() -> Iterator[Client]:
    client = Client("anthropic", str(OTHERS))
    yield client
    client.close()


@pytest.fixture(scope="module")
def openai_client() -> Iterator[Client]:
    client = Client("openai", sys.executable)
    yield client
    client.close()


def expected(cluster: PlainCluster, **stopping: Any) -> dict[str, Any]:
    """What gRPC says of the same chat, as the clients tell it."""
    chat = pb.ChatInput()
    for message in MESSAGES:
        chat.messages.add().update(message)
    spec = pb.GenerationSpec(chat=chat, sampling=pb.SamplingParams(temperature=0))
    spec.stopping.CopyFrom(pb.StoppingCriteria(max_output_tokens=NUM_TOKENS, **stopping))
    answer = cluster.client.generate(spec, timeout_s=WAIT_S)
    usage, reasons = answer.usage, {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
    return {
        "text": answer.outputs[0].text,
        "finish_reason": reasons[answer.ends[0].finish_reason],
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


@pytest.mark.parametrize("step", ["chat", "async chat"])
def test_a_chat_is_what_grpc_says(client: Client, cluster: PlainCluster, step: str) -> None:
    assert client.ask(step, cluster.http_address) == expected(cluster)


@pytest.mark.parametrize("step", ["stream", "async stream"])
def test_a_stream_comes_in_parts_and_ends_with_its_usage(client: Client, cluster: PlainCluster, step: str) -> None:
    told = client.ask(step, cluster.http_address)
    assert told.pop("num_chunks") > 2
    assert told == expected(cluster)


def test_a_stop_string_ends_a_chat_before_it(client: Client, cluster: PlainCluster) -> None:
    told, wanted = client.ask("stop", cluster.http_address), expected(cluster, stop=["\n"])
    assert told == wanted and wanted["finish_reason"] == "stop"
    assert wanted["text"] == expected(cluster)["text"].partition("\n")[0]


@pytest.mark.parametrize("step", ["error", "async error"])
def test_an_error_is_of_the_clients_own_kind_and_says_what_is_wrong(
    client: Client, cluster: PlainCluster, step: str
) -> None:
    told = client.ask(step, cluster.http_address)
    assert "BadRequestError" in told["kinds"] and told["status"] == 400
    assert "temperature: must be between 0 and 2 (got 2.5)" in told["message"]


@pytest.mark.parametrize("step", ["retry", "async retry"])
def test_a_refusal_for_load_is_tried_again_until_there_is_room(
    client: Client, cluster: PlainCluster, step: str
) -> None:
    with Crowd(cluster) as crowd:
        crowd.leaves_after(MOST_REFUSALS)
        told = client.ask(step, crowd.http_address)
    assert crowd.num_refused() >= MOST_REFUSALS
    assert told.pop("retries", MOST_REFUSALS) >= MOST_REFUSALS
    assert told == expected(cluster)


def test_an_output_is_an_object_of_the_schema(client: Client, cluster: PlainCluster) -> None:
    told = client.ask("structured", cluster.http_address)["parsed"]
    assert set(told) == {"mood", "verses"}
    assert told["mood"] in ("merry", "sad") and 1 <= told["verses"] <= 9


@pytest.mark.parametrize(("step", "names"), [("required", {"say", "sing"}), ("named stream", {"sing"})])
def test_a_call_that_is_forced_has_the_arguments_of_its_schema(
    openai_client: Client, cluster: PlainCluster, step: str, names: set[str]
) -> None:
    told = openai_client.ask(step, cluster.http_address)
    assert told["finish_reason"] == "tool_calls" and not told["text"] and told["calls"]
    for name, arguments in told["calls"]:
        assert name in names
        jsonschema.validate(arguments, SCHEMA)


def test_a_refusal_says_when_to_come_again(openai_client: Client, cluster: PlainCluster) -> None:
    with Crowd(cluster) as crowd:
        told = openai_client.ask("refused", crowd.http_address)
    assert told["status"] == 429 and "RateLimitError" in told["kinds"] and "try again" in told["message"]
    after_s, after_ms = int(told["headers"]["retry-after"]), int(told["headers"]["retry-after-ms"])
    assert 1 <= after_s <= 60 and 1000 * (after_s - 1) < after_ms <= 1000 * after_s


@NEEDS_OTHERS
def test_tokens_are_counted_as_a_message_uses_them_and_too_much_is_refused(
    anthropic_client: Client, cluster: PlainCluster
) -> None:
    told = anthropic_client.ask("count", cluster.http_address)
    assert told["counted"] == told["used"] > 0
    with Crowd(cluster) as crowd:
        told = anthropic_client.ask("refused", crowd.http_address)
    assert (told["status"], told["type"]) == (529, "overloaded_error") and int(told["headers"]["retry-after"]) >= 1


def test_a_raw_stream_is_server_sent_events(openai_client: Client, cluster: PlainCluster) -> None:
    told = openai_client.ask("raw stream", cluster.http_address)
    *lines, last = told["lines"]
    assert last == "data: [DONE]" and told["content_type"].startswith("text/event-stream")
    assert told["id"].startswith("req-")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    texts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == expected(cluster)["text"]
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_a_chat_in_a_batch_is_what_grpc_says(openai_client: Client, cluster: PlainCluster) -> None:
    told = openai_client.ask("batch", cluster.http_address)
    assert told == expected(cluster) | {"status": "completed"}


class Crowd:
    """Two requests at the narrow router that do not end before `leaves_after`: their decode worker stands still. They
    are short, since who is refused is told to wait for as long as they should take."""

    def __init__(self, cluster: PlainCluster) -> None:
        narrow: dict[str, Any] = cluster.narrow  # type: ignore[attr-defined]
        self.http_address = str(narrow["http_address"])
        self._cluster = cluster
        self._decode = cluster.processes[DECODE].popen
        self._client = BatonClient(str(narrow["address"]))
        self._refused_before = self._metric('baton_refusals_total{reason="queue_requests"}')
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Crowd:
        self._decode.send_signal(signal.SIGSTOP)
        try:
            self._streams = [Stream(self._cluster, token_spec([1, 2], 2), client=self._client) for _ in range(2)]
            self._until(lambda: self._metric("baton_running_requests") == self._metric("baton_queued_requests") == 1)
        except BaseException:
            self._decode.send_signal(signal.SIGCONT)
            raise
        return self

    def leaves_after(self, num_refused: int) -> None:
        """Once a third has been refused so often. Returns at once."""
        self._watcher = threading.Thread(target=self._leave, args=(num_refused,))
        self._watcher.start()

    def num_refused(self) -> float:
        return self._metric('baton_refusals_total{reason="queue_requests"}') - self._refused_before

    def __exit__(self, *error: object) -> None:
        if self._watcher is not None:
            self._watcher.join()
        self._decode.send_signal(signal.SIGCONT)
        for stream in self._streams:
            stream.cancel()
            stream.join()
        self._client.close()

    def _leave(self, num_refused: int) -> None:
        try:
            self._until(lambda: self.num_refused() >= num_refused)
        finally:
            self._decode.send_signal(signal.SIGCONT)

    def _until(self, condition: Callable[[], bool]) -> None:
        until, never = time.monotonic() + WAIT_S, threading.Event()
        while not condition():
            assert time.monotonic() < until, f"this did not come about within {WAIT_S} s"
            never.wait(LOOK_EVERY_S)

    def _metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=WAIT_S) as page:
            lines = page.read().decode().splitlines()
        return next(float(line.removeprefix(name)) for line in lines if line.startswith(f"{name} "))
