"""`baton generate`: prints the text that continues a prompt as it comes.

With several sequences the first is printed live and each other one once those before it have ended. Only the text goes
to stdout; timing and errors go to stderr.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from cli.common import AsJson, RouterOptions, outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cluster.pb.generation_pb2 import GenerateStreamResponse, GenerationSpec
    from tools.client import BatonClient, GenerationStream, Prompt
    from tools.generation_stream import ResumingStream, Transcript


@dataclass(frozen=True)
class SamplingOptions:
    """Options of a command that generates text."""

    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256
    temperature: Annotated[
        float | None,
        typer.Option(help="0 always takes the likeliest token; default: the model's own.", show_default=False),
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the likeliest tokens that make up this probability.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Sample among this many of the likeliest tokens; 0: all.")] = None
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same text.")] = None
    greedy: Annotated[bool, typer.Option("--greedy", help="Short for --temperature 0.")] = False
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="End when the connection breaks, instead of resuming the stream.")
    ] = False

    def __post_init__(self) -> None:
        if self.greedy and self.temperature:
            raise typer.BadParameter(f"--greedy is temperature 0, and --temperature {self.temperature:g} was given too")

    def spec(self, prompt: Prompt, **fields: Any) -> GenerationSpec:
        """A request with these options and other fields of it. Raises InvalidRequest."""
        from tools.client import make_spec

        temperature = 0.0 if self.greedy else self.temperature
        return make_spec(
            prompt,
            max_output_tokens=self.max_tokens,
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            **fields,
        )

    def stream(self, client: BatonClient, spec: GenerationSpec) -> GenerationStream | ResumingStream:
        return client.stream(spec) if self.no_resume else client.resuming_stream(spec)


def generate(
    router: RouterOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to continue; `-` reads it from standard input.")
    ],
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Sequences to generate.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    suffix: Annotated[
        str, typer.Option(help="Text behind what is generated, for models that fill in the middle.")
    ] = "",
    as_json: AsJson = False,
    timing: Annotated[bool, typer.Option("--timing", help="Print where the time went, on stderr.")] = False,
) -> None:
    """Generate text from a prompt and print it as it comes."""
    with outcome(), router.connect() as client:
        from tools.generation_stream import Transcript

        text, with_timing = _read_prompt(prompt), timing or as_json
        spec = sampling.spec(text, n=n, stop=stop or (), token_ids=as_json, include_timing=with_timing, suffix=suffix)
        transcript = Transcript()
        with sampling.stream(client, spec) as stream:
            collect(stream, transcript, None if as_json else sys.stdout)
        if as_json:
            import json

            print(json.dumps(transcript.as_dict(), ensure_ascii=False))
        if timing:
            print(describe_timing(transcript), file=sys.stderr)


def _read_prompt(prompt: str) -> str:
    """The prompt, or standard input with its last newline. Raises InvalidRequest."""
    from cluster.errors import InvalidRequest

    data = sys.stdin.buffer.read() if prompt == "-" else prompt.encode("utf-8", "surrogateescape")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the prompt is not UTF-8 text (byte {error.start})") from error


def collect(stream: Iterable[GenerateStreamResponse], transcript: Transcript, out: TextIO | None) -> None:
    """Fills the transcript and prints its text to `out` as it comes; ends the last line even after an error."""
    printer = _Printer(transcript, out) if out is not None else None
    try:
        for event in _read_by_thread(stream):
            transcript.add(event)
            if printer is not None:
                printer.update()
    finally:
        if printer is not None:
            printer.end_line()


def _read_by_thread(stream: Iterable[GenerateStreamResponse]) -> Iterator[GenerateStreamResponse]:
    """The events of a stream, and its error. Ctrl-C raises on the main thread, wherever that is: inside gRPC it can
    leave a lock held, and then every later call of the channel hangs."""
    events: SimpleQueue[GenerateStreamResponse | Exception | None] = SimpleQueue()

    def read() -> None:
        try:
            for event in stream:
                events.put(event)
        except Exception as error:
            events.put(error)
        else:
            events.put(None)

    threading.Thread(target=read, name="stream", daemon=True).start()
    while (event := events.get()) is not None:
        if isinstance(event, Exception):
            raise event
        yield event


class _Printer:
    """Prints sequences one after the other, the current one as it grows."""

    def __init__(self, transcript: Transcript, out: TextIO) -> None:
        self._transcript = transcript
        self._out = out
        self._current = 0
        self._printed = 0
        self._last = "\n"

    def update(self) -> None:
        """Prints new text; goes on with the next sequence when one has ended."""
        by_index = {sequence.index: sequence for sequence in self._transcript.sequences}
        while (sequence := by_index.get(self._current)) is not None:
            self._write(sequence.text[self._printed :])
            self._printed = len(sequence.text)
            if sequence.finish_reason is None or self._current + 1 not in by_index:
                return
            self._current, self._printed = self._current + 1, 0
            self.end_line()
            self._write(f"--- {self._current + 1} ---\n")

    def end_line(self) -> None:
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._last = text[-1]  # before the write: Ctrl-C may come right after it
            self._out.write(text)
            self._out.flush()


def describe_timing(transcript: Transcript) -> str:
    """One line: `5 prompt tokens (0 cached), 64 new; first token 31 ms (queue 1, prefill 20), ...`."""
    from tools.generation_stream import timing_dict

    usage, timing = transcript.usage, transcript.timing
    if usage is None or timing is None:
        return "the server sent no timing"
    ms = timing_dict(timing)
    num_decoded = max((sequence.num_tokens for sequence in transcript.sequences), default=1) - 1
    each = f" ({ms['decode_ms'] / num_decoded:.2f} ms a token)" if num_decoded > 0 else ""
    moved = f", moved {timing.migrations} times" if timing.migrations else ""
    fetched = f", {timing.fetched_tokens} of them fetched" if timing.fetched_tokens else ""
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached{fetched}), {usage.completion_tokens} new; "
        f"first token {ms['time_to_first_token_ms']:.1f} ms "
        f"(queue {ms['queue_ms']:.1f}, prefill {ms['prefill_ms']:.1f}), hand-off {ms['kv_transfer_ms']:.1f} ms, "
        f"decode {ms['decode_ms']:.1f} ms{each}; {timing.placement or 'placement unknown'}{moved}"
    )
