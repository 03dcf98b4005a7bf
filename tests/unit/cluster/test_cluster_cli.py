"""The client side of `baton`, against a scripted router on a real gRPC connection."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from typer.testing import CliRunner, Result

from cluster import rpc
from cluster.cli.main import app
from cluster.client import BatonClient, make_spec
from cluster.errors import (
    BatonError,
    FailedPrecondition,
    FieldViolation,
    InternalError,
    InvalidRequest,
    NotReachable,
    OutOfRange,
    Overloaded,
)
from cluster.pb import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, worker_pb2
from cluster.pb import generation_pb2 as pb
from cluster.transcript import Transcript

ROOT = Path(__file__).resolve().parents[3]
Event = pb.GenerateStreamResponse
Script = Callable[[pb.GenerationSpec], AsyncIterator[Event]]


def started() -> Event:
    return Event(started=pb.Started(generation_id="gen-1", model="bard", prompt_tokens=3))


def delta(text: str, first: int, count: int = 1, index: int = 0) -> Event:
    ids = range(first, first + count)
    return Event(
        delta=pb.SequenceDelta(index=index, first_token_index=first, token_count=count, token_ids=ids, text=text)
    )


def end(count: int, index: int = 0) -> Event:
    reason = pb.FINISH_REASON_LENGTH
    return Event(sequence_end=pb.SequenceEnd(index=index, finish_reason=reason, token_count=count))


def completed(num_tokens: int = 2) -> Event:
    timing = pb.Timing(placement="disaggregated")
    timing.time_to_first_token.FromMilliseconds(31)
    timing.decode.FromMilliseconds(8)
    usage = pb.Usage(prompt_tokens=3, completion_tokens=num_tokens, cached_tokens=1)
    return Event(completed=pb.Completed(usage=usage, timing=timing))


async def hello(_: pb.GenerationSpec) -> AsyncIterator[Event]:
    for event in (started(), delta("Hello", 0), delta(" world", 1), end(2), completed()):
        yield event


def failing(error: BatonError, *before: Event) -> Script:
    async def script(_: pb.GenerationSpec) -> AsyncIterator[Event]:
        for event in before:
            yield event
        raise error

    return script


class ScriptedRouter(generation_pb2_grpc.GenerationServiceServicer, admin_pb2_grpc.AdminServiceServicer):  # type: ignore[misc]
    """Answers as `script` says and remembers what it was asked."""

    def __init__(self) -> None:
        self.address = ""
        self.script: Script = hello
        self.specs: list[pb.GenerationSpec] = []
        self.cancelled = threading.Event()
        self.go_on = threading.Event()
        self.status = admin_pb2.GetStatusResponse()

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> AsyncIterator[Event]:
        self.specs.append(request.spec)
        try:
            async for event in self.script(request.spec):
                yield event
        except BatonError as error:
            await rpc.abort(context, error)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=request.text.encode())

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> admin_pb2.GetStatusResponse:
        return self.status

    async def hello_then_wait(self, _: pb.GenerationSpec) -> AsyncIterator[Event]:
        yield started()
        yield delta("Hello", 0)
        await asyncio.to_thread(self.go_on.wait, 20)
        yield delta(" world", 1)
        yield end(2)
        yield completed()

    async def hello_then_hang(self, _: pb.GenerationSpec) -> AsyncIterator[Event]:
        yield started()
        yield delta("Hello", 0)
        await asyncio.Event().wait()


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    scripted = ScriptedRouter()
    loop = asyncio.new_event_loop()

    async def start() -> Any:
        server, port = rpc.create_server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(scripted, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(scripted, server)
        await server.start()
        scripted.address = f"127.0.0.1:{port}"
        return server

    server = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield scripted
    scripted.go_on.set()
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""

    async def bind_and_leave() -> int:
        server, port = rpc.create_server()
        await server.start()
        await server.stop(None)
        return port

    return f"127.0.0.1:{asyncio.run(bind_and_leave())}"


def baton(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def start_baton(*arguments: str, **kwargs: Any) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cluster.cli.main", *arguments]
    return subprocess.Popen(command, env=environment, cwd=ROOT, **kwargs)


def read_until(descriptor: int, wanted: bytes) -> bytes:
    """Everything up to and including `wanted`; what came, when the other side closes first."""
    seen = b""
    while wanted not in seen:
        try:
            piece = os.read(descriptor, 1000)
        except OSError:  # Linux says EIO when the far side of a terminal closes
            return seen
        if not piece:
            return seen
        seen += piece
    return seen


# generate


def test_generate_prints_the_text_and_nothing_else(router: ScriptedRouter) -> None:
    done = baton("generate", "Say hello", "--address", router.address)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Hello world\n", "")
    assert router.specs[0].text == "Say hello"


def test_generate_leaves_unset_what_was_not_asked_for(router: ScriptedRouter) -> None:
    baton("generate", "x", "--address", router.address)
    (spec,) = router.specs
    assert json_format.MessageToDict(spec.sampling) == {"n": 1}
    assert json_format.MessageToDict(spec.stopping) == {"maxOutputTokens": 256}
    assert json_format.MessageToDict(spec.output) == {}


def test_generate_passes_every_option_on(router: ScriptedRouter) -> None:
    options = "--max-tokens 7 --temperature 0.5 --top-p 0.25 --top-k 3 --seed 11 --n 2 --stop END --stop STOP --timing"
    baton("generate", "x", "--address", router.address, *options.split())
    (spec,) = router.specs
    sampling = {"temperature": 0.5, "topP": 0.25, "topK": 3, "seed": "11", "n": 2}
    assert json_format.MessageToDict(spec.sampling) == sampling
    assert json_format.MessageToDict(spec.stopping) == {"maxOutputTokens": 7, "stop": ["END", "STOP"]}
    assert json_format.MessageToDict(spec.output) == {"includeTiming": True}


def test_greedy_is_temperature_zero_and_refuses_another(router: ScriptedRouter) -> None:
    baton("generate", "x", "--address", router.address, "--greedy")
    assert router.specs[0].sampling.HasField("temperature")
    assert router.specs[0].sampling.temperature == 0
    done = baton("generate", "x", "--address", router.address, "--greedy", "--temperature", "1")
    assert done.exit_code == 2
    assert "--greedy is temperature 0" in done.stderr
    assert len(router.specs) == 1


def test_a_dash_reads_the_prompt_from_standard_input_as_it_is(router: ScriptedRouter) -> None:
    assert baton("generate", "-", "--address", router.address, stdin="to be,\nor é\n").exit_code == 0
    assert router.specs[0].text == "to be,\nor é\n"
    done = baton("generate", "-", "--address", router.address, stdin=b"caf\xe9")
    assert (done.exit_code, done.stderr) == (2, "error: the prompt is not UTF-8 text (byte 3)\n")


def test_generate_json_is_one_document(router: ScriptedRouter) -> None:
    done = baton("generate", "x", "--address", router.address, "--json")
    document = json.loads(done.stdout)
    assert document["outputs"] == [
        {
            "index": 0,
            "text": "Hello world",
            "token_ids": [0, 1],
            "num_tokens": 2,
            "finish_reason": "length",
            "matched_stop": None,
        }
    ]
    assert (document["generation_id"], document["model"]) == ("gen-1", "bard")
    assert document["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}
    assert document["timing"]["time_to_first_token_ms"] == 31
    assert router.specs[0].output.token_ids


def test_timing_goes_to_stderr(router: ScriptedRouter) -> None:
    done = baton("generate", "x", "--address", router.address, "--timing")
    assert done.stdout == "Hello world\n"
    assert "3 prompt tokens (1 cached), 2 new; first token 31.0 ms" in done.stderr
    assert "decode 8.0 ms (8.00 ms a token); disaggregated" in done.stderr


def test_several_sequences_are_printed_one_after_the_other(router: ScriptedRouter) -> None:
    async def interleaved(_: pb.GenerationSpec) -> AsyncIterator[Event]:
        yield started()
        for event in (delta("b1", 0, index=1), delta("a1", 0), delta("b2", 1, index=1), end(2, index=1)):
            yield event
        for event in (delta("a2\n", 1), end(2), delta("c1", 0, index=2), end(1, index=2), completed(5)):
            yield event

    router.script = interleaved
    done = baton("generate", "x", "--address", router.address, "-n", "3")
    assert done.stdout == "a1a2\n--- 2 ---\nb1b2\n--- 3 ---\nc1\n"


def test_text_is_printed_as_it_comes(router: ScriptedRouter) -> None:
    router.script = router.hello_then_wait
    with start_baton("generate", "x", "--address", router.address, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert read_until(process.stdout.fileno(), b"Hello") == b"Hello"
        router.go_on.set()
        assert process.stdout.read() == b" world\n"
    assert process.returncode == 0


def test_ctrl_c_cancels_the_generation_and_exits_130_quietly(router: ScriptedRouter) -> None:
    router.script = router.hello_then_hang
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_baton("generate", "x", "--address", router.address, **pipes) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"Hello")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"\n", b"")
    assert router.cancelled.wait(10)


def test_a_reader_that_goes_away_ends_generate_quietly(router: ScriptedRouter) -> None:
    router.script = router.hello_then_wait
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_baton("generate", "x", "--address", router.address, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        read_until(process.stdout.fileno(), b"Hello")
        process.stdout.close()
        router.go_on.set()
        assert process.stderr.read() == b""
    assert process.returncode == 1


# errors


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            InvalidRequest("wrong", violations=(FieldViolation("spec.sampling.top_p", "must be at most 1 (got 7)"),)),
            2,
            "error: spec.sampling.top_p: must be at most 1 (got 7)",
        ),
        (OutOfRange("prompt of 9 tokens exceeds 8"), 1, "error: prompt of 9 tokens exceeds 8"),
        (Overloaded("the queue is full", retry_after_s=2), 1, "error: the queue is full\n       try again in 2 s"),
        (FailedPrecondition("no chat template"), 1, "error: no chat template"),
    ],
)
def test_an_error_of_the_server_is_one_message_and_an_exit_code(
    router: ScriptedRouter, error: BatonError, code: int, line: str
) -> None:
    router.script = failing(error)
    done = baton("generate", "x", "--address", router.address)
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", line + "\n")


def test_an_error_in_the_middle_keeps_what_was_printed(router: ScriptedRouter) -> None:
    router.script = failing(InternalError("a fault"), started(), delta("Hello", 0))
    done = baton("generate", "x", "--address", router.address)
    assert (done.exit_code, done.stdout, done.stderr) == (1, "Hello\n", "error: a fault\n")


@pytest.mark.parametrize("command", [("generate", "x"), ("status",), ("chat",)], ids=lambda command: command[0])
def test_nobody_at_the_address_is_exit_code_4(nobody: str, command: tuple[str, ...]) -> None:
    done = baton(*command, "--address", nobody, stdin="hello\n")
    assert done.exit_code == 4
    assert f"error: nobody answers at {nobody}" in done.stderr
    assert "start a cluster with `baton serve`" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "x", "--address", "localhost"),
        ("generate", "x", "--address", "http://127.0.0.1:50051"),
        ("generate", "x", "--max-tokens", "0"),
        ("generate", "x", "--temperature", "warm"),
        ("generate", "x", "--seed", "-1"),
        ("generate", "x", "--no-such-flag"),
        ("generat", "x"),
        ("config", "validate"),
        ("config", "check", "cluster.yaml"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = baton(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Traceback" not in done.output


def test_a_number_too_large_for_its_field_is_a_mistake_of_the_user(router: ScriptedRouter) -> None:
    done = baton("generate", "x", "--address", router.address, "--max-tokens", str(2**40))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: a number does not fit its field")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((delta("a", 0), delta("a", 0)), "token 0 of sequence 0 came after 1 tokens"),
        ((delta("a", 1),), "token 1 of sequence 0 came after 0 tokens"),
        ((delta("a", 0), end(1), delta("b", 1)), "came after 1 tokens, which has ended with length"),
        ((delta("a", 0), end(2)), "ended with 2 tokens of which 1 came"),
    ],
)
def test_a_token_that_does_not_come_exactly_once_is_noticed(events: tuple[Event, ...], expected: str) -> None:
    transcript = Transcript()
    with pytest.raises(InternalError, match=expected):
        for event in events:
            transcript.add(event)


# chat


async def echo(spec: pb.GenerationSpec) -> AsyncIterator[Event]:
    messages = [json_format.MessageToDict(message) for message in spec.chat.messages]
    yield started()
    yield delta(f"{len(messages)}: {messages[-1]['content']}", 0)
    yield end(1)
    yield completed(1)


def contents(spec: pb.GenerationSpec) -> list[tuple[str, str]]:
    messages = [json_format.MessageToDict(message) for message in spec.chat.messages]
    return [(message["role"], message["content"]) for message in messages]


def test_chat_answers_each_piped_line_with_the_history_so_far(router: ScriptedRouter) -> None:
    router.script = echo
    lines = "good day\n\nand you?\n/quit\nnever sent\n"
    done = baton("chat", "--address", router.address, "--system", "Be kind.", stdin=lines)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "2: good day\n4: and you?\n", "")
    assert contents(router.specs[-1]) == [
        ("system", "Be kind."),
        ("user", "good day"),
        ("assistant", "2: good day"),
        ("user", "and you?"),
    ]


def test_chat_from_a_pipe_ends_at_the_first_error(router: ScriptedRouter) -> None:
    router.script = failing(Overloaded("full"))
    done = baton("chat", "--address", router.address, stdin="a\nb\n")
    assert (done.exit_code, done.stderr, len(router.specs)) == (1, "error: full\n", 1)
    done = baton("chat", "--address", router.address, stdin=b"\xff\n")
    assert (done.exit_code, done.stderr) == (2, "error: the message is not UTF-8 text\n")


def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends(router: ScriptedRouter) -> None:
    router.script = router.hello_then_hang
    terminal, far_side = pty.openpty()
    ends = {"stdin": far_side, "stdout": far_side, "stderr": far_side}
    with start_baton("chat", "--address", router.address, start_new_session=True, **ends) as process:
        os.close(far_side)
        read_until(terminal, b"> ")
        os.write(terminal, b"first\n")
        read_until(terminal, b"Hello")
        process.send_signal(signal.SIGINT)
        assert b"(stopped)" in read_until(terminal, b"> ")
        assert router.cancelled.wait(10)
        router.script = failing(Overloaded("busy"))
        os.write(terminal, b"second\n")
        assert b"error: busy" in read_until(terminal, b"> ")
        router.script = echo
        os.write(terminal, b"third\n")
        assert b"3: third" in read_until(terminal, b"> ")
        process.send_signal(signal.SIGINT)
        assert b"Ctrl-D ends" in read_until(terminal, b"> ")
        os.write(terminal, b"\x04")
        read_until(terminal, b"never printed")
        assert process.wait(30) == 0
    os.close(terminal)
    assert contents(router.specs[-1]) == [("user", "first"), ("assistant", "Hello"), ("user", "third")]


# status


def cluster_status() -> admin_pb2.GetStatusResponse:
    info = worker_pb2.WorkerInfo(worker_id="prefill-0", role=worker_pb2.ROLE_PREFILL, node="node-a", block_size=16)
    info.ranks.add(tp_rank=0, pid=4242, host="127.0.0.1", device="cpu")
    stats = worker_pb2.WorkerStats(blocks_free=1000, blocks_held=20, blocks_cached=4, blocks_total=1024)
    stats.num_running_seqs = 7
    state = admin_pb2.WorkerStatus
    workers = [
        state(worker_id="prefill-0", address="127.0.0.1:7001", state=state.STATE_READY, info=info, stats=stats),
        state(worker_id="decode-0", address="127.0.0.1:7002", state=state.STATE_CONNECTING),
    ]
    router = admin_pb2.RouterStatus(num_queued=3, max_queued=1024, num_running=5, pid=99, uptime_s=61)
    return admin_pb2.GetStatusResponse(model="bard", router_address="127.0.0.1:50051", workers=workers, router=router)


def test_status_json_names_each_worker_with_its_ranks_and_blocks(router: ScriptedRouter) -> None:
    router.status = cluster_status()
    done = baton("status", "--json", "--address", router.address)
    document = json.loads(done.stdout)
    ready, connecting = document["workers"]
    assert (ready["worker_id"], ready["role"], ready["node"], ready["state"]) == (
        "prefill-0",
        "prefill",
        "node-a",
        "ready",
    )
    assert ready["ranks"] == [{"tp_rank": 0, "pid": 4242, "host": "127.0.0.1", "device": "cpu"}]
    assert ready["kv_blocks"] == {"free": 1000, "held": 20, "cached": 4, "total": 1024}
    assert ready["running_sequences"] == 7
    assert (connecting["worker_id"], connecting["state"], connecting["role"]) == ("decode-0", "connecting", "unknown")
    assert (document["router"]["queued"], document["router"]["running"], document["router"]["pid"]) == (3, 5, 99)


def test_status_is_a_table_for_people(router: ScriptedRouter) -> None:
    router.status = cluster_status()
    lines = baton("status", "--address", router.address).stdout.splitlines()
    assert lines[0] == "bard at 127.0.0.1:50051, up 61 s"
    assert lines[1].startswith("requests: 5 running, 3 of 1024 queued, 0 finished")
    ready = next(line for line in lines if "prefill-0" in line)
    assert " ".join(ready.split()) == "prefill-0 ready prefill node-a 0 (4242, cpu) 1000 20 4 1024 7 0"
    connecting = next(line for line in lines if "decode-0" in line)
    assert " ".join(connecting.split()) == "decode-0 connecting unknown - - - - - - - -"


def test_status_of_a_cluster_without_workers_says_so(router: ScriptedRouter) -> None:
    done = baton("status", "--address", router.address)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "no workers")


# config, version, start-up


def test_config_validate_says_what_it_found() -> None:
    done = baton("config", "validate", str(ROOT / "cluster.yaml"))
    assert done.exit_code == 0
    expected = "1 prefill + 1 decode worker, tiny-shakespeare in float32 on cpu, gRPC on 127.0.0.1:50051"
    assert done.stdout == f"{ROOT / 'cluster.yaml'}: valid: {expected}\n"


def test_config_validate_reports_the_mistakes_with_exit_code_3(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("metadata:\n  serving: {model: {}, rolls: 1}\n")
    done = baton("config", "validate", str(file))
    assert (done.exit_code, done.stdout) == (3, "")
    assert f'{file}:2:24: metadata.serving.rolls: unknown key; did you mean "roles"?' in done.stderr
    assert f"{file}:2:20: metadata.serving.model.path: is missing" in done.stderr


def test_the_program_ends_with_the_same_exit_codes(tmp_path: Path, nobody: str) -> None:
    for code, arguments in {
        0: ("--version",),
        2: ("no-such-command",),
        3: ("config", "validate", str(tmp_path / "none.yaml")),
        4: ("status", "--address", nobody),
    }.items():
        with start_baton(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=30)
        assert process.returncode == code, err
        assert b"Traceback" not in err
        assert bool(out) == (code == 0)


def test_the_program_starts_without_grpc_ray_torch_or_rich() -> None:
    code = (
        "import sys, cluster.cli.main; print([m for m in ('grpc', 'ray', 'torch', 'rich', 'yaml') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# the client


def test_a_prompt_is_text_token_ids_or_messages() -> None:
    assert make_spec("hi").WhichOneof("prompt") == "text"
    assert list(make_spec([1, 2]).token_ids.ids) == [1, 2]
    assert make_spec([]).WhichOneof("prompt") == "token_ids"
    assert contents(make_spec([{"role": "user", "content": "hi"}])) == [("user", "hi")]
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        make_spec("\ud800")


def test_a_deadline_of_the_caller_ends_the_stream(router: ScriptedRouter) -> None:
    router.script = router.hello_then_hang
    with BatonClient(router.address) as client, client.stream(make_spec("x"), timeout_s=0.5) as stream:
        with pytest.raises(BatonError) as caught:
            list(stream)
        assert caught.value.grpc_code == "DEADLINE_EXCEEDED"


def test_leaving_a_stream_cancels_it_at_the_server(router: ScriptedRouter) -> None:
    router.script = router.hello_then_hang
    with BatonClient(router.address) as client, client.stream(make_spec("x")) as stream:
        next(stream)
    assert router.cancelled.wait(10)


def test_a_call_returns_the_servers_answer(router: ScriptedRouter, nobody: str) -> None:
    with BatonClient(router.address) as client:
        assert client.tokenize("abc") == [97, 98, 99]
    with BatonClient(nobody) as client, pytest.raises(NotReachable, match=f"nobody answers at {nobody}"):
        client.tokenize("abc")
