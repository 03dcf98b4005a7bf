"""`baton generate` against a scripted router on a real gRPC connection."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator

import pytest
from google.protobuf import json_format
from scripted_router import (
    Event,
    ScriptedRouter,
    baton,
    completed,
    delta,
    end,
    failing,
    read_until,
    start_baton,
    started,
)

from cli.generate import collect
from cluster.errors import (
    BatonError,
    FailedPrecondition,
    FieldViolation,
    InternalError,
    InvalidRequest,
    OutOfRange,
    Overloaded,
)
from cluster.pb import generation_pb2 as pb
from tools.generation_stream import Transcript


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


class _InterruptedCall:
    """Ctrl-C comes while this call is inside gRPC, where it would leave a lock held."""

    def __init__(self) -> None:
        self.is_hit = False

    def __iter__(self) -> _InterruptedCall:
        return self

    def __next__(self) -> Event:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.2)
        except KeyboardInterrupt:
            self.is_hit = True
            raise
        raise StopIteration


def test_ctrl_c_is_never_raised_inside_grpc() -> None:
    call = _InterruptedCall()
    with pytest.raises(KeyboardInterrupt):
        collect(call, Transcript(), None)
    assert not call.is_hit
