"""The router's dispatcher without a socket: sessions that a test opens, speaks on and breaks, a clock that it moves.

Everything from the worker's events to the client's messages is the router's own code; only gRPC is left out. `run`
gives a scenario an event loop whose time stands still until `ManualClock.advance`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, phase, tokens
from router_harness import EOS, MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, ids

from cluster.lifecycle import TRANSITIONS, RequestState
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2
from cluster.settings import RouterSettings
from router.api.call import ANYONE, Principal
from router.api.chat_template import ChatTemplate
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer
from router.api.validate import validate
from router.observe.activity import Activity
from router.observe.metrics import RouterMetrics
from router.routing.dispatcher import Dispatcher
from router.routing.fleet import WorkerAddress
from router.routing.load_tracker import NOTHING
from router.routing.worker_client import WorkerClient
from router.stream.client_stream import StreamReader
from router.stream.request import LiveRequest

T = TypeVar("T")
S = RequestState

ROLES = {"p": worker_pb2.ROLE_PREFILL, "d": worker_pb2.ROLE_DECODE}
QUEUE_TIMEOUT_S = 30.0
SETTINGS: Mapping[str, Any] = {
    "model_path": "unused",
    "max_running_requests": 100,
    "max_queued_requests": 100,
    "queue_timeout_s": QUEUE_TIMEOUT_S,
}
STATES = ("dispatched", "prefilling", "first token", "transferring")
"""How far an attempt has come."""

_MODEL = ServedModel("m", VOCAB_SIZE, MAX_MODEL_LEN, 16, (EOS,))
_TOKENIZER = Tokenizer(TOKENIZER.to_str().encode(), ChatTemplate({}, {}))


class ManualClock:
    """The time of one scenario, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def advance(self, seconds: float) -> None:
        """Everything that is due by then has run when this returns, and the tasks that it started have begun."""
        self.now += seconds
        for _ in range(5):
            await asyncio.sleep(0)


class _ManualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return self._clock()


def run(scenario: Callable[[ManualClock], Awaitable[T]]) -> T:
    clock = ManualClock()

    async def play() -> T:
        return await scenario(clock)

    with asyncio.Runner(loop_factory=lambda: _ManualLoop(clock)) as runner:
        return runner.run(play())


class WiredWorker(WorkerClient):
    """A worker's connection, of which the test is the other end. It is not ready until `open`."""

    num_lives = 0

    def start(self) -> None:
        self.taken: list[worker_pb2.Command] = []

    async def close(self) -> None:
        self.lose()

    def open(self, **info_fields: Any) -> None:
        """A session with a worker that has just started."""
        WiredWorker.num_lives += 1
        fields: dict[str, Any] = {"block_size": 16, "num_blocks": 64, "max_num_seqs": 16} | info_fields
        info = worker_pb2.WorkerInfo(
            worker_id=self.worker_id, incarnation=str(self.num_lives), role=self.role, **fields
        )
        self.emit(worker_pb2.Event(info=info))

    def lose(self) -> None:
        """The session breaks; commands under way are lost with it."""
        self._lose()

    def emit(self, *events: worker_pb2.Event) -> None:
        self._read(worker_pb2.EventBatch(events=events))

    def take(self) -> list[worker_pb2.Command]:
        """The commands sent since the last take, in their order; `taken` keeps all that were taken."""
        commands = list(self._commands)
        self._commands.clear()
        self.taken += commands
        return commands

    def take_admits(self) -> list[worker_pb2.Admit]:
        return [command.admit for command in self.take() if command.HasField("admit")]


class WiredRouter:
    """A dispatcher over workers named `p0`, `d1`, ...: the letter is the role."""

    def __init__(
        self,
        clock: ManualClock,
        worker_ids: Sequence[str],
        **settings: Any,
    ) -> None:
        """`settings`: of the router, by their short names, on top of SETTINGS."""
        self.clock = clock
        self.num_submitted = 0
        self.dispatcher = dispatcher = Dispatcher(
            RouterSettings.from_values(**(SETTINGS | settings)), lambda: None, clock, make_client=WiredWorker
        )
        self.metrics = RouterMetrics(
            dispatcher.counters, dispatcher.fleet, lambda: dispatcher.num_queued, lambda: dispatcher.num_running
        )
        self.activity = Activity()
        dispatcher.observers += [self.metrics, self.activity]
        dispatcher.running.observe(self.metrics.decided, self.metrics.fetched)
        self.workers: dict[str, WiredWorker] = {}
        """Those that are named now."""
        self.name(worker_ids)
        for worker in self.workers.values():
            worker.open()

    def name(self, worker_ids: Sequence[str], *, relabelled: Sequence[str] = (), draining: Sequence[str] = ()) -> None:
        """Makes these the complete set; new ones are not ready yet. `relabelled`: those of the other role now."""
        other = {worker_pb2.ROLE_PREFILL: worker_pb2.ROLE_DECODE, worker_pb2.ROLE_DECODE: worker_pb2.ROLE_PREFILL}
        roles = {i: other[ROLES[i[0]]] if i in relabelled else ROLES[i[0]] for i in worker_ids}
        self.dispatcher.set_workers(WorkerAddress(i, f"{i}:1", role, i in draining) for i, role in roles.items())
        self.workers = {worker.worker_id: worker for worker in self.dispatcher.fleet}  # type: ignore[misc]

    def submit(
        self,
        *,
        text: str = "hello",
        n: int = 1,
        max_output_tokens: int = 16,
        stop: Sequence[str] = (),
        prompt_logprobs: int | None = None,
        session_id: str = "",
        retain_s: int = 0,
        priority: int = 0,
        queue_timeout_s: int | None = None,
        time_left_s: float | None = None,
        principal: Principal = ANYONE,
    ) -> Client:
        self.num_submitted += 1
        scheduling = pb.SchedulingOptions(priority=priority, session_id=session_id)
        if queue_timeout_s is not None:
            scheduling.queue_timeout.FromSeconds(queue_timeout_s)
        spec = pb.GenerationSpec(
            text=text,
            sampling=pb.SamplingParams(n=n, temperature=1, seed=1),
            output=pb.OutputOptions(
                text=True, token_ids=True, top_logprobs=0, prompt_logprobs=prompt_logprobs, include_timing=True
            ),
            stopping=pb.StoppingCriteria(max_output_tokens=max_output_tokens, stop=stop),
            scheduling=scheduling,
        )
        if retain_s:
            spec.cache.retain_for.FromSeconds(retain_s)
        request = validate(
            spec, _MODEL, lambda text: tuple(ids(str(text))), try_grammar=lambda _, text: text, fresh_seed=1
        )
        live = LiveRequest(
            f"gen-{self.num_submitted}",
            request,
            [_TOKENIZER.new_detokenizer(request.prompt_token_ids) for _ in range(n)],
            model="m",
            now=self.clock(),
            arrival_time_s=1e9,
            is_streaming=True,
            principal=principal,
        )
        client = Client(live)
        self.dispatcher.submit(live, time_left_s=time_left_s)
        return client

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        dispatcher = self.dispatcher
        assert (dispatcher.num_queued, dispatcher.num_running) == (0, 0)
        assert not dispatcher.running._on_worker
        for worker_id in ("p0", "p1", "p2", "d0", "d1", "d2", *self.workers):
            assert dispatcher.context.loads[worker_id] == NOTHING, worker_id
        counters = dispatcher.counters
        ended = counters.finished + counters.cancelled + counters.failed + counters.rejected
        assert ended == self.num_submitted, counters


class Client:
    """Takes what the router has for it, as a stream would, and checks that nothing is missing or told twice."""

    def __init__(self, live: LiveRequest) -> None:
        n = live.request.sampling.params.n
        self.live = live
        self.reader = StreamReader(live)
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.texts = [""] * n
        self.ends: dict[int, pb.SequenceEnd] = {}
        self.completed: pb.Completed | None = None
        self.num_started = 0
        self.phase = pb.Heartbeat.PHASE_UNSPECIFIED
        """That was told last."""
        self.has_all = False

    @property
    def request_id(self) -> str:
        return self.live.key.request_id

    def heartbeat(self) -> pb.Heartbeat.Phase:
        """The phase that the client is sent now."""
        self.phase = pb.Heartbeat.PHASE_UNSPECIFIED
        self.take()
        return self.phase

    def take(self) -> None:
        if self.has_all:
            return
        self.has_all = self.live.is_over
        for event in self.reader.take():
            assert self.completed is None, "something came after the end"
            if event.HasField("delta"):
                self._add(event.delta)
            elif event.HasField("sequence_end"):
                end = event.sequence_end
                assert end.index not in self.ends and end.token_count == len(self.tokens[end.index])
                self.ends[end.index] = end
            elif event.HasField("completed"):
                self.completed = event.completed
            elif event.HasField("heartbeat"):
                self.phase = event.heartbeat.phase
            elif event.HasField("started"):
                self.num_started += 1
                assert self.num_started == 1
                self._check_prompt(list(event.started.prompt_logprobs))

    def _check_prompt(self, told: list[pb.TokenLogprob]) -> None:
        """All of one attempt, or none where nobody asked or the request ended before."""
        request = self.live.request
        is_cut_off = self.live.is_over and self.live.lifecycle.state is not S.FINISHED
        if request.prompt_logprobs is None or (is_cut_off and not told):
            assert not told
            return
        assert [entry.token_id for entry in told] == list(request.prompt_token_ids)
        assert [entry.undefined for entry in told] == [True] + [False] * (len(told) - 1)
        assert len({entry.logprob for entry in told[1:]}) == 1, "logprobs of two attempts were mixed"

    def _add(self, delta: pb.SequenceDelta) -> None:
        told = self.tokens[delta.index]
        assert delta.index not in self.ends
        assert delta.first_token_index == len(told)
        assert delta.token_count == len(delta.token_ids) == len(delta.logprobs)
        assert [logprob.token_id for logprob in delta.logprobs] == list(delta.token_ids)
        told.extend(delta.token_ids)
        self.texts[delta.index] += delta.text


def logged(key: worker_pb2.RequestKey, first: int, text: str, **fields: Any) -> worker_pb2.Event:
    logprobs = [pb.TokenLogprob(token_id=i, logprob=-1.0) for i in ids(text)]
    return tokens(key, first, ids(text), logprobs=logprobs, **fields)


def admit_of(worker: WiredWorker) -> worker_pb2.Admit:
    (admit,) = worker.take_admits()
    return admit


def known(admit: worker_pb2.Admit) -> dict[int, list[int]]:
    return {k.sequence_index: list(k.token_ids) for k in admit.known_tokens}


def cancelled(worker: WiredWorker, key: worker_pb2.RequestKey) -> list[int | None]:
    """What was taken back of an attempt: sequences, or None for all of it. Commands must have been taken."""
    cancels = [c.cancel for c in worker.taken if c.HasField("cancel") and c.cancel.key == key]
    return [c.sequence_index if c.HasField("sequence_index") else None for c in cancels]


def reach(router: WiredRouter, state: str, **request: Any) -> tuple[Client, worker_pb2.RequestKey]:
    """A request on p0 and d0, with its first token in the later states."""
    client = router.submit(**request)
    p0, d0 = router.workers["p0"], router.workers["d0"]
    key = admit_of(p0).key
    assert admit_of(d0).key == key
    events = [phase(key, PREFILL), logged(key, 0, "a"), phase(key, TRANSFER)]
    p0.emit(*events[: STATES.index(state)])
    assert client.live.lifecycle.state is [S.QUEUED, S.PREFILLING, S.PREFILLING, S.TRANSFERRING][STATES.index(state)]
    return client, key


def go_on(router: WiredRouter, client: Client, placement: tuple[str, str]) -> None:
    """The attempt that runs there now goes well. Tokens that are known are not told again."""
    prefill_id, decode_id = placement
    prefill, decode = router.workers.get(prefill_id), router.workers[decode_id]
    key, first = client.live.key.to_proto(), logged(client.live.key.to_proto(), 0, "a")
    is_known = client.live.sequences[0].num_tokens > 0
    if prefill is None:
        decode.emit(phase(key, PREFILL), phase(key, DECODE), *([] if is_known else [first]))
    else:
        prefill.emit(phase(key, PREFILL), *([] if is_known else [first]), phase(key, TRANSFER))
        decode.emit(phase(key, DECODE))
    decode.emit(logged(key, 1, "b"), logged(key, 2, "c", finish_reason=LENGTH))
    client.take()
    assert client.tokens == [ids("abc")] and client.texts == ["abc"]
    assert client.live.lifecycle.state is S.FINISHED and client.completed is not None
    assert client.completed.usage.completion_tokens == 3
    story = [entry.state for entry in client.live.lifecycle.history]
    assert [state for state in story if not TRANSITIONS[state]] == [S.FINISHED]
    router.check_idle()
