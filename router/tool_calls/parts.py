"""The parts of one sequence's text as messages: text, thinking, and calls of tools with their ids."""

from __future__ import annotations

import hashlib

from cluster.pb import generation_pb2 as pb
from router.tool_calls.output import OutputForm
from router.tool_calls.reader import Arguments, CallBegin, CallEnd, Part, Reasoning, Text


class SequenceParts:
    """Reads the text of a sequence, and holds what was read until it is taken."""

    def __init__(self, form: OutputForm, seed: str, *, streams_calls: bool) -> None:
        """`seed`: what the ids of calls are made of, so that a stream that is resumed has the same ones."""
        self._parser = form.parser(streams_calls=streams_calls)
        self._seed = seed
        self._pending: list[pb.OutputPart] = []
        self.num_calls = 0
        """Calls that are whole."""
        self.num_thinking_tokens = 0
        self._index = -1
        """Of the last call that has begun."""

    def feed(self, text: str, num_tokens: int, *, is_held: bool = False) -> None:
        """Reads the text of so many tokens; one at a time, where thinking is to be counted. `is_held`: the client has
        it already."""
        parser = self._parser
        was_thinking = parser.is_thinking
        self._keep(parser.feed(text), is_held)
        if was_thinking or parser.is_thinking:
            self.num_thinking_tokens += num_tokens

    def end(self, *, is_held: bool = False) -> None:
        """The text has ended."""
        self._keep(self._parser.end(), is_held)

    def take(self, delta: pb.SequenceDelta) -> None:
        """Puts what was read into `delta`."""
        pending, self._pending = self._pending, []
        delta.text = "".join(part.text for part in pending)
        if any(part.WhichOneof("part") != "text" for part in pending):
            delta.parts.extend(pending)

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def _keep(self, parts: list[Part], is_held: bool) -> None:
        for part in parts:
            if isinstance(part, CallBegin):
                self._index += 1
            elif isinstance(part, CallEnd):
                self.num_calls += 1
            if not is_held:
                self._add(part)

    def _add(self, part: Part) -> None:
        """Joins it to the last one, where both are of one kind."""
        last = self._pending[-1] if self._pending else pb.OutputPart()
        match part:
            case Text(text):
                if last.WhichOneof("part") != "text":
                    self._pending.append(last := pb.OutputPart())
                last.text += text
            case Reasoning(text):
                if last.WhichOneof("part") != "reasoning":
                    self._pending.append(last := pb.OutputPart())
                last.reasoning += text
            case CallBegin(name, own_id):
                call = pb.ToolCallDelta(index=self._index, id=own_id or self._call_id(), name=name)
                self._pending.append(pb.OutputPart(tool_call=call))
            case Arguments(text):
                self._open_call(last).arguments += text
            case CallEnd():
                self._open_call(last).is_whole = True

    def _open_call(self, last: pb.OutputPart) -> pb.ToolCallDelta:
        """The piece that the rest of the open call goes to."""
        if last.WhichOneof("part") != "tool_call" or last.tool_call.is_whole:
            last = pb.OutputPart(tool_call=pb.ToolCallDelta(index=self._index))
            self._pending.append(last)
        return last.tool_call

    def _call_id(self) -> str:
        return f"call_{hashlib.sha256(f'{self._seed} {self._index}'.encode()).hexdigest()[:24]}"
