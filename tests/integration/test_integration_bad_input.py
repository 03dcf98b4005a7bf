"""Every mistake of a client gets a typed status that names the field, from a real cluster, and costs no one else
anything; a checkpoint or a KV pool that cannot be served ends the worker at its start with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from checkpoints import make_checkpoint
from cluster_fixture import BUNDLED_MODEL, PlainCluster, Stream, single_process, token_spec
from google.protobuf import duration_pb2, struct_pb2
from google.rpc import error_details_pb2, status_pb2
from safetensors.torch import load_file, save_file
from workers import Process

from cluster import rpc
from cluster.pb import generation_pb2 as pb
from cluster.program import ExitCode
from cluster.settings import WorkerSettings
from engine.sampling.params import SamplingParams

NAN, INF = float("nan"), float("inf")
VOCAB_SIZE, CONTEXT = 1024, 2048
HEALTHY_PROMPT, HEALTHY_TOKENS = [5, 7, 11, 13], 24

INVALID = grpc.StatusCode.INVALID_ARGUMENT
OUT_OF_RANGE = grpc.StatusCode.OUT_OF_RANGE
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED


def sampling(**values: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(text="ROMEO:", sampling=pb.SamplingParams(**values))


def stopping(**values: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(text="ROMEO:", stopping=pb.StoppingCriteria(**values))


def output(**values: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(text="ROMEO:", output=pb.OutputOptions(**values))


def tokens(ids: list[int], **values: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(token_ids=pb.TokenIds(ids=ids), stopping=pb.StoppingCriteria(**values))


def scheduling(**values: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(text="ROMEO:", scheduling=pb.SchedulingOptions(**values))


PROMPTS = [
    ("an empty text", pb.GenerationSpec(text=""), INVALID, "spec.text"),
    ("no token ids", tokens([]), INVALID, "spec.token_ids"),
    ("no chat messages", pb.GenerationSpec(chat=pb.ChatInput()), INVALID, "spec.chat.messages"),
    ("a token id outside the vocabulary", tokens([1, VOCAB_SIZE]), INVALID, "spec.token_ids.ids"),
    ("no prompt", pb.GenerationSpec(), INVALID, "spec.prompt"),
    ("a prompt over the context", tokens([1] * CONTEXT), OUT_OF_RANGE, "spec.token_ids"),
    ("a text over the context", pb.GenerationSpec(text="to be " * CONTEXT), OUT_OF_RANGE, "spec.text"),
    (
        "prompt and output over the context",
        tokens([1] * 100, max_output_tokens=CONTEXT - 99),
        OUT_OF_RANGE,
        "spec.stopping.max_output_tokens",
    ),
    ("an unknown model", pb.GenerationSpec(model="gpt-7", text="hi"), NOT_FOUND, "spec.model"),
]
_BOUNDS = {
    "temperature": (NAN, INF, -0.1, 2.1),
    "top_p": (NAN, INF, 0.0, -0.5, 1.1),
    "min_p": (NAN, INF, -0.1, 1.1),
    "frequency_penalty": (NAN, -INF, -2.1, 2.1),
    "presence_penalty": (NAN, INF, -2.1, 2.1),
    "repetition_penalty": (NAN, INF, 0.0, 10.1),
    "top_k": (-2,),
    "n": (0, 17, 2**32 - 1),
}
SAMPLING = [
    (f"{name}={value}", sampling(**{name: value}), INVALID, f"spec.sampling.{name}")
    for name, values in _BOUNDS.items()
    for value in values
] + [
    ("a bias that is not a number", sampling(logit_bias={3: NAN}), INVALID, "spec.sampling.logit_bias[3]"),
    ("a bias of no token", sampling(logit_bias={VOCAB_SIZE: 1.0}), INVALID, "spec.sampling.logit_bias"),
    ("an allowed id of no token", sampling(allowed_token_ids=[VOCAB_SIZE]), INVALID, "spec.sampling.allowed_token_ids"),
]
OTHERS = [
    ("no room for output", stopping(max_output_tokens=0), INVALID, "spec.stopping.max_output_tokens"),
    (
        "more at least than at most",
        stopping(max_output_tokens=3, min_output_tokens=4),
        INVALID,
        "spec.stopping.min_output_tokens",
    ),
    ("too many stop strings", stopping(stop=[str(i) for i in range(17)]), INVALID, "spec.stopping.stop"),
    ("a stop string that is too long", stopping(stop=["fine", "x" * 257]), INVALID, "spec.stopping.stop[1]"),
    ("an empty stop string", stopping(stop=[""]), INVALID, "spec.stopping.stop[0]"),
    ("a stop id of no token", stopping(stop_token_ids=[VOCAB_SIZE]), INVALID, "spec.stopping.stop_token_ids"),
    ("too many logprobs", output(top_logprobs=21), INVALID, "spec.output.top_logprobs"),
    ("an interval of nothing", output(stream_interval_tokens=0), INVALID, "spec.output.stream_interval_tokens"),
    (
        "a negative queue timeout",
        scheduling(queue_timeout=duration_pb2.Duration(seconds=-1)),
        INVALID,
        "spec.scheduling.queue_timeout",
    ),
    ("a priority of no class", scheduling(priority=11), INVALID, "spec.scheduling.priority"),
    ("a request id that is too long", pb.GenerationSpec(text="hi", request_id="x" * 257), INVALID, "spec.request_id"),
    (
        "a salt that is too long",
        pb.GenerationSpec(text="hi", cache=pb.CacheOptions(cache_salt="x" * 257)),
        INVALID,
        "spec.cache.cache_salt",
    ),
]
NOT_SERVED = [
    (field, spec, UNIMPLEMENTED, f"spec.{field}")
    for field, spec in {
        "sampling.bad_words": sampling(bad_words=["no"]),
        "extensions": pb.GenerationSpec(text="hi", extensions=struct_pb2.Struct()),
    }.items()
]
MISTAKES = PROMPTS + SAMPLING + OTHERS + NOT_SERVED


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    with PlainCluster(BUNDLED_MODEL, tmp_path_factory.mktemp("cluster"), kv_cache_tokens=8192) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected() -> list[int]:
    greedy = SamplingParams(temperature=0.0, max_output_tokens=HEALTHY_TOKENS)
    return list(single_process([HEALTHY_PROMPT], [greedy])[0][0].token_ids)


@pytest.fixture
def healthy(cluster: PlainCluster, expected: list[int]) -> Iterator[None]:
    """A stream that is under way while the test does its worst, and then ends as if nothing had been."""
    stream = Stream(cluster, token_spec(HEALTHY_PROMPT, HEALTHY_TOKENS), name="healthy")
    stream.wait_for_tokens(1)
    num_failed = cluster.status().router.num_failed
    yield
    stream.result()
    assert stream.token_ids() == expected
    assert cluster.status().router.num_failed == num_failed


def refusal(call: Any) -> tuple[grpc.StatusCode, list[str], str]:
    """Code, fields of the violations and reason that a client is given; a status's two forms must agree."""
    with pytest.raises(grpc.RpcError) as raised:
        for _ in call() or ():
            pass
    error: Any = raised.value
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())[rpc.DETAILS_KEY])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info) and info.domain == "baton"
    assert status.details[1].Unpack(bad)
    assert all(violation.description for violation in bad.field_violations)
    return error.code(), [violation.field for violation in bad.field_violations], info.reason


def raw(cluster: PlainCluster, data: bytes, method: str = "Generate") -> tuple[grpc.StatusCode, list[str], str]:
    """The refusal of a request made of these bytes."""
    call: Any = cluster.channel.unary_unary(f"/baton.v1.GenerationService/{method}", None, None)
    return refusal(lambda: call(data, timeout=30))


@pytest.mark.parametrize(("spec", "code", "field"), [c[1:] for c in MISTAKES], ids=[c[0] for c in MISTAKES])
def test_a_mistake_is_refused_by_its_field(
    spec: pb.GenerationSpec, code: grpc.StatusCode, field: str, cluster: PlainCluster, healthy: None
) -> None:
    unary = refusal(lambda: cluster.generation.Generate(pb.GenerateRequest(spec=spec), timeout=30))
    streamed = refusal(lambda: cluster.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec), timeout=30))

    assert unary == streamed
    assert unary[:2] == (code, [field])


def test_all_mistakes_of_a_request_are_told_at_once(cluster: PlainCluster, healthy: None) -> None:
    spec = pb.GenerationSpec(
        text="ROMEO:",
        sampling=pb.SamplingParams(temperature=NAN, n=99),
        stopping=pb.StoppingCriteria(stop=[""]),
    )
    code, fields, _ = refusal(lambda: cluster.generation.Generate(pb.GenerateRequest(spec=spec)))
    assert code is INVALID
    assert fields == ["spec.sampling.temperature", "spec.sampling.n", "spec.stopping.stop[0]"]


def test_two_exclusive_fields_are_refused_though_protobuf_would_keep_the_last(
    cluster: PlainCluster, healthy: None
) -> None:
    both = pb.GenerationSpec(text="ROMEO:").SerializeToString() + tokens([1, 2]).SerializeToString()
    assert raw(cluster, field_of(1, both))[:2] == (INVALID, ["spec.token_ids"])
    two = pb.SamplingParams(regex="a").SerializeToString() + pb.SamplingParams(json_object=True).SerializeToString()
    spec = pb.GenerationSpec(text="ROMEO:").SerializeToString() + field_of(5, two)
    assert raw(cluster, field_of(1, spec))[:2] == (INVALID, ["spec.sampling.json_object"])


def field_of(number: int, content: bytes) -> bytes:
    """A length-delimited field as protobuf writes it."""
    length, varint = len(content), bytearray()
    while length >= 0x80:
        varint.append(length & 0x7F | 0x80)
        length >>= 7
    varint.append(length)
    return bytes([number << 3 | 2]) + bytes(varint) + content


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (field_of(2, b"to be \xff\xfe"), "spec.text"),
        (field_of(2, b"cut off \xe2\x82"), "spec.text"),
        (field_of(2, b"a surrogate \xed\xa0\x80"), "spec.text"),
        (field_of(1, b"\x80"), "spec.model"),
        (field_of(2, b"hi") + field_of(6, field_of(3, b"fine") + field_of(3, b"\xc0\x80")), "spec.stopping.stop[1]"),
        (field_of(2, b"hi") + field_of(8, field_of(1, b"\xff")), "spec.cache.cache_salt"),
    ],
)
def test_text_that_is_not_utf8_is_refused_by_its_field(
    spec: bytes, field: str, cluster: PlainCluster, healthy: None
) -> None:
    assert raw(cluster, field_of(1, spec))[:2] == (INVALID, [field])


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 100, bytes(range(256)), b"\x0a\x80\x80\x80\x80\x80", b"\x0a\x7fabc", b"\x0b" * 3000],
    ids=["ones", "all bytes", "an endless length", "a length behind the end", "open groups"],
)
@pytest.mark.parametrize("method", ["Generate", "Tokenize", "CancelGeneration"])
def test_garbage_is_refused(method: str, data: bytes, cluster: PlainCluster, healthy: None) -> None:
    code, fields, reason = raw(cluster, data, method)
    assert (code, fields, reason) == (INVALID, ["request"], "INVALID_REQUEST")


def test_an_empty_request_is_refused(cluster: PlainCluster, healthy: None) -> None:
    assert raw(cluster, b"")[:2] == (INVALID, ["spec"])


def test_a_message_of_ten_megabytes_is_refused_by_its_size(cluster: PlainCluster, healthy: None) -> None:
    request = pb.GenerateRequest(spec=pb.GenerationSpec(text="x" * 10_000_000))
    assert refusal(lambda: cluster.generation.Generate(request))[:2] == (INVALID, ["request"])


def test_a_message_beyond_what_grpc_takes_is_refused(cluster: PlainCluster, healthy: None) -> None:
    request = pb.GenerateRequest(spec=pb.GenerationSpec(text="x" * 20_000_000))
    with pytest.raises(grpc.RpcError) as raised:
        cluster.generation.Generate(request)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("how", [{"timeout": 0}, {"timeout": -1}, {"metadata": (("grpc-timeout", "1n"),)}])
def test_a_deadline_already_past_is_refused_and_starts_nothing(
    how: dict[str, Any], cluster: PlainCluster, healthy: None
) -> None:
    """The last one passes at the server only. gRPC itself answers all of them, in the client or in the server."""
    spec = token_spec([1, 2, 3], 1000)
    with pytest.raises(grpc.RpcError) as raised:
        cluster.generation.Generate(pb.GenerateRequest(spec=spec), **how)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.wait_for(lambda status: status.router.num_running <= 1 and status.router.num_queued == 0)


@pytest.mark.parametrize(
    ("method", "request_", "code", "fields"),
    [
        ("Tokenize", pb.TokenizeRequest(), INVALID, ["input"]),
        ("Tokenize", pb.TokenizeRequest(model="gpt-7", text="x"), NOT_FOUND, ["model"]),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[VOCAB_SIZE]), INVALID, ["token_ids"]),
        ("GetModel", pb.GetModelRequest(model="gpt-7"), NOT_FOUND, ["model"]),
        ("ListModels", pb.ListModelsRequest(page_size=-1), INVALID, ["page_size"]),
    ],
)
def test_the_small_methods_refuse_too(
    method: str, request_: Any, code: grpc.StatusCode, fields: list[str], cluster: PlainCluster, healthy: None
) -> None:
    assert refusal(lambda: getattr(cluster.generation, method)(request_))[:2] == (code, fields)


def refused_start(folder: Path, **settings: Any) -> str:
    """What a worker says that must end with the exit code of a bad configuration."""
    given = {"threads": 1, "device": "cpu", "dtype": "float32", "max_model_len": 256, **settings}
    settings = WorkerSettings.from_values(worker_id="w", role="decode", model_path=str(folder), **given)
    process = Process("worker", settings.to_json())
    code = process.popen.wait(60)
    said = process.stderr()
    process.stop()
    assert code == ExitCode.BAD_CONFIG, said
    assert "Traceback" not in said
    return said.strip().splitlines()[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "model")


def test_a_truncated_checkpoint_is_refused_with_its_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])

    said = refused_start(folder)

    assert said.startswith("error: ") and str(file) in said and "truncated" in said


def test_a_missing_tensor_is_refused_with_its_name_and_shape(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.2.mlp.down_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})

    said = refused_start(folder)

    assert str(file) in said and "model.layers.2.mlp.down_proj.weight is missing" in said and "[64, 128]" in said


def test_a_wrong_shape_is_refused_with_both_shapes(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(48, 64)
    save_file(weights, file, metadata={"format": "pt"})

    said = refused_start(folder)

    assert str(file) in said and "model.layers.1.self_attn.k_proj.weight" in said
    assert "[48, 64]" in said and "[64, 64]" in said


def test_an_architecture_that_is_not_supported_is_refused_by_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    config["model_type"] = "mamba"
    (folder / "config.json").write_text(json.dumps(config))

    said = refused_start(folder)

    assert "config.json" in said and "MambaForCausalLM" in said and "LlamaForCausalLM" in said


def test_a_kv_pool_too_small_for_one_request_is_refused_with_the_number_that_fits(folder: Path) -> None:
    said = refused_start(folder, kv_cache_tokens=250)

    assert "max_model_len" in said and "256" in said
    assert "240" in said, "15 whole blocks of 16 tokens fit"
