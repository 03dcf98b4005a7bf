"""A router that tattles: what workers tell of a request, and what its client is told, is held to what was promised.

A worker may speak for the attempt that runs only, and in an attempt each token is told once, and none that was known
when it began. A client is told each token once and in order, each sequence's end after its tokens, and the end last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2
from router.routing.dispatcher import Dispatcher
from router.routing.worker_client import WorkerClient
from router.stream.request import Attempt, LiveRequest
from simulate.model import END_TOKEN


class WatchedDispatcher(Dispatcher):
    """A router whose workers are listened to."""

    def __init__(self, *arguments: Any, **values: Any) -> None:
        super().__init__(*arguments, **values)
        self._told: WeakKeyDictionary[Attempt, list[set[int]]] = WeakKeyDictionary()
        """The tokens of each sequence that were known before an attempt, or were told in it."""

    def _on_event(self, worker: WorkerClient, live: LiveRequest, kind: str, message: Any, now: float) -> None:
        key = RequestKey.of(message.key)
        assert key == live.key, f"{worker.worker_id} speaks for {key}, which is over, and counts for {live.key}"
        told = self._told.get(live.attempt)
        if told is None:
            told = self._told[live.attempt] = [set(range(len(s.known_ids))) for s in live.sequences]
        if kind == "tokens":
            first = message.first_token_index
            new, old = set(range(first, first + len(message.token_ids))), told[message.sequence_index]
            assert not old & new, f"{worker.worker_id} tells tokens {sorted(old & new)} of {key} twice"
            old |= new
        super()._on_event(worker, live, kind, message, now)


class DigitText:
    """Each token of the simulated model as text (`router.stream.detokenizer.Detokenizer`): five digits."""

    is_whole = True

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token_id:05d}" for token_id in token_ids)

    def flush(self) -> str:
        return ""


@dataclass
class Told:
    """The output of one sequence, as a client was told it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    has_ended: bool = False

    def add(self, delta: generation_pb2.SequenceDelta) -> None:
        assert not self.has_ended, "tokens came after the end of their sequence"
        assert delta.first_token_index == len(self.token_ids), (
            f"the client got token {delta.first_token_index} after {len(self.token_ids)} tokens"
        )
        assert delta.token_count == len(delta.token_ids), "a delta counts other tokens than it has"
        self.token_ids += delta.token_ids
        self.text += delta.text

    def end(self, end: generation_pb2.SequenceEnd) -> None:
        assert not self.has_ended, "a sequence ended twice"
        assert end.token_count == len(self.token_ids), (
            f"a sequence ended with {end.token_count} tokens, and the client got {len(self.token_ids)}"
        )
        self.has_ended = True

    def check(self, undisturbed: Sequence[int], stop: str, is_finished: bool) -> None:
        """Raises AssertionError unless this is the beginning of the undisturbed output, and all of it if it finished.
        `stop` ends it; empty: nothing but its length does."""
        text = DigitText().push([token_id for token_id in undisturbed if token_id != END_TOKEN])
        at = text.find(stop) if stop else -1
        whole = list(undisturbed if at < 0 else undisturbed[: -(-(at + len(stop)) // 5)])
        got = self.token_ids
        assert got == whole[: len(got)], "other tokens came than those of the prompt"
        if stop:
            assert text.startswith(self.text), "other text came than that of the tokens"
        if is_finished:
            assert got == whole, f"it ended after {len(got)} of {len(whole)} tokens"
            assert not stop or self.text == (text if at < 0 else text[:at]), "the text is cut at the wrong place"
