"""`baton chat` against a scripted router on a real gRPC connection."""

from __future__ import annotations

import json
import os
import pty
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from google.protobuf import json_format
from scripted_router import (
    Event,
    ScriptedRouter,
    baton,
    completed,
    contents,
    delta,
    end,
    failing,
    interrupt_until,
    read_until,
    start_baton,
    started,
)

from cluster.errors import (
    Overloaded,
)
from cluster.pb import generation_pb2 as pb

# chat


async def echo(spec: pb.GenerationSpec) -> AsyncIterator[Event]:
    messages = [json_format.MessageToDict(message) for message in spec.chat.messages]
    yield started()
    yield delta(f"{len(messages)}: {messages[-1]['content']}", 0)
    yield end(1)
    yield completed(1)


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


FUNCTIONS = """
def weather(city: str) -> str:
    'The weather.'
    return f"sunny in {city}"
"""


async def call_once(spec: pb.GenerationSpec) -> AsyncIterator[Event]:
    yield started()
    if any(message["role"] == "tool" for message in json.loads(spec.chat.json)["messages"]):
        yield delta("It is sunny.", 0)
    else:
        piece = pb.ToolCallDelta(id="call_1", name="weather", arguments='{"city": "Rome"}', is_whole=True)
        called = pb.SequenceDelta(token_count=1, parts=[pb.OutputPart(tool_call=piece)])
        yield pb.GenerateStreamResponse(delta=called)
    yield end(1)
    yield completed(1)


def test_a_tool_choice_is_that_of_the_first_answer_to_a_message(router: ScriptedRouter, tmp_path: Path) -> None:
    router.script = call_once
    (tmp_path / "own.py").write_text(FUNCTIONS)
    chat = ("chat", "--address", router.address, "--tools", str(tmp_path / "own.py"), "--tool-choice")
    done = baton(*chat, "weather", stdin="And Rome?\n")
    assert (done.exit_code, done.stdout) == (0, "It is sunny.\n")
    first, second = (spec.chat.tool_choice for spec in router.specs)
    assert (first.mode, list(first.names)) == (pb.ToolChoice.MODE_REQUIRED, ["weather"])
    assert second == pb.ToolChoice()
    done = baton(*chat, "wether", stdin="And Rome?\n")
    assert (done.exit_code, "did you mean weather?" in done.stderr) == (2, True)
    done = baton("chat", "--address", router.address, "--tool-choice", "required", stdin="Hi\n")
    assert (done.exit_code, "needs functions to choose among: --tools FILE" in done.stderr) == (2, True)


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
        interrupt_until(process, terminal, b"Ctrl-D ends.\r\n> ")
        os.write(terminal, b"\x04")
        assert process.wait(30) == 0
    os.close(terminal)
    assert contents(router.specs[-1]) == [("user", "first"), ("assistant", "Hello"), ("user", "third")]
