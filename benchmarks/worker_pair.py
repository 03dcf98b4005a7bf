"""A prefill and a decode worker as real processes, and what a router hears of them, with the time it was heard at.

Settings are those that the cluster.yaml at the root gives its workers, with one thread each. All times are of this
process's one clock, taken when an event arrives here; both workers' events arrive in this process.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.plain_cluster import ROOT, Program, ProgramFailed
from cluster import rpc
from cluster.config.load import load_config
from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2, worker_pb2, worker_pb2_grpc
from controller.plan import plan_cluster

BLOCK_SIZE = 16
WAIT_S = 120.0


@dataclass
class Heard:
    """When what was heard of one request, in seconds; None: not yet."""

    prefilling: float | None = None
    first_token: float | None = None
    decoding: float | None = None
    ended: float | None = None
    tokens: dict[int, int] = field(default_factory=dict)
    """The output so far, by index. The prefill worker tells of the first one on a session of its own, maybe last."""
    failure: str = ""
    is_cancelled: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [self.tokens[index] for index in sorted(self.tokens)]


class Session:
    """A router's session with one worker."""

    def __init__(self, program: Program, heard: dict[RequestKey, Heard], changed: threading.Condition) -> None:
        self.program = program
        self.address = str(program.expect("ready")["address"])
        self.stats = worker_pb2.WorkerStats()
        self.idle_since: float | None = None
        """When the stats that came last first said that nothing is held; None when they say that something is."""
        self.lost: str | None = None
        self._heard = heard
        self._changed = changed
        self._commands: queue.SimpleQueue[worker_pb2.Command | None] = queue.SimpleQueue()
        self._channel = rpc.create_blocking_channel(self.address)
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._events = stub.Session(iter(self._commands.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, **command: Any) -> None:
        self._commands.put(worker_pb2.Command(**command))

    def close(self) -> None:
        self._commands.put(None)
        self._events.cancel()
        self._reader.join()
        self._channel.close()

    def _read(self) -> None:
        try:
            for batch in self._events:
                now = time.perf_counter()
                with self._changed:
                    for event in batch.events:
                        self._note(event, now)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            with self._changed:
                self.lost = rpc.from_rpc_error(error).message
                self._changed.notify_all()

    def _note(self, event: worker_pb2.Event, now: float) -> None:
        match event.WhichOneof("event"):
            case "info":
                self.info = event.info
            case "stats":
                self.stats = event.stats
                is_idle = not event.stats.num_requests and not event.stats.blocks_held
                self.idle_since = (self.idle_since or now) if is_idle else None
            case "phase":
                heard = self._heard_of(event.phase.key)
                if event.phase.phase == generation_pb2.Heartbeat.PHASE_PREFILL:
                    heard.prefilling = now
                elif event.phase.phase == generation_pb2.Heartbeat.PHASE_DECODE:
                    heard.decoding = now
            case "tokens":
                heard = self._heard_of(event.tokens.key)
                heard.first_token = heard.first_token or now
                heard.tokens.update(enumerate(event.tokens.token_ids, event.tokens.first_token_index))
                if event.tokens.finish_reason:
                    heard.ended = now
            case "failed":
                self._heard_of(event.failed.key).failure = event.failed.message or "without a message"

    def _heard_of(self, key: worker_pb2.RequestKey) -> Heard:
        """What is told of a request after its end is noted where nobody reads it."""
        return self._heard.get(RequestKey.of(key)) or Heard()


class WorkerPair:
    """Requests for one prefill and one decode worker."""

    def __init__(self, prefill: Program, decode: Program) -> None:
        self._changed = threading.Condition()
        self._heard: dict[RequestKey, Heard] = {}
        self._names = itertools.count(1)
        self._random = random.Random(0)
        self.prefill = Session(prefill, self._heard, self._changed)
        self.decode = Session(decode, self._heard, self._changed)
        self._both = (self.prefill, self.decode)
        self.wait("both workers are ready", lambda: all(s.stats.blocks_total for s in self._both))

    def hand_off(self, prompt_tokens: int, output_tokens: int, vocab_size: int) -> tuple[RequestKey, Heard]:
        """Gives both workers a prompt of random tokens that no cache knows, as the router does."""
        return self.hand_off_of(self.random_prompt(prompt_tokens, vocab_size), output_tokens)

    def random_prompt(self, num_tokens: int, vocab_size: int) -> list[int]:
        return self._random.choices(range(3, vocab_size), k=num_tokens)

    def alone(self, prompt: list[int], output_tokens: int) -> Heard:
        """Gives the decode worker a prompt to compute by itself."""
        _, heard, common = self._new_request(prompt, output_tokens)
        self.decode.send(admit=worker_pb2.Admit(role=worker_pb2.ROLE_DECODE, **common))
        return heard

    def hand_off_of(self, prompt: list[int], output_tokens: int) -> tuple[RequestKey, Heard]:
        """Gives both workers a prompt; what they have cached of it does not count."""
        key, heard, common = self._new_request(prompt, output_tokens)
        info = self.decode.info
        peer = worker_pb2.Peer(worker_id=info.worker_id, incarnation=info.incarnation, address=self.decode.address)
        self.decode.send(admit=worker_pb2.Admit(role=worker_pb2.ROLE_DECODE, expect_handoff=True, **common))
        self.prefill.send(admit=worker_pb2.Admit(role=worker_pb2.ROLE_PREFILL, decode_peer=peer, **common))
        return key, heard

    def _new_request(self, prompt: list[int], output_tokens: int) -> tuple[RequestKey, Heard, dict[str, Any]]:
        """Greedy; with the fields that each worker is sent."""
        key = RequestKey(f"request-{next(self._names)}", 1)
        with self._changed:
            heard = self._heard[key] = Heard()
        return (
            key,
            heard,
            {
                "key": key.to_proto(),
                "prompt_token_ids": prompt,
                "sampling": worker_pb2.Sampling(
                    params=generation_pb2.SamplingParams(temperature=0),
                    stopping=generation_pb2.StoppingCriteria(max_output_tokens=output_tokens),
                ),
                "bypass_prefix_cache": True,
            },
        )

    def cancel(self, key: RequestKey) -> float:
        """Tells both; returns when."""
        with self._changed:
            self._heard[key].is_cancelled = True
        now = time.perf_counter()
        for session in self._both:
            session.send(cancel=worker_pb2.Cancel(key=key.to_proto()))
        return now

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        """Until `is_so`, which is asked after every event. Raises ProgramFailed for a request or worker that failed."""

        def failure() -> ProgramFailed | None:
            for session in self._both:
                if session.lost is not None:
                    return session.program.failure(f"its session ended: {session.lost}")
            failed = [heard.failure for heard in self._heard.values() if heard.failure and not heard.is_cancelled]
            return ProgramFailed(f"a request failed: {failed[0]}") if failed else None

        with self._changed:
            is_over = self._changed.wait_for(lambda: is_so() or failure() is not None, WAIT_S)
            error = failure()
        if error is not None:
            raise error
        if not is_over:
            raise self.decode.program.failure(f"after {WAIT_S:.0f} s still not so: {what}")

    def wait_busy(self) -> None:
        """Until both workers' stats say that they hold a request."""
        self.wait("both workers hold the request", lambda: all(s.stats.num_requests for s in self._both))

    def wait_idle(self) -> float:
        """Until both workers' stats say that no request and no block is held; returns when that was so."""
        self.wait("nothing is held", lambda: all(s.idle_since for s in self._both))
        with self._changed:
            self._heard.clear()
            return max(s.idle_since or 0.0 for s in self._both)

    def close(self) -> None:
        for session in self._both:
            session.close()


@contextlib.contextmanager
def running_pair(model: Path, max_model_len: int, **values: Any) -> Iterator[WorkerPair]:
    """Both workers with a model, by default in float32 on the CPU, ready; `values`: settings of both. Raises
    ProgramFailed."""
    plan = plan_cluster(load_config(ROOT / "cluster.yaml"), num_gpus=0, num_cores=None)
    with contextlib.ExitStack() as stack:
        programs = {}
        for worker in plan.workers:
            settings = worker.ranks[0].with_values(
                model_path=str(model),
                model_name=None,
                max_model_len=max_model_len,
                block_size=BLOCK_SIZE,
                kv_cache_tokens=2 * (max_model_len + BLOCK_SIZE),
                metrics_port=None,
                **{"dtype": "float32", "threads": 1, **values},
            )
            program = programs[worker.role] = Program("worker", settings)
            stack.callback(program.stop)
        for program in programs.values():
            program.expect("prepared")
        pair = WorkerPair(programs["prefill"], programs["decode"])
        stack.callback(pair.close)
        yield pair
