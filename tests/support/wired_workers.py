"""Workers for `wired_router` that keep the worker's side of the protocol, one small step at a time, in any order.

Commands and events travel: each worker hears and is heard when the test says so, and loses what is under way with its
session. Tokens differ from attempt to attempt wherever they are not known, so that what is mixed up shows. Knows no
model, no blocks and no link: a hand-off is one step, and fails when the other side does not have the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fake_worker import DECODE, LENGTH, PREFILL, STOP, TRANSFER, failed, phase, prompt_logprobs, tokens
from router_harness import EOS, ids
from wired_router import WiredWorker

from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2

LETTERS = ids("abcdefghijklmnopqrtuvwxyz")
STOP_LETTER = ids("s")[0]
PEER_LOST = worker_pb2.Failed.REASON_PEER_LOST
Pick = Callable[[int], int]
"""A number below the one given."""


@dataclass
class Story:
    """An attempt as its workers see it, by sequence: shared by both."""

    given: list[list[int]]
    """The tokens that were known."""
    written: list[list[int]]
    """Those and what the model wrote, as far as it came."""
    revision: str = ""
    """The weights of both."""

    def has(self, index: int, told: list[int]) -> bool:
        """A client of this attempt may have been told this."""
        longest = max(self.given[index], self.written[index], key=len)
        return longest[: len(told)] == told


@dataclass
class Task:
    """What a worker holds for an attempt."""

    admit: worker_pb2.Admit
    story: Story
    stage: str = "admitted"
    """admitted -> prefilling -> sampled (prefill) | admitted -> prefilling (local) | -> decoding (decode)."""
    dropped: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    num_scored: int = 0
    """Prompt tokens whose logprobs were told."""

    @property
    def must_score(self) -> bool:
        return self.admit.HasField("prompt_logprobs") and self.num_scored < len(self.admit.prompt_token_ids)

    @property
    def is_waiting(self) -> bool:
        """For a hand-off."""
        return self.admit.expect_handoff and self.stage == "admitted"


class ModelWorker:
    """The other end of one WiredWorker. `workers` is everyone by id, `stories` all there were."""

    def __init__(
        self,
        wire: WiredWorker,
        workers: dict[str, ModelWorker],
        stories: dict[RequestKey, Story],
        pick: Pick,
    ) -> None:
        self.wire = wire
        self.tasks: dict[RequestKey, Task] = {}
        self.incarnation = ""
        self._workers = workers
        self._stories = stories
        self._pick = pick
        self._inbox: deque[worker_pb2.Command] = deque()
        self._outbox: deque[worker_pb2.Event] = deque()

    def open(self, weights_revision: str = "") -> None:
        """A new life."""
        self.wire.open(weights_revision=weights_revision)
        assert self.wire.info is not None
        self.incarnation = self.wire.info.incarnation

    def die(self) -> None:
        """With all that it holds, and all that is under way."""
        self.incarnation = ""
        self.tasks.clear()
        self._inbox.clear()
        self._outbox.clear()
        self.wire.lose()

    def fetch(self) -> None:
        self._inbox.extend(self.wire.take())

    def hear(self) -> bool:
        """One command; False when there was none."""
        self.fetch()
        if not self._inbox:
            return False
        command = self._inbox.popleft()
        if command.HasField("admit"):
            self._admit(command.admit)
        elif command.HasField("cancel"):
            self._cancel(command.cancel)
        return True

    def speak(self, num_events: int = 1) -> bool:
        """The router hears a batch of at most so many events; False when there was none."""
        batch = [self._outbox.popleft() for _ in range(min(num_events, len(self._outbox)))]
        if batch:
            self.wire.emit(*batch)
        return bool(batch)

    def work(self) -> bool:
        """One step for one of its requests; False when there is nothing to do."""
        able = [task for task in self.tasks.values() if self._is_able(task)]
        if not able:
            return False
        task = able[self._pick(len(able))]
        if self._has_lost_peer(task):
            self.fail(RequestKey.of(task.admit.key), PEER_LOST)
        elif task.stage == "decoding":
            self._decode(task)
        elif task.admit.role == worker_pb2.ROLE_PREFILL:
            self._prefill(task)
        else:
            self._prefill_locally(task)
        return True

    def fail(self, key: RequestKey, reason: worker_pb2.Failed.Reason) -> None:
        """It gives the request up, and says so."""
        del self.tasks[key]
        self._outbox.append(failed(key.to_proto(), reason))

    def may_have(self, key: RequestKey) -> bool:
        """It has the attempt, or will hear of it."""
        self.fetch()
        return key in self.tasks or any(c.HasField("admit") and RequestKey.of(c.admit.key) == key for c in self._inbox)

    def _admit(self, admit: worker_pb2.Admit) -> None:
        key = RequestKey.of(admit.key)
        assert key not in self.tasks, f"{key} was admitted twice"
        assert not (admit.expect_handoff and admit.HasField("prompt_logprobs")), "who does not compute cannot score"
        n = admit.sampling.params.n
        given: list[list[int]] = [[] for _ in range(n)]
        for known in admit.known_tokens:
            given[known.sequence_index] += known.token_ids
        story = self._stories.setdefault(key, Story(given, [[] for _ in range(n)], self.wire.weights_revision))
        assert story.given == given, f"the workers of {key} were told different things"
        assert story.revision == self.wire.weights_revision, f"the workers of {key} have different weights"
        earlier = [RequestKey(key.request_id, attempt) for attempt in range(key.attempt - 1, 0, -1)]
        before = next((self._stories[k] for k in earlier if k in self._stories), story)
        assert not any(given) or before.revision == story.revision, f"{key} goes on with other weights"
        self.tasks[key] = Task(admit, story, open=set(range(n)))

    def _cancel(self, cancel: worker_pb2.Cancel) -> None:
        key = RequestKey.of(cancel.key)
        task = self.tasks.get(key)
        if task is None:
            return
        if not cancel.HasField("sequence_index"):
            del self.tasks[key]
            return
        task.dropped.add(cancel.sequence_index)
        if task.stage == "decoding":
            self._end(task, cancel.sequence_index)

    def _is_able(self, task: Task) -> bool:
        return not (task.is_waiting or task.stage == "sampled") or self._has_lost_peer(task) or self._can_commit(task)

    def _has_lost_peer(self, task: Task) -> bool:
        key = RequestKey.of(task.admit.key)
        if task.admit.role == worker_pb2.ROLE_PREFILL:
            peer = self._workers[task.admit.decode_peer.worker_id]
            is_same_life = peer.incarnation == task.admit.decode_peer.incarnation
            return not (is_same_life and peer.may_have(key))
        others = [w for w in self._workers.values() if w is not self]
        return task.is_waiting and not any(w.may_have(key) for w in others)

    def _can_commit(self, task: Task) -> bool:
        if task.stage != "sampled":
            return False
        theirs = self._workers[task.admit.decode_peer.worker_id].tasks.get(RequestKey.of(task.admit.key))
        return theirs is not None and theirs.is_waiting

    def _prefill(self, task: Task) -> None:
        key = RequestKey.of(task.admit.key)
        if task.stage == "admitted":
            task.stage = "prefilling"
            self._outbox.append(phase(task.admit.key, PREFILL))
        elif task.must_score:
            self._score(task)
        elif task.stage == "prefilling":
            for index in range(task.admit.sampling.params.n):
                self._append(task, index)
            if task.open:
                task.stage = "sampled"
                self._outbox.append(phase(task.admit.key, TRANSFER))
            else:  # the decode worker misses it and gives up
                del self.tasks[key]
        else:
            decode = self._workers[task.admit.decode_peer.worker_id]
            decode.take_over(decode.tasks[key], task.open)
            del self.tasks[key]

    def take_over(self, task: Task, is_open: set[int]) -> None:
        """The hand-off's end."""
        task.stage = "decoding"
        if is_open - task.dropped:
            self._outbox.append(phase(task.admit.key, DECODE))
        for index in set(task.open):
            if index not in is_open or index in task.dropped:
                self._end(task, index)

    def _prefill_locally(self, task: Task) -> None:
        if task.stage == "admitted":
            task.stage = "prefilling"
            self._outbox.append(phase(task.admit.key, PREFILL))
            return
        if task.must_score:
            self._score(task)
            return
        task.stage = "decoding"
        self._outbox.append(phase(task.admit.key, DECODE))
        for index in range(task.admit.sampling.params.n):
            self._append(task, index)
            if index in task.dropped:
                self._end(task, index)
        if not task.open:
            self.tasks.pop(RequestKey.of(task.admit.key), None)

    def _score(self, task: Task) -> None:
        """A piece of the prompt, whose logprobs tell the attempt."""
        key, first = task.admit.key, task.num_scored
        piece = task.admit.prompt_token_ids[first : first + 1 + self._pick(3)]
        task.num_scored += len(piece)
        self._outbox.append(prompt_logprobs(key, first, piece, -float(key.attempt)))

    def _decode(self, task: Task) -> None:
        indices = sorted(task.open)
        index = indices[self._pick(len(indices))]
        self._append(task, index)
        if index not in task.open:
            self._end(task, index)

    def _append(self, task: Task, index: int) -> None:
        """The next token of one sequence, or all that are known, which are not told.

        Those that are known of a request of one sequence are prefilled with its prompt.
        """
        output, given, admit = task.story.written[index], task.story.given[index], task.admit
        if admit.sampling.params.n == 1:
            output.extend(given[len(output) :])
        position = len(output)
        is_known = position < len(given)
        output.extend(given[position:] or [self._sample(position, admit.key.attempt)])
        token_id = output[-1]
        reason = STOP if token_id == EOS else LENGTH if len(output) >= admit.sampling.stopping.max_output_tokens else 0
        if reason:
            task.open.discard(index)
        if not is_known:
            logprobs = [pb.TokenLogprob(token_id=token_id, logprob=-1.0)]
            stop = {"stop_token_id": EOS} if reason == STOP else {}
            told = tokens(
                admit.key, position, [token_id], sequence_index=index, logprobs=logprobs, finish_reason=reason, **stop
            )
            self._outbox.append(told)

    def _sample(self, position: int, attempt: int) -> int:
        number = self._pick(32)
        if number < 2:
            return EOS if number == 0 else STOP_LETTER
        return LETTERS[(number + 7 * attempt + 3 * position) % len(LETTERS)]

    def _end(self, task: Task, index: int) -> None:
        task.open.discard(index)
        if not task.open:
            self.tasks.pop(RequestKey.of(task.admit.key), None)
