"""Clients that know nothing of Baton's Python: one that asks the server what it offers, and one in JavaScript."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import BUNDLED_MODEL, PlainCluster, token_spec
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from workers import ROOT

from cluster.pb import generation_pb2 as pb

NODE_CLIENT = ROOT / "tests" / "clients" / "node"
NO_NETWORK = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "ENOTCACHED", "E403")
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    with PlainCluster(BUNDLED_MODEL, tmp_path_factory.mktemp("cluster"), kv_cache_tokens=4096) as cluster:
        yield cluster


def greedy(cluster: PlainCluster, prompt: str) -> pb.GenerateResponse:
    return cluster.client.generate(token_spec(cluster.client.tokenize(prompt, add_special_tokens=True), NUM_TOKENS))


def test_reflection_lists_the_services_and_their_methods(cluster: PlainCluster) -> None:
    reflected: Any = ProtoReflectionDescriptorDatabase(cluster.channel)

    assert set(reflected.get_services()) == {
        "baton.v1.GenerationService",
        "baton.admin.v1.StatusService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    pool: Any = DescriptorPool(reflected)
    service = pool.FindServiceByName("baton.v1.GenerationService")
    wanted = pb.DESCRIPTOR.services_by_name["GenerationService"]
    assert [(m.name, m.server_streaming) for m in service.methods] == [
        (m.name, m.server_streaming) for m in wanted.methods
    ]


def test_a_client_that_has_only_the_reflection_completes_a_call(cluster: PlainCluster) -> None:
    """As grpcurl does: messages are made from descriptors that the server sent."""
    database: Any = ProtoReflectionDescriptorDatabase(cluster.channel)
    pool: Any = DescriptorPool(database)
    method = pool.FindServiceByName("baton.v1.GenerationService").FindMethodByName("Generate")
    request_type: Any = message_factory.GetMessageClass(method.input_type)
    response_type: Any = message_factory.GetMessageClass(method.output_type)
    request = request_type()
    request.spec.text = "ROMEO:"
    request.spec.sampling.temperature = 0
    request.spec.stopping.max_output_tokens = NUM_TOKENS
    request.spec.stopping.ignore_eos = True
    request.spec.output.token_ids = True

    call = cluster.channel.unary_unary(
        "/baton.v1.GenerationService/Generate", request_type.SerializeToString, response_type.FromString
    )

    assert list(call(request).outputs[0].token_ids) == list(greedy(cluster, "ROMEO:").outputs[0].token_ids)


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client, what it needs from the npm registry, and messages generated from the .proto file."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node or npm is not installed")
    folder = tmp_path_factory.mktemp("clients") / "node"
    shutil.copytree(NODE_CLIENT, folder, ignore=shutil.ignore_patterns("node_modules", "generated"))
    (folder / "generated").mkdir()
    flags = ("--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")
    installed = run("npm", "ci", *flags, "--fetch-retries=1", "--fetch-timeout=20000", folder=folder)
    if installed.returncode and any(word in installed.stderr for word in NO_NETWORK):
        pytest.skip(f"the npm registry cannot be reached: {installed.stderr[-300:]}")
    assert installed.returncode == 0, installed.stderr
    generated = run("npm", "run", "generate", "--", str(ROOT / "proto" / "generation.proto"), folder=folder)
    assert generated.returncode == 0, generated.stderr
    return folder


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)


def stream(node_client: Path, cluster: PlainCluster, prompt: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and events of one run of the client."""
    ended = run("node", "client.js", cluster.address, prompt, str(NUM_TOKENS), folder=node_client)
    assert not ended.stderr
    return ended.returncode, [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.timeout(300)
def test_a_client_generated_for_javascript_completes_a_stream(node_client: Path, cluster: PlainCluster) -> None:
    code, events = stream(node_client, cluster, "ROMEO:")

    expected = greedy(cluster, "ROMEO:")
    assert code == 0
    kinds = [kind for event in events for kind in event if kind != "heartbeat"]
    assert kinds[0] == "started" and kinds[-2:] == ["sequenceEnd", "completed"]
    assert events[-1] == {"completed": {"completionTokens": NUM_TOKENS}}
    assert events[-2] == {"sequenceEnd": {"finishReason": "FINISH_REASON_LENGTH", "tokenCount": NUM_TOKENS}}
    deltas = [event["delta"] for event in events if "delta" in event]
    token_ids: list[int] = []
    for delta in deltas:
        assert delta["firstTokenIndex"] == len(token_ids)
        token_ids += delta["tokenIds"]
    assert token_ids == list(expected.outputs[0].token_ids)
    assert "".join(delta["text"] for delta in deltas) == expected.outputs[0].text


@pytest.mark.timeout(300)
def test_a_client_in_javascript_is_told_its_mistake(node_client: Path, cluster: PlainCluster) -> None:
    code, events = stream(node_client, cluster, "")

    assert code == 1
    (event,) = events
    assert event["error"]["code"] == "INVALID_ARGUMENT" and event["error"]["details"].startswith("spec.text: ")
