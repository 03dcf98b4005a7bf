"""`baton chat`: a conversation. Each line is a message; the history goes along with every one.

At a terminal Ctrl-C stops the answer and Ctrl-D ends; from a pipe each line is answered in turn and the first error
ends it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cli.common import DEFAULT_ADDRESS, Address, ApiKeyOption, TlsCa, TlsCert, TlsKey, connect, outcome, print_error
from cli.generate import Greedy, MaxTokens, NoResume, Seed, Temperature, TopK, TopP, collect, resolve_temperature
from cluster.errors import BatonError, FailedPrecondition, InvalidRequest, NotReachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.pb.generation_pb2 import GenerationSpec
    from tools.client import BatonClient

    Messages = list[dict[str, str]]

_WELCOME = "Each line is a message. Ctrl-C stops an answer, /quit or Ctrl-D ends."


def chat(
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    system: Annotated[str | None, typer.Option(help="First message, which sets the tone.", show_default=False)] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    greedy: Greedy = False,
    no_resume: NoResume = False,
) -> None:
    """Talk with the model; every message carries the conversation so far."""
    temperature = resolve_temperature(temperature, greedy)
    with outcome(), connect(address, api_key, tls_ca, tls_cert, tls_key) as client:
        from tools.client import make_spec

        def spec_of(messages: Messages) -> GenerationSpec:
            return make_spec(
                messages, max_output_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
            )

        conversation = _Conversation(client, spec_of, is_interactive=sys.stdin.isatty(), resumes=not no_resume)
        if system:
            conversation.messages.append({"role": "system", "content": system})
        conversation.run()


class _Conversation:
    """The history and the loop."""

    def __init__(
        self,
        client: BatonClient,
        spec_of: Callable[[Messages], GenerationSpec],
        *,
        is_interactive: bool,
        resumes: bool = True,
    ) -> None:
        self.messages: Messages = []
        self._client = client
        self._spec_of = spec_of
        self._is_interactive = is_interactive
        self._resumes = resumes

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
        """One question and its answer; a question that got none is taken back."""
        self.messages.append({"role": "user", "content": line})
        try:
            answer = self._answer()
        except BatonError as error:
            if not self._is_interactive or isinstance(error, (FailedPrecondition, NotReachable)):
                raise
            print_error(error)
            answer = ""
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()

    def _answer(self) -> str:
        """Prints the answer as it comes; what came before a Ctrl-C at a terminal counts as the answer."""
        from tools.generation_stream import Transcript

        transcript = Transcript()
        spec = self._spec_of(self.messages)
        with self._client.resuming_stream(spec) if self._resumes else self._client.stream(spec) as stream:
            try:
                collect(stream, transcript, sys.stdout)
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                print("(stopped)", file=sys.stderr)
        return "".join(sequence.text for sequence in transcript.sequences)


def _piped_line() -> str | None:
    """The next line without its end; None after the last."""
    line = sys.stdin.buffer.readline()
    try:
        return line.decode("utf-8").rstrip("\r\n") if line else None
    except UnicodeDecodeError as error:
        raise InvalidRequest("the message is not UTF-8 text") from error
