"""The clients of a soak: they come at random instants, in the ways in which clients come, and each output is compared
with the reference, token by token over gRPC and as text over HTTP.

    grpc      reads to the end, and resumes where the connection or the router is lost
    http      the same over the OpenAI API
    cancel    cancels in the middle
    hang up   closes its socket in the middle of an HTTP stream
    slow      reads nothing for some seconds, then all
    deaf      reads nothing for longer than a router waits, and is dropped

Knows addresses; starts nothing.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import StrEnum
from http.client import HTTPConnection, HTTPException
from typing import Any

import grpc

from benchmarks.overload_load import DEAF
from benchmarks.soak_requests import Asked, transcript_of
from cluster.address import parse_address
from cluster.errors import BatonError, DeadlineExceeded, Overloaded, Unavailable
from cluster.pb import generation_pb2 as pb
from cluster.pb import generation_pb2_grpc
from tools.client import BatonClient, GenerationStream
from tools.generation_stream import Transcript

GIVE_UP_S = 120.0
ASK_AGAIN_S = 0.2
SLOW_S = (2.0, 10.0)
DEAF_S = 26.0
"""Longer than router.stalled_client_timeout_s as shipped."""
MOST_AT_ONCE = 256
RESET = struct.pack("ii", 1, 0)
"""Of SO_LINGER: closing the socket resets the connection."""


class Way(StrEnum):
    """How a client behaves."""

    GRPC = "grpc"
    HTTP = "http"
    CANCEL = "cancel"
    HANG_UP = "hang up"
    SLOW = "slow"
    DEAF = "deaf"


WAYS: dict[str, dict[Way, int]] = {
    "stops": {Way.GRPC: 50, Way.HTTP: 20, Way.CANCEL: 10, Way.HANG_UP: 10, Way.SLOW: 8, Way.DEAF: 2},
    # What a router's death takes from clients that do not resume says nothing.
    "kills": {Way.GRPC: 60, Way.HTTP: 20, Way.CANCEL: 10, Way.HANG_UP: 10},
}
"""Shares of the clients of each phase."""


class Wrong(Exception):
    """An output is not the reference's."""


class Load:
    """Clients of one cluster. `weights`: how many of them behave in which way."""

    def __init__(self, address: str, http_address: str, asked: Sequence[Asked], weights: Mapping[Way, int], seed: int):
        self._address, self._http_address = address, http_address
        self._asked, self._weights = asked, weights
        self._draw = random.Random(seed)
        self._client = BatonClient(address)
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._problems: list[str] = []
        self._num_open = 0
        self._is_over = threading.Event()
        self._may_send = threading.Event()
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE)
        self._do: dict[Way, Callable[[Asked, random.Random], str]] = {
            Way.GRPC: self._read_grpc,
            Way.HTTP: self._read_http,
            Way.CANCEL: self._cancel,
            Way.HANG_UP: self._hang_up,
            Way.SLOW: self._be_slow,
            Way.DEAF: self._be_deaf,
        }

    def capacity(self, streams: int, seconds: float) -> float:
        """Requests a second when so many clients ask again as soon as they are answered, in the later half."""
        done = [0] * streams
        half, end = time.monotonic() + seconds / 2, time.monotonic() + seconds

        def keep_asking(number: int) -> None:
            draw = random.Random(number)
            while time.monotonic() < end and not self._is_over.is_set():
                self._one(draw, WAYS["kills"])  # none that waits
                done[number] += half < time.monotonic() < end

        for future in [self._pool.submit(keep_asking, number) for number in range(streams)]:
            future.result()
        return sum(done) / (seconds / 2)

    def begin(self, rate: float) -> None:
        """Has clients come at so many a second."""
        self._may_send.set()
        threading.Thread(target=self._send, args=(rate,), daemon=True).start()

    def pause(self, within_s: float) -> bool:
        """No more clients come; whether those that are there have all left in time."""
        self._may_send.clear()
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_open, within_s)

    def go_on(self) -> None:
        self._may_send.set()

    def end(self) -> None:
        """Nobody comes, and nothing counts, any more; those who wait leave with the cluster."""
        self._is_over.set()
        self._may_send.set()
        self._client.close()

    def take_counts(self) -> tuple[Counter[str], list[str]]:
        """How requests have ended, and what was wrong, since this was last asked."""
        with self._changed:
            found = self._counts, self._problems
            self._counts, self._problems = Counter(), []
        return found

    def _send(self, rate: float) -> None:
        at = time.monotonic()
        while not self._is_over.is_set():
            if not self._may_send.is_set():
                self._may_send.wait()
                at = time.monotonic()
            at += self._draw.expovariate(rate)
            self._is_over.wait(max(0.0, at - time.monotonic()))
            with self._changed:
                if not self._may_send.is_set() or self._is_over.is_set():
                    continue
                if self._num_open >= MOST_AT_ONCE:
                    self._counts["not sent"] += 1
                    continue
                self._num_open += 1
            self._pool.submit(self._one_of_many, random.Random(self._draw.random()))

    def _one_of_many(self, draw: random.Random) -> None:
        try:
            self._one(draw, self._weights)
        finally:
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()

    def _one(self, draw: random.Random, weights: Mapping[Way, int]) -> None:
        """Never raises: what goes wrong is counted."""
        [way] = draw.choices(list(weights), list(weights.values()))
        number = draw.randrange(len(self._asked))
        problem = ""
        try:
            end = self._do[way](self._asked[number], draw)
        except Wrong as error:
            end, problem = "wrong", str(error)
        except Overloaded:
            end = "refused"
        except DeadlineExceeded as error:  # before it runs, a deadline that is too near is refused with a delay
            end = "lost" if error.retry_after_s is None else "refused"
            problem = error.message if error.retry_after_s is None else ""
        except (BatonError, OSError, HTTPException) as error:
            end, problem = "lost", f"{type(error).__name__}: {error}"
        except Exception as error:  # a fault of this program is not to pass for a good run
            end, problem = "lost", f"{type(error).__name__}: {error!r}"
        with self._changed:
            if self._is_over.is_set():
                return
            self._counts[end] += 1
            if problem:
                self._problems.append(f"{end}: request {number} ({way}): {problem}"[:600])

    def _read_grpc(self, asked: Asked, draw: random.Random) -> str:
        return self._until_taken(lambda: self._grpc_once(asked))

    def _until_taken(self, ask: Callable[[], str]) -> str:
        """What no router took is asked again. Raises what `ask` does."""
        begun = time.monotonic()
        while True:
            try:
                return ask()
            except _NotTaken as error:
                if time.monotonic() > begun + GIVE_UP_S or self._is_over.wait(ASK_AGAIN_S):
                    raise Unavailable(str(error)) from error

    def _grpc_once(self, asked: Asked) -> str:
        transcript = Transcript()
        try:
            with self._client.resuming_stream(asked.spec(), timeout_s=GIVE_UP_S) as stream:
                for event in stream:
                    transcript.add(event)
        except Unavailable as error:
            if transcript.started is None:
                raise _NotTaken(error.message) from error
            raise
        _check(asked, transcript, is_whole=True)
        return "completed"

    def _cancel(self, asked: Asked, draw: random.Random) -> str:
        """Half of them leave, half of them say so."""
        wanted, says_so = draw.randrange(asked.num_tokens), draw.random() < 0.5
        transcript = Transcript()
        open_stream = self._client.resuming_stream if says_so else self._client.stream
        try:
            with open_stream(asked.spec(), timeout_s=GIVE_UP_S) as stream:
                for event in stream:
                    transcript.add(event)
                    if sum(s.num_tokens for s in transcript.sequences) > wanted:
                        break
        except Unavailable:
            pass  # it would have left anyway
        _check(asked, transcript, is_whole=False)
        return "cancelled"

    def _be_slow(self, asked: Asked, draw: random.Random) -> str:
        with self._deaf_stream(asked) as stream:
            self._is_over.wait(draw.uniform(*SLOW_S))
            transcript = transcript_of(stream)
        _check(asked, transcript, is_whole=True)
        return "completed"

    def _be_deaf(self, asked: Asked, draw: random.Random) -> str:
        transcript = Transcript()
        with self._deaf_stream(asked) as stream:
            self._is_over.wait(DEAF_S)
            try:
                for event in stream:
                    transcript.add(event)
            except Overloaded as error:
                if error.reason != "CLIENT_STALLED":
                    raise
        _check(asked, transcript, is_whole=transcript.is_complete)
        return "completed" if transcript.is_complete else "dropped"

    @contextlib.contextmanager
    def _deaf_stream(self, asked: Asked) -> Any:
        """One over a connection of its own, whose window is small."""
        with grpc.insecure_channel(self._address, options=DEAF) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.GenerateStream(pb.GenerateStreamRequest(spec=asked.spec()), timeout=GIVE_UP_S)
            with GenerationStream(call, self._address) as stream:
                yield stream

    def _read_http(self, asked: Asked, draw: random.Random) -> str:
        if asked.is_constrained:  # a pattern is another field there
            return self._read_grpc(asked, draw)
        reader = _HttpReader(self._http_address, asked)
        broken_at: float | None = None
        while not self._is_over.is_set():
            try:
                reader.read()
                break
            except (OSError, HTTPException) as error:
                now = time.monotonic()
                broken_at = now if broken_at is None or reader.has_moved else broken_at
                if now > broken_at + GIVE_UP_S / 2:
                    raise Unavailable(f"the stream broke and was not taken up again: {error}") from error
                self._is_over.wait(ASK_AGAIN_S)
        if reader.text != asked.text:
            raise Wrong(f"its text is {reader.text!r}, not {asked.text!r}")
        return "completed"

    def _hang_up(self, asked: Asked, draw: random.Random) -> str:
        reader = _HttpReader(self._http_address, replace(asked, is_constrained=False), resumes=False)
        wanted = draw.randrange(max(1, len(asked.text)))
        with contextlib.suppress(OSError, HTTPException):  # it would have left anyway
            reader.read(at_most=wanted)
        if not asked.is_constrained and not asked.text.startswith(reader.text):
            raise Wrong(f"its text begins with {reader.text!r}, not {asked.text!r}")
        return "hung up"


class _NotTaken(Exception):
    """No router took the request, so that it may be asked again."""


class _HttpReader:
    """One generation over the OpenAI API, in one connection after another."""

    def __init__(self, address: str, asked: Asked, *, resumes: bool = True) -> None:
        self._host, self._port = parse_address(address)
        usual = {"model": "tiny-shakespeare", "temperature": 0, "ignore_eos": True, "stream": True}
        self._body = json.dumps({**usual, "prompt": asked.prompt, "max_tokens": asked.num_tokens})
        self._headers = {"Content-Type": "application/json"}
        if resumes:
            self._headers["Baton-Resume"] = "true"
        self.text = ""
        self.has_moved = False
        """Whether the last connection brought an event."""

    def read(self, at_most: int | None = None) -> None:
        """Until the end, or until so many characters have come, upon which the connection is reset. Raises OSError or
        HTTPException for a connection that breaks, Overloaded and Unavailable."""
        self.has_moved = False
        connection = HTTPConnection(self._host, self._port, timeout=GIVE_UP_S)
        try:
            connection.request("POST", "/v1/completions", self._body, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                self._refuse(answer.status, answer.read().decode(errors="replace"))
            while line := answer.readline():
                if line.startswith(b"id: "):
                    next_id = line[4:].strip().decode()
                elif line.startswith(b"data: [DONE]"):
                    return
                elif line.startswith(b"data: "):
                    self._take(json.loads(line[6:]))
                    if "Baton-Resume" in self._headers:
                        self._headers["Last-Event-ID"] = next_id
                    if at_most is not None and len(self.text) > at_most:
                        if connection.sock is not None:
                            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                        return
            raise HTTPException("the stream ended without [DONE]")
        finally:
            connection.close()

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise Unavailable(str(chunk["error"])[:300])
        self.has_moved = True
        self.text += "".join(choice.get("text", "") for choice in chunk.get("choices", ()))

    def _refuse(self, status: int, said: str) -> None:
        if status == 429:
            raise Overloaded(said[:300])
        if status == 503 and "Last-Event-ID" not in self._headers:
            raise HTTPException(said[:300])  # nobody took it
        raise Unavailable(f"status {status}: {said[:300]}")


def _check(asked: Asked, transcript: Transcript, *, is_whole: bool) -> None:
    """Raises Wrong for what is not the reference's output, or its beginning."""
    tokens = [token for sequence in transcript.sequences for token in sequence.token_ids]
    wanted = list(asked.tokens if is_whole else asked.tokens[: len(tokens)])
    if tokens != wanted:
        place = next((i for i, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1]), len(wanted))
        raise Wrong(f"from token {place} on its output is {tokens[place:][:8]}, not {wanted[place:][:8]}")
