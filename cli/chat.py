"""`baton chat`: a conversation. Each line is a message, sent together with the messages before it.

At a terminal Ctrl-C stops the answer and Ctrl-D ends; from a pipe each line is answered in turn, up to the first error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import RouterOptions, outcome, print_error
from cli.generate import SamplingOptions, collect
from cluster.errors import BatonError, FailedPrecondition, InvalidRequest, NotReachable

if TYPE_CHECKING:
    from tools.client import BatonClient
    from tools.generation_stream import Transcript
    from tools.local_functions import LocalFunctions

_MOST_ROUNDS = 20
"""Answers with calls to one message, before its conversation is given up."""
_WELCOME = "Each line is a message. Ctrl-C stops an answer, /quit or Ctrl-D ends."


def chat(
    router: RouterOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="First message, which sets the tone.", show_default=False)] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="Python file whose functions the model may call, by their signatures and docstrings. They run here,"
            " unasked.",
            show_default=False,
        ),
    ] = None,
    tool_choice: Annotated[
        str,
        typer.Option(
            metavar="auto|none|required|NAME",
            help="What the first answer to a message calls: what the model decides, nothing, any function, this one.",
        ),
    ] = "auto",
) -> None:
    """Talk with the model; every message carries the conversation so far."""
    with outcome(), router.connect() as client:
        functions = None
        if tools is not None:
            from tools.local_functions import LocalFunctions

            functions = LocalFunctions.from_file(tools)
        _check_choice(tool_choice, functions)
        conversation = _Conversation(client, sampling, functions, tool_choice, is_interactive=sys.stdin.isatty())
        if system:
            conversation.messages.append({"role": "system", "content": system})
        conversation.run()


def _check_choice(choice: str, functions: LocalFunctions | None) -> None:
    """Raises InvalidRequest."""
    names = [] if functions is None else [tool["function"]["name"] for tool in functions.tools]
    if choice == "auto" or (functions is not None and choice in ("none", "required", *names)):
        return
    if functions is None:
        raise InvalidRequest(f"--tool-choice {choice} needs functions to choose among: --tools FILE")
    from cluster.config.source import nearest

    close = nearest(choice, names)
    hint = f"did you mean {close}?" if close else f"it has {', '.join(names)}"
    raise InvalidRequest(f"--tool-choice {choice}: the file of --tools has no such function; {hint}")


class _Conversation:
    """The messages so far, and the loop that reads and answers the next one."""

    def __init__(
        self,
        client: BatonClient,
        sampling: SamplingOptions,
        functions: LocalFunctions | None,
        tool_choice: str,
        *,
        is_interactive: bool,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self._functions = functions
        self._tool_choice = tool_choice
        self._client = client
        self._sampling = sampling
        self._is_interactive = is_interactive

    def run(self) -> None:
        if self._is_interactive:
            import readline  # noqa: F401 - its import gives input() a history and line editing

            print(_WELCOME, file=sys.stderr)
        while (line := self._read_line()) is not None and line.strip() != "/quit":
            if line.strip():
                self._exchange(line)

    def _read_line(self) -> str | None:
        """None at the end of input; a line interrupted at a terminal counts as empty."""
        if not self._is_interactive:
            return _piped_line()
        try:
            return input("> ")
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print("\n" + _WELCOME, file=sys.stderr)
            return ""

    def _exchange(self, line: str) -> None:
        """Sends one message and prints its answer, running the tools that it calls; a message without an answer leaves
        the history."""
        begin = len(self.messages)
        self.messages.append({"role": "user", "content": line})
        try:
            answer = self._answer_with_calls()
        except BatonError as error:
            if not self._is_interactive or isinstance(error, (FailedPrecondition, NotReachable)):
                raise
            print_error(error)
            answer = ""
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            del self.messages[begin:]

    def _answer_with_calls(self) -> str:
        """The text of the first answer that calls nothing. Raises InvalidRequest where none comes."""
        for number in range(_MOST_ROUNDS):
            transcript = self._answer("auto" if number else self._tool_choice)
            text, calls = "".join(sequence.text for sequence in transcript.sequences), transcript.tool_calls
            if self._functions is None or not calls or not transcript.is_complete:
                return text
            called = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
            self.messages.append({"role": "assistant", "content": text or None, "tool_calls": called})
            for call in calls:
                result = self._functions.call(call.name, call.arguments)
                print(f"({call.name} {call.arguments} -> {result})", file=sys.stderr)
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        raise InvalidRequest(f"the model has called tools in {_MOST_ROUNDS} answers, one after the other")

    def _answer(self, tool_choice: str) -> Transcript:
        """Prints the answer as it comes; Ctrl-C at a terminal ends it early."""
        from tools.generation_stream import Transcript

        transcript = Transcript()
        tools = () if self._functions is None else self._functions.tools
        spec = self._sampling.spec(self.messages, tools=tools, tool_choice=tool_choice)
        with self._sampling.stream(self._client, spec) as stream:
            try:
                collect(stream, transcript, sys.stdout)
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                print("(stopped)", file=sys.stderr)
        return transcript


def _piped_line() -> str | None:
    """The next line without its end; None after the last."""
    line = sys.stdin.buffer.readline()
    try:
        return line.decode("utf-8").rstrip("\r\n") if line else None
    except UnicodeDecodeError as error:
        raise InvalidRequest("the message is not UTF-8 text") from error
