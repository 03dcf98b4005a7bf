"""Traces of a router with fake workers: whose they continue, which calls are sampled, and what a collector may do."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from author import ALONE, Author, Reading, again, resumable
from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, FakeWorker, pair, phase, tokens
from kept_traces import Kept
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from otlp_receiver import Received, receiver
from prometheus_client import CollectorRegistry
from router_harness import Router, ids, running_router, text_spec

from cluster.errors import ConfigError, InvalidRequest
from cluster.metrics import LabelledCounter
from cluster.pb import generation_pb2 as pb
from cluster.settings import RouterSettings
from cluster.state import MemoryStore
from router.observe import otel
from router.observe.metrics import TRACE_SPANS
from router.observe.otel import exporter_to
from router.observe.tracing import Origin, Traces
from router.program import open_traces

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"
ORIGIN = Origin("chat", True, 0.0, 1e9)
PARTS = ["attempt", "decode", "hand-off", "prefill", "queue"]


def answer(_: object) -> list[list[int]]:
    return [ids("abc")]


def post(address: str, path: str, body: object, **headers: str) -> int:
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode(), headers)
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=20) as response:
        return int(response.status)


async def hand_over(router: Router, workers: tuple[FakeWorker, FakeWorker], spec: pb.GenerationSpec) -> None:
    """A request of two tokens; each phase is told once the client has heard of the one before."""
    prefill, decode = workers
    call = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec))

    async def until_told(tells: Callable[[pb.GenerateStreamResponse], bool]) -> None:
        while not tells(await call.read()):
            pass

    key = (await prefill.next_admit()).key
    prefill.emit(phase(key, PREFILL))
    await until_told(lambda event: event.heartbeat.phase == PREFILL)
    prefill.emit(tokens(key, 0, ids("a")))
    await until_told(lambda event: event.HasField("delta"))
    prefill.emit(phase(key, TRANSFER))
    await until_told(lambda event: event.heartbeat.phase == TRANSFER)
    decode.emit(phase(key, DECODE), tokens(key, 1, ids("b"), finish_reason=LENGTH))
    await until_told(lambda event: event.HasField("completed"))


async def test_one_request_is_one_trace_with_its_parents_right(tmp_path: Path) -> None:
    kept, workers = Kept(), pair()
    async with running_router(tmp_path, workers, traces=kept.traces) as router:
        await hand_over(router, workers, text_spec(request_id="mine"))
    (root,) = kept.roots()
    spans = kept.spans()
    assert len({span.context.trace_id for span in spans}) == 1
    assert sorted(span.name for span in spans if span is not root) == PARTS
    (attempt,) = (span for span in spans if span.name == "attempt")
    for span in spans:
        above = {root.context.span_id: None, attempt.context.span_id: root}.get(span.context.span_id, attempt)
        assert (span.parent and span.parent.span_id) == (above and above.context.span_id), span.name
    assert root.kind is SpanKind.SERVER and attempt.kind is SpanKind.INTERNAL
    assert root.status.status_code is StatusCode.UNSET
    assert root.attributes is not None and root.attributes["gen_ai.provider.name"] == "baton"
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["baton.request_id"] == "mine"
    assert abs(time.time() - root.start_time / 1e9) < 60
    assert kept.count("sent") == len(spans) == 6


@pytest.mark.parametrize("over_http", [False, True], ids=["grpc", "http"])
async def test_a_callers_trace_goes_on_here(tmp_path: Path, over_http: bool) -> None:
    kept = Kept(sample=0.0)
    headers = {"traceparent": SAMPLED, "tracestate": "vendor=1"}
    async with running_router(tmp_path, pair(answer), traces=kept.traces, http_port=0) as router:
        if over_http:
            body = {"model": "m", "prompt": "hello", "max_tokens": 3, "stream": True}
            body["model"] = json.loads(await asyncio.to_thread(get, router.server.http_address))["data"][0]["id"]
            await asyncio.to_thread(post, router.server.http_address, "/v1/completions", body, **headers)
        else:
            await router.stream(text_spec(), metadata=tuple(headers.items()))
    (root,) = kept.roots()
    assert root.parent is not None and root.parent.is_remote
    assert format(root.context.trace_id, "032x") == TRACE_ID
    assert format(root.parent.span_id, "016x") == SPAN_ID
    assert root.context.trace_state.to_header() == "vendor=1"
    assert all(span.context.trace_id == root.context.trace_id for span in kept.spans())


def get(address: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=20) as response:
        return bytes(response.read())


@pytest.mark.parametrize(
    ("sample", "metadata", "is_traced"),
    [
        (1.0, {"traceparent": UNSAMPLED}, False),
        (0.0, {"traceparent": SAMPLED}, True),
        (0.0, {}, False),
        (0.0, {"traceparent": "00-zz-11-01"}, False),
        (1.0, {"traceparent": "00-zz-11-01"}, True),
        (1.0, {"traceparent": f"00-{'0' * 32}-{SPAN_ID}-00"}, True),
        (1.0, {"traceparent": UNSAMPLED + "x" * 5000}, True),
        (1.0, {"traceparent": UNSAMPLED, "tracestate": "x" * 9000}, False),
    ],
)
def test_the_callers_flag_decides_and_without_one_the_share(
    sample: float, metadata: dict[str, str], is_traced: bool
) -> None:
    with Kept(sample=sample) as kept:
        assert (kept.traces.begin(tuple(metadata.items()), ORIGIN) is not None) == is_traced


def test_two_parents_are_none() -> None:
    with Kept() as kept:
        call = kept.traces.begin((("traceparent", UNSAMPLED), ("Traceparent", UNSAMPLED)), ORIGIN)
        assert call is not None, "neither counts, so the share decides"


def test_metadata_in_bytes_is_no_parent() -> None:
    with Kept(sample=0.0) as kept:
        assert kept.traces.begin((("traceparent", SAMPLED.encode()),), ORIGIN) is None


@pytest.mark.parametrize("metadata", [(), (("traceparent", SAMPLED),)], ids=["its own trace", "the caller's"])
async def test_what_another_router_goes_on_with_is_in_the_trace_of_the_first_call(
    tmp_path: Path, metadata: tuple[tuple[str, str], ...]
) -> None:
    """Whatever the share of the other one is."""
    first, rest = await resumed_elsewhere(tmp_path, one := Kept(sample=1.0), two := Kept(sample=0.0), metadata)
    assert rest.parent is not None and rest.parent.span_id == first.context.span_id
    assert {s.context.trace_id for s in (*one.spans(), *two.spans())} == {first.context.trace_id}
    assert not metadata or format(first.context.trace_id, "032x") == TRACE_ID


async def test_what_begins_untraced_is_traced_at_another_router_by_itself(tmp_path: Path) -> None:
    first, rest = await resumed_elsewhere(tmp_path, Kept(sample=0.0), Kept(sample=1.0), ())
    assert first is None and rest.parent is None


async def resumed_elsewhere(folder: Path, one: Kept, two: Kept, metadata: tuple[tuple[str, str], ...]) -> Any:
    """The roots of a stream whose client leaves and comes back to another router."""
    author, store = Author("hello", limit=2), MemoryStore()
    async with (
        running_router(folder, [author.worker], traces=one.traces, store=store, **ALONE) as here,
        running_router(folder, [author.worker], traces=two.traces, store=store, **ALONE) as there,
    ):
        asked = pb.GenerateStreamRequest(spec=resumable())
        first = Reading(here.generation.GenerateStream(asked, metadata=metadata))
        await first.until_tokens(2)
        rest = Reading.start(there, again(first.generation_id, 2))
        await author.worker.next_admit()
        author.finish()
        await rest.to_the_end()
    return next(iter(one.roots()), None), *two.roots()


def test_the_share_is_drawn_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([0.1, 0.3, 0.24, 0.9])
    monkeypatch.setattr(otel.random, "random", lambda: next(drawn))
    with Kept(sample=0.25) as kept:
        assert [kept.traces.begin((), ORIGIN) is not None for _ in range(4)] == [True, False, True, False]


async def test_a_call_that_is_refused_is_a_span_with_its_error(tmp_path: Path) -> None:
    kept = Kept()
    async with running_router(tmp_path, pair(answer), traces=kept.traces) as router:
        with pytest.raises(grpc.aio.AioRpcError):
            await router.stream(text_spec(sampling=pb.SamplingParams(temperature=-1)))
        with pytest.raises(grpc.aio.AioRpcError):
            await router.stream(text_spec(resume=pb.ResumeFrom(generation_id=f"gen-{'0' * 24}")))
    invalid, unknown = kept.roots()
    assert len(kept.spans()) == 2
    for span, kind in ((invalid, "INVALID_REQUEST"), (unknown, "NOT_FOUND")):
        assert span.status.status_code is StatusCode.ERROR and span.status.description
        assert span.attributes is not None and span.attributes["error.type"] == kind


async def test_a_request_that_waits_in_vain_is_a_span_with_its_error(tmp_path: Path) -> None:
    kept = Kept()
    async with running_router(tmp_path, traces=kept.traces, queue_timeout_s=0.2) as router:
        with pytest.raises(grpc.aio.AioRpcError):
            await router.generation.Generate(pb.GenerateRequest(spec=text_spec()))
    (root,) = kept.roots()
    assert root.status.status_code is StatusCode.ERROR
    assert [span.name for span in kept.spans() if span is not root] == ["queue"]


async def test_what_clients_wrote_and_were_told_is_in_no_span(tmp_path: Path) -> None:
    kept = Kept()
    async with running_router(tmp_path, pair(lambda _: [ids("uvwxyz")]), traces=kept.traces) as router:
        spec = text_spec("my secret", stopping=pb.StoppingCriteria(max_output_tokens=6, stop=["stop-word"]))
        await router.stream(spec)
    told = " ".join(span.to_json() for span in kept.spans())
    assert "secret" not in told and "uvwxyz" not in told and "stop-word" not in told


async def test_the_receiver_gets_over_the_wire_what_the_router_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    workers = pair()
    with receiver() as collector:
        async with running_router(tmp_path, workers, trace_endpoint=collector.url) as router:
            await hand_over(router, workers, text_spec())
        (root,) = collector.roots(1)
    check_tree(collector.spans, root)
    assert root.resource["service.name"] == "baton" and root.resource["service.version"]
    assert collector.headers[0]["authorization"] == "Bearer abc"


def check_tree(spans: Sequence[Received], root: Received) -> None:
    by_id = {span.span_id: span for span in spans}
    assert sorted(span.name for span in spans if span is not root) == PARTS
    for span in spans:
        assert span.trace_id == root.trace_id
        parent = by_id.get(span.parent_id)
        if parent is not None:
            assert parent.begin_ns <= span.begin_ns <= span.end_ns <= parent.end_ns


# Configuration


def settings(**given: Any) -> RouterSettings:
    return RouterSettings.from_values(model_path="m", **given)


def test_nothing_is_traced_and_nothing_imported_unless_it_is_configured() -> None:
    counter = LabelledCounter(TRACE_SPANS, CollectorRegistry())
    assert type(open_traces(settings(), counter)) is Traces
    assert Traces().begin((("traceparent", SAMPLED),), ORIGIN) is None


def test_without_the_extra_a_configured_endpoint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "router.observe.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    counter = LabelledCounter(TRACE_SPANS, CollectorRegistry())
    with pytest.raises(ConfigError, match=r"router\.trace_endpoint.*extra otel"):
        open_traces(settings(trace_endpoint="http://127.0.0.1:4318"), counter)


@pytest.mark.parametrize("endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_the_path_of_traces_is_added_where_it_is_missing(endpoint: str) -> None:
    exporter: Any = exporter_to(endpoint)
    assert exporter._endpoint == "http://c:4318/v1/traces"
    exporter.shutdown()


def test_the_service_is_named_by_the_environment_or_baton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert otel._resource().attributes["service.name"] == "baton"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    assert otel._resource().attributes["service.name"] == "chat-eu"


class Encoded(SpanExporter):
    """Makes of spans what would go over the wire."""

    num_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        self.num_spans += len(spans)
        return SpanExportResult.SUCCESS


def odd_header(draw: random.Random) -> str:
    """Of either kind: right, right but for a few characters, or anything."""
    states = ",".join(f"k{draw.randrange(40)}={chr(draw.randrange(33, 127))}" for _ in range(draw.randrange(40)))
    good = draw.choice([SAMPLED, UNSAMPLED, SAMPLED + "-more", "ff" + SAMPLED[2:], "01" + SAMPLED[2:] + "-x", states])
    text = list(good)
    for _ in range(draw.choice([0, 0, 1, 3, 40])):
        text.insert(draw.randrange(len(text) + 1), chr(draw.choice([0, 9, 32, 45, 61, 120, 0x80, 0x20AC, 0x1F600])))
        del text[draw.randrange(len(text))]
    return "".join(text)


def test_no_header_makes_a_call_fail_or_a_trace_that_cannot_be_sent_or_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    draw = random.Random(1)
    kept = Kept(encoded := Encoded())
    for _ in range(1500):
        names = draw.choices(["traceparent", "traceparent", "tracestate", "TraceParent"], k=draw.choice([1, 2, 2, 3]))
        call = kept.traces.begin([(name, odd_header(draw)) for name in names], ORIGIN)
        if call is not None:
            call.refused(InvalidRequest("no"), 1.0)
    kept.traces.close()
    assert kept.count("failed") == kept.count("dropped") == 0
    assert kept.count("sent") == encoded.num_spans > 0
    assert not caplog.records, "a client could fill the log"
