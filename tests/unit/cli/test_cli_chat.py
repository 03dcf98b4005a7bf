"""`baton chat` against a scripted router on a real gRPC connection."""

from __future__ import annotations

import os
import pty
import signal
from collections.abc import AsyncIterator

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
