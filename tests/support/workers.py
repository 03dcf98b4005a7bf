"""Real worker processes for tests, started without Ray and spoken to as a router would."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import grpc
from nursery import Nursery, nursery_of_session

from cluster import rpc
from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2, worker_pb2, worker_pb2_grpc
from cluster.settings import WorkerSettings
from cluster.tls import internal_tls_of

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0


class Process:
    """One worker or router, forked by a nursery (None: the session's), and the JSON lines it prints when it is prepared
    and ready."""

    def __init__(self, module: str, settings_json: str, namespace: str = "", nursery: Nursery | None = None) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (closed by stop)
        bear = (nursery or nursery_of_session()).bear
        self.popen = bear(module, settings_json, self.errors.fileno(), namespace)
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._closed: Future[float] = Future()
        threading.Thread(target=self._read, daemon=True).start()

    def expect(self, event: str) -> dict[str, Any]:
        """The next line, which must be this event; otherwise fails with what the process said."""
        try:
            line = self._lines.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            line = None
        if line is None or line["event"] != event:
            raise AssertionError(f"expected {event!r}, got {line}: {self.stderr()}")
        return line

    def closed_at(self) -> float:
        """When its files were closed, its sockets among them. Blocks until then."""
        return self._closed.result(START_TIMEOUT_S)

    def stderr(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode()

    def stop(self) -> int:
        """SIGTERM, and the exit code; when that is not enough, SIGABRT, which tells where its threads are."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.popen.send_signal(signal.SIGABRT)
            self.popen.wait()
            raise AssertionError(f"did not stop on SIGTERM: {self.stderr()}") from None
        finally:
            self.popen.stdout.close()
            self.errors.close()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):  # closed by stop
            for line in self.popen.stdout:
                self._lines.put(json.loads(line))
        self._closed.set_result(time.monotonic())
        self._lines.put(None)


@dataclass
class Output:
    """What a worker told about one request."""

    tokens: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    logprobs: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    prompt_logprobs: list[generation_pb2.TokenLogprob] = field(default_factory=list)
    finished: dict[int, int] = field(default_factory=dict)
    phases: list[int] = field(default_factory=list)
    failed: worker_pb2.Failed | None = None
    fetched: worker_pb2.Fetched | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that the worker found in its prefix cache; None: it has not told."""

    def sequence(self, index: int = 0) -> list[int]:
        told = self.tokens[index]
        return [told[i] for i in range(len(told))]


class Worker:
    """A tensor-parallel group of worker processes, and one router session with it."""

    def __init__(self, **settings: Any) -> None:
        base = WorkerSettings.from_values(**{"threads": 1, "device": "cpu", "dtype": "float32", **settings})
        self.settings = base
        leader = self.start_rank(base.to_json())
        self.ranks = [leader]
        card = leader.expect("prepared")
        for rank in range(1, base.tp_size):
            follower = replace(base, tp_rank=rank, leader=card["rank_address"])
            self.ranks.append(self.start_rank(follower.to_json()))
        self.outputs: dict[RequestKey, Output] = defaultdict(Output)
        self.stats = worker_pb2.WorkerStats()
        self.changed = threading.Condition()
        self.is_lost = False
        self.end: str | None = None

    def start_rank(self, settings_json: str) -> Process:
        return Process("worker", settings_json)

    def connect(self) -> Worker:
        """Waits until the worker serves and opens a session."""
        self.address = str(self.ranks[0].expect("ready")["address"])
        return self.connect_again()

    def connect_again(self) -> Worker:
        """Opens a session, as a router that comes (back) does."""
        self.is_lost = False
        self.stats = worker_pb2.WorkerStats()
        self._commands: queue.Queue[worker_pb2.Command | None] = queue.Queue()
        tls = internal_tls_of(self.settings.internal_tls)
        self._channel = rpc.create_blocking_channel(self.address, tls=None if tls is None else tls.client)
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._events = stub.Session(iter(self._commands.get, None))
        first = next(self._events).events
        self.info: worker_pb2.WorkerInfo = first[0].info
        for event in first:
            self._note(event)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def peer(self) -> worker_pb2.Peer:
        return worker_pb2.Peer(worker_id=self.info.worker_id, incarnation=self.info.incarnation, address=self.address)

    def send(self, **command: Any) -> None:
        self._commands.put(worker_pb2.Command(**command))

    def wait_for(self, condition: Any, timeout_s: float = 60.0) -> None:
        """Until `condition()` holds; it is looked at after every event."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), (
                f"{self.settings.worker_id}: {self.stats} {self.outputs}"
            )

    def wait_idle(self) -> None:
        """Until nothing is held: free + cached = total."""
        self.wait_for(lambda: self.stats.blocks_total and self.stats.num_requests == 0 and self.stats.blocks_held == 0)
        assert self.stats.blocks_free + self.stats.blocks_cached == self.stats.blocks_total

    def hang_up(self) -> None:
        """Breaks the session."""
        self._commands.put(None)
        self._events.cancel()
        self._reader.join()
        self._channel.close()

    def close(self) -> None:
        if hasattr(self, "_events"):
            self.hang_up()
        self.ranks[0].stop()
        for rank in self.ranks[1:]:  # they end with rank 0
            rank.popen.wait(20)
            rank.stop()

    def _read(self) -> None:
        try:
            for batch in self._events:
                with self.changed:
                    for event in batch.events:
                        self._note(event)
                    self.changed.notify_all()
        except grpc.RpcError as error:
            self.end = error.details()
        with self.changed:
            self.is_lost = True
            self.changed.notify_all()

    def _note(self, event: worker_pb2.Event) -> None:
        match event.WhichOneof("event"):
            case "stats":
                self.stats = event.stats
            case "phase":
                output = self.outputs[RequestKey.of(event.phase.key)]
                output.phases.append(event.phase.phase)
                if event.phase.phase == generation_pb2.Heartbeat.PHASE_PREFILL:
                    output.num_cached_tokens = event.phase.num_cached_tokens
            case "fetched":
                self.outputs[RequestKey.of(event.fetched.key)].fetched = event.fetched
            case "failed":
                self.outputs[RequestKey.of(event.failed.key)].failed = event.failed
            case "prompt_logprobs":
                told = event.prompt_logprobs
                output = self.outputs[RequestKey.of(told.key)]
                assert told.first_token_index == len(output.prompt_logprobs), "each once and in order"
                assert not output.tokens, "before every token of the output"
                output.prompt_logprobs.extend(told.logprobs)
            case "tokens":
                self._note_tokens(self.outputs[RequestKey.of(event.tokens.key)], event.tokens)

    @staticmethod
    def _note_tokens(output: Output, tokens: worker_pb2.Tokens) -> None:
        told = output.tokens[tokens.sequence_index]
        for offset, token_id in enumerate(tokens.token_ids):
            index = tokens.first_token_index + offset
            assert index not in told, f"token {index} was told twice"
            told[index] = token_id
            if tokens.logprobs:
                output.logprobs[tokens.sequence_index][index] = tokens.logprobs[offset].logprob
        if tokens.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED:
            output.finished[tokens.sequence_index] = tokens.finish_reason


def sampling(**values: Any) -> worker_pb2.Sampling:
    """Greedy, no filters, one sequence, unless told otherwise."""
    params = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "n": 1}
    stopping = {"max_output_tokens": 16}
    how = worker_pb2.Sampling()
    for part, given in ((how.params, params | values), (how.stopping, stopping | values), (how, values)):
        known = part.DESCRIPTOR.fields_by_name
        part.MergeFrom(type(part)(**{name: value for name, value in given.items() if name in known}))
    return how


def hand_off(
    name: str,
    prompt: list[int],
    prefill: Worker,
    decode: Worker,
    how: worker_pb2.Sampling,
    attempt: int = 1,
    **more: Any,
) -> RequestKey:
    """Gives one request to a prefill and a decode worker, as the router does."""
    key = RequestKey(name, attempt)
    common = {"key": key.to_proto(), "prompt_token_ids": prompt, "sampling": how, **more}
    decode.send(admit=worker_pb2.Admit(role=worker_pb2.ROLE_DECODE, expect_handoff=True, **common))
    prefill.send(admit=worker_pb2.Admit(role=worker_pb2.ROLE_PREFILL, decode_peer=decode.peer(), **common))
    return key


def fetch(name: str, prefix: list[int], holder: Worker, target: Worker) -> RequestKey:
    """Has a worker fetch a prefix from another one, as the router does."""
    key = RequestKey(name, 1)
    common = {"key": key.to_proto(), "prompt_token_ids": prefix, "prefix_only": True}
    common["sampling"] = sampling(max_output_tokens=1)
    holder.send(admit=worker_pb2.Admit(role=worker_pb2.ROLE_PREFILL, decode_peer=target.peer(), **common))
    target.send(admit=worker_pb2.Admit(role=worker_pb2.ROLE_DECODE, expect_handoff=True, **common))
    return key


def merged(key: RequestKey, *workers: Worker) -> Output:
    """What several workers told about a request, as one; no token told twice."""
    whole = Output()
    for worker in workers:
        part = worker.outputs[key]
        for index, told in part.tokens.items():
            assert not set(told) & set(whole.tokens[index]), "a token was told by both workers"
            whole.tokens[index].update(told)
            whole.logprobs[index].update(part.logprobs[index])
        whole.finished.update(part.finished)
        whole.failed = whole.failed or part.failed
    return whole


@contextlib.contextmanager
def running(*workers: Worker) -> Iterator[list[Worker]]:
    """Connects workers whose processes start side by side; ends them all."""
    with contextlib.ExitStack() as ends:
        for worker in workers:
            ends.callback(worker.close)
        yield [worker.connect() for worker in workers]
